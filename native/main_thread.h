// The verb that the main thread is in, as Python notes it: one that a signal's handler calls meanwhile is
// refused, in Python.
#pragma once

#include "objects.h"

namespace meshdist {

class MainThread {
 public:
  // `under_way` is a list of one: the verb, or None. `number` is the thread's.
  MainThread(nb::list under_way, unsigned long number)
      : number(number), under_way_(std::move(under_way)) {}

  bool is_here() const { return PyThread_get_thread_ident() == number; }

  // Whether this thread is in a verb already.
  bool is_nested() const { return PyList_GetItem(under_way_.ptr(), 0) != Py_None && is_here(); }

  // Notes `verb` as long as it lives, on the main thread.
  class Within {
   public:
    Within(const MainThread& thread, nb::handle verb) : thread_(thread), is_noted_(thread.is_here()) {
      if (is_noted_) thread_.note(verb);
    }
    ~Within() {
      if (is_noted_) thread_.note(nb::none());
    }
    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;

   private:
    const MainThread& thread_;
    const bool is_noted_;
  };

  unsigned long number;

 private:
  void note(nb::handle verb) const {
    PyList_SetItem(under_way_.ptr(), 0, nb::borrow(verb).release().ptr());
  }

  nb::list under_way_;
};

}  // namespace meshdist
