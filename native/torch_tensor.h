// Read torch's facts about a tensor directly from its C++ object.
//
// To query in Python whether a tensor needs a gradient or is negated, and to record a write to it, takes
// longer than the rest of a small call's checks. Two facts are words of the C++ object: the set of dispatch
// keys, which is a known number for every dense CPU tensor without lazy negation, and a pointer that is null
// as long as autograd does not know the tensor. Their offsets are found by comparing tensors with known
// answers, and verified on others. In a torch with another layout no offset is found, and Python is called.
//
//   tensor in Python      at::TensorImpl
//   at::Tensor ---------> autograd_meta_   null: no gradient
//                         key_set_         equal to a plain tensor's
#pragma once

#include "objects.h"

namespace meshdist {

class TorchTensor {
 public:
  // Of the torch that is loaded.
  static const TorchTensor& here() { return found(); }

  // Look for it, unless it is known: a mode of the program's may hide it for a while. MESHDIST_TORCH_LAYOUT=0
  // lets nothing be found.
  static void look();

  bool is_known() const { return is_known_; }

  // Whether a torch.Tensor is dense, on the CPU, as it is written, and needs no gradient; false also
  // where Python is to be asked.
  bool is_plain(nb::handle x) const {
    const Address impl = word(reinterpret_cast<Address>(x.ptr()), tensor_at_);
    if (word(impl, keys_at_) != plain_keys_) return false;
    return word(impl, autograd_at_) == 0 || !requires_grad_(reinterpret_cast<const void*>(impl));
  }

  // Notify autograd that a torch.Tensor was written.
  void note_write(nb::handle x) const {
    bump_version_(reinterpret_cast<const void*>(reinterpret_cast<Address>(x.ptr()) + tensor_at_));
  }

 private:
  static Address word(Address at, std::size_t offset) {
    return *reinterpret_cast<const Address*>(at + offset);
  }
  static TorchTensor& found();
  void find(nb::handle torch);
  bool is_right(nb::handle torch) const;

  bool is_known_ = false;
  std::size_t tensor_at_ = 0, keys_at_ = 0, autograd_at_ = 0;
  Address plain_keys_ = 0;
  void (*bump_version_)(const void* tensor) = nullptr;
  bool (*requires_grad_)(const void* impl) = nullptr;
};

}  // namespace meshdist
