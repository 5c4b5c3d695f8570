#include "reach.h"

#include <sys/uio.h>

#include <cerrno>

namespace meshdist {

bool can_read(const Endpoint& end, unsigned member) {
  const Proof& theirs = end.segment.member(member).proof;
  const std::uint64_t place = theirs.place.load(std::memory_order_relaxed);
  std::uint64_t found = 0;
  return read_from(end, member, reinterpret_cast<std::uint8_t*>(&found),
                   reinterpret_cast<const std::uint8_t*>(place), sizeof found) &&
         found == theirs.value.load(std::memory_order_relaxed);
}

bool read_from(const Endpoint& end, unsigned member, std::uint8_t* to, const std::uint8_t* from,
               std::size_t bytes) {
  const pid_t pid = end.segment.member(member).report.pid.load(std::memory_order_relaxed);
  while (bytes > 0) {
    const iovec here{to, bytes};
    const iovec there{const_cast<std::uint8_t*>(from), bytes};
    const ssize_t moved = process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    to += moved;
    from += moved;
    bytes -= static_cast<std::size_t>(moved);
  }
  return true;
}

}  // namespace meshdist
