// The class `FastPath` of the module.
#pragma once

#include <string>

#include "runner.h"

namespace meshdist {

void bind_fast_path(nb::module_& module);

// The method for a verb, to be called with an object of the class: to find it by its name takes 40 ns more.
FastFunction find_fast_method(const std::string& verb);
// Whether `path` is of the class; tests have others with the same methods.
bool is_fast_path(nb::handle path);
// That of the calls that are started; None where none are.
nb::object starting_path(nb::handle path);

}  // namespace meshdist
