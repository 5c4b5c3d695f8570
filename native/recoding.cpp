#include "recoding.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels.h"

namespace meshdist {
namespace {

constexpr std::size_t kBlock = 1024;  // elements that stay in the L1 cache from step to step

bool is_float(unsigned dtype) {
  const auto code = static_cast<Dtype>(dtype);
  return code == Dtype::kfloat64 || code == Dtype::kfloat32 || code == Dtype::kfloat16 ||
         code == Dtype::kbfloat16;
}

// Behind its sign the bits of a float count up; those of whole numbers, below zero, count down.
template <class Bits>
Bits flipped(Bits bits) {
  return bits ^ ((bits >> (8 * sizeof bits - 1)) & std::numeric_limits<Bits>::max());
}

template <class Bits>
void to_order(Bits* x, std::size_t count, bool nan_is_greatest) {
  using Limits = std::numeric_limits<Bits>;
  constexpr Bits kInfinity = static_cast<Bits>(sizeof(Bits) == 4 ? 0x7f800000 : 0x7ff0000000000000);
  const Bits end = nan_is_greatest ? Limits::max() : Limits::min();
  for (std::size_t i = 0; i < count; ++i) {
    const Bits bits = x[i];
    x[i] = (bits & Limits::max()) > kInfinity ? end : flipped(bits);
  }
}

template <class Bits>
void from_order(Bits* x, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) x[i] = flipped(x[i]);
}

// Whole numbers are rounded toward zero; there may be more members than narrow ones can count.
template <class T>
void divide(void* data, std::size_t count, std::uint64_t size) {
  using Divisor = std::conditional_t<std::is_integral_v<T> && sizeof(T) < 4, std::int32_t, T>;
  T* const x = static_cast<T*>(data);
  const auto divisor = static_cast<Divisor>(size);
  for (std::size_t i = 0; i < count; ++i) x[i] = static_cast<T>(x[i] / divisor);
}

void divide_whole(unsigned dtype, void* data, std::size_t count, std::uint64_t size) {
  switch (static_cast<Dtype>(dtype)) {
    case Dtype::kint8: return divide<std::int8_t>(data, count, size);
    case Dtype::kint16: return divide<std::int16_t>(data, count, size);
    case Dtype::kint32: return divide<std::int32_t>(data, count, size);
    case Dtype::kint64: return divide<std::int64_t>(data, count, size);
    case Dtype::kuint8: return divide<std::uint8_t>(data, count, size);
    case Dtype::kuint16: return divide<std::uint16_t>(data, count, size);
    case Dtype::kuint32: return divide<std::uint32_t>(data, count, size);
    case Dtype::kuint64: return divide<std::uint64_t>(data, count, size);
    default: return;
  }
}

// Both go on by blocks of `from_item` and `to_item` bytes an element.
template <class Step>
void by_blocks(char* to, std::size_t to_item, char* from, std::size_t from_item, std::size_t count,
               Step step) {
  for (std::size_t start = 0; start < count; start += kBlock) {
    step(to + start * to_item, from + start * from_item, std::min(kBlock, count - start));
  }
}

}  // namespace

void Recoding::encode(unsigned dtype, void* to, const void* from, std::size_t count) const {
  const std::size_t item = kDtypeBytes[dtype], wide = bytes_of(dtype);
  char* const source = static_cast<char*>(const_cast<void*>(from));  // which is only read
  by_blocks(static_cast<char*>(to), wide, source, item, count, [&](void* x, void* y, std::size_t n) {
    if (widens) {
      kernels().widen[dtype](x, y, n);
    } else {
      std::memcpy(x, y, n * item);
    }
    if (orders && wide == 4) to_order(static_cast<std::int32_t*>(x), n, nan_is_greatest);
    if (orders && wide == 8) to_order(static_cast<std::int64_t*>(x), n, nan_is_greatest);
  });
}

void Recoding::decode(unsigned dtype, void* to, void* from, std::size_t count,
                      std::uint64_t size) const {
  const std::size_t item = kDtypeBytes[dtype], wide = bytes_of(dtype);
  const bool divides_floats = divides && is_float(dtype), divides_whole = divides && !divides_floats;
  by_blocks(static_cast<char*>(to), item, static_cast<char*>(from), wide, count,
            [&](void* x, void* y, std::size_t n) {
              if (orders && wide == 4) from_order(static_cast<std::int32_t*>(y), n);
              if (orders && wide == 8) from_order(static_cast<std::int64_t*>(y), n);
              if (divides_floats && wide == 4) divide<float>(y, n, size);
              if (divides_floats && wide == 8) divide<double>(y, n, size);
              if (widens) {
                kernels().narrow[dtype](x, y, n);
              } else if (x != y) {
                std::memcpy(x, y, n * item);
              }
              if (divides_whole) divide_whole(dtype, x, n, size);  // wrapped in their own dtype
            });
}

}  // namespace meshdist
