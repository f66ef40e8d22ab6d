// Muon (Jordan et al. 2024) of a weight matrix W (m,n), CPU: the update is the orthogonal matrix nearest to the
// momentum.
//   M = mu*M + G                                in place, mu = 0.95
//   O = Newton-Schulz(G + mu*M), 5 steps        Nesterov
//   W = W*(1 - lr*wd) - lr * 0.2*sqrt(max(m,n)) * O           in place; the factor gives values of AdamW's size
// Costs 5 (4mnk + 2k^3) flops, k = min(m,n), and 2mn + 2k^2 floats of scratch. Constants: optimizer.h.
#ifndef LLMC_MUON_H
#define LLMC_MUON_H

#include <math.h>   // sqrt
#include <stdint.h> // fixed-width integers

#include "device.h"    // Stream, scratch_get, device_copy
#include "matmul.h"    // matmul_product
#include "optimizer.h" // MUON_*, muon_scale
#include "vector.h"    // vector_blend, vector_scale, sum_of_squares

#include "muon_step.h" // muon_update

#endif
