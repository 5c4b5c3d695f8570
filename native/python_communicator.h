// The communicator as Python has it: pointers, counts and codes in, statuses out. Everything that
// may wait runs without the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <unistd.h>

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "communicator.h"
#include "main_thread.h"

namespace meshdist {

using Count = std::uint64_t;
using Buffers = std::vector<std::pair<Address, Count>>;
using Layouts = std::vector<std::pair<std::vector<Count>, std::vector<Count>>>;

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

// Wait for `what`, which `owner` has started; returns the status.
template <class Owner, class What>
int wait_for(Owner& owner, const What& what, double timeout) {
  Status status;
  {
    nb::gil_scoped_release release;
    status = owner.wait(what, deadline_after(timeout), is_interrupted);
  }
  return outcome(status);
}

// The arguments of the Works of a path's calls, in Python's order: the class of a Work with a Python
// operation, the class of a Work with an operation of the core, the group's timeout, a function that makes a
// failure's error, the group's name, a function that warns of a dropped Work, a function that returns the
// group, and whether streams may have to wait for the call.
struct WorkTerms {
  nb::object of_python, of_core, timeout, explain, group, warn_dropped, user, uses_streams;
};

// The fields of a single Work, except its result and user. The garbage collector does not traverse them.
struct WorkFacts {
  std::shared_ptr<const WorkTerms> terms;
  nb::handle operation;  // which lives as long as the process
  nb::object warn_dropped;
  std::uint64_t note = 0;

  // The arguments of a Work, in the order of `Work` in Python.
  nb::object with(nb::handle request, nb::handle result, nb::handle user) const {
    const nb::object none = nb::none();
    return tuple_of(request, terms->timeout, terms->explain, result, none, operation, terms->group,
                    nb::bool_(false), none, whole(note), warn_dropped, user, terms->uses_streams);
  }
};

// A collective or message in flight, which keeps its tensors: a `Request` of Python. If it is dropped before
// it is done, the tensors stay alive, since a thread of the core may write to them; later operations free the
// tensors of finished calls.
class PyOperation {
 public:
  // `number` is the call's, and `message` (is_send, peer, tag) or None, as for `failures`.
  PyOperation(nb::object kept, std::uint64_t number, nb::object message = nb::none())
      : kept_(std::move(kept)), number_(number), message_(std::move(message)) {
    std::vector<nb::object> freed;  // at the end: that may make another operation
    for (int i = 0; i < 2 && !left.empty(); ++i) {
      auto oldest = std::move(left.front());
      left.pop_front();
      if (oldest.first()) {
        freed.push_back(nb::steal(oldest.second));
      } else {
        left.push_back(std::move(oldest));
      }
    }
  }
  virtual ~PyOperation() {
    const nb::object& warn_dropped = facts_.warn_dropped;
    if (!warn_dropped.is_valid() || warn_dropped.is_none()) return;
    const nb::error_scope scope;  // the program may drop it while an error propagates
    try {
      call_with(warn_dropped, whole(facts_.note));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("a Work that was dropped");
    }
  }
  PyOperation(const PyOperation&) = delete;
  PyOperation& operator=(const PyOperation&) = delete;

  virtual int wait(double timeout) = 0;
  virtual bool is_done() = 0;
  virtual Failure failure() const { return {}; }  // empty where `finish` makes the error
  virtual int source() const { return -1; }
  // Whether a wait makes the current stream wait, while the operation continues.
  virtual bool is_on_stream() const { return false; }
  // The operation of a Work that has its own fields.
  virtual nb::object of_work() const { return nb::find(this); }

  // Serve a Work that has this, its result and its user alone: wait within the group's timeout, as what
  // `wait` names, and warn where it is dropped before that.
  void serve(WorkFacts facts, double timeout, nb::handle wait) {
    facts_ = std::move(facts);
    timeout_ = timeout;
    wait_name_ = nb::borrow(wait);
  }

  // Whether it is done and well, as the only collective of its thread; where it is not, `finish` says why.
  bool wait_plainly() {
    if (is_waited_for_) return true;
    if (!wait_name_.is_valid() || MainThread::is_nested()) return false;
    may_be_dropped();  // also where the wait fails, or an error of a signal's handler ends it
    const MainThread::Within within(wait_name_);
    const bool is_well = wait(timeout_) == 0;
    is_waited_for_ = is_well && !is_on_stream();
    return is_well;
  }

  // No caller needs to know when it is done.
  void may_be_dropped() { facts_.warn_dropped = nb::none(); }

  // From now on the Work has its own fields: its constructor's arguments, and whether it has waited.
  nb::object leave_work(nb::handle result, nb::handle user) {
    const nb::object fields = facts_.with(of_work(), result, user);
    wait_name_.reset();
    may_be_dropped();
    return tuple_of(fields, nb::bool_(is_waited_for_));
  }

  virtual void finish(nb::handle timeout) {
    const int status = wait(nb::cast<double>(timeout.attr("total_seconds")()));
    kept_.reset();
    if (status == 0) return;
    raise_error((*failures)(status, failure(), number_, message_));
  }

  // Makes the error of a status, a failure, the number of a call, and of a message (is_send, peer, tag).
  static inline nb::object* failures = nullptr;

 protected:
  nb::object kept_;
  WorkFacts facts_;

  // For the destructors of operations that know whether they are done.
  template <class IsDone>
  void leave(IsDone is_done) {
    if (kept_.is_valid() && !is_done()) left.emplace_back(is_done, kept_.release().ptr());
  }

 private:
  static inline std::list<std::pair<std::function<bool()>, PyObject*>> left;
  const std::uint64_t number_;
  const nb::object message_;
  double timeout_ = 0;  // of a Work
  nb::object wait_name_;
  bool is_waited_for_ = false;
};

class PyTicket final : public PyOperation {
 public:
  PyTicket(std::shared_ptr<Progress> progress, TicketPtr ticket, nb::object kept, std::uint64_t number)
      : PyOperation(std::move(kept), number), progress_(std::move(progress)), ticket_(std::move(ticket)) {}
  ~PyTicket() override {
    leave([progress = progress_, ticket = ticket_] { return progress->test(ticket); });
  }

  int wait(double timeout) override {
    const bool is_over = progress_->test(ticket_, true);
    const int status = is_over ? static_cast<int>(ticket_->status) : wait_for(*progress_, ticket_, timeout);
    kept_.reset();
    return status;
  }
  bool is_done() override { return progress_->test(ticket_); }
  Failure failure() const override {
    if (!ticket_->has_ended()) throw std::runtime_error("the collective is still in flight");
    return ticket_->failure;
  }

 private:
  const std::shared_ptr<Progress> progress_;
  const TicketPtr ticket_;
};

class PyTransfer final : public PyOperation {
 public:
  PyTransfer(std::shared_ptr<Endpoint> end, std::shared_ptr<Transfers> transfers, TransferPtr transfer,
             nb::object kept, nb::object message)
      : PyOperation(std::move(kept), transfer->note, std::move(message)), end_(std::move(end)),
        transfers_(std::move(transfers)), transfer_(std::move(transfer)) {}
  ~PyTransfer() override {
    leave([transfers = transfers_, transfer = transfer_] { return transfers->test(transfer); });
  }

  int wait(double timeout) override {
    const int status = wait_for(*transfers_, transfer_, timeout);
    kept_.reset();
    return status;
  }
  bool is_done() override {
    nb::gil_scoped_release release;
    return transfers_->test(transfer_);
  }
  Failure failure() const override { return failure_of(*end_, *transfer_); }
  static Failure failure_of(const Endpoint& end, const Transfer& transfer) {
    Failure found = end.failure(transfer.status);
    found.source = transfer.source;
    found.other_note = transfer.other_note;
    return found;
  }
  int source() const override { return transfer_->is_send ? -1 : transfer_->source; }

 private:
  const std::shared_ptr<Endpoint> end_;
  const std::shared_ptr<Transfers> transfers_;
  const TransferPtr transfer_;
};

// The mapping lives as long as this, an array made of it, or, in the communicator that it was added to, such
// an array of any member. (A communicator may end on a native thread, so it must not hold the Python object.)
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
  // The descriptors are its own at once, also where it cannot be made.
  PyCommunicator(int fd, unsigned rank, std::vector<int> pidfds)
      : PyCommunicator(fd, rank, Processes(std::move(pidfds))) {}

  Job job(unsigned operation, Count count, unsigned dtype, unsigned op, int root, Address out, Address in) const {
    if (operation >= kNumOperations || dtype >= kNumDtypes || op >= kNumOps) {
      throw std::invalid_argument("no such code of a collective, dtype or operation");
    }
    if (root < 0 || root >= static_cast<int>(end->size)) {
      throw std::invalid_argument("root lies outside the group");
    }
    Job job;
    job.call.header.operation = static_cast<std::uint8_t>(operation);
    job.call.header.dtype = static_cast<std::uint8_t>(dtype);
    job.call.header.op = static_cast<std::uint8_t>(op);
    job.call.header.root = root;
    job.call.header.count = count;
    job.out = pointer(out);
    job.in = pointer(in);
    return job;
  }
  // Complete `it` with what not every call has.
  void fill_in(Job& it, const Buffers& outs, const Buffers& ins, const Layouts& layouts) const {
    const auto operation = static_cast<unsigned>(it.operation());
    if (!fits(outs, kOutputs[operation], it.root()) || !fits(ins, kInputs[operation], it.root())) {
      throw std::invalid_argument("the collective takes another number of buffers");
    }
    for (auto [address, elements] : outs) it.outs.push_back({pointer(address), elements});
    for (auto [address, elements] : ins) it.ins.push_back({pointer(address), elements});
    if (it.operation() == OperationSpec::all_reduce_list) sign(it);
    lay(it, layouts);
  }

  int run(Job& job, double timeout) {
    Status status;
    Failure failure;
    {
      std::optional<nb::gil_scoped_release> release;
      status = progress->run(job, is_interrupted, failure, [&] {
        release.emplace();
        job.call.deadline = deadline_after(timeout);
      });
    }
    if (status == Status::ok) return 0;
    last_failure_ = std::move(failure);
    return outcome(status);
  }
  std::unique_ptr<PyTicket> start(Job&& job, double timeout, nb::object kept, std::uint64_t number) {
    job.call.deadline = deadline_after(timeout);
    TicketPtr ticket = progress->start(std::move(job));  // does not wait
    return std::make_unique<PyTicket>(progress, std::move(ticket), std::move(kept), number);
  }

  // ---- transfers

  TransferPtr transfer(bool is_send, Address data, Count count, unsigned dtype, int peer, std::int64_t tag,
                       std::uint64_t note) const {
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
  std::unique_ptr<PyOperation> start_transfer(bool is_send, Address data, Count count, unsigned dtype,
                                              int peer, std::int64_t tag, std::uint64_t note, nb::object kept,
                                              nb::object message) {
    TransferPtr it = transfer(is_send, data, count, dtype, peer, tag, note);
    {
      nb::gil_scoped_release release;
      transfers->start(it, true);
    }
    return std::make_unique<PyTransfer>(end, transfers, std::move(it), std::move(kept), std::move(message));
  }
  // Do a transfer, and call `note()`, which may raise: if starting takes no wait, only after the start, so
  // that the other side waits less. Returns the status, and after a receive keeps its source in
  // `last_source`.
  template <class CallRecord>
  int run_transfer(const TransferPtr& it, double timeout, CallRecord note) {
    const bool is_quick = transfers->starts_at_once(*it);
    if (!is_quick) note();
    Status status = Status::ok;
    {
      std::optional<nb::gil_scoped_release> release;
      if (!is_quick) release.emplace();
      transfers->start(it, false);
      if (is_quick) {
        try {
          note();
        } catch (...) {  // its memory is the program's again
          transfers->wait(it, 0, nullptr);
          throw;
        }
      }
      if (!is_quick || !transfers->is_done_soon(*it)) {
        if (!release) release.emplace();
        status = transfers->wait(it, deadline_after(timeout), is_interrupted);
      } else {
        status = it->status;
      }
    }
    last_source = it->source;
    if (status == Status::ok) return 0;
    last_transfer_ = it;
    return outcome(status);
  }

  const Failure& last_failure() const { return last_failure_; }
  Failure last_transfer_failure() const {
    if (last_transfer_ == nullptr) throw std::runtime_error("no transfer has failed");
    return PyTransfer::failure_of(*end, *last_transfer_);
  }

  int last_source = -1;

 private:
  bool fits(const Buffers& buffers, Parts parts, int root) const {
    const bool is_root = root == static_cast<int>(end->rank);
    const bool are_all = parts == Parts::each || (parts == Parts::at_root && is_root);
    return parts == Parts::any || buffers.size() == (are_all ? end->size : parts == Parts::one ? 1u : 0u);
  }
  // A list's header: a digest of the counts in place of a root, so that lists of other cuts differ.
  static void sign(Job& job) {
    Digest digest;
    for (const Part& part : job.outs) {
      job.call.header.count += part.count;
      digest.add(part.count);
    }
    job.call.header.root = static_cast<std::int32_t>(digest.value);
  }

  static void lay(Job& job, const Layouts& layouts) {
    const bool is_list = job.operation() == OperationSpec::all_reduce_list;
    if (!layouts.empty() && layouts.size() != (is_list ? job.outs.size() : 1)) {
      throw std::invalid_argument("as many layouts as buffers are needed");
    }
    for (const auto& [sizes, strides] : layouts) {
      const Count count = is_list ? job.outs[job.layouts.size()].count : job.count();
      Count elements = 1, last = 0;
      for (std::size_t dim = 0; dim < sizes.size() && dim < strides.size(); ++dim) {
        elements *= sizes[dim];
        last += (sizes[dim] - 1) * strides[dim];
      }
      if (sizes.size() != strides.size() || (!sizes.empty() && (elements != count || last + 1 != count))) {
        throw std::invalid_argument("a layout is not of its buffer");
      }
      job.layouts.push_back({sizes, strides});
    }
  }

  PyCommunicator(int fd, unsigned rank, Processes processes)
      : Communicator(std::make_shared<Segment>(fd), rank, std::move(processes)) {}

  Failure last_failure_;
  TransferPtr last_transfer_;
};

}  // namespace meshdist
