// The shared segment: anonymous memory that its members alone can reach.
#pragma once

#include <atomic>
#include <cstdint>

#include "layout.h"

namespace meshdist {

// Make a sealed memfd for `size` members, and reserve the memory that they need at first; throws
// std::system_error (a lack of memory is an error here, never a SIGBUS later). If the kernel cannot reserve
// more of it later, all is reserved.
int create_segment(std::uint32_t size, std::uint64_t slot_bytes, std::uint64_t ring_bytes, bool is_crowded);

// A memfd for a Memory of `bytes` bytes, rounded up to whole cache lines.
int create_memory(std::uint64_t bytes);

// Memory that all members of a group map: buffers there are read where they lie. It counts the
// members that use it no more: the others may read it until the last has gone.
class Memory {
 public:
  // Map all of `fd`, which stays the caller's; throws std::runtime_error where it is not one of ours.
  explicit Memory(int fd);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::uint8_t* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  bool holds(const std::uint8_t* from, std::uint64_t bytes) const {
    return from >= data_ && bytes <= bytes_ && static_cast<std::uint64_t>(from - data_) <= bytes_ - bytes;
  }

  // This member offers nothing in it any more.
  void leave() const { num_left_->fetch_add(1, std::memory_order_acq_rel); }
  // Whether none of its `size` members does.
  bool is_abandoned(unsigned size) const { return num_left_->load(std::memory_order_acquire) >= size; }

 private:
  std::uint8_t* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::atomic<std::uint32_t>* num_left_ = nullptr;  // after the bytes
};

// One member's view of the segment.
class Segment {
 public:
  // Map the segment of `fd`, which the caller keeps; throws std::runtime_error if it is not a meshdist
  // segment, std::system_error if it cannot be mapped.
  explicit Segment(int fd);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const Geometry& geometry() const { return geometry_; }
  Control& control() const { return *reinterpret_cast<Control*>(base_); }
  Member& member(unsigned rank) const {
    return reinterpret_cast<Member*>(base_ + geometry_.members_at)[rank];
  }
  // A number per member, for calls whose parts differ.
  std::uint64_t* table(unsigned rank, std::uint64_t round, Row row) const {
    const std::uint64_t index = (std::uint64_t{rank} * kDepth + round % kDepth) * kNumRows + row;
    return reinterpret_cast<std::uint64_t*>(base_ + geometry_.tables_at) + index * geometry_.size;
  }
  std::uint8_t* slot(unsigned rank, std::uint64_t round, bool is_whole) const {
    const std::uint64_t index = std::uint64_t{rank} * kDepth + round % kDepth;
    return is_whole ? base_ + geometry_.slots_at + index * geometry_.slot_bytes
                    : base_ + geometry_.first_slots_at + index * geometry_.first_slot_bytes;
  }
  // Reserve all members' whole slots, and map them; false where there is no memory for them.
  bool reserve_slots() const { return reserve(geometry_.slots_at, geometry_.rings_at - geometry_.slots_at); }
  DeviceGroup& device_group(unsigned from, unsigned to) const {
    return reinterpret_cast<DeviceGroup*>(base_ + geometry_.channels_at)[from * geometry_.size + to];
  }
  std::uint8_t* first_ring(unsigned from, unsigned to) const {
    return base_ + geometry_.first_rings_at + pair(from, to) * geometry_.first_ring_bytes;
  }
  std::uint8_t* ring(unsigned from, unsigned to) const { return base_ + ring_at(from, to); }
  // Reserve a whole ring; false where there is no memory for it.
  bool reserve_ring(unsigned from, unsigned to) const {
    return reserve(ring_at(from, to), geometry_.ring_bytes);
  }

 private:
  std::uint64_t pair(unsigned from, unsigned to) const {
    return std::uint64_t{from} * (geometry_.size - 1) + (to < from ? to : to - 1);
  }
  std::uint64_t ring_at(unsigned from, unsigned to) const {
    return geometry_.rings_at + pair(from, to) * geometry_.ring_bytes;
  }
  bool reserve(std::uint64_t at, std::uint64_t bytes) const;

  std::uint8_t* base_ = nullptr;
  Geometry geometry_{};
};

}  // namespace meshdist
