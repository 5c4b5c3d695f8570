// The slots that a group's rounds go through: their first parts, and from the first larger call on
// whole ones; see layout.h.
#pragma once

#include <cstdint>

#include "rounds.h"

namespace meshdist {

class Slots {
 public:
  Slots(const Endpoint& endpoint, Rounds& rounds)
      : end_(endpoint), rounds_(rounds), are_whole_(endpoint.segment.geometry().grows == 0) {}

  bool are_whole() const { return are_whole_; }
  std::size_t bytes() const {
    const Geometry& geometry = end_.segment.geometry();
    return are_whole_ ? geometry.slot_bytes : geometry.first_slot_bytes;
  }
  std::uint8_t* at(unsigned member, std::uint64_t round) const {
    return end_.segment.slot(member, round, are_whole_);
  }

  // Whether there are larger ones to be had.
  bool may_grow() const { return !are_whole_ && !has_failed_; }

  // Switch to whole slots, all members together. If a member has no memory for them, the first parts stay in
  // use.
  Status grow(const Call& call) {
    const Status status = rounds_.wait_for_next(call, !end_.segment.reserve_slots());
    if (status != Status::ok) return status;
    are_whole_ = !rounds_.has_anyone_missed();
    has_failed_ = !are_whole_;
    return Status::ok;
  }

 private:
  const Endpoint& end_;
  Rounds& rounds_;
  bool are_whole_;
  bool has_failed_ = false;
};

}  // namespace meshdist
