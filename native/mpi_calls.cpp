#include "mpi_calls.h"

#include <algorithm>

#include "waiting.h"

namespace meshdist {
namespace {

constexpr std::uint64_t kWaits = 1;  // as in `Arrivals`
constexpr std::size_t kMostBuffers = 1024;
constexpr int kLooksPerTime = 16;  // at the clock
// As `Link.finish` stays awake: as long as a slow machine moves the message (a GB/s), and 20 ms at
// most, since a rank that spins here hears no signals.
constexpr Nanoseconds kNsPerByte = 1;
constexpr Nanoseconds kLongestSpin = 20'000'000;
constexpr std::uint64_t kMostBytes = (1u << 31) - 1;  // of a message: MPI counts in an int

struct Names {
  Name is_aborted{"is_aborted"}, check_size{"check_size"};
};

const Names& names() {
  static const Names all;
  return all;
}

}  // namespace

MpiCalls::MpiCalls(nb::dict facts)
    : entry_(facts),
      message_entry_(facts, entry_),
      comm_(facts["comm"]),
      in_place_(facts["in_place"]),
      byte_(facts["byte"]),
      from_address_(facts["from_address"]),
      link_(facts["link"]),
      go_on_(facts["go_on"]),
      finish_(facts["finish"]),
      explain_(facts["explain"]),
      send_(nb::str("send")),
      recv_(nb::str("recv")),
      error_(facts["error"]),
      mpi_(MpiFunctions::of(facts["functions"])),
      most_(number(facts["most"])),
      spin_ns_(number(facts["spin_ns"])),
      all_reduce_(verb("all_reduce", "Allreduce")),
      reduce_(verb("reduce", "Reduce")),
      broadcast_(verb("broadcast", "Bcast")),
      all_gather_(verb("all_gather", "Allgather")),
      reduce_scatter_(verb("reduce_scatter", "Reduce_scatter_block")),
      gather_(verb("gather", "Gather")),
      scatter_(verb("scatter", "Scatter")),
      all_to_all_(verb("all_to_all_single", "Alltoallv")),
      barrier_(verb("barrier", "Barrier")),
      mine_(facts["arrivals"]),
      window_(number(facts["arrivals_window"])),
      check_every_(number(facts["arrivals_check_every"])) {
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
  if (!sum.type.is_valid()) return false;
  entry_.enter({all_reduce_.name, sum.op, sum.number}, &plain);
  entry_.note_write(tuple_of(x));
  run(all_reduce_, nb::borrow(x), in_place_, numbers_of(plain, sum.type), sum.of_mpi);
  return true;
}

bool MpiCalls::reduce(nb::handle x, nb::handle op, int root) {
  Plain plain;
  if (!is_ready() || !read(x, plain)) return false;
  const Way found = find(op, plain);
  if (!found.type.is_valid()) return false;
  entry_.enter({reduce_.name, found.op, found.number, root}, &plain);
  const nb::object numbers = numbers_of(plain, found.type), place = whole(root);
  if (!is_me(root)) {
    run(reduce_, nb::borrow(x), numbers, nb::none(), found.of_mpi, place);
    return true;
  }
  entry_.note_write(tuple_of(x));
  run(reduce_, nb::borrow(x), in_place_, numbers, found.of_mpi, place);
  return true;
}

bool MpiCalls::broadcast(nb::handle x, int root) {
  Plain plain;
  if (!is_ready() || !read(x, plain)) return false;
  entry_.enter({broadcast_.name, nb::none(), -2, root}, &plain);
  if (!is_me(root)) entry_.note_write(tuple_of(x));
  run(broadcast_, nb::borrow(x), bytes_of(plain), whole(root));
  return true;
}

bool MpiCalls::all_gather(nb::handle verb, nb::handle out, nb::handle in) {
  Plain output, input;
  const std::uint64_t size = entry_.size();
  if (!is_ready() || !read(out, output) || !read(in, input) || !output.is_like(input) ||
      !is_of_blocks(output, input, size) || overlap(output, output.bytes(), input)) {
    return false;
  }
  entry_.enter({verb}, &input);
  entry_.note_write(tuple_of(out));
  run(all_gather_, tuple_of(out, in), bytes_of(input), bytes_of(output, 1, size));
  return true;
}

bool MpiCalls::reduce_scatter(nb::handle verb, nb::handle out, nb::handle in, nb::handle op) {
  Plain output, input;
  const std::uint64_t size = entry_.size();
  if (!is_ready() || !read(out, output) || !read(in, input) || !output.is_like(input) ||
      !is_of_blocks(input, output, size) || overlap(output, output.bytes(), input)) {
    return false;
  }
  const Way found = find(op, input);
  if (!found.type.is_valid()) return false;
  entry_.enter({verb, found.op, found.number}, &input);
  entry_.note_write(tuple_of(out));
  run(reduce_scatter_, tuple_of(out, in), numbers_of(input, found.type, size),
      numbers_of(output, found.type),
      found.of_mpi);
  return true;
}

bool MpiCalls::gather(nb::handle x, nb::handle outs, int root) {
  Plain plain, first;
  if (!is_ready() || !read(x, plain)) return false;
  if (is_me(root) ? !read_row(outs, plain, first) : !outs.is_none()) return false;
  entry_.enter({gather_.name, nb::none(), -2, root}, &plain);
  const nb::object place = whole(root);
  if (!is_me(root)) {
    run(gather_, nb::borrow(x), bytes_of(plain), nb::none(), place);
    return true;
  }
  entry_.note_write(checked(PySequence_Tuple(outs.ptr())));
  const std::uint64_t size = entry_.size();
  run(gather_, tuple_of(outs, x), bytes_of(plain), bytes_of(first, size, size), place);
  return true;
}

bool MpiCalls::scatter(nb::handle x, nb::handle ins, int root) {
  Plain plain, first;
  if (!is_ready() || !read(x, plain)) return false;
  if (is_me(root) ? !read_row(ins, plain, first) : !ins.is_none()) return false;
  entry_.enter({scatter_.name, nb::none(), -2, root}, &plain);
  entry_.note_write(tuple_of(x));
  const nb::object place = whole(root);
  if (!is_me(root)) {
    run(scatter_, nb::borrow(x), nb::none(), bytes_of(plain), place);
    return true;
  }
  const std::uint64_t size = entry_.size();
  run(scatter_, tuple_of(ins, x), bytes_of(first, size, size), bytes_of(plain), place);
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
  entry_.enter({all_to_all_.name}, &input, &part);
  entry_.note_write(tuple_of(out));
  run(all_to_all_, tuple_of(out, in), cut(input), cut(output));
  return true;
}

bool MpiCalls::barrier() {
  if (!is_ready()) return false;
  entry_.enter({barrier_.name}, nullptr);
  run(barrier_, nb::none());
  return true;
}

bool MpiCalls::send(nb::handle x, nb::handle peer, nb::handle tag) {
  return transfer(x, {send_, peer, tag, true});
}

nb::object MpiCalls::recv(nb::handle x, nb::handle peer, nb::handle tag) {
  return transfer(x, {recv_, peer, tag}) ? nb::borrow(peer) : nb::none();
}

MpiCalls::Verb MpiCalls::verb(const char* name, const char* method) const {
  return {nb::str(name), comm_.attr(method), nb::str(method)};
}

// Whether the next call may go the short way, as far as that is known without its tensors.
bool MpiCalls::is_ready(bool is_uneven) {
  return (mine_.get(window_) + 1) % check_every_ != 0 && entry_.is_quiet(is_uneven) &&
         !is_true(get(link_, names().is_aborted));
}

bool MpiCalls::read(nb::handle x, Plain& plain) {
  return entry_.read(x, plain) && plain.count != 0 && is_small(plain.bytes());
}

bool MpiCalls::read_row(nb::handle list, const Plain& like, Plain& plain) {
  const bool is_list = PyList_Check(list.ptr());
  if (!is_list && !PyTuple_Check(list.ptr())) return false;
  const std::uint64_t size = entry_.size(), step = like.bytes();
  if (static_cast<std::uint64_t>(PyObject_Size(list.ptr())) != size) return false;
  if (!is_small(size * step)) return false;
  for (std::uint64_t i = 0; i < size; ++i) {
    const Py_ssize_t place = static_cast<Py_ssize_t>(i);
    Plain next;
    const nb::handle one =
        is_list ? PyList_GetItem(list.ptr(), place) : PyTuple_GetItem(list.ptr(), place);
    if (!entry_.read(one, next) || !next.is_like(like) || next.count != like.count) return false;
    if (i != 0 && next.address != plain.address + i * step) return false;
    if (i == 0) plain = std::move(next);
  }
  return !overlap(plain, size * step, like);
}

MpiCalls::Way MpiCalls::find(nb::handle op, const Plain& plain) const {
  for (const Reduction& one : reductions_) {
    if (!one.op.is(op)) continue;
    PyObject* const way = PyDict_GetItem(one.ways.ptr(), plain.dtype.ptr());
    if (way == nullptr) break;
    return {one.op, nb::borrow(PyTuple_GetItem(way, 0)), nb::borrow(PyTuple_GetItem(way, 1)),
            one.number};
  }
  return {};
}

// As `Buffers.moved`, of `blocks` such tensors in a row, counted for each of `parts`.
nb::object MpiCalls::bytes_of(const Plain& plain, std::uint64_t blocks, std::uint64_t parts) {
  const std::uint64_t all = plain.bytes() * blocks;
  nb::object& found = kept({plain.address, all, all / parts, byte_.ptr()});
  if (!found.is_valid()) found = nb::make_tuple(memory(plain.address, all), all / parts, byte_);
  return found;
}

// As `Buffers.numbers`.
nb::object MpiCalls::numbers_of(const Plain& plain, nb::handle type, std::uint64_t parts) {
  const std::uint64_t all = plain.bytes(), count = plain.count / parts;
  nb::object& found = kept({plain.address, all, count, type.ptr()});
  if (!found.is_valid()) {
    found = nb::make_tuple(memory(plain.address, all), count, type);
  }
  return found;
}

// As `Buffers.cut`, into equal parts.
nb::object MpiCalls::cut(const Plain& plain) {
  const std::uint64_t all = plain.bytes(), size = entry_.size();
  nb::object& found = kept({plain.address, all, 0, nullptr});
  if (!found.is_valid()) {
    nb::list counts, starts;
    for (std::uint64_t i = 0; i < size; ++i) {
      counts.append(all / size);
      starts.append(all / size * i);
    }
    found = nb::make_tuple(memory(plain.address, all), nb::make_tuple(counts, starts), byte_);
  }
  return found;
}

// What mpi4py takes for some memory: kept, since programs repeat their calls. It holds an address,
// and no tensor.
nb::object& MpiCalls::kept(const Memory& memory) {
  if (buffers_.size() >= kMostBuffers && buffers_.find(memory) == buffers_.end()) buffers_.clear();
  return buffers_[memory];
}

nb::object MpiCalls::memory(std::uintptr_t address, std::uint64_t bytes) const {
  return from_address_(address, bytes);
}

// Come to the next collective, as `Arrivals.enter` does; whether all members have soon, and wait.
bool MpiCalls::arrive() {
  const std::uint64_t number = mine_.get(window_) + 1, place = number % window_;
  const std::uint64_t word = number << 2 | kWaits;
  mine_.put(window_, number);
  mine_.set(place, word);
  std::size_t num_there = 0;
  const auto are_there = [&] {
    while (num_there < others_.size() && others_[num_there].get(place) == word) ++num_there;
    return num_there == others_.size();
  };
  if (are_there()) return true;
  if (spin_ns_ == 0) return false;
  nb::gil_scoped_release release;
  const Nanoseconds end = now_ns() + static_cast<Nanoseconds>(spin_ns_);
  while (now_ns() < end) {
    for (int i = 0; i < kLooksPerTime; ++i) {
      if (are_there()) return true;
      pause_core();
    }
  }
  return false;
}

template <class... Arguments>
void MpiCalls::run(const Verb& verb, const nb::object& used, const Arguments&... arguments) {
  try {
    if (arrive()) {
      call_with(verb.method, arguments...);
    } else {  // Python waits on
      call_with(go_on_, verb.late, used, tuple_of(arguments...));
    }
  } catch (nb::python_error& error) {
    fail(error);
  }
}

bool MpiCalls::transfer(nb::handle x, Message message) {
  const Plain& plain = message.plain;
  if (mpi_ == nullptr || message.peer.is_none() || is_true(get(link_, names().is_aborted)) ||
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
      call_with(finish_, request, x, nb::bool_(message.is_send));
      is_done = true;
    } else if (!message.is_send) {
      check_size(flight, plain);
    }
  } catch (nb::python_error& failure) {
    if (!is_done) stranded_.append(x);
    const nb::object bytes = whole(static_cast<std::int64_t>(plain.bytes()));
    fail(failure, whole(static_cast<std::int64_t>(note)), message.is_send ? nb::none() : bytes);
  }
  return true;
}

int MpiCalls::start(const Message& message, MpiFunctions::Flight& flight) const {
  nb::gil_scoped_release release;
  const Plain& plain = message.plain;
  return mpi_->start(message.is_send, reinterpret_cast<void*>(plain.address),
                     static_cast<int>(plain.bytes()), message.member,
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

void MpiCalls::check(int error) const {
  if (error != 0) raise_error(call_with(error_, whole(error)));
}

// `known` is what `explain` takes besides.
template <class... Known>
void MpiCalls::fail(nb::python_error& error, const Known&... known) {
  raise_error(call_with(explain_, nb::borrow(error.value()), known...));
}

}  // namespace meshdist
