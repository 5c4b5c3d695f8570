// The collective that the main thread is in, as Python records it. If a signal handler then calls another
// collective, Python rejects that.
#pragma once

#include <pthread.h>

#include "objects.h"

namespace meshdist {

class MainThread {
 public:
  // Notes go into `under_way`, a list of the collective, or of None. `number` is the thread's; a forked child has
  // another main thread. Called once.
  static void note_in(const nb::list& under_way, unsigned long number) {
    under_way_ = nb::borrow(under_way).release().ptr();
    number_ = number;
    pthread_atfork(nullptr, nullptr, [] { number_ = PyThread_get_thread_ident(); });
  }

  static bool is_here() { return PyThread_get_thread_ident() == number_; }

  // Whether this thread is in a collective already.
  static bool is_nested() { return PyList_GetItem(under_way_, 0) != Py_None && is_here(); }

  // Notes `operation` as long as it lives, on the main thread.
  class Within {
   public:
    explicit Within(nb::handle operation) : is_noted_(is_here()) {
      if (is_noted_) note(operation);
    }
    ~Within() {
      if (is_noted_) note(nb::none());
    }
    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;

   private:
    const bool is_noted_;
  };

 private:
  static void note(nb::handle operation) { PyList_SetItem(under_way_, 0, nb::borrow(operation).release().ptr()); }

  static inline PyObject* under_way_ = nullptr;  // kept as long as the process lives
  static inline unsigned long number_ = 0;
};

}  // namespace meshdist
