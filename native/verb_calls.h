// The public verbs, as Python calls them.
#pragma once

#include "objects.h"

namespace meshdist {

void bind_verb_calls(nb::module_& m);

}  // namespace meshdist
