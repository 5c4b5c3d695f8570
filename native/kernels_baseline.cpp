#define MESHDIST_LEVEL baseline
#include "kernels_level.h"
