// Reductions that MPI and torch's classes do on other elements than those of the tensors:
// `datatypes.py` and `substitutes.py` say why.
#pragma once

namespace meshdist {

struct Recoding {
  bool widens = false;           // 16-bit floats become float32, narrow whole numbers int32
  bool orders = false;           // floats become the whole numbers that have their order
  bool nan_is_greatest = false;  // of all numbers, else the least
  bool divides = false;          // the sum, by the number of members

  bool is_any() const { return widens || orders || divides; }
  // Whether MPI reduces the tensor's own memory.
  bool is_in_place() const { return !widens && !orders; }
};

}  // namespace meshdist
