#include "progress.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

namespace meshdist {

namespace {

// Of a collective that gives up: it may be in the midst of a copy. Longer only where a thread that
// runs a collective itself has called close(), from a signal's handler.
constexpr std::chrono::seconds kLongestEnd{10};
constexpr Nanoseconds kBegunSlice = 1'000'000;

}  // namespace

// Return `running_` if all earlier calls are done and no other thread runs a call.
std::unique_lock<std::mutex> Progress::lock_if_idle() {
  if (unfinished_.load(std::memory_order_acquire) != 0) return {};
  return {running_, std::try_to_lock};
}

bool Progress::is_complete_soon() const {
  for (unsigned i = 0; i < kLooks && !end_->is_crowded; ++i) {
    if (collectives_.is_complete()) return true;
    pause_core();
  }
  return collectives_.is_complete();
}

Status Progress::run(Job& job, Failure& failure, std::unique_lock<std::mutex>& lock) {
  if (!lock.owns_lock()) lock = lock_if_idle();
  if (!lock.owns_lock()) {
    const Nanoseconds deadline = job.call.deadline;
    const Interruption interruption = job.call.interruption;
    TicketPtr ticket = start(std::move(job));
    const Status status = wait(ticket, deadline, interruption);
    if (status == Status::interrupted) {  // it uses memory of a caller that continues
      end_->end(status, static_cast<int>(end_->rank));
      wait(ticket, kForever, nullptr);
    }
    if (status != Status::ok) failure = ticket->failure;
    return status;
  }
  sweep_locked();
  if (!finish_begun(job.call)) {  // interrupted: the other members would wait for this call
    end_->end(Status::interrupted, static_cast<int>(end_->rank));
    failure = end_->failure(Status::interrupted);
    return Status::interrupted;
  }
  return run_here(job, failure);
}

// With `running_`: run a call from its beginning.
Status Progress::run_here(Job& job, Failure& failure) {
  const Status status = collectives_.run(job);
  if (status != Status::ok) failure = collectives_.failure();
  return status;
}

// With `running_`: finish the call that is begun.
Status Progress::finish(Job& job, Failure& failure) {
  Status status = collectives_.wait_to_finish(job.call);
  if (status == Status::ok) status = collectives_.finish(job);
  if (status != Status::ok) failure = collectives_.failure();
  return status;
}

TicketPtr Progress::start(Job&& job) {
  auto ticket = std::make_shared<Ticket>();
  ticket->job = std::move(job);
  ticket->job.call.interruption = nullptr;
  if (begin(ticket)) return ticket;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!has_thread_) {
    // The thread owns its data, except for the caller's memory.
    std::thread([self = shared_from_this()] { self->work(); }).detach();
    has_thread_ = true;
  }
  unfinished_.fetch_add(1, std::memory_order_acq_rel);
  queue_.push_back(ticket);
  wake_.notify_one();
  return ticket;
}

// Begin a call, if nothing was started before that is not done.
bool Progress::begin(const TicketPtr& ticket) {
  const std::unique_lock<std::mutex> lock = lock_if_idle();
  if (!lock.owns_lock()) return false;
  if (begun_ != nullptr && (!collectives_.may_finish() || !finish_begun({}))) return false;
  if (end_->size == 1) {  // no thread to wait for
    Failure failure;
    const Status status = run_here(ticket->job, failure);
    ticket->end(status, std::move(failure));
    return true;
  }
  if (!collectives_.begin(ticket->job)) return false;
  begun_ = ticket;
  has_begun_.store(true, std::memory_order_release);
  return true;
}

// With `running_`: finish the call that is begun, if any, under the terms of the thread that waits; false
// where its wait was interrupted, and it stays in flight.
bool Progress::finish_begun(const Call& waiting) {
  if (begun_ == nullptr) return true;
  Call& call = begun_->job.call;
  call.deadline = waiting.deadline;
  call.interruption = waiting.interruption;
  call.stays_in_flight = true;
  Failure failure;
  const Status status = finish(begun_->job, failure);
  if (status == Status::interrupted) return false;
  const TicketPtr ticket = std::exchange(begun_, nullptr);
  has_begun_.store(false, std::memory_order_release);
  ticket->end(status, std::move(failure));
  return true;
}

bool Progress::test(const TicketPtr& ticket, bool is_awaited) {
  if (!ticket->has_ended() && has_begun_.load(std::memory_order_acquire) && !end_->is_forked()) {
    std::unique_lock<std::mutex> lock(running_, std::try_to_lock);
    const bool is_mine = lock.owns_lock() && begun_ != nullptr;
    if (is_mine && (is_awaited ? is_complete_soon() : collectives_.may_finish())) finish_begun({});
  }
  return ticket->has_ended();
}

void Progress::work() {
  block_signals();
  for (;;) {
    TicketPtr ticket;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return !queue_.empty() || end_->is_closing(); });
      if (queue_.empty()) {
        has_thread_ = false;
        return;
      }
      ticket = std::move(queue_.front());
      queue_.pop_front();
    }
    Status status;
    Failure failure;
    {
      std::lock_guard<std::mutex> lock(running_);
      sweep_locked();
      finish_begun({});
      status = run_here(ticket->job, failure);
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      unfinished_.fetch_sub(1, std::memory_order_acq_rel);
      all_done_.notify_all();
    }
    ticket->end(status, std::move(failure));
  }
}

Status Progress::wait(const TicketPtr& ticket, Nanoseconds deadline, Interruption interruption) {
  Call waiting;
  waiting.deadline = deadline;
  waiting.interruption = interruption;
  const auto done = [&] { return ticket->has_ended(); };
  const auto never = [] { return false; };
  // The progress thread needs a core too: look only briefly before sleeping.
  const Patience brief{end_->is_crowded ? 0 : 5'000, 0};
  bool is_late = false;
  for (;;) {
    if (has_begun_.load(std::memory_order_acquire)) {
      std::unique_lock<std::mutex> lock(running_, std::try_to_lock);
      if (lock.owns_lock() && begun_ == ticket && !finish_begun(waiting)) return Status::interrupted;
    }
    if (look(brief, done, never)) break;
    const Nanoseconds left = left_until(deadline);
    if (left <= 0) {
      end_->end(Status::timeout);
      is_late = true;
      deadline = kForever;  // the thread gives up within a moment; then the memory is free
      continue;
    }
    if (interruption != nullptr && interruption()) return Status::interrupted;
    ticket->has_sleepers.store(true, std::memory_order_seq_cst);
    // A begun call may be left by the thread that is at it now.
    const bool is_begun = has_begun_.load(std::memory_order_acquire);
    futex_wait(ticket->is_done, 0, std::min(left, is_begun ? kBegunSlice : kSlice));
  }
  return is_late && ticket->status == Status::aborted ? Status::timeout : ticket->status;
}

void Progress::add_memory(std::shared_ptr<const Memory> memory) {
  std::lock_guard<std::mutex> lock(running_);
  sweep_locked();
  end_->memories.emplace(num_memories_++, std::move(memory));
}

void Progress::sweep() {
  std::unique_lock<std::mutex> lock(running_, std::try_to_lock);
  if (lock.owns_lock()) sweep_locked();
}

void Progress::sweep_locked() {
  auto& memories = end_->memories;
  for (auto it = memories.begin(); it != memories.end();) {
    it = it->second->is_abandoned(end_->size) ? memories.erase(it) : std::next(it);
  }
}

void Progress::close() {
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.notify_all();
  all_done_.wait_for(lock, kLongestEnd, [&] { return unfinished_.load() == 0; });
}

}  // namespace meshdist
