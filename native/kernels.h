// The loops over elements: reductions, and copies that bypass the cache.
//
// kernels_level.h is compiled once per vector width; the widest that this processor has is chosen
// once. All ranks of a host choose alike, and no loop fuses a product with a sum, so results do
// not depend on the choice either.
#pragma once

#include <cstddef>

#include "codes.h"

namespace meshdist {

// Reduce `num_sources` arrays of `count` elements, first to last, into `target`, which may be one of them.
using ReduceLoop = void (*)(void* target, const void* const* sources, std::size_t num_sources,
                            std::size_t count);

// Write floats as integers in the same order, 16-bit floats in 32 bits; and back, where `bits` are
// overwritten.
using ToOrderLoop = void (*)(void* bits, const void* floats, std::size_t count, bool nan_is_greatest);
using FromOrderLoop = void (*)(void* floats, void* bits, std::size_t count);

// Copy with stores that go past the cache; ends with the fence that orders them before a flag.
using StreamLoop = void (*)(void* target, const void* source, std::size_t num_bytes);

struct Kernels {
  ReduceLoop reduce[kNumDtypes][kNumOps];  // null where the operation cannot reduce the dtype
  ToOrderLoop to_order[kNumDtypes];        // null of all but the floats that `reduce` has
  FromOrderLoop from_order[kNumDtypes];
  StreamLoop stream;
};

// The kernels for this processor.
const Kernels& kernels();

// Copy, with stores that go past the cache where that is wanted and worth their fence.
void copy_bytes(void* to, const void* from, std::size_t bytes, bool past_cache);

// Copy floats times `factor`, with stores that go past the cache.
void stream_scaled(float* to, const float* from, std::size_t count, float factor);

}  // namespace meshdist
