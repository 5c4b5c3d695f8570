// The messages between this member and another, as both record them in words that both can read.
//
// The first two words are the number of written entries, and the number of the other member's entries that
// were read. An entry is two words: direction, tag and number; and the fingerprint under a seal that shows
// whether both words are of this entry. The number counts the messages of one direction and tag, so that the
// n-th send matches the n-th receive. It is 0 for a receive whose sender is never known, after which messages
// of that tag cannot be matched. Entries that the other member has not read are not overwritten: further
// entries wait in this process. They are not compared with the calls that the other member starts before they
// are written.
//
// Python is called before any change, or after all changes, so that no other thread can interfere.
#pragma once

#include <deque>
#include <unordered_map>
#include <unordered_set>

#include "words.h"

namespace meshdist {

class MessageLog {
 public:
  // `mine` are this member's words for the other. `find_theirs` finds the other's words for this
  // member, or None as long as they are not there. `is_current`: whether they are still this group's;
  // `is_alive`: whether the other may read or write more. `publish_later` lets a thread `publish` now
  // and then until nothing waits. `num_entries` of one member can be ahead of the other.
  MessageLog(nb::object mine, nb::object find_theirs, nb::object is_current, nb::object is_alive,
             nb::object publish_later, std::uint64_t num_entries)
      : mine_(std::move(mine)), find_theirs_(std::move(find_theirs)), is_current_(std::move(is_current)),
        is_alive_(std::move(is_alive)), publish_later_(std::move(publish_later)), num_entries_(num_entries) {}

  // Note one transfer of a kind; returns its number where its counterpart is there and differs, else 0.
  std::uint64_t note(std::uint64_t kind, std::uint64_t header);

  // Whether `note` calls no Python for this tag.
  bool is_plain(std::uint64_t tag);

  void note_any(std::uint64_t tag);
  bool publish();

 private:
  struct Entry {
    std::uint64_t kind, number, header;
  };
  struct Ahead {
    std::uint64_t number, header;
  };
  struct Lane {
    std::uint64_t count = 0;  // of this member's
    std::deque<Ahead> ahead;  // the other member's, without a counterpart yet
  };

  void find_theirs();
  bool has_room() const;
  void drain();
  void write(const Entry& entry);
  void put(const Entry& entry);
  void read();
  void take(std::uint64_t kind, std::uint64_t number, std::uint64_t header);
  void wake_publisher() const;

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
