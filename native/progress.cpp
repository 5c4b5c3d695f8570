#include "progress.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>

namespace meshdist {

namespace {

// Of a collective that gives up: it may be in the midst of a copy. Longer only where a thread that
// runs a collective itself has called close(), from a signal's handler.
constexpr std::chrono::seconds kLongestEnd{10};

}  // namespace

Status Progress::run(Job& job, Interruption interruption, Failure& failure) {
  if (unfinished_.load(std::memory_order_acquire) != 0) {
    TicketPtr ticket = start(std::move(job));
    const Status status = wait(ticket, kForever, interruption);
    if (status == Status::interrupted) {  // it uses memory of a caller that goes on
      end_->end(status, static_cast<int>(end_->rank));
      wait(ticket, kForever, nullptr);
    }
    if (status != Status::ok) failure = ticket->failure;
    return status;
  }
  std::lock_guard<std::mutex> lock(running_);
  sweep_locked();
  job.call.interruption = interruption;
  const Status status = collectives_.run(job);
  if (status != Status::ok) failure = collectives_.failure();
  return status;
}

TicketPtr Progress::start(Job&& job) {
  auto ticket = std::make_shared<Ticket>();
  ticket->job = std::move(job);
  ticket->job.call.interruption = nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!has_thread_) {
    // The thread owns what it works on, but for the caller's memory.
    std::thread([self = shared_from_this()] { self->work(); }).detach();
    has_thread_ = true;
  }
  unfinished_.fetch_add(1, std::memory_order_acq_rel);
  queue_.push_back(ticket);
  wake_.notify_one();
  return ticket;
}

void Progress::work() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are the program's, not ours
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
    {
      std::lock_guard<std::mutex> lock(running_);
      sweep_locked();
      ticket->status = collectives_.run(ticket->job);
      if (ticket->status != Status::ok) ticket->failure = collectives_.failure();
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      unfinished_.fetch_sub(1, std::memory_order_acq_rel);
      all_done_.notify_all();
    }
    ticket->is_done.store(1, std::memory_order_seq_cst);
    futex_wake_all(ticket->is_done);
  }
}

Status Progress::wait(const TicketPtr& ticket, Nanoseconds deadline, Interruption interruption) {
  const auto done = [&] { return ticket->is_done.load(std::memory_order_acquire) != 0; };
  const auto never = [] { return false; };
  // The progress thread needs a core too: look only briefly before sleeping.
  const Patience brief{end_->is_crowded ? 0 : 5'000, 0, !end_->is_crowded};
  bool is_late = false;
  while (!look(brief, done, never)) {
    const Nanoseconds left = left_until(deadline);
    if (left <= 0) {
      end_->end(Status::timeout);
      is_late = true;
      deadline = kForever;  // the thread gives up within a moment; then the memory is free
      continue;
    }
    if (interruption != nullptr && interruption()) return Status::interrupted;
    futex_wait(ticket->is_done, 0, std::min(left, kSlice));
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
