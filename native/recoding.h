// Reductions that MPI does on other elements than those of the tensors: `datatypes.py` says why.
#pragma once

#include <cstdint>

#include "codes.h"

namespace meshdist {

struct Recoding {
  bool widens = false;  // 16-bit floats become float32, narrow whole numbers int32
  bool orders = false;  // floats become the whole numbers that have their order
  bool nan_is_greatest = false;  // of all numbers, else the least
  bool divides = false;  // the sum, by the number of members

  bool is_any() const { return widens || orders || divides; }
  // Whether MPI reduces the tensor's own memory.
  bool is_in_place() const { return !widens && !orders; }
  // The bytes of an element that travels.
  std::size_t bytes_of(unsigned dtype) const { return widens ? 4 : kDtypeBytes[dtype]; }

  void encode(unsigned dtype, void* to, const void* from, std::size_t count) const;
  // Write into `to` what `size` members have reduced to `from`, which is overwritten, and may be `to`
  // where it is in place.
  void decode(unsigned dtype, void* to, void* from, std::size_t count, std::uint64_t size) const;
};

}  // namespace meshdist
