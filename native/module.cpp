// The core as a Python module.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>

#include "fast_path.h"
#include "main_thread.h"
#include "python_communicator.h"
#include "shm_runner.h"
#include "torch_tensor.h"

using namespace nanobind::literals;

namespace meshdist {
namespace {

// The address of a plain tensor's memory.
void* memory_of(nb::handle tensor) { return pointer(number(tensor.attr("data_ptr")())); }

// `output` becomes the reduction of `num_parts` equal parts of `data`, first to last; both are plain.
void reduce_parts(nb::handle output, nb::handle data, std::size_t num_parts, unsigned dtype, unsigned op) {
  const ReduceLoop reduce = dtype < kNumDtypes && op < kNumOps ? kernels().reduce[dtype][op] : nullptr;
  if (reduce == nullptr) throw std::invalid_argument("no such reduction");
  const std::size_t count = number(output.attr("numel")());
  std::vector<const void*> parts;
  for (std::size_t i = 0; i < num_parts; ++i) {
    parts.push_back(static_cast<const char*>(memory_of(data)) + i * count * kDtypeBytes[dtype]);
  }
  reduce(memory_of(output), parts.data(), num_parts, count);
}

// A method with a collective, in Python's form, and then the `More` as arguments.
template <class... More, class Run>
auto with_job(Run run) {
  return [run](PyCommunicator& self, unsigned operation, Count count, unsigned dtype, unsigned op, int root,
               Address out, Address in, const Buffers& outs, const Buffers& ins, std::uint32_t fingerprint,
               const Layouts& layouts, More... more) {
    Job job = self.job(operation, count, dtype, op, root, out, in);
    job.call.header.fingerprint = fingerprint;
    self.fill_in(job, outs, ins, layouts);
    return run(self, std::move(job), std::move(more)...);
  };
}

// The codes of names, as Python writes them.
template <std::size_t kCount>
nb::dict codes_of(const char* const (&names)[kCount], int (*letter)(int)) {
  nb::dict codes;
  for (std::size_t i = 0; i < kCount; ++i) {
    std::string name = names[i];
    std::transform(name.begin(), name.end(), name.begin(), letter);
    codes[name.c_str()] = i;
  }
  return codes;
}

}  // namespace
}  // namespace meshdist

NB_MODULE(native, m) {
  using namespace meshdist;
  nb::set_leak_warnings(false);  // a program may end with communicators open
  m.doc() = "Collectives and messages through shared memory, and the fast path of plain calls.";

  nb::exception<std::system_error>(m, "SystemError_", PyExc_OSError);
  m.attr("DTYPES") = codes_of(kDtypeNames, std::tolower);
  m.attr("OPERATIONS") = codes_of(kOperationNames, std::tolower);
  m.attr("OPS") = codes_of(kOpNames, std::toupper);
  m.attr("STATUSES") = codes_of(kStatusNames, std::toupper);

  m.def("can_reduce", [](unsigned dtype, unsigned op) {
    return dtype < kNumDtypes && op < kNumOps && kernels().reduce[dtype][op] != nullptr;
  });
  m.def("stream", [](Address to, Address from, Count num_bytes) {
    kernels().stream(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), num_bytes);
  });
  m.def("stream_scaled", [](Address to, Address from, Count count, float factor) {
    stream_scaled(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from), count, factor);
  });
  m.def("reduce_parts", &reduce_parts);
  m.def("create_segment", &create_segment, "size"_a, "slot_bytes"_a, "ring_bytes"_a, "is_crowded"_a);
  m.def("segment_bytes", [](std::uint32_t size, std::uint64_t slot_bytes, std::uint64_t ring_bytes) {
    return plan_geometry(size, slot_bytes, ring_bytes, false, true).total_bytes;
  });

  m.def("create_memory", &create_memory, "bytes"_a);
  nb::class_<PyMemory>(m, "Memory")
      .def(nb::init<int>(), "fd"_a)
      .def_prop_ro("address", &PyMemory::address)
      .def("array", &PyMemory::array, nb::rv_policy::reference);
  nb::class_<Failure>(m, "Failure")
      .def_prop_ro("status", [](const Failure& self) { return static_cast<int>(self.status); })
      .def_ro("culprit", &Failure::culprit)
      .def_ro("text", &Failure::text)
      .def_ro("was_closed", &Failure::was_closed)
      .def_ro("has_exited", &Failure::has_exited)
      .def_ro("source", &Failure::source)
      .def_ro("other_note", &Failure::other_note);
  // As `Request` in Python has them.
  nb::class_<PyOperation>(m, "Started")
      .def("wait", &PyOperation::wait)
      .def("wait_plainly", &PyOperation::wait_plainly)
      .def("may_be_dropped", &PyOperation::may_be_dropped)
      .def("leave_work", &PyOperation::leave_work)
      .def("is_done", &PyOperation::is_done)
      .def("failure", &PyOperation::failure)
      .def("finish", &PyOperation::finish)
      .def("poll", &PyOperation::is_done)
      .def("is_ready", &PyOperation::is_done)
      .def("has_ended", &PyOperation::is_done)
      .def("bound", [](PyOperation&, nb::handle) {})
      .def("source",
           [](nb::handle self) {
             const int source = nb::cast<PyOperation&>(self).source();
             if (source >= 0) return nb::object(nb::int_(source));
             const nb::object requests = nb::module_::import_("meshdist.backends.requests");
             return nb::object(requests.attr("Request").attr("source")(self));  // raises
           })
      .def_prop_ro_static("is_plain", [](nb::handle) { return true; })
      .def_prop_ro_static("on_stream", [](nb::handle) { return false; })
      .def_prop_ro_static("adds_to_stream", [](nb::handle) { return false; });
  nb::class_<PyTicket, PyOperation>(m, "StartedCollective");  // known, its objects are made faster
  nb::class_<PyTransfer, PyOperation>(m, "StartedTransfer");
  m.def("explain_failures_by", [](nb::object made) {
    delete std::exchange(PyOperation::failures, new nb::object(std::move(made)));
  });

  nb::class_<PyCommunicator> c(m, "Communicator");
  c.def(nb::init<int, unsigned, std::vector<int>>(), "fd"_a, "rank"_a, "pidfds"_a);
  c.def_prop_ro("rank", [](const PyCommunicator& self) { return self.end->rank; });
  c.def_prop_ro("size", [](const PyCommunicator& self) { return self.end->size; });
  // Collectives and messages in their two forms: the first waits and returns a status.
  c.def("run", with_job<double>(
                   [](PyCommunicator& self, Job&& job, double timeout) { return self.run(job, timeout); }));
  c.def("start",
        with_job<double, nb::object, std::uint64_t>(
            [](PyCommunicator& self, Job&& job, double timeout, nb::object kept, std::uint64_t number) {
              return self.start(std::move(job), timeout, std::move(kept), number);
            }));
  c.def("run_transfer", [](PyCommunicator& self, bool is_send, Address data, Count count, unsigned dtype,
                           int peer, std::int64_t tag, std::uint64_t note, double timeout) {
    return self.run_transfer(self.transfer(is_send, data, count, dtype, peer, tag, note), timeout, [] {});
  });
  c.def("start_transfer", &PyCommunicator::start_transfer);
  nb::class_<MessageLog>(m, "MessageLog")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, std::uint64_t>())
      .def("note", &MessageLog::note)
      .def("note_any", &MessageLog::note_any)
      .def("publish", &MessageLog::publish);
  nb::class_<Words>(m, "Words").def(nb::init<nb::object>(), "memory"_a);
  nb::class_<Notes>(m, "Notes")
      .def(nb::init<nb::object, std::uint64_t, nb::dict, nb::object, nb::object, nb::object>(), "counts"_a,
           "num_kept"_a, "num_messages"_a, "moments"_a, "is_between"_a, "no_stack"_a)
      .def("find", &Notes::find);
  nb::class_<Headers>(m, "Headers")
      .def("__init__",
           filled_in<Headers, nb::object, Words, nb::list, nb::list, nb::dict, std::uint64_t, std::uint64_t,
                     std::uint64_t>(),
           "table"_a, "words"_a, "missing"_a, "views"_a, "logs"_a, "window"_a, "check_every"_a,
           "uneven_window"_a);
  nb::class_<Entry>(m, "Entry")
      .def(nb::init<Notes&, nb::object, const Headers*, nb::dict, nb::object, nb::object, nb::object,
                    nb::tuple, std::uint64_t, nb::object, nb::object, const Words*, std::uint64_t, nb::object,
                    std::uint64_t, std::int32_t>(),
           nb::keep_alive<1, 2>(), "notes"_a, "group"_a, "headers"_a.none(), "aborts"_a, "label"_a, "log"_a,
           "log_level"_a, "ranks"_a, "member"_a, "calls"_a, "disagree"_a, "fingerprints"_a.none(),
           "check_every"_a, "get_level"_a.none(), "most_level"_a, "device_type"_a)
      .def("enter", &Entry::enter_even);
  m.def("note_operations_in", &MainThread::note_in, "under_way"_a, "number"_a);
  nb::class_<Runner>(m, "Runner");
  nb::class_<ShmRunner, Runner>(m, "ShmRunner")
      .def(nb::init<PyCommunicator&, nb::object, nb::object, std::int64_t, double>(), nb::keep_alive<1, 2>(),
           "communicator"_a, "fail"_a, "give_up"_a, "largest_tag"_a, "timeout"_a);
  m.def("to_order", [](unsigned dtype, nb::handle bits, nb::handle floats, bool nan_is_greatest) {
    const ToOrderLoop write = kernels().to_order[dtype % kNumDtypes];
    if (write == nullptr) throw std::invalid_argument("no such order");
    write(memory_of(bits), memory_of(floats), number(floats.attr("numel")()), nan_is_greatest);
  });
  m.def("from_order", [](unsigned dtype, nb::handle floats, nb::handle bits) {
    const FromOrderLoop write = kernels().from_order[dtype % kNumDtypes];
    if (write == nullptr) throw std::invalid_argument("no such order");
    write(memory_of(floats), memory_of(bits), number(floats.attr("numel")()));
  });
  bind_python_runner(m);
  bind_fast_path(m);
  bind_operation_calls(m);
  m.def("knows_torch", [] { return TorchTensor::here().is_known(); });
  c.def_ro("last_source", &PyCommunicator::last_source);
  c.def("last_failure", &PyCommunicator::last_failure, nb::rv_policy::copy);
  c.def("last_transfer_failure", &PyCommunicator::last_transfer_failure);
  c.def("add_memory", [](PyCommunicator& self, PyMemory& memory) {
    nb::gil_scoped_release release;
    memory.progress = self.progress;
    self.progress->add_memory(memory.memory);
  });
  c.def("abort", &PyCommunicator::abort, nb::call_guard<nb::gil_scoped_release>());
  c.def("close", &PyCommunicator::close, nb::call_guard<nb::gil_scoped_release>());
  c.def("announce_end", [](PyCommunicator& self) { self.end->announce_end(); });
  // Whether parts of some size are read from other members' memory; see reach.h.
  c.def_prop_ro("reads_others",
                [](PyCommunicator& self) { return self.progress->collectives().reads_others(); });
  // For measurements.
  c.def("set_tuning", [](PyCommunicator& self, const std::string& name, std::size_t value) {
#define MESHDIST_TUNED(name) {#name, &Tuning::name}
    static const std::map<std::string, std::size_t Tuning::*> thresholds{
        MESHDIST_TUNED(chunk_bytes), MESHDIST_TUNED(far_halves_least_bytes),
        MESHDIST_TUNED(fetch_block_bytes), MESHDIST_TUNED(fetch_least_bytes),
        MESHDIST_TUNED(fetch_most_bytes), MESHDIST_TUNED(halves_least_bytes),
        MESHDIST_TUNED(halves_most_bytes), MESHDIST_TUNED(near_chunk_bytes), MESHDIST_TUNED(spread_bytes),
        MESHDIST_TUNED(spread_most_bytes), MESHDIST_TUNED(stream_out_bytes),
        MESHDIST_TUNED(streams_into_slots), MESHDIST_TUNED(whole_reduce_bytes)};
    const auto found = thresholds.find(name);
    if (found == thresholds.end()) throw std::invalid_argument("no such tuning");
    self.progress->collectives().tuning.*found->second = value;
    self.transfers->tuning.*found->second = value;
  });
}
