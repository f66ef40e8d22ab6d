// Masks that never change, for the tests of both builds.
#ifndef MASK_GOLDEN_H
#define MASK_GOLDEN_H

#include "../llmc/mask_set.h" // MaskKey

// Index sets that every build must find: the first 12 of the set. They are part of every run's bits.
static const struct {
    MaskKey key;
    int token, H;
    int first[12];
} mask_golden[] = {
    {{1337, 0, 0, 0, 0}, 0, 192, {169, 19, 94, 145, 130, 129, 72, 64, 191, 14, 171, 181}},
    {{1337, 0, 0, 1000, 0}, 0, 768, {314, 452, 129, 642, 317, 589, 431, 554, 371, 398, 397, 654}},
    {{1337, 0, 1, 7, 2}, 4095, 768, {677, 161, 290, 165, 81, 608, 554, 48, 87, 101, 21, 448}},
    {{0x9E3779B97F4A7C15ull, 4095, 4095, (1ll << 36) - 1, 4095},
     (1 << 24) - 1,
     2048,
     {1379, 172, 1365, 1088, 1050, 1131, 1194, 1550, 939, 1313, 212, 512}},
    {{42, 3, 2, 5000000000ll, 1}, 17, 2048, {930, 1335, 731, 1633, 262, 1517, 1694, 1529, 196, 490, 160, 1249}},
    {{42, 0, 0, 1, 0}, 5, 65536, {35577, 29657, 8147, 55660, 19459, 23401, 34760, 58252, 31927, 20597, 54766, 13669}},
};

#endif
