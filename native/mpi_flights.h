// The collectives of a group that MPI has started, and that are in flight.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "mpi_functions.h"
#include "python_communicator.h"

namespace meshdist {

class MpiFlights {
 public:
  struct Flight {
    Collective call;  // as MPI does it; its memory is kept until it is done
    Address to;       // where the result belongs
    nb::object scratch;
    std::vector<int> cuts;
    MpiFunctions::Flight mpi{};
    std::mutex testing{};
    std::atomic<bool> is_done{false};  // the result is in place, or MPI has failed
    int error = 0;
  };
  using FlightPtr = std::shared_ptr<Flight>;

  MpiFlights(const MpiFunctions& mpi, std::uint64_t size) : mpi_(mpi), size_(size) {}

  // Keep a collective that has started, also where its Work is dropped.
  void add(const FlightPtr& flight);

  // Let MPI go on, unless another thread does so just now; whether it is done with this one. Without
  // the GIL, since a reduction of Python's may run meanwhile.
  bool test(Flight& flight) const;
  // The same, called with the GIL; frees what is kept for a collective that is done.
  bool settle(Flight& flight);

  // Test any that is in flight, which lets MPI go on with all; whether there is one.
  bool progress();

  // Test all for the last time; whether some are still in flight, whose memory is kept from now on.
  bool close();

  // Write what MPI has reduced to where it belongs, if it is recoded and `to` is not 0.
  void decode(const Collective& call, Address to) const;

  // Memory of at least so many bytes: a bytearray, to be given back for later calls. A null object may
  // be given, too.
  nb::object take(std::uint64_t bytes);
  void give(nb::object scratch);

 private:
  static constexpr Py_ssize_t kMostScratch = 256 << 20;  // that is kept

  const MpiFunctions& mpi_;
  const std::uint64_t size_;
  std::atomic<bool> is_closed_{false};
  std::list<FlightPtr> flights_;  // some are done
  nb::object scratch_;            // given back last
};

// Ask for as long as MPI may take to move so many bytes (a GB/s), since it moves data while it is asked;
// but no longer than 20 ms, since a rank that spins here handles no signals.
template <class IsDone>
bool is_done_soon(Nanoseconds spin, std::uint64_t bytes, IsDone is_done) {
  constexpr int kLooksPerTime = 16;  // at the clock
  constexpr Nanoseconds kNsPerByte = 1, kLongest = 20'000'000;
  if (is_done()) return true;
  if (spin == 0) return false;
  const Nanoseconds end = now_ns() + std::min(spin + static_cast<Nanoseconds>(bytes) * kNsPerByte, kLongest);
  do {
    for (int i = 0; i < kLooksPerTime; ++i) {
      if (is_done()) return true;
    }
  } while (now_ns() < end);
  return false;
}

// One collective in flight; Python's `link` waits for it where it is not done soon, and makes the failure
// of an `error` of MPI's.
class MpiStarted final : public PyOperation {
 public:
  MpiStarted(nb::object owner, MpiFlights& flights, MpiFlights::FlightPtr flight, nb::object link,
             nb::object error, Nanoseconds spin)
      : PyOperation({}, 0), owner_(std::move(owner)), flights_(flights), flight_(std::move(flight)),
        link_(std::move(link)), error_(std::move(error)), spin_(spin) {}

  int wait(double timeout) override;
  void finish(nb::handle timeout) override;
  bool is_done() override;
  Failure failure() const override { return {}; }  // `finish` raises it
  bool test() { return flights_.settle(*flight_); }

 private:
  const nb::object owner_;  // of `flights`
  MpiFlights& flights_;
  const MpiFlights::FlightPtr flight_;
  const nb::object link_, error_;
  const Nanoseconds spin_;
};

}  // namespace meshdist
