// The short ways of the verbs over MPI: plain tensors of the CPU, waited for.
//
// Each checks its tensors, and notes and compares the call. A collective is mpi4py's blocking call,
// once all members have come; a message is started by MPI's own functions, and asked after for a
// while. What is not plain is left to Python: each returns false then.
#pragma once

#include "message_entry.h"
#include "mpi_functions.h"

namespace meshdist {

class MpiCalls {
 public:
  // `facts` has what Python knows: see `meshdist.wires.mpi`.
  explicit MpiCalls(nb::dict facts);

  bool all_reduce(nb::handle x);
  bool reduce(nb::handle x, nb::handle op, int root);
  bool broadcast(nb::handle x, int root);
  bool all_gather(nb::handle verb, nb::handle out, nb::handle in);
  bool reduce_scatter(nb::handle verb, nb::handle out, nb::handle in, nb::handle op);
  bool gather(nb::handle x, nb::handle outs, int root);
  bool scatter(nb::handle x, nb::handle ins, int root);
  bool all_to_all(nb::handle out, nb::handle in);
  bool barrier();
  bool send(nb::handle x, nb::handle peer, nb::handle tag);
  nb::object recv(nb::handle x, nb::handle peer, nb::handle tag);

 private:
  // A reduction that is done on the very memory of a tensor.
  struct Reduction {
    nb::object op, ways;  // ways: MPI's datatype and reduction for each dtype
    std::int64_t number;
  };
  struct Memory {
    std::uintptr_t address;
    std::uint64_t bytes, count;
    const void* type;
    bool operator==(const Memory& o) const {
      return address == o.address && bytes == o.bytes && count == o.count && type == o.type;
    }
  };
  struct Hash {
    std::size_t operator()(const Memory& m) const {
      return (m.address ^ m.count << 20 ^ m.bytes << 40) * 0x9e3779b97f4a7c15u >> 16;
    }
  };
  struct Verb {
    nb::object name;    // ours
    nb::object method;  // mpi4py's, of the blocking call
    nb::object late;    // its name
  };

  Verb verb(const char* name, const char* method) const;
  bool is_ready(bool is_uneven = false);
  bool read(nb::handle x, Plain& plain);
  // One member's tensors that lie one after the other: the first in `plain`.
  bool read_row(nb::handle list, const Plain& like, Plain& plain);
  bool is_small(std::uint64_t bytes) const { return bytes <= most_; }
  bool is_me(int root) const { return static_cast<std::uint64_t>(root) == entry_.member(); }
  // How MPI reduces such a tensor; no type where it does not.
  struct Way {
    nb::object op, type, of_mpi;
    std::int64_t number = 0;
  };
  Way find(nb::handle op, const Plain& plain) const;

  nb::object bytes_of(const Plain& plain, std::uint64_t blocks = 1, std::uint64_t parts = 1);
  nb::object numbers_of(const Plain& plain, nb::handle type, std::uint64_t parts = 1);
  nb::object cut(const Plain& plain);
  nb::object& kept(const Memory& memory);
  nb::object memory(std::uintptr_t address, std::uint64_t bytes) const;

  bool arrive();
  template <class... Arguments>
  void run(const Verb& verb, const nb::object& used, const Arguments&... arguments);
  bool transfer(nb::handle x, Message message);
  int start(const Message& message, MpiFunctions::Flight& flight) const;
  bool is_done_soon(const Plain& plain, MpiFunctions::Flight& flight) const;
  void check_size(const MpiFunctions::Flight& flight, const Plain& plain) const;
  void check(int error) const;
  template <class... Known>
  [[noreturn]] void fail(nb::python_error& error, const Known&... known);

  Entry entry_;
  MessageEntry message_entry_;
  const nb::object comm_, in_place_, byte_, from_address_;
  const nb::object link_, go_on_, finish_, explain_;
  const nb::object send_, recv_, error_;
  nb::list stranded_;  // tensors of messages after which nobody asks any more: MPI may use them
  const std::unique_ptr<MpiFunctions> mpi_;  // null where they cannot be reached
  const std::uint64_t most_, spin_ns_;
  const Verb all_reduce_, reduce_, broadcast_, all_gather_, reduce_scatter_, gather_, scatter_,
      all_to_all_, barrier_;
  std::vector<Reduction> reductions_;  // the first one is the sum
  Words mine_;
  std::vector<Words> others_;
  const std::uint64_t window_, check_every_;
  std::unordered_map<Memory, nb::object, Hash> buffers_;
};

}  // namespace meshdist
