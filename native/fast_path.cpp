#include "fast_path.h"

namespace meshdist {
namespace {

namespace names {
const Name all_reduce{"all_reduce"}, reduce{"reduce"}, broadcast{"broadcast"}, all_gather{"all_gather"},
    all_gather_into_tensor{"all_gather_into_tensor"}, all_gather_single{"all_gather_single"},
    reduce_scatter_tensor{"reduce_scatter_tensor"},
    reduce_scatter_single{"reduce_scatter_single"}, gather{"gather"}, scatter{"scatter"},
    all_to_all{"all_to_all"}, all_to_all_single{"all_to_all_single"}, barrier{"barrier"},
    send{"send"}, recv{"recv"};
}

}  // namespace

FastPath::FastPath(Entry& entry, Runner& runner, const nb::list& reductions)
    : entry_(entry), runner_(runner) {
  for (nb::handle one : reductions) {
    Reduction made{one[0], nb::cast<std::int64_t>(one[1]), {}};
    for (auto [dtype, way] : nb::borrow<nb::dict>(one[2])) {
      unsigned code = 0;
      if (entry_.find_code(dtype, code)) made.ways[code] = {number(way[0]), number(way[1]), true};
    }
    reductions_.push_back(std::move(made));
  }
}

bool FastPath::all_reduce(nb::handle x) {
  const Reduction& sum = reductions_.front();
  Collective call{Verb::all_reduce, {names::all_reduce.object}};
  Plain plain;
  if (!is_ready() || !entry_.read(x, plain) || !reduces(sum.op, plain, call)) return false;
  call.in = call.out = plain.address;
  call.written = tuple_of(x);
  return run(call, plain, plain);
}

bool FastPath::reduce(nb::handle x, nb::handle op, int root) {
  Collective call{Verb::reduce, {names::reduce.object}};
  Plain plain;
  if (!is_ready() || !entry_.read(x, plain) || !reduces(op, plain, call)) return false;
  call.header.root = root;
  call.in = call.out = plain.address;
  (is_me(root) ? call.written : call.read) = tuple_of(x);
  return run(call, plain, plain);
}

bool FastPath::broadcast(nb::handle x, int root) {
  Collective call{Verb::broadcast, {names::broadcast.object}};
  Plain plain;
  if (!is_ready() || !entry_.read(x, plain)) return false;
  call.header.root = root;
  call.out = plain.address;
  (is_me(root) ? call.read : call.written) = tuple_of(x);
  return run(call, plain, plain);
}

bool FastPath::all_gather_into_tensor(nb::handle out, nb::handle in) {
  return gather_blocks(names::all_gather_into_tensor, out, in);
}

bool FastPath::all_gather_single(nb::handle out, nb::handle in) {
  return gather_blocks(names::all_gather_single, out, in);
}

bool FastPath::gather_blocks(const Name& verb, nb::handle out, nb::handle in) {
  Collective call{Verb::all_gather, {verb.object}};
  Plain output, input;
  if (!is_ready() || !entry_.read(out, output) || !entry_.read(in, input) ||
      !output.is_like(input) || !is_of_blocks(output, input, entry_.size())) {
    return false;
  }
  const bool is_in_place = input.address == output.address + entry_.member() * input.bytes();
  if (!is_in_place && overlap(output, output.bytes(), input)) return false;
  call.in = input.address;
  call.out = output.address;
  call.read = nb::borrow(in);
  call.written = tuple_of(out);
  return run(call, input, input);
}

bool FastPath::reduce_scatter_tensor(nb::handle out, nb::handle in, nb::handle op) {
  return scatter_blocks(names::reduce_scatter_tensor, out, in, op);
}

bool FastPath::reduce_scatter_single(nb::handle out, nb::handle in, nb::handle op) {
  return scatter_blocks(names::reduce_scatter_single, out, in, op);
}

bool FastPath::scatter_blocks(const Name& verb, nb::handle out, nb::handle in, nb::handle op) {
  Collective call{Verb::reduce_scatter, {verb.object}};
  Plain output, input;
  if (!is_ready() || !entry_.read(out, output) || !entry_.read(in, input) ||
      !output.is_like(input) || !is_of_blocks(input, output, entry_.size()) ||
      overlap(output, output.bytes(), input) || !reduces(op, input, call)) {
    return false;
  }
  call.in = input.address;
  call.out = output.address;
  call.read = nb::borrow(in);
  call.written = tuple_of(out);
  return run(call, output, input);
}

bool FastPath::all_gather(nb::handle outs, nb::handle x) {
  Collective call{Verb::all_gather_v, {names::all_gather.object}};
  Plain plain;
  if (!is_ready(true) || !entry_.read(x, plain) ||
      !read_apart(outs, plain, call.outs, call.written)) {
    return false;
  }
  call.in = plain.address;
  call.read = nb::borrow(x);
  return run(call, plain, plain, true);
}

bool FastPath::gather(nb::handle x, nb::handle outs, int root) {
  Collective call{Verb::gather, {names::gather.object}};
  Plain plain;
  if (!is_ready() || !entry_.read(x, plain)) return false;
  if (is_me(root) ? !read_apart(outs, plain, call.outs, call.written) : !outs.is_none()) return false;
  call.header.root = root;
  call.in = plain.address;
  call.read = nb::borrow(x);
  return run(call, plain, plain);
}

bool FastPath::scatter(nb::handle x, nb::handle ins, int root) {
  Collective call{Verb::scatter, {names::scatter.object}};
  Plain plain;
  if (!is_ready() || !entry_.read(x, plain)) return false;
  if (is_me(root) ? !read_apart(ins, plain, call.ins, call.read) : !ins.is_none()) return false;
  call.header.root = root;
  call.out = plain.address;
  call.written = tuple_of(x);
  return run(call, plain, plain);
}

bool FastPath::all_to_all_single(nb::handle out, nb::handle in) {
  Collective call{Verb::all_to_all, {names::all_to_all_single.object}};
  Plain output, input;
  const std::uint64_t size = entry_.size();
  if (!is_ready(true) || !entry_.read(out, output) || !entry_.read(in, input) ||
      !output.is_like(input) || !are_in_equal_parts(output, input, size) ||
      overlap(output, output.bytes(), input)) {
    return false;
  }
  Plain part = input;
  part.count /= size;
  for (std::uint64_t i = 0; i < size; ++i) {
    call.outs.push_back(output.address + i * part.bytes());
    call.ins.push_back(input.address + i * part.bytes());
  }
  call.read = nb::borrow(in);
  call.written = tuple_of(out);
  return run(call, part, input, true);
}

bool FastPath::all_to_all(nb::handle outs, nb::handle ins) {
  Collective call{Verb::all_to_all, {names::all_to_all.object}};
  Plain first;
  if (!is_ready(true) || !entry_.read_list(ins, first, call.ins, call.read) ||
      !entry_.read_list(outs, first, call.outs, call.written) ||
      overlaps_any(first, call.ins, call.outs)) {
    return false;
  }
  return run(call, first, first, true);
}

bool FastPath::barrier() {
  Collective call{Verb::barrier, {names::barrier.object}};
  return is_ready() && run(call, {}, {});
}

bool FastPath::send(nb::handle x, nb::handle peer, nb::handle tag) {
  Message message{names::send.object, peer, tag, true};
  return run(x, message);
}

nb::object FastPath::recv(nb::handle x, nb::handle peer, nb::handle tag) {
  Message message{names::recv.object, peer, tag};
  return run(x, message) ? entry_.rank_of(message.member) : nb::bool_(false);
}

bool FastPath::is_ready(bool is_uneven) const {
  return runner_.is_ready() && entry_.is_quiet(is_uneven);
}

bool FastPath::reduces(nb::handle op, const Plain& plain, Collective& call) const {
  for (const Reduction& one : reductions_) {
    if (!one.op.is(op)) continue;
    call.header.op = one.op;
    call.header.number = one.number;
    call.way = one.ways[plain.code];
    return call.way.is_known;
  }
  return false;
}

bool FastPath::read_apart(nb::handle list, Plain& like, Addresses& addresses,
                          nb::object& kept) {
  return entry_.read_list(list, like, addresses, kept) &&
         !overlaps_any(like, {like.address}, addresses);
}

bool FastPath::run(Collective& call, const Plain& part, const Plain& plain, bool is_uneven) {
  call.count = part.count;
  call.item = part.item;
  call.dtype = part.code;
  if (!runner_.takes(call)) return false;
  entry_.enter(call.header, plain, is_uneven ? &part.count : nullptr);
  if (call.written.is_valid()) entry_.note_write(call.written);
  runner_.run(call);
  return true;
}

bool FastPath::run(nb::handle x, Message& message) {
  if (!entry_.read(x, message) || !runner_.takes(message)) return false;
  runner_.run(message, x, entry_);
  return true;
}

}  // namespace meshdist
