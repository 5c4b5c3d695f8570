// How a thread waits for another process: a short spin, yields while no other program wants the core,
// then a sleep on a futex. Now and then it checks the clock, the communicator's end, and whether the
// members that it waits for still live.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>

#include "layout.h"

namespace meshdist {

using Nanoseconds = std::int64_t;

inline Nanoseconds now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * Nanoseconds{1000000000} + t.tv_nsec;
}

// Called now and then by a thread of the program that waits: whether Ctrl-C interrupts it.
using Interruption = bool (*)();

constexpr Nanoseconds kForever = INT64_MAX;

inline Nanoseconds deadline_after(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return kForever;
  return now_ns() + static_cast<Nanoseconds>(seconds * 1e9);
}

// How long it is until a deadline; not positive once it has passed.
inline Nanoseconds left_until(Nanoseconds deadline) {
  return deadline == kForever ? kForever : deadline - now_ns();
}

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // yield does nothing on most cores
#endif
}

// For a thread of the core's own: signals are the program's.
void block_signals();

// Sleep while `word` holds `expected`, for at most `limit`.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, Nanoseconds limit);
void futex_wake_all(std::atomic<std::uint32_t>& word);

// Wake the threads that sleep on `seat`, whatever they wait for.
inline void ring(Seat& seat) {
  seat.doorbell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(seat.doorbell);
}

// Whether a 32-bit count that wraps around has reached `wanted`.
inline bool is_reached(std::uint32_t count, std::uint32_t wanted) {
  return static_cast<std::int32_t>(count - wanted) >= 0;
}

// Wake the sleepers that wait for `member`. Call it after the change was stored sequentially consistent: a
// sleeper counts itself first and then looks at the change, so either the sleeper or the caller sees the
// other.
inline void ring_if_awaited(Seat& seat, std::int32_t member) {
  if (seat.sleepers.load(std::memory_order_seq_cst) == 0) return;
  const std::int32_t awaited = seat.awaited.load(std::memory_order_seq_cst);
  if (awaited == member || awaited == kAnyone) ring(seat);
}

// The same for a sleeper that waits for one round of a member, which has published a round.
inline void ring_if_awaited(Seat& seat, std::int32_t member, std::uint32_t stamp) {
  if (seat.sleepers.load(std::memory_order_seq_cst) == 0) return;
  if (seat.awaited.load(std::memory_order_seq_cst) != member) return;
  if (is_reached(stamp, seat.awaited_stamp.load(std::memory_order_seq_cst))) ring(seat);
}

// How long to look before sleeping.
struct Patience {
  Nanoseconds spin;   // on the core: good if the awaited member runs on another core
  Nanoseconds yield;  // yielding the core: good if the awaited member shares this core

  // Measured on 2 cores: a sleep and its wake-up cost 5 to 30 us, so spinning for about that long costs at
  // most twice the best. Two ranks that wake each other end up on the same core, and stay there as long as
  // they sleep, since the kernel moves only runnable threads. So yield before sleeping, which switches in 1
  // to 2 us until the other core has fetched one of the two (all-reduces of 8 bytes in bursts took 2 to 257
  // us, one in six above 60; with yields 2 to 22).
  static Patience usual() { return {20'000, 1'000'000}; }
  // With more ranks than cores the one awaited may need this very core: a pause would only hold it up.
  static Patience crowded() { return {0, 100'000}; }
};

// Whether other programs need the cores of this process's threads. A thread that yields its core while it
// waits measures this for all threads.
class CoreDemand {
 public:
  // The time until which a waiting thread should sleep immediately: a thread that only yields is scheduled
  // after each computing program, which takes milliseconds, while a sleeper runs when it is woken.
  bool is_high(Nanoseconds now) const { return now < until_.load(std::memory_order_relaxed); }

  // A thread that gave its core away got it back after so long.
  void note(Nanoseconds now, Nanoseconds gone) {
    if (gone < kForeignTurn) return;
    const Nanoseconds last = rest_.load(std::memory_order_relaxed);
    const bool is_soon = now - until_.load(std::memory_order_relaxed) < last;
    const Nanoseconds rest = is_soon ? std::min(kLongestRest, 4 * last) : kShortestRest;
    rest_.store(rest, std::memory_order_relaxed);
    until_.store(now + rest, std::memory_order_relaxed);
  }

 private:
  // A rank that shares the core hands over in some microseconds, unless it computes; a program that
  // computes does when its slice is over: 1 to 4 ms.
  static constexpr Nanoseconds kForeignTurn = 500'000;
  // To try again costs a few time slices. So the first rest is short, since most turns are turns of the
  // system's threads, and it grows if turns follow each other quickly.
  static constexpr Nanoseconds kShortestRest = 50'000'000;
  static constexpr Nanoseconds kLongestRest = 10'000'000'000;

  std::atomic<Nanoseconds> until_{0};
  std::atomic<Nanoseconds> rest_{0};
};

inline CoreDemand core_demand;

// How often a small call looks for the others before it lets other threads of the program go on: some 2 us.
constexpr unsigned kLooks = 64;

// A sleeper wakes this often to check the clock, and whether the awaited members still live.
constexpr Nanoseconds kSlice = 100'000'000;

// Look until `ready()`, at first without sleeping. `is_over()` is looked at now and then.
// Returns whether it was ready or over; afterwards the caller sleeps.
template <class Ready, class IsOver>
bool look(const Patience& patience, Ready ready, IsOver is_over) {
  if (ready()) return true;
  if (patience.spin > 0) {
    const Nanoseconds end = now_ns() + patience.spin;
    do {
      for (int i = 0; i < 64; ++i) {
        pause_core();
        if (ready()) return true;
      }
      if (is_over()) return true;
    } while (now_ns() < end);
  }
  Nanoseconds now = now_ns();
  const Nanoseconds end = now + patience.yield;
  while (now < end && !core_demand.is_high(now)) {
    sched_yield();
    const Nanoseconds back = now_ns();
    core_demand.note(back, back - now);
    if (ready() || is_over()) return true;
    now = now_ns();  // looking may be work: a message's pieces are copied there
  }
  return is_over();
}

// Sleep once on `seat` until `member` rings, or `limit` has passed, unless `ready()` or `is_over()`.
template <class Ready, class IsOver>
void doze(Seat& seat, std::int32_t member, Nanoseconds limit, Ready ready, IsOver is_over) {
  const std::uint32_t rings = seat.doorbell.load(std::memory_order_seq_cst);
  seat.awaited.store(member, std::memory_order_seq_cst);
  seat.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (!ready() && !is_over()) futex_wait(seat.doorbell, rings, limit);
  seat.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace meshdist
