// NCCL of the emulator. First stand-in.
#ifndef EMU_NCCL_H
#define EMU_NCCL_H

#include <cuda_runtime.h> // cudaStream_t

#endif
