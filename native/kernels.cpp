#include "kernels.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace meshdist {

namespace baseline {
Kernels make_kernels();
}
#if defined(MESHDIST_WIDE_X86)
namespace avx2 {
Kernels make_kernels();
}
namespace avx512 {
Kernels make_kernels();
}
#endif

namespace {

Kernels choose() {
#if defined(MESHDIST_WIDE_X86)
  // Tests compare the widths with each other by this variable; every rank must be given the same.
  const char* wish = std::getenv("MESHDIST_SHM_VECTORS");
  const auto may = [wish](const char* level) { return wish == nullptr || !std::strcmp(wish, level); };
  __builtin_cpu_init();
  if (may("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return avx512::make_kernels();
  }
  if (may("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    return avx2::make_kernels();
  }
#endif
  return baseline::make_kernels();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

void copy_bytes(void* to, const void* from, std::size_t bytes, bool past_cache) {
  if (past_cache && bytes >= 4096) {
    kernels().stream(to, from, bytes);
  } else if (bytes != 0) {
    std::memcpy(to, from, bytes);
  }
}

void stream_scaled(float* to, const float* from, std::size_t count, float factor) {
  float block[4096];  // stays in the cache
  for (std::size_t at = 0, n = 0; at < count; at += n) {
    n = std::min(std::size(block), count - at);
    for (std::size_t i = 0; i < n; ++i) block[i] = from[at + i] * factor;
    kernels().stream(to + at, block, n * sizeof(float));
  }
}

}  // namespace meshdist
