#include "message_entry.h"

namespace meshdist {
namespace {

constexpr std::size_t kMostHeaders = 4096;

}  // namespace

MessageEntry::MessageEntry(const nb::dict& facts, Entry& entry)
    : entry_(entry),
      largest_tag_(nb::cast<std::int64_t>(facts["largest_tag"])),
      headers_(facts["message_headers"]),
      misfit_(facts["misfit"]) {
  if (facts.contains("unmatched")) unmatched_ = facts["unmatched"];
  if (facts.contains("logs")) logs_ = facts["logs"];
}

bool MessageEntry::read(nb::handle x, Message& message) {
  if (!entry_.is_open() || !PyLong_CheckExact(message.tag.ptr())) return false;
  int overflow = 0;
  message.number = PyLong_AsLongLongAndOverflow(message.tag.ptr(), &overflow);
  if (overflow != 0 || message.number < 0 || message.number > largest_tag_) return false;
  if (!message.peer.is_none()) message.member = nb::cast<int>(message.peer);
  if (message.member == static_cast<int>(entry_.member())) return false;
  if (!message.is_send && unmatched_.is_valid() && PyList_Size(unmatched_.ptr()) != 0) return false;
  if (logs_.is_valid()) {
    PyObject* const log = PyDict_GetItem(logs_.ptr(), message.peer.ptr());
    if (log == nullptr) return false;
    message.log_owner = nb::borrow(log);
    if (!nb::try_cast(message.log_owner, message.log)) return false;  // Python's own
    if (!message.log->is_plain(message.number)) return false;
  }
  return entry_.read(x, message.plain);
}

std::uint64_t MessageEntry::note(const Message& message) {
  return entry_.notes().keep_message(message.verb, message.plain.data, kind_of(message));
}

void MessageEntry::compare(const Message& message) {
  if (message.log == nullptr) return;
  const std::uint64_t kind = static_cast<std::uint64_t>(message.number) << 1 | !message.is_send;
  const std::uint64_t number = message.log->note(kind, header_of(message.plain));
  if (number == 0) return;
  note(message);
  raise_error(call_with(misfit_, nb::bool_(message.is_send), message.peer, message.tag,
                        whole(static_cast<std::int64_t>(number))));
}

nb::handle MessageEntry::kind_of(const Message& message) {
  Lane& last = last_lanes_[message.is_send];
  if (!last.kind.is_valid() || last.member != message.member || last.number != message.number) {
    last = {message.member, message.number,
            tuple_of(nb::bool_(message.is_send), message.peer, message.tag)};
  }
  return last.kind;
}

// As Python makes it, so that members on either way agree; kept, since programs repeat their calls.
std::uint64_t MessageEntry::header_of(const Plain& plain) {
  const Kind kind{plain.dtype.ptr(), plain.count};
  const auto found = kept_headers_.find(kind);
  if (found != kept_headers_.end()) return found->second;
  if (kept_headers_.size() >= kMostHeaders) kept_headers_.clear();
  const nb::object count = whole(static_cast<std::int64_t>(plain.count));
  const nb::object key = tuple_of(plain.dtype, count, nb::bool_(false));
  const std::uint64_t made = meshdist::number(checked(PyObject_GetItem(headers_.ptr(), key.ptr())));
  kept_headers_.emplace(kind, made);
  return made;
}

}  // namespace meshdist
