#include "endpoint.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <random>
#include <stdexcept>

namespace meshdist {
namespace {

unsigned forks = 0;
const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });

std::uint64_t random_number() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

}  // namespace

unsigned num_forks() { return forks; }

Processes::~Processes() {
  for (int pidfd : pidfds_) {
    if (pidfd >= 0) ::close(pidfd);
  }
}

bool Processes::has_exited(unsigned member) const {
  if (member >= pidfds_.size() || pidfds_[member] < 0) return false;
  pollfd query{pidfds_[member], POLLIN, 0};
  return poll(&query, 1, 0) == 1 && (query.revents & (POLLIN | POLLHUP)) != 0;
}

Endpoint::Endpoint(std::shared_ptr<const Segment> segment_, unsigned rank_, Processes processes)
    : segment(*segment_), rank(rank_), size(segment.geometry().size),
      is_crowded(segment.geometry().is_crowded != 0),
      patience(is_crowded ? Patience::crowded() : Patience::usual()), owned_(std::move(segment_)),
      proof_(random_number()), processes_(std::move(processes)) {
  if (rank >= size) throw std::invalid_argument("rank lies outside the segment's members");
  if (processes_.count() != 0 && processes_.count() != size) {
    throw std::invalid_argument("one pidfd per member is expected, or none at all");
  }
  me().proof.place.store(reinterpret_cast<std::uintptr_t>(&proof_));
  me().proof.value.store(proof_);
  me().report.pid.store(static_cast<std::int32_t>(getpid()));
}

void Endpoint::wake_everyone() const {
  for (unsigned j = 0; j < size; ++j) {
    for (Seat& seat : segment.member(j).seats) ring(seat);
  }
}

void Endpoint::end(Status cause, int culprit) const {
  Ending& ending = segment.control().ending;
  if (ending.claimed.exchange(1) == 0) {
    ending.cause = static_cast<std::int32_t>(cause);
    ending.culprit = culprit;
    ending.is_over.store(1, std::memory_order_seq_cst);
  }
  wake_everyone();
}

void Endpoint::close() {
  if (is_closing_.exchange(true)) return;
  if (!is_forked()) {
    me().report.was_closed.store(1, std::memory_order_seq_cst);
    wake_everyone();
  }
}

void Endpoint::announce_end() const {
  if (!is_forked()) me().report.is_ending.store(1, std::memory_order_seq_cst);
}

bool Endpoint::has_closed(unsigned peer) const {
  return segment.member(peer).report.was_closed.load(std::memory_order_seq_cst) != 0;
}

bool Endpoint::is_gone(unsigned peer) const { return has_closed(peer) || processes_.has_exited(peer); }

bool Endpoint::has_died(unsigned peer) const {
  return processes_.has_exited(peer) && !has_closed(peer) &&
         segment.member(peer).report.is_ending.load(std::memory_order_seq_cst) == 0;
}

Failure Endpoint::failure(Status status, int culprit) const {
  Failure failure;
  failure.status = status;
  failure.culprit = culprit;
  const Ending& ending = segment.control().ending;
  if (ending.is_over.load() != 0) {
    if (status == Status::aborted) failure.status = static_cast<Status>(ending.cause);
    if (culprit < 0) failure.culprit = ending.culprit;
  }
  for (unsigned j = 0; j < size; ++j) {
    failure.was_closed.push_back(has_closed(j));
    failure.has_exited.push_back(processes_.has_exited(j));
  }
  return failure;
}

}  // namespace meshdist
