// The shortest way of the plainest call: the sum of one plain tensor, in place, waited for.
//
// What `meshdist.all_reduce` does in Python for any argument takes longer than the sum of a few
// numbers. This does the same for one kind of call, and leaves every other to Python: it checks the
// tensor, notes the call as `Recorder.note` does, and tells autograd of the write.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "tensor_view.h"

namespace meshdist {

class PlainSum {
 public:
  // `facts` has what Python knows: see `meshdist.wires.native`.
  explicit PlainSum(nanobind::dict facts);

  struct Buffer {
    std::uintptr_t address = 0;
    std::uint64_t count = 0;
    unsigned dtype = 0;
  };

  // Fill `buffer` and note the call, if the call is plain; else nothing has happened.
  bool begin(nanobind::handle tensor, Buffer& buffer);

  // Tell autograd that `tensor` was written into.
  void note_write(nanobind::handle tensor);

 private:
  bool is_quiet() const;
  nanobind::object read(nanobind::handle tensor, Buffer& buffer);
  void note(nanobind::handle data);

  const unsigned num_forks_;
  nanobind::object tensor_type_, codes_;
  TensorViews views_;
  nanobind::object last_data_;
  unsigned last_code_of_dtype_ = 0;
  std::uint32_t last_dtype_ = 0;
  std::vector<std::int64_t> last_shape_;
  nanobind::object aborts_, is_told_, level_;
  nanobind::object recorder_, notes_, moments_, between_files_;
  nanobind::object group_, verb_, more_, no_stack_;
  nanobind::object increment_version_;
  nanobind::object last_code_;  // the program's that called last
  Py_ssize_t num_kept_;
};

}  // namespace meshdist
