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

// A hash of some numbers.
template <class Numbers>
std::size_t mixed(const Numbers& numbers) {
  std::size_t mix = 0;
  for (const auto number : numbers) {
    mix = (mix ^ static_cast<std::size_t>(number)) * 0x9e3779b97f4a7c15u;
    mix ^= mix >> 29;
  }
  return mix;
}

inline nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

// The name of an attribute or collective, made when the module is loaded; it lives as long as the process.
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
  return checked(PyObject_VectorcallMethod(name.object, arguments, 1 + sizeof...(given), nullptr));
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

// What a dict of Python's has under `key`; null where it has nothing.
inline PyObject* find_in(nb::handle dict, nb::handle key) {
  PyObject* const found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (found == nullptr && PyErr_Occurred()) throw nb::python_error();
  return found;
}

// A function as METH_FASTCALL calls it.
using FastFunction = PyObject* (*)(PyObject* self, PyObject* const* given, Py_ssize_t num_given);

// The object that `function` returns; an exception of it becomes Python's.
template <class Function>
PyObject* returned(Function function) {
  try {
    return function().release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

inline PyMethodDef fast_method(const char* name, FastFunction function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL,
          nullptr};
}

// A constructor that fills in the members of a struct, in their order.
template <class Struct, class... Members>
auto filled_in() {
  return [](Struct* self, Members... members) { new (self) Struct{std::move(members)...}; };
}

template <class... Items>
nb::object tuple_of(const Items&... items) {
  return checked(PyTuple_Pack(sizeof...(items), items.ptr()...));
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
