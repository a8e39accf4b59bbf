// FUSEDMOE_HD before a function: compiled for the host and, in a CUDA source, for the device too.
#pragma once

#ifdef __CUDACC__
#define FUSEDMOE_HD __host__ __device__
#else
#define FUSEDMOE_HD
#endif
