#include "collectives.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <sstream>

#include "exchange.h"
#include "reach.h"

namespace meshdist {
namespace {

// Copy elements between `rows`, which is in row-major order, and the strided array `there`.
template <class Element>
void copy_elements(const Layout& layout, std::uint64_t count, void* in_rows, void* in_place, bool into_rows) {
  auto* const rows = static_cast<Element*>(in_rows);
  auto* there = static_cast<Element*>(in_place);
  const std::size_t last = layout.sizes.size() - 1;
  const std::uint64_t size = layout.sizes[last], stride = layout.strides[last];
  std::vector<std::uint64_t> at(last);
  for (std::uint64_t done = 0; done < count; done += size) {
    if (into_rows) {
      for (std::uint64_t i = 0; i < size; ++i) rows[done + i] = there[i * stride];
    } else {
      for (std::uint64_t i = 0; i < size; ++i) there[i * stride] = rows[done + i];
    }
    for (std::size_t dim = last; dim-- > 0;) {
      there += layout.strides[dim];
      if (++at[dim] < layout.sizes[dim]) break;
      there -= layout.strides[dim] * layout.sizes[dim];
      at[dim] = 0;
    }
  }
}

struct Wide {
  std::uint64_t halves[2];
};

// The loop for elements of `item` bytes.
auto copy_loop(std::size_t item) {
  switch (item) {
    case 1: return copy_elements<std::uint8_t>;
    case 2: return copy_elements<std::uint16_t>;
    case 4: return copy_elements<std::uint32_t>;
    case 8: return copy_elements<std::uint64_t>;
    default: return copy_elements<Wide>;
  }
}

// Let the header show layouts, by a digest of their numbers.
void sign(Header& header, const std::vector<Layout>& layouts) {
  Digest digest;
  for (const Layout& layout : layouts) {
    digest.add(layout.sizes.size());
    for (std::size_t dim = 0; dim < layout.sizes.size(); ++dim) {
      digest.add(layout.sizes[dim]);
      digest.add(layout.strides[dim]);
    }
  }
  header.fingerprint ^= static_cast<std::uint32_t>(digest.value);
  header.layout = static_cast<std::uint8_t>(digest.value >> 56 | 1);
}

}  // namespace

Collectives::Collectives(const Endpoint& endpoint)
    : end_(endpoint), kernels_(kernels()), rounds_(endpoint), slots_(endpoint, rounds_),
      probe_(endpoint, rounds_, slots_), sources_(endpoint.size), theirs_(endpoint.size),
      is_afar_(endpoint.size), given_(std::size_t{endpoint.size} * endpoint.size),
      expected_(std::size_t{endpoint.size} * endpoint.size),
      lanes_(std::size_t{endpoint.size} * endpoint.size), ends_(endpoint.size) {}

Status Collectives::run(Job& job) {
  Job plain;
  if (!job.layouts.empty()) {
    plain = job;
    plain.layouts.clear();
    item_ = kDtypeBytes[job.call.header.dtype];
    if (is_of_one_round(plain)) return run_in_row_major_order(job, plain);  // others may have begun it
    sign(job.call.header, job.layouts);
  }
  rounds_.layouts_differ = false;
  const Status status = run_as_it_lies(job);
  if (status != Status::mismatch || !rounds_.layouts_differ) return status;
  return job.layouts.empty() ? run_as_it_lies(job) : run_in_row_major_order(job, plain);
}

// Whether a call takes one round if no member offers its memory; all members find the same. `begin`
// declines the calls in which a member may offer.
bool Collectives::is_of_one_round(const Job& job) const {
  const std::size_t bytes = job.count() * kDtypeBytes[job.call.header.dtype];
  if (end_.size < 2 || bytes > tuning.begun_most_bytes || !job.layouts.empty()) return false;
  switch (job.operation()) {
    case OperationSpec::all_reduce: return !is_halved(job) && (end_.size == 2 || bytes <= tuning.whole_reduce_bytes);
    case OperationSpec::broadcast:
    case OperationSpec::all_gather:
    case OperationSpec::reduce_scatter: return true;
    default: return false;
  }
}

bool Collectives::begin(Job& job) {
  item_ = kDtypeBytes[job.call.header.dtype];
  const std::size_t bytes = job.count() * item_;
  // Before a call that would do more than it: see `run_as_it_lies`.
  const bool is_ready = !end_.is_over() && has_tried_reading_ && probe_.is_idle() &&
                        (!slots_.may_grow() || bytes < tuning.spread_bytes);
  if (!is_ready || !is_of_one_round(job)) return false;
  if (!end_.memories.empty() && bytes >= tuning.shared_bytes) return false;  // another may offer
  mismatch_culprit_ = -1;
  rounds_.layouts_differ = false;
  bad_round_ = rounds_.next();
  probe_.consider(bytes);
  phase_ = Phase::begin;
  const Status status = dispatch(job);
  phase_ = Phase::all;
  return status == Status::pending;
}

Status Collectives::finish(Job& job) {
  item_ = kDtypeBytes[job.call.header.dtype];
  phase_ = Phase::finish;
  const Status status = described(dispatch(job));
  phase_ = Phase::all;
  return status;
}

// Run `job` on row-major copies of tensors in another order; `plain` is `job` without layouts. Programs
// rarely need this, so it need not be fast.
Status Collectives::run_in_row_major_order(const Job& job, Job& plain) {
  const bool is_list = job.operation() == OperationSpec::all_reduce_list;
  const auto parts = is_list ? job.outs : std::vector<Part>{{job.out, job.count()}};
  std::vector<std::vector<std::uint8_t>> copies(parts.size());
  const auto copy = [&](bool into_rows) {
    for (std::size_t k = 0; k < parts.size(); ++k) {
      if (job.layouts[k].sizes.empty()) continue;
      copies[k].resize(parts[k].count * item_);
      copy_loop(item_)(job.layouts[k], parts[k].count, copies[k].data(), parts[k].data, into_rows);
      (is_list ? plain.outs[k].data : plain.out) = copies[k].data();
    }
  };
  copy(true);
  const Status status = run_as_it_lies(plain);
  const bool is_root = job.root() == static_cast<int>(end_.rank);
  const bool is_written = job.operation() == OperationSpec::broadcast ? !is_root
                          : job.operation() == OperationSpec::reduce  ? is_root
                                                        : true;
  if (status == Status::ok && is_written) copy(false);
  return status;
}

Status Collectives::run_as_it_lies(Job& job) {
  if (end_.is_over()) {
    rounds_.describe(end_.over_status(), 0);
    return end_.over_status();
  }
  item_ = kDtypeBytes[job.call.header.dtype];
  mismatch_culprit_ = -1;
  Status status = try_reading(job.call);
  bad_round_ = rounds_.next();
  if (status == Status::ok) status = agree_to_grow(job);
  if (status == Status::ok) status = probe_.before(job.call);
  if (status == Status::ok) {
    bad_round_ = rounds_.next();
    std::uint64_t count = job.count();
    for (const Part& part : job.ins) count += part.count;
    probe_.consider(count * item_);
    status = dispatch(job);
  }
  return described(status);
}

// The status of a call; of a failed call `failure()` is made.
Status Collectives::described(Status status) {
  if (status == Status::ok) return status;
  rounds_.describe(status, bad_round_);
  if (mismatch_culprit_ >= 0) {
    rounds_.failure.culprit = mismatch_culprit_;
    rounds_.failure.text = mismatch_;
  }
  return status;
}

// At the first call find out whether every member can read all others' memory.
Status Collectives::try_reading(const Call& call) {
  if (has_tried_reading_) return Status::ok;
  has_tried_reading_ = true;
  if (end_.size < 2) return Status::ok;
  bool has_missed = end_.is_crowded;
  Status status = rounds_.wait_for_next(call);  // all are there now
  if (status != Status::ok) return status;
  for (unsigned j = 0; j < end_.size && !has_missed; ++j) has_missed = j != end_.rank && !can_read(end_, j);
  status = rounds_.wait_for_next(call, has_missed);
  reads_others_ = status == Status::ok && !rounds_.has_anyone_missed();
  return status;
}

// The first call that is large: announce it without data, and where all members agree on it go on with
// whole slots.
Status Collectives::agree_to_grow(const Job& job) {
  if (!slots_.may_grow() || job.count() * item_ < tuning.spread_bytes) return Status::ok;
  Call call = job.call;
  const std::uint64_t round = rounds_.next();
  rounds_.announce(call);
  const Status status = rounds_.agree(round, call);
  return status == Status::ok ? slots_.grow(call) : status;
}

// Whether a member's stores into slots, `bytes` a round, go past the cache.
bool Collectives::streams(std::size_t bytes) const {
  if (tuning.streams_into_slots <= 1) return tuning.streams_into_slots != 0;
  return (bytes < kLargeBytes ? end_.streams_little : end_.streams_much).load(std::memory_order_relaxed);
}

// Agree on the call that was announced in `round`, and take over which stores the first member found faster.
Status Collectives::agree(const Job& job, std::uint64_t round) {
  const Status status = rounds_.agree(round, job.call);
  if (status == Status::ok || status == Status::mismatch) {
    probe_.heed(round);
    streams_in_ = streams(span_);
  }
  return status;
}

#define MESHDIST_RUN(name, method, reduces, ...)                          \
  case OperationSpec::name:                                                        \
    loop_ = reduces ? kernels_.reduce[header.dtype][header.op] : nullptr; \
    return reduces && loop_ == nullptr ? Status::unsupported : method(job);

Status Collectives::dispatch(Job& job) {
  const auto& header = job.call.header;
  streams_out_ = false;
  switch (job.operation()) { MESHDIST_OPERATIONS(MESHDIST_RUN) }
  return Status::unsupported;
}

// The bytes of each round of a call on `bytes` bytes. Short rounds stay in the caches. Use longer rounds if
// ranks share cores, because each round is then expensive.
std::size_t Collectives::near_chunk(std::size_t bytes) const {
  const bool is_short = !streams(bytes) && !end_.is_crowded;
  return is_short ? std::min(tuning.chunk_bytes, tuning.near_chunk_bytes) : tuning.chunk_bytes;
}

// Lay out rounds of `pieces` equal pieces, at most `chunk` bytes in all, of which the longest has `longest`
// bytes in the whole call: return the bytes of a piece in one round, whole cache lines.
std::size_t Collectives::lay_out(std::size_t pieces, std::size_t longest, std::size_t chunk) {
  if (pieces == 1 && longest <= kCacheLine) {  // of a small call, which cannot wait for divisions
    span_ = kCacheLine;
    num_places_ = 1;
    streams_in_ = streams(span_);
    return kCacheLine;
  }
  const std::size_t room = std::min(chunk, slots_.bytes());
  const std::size_t most = room / std::max<std::size_t>(pieces, 1) / kCacheLine * kCacheLine;
  const std::size_t needed = round_up(std::max<std::size_t>(longest, 1), kCacheLine);
  const std::size_t piece = std::min(most, needed);
  span_ = piece * std::max<std::size_t>(pieces, 1);
  const bool spreads = span_ >= tuning.spread_bytes && needed <= tuning.spread_most_bytes;
  num_places_ = spreads ? slots_.bytes() / span_ : 1;
  streams_in_ = streams(span_);
  return piece;
}

// Whether members read each other's memory for up to `bytes` bytes; equal on all members.
bool Collectives::is_fetched(std::size_t bytes) const {
  return reads_others_ && bytes != 0 && bytes >= tuning.fetch_least_bytes && bytes <= tuning.fetch_most_bytes;
}

// The place from which other members read this member's `input`, and the hint that announces it; hint 0 if
// they do not.
std::pair<Place, std::uint32_t> Collectives::place_of(const Input& input) const {
  const bool gives = input.giver == kEveryone || input.giver == static_cast<int>(end_.rank);
  if (end_.size < 2 || !gives) return {};
  for (const auto& [number, memory] : end_.memories) {
    if (input.bytes < tuning.shared_bytes || !memory->holds(input.data, input.bytes)) continue;
    return {{number, static_cast<std::uint64_t>(input.data - memory->data())}, kHintShared};
  }
  if (!input.is_fetched) return {};
  return {{0, reinterpret_cast<std::uintptr_t>(input.data)}, kHintOwn};
}

// Publish it with the announcement in `round`; whether there is such a place.
bool Collectives::offer(const Input& input, std::uint64_t round) {
  const auto [place, hint] = place_of(input);
  if (hint == 0) return false;
  std::memcpy(rounds_.line(end_.rank, round).bytes, &place, sizeof place);
  rounds_.call_hints_ = hint;
  return true;
}

// Which members have offered in `round`; all find the same.
Collectives::Sharing Collectives::find_offers(const Input& input, std::uint64_t round) {
  unsigned offers = 0;
  for (unsigned j = 0; j < end_.size; ++j) {
    const Line& line = rounds_.line(j, round);
    if ((line.hints & (kHintShared | kHintOwn)) == 0) continue;
    ++offers;
    Place place;
    std::memcpy(&place, line.bytes, sizeof place);
    is_afar_[j] = (line.hints & kHintOwn) != 0 && j != end_.rank;
    theirs_[j] = (line.hints & kHintOwn) != 0 ? reinterpret_cast<Bytes>(place.offset)
                                              : end_.memories.at(place.memory)->data() + place.offset;
  }
  const unsigned givers = input.giver == kEveryone ? end_.size : 1;
  return offers == 0 ? Sharing::none : offers == givers ? Sharing::all : Sharing::some;
}

// Copy what `member` has offered, from `offset` on; whether that could be done.
bool Collectives::fetch(Bytes to, unsigned member, std::size_t offset, std::size_t bytes) const {
  const std::uint8_t* from = theirs_[member] + offset;
  if (is_afar_[member]) return read_from(end_, member, to, from, bytes);
  if (to != from) copy_out(to, from, bytes);
  return true;
}

// Publish whether this member has read the other members' memory, and wait for all members to publish this,
// because no member's input may change earlier. If a member failed, no member reads others' memory again, and
// the status is `unsupported`: the caller uses another algorithm.
Status Collectives::finish_direct(const Job& job, bool is_done) {
  const Status status = rounds_.wait_for_next(job.call, !is_done);
  if (status != Status::ok) return status;
  // A member that has published, and then gave up waiting, may have written over its input
  // while this one read it; it ended the communicator before.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (end_.is_over()) return end_.over_status();
  if (!rounds_.has_anyone_missed()) return Status::ok;
  reads_others_ = false;
  return Status::unsupported;
}

Status Collectives::agree_on_sizes(Job& job) {
  const std::uint64_t round = rounds_.next();
  const unsigned n = end_.size;
  for (unsigned j = 0; j < n; ++j) {  // where there is one part, it is the same for all
    const Part& in = job.ins[job.ins.size() == n ? j : 0];
    const Part& out = job.outs[job.outs.size() == n ? j : 0];
    end_.segment.table(end_.rank, round, kGiven)[j] = in.count;
    end_.segment.table(end_.rank, round, kExpected)[j] = out.count;
    end_.segment.table(end_.rank, round, kPlaces)[j] = reinterpret_cast<std::uintptr_t>(in.data);
  }
  rounds_.announce(job.call);
  const Status status = agree(job, round);
  if (status != Status::ok) return status;
  for (unsigned i = 0; i < n; ++i) {
    std::memcpy(&given_[i * n], end_.segment.table(i, round, kGiven), n * sizeof(std::uint64_t));
    std::memcpy(&expected_[i * n], end_.segment.table(i, round, kExpected), n * sizeof(std::uint64_t));
    theirs_[i] = reinterpret_cast<Bytes>(end_.segment.table(i, round, kPlaces)[end_.rank]);
    is_afar_[i] = i != end_.rank;
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
  const std::uint64_t largest = *std::max_element(given_.begin(), given_.end()) * item_;
  return slots_.may_grow() && largest >= tuning.spread_bytes ? slots_.grow(job.call) : Status::ok;
}

Status Collectives::barrier(Job& job) {
  const std::uint64_t round = rounds_.next();
  rounds_.announce(job.call);
  return agree(job, round);
}

}  // namespace meshdist
