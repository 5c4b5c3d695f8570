// The fast path over methods of torch's classes, and over functions of Python.
//
// For each kind of call Python returns a *shortcut* once: the method or function that does it. From then
// on each such call calls that, and Python waits for its work.
#include <nanobind/stl/unique_ptr.h>

#include <map>
#include <tuple>

#include "fast_path.h"
#include "python_communicator.h"
#include "runner.h"

using namespace nanobind::literals;

namespace meshdist {
namespace {

namespace names {
const Name group{"torch_group"}, failure{"failure"}, dim{"dim"}, view{"view"}, on_stream{"on_stream"},
    poll{"poll"}, wait{"wait"};
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
  return call.operation == OperationSpec::all_to_all && PyTuple_Check(call.read.ptr());
}

// The arguments of the method or function before its options.
Arguments arguments_of(const Collective& call) {
  switch (call.operation) {
    case OperationSpec::all_reduce: return {checked(PySequence_List(call.written.ptr()))};
    case OperationSpec::reduce:
    case OperationSpec::broadcast: return {flats(call.written.is_valid() ? call.written : call.read)};
    case OperationSpec::all_gather:
    case OperationSpec::reduce_scatter: return {first(call.written), flat(call.read)};
    case OperationSpec::all_gather_v:
    case OperationSpec::gather: return {listed(flats(call.written)), flats(call.read)};
    case OperationSpec::scatter: return {flats(call.written), listed(flats(call.read))};
    case OperationSpec::all_to_all: {
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

// Calls `function`, or the method of that name of the first argument if it is a name.
nb::object call_by_list(nb::handle function, const Arguments& given) {
  std::vector<PyObject*> pointers;
  for (const nb::object& argument : given) pointers.push_back(argument.ptr());
  const auto call = PyUnicode_Check(function.ptr()) ? PyObject_VectorcallMethod : PyObject_Vectorcall;
  return checked(call(function.ptr(), pointers.data(), pointers.size(), nullptr));
}

// A collective that a method has started, with the Python operation that waits for it.
class PythonStarted final : public PyOperation {
 public:
  explicit PythonStarted(nb::object request)
      : PyOperation({}, 0), request_(std::move(request)),
        is_on_stream_(is_true(get(request_, names::on_stream))) {}

  int wait(double timeout) override {
    if (is_true(facts_.terms->uses_streams) && !is_on_stream_) return 1;  // Python orders streams after it
    return static_cast<int>(number(call(request_, names::wait, nb::float_(is_on_stream_ ? 0 : timeout))));
  }
  bool is_done() override { return is_true(call(request_, names::poll)); }
  bool is_on_stream() const override { return is_on_stream_; }
  nb::object of_work() const override { return request_; }

 private:
  const nb::object request_;
  const bool is_on_stream_;
};

class PythonRunner final : public Runner {
 public:
  // Methods are methods of `communicator.torch_group`; `communicator.failure` converts their errors to a
  // backend's failure. Functions use neither. `find(operation, op, dtype, root, is_list, is_empty)` returns
  // the shortcut of a kind of call, as in `meshdist/backends/c10d/fast_path.py`, with a method's name or a
  // function; None leaves these calls to Python. `end(work, note)` waits for a work that is not None; for
  // calls that are started, `end(work, then, note)` returns the operation. `explain(error)` returns the error
  // to raise.
  PythonRunner(nb::object communicator, nb::object find, nb::object end, nb::object explain)
      : Runner(0), communicator_(std::move(communicator)), find_(std::move(find)), end_(std::move(end)),
        explain_(std::move(explain)) {}

  bool takes(const Collective& call) const override {
    const Shortcut& shortcut = find(call);
    return shortcut.method.is_valid() && call.bytes() <= shortcut.most_bytes;
  }
  bool takes(const Message&) const override { return false; }

  void run(const Collective& call) override {
    try {
      const Begun begun = begin(call);
      if (!begun.work.is_none()) call_with(end_, begun.work, whole(call.note));
      if (!begun.then.is_none()) call_with(begun.then);
    } catch (nb::python_error& error) {
      raise_error(call_with(explain_, nb::borrow(error.value())));
    }
  }

  nb::object start(const Collective& call) override {
    try {
      const Begun begun = begin(call);
      nb::object request = call_with(end_, begun.work, begun.then, whole(call.note));
      // What completes a result on a stream is ordered by a Work of Python's.
      if (!begun.then.is_none()) return request;
      return nb::cast(std::make_unique<PythonStarted>(std::move(request)));
    } catch (nb::python_error& error) {
      raise_error(call_with(explain_, nb::borrow(error.value())));
    }
  }

  void run(Message&, nb::handle, Entry&) override {}

 private:
  struct Shortcut {
    nb::object method, options, prepare;  // no method if Python does it
    std::uint64_t most_bytes = 0;
  };
  // The work, and a function that completes the result afterwards, or None.
  struct Begun {
    nb::object work, then;
  };
  using Kind = std::tuple<OperationSpec, std::int64_t, unsigned, std::int64_t, bool, bool>;

  const Shortcut& find(const Collective& call) const {
    const bool is_empty = call.count == 0 && call.in_counts.empty();
    const Kind kind{call.operation, call.header.op, call.dtype, call.header.root, is_list(call), is_empty};
    auto found = shortcuts_.find(kind);
    if (found == shortcuts_.end()) {
      const nb::object made =
          call_with(find_, nb::str(kOperationNames[static_cast<unsigned>(call.operation)]), whole(call.header.op),
                    whole(call.dtype), whole(call.header.root), nb::bool_(is_list(call)),
                    nb::bool_(is_empty));
      Shortcut shortcut;
      if (!made.is_none()) shortcut = {made[0], made[1], made[2], number(made[3])};
      found = shortcuts_.emplace(kind, std::move(shortcut)).first;
    }
    return found->second;
  }

  Begun begin(const Collective& call) const {
    const Shortcut& shortcut = find(call);
    Begun begun{nb::none(), nb::none()};
    Arguments given = arguments_of(call);
    if (!shortcut.prepare.is_none()) {
      const nb::object prepared = call_by_list(shortcut.prepare, given);
      given.clear();
      for (nb::handle argument : nb::object(prepared[0])) given.push_back(nb::borrow(argument));
      begun.then = prepared[1];
    }
    const bool is_method = PyUnicode_Check(shortcut.method.ptr());
    if (is_method) given.insert(given.begin(), get(communicator_, names::group));
    given.push_back(shortcut.options);
    try {
      begun.work = call_by_list(shortcut.method, given);
    } catch (nb::python_error& error) {
      if (!is_method || !error.matches(PyExc_RuntimeError)) throw;
      raise_error(meshdist::call(communicator_, names::failure, nb::borrow(error.value())));
    }
    return begun;
  }

  const nb::object communicator_, find_, end_, explain_;
  mutable std::map<Kind, Shortcut> shortcuts_;
};

}  // namespace

void bind_python_runner(nb::module_& m) {
  nb::class_<PythonStarted, PyOperation>(m, "PythonStarted");
  nb::class_<PythonRunner, Runner>(m, "PythonRunner")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object>(), "communicator"_a, "find"_a, "end"_a,
           "explain"_a);
}

}  // namespace meshdist
