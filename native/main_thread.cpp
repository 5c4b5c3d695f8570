#include "main_thread.h"

#include <pthread.h>

namespace meshdist {

// Called once; a forked child has another main thread.
void MainThread::note_in(const nb::list& under_way, unsigned long number) {
  under_way_ = nb::borrow(under_way).release().ptr();
  number_ = number;
  pthread_atfork(nullptr, nullptr, [] { number_ = PyThread_get_thread_ident(); });
}

}  // namespace meshdist
