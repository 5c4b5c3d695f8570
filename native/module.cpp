// The core as a Python module: pointers, counts and codes in, statuses out. Everything that may
// wait runs without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>

#include "communicator.h"
#include "mpi_calls.h"
#include "plain_sum.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace meshdist {
namespace {

using Address = std::uintptr_t;
using Count = std::uint64_t;
using Addresses = std::vector<Address>;
using Counts = std::vector<Count>;

std::uint8_t* pointer(Address address) { return reinterpret_cast<std::uint8_t*>(address); }

// Called without the GIL by a thread of the program that waits.
bool is_interrupted() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

int outcome(Status status) {
  if (status == Status::interrupted && PyErr_Occurred()) throw nb::python_error();
  return static_cast<int>(status);
}

nb::dict describe(const Failure& failure) {
  nb::list members;
  for (const Failure::Seen& seen : failure.members) {
    nb::dict one;
    const bool is_known = seen.header.dtype < kNumDtypes;
    one["verb"] = verb_name(seen.header.verb);
    one["dtype"] = is_known ? dtype_facts(static_cast<Dtype>(seen.header.dtype)).name : "unknown";
    one["op"] = op_name(seen.header.op);
    one["root"] = seen.header.root;
    one["count"] = seen.header.count;
    one["sequence"] = seen.header.sequence;
    one["begun"] = seen.begun;
    one["ended"] = seen.ended;
    one["is_open"] = seen.is_open;
    one["was_closed"] = seen.was_closed;
    one["has_exited"] = seen.has_exited;
    one["pid"] = seen.pid;
    members.append(one);
  }
  nb::dict all;
  all["status"] = static_cast<int>(failure.status);
  all["cause"] = failure.cause;
  all["by"] = failure.by;
  all["culprit"] = failure.culprit;
  all["sequence"] = failure.sequence;
  all["text"] = failure.text;
  all["members"] = members;
  return all;
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
  nb::dict failure() const {
    if (!is_done()) throw std::runtime_error("the collective is still in flight");
    return describe(ticket->failure);
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
  nb::dict failure() const {
    nb::dict all = describe(end->failure(transfer->status));
    all["peer"] = transfer->peer;
    all["tag"] = transfer->tag;
    all["source"] = transfer->source;
    all["other_dtype"] =
        transfer->other_dtype < kNumDtypes
            ? dtype_facts(static_cast<Dtype>(transfer->other_dtype)).name
            : "unknown";
    all["other_count"] = transfer->other_count;
    all["other_note"] = transfer->other_note;
    return all;
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
  PyCommunicator(int fd, unsigned rank, Processes processes, bool is_crowded)
      : Communicator(std::make_shared<Segment>(fd), rank, std::move(processes), is_crowded) {}

  Job job(Verb verb, Count count, unsigned dtype, unsigned op, int root, double factor) const {
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
    job.call.factor = factor;
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

  Job all_reduce(Address data, Count count, unsigned dtype, unsigned op, double factor) const {
    Job it = job(Verb::all_reduce, count, dtype, op, 0, factor);
    it.out = pointer(data);
    return it;
  }
  Job all_reduce_list(const Addresses& data, const Counts& counts, unsigned dtype, unsigned op,
                      double factor) const {
    Count total = 0;
    std::uint32_t digest = 2166136261u;  // FNV-1a over the counts: lists of other cuts differ
    for (Count count : counts) {
      total += count;
      for (int i = 0; i < 8; ++i) digest = (digest ^ (count >> (8 * i) & 0xff)) * 16777619u;
    }
    Job it = job(Verb::all_reduce_list, total, dtype, op, static_cast<std::int32_t>(digest), factor);
    it.outs = parts(data, counts, false);
    return it;
  }
  Job reduce(Address data, Count count, unsigned dtype, unsigned op, int root, double factor) const {
    Job it = job(Verb::reduce, count, dtype, op, root, factor);
    it.out = pointer(data);
    return it;
  }
  Job broadcast(Address data, Count count, unsigned dtype, int root) const {
    Job it = job(Verb::broadcast, count, dtype, 0, root, 1.0);
    it.out = pointer(data);
    return it;
  }
  Job all_gather(Address out, Address in, Count count, unsigned dtype) const {
    Job it = job(Verb::all_gather, count, dtype, 0, 0, 1.0);
    it.out = pointer(out);
    it.in = pointer(in);
    return it;
  }
  Job all_gather_v(const Addresses& outs, const Counts& out_counts, Address in, Count count,
                   unsigned dtype) const {
    Job it = job(Verb::all_gather_v, 0, dtype, 0, 0, 1.0);
    it.outs = parts(outs, out_counts, true);
    it.ins = {Part{pointer(in), count}};
    return it;
  }
  Job gather(const Addresses& outs, Address in, Count count, unsigned dtype, int root) const {
    Job it = job(Verb::gather, count, dtype, 0, root, 1.0);
    it.outs = equal_parts(outs, count, is_me(root));
    it.in = pointer(in);
    return it;
  }
  Job gather_v(const Addresses& outs, const Counts& out_counts, Address in, Count count,
               unsigned dtype, int root) const {
    Job it = job(Verb::gather_v, 0, dtype, 0, root, 1.0);
    if (is_me(root)) it.outs = parts(outs, out_counts, true);
    it.ins = {Part{pointer(in), count}};
    return it;
  }
  Job scatter(Address out, const Addresses& ins, Count count, unsigned dtype, int root) const {
    Job it = job(Verb::scatter, count, dtype, 0, root, 1.0);
    it.out = pointer(out);
    it.ins = equal_parts(ins, count, is_me(root));
    return it;
  }
  Job scatter_v(Address out, Count count, const Addresses& ins, const Counts& in_counts,
                unsigned dtype, int root) const {
    Job it = job(Verb::scatter_v, 0, dtype, 0, root, 1.0);
    it.outs = {Part{pointer(out), count}};
    if (is_me(root)) it.ins = parts(ins, in_counts, true);
    return it;
  }
  Job reduce_scatter(Address out, Address in, Count count, unsigned dtype, unsigned op,
                     double factor) const {
    Job it = job(Verb::reduce_scatter, count, dtype, op, 0, factor);
    it.out = pointer(out);
    it.in = pointer(in);
    return it;
  }
  Job reduce_scatter_v(Address out, Count count, const Addresses& ins, const Counts& in_counts,
                       unsigned dtype, unsigned op, double factor) const {
    Job it = job(Verb::reduce_scatter_v, 0, dtype, op, 0, factor);
    it.outs = {Part{pointer(out), count}};
    it.ins = parts(ins, in_counts, true);
    return it;
  }
  Job all_to_all(Address out, Address in, Count count, unsigned dtype) const {
    Job it = job(Verb::all_to_all, count, dtype, 0, 0, 1.0);
    it.out = pointer(out);
    it.in = pointer(in);
    return it;
  }
  Job all_to_all_v(const Addresses& outs, const Counts& out_counts, const Addresses& ins,
                   const Counts& in_counts, unsigned dtype) const {
    Job it = job(Verb::all_to_all_v, 0, dtype, 0, 0, 1.0);
    it.outs = parts(outs, out_counts, true);
    it.ins = parts(ins, in_counts, true);
    return it;
  }
  Job barrier() const { return job(Verb::barrier, 0, 0, 0, 0, 1.0); }

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
    it->bytes = count * dtype_facts(static_cast<Dtype>(dtype)).bytes;
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

  nb::dict last_failure() const { return describe(last_failure_); }
  nb::dict last_transfer_failure() const {
    if (last_transfer_ == nullptr) throw std::runtime_error("no transfer has failed");
    return PyTransfer{end, transfers, last_transfer_}.failure();
  }
  nb::list members() const { return nb::cast<nb::list>(describe(end->failure(Status::ok))["members"]); }

  int last_source = -1;

 private:
  Failure last_failure_;
  TransferPtr last_transfer_;
};

struct PyPlainSum : PlainSum {
  PyPlainSum(nb::object communicator, nb::dict facts, double timeout)
      : PlainSum(std::move(facts)),
        owner(std::move(communicator)),
        core(nb::cast<PyCommunicator&>(owner)),
        timeout(timeout) {}

  // The status, or -1 where the call is not plain; nothing has happened then.
  int run(nb::handle tensor) {
    Plain plain;
    if (!begin(tensor, plain)) return -1;
    Job job = core.all_reduce(plain.address, plain.count, plain.code, kSum, 1.0);
    note_write(tensor);
    return core.run(job, timeout);
  }

  static constexpr unsigned kSum = static_cast<unsigned>(Op::sum);
  const nb::object owner;
  PyCommunicator& core;
  const double timeout;
};

// A verb in its two forms: `name(..., timeout)` waits and returns a status, `name_async(...,
// timeout)` returns a Ticket at once.
template <class... Args>
void bind_verb(nb::class_<PyCommunicator>& to, const char* name, const char* async_name,
               Job (PyCommunicator::*make)(Args...) const) {
  to.def(name, [make](PyCommunicator& self, std::decay_t<Args>... args, double timeout) {
    Job job = (self.*make)(args...);
    return self.run(job, timeout);
  });
  to.def(async_name, [make](PyCommunicator& self, std::decay_t<Args>... args, double timeout) {
    return self.start((self.*make)(args...), timeout);
  });
}

template <class Code>
nb::dict codes_of(std::size_t count, Code name) {
  nb::dict codes;
  for (std::size_t i = 0; i < count; ++i) codes[name(i)] = i;
  return codes;
}

}  // namespace
}  // namespace meshdist

NB_MODULE(native, m) {
  using namespace meshdist;
  nb::set_leak_warnings(false);  // a program may end with communicators open
  m.doc() = "Collectives between the processes of one host, through shared memory.";

  nb::exception<std::system_error>(m, "SystemError_", PyExc_OSError);
  m.attr("DTYPES") =
      codes_of(kNumDtypes, [](std::size_t i) { return dtype_facts(static_cast<Dtype>(i)).name; });
  m.attr("OPS") = codes_of(kNumOps, [](std::size_t i) { return op_name(i); });
  nb::dict statuses;
  const char* const names[] = {"OK",       "TIMEOUT",     "ABORTED", "DIED",
                               "MISMATCH", "UNSUPPORTED", "CLOSED",  "CANCELLED",
                               "INTERRUPTED", "PENDING"};
  for (std::size_t i = 0; i < std::size(names); ++i) statuses[names[i]] = i;
  m.attr("STATUSES") = statuses;
  m.attr("VECTORS") = kernels().name;

  m.def("can_reduce", [](unsigned dtype, unsigned op) {
    return dtype < kNumDtypes && op < kNumOps && kernels().reduce[dtype][op] != nullptr;
  });
  m.def("let_timeouts_stand", &let_timeouts_stand, "stand"_a);
  m.def("create_segment", &create_segment, "size"_a, "slot_bytes"_a, "ring_bytes"_a);
  m.def("segment_bytes", [](std::uint32_t size, std::uint64_t slot_bytes, std::uint64_t ring_bytes) {
    return plan_geometry(size, slot_bytes, ring_bytes).total_bytes;
  });

  m.def("create_memory", &create_memory, "bytes"_a);
  nb::class_<PyMemory>(m, "Memory")
      .def(nb::init<int>(), "fd"_a)
      .def_prop_ro("address", &PyMemory::address)
      .def("array", &PyMemory::array, nb::rv_policy::reference);
  nb::class_<PyTicket>(m, "Ticket")
      .def("wait", &PyTicket::wait)
      .def("is_done", &PyTicket::is_done)
      .def("failure", &PyTicket::failure);
  nb::class_<PyTransfer>(m, "Transfer")
      .def("wait", &PyTransfer::wait)
      .def("is_done", &PyTransfer::is_done)
      .def("failure", &PyTransfer::failure)
      .def_prop_ro("source", [](const PyTransfer& self) { return self.transfer->source; });

  nb::class_<PyCommunicator> c(m, "Communicator");
  c.def(
      "__init__",
      [](PyCommunicator* self, int fd, unsigned rank, std::vector<int> pidfds, bool is_crowded) {
        Processes processes(std::move(pidfds));
        new (self) PyCommunicator(fd, rank, std::move(processes), is_crowded);
      },
      "fd"_a, "rank"_a, "pidfds"_a, "is_crowded"_a);
  c.def_prop_ro("rank", [](const PyCommunicator& self) { return self.end->rank; });
  c.def_prop_ro("size", [](const PyCommunicator& self) { return self.end->size; });
  bind_verb(c, "all_reduce", "all_reduce_async", &PyCommunicator::all_reduce);
  bind_verb(c, "all_reduce_list", "all_reduce_list_async", &PyCommunicator::all_reduce_list);
  bind_verb(c, "reduce", "reduce_async", &PyCommunicator::reduce);
  bind_verb(c, "broadcast", "broadcast_async", &PyCommunicator::broadcast);
  bind_verb(c, "all_gather", "all_gather_async", &PyCommunicator::all_gather);
  bind_verb(c, "all_gather_v", "all_gather_v_async", &PyCommunicator::all_gather_v);
  bind_verb(c, "gather", "gather_async", &PyCommunicator::gather);
  bind_verb(c, "gather_v", "gather_v_async", &PyCommunicator::gather_v);
  bind_verb(c, "scatter", "scatter_async", &PyCommunicator::scatter);
  bind_verb(c, "scatter_v", "scatter_v_async", &PyCommunicator::scatter_v);
  bind_verb(c, "reduce_scatter", "reduce_scatter_async", &PyCommunicator::reduce_scatter);
  bind_verb(c, "reduce_scatter_v", "reduce_scatter_v_async", &PyCommunicator::reduce_scatter_v);
  bind_verb(c, "all_to_all", "all_to_all_async", &PyCommunicator::all_to_all);
  bind_verb(c, "all_to_all_v", "all_to_all_v_async", &PyCommunicator::all_to_all_v);
  bind_verb(c, "barrier", "barrier_async", &PyCommunicator::barrier);
  c.def("send", [](PyCommunicator& self, Address data, Count count, unsigned dtype, int peer,
                   std::int64_t tag, double timeout, std::uint64_t note) {
    return self.run_transfer(true, data, count, dtype, peer, tag, note, timeout);
  }, "data"_a, "count"_a, "dtype"_a, "peer"_a, "tag"_a, "timeout"_a, "note"_a = 0);
  c.def("recv", [](PyCommunicator& self, Address data, Count count, unsigned dtype, int peer,
                   std::int64_t tag, double timeout, std::uint64_t note) {
    return self.run_transfer(false, data, count, dtype, peer, tag, note, timeout);
  }, "data"_a, "count"_a, "dtype"_a, "peer"_a, "tag"_a, "timeout"_a, "note"_a = 0);
  c.def("send_async", [](PyCommunicator& self, Address data, Count count, unsigned dtype, int peer,
                         std::int64_t tag, std::uint64_t note) {
    return self.start_transfer(true, data, count, dtype, peer, tag, note);
  }, "data"_a, "count"_a, "dtype"_a, "peer"_a, "tag"_a, "note"_a = 0);
  c.def("recv_async", [](PyCommunicator& self, Address data, Count count, unsigned dtype, int peer,
                         std::int64_t tag, std::uint64_t note) {
    return self.start_transfer(false, data, count, dtype, peer, tag, note);
  }, "data"_a, "count"_a, "dtype"_a, "peer"_a, "tag"_a, "note"_a = 0);
  nb::class_<PyPlainSum>(m, "PlainSum")
      .def(nb::init<nb::object, nb::dict, double>(), "communicator"_a, "facts"_a, "timeout"_a)
      .def("run", &PyPlainSum::run, "tensor"_a.none());
  nb::class_<Entry>(m, "Entry")
      .def(nb::init<nb::dict>(), "facts"_a)
      .def("enter", &Entry::enter_one, nb::arg(), nb::arg().none(), nb::arg().none(),
           nb::arg().none(), nb::arg().none());
  nb::class_<MpiCalls>(m, "MpiCalls")
      .def(nb::init<nb::dict>(), "facts"_a)
      .def("all_reduce", &MpiCalls::all_reduce, nb::arg().none())
      .def("reduce", &MpiCalls::reduce, nb::arg().none(), nb::arg().none(), nb::arg())
      .def("broadcast", &MpiCalls::broadcast, nb::arg().none(), nb::arg())
      .def("all_gather", &MpiCalls::all_gather, nb::arg(), nb::arg().none(), nb::arg().none())
      .def("reduce_scatter", &MpiCalls::reduce_scatter, nb::arg(), nb::arg().none(),
           nb::arg().none(), nb::arg().none())
      .def("gather", &MpiCalls::gather, nb::arg().none(), nb::arg().none(), nb::arg())
      .def("scatter", &MpiCalls::scatter, nb::arg().none(), nb::arg().none(), nb::arg())
      .def("all_to_all", &MpiCalls::all_to_all, nb::arg().none(), nb::arg().none())
      .def("barrier", &MpiCalls::barrier);
  c.def_prop_ro("streams_into_slots", [](const PyCommunicator& self) {
    return self.end->streams_much.load();
  });
  c.def_ro("last_source", &PyCommunicator::last_source);
  c.def("last_failure", &PyCommunicator::last_failure);
  c.def("last_transfer_failure", &PyCommunicator::last_transfer_failure);
  c.def("members", &PyCommunicator::members);
  c.def("add_memory", [](PyCommunicator& self, PyMemory& memory) {
    nb::gil_scoped_release release;
    memory.progress = self.progress;
    self.progress->add_memory(memory.memory);
  });
  c.def("abort", &PyCommunicator::abort, nb::call_guard<nb::gil_scoped_release>());
  c.def("close", &PyCommunicator::close, nb::call_guard<nb::gil_scoped_release>());
  c.def("announce_end", [](PyCommunicator& self) { self.end->announce_end(); });
  // For measurements.
  c.def("set_tuning", [](PyCommunicator& self, const std::string& name, std::size_t value) {
    Tuning& tuning = self.progress->collectives().tuning;
    if (name == "chunk_bytes") {
      tuning.chunk_bytes = value;
    } else if (name == "whole_reduce_bytes") {
      tuning.whole_reduce_bytes = value;
    } else if (name == "shared_bytes") {
      tuning.shared_bytes = value;
    } else if (name == "spread_bytes") {
      tuning.spread_bytes = value;
    } else if (name == "stream_out_bytes") {
      tuning.stream_out_bytes = self.transfers->tuning.stream_out_bytes = value;
    } else if (name == "streams_into_slots") {
      self.progress->collectives().keep_stores(value != 0);
    } else {
      throw std::invalid_argument("no such tuning");
    }
  });
}
