// The short ways of the verbs over MPI: plain tensors of the CPU, waited for.
//
// Each checks its tensors, and notes and compares the call. A collective is MPI's blocking one, once
// all members have come, and where one of them does not wait the one that goes on by itself; a message
// is started, and asked after for a while. What is not plain is left to Python: each returns false then.
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
  bool all_gather_list(nb::handle outs, nb::handle x);
  bool gather(nb::handle x, nb::handle outs, int root);
  bool scatter(nb::handle x, nb::handle ins, int root);
  bool all_to_all(nb::handle out, nb::handle in);
  bool all_to_all_list(nb::handle outs, nb::handle ins);
  bool barrier();
  bool send(nb::handle x, nb::handle peer, nb::handle tag);
  nb::object recv(nb::handle x, nb::handle peer, nb::handle tag);

 private:
  using Collective = MpiFunctions::Collective;
  using Verb = MpiFunctions::Verb;
  // A reduction that is done on the very memory of a tensor.
  struct Reduction {
    nb::object op, ways;  // ways: MPI's datatype and reduction for each dtype
    std::int64_t number;
  };

  bool is_ready(bool is_uneven = false);
  bool read(nb::handle x, Plain& plain);
  // Where the tensors of a list begin that lie one after the other.
  bool read_row(nb::handle list, const Plain& like, void*& row);
  bool is_small(std::uint64_t bytes) const { return bytes <= most_; }
  bool is_me(int root) const { return static_cast<std::uint64_t>(root) == entry_.member(); }
  // How MPI reduces such a tensor; no datatype where it does not.
  struct Way {
    nb::object op;
    std::uint64_t type = 0, of_mpi = 0;
    std::int64_t number = 0;
  };
  Way find(nb::handle op, const Plain& plain) const;

  bool arrive(const Collective& call);
  bool wait_for_all();
  int run_with_all(Collective call) const;
  // `used` are the call's tensors.
  void run(const Collective& call, nb::handle used);
  void run_later(Collective call, nb::handle used);
  template <class Function>
  void call_mpi(Function function) const;
  bool transfer(nb::handle x, Message message);
  int start(const Message& message, MpiFunctions::Flight& flight) const;
  bool is_done_soon(const Plain& plain, MpiFunctions::Flight& flight) const;
  void check_size(const MpiFunctions::Flight& flight, const Plain& plain) const;
  void check(int error) const;
  template <class... Known>
  [[noreturn]] void fail(nb::python_error& error, const Known&... known);

  Entry entry_;
  MessageEntry message_entry_;
  const nb::object link_, wait_for_all_, leave_, finish_collective_, end_, finish_message_, explain_;
  const nb::object error_, strand_;
  const std::unique_ptr<MpiFunctions> mpi_;
  const std::uint64_t most_, spin_ns_;
  const nb::str send_, recv_;
  const nb::str all_reduce_, reduce_, broadcast_, all_gather_, gather_, scatter_, all_to_all_,
      all_to_all_list_, barrier_;
  std::vector<Reduction> reductions_;  // the first one is the sum
  Words mine_;
  std::vector<Words> others_;
  const std::uint64_t window_, check_every_, waits_, left_, even_, number_shift_;
};

}  // namespace meshdist
