// The rounds that all collectives are made of; layout.h says why four of everything suffice.
#pragma once

#include <cstdint>
#include <vector>

#include "endpoint.h"

namespace meshdist {

// One collective as this member calls it.
struct Call {
  Header header;
  Nanoseconds deadline = kForever;
  Interruption interruption = nullptr;
  bool stays_in_flight = false;  // where its wait is interrupted, for a later wait
};

class Rounds {
 public:
  explicit Rounds(const Endpoint& endpoint) : end_(endpoint) {}

  // The round that is published next.
  std::uint64_t next() const { return next_; }
  Line& line(unsigned member, std::uint64_t round) const {
    return end_.segment.member(member).lines[round % kDepth];
  }

  // Publish a call's first round, with the data written for it.
  void announce(Call& call) {
    call.header.sequence = ++sequence_;
    Line& mine = line(end_.rank, next_);
    mine.header = call.header;
    mine.hints = hints_ | call_hints_;
    call_hints_ = 0;
    publish();
  }

  // Publish the next round, with the data written for it.
  void publish() {
    const std::uint32_t mine = stamp(next_);
    line(end_.rank, next_).flag.store(mine, std::memory_order_seq_cst);
    ++next_;
    for (unsigned j = 0; j < end_.size; ++j) {
      if (j != end_.rank) {
        ring_if_awaited(end_.segment.member(j).seats[kForRounds], static_cast<std::int32_t>(end_.rank), mine);
      }
    }
  }

  // For rounds that only some members need: for each member the first round in which it is waited
  // for no longer. Null where every round waits for all.
  using Ends = std::vector<std::uint64_t>;

  // Wait until all members, or the members in `ends`, have published `round`.
  Status wait(std::uint64_t round, const Call& call, const Ends* ends = nullptr) {
    for (unsigned j = 0; j < end_.size; ++j) {
      if (is_awaited(j, round, ends) && !has_published(j, round)) {
        const Status status = wait_for(j, round, call, ends);
        if (status != Status::ok) return status;
      }
    }
    return Status::ok;
  }

  // Publish the next round and whether this member failed in a step that all members need; wait for all.
  Status wait_for_next(const Call& call, bool has_missed = false) {
    line(end_.rank, next_).hints = has_missed ? kHintMissed : 0u;
    publish();
    return wait(next_ - 1, call);
  }
  // Whether any member has published so in that round.
  bool has_anyone_missed() const {
    for (unsigned j = 0; j < end_.size; ++j) {
      if ((line(j, next_ - 1).hints & kHintMissed) != 0) return true;
    }
    return false;
  }

  // Skip to a later round, which all members will run; others may still run those before it.
  void go_on_with(std::uint64_t round) { next_ = round; }

  // Wait for everyone's announcement in `round` and compare. If calls differ, all members detect that in this
  // round, and none continues: the communicator stays usable.
  Status agree(std::uint64_t round, const Call& call) {
    const Status status = wait(round, call);
    if (status != Status::ok) return status;
    for (unsigned j = 0; j < end_.size; ++j) {
      if (line(j, round).header == call.header) continue;
      layouts_differ = find_layouts_differ(round);
      return Status::mismatch;
    }
    return Status::ok;
  }

  // Whether all members have published `round`.
  bool is_complete(std::uint64_t round) const {
    for (unsigned j = 0; j < end_.size; ++j) {
      if (j != end_.rank && !has_published(j, round)) return false;
    }
    return true;
  }

  // Whether they have, or it is clear that a member never will.
  bool is_settled(std::uint64_t round) const {
    return is_complete(round) || end_.is_over() || find_gone(0, end_.size, round, nullptr) >= 0;
  }

  // Of the last mismatch: whether the calls may differ in the order of the elements alone. All
  // members find the same.
  bool layouts_differ = false;

  // Whether all members have published `round`, which all have, with `hint`.
  bool everyone_hints(std::uint64_t round, std::uint32_t hint) const {
    for (unsigned j = 0; j < end_.size; ++j) {
      if ((line(j, round).hints & hint) == 0) return false;
    }
    return true;
  }

  // What the last failing call saw.
  Failure failure;

  // Make `failure` of a call that ended with `status` in `round`.
  void describe(Status status, std::uint64_t round);

  // The hints in every announcement of this member; others read the first member's alone.
  std::uint32_t hints_ = 0;
  // The hints in only its next announcement; the other members read the hints of all members.
  std::uint32_t call_hints_ = 0;

 private:
  static std::uint32_t stamp(std::uint64_t round) { return static_cast<std::uint32_t>(round + 1); }
  bool has_published(unsigned member, std::uint64_t round) const {
    return is_reached(line(member, round).flag.load(std::memory_order_seq_cst), stamp(round));
  }
  bool is_awaited(unsigned member, std::uint64_t round, const Ends* ends) const {
    return member != end_.rank && (ends == nullptr || round < (*ends)[member]);
  }
  Status wait_for(unsigned member, std::uint64_t round, const Call& call, const Ends* ends);
  bool find_layouts_differ(std::uint64_t round) const;
  int find_gone(unsigned begin, unsigned end, std::uint64_t round, const Ends* ends) const;

  const Endpoint& end_;
  std::uint64_t next_ = 0;
  std::uint32_t sequence_ = 0;
  int culprit_ = -1;
};

}  // namespace meshdist
