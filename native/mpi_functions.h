// Collectives and messages by MPI's own functions, which mpi4py has loaded; MPI is not linked here.
//
// What these functions take is equal for every library but for its handles, which are numbers or
// pointers, and the size of a status. mpi4py knows both.
#pragma once

#include <iterator>
#include <memory>

#include "objects.h"

namespace meshdist {

class MpiFunctions {
 public:
  enum class Verb {
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    all_gather_list,
    reduce_scatter,
    gather,
    scatter,
    all_to_all,
    all_to_all_even,
    barrier
  };
  static constexpr const char* kNames[] = {
      "all_reduce", "reduce",     "broadcast",       "all_gather", "all_gather_list", "reduce_scatter",
      "gather",     "scatter",    "all_to_all",      "all_to_all_even", "barrier"};
  static constexpr std::size_t kNumVerbs = static_cast<std::size_t>(Verb::barrier) + 1;
  static_assert(std::size(kNames) == kNumVerbs);

  // A collective. Counts are of elements where it reduces, else of bytes, and for one member where
  // one side has a part for each. `all_gather_list` and `all_to_all` have them in `cuts`, too: the
  // count of each member's part, then where it starts in `out`, then in `in`.
  struct Collective {
    Verb verb;
    const void* in = nullptr;
    void* out = nullptr;
    int in_count = 0, out_count = 0;
    std::uint64_t type = 0, op = 0;  // handles
    int root = 0;
    const int* cuts = nullptr;  // to stay until it is done
  };

  // An operation under way.
  struct Flight {
    alignas(16) unsigned char status[64];
    alignas(8) unsigned char request[8];
  };

  // Of the group and functions that `facts` has: see `meshdist.wires.mpi`.
  static std::unique_ptr<MpiFunctions> of(nb::handle facts);
  virtual ~MpiFunctions() = default;

  // Each returns MPI's error code, 0 for none. They are called without Python's lock.
  virtual int run(const Collective& call) const = 0;
  virtual int start(const Collective& call, Flight& flight) const = 0;
  virtual int start(bool is_send, void* memory, int bytes, int member, int tag,
                    Flight& flight) const = 0;
  virtual int ask(Flight& flight, bool& is_done) const = 0;
  virtual int count(const Flight& flight, int& bytes) const = 0;

  // The request, as mpi4py takes it.
  virtual std::uint64_t request_of(const Flight& flight) const = 0;

  // What stands for the memory of a call that leaves its result where its input is.
  const void* in_place() const { return in_place_; }

 protected:
  explicit MpiFunctions(const void* in_place) : in_place_(in_place) {}

 private:
  const void* const in_place_;
};

}  // namespace meshdist
