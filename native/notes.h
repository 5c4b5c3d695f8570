// Notes of the calls of one member, as `Recorder` in Python makes them, with its counters: the fields of
// `CallRecord` in `checking/calls.py`, made as tuples only for readers.
#pragma once

#include "words.h"

namespace meshdist {

class Notes {
 public:
  // `counts`, `num_messages`: a recorder's own; as many notes are kept as it keeps. `moments` counts
  // the notes of all recorders, `is_between` has for each file whether it lies between the program and the
  // collectives, and `no_stack` stands for the stack.
  Notes(nb::object counts, std::uint64_t num_kept, nb::dict num_messages, nb::object moments,
        nb::object is_between, nb::object no_stack)
      : counts_(std::move(counts)), moments_(std::move(moments)), kept_(num_kept),
        num_messages_(std::move(num_messages)), is_between_(std::move(is_between)),
        no_stack_(std::move(no_stack)), get_frame_(nb::borrow(PySys_GetObject("_getframe"))),
        depth_(whole(1)), none_(whole(0)) {}

  // Of the last collective.
  std::uint64_t sequence() const { return counts_.get(kSequence); }
  std::uint64_t num_notes() const { return counts_.get(kNumNotes); }

  // Keep a collective of a group, a `Call` of Python's; returns its number in the members' common
  // sequence. `sizes` may be null.
  std::uint64_t keep_collective(nb::handle group, nb::handle call, nb::handle sizes = {});

  // Keep a send or receive of a kind, (is_send, peer, tag); returns the number of the note.
  std::uint64_t keep_message(nb::handle group, nb::handle call, nb::handle kind);

  // The fields of the note of this number; None where it is not kept, or is Python's.
  nb::object find(std::uint64_t number) const;

 private:
  static constexpr std::uint64_t kSequence = 0, kMoment = 1, kNumNotes = 2;  // as in `Recorder`
  struct CallRecord {
    std::uint64_t number = 0, sequence = 0;
    nb::object group, call, sizes, among_its_kind, code, instruction;
  };

  std::uint64_t keep(nb::handle group, nb::handle call, nb::handle sizes, nb::handle among_its_kind);
  nb::object first_frame() const;

  const Words counts_, moments_;
  std::vector<CallRecord> kept_;
  const nb::dict num_messages_;
  const nb::object is_between_, no_stack_;
  const nb::object get_frame_, depth_, none_;
  const nb::tuple no_sizes_;
  nb::object last_code_;  // the program's that called last
};

}  // namespace meshdist
