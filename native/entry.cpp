#include "entry.h"

#include <algorithm>
#include <utility>

#include "endpoint.h"

namespace meshdist {
namespace {

constexpr std::size_t kMostCalls = 4096;

namespace names {
const Name fingerprint{"fingerprint"}, value{"value"};
}

nb::object number_or_none(std::int64_t value) { return value < 0 ? nb::none() : whole(value); }

}  // namespace

Entry::Entry(Notes& notes, nb::object group, const Headers* headers, nb::dict aborts, nb::object label,
             nb::object log, nb::object log_level, nb::tuple ranks, std::uint64_t member, nb::object calls,
             nb::object disagree, const Words* fingerprints, std::uint64_t check_every, nb::object get_level,
             std::uint64_t most_level, std::int32_t device_type)
    : num_forks_(num_forks()), reader_(device_type), notes_(notes), group_(std::move(group)),
      headers_(headers == nullptr ? std::nullopt : std::optional<Headers>(*headers)),
      aborts_(std::move(aborts)), label_(std::move(label)), is_logged_(log.attr("isEnabledFor")),
      log_level_(std::move(log_level)),
      // What the logger has answered before; Python empties it whenever the level of any changes. It
      // is no documented part of a logger.
      known_levels_(nb::getattr(log, "_cache", nb::dict())),
      increment_version_(nb::module_::import_("torch").attr("_C").attr("_increment_version")),
      ranks_(std::move(ranks)), size_(nb::len(ranks_)), member_(member), calls_(std::move(calls)),
      disagree_(std::move(disagree)), empty_(nb::str("")),
      fingerprints_(fingerprints == nullptr ? Words() : *fingerprints), check_every_(check_every),
      get_level_(std::move(get_level)), most_level_(most_level) {}

bool Entry::is_open() const {
  if (num_forks_ != num_forks()) return false;
  if (PyDict_Size(aborts_.ptr()) != 0 && PyDict_Contains(aborts_.ptr(), label_.ptr()) != 0) {
    return false;
  }
  const bool is_silent = find_in(known_levels_, log_level_) == Py_False;
  if (!is_silent && is_true(call_with(is_logged_, log_level_))) return false;
  return !headers_ || PyList_Size(headers_->missing.ptr()) == 0;
}

bool Entry::is_quiet(bool is_uneven) {
  if (!is_open()) return false;
  if (!get_level_.is_none() && number(get(call_with(get_level_), names::value)) > most_level_) {
    return false;
  }
  const std::uint64_t sequence = notes_.sequence() + 1;
  if (check_every_ != 0 && (sequence % check_every_ == 0 || (sequence & (sequence - 1)) == 0)) return false;
  if (!headers_) return true;
  if (static_cast<std::size_t>(PyList_Size(headers_->views.ptr())) != others_.size()) {
    others_.clear();
    for (nb::handle view : headers_->views) others_.emplace_back(nb::object(view[1]));
  }
  if (sequence % headers_->check_every == 0) return false;
  if (!is_uneven || sequence < headers_->uneven_window) return true;
  const std::uint64_t reached = sequence - (headers_->uneven_window - 1);
  for (const Words& other : others_) {  // no member may still read the entry to be overwritten
    const std::uint64_t ahead = ((other.get(reached % headers_->window) >> 32) - reached) & kLow;
    if (ahead >= std::uint64_t{1} << 31) return false;
  }
  return true;
}

bool Entry::read_list(nb::handle list, Plain& like, Addresses& addresses, nb::object& kept, Counts* counts) {
  if (!PyList_Check(list.ptr()) && !PyTuple_Check(list.ptr())) return false;
  kept = checked(PySequence_Tuple(list.ptr()));
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
  if (headers_) {
    PyObject* const log = find_in(headers_->logs, message.peer);
    if (log == nullptr) return false;
    message.log_owner = nb::borrow(log);
    message.log = nb::inst_ptr<MessageLog>(message.log_owner);
    if (!message.log->is_plain(message.number)) return false;
  }
  if (!read(x, message.plain)) return false;
  message.known = find(message);
  return true;
}

std::uint32_t Entry::enter(const Call& call, const Plain& plain, const Sizes* sizes) {
  const bool is_uneven = sizes != nullptr;
  const Known known = find(call, plain, is_uneven);
  const nb::object noted = is_uneven ? sizes_of(*sizes) : nb::object();
  const std::uint64_t sequence = notes_.keep_collective(group_, known.call, noted);
  compare(sequence, known.fingerprint, is_uneven ? &sizes->part : nullptr);
  return call.op_name.is_valid() ? static_cast<std::uint32_t>(known.fingerprint) : 0;
}

bool Entry::enter_even(nb::handle call, std::uint64_t fingerprint) {
  if (!is_quiet()) return false;
  const std::uint64_t sequence = notes_.keep_collective(group_, call);
  compare(sequence, fingerprint, nullptr);
  return true;
}

void Entry::note_write(nb::handle tensors) {
  const TorchTensor& torch = TorchTensor::here();
  const Py_ssize_t count = torch.is_known() ? PyTuple_Size(tensors.ptr()) : -1;
  const auto is_plain = [&](Py_ssize_t i) { return torch.is_plain(PyTuple_GetItem(tensors.ptr(), i)); };
  Py_ssize_t num_plain = 0;
  while (num_plain < count && is_plain(num_plain)) ++num_plain;
  if (num_plain != count) {
    call_with(increment_version_, tensors);
    return;
  }
  for (Py_ssize_t i = 0; i < count; ++i) torch.note_write(PyTuple_GetItem(tensors.ptr(), i));
}

void Entry::compare(const Message& message) {
  if (message.log == nullptr) return;
  const std::uint64_t kind = static_cast<std::uint64_t>(message.number) << 1 | !message.is_send;
  const std::uint64_t number = message.log->note(kind, message.known.fingerprint);
  if (number == 0) return;
  note(message);
  raise_error(call_with(disagree_, whole(number), message.known.kind));
}

Known Entry::find(const Call& called, const Plain& plain, bool is_uneven) {
  const nb::handle data = plain.dtype.is_valid() ? nb::handle(plain.data) : nb::handle(Py_None);
  const nb::handle op_name = called.op_name.is_valid() ? called.op_name : nb::handle(empty_);
  const Key key{called.operation.ptr(), data.ptr(), op_name.ptr(), called.op, called.root, is_uneven};
  return find(key, plain.is_kept || data.is_none(), last_[2], [&] {
    const nb::object op = number_or_none(called.op), root = number_or_none(called.root);
    return std::pair(tuple_of(called.operation, data, op, root, op_name, nb::bool_(is_uneven), nb::tuple()),
                     nb::object());
  });
}

Known Entry::find(const Message& message) {
  const nb::object& data = message.plain.data;
  const Key key{message.operation.ptr(), data.ptr(), nullptr, message.number, message.member, false};
  return find(key, message.plain.is_kept, last_[message.is_send], [&] {
    return std::pair(tuple_of(message.operation, data, nb::none(), nb::none(), empty_, nb::bool_(false),
                              nb::tuple(), message.peer, message.tag),
                     tuple_of(nb::bool_(message.is_send), message.peer, message.tag));
  });
}

template <class Make>
Known Entry::find(const Key& key, bool is_kept, const Row*& last, Make make) {
  if (last != nullptr && last->first == key) return last->second.known;
  auto found = known_.find(key);
  if (found == known_.end()) {
    const auto [fields, kind] = make();
    const nb::object call = checked(PyObject_GetItem(calls_.ptr(), fields.ptr()));
    const Known known{call, kind, number(get(call, names::fingerprint))};
    if (!is_kept) return known;  // its data lie at another address each time
    if (known_.size() >= kMostCalls) {
      known_.clear();
      last_ = {};
    }
    found = known_.emplace(key, Kept{known, fields}).first;
  }
  last = &*found;
  return found->second.known;
}

void Entry::compare(std::uint64_t sequence, std::uint64_t header, const std::uint64_t* part) {
  if (headers_) compare_here(sequence, header, part);
  if (check_every_ != 0) fingerprints_.put(sequence % check_every_, header);
}

void Entry::compare_here(std::uint64_t sequence, std::uint64_t header, const std::uint64_t* part) {
  const Words& mine = headers_->mine;
  if (part != nullptr) {
    const std::uint64_t start = headers_->window + sequence % headers_->uneven_window * (1 + 2 * size_);
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
  const std::uint64_t start = headers_->window + sequence % headers_->uneven_window * (1 + 2 * size_);
  return theirs.get(start + 1 + member_) != *part || theirs.get(start + 1 + size_ + member_) != *part;
}

// Kept, as fingerprints are.
nb::object Entry::sizes_of(const Sizes& sizes) {
  const auto is_kept = [&](const Counts& last, const Counts* given) {
    if (given != nullptr) return last == *given;
    return last.size() == size_ &&
           std::all_of(last.begin(), last.end(), [&](auto one) { return one == sizes.part; });
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
