// The fast path over MPI.
//
// A collective is MPI's blocking one, once all members have arrived, or the nonblocking one where a
// member does not wait; a message is started, and polled for a while.
#pragma once

#include <optional>

#include "mpi_flights.h"
#include "waiting.h"

namespace meshdist {

// The members' words that say at which collective they have arrived, as `Arrivals` has them.
struct ArrivalWords {
  Words mine;
  std::vector<Words> others;
  std::uint64_t window, check_every;  // a word per collective, and how many there were
  std::uint64_t inside;               // the word that says how long it may be in MPI's call
  std::uint64_t goes_on, waits, left, even, number_shift;  // the contents of a word
};

class MpiRunner final : public Runner {
 public:
  // Python's objects go on where this one cannot: `arrivals`, `link`, and `finish_message(request, x,
  // is_send)`, which waits. `explain(error, note, num_bytes)` makes the error to raise; `error` is the
  // class of MPI's errors. `most_bytes` is how much one call may move, and `limit_ms` how long it may take.
  MpiRunner(const MpiFunctions& mpi, nb::object flights, const ArrivalWords& words, nb::object arrivals,
            nb::object timeout, nb::object link, nb::object finish_message, nb::object explain,
            nb::object error, std::uint64_t rank, std::int64_t largest_tag, std::uint64_t most_bytes,
            std::uint64_t limit_ms, double spin_s)
      : Runner(largest_tag), mpi_(mpi), flights_owner_(std::move(flights)),
        flights_(nb::cast<MpiFlights&>(flights_owner_)), words_(words), arrivals_(std::move(arrivals)),
        timeout_(std::move(timeout)), link_(std::move(link)), finish_message_(std::move(finish_message)),
        explain_(std::move(explain)), error_(std::move(error)), rank_(rank),
        most_bytes_(std::min(most_bytes, kMostBytes)), limit_ms_(limit_ms),
        spin_ns_(static_cast<Nanoseconds>(spin_s * 1e9)) {}

  bool is_ready() const override;
  bool takes(const Collective& call) const override;
  bool takes(const Message& message) const override;
  void run(const Collective& call) override;
  bool starts(const Collective&) const override { return true; }
  nb::object start(const Collective& call, std::uint64_t number) override;
  void run(Message& message, nb::handle x, Entry& entry) override;

 private:
  static constexpr std::uint64_t kMostBytes = (1u << 31) - 1;  // MPI's functions count in an int

  bool is_root(const Collective& call) const { return call.header.root == static_cast<std::int64_t>(rank_); }
  std::uint64_t size() const { return words_.others.size() + 1; }
  bool is_aborted() const;
  // Where the result of a reduction belongs; 0 where this member gets none.
  Address result_of(const Collective& call) const {
    return call.verb != Verb::reduce || is_root(call) ? call.out : 0;
  }
  std::optional<Collective> encoded(const Collective& call, nb::object& scratch) const;
  std::uint64_t word_of_next(std::uint64_t state) const;
  bool arrive(bool is_even) const;
  bool wait_for_all() const;
  int run_with_all(const Collective& call, const int* cuts, bool is_even) const;
  nb::object begin(const Collective& call, Address to, nb::object scratch, std::vector<int> cuts) const;
  nb::object request_of(const MpiFunctions::Flight& flight) const;
  template <class Function>
  void call_mpi(Function function) const;
  void check(int error) const;
  [[noreturn]] void fail(const nb::python_error& error, nb::handle note, nb::handle num_bytes) const;

  const MpiFunctions& mpi_;
  const nb::object flights_owner_;
  MpiFlights& flights_;
  const ArrivalWords words_;
  const nb::object arrivals_, timeout_, link_, finish_message_, explain_, error_;
  const std::uint64_t rank_, most_bytes_, limit_ms_;
  const Nanoseconds spin_ns_;
};

}  // namespace meshdist
