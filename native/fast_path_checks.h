// Tensors whose own memory travels, read by way of DLPack's exchange between libraries: one call
// that gives memory, shape and dtype, and makes no Python object.
#pragma once

#include <array>
#include <unordered_map>

#include "torch_tensor.h"

namespace meshdist {

struct Plain {
  nb::object data, dtype;  // data: shape and dtype, as notes keep them
  std::uintptr_t address = 0;
  std::uint64_t count = 0, item = 0;
  unsigned code = 0;                   // the core's, of the dtype
  const std::int64_t* dims = nullptr;  // the tensor's own
  int num_dims = 0;
  int device = 0;        // its index for the device type
  bool is_kept = false;  // whether `data` is the same object each time

  std::uint64_t bytes() const { return count * item; }
  bool is_like(const Plain& other) const { return dtype.is(other.dtype) && device == other.device; }
};

// Tensors of one dtype, by their addresses: the i-th has `counts[i]` elements of `item` bytes, or all have
// `counts[0]`.
struct Spans {
  const Addresses& starts;
  const Counts& counts;
  std::uint64_t item;
  Address end(std::size_t i) const { return starts[i] + counts[counts.size() > 1 ? i : 0] * item; }
};

// Whether any of `some` reaches into any of `others`; whether two of `some` have memory in common.
bool overlap(const Spans& some, const Spans& others);
bool overlap_each_other(const Spans& some);
inline bool overlap(const Plain& a, const Plain& b) {
  return a.address < b.address + b.bytes() && b.address < a.address + a.bytes();
}

// Whether `whole` is one `block` per member: flat, joined along dim 0, or stacked.
bool is_of_blocks(const Plain& whole, const Plain& block, std::uint64_t size);

// Whether both can be cut along dim 0 into as many parts as there are members, of one size.
bool are_in_equal_parts(const Plain& one, const Plain& other, std::uint64_t size);

// How many elements of `whole` belong to each of `size` members: `sizes` has rows along dim 0, in a list
// or tuple, or is None or empty for equal parts. False where it is not plain, or cuts nothing so.
bool cut(nb::handle sizes, const Plain& whole, std::uint64_t size, Counts& counts);

// Of how many elements a row along dim 0 is.
std::uint64_t row_of(const Plain& whole);

class PlainReader {
 public:
  // Of tensors on devices of a type, as DLPack numbers them.
  explicit PlainReader(std::int32_t device_type);

  // Whether `x` is a plain tensor: dense, contiguous, on such a device, and without a gradient; fills
  // `plain`.
  bool read(nb::handle x, Plain& plain);

  // Whether plain tensors may have a dtype; `code` is the core's.
  bool find_code(nb::handle dtype, unsigned& code) const;

 private:
  static constexpr int kMostDims = 5;  // of shapes that are kept
  struct Kind {
    nb::object data, dtype;  // no dtype where it has no code
    unsigned code = 0;
  };
  using Key = std::array<std::int64_t, kMostDims + 1>;
  struct Hash {
    std::size_t operator()(const Key& key) const { return mixed(key); }
  };

  Kind kind_of(nb::handle x) const;
  bool is_as_written(nb::handle x) const;

  const TorchTensor& torch_ = TorchTensor::here();
  const std::int32_t device_type_;
  const nb::object tensor_type_;
  nb::dict codes_;
  int (*look_)(void*, void*) = nullptr;        // null where torch does not offer it
  std::unordered_map<Key, Kind, Hash> kinds_;  // programs repeat their shapes
  const std::pair<const Key, Kind>* last_kind_ = nullptr;
};

}  // namespace meshdist
