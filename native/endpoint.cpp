#include "endpoint.h"

#include <unistd.h>

#include <cstring>
#include <stdexcept>

namespace meshdist {

Endpoint::Endpoint(std::shared_ptr<const Segment> segment_, unsigned rank_,
                   std::vector<int> pidfds, bool is_crowded_)
    : segment(*segment_),
      rank(rank_),
      size(segment.geometry().size),
      patience(is_crowded_ ? Patience::crowded() : Patience::usual()),
      is_crowded(is_crowded_),
      owned_(std::move(segment_)),
      pidfds_(std::move(pidfds)) {
  if (rank >= size) throw std::invalid_argument("rank lies outside the segment's members");
  if (!pidfds_.empty() && pidfds_.size() != size) {
    throw std::invalid_argument("one pidfd per member is expected, or none at all");
  }
  pidfds_.resize(size, -1);
  me().report.pid.store(static_cast<std::int32_t>(getpid()));
  me().report.is_open.store(1);
}

Endpoint::~Endpoint() {
  for (int pidfd : pidfds_) {
    if (pidfd >= 0) ::close(pidfd);
  }
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

bool Endpoint::is_gone(unsigned peer) const {
  return segment.member(peer).report.was_closed.load(std::memory_order_seq_cst) != 0 ||
         has_exited(pidfds_[peer]);
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
    one.has_exited = has_exited(pidfds_[j]);
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
