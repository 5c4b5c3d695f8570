#define MESHDIST_LEVEL avx2
#include "kernels_level.h"
