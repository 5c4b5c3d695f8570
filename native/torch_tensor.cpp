#include "torch_tensor.h"

#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <optional>

namespace meshdist {
namespace {

// Both objects are at least as large in each torch that has DLPack's exchange.
constexpr std::size_t kWordsOfTensor = 6, kWordsOfImpl = 24;

template <std::size_t kCount>
std::array<Address, kCount> words_at(Address place) {
  std::array<Address, kCount> words;
  std::memcpy(words.data(), reinterpret_cast<const void*>(place), sizeof words);
  return words;
}

// Behind how many bytes `wanted` stands; none where it stands nowhere, or at several places.
template <std::size_t kCount>
std::optional<std::size_t> offset_of(const std::array<Address, kCount>& words, Address wanted) {
  std::optional<std::size_t> found;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (words[i] != wanted) continue;
    if (found) return std::nullopt;
    found = i * sizeof wanted;
  }
  return found;
}

// The first of these that a library has, which torch has loaded.
void* find_symbol(const char* library, std::initializer_list<const char*> mangled) {
  void* const loaded = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
  if (loaded == nullptr) return nullptr;
  void* found = nullptr;
  for (const char* name : mangled) {
    if (found == nullptr) found = dlsym(loaded, name);
  }
  dlclose(loaded);
  return found;
}

// A context of Python's, entered as long as this lives.
class Entered {
 public:
  explicit Entered(nb::object context) : context_(std::move(context)) { context_.attr("__enter__")(); }
  ~Entered() { context_.attr("__exit__")(nb::none(), nb::none(), nb::none()); }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  const nb::object context_;
};

}  // namespace

TorchTensor& TorchTensor::found() {
  static TorchTensor found;
  return found;
}

void TorchTensor::look() {
  const char* const choice = std::getenv("MESHDIST_TORCH_LAYOUT");
  if (found().is_known_ || (choice != nullptr && std::strcmp(choice, "0") == 0)) return;
  const nb::error_scope scope;
  try {
    const nb::object torch = nb::module_::import_("torch");
    const Entered usual(torch.attr("inference_mode")(false)), with_gradients(torch.attr("enable_grad")());
    found().find(torch);
  } catch (nb::python_error&) {  // this torch lacks a name
  }
}

void TorchTensor::find(nb::handle torch) {
  const nb::object x = torch.attr("ones")(3, nb::arg("device") = "cpu");
  const auto impl = nb::cast<Address>(x.attr("_cdata"));
  const auto tensor_at = offset_of(words_at<kWordsOfTensor>(reinterpret_cast<Address>(x.ptr())), impl);
  plain_keys_ = nb::cast<Address>(torch.attr("_C").attr("_dispatch_keys")(x).attr("raw_repr")());
  const auto before = words_at<kWordsOfImpl>(impl);
  const auto keys_at = offset_of(before, plain_keys_);
  x.attr("requires_grad_")();
  const auto after = words_at<kWordsOfImpl>(impl);
  std::optional<std::size_t> autograd_at;
  for (std::size_t i = 0; i < kWordsOfImpl; ++i) {
    if (before[i] == after[i]) continue;
    if (autograd_at || before[i] != 0) return;
    autograd_at = i * sizeof impl;
  }
  // torch::autograd::impl::bump_version(const at::Tensor&), and of at::TensorBase; TensorImpl::requires_grad
  bump_version_ = reinterpret_cast<void (*)(const void*)>(
      find_symbol("libtorch_cpu.so", {"_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
                                      "_ZN5torch8autograd4impl12bump_versionERKN2at10TensorBaseE"}));
  requires_grad_ = reinterpret_cast<bool (*)(const void*)>(
      find_symbol("libc10.so", {"_ZNK3c1010TensorImpl13requires_gradEv"}));
  if (!tensor_at || !keys_at || !autograd_at || bump_version_ == nullptr || requires_grad_ == nullptr) {
    return;
  }
  tensor_at_ = *tensor_at;
  keys_at_ = *keys_at;
  autograd_at_ = *autograd_at;
  is_known_ = is_right(torch);
}

bool TorchTensor::is_right(nb::handle torch) const {
  const auto make = [&](const char* device, const char* dtype) {
    return nb::object(
        torch.attr("ones")(4, nb::arg("device") = device, nb::arg("dtype") = torch.attr(dtype)));
  };
  const nb::object plain = make("cpu", "float32"), view = plain.attr("view")(2, 2);
  const nb::object leaf = make("cpu", "float32").attr("requires_grad_")();
  for (const nb::object& other :
       {torch.attr("_neg_view")(make("cpu", "float64")), leaf, leaf.attr("mul")(2),
        make("cpu", "complex64").attr("conj")(), plain.attr("to_sparse")(), make("meta", "float32")}) {
    if (is_plain(other)) return false;
  }
  const auto version = [](nb::handle x) { return nb::cast<long>(x.attr("_version")); };
  const long of_plain = version(plain), of_view = version(view);
  if (!is_plain(plain) || !is_plain(view) || !is_plain(leaf.attr("detach")())) return false;
  note_write(plain);
  return version(plain) == of_plain + 1 && version(view) == of_view + 1;
}

}  // namespace meshdist
