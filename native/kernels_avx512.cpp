#define MESHDIST_LEVEL avx512
#include "kernels_level.h"
