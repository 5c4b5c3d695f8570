#include "probe.h"

#include <algorithm>
#include <cstring>

namespace meshdist {
namespace {

// The states last seconds to minutes, and a lap costs 10 to 40 us.
constexpr Nanoseconds kLapInterval = 20'000'000;
// Ranks that share cores cannot run laps, and measuring both ways costs them more.
constexpr Nanoseconds kCrowdedInterval = 1'000'000'000;
// Smaller calls take the same time in both ways.
constexpr std::size_t kWorthwhileBytes = 4 * 1024;
// Another program on these cores may have spoilt a measurement: the best of several counts.
constexpr Nanoseconds kMeasureInterval = 1'000'000'000;
constexpr Nanoseconds kNewInterval = 100'000'000;
constexpr double kForgetting = 1.1;
// Ranks that share cores know of a change by these measurements alone.
constexpr double kCrowdedForgetting = 1.5;
constexpr int kLaps = 16;
constexpr Nanoseconds kLapPatience = 20'000;  // then a member is not running now
constexpr int kTrials = 8;
constexpr int kCrowdedTrials = 3;
constexpr std::size_t kLittleTrialBytes = 8 * 1024;
constexpr std::size_t kMuchTrialBytes = 128 * 1024;
// The same state measures within some per cent; the two states differ threefold.
constexpr double kSameHop = 1.4;
// If the cores share no cache, stores past the cache take a quarter of the time. If they do, plain stores
// take half of it, but on a busy machine the same time: so only a clear result counts.
constexpr double kClearly = 0.6;

}  // namespace

Probe::Probe(const Endpoint& endpoint, Rounds& rounds, const Slots& slots)
    : end_(endpoint), rounds_(rounds), slots_(slots) {}

bool Probe::Times::streams() const { return streamed < kClearly * plain; }

void Probe::Times::learn(const Times& now, double forgetting) {
  plain = std::min(plain * forgetting, now.plain);
  streamed = std::min(streamed * forgetting, now.streamed);
}

std::uint32_t Probe::Known::hints() const {
  return (little.streams() ? kHintStreamLittle : 0u) | (much.streams() ? kHintStreamMuch : 0u);
}

void Probe::consider(std::size_t bytes) {
  if (end_.rank != 0 || end_.size < 2 || bytes < kWorthwhileBytes) return;
  const Nanoseconds interval = end_.is_crowded ? kCrowdedInterval : kLapInterval;
  if (now_ns() - last_ > interval) rounds_.hints_ |= kHintProbeNext;
}

void Probe::heed(std::uint64_t round) {
  const std::uint32_t hints = rounds_.line(0, round).hints;
  if (hints & kHintProbeNext) is_due_ = true;
  end_.streams_little.store((hints & kHintStreamLittle) != 0, std::memory_order_relaxed);
  end_.streams_much.store((hints & kHintStreamMuch) != 0, std::memory_order_relaxed);
}

// Pass a token round all members: nanoseconds from one core to the next, at best; 0 if it was lost.
double Probe::hop_ns() {
  const unsigned before = (end_.rank + end_.size - 1) % end_.size;
  std::atomic<std::uint64_t>& mine = end_.me().token;
  std::atomic<std::uint64_t>& theirs = end_.segment.member(before).token;
  const std::uint64_t last = lap_ + kLaps;
  Nanoseconds best = kForever;
  while (lap_ < last) {
    ++lap_;
    const Nanoseconds start = now_ns();
    if (end_.rank == 0) mine.store(lap_, std::memory_order_release);
    std::uint64_t seen;
    for (unsigned spins = 1; (seen = theirs.load(std::memory_order_acquire)) < lap_; ++spins) {
      if (spins % 256 == 0 && now_ns() - start > kLapPatience) break;
    }
    if (seen != lap_) lap_ = last;  // it, or one before it, is not running: give up
    if (end_.rank == 0 && seen == lap_) best = std::min(best, now_ns() - start);
    if (end_.rank != 0 || lap_ == last) mine.store(lap_, std::memory_order_release);
  }
  return best == kForever ? 0.0 : static_cast<double>(best) / end_.size;
}

// One round as collectives do it: copy into the slot, publish, wait, copy out of the next member's slot. If
// ranks share cores, only the copies are timed, since waits then take arbitrary time.
Status Probe::time_round(const Call& call, bool streams, std::size_t bytes, double& took) {
  const std::uint64_t round = rounds_.next();
  const std::size_t num_places = slots_.bytes() / bytes;
  const std::size_t at = round / kDepth % num_places * bytes;
  const Nanoseconds begin_in = now_ns();
  copy_bytes(slots_.at(end_.rank, round) + at, from_.data(), bytes, streams);
  const Nanoseconds end_in = now_ns();
  rounds_.publish();
  const Status status = rounds_.wait(round, call);
  if (status != Status::ok) return status;
  const Nanoseconds begin_out = now_ns();
  const unsigned next = (end_.rank + 1) % end_.size;
  std::memcpy(to_.data(), slots_.at(next, round) + at, bytes);
  const Nanoseconds waited = end_.is_crowded ? begin_out - end_in : 0;
  took = static_cast<double>(now_ns() - begin_in - waited);
  return Status::ok;
}

// Both kinds of stores, with much and with little; the best of some rounds each.
Status Probe::measure_both(const Call& call, Times& little, Times& much) {
  const std::size_t slot_bytes = slots_.bytes();
  const std::size_t much_bytes = std::min(kMuchTrialBytes, slot_bytes);
  const std::size_t little_bytes = std::min(kLittleTrialBytes, slot_bytes);
  from_.resize(much_bytes);
  to_.resize(much_bytes);
  // The slots lie where the other kind, or the program, has left them: go round them once.
  const int num_cold = static_cast<int>(kDepth * (slot_bytes / much_bytes));
  // Ranks that share cores pay for every round.
  const int num_trials = end_.is_crowded ? kCrowdedTrials : kTrials;
  // The best of `num_trials` rounds, after `num_first` rounds that do not count.
  const auto measure = [&](bool streams, std::size_t bytes, int num_first, double& best) {
    for (int i = 0; i < num_first + num_trials; ++i) {
      double took = 0;
      const Status status = time_round(call, streams, bytes, took);
      if (status != Status::ok) return status;
      if (i >= num_first) best = std::min(best, took);
    }
    return Status::ok;
  };
  for (const bool streams : {false, true}) {
    Status status = measure(streams, much_bytes, num_cold, streams ? much.streamed : much.plain);
    if (status == Status::ok && !end_.is_crowded) {
      status = measure(streams, little_bytes, 0, streams ? little.streamed : little.plain);
    }
    if (status != Status::ok) return status;
  }
  if (end_.is_crowded) little = much;
  return Status::ok;
}

Status Probe::before(const Call& call) {
  if (is_idle()) return Status::ok;
  is_due_ = false;
  if (end_.size < 2) return Status::ok;
  // Start together. A second round publishes the first member's decision.
  Status status = rounds_.wait_for_next(call);
  if (status != Status::ok) return status;
  const double hop = end_.is_crowded ? 1.0 : hop_ns();
  const std::uint64_t round = rounds_.next();
  std::uint32_t hints = rounds_.hints_ & (kHintStreamLittle | kHintStreamMuch);
  const auto ratio = [hop](const Known& one) { return std::max(hop / one.hop, one.hop / hop); };
  auto known = std::min_element(known_.begin(), known_.end(),
                                [&](const Known& a, const Known& b) { return ratio(a) < ratio(b); });
  if (end_.rank == 0) {
    const bool was_lost = hop == 0.0 && !known_.empty();  // keep the known result, retry later
    const bool is_new = known == known_.end() || ratio(*known) > kSameHop;
    if (!was_lost && known != known_.end()) hints = known->hints();
    // A busy machine makes every lap look new: the nearest will do meanwhile.
    const Nanoseconds wait = is_new ? kNewInterval : kMeasureInterval;
    const Nanoseconds since = is_new ? measured_ : known->measured;
    if (known_.empty() || (!was_lost && now_ns() - since > wait)) hints |= kHintMeasureBoth;
    if (is_new) known = known_.end();
    rounds_.line(0, round).hints = hints;
  }
  rounds_.publish();
  status = rounds_.wait(round, call);
  if (status != Status::ok) return status;
  if (rounds_.line(0, round).hints & kHintMeasureBoth) {
    Times little, much;
    status = measure_both(call, little, much);
    if (status != Status::ok) return status;
    if (end_.rank == 0) {
      if (known == known_.end()) {
        if (known_.size() >= 8) known_.erase(known_.begin());
        known = known_.insert(known_.end(), Known{std::max(hop, 1.0), little, much, 0});
      }
      const double forgetting = end_.is_crowded ? kCrowdedForgetting : kForgetting;
      known->little.learn(little, forgetting);
      known->much.learn(much, forgetting);
      known->measured = measured_ = now_ns();
      hints = known->hints();
    }
  }
  rounds_.hints_ = hints & (kHintStreamLittle | kHintStreamMuch);
  last_ = now_ns();
  return Status::ok;
}

}  // namespace meshdist
