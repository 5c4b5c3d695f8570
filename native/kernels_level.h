// The loops for one vector width. Each of the including files defines MESHDIST_LEVEL and is compiled for its
// width. Do not use inline functions of the standard library here: the linker would keep a single copy, which
// this processor may be unable to run.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace meshdist {
namespace MESHDIST_LEVEL {
namespace {

// Elements reduced at a time where they pass through wider numbers: a few KiB, in the L1 cache.
constexpr size_t kBlock = 512;

template <class To>
inline To load(const void* from) {
  To found;
  memcpy(&found, from, sizeof found);
  return found;
}

inline float as_float(uint32_t bits) { return load<float>(&bits); }
inline uint32_t as_bits(float value) { return load<uint32_t>(&value); }

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
template <class T>
struct Complex {
  T re, im;
};

// ---- vectors of this level: of floats, and of words of as many bits

#if defined(__AVX2__)
#if defined(__AVX512F__)
constexpr size_t kLanes = 16;
#else
constexpr size_t kLanes = 8;
#endif
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Bits = uint32_t __attribute__((vector_size(kLanes * sizeof(float))));

inline Floats load_float16(const void* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
#else
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#endif
}

inline void store_float16(void* to, Floats from) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtps_ph(from, _MM_FROUND_TO_NEAREST_INT));
#else
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_cvtps_ph(from, _MM_FROUND_TO_NEAREST_INT));
#endif
}
#endif

// ---- 16-bit floats to float32 and back, round to nearest even

inline void widen(float* __restrict to, const BFloat16* __restrict from, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] = as_float(uint32_t{from[i].bits} << 16);
}

inline uint16_t narrow_bfloat16(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;  // rounding could carry a NaN into an infinity
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

inline void narrow(BFloat16* __restrict to, const float* __restrict from, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i].bits = narrow_bfloat16(from[i]);
}

#if defined(__aarch64__)

inline void widen(float* __restrict to, const Float16* __restrict from, size_t n) {
  const __fp16* halves = reinterpret_cast<const __fp16*>(from);
  for (size_t i = 0; i < n; ++i) to[i] = halves[i];
}

inline void narrow(Float16* __restrict to, const float* __restrict from, size_t n) {
  __fp16* halves = reinterpret_cast<__fp16*>(to);
  for (size_t i = 0; i < n; ++i) halves[i] = static_cast<__fp16>(from[i]);
}

#else

inline float widen_float16(uint32_t half) {
  const uint32_t sign = (half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 0x1f;
  const uint32_t fraction = half & 0x3ff;
  if (exponent == 0) {  // zero and subnormals: the fraction counts units of 2^-24
    const float size = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return as_float(sign | as_bits(size));
  }
  if (exponent == 31) {
    const uint32_t quiet = fraction != 0 ? 0x400000 : 0;
    return as_float(sign | 0x7f800000 | quiet | fraction << 13);
  }
  return as_float(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t narrow_float16(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (size >> 13 & 0x1ff));
  if (size >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);  // 65536 and above
  if (size < 0x38800000) {
    // Below the least normal half: adding 0.5 leaves units of 2^-24 in the low bits, rounded.
    const uint32_t units = as_bits(as_float(size) + 0.5f) - as_bits(0.5f);
    return static_cast<uint16_t>(sign | units);
  }
  const uint32_t rounded = size + 0xfff + ((size >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

inline void widen(float* to, const Float16* from, size_t n) {
  size_t i = 0;
#if defined(__AVX2__)
  for (; i + kLanes <= n; i += kLanes) {
    const Floats wide = load_float16(from + i);
    memcpy(to + i, &wide, sizeof wide);
  }
#endif
  for (; i < n; ++i) to[i] = widen_float16(from[i].bits);
}

inline void narrow(Float16* to, const float* from, size_t n) {
  size_t i = 0;
#if defined(__AVX2__)
  for (; i + kLanes <= n; i += kLanes) store_float16(to + i, load<Floats>(from + i));
#endif
  for (; i < n; ++i) to[i].bits = narrow_float16(from[i]);
}

#endif

// ---- two numbers into a single number. Unsigned types replace signed types if the bits are equal.

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};
struct WrappedSum {  // of signed numbers, as of their unsigned twins
  template <class T>
  static T apply(T a, T b) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  }
};
struct Product {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a * b);
  }
  static uint16_t apply(uint16_t a, uint16_t b) {  // would be a product of signed ints
    return static_cast<uint16_t>(uint32_t{a} * uint32_t{b});
  }
};
template <bool kIsMax>
struct Extreme {  // a NaN on either side wins, as in torch
  template <class T>
  static T apply(T a, T b) {
    return (kIsMax ? a > b : a < b) || a != a ? a : b;
  }
#if defined(__AVX2__)
  static Floats apply(Floats a, Floats b) { return ((kIsMax ? a > b : a < b) | (a != a)) ? a : b; }
#endif
};
using Min = Extreme<false>;
using Max = Extreme<true>;
struct And {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// ---- loops

#if defined(__GNUC__) && !defined(__clang__)
#define MESHDIST_INDEPENDENT _Pragma("GCC ivdep")
#else
#define MESHDIST_INDEPENDENT
#endif

// The type of a mean's divisor: there may be more members than narrow integers can count.
template <class T>
using Divisor = std::conditional_t<std::is_integral_v<T> && sizeof(T) < sizeof(int32_t), int32_t, T>;

// Reduce two to four arrays, first to last, in a single pass. `to` may be a source.
template <class T, class Combine, bool kDivide>
void fold(T* to, const T* const* from, size_t num, size_t n, Divisor<T> divisor) {
  const auto end = [divisor](T whole) { return kDivide ? static_cast<T>(whole / divisor) : whole; };
  const T *a = from[0], *b = from[1];
  if (num == 2) {
    MESHDIST_INDEPENDENT
    for (size_t i = 0; i < n; ++i) to[i] = end(Combine::apply(a[i], b[i]));
    return;
  }
  const T* c = from[2];
  if (num == 3) {
    MESHDIST_INDEPENDENT
    for (size_t i = 0; i < n; ++i) to[i] = end(Combine::apply(Combine::apply(a[i], b[i]), c[i]));
    return;
  }
  const T* d = from[3];
  MESHDIST_INDEPENDENT
  for (size_t i = 0; i < n; ++i) {
    to[i] = end(Combine::apply(Combine::apply(Combine::apply(a[i], b[i]), c[i]), d[i]));
  }
}

// Elements that are reduced as they are.
template <class T, class Combine, bool kAverage>
void reduce_plain(void* target, const void* const* sources, size_t num_sources, size_t count) {
  T* to = static_cast<T*>(target);
  const auto divisor = static_cast<Divisor<T>>(num_sources);
  const T* from[4];
  if (num_sources >= 2 && num_sources <= 4) {
    for (size_t j = 0; j < num_sources; ++j) from[j] = static_cast<const T*>(sources[j]);
    return fold<T, Combine, kAverage>(to, from, num_sources, count, divisor);
  }
  // `to` may be a source that is not read yet, so the total needs separate memory.
  T total[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = count - at < kBlock ? count - at : kBlock;
    memcpy(total, static_cast<const T*>(sources[0]) + at, n * sizeof(T));
    for (size_t j = 1; j < num_sources;) {
      size_t num = 1;
      from[0] = total;
      while (num < 4 && j < num_sources) from[num++] = static_cast<const T*>(sources[j++]) + at;
      fold<T, Combine, false>(total, from, num, n, divisor);
    }
    if (kAverage) {
      for (size_t i = 0; i < n; ++i) total[i] = static_cast<T>(total[i] / divisor);
    }
    memcpy(to + at, total, n * sizeof(T));
  }
}

// Averages and sums of complex numbers are computed by parts.
template <class T, class Combine, bool kAverage>
void reduce_pairs(void* target, const void* const* sources, size_t num_sources, size_t count) {
  reduce_plain<T, Combine, kAverage>(target, sources, num_sources, 2 * count);
}

template <class T>
void multiply_complex(void* target, const void* const* sources, size_t num_sources, size_t count) {
  Complex<T>* to = static_cast<Complex<T>*>(target);
  for (size_t i = 0; i < count; ++i) {
    Complex<T> total = static_cast<const Complex<T>*>(sources[0])[i];
    for (size_t j = 1; j < num_sources; ++j) {
      const Complex<T> next = static_cast<const Complex<T>*>(sources[j])[i];
      total = {total.re * next.re - total.im * next.im, total.re * next.im + total.im * next.re};
    }
    to[i] = total;
  }
}

// Two sources of 16-bit floats need no intermediate buffer: this is 3 times faster than by blocks. Each
// function returns the number of elements that it has reduced, from the first on.

// A 32-bit word holds two bfloat16, and the upper bfloat16 is a float32 except for the low bits. NaN needs no
// special case: the numbers have zeros in their low halves, so NaNs made of them do too, and rounding them
// adds nothing that could carry.
template <class Word>
inline Word rounded(Word bits) {
  return bits + 0x7fff + ((bits >> 16) & 1);
}

// From the `done`th word on, as many at a time as `Words` has.
template <class Floats, class Words, class Combine, bool kAverage>
size_t reduce_words(BFloat16* to, const BFloat16* a, const BFloat16* b, size_t done, size_t num_words) {
  constexpr size_t kStep = sizeof(Words) / sizeof(uint32_t);
  for (; done + kStep <= num_words; done += kStep) {
    const Words x = load<Words>(a + 2 * done), y = load<Words>(b + 2 * done);
    const Words upper_x = x & 0xffff0000, upper_y = y & 0xffff0000, lower_x = x << 16, lower_y = y << 16;
    Floats upper = Combine::apply(load<Floats>(&upper_x), load<Floats>(&upper_y));
    Floats lower = Combine::apply(load<Floats>(&lower_x), load<Floats>(&lower_y));
    if (kAverage) upper *= 0.5f, lower *= 0.5f;
    const Words word = (rounded(load<Words>(&upper)) & 0xffff0000) | rounded(load<Words>(&lower)) >> 16;
    memcpy(to + 2 * done, &word, sizeof word);
  }
  return done;
}

template <class Combine, bool kAverage>
size_t reduce_two(BFloat16* to, const BFloat16* a, const BFloat16* b, size_t count) {
  size_t done = 0;
#if defined(__AVX2__)
  done = reduce_words<Floats, Bits, Combine, kAverage>(to, a, b, done, count / 2);
#endif
  return 2 * reduce_words<float, uint32_t, Combine, kAverage>(to, a, b, done, count / 2);
}

template <class Combine, bool kAverage>
size_t reduce_two(Float16* to, const Float16* a, const Float16* b, size_t count) {
  size_t i = 0;
#if defined(__AVX2__)
  for (; i + kLanes <= count; i += kLanes) {
    Floats whole = Combine::apply(load_float16(a + i), load_float16(b + i));
    if (kAverage) whole *= 0.5f;
    store_float16(to + i, whole);
  }
#else
  (void)to, (void)a, (void)b, (void)count;
#endif
  return i;
}

// 16-bit floats: in float32, rounded once.
template <class T, class Combine, bool kAverage>
void reduce_widened(void* target, const void* const* sources, size_t num_sources, size_t count) {
  T* to = static_cast<T*>(target);
  alignas(64) float total[kBlock];
  alignas(64) float next[kBlock];
  const float divisor = static_cast<float>(num_sources);
  size_t done = 0;
  if (num_sources == 2) {
    done = reduce_two<Combine, kAverage>(to, static_cast<const T*>(sources[0]),
                                         static_cast<const T*>(sources[1]), count);
  }
  for (size_t at = done; at < count; at += kBlock) {
    const size_t n = count - at < kBlock ? count - at : kBlock;
    widen(total, static_cast<const T*>(sources[0]) + at, n);
    for (size_t j = 1; j < num_sources; ++j) {
      widen(next, static_cast<const T*>(sources[j]) + at, n);
      for (size_t i = 0; i < n; ++i) total[i] = Combine::apply(total[i], next[i]);
    }
    if (kAverage) {
      for (size_t i = 0; i < n; ++i) total[i] /= divisor;
    }
    narrow(to + at, total, n);
  }
}

template <class T, class Combine, bool kAverage>
void reduce(void* target, const void* const* sources, size_t num_sources, size_t count) {
  if constexpr (std::is_class_v<T>) {
    reduce_widened<T, Combine, kAverage>(target, sources, num_sources, count);
  } else {
    reduce_plain<T, Combine, kAverage>(target, sources, num_sources, count);
  }
}

// bool: any byte but 0 is true, and results are 0 or 1.
template <class Combine>
void reduce_bool(void* target, const void* const* sources, size_t num_sources, size_t count) {
  uint8_t* to = static_cast<uint8_t*>(target);
  uint8_t total[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = count - at < kBlock ? count - at : kBlock;
    const uint8_t* first = static_cast<const uint8_t*>(sources[0]) + at;
    for (size_t i = 0; i < n; ++i) total[i] = first[i] != 0;
    for (size_t j = 1; j < num_sources; ++j) {
      const uint8_t* from = static_cast<const uint8_t*>(sources[j]) + at;
      for (size_t i = 0; i < n; ++i) {
        total[i] = Combine::apply(total[i], static_cast<uint8_t>(from[i] != 0));
      }
    }
    memcpy(to + at, total, n);
  }
}

// ---- copies past the cache

void stream(void* target, const void* source, size_t num_bytes) {
  char* to = static_cast<char*>(target);
  const char* from = static_cast<const char*>(source);
#if defined(__x86_64__)
#if defined(__AVX512F__)
  constexpr size_t kWidth = 64;
#elif defined(__AVX2__)
  constexpr size_t kWidth = 32;
#else
  constexpr size_t kWidth = 16;
#endif
  constexpr size_t kStep = 256;  // four whole cache lines, which leave without being read first
  size_t head = (kStep / 4 - reinterpret_cast<uintptr_t>(to) % 64) % 64;
  if (head > num_bytes) head = num_bytes;
  memcpy(to, from, head);
  to += head, from += head, num_bytes -= head;
  for (; num_bytes >= kStep; to += kStep, from += kStep, num_bytes -= kStep) {
    for (size_t i = 0; i < kStep; i += kWidth) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i),
                          _mm512_loadu_si512(reinterpret_cast<const void*>(from + i)));
#elif defined(__AVX2__)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
#else
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#endif
    }
  }
  memcpy(to, from, num_bytes);
  _mm_sfence();
#else
  memcpy(to, from, num_bytes);
#endif
}

// ---- the table: the row of each kind of dtypes in `codes.h`

using Row = ReduceLoop[kNumOps];

void put(Row& row, Op op, ReduceLoop loop) { row[static_cast<size_t>(op)] = loop; }

template <class T>
void put_float(Row& row) {
  put(row, Op::sum, reduce<T, Sum, false>);
  put(row, Op::avg, reduce<T, Sum, true>);
  put(row, Op::product, reduce<T, Product, false>);
  put(row, Op::min, reduce<T, Min, false>);
  put(row, Op::max, reduce<T, Max, false>);
}

// `T` orders, and `U`, its unsigned twin, wraps around without undefined behaviour.
template <class T>
void put_whole(Row& row) {
  using U = std::make_unsigned_t<T>;
  put(row, Op::sum, reduce_plain<U, Sum, false>);
  put(row, Op::avg, reduce_plain<T, WrappedSum, true>);
  put(row, Op::product, reduce_plain<U, Product, false>);
  put(row, Op::min, reduce_plain<T, Min, false>);
  put(row, Op::max, reduce_plain<T, Max, false>);
  put(row, Op::band, reduce_plain<U, And, false>);
  put(row, Op::bor, reduce_plain<U, Or, false>);
  put(row, Op::bxor, reduce_plain<U, Xor, false>);
}

template <class T>
void put_complex(Row& row) {
  put(row, Op::sum, reduce_pairs<T, Sum, false>);
  put(row, Op::avg, reduce_pairs<T, Sum, true>);
  put(row, Op::product, multiply_complex<T>);
}

// Over bool a sum is "any", a product "all".
void put_bool(Row& row) {
  const Op any[] = {Op::sum, Op::max, Op::bor};
  const Op all[] = {Op::product, Op::min, Op::band};
  for (Op op : any) put(row, op, reduce_bool<Or>);
  for (Op op : all) put(row, op, reduce_bool<And>);
  put(row, Op::bxor, reduce_bool<Xor>);
}

void put_nothing(Row&) {}
void put_nothing(Kernels&, Dtype) {}

// ---- order

// Convert between floats and integers of the same order. Float bits after the sign count up; for negative
// numbers the integers count down below zero.
template <class T, bool kHasNan>
void flip(T* x, size_t n, bool nan_is_greatest) {
  using Bits = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
  constexpr Bits kGreatest = static_cast<Bits>(sizeof(T) == 8 ? INT64_MAX : INT32_MAX);
  const Bits end = nan_is_greatest ? kGreatest : -kGreatest - 1;
  for (size_t i = 0; i < n; ++i) {
    Bits bits;
    memcpy(&bits, x + i, sizeof bits);
    const bool is_nan = kHasNan && x[i] != x[i];
    bits = is_nan ? end : bits ^ (bits < 0 ? kGreatest : 0);
    memcpy(x + i, &bits, sizeof bits);
  }
}

template <class T, class Wide>
void to_order(void* bits, const void* floats, size_t count, bool nan_is_greatest) {
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t n = count - start < kBlock ? count - start : kBlock;
    Wide* const x = static_cast<Wide*>(bits) + start;
    const T* const y = static_cast<const T*>(floats) + start;
    if constexpr (std::is_same_v<T, Wide>) {
      memcpy(x, y, n * sizeof(T));
    } else {
      widen(x, y, n);
    }
    flip<Wide, true>(x, n, nan_is_greatest);
  }
}

template <class T, class Wide>
void from_order(void* floats, void* bits, size_t count) {
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t n = count - start < kBlock ? count - start : kBlock;
    T* const x = static_cast<T*>(floats) + start;
    Wide* const y = static_cast<Wide*>(bits) + start;
    flip<Wide, false>(y, n, false);
    if constexpr (std::is_same_v<T, Wide>) {
      memcpy(x, y, n * sizeof(T));
    } else {
      narrow(x, y, n);
    }
  }
}

template <class T, class Wide = T>
void put_order(Kernels& k, Dtype dtype) {
  k.to_order[static_cast<size_t>(dtype)] = to_order<T, Wide>;
  k.from_order[static_cast<size_t>(dtype)] = from_order<T, Wide>;
}

}  // namespace

Kernels make_kernels() {
  Kernels k;
  memset(&k, 0, sizeof k);
  k.stream = stream;
#define MESHDIST_PUT(name, bytes, put_loops, ...)           \
  put_loops(k.reduce[static_cast<size_t>(Dtype::k##name)]); \
  __VA_ARGS__(k, Dtype::k##name);
  MESHDIST_DTYPES(MESHDIST_PUT)
#undef MESHDIST_PUT
  return k;
}

}  // namespace MESHDIST_LEVEL
}  // namespace meshdist
