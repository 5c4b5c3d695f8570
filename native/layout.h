// The contents of the shared segment, and their places.
//
// Everything that members exchange is published in numbered *rounds*. A member publishes round g by setting
// the flag of its line g % kDepth, and with it everything written before: the line's header and few bytes,
// its slot g % kDepth, its table g % kDepth. All members run the same rounds. A member publishes round g + 1
// only when it has seen everyone's round g, and reads the data of round g before it publishes round g + 2. So
// with four of each, no member overwrites data that another still reads.
//
// An all-to-all whose parts differ keeps this rule pair by pair (all_to_all.cpp). All members wait for all in
// its first round. In later rounds a member waits only for members with which it exchanges data, until two
// rounds after the last round that has data for either: by then the other member has read its slots. A member
// that waits for no other skips to the round that follows the whole all-to-all. So its flag may show a later
// round than another member waits for; a flag means that all rounds up to its number were published.
//
// A group that only small calls have used needs little memory: its slots and rings begin in *first* parts of
// some pages, and only these are reserved when it opens. The whole slots and rings are elsewhere. They are
// reserved by the first larger call (slots.h), or by the first packet that does not fit in a first ring
// (transfers.h). If that fails, the first parts stay in use.
#pragma once

#include <algorithm>
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
constexpr std::uint32_t kVersion = 5;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "members share these by memory");
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "members share these by memory");

// The place of a member's buffer; in a line's bytes.
struct Place {
  std::uint64_t memory;  // that all members map: the index in the order of adding, equal on all
  std::uint64_t offset;  // in it; in the member's own memory the address
};
static_assert(sizeof(Place) <= kInlineBytes, "a line holds it");

// The rows of a table: per member, the number of elements that this member sends and expects, and the address
// of the data in its own memory.
enum Row : unsigned { kGiven, kExpected, kPlaces, kNumRows };

// In a line's hints. Those of the stores and the probe are the first member's alone, see probe.h.
enum Hint : std::uint32_t {
  kHintStreamMuch = 1,
  kHintProbeNext = 2,
  kHintMeasureBoth = 4,
  kHintShared = 8,  // the line's bytes are a Place in shared memory
  kHintStreamLittle = 16,
  kHintOwn = 32,     // the line's bytes are a Place in the member's own memory
  kHintMissed = 64,  // this member failed to read another's memory, or to reserve memory
  kHintEven = 128,   // of an all-to-all: equal parts, already in the slot of the round
};

// What one member says it is calling; members must agree on all of it.
struct Header {
  std::uint8_t operation = 0;
  std::uint8_t dtype = 0;
  std::uint8_t op = 0;
  std::uint8_t layout = 0;  // 0 in row-major order; else it and the fingerprint are of the layout
  std::int32_t root = 0;    // for lists: a digest of the sizes
  std::uint64_t count = 0;
  std::uint32_t sequence = 0;  // its low bits
  // Of a call of which the other fields do not show all, as of a call with an operation name; else 0.
  std::uint32_t fingerprint = 0;

  bool operator==(const Header& other) const {
    return operation == other.operation && dtype == other.dtype && op == other.op && root == other.root &&
           count == other.count && sequence == other.sequence && fingerprint == other.fingerprint &&
           layout == other.layout;
  }
  bool operator!=(const Header& other) const { return !(*this == other); }
  // Apart from the order of the elements, which the fingerprint shows too.
  bool is_alike(const Header& other) const {
    Header mine = *this;
    mine.layout = other.layout;
    mine.fingerprint = other.fingerprint;
    return mine == other;
  }
};
static_assert(sizeof(Header) == 24, "a line holds it beside the flag");

// A flag, the header that it announces, and some bytes of data: one cache line for a small call.
struct alignas(kCacheLine) Line {
  std::atomic<std::uint32_t> flag;
  std::uint32_t hints;
  Header header;
  std::uint8_t bytes[kInlineBytes];
};
static_assert(sizeof(Line) == kCacheLine, "one line");

// The threads of a member sleep here. A member that changes a value that a sleeper may wait for reads this,
// and rings if the sleeper waits for it.
struct alignas(kCacheLine) Seat {
  std::atomic<std::uint32_t> doorbell;
  std::atomic<std::uint32_t> sleepers;
  std::atomic<std::int32_t> awaited;         // a member's rank, or kAnyone
  std::atomic<std::uint32_t> awaited_stamp;  // of that member's round: no earlier one need ring
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
  std::uint32_t is_crowded;  // whether ranks outnumber cores: all members must agree
  std::uint32_t grows;       // whether slots and rings begin with their first parts
  std::uint64_t slot_bytes;
  std::uint64_t ring_bytes;
  std::uint64_t first_slot_bytes;
  std::uint64_t first_ring_bytes;
  std::uint64_t members_at;
  std::uint64_t tables_at;
  std::uint64_t channels_at;
  std::uint64_t first_slots_at;
  std::uint64_t first_rings_at;
  std::uint64_t first_bytes;  // reserved at first
  std::uint64_t slots_at;
  std::uint64_t rings_at;
  std::uint64_t total_bytes;
};

struct Control {
  Geometry geometry;
  Ending ending;
};

// A one-way stream of packets between two members: bytes written and bytes read since the opening.
struct DeviceGroup {
  alignas(kCacheLine) std::atomic<std::uint64_t> written;
  // Offers that the writer took back: the memory that they name may hold anything now.
  std::atomic<std::uint32_t> revocations;
  alignas(kCacheLine) std::atomic<std::uint64_t> read;
};

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

inline Geometry plan_geometry(std::uint32_t size, std::uint64_t slot_bytes, std::uint64_t ring_bytes,
                              bool is_crowded, bool grows) {
  Geometry g{};
  g.magic = kMagic;
  g.version = kVersion;
  g.size = size;
  g.is_crowded = is_crowded;
  g.grows = grows;
  g.slot_bytes = round_up(slot_bytes, kPage);
  g.ring_bytes = round_up(ring_bytes, kPage);
  // A piece for each member takes a cache line of a slot at least.
  const std::uint64_t least = std::max<std::uint64_t>((size + 1) * kCacheLine, g.slot_bytes / 32);
  g.first_slot_bytes = grows ? std::min(g.slot_bytes, round_up(least, kPage)) : g.slot_bytes;
  g.first_ring_bytes = grows ? std::min(g.ring_bytes, std::uint64_t{kPage}) : g.ring_bytes;
  const std::uint64_t num_slots = std::uint64_t{size} * kDepth;
  const std::uint64_t num_rings = std::uint64_t{size} * (size - 1);
  std::uint64_t at = 0;
  const auto lay = [&](std::uint64_t bytes) {
    const std::uint64_t begin = at;
    at = round_up(at + bytes, kPage);
    return begin;
  };
  lay(sizeof(Control));
  g.members_at = lay(size * sizeof(Member));
  g.tables_at = lay(num_slots * kNumRows * size * sizeof(std::uint64_t));
  g.channels_at = lay(std::uint64_t{size} * size * sizeof(DeviceGroup));
  g.first_slots_at = lay(num_slots * g.first_slot_bytes);
  g.first_rings_at = lay(num_rings * g.first_ring_bytes);
  g.first_bytes = at;
  g.slots_at = grows ? lay(num_slots * g.slot_bytes) : g.first_slots_at;
  g.rings_at = grows ? lay(num_rings * g.ring_bytes) : g.first_rings_at;
  g.total_bytes = at;
  return g;
}

}  // namespace meshdist
