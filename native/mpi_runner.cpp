// The fast path over MPI.
//
// A collective is MPI's blocking one, once all members have arrived, or the nonblocking one where a
// member does not wait; a message is started, and polled for a while.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>

#include "fast_path.h"
#include "mpi_flights.h"

using namespace nanobind::literals;

namespace meshdist {
namespace {

namespace names {
const Name is_aborted{"is_aborted"}, check_size{"check_size"}, strand{"strand"}, wait_for_all{"wait_for_all"},
    leave{"leave"}, end{"end"}, finish_at_once{"finish_at_once"}, wait{"wait"}, failure{"failure"},
    test_quietly{"test_quietly"};
}

// Whether tensors of `step` bytes lie one after the other.
bool is_row(const Addresses& addresses, std::uint64_t step) {
  for (std::size_t i = 1; i < addresses.size(); ++i) {
    if (addresses[i] != addresses[0] + i * step) return false;
  }
  return true;
}

// Where tensors start, in bytes from the first: in MPI's numbers.
int start_of(Address one, const Addresses& among) { return static_cast<int>(one - among.front()); }

bool are_near(const Addresses& addresses) {
  return std::all_of(addresses.begin(), addresses.end(), [&](Address one) {
    return start_of(one, addresses) == static_cast<std::int64_t>(one - addresses.front());
  });
}

// The bytes of an element as it travels.
std::uint64_t item_of(const Collective& call) { return call.way.recoding.widens ? 4 : call.item; }

// What MPI takes for parts that lie anywhere; see `MpiFunctions::run`.
std::vector<int> cuts_of(const Collective& call) {
  if (call.verb != Verb::all_to_all && call.verb != Verb::all_gather_v) return {};
  std::vector<int> cuts(call.outs.size(), static_cast<int>(call.bytes()));
  for (const Addresses* some : {&call.outs, &call.ins}) {
    for (Address one : *some) cuts.push_back(start_of(one, *some));
  }
  return cuts;
}

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

  int wait(double timeout) override {
    const auto spin = static_cast<Nanoseconds>(std::min(static_cast<double>(spin_), timeout * 1e9));
    const std::uint64_t bytes = flight_->call.bytes();
    if (!flight_->is_done) {
      nb::gil_scoped_release release;
      is_done_soon(spin, bytes, [&] { return flights_.test(*flight_); });
    }
    if (!flight_->is_done) return static_cast<int>(Status::pending);
    test();
    return flight_->error;
  }
  void finish(nb::handle timeout) override {
    if (!test()) {
      const nb::object self = nb::find(this);
      call(link_, names::wait, get(self, names::test_quietly), timeout);
    }
    if (flight_->error == 0) return;
    raise_error(call(link_, names::failure, call_with(error_, whole(flight_->error))));
  }
  bool is_done() override { return test() || is_true(get(link_, names::is_aborted)); }
  bool test() { return flights_.settle(*flight_); }

 private:
  const nb::object owner_;  // of `flights`
  MpiFlights& flights_;
  const MpiFlights::FlightPtr flight_;
  const nb::object link_, error_;
  const Nanoseconds spin_;
};

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

  bool is_ready() const override {
    return (words_.mine.get(words_.window) + 1) % words_.check_every != 0 && !is_aborted();
  }

  bool takes(const Collective& call) const override {
    const bool is_whole = call.verb == Verb::all_reduce || call.verb == Verb::reduce ||
                          call.verb == Verb::broadcast || call.verb == Verb::barrier;
    const std::uint64_t bytes = call.count * item_of(call) * (is_whole ? 1 : size());
    if (!call.in_counts.empty()) return false;
    if ((call.count == 0 && call.verb != Verb::barrier) || bytes > most_bytes_) return false;
    switch (call.verb) {
      case Verb::all_gather:  // MPI wants its input elsewhere
        return call.in != call.out + rank_ * call.bytes();
      case Verb::gather:
      case Verb::scatter: return is_row(call.outs, call.bytes()) && is_row(call.ins, call.bytes());
      default: return are_near(call.outs) && are_near(call.ins);
    }
  }

  bool takes(const Message& message) const override {
    return Runner::takes(message) && message.member >= 0 && message.plain.bytes() <= kMostBytes &&
           !is_aborted();
  }

  void run(const Collective& given) override {
    const bool is_even = given.verb == Verb::all_to_all && is_row(given.outs, given.bytes()) &&
                         is_row(given.ins, given.bytes());
    std::vector<int> cuts = cuts_of(given);
    try {
      nb::object scratch;
      const std::optional<Collective> recoded = encoded(given, scratch);
      const Collective& call = recoded ? *recoded : given;
      bool have_come = false;
      int error = 0;
      const auto go = [&] {
        error = run_with_all(call, cuts.data(), is_even);
        if (error == 0) flights_.decode(call, result_of(given));
        return error;
      };
      {
        nb::gil_scoped_release release;
        have_come = arrive(is_even);
        if (have_come) go();
      }
      check(error);
      if (!have_come) {  // Python waits on
        if (wait_for_all()) {
          call_mpi(go);
        } else {  // where one does not wait for its collective no member may do MPI's blocking one
          const nb::object started = begin(call, result_of(given), std::move(scratch), std::move(cuts));
          meshdist::call(link_, names::finish_at_once, started, timeout_);
        }
        meshdist::call(arrivals_, names::end);
      }
      flights_.give(std::move(scratch));
    } catch (nb::python_error& error) {
      fail(error, nb::none(), nb::none());
    }
  }

  // Come to the next collective, as `Arrivals.enter` does where this member does not wait, and start it.
  nb::object start(const Collective& given) override {
    try {
      nb::object scratch;
      const std::optional<Collective> recoded = encoded(given, scratch);
      word_of_next(words_.goes_on);
      return begin(recoded ? *recoded : given, result_of(given), std::move(scratch), cuts_of(given));
    } catch (nb::python_error& error) {
      fail(error, nb::none(), nb::none());
    }
  }

  void run(Message& message, nb::handle x, Entry& entry) override {
    const Plain& plain = message.plain;
    entry.compare(message);
    if (!message.is_send) entry.note_write(tuple_of(x));
    MpiFunctions::Flight flight;
    int error = 0;
    {
      nb::gil_scoped_release release;
      error = mpi_.start(message, flight);
    }
    const nb::object num_bytes = whole(plain.bytes());
    std::uint64_t note = 0;
    bool is_done = error != 0;
    try {
      // Started before it is noted, so that the other side waits less.
      note = entry.note(message);
      check(error);
      call_mpi([&] {
        is_done_soon(spin_ns_, plain.bytes(), [&] {
          error = mpi_.ask(flight, is_done);
          return is_done || error != 0;
        });
        return error;
      });
      if (!is_done) {  // Python waits on
        call_with(finish_message_, whole(mpi_.request_of(flight)), x, nb::bool_(message.is_send));
        is_done = true;
      } else if (!message.is_send) {
        int count = 0;
        check(mpi_.count(flight, count));
        if (static_cast<std::uint64_t>(count) != plain.bytes()) {
          call(link_, names::check_size, whole(count), num_bytes);
        }
      }
    } catch (nb::python_error& failure) {
      if (!is_done) call(link_, names::strand, nb::borrow(x));
      fail(failure, whole(note), message.is_send ? nb::none() : num_bytes);
    }
  }

 private:
  static constexpr std::uint64_t kMostBytes = (1u << 31) - 1;  // MPI's functions count in an int

  bool is_root(const Collective& call) const { return call.header.root == static_cast<std::int64_t>(rank_); }
  std::uint64_t size() const { return words_.others.size() + 1; }
  bool is_aborted() const { return is_true(get(link_, names::is_aborted)); }
  // Where the result of a reduction belongs; 0 where this member gets none.
  Address result_of(const Collective& call) const {
    return call.verb != Verb::reduce || is_root(call) ? call.out : 0;
  }

  // The call as MPI does it where the numbers are recoded, on `scratch` unless it is in place.
  std::optional<Collective> encoded(const Collective& call, nb::object& scratch) const {
    const Recoding recoding = call.way.recoding;
    if (!recoding.is_any()) return std::nullopt;
    std::optional<Collective> sent(call);
    if (!recoding.is_in_place()) {
      const bool is_scattered = call.verb == Verb::reduce_scatter;
      const std::uint64_t given = call.count * (is_scattered ? size() : 1);
      sent->item = item_of(call);
      scratch = flights_.take((given + (is_scattered ? call.count : 0)) * sent->item);
      sent->in = reinterpret_cast<Address>(PyByteArray_AsString(scratch.ptr()));
      sent->out = sent->in + (is_scattered ? given * sent->item : 0);
      nb::gil_scoped_release release;
      kernels().encode[call.dtype](recoding, pointer(sent->in), pointer(call.in), given);
    }
    return sent;
  }

  // The operation of a collective that MPI has started.
  nb::object begin(const Collective& call, Address to, nb::object scratch, std::vector<int> cuts) const {
    const MpiFlights::FlightPtr flight(new MpiFlights::Flight{call, to, std::move(scratch), std::move(cuts)});
    call_mpi([&] { return mpi_.start(call, flight->cuts.data(), is_root(call), flight->mpi); });
    flights_.add(flight);
    return nb::cast(std::make_unique<MpiStarted>(flights_owner_, flights_, flight, link_, error_, spin_ns_));
  }

  // Write that this member has come to the next collective; returns the word.
  std::uint64_t word_of_next(std::uint64_t state) const {
    const std::uint64_t number = words_.mine.get(words_.window) + 1;
    const std::uint64_t word = number << words_.number_shift | state;
    words_.mine.put(words_.window, number);
    words_.mine.set(number % words_.window, word);
    return word;
  }

  // Arrive at the next collective, as `Arrivals.enter` does; whether all members soon have, and wait.
  // Runs without the GIL.
  bool arrive(bool is_even) const {
    const std::uint64_t written = word_of_next(is_even ? words_.waits | words_.even : words_.waits);
    const std::uint64_t word = written & ~words_.even;
    const std::uint64_t place = (word >> words_.number_shift) % words_.window;
    const std::vector<Words>& others = words_.others;
    std::size_t num_there = 0;
    return is_done_soon(spin_ns_, 0, [&] {
      while (num_there < others.size() && (others[num_there].get(place) & ~words_.even) == word) ++num_there;
      if (num_there == others.size()) return true;
      pause_core();
      return false;
    });
  }

  // Wait in Python until all members have arrived; whether all wait. An exception of a signal's handler
  // must not pass before this member has written that it left: the others would wait for it in MPI.
  bool wait_for_all() const {
    nb::object error;
    for (;;) {
      try {
        return number(error.is_valid() ? call(arrivals_, names::leave, error)
                                       : call(arrivals_, names::wait_for_all, timeout_)) != 0;
      } catch (nb::python_error& raised) {
        const std::uint64_t at = words_.mine.get(words_.window);
        const std::uint64_t word = words_.mine.get(at % words_.window) & ~words_.even;
        if (word == (at << words_.number_shift | words_.left)) throw;
        error = nb::borrow(raised.value());
      }
    }
  }

  // Do a collective at which all members have arrived, without the GIL. Where each has parts of one
  // size in a row an exchange is MPI's alltoall, which is the faster one.
  int run_with_all(const Collective& call, const int* cuts, bool is_even) const {
    const std::uint64_t place = words_.mine.get(words_.window) % words_.window;
    const auto says_even = [&](const Words& words) { return (words.get(place) & words_.even) != 0; };
    const bool are_even = is_even && std::all_of(words_.others.begin(), words_.others.end(), says_even);
    words_.mine.put(words_.inside, limit_ms_);
    const int error = mpi_.run(call, are_even ? nullptr : cuts, is_root(call));
    words_.mine.put(words_.inside, 0);
    return error;
  }

  template <class Function>
  void call_mpi(Function function) const {
    int error = 0;
    {
      nb::gil_scoped_release release;
      error = function();
    }
    check(error);
  }

  void check(int error) const {
    if (error != 0) raise_error(call_with(error_, whole(error)));
  }

  [[noreturn]] void fail(const nb::python_error& error, nb::handle note, nb::handle num_bytes) const {
    raise_error(call_with(explain_, nb::borrow(error.value()), note, num_bytes));
  }

  const MpiFunctions& mpi_;
  const nb::object flights_owner_;
  MpiFlights& flights_;
  const ArrivalWords words_;
  const nb::object arrivals_, timeout_, link_, finish_message_, explain_, error_;
  const std::uint64_t rank_, most_bytes_, limit_ms_;
  const Nanoseconds spin_ns_;
};

}  // namespace

void bind_mpi_runner(nb::module_& m) {
  m.attr("MPI_FUNCTIONS") = MpiFunctions::names();
  nb::class_<MpiFunctions>(m, "MpiFunctions")
      .def(nb::new_(&MpiFunctions::of), "addresses"_a, "comm"_a, "byte"_a, "in_place"_a, "handle_bytes"_a,
           "status_bytes"_a);
  nb::class_<MpiFlights>(m, "MpiFlights")
      .def(nb::init<const MpiFunctions&, std::uint64_t>(), nb::keep_alive<1, 2>(), "functions"_a, "size"_a)
      .def("progress", &MpiFlights::progress)
      .def("close", &MpiFlights::close);
  nb::class_<MpiStarted, PyOperation>(m, "MpiStarted").def("test_quietly", &MpiStarted::test);
  nb::class_<ArrivalWords>(m, "ArrivalWords")
      .def("__init__",
           filled_in<ArrivalWords, Words, std::vector<Words>, std::uint64_t, std::uint64_t, std::uint64_t,
                     std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>(),
           "mine"_a, "others"_a, "window"_a, "check_every"_a, "inside"_a, "goes_on"_a, "waits"_a, "left"_a,
           "even"_a, "number_shift"_a);
  nb::class_<MpiRunner, Runner>(m, "MpiRunner")
      .def(nb::init<const MpiFunctions&, nb::object, const ArrivalWords&, nb::object, nb::object, nb::object,
                    nb::object, nb::object, nb::object, std::uint64_t, std::int64_t, std::uint64_t,
                    std::uint64_t, double>(),
           nb::keep_alive<1, 2>(), "functions"_a, "flights"_a, "words"_a, "arrivals"_a, "timeout"_a, "link"_a,
           "finish_message"_a, "explain"_a, "error"_a, "rank"_a, "largest_tag"_a, "most_bytes"_a,
           "limit_ms"_a, "spin_s"_a);
}

}  // namespace meshdist
