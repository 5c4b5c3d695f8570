#include "fast_path_checks.h"

#include <algorithm>

#include "codes.h"

namespace meshdist {
namespace {

constexpr std::size_t kMostKinds = 1024;

// As DLPack 1 lays them out.
struct DlTensor {
  void* data;
  std::int32_t device_type, device;
  std::int32_t num_dims;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};
struct DlExchange {
  std::uint32_t major, minor;
  void* older;
  void *allocate, *managed_from_object, *managed_to_object;
  int (*tensor_from_object)(void* object, void* tensor);
};

bool is_contiguous(const DlTensor& x) {
  std::int64_t step = 1;
  for (std::int32_t i = x.num_dims - 1; i >= 0; --i) {
    if (x.shape[i] == 0) return true;
    if (x.shape[i] != 1 && x.strides[i] != step) return false;
    step *= x.shape[i];
  }
  return true;
}

namespace names {
const Name requires_grad{"requires_grad"}, is_neg{"is_neg"}, shape{"shape"}, dtype{"dtype"};
}

}  // namespace

bool overlap(const Spans& some, const Spans& others) {
  for (std::size_t i = 0; i < some.starts.size(); ++i) {
    for (std::size_t j = 0; j < others.starts.size(); ++j) {
      if (some.starts[i] < others.end(j) && others.starts[j] < some.end(i)) return true;
    }
  }
  return false;
}

bool overlap_each_other(const Spans& some) {
  for (std::size_t i = 1; i < some.starts.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (some.starts[i] < some.end(j) && some.starts[j] < some.end(i)) return true;
    }
  }
  return false;
}

std::uint64_t row_of(const Plain& whole) {
  std::uint64_t row = 1;
  for (int i = 1; i < whole.num_dims; ++i) row *= static_cast<std::uint64_t>(whole.dims[i]);
  return row;
}

bool cut(nb::handle sizes, const Plain& whole, std::uint64_t size, Counts& counts) {
  if (whole.num_dims == 0) return false;
  const auto num_rows = static_cast<std::uint64_t>(whole.dims[0]);
  const std::uint64_t row = row_of(whole);
  const bool is_list = PyList_Check(sizes.ptr()), is_tuple = PyTuple_Check(sizes.ptr());
  if (!sizes.is_none() && !is_list && !is_tuple) return false;
  const Py_ssize_t length = sizes.is_none() ? 0 : PySequence_Size(sizes.ptr());
  if (length == 0) {
    counts.assign(size, num_rows / size * row);
    return num_rows % size == 0;
  }
  if (static_cast<std::uint64_t>(length) != size) return false;
  std::uint64_t left = num_rows;
  for (Py_ssize_t j = 0; j < length; ++j) {
    PyObject* const one = is_list ? PyList_GetItem(sizes.ptr(), j) : PyTuple_GetItem(sizes.ptr(), j);
    if (!PyLong_CheckExact(one)) return false;
    int overflow = 0;
    const long long rows = PyLong_AsLongLongAndOverflow(one, &overflow);
    if (overflow != 0 || rows < 0 || static_cast<std::uint64_t>(rows) > left) return false;
    left -= static_cast<std::uint64_t>(rows);
    counts.push_back(static_cast<std::uint64_t>(rows) * row);
  }
  return left == 0;
}

bool is_of_blocks(const Plain& whole, const Plain& block, std::uint64_t size) {
  if (whole.count != size * block.count || whole.num_dims == 0) return false;
  if (whole.num_dims == 1) return true;
  const int more = whole.num_dims - block.num_dims;
  if (more != 0 && more != 1) return false;
  const std::uint64_t rows = more == 1 ? size : size * block.dims[0];
  return static_cast<std::uint64_t>(whole.dims[0]) == rows &&
         std::equal(whole.dims + 1, whole.dims + whole.num_dims, block.dims + 1 - more);
}

bool are_in_equal_parts(const Plain& one, const Plain& other, std::uint64_t size) {
  if (one.num_dims == 0 || other.num_dims == 0 || one.count != other.count) return false;
  if (one.dims[0] != other.dims[0] || static_cast<std::uint64_t>(one.dims[0]) % size != 0) {
    return false;
  }
  return one.count != 0 || (one.num_dims == 1 && other.num_dims == 1);  // else rows may differ
}

PlainReader::PlainReader(std::int32_t device_type)
    : device_type_(device_type), tensor_type_(nb::module_::import_("torch").attr("Tensor")) {
  TorchTensor::look();
  const nb::object torch = nb::module_::import_("torch");
  for (std::size_t code = 0; code < kNumDtypes; ++code) {
    const nb::object dtype = nb::getattr(torch, kDtypeNames[code], nb::none());  // None in older torch
    const bool is_plain = !dtype.is_none() && !nb::cast<bool>(dtype.attr("is_complex"));
    if (is_plain) codes_[dtype] = code;  // complex tensors may hold conjugates
  }
  const nb::object capsule = nb::getattr(tensor_type_, "__dlpack_c_exchange_api__", nb::none());
  if (capsule.is_none()) return;
  const auto* const exchange =
      static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (exchange == nullptr) throw nb::python_error();
  if (exchange->major == 1) look_ = exchange->tensor_from_object;
}

bool PlainReader::find_code(nb::handle dtype, unsigned& code) const {
  PyObject* const found = find_in(codes_, dtype);
  if (found != nullptr) code = static_cast<unsigned>(PyLong_AsLong(found));
  return found != nullptr;
}

bool PlainReader::read(nb::handle x, Plain& plain) {
  if (look_ == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())) != tensor_type_.ptr()) {
    return false;
  }
  DlTensor tensor;
  if (look_(x.ptr(), &tensor) != 0) {  // sparse, nested, quantized, on a device that it lacks
    PyErr_Clear();
    return false;
  }
  if (tensor.device_type != device_type_ || !is_contiguous(tensor) || !is_as_written(x)) return false;
  plain.count = 1;
  for (std::int32_t i = 0; i < tensor.num_dims; ++i) plain.count *= tensor.shape[i];
  plain.address = reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
  if (plain.address == 0 && plain.count != 0) return false;  // its memory was taken away
  plain.item = tensor.bits * tensor.lanes / 8u;
  plain.dims = tensor.shape;
  plain.num_dims = tensor.num_dims;
  plain.device = tensor.device;
  Kind unkept;
  const Kind* kind = &unkept;
  if (tensor.num_dims <= kMostDims) {
    Key key{tensor.code | tensor.bits << 8 | std::int64_t{tensor.lanes} << 16 |
            std::int64_t{tensor.num_dims} << 32};
    for (std::int32_t i = 0; i < tensor.num_dims; ++i) key[i + 1] = tensor.shape[i];
    if (last_kind_ == nullptr || last_kind_->first != key) {
      auto found = kinds_.find(key);
      if (found == kinds_.end()) {
        if (kinds_.size() >= kMostKinds) kinds_.clear();
        found = kinds_.emplace(key, kind_of(x)).first;
      }
      last_kind_ = &*found;  // remains valid after `clear`
    }
    kind = &last_kind_->second;
  } else {
    unkept = kind_of(x);
  }
  plain.data = kind->data;
  plain.dtype = kind->dtype;
  plain.code = kind->code;
  plain.is_kept = kind != &unkept;
  return plain.dtype.is_valid();
}

// Whether autograd may ignore the write, and the elements are the values in memory (not negated).
bool PlainReader::is_as_written(nb::handle x) const {
  if (torch_.is_known() && torch_.is_plain(x)) return true;
  return !is_true(get(x, names::requires_grad)) && !is_true(call(x, names::is_neg));
}

PlainReader::Kind PlainReader::kind_of(nb::handle x) const {
  Kind kind;
  nb::object dtype = get(x, names::dtype);
  if (!find_code(dtype, kind.code)) return kind;
  kind.data = tuple_of(get(x, names::shape), dtype);
  kind.dtype = std::move(dtype);
  return kind;
}

}  // namespace meshdist
