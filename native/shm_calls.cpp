#include "shm_calls.h"

#include <utility>

namespace meshdist {

ShmCalls::ShmCalls(nb::object communicator, nb::dict facts, double timeout)
    : entry_(facts),
      message_entry_(facts, entry_),
      owner_(std::move(communicator)),
      core_(nb::cast<PyCommunicator&>(owner_)),
      timeout_(timeout),
      failed_(facts["failed"]),
      message_failed_(facts["message_failed"]),
      all_reduce_(nb::str("all_reduce")),
      reduce_(nb::str("reduce")),
      broadcast_(nb::str("broadcast")),
      all_gather_(nb::str("all_gather")),
      gather_(nb::str("gather")),
      scatter_(nb::str("scatter")),
      all_to_all_(nb::str("all_to_all_single")),
      all_to_all_list_(nb::str("all_to_all")),
      barrier_(nb::str("barrier")),
      send_(nb::str("send")),
      recv_(nb::str("recv")) {
  for (nb::handle one : nb::borrow<nb::list>(facts["reductions"])) {
    reductions_.push_back(
        {one[0], one[3], nb::cast<std::int64_t>(one[1]), nb::cast<unsigned>(one[2])});
  }
}

bool ShmCalls::all_reduce(nb::handle x) {
  Plain plain;
  const Reduction& sum = reductions_.front();
  if (!entry_.is_quiet() || !entry_.read(x, plain) || find(sum.op, plain) == nullptr) return false;
  entry_.enter({all_reduce_, sum.op, sum.number}, &plain);
  entry_.note_write(tuple_of(x));
  return run(core_.all_reduce(plain.address, plain.count, plain.code, sum.code, 1.0));
}

bool ShmCalls::reduce(nb::handle x, nb::handle op, int root) {
  Plain plain;
  if (!entry_.is_quiet() || !entry_.read(x, plain)) return false;
  const Reduction* const found = find(op, plain);
  if (found == nullptr) return false;
  entry_.enter({reduce_, found->op, found->number, root}, &plain);
  if (is_me(root)) entry_.note_write(tuple_of(x));
  return run(core_.reduce(plain.address, plain.count, plain.code, found->code, root, 1.0));
}

bool ShmCalls::broadcast(nb::handle x, int root) {
  Plain plain;
  if (!entry_.is_quiet() || !entry_.read(x, plain)) return false;
  entry_.enter({broadcast_, nb::none(), -2, root}, &plain);
  if (!is_me(root)) entry_.note_write(tuple_of(x));
  return run(core_.broadcast(plain.address, plain.count, plain.code, root));
}

bool ShmCalls::all_gather(nb::handle verb, nb::handle out, nb::handle in) {
  Plain output, input;
  if (!entry_.is_quiet() || !entry_.read(out, output) || !entry_.read(in, input) ||
      !output.is_like(input) || !is_of_blocks(output, input, entry_.size())) {
    return false;
  }
  const bool is_in_place = input.address == output.address + entry_.member() * input.bytes();
  if (!is_in_place && overlap(output, output.bytes(), input)) return false;
  entry_.enter({verb}, &input);
  entry_.note_write(tuple_of(out));
  return run(core_.all_gather(output.address, input.address, input.count, input.code));
}

bool ShmCalls::reduce_scatter(nb::handle verb, nb::handle out, nb::handle in, nb::handle op) {
  Plain output, input;
  if (!entry_.is_quiet() || !entry_.read(out, output) || !entry_.read(in, input) ||
      !output.is_like(input) || !is_of_blocks(input, output, entry_.size()) ||
      overlap(output, output.bytes(), input)) {
    return false;
  }
  const Reduction* const found = find(op, input);
  if (found == nullptr) return false;
  entry_.enter({verb, found->op, found->number}, &input);
  entry_.note_write(tuple_of(out));
  return run(core_.reduce_scatter(output.address, input.address, output.count, output.code,
                                  found->code, 1.0));
}

bool ShmCalls::all_gather_list(nb::handle outs, nb::handle x) {
  Plain plain;
  Addresses addresses;
  if (!entry_.is_quiet(true) || !entry_.read(x, plain) || !read_apart(outs, plain, addresses)) {
    return false;
  }
  entry_.enter({all_gather_}, &plain, &plain.count);
  entry_.note_write(tuple_from(outs));
  const Counts counts(entry_.size(), plain.count);
  return run(core_.all_gather_v(addresses, counts, plain.address, plain.count, plain.code));
}

bool ShmCalls::gather(nb::handle x, nb::handle outs, int root) {
  Plain plain;
  Addresses addresses;
  if (!entry_.is_quiet() || !entry_.read(x, plain)) return false;
  if (is_me(root) ? !read_apart(outs, plain, addresses) : !outs.is_none()) return false;
  entry_.enter({gather_, nb::none(), -2, root}, &plain);
  if (is_me(root)) entry_.note_write(tuple_from(outs));
  return run(core_.gather(addresses, plain.address, plain.count, plain.code, root));
}

bool ShmCalls::scatter(nb::handle x, nb::handle ins, int root) {
  Plain plain;
  Addresses addresses;
  if (!entry_.is_quiet() || !entry_.read(x, plain)) return false;
  if (is_me(root) ? !read_apart(ins, plain, addresses) : !ins.is_none()) return false;
  entry_.enter({scatter_, nb::none(), -2, root}, &plain);
  entry_.note_write(tuple_of(x));
  return run(core_.scatter(plain.address, addresses, plain.count, plain.code, root));
}

bool ShmCalls::all_to_all(nb::handle out, nb::handle in) {
  Plain output, input;
  const std::uint64_t size = entry_.size();
  if (!entry_.is_quiet(true) || !entry_.read(out, output) || !entry_.read(in, input) ||
      !output.is_like(input) || !are_in_equal_parts(output, input, size) ||
      overlap(output, output.bytes(), input)) {
    return false;
  }
  const std::uint64_t part = input.count / size, step = input.bytes() / size;
  Addresses outs(size), ins(size);
  for (std::uint64_t i = 0; i < size; ++i) {
    outs[i] = output.address + i * step;
    ins[i] = input.address + i * step;
  }
  const Counts counts(size, part);
  entry_.enter({all_to_all_}, &input, &part);
  entry_.note_write(tuple_of(out));
  return run(core_.all_to_all_v(outs, counts, ins, counts, input.code));
}

bool ShmCalls::all_to_all_list(nb::handle outs, nb::handle ins) {
  Plain first;
  Addresses to, from;
  if (!entry_.is_quiet(true) || !entry_.read_first(ins, first) ||
      !entry_.read_list(ins, first, from) || !entry_.read_list(outs, first, to) ||
      overlaps_any(first, from, to)) {
    return false;
  }
  entry_.enter({all_to_all_list_}, &first, &first.count);
  entry_.note_write(tuple_from(outs));
  const Counts counts(entry_.size(), first.count);
  return run(core_.all_to_all_v(to, counts, from, counts, first.code));
}

bool ShmCalls::barrier() {
  if (!entry_.is_quiet()) return false;
  entry_.enter({barrier_}, nullptr);
  return run(core_.barrier());
}

bool ShmCalls::send(nb::handle x, nb::handle peer, nb::handle tag) {
  return run(x, {send_, peer, tag, true});
}

nb::object ShmCalls::recv(nb::handle x, nb::handle peer, nb::handle tag) {
  return run(x, {recv_, peer, tag}) ? whole(core_.last_source) : nb::none();
}

const ShmCalls::Reduction* ShmCalls::find(nb::handle op, const Plain& plain) const {
  for (const Reduction& one : reductions_) {
    if (!one.op.is(op)) continue;
    return PyDict_GetItem(one.dtypes.ptr(), plain.dtype.ptr()) == nullptr ? nullptr : &one;
  }
  return nullptr;
}

bool ShmCalls::read_apart(nb::handle list, const Plain& like, Addresses& addresses) {
  return entry_.read_list(list, like, addresses) && !overlaps_any(like, {like.address}, addresses);
}

bool ShmCalls::run(Job job) {
  const int status = core_.run(job, timeout_);
  if (status == 0) return true;
  raise_error(call_with(failed_, whole(status)));
}

bool ShmCalls::run(nb::handle x, Message message) {
  if (!message_entry_.read(x, message)) return false;
  const std::uint64_t note = message_entry_.note(message);
  if (!message.is_send) entry_.note_write(tuple_of(x));
  const Plain& plain = message.plain;
  const int status = core_.run_transfer(message.is_send, plain.address, plain.count, plain.code,
                                        message.member, message.number, note, timeout_);
  if (status == 0) return true;
  raise_error(call_with(message_failed_, whole(status), nb::bool_(message.is_send),
                        whole(message.member), message.tag,
                        whole(static_cast<std::int64_t>(note))));
}

}  // namespace meshdist
