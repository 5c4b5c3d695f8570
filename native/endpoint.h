// One member's place in a communicator: its memory, its peers' lives, and the communicator's end.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "segment.h"
#include "waiting.h"

namespace meshdist {

// What went wrong, as messages tell it: everyone's last header at that moment.
struct Failure {
  Status status = Status::ok;
  std::int32_t cause = 0;     // the Status with which the communicator ended, if it did
  std::int32_t by = -1;       // the member that ended it
  std::int32_t culprit = -1;  // who died, or whose call differs
  std::uint64_t sequence = 0;
  std::string text;  // what exactly differs
  struct Seen {
    Header header;
    std::uint64_t begun = 0;
    std::uint64_t ended = 0;
    bool is_open = false;
    bool was_closed = false;
    bool has_exited = false;
    int pid = 0;
  };
  std::vector<Seen> members;
};

// Handles to the members' processes. The descriptors become its own, also where what it is made for
// fails.
class Processes {
 public:
  // One pidfd per member, -1 for this one and where there is none; or none at all.
  explicit Processes(std::vector<int> pidfds) : pidfds_(std::move(pidfds)) {}
  Processes(Processes&& other) noexcept : pidfds_(std::exchange(other.pidfds_, {})) {}
  ~Processes();

  std::size_t count() const { return pidfds_.size(); }
  bool has_exited(unsigned member) const;

 private:
  std::vector<int> pidfds_;
};

class Endpoint {
 public:
  Endpoint(std::shared_ptr<const Segment> segment, unsigned rank, Processes processes);
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  const Segment& segment;
  const unsigned rank;
  const unsigned size;
  const bool is_crowded;
  const Patience patience;

  // What the last probe found for rounds of less than kLargeBytes, and of more; see probe.h.
  mutable std::atomic<bool> streams_little{false};
  mutable std::atomic<bool> streams_much{false};

  // Memory that all members have added, by its number, and that some still use.
  std::map<std::uint64_t, std::shared_ptr<const Memory>> memories;

  Member& me() const { return segment.member(rank); }

  // Whether waiting has no sense any more: ended by a member, or closed here.
  bool is_over() const {
    return segment.control().ending.is_over.load(std::memory_order_seq_cst) != 0 ||
           is_closing_.load(std::memory_order_seq_cst);
  }
  bool is_closing() const { return is_closing_.load(std::memory_order_seq_cst); }
  Status over_status() const { return is_closing_.load() ? Status::closed : Status::aborted; }

  // End the communicator for all members and wake whoever sleeps; the first cause stands.
  void end(Status cause, int culprit, std::uint64_t sequence) const;

  // Whether this is a forked child's copy, which must not touch the parent's state.
  bool is_forked() const;

  // No more waiting on this member; the others go on until they need it.
  void close();

  // Let the others know that this process comes to its end in good order.
  void announce_end() const;

  bool is_gone(unsigned peer) const;   // exited or closed: it will publish nothing more
  bool has_died(unsigned peer) const;  // exited before it had closed, and not in good order

  Failure failure(Status status, int culprit = -1, std::string text = "") const;
  std::vector<Failure::Seen> seen() const;

 private:
  void wake_everyone() const;
  bool has_closed(unsigned peer) const;

  const std::shared_ptr<const Segment> owned_;
  const std::uint64_t proof_;  // the others read it where it is
  const Processes processes_;
  std::atomic<bool> is_closing_{false};
};

}  // namespace meshdist
