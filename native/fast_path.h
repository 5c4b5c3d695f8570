// The class `FastPath` of the module.
#pragma once

#include "runner.h"

namespace meshdist {

void bind_fast_path(nb::module_& module);

}  // namespace meshdist
