// The collectives, each as a sequence of rounds.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels.h"
#include "probe.h"
#include "rounds.h"
#include "slots.h"
#include "tuning.h"

namespace meshdist {

// 64-bit FNV-1a over numbers.
struct Digest {
  std::uint64_t value = 14695981039346656037u;
  void add(std::uint64_t number) {
    for (int i = 0; i < 8; ++i) value = (value ^ (number >> (8 * i) & 0xff)) * 1099511628211u;
  }
};

// Consecutive elements somewhere in this process.
struct Part {
  std::uint8_t* data = nullptr;
  std::uint64_t count = 0;
};

// The layout of elements that are not in row-major order: sizes and strides of the dimensions. There are no
// gaps, and no two elements overlap.
struct Layout {
  std::vector<std::uint64_t> sizes, strides;
};

// One collective to run: the call, and this member's buffers. `outs` and `ins` have one part per
// member (or per tensor of a list) where a collective takes several; else `out` and `in` are used.
struct Job {
  Call call;
  std::uint8_t* out = nullptr;
  std::uint8_t* in = nullptr;
  std::vector<Part> outs;
  std::vector<Part> ins;
  // Of `out`, or of each of `outs`, for a collective that works element by element; none, or one without
  // dimensions, is row-major.
  std::vector<Layout> layouts;

  OperationSpec operation() const { return static_cast<OperationSpec>(call.header.operation); }
  int root() const { return call.header.root; }
  std::uint64_t count() const { return call.header.count; }
};

class Collectives {
 public:
  explicit Collectives(const Endpoint& endpoint);

  // Run `job`; on failure `failure()` has the cause. If members' layouts differ, run in row-major order, on
  // copies of tensors in another order.
  Status run(Job& job);

  // Begin a call of one round without waiting for any member: this member's part is published, which is
  // all that the others need of it. False where `run` has to do it all, and nothing has happened. Nothing
  // else may run before `finish` does the rest.
  bool begin(Job& job);
  Status finish(Job& job);
  // Whether `finish` would not wait.
  bool may_finish() const { return rounds_.is_settled(begun_); }
  // The same, by one look that asks no other process.
  bool is_complete() const { return rounds_.is_complete(begun_); }
  // Wait until it would not, under the terms of `call`; on failure `failure()` has the cause.
  Status wait_to_finish(const Call& call) { return described(rounds_.wait(begun_, call)); }

  const Failure& failure() const { return rounds_.failure; }
  bool reads_others() const { return reads_others_; }
  Tuning tuning;

 private:
  using Bytes = std::uint8_t*;
  static constexpr int kEveryone = -1;
  struct Input {
    const std::uint8_t* data = nullptr;
    std::size_t bytes = 0;
    int giver = kEveryone;
    bool is_fetched = false;  // by the others, from this member's own memory
  };
  enum class Sharing { none, some, all };
  // Consecutive elements of all that a call reduces.
  struct Range {
    std::uint64_t from, to;
  };
  // A lane of an all-to-all, in the slot of the sending member: its place, its bytes per round, and its
  // number of rounds.
  struct Lane {
    std::size_t begin = 0, bytes = 0;
    std::uint64_t num_rounds = 0;
  };
  // Of each of two members: how far it has come.
  using Ends = std::array<std::uint64_t, 2>;

  Status run_as_it_lies(Job& job);
  Status described(Status status);
  bool is_of_one_round(const Job& job) const;
  Status run_in_row_major_order(const Job& job, Job& plain);
  Status dispatch(Job& job);
  bool is_fetched(std::size_t bytes) const;
  bool streams(std::size_t bytes) const;
  std::pair<Place, std::uint32_t> place_of(const Input& input) const;
  bool offer(const Input& input, std::uint64_t round);
  Sharing find_offers(const Input& input, std::uint64_t round);
  bool fetch(Bytes to, unsigned member, std::size_t offset, std::size_t bytes) const;
  Status finish_direct(const Job& job, bool is_done);
  Input reduce_input(const Job& job) const;
  Range share(const Job& job, unsigned member) const;
  void reduce_shared(const Job& job);
  Status try_reading(const Call& call);
  Status agree_to_grow(const Job& job);
  Status agree(const Job& job, std::uint64_t round);
  Status all_reduce(Job& job);
  Status reduce_whole(Job& job);
  Status reduce_by_parts(Job& job);
  Bytes fetch_block(unsigned member, std::size_t offset, std::size_t bytes);
  bool is_halved(const Job& job) const;
  Status reduce_by_halves(Job& job);
  Status reduce_half(const Job& job, Ends& ends);
  Status finish_halves(Job& job, const Ends& ends);
  Status broadcast(Job& job);
  Status all_gather(Job& job);
  Status scatter(Job& job);
  bool writes_over_input(const Job& job) const;
  Status reduce_scatter(Job& job);
  Status reduce_scatter_apart(Job& job);
  Status all_to_all(Job& job);
  bool is_small_and_even(const Job& job) const;
  void lay_lanes();
  void lay_side_by_side(Lane* lanes, std::size_t room) const;
  std::uint64_t find_ends(std::uint64_t first);
  Status barrier(Job& job);

  // Run the rounds in order: `write(i, round)` writes this member's part of the i-th round, `read(i, round)`
  // reads the other members' parts. Reading the i-th overlaps with the other members' writing of the next. If
  // each sending member (`giver`, or all) has its `input` in memory that the others map or can read,
  // `direct()` does everything instead, and returns whether it succeeded.
  template <class Write, class Read, class Direct>
  Status exchange(Job& job, std::uint64_t num_rounds, const Input& input, Write write, Read read,
                  Direct direct);
  template <class Write, class Read>
  Status exchange_agreed(Job& job, std::uint64_t num_rounds, Write write, Read read,
                         std::uint64_t num_done = 0);

  // For collectives whose parts differ: publish this member's sizes to send and to receive, and the place of
  // its data, and check all pairs, so that all members find the same result.
  Status agree_on_sizes(Job& job);

  Bytes area(unsigned member, std::uint64_t round, bool is_inline) const {
    return is_inline ? rounds_.line(member, round).bytes : slot(member, round);
  }
  // The place of a member's part in `round`: every fourth round uses the same slot, at another place.
  Bytes slot(unsigned member, std::uint64_t round) const {
    return slots_.at(member, round) + round / kDepth % num_places_ * span_;
  }
  // The place of `to`'s piece in `from`'s slot.
  static unsigned place(unsigned from, unsigned to) { return to < from ? to : to - 1; }

  void copy_in(Bytes slot, const std::uint8_t* from, std::size_t bytes) const {
    copy_bytes(slot, from, bytes, streams_in_);
  }
  void copy_out(Bytes to, const std::uint8_t* slot, std::size_t bytes) const {
    copy_bytes(to, slot, bytes, streams_out_);
  }
  void reduce_out(Bytes to, std::uint64_t count);
  std::size_t near_chunk(std::size_t bytes) const;
  std::size_t lay_out(std::size_t pieces, std::size_t longest, std::size_t chunk);
  std::size_t lay_out(std::size_t pieces, std::size_t longest) {
    return lay_out(pieces, longest, tuning.chunk_bytes);
  }

  // A call that is begun stops once it has published, and begins there when it is finished.
  enum class Phase { all, begin, finish };

  const Endpoint& end_;
  const Kernels& kernels_;
  Rounds rounds_;
  Slots slots_;
  Probe probe_;
  Phase phase_ = Phase::all;  // of the call that runs
  std::uint64_t begun_ = 0;   // the round of the call that was begun
  bool has_tried_reading_ = false;
  bool reads_others_ = false;  // each member from every other; all have the same answer
  ReduceLoop loop_ = nullptr;
  std::size_t item_ = 1;        // bytes per element of the call that runs
  std::size_t span_ = 0;        // bytes that it writes to a slot per round; equal on all members
  std::size_t num_places_ = 1;  // for them in a slot
  bool streams_in_ = false;     // its stores into slots
  bool streams_out_ = false;    // its stores into results
  std::vector<const void*> sources_;
  std::vector<std::uint8_t*> theirs_;    // the members' inputs, if they are shared or fetched
  std::vector<bool> is_afar_;            // whether a member's input is in its own memory
  std::vector<std::uint8_t> fetched_;    // copies to be reduced
  std::vector<std::uint64_t> given_;     // [from][to], of the call that runs
  std::vector<std::uint64_t> expected_;  // [by][of]
  std::vector<Lane> lanes_;              // [from][to]
  Rounds::Ends ends_;                    // of the rounds with each member
  std::uint64_t bad_round_ = 0;
  std::string mismatch_;
  int mismatch_culprit_ = -1;
};

}  // namespace meshdist
