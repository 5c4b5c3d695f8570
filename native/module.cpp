// The core as a Python module.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <stdexcept>
#include <string>
#include <system_error>

#include "mpi_calls.h"
#include "python_communicator.h"
#include "shm_calls.h"

using namespace nanobind::literals;

namespace meshdist {
namespace {

// The short ways that every wire with any has; see `PlainCalls` in `meshdist.wires.base`.
template <class Calls>
void bind_plain_calls(nb::class_<Calls> to) {
  to.def("all_reduce", &Calls::all_reduce, nb::arg().none())
      .def("reduce", &Calls::reduce, nb::arg().none(), nb::arg().none(), nb::arg())
      .def("broadcast", &Calls::broadcast, nb::arg().none(), nb::arg())
      .def("all_gather", &Calls::all_gather, nb::arg(), nb::arg().none(), nb::arg().none())
      .def("reduce_scatter", &Calls::reduce_scatter, nb::arg(), nb::arg().none(), nb::arg().none(),
           nb::arg().none())
      .def("gather", &Calls::gather, nb::arg().none(), nb::arg().none(), nb::arg())
      .def("scatter", &Calls::scatter, nb::arg().none(), nb::arg().none(), nb::arg())
      .def("all_to_all", &Calls::all_to_all, nb::arg().none(), nb::arg().none())
      .def("all_gather_list", &Calls::all_gather_list, nb::arg().none(), nb::arg().none())
      .def("all_to_all_list", &Calls::all_to_all_list, nb::arg().none(), nb::arg().none())
      .def("barrier", &Calls::barrier)
      .def("send", &Calls::send, nb::arg().none(), nb::arg(), nb::arg().none())
      .def("recv", &Calls::recv, nb::arg().none(), nb::arg().none(), nb::arg().none());
}

// `result` becomes the sum of both, numbers of a dtype. Called by MPI, which passes its own datatype.
void add_to(unsigned dtype, nb::handle data, nb::handle result, nb::handle) {
  const ReduceLoop add =
      dtype < kNumDtypes ? kernels().reduce[dtype][static_cast<unsigned>(Op::sum)] : nullptr;
  if (add == nullptr) throw std::invalid_argument("no such sum");
  Py_buffer from, to;
  if (PyObject_GetBuffer(data.ptr(), &from, PyBUF_SIMPLE) != 0) throw nb::python_error();
  if (PyObject_GetBuffer(result.ptr(), &to, PyBUF_WRITABLE) != 0) {
    PyBuffer_Release(&from);
    throw nb::python_error();
  }
  const void* const sources[] = {to.buf, from.buf};
  const double factors[] = {1.0, 1.0};
  const std::size_t count = std::min(from.len, to.len) / dtype_facts(static_cast<Dtype>(dtype)).bytes;
  add(to.buf, sources, 2, count, factors);
  PyBuffer_Release(&to);
  PyBuffer_Release(&from);
}

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
  m.def("add_to", &add_to, nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  m.def("let_timeouts_stand", &let_timeouts_stand, "stand"_a);
  m.def("create_segment", &create_segment, "size"_a, "slot_bytes"_a, "ring_bytes"_a,
        "is_crowded"_a);
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
      [](PyCommunicator* self, int fd, unsigned rank, std::vector<int> pidfds) {
        Processes processes(std::move(pidfds));
        new (self) PyCommunicator(fd, rank, std::move(processes));
      },
      "fd"_a, "rank"_a, "pidfds"_a);
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
  nb::class_<MessageLog>(m, "MessageLog")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, std::uint64_t>())
      .def_prop_ro("num_waiting", &MessageLog::num_waiting)
      .def("note", &MessageLog::note)
      .def("has_sent", &MessageLog::has_sent)
      .def("sees_sends", &MessageLog::sees_sends)
      .def("note_any", &MessageLog::note_any)
      .def("publish", &MessageLog::publish);
  nb::class_<Entry>(m, "Entry")
      .def(nb::init<nb::dict>(), "facts"_a)
      .def("enter", &Entry::enter_one, nb::arg(), nb::arg().none(), nb::arg().none(),
           nb::arg().none(), nb::arg().none());
  bind_plain_calls(nb::class_<MpiCalls>(m, "MpiCalls").def(nb::init<nb::dict>(), "facts"_a));
  bind_plain_calls(nb::class_<ShmCalls>(m, "ShmCalls")
                       .def(nb::init<nb::object, nb::dict, double>(), "communicator"_a, "facts"_a,
                            "timeout"_a));
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
  // Whether parts of some size are read where they lie in other members' memory; see reach.h.
  c.def_prop_ro("reads_others",
                [](PyCommunicator& self) { return self.progress->collectives().reads_others(); });
  // For measurements.
  c.def("set_tuning", [](PyCommunicator& self, const std::string& name, std::size_t value) {
    static const std::map<std::string, std::size_t Tuning::*> thresholds{
        {"chunk_bytes", &Tuning::chunk_bytes},
        {"far_halves_least_bytes", &Tuning::far_halves_least_bytes},
        {"fetch_block_bytes", &Tuning::fetch_block_bytes},
        {"fetch_broadcast_most_bytes", &Tuning::fetch_broadcast_most_bytes},
        {"fetch_least_bytes", &Tuning::fetch_least_bytes},
        {"fetch_most_bytes", &Tuning::fetch_most_bytes},
        {"halves_least_bytes", &Tuning::halves_least_bytes},
        {"halves_most_bytes", &Tuning::halves_most_bytes},
        {"near_chunk_bytes", &Tuning::near_chunk_bytes},
        {"shared_bytes", &Tuning::shared_bytes},
        {"spread_bytes", &Tuning::spread_bytes},
        {"spread_most_bytes", &Tuning::spread_most_bytes},
        {"stream_out_bytes", &Tuning::stream_out_bytes},
        {"whole_reduce_bytes", &Tuning::whole_reduce_bytes},
    };
    Collectives& collectives = self.progress->collectives();
    if (const auto found = thresholds.find(name); found != thresholds.end()) {
      collectives.tuning.*found->second = value;
      self.transfers->tuning.*found->second = value;
    } else if (name == "streams_into_slots") {
      collectives.keep_stores(value != 0);
    } else {
      throw std::invalid_argument("no such tuning");
    }
  });
}
