#include "endpoint.h"

#include <unistd.h>

#include <cstring>
#include <random>
#include <stdexcept>

namespace meshdist {
namespace {

std::uint64_t random_number() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

}  // namespace

Processes::~Processes() {
  for (int pidfd : pidfds_) {
    if (pidfd >= 0) ::close(pidfd);
  }
}

bool Processes::has_exited(unsigned member) const {
  return member < pidfds_.size() && meshdist::has_exited(pidfds_[member]);
}

Endpoint::Endpoint(std::shared_ptr<const Segment> segment_, unsigned rank_, Processes processes)
    : segment(*segment_),
      rank(rank_),
      size(segment.geometry().size),
      is_crowded(segment.geometry().is_crowded != 0),
      patience(is_crowded ? Patience::crowded() : Patience::usual()),
      owned_(std::move(segment_)),
      proof_(random_number()),
      processes_(std::move(processes)) {
  if (rank >= size) throw std::invalid_argument("rank lies outside the segment's members");
  if (processes_.count() != 0 && processes_.count() != size) {
    throw std::invalid_argument("one pidfd per member is expected, or none at all");
  }
  me().proof.place.store(reinterpret_cast<std::uintptr_t>(&proof_));
  me().proof.value.store(proof_);
  me().report.pid.store(static_cast<std::int32_t>(getpid()));
  me().report.is_open.store(1);
}

void Endpoint::wake_everyone() const {
  for (unsigned j = 0; j < size; ++j) {
    for (Seat& seat : segment.member(j).seats) ring(seat);
  }
}

void Endpoint::end(Status cause, int culprit, std::uint64_t sequence) const {
  Ending& ending = segment.control().ending;
  if (ending.claimed.exchange(1) == 0) {
    ending.cause = static_cast<std::int32_t>(cause);
    ending.by = static_cast<std::int32_t>(rank);
    ending.culprit = culprit;
    ending.sequence = sequence;
    ending.is_over.store(1, std::memory_order_seq_cst);
  }
  wake_everyone();
}

bool Endpoint::is_forked() const {
  return me().report.pid.load() != static_cast<std::int32_t>(getpid());
}

void Endpoint::close() {
  if (is_closing_.exchange(true)) return;
  if (!is_forked()) {
    me().report.was_closed.store(1, std::memory_order_seq_cst);
    me().report.is_open.store(0, std::memory_order_seq_cst);
    wake_everyone();
  }
}

void Endpoint::announce_end() const {
  if (!is_forked()) me().report.is_ending.store(1, std::memory_order_seq_cst);
}

bool Endpoint::has_closed(unsigned peer) const {
  return segment.member(peer).report.was_closed.load(std::memory_order_seq_cst) != 0;
}

bool Endpoint::is_gone(unsigned peer) const {
  return has_closed(peer) || processes_.has_exited(peer);
}

bool Endpoint::has_died(unsigned peer) const {
  return processes_.has_exited(peer) && !has_closed(peer) &&
         segment.member(peer).report.is_ending.load(std::memory_order_seq_cst) == 0;
}

std::vector<Failure::Seen> Endpoint::seen() const {
  std::vector<Failure::Seen> all(size);
  for (unsigned j = 0; j < size; ++j) {
    const Report& report = segment.member(j).report;
    Failure::Seen& one = all[j];
    one.begun = report.begun.load();
    one.ended = report.ended.load();
    std::uint64_t words[3];
    for (int i = 0; i < 3; ++i) words[i] = report.words[i].load();
    std::memcpy(&one.header, words, sizeof one.header);
    one.is_open = report.is_open.load() != 0;
    one.was_closed = report.was_closed.load() != 0;
    one.has_exited = processes_.has_exited(j);
    one.pid = report.pid.load();
  }
  return all;
}

Failure Endpoint::failure(Status status, int culprit, std::string text) const {
  Failure failure;
  failure.status = status;
  failure.culprit = culprit;
  failure.text = std::move(text);
  failure.sequence = me().report.begun.load();
  const Ending& ending = segment.control().ending;
  if (ending.is_over.load() != 0) {
    failure.cause = ending.cause;
    failure.by = ending.by;
    if (culprit < 0) failure.culprit = ending.culprit;
    failure.sequence = ending.sequence;
  }
  failure.members = seen();
  return failure;
}

}  // namespace meshdist
