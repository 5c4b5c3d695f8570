// What stands before a collective: its tensors are looked at, it is noted, and it is compared.
//
// `Channel.enter` and `collectives/checks.py` do in Python what this does for plain calls; every
// other call is left to them. So nothing has happened yet where a function here says that a call is
// not plain.
#pragma once

#include "notes.h"
#include "plain.h"

#include <vector>

namespace meshdist {

class Entry {
 public:
  // `facts` has what Python knows: see `meshdist.mesh.channel`.
  explicit Entry(nb::dict facts);

  // What must be equal on all members besides dtype and count; `number` is that of `op`.
  struct Call {
    nb::handle verb;
    nb::handle op = nb::none();
    std::int64_t number = -2;
    std::int64_t root = -2;
  };

  // Whether there is nothing to refuse or to tell, and nobody's words are missing.
  bool is_open() const;

  // Whether it is so, and there is nothing to wait for before the next collective.
  bool is_quiet(bool is_uneven = false);

  // Whether `x` is a plain tensor; fills `plain`.
  bool read(nb::handle x, Plain& plain) { return reader_.read(x, plain); }

  // Whether `list` is a list or tuple that begins with a plain tensor; fills `plain`.
  bool read_first(nb::handle list, Plain& plain);

  // Where the plain tensors of a list of one per member lie, all of the size and dtype of `like`;
  // false where it is no such list.
  bool read_list(nb::handle list, const Plain& like, Addresses& addresses);

  // Note a call and compare it with the others'; raises what `disagreement` makes where one
  // differs. `part` is how many elements go to and come from each member, of an uneven call.
  void enter(const Call& call, const Plain* plain, const std::uint64_t* part = nullptr) {
    const std::uint64_t count = plain == nullptr ? 0 : plain->count;
    enter(call, plain == nullptr ? nb::none() : plain->data,
          plain == nullptr ? nb::none() : plain->dtype, part == nullptr ? count : 0, part);
  }

  // As `Channel.enter`, for a call on one tensor or none: false where it is not plain.
  bool enter_one(nb::handle verb, nb::handle tensor, nb::handle op, nb::handle number,
                 nb::handle root);

  Notes& notes() { return notes_; }

  std::uint64_t size() const { return size_; }
  std::uint64_t member() const { return member_; }

  // Tell autograd that tensors, a sequence, were written into.
  void note_write(nb::handle tensors) { call_with(increment_version_, tensors); }

 private:
  struct Header {
    PyObject *verb, *dtype;
    std::uint64_t count;
    std::int64_t number, root;
    bool is_uneven;
    bool operator==(const Header& o) const {
      return verb == o.verb && dtype == o.dtype && count == o.count && number == o.number &&
             root == o.root && is_uneven == o.is_uneven;
    }
  };
  struct Hash {
    std::size_t operator()(const Header& h) const {
      std::size_t mixed = reinterpret_cast<std::size_t>(h.verb);
      for (std::uint64_t one : {reinterpret_cast<std::uint64_t>(h.dtype), h.count,
                                static_cast<std::uint64_t>((h.number * 64 + h.root) * 2 + h.is_uneven)}) {
        mixed = (mixed ^ one) * 0x9e3779b97f4a7c15u;
        mixed ^= mixed >> 29;
      }
      return mixed;
    }
  };

  void enter(const Call& call, const nb::object& data, nb::handle dtype, std::uint64_t count,
             const std::uint64_t* part);
  std::uint64_t fingerprint(const Header& header, const nb::object& data);
  void compare(std::uint64_t sequence, std::uint64_t header, const std::uint64_t* part);
  bool differs(std::size_t other, std::uint64_t word, std::uint64_t sequence,
               const std::uint64_t* part) const;
  nb::object sizes_of(std::uint64_t part);

  const unsigned num_forks_;
  PlainReader reader_;
  nb::object aborts_, label_, is_told_, level_, known_levels_;
  Notes notes_;
  nb::object increment_version_;
  const std::uint64_t size_, member_;

  // The members' headers; none are compared where there is no `ledger_`.
  nb::object ledger_, missing_, views_, headers_, disagreement_;
  std::uint64_t window_ = 0, check_every_ = 0, uneven_window_ = 0;
  Words mine_;
  std::vector<Words> others_;
  std::unordered_map<Header, std::uint64_t, Hash> fingerprints_;
  std::vector<nb::object> verbs_;  // whose addresses are keys there
  nb::object sizes_;
  std::uint64_t sizes_part_ = 0;
};

}  // namespace meshdist
