#include "mpi_flights.h"

#include <algorithm>

#include "kernels.h"

namespace meshdist {
namespace {

constexpr int kSwept = 2;  // more than one, so that those whose Work was dropped are freed in time

namespace names {
const Name is_aborted{"is_aborted"}, wait{"wait"}, failure{"failure"}, test_quietly{"test_quietly"};
}

}  // namespace

void MpiFlights::add(const FlightPtr& flight) {
  flights_.push_back(flight);
  for (int i = 0; i < kSwept; ++i) {
    const FlightPtr oldest = flights_.front();
    if (oldest == flight) return;
    const bool is_done = settle(*oldest);
    const auto found = std::find(flights_.begin(), flights_.end(), oldest);
    if (found == flights_.end()) return;  // another thread has closed the group meanwhile
    if (is_done) {
      flights_.erase(found);
    } else {
      flights_.splice(flights_.end(), flights_, found);
    }
  }
}

bool MpiFlights::test(Flight& flight) const {
  if (flight.is_done) return true;
  const std::unique_lock<std::mutex> lock(flight.testing, std::try_to_lock);
  if (!lock.owns_lock() || flight.is_done || is_closed_) return flight.is_done;
  bool is_done = false;
  flight.error = mpi_.ask(flight.mpi, is_done);
  if (flight.error == 0 && is_done) decode(flight.call, flight.to);
  flight.is_done = is_done || flight.error != 0;
  return flight.is_done;
}

bool MpiFlights::settle(Flight& flight) {
  if (!flight.is_done) {
    nb::gil_scoped_release release;
    if (!test(flight)) return false;
  }
  give(std::move(flight.scratch));
  const Collective freed = std::move(flight.call);  // at the end: that may make another operation
  return true;
}

bool MpiFlights::progress() {
  const auto is_in_flight = [](const FlightPtr& flight) { return !flight->is_done; };
  const auto found = std::find_if(flights_.begin(), flights_.end(), is_in_flight);
  if (found == flights_.end()) return false;
  const FlightPtr flight = *found;
  settle(*flight);
  return true;
}

bool MpiFlights::close() {
  static auto* const abandoned = new std::list<FlightPtr>;  // until the process ends
  std::list<FlightPtr> left(flights_);
  left.remove_if([&](const FlightPtr& flight) { return settle(*flight); });
  is_closed_ = true;
  flights_.clear();
  const bool are_left = !left.empty();
  abandoned->splice(abandoned->end(), left);
  return are_left;
}

void MpiFlights::decode(const Collective& call, Address to) const {
  const Recoding recoding = call.way.recoding;
  if (!recoding.is_any() || to == 0) return;
  kernels().decode[call.dtype](recoding, pointer(to), pointer(call.out), call.count, size_);
}

nb::object MpiFlights::take(std::uint64_t bytes) {
  const auto size = static_cast<Py_ssize_t>(bytes);
  if (scratch_.is_valid() && PyByteArray_Size(scratch_.ptr()) >= size) return std::move(scratch_);
  return checked(PyByteArray_FromStringAndSize(nullptr, size));
}

void MpiFlights::give(nb::object scratch) {
  if (!scratch.is_valid() || PyByteArray_Size(scratch.ptr()) > kMostScratch) return;
  scratch_ = std::move(scratch);
}

int MpiStarted::wait(double timeout) {
  const auto spin = static_cast<Nanoseconds>(std::min(static_cast<double>(spin_), timeout * 1e9));
  const std::uint64_t bytes = flight_->call.bytes();
  if (!flight_->is_done) {
    nb::gil_scoped_release release;
    is_done_soon(spin, bytes, [&] { return flights_.test(*flight_); });
  }
  if (!flight_->is_done) return static_cast<int>(Status::pending);
  test();
  return flight_->error;
}

void MpiStarted::finish(nb::handle timeout) {
  if (!test()) {
    const nb::object self = nb::find(this);
    call(link_, names::wait, get(self, names::test_quietly), timeout);
  }
  if (flight_->error == 0) return;
  raise_error(call(link_, names::failure, call_with(error_, whole(flight_->error))));
}

bool MpiStarted::is_done() { return test() || is_true(get(link_, names::is_aborted)); }

}  // namespace meshdist
