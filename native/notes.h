// Notes of the calls of one member, as `Recorder` in Python makes them, in its own lists: tuples of
// the fields of `Note` in `checking/calls.py`.
#pragma once

#include "words.h"

namespace meshdist {

class Notes {
 public:
  // `counts`, `notes`, `num_messages`: a recorder's own. `moments` counts the notes of all recorders,
  // `is_between` has for each file whether it lies between the program and the verbs, and `no_stack`
  // stands for the stack, in notes of `group`.
  Notes(nb::object counts, nb::list notes, nb::dict num_messages, nb::object moments,
        nb::object is_between, nb::object no_stack, nb::object group)
      : counts_(std::move(counts)),
        notes_(std::move(notes)),
        num_messages_(std::move(num_messages)),
        moments_(std::move(moments)),
        is_between_(std::move(is_between)),
        no_stack_(std::move(no_stack)),
        group_(std::move(group)),
        get_frame_(nb::borrow(PySys_GetObject("_getframe"))),
        depth_(whole(1)),
        none_(whole(0)),
        num_kept_(PyList_Size(notes_.ptr())) {}

  // Of the last collective.
  std::uint64_t sequence() const;
  std::uint64_t num_notes() const;

  // Keep a collective, a `Call` of Python's; returns its number in the members' common sequence.
  // `sizes` may be null.
  std::uint64_t keep_collective(nb::handle call, nb::handle sizes = {});

  // Keep a send or receive of a kind, (is_send, peer, tag); returns the number of the note.
  std::uint64_t keep_message(nb::handle call, nb::handle kind);

 private:
  std::uint64_t keep(nb::handle call, nb::handle sizes, nb::handle among_its_kind);
  nb::object first_frame() const;

  const Words counts_;
  const nb::list notes_;
  const nb::dict num_messages_;
  const nb::object moments_, is_between_, no_stack_, group_;
  const nb::object get_frame_, depth_, none_;
  const nb::tuple no_sizes_;
  nb::object last_code_;  // the program's that called last
  const Py_ssize_t num_kept_;
};

}  // namespace meshdist
