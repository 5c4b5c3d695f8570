// The thresholds between algorithms, in one place, each with the measurement behind it.
#pragma once

#include <cstddef>

namespace meshdist {

struct Tuning {
  // Bytes that a member publishes per round, at most a slot.
  std::size_t chunk_bytes = 256 * 1024;
  // With two members each reads all of the other's data, one round per chunk. With more, each
  // reduces its own part of a chunk, which takes a second round but reads 2 instead of n - 1
  // times the data; below this size the round costs more than the reading.
  std::size_t whole_reduce_bytes = 16 * 1024;
  // From here on buffers in memory that all members map are reduced and read where they lie, which
  // takes one more round than a call of one chunk.
  std::size_t shared_bytes = 64 * 1024;
  // Results larger than this leave the caches before anybody reads them, so they are written past
  // the caches, which spares reading their lines first.
  std::size_t stream_out_bytes = 8 * 1024 * 1024;
};

}  // namespace meshdist
