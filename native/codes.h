// The numbers by which Python and the core name dtypes, operations and outcomes, and the core's collectives.
// Each list stands once: enum, names and tables are made from it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace meshdist {

// The dtypes: name in Python, bytes, and the macro that adds their loops and orderings to the tables of
// kernels (see kernels_level.h).
#define MESHDIST_DTYPES(X)                                        \
  X(float64, 8, put_float<double>, put_order<double>)             \
  X(float32, 4, put_float<float>, put_order<float>)               \
  X(float16, 2, put_float<Float16>, put_order<Float16, float>)    \
  X(bfloat16, 2, put_float<BFloat16>, put_order<BFloat16, float>) \
  X(int8, 1, put_whole<int8_t>, put_nothing)                      \
  X(int16, 2, put_whole<int16_t>, put_nothing)                    \
  X(int32, 4, put_whole<int32_t>, put_nothing)                    \
  X(int64, 8, put_whole<int64_t>, put_nothing)                    \
  X(uint8, 1, put_whole<uint8_t>, put_nothing)                    \
  X(uint16, 2, put_whole<uint16_t>, put_nothing)                  \
  X(uint32, 4, put_whole<uint32_t>, put_nothing)                  \
  X(uint64, 8, put_whole<uint64_t>, put_nothing)                  \
  X(bool, 1, put_bool, put_nothing)                               \
  X(complex64, 8, put_complex<float>, put_nothing)                \
  X(complex128, 16, put_complex<double>, put_nothing)             \
  X(complex32, 4, put_nothing, put_nothing)                       \
  X(float8_e4m3fn, 1, put_nothing, put_nothing)                   \
  X(float8_e4m3fnuz, 1, put_nothing, put_nothing)                 \
  X(float8_e5m2, 1, put_nothing, put_nothing)                     \
  X(float8_e5m2fnuz, 1, put_nothing, put_nothing)                 \
  X(float8_e8m0fnu, 1, put_nothing, put_nothing)

// The core's collectives: name, its method of `Collectives`, whether it reduces, and the number of parts of
// its outputs and inputs: 0 for a single buffer, 1, the number of members, the same only on the root, or any.
enum class Parts { none, one, each, at_root, any };
#define MESHDIST_OPERATIONS(X)                              \
  X(all_reduce, all_reduce, true, none, none)          \
  X(all_reduce_list, all_reduce, true, any, none)      \
  X(reduce, all_reduce, true, none, none)              \
  X(broadcast, broadcast, false, none, none)           \
  X(all_gather, all_gather, false, none, none)         \
  X(all_gather_v, all_gather, false, each, one)        \
  X(gather, all_gather, false, at_root, none)          \
  X(scatter, scatter, false, none, at_root)            \
  X(reduce_scatter, reduce_scatter, true, none, none)  \
  X(reduce_scatter_v, reduce_scatter, true, one, each) \
  X(all_to_all, all_to_all, false, each, each)         \
  X(barrier, barrier, false, none, none)

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
#define MESHDIST_NAME(name, ...) name,
#define MESHDIST_BYTES(name, bytes, ...) bytes,
#define MESHDIST_OUTPUTS(name, method, reduces, outputs, inputs) Parts::outputs,
#define MESHDIST_INPUTS(name, method, reduces, outputs, inputs) Parts::inputs,
#define MESHDIST_TEXT(name, ...) #name,

enum class OperationSpec : std::uint8_t { MESHDIST_OPERATIONS(MESHDIST_NAME) };
enum class Dtype : std::uint8_t { MESHDIST_DTYPES(MESHDIST_K_NAME) };
enum class Op : std::uint8_t { MESHDIST_OPS(MESHDIST_NAME) };
enum class Status : int { MESHDIST_STATUSES(MESHDIST_NAME) };

constexpr std::size_t kDtypeBytes[] = {MESHDIST_DTYPES(MESHDIST_BYTES)};
constexpr Parts kOutputs[] = {MESHDIST_OPERATIONS(MESHDIST_OUTPUTS)};
constexpr Parts kInputs[] = {MESHDIST_OPERATIONS(MESHDIST_INPUTS)};
constexpr const char* kOperationNames[] = {MESHDIST_OPERATIONS(MESHDIST_TEXT)};
constexpr const char* kDtypeNames[] = {MESHDIST_DTYPES(MESHDIST_TEXT)};
constexpr const char* kOpNames[] = {MESHDIST_OPS(MESHDIST_TEXT)};
constexpr const char* kStatusNames[] = {MESHDIST_STATUSES(MESHDIST_TEXT)};

constexpr std::size_t kNumOperations = sizeof kOperationNames / sizeof *kOperationNames;
constexpr std::size_t kNumDtypes = sizeof kDtypeNames / sizeof *kDtypeNames;
constexpr std::size_t kNumOps = sizeof kOpNames / sizeof *kOpNames;

}  // namespace meshdist
