#include "waiting.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace meshdist {

void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, Nanoseconds limit) {
  if (limit <= 0) return;
  timespec span;
  span.tv_sec = limit / 1000000000;
  span.tv_nsec = limit % 1000000000;
  // Not private: the word is shared between processes.
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &span, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace meshdist
