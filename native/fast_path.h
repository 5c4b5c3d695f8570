// The fast path of the verbs: blocking calls on plain CPU tensors, on a wire that has a runner.
//
// What the verbs do in Python for any argument takes longer than to move a few numbers. Each method
// checks its tensors, notes and compares the call, notifies autograd of what is written, and lets
// the runner do it; or it returns false, has changed nothing, and Python does it all.
#pragma once

#include <array>

#include "runner.h"

namespace meshdist {

class FastPath {
 public:
  // `reductions` has tuples: a ReduceOp, its number, and for each dtype that it takes the wire's names
  // for both. SUM comes first.
  FastPath(Entry& entry, Runner& runner, const nb::list& reductions);

  bool all_reduce(nb::handle x);
  bool reduce(nb::handle x, nb::handle op, int root);
  bool broadcast(nb::handle x, int root);
  bool all_gather_into_tensor(nb::handle out, nb::handle in);
  bool all_gather_single(nb::handle out, nb::handle in);
  bool reduce_scatter_tensor(nb::handle out, nb::handle in, nb::handle op);
  bool reduce_scatter_single(nb::handle out, nb::handle in, nb::handle op);
  bool all_gather(nb::handle outs, nb::handle x);
  bool gather(nb::handle x, nb::handle outs, int root);
  bool scatter(nb::handle x, nb::handle ins, int root);
  bool all_to_all(nb::handle outs, nb::handle ins);
  bool all_to_all_single(nb::handle out, nb::handle in);
  bool barrier();
  bool send(nb::handle x, nb::handle peer, nb::handle tag);
  // Returns the global rank of the sender; false where it is not done.
  nb::object recv(nb::handle x, nb::handle peer, nb::handle tag);

 private:
  bool gather_blocks(const Name& verb, nb::handle out, nb::handle in);
  bool scatter_blocks(const Name& verb, nb::handle out, nb::handle in, nb::handle op);
  struct Reduction {
    nb::object op;
    std::int64_t number;
    std::array<Way, kNumDtypes> ways;
  };

  bool is_ready(bool is_uneven = false) const;
  bool is_me(int root) const { return static_cast<std::uint64_t>(root) == entry_.member(); }
  // Whether `op` reduces such tensors; fills the call in.
  bool reduces(nb::handle op, const Plain& plain, Collective& call) const;
  // Whether a list has one tensor per member, all like `like` and apart from it; keeps it in `kept`.
  bool read_apart(nb::handle list, Plain& like, Addresses& addresses, nb::object& kept);
  // `part` has one member's part; `plain` what is noted; `num_parts` goes to and comes from each
  // member, of an uneven call.
  bool run(Collective& call, const Plain& part, const Plain& plain, bool is_uneven = false);
  bool run(nb::handle x, Message& message);

  Entry& entry_;
  Runner& runner_;
  std::vector<Reduction> reductions_;
};

}  // namespace meshdist
