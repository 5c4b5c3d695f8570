// The loops over elements: reductions, and copies that bypass the cache.
//
// kernels_level.h is compiled once per vector width; the widest that this processor has is chosen
// once. All ranks of a host choose alike, and no loop fuses a product with a sum, so results do
// not depend on the choice either.
#pragma once

#include <cstddef>

#include "codes.h"

namespace meshdist {

// Reduce `num_sources` arrays of `count` elements, first to last, into `target`, which may be one
// of them.
using ReduceLoop = void (*)(void* target, const void* const* sources, std::size_t num_sources,
                            std::size_t count);

// Convert elements to float32 or int32, or back: 16-bit floats rounded to the nearest, whole numbers
// wrapped.
using ConvertLoop = void (*)(void* target, const void* source, std::size_t count);

// Copy with stores that go past the cache; ends with the fence that orders them before a flag.
using StreamLoop = void (*)(void* target, const void* source, std::size_t num_bytes);

struct Kernels {
  ReduceLoop reduce[kNumDtypes][kNumOps];  // null where the operation cannot reduce the dtype
  ConvertLoop widen[kNumDtypes], narrow[kNumDtypes];  // null of other dtypes than such of 8 or 16 bits
  StreamLoop stream;
};

// The kernels for this processor.
const Kernels& kernels();

}  // namespace meshdist
