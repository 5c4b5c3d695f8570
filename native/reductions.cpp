// The collectives that reduce: all-reduce, reduce and reduce-scatter.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "collectives.h"
#include "exchange.h"

namespace meshdist {
namespace {

// What is reduced at a time where the result is copied on, and stays in the L1 cache until then.
constexpr std::size_t kL1BlockBytes = 8192;

// Call `use(data, offset, count)` for each contiguous stretch of the elements [start, start + count) that
// `job` reduces, in one buffer or several.
template <class Use>
void for_stretches(const Job& job, std::uint64_t start, std::uint64_t count, std::size_t item, Use use) {
  if (job.operation() != OperationSpec::all_reduce_list) return use(job.out + start * item, 0, count);
  std::uint64_t done = 0;
  for (const Part& part : job.outs) {
    if (done == count) return;
    if (start >= part.count) {
      start -= part.count;
      continue;
    }
    const std::uint64_t n = std::min(part.count - start, count - done);
    use(part.data + start * item, done, n);
    done += n;
    start = 0;
  }
}

}  // namespace

Status Collectives::all_reduce(Job& job) {
  if (end_.size == 1) return Status::ok;  // it lies there already, as its own sum and mean
  if (is_halved(job)) return reduce_by_halves(job);
  const bool whole = end_.size <= 2 || job.count() * item_ <= tuning.whole_reduce_bytes;
  return whole ? reduce_whole(job) : reduce_by_parts(job);
}

Status Collectives::reduce_whole(Job& job) {
  // Worked example: 3 members sum 2 numbers of 4 bytes in round g, then 12 numbers in round g + 1.
  //
  //   round g      line g % 4 of the member       as soon as it sees all flags, each member
  //   member 0     flag g + 1, bytes 1 2          adds up its own tensor and the others' bytes,
  //   member 1     flag g + 1, bytes 10 20        in group order: 1 + 10 + 100, 2 + 20 + 200
  //   member 2     flag g + 1, bytes 100 200
  //
  // 8 bytes fit into the 32 of a line, so a call is one cache line of each member. 48 bytes do not:
  // in round g + 1 they lie in slot (g + 1) % 4 of each member, and the line has flag and header.
  //
  // Why four lines and four slots suffice, with member 2 as late as it may be:
  //
  //   member 0     publish g   publish g+1   publish g+2 ...............   publish g+3   write g+4
  //   member 2     publish g   publish g+1 .....   read g   publish g+2
  //   time         --------------------------------------------------------------------------->
  //
  // Member 0 publishes g + 3 once it has seen g + 2 of all, and member 2 has read g by then. So
  // g + 4 may lie where g lay. Of three lines g + 3 would lie there; a member writes that once it has
  // published g + 2, for which it has seen g + 1 of all, and member 2 may still read g.
  const bool takes = job.operation() != OperationSpec::reduce || job.root() == static_cast<int>(end_.rank);
  const std::uint64_t count = job.count();
  const bool is_inline = count * item_ <= kInlineBytes;
  const std::size_t bytes = count * item_;
  const std::uint64_t per_chunk = lay_out(1, bytes, near_chunk(bytes)) / item_;

  const bool gives = job.operation() != OperationSpec::reduce || !takes;  // no member reads the root's input
  const auto write = [&](std::uint64_t i, std::uint64_t round) {
    const std::uint64_t start = i * per_chunk;
    if (!gives || start >= count) return;
    Bytes slot = area(end_.rank, round, is_inline);
    for_stretches(
        job, start, std::min(per_chunk, count - start), item_,
        [&](Bytes data, std::uint64_t at, std::uint64_t n) { copy_in(slot + at * item_, data, n * item_); });
  };
  const auto read = [&](std::uint64_t i, std::uint64_t round) {
    const std::uint64_t start = i * per_chunk;
    if (!takes || start >= count) return;
    for_stretches(job, start, std::min(per_chunk, count - start), item_,
                  [&](Bytes data, std::uint64_t at, std::uint64_t n) {
                    for (unsigned j = 0; j < end_.size; ++j) {
                      sources_[j] = j == end_.rank ? data : area(j, round, is_inline) + at * item_;
                    }
                    loop_(data, sources_.data(), end_.size, n);
                  });
  };
  return exchange(job, num_chunks(count, per_chunk), reduce_input(job), write, read, [&] {
    reduce_shared(job);
    return true;
  });
}

Collectives::Input Collectives::reduce_input(const Job& job) const {
  if (job.operation() != OperationSpec::all_reduce) return {};  // the others must not be written to, or are many
  return {job.out, job.count() * item_, kEveryone};
}

// What `member` reduces for all: whole cache lines, but for the last.
Collectives::Range Collectives::share(const Job& job, unsigned member) const {
  const std::uint64_t line = std::max<std::uint64_t>(kCacheLine / item_, 1);
  const std::uint64_t each = round_up((job.count() + end_.size - 1) / end_.size, line);
  const std::uint64_t from = std::min(job.count(), each * member);
  return {from, std::min(job.count(), from + each)};
}

// All-reduce buffers that all members map: each member reduces its part of all, into all.
void Collectives::reduce_shared(const Job& job) {
  const unsigned n = end_.size;
  const auto [from, to] = share(job, end_.rank);
  const std::uint64_t block = kL1BlockBytes / item_;
  for (std::uint64_t at = from; at < to; at += block) {
    const std::uint64_t b = std::min(block, to - at);
    for (unsigned j = 0; j < n; ++j) sources_[j] = theirs_[j] + at * item_;
    Bytes mine = job.out + at * item_;
    loop_(mine, sources_.data(), n, b);
    for (unsigned j = 0; j < n; ++j) {
      if (j != end_.rank) std::memcpy(theirs_[j] + at * item_, mine, b * item_);
    }
  }
}

// Whether each of two members reduces a half of the inputs directly from memory; equal on both.
bool Collectives::is_halved(const Job& job) const {
  const std::size_t bytes = job.count() * item_;
  const std::size_t least = streams(bytes) ? tuning.far_halves_least_bytes : tuning.halves_least_bytes;
  return job.operation() == OperationSpec::all_reduce && end_.size == 2 && reads_others_ && bytes >= least &&
         bytes <= tuning.halves_most_bytes;
}

// Each fetches its half of the other's data and reduces it into its own; then it fetches the half
// that the other has reduced.
Status Collectives::reduce_by_halves(Job& job) {
  // Worked example: 2 members sum 48 floats, a and b: 3 cache lines, of which member 0 reduces two and
  // member 1 the last. A block that is fetched has 16 floats.
  //
  //                0:16    16:32    32:48
  //   member 0     a       a        a          round g: the place of a is published,
  //   member 1     b       b        b          and that of b
  //
  //   member 0     a+b     a+b      a          it has fetched b 0:16, b 16:32; round g + 1: "to 32"
  //   member 1     b       b        a+b        it has fetched a 32:48;         round g + 1: "to 48"
  //
  //   member 0     a+b     a+b      a+b        it has fetched a+b 32:48;       round g + 2: "read"
  //   member 1     a+b     a+b      a+b        it has fetched a+b 0:32;        round g + 2: "read"
  //
  // No call returns before round g + 2 is complete: until then the other reads its memory.
  //
  // Where member 0 cannot read b 16:32 it says "to 16" and "missed" in round g + 1. Then both finish
  // by slots, in three more rounds: for 0:16 member 0 gives a+b, which member 1 copies; for 16:32
  // both give what they have and both reduce; for 32:48 member 1 gives a+b, which member 0 copies.
  const std::uint64_t first = rounds_.next();
  Input input = reduce_input(job);
  input.is_fetched = true;
  offer(input, first);
  rounds_.announce(job.call);
  Status status = agree(job, first);
  if (status != Status::ok) return status;
  find_offers(input, first);
  if (rounds_.everyone_hints(first, kHintShared)) {
    reduce_shared(job);
    return finish_direct(job, true);
  }
  Ends ends{};
  status = reduce_half(job, ends);
  if (status != Status::ok && status != Status::unsupported) return status;
  const unsigned other = 1 - end_.rank;
  const auto [from, to] = share(job, other);
  const std::size_t at = from * item_;
  status = finish_direct(job, status == Status::ok && fetch(job.out + at, other, at, (to - from) * item_));
  return status == Status::unsupported ? finish_halves(job, ends) : status;
}

// Copy a block of what `member` has offered to where it stays in the cache; null where it cannot be read.
Collectives::Bytes Collectives::fetch_block(unsigned member, std::size_t offset, std::size_t bytes) {
  fetched_.resize(end_.size * tuning.fetch_block_bytes);
  const Bytes here = fetched_.data() + member * tuning.fetch_block_bytes;
  return fetch(here, member, offset, bytes) ? here : nullptr;
}

// Reduce this member's half, block by block as it is fetched. `ends` gets how far each has come;
// where that is not to the end of its half the status is `unsupported`, on both.
Status Collectives::reduce_half(const Job& job, Ends& ends) {
  const unsigned other = 1 - end_.rank;
  const auto [from, to] = share(job, end_.rank);
  const std::uint64_t block = tuning.fetch_block_bytes / item_;
  std::uint64_t at = from;
  while (at < to) {
    const std::uint64_t n = std::min(block, to - at);
    sources_[other] = fetch_block(other, at * item_, n * item_);
    if (sources_[other] == nullptr) break;
    Bytes mine = job.out + at * item_;
    sources_[end_.rank] = mine;
    loop_(mine, sources_.data(), end_.size, n);
    at += n;
  }
  const std::uint64_t round = rounds_.next();
  std::memcpy(rounds_.line(end_.rank, round).bytes, &at, sizeof at);
  const Status status = rounds_.wait_for_next(job.call, at < to);
  if (status != Status::ok) return status;
  for (unsigned j = 0; j < end_.size; ++j) {
    std::memcpy(&ends[j], rounds_.line(j, round).bytes, sizeof ends[j]);
  }
  return rounds_.has_anyone_missed() ? Status::unsupported : Status::ok;
}

// Finish by slots: each member has reduced its half up to its end, and not the rest.
Status Collectives::finish_halves(Job& job, const Ends& ends) {
  const std::uint64_t per_chunk = lay_out(1, job.count() * item_) / item_;
  const auto go_through = [&](Range range, auto take) {
    const auto at = [&](std::uint64_t i) { return range.from + i * per_chunk; };
    const auto bytes = [&](std::uint64_t i) { return std::min(per_chunk, range.to - at(i)) * item_; };
    const auto write = [&](std::uint64_t i, std::uint64_t round) {
      copy_in(slot(end_.rank, round), job.out + at(i) * item_, bytes(i));
    };
    const auto read = [&](std::uint64_t i, std::uint64_t round) {
      take(job.out + at(i) * item_, round, bytes(i));
    };
    const std::uint64_t num_rounds = (range.to - range.from + per_chunk - 1) / per_chunk;
    return exchange_agreed(job, num_rounds, write, read);
  };
  for (unsigned j = 0; j < end_.size; ++j) {
    const Range half = share(job, j);
    const auto copy = [&](Bytes there, std::uint64_t round, std::size_t bytes) {
      if (j != end_.rank) copy_out(there, slot(j, round), bytes);
    };
    const auto reduce = [&](Bytes there, std::uint64_t round, std::size_t bytes) {
      for (unsigned i = 0; i < end_.size; ++i) {
        sources_[i] = i == end_.rank ? there : slot(i, round);
      }
      loop_(there, sources_.data(), end_.size, bytes / item_);
    };
    Status status = go_through({half.from, ends[j]}, copy);
    if (status != Status::ok) return status;
    status = go_through({ends[j], half.to}, reduce);
    if (status != Status::ok) return status;
  }
  return Status::ok;
}

Status Collectives::reduce_by_parts(Job& job) {
  const bool takes = job.operation() != OperationSpec::reduce || job.root() == static_cast<int>(end_.rank);
  const unsigned n = end_.size;
  const unsigned me = end_.rank;
  const std::uint64_t count = job.count();
  // A slot holds a chunk, cut into one piece per member, and the one piece that I have reduced.
  const std::uint64_t piece = lay_out(n + 1, (count + n - 1) / n * item_) / item_;
  const std::uint64_t per_chunk = piece * n;
  const std::uint64_t chunks = num_chunks(count, per_chunk);
  const std::size_t result_at = per_chunk * item_;
  const std::size_t block = kL1BlockBytes / item_;
  streams_out_ = count * item_ > tuning.stream_out_bytes;

  // The chunk's last pieces may be short or empty: cut what there is evenly, in whole lines.
  const auto cut = [&](std::uint64_t i, unsigned p) {
    const std::uint64_t start = i * per_chunk;
    const std::uint64_t here = std::min(per_chunk, count - start);
    const std::uint64_t line = std::max<std::uint64_t>(kCacheLine / item_, 1);
    const std::uint64_t each = std::min(piece, round_up((here + n - 1) / n, line));
    const std::uint64_t from = std::min(here, each * p);
    return std::pair(start + from, std::min(here, each * (p + 1)) - from);
  };
  const auto write = [&](std::uint64_t i, std::uint64_t round) {
    Bytes mine = slot(me, round);
    for (unsigned p = 0; p < n; ++p) {
      const auto [from, len] = cut(i, p);
      if (p == me || len == 0) continue;
      for_stretches(job, from, len, item_, [&](Bytes data, std::uint64_t at, std::uint64_t m) {
        copy_in(mine + (p * piece + at) * item_, data, m * item_);
      });
    }
  };
  // Reduce my piece of the i-th chunk, given in `round`, for publishing in `result_round`.
  const auto reduce_mine = [&](std::uint64_t i, std::uint64_t round, std::uint64_t result_round) {
    Bytes result = slot(me, result_round) + result_at;
    const auto [from, len] = cut(i, me);
    for_stretches(job, from, len, item_, [&](Bytes data, std::uint64_t at, std::uint64_t m) {
      for (std::uint64_t done = 0; done < m; done += block) {
        const std::uint64_t b = std::min<std::uint64_t>(block, m - done);
        const std::size_t offset = (me * piece + at + done) * item_;
        for (unsigned j = 0; j < n; ++j) {
          sources_[j] = j == me ? data + done * item_ : slot(j, round) + offset;
        }
        Bytes there = result + (at + done) * item_;
        if (takes) {
          loop_(data + done * item_, sources_.data(), n, b);
          copy_in(there, data + done * item_, b * item_);
        } else {
          loop_(there, sources_.data(), n, b);
        }
      }
    });
  };
  const auto collect = [&](std::uint64_t i, std::uint64_t round) {
    if (!takes) return;
    for (unsigned p = 0; p < n; ++p) {
      const auto [from, len] = cut(i, p);
      if (p == me || len == 0) continue;
      const std::uint8_t* result = slot(p, round) + result_at;
      for_stretches(job, from, len, item_, [&](Bytes data, std::uint64_t at, std::uint64_t m) {
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
  const Sharing sharing = find_offers(input, first);
  if (sharing == Sharing::all) {
    reduce_shared(job);
    return finish_direct(job, true);
  }
  if (sharing == Sharing::some) {  // members that offered have written nothing: start over
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

// Reduce `count` elements of each of `sources_` into a result.
void Collectives::reduce_out(Bytes to, std::uint64_t count) {
  if (!streams_out_) {
    loop_(to, sources_.data(), end_.size, count);
    return;
  }
  alignas(kCacheLine) std::uint8_t reduced[kL1BlockBytes];
  const std::uint64_t block = kL1BlockBytes / item_;
  while (count > 0) {
    const std::uint64_t here = std::min(block, count);
    const std::size_t bytes = here * item_;
    loop_(reduced, sources_.data(), end_.size, here);
    copy_out(to, reduced, bytes);
    for (const void*& source : sources_) source = static_cast<const std::uint8_t*>(source) + bytes;
    to += bytes;
    count -= here;
  }
}

// Whether the result of a reduce-scatter would overwrite input that is still to be read. Its own part of the
// input is read before it is written, if the two begin together.
bool Collectives::writes_over_input(const Job& job) const {
  const bool varies = job.operation() == OperationSpec::reduce_scatter_v;
  const Part out = varies ? job.outs[0] : Part{job.out, job.count()};
  const Bytes end = out.data + out.count * item_;
  for (unsigned j = 0; j < end_.size; ++j) {
    const Part in = varies ? job.ins[j] : Part{job.in + j * job.count() * item_, job.count()};
    if (j == end_.rank && in.data == out.data) continue;
    if (in.data < end && out.data < in.data + in.count * item_) return true;
  }
  return false;
}

Status Collectives::reduce_scatter(Job& job) {
  if (writes_over_input(job)) {
    const bool is_list = job.operation() == OperationSpec::reduce_scatter_v;
    Bytes& out = is_list ? job.outs[0].data : job.out;
    const std::size_t bytes = (is_list ? job.outs[0].count : job.count()) * item_;
    std::vector<std::uint8_t> result(bytes);
    const Bytes wanted = std::exchange(out, result.data());
    const Status status = reduce_scatter_apart(job);
    out = wanted;
    if (status == Status::ok) std::memcpy(out, result.data(), bytes);
    return status;
  }
  return reduce_scatter_apart(job);
}

Status Collectives::reduce_scatter_apart(Job& job) {
  const unsigned n = end_.size;
  const unsigned me = end_.rank;
  const bool varies = job.operation() == OperationSpec::reduce_scatter_v;
  if (varies) {
    const Status status = agree_on_sizes(job);
    if (status != Status::ok) return status;
  }
  const auto count_of = [&](unsigned j) { return varies ? given_[me * n + j] : job.count(); };
  const auto source = [&](unsigned j) { return varies ? job.ins[j].data : job.in + j * job.count() * item_; };
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
      copy_in(area(me, round, is_inline) + place(me, j) * stride * item_, source(j) + start * item_,
              std::min(piece, count_of(j) - start) * item_);
    }
  };
  const auto read = [&](std::uint64_t i, std::uint64_t round) {
    const std::uint64_t start = i * piece;
    if (start >= count_of(me)) return;
    for (unsigned j = 0; j < n; ++j) {
      sources_[j] =
          j == me ? source(me) + start * item_ : area(j, round, is_inline) + place(j, me) * stride * item_;
    }
    reduce_out(target + start * item_, std::min(piece, count_of(me) - start));
  };
  const std::size_t part = job.count() * item_;
  const bool is_in_place = target == source(me);
  // A result in place has just been read: its lines are in the cache.
  streams_out_ = !is_in_place && count_of(me) * item_ > tuning.stream_out_bytes;
  const auto direct = [&] {
    // If another member's part may be unreadable, the call must be able to start over.
    const bool may_fail = std::find(is_afar_.begin(), is_afar_.end(), true) != is_afar_.end();
    std::vector<std::uint8_t> beside(is_in_place && may_fail ? part : 0);
    const Bytes result = beside.empty() ? target : beside.data();
    for (std::uint64_t at = 0; at < job.count();) {
      const std::uint64_t count = std::min(tuning.fetch_block_bytes / item_, job.count() - at);
      for (unsigned j = 0; j < n; ++j) {
        const std::size_t offset = (me * job.count() + at) * item_;
        if (!is_afar_[j]) {
          sources_[j] = theirs_[j] + offset;
        } else if (const Bytes here = fetch_block(j, offset, count * item_)) {
          sources_[j] = here;
        } else {
          return false;
        }
      }
      loop_(result + at * item_, sources_.data(), n, count);
      at += count;
    }
    if (!beside.empty()) std::memcpy(target, result, part);
    return true;
  };
  const std::uint64_t rounds = num_chunks(longest, piece);
  if (varies) return exchange_agreed(job, longest == 0 ? 0 : rounds, write, read);
  const Input input{job.in, n * part, kEveryone, !is_in_place && is_fetched(part)};
  return exchange(job, rounds, input, write, read, direct);
}

}  // namespace meshdist
