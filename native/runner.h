// What a backend does for the fast path: plain collectives and messages, once they are checked.
#pragma once

#include "codes.h"
#include "entry.h"

namespace meshdist {

// A collective on plain tensors. Its buffers are `in` and `out`, or one per member in `ins` and `outs`.
struct Collective {
  OperationSpec operation;
  Entry::Call header;                 // as it is noted and compared
  std::uint64_t count = 0, item = 1;  // elements of a member's part, and bytes of an element
  unsigned dtype = 0;                 // the core's code
  unsigned op = 0;                    // of a reduction: the core's code
  Address in = 0, out = 0;
  Addresses ins{}, outs{};
  Counts in_counts{}, out_counts{};  // of an all-to-all whose parts differ; `count` is 0 then
  std::uint32_t fingerprint = 0;     // compared in addition: the fingerprint of an operation name
  std::uint64_t note = 0;            // the number under which it is noted
  std::uint64_t sequence = 0;        // the number of a collective that is started
  nb::object written{}, read{};      // the tensors: tuples, or a single tensor

  std::uint64_t bytes() const { return count * item; }
};

class Runner {
 public:
  explicit Runner(std::int64_t largest_tag) : largest_tag_(largest_tag) {}
  virtual ~Runner() = default;

  // Whether this backend can do it. Nothing has happened yet.
  virtual bool takes(const Collective&) const { return true; }
  virtual bool takes(const Message& message) const { return message.number <= largest_tag_; }
  // Do a collective that is noted and compared, or raise.
  virtual void run(const Collective& call) = 0;
  // Start a collective; returns its operation.
  virtual nb::object start(const Collective& call) = 0;
  // Note a message of tensor `x` and do it, or raise; `message.member` is then its other side.
  virtual void run(Message& message, nb::handle x, Entry& entry) = 0;

 private:
  const std::int64_t largest_tag_;
};

}  // namespace meshdist
