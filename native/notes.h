// What a recorder keeps of the calls of one member, as `Recorder` in Python does, in its own lists.
#pragma once

#include "words.h"

namespace meshdist {

class Notes {
 public:
  // `facts` has what `Recorder.insides` tells, and the group's name.
  explicit Notes(const nb::dict& facts);

  // Of the last collective.
  std::uint64_t sequence() const;

  // Keep a collective; returns its number in the members' common sequence.
  std::uint64_t keep_collective(nb::handle verb, const nb::object& data, const nb::object& more);

  // Keep a send or receive of a kind, (is_send, peer, tag); returns the number of the note.
  std::uint64_t keep_message(nb::handle verb, const nb::object& data, nb::handle kind);

 private:
  std::uint64_t keep(nb::handle verb, const nb::object& data, const nb::object& more);
  nb::object first_frame() const;

  const Words counts_;
  const nb::object notes_, num_messages_, moments_, between_files_, group_, no_stack_;
  const nb::object get_frame_, depth_;
  nb::object last_code_;  // the program's that called last
  const Py_ssize_t num_kept_;
};

}  // namespace meshdist
