#define MESHDIST_LEVEL avx2
#define MESHDIST_LEVEL_NAME "avx2"
#include "kernels_level.h"
