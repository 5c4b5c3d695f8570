// The fast path of the collectives: calls on plain tensors, on a backend that has a runner.
//
// The Python code of the collectives, which accepts any argument, takes longer than moving a few numbers.
// Each method checks its tensors, records and compares the call, notifies autograd of writes, and lets the
// runner do or start it. If it returns false, it has changed nothing, and Python does everything.
#include "fast_path.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

#include "main_thread.h"
#include "python_communicator.h"
#include "runner.h"

using namespace nanobind::literals;

namespace meshdist {
namespace {

// The collectives, each with the method that does it.
#define MESHDIST_FAST_OPERATIONS(X)                                                         \
  X(all_reduce, all_reduce) X(reduce, reduce) X(broadcast, broadcast)                  \
  X(all_gather_into_tensor, gather_blocks) X(all_gather_single, gather_blocks)         \
  X(reduce_scatter_tensor, scatter_blocks) X(reduce_scatter_single, scatter_blocks)    \
  X(all_gather, all_gather) X(gather, gather) X(scatter, scatter)                      \
  X(all_to_all, all_to_all) X(all_to_all_single, all_to_all_single)                    \
  X(barrier, barrier) X(send, send) X(recv, recv)

namespace names {
#define MESHDIST_NAME_OF(operation, method) const Name operation{#operation};
MESHDIST_FAST_OPERATIONS(MESHDIST_NAME_OF)
const Name started{"_started"}, result{"_result"}, user{"_user"}, starting{"starting"};
}  // namespace names

class FastPath {
 public:
  // `reductions` has tuples: a ReduceOp, its number, and for each dtype that it takes the core's
  // code of the reduction. `works`, of a path whose calls are started, has the fields of `WorkTerms`.
  FastPath(Entry& entry, Runner& runner, const nb::list& reductions, const nb::object& works)
      : entry_(entry), runner_(runner), starts_(!works.is_none()) {
    if (starts_) {
      terms_ = std::make_shared<WorkTerms>(
          WorkTerms{works[0], works[1], works[2], works[3], works[4], works[5], works[6], works[7]});
      timeout_s_ = nb::cast<double>(terms_->timeout.attr("total_seconds")());
    }
    for (nb::handle one : reductions) {
      Reduction made{one[0], nb::cast<std::int64_t>(one[1]), {}};
      made.ops.fill(-1);
      for (auto [dtype, op] : nb::borrow<nb::dict>(one[2])) {
        unsigned code = 0;
        if (entry_.find_code(dtype, code)) made.ops[code] = nb::cast<int>(op);
      }
      reductions_.push_back(std::move(made));
    }
  }

  // Each is given the collective that a program has called; the operation name of a call is None where it has none.
  bool all_reduce(nb::handle operation, nb::handle x, nb::handle op, nb::handle op_name) {
    return run_in_place({OperationSpec::all_reduce, {operation, op_name_of(op_name)}}, x, op);
  }

  bool reduce(nb::handle operation, nb::handle x, nb::handle op, int root) {
    return run_in_place({OperationSpec::reduce, {operation}}, x, op, root);
  }

  bool broadcast(nb::handle operation, nb::handle x, int root, nb::handle op_name) {
    return run_in_place({OperationSpec::broadcast, {operation, op_name_of(op_name)}}, x, {}, root);
  }

  bool gather_blocks(nb::handle operation, nb::handle out, nb::handle in, nb::handle op_name) {
    return run_blocks({OperationSpec::all_gather, {operation, op_name_of(op_name)}}, out, in);
  }

  bool scatter_blocks(nb::handle operation, nb::handle out, nb::handle in, nb::handle op, nb::handle op_name) {
    return run_blocks({OperationSpec::reduce_scatter, {operation, op_name_of(op_name)}}, out, in, op);
  }

  bool all_gather(nb::handle operation, nb::handle outs, nb::handle x) {
    Collective call{OperationSpec::all_gather_v, {operation}};
    Plain plain;
    if (!is_ready(true) || !entry_.read(x, plain) ||
        !read_apart(outs, plain, call.outs, call.written, true)) {
      return false;
    }
    call.in = plain.address;
    call.read = nb::borrow(x);
    return run(call, plain, plain, true);
  }

  bool gather(nb::handle operation, nb::handle x, nb::handle outs, int root) {
    return run_at_root({OperationSpec::gather, {operation}}, x, outs, root);
  }

  bool scatter(nb::handle operation, nb::handle x, nb::handle ins, int root) {
    return run_at_root({OperationSpec::scatter, {operation}}, x, ins, root);
  }

  bool all_to_all_single(nb::handle operation, nb::handle out, nb::handle in, nb::handle out_sizes,
                         nb::handle in_sizes, nb::handle op_name) {
    Collective call{OperationSpec::all_to_all, {operation, op_name_of(op_name)}};
    Plain output, input;
    const std::uint64_t size = entry_.size();
    if (!is_ready(true) || !entry_.read(out, output) || !entry_.read(in, input) || !output.is_like(input) ||
        overlap(output, input)) {
      return false;
    }
    call.read = nb::borrow(in);
    call.written = tuple_of(out);
    if (out_sizes.is_none() && in_sizes.is_none()) {
      if (!are_in_equal_parts(output, input, size)) return false;
      Plain part = input;
      part.count /= size;
      for (std::uint64_t i = 0; i < size; ++i) {
        call.outs.push_back(output.address + i * part.bytes());
        call.ins.push_back(input.address + i * part.bytes());
      }
      return run(call, part, input, true);
    }
    if (!cut(out_sizes, output, size, call.out_counts) || !cut(in_sizes, input, size, call.in_counts) ||
        row_of(output) != row_of(input)) {
      return false;
    }
    std::uintptr_t to = output.address, from = input.address;
    for (std::uint64_t i = 0; i < size; ++i) {
      call.outs.push_back(to);
      call.ins.push_back(from);
      to += call.out_counts[i] * output.item;
      from += call.in_counts[i] * input.item;
    }
    return exchange(call, input);
  }

  bool all_to_all(nb::handle operation, nb::handle outs, nb::handle ins, nb::handle op_name) {
    Collective call{OperationSpec::all_to_all, {operation, op_name_of(op_name)}};
    Plain first;
    if (!is_ready(true) || !entry_.read_list(ins, first, call.ins, call.read, &call.in_counts) ||
        !entry_.read_list(outs, first, call.outs, call.written, &call.out_counts) ||
        overlap({call.ins, call.in_counts, first.item}, {call.outs, call.out_counts, first.item}) ||
        overlap_each_other({call.outs, call.out_counts, first.item})) {
      return false;
    }
    return exchange(call, first);
  }

  // That of the same group's calls that are started; None where none are.
  nb::object starting = nb::none();

  // What the call that was done returns: a Work where it was started, of a receive the sender's global rank.
  nb::object take_found() { return std::exchange(found_, nb::none()); }

  bool barrier(nb::handle operation) {
    Collective call{OperationSpec::barrier, {operation}};
    return is_ready() && run(call, {}, {});
  }

  bool send(nb::handle operation, nb::handle x, nb::handle peer, nb::handle tag) {
    Message message{operation, peer, tag, true};
    return run(x, message);
  }

  bool recv(nb::handle operation, nb::handle x, nb::handle peer, nb::handle tag) {
    Message message{operation, peer, tag};
    if (!run(x, message)) return false;
    found_ = entry_.rank_of(message.member);
    return true;
  }

 private:
  struct Reduction {
    nb::object op;
    std::int64_t number;
    std::array<int, kNumDtypes> ops;  // the core's code of the reduction of each dtype; -1: not reduced
  };

  // A call on one tensor, which is reduced if there is an op, and has a root unless that is negative.
  bool run_in_place(Collective&& call, nb::handle x, nb::handle op, int root = -1) {
    Plain plain;
    if (!is_ready() || !entry_.read(x, plain) || (op.is_valid() && !reduces(op, plain, call))) return false;
    call.header.root = root;
    call.in = call.out = plain.address;
    const bool is_written = root < 0 || is_me(root) == op.is_valid();
    (is_written ? call.written : call.read) = tuple_of(x);
    return run(call, plain, plain);
  }

  // A call that has a block of each member in one tensor, and one block in the other.
  bool run_blocks(Collective&& call, nb::handle out, nb::handle in, nb::handle op = {}) {
    Plain output, input;
    const bool gathers = call.operation == OperationSpec::all_gather;
    const Plain &whole = gathers ? output : input, &block = gathers ? input : output;
    if (!is_ready() || !entry_.read(out, output) || !entry_.read(in, input) || !output.is_like(input) ||
        !is_of_blocks(whole, block, entry_.size())) {
      return false;
    }
    const bool is_in_place = gathers && input.address == output.address + entry_.member() * input.bytes();
    if (!is_in_place && overlap(output, input)) return false;
    if (!gathers && !reduces(op, input, call)) return false;
    call.in = input.address;
    call.out = output.address;
    call.read = nb::borrow(in);
    call.written = tuple_of(out);
    return run(call, block, input);
  }

  // A call that has a tensor on each member, and on the root one of each member in a list; None elsewhere.
  bool run_at_root(Collective&& call, nb::handle x, nb::handle list, int root) {
    Plain plain;
    const bool gathers = call.operation == OperationSpec::gather;
    if (!is_ready() || !entry_.read(x, plain)) return false;
    nb::object &of_x = gathers ? call.read : call.written, &of_list = gathers ? call.written : call.read;
    Addresses& parts = gathers ? call.outs : call.ins;
    if (is_me(root) ? !read_apart(list, plain, parts, of_list, gathers) : !list.is_none()) return false;
    call.header.root = root;
    (gathers ? call.in : call.out) = plain.address;
    of_x = tuple_of(x);
    return run(call, plain, plain);
  }

  static nb::handle op_name_of(nb::handle given) { return given.is_none() ? nb::handle() : given; }

  // An all-to-all of parts that have counts, of tensors like `plain`, which is noted.
  bool exchange(Collective& call, const Plain& plain) {
    const std::uint64_t count = call.in_counts.front();
    const auto is_even = [&](const Counts& counts) {
      return std::all_of(counts.begin(), counts.end(), [&](auto one) { return one == count; });
    };
    Plain part = plain;
    part.count = count;
    if (is_even(call.in_counts) && is_even(call.out_counts)) {
      call.in_counts.clear();
      call.out_counts.clear();
      return run(call, part, plain, true);
    }
    const std::uint64_t me = entry_.member();
    part.count = 0;
    return call.in_counts[me] == call.out_counts[me] && run(call, part, plain, true);
  }

  bool is_ready(bool is_uneven = false) const {
    return !MainThread::is_nested() && entry_.is_quiet(is_uneven);
  }

  bool is_me(int root) const { return static_cast<std::uint64_t>(root) == entry_.member(); }

  // Whether `op` reduces such tensors; fills the call in.
  bool reduces(nb::handle op, const Plain& plain, Collective& call) const {
    const Reduction* found = find(op);
    if (!found) return false;
    call.header.op = found->number;
    const int code = found->ops[plain.code];
    call.op = static_cast<unsigned>(code);
    return code >= 0;
  }

  // Look up the op by its address. An op that another process has sent is a different object that is equal to
  // a known op.
  const Reduction* find(nb::handle op) const {
    for (const Reduction& one : reductions_) {
      if (one.op.is(op)) return &one;
    }
    for (const Reduction& one : reductions_) {
      if (op.type().is(one.op.type()) && one.op.equal(op)) return &one;
    }
    return nullptr;
  }

  // Whether a list has one tensor per member, all like `like` and apart from it, and where they are written
  // apart from each other; keeps it in `kept`.
  bool read_apart(nb::handle list, Plain& like, Addresses& addresses, nb::object& kept,
                  bool are_written = false) {
    if (!entry_.read_list(list, like, addresses, kept)) return false;
    const Counts count{like.count};
    const Spans all{addresses, count, like.item};
    return !overlap({{like.address}, count, like.item}, all) && !(are_written && overlap_each_other(all));
  }

  // `part` is one member's part, to and from each member, of an uneven call without counts; `plain` is
  // recorded.
  bool run(Collective& call, const Plain& part, const Plain& plain, bool is_uneven = false) {
    call.count = part.count;
    call.item = part.item;
    call.dtype = part.code;
    const bool differ = !call.in_counts.empty();
    if (!runner_.takes(call) || (differ && entry_.compares())) return false;
    Entry::Sizes sizes{part.count};
    if (differ) sizes = {0, &call.in_counts, &call.out_counts};
    const MainThread::Within within(call.header.operation);
    call.fingerprint = entry_.enter(call.header, plain, is_uneven ? &sizes : nullptr);
    call.note = entry_.num_notes();
    if (call.written.is_valid()) entry_.note_write(call.written);
    if (!starts_) {
      runner_.run(call);
      return true;
    }
    call.sequence = entry_.sequence();
    found_ = make_work(call, runner_.start(call));
    return true;
  }

  // The Work of a call that was started.
  nb::object make_work(const Collective& call, const nb::object& request) {
    // If this member only sends, the receiving members warn about dropped Works.
    const bool warns = call.written.is_valid() || !call.read.is_valid();
    const WorkFacts facts{terms_, call.header.operation, warns ? terms_->warn_dropped : nb::none(), call.note};
    const nb::object result =
        call.written.is_valid() ? checked(PySequence_List(call.written.ptr())) : nb::list();
    if (!warns) {
      PyList_Append(result.ptr(),
                    PyTuple_Check(call.read.ptr()) ? PyTuple_GetItem(call.read.ptr(), 0) : call.read.ptr());
    }
    const nb::object user = call_with(terms_->user);
    PyOperation* started = nullptr;
    if (!nb::try_cast(request, started)) {
      const nb::object fields = facts.with(request, result, user);
      return checked(PyObject_CallObject(terms_->of_python.ptr(), fields.ptr()));
    }
    started->serve(facts, timeout_s_, wait_of(call.header.operation));
    const nb::object work =
        checked(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(terms_->of_core.ptr()), 0));
    for (const auto& [name, value] : {std::pair(&names::started, request),
                                      std::pair(&names::result, result), std::pair(&names::user, user)}) {
      if (PyObject_GenericSetAttr(work.ptr(), name->object, value.ptr()) != 0) throw nb::python_error();
    }
    return work;
  }

  // What the main thread is in as it waits for a collective.
  nb::handle wait_of(nb::handle operation) {
    nb::object& text = waits_[operation.ptr()];
    if (!text.is_valid()) text = checked(PyUnicode_FromFormat("wait() of %U", operation.ptr()));
    return text;
  }

  bool run(nb::handle x, Message& message) {
    if (starts_ || MainThread::is_nested() || !entry_.read(x, message) || !runner_.takes(message))
      return false;
    const MainThread::Within within(message.operation);
    runner_.run(message, x, entry_);
    return true;
  }

  Entry& entry_;
  Runner& runner_;
  const bool starts_;
  std::shared_ptr<const WorkTerms> terms_;
  double timeout_s_ = 0;  // of the group
  std::unordered_map<PyObject*, nb::object> waits_;
  nb::object found_ = nb::none();  // from the end of a method until it returns, without a step of Python
  std::vector<Reduction> reductions_;
};

template <class To>
To argument(PyObject* const* given, Py_ssize_t count, std::size_t place) {
  const nb::handle found = place < static_cast<std::size_t>(count) ? given[place] : Py_None;
  if constexpr (std::is_same_v<To, int>) {
    return nb::cast<int>(found);
  } else {
    return found;
  }
}

// A collective as Python has it: None where the call is done, its Work where it is started, else False.
template <const Name* kOperation, auto kMethod>
struct Entrance;
template <const Name* kOperation, class... Taken, bool (FastPath::*kMethod)(nb::handle, Taken...)>
struct Entrance<kOperation, kMethod> {
  static PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    return call_with(self, given, count, std::index_sequence_for<Taken...>());
  }

 private:
  template <std::size_t... kPlaces>
  static PyObject* call_with(PyObject* self, PyObject* const* given, Py_ssize_t count,
                             std::index_sequence<kPlaces...>) {
    return returned([&]() -> nb::object {
      if (!nb::inst_ready(self)) {
        PyErr_SetString(PyExc_TypeError, "a FastPath that its __init__ has not made");
        throw nb::python_error();
      }
      FastPath& path = *nb::inst_ptr<FastPath>(self);
      if (!(path.*kMethod)(kOperation->object, argument<Taken>(given, count, kPlaces)...)) return nb::bool_(false);
      return path.take_found();
    });
  }
};

#define MESHDIST_METHOD(operation, method) fast_method(#operation, Entrance<&names::operation, &FastPath::method>::call),
PyMethodDef methods[] = {MESHDIST_FAST_OPERATIONS(MESHDIST_METHOD)};

PyObject* fast_path_type = nullptr;  // kept as long as the process lives

}  // namespace

FastFunction find_fast_method(const std::string& operation) {
  for (const PyMethodDef& method : methods) {
    if (operation == method.ml_name) {
      return reinterpret_cast<FastFunction>(reinterpret_cast<void (*)()>(method.ml_meth));
    }
  }
  throw std::invalid_argument("the fast path has no such collective");
}

bool is_fast_path(nb::handle path) { return path.type().is(fast_path_type); }

nb::object starting_path(nb::handle path) {
  return is_fast_path(path) ? nb::inst_ptr<FastPath>(path)->starting : get(path, names::starting);
}

void bind_fast_path(nb::module_& m) {
  const nb::object type =
      nb::class_<FastPath>(m, "FastPath")
          .def(nb::init<Entry&, Runner&, nb::list, nb::object>(), nb::keep_alive<1, 2>(),
               nb::keep_alive<1, 3>(), "entry"_a, "runner"_a, "reductions"_a, "works"_a = nb::none())
          .def_rw("starting", &FastPath::starting, nb::arg().none());
  fast_path_type = type.inc_ref().ptr();
  // Descriptors of Python's own: nanobind's find the arguments' types at each call, which takes 30 ns more.
  for (PyMethodDef& method : methods) {
    type.attr(method.ml_name) =
        checked(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(fast_path_type), &method));
  }
}

}  // namespace meshdist
