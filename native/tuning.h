// The thresholds between algorithms, each with its measurement.
#pragma once

#include <cstddef>

namespace meshdist {

struct Tuning {
  // Bytes that a member publishes per round, at most a slot. 512 KiB were as fast as or faster than
  // less from 256 KiB to 64 MiB: with stores past the cache, where only the number of rounds counts,
  // 5 to 25 % from 4 MiB on.
  std::size_t chunk_bytes = 512 * 1024;
  // The same for a broadcast, and if two members reduce all of a chunk, with plain stores: the data that a
  // member has written to its slot are in its cache when it reduces them, and the slots stay in the other
  // member's cache. Against 512 KiB, all-reduce took 96 % of the time at 1 and 64 MiB and 92 % at 2 and 256
  // MiB, reduce and broadcast 92 to 97 % at 1 and 2 MiB and as long from 4 MiB on. 128 KiB were 2 to 4 %
  // faster at 2 and 256 MiB, and 5 % slower at 64 MiB, in 16-bit floats 10 %; 64 KiB were slower. All-gathers
  // and all-to-alls by slots took 100 to 105 %.
  std::size_t near_chunk_bytes = 256 * 1024;
  // Rounds of at least `spread_bytes` use another place of their slot each time, over 2 MiB with two members:
  // a line that has left the reader's own cache is overwritten much faster than a cached line (all-reduce of
  // 4, 64 and 256 KiB: 0.5, 3.7, 12.8 us instead of 0.8, 9.3, 17.1). Shorter rounds were as fast or faster at
  // a fixed place (2 KiB: 0.46 us, spread 0.53). Calls of more than `spread_most_bytes`, which take several
  // rounds, also use a fixed place: many places would evict the program's data from the caches (from 1 MiB on
  // broadcast and reduce took 86 to 95 % of the time, all-reduce 96 to 101 %).
  std::size_t spread_bytes = 4 * 1024;
  std::size_t spread_most_bytes = 512 * 1024;
  // With two members each reads all of the other's data, one round per chunk. With more, each
  // reduces its own part of a chunk, which takes a second round but reads 2 instead of n - 1
  // times the data. With 4 ranks the two were even at 16 to 64 KiB, within the noise.
  std::size_t whole_reduce_bytes = 16 * 1024;
  // If a started call takes one round, of at most this many bytes per member, its caller begins it and the
  // thread that waits finishes it; a background thread does larger calls. Up to this size, tensors in another
  // order than row-major are copied, since members may have begun the call.
  std::size_t begun_most_bytes = 16 * 1024;
  // From here on buffers in memory that all members map are reduced and read where they lie, which
  // takes one more round than a call of one chunk: at 64 KiB a third of the time already.
  std::size_t shared_bytes = 16 * 1024;
  // A member reads another member's data directly from memory, if that is allowed, at sizes in this range.
  // Two ranks' all-gather and all-to-all took half to four fifths of the time from 128 KiB to 4 MiB in all,
  // as long at 16 MiB, and a third longer at 64 MiB, where the kernel's work for each page costs more than a
  // copy by the other core; reduce-scatter of 256 KiB to 16 MiB took 70 to 95 %, of 64 KiB and of 64 MiB 105
  // to 115 %.
  std::size_t fetch_least_bytes = 64 * 1024;
  std::size_t fetch_most_bytes = 8 * 1024 * 1024;
  // The largest broadcast that is read: at 128 to 512 KiB that took 70 to 80 % of the time by slots,
  // into which the other core copies meanwhile, at 1 MiB 87 to 97 %, at 2 and 4 MiB 105 to 112 %.
  std::size_t fetch_broadcast_most_bytes = 1024 * 1024;
  // What is reduced is fetched in blocks of this size: 128 to 512 KiB were alike, 1 MiB took a fifth longer.
  std::size_t fetch_block_bytes = 256 * 1024;
  // All-reduce of this many bytes on two ranks: each rank reduces half of the data directly from memory. If
  // the cores share a cache, that took 70 to 80 % of the time by slots from 3 to 32 MiB, 90 to 125 % at 64
  // MiB, 120 % above, as long at 2 MiB, and longer below. If they do not (`far`), slots took 58, 147 and 712
  // us for 256 KiB, 1 and 4 MiB; reading is estimated at 28, 115 and 500 from its parts, not measured as a
  // whole.
  std::size_t halves_least_bytes = 3 * 1024 * 1024;
  std::size_t far_halves_least_bytes = 128 * 1024;
  std::size_t halves_most_bytes = 32 * 1024 * 1024;
  // The largest message that is sent immediately. A larger message is offered, and read from the sender's
  // memory. If ranks outnumber cores, it is sent in pieces instead, after the receiver has answered, and each
  // step may wait for a core. There, messages of 24, 32, 48 and 64 KiB sent immediately took 5, 5, 6 and 7 us
  // between two ranks of four on two cores, instead of 9, 9, 10 and 11, and torch's 1F1B with messages of 32
  // KiB took 92 % of the CPU time.
  std::size_t message_bytes = 16 * 1024;
  std::size_t crowded_message_bytes = 64 * 1024;
  // Results larger than this leave the caches before they are read, so they are written past
  // the caches, which spares reading their lines first: at 64 MiB 1.1 to 1.9 times as fast in
  // all-gather, all-to-all, broadcast and send, 1.2 times in reduce-scatter; at 4 MiB no gain.
  std::size_t stream_out_bytes = 8 * 1024 * 1024;
  // For measurements: 1 or 0 keep to stores into slots past the caches, or to plain ones, whatever the
  // probe finds. As every threshold, this is set on all members.
  std::size_t streams_into_slots = 2;
};

}  // namespace meshdist
