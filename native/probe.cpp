#include "probe.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace meshdist {
namespace {

// The states last seconds to minutes, and a lap costs 10 to 40 us.
constexpr Nanoseconds kLapInterval = 20'000'000;
// Ranks that share cores cannot run laps, and measuring both ways costs them more.
constexpr Nanoseconds kCrowdedInterval = 1'000'000'000;
// Smaller calls take the same time in both ways.
constexpr std::size_t kWorthwhileBytes = 64 * 1024;
// Another program on these cores may have spoilt a measurement: the best of several counts.
constexpr Nanoseconds kMeasureInterval = 1'000'000'000;
constexpr Nanoseconds kNewInterval = 100'000'000;
constexpr double kForgetting = 1.1;
constexpr int kLaps = 16;
constexpr Nanoseconds kLapPatience = 20'000;  // then a member is not running now
constexpr int kTrials = 4;
constexpr std::size_t kTrialBytes = 128 * 1024;
// The same state measures within some per cent; the two states differ fourfold.
constexpr double kSameHop = 1.4;

}  // namespace

Probe::Probe(const Endpoint& endpoint, Rounds& rounds)
    : end_(endpoint), rounds_(rounds), kernels_(kernels()) {}

void Probe::consider(std::size_t bytes) {
  if (end_.rank != 0 || end_.size < 2 || bytes < kWorthwhileBytes) return;
  const Nanoseconds interval = end_.is_crowded ? kCrowdedInterval : kLapInterval;
  if (now_ns() - last_ > interval) rounds_.hints_ |= kHintProbeNext;
}

void Probe::heed(std::uint64_t round) {
  const std::uint32_t hints = rounds_.line(0, round).hints;
  if (hints & kHintProbeNext) is_due_ = true;
  end_.streams_into_slots.store((hints & kHintStream) != 0, std::memory_order_relaxed);
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
    if (seen != lap_) lap_ = last;  // it, or one before it, is not running: give up, and let go
    if (end_.rank == 0 && seen == lap_) best = std::min(best, now_ns() - start);
    if (end_.rank != 0 || lap_ == last) mine.store(lap_, std::memory_order_release);
  }
  return best == kForever ? 0.0 : static_cast<double>(best) / end_.size;
}

// Rounds of copies into slots and out of them, in turns of both kinds; the best of each.
Status Probe::measure_both(const Call& call, double& plain, double& streamed) {
  const std::size_t bytes =
      std::min<std::size_t>(kTrialBytes, end_.segment.geometry().slot_bytes);
  from_.resize(bytes);
  to_.resize(bytes);
  plain = streamed = HUGE_VAL;
  for (int kind = 0; kind < 2; ++kind) {
    for (int i = 0; i < kTrials; ++i) {
      const Nanoseconds start = now_ns();
      const std::uint64_t round = rounds_.next();
      if (kind == 0) {
        std::memcpy(end_.segment.slot(end_.rank, round), from_.data(), bytes);
      } else {
        kernels_.stream(end_.segment.slot(end_.rank, round), from_.data(), bytes);
      }
      rounds_.publish();
      const Status status = rounds_.wait(round, call);
      if (status != Status::ok) return status;
      const unsigned next = (end_.rank + 1) % end_.size;
      std::memcpy(to_.data(), end_.segment.slot(next, round), bytes);
      const double took = static_cast<double>(now_ns() - start);
      if (i == 0) continue;  // the slots still lie where the other kind, or the program, left them
      (kind == 0 ? plain : streamed) = std::min(kind == 0 ? plain : streamed, took);
    }
  }
  return Status::ok;
}

Status Probe::before(const Call& call) {
  if (!is_due_) return Status::ok;
  is_due_ = false;
  if (end_.size < 2) return Status::ok;
  // Start together; and learn from the first member, by a second round, what is to follow.
  std::uint64_t round = rounds_.next();
  rounds_.publish();
  Status status = rounds_.wait(round, call);
  if (status != Status::ok) return status;
  const double hop = end_.is_crowded ? 1.0 : hop_ns();
  round = rounds_.next();
  std::uint32_t hints = rounds_.hints_ & kHintStream;
  const auto ratio = [hop](const Known& one) { return std::max(hop / one.hop, one.hop / hop); };
  auto known = std::min_element(known_.begin(), known_.end(), [&](const Known& a, const Known& b) {
    return ratio(a) < ratio(b);
  });
  if (end_.rank == 0) {
    const bool was_lost = hop == 0.0 && !known_.empty();  // stay with what is known, try again later
    const bool is_new = known == known_.end() || ratio(*known) > kSameHop;
    if (!was_lost && known != known_.end()) {
      hints = known->streams() ? std::uint32_t{kHintStream} : 0u;
    }
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
    double plain = 0, streamed = 0;
    status = measure_both(call, plain, streamed);
    if (status != Status::ok) return status;
    if (end_.rank == 0) {
      if (known == known_.end()) {
        if (known_.size() >= 8) known_.erase(known_.begin());
        known = known_.insert(known_.end(), Known{std::max(hop, 1.0), plain, streamed, 0});
      }
      known->plain = std::min(known->plain * kForgetting, plain);
      known->streamed = std::min(known->streamed * kForgetting, streamed);
      known->measured = measured_ = now_ns();
      hints = known->streams() ? std::uint32_t{kHintStream} : 0u;
    }
  }
  rounds_.hints_ = hints & kHintStream;
  last_ = now_ns();
  return Status::ok;
}

}  // namespace meshdist
