// What lies in the shared segment, and where.
//
// Everything that members exchange is published in numbered *rounds*. A member publishes round g
// by setting the flag of its line g % kDepth, and with it whatever it wrote before: the line's
// header and few bytes, its slot g % kDepth, its table g % kDepth. All members run the same rounds.
// A member publishes round g + 1 only when it has seen everyone's round g, and reads what belongs
// to round g before it publishes round g + 2; so what it reads is never written over while there
// are four of each.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "codes.h"

namespace meshdist {

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kPage = 4096;
constexpr unsigned kDepth = 4;
constexpr std::size_t kInlineBytes = 32;
constexpr std::uint64_t kMagic = 0x6d6573686469'7374;
constexpr std::uint32_t kVersion = 3;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "members share these by memory");
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "members share these by memory");

// Where a member's buffer lies; in a line's bytes.
struct Place {
  std::uint64_t memory;  // that all members map: the index in the order of adding, equal on all
  std::uint64_t offset;  // in it; in the member's own memory the address
};
static_assert(sizeof(Place) <= kInlineBytes, "a line holds it");

// The rows of a table: per member how many elements this one gives it, how many it expects of it, and
// where in its own memory what it gives begins.
enum Row : unsigned { kGiven, kExpected, kPlaces, kNumRows };

// In a line's hints. Those of the stores and the probe are the first member's alone, see probe.h.
enum Hint : std::uint32_t {
  kHintStreamMuch = 1,
  kHintProbeNext = 2,
  kHintMeasureBoth = 4,
  kHintShared = 8,  // the line's bytes are a Place in shared memory
  kHintStreamLittle = 16,
  kHintOwn = 32,     // the line's bytes are a Place in the member's own memory
  kHintMissed = 64,  // this member could not read what another one has in its own memory
};

// What one member says it is calling; members must agree on all of it.
struct Header {
  std::uint8_t verb = 0;
  std::uint8_t dtype = 0;
  std::uint8_t op = 0;
  std::uint8_t unused = 0;
  std::int32_t root = 0;  // for lists: a digest of the sizes
  std::uint64_t count = 0;
  std::uint64_t sequence = 0;

  bool operator==(const Header& other) const {
    return verb == other.verb && dtype == other.dtype && op == other.op && root == other.root &&
           count == other.count && sequence == other.sequence;
  }
  bool operator!=(const Header& other) const { return !(*this == other); }
};
static_assert(sizeof(Header) == 24, "a line holds it beside the flag");

// A flag, what it announces, and as many bytes of data as fit: one cache line for a small call.
struct alignas(kCacheLine) Line {
  std::atomic<std::uint32_t> flag;
  std::uint32_t hints;
  Header header;
  std::uint8_t bytes[kInlineBytes];
};
static_assert(sizeof(Line) == kCacheLine, "one line");

// Where the threads of a member sleep. A member that changes what a sleeper may wait for looks here,
// and rings if the sleeper waits for it.
struct alignas(kCacheLine) Seat {
  std::atomic<std::uint32_t> doorbell;
  std::atomic<std::uint32_t> sleepers;
  std::atomic<std::int32_t> awaited;  // a member's rank, or kAnyone
};
constexpr std::int32_t kAnyone = -1;
enum SeatUse { kForRounds = 0, kForTransfers = 1, kNumSeats = 2 };

// What the others know of a member's life.
struct alignas(kCacheLine) Report {
  std::atomic<std::uint32_t> was_closed;
  std::atomic<std::uint32_t> is_ending;  // its process exits normally
  std::atomic<std::int32_t> pid;
};

// A number somewhere in a member's own memory, and where: see reach.h.
struct alignas(kCacheLine) Proof {
  std::atomic<std::uint64_t> place;
  std::atomic<std::uint64_t> value;
};

struct Member {
  Line lines[kDepth];
  Seat seats[kNumSeats];
  Report report;
  Proof proof;
  alignas(kCacheLine) std::atomic<std::uint64_t> token;  // of the latency probe
};

// Why the communicator ended: written once, by the first that ends it.
struct alignas(kCacheLine) Ending {
  std::atomic<std::uint32_t> is_over;
  std::atomic<std::uint32_t> claimed;
  std::int32_t cause;    // a Status
  std::int32_t culprit;  // the member that died, or -1
};

struct Geometry {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t size;
  std::uint64_t is_crowded;  // whether ranks outnumber cores: all members must agree
  std::uint64_t slot_bytes;
  std::uint64_t ring_bytes;
  std::uint64_t members_at;
  std::uint64_t tables_at;
  std::uint64_t channels_at;
  std::uint64_t slots_at;
  std::uint64_t rings_at;
  std::uint64_t total_bytes;
};

struct Control {
  Geometry geometry;
  Ending ending;
};

// A one-way stream of packets between two members: bytes written and bytes read since the opening.
struct Channel {
  alignas(kCacheLine) std::atomic<std::uint64_t> written;
  // Offers that the writer took back: the memory that they name may hold anything now.
  std::atomic<std::uint32_t> revocations;
  alignas(kCacheLine) std::atomic<std::uint64_t> read;
};

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

inline Geometry plan_geometry(std::uint32_t size, std::uint64_t slot_bytes,
                              std::uint64_t ring_bytes, bool is_crowded = false) {
  Geometry g{};
  g.magic = kMagic;
  g.version = kVersion;
  g.size = size;
  g.is_crowded = is_crowded;
  g.slot_bytes = round_up(slot_bytes, kPage);
  g.ring_bytes = round_up(ring_bytes, kPage);
  std::uint64_t at = round_up(sizeof(Control), kPage);
  g.members_at = at;
  at = round_up(at + size * sizeof(Member), kPage);
  g.tables_at = at;
  at = round_up(at + std::uint64_t{size} * kDepth * kNumRows * size * sizeof(std::uint64_t), kPage);
  g.channels_at = at;
  at = round_up(at + std::uint64_t{size} * size * sizeof(Channel), kPage);
  g.slots_at = at;
  at += std::uint64_t{size} * kDepth * g.slot_bytes;
  g.rings_at = at;
  at += std::uint64_t{size} * (size - 1) * g.ring_bytes;
  g.total_bytes = at;
  return g;
}

}  // namespace meshdist
