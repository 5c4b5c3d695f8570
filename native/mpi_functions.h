// Collectives and messages by MPI's own functions, which mpi4py has loaded; MPI is not linked here.
//
// What these functions take is equal for every library but for its handles, which are numbers or
// pointers, and the size of a status. mpi4py knows both.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runner.h"

namespace meshdist {

class MpiFunctions {
 public:
  // The functions' names: the blocking collectives, those that only start them, and the others.
  static std::vector<std::string> names();

  // An operation under way.
  struct Flight {
    alignas(16) unsigned char status[64];
    alignas(8) unsigned char request[8];
  };

  // The functions lie at `addresses`, in the order of their names; `comm`, `byte` and `in_place` are MPI's
  // handles for the group, for bytes and for the memory of a call that leaves its result where its input is.
  static std::unique_ptr<MpiFunctions> of(const Addresses& addresses, std::uint64_t comm, std::uint64_t byte,
                                          std::uint64_t in_place, std::size_t handle_bytes,
                                          std::size_t status_bytes);
  virtual ~MpiFunctions() = default;

  // Each returns MPI's error code, 0 for none. They are called without the GIL.
  //
  // `cuts`, of a call whose parts lie anywhere: the bytes of each member's part, then where it starts
  // in `outs`, then in `ins`. They and the buffers stay until it is done.
  virtual int run(const Collective& call, const int* cuts, bool is_root) const = 0;
  virtual int start(const Collective& call, const int* cuts, bool is_root, Flight& flight) const = 0;
  virtual int start(const Message& message, Flight& flight) const = 0;
  virtual int ask(Flight& flight, bool& is_done) const = 0;
  virtual int count(const Flight& flight, int& bytes) const = 0;

  // The request, as mpi4py takes it.
  virtual std::uint64_t request_of(const Flight& flight) const = 0;
};

}  // namespace meshdist
