#include "mpi_runner.h"

#include <nanobind/stl/unique_ptr.h>

#include <algorithm>

#include "kernels.h"

namespace meshdist {
namespace {

namespace names {
const Name is_aborted{"is_aborted"}, check_size{"check_size"}, strand{"strand"}, wait_for_all{"wait_for_all"},
    leave{"leave"}, end{"end"}, finish_at_once{"finish_at_once"};
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

}  // namespace

bool MpiRunner::is_aborted() const { return is_true(get(link_, names::is_aborted)); }

bool MpiRunner::is_ready() const {
  return (words_.mine.get(words_.window) + 1) % words_.check_every != 0 && !is_aborted();
}

bool MpiRunner::takes(const Collective& call) const {
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

bool MpiRunner::takes(const Message& message) const {
  return Runner::takes(message) && message.member >= 0 && message.plain.bytes() <= kMostBytes &&
         !is_aborted();
}

// The call as MPI does it where the numbers are recoded, on `scratch` unless it is in place.
std::optional<Collective> MpiRunner::encoded(const Collective& call, nb::object& scratch) const {
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

void MpiRunner::run(const Collective& given) {
  const bool is_even =
      given.verb == Verb::all_to_all && is_row(given.outs, given.bytes()) && is_row(given.ins, given.bytes());
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
nb::object MpiRunner::start(const Collective& given, std::uint64_t) {
  try {
    nb::object scratch;
    const std::optional<Collective> recoded = encoded(given, scratch);
    word_of_next(words_.goes_on);
    return begin(recoded ? *recoded : given, result_of(given), std::move(scratch), cuts_of(given));
  } catch (nb::python_error& error) {
    fail(error, nb::none(), nb::none());
  }
}

// The operation of a collective that MPI has started.
nb::object MpiRunner::begin(const Collective& call, Address to, nb::object scratch,
                            std::vector<int> cuts) const {
  const MpiFlights::FlightPtr flight(new MpiFlights::Flight{call, to, std::move(scratch), std::move(cuts)});
  call_mpi([&] { return mpi_.start(call, flight->cuts.data(), is_root(call), flight->mpi); });
  flights_.add(flight);
  return nb::cast(std::make_unique<MpiStarted>(flights_owner_, flights_, flight, link_, error_, spin_ns_));
}

// Write that this member has come to the next collective; returns the word.
std::uint64_t MpiRunner::word_of_next(std::uint64_t state) const {
  const std::uint64_t number = words_.mine.get(words_.window) + 1;
  const std::uint64_t word = number << words_.number_shift | state;
  words_.mine.put(words_.window, number);
  words_.mine.set(number % words_.window, word);
  return word;
}

// Arrive at the next collective, as `Arrivals.enter` does; whether all members soon have, and wait.
// Runs without the GIL.
bool MpiRunner::arrive(bool is_even) const {
  const std::uint64_t written = word_of_next(is_even ? words_.waits | words_.even : words_.waits);
  const std::uint64_t word = written & ~words_.even;
  const std::uint64_t place = (word >> words_.number_shift) % words_.window;
  std::size_t num_there = 0;
  return is_done_soon(spin_ns_, 0, [&] {
    while (num_there < words_.others.size() && (words_.others[num_there].get(place) & ~words_.even) == word) {
      ++num_there;
    }
    if (num_there == words_.others.size()) return true;
    pause_core();
    return false;
  });
}

// Wait in Python until all members have arrived; whether all wait. An exception of a signal's handler
// must not pass before this member has written that it left: the others would wait for it in MPI.
bool MpiRunner::wait_for_all() const {
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
int MpiRunner::run_with_all(const Collective& call, const int* cuts, bool is_even) const {
  const std::uint64_t place = words_.mine.get(words_.window) % words_.window;
  const auto says_even = [&](const Words& words) { return (words.get(place) & words_.even) != 0; };
  const bool are_even = is_even && std::all_of(words_.others.begin(), words_.others.end(), says_even);
  words_.mine.put(words_.inside, limit_ms_);
  const int error = mpi_.run(call, are_even ? nullptr : cuts, is_root(call));
  words_.mine.put(words_.inside, 0);
  return error;
}

void MpiRunner::run(Message& message, nb::handle x, Entry& entry) {
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
      call_with(finish_message_, request_of(flight), x, nb::bool_(message.is_send));
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

nb::object MpiRunner::request_of(const MpiFunctions::Flight& flight) const {
  return checked(PyLong_FromUnsignedLongLong(mpi_.request_of(flight)));
}

template <class Function>
void MpiRunner::call_mpi(Function function) const {
  int error = 0;
  {
    nb::gil_scoped_release release;
    error = function();
  }
  check(error);
}

void MpiRunner::check(int error) const {
  if (error != 0) raise_error(call_with(error_, whole(error)));
}

void MpiRunner::fail(const nb::python_error& error, nb::handle note, nb::handle num_bytes) const {
  raise_error(call_with(explain_, nb::borrow(error.value()), note, num_bytes));
}

}  // namespace meshdist
