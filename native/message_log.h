// The messages between this member and one other, as both note them: see `MessageLog` in
// `meshdist.runtime.message_log`, which this does faster.
//
// Python is asked before anything changes, or after all has, so that no other thread comes between.
#pragma once

#include <deque>
#include <unordered_map>
#include <unordered_set>

#include "words.h"

namespace meshdist {

class MessageLog {
 public:
  // As the one in Python; `num_entries` of one member can be ahead of the other.
  MessageLog(nb::object mine, nb::object find_theirs, nb::object is_current, nb::object is_alive,
             nb::object publish_later, std::uint64_t num_entries);

  // Note one transfer of a kind; returns its number where its counterpart is there and differs,
  // else 0.
  std::uint64_t note(std::uint64_t kind, std::uint64_t header);

  // Whether `note` needs nobody but the two members for this tag.
  bool is_plain(std::uint64_t tag);

  bool has_sent(std::uint64_t tag);
  bool sees_sends(std::uint64_t tag);
  void note_any(std::uint64_t tag);
  bool publish();
  std::size_t num_waiting() const { return backlog_.size(); }

 private:
  struct Entry {
    std::uint64_t kind, number, header;
  };
  struct Ahead {
    std::uint64_t number, header;
  };
  struct Lane {
    std::uint64_t count = 0;   // of this member's
    std::uint64_t latest = 0;  // of the other's
    std::deque<Ahead> ahead;   // of the other's, those that have no counterpart yet
  };

  void find_theirs();
  bool has_room() const;
  void drain();
  void write(const Entry& entry);
  void put(const Entry& entry);
  void read();
  void take(std::uint64_t kind, std::uint64_t number, std::uint64_t header);
  void tell_publisher() const;

  const Words mine_;
  Words theirs_;
  const nb::object find_theirs_, is_current_, is_alive_, publish_later_;
  const std::uint64_t num_entries_;
  std::uint64_t num_mine_ = 0, num_read_ = 0;
  std::unordered_map<std::uint64_t, Lane> lanes_;  // by kind
  std::deque<Entry> backlog_;
  std::unordered_set<std::uint64_t> loose_;
  bool has_gaps_ = false;
};

}  // namespace meshdist
