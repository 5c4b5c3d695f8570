#define MESHDIST_LEVEL baseline
#define MESHDIST_LEVEL_NAME "baseline"
#include "kernels_level.h"
