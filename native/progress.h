// Collectives that are started. The caller begins collectives of one round and few bytes; the thread that
// waits for them, polls, or runs the next collective finishes them. All others run in order on a background
// thread, which starts at first use.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "collectives.h"

namespace meshdist {

// A collective in flight.
struct Ticket {
  Job job;
  Status status = Status::pending;
  Failure failure;
  std::atomic<std::uint32_t> is_done{0};  // a futex word of this process
  std::atomic<bool> has_sleepers{false};

  bool has_ended() const { return is_done.load(std::memory_order_acquire) != 0; }
  void end(Status how, Failure why) {
    status = how;
    failure = std::move(why);
    is_done.store(1, std::memory_order_seq_cst);
    if (has_sleepers.load(std::memory_order_seq_cst)) futex_wake_all(is_done);
  }
};
using TicketPtr = std::shared_ptr<Ticket>;

class Progress : public std::enable_shared_from_this<Progress> {
 public:
  explicit Progress(std::shared_ptr<Endpoint> endpoint) : end_(std::move(endpoint)), collectives_(*end_) {}

  // Run `job` here, after all that was started before. `let_go` is called before it waits for longer than
  // the other members take that come at the same time; it sets the deadline.
  template <class LetGo>
  Status run(Job& job, Interruption interruption, Failure& failure, LetGo let_go) {
    job.call.interruption = interruption;
    std::unique_lock<std::mutex> lock = lock_if_idle();
    const bool is_begun = lock.owns_lock() && begun_ == nullptr && collectives_.begin(job);
    if (!is_begun || !is_complete_soon()) let_go();
    return is_begun ? finish(job, failure) : run(job, failure, lock);
  }

  // Begin `job`, or queue it.
  TicketPtr start(Job&& job);

  // Whether `ticket` is done, also by what takes no waiting; where it `is_awaited`, by some two microseconds.
  bool test(const TicketPtr& ticket, bool is_awaited = false);

  // Wait for `ticket`. A timeout ends the communicator, since no later call can run.
  Status wait(const TicketPtr& ticket, Nanoseconds deadline, Interruption interruption);

  // Return once no collective uses the caller's memory any more, in ten seconds at most: the
  // communicator is closing, so each of them gives up where it would wait.
  void close();

  // Let collectives read buffers in `memory` where they lie; all members add it, in the same order.
  void add_memory(std::shared_ptr<const Memory> memory);

  // Unmap memory that no member uses any more; while a collective runs the next one does it.
  void sweep();

  Collectives& collectives() { return collectives_; }

 private:
  std::unique_lock<std::mutex> lock_if_idle();
  bool is_complete_soon() const;
  Status run(Job& job, Failure& failure, std::unique_lock<std::mutex>& lock);
  Status run_here(Job& job, Failure& failure);
  Status finish(Job& job, Failure& failure);
  bool begin(const TicketPtr& ticket);
  bool finish_begun(const Call& waiting);
  void work();
  void sweep_locked();

  const std::shared_ptr<Endpoint> end_;
  Collectives collectives_;
  std::mutex running_;  // held by whichever thread runs a collective
  TicketPtr begun_;     // the call that is begun, with `running_`
  std::atomic<bool> has_begun_{false};
  std::uint64_t num_memories_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_, all_done_;
  std::deque<TicketPtr> queue_;
  std::atomic<int> unfinished_{0};
  bool has_thread_ = false;
};

}  // namespace meshdist
