#include "entry.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace meshdist {
namespace {

constexpr std::size_t kMostFingerprints = 4096;

unsigned forks = 0;  // between this process and the one that loaded the module
const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });

namespace names {
const Name dtype{"dtype"}, shape{"shape"};
}

nb::object number_or_none(std::int64_t value) { return value < 0 ? nb::none() : whole(value); }

}  // namespace

Entry::Entry(const Notes& notes, const Headers* headers, nb::list receives, nb::dict aborts,
             nb::object label, nb::object log, nb::object log_level, nb::tuple ranks,
             std::uint64_t member, nb::object fingerprints, nb::object message_fingerprints,
             nb::object disagree, nb::list under_way, unsigned long main_thread)
    : num_forks_(forks),
      notes_(notes),
      headers_(headers == nullptr ? std::nullopt : std::optional<Headers>(*headers)),
      receives_(std::move(receives)),
      aborts_(std::move(aborts)),
      label_(std::move(label)),
      is_logged_(log.attr("isEnabledFor")),
      log_level_(std::move(log_level)),
      // What the logger has answered before; Python empties it whenever the level of any changes. It
      // is no documented part of a logger.
      known_levels_(nb::getattr(log, "_cache", nb::dict())),
      increment_version_(nb::module_::import_("torch").attr("_C").attr("_increment_version")),
      ranks_(std::move(ranks)),
      size_(nb::len(ranks_)),
      member_(member),
      fingerprint_of_(std::move(fingerprints)),
      message_fingerprint_of_(std::move(message_fingerprints)),
      disagree_(std::move(disagree)),
      under_way_(std::move(under_way)),
      main_thread_(main_thread) {}

bool Entry::is_open() const {
  if (num_forks_ != forks) return false;
  if (PyDict_Size(aborts_.ptr()) != 0 && PyDict_Contains(aborts_.ptr(), label_.ptr()) != 0) {
    return false;
  }
  const bool is_silent = PyDict_GetItem(known_levels_.ptr(), log_level_.ptr()) == Py_False;
  if (!is_silent && is_true(call_with(is_logged_, log_level_))) return false;
  return !headers_ || PyList_Size(headers_->missing.ptr()) == 0;
}

bool Entry::is_quiet(bool is_uneven) {
  if (!is_open()) return false;
  if (!headers_) return true;
  if (static_cast<std::size_t>(PyList_Size(headers_->views.ptr())) != others_.size()) {
    others_.clear();
    for (nb::handle view : headers_->views) others_.emplace_back(nb::object(view[1]));
  }
  const std::uint64_t sequence = notes_.sequence() + 1;
  if (sequence % headers_->check_every == 0) return false;
  if (!is_uneven || sequence < headers_->uneven_window) return true;
  const std::uint64_t reached = sequence - (headers_->uneven_window - 1);
  for (const Words& other : others_) {  // no member may still look for what is to be overwritten
    const std::uint64_t ahead = ((other.get(reached % headers_->window) >> 32) - reached) & kLow;
    if (ahead >= std::uint64_t{1} << 31) return false;
  }
  return true;
}

bool Entry::read_list(nb::handle list, Plain& like, Addresses& addresses, nb::object& kept,
                      Counts* counts) {
  if (!PyList_Check(list.ptr()) && !PyTuple_Check(list.ptr())) return false;
  kept = tuple_from(list);
  if (static_cast<std::uint64_t>(PyTuple_Size(kept.ptr())) != size_) return false;
  for (nb::handle one : kept) {
    Plain plain;
    if (!read(one, plain)) return false;
    if (!like.dtype.is_valid()) like = plain;
    if (!plain.is_like(like) || (counts == nullptr && plain.count != like.count)) return false;
    if (counts != nullptr) counts->push_back(plain.count);
    addresses.push_back(plain.address);
  }
  return true;
}

bool Entry::read(nb::handle x, Message& message) {
  if (!is_open() || !PyLong_CheckExact(message.tag.ptr())) return false;
  int overflow = 0;
  message.number = PyLong_AsLongLongAndOverflow(message.tag.ptr(), &overflow);
  if (overflow != 0 || message.number < 0) return false;
  if (!message.peer.is_none()) message.member = nb::cast<int>(message.peer);
  if (message.member == static_cast<int>(member_)) return false;
  if (!message.is_send && PyList_Size(receives_.ptr()) != 0) return false;
  if (headers_) {
    PyObject* const log = PyDict_GetItem(headers_->logs.ptr(), message.peer.ptr());
    if (log == nullptr) return false;
    message.log_owner = nb::borrow(log);
    message.log = nb::inst_ptr<MessageLog>(message.log_owner);
    if (!message.log->is_plain(message.number)) return false;
  }
  return read(x, message.plain);
}

std::uint32_t Entry::enter(const Call& call, const Plain& plain, const Sizes* sizes) {
  const bool has_tensor = plain.dtype.is_valid(), has_title = call.title.is_valid();
  const bool is_uneven = sizes != nullptr;
  const nb::object data = has_tensor ? plain.data : nb::none();
  const nb::object noted_sizes = is_uneven ? sizes_of(*sizes) : nb::tuple();
  const nb::object root = number_or_none(call.root);
  const std::uint64_t sequence =
      notes_.keep_collective(call.verb, data, call.op, root, noted_sizes, call.title);
  if (!headers_ && !has_title) return 0;
  PyObject* const dtype = has_tensor ? plain.dtype.ptr() : Py_None;
  const std::uint64_t count = is_uneven ? 0 : plain.count;
  const Header header{call.verb.ptr(), dtype,     count,           call.number,
                      call.root,       is_uneven, call.title.ptr()};
  const auto key = [&] {
    const nb::object op = number_or_none(call.number);
    names_.push_back(nb::borrow(call.verb));
    if (!has_title) return tuple_of(call.verb, data, op, root, nb::bool_(is_uneven));
    names_.push_back(nb::borrow(call.title));
    return tuple_of(call.verb, data, op, root, nb::bool_(is_uneven), call.title);
  };
  const std::uint64_t made = fingerprint(header, fingerprint_of_, key);
  if (headers_) compare(sequence, made, is_uneven ? &sizes->part : nullptr);
  return has_title ? static_cast<std::uint32_t>(made) : 0;
}

bool Entry::enter_one(nb::handle verb, nb::handle tensor, nb::handle op, nb::handle number,
                      nb::handle root, nb::handle title) {
  if (!is_quiet()) return false;
  Call call{verb, nb::len(title) == 0 ? nb::handle() : title, op};
  if (!number.is_none()) call.number = nb::cast<std::int64_t>(number);
  if (!root.is_none()) call.root = nb::cast<std::int64_t>(root);
  Plain plain;
  if (!tensor.is_none() && !read(tensor, plain)) {
    if (PyList_Check(tensor.ptr())) return false;
    const nb::object shape = get(tensor, names::shape);
    plain.dtype = get(tensor, names::dtype);
    plain.data = tuple_of(shape, plain.dtype);
    plain.count = 1;
    for (nb::handle size : shape) plain.count *= meshdist::number(size);
  }
  enter(call, plain);
  return true;
}

std::uint64_t Entry::note(const Message& message) {
  return notes_.keep_message(message.verb, message.plain.data, kind_of(message));
}

void Entry::compare(const Message& message) {
  if (message.log == nullptr) return;
  const Plain& plain = message.plain;
  const Header header{nullptr, plain.dtype.ptr(), plain.count};
  const auto key = [&] {
    return tuple_of(plain.dtype, whole(plain.count), nb::bool_(false));
  };
  const std::uint64_t kind = static_cast<std::uint64_t>(message.number) << 1 | !message.is_send;
  const std::uint64_t number =
      message.log->note(kind, fingerprint(header, message_fingerprint_of_, key));
  if (number == 0) return;
  note(message);
  const nb::object sides = tuple_of(nb::bool_(message.is_send), message.peer, message.tag);
  raise_error(call_with(disagree_, whole(number), sides));
}

nb::handle Entry::kind_of(const Message& message) {
  Lane& last = last_lanes_[message.is_send];
  if (!last.kind.is_valid() || last.member != message.member || last.number != message.number) {
    last = {message.member, message.number,
            tuple_of(nb::bool_(message.is_send), message.peer, message.tag)};
  }
  return last.kind;
}

// Kept, since programs repeat their calls.
template <class Key>
std::uint64_t Entry::fingerprint(const Header& header, nb::handle by, Key key) {
  const auto found = fingerprints_.find(header);
  if (found != fingerprints_.end()) return found->second;
  if (fingerprints_.size() >= kMostFingerprints) {
    fingerprints_.clear();
    names_.clear();
  }
  const std::uint64_t made = number(checked(PyObject_GetItem(by.ptr(), nb::object(key()).ptr())));
  fingerprints_.emplace(header, made);
  return made;
}

void Entry::compare(std::uint64_t sequence, std::uint64_t header, const std::uint64_t* part) {
  const Words& mine = headers_->mine;
  if (part != nullptr) {
    const std::uint64_t start =
        headers_->window + sequence % headers_->uneven_window * (1 + 2 * size_);
    for (std::uint64_t i = 1; i <= 2 * size_; ++i) mine.put(start + i, *part);
    mine.put(start, sequence);
  }
  const std::uint64_t word = (sequence & kLow) << 32 | header;
  mine.set(sequence % headers_->window, word);
  for (std::size_t other = 0; other < others_.size(); ++other) {
    if (!differs(other, word, sequence, part)) continue;
    // It may be the words of a group that has ended, which Python finds out.
    nb::list sizes;
    for (std::uint64_t i = 0; part != nullptr && i < size_; ++i) sizes.append(*part);
    if (nb::len(headers_->table.attr("enter")(sequence, header, sizes, sizes)) != 0) {
      raise_error(call_with(disagree_, whole(sequence), nb::none()));
    }
    return;
  }
}

bool Entry::differs(std::size_t other, std::uint64_t word, std::uint64_t sequence,
                    const std::uint64_t* part) const {
  const Words& theirs = others_[other];
  const std::uint64_t found = theirs.get(sequence % headers_->window);
  if (found != word) return found >> 32 == word >> 32;
  if (part == nullptr) return false;
  const std::uint64_t start =
      headers_->window + sequence % headers_->uneven_window * (1 + 2 * size_);
  return theirs.get(start + 1 + member_) != *part ||
         theirs.get(start + 1 + size_ + member_) != *part;
}

// Kept, as fingerprints are.
nb::object Entry::sizes_of(const Sizes& sizes) {
  const auto is_kept = [&](const Counts& last, const Counts* given) {
    if (given != nullptr) return last == *given;
    return last.size() == size_ && std::all_of(last.begin(), last.end(),
                                               [&](auto one) { return one == sizes.part; });
  };
  if (sizes_.is_valid() && is_kept(last_sent_, sizes.sent) && is_kept(last_taken_, sizes.taken)) {
    return sizes_;
  }
  const Counts even(size_, sizes.part);
  last_sent_ = sizes.sent == nullptr ? even : *sizes.sent;
  last_taken_ = sizes.taken == nullptr ? even : *sizes.taken;
  const auto made = [](const Counts& counts) {
    nb::list list;
    for (const std::uint64_t one : counts) list.append(one);
    return list;
  };
  sizes_ = tuple_of(made(last_sent_), made(last_taken_));
  return sizes_;
}

}  // namespace meshdist
