#include "entry.h"

#include <pthread.h>

#include <utility>

namespace meshdist {
namespace {

constexpr std::uint64_t kLow = 0xffffffffu;
constexpr std::uint64_t kSequence = 0, kMoment = 1, kNumNotes = 2;  // as in `Recorder`
constexpr std::size_t kMostFingerprints = 4096;

unsigned forks = 0;  // between this process and the one that loaded the module
const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });

struct Names {
  Name dtype{"dtype"}, shape{"shape"};
  Name back{"f_back"}, instruction{"f_lasti"}, file{"co_filename"};
};

const Names& names() {
  static const Names all;
  return all;
}

nb::object code_of(nb::handle frame) {
  return checked(
      reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
}

nb::object number_or_none(std::int64_t value) { return value < 0 ? nb::none() : whole(value); }

}  // namespace

Words::Words(nb::object memory) : memory_(std::move(memory)) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(memory_.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
  words_ = static_cast<std::uint64_t*>(buffer.buf);
  PyBuffer_Release(&buffer);
}

Entry::Entry(nb::dict facts)
    : num_forks_(forks),
      reader_(facts),
      aborts_(facts["aborts"]),
      label_(facts["label"]),
      is_told_(facts["is_told"]),
      level_(facts["level"]),
      counts_(facts["counts"]),
      notes_(facts["notes"]),
      moments_(facts["moments"]),
      between_files_(facts["between_files"]),
      group_(facts["group"]),
      no_stack_(facts["no_stack"]),
      increment_version_(facts["increment_version"]),
      get_frame_(nb::borrow(PySys_GetObject("_getframe"))),
      depth_(whole(1)),
      num_kept_(PyList_Size(notes_.ptr())),
      size_(number(facts["size"])),
      member_(number(facts["member"])) {
  if (!facts.contains("ledger")) return;
  ledger_ = facts["ledger"];
  missing_ = facts["missing"];
  views_ = facts["views"];
  headers_ = facts["headers"];
  disagreement_ = facts["disagreement"];
  mine_ = Words(facts["words"]);
  window_ = number(facts["window"]);
  check_every_ = number(facts["check_every"]);
  uneven_window_ = number(facts["uneven_window"]);
}

bool Entry::is_quiet(bool is_uneven) {
  if (num_forks_ != forks) return false;
  if (PyDict_Size(aborts_.ptr()) != 0 && PyDict_Contains(aborts_.ptr(), label_.ptr()) != 0) {
    return false;
  }
  if (is_true(call_with(is_told_, level_))) return false;
  if (!ledger_.is_valid()) return true;
  if (PyList_Size(missing_.ptr()) != 0) return false;
  if (static_cast<std::size_t>(PyList_Size(views_.ptr())) != others_.size()) {
    others_.clear();
    places_.clear();
    for (nb::handle view : nb::borrow<nb::list>(views_)) {
      places_.push_back(number(view[0]));
      others_.emplace_back(nb::object(view[1]));
    }
  }
  const std::uint64_t sequence = counts_.get(kSequence) + 1;
  if (sequence % check_every_ == 0) return false;
  if (!is_uneven || sequence < uneven_window_) return true;
  const std::uint64_t reached = sequence - (uneven_window_ - 1);
  for (const Words& other : others_) {  // nobody may still look for what is about to be overwritten
    const std::uint64_t ahead = ((other.get(reached % window_) >> 32) - reached) & kLow;
    if (ahead >= std::uint64_t{1} << 31) return false;
  }
  return true;
}

void Entry::enter(const Call& call, const nb::object& data, nb::handle dtype,
                  std::uint64_t count, const std::uint64_t* part) {
  const std::uint64_t sequence = note(call, data, part == nullptr ? nb::tuple() : sizes_of(*part));
  if (ledger_.is_valid()) {
    const Header header{call.verb.ptr(), dtype.ptr(), count, call.number, call.root, part != nullptr};
    compare(sequence, fingerprint(header, data), part);
  }
}

bool Entry::enter_one(nb::handle verb, nb::handle tensor, nb::handle op, nb::handle op_number,
                      nb::handle root) {
  if (!is_quiet()) return false;
  Call call{verb, op};
  if (!op_number.is_none()) call.number = PyLong_AsLongLong(op_number.ptr());
  if (!root.is_none()) call.root = PyLong_AsLongLong(root.ptr());
  if (tensor.is_none()) {
    enter(call, nullptr);
    return true;
  }
  if (PyList_Check(tensor.ptr())) return false;
  const nb::object shape = get(tensor, names().shape), dtype = get(tensor, names().dtype);
  std::uint64_t count = 1;
  for (Py_ssize_t i = 0; i < PyTuple_Size(shape.ptr()); ++i) {
    count *= number(PyTuple_GetItem(shape.ptr(), i));
  }
  enter(call, tuple_of(shape, dtype), dtype, count, nullptr);
  return true;
}

// The caller of what is surely this package's. Frames cost nothing while nobody asks for them.
nb::object Entry::first_frame() const {
  try {
    return call_with(get_frame_, depth_);
  } catch (nb::python_error& error) {  // there are not so many: no program calls, but Python itself
    if (!error.matches(PyExc_ValueError)) throw;
    return nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  }
}

std::uint64_t Entry::note(const Call& call, const nb::object& data, const nb::object& sizes) {
  const Names& n = names();
  nb::object frame = first_frame(), code = code_of(frame);
  while (!code.is(last_code_)) {  // programs repeat their calls
    if (!is_true(checked(PyObject_GetItem(between_files_.ptr(), get(code, n.file).ptr())))) {
      last_code_ = code;
      break;
    }
    nb::object back = get(frame, n.back);
    if (back.is_none()) break;
    frame = std::move(back);  // out to the program
    code = code_of(frame);
  }
  const std::uint64_t sequence = counts_.get(kSequence) + 1;
  const nb::object told = whole(static_cast<std::int64_t>(sequence));
  const nb::object more = tuple_of(call.op, number_or_none(call.root), sizes);
  const nb::object note = tuple_of(told, group_, call.verb, data, more, code,
                                   get(frame, n.instruction), no_stack_);
  const std::uint64_t num_notes = counts_.get(kNumNotes);
  const Py_ssize_t place = static_cast<Py_ssize_t>(num_notes % num_kept_);
  if (PyList_SetItem(notes_.ptr(), place, note.inc_ref().ptr()) != 0) throw nb::python_error();
  counts_.put(kSequence, sequence);
  counts_.put(kMoment, number(checked(PyIter_Next(moments_.ptr()))));
  counts_.put(kNumNotes, num_notes + 1);
  return sequence;
}

// As Python makes it, so that members on either way agree; kept, since programs repeat their calls.
std::uint64_t Entry::fingerprint(const Header& header, const nb::object& data) {
  const auto found = fingerprints_.find(header);
  if (found != fingerprints_.end()) return found->second;
  if (fingerprints_.size() >= kMostFingerprints) {
    fingerprints_.clear();
    verbs_.clear();
  }
  const nb::object key = tuple_of(nb::handle(header.verb), data, number_or_none(header.number),
                                  number_or_none(header.root), nb::bool_(header.is_uneven));
  const std::uint64_t made = number(checked(PyObject_GetItem(headers_.ptr(), key.ptr())));
  verbs_.push_back(nb::borrow(header.verb));
  fingerprints_.emplace(header, made);
  return made;
}

void Entry::compare(std::uint64_t sequence, std::uint64_t header, const std::uint64_t* part) {
  if (part != nullptr) {
    const std::uint64_t start = window_ + sequence % uneven_window_ * (1 + 2 * size_);
    for (std::uint64_t i = 1; i <= 2 * size_; ++i) mine_.put(start + i, *part);
    mine_.put(start, sequence);
  }
  const std::uint64_t word = (sequence & kLow) << 32 | header;
  mine_.set(sequence % window_, word);
  for (std::size_t other = 0; other < others_.size(); ++other) {
    if (!differs(other, word, sequence, part)) continue;
    // Whether it does in truth, and not by words of a group that has ended, Python finds out.
    nb::list sizes;
    for (std::uint64_t i = 0; part != nullptr && i < size_; ++i) sizes.append(*part);
    if (nb::len(ledger_.attr("enter")(sequence, header, sizes, sizes)) != 0) {
      const nb::object error = disagreement_(sequence);
      PyErr_SetObject(error.type().ptr(), error.ptr());
      throw nb::python_error();
    }
    return;
  }
}

bool Entry::differs(std::size_t other, std::uint64_t word, std::uint64_t sequence,
                    const std::uint64_t* part) const {
  const Words& theirs = others_[other];
  const std::uint64_t found = theirs.get(sequence % window_);
  if (found != word) return found >> 32 == word >> 32;
  if (part == nullptr) return false;
  const std::uint64_t start = window_ + sequence % uneven_window_ * (1 + 2 * size_);
  return theirs.get(start + 1 + member_) != *part ||
         theirs.get(start + 1 + size_ + member_) != *part;
}

nb::object Entry::sizes_of(std::uint64_t part) {
  if (!sizes_.is_valid() || part != sizes_part_) {
    nb::list parts;
    for (std::uint64_t i = 0; i < size_; ++i) parts.append(part);
    sizes_ = tuple_of(parts, parts);
    sizes_part_ = part;
  }
  return sizes_;
}

}  // namespace meshdist
