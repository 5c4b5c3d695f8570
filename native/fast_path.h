// What the files of the fast path add to the module, and its class `FastPath`, as calls of collectives find it.
#pragma once

#include <string>

#include "objects.h"

namespace meshdist {

void bind_fast_path(nb::module_& module);
void bind_python_runner(nb::module_& module);
void bind_operation_calls(nb::module_& module);

// The method for a collective, to be called with an object of the class: to find it by its name takes 40 ns more.
FastFunction find_fast_method(const std::string& operation);
// Whether `path` is of the class; tests have others with the same methods.
bool is_fast_path(nb::handle path);
// That of the calls that are started; None where none are.
nb::object starting_path(nb::handle path);

}  // namespace meshdist
