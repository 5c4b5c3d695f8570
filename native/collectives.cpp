#include "collectives.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <sstream>

namespace meshdist {
namespace {

// Call `use(data, offset, count)` for the stretches of `parts` that make up the elements
// [start, start + count) of all of them one after the other.
template <class Use>
void for_stretches(const Part* parts, std::size_t num_parts, std::uint64_t start,
                   std::uint64_t count, std::size_t item, Use use) {
  std::uint64_t done = 0;
  for (std::size_t i = 0; i < num_parts && done < count; ++i) {
    if (start >= parts[i].count) {
      start -= parts[i].count;
      continue;
    }
    const std::uint64_t n = std::min(parts[i].count - start, count - done);
    use(parts[i].data + start * item, done, n);
    done += n;
    start = 0;
  }
}

// Copies of less are not worth a fence.
constexpr std::size_t kStreamableBytes = 4096;

std::uint64_t num_chunks(std::uint64_t count, std::uint64_t per_chunk) {
  return count == 0 ? 1 : (count + per_chunk - 1) / per_chunk;
}

}  // namespace

Collectives::Collectives(const Endpoint& endpoint)
    : end_(endpoint),
      kernels_(kernels()),
      rounds_(endpoint),
      reach_(endpoint, rounds_),
      probe_(endpoint, rounds_),
      factors_(endpoint.size, 1.0),
      sources_(endpoint.size),
      theirs_(endpoint.size),
      is_afar_(endpoint.size),
      given_(std::size_t{endpoint.size} * endpoint.size),
      expected_(std::size_t{endpoint.size} * endpoint.size) {
}

Status Collectives::run(Job& job) {
  if (end_.is_over()) {
    rounds_.describe(end_.over_status(), 0, job.call);
    return end_.over_status();
  }
  item_ = dtype_facts(job.dtype()).bytes;
  mismatch_.clear();
  mismatch_culprit_ = -1;
  chunk_ = std::min<std::size_t>(tuning.chunk_bytes, end_.segment.geometry().slot_bytes);
  Status status = reach_.before(job.call);
  if (status == Status::ok) status = probe_.before(job.call);
  bad_round_ = rounds_.next();
  if (status == Status::ok) {
    std::uint64_t count = job.count();
    for (const Part& part : job.ins) count += part.count;
    probe_.consider(count * item_);
    status = dispatch(job);
  }
  if (status == Status::ok) {
    rounds_.finish(job.call);
  } else {
    rounds_.describe(status, bad_round_, job.call);
    if (mismatch_culprit_ >= 0) {
      rounds_.failure.culprit = mismatch_culprit_;
      rounds_.failure.text = mismatch_;
    }
    if (status == Status::mismatch) rounds_.finish(job.call);
  }
  return status;
}

// Whether what a member lays into slots, `bytes` a round, goes past the cache.
bool Collectives::streams(std::size_t bytes) const {
  if (kept_stores_ >= 0) return kept_stores_ != 0;
  return (bytes < kLargeBytes ? end_.streams_little : end_.streams_much)
      .load(std::memory_order_relaxed);
}

// Agree on the call that was announced in `round`, and heed what the first member found.
Status Collectives::agree(const Job& job, std::uint64_t round) {
  const Status status = rounds_.agree(round, job.call);
  if (status == Status::ok || status == Status::mismatch) {
    probe_.heed(round);
    streams_in_ = streams(span_);
  }
  return status;
}

Status Collectives::dispatch(Job& job) {
  const bool reduces = job.verb() == Verb::all_reduce || job.verb() == Verb::all_reduce_list ||
                       job.verb() == Verb::reduce || job.verb() == Verb::reduce_scatter ||
                       job.verb() == Verb::reduce_scatter_v;
  if (reduces) {
    loop_ = kernels_.reduce[job.call.header.dtype][job.call.header.op];
    if (loop_ == nullptr) return Status::unsupported;
    end_.me().factors[rounds_.next() % kDepth] = job.call.factor;
  }
  streams_out_ = false;
  switch (job.verb()) {
    case Verb::all_reduce:
    case Verb::all_reduce_list:
    case Verb::reduce: {
      const std::size_t bytes = job.count() * item_;
      const bool whole = end_.size <= 2 || bytes <= tuning.whole_reduce_bytes;
      return whole ? reduce_whole(job) : reduce_by_parts(job);
    }
    case Verb::broadcast:
      return broadcast(job);
    case Verb::all_gather:
    case Verb::all_gather_v:
      return all_gather(job);
    case Verb::gather:
    case Verb::gather_v:
      return gather(job);
    case Verb::scatter:
    case Verb::scatter_v:
      return scatter(job);
    case Verb::reduce_scatter:
    case Verb::reduce_scatter_v:
      return reduce_scatter(job);
    case Verb::all_to_all:
    case Verb::all_to_all_v:
      return all_to_all(job);
    case Verb::barrier:
      return barrier(job);
    default:
      return Status::unsupported;
  }
}

void Collectives::copy_in(Bytes slot, const std::uint8_t* from, std::size_t bytes) const {
  if (streams_in_ && bytes >= kStreamableBytes) {
    kernels_.stream(slot, from, bytes);
  } else if (bytes != 0) {
    std::memcpy(slot, from, bytes);
  }
}

void Collectives::copy_out(Bytes to, const std::uint8_t* slot, std::size_t bytes) const {
  if (streams_out_ && bytes >= kStreamableBytes) {
    kernels_.stream(to, slot, bytes);
  } else if (bytes != 0) {
    std::memcpy(to, slot, bytes);
  }
}

// Lay out rounds of `pieces` equal pieces, of which the longest has `longest` bytes in all: return
// the bytes of a piece in one round, whole cache lines.
std::size_t Collectives::lay_out(std::size_t pieces, std::size_t longest) {
  const std::size_t most = chunk_ / std::max<std::size_t>(pieces, 1) / kCacheLine * kCacheLine;
  const std::size_t needed = round_up(std::max<std::size_t>(longest, 1), kCacheLine);
  const std::size_t piece = std::min(most, needed);
  span_ = piece * std::max<std::size_t>(pieces, 1);
  const bool spreads = span_ >= tuning.spread_bytes;
  num_places_ = spreads ? end_.segment.geometry().slot_bytes / span_ : 1;
  streams_in_ = streams(span_);
  return piece;
}

// Whether members fetch from each other what has up to `bytes` bytes; all give the same answer.
bool Collectives::is_fetched(std::size_t bytes) const {
  return reach_.is_open() && bytes != 0 && bytes >= tuning.fetch_least_bytes &&
         bytes <= tuning.fetch_most_bytes;
}

// Tell the others, with the announcement in `round`, where `input` lies, if they can read it there.
bool Collectives::offer(const Input& input, std::uint64_t round) {
  if (end_.size < 2) return false;
  if (input.giver != kEveryone && input.giver != static_cast<int>(end_.rank)) return false;
  const auto tell = [&](const Place& place, Hint hint) {
    std::memcpy(rounds_.line(end_.rank, round).bytes, &place, sizeof place);
    rounds_.call_hints_ = hint;
    return true;
  };
  for (const auto& [number, memory] : end_.memories) {
    if (input.bytes < tuning.shared_bytes || !memory->holds(input.data, input.bytes)) continue;
    return tell({number, static_cast<std::uint64_t>(input.data - memory->data())}, kHintShared);
  }
  return is_fetched(input.fetched) && tell({0, reinterpret_cast<std::uintptr_t>(input.data)}, kHintOwn);
}

// Who has offered in `round`; all members come to the same answer.
Collectives::Sharing Collectives::find_offers(const Input& input, std::uint64_t round) {
  unsigned offers = 0;
  for (unsigned j = 0; j < end_.size; ++j) {
    const Line& line = rounds_.line(j, round);
    if ((line.hints & (kHintShared | kHintOwn)) == 0) continue;
    ++offers;
    Place place;
    std::memcpy(&place, line.bytes, sizeof place);
    is_afar_[j] = (line.hints & kHintOwn) != 0 && j != end_.rank;
    theirs_[j] = (line.hints & kHintOwn) != 0
                     ? reinterpret_cast<Bytes>(place.offset)
                     : end_.memories.at(place.memory)->data() + place.offset;
  }
  const unsigned givers = input.giver == kEveryone ? end_.size : 1;
  return offers == 0 ? Sharing::none : offers == givers ? Sharing::all : Sharing::some;
}

// Copy what `member` has offered, from `offset` on; whether that could be done.
bool Collectives::fetch(Bytes to, unsigned member, std::size_t offset, std::size_t bytes) const {
  const std::uint8_t* from = theirs_[member] + offset;
  if (is_afar_[member]) return reach_.read(member, to, from, bytes);
  if (to != from) copy_out(to, from, bytes);
  return true;
}

// Tell the others that this member has read all it wants, or could not, and wait until all have
// told: their inputs stay till then. Where a member could not nobody tries again, and the status is
// `unsupported`: what can be done instead is the caller's.
Status Collectives::finish_direct(const Job& job, bool is_done) {
  const std::uint64_t round = rounds_.next();
  rounds_.line(end_.rank, round).hints = is_done ? 0u : kHintMissed;
  rounds_.publish();
  const Status status = rounds_.wait(round, job.call);
  if (status != Status::ok) return status;
  // A member that has told, and then gave up waiting for this one, may have written over its input
  // while this one read it; it ended the communicator before.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (end_.is_over()) return end_.over_status();
  if (!rounds_.anyone_hints(round, kHintMissed)) return Status::ok;
  reach_.close();
  return Status::unsupported;
}

template <class Write, class Read, class Direct>
Status Collectives::exchange(Job& job, std::uint64_t num_rounds, const Input& input, Write write,
                             Read read, Direct direct) {
  const std::uint64_t first = rounds_.next();
  if (!offer(input, first)) write(0, first);
  rounds_.announce(job.call);
  Status status = agree(job, first);
  if (status != Status::ok) return status;
  if (loop_ != nullptr) {
    for (unsigned j = 0; j < end_.size; ++j) {
      factors_[j] = end_.segment.member(j).factors[first % kDepth];
    }
  }
  const Sharing sharing = find_offers(input, first);
  if (sharing == Sharing::all) {
    status = finish_direct(job, direct());
    if (status != Status::unsupported) return status;
  }
  // Those who offered have written nothing for the first round: begin anew, all of them.
  if (sharing != Sharing::none) return exchange_agreed(job, num_rounds, write, read);
  for (std::uint64_t i = 1; i < num_rounds; ++i) {
    write(i, first + i);
    rounds_.publish();
    read(i - 1, first + i - 1);
    status = rounds_.wait(first + i, job.call);
    if (status != Status::ok) return status;
  }
  read(num_rounds - 1, first + num_rounds - 1);
  return Status::ok;
}

// The same, when a round before has announced the call.
template <class Write, class Read>
Status Collectives::exchange_agreed(Job& job, std::uint64_t num_rounds, Write write, Read read) {
  const std::uint64_t first = rounds_.next();
  for (std::uint64_t i = 0; i < num_rounds; ++i) {
    write(i, first + i);
    rounds_.publish();
    if (i > 0) read(i - 1, first + i - 1);
    const Status status = rounds_.wait(first + i, job.call);
    if (status != Status::ok) return status;
  }
  if (num_rounds > 0) read(num_rounds - 1, first + num_rounds - 1);
  return Status::ok;
}

// The same for parts of up to `longest` bytes, whose sizes and places the members have told.
template <class Write, class Read, class Direct>
Status Collectives::exchange_parts(Job& job, std::uint64_t num_rounds, std::size_t longest,
                                   Write write, Read read, Direct direct) {
  if (longest == 0) return Status::ok;
  if (is_fetched(longest)) {
    const Status status = finish_direct(job, direct());
    if (status != Status::unsupported) return status;
  }
  return exchange_agreed(job, num_rounds, write, read);
}

Status Collectives::agree_on_sizes(Job& job) {
  const std::uint64_t round = rounds_.next();
  const unsigned n = end_.size;
  std::uint64_t* given = end_.segment.table(end_.rank, round, kGiven);
  std::uint64_t* expected = end_.segment.table(end_.rank, round, kExpected);
  std::uint64_t* places = end_.segment.table(end_.rank, round, kPlaces);
  const bool is_root = job.root() == static_cast<int>(end_.rank);
  for (unsigned j = 0; j < n; ++j) {
    const bool to_root = job.root() == static_cast<int>(j);
    switch (job.verb()) {
      case Verb::all_gather_v:
        given[j] = job.ins[0].count;
        expected[j] = job.outs[j].count;
        places[j] = reinterpret_cast<std::uintptr_t>(job.ins[0].data);
        break;
      case Verb::gather_v:
        given[j] = to_root ? job.ins[0].count : 0;
        expected[j] = is_root ? job.outs[j].count : 0;
        break;
      case Verb::scatter_v:
        given[j] = is_root ? job.ins[j].count : 0;
        expected[j] = to_root ? job.outs[0].count : 0;
        break;
      case Verb::reduce_scatter_v:
        given[j] = job.ins[j].count;
        expected[j] = job.outs[0].count;
        break;
      default:
        given[j] = job.ins[j].count;
        expected[j] = job.outs[j].count;
        places[j] = reinterpret_cast<std::uintptr_t>(job.ins[j].data);
    }
  }
  if (loop_ != nullptr) end_.me().factors[round % kDepth] = job.call.factor;
  rounds_.announce(job.call);
  const Status status = agree(job, round);
  if (status != Status::ok) return status;
  for (unsigned i = 0; i < n; ++i) {
    std::memcpy(&given_[i * n], end_.segment.table(i, round, kGiven), n * sizeof(std::uint64_t));
    std::memcpy(&expected_[i * n], end_.segment.table(i, round, kExpected), n * sizeof(std::uint64_t));
    theirs_[i] = reinterpret_cast<Bytes>(end_.segment.table(i, round, kPlaces)[end_.rank]);
    is_afar_[i] = i != end_.rank;
    factors_[i] = end_.segment.member(i).factors[round % kDepth];
  }
  for (unsigned i = 0; i < n; ++i) {
    for (unsigned j = 0; j < n; ++j) {
      if (given_[i * n + j] == expected_[j * n + i]) continue;
      std::ostringstream text;
      text << "member " << i << " gives " << given_[i * n + j] << " elements to member " << j
           << ", which expects " << expected_[j * n + i];
      mismatch_ = text.str();
      mismatch_culprit_ = static_cast<int>(j);
      return Status::mismatch;
    }
  }
  return Status::ok;
}

// ---- reductions to everyone, or to one

Status Collectives::reduce_whole(Job& job) {
  const Part single{job.out, job.count()};
  const bool is_list = job.verb() == Verb::all_reduce_list;
  const Part* parts = is_list ? job.outs.data() : &single;
  const std::size_t num_parts = is_list ? job.outs.size() : 1;
  const bool takes = job.verb() != Verb::reduce || job.root() == static_cast<int>(end_.rank);
  const std::uint64_t count = job.count();
  const bool is_inline = count * item_ <= kInlineBytes;
  const std::uint64_t per_chunk = lay_out(1, count * item_) / item_;

  const auto write = [&](std::uint64_t i, std::uint64_t round) {
    const std::uint64_t start = i * per_chunk;
    if (start >= count) return;
    Bytes slot = area(end_.rank, round, is_inline);
    for_stretches(parts, num_parts, start, std::min(per_chunk, count - start), item_,
                  [&](Bytes data, std::uint64_t at, std::uint64_t n) {
                    copy_in(slot + at * item_, data, n * item_);
                  });
  };
  const auto read = [&](std::uint64_t i, std::uint64_t round) {
    const std::uint64_t start = i * per_chunk;
    if (!takes || start >= count) return;
    for_stretches(parts, num_parts, start, std::min(per_chunk, count - start), item_,
                  [&](Bytes data, std::uint64_t at, std::uint64_t n) {
                    for (unsigned j = 0; j < end_.size; ++j) {
                      sources_[j] = j == end_.rank ? data : area(j, round, is_inline) + at * item_;
                    }
                    loop_(data, sources_.data(), end_.size, n, factors_.data());
                  });
  };
  return exchange(job, num_chunks(count, per_chunk), reduce_input(job), write, read,
                  [&] {
                    reduce_shared(job);
                    return true;
                  });
}

Collectives::Input Collectives::reduce_input(const Job& job) const {
  if (job.verb() != Verb::all_reduce) return {};  // the others must not be written to, or are many
  return {job.out, job.count() * item_, kEveryone};
}

// All-reduce buffers that all members map: each member reduces its part of all, into all.
void Collectives::reduce_shared(const Job& job) {
  const unsigned n = end_.size;
  const std::uint64_t line = std::max<std::uint64_t>(kCacheLine / item_, 1);
  const std::uint64_t each = round_up((job.count() + n - 1) / n, line);
  const std::uint64_t from = std::min(job.count(), each * end_.rank);
  const std::uint64_t to = std::min(job.count(), from + each);
  const std::uint64_t block = 8192 / item_;  // stays in the L1 cache until all have it
  for (std::uint64_t at = from; at < to; at += block) {
    const std::uint64_t b = std::min(block, to - at);
    for (unsigned j = 0; j < n; ++j) sources_[j] = theirs_[j] + at * item_;
    Bytes mine = job.out + at * item_;
    loop_(mine, sources_.data(), n, b, factors_.data());
    for (unsigned j = 0; j < n; ++j) {
      if (j != end_.rank) std::memcpy(theirs_[j] + at * item_, mine, b * item_);
    }
  }
}

Status Collectives::reduce_by_parts(Job& job) {
  const Part single{job.out, job.count()};
  const bool is_list = job.verb() == Verb::all_reduce_list;
  const Part* parts = is_list ? job.outs.data() : &single;
  const std::size_t num_parts = is_list ? job.outs.size() : 1;
  const bool takes = job.verb() != Verb::reduce || job.root() == static_cast<int>(end_.rank);
  const unsigned n = end_.size;
  const unsigned me = end_.rank;
  const std::uint64_t count = job.count();
  // A slot holds a chunk, cut into one piece per member, and the one piece that I have reduced.
  const std::uint64_t piece = lay_out(n + 1, (count + n - 1) / n * item_) / item_;
  const std::uint64_t per_chunk = piece * n;
  const std::uint64_t chunks = num_chunks(count, per_chunk);
  const std::size_t result_at = per_chunk * item_;
  const std::size_t block = 8192 / item_;  // stays in the L1 cache from reducing to publishing
  streams_out_ = count * item_ > tuning.stream_out_bytes;

  // The chunk's last pieces may be short or empty: cut what there is evenly, in whole lines.
  const auto cut = [&](std::uint64_t i, unsigned p, std::uint64_t& from, std::uint64_t& len) {
    const std::uint64_t start = i * per_chunk;
    const std::uint64_t here = std::min(per_chunk, count - start);
    const std::uint64_t line = std::max<std::uint64_t>(kCacheLine / item_, 1);
    const std::uint64_t each = std::min(piece, round_up((here + n - 1) / n, line));
    from = std::min(here, each * p);
    len = std::min(here, each * (p + 1)) - from;
    from += start;
  };
  const auto write = [&](std::uint64_t i, std::uint64_t round) {
    Bytes mine = slot(me, round);
    for (unsigned p = 0; p < n; ++p) {
      std::uint64_t from, len;
      cut(i, p, from, len);
      if (p == me || len == 0) continue;
      for_stretches(parts, num_parts, from, len, item_,
                    [&](Bytes data, std::uint64_t at, std::uint64_t m) {
                      copy_in(mine + (p * piece + at) * item_, data, m * item_);
                    });
    }
  };
  // Reduce my piece of the i-th chunk, given in `round`, for publishing in `result_round`.
  const auto reduce_mine = [&](std::uint64_t i, std::uint64_t round, std::uint64_t result_round) {
    Bytes result = slot(me, result_round) + result_at;
    std::uint64_t from, len;
    cut(i, me, from, len);
    for_stretches(parts, num_parts, from, len, item_,
                  [&](Bytes data, std::uint64_t at, std::uint64_t m) {
      for (std::uint64_t done = 0; done < m; done += block) {
        const std::uint64_t b = std::min<std::uint64_t>(block, m - done);
        const std::size_t offset = (me * piece + at + done) * item_;
        for (unsigned j = 0; j < n; ++j) {
          sources_[j] = j == me ? data + done * item_ : slot(j, round) + offset;
        }
        Bytes there = result + (at + done) * item_;
        if (takes) {
          loop_(data + done * item_, sources_.data(), n, b, factors_.data());
          copy_in(there, data + done * item_, b * item_);
        } else {
          loop_(there, sources_.data(), n, b, factors_.data());
        }
      }
    });
  };
  const auto collect = [&](std::uint64_t i, std::uint64_t round) {
    if (!takes) return;
    for (unsigned p = 0; p < n; ++p) {
      std::uint64_t from, len;
      cut(i, p, from, len);
      if (p == me || len == 0) continue;
      const std::uint8_t* result = slot(p, round) + result_at;
      for_stretches(parts, num_parts, from, len, item_,
                    [&](Bytes data, std::uint64_t at, std::uint64_t m) {
                      copy_out(data, result + at * item_, m * item_);
                    });
    }
  };

  std::uint64_t first = rounds_.next();
  const Input input = reduce_input(job);
  if (!offer(input, first)) write(0, first);
  rounds_.announce(job.call);
  Status status = agree(job, first);
  if (status != Status::ok) return status;
  for (unsigned j = 0; j < n; ++j) factors_[j] = end_.segment.member(j).factors[first % kDepth];
  const Sharing sharing = find_offers(input, first);
  if (sharing == Sharing::all) {
    reduce_shared(job);
    return finish_direct(job, true);
  }
  if (sharing == Sharing::some) {  // those who offered have written nothing: begin anew
    first = rounds_.next();
    write(0, first);
    rounds_.publish();
    status = rounds_.wait(first, job.call);
    if (status != Status::ok) return status;
  }
  if (chunks == 1) {
    reduce_mine(0, first, first + 1);
    rounds_.publish();
    status = rounds_.wait(first + 1, job.call);
    if (status == Status::ok) collect(0, first + 1);
    return status;
  }
  // Chunk i is given in round i, reduced while round i + 1 is in flight, and its results are
  // published in round i + 2.
  for (std::uint64_t i = 1; i <= chunks + 1; ++i) {
    if (i < chunks) write(i, first + i);
    rounds_.publish();
    if (i <= chunks) reduce_mine(i - 1, first + i - 1, first + i + 1);
    if (i >= 3) collect(i - 3, first + i - 1);
    status = rounds_.wait(first + i, job.call);
    if (status != Status::ok) return status;
  }
  collect(chunks - 1, first + chunks + 1);
  return Status::ok;
}

// ---- copies

Status Collectives::broadcast(Job& job) {
  const bool is_root = job.root() == static_cast<int>(end_.rank);
  const auto root = static_cast<unsigned>(job.root());
  const std::size_t bytes = job.count() * item_;
  const bool is_inline = bytes <= kInlineBytes;
  const std::size_t chunk = lay_out(1, bytes);
  streams_out_ = bytes > tuning.stream_out_bytes;
  const auto write = [&](std::uint64_t i, std::uint64_t round) {
    if (!is_root || bytes == 0) return;
    copy_in(area(root, round, is_inline), job.out + i * chunk, std::min(chunk, bytes - i * chunk));
  };
  const auto read = [&](std::uint64_t i, std::uint64_t round) {
    if (is_root || bytes == 0) return;
    copy_out(job.out + i * chunk, area(root, round, is_inline), std::min(chunk, bytes - i * chunk));
  };
  loop_ = nullptr;
  return exchange(job, num_chunks(bytes, chunk), {job.out, bytes, job.root()}, write, read,
                  [&] { return is_root || fetch(job.out, root, 0, bytes); });
}

Status Collectives::all_gather(Job& job) {
  const unsigned n = end_.size;
  const unsigned me = end_.rank;
  const bool varies = job.verb() == Verb::all_gather_v;
  loop_ = nullptr;
  if (varies) {
    const Status status = agree_on_sizes(job);
    if (status != Status::ok) return status;
  }
  const auto bytes_of = [&](unsigned j) {
    return (varies ? expected_[me * n + j] : job.count()) * item_;
  };
  const auto target = [&](unsigned j) {
    return job.outs.empty() ? job.out + j * job.count() * item_ : job.outs[j].data;
  };
  const Bytes own = varies ? job.ins[0].data : job.in;
  std::size_t longest = 0, total = 0;
  for (unsigned j = 0; j < n; ++j) {
    longest = std::max(longest, bytes_of(j));
    total += bytes_of(j);
  }
  const bool is_inline = !varies && longest <= kInlineBytes;
  const std::size_t chunk = lay_out(1, longest);
  streams_out_ = total > tuning.stream_out_bytes;
  const auto write = [&](std::uint64_t i, std::uint64_t round) {
    const std::size_t start = i * chunk;
    if (start >= bytes_of(me)) return;
    copy_in(area(me, round, is_inline), own + start, std::min(chunk, bytes_of(me) - start));
  };
  const auto read = [&](std::uint64_t i, std::uint64_t round) {
    const std::size_t start = i * chunk;
    for (unsigned j = 0; j < n; ++j) {
      if (start >= bytes_of(j)) continue;
      const std::size_t bytes = std::min(chunk, bytes_of(j) - start);
      if (j != me) {
        copy_out(target(j) + start, area(j, round, is_inline), bytes);
      } else if (target(me) != own) {
        copy_out(target(me) + start, own + start, bytes);
      }
    }
  };
  const auto direct = [&] {
    bool is_done = true;
    for (unsigned j = 0; j < n; ++j) is_done &= fetch(target(j), j, 0, bytes_of(j));
    return is_done;
  };
  const std::uint64_t rounds = num_chunks(longest, chunk);
  return varies ? exchange_parts(job, rounds, longest, write, read, direct)
                : exchange(job, rounds, {own, longest, kEveryone, longest}, write, read, direct);
}

Status Collectives::gather(Job& job) {
  const unsigned n = end_.size;
  const unsigned me = end_.rank;
  const auto root = static_cast<unsigned>(job.root());
  const bool varies = job.verb() == Verb::gather_v;
  loop_ = nullptr;
  if (varies) {
    const Status status = agree_on_sizes(job);
    if (status != Status::ok) return status;
  }
  const auto bytes_of = [&](unsigned j) {
    return (varies ? given_[j * n + root] : job.count()) * item_;
  };
  const Bytes own = varies ? job.ins[0].data : job.in;
  std::size_t longest = 0, total = 0;
  for (unsigned j = 0; j < n; ++j) {
    longest = std::max(longest, bytes_of(j));
    total += bytes_of(j);
  }
  const bool is_inline = !varies && longest <= kInlineBytes;
  const std::size_t chunk = lay_out(1, longest);
  streams_out_ = total > tuning.stream_out_bytes;
  const auto write = [&](std::uint64_t i, std::uint64_t round) {
    const std::size_t start = i * chunk;
    if (me == root || start >= bytes_of(me)) return;
    copy_in(area(me, round, is_inline), own + start, std::min(chunk, bytes_of(me) - start));
  };
  const auto read = [&](std::uint64_t i, std::uint64_t round) {
    if (me != root) return;
    const std::size_t start = i * chunk;
    for (unsigned j = 0; j < n; ++j) {
      if (start >= bytes_of(j)) continue;
      const std::size_t bytes = std::min(chunk, bytes_of(j) - start);
      const Bytes to = job.outs[j].data;
      if (j != me) {
        copy_out(to + start, area(j, round, is_inline), bytes);
      } else if (to != own) {
        copy_out(to + start, own + start, bytes);
      }
    }
  };
  const std::uint64_t rounds = num_chunks(longest, chunk);
  return varies ? exchange_agreed(job, longest == 0 ? 0 : rounds, write, read)
                : exchange(job, rounds, {own, longest}, write, read, [&] {
                    bool is_done = true;
                    for (unsigned j = 0; j < n && me == root; ++j) {
                      is_done &= fetch(job.outs[j].data, j, 0, longest);
                    }
                    return is_done;
                  });
}

Status Collectives::scatter(Job& job) {
  const unsigned n = end_.size;
  const unsigned me = end_.rank;
  const auto root = static_cast<unsigned>(job.root());
  const bool varies = job.verb() == Verb::scatter_v;
  loop_ = nullptr;
  if (varies) {
    const Status status = agree_on_sizes(job);
    if (status != Status::ok) return status;
  }
  const auto bytes_of = [&](unsigned j) {
    return (varies ? given_[root * n + j] : job.count()) * item_;
  };
  const Bytes target = varies ? job.outs[0].data : job.out;
  std::size_t longest = 0, total = 0;
  for (unsigned j = 0; j < n; ++j) {
    longest = std::max(longest, bytes_of(j));
    total += bytes_of(j);
  }
  const std::size_t piece = lay_out(n - 1, longest);
  streams_out_ = bytes_of(me) > tuning.stream_out_bytes;
  const auto write = [&](std::uint64_t i, std::uint64_t round) {
    if (me != root) return;
    const std::size_t start = i * piece;
    for (unsigned j = 0; j < n; ++j) {
      if (j == me || start >= bytes_of(j)) continue;
      copy_in(slot(me, round) + place(me, j) * piece, job.ins[j].data + start,
              std::min(piece, bytes_of(j) - start));
    }
  };
  const auto read = [&](std::uint64_t i, std::uint64_t round) {
    const std::size_t start = i * piece;
    if (start >= bytes_of(me)) return;
    const std::size_t bytes = std::min(piece, bytes_of(me) - start);
    if (me != root) {
      copy_out(target + start, slot(root, round) + place(root, me) * piece, bytes);
    } else if (target != job.ins[me].data) {
      copy_out(target + start, job.ins[me].data + start, bytes);
    }
  };
  const std::uint64_t rounds = num_chunks(longest, piece);
  return varies ? exchange_agreed(job, longest == 0 ? 0 : rounds, write, read)
                : exchange(job, rounds, {}, write, read, [] { return true; });
}

Status Collectives::reduce_scatter(Job& job) {
  const unsigned n = end_.size;
  const unsigned me = end_.rank;
  const bool varies = job.verb() == Verb::reduce_scatter_v;
  if (varies) {
    const Status status = agree_on_sizes(job);
    if (status != Status::ok) return status;
  }
  const auto count_of = [&](unsigned j) { return varies ? given_[me * n + j] : job.count(); };
  const auto source = [&](unsigned j) {
    return varies ? job.ins[j].data : job.in + j * job.count() * item_;
  };
  const Bytes target = varies ? job.outs[0].data : job.out;
  std::uint64_t longest = 0;
  for (unsigned j = 0; j < n; ++j) longest = std::max<std::uint64_t>(longest, count_of(j));
  const bool is_inline = !varies && (n - 1) * job.count() * item_ <= kInlineBytes;
  const std::uint64_t piece = lay_out(n - 1, longest * item_) / item_;
  const std::uint64_t stride = is_inline ? job.count() : piece;
  const auto write = [&](std::uint64_t i, std::uint64_t round) {
    const std::uint64_t start = i * piece;
    for (unsigned j = 0; j < n; ++j) {
      if (j == me || start >= count_of(j)) continue;
      copy_in(area(me, round, is_inline) + place(me, j) * stride * item_,
              source(j) + start * item_, std::min(piece, count_of(j) - start) * item_);
    }
  };
  const auto read = [&](std::uint64_t i, std::uint64_t round) {
    const std::uint64_t start = i * piece;
    if (start >= count_of(me)) return;
    for (unsigned j = 0; j < n; ++j) {
      sources_[j] = j == me ? source(me) + start * item_
                            : area(j, round, is_inline) + place(j, me) * stride * item_;
    }
    loop_(target + start * item_, sources_.data(), n, std::min(piece, count_of(me) - start),
          factors_.data());
  };
  const std::uint64_t rounds = num_chunks(longest, piece);
  return varies ? exchange_agreed(job, longest == 0 ? 0 : rounds, write, read)
                : exchange(job, rounds, {job.in, n * job.count() * item_}, write, read, [&] {
                    for (unsigned j = 0; j < n; ++j) {
                      sources_[j] = theirs_[j] + me * job.count() * item_;
                    }
                    loop_(target, sources_.data(), n, job.count(), factors_.data());
                    return true;
                  });
}

Status Collectives::all_to_all(Job& job) {
  const unsigned n = end_.size;
  const unsigned me = end_.rank;
  const bool varies = job.verb() == Verb::all_to_all_v;
  loop_ = nullptr;
  if (varies) {
    const Status status = agree_on_sizes(job);
    if (status != Status::ok) return status;
  }
  const std::size_t equal = job.count() * item_;
  const auto bytes_to = [&](unsigned j) { return varies ? given_[me * n + j] * item_ : equal; };
  const auto bytes_from = [&](unsigned j) { return varies ? given_[j * n + me] * item_ : equal; };
  const auto source = [&](unsigned j) { return varies ? job.ins[j].data : job.in + j * equal; };
  const auto target = [&](unsigned j) { return varies ? job.outs[j].data : job.out + j * equal; };
  std::size_t longest = equal, total = equal * n;
  if (varies) {
    longest = *std::max_element(given_.begin(), given_.end()) * item_;
    total = 0;
    for (unsigned j = 0; j < n; ++j) total += bytes_from(j);
  }
  const bool is_inline = !varies && (n - 1) * equal <= kInlineBytes;
  const std::size_t piece = lay_out(n - 1, longest);
  const std::size_t stride = is_inline ? equal : piece;
  streams_out_ = total > tuning.stream_out_bytes;
  const auto write = [&](std::uint64_t i, std::uint64_t round) {
    const std::size_t start = i * piece;
    for (unsigned j = 0; j < n; ++j) {
      if (j == me || start >= bytes_to(j)) continue;
      copy_in(area(me, round, is_inline) + place(me, j) * stride, source(j) + start,
              std::min(piece, bytes_to(j) - start));
    }
  };
  const auto read = [&](std::uint64_t i, std::uint64_t round) {
    const std::size_t start = i * piece;
    for (unsigned j = 0; j < n; ++j) {
      if (start >= bytes_from(j)) continue;
      const std::size_t bytes = std::min(piece, bytes_from(j) - start);
      if (j != me) {
        copy_out(target(j) + start, area(j, round, is_inline) + place(j, me) * stride, bytes);
      } else if (target(me) != source(me)) {
        copy_out(target(me) + start, source(me) + start, bytes);
      }
    }
  };
  const auto direct = [&] {
    bool is_done = true;
    for (unsigned j = 0; j < n; ++j) {
      is_done &= fetch(target(j), j, varies ? 0 : me * equal, bytes_from(j));
    }
    return is_done;
  };
  const std::uint64_t rounds = num_chunks(longest, piece);
  return varies ? exchange_parts(job, rounds, longest, write, read, direct)
                : exchange(job, rounds, {job.in, n * equal, kEveryone, equal}, write, read, direct);
}

Status Collectives::barrier(Job& job) {
  loop_ = nullptr;
  const std::uint64_t round = rounds_.next();
  rounds_.announce(job.call);
  return agree(job, round);
}

}  // namespace meshdist
