#include "plain_sum.h"

#include <pthread.h>

#include <algorithm>

namespace nb = nanobind;

namespace meshdist {
namespace {

unsigned forks = 0;  // between this process and the one that loaded the module
const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });

nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

// Names of attributes, made once; they live as long as the process.
struct Name {
  explicit Name(const char* text) : object(PyUnicode_InternFromString(text)) {}
  PyObject* const object;
};

nb::object get(nb::handle from, const Name& name) {
  return checked(PyObject_GetAttr(from.ptr(), name.object));
}

nb::object call(nb::handle on, const Name& name) {
  PyObject* const arguments[] = {on.ptr()};
  return checked(PyObject_VectorcallMethod(name.object, arguments, 1, nullptr));
}

// With one argument. (PyObject_CallOneArg is not in the stable ABI.)
nb::object call_with(nb::handle function, nb::handle argument) {
  PyObject* const arguments[] = {argument.ptr()};
  return checked(PyObject_Vectorcall(function.ptr(), arguments, 1, nullptr));
}

nb::object code_of(nb::handle frame) {
  return checked(
      reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
}

bool is_true(const nb::object& value) { return value.ptr() == Py_True; }

void set(nb::handle on, const Name& name, nb::handle value) {
  if (PyObject_SetAttr(on.ptr(), name.object, value.ptr()) != 0) throw nb::python_error();
}

struct Names {
  Name requires_grad{"requires_grad"}, is_contiguous{"is_contiguous"}, is_neg{"is_neg"};
  Name is_cpu{"is_cpu"}, dtype{"dtype"}, data_ptr{"data_ptr"}, shape{"shape"};
  Name back{"f_back"}, instruction{"f_lasti"}, file{"co_filename"};
  Name sequence{"sequence"}, moment{"moment"}, num_notes{"num_notes"};
};

const Names& names() {
  static const Names all;
  return all;
}

std::uint64_t number(nb::handle value) {
  const std::uint64_t found = PyLong_AsUnsignedLongLong(value.ptr());
  if (found == static_cast<std::uint64_t>(-1) && PyErr_Occurred()) throw nb::python_error();
  return found;
}

}  // namespace

PlainSum::PlainSum(nb::dict facts)
    : num_forks_(forks),
      tensor_type_(facts["tensor_type"]),
      views_(tensor_type_),
      codes_(facts["codes"]),
      aborts_(facts["aborts"]),
      is_told_(facts["is_told"]),
      level_(facts["level"]),
      recorder_(facts["recorder"]),
      notes_(facts["notes"]),
      moments_(facts["moments"]),
      between_files_(facts["between_files"]),
      group_(facts["group"]),
      verb_(facts["verb"]),
      more_(facts["more"]),
      no_stack_(facts["no_stack"]),
      increment_version_(facts["increment_version"]),
      num_kept_(PyList_Size(notes_.ptr())) {}

bool PlainSum::begin(nb::handle tensor, Buffer& buffer) {
  if (!is_quiet() || reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())) != tensor_type_.ptr()) {
    return false;
  }
  nb::object data;
  try {
    data = read(tensor, buffer);
  } catch (nb::python_error& error) {  // sparse and nested tensors have no address, or no shape
    if (!error.matches(PyExc_RuntimeError)) throw;
  }
  if (!data.is_valid()) return false;
  note(data);
  return true;
}

// Whether there is nothing to refuse or to tell: no fork, no broken group, no log of all verbs.
bool PlainSum::is_quiet() const {
  if (num_forks_ != forks || PyDict_Size(aborts_.ptr()) != 0) return false;
  return !is_true(call_with(is_told_, level_));
}

// The shape and dtype of a tensor whose memory is the call's; null where it is not so plain.
nb::object PlainSum::read(nb::handle tensor, Buffer& buffer) {
  const Names& n = names();
  TensorView view;
  if (!views_.look(tensor, view) || !view.is_cpu || !view.is_contiguous()) return {};
  if (is_true(get(tensor, n.requires_grad)) || is_true(call(tensor, n.is_neg))) return {};
  buffer.count = view.count();
  buffer.address = reinterpret_cast<std::uintptr_t>(view.data);
  if (buffer.address == 0 && buffer.count != 0) return {};  // its memory was taken away
  if (!last_data_.is_valid() || view.dtype != last_dtype_ ||
      !std::equal(last_shape_.begin(), last_shape_.end(), view.shape, view.shape + view.num_dims)) {
    const nb::object dtype = get(tensor, n.dtype);
    PyObject* const code = PyDict_GetItem(codes_.ptr(), dtype.ptr());
    if (code == nullptr) return {};
    last_code_of_dtype_ = static_cast<unsigned>(PyLong_AsLong(code));
    last_dtype_ = view.dtype;
    last_shape_.assign(view.shape, view.shape + view.num_dims);
    last_data_ = checked(PyTuple_Pack(2, get(tensor, n.shape).ptr(), dtype.ptr()));
  }
  buffer.dtype = last_code_of_dtype_;
  return last_data_;
}

void PlainSum::note(nb::handle data) {
  const Names& n = names();
  nb::object frame = nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));  // the verb's
  nb::object code = code_of(frame);
  for (nb::object back = get(frame, n.back); !back.is_none(); back = get(frame, n.back)) {
    frame = std::move(back);  // out to the program
    code = code_of(frame);
    if (code.is(last_code_)) break;  // programs repeat their calls
    if (!is_true(checked(PyObject_GetItem(between_files_.ptr(), get(code, n.file).ptr())))) {
      last_code_ = code;
      break;
    }
  }
  const nb::object sequence =
      checked(PyLong_FromUnsignedLongLong(number(get(recorder_, n.sequence)) + 1));
  const nb::object note = checked(PyTuple_Pack(8, sequence.ptr(), group_.ptr(), verb_.ptr(),
                                               data.ptr(), more_.ptr(), code.ptr(),
                                               get(frame, n.instruction).ptr(), no_stack_.ptr()));
  const std::uint64_t num_notes = number(get(recorder_, n.num_notes));
  const Py_ssize_t place = static_cast<Py_ssize_t>(num_notes % num_kept_);
  if (PyList_SetItem(notes_.ptr(), place, note.inc_ref().ptr()) != 0) throw nb::python_error();
  set(recorder_, n.sequence, sequence);
  set(recorder_, n.moment, checked(PyIter_Next(moments_.ptr())));
  set(recorder_, n.num_notes, checked(PyLong_FromUnsignedLongLong(num_notes + 1)));
}

void PlainSum::note_write(nb::handle tensor) {
  const nb::object one = checked(PyTuple_Pack(1, tensor.ptr()));
  call_with(increment_version_, one);
}

}  // namespace meshdist
