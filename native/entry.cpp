#include "entry.h"

#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace meshdist {
namespace {

constexpr std::uint64_t kLow = 0xffffffffu;
constexpr std::size_t kMostFingerprints = 4096;

unsigned forks = 0;  // between this process and the one that loaded the module
const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });

struct Names {
  Name requires_grad{"requires_grad"}, is_neg{"is_neg"}, dtype{"dtype"}, shape{"shape"};
  Name back{"f_back"}, instruction{"f_lasti"}, file{"co_filename"};
  Name sequence{"sequence"}, moment{"moment"}, num_notes{"num_notes"};
};

const Names& names() {
  static const Names all;
  return all;
}

nb::object code_of(nb::handle frame) {
  return checked(
      reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
}

std::uint64_t count_of(nb::handle shape) {
  std::uint64_t count = 1;
  for (Py_ssize_t i = 0; i < PyTuple_Size(shape.ptr()); ++i) {
    count *= number(PyTuple_GetItem(shape.ptr(), i));
  }
  return count;
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
      tensor_type_(facts["tensor_type"]),
      codes_(facts["codes"]),
      tensors_(tensor_type_),
      aborts_(facts["aborts"]),
      is_told_(facts["is_told"]),
      level_(facts["level"]),
      recorder_(facts["recorder"]),
      notes_(facts["notes"]),
      moments_(facts["moments"]),
      between_files_(facts["between_files"]),
      group_(facts["group"]),
      no_stack_(facts["no_stack"]),
      increment_version_(facts["increment_version"]),
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
  if (num_forks_ != forks || PyDict_Size(aborts_.ptr()) != 0) return false;
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
  const std::uint64_t sequence = number(get(recorder_, names().sequence)) + 1;
  if (sequence % check_every_ == 0) return false;
  if (!is_uneven || sequence < uneven_window_) return true;
  const std::uint64_t reached = sequence - (uneven_window_ - 1);
  for (const Words& other : others_) {  // nobody may still look for what is about to be overwritten
    const std::uint64_t ahead = ((other.get(reached % window_) >> 32) - reached) & kLow;
    if (ahead >= std::uint64_t{1} << 31) return false;
  }
  return true;
}

bool Entry::Kind::is_of(const TensorView& view) const {
  return dtype.is_valid() && dtype_number == view.dtype &&
         std::equal(dims.begin(), dims.end(), view.shape, view.shape + view.num_dims);
}

bool Entry::read(nb::handle x, Plain& plain) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())) != tensor_type_.ptr()) return false;
  const Names& n = names();
  TensorView view;
  if (!tensors_.look(x, view) || !view.is_cpu || !view.is_contiguous()) return false;
  if (is_true(get(x, n.requires_grad)) || is_true(call(x, n.is_neg))) return false;
  plain.count = view.count();
  plain.address = reinterpret_cast<std::uintptr_t>(view.data);
  if (plain.address == 0 && plain.count != 0) return false;  // its memory was taken away
  const Kind* kind = std::find_if(std::begin(kinds_), std::end(kinds_),
                                  [&](const Kind& one) { return one.is_of(view); });
  if (kind == std::end(kinds_)) {
    Kind made{view.dtype, {view.shape, view.shape + view.num_dims}, get(x, n.shape), get(x, n.dtype)};
    PyObject* const code = PyDict_GetItem(codes_.ptr(), made.dtype.ptr());
    if (code == nullptr) return false;
    made.code = static_cast<unsigned>(PyLong_AsLong(code));
    next_kind_ = (next_kind_ + 1) % std::size(kinds_);
    kind = &(kinds_[next_kind_] = std::move(made));
  }
  plain.shape = kind->shape;
  plain.dtype = kind->dtype;
  plain.code = kind->code;
  return true;
}

void Entry::enter(const Call& call, const Plain* plain, const std::uint64_t* part) {
  const nb::object data = plain == nullptr ? nb::none() : plain->data();
  const std::uint64_t sequence = note(call, data, part == nullptr ? nb::tuple() : sizes_of(*part));
  if (ledger_.is_valid()) {
    compare(sequence, fingerprint(call, plain, data, part != nullptr), part);
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
  Plain plain;
  plain.dtype = get(tensor, names().dtype);
  plain.shape = get(tensor, names().shape);
  plain.count = count_of(plain.shape);
  enter(call, &plain);
  return true;
}

std::uint64_t Entry::note(const Call& call, const nb::object& data, const nb::object& sizes) {
  const Names& n = names();
  nb::object frame = nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));  // the verb's
  nb::object code = code_of(frame);
  for (nb::object back = get(frame, n.back); !back.is_none(); back = get(frame, n.back)) {
    frame = std::move(back);  // out to the program
    code = code_of(frame);
    if (code.is(last_code_)) break;  // programs repeat their calls
    if (!is_true(checked(PyObject_GetItem(between_files_.ptr(), get(code, n.file).ptr())))) {
      last_code_ = code;
      break;
    }
  }
  const std::uint64_t sequence = number(get(recorder_, n.sequence)) + 1;
  const nb::object told = whole(static_cast<std::int64_t>(sequence));
  const nb::object more = tuple_of(call.op, number_or_none(call.root), sizes);
  const nb::object note = tuple_of(told, group_, call.verb, data, more, code,
                                   get(frame, n.instruction), no_stack_);
  const std::uint64_t num_notes = number(get(recorder_, n.num_notes));
  const Py_ssize_t place = static_cast<Py_ssize_t>(num_notes % num_kept_);
  if (PyList_SetItem(notes_.ptr(), place, note.inc_ref().ptr()) != 0) throw nb::python_error();
  set(recorder_, n.sequence, told);
  set(recorder_, n.moment, checked(PyIter_Next(moments_.ptr())));
  set(recorder_, n.num_notes, whole(static_cast<std::int64_t>(num_notes + 1)));
  return sequence;
}

// As Python makes it, so that members on either way agree; kept, since programs repeat their calls.
std::uint64_t Entry::fingerprint(const Call& call, const Plain* plain, const nb::object& data,
                                 bool is_uneven) {
  Header header{call.verb.ptr(), nullptr, 0, call.number, call.root};
  if (plain != nullptr) {
    header.dtype = plain->dtype.ptr();
    header.count = is_uneven ? 0 : plain->count;
  }
  const auto found = fingerprints_.find(header);
  if (found != fingerprints_.end()) return found->second;
  if (fingerprints_.size() >= kMostFingerprints) {
    fingerprints_.clear();
    verbs_.clear();
  }
  const nb::object key = tuple_of(call.verb, data, number_or_none(call.number),
                                  number_or_none(call.root), nb::bool_(is_uneven));
  const std::uint64_t made = number(checked(PyObject_GetItem(headers_.ptr(), key.ptr())));
  verbs_.push_back(nb::borrow(call.verb));
  fingerprints_.emplace(header, made);
  return made;
}

void Entry::compare(std::uint64_t sequence, std::uint64_t header, const std::uint64_t* part) {
  if (part != nullptr) {
    const std::uint64_t start = window_ + sequence % uneven_window_ * (1 + 2 * size_);
    for (std::uint64_t i = 1; i <= 2 * size_; ++i) mine_.set(start + i, *part);
    mine_.set(start, sequence);
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
