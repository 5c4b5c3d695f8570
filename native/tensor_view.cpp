#include "tensor_view.h"

namespace nb = nanobind;

namespace meshdist {
namespace {

constexpr char kAttribute[] = "__dlpack_c_exchange_api__";
constexpr char kCapsule[] = "dlpack_exchange_api";
constexpr std::uint32_t kMajorVersion = 1;
constexpr std::int32_t kCpu = 1;

// DLPackExchangeAPI, whose order of members DLPack promises to keep.
struct Table {
  std::uint32_t major, minor;
  void* previous;
  void* allocate;
  void* to_managed;
  void* from_managed;
  void* to_tensor;
  void* current_stream;
};

}  // namespace

// DLTensor.
struct TensorViews::Tensor {
  void* data;
  std::int32_t device_type, device_index;
  std::int32_t num_dims;
  std::uint32_t dtype;  // a code, bits and lanes
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

TensorViews::TensorViews(nb::handle type) {
  if (!nb::hasattr(type, kAttribute)) return;
  const nb::object capsule = type.attr(kAttribute);
  const auto* table = static_cast<const Table*>(PyCapsule_GetPointer(capsule.ptr(), kCapsule));
  if (table == nullptr) throw nb::python_error();
  if (table->major == kMajorVersion) fill_ = reinterpret_cast<Fill>(table->to_tensor);
}

bool TensorViews::look(nb::handle tensor, TensorView& view) const {
  Tensor found{};
  if (fill_ == nullptr) return false;
  if (fill_(tensor.ptr(), &found) != 0) {  // sparse and nested tensors have no such memory
    PyErr_Clear();
    return false;
  }
  view.data = static_cast<std::uint8_t*>(found.data) + found.byte_offset;
  view.num_dims = found.num_dims;
  view.shape = found.shape;
  view.strides = found.strides;
  view.dtype = found.dtype;
  view.is_cpu = found.device_type == kCpu;
  return true;
}

bool TensorView::is_contiguous() const {
  if (count() == 0) return true;
  std::int64_t expected = 1;
  for (std::int32_t i = num_dims; i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

std::uint64_t TensorView::count() const {
  std::uint64_t count = 1;
  for (std::int32_t i = 0; i < num_dims; ++i) count *= static_cast<std::uint64_t>(shape[i]);
  return count;
}

}  // namespace meshdist
