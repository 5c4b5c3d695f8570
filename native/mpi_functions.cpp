#include "mpi_functions.h"

#include <array>
#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace meshdist {
namespace {

template <class Handle>
class Functions final : public MpiFunctions {
 public:
  explicit Functions(nb::handle facts)
      : MpiFunctions(reinterpret_cast<const void*>(number(facts["in_place"]))),
        blocking_(table(facts["blocking"])),
        starting_(table(facts["starting"])),
        send_(function<Start>(facts, "isend")),
        recv_(function<Start>(facts, "irecv")),
        test_(function<Test>(facts, "test")),
        count_(function<Count>(facts, "get_count")),
        size_(number(facts["size"])),
        comm_(handle_of(number(facts["comm"]))),
        byte_(handle_of(number(facts["byte"]))) {}

  int run(const Collective& call) const override { return go(blocking_, call); }
  int start(const Collective& call, Flight& flight) const override {
    return go(starting_, call, static_cast<void*>(flight.request));
  }
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
  using Table = std::array<std::uint64_t, kNumVerbs>;  // where the functions are, by verb

  // `request` is what a function that only starts a collective takes besides.
  template <class... Request>
  int go(const Table& functions, const Collective& c, Request... request) const {
    const std::uint64_t where = functions[static_cast<std::size_t>(c.verb)];
    const auto call = [&](auto... given) {
      return reinterpret_cast<int (*)(decltype(given)..., Request...)>(where)(given..., request...);
    };
    const Handle type = handle_of(c.type), op = handle_of(c.op);
    switch (c.verb) {
      case Verb::all_reduce:
        return call(c.in, c.out, c.out_count, type, op, comm_);
      case Verb::reduce:
        return call(c.in, c.out, c.in_count, type, op, c.root, comm_);
      case Verb::broadcast:
        return call(c.out, c.out_count, byte_, c.root, comm_);
      case Verb::all_gather:
      case Verb::all_to_all_even:
        return call(c.in, c.in_count, byte_, c.out, c.out_count, byte_, comm_);
      case Verb::reduce_scatter:
        return call(c.in, c.out, c.out_count, type, op, comm_);
      case Verb::gather:
      case Verb::scatter:
        return call(c.in, c.in_count, byte_, c.out, c.out_count, byte_, c.root, comm_);
      case Verb::all_gather_list:
        return call(c.in, c.in_count, byte_, c.out, c.cuts, c.cuts + size_, byte_, comm_);
      case Verb::all_to_all:
        return call(c.in, c.cuts, c.cuts + 2 * size_, byte_, c.out, c.cuts, c.cuts + size_, byte_,
                    comm_);
      case Verb::barrier:
        return call(comm_);
    }
    throw std::logic_error("no such verb");
  }

  static Table table(nb::handle addresses) {
    Table found{};
    for (std::size_t i = 0; i < kNumVerbs; ++i) found[i] = number(addresses[kNames[i]]);
    return found;
  }

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

  const Table blocking_, starting_;
  const Start send_, recv_;
  const Test test_;
  const Count count_;
  const std::uint64_t size_;
  const Handle comm_, byte_;
};

}  // namespace

std::unique_ptr<MpiFunctions> MpiFunctions::of(nb::handle facts) {
  if (number(facts["status_bytes"]) > sizeof(Flight::status)) {
    throw std::invalid_argument("MPI's status is larger than was thought");
  }
  if (number(facts["handle_bytes"]) == sizeof(int)) return std::make_unique<Functions<int>>(facts);
  return std::make_unique<Functions<void*>>(facts);
}

}  // namespace meshdist
