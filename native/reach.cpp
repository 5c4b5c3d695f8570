#include "reach.h"

#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <random>

namespace meshdist {
namespace {

std::uint64_t random_number() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

struct Proof {
  std::uint64_t address;
  std::uint64_t value;
};
static_assert(sizeof(Proof) <= kInlineBytes, "a line holds it");

}  // namespace

Reach::Reach(const Endpoint& endpoint, Rounds& rounds)
    : end_(endpoint), rounds_(rounds), proof_(random_number()) {}

bool Reach::read(unsigned member, std::uint8_t* to, const std::uint8_t* from,
                 std::size_t bytes) const {
  const pid_t pid = end_.segment.member(member).report.pid.load(std::memory_order_relaxed);
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

Status Reach::before(const Call& call) {
  if (is_tried_) return Status::ok;
  is_tried_ = true;
  if (end_.size < 2) return Status::ok;
  const std::uint64_t told = rounds_.next();
  const Proof mine{reinterpret_cast<std::uintptr_t>(&proof_), proof_};
  std::memcpy(rounds_.line(end_.rank, told).bytes, &mine, sizeof mine);
  rounds_.publish();
  Status status = rounds_.wait(told, call);
  if (status != Status::ok) return status;
  bool reads_all = !end_.is_crowded;
  for (unsigned j = 0; j < end_.size && reads_all; ++j) {
    if (j == end_.rank) continue;
    Proof theirs;
    std::memcpy(&theirs, rounds_.line(j, told).bytes, sizeof theirs);
    std::uint64_t found = 0;
    reads_all = read(j, reinterpret_cast<std::uint8_t*>(&found),
                     reinterpret_cast<const std::uint8_t*>(theirs.address), sizeof found) &&
                found == theirs.value;
  }
  const std::uint64_t answered = rounds_.next();
  rounds_.line(end_.rank, answered).hints = reads_all ? 0u : kHintMissed;
  rounds_.publish();
  status = rounds_.wait(answered, call);
  if (status != Status::ok) return status;
  is_open_ = !rounds_.anyone_hints(answered, kHintMissed);
  return Status::ok;
}

}  // namespace meshdist
