#include "waiting.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <mutex>

namespace meshdist {

namespace {

std::mutex changing;
std::atomic<Nanoseconds> paused_since{0};  // 0: it runs
std::atomic<Nanoseconds> paused_for{0};

}  // namespace

// A thread that reads while it changes may be a slice early or late, no more.
Nanoseconds timeout_now() {
  const Nanoseconds since = paused_since.load(std::memory_order_acquire);
  return (since != 0 ? since : now_ns()) - paused_for.load(std::memory_order_acquire);
}

void let_timeouts_stand(bool stand) {
  const std::lock_guard<std::mutex> lock(changing);
  const Nanoseconds since = paused_since.load(std::memory_order_relaxed);
  if (stand == (since != 0)) return;
  if (stand) {
    paused_since.store(now_ns(), std::memory_order_release);
  } else {
    paused_for.fetch_add(now_ns() - since, std::memory_order_release);
    paused_since.store(0, std::memory_order_release);
  }
}

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
