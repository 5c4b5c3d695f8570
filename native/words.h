// Words of 64 bits in a Python buffer, which another process may read or write.
#pragma once

#include <cstdint>
#include <utility>

#include "objects.h"

namespace meshdist {

constexpr std::uint64_t kLow = 0xffffffffu;  // half a word

class Words {
 public:
  Words() = default;
  explicit Words(nb::object memory) : memory_(std::move(memory)) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(memory_.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
    words_ = static_cast<std::uint64_t*>(buffer.buf);
    PyBuffer_Release(&buffer);
  }

  bool are_known() const { return words_ != nullptr; }
  std::uint64_t get(std::uint64_t place) const { return __atomic_load_n(words_ + place, __ATOMIC_ACQUIRE); }
  void put(std::uint64_t place, std::uint64_t value) const {
    __atomic_store_n(words_ + place, value, __ATOMIC_RELEASE);
  }
  // Like `put`, and visible to others before this process reads later data.
  void set(std::uint64_t place, std::uint64_t value) const {
    put(place, value);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
  }

 private:
  nb::object memory_;  // a memoryview, which keeps the words where they are
  std::uint64_t* words_ = nullptr;
};

}  // namespace meshdist
