// Element types that the emulator's libraries name, numbered as the toolkit numbers them.
#ifndef EMULATOR_LIBRARY_TYPES_H
#define EMULATOR_LIBRARY_TYPES_H

typedef enum { CUDA_R_32F = 0, CUDA_R_16BF = 14 } cudaDataType_t;

#endif
