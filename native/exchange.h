// The patterns of rounds that the collectives are made of, see collectives.h.
#pragma once

#include <cstdint>

#include "collectives.h"

namespace meshdist {

inline std::uint64_t num_chunks(std::uint64_t count, std::uint64_t per_chunk) {
  return count <= per_chunk ? 1 : (count + per_chunk - 1) / per_chunk;
}

template <class Write, class Read, class Direct>
Status Collectives::exchange(Job& job, std::uint64_t num_rounds, const Input& input, Write write, Read read,
                             Direct direct) {
  if (phase_ == Phase::begin && (num_rounds > 1 || place_of(input).second != 0)) return Status::unsupported;
  const std::uint64_t first = phase_ == Phase::finish ? begun_ : rounds_.next();
  if (phase_ != Phase::finish) {
    if (!offer(input, first)) write(0, first);
    rounds_.announce(job.call);
  }
  if (phase_ == Phase::begin) {
    begun_ = first;
    return Status::pending;
  }
  Status status = agree(job, first);
  if (status != Status::ok) return status;
  const Sharing sharing = find_offers(input, first);
  if (sharing == Sharing::all) {
    status = finish_direct(job, direct());
    if (status != Status::unsupported) return status;
  }
  // Members that offered have written nothing for the first round, so all members start over.
  return exchange_agreed(job, num_rounds, write, read, sharing == Sharing::none ? 1 : 0);
}

// The same, after a round that announced the call, when `num_done` of this exchange's rounds are complete.
template <class Write, class Read>
Status Collectives::exchange_agreed(Job& job, std::uint64_t num_rounds, Write write, Read read,
                                    std::uint64_t num_done) {
  const std::uint64_t first = rounds_.next() - num_done;
  for (std::uint64_t i = num_done; i < num_rounds; ++i) {
    write(i, first + i);
    rounds_.publish();
    if (i > 0) read(i - 1, first + i - 1);
    const Status status = rounds_.wait(first + i, job.call);
    if (status != Status::ok) return status;
  }
  if (num_rounds > 0) read(num_rounds - 1, first + num_rounds - 1);
  return Status::ok;
}

}  // namespace meshdist
