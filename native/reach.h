// Reading another member's memory where it lies: one copy where slots take two.
//
// The kernel lets a process read another one's memory where it may also attach a debugger to it:
// the same user, and nothing stricter in force (Yama's ptrace_scope, a container's seccomp filter).
// So the members try it before the first call, and do it only where each can read from all others,
// and has a core of its own: ranks that share cores are faster by slots, where one copies in what all
// others read (4 ranks on 2 cores took 1.2 to 2 times as long with it).
#pragma once

#include <cstdint>

#include "rounds.h"

namespace meshdist {

class Reach {
 public:
  Reach(const Endpoint& endpoint, Rounds& rounds);
  Reach(const Reach&) = delete;  // the others read `proof_` where it is
  Reach& operator=(const Reach&) = delete;

  // Before each call: try it, the first time.
  Status before(const Call& call);

  // Whether members may tell each other addresses; all give the same answer.
  bool is_open() const { return is_open_; }
  // All members: never again.
  void close() { is_open_ = false; }

  // Copy `bytes` bytes at `from` in `member`'s memory; false where they cannot be read.
  bool read(unsigned member, std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) const;

 private:
  const Endpoint& end_;
  Rounds& rounds_;
  const std::uint64_t proof_;  // which a stranger who bears a member's number does not have there
  bool is_tried_ = false;
  bool is_open_ = false;
};

}  // namespace meshdist
