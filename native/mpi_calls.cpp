#include "mpi_calls.h"

#include <algorithm>

#include "waiting.h"

namespace meshdist {
namespace {

constexpr int kLooksPerTime = 16;  // at the clock
// As `Link.finish` stays awake: as long as a slow machine moves the message (a GB/s), and 20 ms at
// most, since a rank that spins here hears no signals.
constexpr Nanoseconds kNsPerByte = 1;
constexpr Nanoseconds kLongestSpin = 20'000'000;
constexpr std::uint64_t kMostBytes = (1u << 31) - 1;  // these functions count in an int

struct Names {
  Name is_aborted{"is_aborted"}, check_size{"check_size"};
};

const Names& names() {
  static const Names all;
  return all;
}

void* memory(const Plain& plain) { return reinterpret_cast<void*>(plain.address); }

int bytes(const Plain& plain) { return static_cast<int>(plain.bytes()); }

// Whether MPI's alltoall does it where all members have parts of one size: those of lists lie anywhere.
bool may_be_even(const MpiFunctions::Collective& call) {
  return call.verb == MpiFunctions::Verb::all_to_all && call.in_count != 0;
}

// Append where the tensors at `addresses` start, in bytes from the first; false where that is too
// far for MPI's numbers.
bool append_starts(const Addresses& addresses, std::vector<int>& cuts) {
  for (std::uintptr_t one : addresses) {
    const std::int64_t start = static_cast<std::int64_t>(one - addresses.front());
    cuts.push_back(static_cast<int>(start));
    if (cuts.back() != start) return false;
  }
  return true;
}

}  // namespace

MpiCalls::MpiCalls(nb::dict facts)
    : entry_(facts),
      message_entry_(facts, entry_),
      link_(facts["link"]),
      wait_for_all_(facts["wait_for_all"]),
      leave_(facts["leave"]),
      finish_collective_(facts["finish_collective"]),
      end_(facts["end"]),
      finish_message_(facts["finish_message"]),
      explain_(facts["explain"]),
      error_(facts["error"]),
      strand_(facts["strand"]),
      mpi_(MpiFunctions::of(facts["functions"])),
      most_(std::min(number(facts["most"]), kMostBytes)),
      spin_ns_(number(facts["spin_ns"])),
      send_("send"),
      recv_("recv"),
      all_reduce_("all_reduce"),
      reduce_("reduce"),
      broadcast_("broadcast"),
      all_gather_("all_gather"),
      gather_("gather"),
      scatter_("scatter"),
      all_to_all_("all_to_all_single"),
      all_to_all_list_("all_to_all"),
      barrier_("barrier"),
      mine_(facts["arrivals"]),
      window_(number(facts["arrivals_window"])),
      check_every_(number(facts["arrivals_check_every"])),
      waits_(number(facts["arrivals_waits"])),
      left_(number(facts["arrivals_left"])),
      even_(number(facts["arrivals_even"])),
      number_shift_(number(facts["arrivals_number_shift"])) {
  for (nb::handle one : nb::borrow<nb::list>(facts["reductions"])) {
    reductions_.push_back({one[0], one[2], nb::cast<std::int64_t>(one[1])});
  }
  for (nb::handle words : nb::borrow<nb::list>(facts["others_arrivals"])) {
    others_.emplace_back(nb::borrow(words));
  }
}

bool MpiCalls::all_reduce(nb::handle x) {
  Plain plain;
  if (!is_ready() || !read(x, plain)) return false;
  const Way sum = find(reductions_.front().op, plain);
  if (sum.type == 0) return false;
  entry_.enter({all_reduce_, sum.op, sum.number}, &plain);
  entry_.note_write(tuple_of(x));
  Collective call{Verb::all_reduce, mpi_->in_place(), memory(plain)};
  call.out_count = static_cast<int>(plain.count);
  call.type = sum.type;
  call.op = sum.of_mpi;
  run(call, x);
  return true;
}

bool MpiCalls::reduce(nb::handle x, nb::handle op, int root) {
  Plain plain;
  if (!is_ready() || !read(x, plain)) return false;
  const Way found = find(op, plain);
  if (found.type == 0) return false;
  entry_.enter({reduce_, found.op, found.number, root}, &plain);
  Collective call{Verb::reduce, memory(plain)};
  call.in_count = static_cast<int>(plain.count);
  call.type = found.type;
  call.op = found.of_mpi;
  call.root = root;
  if (is_me(root)) {
    entry_.note_write(tuple_of(x));
    call.in = mpi_->in_place();
    call.out = memory(plain);
  }
  run(call, x);
  return true;
}

bool MpiCalls::broadcast(nb::handle x, int root) {
  Plain plain;
  if (!is_ready() || !read(x, plain)) return false;
  entry_.enter({broadcast_, nb::none(), -2, root}, &plain);
  if (!is_me(root)) entry_.note_write(tuple_of(x));
  Collective call{Verb::broadcast, nullptr, memory(plain)};
  call.out_count = bytes(plain);
  call.root = root;
  run(call, x);
  return true;
}

bool MpiCalls::all_gather(nb::handle verb, nb::handle out, nb::handle in) {
  Plain output, input;
  if (!is_ready() || !read(out, output) || !read(in, input) || !output.is_like(input) ||
      !is_of_blocks(output, input, entry_.size()) || overlap(output, output.bytes(), input)) {
    return false;
  }
  entry_.enter({verb}, &input);
  entry_.note_write(tuple_of(out));
  Collective call{Verb::all_gather, memory(input), memory(output)};
  call.in_count = call.out_count = bytes(input);
  run(call, tuple_of(out, in));
  return true;
}

bool MpiCalls::reduce_scatter(nb::handle verb, nb::handle out, nb::handle in, nb::handle op) {
  Plain output, input;
  if (!is_ready() || !read(out, output) || !read(in, input) || !output.is_like(input) ||
      !is_of_blocks(input, output, entry_.size()) || overlap(output, output.bytes(), input)) {
    return false;
  }
  const Way found = find(op, input);
  if (found.type == 0) return false;
  entry_.enter({verb, found.op, found.number}, &input);
  entry_.note_write(tuple_of(out));
  Collective call{Verb::reduce_scatter, memory(input), memory(output)};
  call.out_count = static_cast<int>(output.count);
  call.type = found.type;
  call.op = found.of_mpi;
  run(call, tuple_of(out, in));
  return true;
}

bool MpiCalls::gather(nb::handle x, nb::handle outs, int root) {
  Plain plain;
  void* row = nullptr;
  if (!is_ready() || !read(x, plain)) return false;
  if (is_me(root) ? !read_row(outs, plain, row) : !outs.is_none()) return false;
  entry_.enter({gather_, nb::none(), -2, root}, &plain);
  Collective call{Verb::gather, memory(plain)};
  call.in_count = bytes(plain);
  call.root = root;
  nb::object used = nb::borrow(x);
  if (is_me(root)) {
    const nb::object rows = tuple_from(outs);
    entry_.note_write(rows);
    call.out = row;
    call.out_count = call.in_count;
    used = tuple_of(rows, x);
  }
  run(call, used);
  return true;
}

bool MpiCalls::scatter(nb::handle x, nb::handle ins, int root) {
  Plain plain;
  void* row = nullptr;
  if (!is_ready() || !read(x, plain)) return false;
  if (is_me(root) ? !read_row(ins, plain, row) : !ins.is_none()) return false;
  entry_.enter({scatter_, nb::none(), -2, root}, &plain);
  entry_.note_write(tuple_of(x));
  Collective call{Verb::scatter, nullptr, memory(plain)};
  call.out_count = bytes(plain);
  call.root = root;
  if (is_me(root)) {
    call.in = row;
    call.in_count = call.out_count;
  }
  run(call, tuple_of(is_me(root) ? tuple_from(ins) : nb::none(), x));
  return true;
}

bool MpiCalls::all_to_all(nb::handle out, nb::handle in) {
  Plain output, input;
  const std::uint64_t size = entry_.size();
  if (!is_ready(true) || !read(out, output) || !read(in, input) || !output.is_like(input) ||
      !are_in_equal_parts(output, input, size) || overlap(output, output.bytes(), input)) {
    return false;
  }
  const std::uint64_t part = input.count / size;
  entry_.enter({all_to_all_}, &input, &part);
  entry_.note_write(tuple_of(out));
  Collective call{Verb::all_to_all, memory(input), memory(output)};
  const int each = bytes(input) / static_cast<int>(size);
  std::vector<int> cuts(3 * size, each);
  for (std::uint64_t i = 0; i < size; ++i) {
    cuts[size + i] = cuts[2 * size + i] = each * static_cast<int>(i);
  }
  call.in_count = call.out_count = each;
  call.cuts = cuts.data();
  run(call, tuple_of(out, in));
  return true;
}

bool MpiCalls::all_gather_list(nb::handle outs, nb::handle x) {
  Plain plain;
  Addresses addresses;
  if (!is_ready(true) || !read(x, plain) || !is_small(entry_.size() * plain.bytes()) ||
      !entry_.read_list(outs, plain, addresses) ||
      overlaps_any(plain, {plain.address}, addresses)) {
    return false;
  }
  std::vector<int> cuts(entry_.size(), bytes(plain));
  if (!append_starts(addresses, cuts)) return false;
  cuts.resize(3 * entry_.size());
  entry_.enter({all_gather_}, &plain, &plain.count);
  const nb::object rows = tuple_from(outs);
  entry_.note_write(rows);
  Collective call{Verb::all_gather_list, memory(plain), reinterpret_cast<void*>(addresses[0])};
  call.in_count = bytes(plain);
  call.cuts = cuts.data();
  run(call, tuple_of(rows, x));
  return true;
}

bool MpiCalls::all_to_all_list(nb::handle outs, nb::handle ins) {
  Plain first;
  Addresses to, from;
  if (!is_ready(true) || !entry_.read_first(ins, first) || first.count == 0 ||
      !is_small(entry_.size() * first.bytes()) || !entry_.read_list(ins, first, from) ||
      !entry_.read_list(outs, first, to) || overlaps_any(first, from, to)) {
    return false;
  }
  std::vector<int> cuts(entry_.size(), bytes(first));
  if (!append_starts(to, cuts) || !append_starts(from, cuts)) return false;
  entry_.enter({all_to_all_list_}, &first, &first.count);
  const nb::object rows = tuple_from(outs);
  entry_.note_write(rows);
  Collective call{Verb::all_to_all, reinterpret_cast<void*>(from[0]),
                  reinterpret_cast<void*>(to[0])};
  call.cuts = cuts.data();
  run(call, tuple_of(rows, tuple_from(ins)));
  return true;
}

bool MpiCalls::barrier() {
  if (!is_ready()) return false;
  entry_.enter({barrier_}, nullptr);
  run({Verb::barrier}, nb::none());
  return true;
}

bool MpiCalls::send(nb::handle x, nb::handle peer, nb::handle tag) {
  return transfer(x, {send_, peer, tag, true});
}

nb::object MpiCalls::recv(nb::handle x, nb::handle peer, nb::handle tag) {
  return transfer(x, {recv_, peer, tag}) ? nb::borrow(peer) : nb::none();
}

// Whether the next call may go the short way, as far as that is known without its tensors.
bool MpiCalls::is_ready(bool is_uneven) {
  return (mine_.get(window_) + 1) % check_every_ != 0 && entry_.is_quiet(is_uneven) &&
         !is_true(get(link_, names().is_aborted));
}

bool MpiCalls::read(nb::handle x, Plain& plain) {
  return entry_.read(x, plain) && plain.count != 0 && is_small(plain.bytes());
}

bool MpiCalls::read_row(nb::handle list, const Plain& like, void*& row) {
  Addresses addresses;
  const std::uint64_t step = like.bytes();
  if (!entry_.read_list(list, like, addresses) || !is_small(entry_.size() * step) ||
      overlaps_any(like, {like.address}, addresses)) {
    return false;
  }
  for (std::uint64_t i = 1; i < entry_.size(); ++i) {
    if (addresses[i] != addresses[0] + i * step) return false;
  }
  row = reinterpret_cast<void*>(addresses[0]);
  return true;
}

MpiCalls::Way MpiCalls::find(nb::handle op, const Plain& plain) const {
  for (const Reduction& one : reductions_) {
    if (!one.op.is(op)) continue;
    PyObject* const way = PyDict_GetItem(one.ways.ptr(), plain.dtype.ptr());
    if (way == nullptr) break;
    return {one.op, number(PyTuple_GetItem(way, 0)), number(PyTuple_GetItem(way, 1)), one.number};
  }
  return {};
}

// Come to the next collective, as `Arrivals.enter` does; whether all members have soon, and wait.
// Python's lock is not held.
bool MpiCalls::arrive(const Collective& call) {
  const std::uint64_t number = mine_.get(window_) + 1, place = number % window_;
  const std::uint64_t word = number << number_shift_ | waits_;
  mine_.put(window_, number);
  mine_.set(place, may_be_even(call) ? word | even_ : word);
  std::size_t num_there = 0;
  const auto are_there = [&] {
    while (num_there < others_.size() && (others_[num_there].get(place) & ~even_) == word) {
      ++num_there;
    }
    return num_there == others_.size();
  };
  if (are_there()) return true;
  if (spin_ns_ == 0) return false;
  const Nanoseconds end = now_ns() + static_cast<Nanoseconds>(spin_ns_);
  while (now_ns() < end) {
    for (int i = 0; i < kLooksPerTime; ++i) {
      if (are_there()) return true;
      pause_core();
    }
  }
  return false;
}

// Wait in Python until all members have come; whether all wait. What a signal's handler raises where
// Python does not catch it must not pass before the others are told that this one has left: they
// would wait for it in MPI.
bool MpiCalls::wait_for_all() {
  nb::object error;
  for (;;) {
    try {
      return number(error.is_valid() ? call_with(leave_, error) : call_with(wait_for_all_)) != 0;
    } catch (nb::python_error& raised) {
      const std::uint64_t at = mine_.get(window_);
      const std::uint64_t word = mine_.get(at % window_) & ~even_;
      if (word == (at << number_shift_ | left_)) throw;
      error = nb::borrow(raised.value());
    }
  }
}

// Do a collective to which all members have come, without Python's lock. Where each has parts of one
// size an exchange is MPI's alltoall, which is the faster one.
int MpiCalls::run_with_all(Collective call) const {
  const std::uint64_t place = mine_.get(window_) % window_;
  const auto is_even = [=](const Words& words) { return (words.get(place) & even_) != 0; };
  if (may_be_even(call) && std::all_of(others_.begin(), others_.end(), is_even)) {
    call.verb = Verb::all_to_all_even;
  }
  return mpi_->run(call);
}

void MpiCalls::run(const Collective& call, nb::handle used) {
  try {
    bool have_come = false;
    int error = 0;
    {
      nb::gil_scoped_release release;
      have_come = arrive(call);
      if (have_come) error = run_with_all(call);
    }
    check(error);
    if (!have_come) run_later(call, used);
  } catch (nb::python_error& error) {
    fail(error);
  }
}

// Wait for the others in Python. Where one of them does not wait for its collective nobody may do
// MPI's blocking one.
void MpiCalls::run_later(Collective call, nb::handle used) {
  if (wait_for_all()) {
    call_mpi([&] { return run_with_all(call); });
  } else {
    const nb::bytes cuts(call.cuts, call.cuts == nullptr ? 0 : 3 * entry_.size() * sizeof(int));
    if (call.cuts != nullptr) call.cuts = static_cast<const int*>(cuts.data());
    const nb::object kept = tuple_of(used, cuts);
    MpiFunctions::Flight flight;
    call_mpi([&] { return mpi_->start(call, flight); });
    try {
      const nb::object request = checked(PyLong_FromUnsignedLongLong(mpi_->request_of(flight)));
      call_with(finish_collective_, request, kept);
    } catch (nb::python_error&) {
      call_with(strand_, kept);
      throw;
    }
  }
  call_with(end_);
}

bool MpiCalls::transfer(nb::handle x, Message message) {
  const Plain& plain = message.plain;
  if (message.peer.is_none() || is_true(get(link_, names().is_aborted)) ||
      !message_entry_.read(x, message) || plain.bytes() > kMostBytes) {
    return false;
  }
  message_entry_.compare(message);
  if (!message.is_send) entry_.note_write(tuple_of(x));
  MpiFunctions::Flight flight;
  const int error = start(message, flight);
  std::uint64_t note = 0;
  bool is_done = error != 0;
  try {
    // The sooner it is on its way the less the other side waits; it is noted meanwhile.
    note = message_entry_.note(message);
    check(error);
    is_done = is_done_soon(plain, flight);
    if (!is_done) {  // Python waits on
      const nb::object request = checked(PyLong_FromUnsignedLongLong(mpi_->request_of(flight)));
      call_with(finish_message_, request, x, nb::bool_(message.is_send));
      is_done = true;
    } else if (!message.is_send) {
      check_size(flight, plain);
    }
  } catch (nb::python_error& failure) {
    if (!is_done) call_with(strand_, nb::borrow(x));
    const nb::object bytes = whole(static_cast<std::int64_t>(plain.bytes()));
    fail(failure, whole(static_cast<std::int64_t>(note)), message.is_send ? nb::none() : bytes);
  }
  return true;
}

int MpiCalls::start(const Message& message, MpiFunctions::Flight& flight) const {
  nb::gil_scoped_release release;
  const Plain& plain = message.plain;
  return mpi_->start(message.is_send, memory(plain), bytes(plain), message.member,
                     static_cast<int>(message.number), flight);
}

// MPI moves data while it is asked: as long as that may take, but for what is too large to be deaf
// to signals meanwhile.
bool MpiCalls::is_done_soon(const Plain& plain, MpiFunctions::Flight& flight) const {
  bool is_done = false;
  int error = 0;
  {
    nb::gil_scoped_release release;
    error = mpi_->ask(flight, is_done);
    if (!is_done && error == 0 && spin_ns_ != 0) {
      const Nanoseconds moving = static_cast<Nanoseconds>(plain.bytes()) * kNsPerByte;
      const Nanoseconds end =
          now_ns() + std::min(static_cast<Nanoseconds>(spin_ns_) + moving, kLongestSpin);
      do {
        for (int i = 0; i < kLooksPerTime && !is_done && error == 0; ++i) {
          error = mpi_->ask(flight, is_done);
        }
      } while (!is_done && error == 0 && now_ns() < end);
    }
  }
  check(error);
  return is_done;
}

void MpiCalls::check_size(const MpiFunctions::Flight& flight, const Plain& plain) const {
  int count = 0;
  check(mpi_->count(flight, count));
  const std::int64_t bytes = static_cast<std::int64_t>(plain.bytes());
  if (count != bytes) call(link_, names().check_size, whole(count), whole(bytes));
}

template <class Function>
void MpiCalls::call_mpi(Function function) const {
  int error = 0;
  {
    nb::gil_scoped_release release;
    error = function();
  }
  check(error);
}

void MpiCalls::check(int error) const {
  if (error != 0) raise_error(call_with(error_, whole(error)));
}

// `known` is what `explain` takes besides.
template <class... Known>
void MpiCalls::fail(nb::python_error& error, const Known&... known) {
  raise_error(call_with(explain_, nb::borrow(error.value()), known...));
}

}  // namespace meshdist
