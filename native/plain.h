// A tensor whose own memory travels, and how two of them fit together.
#pragma once

#include "objects.h"

namespace meshdist {

struct Plain {
  nb::object shape, dtype;
  std::uintptr_t address = 0;
  std::uint64_t count = 0;
  unsigned code = 0;  // what `codes` has for its dtype

  bool is_like(const Plain& other) const { return dtype.is(other.dtype); }
  nb::object data() const { return tuple_of(shape, dtype); }
  std::int64_t num_dims() const { return PyTuple_Size(shape.ptr()); }
  std::uint64_t dim(std::int64_t place) const {
    return number(PyTuple_GetItem(shape.ptr(), static_cast<Py_ssize_t>(place)));
  }
};

// Whether memory of so many bytes from one address on reaches into that of another one.
bool overlap(std::uintptr_t one, std::uint64_t bytes, std::uintptr_t other, std::uint64_t others);

// Whether `whole` is one `block` for each of `size` members: flat, joined along dim 0, or stacked.
bool is_of_blocks(const Plain& whole, const Plain& block, std::uint64_t size);

// Whether both can be cut into `size` equal parts along dim 0, which are of the same size.
bool are_in_equal_parts(const Plain& one, const Plain& other, std::uint64_t size);

}  // namespace meshdist
