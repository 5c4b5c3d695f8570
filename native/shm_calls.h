// The short ways of the verbs through shared memory: plain tensors of the CPU, waited for.
//
// What the verbs do in Python for any argument takes longer than to move a few numbers. Each of these
// checks its tensors, notes the call, tells autograd what is written, and runs it; or returns false,
// and nothing has happened: Python is to do all that.
#pragma once

#include <vector>

#include "message_entry.h"
#include "python_communicator.h"

namespace meshdist {

class ShmCalls {
 public:
  // `facts` has what Python knows: see `meshdist.wires.shm`.
  ShmCalls(nb::object communicator, nb::dict facts, double timeout);

  bool all_reduce(nb::handle x);
  bool reduce(nb::handle x, nb::handle op, int root);
  bool broadcast(nb::handle x, int root);
  bool all_gather(nb::handle verb, nb::handle out, nb::handle in);
  bool reduce_scatter(nb::handle verb, nb::handle out, nb::handle in, nb::handle op);
  bool all_gather_list(nb::handle outs, nb::handle x);
  bool gather(nb::handle x, nb::handle outs, int root);
  bool scatter(nb::handle x, nb::handle ins, int root);
  bool all_to_all(nb::handle out, nb::handle in);
  bool all_to_all_list(nb::handle outs, nb::handle ins);
  bool barrier();
  bool send(nb::handle x, nb::handle peer, nb::handle tag);
  nb::object recv(nb::handle x, nb::handle peer, nb::handle tag);

 private:
  struct Reduction {
    nb::object op, dtypes;  // a dict of those that it takes
    std::int64_t number;    // Python's
    unsigned code;          // the core's
  };

  // The reduction that the core does for `op` on such tensors; null where it does none.
  const Reduction* find(nb::handle op, const Plain& plain) const;
  // Where the tensors of a list of one per member lie, all like `like` and apart from it.
  bool read_apart(nb::handle list, const Plain& like, Addresses& addresses);
  bool is_me(int root) const { return static_cast<std::uint64_t>(root) == entry_.member(); }
  bool run(Job job);
  bool run(nb::handle x, Message message);

  Entry entry_;
  MessageEntry message_entry_;
  const nb::object owner_;
  PyCommunicator& core_;
  const double timeout_;
  const nb::object failed_, message_failed_;  // make the error to raise of a status
  std::vector<Reduction> reductions_;  // the first one is the sum
  const nb::object all_reduce_, reduce_, broadcast_, all_gather_, gather_, scatter_, all_to_all_,
      all_to_all_list_, barrier_, send_, recv_;
};

}  // namespace meshdist
