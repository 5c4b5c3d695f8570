#include "torch_runner.h"

#include <nanobind/stl/unique_ptr.h>

namespace meshdist {
namespace {

namespace names {
const Name group{"_group"}, failure{"failure"}, dim{"dim"}, view{"view"}, on_stream{"on_stream"}, poll{"poll"},
    wait{"wait"};
}

using Arguments = std::vector<nb::object>;

nb::object flat(nb::handle x) {
  return PyLong_AsLong(call(x, names::dim).ptr()) == 1 ? nb::borrow(x) : call(x, names::view, whole(-1));
}

// The tensors of a call, a tensor or a tuple, as a list of flat tensors.
nb::object flats(const nb::object& tensors) {
  nb::list list;
  if (!tensors.is_valid()) return list;
  if (!PyTuple_Check(tensors.ptr())) {
    list.append(flat(tensors));
  } else {
    for (nb::handle tensor : tensors) list.append(flat(tensor));
  }
  return list;
}

// As c10d takes the lists of several devices.
nb::object listed(const nb::object& tensors) {
  nb::list list;
  if (nb::len(tensors) != 0) list.append(tensors);
  return list;
}

nb::object first(const nb::object& tuple) { return flat(PyTuple_GetItem(tuple.ptr(), 0)); }

bool is_list(const Collective& call) {
  return call.verb == Verb::all_to_all && PyTuple_Check(call.read.ptr());
}

// What the class's method takes before its options.
Arguments arguments_of(const Collective& call) {
  switch (call.verb) {
    case Verb::all_reduce: return {checked(PySequence_List(call.written.ptr()))};
    case Verb::reduce:
    case Verb::broadcast: return {flats(call.written.is_valid() ? call.written : call.read)};
    case Verb::all_gather:
    case Verb::reduce_scatter: return {first(call.written), flat(call.read)};
    case Verb::all_gather_v:
    case Verb::gather: return {listed(flats(call.written)), flats(call.read)};
    case Verb::scatter: return {flats(call.written), listed(flats(call.read))};
    case Verb::all_to_all: {
      if (is_list(call)) return {flats(call.written), flats(call.read)};
      nb::list takes, gives;
      for (std::size_t i = 0; i < call.outs.size(); ++i) {
        takes.append(call.out_counts.empty() ? call.count : call.out_counts[i]);
        gives.append(call.in_counts.empty() ? call.count : call.in_counts[i]);
      }
      return {first(call.written), flat(call.read), takes, gives};
    }
    default: return {};
  }
}

// Calls `function`, or the method of that name of the first argument where it is a name.
nb::object call_by_list(nb::handle function, const Arguments& given) {
  std::vector<PyObject*> pointers;
  for (const nb::object& argument : given) pointers.push_back(argument.ptr());
  const auto call = PyUnicode_Check(function.ptr()) ? PyObject_VectorcallMethod : PyObject_Vectorcall;
  return checked(call(function.ptr(), pointers.data(), pointers.size(), nullptr));
}

}  // namespace

TorchStarted::TorchStarted(nb::object operation)
    : PyOperation({}, 0),
      operation_(std::move(operation)),
      is_on_stream_(is_true(get(operation_, names::on_stream))) {}

int TorchStarted::wait(double timeout) {
  if (is_true(facts_.terms->uses_streams) && !is_on_stream_) return 1;  // Python orders streams behind it
  return static_cast<int>(number(call(operation_, names::wait, nb::float_(is_on_stream_ ? 0 : timeout))));
}

bool TorchStarted::is_done() { return is_true(call(operation_, names::poll)); }

const TorchRunner::Shortcut& TorchRunner::find(const Collective& call) const {
  const bool is_empty = call.count == 0 && call.in_counts.empty();
  const Kind kind{static_cast<std::int64_t>(call.verb),
                  call.header.op,
                  call.dtype,
                  call.header.root,
                  is_list(call),
                  is_empty};
  auto found = shortcuts_.find(kind);
  if (found == shortcuts_.end()) {
    const nb::object made =
        call_with(find_, nb::str(kVerbNames[static_cast<unsigned>(call.verb)]), whole(kind[1]),
                  whole(kind[2]), whole(kind[3]), nb::bool_(kind[4] != 0), nb::bool_(is_empty));
    Shortcut shortcut;
    if (!made.is_none()) shortcut = {made[0], made[1], made[2], number(made[3])};
    found = shortcuts_.emplace(kind, std::move(shortcut)).first;
  }
  return found->second;
}

bool TorchRunner::takes(const Collective& call) const {
  const Shortcut& shortcut = find(call);
  return shortcut.method.is_valid() && call.bytes() <= shortcut.most_bytes;
}

TorchRunner::Begun TorchRunner::begin(const Collective& call) const {
  const Shortcut& shortcut = find(call);
  Begun begun{nb::none(), nb::none()};
  Arguments given = arguments_of(call);
  if (!shortcut.prepare.is_none()) {
    const nb::object prepared = call_by_list(shortcut.prepare, given);
    given.clear();
    for (nb::handle argument : nb::object(prepared[0])) given.push_back(nb::borrow(argument));
    begun.then = prepared[1];
  }
  given.insert(given.begin(), get(communicator_, names::group));
  given.push_back(shortcut.options);
  try {
    begun.work = call_by_list(shortcut.method, given);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_RuntimeError)) throw;
    raise_error(meshdist::call(communicator_, names::failure, nb::borrow(error.value())));
  }
  return begun;
}

void TorchRunner::run(const Collective& call) {
  try {
    const Begun begun = begin(call);
    if (!begun.work.is_none()) call_with(end_, begun.work, whole(call.note));
    if (!begun.then.is_none()) call_with(begun.then);
  } catch (nb::python_error& error) {
    raise_error(call_with(explain_, nb::borrow(error.value())));
  }
}

nb::object TorchRunner::start(const Collective& call, std::uint64_t) {
  try {
    const Begun begun = begin(call);
    nb::object operation = call_with(end_, begun.work, begun.then, whole(call.note));
    // What completes a result on a stream is ordered by a Work of Python's.
    if (!begun.then.is_none()) return operation;
    return nb::cast(std::make_unique<TorchStarted>(std::move(operation)));
  } catch (nb::python_error& error) {
    raise_error(call_with(explain_, nb::borrow(error.value())));
  }
}

}  // namespace meshdist
