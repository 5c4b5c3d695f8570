#include "entry.h"

#include <pthread.h>

#include <utility>

namespace meshdist {
namespace {

constexpr std::size_t kMostFingerprints = 4096;

unsigned forks = 0;  // between this process and the one that loaded the module
const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });

struct Names {
  Name dtype{"dtype"}, shape{"shape"};
};

const Names& names() {
  static const Names all;
  return all;
}

// Of a list or tuple; not valid where it is none, or shorter.
nb::handle item_of(nb::handle list, std::size_t place) {
  const Py_ssize_t i = static_cast<Py_ssize_t>(place);
  if (PyList_Check(list.ptr())) {
    return i < PyList_Size(list.ptr()) ? PyList_GetItem(list.ptr(), i) : nullptr;
  }
  if (PyTuple_Check(list.ptr())) {
    return i < PyTuple_Size(list.ptr()) ? PyTuple_GetItem(list.ptr(), i) : nullptr;
  }
  return nullptr;
}

nb::object number_or_none(std::int64_t value) { return value < 0 ? nb::none() : whole(value); }

}  // namespace

Entry::Entry(nb::dict facts)
    : num_forks_(forks),
      reader_(facts),
      aborts_(facts["aborts"]),
      label_(facts["label"]),
      is_told_(facts["is_told"]),
      level_(facts["level"]),
      known_levels_(facts["known_levels"]),
      notes_(facts),
      increment_version_(facts["increment_version"]),
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

bool Entry::is_open() const {
  if (num_forks_ != forks) return false;
  if (PyDict_Size(aborts_.ptr()) != 0 && PyDict_Contains(aborts_.ptr(), label_.ptr()) != 0) {
    return false;
  }
  const bool is_silent = PyDict_GetItem(known_levels_.ptr(), level_.ptr()) == Py_False;
  if (!is_silent && is_true(call_with(is_told_, level_))) return false;
  return !ledger_.is_valid() || PyList_Size(missing_.ptr()) == 0;
}

bool Entry::is_quiet(bool is_uneven) {
  if (!is_open()) return false;
  if (!ledger_.is_valid()) return true;
  if (static_cast<std::size_t>(PyList_Size(views_.ptr())) != others_.size()) {
    others_.clear();
    for (nb::handle view : nb::borrow<nb::list>(views_)) {
      others_.emplace_back(nb::object(view[1]));
    }
  }
  const std::uint64_t sequence = notes_.sequence() + 1;
  if (sequence % check_every_ == 0) return false;
  if (!is_uneven || sequence < uneven_window_) return true;
  const std::uint64_t reached = sequence - (uneven_window_ - 1);
  for (const Words& other : others_) {  // nobody may still look for what is about to be overwritten
    const std::uint64_t ahead = ((other.get(reached % window_) >> 32) - reached) & kLow;
    if (ahead >= std::uint64_t{1} << 31) return false;
  }
  return true;
}

bool Entry::read_first(nb::handle list, Plain& plain) {
  const nb::handle first = item_of(list, 0);
  return first.is_valid() && read(first, plain);
}

bool Entry::read_list(nb::handle list, const Plain& like, Addresses& addresses) {
  addresses.clear();
  for (nb::handle one; (one = item_of(list, addresses.size())).is_valid();) {
    Plain plain;
    if (addresses.size() == size_ || !read(one, plain) || !plain.is_like(like) ||
        plain.count != like.count) {
      return false;
    }
    addresses.push_back(plain.address);
  }
  return addresses.size() == size_;
}

void Entry::enter(const Call& call, const nb::object& data, nb::handle dtype,
                  std::uint64_t count, const std::uint64_t* part) {
  const nb::object sizes = part == nullptr ? nb::tuple() : sizes_of(*part);
  const nb::object more = tuple_of(call.op, number_or_none(call.root), sizes);
  const std::uint64_t sequence = notes_.keep_collective(call.verb, data, more);
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
      raise_error(disagreement_(sequence));
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
