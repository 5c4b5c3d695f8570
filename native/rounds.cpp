#include "rounds.h"

namespace meshdist {

Status Rounds::wait_for(unsigned member, std::uint64_t round, const Call& call, const Ends* ends) {
  const auto ready = [&] { return has_published(member, round); };
  const auto is_over = [&] { return end_.is_over(); };
  Seat& seat = end_.me().seats[kForRounds];
  unsigned end = member + 1;
  for (;;) {
    if (look(end_.patience, ready, is_over)) return ready() ? Status::ok : end_.over_status();
    const int gone = find_gone(member, end, round, ends);
    if (gone >= 0) {
      if (end_.is_over()) return end_.over_status();
      culprit_ = gone;
      end_.end(Status::died, culprit_);
      return Status::died;
    }
    const Nanoseconds left = left_until(call.deadline);
    if (left <= 0) {
      end_.end(Status::timeout);
      return Status::timeout;
    }
    if (call.interruption != nullptr && call.interruption()) {
      if (!call.stays_in_flight) {
        end_.end(Status::interrupted, static_cast<int>(end_.rank));  // half done: no member can go on
      }
      return Status::interrupted;
    }
    seat.awaited_stamp.store(stamp(round), std::memory_order_seq_cst);
    doze(seat, static_cast<std::int32_t>(member), left < kSlice ? left : kSlice, ready, is_over);
    end = end_.size;  // from now on look at all members: an exited member never publishes
  }
}

// A member from `begin` to `end` that is awaited, has gone, and will not publish `round`; else -1.
int Rounds::find_gone(unsigned begin, unsigned end, std::uint64_t round, const Ends* ends) const {
  for (unsigned j = begin; j < end; ++j) {
    if (!is_awaited(j, round, ends)) continue;
    // In this order: it may publish and go meanwhile.
    if (end_.is_gone(j) && !has_published(j, round)) return static_cast<int>(j);
  }
  return -1;
}

bool Rounds::find_layouts_differ(std::uint64_t round) const {
  bool has_layout = false;
  for (unsigned j = 0; j < end_.size; ++j) {
    const Header& header = line(j, round).header;
    if (!header.is_alike(line(0, round).header)) return false;
    has_layout |= header.layout != 0;
  }
  return has_layout;
}

void Rounds::describe(Status status, std::uint64_t round) {
  failure = end_.failure(status, status == Status::died ? culprit_ : -1);
  if (status != Status::mismatch) return;
  for (unsigned j = 0; j < end_.size && failure.culprit < 0; ++j) {
    if (line(j, round).header != line(0, round).header) failure.culprit = static_cast<int>(j);
  }
}

}  // namespace meshdist
