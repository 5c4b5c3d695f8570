// One member's communicator, as the module shows it to Python.
#pragma once

#include <memory>

#include "endpoint.h"
#include "progress.h"
#include "transfers.h"

namespace meshdist {

class Communicator {
 public:
  // Members in one process, as tests have them, may share their view of the segment.
  Communicator(std::shared_ptr<const Segment> segment, unsigned rank, Processes processes)
      : end(std::make_shared<Endpoint>(std::move(segment), rank, std::move(processes))),
        progress(std::make_shared<Progress>(end)), transfers(std::make_shared<Transfers>(end)) {}
  ~Communicator() { close(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Free every thread, of every member, that waits in this communicator.
  void abort() { end->end(Status::aborted); }

  // End this member's part. Operations in flight here end as closed and no longer use the caller's memory
  // (see Progress::close). Native threads end by themselves; the last thread to end frees the group's memory.
  void close() {
    if (end->is_closing()) return;
    end->close();
    if (!end->is_forked()) {
      progress->close();
      transfers->close();
    }
  }

  const std::shared_ptr<Endpoint> end;
  const std::shared_ptr<Progress> progress;
  const std::shared_ptr<Transfers> transfers;
};

}  // namespace meshdist
