// The thresholds between algorithms, in one place, each with the measurement behind it.
#pragma once

#include <cstddef>

namespace meshdist {

struct Tuning {
  // Bytes that a member publishes per round, at most a slot. Where the members share a cache, the
  // four slots of each shall stay in it beside the data: 256 KiB were as fast as or faster than
  // half and twice that from 256 KiB to 64 MiB.
  std::size_t chunk_bytes = 256 * 1024;
  // Stores past the cache keep nothing there, so only the rounds count: 512 KiB took 5 to 25 % less
  // than 256 KiB from 4 MiB on.
  std::size_t stream_chunk_bytes = 512 * 1024;
  // Where one member alone writes, larger slots stay in the cache: with plain stores 64 MiB took
  // 4.5 ms with these and 6.9 with 256 KiB, with stores past the cache 5.6 and 6.0.
  std::size_t broadcast_chunk_bytes = 512 * 1024;
  // With two members each reads all of the other's data, one round per chunk. With more, each
  // reduces its own part of a chunk, which takes a second round but reads 2 instead of n - 1
  // times the data. With 4 ranks the two were even at 16 to 64 KiB, within the noise.
  std::size_t whole_reduce_bytes = 16 * 1024;
  // From here on buffers in memory that all members map are reduced and read where they lie, which
  // takes one more round than a call of one chunk: at 64 KiB a third of the time already.
  std::size_t shared_bytes = 16 * 1024;
  // Results larger than this leave the caches before anybody reads them, so they are written past
  // the caches, which spares reading their lines first: at 64 MiB 1.1 to 1.9 times as fast in
  // all-gather, all-to-all, broadcast and send, at 4 MiB no gain.
  std::size_t stream_out_bytes = 8 * 1024 * 1024;
};

}  // namespace meshdist
