#include "mpi_functions.h"

#include <cctype>
#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace meshdist {
namespace {

#define MESHDIST_MPI_COLLECTIVES(X)                                                       \
  X(Allreduce) X(Reduce) X(Bcast) X(Allgather) X(Allgatherv) X(Reduce_scatter_block)      \
  X(Gather) X(Scatter) X(Alltoallv) X(Alltoall) X(Barrier)
#define MESHDIST_MPI_MESSAGES(X) X(Isend) X(Irecv) X(Test) X(Get_count)
#define MESHDIST_INDEX(name) k##name,
#define MESHDIST_TEXT_OF(name) #name,

enum Function : std::size_t {
  MESHDIST_MPI_COLLECTIVES(MESHDIST_INDEX) kNumCollectives,
  // After the blocking collectives come those that only start them, in the same order.
  kFirstMessage = 2 * kNumCollectives - 1,
  MESHDIST_MPI_MESSAGES(MESHDIST_INDEX) kNumFunctions
};
constexpr const char* kCollectives[] = {MESHDIST_MPI_COLLECTIVES(MESHDIST_TEXT_OF)};
constexpr const char* kMessages[] = {MESHDIST_MPI_MESSAGES(MESHDIST_TEXT_OF)};

void* memory(Address address) { return reinterpret_cast<void*>(address); }
void* first(const Addresses& addresses) { return addresses.empty() ? nullptr : memory(addresses.front()); }

template <class Handle>
class Functions final : public MpiFunctions {
 public:
  Functions(Addresses addresses, std::uint64_t comm, std::uint64_t byte, std::uint64_t in_place)
      : addresses_(std::move(addresses)), comm_(handle_of(comm)), byte_(handle_of(byte)),
        in_place_(memory(in_place)) {}

  int run(const Collective& call, const int* cuts, bool is_root) const override {
    return go(0, call, cuts, is_root);
  }
  int start(const Collective& call, const int* cuts, bool is_root, Flight& flight) const override {
    return go(kNumCollectives, call, cuts, is_root, static_cast<void*>(flight.request));
  }
  int start(const Message& message, Flight& flight) const override {
    const Plain& plain = message.plain;
    return call<void*, int, Handle, int, int, Handle, void*>(
        message.is_send ? kIsend : kIrecv, memory(plain.address), static_cast<int>(plain.bytes()), byte_,
        message.member, static_cast<int>(message.number), comm_, flight.request);
  }
  int ask(Flight& flight, bool& is_done) const override {
    int found = 0;
    const int error = call<void*, int*, void*>(kTest, flight.request, &found, flight.status);
    is_done = found != 0;
    return error;
  }
  int count(const Flight& flight, int& bytes) const override {
    return call<const void*, Handle, int*>(kGet_count, flight.status, byte_, &bytes);
  }
  std::uint64_t request_of(const Flight& flight) const override {
    std::uint64_t found = 0;
    std::memcpy(&found, flight.request, sizeof(Handle));
    return found;
  }

 private:
  template <class... Given>
  int call(std::size_t function, Given... given) const {
    return reinterpret_cast<int (*)(Given...)>(addresses_[function])(given...);
  }

  // `form` leads from the blocking functions to those that only start, which take a `request` more.
  template <class... Request>
  int go(std::size_t form, const Collective& c, const int* cuts, bool is_root, Request... request) const {
    const auto call = [&](Function function, auto... given) {
      return this->call(form + function, given..., request...);
    };
    const void* const in = memory(c.in);
    void* const out = memory(c.out);
    const Handle type = handle_of(c.way.type), op = handle_of(c.way.op);
    const int count = static_cast<int>(c.count), bytes = static_cast<int>(c.bytes());
    const int root = static_cast<int>(c.header.root);
    const std::size_t size = c.outs.size();
    switch (c.verb) {
      case Verb::all_reduce: return call(kAllreduce, in_place_, out, count, type, op, comm_);
      case Verb::reduce:
        return call(kReduce, is_root ? in_place_ : in, is_root ? out : nullptr, count, type, op, root, comm_);
      case Verb::broadcast: return call(kBcast, out, bytes, byte_, root, comm_);
      case Verb::all_gather: return call(kAllgather, in, bytes, byte_, out, bytes, byte_, comm_);
      case Verb::reduce_scatter: return call(kReduce_scatter_block, in, out, count, type, op, comm_);
      case Verb::gather: return call(kGather, in, bytes, byte_, first(c.outs), bytes, byte_, root, comm_);
      case Verb::scatter:
        return call(kScatter, static_cast<const void*>(first(c.ins)), bytes, byte_, out, bytes, byte_, root,
                    comm_);
      case Verb::all_gather_v:
        return call(kAllgatherv, in, bytes, byte_, first(c.outs), cuts, cuts + size, byte_, comm_);
      case Verb::all_to_all: {
        const void* const given = first(c.ins);
        void* const taken = first(c.outs);
        if (cuts == nullptr) {
          return call(kAlltoall, given, bytes, byte_, taken, bytes, byte_, comm_);
        }
        return call(kAlltoallv, given, cuts, cuts + 2 * size, byte_, taken, cuts, cuts + size, byte_, comm_);
      }
      case Verb::barrier: return call(kBarrier, comm_);
      default: throw std::logic_error("MPI has no such collective");
    }
  }

  static Handle handle_of(std::uint64_t number) {
    if constexpr (std::is_pointer_v<Handle>) {
      return reinterpret_cast<Handle>(number);
    } else {
      return static_cast<Handle>(number);
    }
  }

  const Addresses addresses_;
  const Handle comm_, byte_;
  const void* const in_place_;
};

}  // namespace

std::vector<std::string> MpiFunctions::names() {
  std::vector<std::string> all;
  for (const char* name : kCollectives) all.push_back(std::string("MPI_") + name);
  for (std::string name : kCollectives) {
    name[0] = static_cast<char>(std::tolower(name[0]));
    all.push_back("MPI_I" + name);
  }
  for (const char* name : kMessages) all.push_back(std::string("MPI_") + name);
  return all;
}

std::unique_ptr<MpiFunctions> MpiFunctions::of(const Addresses& addresses, std::uint64_t comm,
                                               std::uint64_t byte, std::uint64_t in_place,
                                               std::size_t handle_bytes, std::size_t status_bytes) {
  if (addresses.size() != kNumFunctions) throw std::invalid_argument("an address per function");
  if (status_bytes > sizeof(Flight::status)) {
    throw std::invalid_argument("MPI's status is larger than was thought");
  }
  if (handle_bytes == sizeof(int)) {
    return std::make_unique<Functions<int>>(addresses, comm, byte, in_place);
  }
  return std::make_unique<Functions<void*>>(addresses, comm, byte, in_place);
}

}  // namespace meshdist
