// Messages between two members, by (peer, tag).
//
// Each ordered pair of members has a ring of packets. A small message is one packet. A large message is
// offered, accepted by the receiver once it has a matching receive, and then sent in pieces. So a ring never
// holds large data without a matching receive, its reader can always drain it, and no message blocks another.
// A ring begins in a page, and continues in a larger ring from the first packet that does not fit in the
// page. A thread that waits advances all transfers of its member; a helper thread does so while transfers are
// in flight and no thread waits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "endpoint.h"
#include "tuning.h"

namespace meshdist {

// One message under way, at one of its ends.
struct Transfer {
  bool is_send = false;
  int peer = -1;  // -1: a receive from any member
  std::int64_t tag = 0;
  std::uint8_t* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;
  std::uint8_t dtype = 0;
  std::uint64_t moved = 0;  // of a large send
  int source = -1;         // a receive's source
  std::uint64_t note = 0;  // under which this member has noted the call
  Status status = Status::ok;
  std::uint64_t other_note = 0;  // the other side's, where the two do not fit
  std::atomic<bool> is_done{false};
};
using TransferPtr = std::shared_ptr<Transfer>;

class Transfers : public std::enable_shared_from_this<Transfers> {
 public:
  explicit Transfers(std::shared_ptr<Endpoint> endpoint);

  // Start, and do everything that is possible now. If `in_background`, the helper does the rest.
  void start(const TransferPtr& transfer, bool in_background);

  // Whether `start` moves few bytes, and would not wait for another thread.
  bool starts_at_once(const Transfer& transfer) const;

  // Wait until it is done; on timeout, interruption or death it is given up and its memory is not
  // touched again.
  Status wait(const TransferPtr& transfer, Nanoseconds deadline, Interruption interruption);

  // Whether it is done, after a check for arrived packets; after some, for about two microseconds.
  bool test(const TransferPtr& transfer);
  bool is_done_soon(const Transfer& transfer);

  // Give up all that is under way, and end the helper.
  void close();

  Tuning tuning;

 private:
  enum class Kind : std::uint32_t { pad = 1, message, offer, accept, fetched, reject, data, cancel, grow };
  struct alignas(kCacheLine) Packet {
    Kind kind;
    std::uint32_t payload;  // bytes that follow
    std::int64_t tag;
    std::uint64_t id;
    std::uint64_t bytes;
    std::uint64_t count;
    union {
      std::uint64_t offset;  // of data
      std::uint64_t note;    // of the call that a message, an offer or a rejection is of
    };
    const std::uint8_t* place;  // in the sender's memory, of an offer that may be read there
    std::uint8_t dtype;
    std::uint32_t revocations;  // of this member's earlier offers
  };
  static_assert(sizeof(Packet) == kCacheLine, "packets lie on cache lines");

  // A message that came, or was offered, before there was a receive for it.
  struct Early {
    Packet packet;
    std::uint64_t order;
    std::vector<std::uint8_t> payload;
    TransferPtr own;  // the send, if a member sends to itself
  };
  struct Arriving {
    TransferPtr receive;  // null once given up: the rest is dropped
    std::uint64_t left;
  };
  // A stretch of memory for consecutive packets. Positions count all bytes written in this direction; `begin`
  // is the position of the first byte.
  struct Ring {
    std::uint8_t* memory = nullptr;
    std::uint64_t bytes = 0;
    std::uint64_t begin = 0;
    std::uint8_t* at(std::uint64_t position) const { return memory + (position - begin) % bytes; }
    std::uint64_t to_end(std::uint64_t position) const { return bytes - (position - begin) % bytes; }
  };
  struct Peer {
    Ring in, out;
    bool may_grow = true;  // the ring `out`
    std::deque<TransferPtr> unannounced;
    std::deque<std::pair<std::uint64_t, TransferPtr>> streaming;
    std::unordered_map<std::uint64_t, TransferPtr> offered;
    std::unordered_map<std::uint64_t, Arriving> arriving;
    std::deque<Packet> replies;
    std::list<Early> early;
    std::optional<bool> is_readable;  // its memory, from here
  };

  bool advance();
  bool drain(unsigned peer);
  bool push(unsigned peer);
  void take(unsigned peer, const Packet& packet, const std::uint8_t* payload);
  bool put(unsigned peer, const Packet& packet, const std::uint8_t* payload);
  void grow(unsigned peer);
  std::uint64_t message_limit(unsigned peer) const;
  std::uint64_t piece_limit(unsigned peer) const;
  Packet packet_of(const Transfer& send) const;
  void send_to_self(const TransferPtr& send);
  void pass_to_self(const TransferPtr& send, const TransferPtr& receive, const Packet& packet);
  void post(const TransferPtr& receive);
  TransferPtr match(unsigned from, std::int64_t tag);
  bool fits(const TransferPtr& receive, unsigned from, const Packet& packet);
  void accept(const TransferPtr& receive, unsigned from, const Packet& packet);
  bool fetch(const TransferPtr& receive, unsigned from, const Packet& packet);
  void meet(const TransferPtr& receive, unsigned from, const Packet& packet, const std::uint8_t* payload);
  void complete(const TransferPtr& transfer, Status status);
  void give_up(const TransferPtr& transfer, Status status);
  void give_up_all(Status status);
  bool is_hopeless(const Transfer& transfer) const;
  void leave_to_helper(std::unique_lock<std::mutex>& lock);
  void help();
  bool has_work() const { return pending_ > 0 || num_owed_ > 0; }
  void owe(Peer& peer, const Packet& reply) {
    peer.replies.push_back(reply);
    ++num_owed_;
  }
  std::vector<TransferPtr> all_pending() const;

  const std::shared_ptr<Endpoint> end_;
  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::vector<Peer> peers_;
  std::list<TransferPtr> posted_;
  std::uint64_t next_id_ = 1;
  std::uint64_t next_order_ = 0;
  int pending_ = 0;
  int num_owed_ = 0;  // replies that did not fit in the ring yet
  int foreground_ = 0;
  bool has_helper_ = false;
};

}  // namespace meshdist
