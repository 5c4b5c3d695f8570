// Where a torch tensor's memory lies, asked of DLPack's table of C functions.
//
// The same by the tensor's attributes takes ten times as long, since each is made into an object of
// Python's. The table is part of DLPack 1.3 (https://dmlc.github.io/dlpack/latest/python_spec.html);
// torch has it from 2.10 on.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace meshdist {

// Valid as long as the tensor is not changed.
struct TensorView {
  void* data = nullptr;
  std::int32_t num_dims = 0;
  const std::int64_t* shape = nullptr;
  const std::int64_t* strides = nullptr;
  std::uint32_t dtype = 0;  // as DLPack numbers them
  bool is_cpu = false;

  bool is_contiguous() const;
  std::uint64_t count() const;
};

class TensorViews {
 public:
  // Of the tensors of `type`, a class.
  explicit TensorViews(nanobind::handle type);

  // Whether `tensor`, of that very class, has memory that could be told.
  bool look(nanobind::handle tensor, TensorView& view) const;

 private:
  struct Tensor;
  using Fill = int (*)(void* object, Tensor* tensor);

  Fill fill_ = nullptr;
};

}  // namespace meshdist
