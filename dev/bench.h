// What the benchmarks of both devices share; included after train_gpt.cu.
#ifndef BENCH_H
#define BENCH_H

static double median(double *values, int n) {
    for (int i = 1; i < n; i++) { // insertion sort
        double value = values[i];
        int j = i;
        for (; j > 0 && values[j - 1] > value; j--) values[j] = values[j - 1];
        values[j] = value;
    }
    return n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

// FLOPs of a token in training: 6 per parameter of a matrix that multiplies (the embedding does not), and 6*T*NH*HD a
// layer for causal attention (half of the T x T scores); recomputed scores are not counted.
static double flops_per_token(const Stage *stage, int T) {
    const Config *c = &stage->config;
    double matrices = (double)(config_n_params(c) - (c->tied ? 0 : (int64_t)c->vocab * c->channels));
    return 6.0 * matrices + 6.0 * T * (double)stage->A * c->n_layers;
}

// Multiplications and additions of a second moment as it is computed.
static double rotate_moment_flops(int side, int inner) {
    double flops = 0.0;
    for (int i = 0; i < side; i += ROTATE_BLOCK) {
        int rows = side - i < ROTATE_BLOCK ? side - i : (int)ROTATE_BLOCK;
        flops += 2.0 * rows * (i + rows) * inner;
    }
    return flops;
}

// The same of the products of a rotated step of a matrix (m,n) without a refresh. second: of second moments too.
static double rotate_product_flops(RotateSides sides, int second, int m, int n) {
    double left = 4.0 * m * m * n + (second ? rotate_moment_flops(m, n) : 0.0);
    double right = 4.0 * m * n * n + (second ? rotate_moment_flops(n, m) : 0.0);
    return (sides.left ? left : 0.0) + (sides.right ? right : 0.0);
}

// A batch of random tokens and targets.
static void fill_batch(Batch *batch, int vocab) {
    int N = batch->b * batch->T;
    for (int n = 0; n < N; n++) {
        batch->tokens[n] = rand_block(1, RAND_TEST, 0, (uint64_t)n).v[0] % (uint32_t)vocab;
        batch->targets[n] = (int32_t)(rand_block(1, RAND_TEST, 1, (uint64_t)n).v[0] % (uint32_t)vocab);
    }
    batch->n_valid = N;
}

#endif
