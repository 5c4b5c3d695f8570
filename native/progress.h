// Collectives that run beside the program: in order, on a thread that starts at first use.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "collectives.h"

namespace meshdist {

// A collective in flight.
struct Ticket {
  Job job;
  Status status = Status::pending;
  Failure failure;
  std::atomic<std::uint32_t> is_done{0};  // a futex word of this process
};
using TicketPtr = std::shared_ptr<Ticket>;

class Progress : public std::enable_shared_from_this<Progress> {
 public:
  explicit Progress(std::shared_ptr<Endpoint> endpoint)
      : end_(std::move(endpoint)), collectives_(*end_) {}

  // Run `job` here, after all that was started before.
  Status run(Job& job, Interruption interruption, Failure& failure);

  // Queue `job`.
  TicketPtr start(Job&& job);

  // Wait for `ticket`. Where time runs out the communicator ends, since nothing behind it can run.
  Status wait(const TicketPtr& ticket, Nanoseconds deadline, Interruption interruption);

  // Return once no collective uses the caller's memory any more, in ten seconds at most: the
  // communicator is closing, so each of them gives up where it would wait.
  void close();

  // Let collectives read buffers in `memory` where they lie; all members add it, in the same order.
  void add_memory(std::shared_ptr<const Memory> memory);

  // Unmap memory that no member uses any more; while a collective runs the next one does it.
  void sweep();

  // Whether a member has come to the collective behind the last of this one; false while that runs.
  bool is_awaited() {
    std::unique_lock<std::mutex> lock(running_, std::try_to_lock);
    return lock.owns_lock() && unfinished_.load(std::memory_order_acquire) == 0 &&
           collectives_.is_awaited();
  }

  Collectives& collectives() { return collectives_; }

 private:
  void work();
  void sweep_locked();

  const std::shared_ptr<Endpoint> end_;
  Collectives collectives_;
  std::mutex running_;  // held by whichever thread runs a collective
  std::uint64_t num_memories_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_, all_done_;
  std::deque<TicketPtr> queue_;
  std::atomic<int> unfinished_{0};
  bool has_thread_ = false;
};

}  // namespace meshdist
