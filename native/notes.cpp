#include "notes.h"

namespace meshdist {
namespace {

constexpr std::uint64_t kSequence = 0, kMoment = 1, kNumNotes = 2;  // as in `Recorder`

struct Names {
  Name back{"f_back"}, instruction{"f_lasti"}, file{"co_filename"};
};

const Names& names() {
  static const Names all;
  return all;
}

nb::object code_of(nb::handle frame) {
  return checked(
      reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
}

}  // namespace

Notes::Notes(const nb::dict& facts)
    : counts_(facts["counts"]),
      notes_(facts["notes"]),
      num_messages_(facts["num_messages"]),
      moments_(facts["moments"]),
      between_files_(facts["between_files"]),
      group_(facts["group"]),
      no_stack_(facts["no_stack"]),
      get_frame_(nb::borrow(PySys_GetObject("_getframe"))),
      depth_(whole(1)),
      num_kept_(PyList_Size(notes_.ptr())) {}

std::uint64_t Notes::sequence() const { return counts_.get(kSequence); }

std::uint64_t Notes::keep_collective(nb::handle verb, const nb::object& data,
                                     const nb::object& more) {
  const std::uint64_t number = sequence() + 1;
  counts_.put(kSequence, number);
  keep(verb, data, more);
  return number;
}

std::uint64_t Notes::keep_message(nb::handle verb, const nb::object& data, nb::handle kind) {
  PyObject* const before = PyDict_GetItem(num_messages_.ptr(), kind.ptr());
  const nb::object number = whole(before == nullptr ? 1 : PyLong_AsLongLong(before) + 1);
  if (PyDict_SetItem(num_messages_.ptr(), kind.ptr(), number.ptr()) != 0) throw nb::python_error();
  const nb::handle is_send = PyTuple_GetItem(kind.ptr(), 0), peer = PyTuple_GetItem(kind.ptr(), 1),
                   tag = PyTuple_GetItem(kind.ptr(), 2);
  return keep(verb, data, tuple_of(is_send, peer, tag, number));
}

std::uint64_t Notes::keep(nb::handle verb, const nb::object& data, const nb::object& more) {
  const Names& n = names();
  nb::object frame = first_frame(), code = code_of(frame);
  while (!code.is(last_code_)) {  // programs repeat their calls
    if (!is_true(checked(PyObject_GetItem(between_files_.ptr(), get(code, n.file).ptr())))) {
      last_code_ = code;
      break;
    }
    nb::object back = get(frame, n.back);
    if (back.is_none()) break;
    frame = std::move(back);  // out to the program
    code = code_of(frame);
  }
  const nb::object told = whole(static_cast<std::int64_t>(sequence()));
  const nb::object note =
      tuple_of(told, group_, verb, data, more, code, get(frame, n.instruction), no_stack_);
  const std::uint64_t before = counts_.get(kNumNotes);
  const Py_ssize_t place = static_cast<Py_ssize_t>(before % num_kept_);
  if (PyList_SetItem(notes_.ptr(), place, note.inc_ref().ptr()) != 0) throw nb::python_error();
  counts_.put(kMoment, number(checked(PyIter_Next(moments_.ptr()))));
  counts_.put(kNumNotes, before + 1);
  return before + 1;
}

// The caller of what is surely this package's. Frames cost nothing while nobody asks for them.
nb::object Notes::first_frame() const {
  try {
    return call_with(get_frame_, depth_);
  } catch (nb::python_error& error) {  // there are not so many: no program calls, but Python itself
    if (!error.matches(PyExc_ValueError)) throw;
    return nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  }
}

}  // namespace meshdist
