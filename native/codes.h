// The numbers by which Python and the core name verbs, dtypes, operations and outcomes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace meshdist {

enum class Verb : std::uint8_t {
  none,
  all_reduce,
  all_reduce_list,
  reduce,
  broadcast,
  all_gather,
  all_gather_v,
  gather,
  gather_v,
  scatter,
  scatter_v,
  reduce_scatter,
  reduce_scatter_v,
  all_to_all,
  all_to_all_v,
  barrier,
  count_
};

inline const char* verb_name(std::uint8_t verb) {
  static const char* const names[] = {
      "none",    "all_reduce", "all_reduce_list", "reduce",         "broadcast",
      "all_gather", "all_gather_v", "gather",     "gather_v",       "scatter",
      "scatter_v", "reduce_scatter", "reduce_scatter_v", "all_to_all", "all_to_all_v",
      "barrier"};
  return verb < static_cast<std::uint8_t>(Verb::count_) ? names[verb] : "unknown";
}

enum class Dtype : std::uint8_t {
  float64,
  float32,
  float16,
  bfloat16,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
  boolean,
  complex64,
  complex128,
  // Moved, never reduced:
  complex32,
  float8_e4m3fn,
  float8_e4m3fnuz,
  float8_e5m2,
  float8_e5m2fnuz,
  float8_e8m0fnu,
  count_
};

constexpr std::size_t kNumDtypes = static_cast<std::size_t>(Dtype::count_);

struct DtypeFacts {
  const char* name;
  std::size_t bytes;
};

inline DtypeFacts dtype_facts(Dtype dtype) {
  static const DtypeFacts facts[] = {
      {"float64", 8},       {"float32", 4},         {"float16", 2},     {"bfloat16", 2},
      {"int8", 1},          {"int16", 2},           {"int32", 4},       {"int64", 8},
      {"uint8", 1},         {"uint16", 2},          {"uint32", 4},      {"uint64", 8},
      {"bool", 1},          {"complex64", 8},       {"complex128", 16}, {"complex32", 4},
      {"float8_e4m3fn", 1}, {"float8_e4m3fnuz", 1}, {"float8_e5m2", 1}, {"float8_e5m2fnuz", 1},
      {"float8_e8m0fnu", 1}};
  return facts[static_cast<std::size_t>(dtype)];
}

enum class Op : std::uint8_t {
  sum,
  avg,
  product,
  min,
  max,
  band,
  bor,
  bxor,
  premul_sum,
  count_
};

constexpr std::size_t kNumOps = static_cast<std::size_t>(Op::count_);

inline const char* op_name(std::uint8_t op) {
  static const char* const names[] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                      "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  return op < kNumOps ? names[op] : "unknown";
}

enum class Status : int {
  ok,
  timeout,      // this rank's time ran out
  aborted,      // a member ended the communicator; its cause stands in the segment
  died,         // a member that was waited for has exited
  mismatch,     // the members called different things
  unsupported,  // this operation cannot reduce this dtype
  closed,       // this rank has closed the communicator
  cancelled,    // the peer of a transfer gave it up
  interrupted,  // the program was told to stop (Ctrl-C) while it waited here
  pending       // not over yet
};

}  // namespace meshdist
