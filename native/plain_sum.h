// The shortest way of the plainest call: the sum of one plain tensor, in place, waited for.
//
// What `meshdist.all_reduce` does in Python for any argument takes longer than the sum of a few
// numbers. This does the same for one kind of call, and leaves every other to Python.
#pragma once

#include "entry.h"

namespace meshdist {

class PlainSum {
 public:
  // `facts` has what Python knows: see `meshdist.wires.shm`.
  explicit PlainSum(nb::dict facts)
      : entry_(facts), verb_(facts["verb"]), op_(facts["op"]) {}

  // Fill `plain` and note the call, if the call is plain; else nothing has happened.
  bool begin(nb::handle tensor, Plain& plain) {
    if (!entry_.is_quiet() || !entry_.read(tensor, plain)) return false;
    entry_.enter(Entry::Call{verb_, op_}, &plain);
    return true;
  }

  // Tell autograd that `tensor` was written into.
  void note_write(nb::handle tensor) { entry_.note_write(tuple_of(tensor)); }

 private:
  Entry entry_;
  const nb::object verb_, op_;
};

}  // namespace meshdist
