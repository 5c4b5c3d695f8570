// Ranks as threads of one process, so that sanitizers see all of them: random collectives, sizes, dtypes,
// groups and messages, blocking and in flight, each result checked. Usage: stress [ranks] [seconds]
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "communicator.h"

using namespace meshdist;

namespace {

constexpr Nanoseconds kPatience = 120'000'000'000;
using Numbers = std::vector<std::int32_t>;

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "stress: %s\n", what);
  std::abort();
}

struct Group {
  std::vector<unsigned> members;  // ranks of the whole, in group order
  std::shared_ptr<const Segment> segment;
};

// What member j holds at index i in the s-th step.
std::int32_t value(std::uint64_t s, unsigned j, std::uint64_t i) {
  return static_cast<std::int32_t>((s * 31 + j * 7 + i) % 1000);
}

// The sum of what `n` members hold there.
std::int32_t total(std::uint64_t s, unsigned n, std::uint64_t i) {
  std::int32_t sum = 0;
  for (unsigned j = 0; j < n; ++j) sum += value(s, j, i);
  return sum;
}

Numbers made(std::uint64_t s, unsigned j, std::uint64_t count) {
  Numbers x(count);
  for (std::uint64_t i = 0; i < count; ++i) x[i] = value(s, j, i);
  return x;
}

std::uint8_t* bytes(Numbers& x) { return reinterpret_cast<std::uint8_t*>(x.data()); }

Job job(OperationSpec operation, std::uint64_t count, int root) {
  Job it;
  it.call.header.operation = static_cast<std::uint8_t>(operation);
  it.call.header.dtype = static_cast<std::uint8_t>(Dtype::kint32);
  it.call.header.op = static_cast<std::uint8_t>(Op::sum);
  it.call.header.count = count;
  it.call.header.root = root;
  it.call.deadline = now_ns() + kPatience;
  return it;
}

// The file of the memory that a group makes in one step: opened by the first member that comes.
class Matching {
 public:
  std::shared_ptr<const Memory> map(std::uint64_t step, unsigned size, std::uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto [it, is_first] = files_.try_emplace(step);
    if (is_first) it->second.fd = create_memory(bytes);
    auto memory = std::make_shared<Memory>(it->second.fd);
    if (++it->second.num_mapped == size) {
      close(it->second.fd);
      files_.erase(it);
    }
    return memory;
  }

 private:
  struct File {
    int fd = -1;
    unsigned num_mapped = 0;
  };
  std::mutex mutex_;
  std::map<std::uint64_t, File> files_;
};

Matching meeting;

struct Rank {
  std::vector<std::unique_ptr<Communicator>> communicators;
  std::mt19937_64 own;  // each rank draws other numbers from it

  // Sums and broadcasts in shared memory; some members drop the memory while others use it.
  void shared(std::uint64_t s, std::uint64_t count, int root, Communicator& c) {
    const unsigned n = c.end->size, me = c.end->rank;
    auto memory = meeting.map(s, n, 4 * n * count);
    c.progress->add_memory(memory);
    Numbers beside(count);
    auto* inside = reinterpret_cast<std::int32_t*>(memory->data()) + me * count;
    bool is_inside = true;
    for (const OperationSpec operation : {OperationSpec::all_reduce, OperationSpec::broadcast, OperationSpec::broadcast}) {
      std::int32_t* x = is_inside ? inside : beside.data();
      for (std::uint64_t i = 0; i < count; ++i) x[i] = value(s, me, i);
      Job it = job(operation, count, operation == OperationSpec::broadcast ? root : 0);
      it.out = reinterpret_cast<std::uint8_t*>(x);
      run(it, false, c);
      const auto last = [&](std::uint64_t i) {
        return operation == OperationSpec::broadcast ? value(s, root, i) : total(s, n, i);
      };
      check(count == 0 || x[count - 1] == last(count - 1), "a result on shared memory");
      if (is_inside && own() % 2 == 0) {
        memory->leave();
        memory.reset();
        c.progress->sweep();
        is_inside = false;
      }
    }
    if (is_inside) memory->leave();
  }

  // All members of a group draw the same numbers.
  void step(std::uint64_t s, std::size_t g, Communicator& c) {
    std::mt19937_64 draw(s * 1000 + g);
    const unsigned n = c.end->size, me = c.end->rank;
    static const std::uint64_t counts[] = {0, 1, 7, 8, 900, 5000, 40'000, 130'001};
    const std::uint64_t count = counts[draw() % 8];
    const int root = static_cast<int>(draw() % n);
    const bool in_flight = draw() % 3 == 0;
    const auto kind = draw() % 12;
    Job it;
    Numbers x = made(s, me, count), out;
    if (kind <= 2) {
      const OperationSpec operations[] = {OperationSpec::all_reduce, OperationSpec::reduce, OperationSpec::broadcast};
      it = job(operations[kind], count, kind == 0 ? 0 : root);
      it.out = bytes(x);
    } else if (kind == 3) {
      out.resize(n * count);
      it = job(OperationSpec::all_gather, count, 0);
      it.in = bytes(x), it.out = bytes(out);
    } else if (kind == 4) {
      x = made(s, me, n * count), out.resize(count);
      it = job(OperationSpec::reduce_scatter, count, 0);
      it.in = bytes(x), it.out = bytes(out);
    } else if (kind == 5) {
      x = made(s, me, n * count), out.resize(n * count);
      it = job(OperationSpec::all_to_all, 0, 0);
      for (unsigned j = 0; j < n; ++j) {
        it.ins.push_back(Part{bytes(x) + 4 * j * count, count});
        it.outs.push_back(Part{bytes(out) + 4 * j * count, count});
      }
    } else if (kind == 6) {
      // Member j gives every member count + j numbers.
      x = made(s, me, count + me);
      it = job(OperationSpec::all_gather_v, 0, 0);
      it.ins = {Part{bytes(x), count + me}};
      out.resize(n * count + n * (n - 1) / 2);
      std::uint64_t at = 0;
      for (unsigned j = 0; j < n; ++j) {
        it.outs.push_back(Part{bytes(out) + 4 * at, count + j});
        at += count + j;
      }
    } else if (kind == 7) {
      it = job(OperationSpec::barrier, 0, 0);
    } else if (kind == 8) {
      return shared(s, count, root, c);
    } else if (kind == 9) {
      return messages(s, count, c);
    } else {
      return exchange(s, draw, in_flight, c);
    }
    Numbers early = made(s, me, 8);  // of a call that another one follows before it is waited for
    Job before = job(OperationSpec::all_reduce, early.size(), 0);
    before.out = bytes(early);
    const TicketPtr waits = draw() % 2 == 0 ? c.progress->start(std::move(before)) : nullptr;
    run(it, in_flight, c);
    if (waits != nullptr) {
      check(c.progress->wait(waits, kForever, nullptr) == Status::ok, "an earlier call");
      check(early.back() == total(s, n, early.size() - 1), "the result of an earlier call");
    }
    bool good = true;
    std::uint64_t at = 0;
    for (std::uint64_t i = 0; i < count; ++i) {
      if (kind == 0 || (kind == 1 && root == static_cast<int>(me))) good &= x[i] == total(s, n, i);
      if (kind == 1 && root != static_cast<int>(me)) good &= x[i] == value(s, me, i);
      if (kind == 2) good &= x[i] == value(s, root, i);
      if (kind == 4) good &= out[i] == total(s, n, me * count + i);
      for (unsigned j = 0; j < n; ++j) {
        if (kind == 3) good &= out[j * count + i] == value(s, j, i);
        if (kind == 5) good &= out[j * count + i] == value(s, j, me * count + i);
      }
    }
    for (unsigned j = 0; kind == 6 && j < n; ++j) {
      for (std::uint64_t i = 0; i < count + j; ++i) good &= out[at++] == value(s, j, i);
    }
    check(good, "a result");
  }

  static void run(Job& it, bool in_flight, Communicator& c) {
    if (in_flight) {
      const TicketPtr ticket = c.progress->start(std::move(it));
      std::thread polls([&] {  // which may finish it as well
        for (int i = 0; i < 100 && !c.progress->test(ticket); ++i) std::this_thread::yield();
      });
      check(c.progress->wait(ticket, kForever, nullptr) == Status::ok, "a collective in flight");
      polls.join();
    } else {
      Failure failure;
      check(c.progress->run(it, nullptr, failure, [] {}) == Status::ok, "a collective");
    }
  }

  // An all-to-all in which each pair of members exchanges another amount, many of them nothing; some
  // members are done with it, and with calls behind it, while others have much to do.
  void exchange(std::uint64_t s, std::mt19937_64& draw, bool in_flight, Communicator& c) {
    const unsigned n = c.end->size, me = c.end->rank;
    static const std::uint64_t counts[] = {0, 1, 17, 2000, 9001, 60'013};
    const std::uint64_t chosen = draw() % 3;  // one of three pairs, one of two, all
    std::vector<std::uint64_t> gives(std::size_t{n} * n);
    for (std::uint64_t& one : gives) {
      const bool is_empty = draw() % 3 > chosen;
      one = is_empty ? 0 : counts[draw() % 6];
    }
    std::vector<Numbers> ins(n), outs(n);
    Job it = job(OperationSpec::all_to_all, 0, 0);
    for (unsigned j = 0; j < n; ++j) {
      ins[j] = made(s, me * n + j, gives[me * n + j]);
      outs[j].resize(gives[j * n + me]);
      it.ins.push_back(Part{bytes(ins[j]), ins[j].size()});
      it.outs.push_back(Part{bytes(outs[j]), outs[j].size()});
    }
    run(it, in_flight, c);
    for (unsigned j = 0; j < n; ++j) {
      check(outs[j] == made(s, j * n + me, gives[j * n + me]), "what a member gave this one");
    }
    for (auto more = draw() % 4; more > 0; --more) {  // which use the same slots, lines and tables
      Numbers x = made(s, me, 700);
      Job next = job(OperationSpec::all_reduce, x.size(), 0);
      next.out = bytes(x);
      run(next, false, c);
      check(x.back() == total(s, n, x.size() - 1), "a sum behind an exchange");
    }
  }

  // Each member sends to all, receives first, and waits in an order of its own.
  void messages(std::uint64_t s, std::uint64_t count, Communicator& c) {
    const unsigned n = c.end->size, me = c.end->rank;
    std::vector<Numbers> got(n, Numbers(count));
    Numbers x = made(s, me, count);
    std::vector<TransferPtr> all;
    for (unsigned half = 0; half < 2; ++half) {
      for (unsigned j = 0; j < n; ++j) {
        auto it = std::make_shared<Transfer>();
        it->is_send = half == 1;
        it->peer = static_cast<int>(j);
        it->tag = static_cast<std::int64_t>(s);
        it->data = half == 1 ? bytes(x) : bytes(got[j]);
        it->count = count;
        it->bytes = 4 * count;
        it->dtype = static_cast<std::uint8_t>(Dtype::kint32);
        c.transfers->start(it, true);
        all.push_back(std::move(it));
      }
    }
    std::shuffle(all.begin(), all.end(), std::mt19937_64(s * 64 + me));
    for (const TransferPtr& one : all) {
      check(c.transfers->wait(one, now_ns() + kPatience, nullptr) == Status::ok, "a message");
    }
    for (unsigned j = 0; j < n; ++j) check(got[j] == made(s, j, count), "a message's content");
  }
};

}  // namespace

int main(int argc, char** argv) {
  const unsigned ranks = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 8;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 60.0;
  std::vector<Group> groups(3);
  for (unsigned r = 0; r < ranks; ++r) {
    groups[0].members.push_back(r);
    if (r % 2 == 0) groups[1].members.insert(groups[1].members.begin(), r);
    if (r < 3) groups[2].members.push_back(r);
  }
  for (Group& group : groups) {
    const bool is_crowded = &group != &groups[1];  // that one as if each had a core of its own
    const auto size = static_cast<std::uint32_t>(group.members.size());
    const int fd = create_segment(size, 16384, 8192, is_crowded);
    group.segment = std::make_shared<Segment>(fd);
    close(fd);
  }
  std::vector<std::uint64_t> steps(ranks);
  std::vector<std::thread> threads;
  for (unsigned r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank;
      rank.own.seed(r);
      for (const Group& group : groups) {
        const auto place = std::find(group.members.begin(), group.members.end(), r);
        const auto index = static_cast<unsigned>(place - group.members.begin());
        rank.communicators.push_back(place == group.members.end() ? nullptr
                                                                  : std::make_unique<Communicator>(
                                                                        group.segment, index, Processes({})));
        if (rank.communicators.back() == nullptr) continue;
        Tuning& tuning = rank.communicators.back()->progress->collectives().tuning;
        tuning.halves_least_bytes = tuning.far_halves_least_bytes = 4096;
        tuning.fetch_least_bytes = 4096;
      }
      const Nanoseconds end = deadline_after(seconds);
      bool goes_on = true;
      for (std::uint64_t s = 1; goes_on; ++s) {
        std::mt19937_64 draw(s);
        const std::size_t g = draw() % groups.size();
        if (rank.communicators[g] != nullptr) rank.step(s, g, *rank.communicators[g]);
        if (s % 16 == 0) {  // rank 0's clock counts
          std::int32_t more = now_ns() < end;
          Job it = job(OperationSpec::broadcast, 1, 0);
          it.out = reinterpret_cast<std::uint8_t*>(&more);
          Rank::run(it, false, *rank.communicators[0]);
          goes_on = more != 0;
        }
        steps[r] = s;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Helpers end by themselves; give them the moment that a process would not.
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  std::printf("%u ranks, %llu steps, no fault\n", ranks, static_cast<unsigned long long>(steps[0]));
  return 0;
}
