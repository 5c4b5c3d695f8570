// What stands before a blocking send or receive: it is compared with its counterpart, and noted.
//
// `Message.start` does in Python what this does for plain ones; every other is left to it.
#pragma once

#include <unordered_map>
#include <vector>

#include "entry.h"
#include "message_log.h"

namespace meshdist {

struct Message {
  nb::handle verb, peer, tag;  // peer: None for a receive from any member
  bool is_send = false;
  // As numbers, which `MessageEntry::read` fills in; -1 is any member.
  int member = -1;
  std::int64_t number = 0;
  MessageLog* log = nullptr;  // null where none is kept
  nb::object log_owner{};     // another thread may close the group meanwhile
  Plain plain{};
};

class MessageEntry {
 public:
  // `facts` has what Python knows: see `meshdist.mesh.channel`.
  MessageEntry(const nb::dict& facts, Entry& entry);

  // Whether a message of tensor `x` is plain and nothing stands in its way; fills the rest in.
  bool read(nb::handle x, Message& message);

  // Note it; returns the number of the note.
  std::uint64_t note(const Message& message);

  // Compare it with its counterpart, if that is there; where they differ note it, and raise what
  // `misfit` makes.
  void compare(const Message& message);

 private:
  struct Kind {
    const PyObject* dtype;
    std::uint64_t count;
    bool operator==(const Kind& o) const { return dtype == o.dtype && count == o.count; }
  };
  struct Hash {
    std::size_t operator()(const Kind& kind) const {
      return (reinterpret_cast<std::size_t>(kind.dtype) ^ kind.count) * 0x9e3779b97f4a7c15u >> 16;
    }
  };

  nb::handle kind_of(const Message& message);
  std::uint64_t header_of(const Plain& plain);

  Entry& entry_;
  const std::int64_t largest_tag_;
  const nb::object headers_, misfit_;
  nb::object unmatched_;  // receives that wait for their sender; none where it is not valid
  nb::object logs_;       // of the messages with each other member; not valid where none are kept
  std::unordered_map<Kind, std::uint64_t, Hash> kept_headers_;
  struct Lane {
    int member = -2;
    std::int64_t number = 0;
    nb::object kind;
  };
  Lane last_lanes_[2];  // programs repeat their calls: of receives, of sends
};

}  // namespace meshdist
