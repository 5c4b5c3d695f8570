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

// The number of forks between this process and the process that loaded the core.
unsigned num_forks();

// What went wrong, and which members had gone at that moment.
struct Failure {
  Status status = Status::ok;                // where a member ended the communicator, that member's
  int culprit = -1;                          // the member that died, or whose call differs
  std::string text;                          // what exactly differs
  std::vector<bool> was_closed, has_exited;  // of each member
  int source = -1;                           // of a message
  std::uint64_t other_note = 0;              // of a message that did not fit: the other side's
};

// Handles to the members' processes. This object owns the descriptors, even if the construction of its owner
// fails.
class Processes {
 public:
  // One pidfd per member, -1 for this member and for members without a pidfd; or an empty list.
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

  // Whether the communicator was ended by a member, or closed here: then waiting is useless.
  bool is_over() const {
    return segment.control().ending.is_over.load(std::memory_order_seq_cst) != 0 ||
           is_closing_.load(std::memory_order_seq_cst);
  }
  bool is_closing() const { return is_closing_.load(std::memory_order_seq_cst); }
  Status over_status() const { return is_closing_.load() ? Status::closed : Status::aborted; }

  // End the communicator for all members and wake all sleepers; the first cause is kept.
  void end(Status cause, int culprit = -1) const;

  // Whether this is a forked child's copy, which must not touch the parent's state.
  bool is_forked() const { return num_forks_ != num_forks(); }

  // End this member's part; the others go on until they need it.
  void close();

  // Announce to the others that this process exits normally.
  void announce_end() const;

  bool is_gone(unsigned peer) const;   // exited or closed: it will publish nothing more
  bool has_died(unsigned peer) const;  // exited before it had closed, and not normally

  Failure failure(Status status, int culprit = -1) const;

 private:
  void wake_everyone() const;
  bool has_closed(unsigned peer) const;

  const std::shared_ptr<const Segment> owned_;
  const unsigned num_forks_ = num_forks();
  const std::uint64_t proof_;  // the others read it where it is
  const Processes processes_;
  std::atomic<bool> is_closing_{false};
};

}  // namespace meshdist
