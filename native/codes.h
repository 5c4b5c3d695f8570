// The numbers by which Python and the core name dtypes, operations and outcomes, and the core's verbs.
// Each list stands once: enum, names and tables are made from it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace meshdist {

enum class Verb : std::uint8_t {
  all_reduce,
  all_reduce_list,
  reduce,
  broadcast,
  all_gather,
  all_gather_v,
  gather,
  scatter,
  reduce_scatter,
  reduce_scatter_v,
  all_to_all,
  barrier,
};

// The dtypes: name in Python, bytes, and what puts their loops into the table of kernels (see
// kernels_level.h).
#define MESHDIST_DTYPES(X)               \
  X(float64, 8, put_float<double>)       \
  X(float32, 4, put_float<float>)        \
  X(float16, 2, put_float<Float16>)      \
  X(bfloat16, 2, put_float<BFloat16>)    \
  X(int8, 1, put_whole<int8_t>)          \
  X(int16, 2, put_whole<int16_t>)        \
  X(int32, 4, put_whole<int32_t>)        \
  X(int64, 8, put_whole<int64_t>)        \
  X(uint8, 1, put_whole<uint8_t>)        \
  X(uint16, 2, put_whole<uint16_t>)      \
  X(uint32, 4, put_whole<uint32_t>)      \
  X(uint64, 8, put_whole<uint64_t>)      \
  X(bool, 1, put_bool)                   \
  X(complex64, 8, put_complex<float>)    \
  X(complex128, 16, put_complex<double>) \
  X(complex32, 4, put_nothing)           \
  X(float8_e4m3fn, 1, put_nothing)       \
  X(float8_e4m3fnuz, 1, put_nothing)     \
  X(float8_e5m2, 1, put_nothing)         \
  X(float8_e5m2fnuz, 1, put_nothing)     \
  X(float8_e8m0fnu, 1, put_nothing)

#define MESHDIST_OPS(X) X(sum) X(avg) X(product) X(min) X(max) X(band) X(bor) X(bxor)

// timeout: this rank's time ran out; aborted: a member ended the communicator, and its cause is in
// the segment; died: a member that was waited for has exited; mismatch: the members called different
// things; unsupported: this operation cannot reduce this dtype; closed: this rank has closed the
// communicator; cancelled: the peer of a transfer gave it up; interrupted: Ctrl-C
// reached the program while it waited here; pending: not over yet.
#define MESHDIST_STATUSES(X)                                                            \
  X(ok) X(timeout) X(aborted) X(died) X(mismatch) X(unsupported) X(closed) X(cancelled) \
  X(interrupted) X(pending)

#define MESHDIST_K_NAME(name, ...) k##name,
#define MESHDIST_NAME(name) name,
#define MESHDIST_BYTES(name, bytes, put_loops) bytes,
#define MESHDIST_TEXT(name, ...) #name,

enum class Dtype : std::uint8_t { MESHDIST_DTYPES(MESHDIST_K_NAME) };
enum class Op : std::uint8_t { MESHDIST_OPS(MESHDIST_NAME) };
enum class Status : int { MESHDIST_STATUSES(MESHDIST_NAME) };

constexpr std::size_t kDtypeBytes[] = {MESHDIST_DTYPES(MESHDIST_BYTES)};
constexpr const char* kDtypeNames[] = {MESHDIST_DTYPES(MESHDIST_TEXT)};
constexpr const char* kOpNames[] = {MESHDIST_OPS(MESHDIST_TEXT)};
constexpr const char* kStatusNames[] = {MESHDIST_STATUSES(MESHDIST_TEXT)};

constexpr std::size_t kNumDtypes = sizeof kDtypeNames / sizeof *kDtypeNames;
constexpr std::size_t kNumOps = sizeof kOpNames / sizeof *kOpNames;

}  // namespace meshdist
