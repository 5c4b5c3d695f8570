// Reading another member's memory where it lies: one copy where slots and rings take two.
//
// The kernel lets a process read another one's memory where it may also attach a debugger to it:
// the same user, and nothing stricter in force (Yama's ptrace_scope, a container's seccomp filter).
// So it is tried before it is relied on, and done only where each member has a core of its own:
// ranks that share cores are faster by slots, where one copies in what all others read (4 ranks on
// 2 cores took 1.2 to 2 times as long with it).
#pragma once

#include <cstddef>
#include <cstdint>

#include "endpoint.h"

namespace meshdist {

// Whether `member`'s memory can be read here, and is its own: another process of the same number,
// in another namespace, does not have its proof there.
bool can_read(const Endpoint& end, unsigned member);

// Copy `bytes` bytes at `from` in `member`'s memory; false where they cannot be read.
bool read_from(const Endpoint& end, unsigned member, std::uint8_t* to, const std::uint8_t* from,
               std::size_t bytes);

}  // namespace meshdist
