// The collectives of a group that MPI has started, and that are in flight.
#pragma once

#include <algorithm>
#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.h"
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
  void add(const FlightPtr& flight) {
    flights_.push_back(flight);
    for (int i = 0; i < kSwept; ++i) {
      const FlightPtr oldest = flights_.front();
      if (oldest == flight) return;
      const bool is_done = settle(*oldest);
      const auto found = std::find(flights_.begin(), flights_.end(), oldest);
      if (found == flights_.end()) return;  // another thread has closed the group meanwhile
      if (is_done) {
        flights_.erase(found);
      } else {
        flights_.splice(flights_.end(), flights_, found);
      }
    }
  }

  // Let MPI go on, unless another thread does so just now; whether it is done with this one. Without
  // the GIL, since a reduction of Python's may run meanwhile.
  bool test(Flight& flight) const {
    if (flight.is_done) return true;
    const std::unique_lock<std::mutex> lock(flight.testing, std::try_to_lock);
    if (!lock.owns_lock() || flight.is_done || is_closed_) return flight.is_done;
    bool is_done = false;
    flight.error = mpi_.ask(flight.mpi, is_done);
    if (flight.error == 0 && is_done) decode(flight.call, flight.to);
    flight.is_done = is_done || flight.error != 0;
    return flight.is_done;
  }
  // The same, called with the GIL; frees what is kept for a collective that is done.
  bool settle(Flight& flight) {
    if (!flight.is_done) {
      nb::gil_scoped_release release;
      if (!test(flight)) return false;
    }
    give(std::move(flight.scratch));
    const Collective freed = std::move(flight.call);  // at the end: that may make another operation
    return true;
  }

  // Test any that is in flight, which lets MPI go on with all; whether there is one.
  bool progress() {
    const auto is_in_flight = [](const FlightPtr& flight) { return !flight->is_done; };
    const auto found = std::find_if(flights_.begin(), flights_.end(), is_in_flight);
    if (found == flights_.end()) return false;
    const FlightPtr flight = *found;
    settle(*flight);
    return true;
  }

  // Test all for the last time; whether some are still in flight, whose memory is kept from now on.
  bool close() {
    static auto* const abandoned = new std::list<FlightPtr>;  // until the process ends
    std::list<FlightPtr> left(flights_);
    left.remove_if([&](const FlightPtr& flight) { return settle(*flight); });
    is_closed_ = true;
    flights_.clear();
    const bool are_left = !left.empty();
    abandoned->splice(abandoned->end(), left);
    return are_left;
  }

  // Write what MPI has reduced to where it belongs, if it is recoded and `to` is not 0.
  void decode(const Collective& call, Address to) const {
    const Recoding recoding = call.way.recoding;
    if (!recoding.is_any() || to == 0) return;
    kernels().decode[call.dtype](recoding, pointer(to), pointer(call.out), call.count, size_);
  }

  // Memory of at least so many bytes: a bytearray, to be given back for later calls. A null object may
  // be given, too.
  nb::object take(std::uint64_t bytes) {
    const auto size = static_cast<Py_ssize_t>(bytes);
    if (scratch_.is_valid() && PyByteArray_Size(scratch_.ptr()) >= size) return std::move(scratch_);
    return checked(PyByteArray_FromStringAndSize(nullptr, size));
  }
  void give(nb::object scratch) {
    if (!scratch.is_valid() || PyByteArray_Size(scratch.ptr()) > kMostScratch) return;
    scratch_ = std::move(scratch);
  }

 private:
  static constexpr int kSwept = 2;  // more than one, so that those whose Work was dropped are freed in time
  static constexpr Py_ssize_t kMostScratch = 256 << 20;  // that is kept

  const MpiFunctions& mpi_;
  const std::uint64_t size_;
  std::atomic<bool> is_closed_{false};
  std::list<FlightPtr> flights_;  // some are done
  nb::object scratch_;            // given back last
};

}  // namespace meshdist
