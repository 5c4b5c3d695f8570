// All-to-all. A member sends through its own slots, which it divides into a lane for each receiving member.
// Lane widths are proportional to lengths, so that a member's lanes end in about the same round. All members
// know all lanes, because every member publishes its sizes.
//
// If all members exchange small parts of equal size, the parts are sent in the first round, which publishes
// the sizes, and no other round follows.
//
// In the first round all members wait for all. From the second round on, only members that exchange data wait
// for each other; a member that has finished its exchanges skips to the next call (layout.h explains why it
// may).
#include <algorithm>

#include "collectives.h"
#include "exchange.h"

namespace meshdist {
namespace {

// So many rounds after the last that has data for either, a member has seen that the other read its slots.
constexpr std::uint64_t kRoundsToRead = 2;

}  // namespace

Status Collectives::all_to_all(Job& job) {
  const unsigned n = end_.size;
  const unsigned me = end_.rank;
  const std::uint64_t announced = rounds_.next();
  const std::size_t part = job.ins[0].count * item_;  // where parts are even
  if (is_small_and_even(job)) {
    for (unsigned j = 0; j < n; ++j) {
      if (j != me) copy_in(slots_.at(me, announced) + j * part, job.ins[j].data, part);
    }
    rounds_.call_hints_ = kHintEven;
  }
  Status status = agree_on_sizes(job);
  if (status != Status::ok) return status;
  if (rounds_.everyone_hints(announced, kHintEven)) {
    for (unsigned j = 0; j < n; ++j) {
      const std::uint8_t* const from = j == me ? job.ins[me].data : slots_.at(j, announced) + me * part;
      if (job.outs[j].data != from) copy_out(job.outs[j].data, from, part);
    }
    return Status::ok;
  }
  const auto bytes_to = [&](unsigned j) { return given_[me * n + j] * item_; };
  const auto bytes_from = [&](unsigned j) { return given_[j * n + me] * item_; };
  const std::size_t longest = *std::max_element(given_.begin(), given_.end()) * item_;
  if (longest == 0) return Status::ok;
  std::size_t total = 0;
  for (unsigned j = 0; j < n; ++j) total += bytes_from(j);
  streams_out_ = total > tuning.stream_out_bytes;
  if (is_fetched(longest)) {
    bool is_done = true;
    for (unsigned j = 0; j < n; ++j) is_done &= fetch(job.outs[j].data, j, 0, bytes_from(j));
    status = finish_direct(job, is_done);
    if (status != Status::unsupported) return status;
  }
  lay_lanes();
  const auto write = [&](std::uint64_t i, std::uint64_t round) {
    for (unsigned j = 0; j < n; ++j) {
      const Lane& lane = lanes_[me * n + j];
      if (i >= lane.num_rounds) continue;
      const std::size_t start = i * lane.bytes;
      copy_in(slot(me, round) + lane.begin, job.ins[j].data + start,
              std::min(lane.bytes, bytes_to(j) - start));
    }
  };
  const auto read = [&](std::uint64_t i, std::uint64_t round) {
    for (unsigned j = 0; j < n; ++j) {
      const Lane& lane = lanes_[j * n + me];
      if (i >= lane.num_rounds) continue;
      const std::size_t start = i * lane.bytes;
      copy_out(job.outs[j].data + start, slot(j, round) + lane.begin,
               std::min(lane.bytes, bytes_from(j) - start));
    }
  };
  const std::uint64_t first = rounds_.next();
  const std::uint64_t behind = find_ends(first);
  const std::uint64_t end = *std::max_element(ends_.begin(), ends_.end());
  for (std::uint64_t round = first; round < end; ++round) {
    write(round - first, round);
    rounds_.publish();
    if (round == first) {  // while others write
      if (job.outs[me].data != job.ins[me].data) {
        copy_out(job.outs[me].data, job.ins[me].data, bytes_to(me));
      }
    } else {
      read(round - 1 - first, round - 1);
    }
    status = rounds_.wait(round, job.call, &ends_);
    if (status != Status::ok) return status;
  }
  read(end - 1 - first, end - 1);
  rounds_.go_on_with(behind);
  return Status::ok;
}

// So small that agreeing on the sizes makes no slot grow.
bool Collectives::is_small_and_even(const Job& job) const {
  const std::uint64_t count = job.ins[0].count;
  const auto is_even = [&](const Part& part) { return part.count == count; };
  const std::size_t bytes = count * item_;
  return end_.size > 1 && bytes < tuning.spread_bytes &&
         bytes * end_.size <= std::min(tuning.begun_most_bytes, slots_.bytes()) &&
         std::all_of(job.ins.begin(), job.ins.end(), is_even) &&
         std::all_of(job.outs.begin(), job.outs.end(), is_even);
}

// Give every pair of members a lane. All members find the same.
void Collectives::lay_lanes() {
  const unsigned n = end_.size;
  std::size_t most = 0;  // that one member gives, in lanes as wide as they can be
  for (unsigned i = 0; i < n; ++i) {
    std::size_t given = 0;
    for (unsigned j = 0; j < n; ++j) {
      const std::size_t bytes = i == j ? 0 : round_up(given_[i * n + j] * item_, kCacheLine);
      lanes_[i * n + j] = {0, bytes, bytes == 0 ? 0u : 1u};
      given += bytes;
    }
    most = std::max(most, given);
  }
  const std::size_t room = lay_out(1, most);
  for (unsigned i = 0; i < n; ++i) lay_side_by_side(&lanes_[i * n], room);
}

// Lay a member's lanes side by side. If they do not fit, give each lane its share of the cache lines, at
// least a single line, and take several rounds.
void Collectives::lay_side_by_side(Lane* lanes, std::size_t room) const {
  std::size_t total = 0, spare = room / kCacheLine;
  for (unsigned j = 0; j < end_.size; ++j) {
    total += lanes[j].bytes;
    spare -= lanes[j].num_rounds;
  }
  std::size_t at = 0;
  for (unsigned j = 0; j < end_.size; ++j) {
    Lane& lane = lanes[j];
    if (lane.num_rounds == 0) continue;
    if (total > room) {
      const std::size_t bytes = lane.bytes;
      lane.bytes = (1 + spare * (bytes / kCacheLine) / (total / kCacheLine)) * kCacheLine;
      lane.num_rounds = num_chunks(bytes, lane.bytes);
    }
    lane.begin = at;
    at += lane.bytes;
  }
}

// Set in which round, from `first` on, this member ceases to wait for each other member; return the
// round that follows the all-to-all on all members.
std::uint64_t Collectives::find_ends(std::uint64_t first) {
  const unsigned n = end_.size;
  const unsigned me = end_.rank;
  std::uint64_t most = 1;
  for (const Lane& lane : lanes_) most = std::max(most, lane.num_rounds);
  for (unsigned j = 0; j < n; ++j) {
    const std::uint64_t rounds = std::max(lanes_[me * n + j].num_rounds, lanes_[j * n + me].num_rounds);
    const std::uint64_t last = rounds == 0 ? 1 : std::min(most, rounds + kRoundsToRead);
    ends_[j] = first + last;
  }
  return first + most;
}

}  // namespace meshdist
