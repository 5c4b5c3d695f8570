// The fast path through shared memory.
#pragma once

#include <algorithm>

#include "python_communicator.h"
#include "runner.h"

namespace meshdist {

class ShmRunner final : public Runner {
 public:
  // `fail(status, note, message)` makes the error of a collective, or of a recorded message; `give_up(error)`
  // raises the exception of a signal handler in a collective, and notifies the other members.
  ShmRunner(PyCommunicator& core, nb::object fail, nb::object give_up, std::int64_t largest_tag,
            double timeout)
      : Runner(largest_tag), core_(core), fail_(std::move(fail)), give_up_(std::move(give_up)),
        timeout_(timeout) {}

  void run(const Collective& call) override {
    Job job = job_of(call);
    int status = 0;
    try {
      status = core_.run(job, timeout_);
    } catch (nb::python_error& error) {
      call_with(give_up_, nb::borrow(error.value()));
      throw;
    }
    if (status != 0) raise_error(call_with(fail_, whole(status), nb::none(), nb::none()));
  }

  nb::object start(const Collective& call) override {
    nb::object kept =
        call.read.is_valid() ? tuple_of(or_none(call.written), call.read) : or_none(call.written);
    return nb::cast(core_.start(job_of(call), timeout_, std::move(kept), call.sequence));
  }

  void run(Message& message, nb::handle x, Entry& entry) override {
    const Plain& plain = message.plain;
    // Use the number that the other side gets; a finalizer that meanwhile records a call takes that number.
    std::uint64_t note = entry.num_notes() + 1;
    const TransferPtr transfer = core_.transfer(message.is_send, plain.address, plain.count, plain.code,
                                                message.member, message.number, note);
    const int status = core_.run_transfer(transfer, timeout_, [&] {
      note = entry.note(message);
      if (!message.is_send) entry.note_write(tuple_of(x));
    });
    if (status != 0) {
      const nb::object sides = tuple_of(nb::bool_(message.is_send), whole(message.member), message.tag);
      raise_error(call_with(fail_, whole(status), whole(note), sides));
    }
    message.member = core_.last_source;
  }

 private:
  static nb::object or_none(const nb::object& one) { return one.is_valid() ? one : nb::none(); }

  Job job_of(const Collective& call) const {
    const bool varies = call.operation == OperationSpec::all_gather_v || call.operation == OperationSpec::all_to_all;
    Job job = core_.job(static_cast<unsigned>(call.operation), varies ? 0 : call.count, call.dtype,
                        call.op, std::max(static_cast<int>(call.header.root), 0),
                        call.out, call.in);
    job.call.header.fingerprint = call.fingerprint;
    put(job.ins, call.ins, call.in_counts, call.count);
    put(job.outs, call.outs, call.out_counts, call.count);
    if (call.operation == OperationSpec::all_gather_v) job.ins = {{job.in, call.count}};
    return job;
  }

  static void put(std::vector<Part>& parts, const Addresses& from, const Counts& counts,
                  std::uint64_t count) {
    parts.reserve(from.size());
    for (std::size_t j = 0; j < from.size(); ++j) {
      parts.push_back({pointer(from[j]), counts.empty() ? count : counts[j]});
    }
  }

  PyCommunicator& core_;
  const nb::object fail_, give_up_;
  const double timeout_;
};

}  // namespace meshdist
