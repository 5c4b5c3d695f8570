#include "notes.h"

namespace meshdist {
namespace {

namespace names {
const Name back{"f_back"}, instruction{"f_lasti"}, file{"co_filename"};
}

nb::object code_of(nb::handle frame) {
  return checked(reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
}

}  // namespace

std::uint64_t Notes::keep_collective(nb::handle group, nb::handle call, nb::handle sizes) {
  const std::uint64_t number = sequence() + 1;
  counts_.put(kSequence, number);
  keep(group, call, sizes.is_valid() ? sizes : nb::handle(no_sizes_), none_);
  return number;
}

std::uint64_t Notes::keep_message(nb::handle group, nb::handle call, nb::handle kind) {
  PyObject* const before = find_in(num_messages_, kind);
  const nb::object number = whole(before == nullptr ? 1 : PyLong_AsLongLong(before) + 1);
  if (PyDict_SetItem(num_messages_.ptr(), kind.ptr(), number.ptr()) != 0) throw nb::python_error();
  return keep(group, call, no_sizes_, number);
}

nb::object Notes::find(std::uint64_t number) const {
  // A copy: making the tuple may collect garbage, and a finalizer may note a call in this place.
  const CallRecord note = kept_[number % kept_.size()];
  if (number == 0 || note.number != number) return nb::none();
  return tuple_of(whole(note.sequence), note.group, note.call, note.sizes, note.among_its_kind, note.code,
                  note.instruction, no_stack_);
}

std::uint64_t Notes::keep(nb::handle group, nb::handle call, nb::handle sizes, nb::handle among_its_kind) {
  nb::object frame = first_frame(), code = code_of(frame);
  while (!code.is(last_code_)) {  // programs repeat their calls
    if (!is_true(checked(PyObject_GetItem(is_between_.ptr(), get(code, names::file).ptr())))) {
      last_code_ = code;
      break;
    }
    nb::object back = get(frame, names::back);
    if (back.is_none()) break;
    frame = std::move(back);  // out to the program
    code = code_of(frame);
  }
  const std::uint64_t noted = num_notes() + 1;
  CallRecord note{noted,
            sequence(),
            nb::borrow(group),
            nb::borrow(call),
            nb::borrow(sizes),
            nb::borrow(among_its_kind),
            std::move(code),
            get(frame, names::instruction)};
  std::swap(kept_[noted % kept_.size()], note);  // the older note is freed at the end
  moments_.put(0, moments_.get(0) + 1);
  counts_.put(kMoment, moments_.get(0));
  counts_.put(kNumNotes, noted);
  return noted;
}

// The first frame that may be the program's: those within `depth_` are surely this package's.
nb::object Notes::first_frame() const {
  try {
    return call_with(get_frame_, depth_);
  } catch (nb::python_error& error) {  // there are fewer: Python itself calls, no program
    if (!error.matches(PyExc_ValueError)) throw;
    return nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  }
}

}  // namespace meshdist
