// Read another member's memory directly: a single copy instead of two through slots and rings.
//
// The kernel lets a process read another process's memory if it may also attach a debugger to it: the same
// user, and no stricter rule in force (Yama's ptrace_scope, a container's seccomp filter). So members try it
// before they rely on it, and use it only if each member has a core to itself: ranks that share cores are
// faster by slots, where one member copies in the data that all others read (4 ranks on 2 cores took 1.2 to 2
// times as long with it).
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
