// One source for the CPU and the device: HOST_DEVICE before a function says that kernels call it too.
#ifndef LLMC_PORTABLE_H
#define LLMC_PORTABLE_H

#ifdef DEVICE_CUDA
#include <cuda_runtime.h> // __host__, __device__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

#endif
