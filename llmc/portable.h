// Functions that host and device code share: `static inline HOST_DEVICE`. A CUDA build compiles them for both sides.
#ifndef LLMC_PORTABLE_H
#define LLMC_PORTABLE_H

#ifdef DEVICE_CUDA
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

#endif
