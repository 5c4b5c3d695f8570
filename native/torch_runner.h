// The fast path over torch's own classes.
//
// Python says once of each kind of call how the class does it: its *shortcut*. From then on a call is
// a call of the class's method, and Python waits for its work.
#pragma once

#include <map>

#include "python_communicator.h"
#include "runner.h"

namespace meshdist {

// A collective that a class of torch's has started, and for which an operation of Python's waits.
class TorchStarted final : public PyOperation {
 public:
  explicit TorchStarted(nb::object operation);

  int wait(double timeout) override;
  bool is_done() override;
  Failure failure() const override { return {}; }  // Python's `finish` raises it
  bool is_on_stream() const override { return is_on_stream_; }
  nb::object of_work() const override { return operation_; }

 private:
  const nb::object operation_;
  const bool is_on_stream_;
};

class TorchRunner final : public Runner {
 public:
  // `communicator` has the class's object as `_group`, and `failure` makes a wire's failure of its
  // errors. `find(verb, op, dtype, root, is_list, is_empty)` gives the shortcut of some calls, as
  // `meshdist/wires/c10d/shortcuts.py` has it; None where Python does them. `end(work, note)`
  // waits for a work, where the class gives one; or, of calls that are started, `end(work, then, note)`
  // makes the operation. `explain(error)` makes the error to raise of any.
  TorchRunner(nb::object communicator, nb::object find, nb::object end, nb::object explain)
      : Runner(0), communicator_(std::move(communicator)), find_(std::move(find)), end_(std::move(end)),
        explain_(std::move(explain)) {}

  bool takes(const Collective& call) const override;
  bool takes(const Message&) const override { return false; }
  void run(const Collective& call) override;
  bool starts(const Collective&) const override { return true; }
  nb::object start(const Collective& call, std::uint64_t number) override;
  void run(Message&, nb::handle, Entry&) override {}

 private:
  struct Shortcut {
    nb::object method, options, prepare;  // no method where Python does it
    std::uint64_t most_bytes = 0;
  };
  // The work, and what completes the result behind it, or None.
  struct Begun {
    nb::object work, then;
  };
  using Kind = std::array<std::int64_t, 6>;

  const Shortcut& find(const Collective& call) const;
  Begun begin(const Collective& call) const;

  const nb::object communicator_, find_, end_, explain_;
  mutable std::map<Kind, Shortcut> shortcuts_;
};

}  // namespace meshdist
