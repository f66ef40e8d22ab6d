// How a model's RoPE frequencies are made: read from its config. Plain and `llama3` scaling.
#ifndef LLMC_ROPE_CONFIG_H
#define LLMC_ROPE_CONFIG_H

#include <math.h> // pow

typedef struct {
    float theta;
    int scaled; // 0: plain, 1: llama3
    float factor, low_freq_factor, high_freq_factor;
    int original_context;
} RopeConfig;

// inv_freq (HD/2): theta^(-2i/HD); with llama3 scaling wavelengths beyond original_context/low are divided by factor,
// those below original_context/high stay, and between the two it is interpolated (Llama 3.1 model card).
static inline void rope_inv_freq(float *inv_freq, int HD, const RopeConfig *rope) {
    for (int i = 0; i < HD / 2; i++) {
        double freq = pow((double)rope->theta, -2.0 * i / HD);
        if (rope->scaled) {
            double wavelength = 2.0 * 3.14159265358979323846 / freq;
            double low = rope->original_context / (double)rope->low_freq_factor;
            double high = rope->original_context / (double)rope->high_freq_factor;
            if (wavelength > low) {
                freq /= (double)rope->factor;
            } else if (wavelength >= high) {
                double smooth = (rope->original_context / wavelength - (double)rope->low_freq_factor) /
                                ((double)rope->high_freq_factor - (double)rope->low_freq_factor);
                freq = (1.0 - smooth) * freq / (double)rope->factor + smooth * freq;
            }
        }
        inv_freq[i] = (float)freq;
    }
}

#endif
