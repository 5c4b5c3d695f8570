#include "waiting.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace meshdist {

void yield_core() { sched_yield(); }

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

bool has_exited(int pidfd) {
  if (pidfd < 0) return false;
  pollfd query{pidfd, POLLIN, 0};
  return poll(&query, 1, 0) == 1 && (query.revents & (POLLIN | POLLHUP)) != 0;
}

}  // namespace meshdist
