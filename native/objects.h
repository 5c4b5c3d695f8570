// Python's objects, handled by its C API where nanobind would take longer.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace meshdist {

namespace nb = nanobind;

// Of memory, as Python has it.
using Address = std::uintptr_t;
using Addresses = std::vector<Address>;
using Counts = std::vector<std::uint64_t>;  // of elements, by member

inline nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

// The name of an attribute or verb, made when the module is loaded; it lives as long as the process.
struct Name {
  explicit Name(const char* text) : object(PyUnicode_InternFromString(text)) {}
  PyObject* const object;
};

inline nb::object get(nb::handle from, const Name& name) {
  return checked(PyObject_GetAttr(from.ptr(), name.object));
}

template <class... Arguments>
nb::object call(nb::handle on, const Name& name, const Arguments&... given) {
  PyObject* const arguments[] = {on.ptr(), given.ptr()...};
  return checked(
      PyObject_VectorcallMethod(name.object, arguments, 1 + sizeof...(given), nullptr));
}

template <class... Arguments>
nb::object call_with(nb::handle function, const Arguments&... given) {
  PyObject* const arguments[sizeof...(given) + 1] = {given.ptr()...};
  return checked(PyObject_Vectorcall(function.ptr(), arguments, sizeof...(given), nullptr));
}

[[noreturn]] inline void raise_error(const nb::object& error) {
  PyErr_SetObject(error.type().ptr(), error.ptr());
  throw nb::python_error();
}

template <class... Items>
nb::object tuple_of(const Items&... items) {
  return checked(PyTuple_Pack(sizeof...(items), items.ptr()...));
}

inline nb::object tuple_from(nb::handle sequence) {
  return checked(PySequence_Tuple(sequence.ptr()));
}

inline bool is_true(const nb::object& value) { return value.ptr() == Py_True; }

template <class Number>
nb::object whole(Number value) {
  return checked(PyLong_FromLongLong(static_cast<long long>(value)));
}

inline std::uint64_t number(nb::handle value) {
  const std::uint64_t found = PyLong_AsUnsignedLongLong(value.ptr());
  if (found == static_cast<std::uint64_t>(-1) && PyErr_Occurred()) throw nb::python_error();
  return found;
}

}  // namespace meshdist
