// The communicator as Python has it: pointers, counts and codes in, statuses out. Everything that
// may wait runs without the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "communicator.h"
#include "objects.h"

namespace meshdist {

using Count = std::uint64_t;
using Counts = std::vector<Count>;

inline std::uint8_t* pointer(Address address) { return reinterpret_cast<std::uint8_t*>(address); }

// Called without the GIL by a thread of the program that waits.
inline bool is_interrupted() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

inline int outcome(Status status) {
  if (status == Status::interrupted && PyErr_Occurred()) throw nb::python_error();
  return static_cast<int>(status);
}

struct PyTicket {
  std::shared_ptr<Progress> progress;
  TicketPtr ticket;

  int wait(double timeout) const {
    Status status;
    {
      nb::gil_scoped_release release;
      status = progress->wait(ticket, deadline_after(timeout), is_interrupted);
    }
    return outcome(status);
  }
  bool is_done() const { return ticket->is_done.load(std::memory_order_acquire) != 0; }
  const Failure& failure() const {
    if (!is_done()) throw std::runtime_error("the collective is still in flight");
    return ticket->failure;
  }
};

struct PyTransfer {
  std::shared_ptr<Endpoint> end;
  std::shared_ptr<Transfers> transfers;
  TransferPtr transfer;

  int wait(double timeout) const {
    Status status;
    {
      nb::gil_scoped_release release;
      status = transfers->wait(transfer, deadline_after(timeout), is_interrupted);
    }
    return outcome(status);
  }
  bool is_done() const {
    nb::gil_scoped_release release;
    return transfers->test(transfer);
  }
  Failure failure() const {
    Failure found = end->failure(transfer->status);
    found.source = transfer->source;
    found.other_note = transfer->other_note;
    return found;
  }
};

// The mapping lives as long as this, an array made of it, or, in the communicator that it was added
// to, such an array of any member. (A communicator may end on a native thread, so it must not hold
// the Python object.)
struct PyMemory {
  explicit PyMemory(int fd) : memory(std::make_shared<Memory>(fd)) {}
  PyMemory(const PyMemory&) = delete;
  PyMemory& operator=(const PyMemory&) = delete;
  ~PyMemory() {
    if (getpid() != process) return;  // a forked child's copy is not the member's
    memory->leave();
    memory.reset();
    if (const auto user = progress.lock()) user->sweep();
  }

  std::shared_ptr<const Memory> memory;
  std::weak_ptr<Progress> progress;
  const pid_t process = getpid();

  Address address() const { return reinterpret_cast<Address>(memory->data()); }
  nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>> array() const {
    return {memory->data(), {memory->bytes()}, nb::find(*this)};
  }
};

class PyCommunicator : public Communicator {
 public:
  PyCommunicator(int fd, unsigned rank, Processes processes)
      : Communicator(std::make_shared<Segment>(fd), rank, std::move(processes)) {}

  Job job(Verb verb, Count count, unsigned dtype, unsigned op = 0, int root = 0, Address out = 0,
          Address in = 0) const {
    if (dtype >= kNumDtypes) throw std::invalid_argument("no such dtype code");
    if (op >= kNumOps) throw std::invalid_argument("no such operation code");
    if (verb != Verb::all_reduce_list && (root < 0 || root >= static_cast<int>(end->size))) {
      throw std::invalid_argument("root lies outside the group");
    }
    Job job;
    job.call.header.verb = static_cast<std::uint8_t>(verb);
    job.call.header.dtype = static_cast<std::uint8_t>(dtype);
    job.call.header.op = static_cast<std::uint8_t>(op);
    job.call.header.root = root;
    job.call.header.count = count;
    job.out = pointer(out);
    job.in = pointer(in);
    return job;
  }

  std::vector<Part> parts(const Addresses& addresses, const Counts& counts, bool per_member) const {
    if (addresses.size() != counts.size() || (per_member && counts.size() != end->size)) {
      throw std::invalid_argument("one address and one count per member are expected");
    }
    std::vector<Part> parts(counts.size());
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i] = {pointer(addresses[i]), counts[i]};
    return parts;
  }
  std::vector<Part> equal_parts(const Addresses& addresses, Count count, bool is_wanted) const {
    if (!is_wanted) return {};
    return parts(addresses, Counts(addresses.size(), count), true);
  }
  bool is_me(int root) const { return root == static_cast<int>(end->rank); }

  int run(Job& job, double timeout) {
    Status status;
    Failure failure;
    {
      nb::gil_scoped_release release;
      job.call.deadline = deadline_after(timeout);
      status = progress->run(job, is_interrupted, failure);
    }
    if (status == Status::ok) return 0;
    last_failure_ = std::move(failure);
    return outcome(status);
  }
  PyTicket start(Job&& job, double timeout) {
    nb::gil_scoped_release release;
    job.call.deadline = deadline_after(timeout);
    return PyTicket{progress, progress->start(std::move(job))};
  }

  // ---- each verb's job; `run` or `start` follows

  Job all_reduce(Address data, Count count, unsigned dtype, unsigned op) const {
    return job(Verb::all_reduce, count, dtype, op, 0, data);
  }
  Job all_reduce_list(const Addresses& data, const Counts& counts, unsigned dtype,
                      unsigned op) const {
    Count total = 0;
    std::uint32_t digest = 2166136261u;  // FNV-1a over the counts: lists of other cuts differ
    for (Count count : counts) {
      total += count;
      for (int i = 0; i < 8; ++i) digest = (digest ^ (count >> (8 * i) & 0xff)) * 16777619u;
    }
    Job it = job(Verb::all_reduce_list, total, dtype, op, static_cast<std::int32_t>(digest));
    it.outs = parts(data, counts, false);
    return it;
  }
  Job reduce(Address data, Count count, unsigned dtype, unsigned op, int root) const {
    return job(Verb::reduce, count, dtype, op, root, data);
  }
  Job broadcast(Address data, Count count, unsigned dtype, int root) const {
    return job(Verb::broadcast, count, dtype, 0, root, data);
  }
  Job all_gather(Address out, Address in, Count count, unsigned dtype) const {
    return job(Verb::all_gather, count, dtype, 0, 0, out, in);
  }
  Job all_gather_v(const Addresses& outs, const Counts& out_counts, Address in, Count count,
                   unsigned dtype) const {
    Job it = job(Verb::all_gather_v, 0, dtype);
    it.outs = parts(outs, out_counts, true);
    it.ins = {Part{pointer(in), count}};
    return it;
  }
  Job gather(const Addresses& outs, Address in, Count count, unsigned dtype, int root) const {
    Job it = job(Verb::gather, count, dtype, 0, root, 0, in);
    it.outs = equal_parts(outs, count, is_me(root));
    return it;
  }
  Job scatter(Address out, const Addresses& ins, Count count, unsigned dtype, int root) const {
    Job it = job(Verb::scatter, count, dtype, 0, root, out);
    it.ins = equal_parts(ins, count, is_me(root));
    return it;
  }
  Job reduce_scatter(Address out, Address in, Count count, unsigned dtype, unsigned op) const {
    return job(Verb::reduce_scatter, count, dtype, op, 0, out, in);
  }
  Job reduce_scatter_v(Address out, Count count, const Addresses& ins, const Counts& in_counts,
                       unsigned dtype, unsigned op) const {
    Job it = job(Verb::reduce_scatter_v, 0, dtype, op);
    it.outs = {Part{pointer(out), count}};
    it.ins = parts(ins, in_counts, true);
    return it;
  }
  Job all_to_all(const Addresses& outs, const Counts& out_counts, const Addresses& ins,
                 const Counts& in_counts, unsigned dtype) const {
    Job it = job(Verb::all_to_all, 0, dtype);
    it.outs = parts(outs, out_counts, true);
    it.ins = parts(ins, in_counts, true);
    return it;
  }
  Job barrier() const { return job(Verb::barrier, 0, 0); }

  // ---- transfers

  TransferPtr transfer(bool is_send, Address data, Count count, unsigned dtype, int peer,
                       std::int64_t tag, std::uint64_t note) const {
    if (dtype >= kNumDtypes) throw std::invalid_argument("no such dtype code");
    if (peer >= static_cast<int>(end->size) || peer < (is_send ? 0 : -1)) {
      throw std::invalid_argument("peer lies outside the group");
    }
    auto it = std::make_shared<Transfer>();
    it->is_send = is_send;
    it->data = pointer(data);
    it->count = count;
    it->dtype = static_cast<std::uint8_t>(dtype);
    it->bytes = count * kDtypeBytes[dtype];
    it->peer = peer;
    it->tag = tag;
    it->note = note;
    return it;
  }
  PyTransfer start_transfer(bool is_send, Address data, Count count, unsigned dtype, int peer,
                            std::int64_t tag, std::uint64_t note) {
    TransferPtr it = transfer(is_send, data, count, dtype, peer, tag, note);
    nb::gil_scoped_release release;
    return PyTransfer{end, transfers, transfers->start(std::move(it), true)};
  }
  // Returns the status, and after a receive keeps its source in `last_source`.
  int run_transfer(bool is_send, Address data, Count count, unsigned dtype, int peer,
                   std::int64_t tag, std::uint64_t note, double timeout) {
    TransferPtr it = transfer(is_send, data, count, dtype, peer, tag, note);
    Status status;
    {
      nb::gil_scoped_release release;
      const Nanoseconds deadline = deadline_after(timeout);
      it = transfers->start(std::move(it), false);
      status = transfers->wait(it, deadline, is_interrupted);
    }
    last_source = it->source;
    if (status == Status::ok) return 0;
    last_transfer_ = it;
    return outcome(status);
  }

  const Failure& last_failure() const { return last_failure_; }
  Failure last_transfer_failure() const {
    if (last_transfer_ == nullptr) throw std::runtime_error("no transfer has failed");
    return PyTransfer{end, transfers, last_transfer_}.failure();
  }

  int last_source = -1;

 private:
  Failure last_failure_;
  TransferPtr last_transfer_;
};

}  // namespace meshdist
