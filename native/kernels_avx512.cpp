#define MESHDIST_LEVEL avx512
#define MESHDIST_LEVEL_NAME "avx512"
#include "kernels_level.h"
