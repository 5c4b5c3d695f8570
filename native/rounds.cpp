#include "rounds.h"

namespace meshdist {

Status Rounds::wait_for(unsigned member, std::uint64_t round, const Call& call) {
  const auto ready = [&] { return has_published(member, round); };
  const auto is_over = [&] { return end_.is_over(); };
  for (;;) {
    if (look(end_.patience, ready, is_over)) return ready() ? Status::ok : end_.over_status();
    // Members that were looked at before may also be dead; but they have published this round.
    if (end_.is_gone(member) && !ready()) {
      if (end_.is_over()) return end_.over_status();
      culprit_ = static_cast<int>(member);
      end_.end(Status::died, culprit_);
      return Status::died;
    }
    const Nanoseconds left = left_until(call.deadline);
    if (left <= 0) {
      end_.end(Status::timeout);
      return Status::timeout;
    }
    if (call.interruption != nullptr && call.interruption()) {
      end_.end(Status::interrupted);  // half done: no member can go on
      return Status::interrupted;
    }
    doze(end_.me().seats[kForRounds], static_cast<std::int32_t>(member),
         left < kSlice ? left : kSlice, ready, is_over);
  }
}

void Rounds::describe(Status status, std::uint64_t round) {
  failure = end_.failure(status, status == Status::died ? culprit_ : -1);
  if (status != Status::mismatch) return;
  for (unsigned j = 0; j < end_.size && failure.culprit < 0; ++j) {
    if (line(j, round).header != line(0, round).header) failure.culprit = static_cast<int>(j);
  }
}

}  // namespace meshdist
