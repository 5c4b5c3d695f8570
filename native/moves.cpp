// The collectives that move data as it is: broadcast, gather, scatter and all-gather.
#include <algorithm>

#include "collectives.h"
#include "exchange.h"

namespace meshdist {

Status Collectives::broadcast(Job& job) {
  const bool is_root = job.root() == static_cast<int>(end_.rank);
  const auto root = static_cast<unsigned>(job.root());
  const std::size_t bytes = job.count() * item_;
  const bool is_inline = bytes <= kInlineBytes;
  const std::size_t chunk = lay_out(1, bytes, near_chunk(bytes));
  streams_out_ = bytes > tuning.stream_out_bytes;
  const auto write = [&](std::uint64_t i, std::uint64_t round) {
    if (!is_root || bytes == 0) return;
    copy_in(area(root, round, is_inline), job.out + i * chunk, std::min(chunk, bytes - i * chunk));
  };
  const auto read = [&](std::uint64_t i, std::uint64_t round) {
    if (is_root || bytes == 0) return;
    copy_out(job.out + i * chunk, area(root, round, is_inline), std::min(chunk, bytes - i * chunk));
  };
  const bool reads = is_fetched(bytes) && bytes <= tuning.fetch_broadcast_most_bytes;
  return exchange(job, num_chunks(bytes, chunk), {job.out, bytes, job.root(), reads}, write, read,
                  [&] { return is_root || fetch(job.out, root, 0, bytes); });
}

// All-gather, and gather, in which the root alone takes and all others give.
Status Collectives::all_gather(Job& job) {
  const unsigned n = end_.size;
  const unsigned me = end_.rank;
  const bool varies = job.operation() == OperationSpec::all_gather_v, is_for_all = job.operation() != OperationSpec::gather;
  const bool is_root = job.root() == static_cast<int>(me);
  const bool gives = is_for_all || !is_root, takes = is_for_all || is_root;
  if (varies) {
    const Status status = agree_on_sizes(job);
    if (status != Status::ok) return status;
  }
  const auto bytes_of = [&](unsigned j) { return (varies ? expected_[me * n + j] : job.count()) * item_; };
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
    if (!gives || start >= bytes_of(me)) return;
    copy_in(area(me, round, is_inline), own + start, std::min(chunk, bytes_of(me) - start));
  };
  const auto read = [&](std::uint64_t i, std::uint64_t round) {
    const std::size_t start = i * chunk;
    for (unsigned j = 0; j < n && takes; ++j) {
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
    for (unsigned j = 0; j < n && takes; ++j) is_done &= fetch(target(j), j, 0, bytes_of(j));
    return is_done;
  };
  const std::uint64_t rounds = num_chunks(longest, chunk);
  if (varies) {  // sizes and places are published already
    if (longest == 0) return Status::ok;
    const Status status = is_fetched(longest) ? finish_direct(job, direct()) : Status::unsupported;
    return status == Status::unsupported ? exchange_agreed(job, rounds, write, read) : status;
  }
  const Input input{own, longest, kEveryone, is_for_all && is_fetched(longest)};
  return exchange(job, rounds, input, write, read, direct);
}

Status Collectives::scatter(Job& job) {
  const unsigned me = end_.rank;
  const auto root = static_cast<unsigned>(job.root());
  const std::size_t bytes = job.count() * item_;
  const std::size_t piece = lay_out(end_.size - 1, bytes);
  streams_out_ = bytes > tuning.stream_out_bytes;
  const auto write = [&](std::uint64_t i, std::uint64_t round) {
    const std::size_t start = i * piece;
    if (me != root || start >= bytes) return;
    for (unsigned j = 0; j < end_.size; ++j) {
      if (j == me) continue;
      copy_in(slot(me, round) + place(me, j) * piece, job.ins[j].data + start,
              std::min(piece, bytes - start));
    }
  };
  const auto read = [&](std::uint64_t i, std::uint64_t round) {
    const std::size_t start = i * piece;
    if (start >= bytes) return;
    const std::size_t here = std::min(piece, bytes - start);
    if (me != root) {
      copy_out(job.out + start, slot(root, round) + place(root, me) * piece, here);
    } else if (job.out != job.ins[me].data) {
      copy_out(job.out + start, job.ins[me].data + start, here);
    }
  };
  return exchange(job, num_chunks(bytes, piece), {}, write, read, [] { return true; });
}

}  // namespace meshdist
