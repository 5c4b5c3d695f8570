#include "message_log.h"

namespace meshdist {
namespace {

constexpr std::uint64_t kWritten = 0, kRead = 1, kFirst = 2;  // words, in this order

std::uint64_t seal(std::uint64_t entry, std::uint64_t name) {
  return (((entry + 1) * 0x9e3779b97f4a7c15u ^ name) * 0xd6e8feb86659fd93u) >> 32;
}

}  // namespace

std::uint64_t MessageLog::note(std::uint64_t kind, std::uint64_t header) {
  find_theirs();
  Lane& lane = lanes_[kind];
  const std::uint64_t number = lane.count + 1;
  write({kind, number, header});
  read();  // before it counts: the other member has compared earlier numbers
  lane.count = number;
  std::deque<Ahead>& ahead = lanes_[kind ^ 1].ahead;
  while (!ahead.empty() && ahead.front().number < number) ahead.pop_front();
  bool differs = false;
  if (!ahead.empty() && ahead.front().number == number) {
    differs = ahead.front().header != header && !has_gaps_ && loose_.count(kind >> 1) == 0;
    ahead.pop_front();
  }
  wake_publisher();
  return differs && is_true(call_with(is_current_)) ? number : 0;
}

bool MessageLog::is_plain(std::uint64_t tag) {
  find_theirs();
  drain();
  return theirs_.are_known() && backlog_.empty() && has_room() && !has_gaps_ && loose_.count(tag) == 0;
}

void MessageLog::note_any(std::uint64_t tag) {
  find_theirs();
  if (!loose_.insert(tag).second) return;
  write({tag << 1 | 1, 0, 0});
  wake_publisher();
}

bool MessageLog::publish() {
  const bool is_read = backlog_.empty() || is_true(call_with(is_alive_));
  if (!is_read) backlog_.clear();
  drain();
  return backlog_.empty();
}

void MessageLog::find_theirs() {
  if (theirs_.are_known()) return;
  nb::object found = call_with(find_theirs_);
  if (!found.is_none() && !theirs_.are_known()) theirs_ = Words(std::move(found));
}

// A member whose words are not known here may not read this one's either.
bool MessageLog::has_room() const {
  return num_mine_ < num_entries_ || !theirs_.are_known() || num_mine_ < theirs_.get(kRead) + num_entries_;
}

void MessageLog::drain() {
  while (!backlog_.empty() && has_room()) {
    put(backlog_.front());
    backlog_.pop_front();
  }
}

void MessageLog::write(const Entry& entry) {
  drain();
  if (backlog_.empty() && has_room()) {
    put(entry);
  } else {
    backlog_.push_back(entry);
  }
}

void MessageLog::put(const Entry& entry) {
  const std::uint64_t place = kFirst + 2 * (num_mine_ % num_entries_);
  const std::uint64_t name = entry.kind << 32 | (entry.number & kLow);
  mine_.put(place, name);
  mine_.put(place + 1, seal(num_mine_, name) << 32 | entry.header);
  mine_.set(kWritten, ++num_mine_);
}

void MessageLog::read() {
  if (!theirs_.are_known()) return;
  std::uint64_t written = theirs_.get(kWritten);
  if (written == num_read_) return;
  if (written - num_read_ > num_entries_) {
    has_gaps_ = true;
    num_read_ = written - num_entries_;
  }
  for (; num_read_ < written; ++num_read_) {
    const std::uint64_t place = kFirst + 2 * (num_read_ % num_entries_);
    const std::uint64_t name = theirs_.get(place), word = theirs_.get(place + 1);
    if (word >> 32 == seal(num_read_, name)) {
      take(name >> 32, name & kLow, word & kLow);
    } else if (theirs_.get(kWritten) - num_read_ >= num_entries_) {  // overwritten meanwhile
      has_gaps_ = true;
    } else {  // not all of it has arrived yet
      break;
    }
  }
  mine_.put(kRead, num_read_);
}

void MessageLog::take(std::uint64_t kind, std::uint64_t number, std::uint64_t header) {
  if (number == 0) {
    loose_.insert(kind >> 1);
    return;
  }
  if (number > lanes_[kind ^ 1].count) lanes_[kind].ahead.push_back({number, header});
}

void MessageLog::wake_publisher() const {
  if (!backlog_.empty()) call_with(publish_later_);
}

}  // namespace meshdist
