// Find which stores suit the path between the members: plain stores, or stores past the cache.
//
// If the cores share a cache, plain stores into a slot are twice as fast as stores past it, since the reader
// finds them in the cache. If not, every line of a slot that is written again is first fetched from the
// reader's cache, and plain stores are five times slower. Virtual machines change from one case to the other
// while a program runs. So the members measure both kinds at the first call with whole slots, within a
// millisecond, with rounds of few bytes and of many (few stay in the cores' own caches), and record how long
// a cache line takes from core to core. They repeat this last measurement every now and then, in some
// microseconds. Only if its result is new, or was last seen a second ago, do they measure both kinds again.
#pragma once

#include <cmath>
#include <vector>

#include "kernels.h"
#include "rounds.h"
#include "slots.h"

namespace meshdist {

// Rounds of less than this are little, with which the two kinds may differ otherwise: little stays
// in the cores' own caches.
constexpr std::size_t kLargeBytes = 16 * 1024;

class Probe {
 public:
  Probe(const Endpoint& endpoint, Rounds& rounds, const Slots& slots);

  // Before each call with whole slots: probe, if the first member requested it with the last one (or
  // there was none).
  Status before(const Call& call);
  // Whether it does nothing now.
  bool is_idle() const { return !is_due_ || !slots_.are_whole(); }

  // On the first member: request a probe with this call, of `bytes` bytes, if the last is old.
  void consider(std::size_t bytes);

  // Use the first member's result, after the members agreed on a call.
  void heed(std::uint64_t round);

 private:
  struct Times {  // the best of both kinds; old results lose weight
    double plain = HUGE_VAL, streamed = HUGE_VAL;
    void learn(const Times& now, double forgetting);
    bool streams() const;
  };
  struct Known {
    double hop;
    Times little, much;
    Nanoseconds measured;
    std::uint32_t hints() const;
  };

  Status time_round(const Call& call, bool streams, std::size_t bytes, double& took);
  Status measure_both(const Call& call, Times& little, Times& much);
  double hop_ns();

  const Endpoint& end_;
  Rounds& rounds_;
  const Slots& slots_;
  std::vector<std::uint8_t> from_, to_;
  std::vector<Known> known_;
  bool is_due_ = true;
  std::uint64_t lap_ = 0;
  Nanoseconds last_ = 0;
  Nanoseconds measured_ = 0;
};

}  // namespace meshdist
