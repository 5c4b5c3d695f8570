#include "mpi_functions.h"

#include <cstring>
#include <type_traits>

namespace meshdist {
namespace {

template <class Handle>
class Functions final : public MpiFunctions {
 public:
  explicit Functions(nb::handle facts)
      : send_(function<Start>(facts, "isend")),
        recv_(function<Start>(facts, "irecv")),
        test_(function<Test>(facts, "test")),
        count_(function<Count>(facts, "get_count")),
        comm_(handle_of(number(facts["comm"]))),
        byte_(handle_of(number(facts["byte"]))) {}

  int start(bool is_send, void* memory, int bytes, int member, int tag,
            Flight& flight) const override {
    return (is_send ? send_ : recv_)(memory, bytes, byte_, member, tag, comm_, flight.request);
  }
  int ask(Flight& flight, bool& is_done) const override {
    int found = 0;
    const int error = test_(flight.request, &found, flight.status);
    is_done = found != 0;
    return error;
  }
  int count(const Flight& flight, int& bytes) const override {
    return count_(flight.status, byte_, &bytes);
  }
  std::uint64_t request_of(const Flight& flight) const override {
    std::uint64_t found = 0;
    std::memcpy(&found, flight.request, sizeof(Handle));
    return found;
  }

 private:
  using Start = int (*)(void*, int, Handle, int, int, Handle, void*);
  using Test = int (*)(void*, int*, void*);
  using Count = int (*)(const void*, Handle, int*);

  template <class Function>
  static Function function(nb::handle facts, const char* name) {
    return reinterpret_cast<Function>(number(facts[name]));
  }
  static Handle handle_of(std::uint64_t number) {
    if constexpr (std::is_pointer_v<Handle>) {
      return reinterpret_cast<Handle>(number);
    } else {
      return static_cast<Handle>(number);
    }
  }

  const Start send_, recv_;
  const Test test_;
  const Count count_;
  const Handle comm_, byte_;
};

}  // namespace

std::unique_ptr<MpiFunctions> MpiFunctions::of(nb::handle facts) {
  if (facts.is_none() || number(facts["status_bytes"]) > sizeof(Flight::status)) return nullptr;
  if (number(facts["handle_bytes"]) == sizeof(int)) return std::make_unique<Functions<int>>(facts);
  return std::make_unique<Functions<void*>>(facts);
}

}  // namespace meshdist
