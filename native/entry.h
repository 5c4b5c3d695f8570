// Check the tensors of a plain call, record it, and compare it.
//
// `DeviceGroup` and `collectives/argument_checks.py` do in Python what this does for plain calls; every other
// call is left to them. So a function here that reports that a call is not plain has changed nothing.
#pragma once

#include <optional>
#include <unordered_map>
#include <vector>

#include "message_log.h"
#include "notes.h"
#include "fast_path_checks.h"

namespace meshdist {

// The members' headers, as a `FingerprintTable` in Python has them.
struct Headers {
  nb::object table;  // asked whether a header that seems to differ does
  Words mine;
  nb::list missing;  // members whose words are not known yet
  nb::list views;    // of each other member its place and words
  nb::dict logs;     // of the messages with each other member
  std::uint64_t window, check_every, uneven_window;
};

// The `Call` of Python's; `kind` is of a message (is_send, peer, tag).
struct Known {
  nb::object call, kind;
  std::uint64_t fingerprint = 0;
};

struct Message {
  nb::handle operation, peer, tag;  // peer: None for a receive from any member
  bool is_send = false;
  // As numbers, which `Entry::read` fills in; -1 is any member.
  int member = -1;
  std::int64_t number = 0;
  MessageLog* log = nullptr;  // null where none is kept
  nb::object log_owner{};     // another thread may close the group meanwhile
  Plain plain{};
  Known known{};
};

class Entry {
 public:
  // Calls are recorded for `group`. If `headers` is null, no calls are compared. `calls` maps the tuple of a
  // call's fields to its `Call`, which Python makes. `disagree(number, message)` makes the error of members
  // whose calls differ.
  // If members are on several hosts, `fingerprints` gets the fingerprints of the last `check_every` calls,
  // and calls at which Python compares them are left to Python; else `check_every` is 0. If `get_level`,
  // which may be None, returns more than `most_level`, all calls are left to Python, which compares them
  // before data move. `device_type` is the tensors' device type, as DLPack numbers it.
  Entry(Notes& notes, nb::object group, const Headers* headers, nb::dict aborts, nb::object label,
        nb::object log, nb::object log_level, nb::tuple ranks, std::uint64_t member, nb::object calls,
        nb::object disagree, const Words* fingerprints, std::uint64_t check_every, nb::object get_level,
        std::uint64_t most_level, std::int32_t device_type);

  // What is called, besides the data: the number of an op, -1 for none, as of a root, and `op_name` null
  // where there is none.
  struct Call {
    nb::handle operation;
    nb::handle op_name{};
    std::int64_t op = -1;
    std::int64_t root = -1;
  };

  // Numbers of elements to and from each member in an uneven call: `part`, or the lists.
  struct Sizes {
    std::uint64_t part = 0;
    const Counts* sent = nullptr;
    const Counts* taken = nullptr;
  };

  // Whether there is nothing to reject or to log, and every member's words are known.
  bool is_open() const;

  // Whether it is so, and there is nothing to wait for before the next collective.
  bool is_quiet(bool is_uneven = false);

  // Whether `x` is a plain tensor; fills `plain`.
  bool read(nb::handle x, Plain& plain) { return reader_.read(x, plain); }
  bool find_code(nb::handle dtype, unsigned& code) const { return reader_.find_code(dtype, code); }

  // The addresses of the plain tensors of a list of one tensor per member, all with the size and dtype of
  // `like`, or of the first tensor, which then becomes `like`; false if it is not such a list. `kept` gets
  // the tensors as a tuple. Sizes may differ if `counts` is given.
  bool read_list(nb::handle list, Plain& like, Addresses& addresses, nb::object& kept,
                 Counts* counts = nullptr);

  // Whether calls are compared in a header table, by this.
  bool compares() const { return headers_.has_value(); }

  // Whether a message of tensor `x` is plain and may start; fills the rest in.
  bool read(nb::handle x, Message& message);

  // Record a call and compare it with the other members' calls; raise if they differ. Only the backend
  // compares parts of several sizes. Return the value that a comparing backend has to compare in addition:
  // the fingerprint of a call that has an operation name, else 0.
  std::uint32_t enter(const Call& call, const Plain& plain, const Sizes* sizes = nullptr);

  // As `DeviceGroup.enter`, for an even call of Python's: false where there is something to wait for.
  bool enter_even(nb::handle call, std::uint64_t fingerprint);

  // Note a message; returns the number of the note.
  std::uint64_t note(const Message& message) {
    return notes_.keep_message(group_, message.known.call, message.known.kind);
  }

  // Compare it with its counterpart, if that is there; where they differ note it, and raise.
  void compare(const Message& message);

  // The numbers of the last collective and of the last note.
  std::uint64_t sequence() const { return notes_.sequence(); }
  std::uint64_t num_notes() const { return notes_.num_notes(); }

  std::uint64_t size() const { return size_; }
  std::uint64_t member() const { return member_; }
  nb::object rank_of(int member) const { return ranks_[member]; }  // in the world

  // Notify autograd that plain tensors, a tuple, were written.
  void note_write(nb::handle tensors);

 private:
  // What is called, by addresses. Of a message `op` is the tag, and `root` the peer.
  struct Key {
    PyObject *operation, *data, *op_name;
    std::int64_t op, root;
    bool is_uneven;
    bool operator==(const Key& o) const {
      return operation == o.operation && data == o.data && op_name == o.op_name && op == o.op && root == o.root &&
             is_uneven == o.is_uneven;
    }
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      return mixed(std::initializer_list<std::uint64_t>{
          reinterpret_cast<std::uint64_t>(key.operation), reinterpret_cast<std::uint64_t>(key.data),
          reinterpret_cast<std::uint64_t>(key.op_name),
          static_cast<std::uint64_t>((key.op * 64 + key.root) * 2 + key.is_uneven)});
    }
  };
  struct Kept {
    Known known;
    nb::object fields;  // of the call, whose addresses are the key
  };
  using Row = std::pair<const Key, Kept>;

  Known find(const Call& called, const Plain& plain, bool is_uneven);
  Known find(const Message& message);
  // `last` is the previous result for such calls; `make` returns the fields and the kind of a call that is
  // not known yet.
  template <class Make>
  Known find(const Key& key, bool is_kept, const Row*& last, Make make);
  void compare(std::uint64_t sequence, std::uint64_t header, const std::uint64_t* part);
  void compare_here(std::uint64_t sequence, std::uint64_t header, const std::uint64_t* part);
  bool differs(std::size_t other, std::uint64_t word, std::uint64_t sequence,
               const std::uint64_t* part) const;
  nb::object sizes_of(const Sizes& sizes);

  const unsigned num_forks_;
  PlainReader reader_;
  Notes& notes_;
  const nb::object group_;
  const std::optional<Headers> headers_;
  const nb::dict aborts_;
  const nb::object label_, is_logged_, log_level_, known_levels_, increment_version_;
  const nb::tuple ranks_;
  const std::uint64_t size_, member_;
  const nb::object calls_, disagree_, empty_;
  const Words fingerprints_;
  const std::uint64_t check_every_;
  const nb::object get_level_;
  const std::uint64_t most_level_;
  std::vector<Words> others_;
  std::unordered_map<Key, Kept, Hash> known_;  // programs repeat their calls
  std::array<const Row*, 3> last_{};           // of receives, sends and collectives
  nb::object sizes_;                           // as notes have them, of the last uneven call
  Counts last_sent_, last_taken_;
};

}  // namespace meshdist
