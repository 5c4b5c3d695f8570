// Messages by MPI's own functions, which mpi4py has loaded; MPI itself is not linked here.
//
// What these functions take is equal for every library but for its handles, which are numbers or
// pointers, and the size of a status. mpi4py knows both.
#pragma once

#include <memory>

#include "objects.h"

namespace meshdist {

class MpiFunctions {
 public:
  // A message under way.
  struct Flight {
    alignas(16) unsigned char status[64];
    alignas(8) unsigned char request[8];
  };

  // Of the group and functions that `facts` has: see `meshdist.wires.mpi`. Null where it has
  // none, or a status does not fit.
  static std::unique_ptr<MpiFunctions> of(nb::handle facts);
  virtual ~MpiFunctions() = default;

  // Each returns MPI's error code, 0 for none. They are called without Python's lock.
  virtual int start(bool is_send, void* memory, int bytes, int member, int tag,
                    Flight& flight) const = 0;
  virtual int ask(Flight& flight, bool& is_done) const = 0;
  virtual int count(const Flight& flight, int& bytes) const = 0;

  // The request, as mpi4py takes it.
  virtual std::uint64_t request_of(const Flight& flight) const = 0;
};

}  // namespace meshdist
