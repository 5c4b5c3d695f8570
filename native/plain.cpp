#include "plain.h"

namespace meshdist {

bool overlap(std::uintptr_t one, std::uint64_t bytes, std::uintptr_t other, std::uint64_t others) {
  return one < other + others && other < one + bytes;
}

bool is_of_blocks(const Plain& whole, const Plain& block, std::uint64_t size) {
  if (whole.count != size * block.count) return false;
  const std::int64_t num_whole = whole.num_dims(), num_block = block.num_dims();
  if (num_whole == 1) return true;
  const std::int64_t more = num_whole - num_block;
  if (more != 0 && more != 1) return false;
  if (whole.dim(0) != (more == 1 ? size : size * block.dim(0))) return false;
  for (std::int64_t i = 1; i < num_whole; ++i) {
    if (whole.dim(i) != block.dim(i - more)) return false;
  }
  return true;
}

bool are_in_equal_parts(const Plain& one, const Plain& other, std::uint64_t size) {
  return one.num_dims() != 0 && one.count == other.count && other.num_dims() != 0 &&
         one.dim(0) == other.dim(0) && one.dim(0) % size == 0;
}

}  // namespace meshdist
