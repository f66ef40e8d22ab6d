// Attention against plain loops in double. T on both sides of every tile's edge, heads of each tensor-core size and of
// each plain tile, rows that do not fit 16 bytes, queries fewer than keys, documents that end inside tiles, on their
// edges and after one token, windows of every length. The bound is twice the error of the same loops in the kernels'
// precision. Must fail for: zeros, a head mapped to the wrong kv head, the diagonal masked out, documents or the window
// ignored, a group's heads not all added, rows of padding counted.
#include "../../llmc/attention.cuh"

typedef struct {
    int B, Tq, Tk, NH, NKV, HD;
    int pad;       // columns of a joint row that belong to nobody
    int documents; // 1: the sequences are packed
    int window;
} AttentionCase;

// Host arrays of one case. Rows of q, of k and v, and of their gradients are joint rows of `stride`.
typedef struct {
    AttentionShape s; // starts: on the host
    const float *q, *k, *v, *dout;
} AttentionInput;

// Results packed: out (B, Tq, NH*HD), lse (B, NH, Tq), dq as out, dk, dv (B, Tk, NKV*HD).
template <class Real> struct AttentionResult { Real *out, *lse, *dq, *dk, *dv; };

template <class Real> static AttentionResult<Real> attention_result(AttentionShape s) {
    size_t n_q = (size_t)s.B * s.Tq * s.NH * s.HD, n_kv = (size_t)s.B * s.Tk * s.NKV * s.HD;
    AttentionResult<Real> r;
    r.out = (Real *)calloc(n_q, sizeof(Real)), r.dq = (Real *)calloc(n_q, sizeof(Real));
    r.lse = (Real *)calloc((size_t)s.B * s.NH * s.Tq, sizeof(Real));
    r.dk = (Real *)calloc(n_kv, sizeof(Real)), r.dv = (Real *)calloc(n_kv, sizeof(Real));
    return r;
}

template <class Real> static void attention_result_free(AttentionResult<Real> r) {
    free(r.out), free(r.lse), free(r.dq), free(r.dk), free(r.dv);
}

static float round_to_bf16(float x) {
    return float_of_bf16(bf16_of_float(x));
}

static float round_to_x(float x) {
    return to_float(to_floatX(x));
}

template <class Real> static Real round_not(Real x) {
    return x;
}

// How probabilities and dS enter a product, and how out is stored for the backward.
template <class Real> struct AttentionRounding { Real (*product)(Real), (*store)(Real); };

// One query and head: its out and lse, and what it adds to the gradients.
template <class Real>
static void attention_query(AttentionResult<Real> r, const AttentionInput *in, int b, int head, int i, Real *p,
                            AttentionRounding<Real> round) {
    const AttentionShape *s = &in->s;
    int HD = s->HD, position = s->Tk - s->Tq + i, kv_head = head / (s->NH / s->NKV);
    int start = s->starts != NULL ? s->starts[(size_t)b * s->Tk + position] : 0;
    while (s->window > 0 && position - start >= s->window) start++;
    const float *q = in->q + ((size_t)b * s->Tq + i) * s->q_stride + (size_t)head * HD;
    size_t out_at = (((size_t)b * s->Tq + i) * s->NH + head) * HD;
    Real scale = 1 / sqrt((Real)HD), top = -INFINITY, total = 0, delta = 0;
    for (int j = start; j <= position; j++) {
        const float *k = in->k + ((size_t)b * s->Tk + j) * s->kv_stride + (size_t)kv_head * HD;
        p[j] = 0;
        for (int d = 0; d < HD; d++) p[j] += (Real)q[d] * (Real)k[d];
        p[j] *= scale;
        top = p[j] > top ? p[j] : top;
    }
    for (int j = start; j <= position; j++) {
        const float *v = in->v + ((size_t)b * s->Tk + j) * s->kv_stride + (size_t)kv_head * HD;
        Real weight = exp(p[j] - top);
        total += weight;
        for (int d = 0; d < HD; d++) r.out[out_at + d] += round.product(weight) * (Real)v[d];
    }
    r.lse[((size_t)b * s->NH + head) * s->Tq + i] = top + log(total);
    for (int d = 0; d < HD; d++) {
        r.out[out_at + d] = round.store(r.out[out_at + d] / total);
        delta += (Real)in->dout[out_at + d] * r.out[out_at + d];
    }
    for (int j = start; j <= position; j++) {
        size_t row = (size_t)b * s->Tk + j, in_at = row * s->kv_stride + (size_t)kv_head * HD;
        size_t at = (row * s->NKV + kv_head) * HD;
        Real prob = exp(p[j] - top) / total, dprob = 0;
        for (int d = 0; d < HD; d++) dprob += (Real)in->dout[out_at + d] * (Real)in->v[in_at + d];
        Real dscore = round.product(prob * (dprob - delta)) * scale;
        for (int d = 0; d < HD; d++) {
            r.dv[at + d] += round.product(prob) * (Real)in->dout[out_at + d];
            r.dk[at + d] += dscore * (Real)q[d];
            r.dq[out_at + d] += dscore * (Real)in->k[in_at + d];
        }
    }
}

template <class Real>
static AttentionResult<Real> attention_loops(const AttentionInput *in, AttentionRounding<Real> round) {
    AttentionResult<Real> r = attention_result<Real>(in->s);
    Real *p = (Real *)malloc(sizeof(Real) * (size_t)in->s.Tk);
    for (int b = 0; b < in->s.B; b++)
        for (int head = 0; head < in->s.NH; head++)
            for (int i = 0; i < in->s.Tq; i++) attention_query(r, in, b, head, i, p, round);
    free(p);
    return r;
}

// value against exact; plain: the loops in the same precision, before their result is stored as floatX or, for lse,
// fp32.
static void attention_check(const float *value, const double *exact, float *plain, int64_t n, int is_x,
                            const AttentionCase *c, const char *what) {
    float *expected = host_nan(n);
    for (int64_t i = 0; i < n; i++) {
        expected[i] = (float)exact[i];
        if (is_x) plain[i] = round_to_x(plain[i]);
    }
    double tol = 2.0 * relative_error(plain, expected, n), error = relative_error(value, expected, n);
    if (tol < 5e-7) tol = 5e-7; // few and exact values: the plain loops may be right by luck
    check(error <= tol && tol < 0.1,
          "%s: relative error %.3g, at most %.3g allowed (B %d, T %d of %d, NH %d/%d, HD %d, window %d)", what, error,
          tol, c->B, c->Tq, c->Tk, c->NH, c->NKV, c->HD, c->window);
    free(expected);
}

// to (rows, n) = columns from .. from+n-1 of joint rows
static float *attention_columns(const float *joint, int64_t rows, int stride, int from, int n) {
    float *to = (float *)malloc(sizeof(float) * (size_t)(rows * n + 1));
    for (int64_t row = 0; row < rows; row++)
        memcpy(to + row * n, joint + row * stride + from, sizeof(float) * (size_t)n);
    return to;
}

// Document starts of each sequence: lengths from a list that each enters at another place.
static int32_t *attention_starts_of(int B, int T) {
    static const int lengths[] = {3, 60, 1, 1, 64, 31, 70, 5, 129};
    int32_t *starts = (int32_t *)malloc(sizeof(int32_t) * (size_t)B * (size_t)T);
    for (int b = 0; b < B; b++)
        for (int t = 0, start = 0, i = 3 * b; t < T; t++) {
            if (t - start >= lengths[i % 9]) start = t, i++;
            starts[(size_t)b * T + t] = start;
        }
    return starts;
}

static void attention_backward_check(const AttentionCase *c, AttentionShape s, const float *dout, floatX *x,
                                     floatX *out, float *lse, AttentionResult<double> exact,
                                     AttentionResult<float> plain) {
    int A = s.NH * s.HD, KV = s.NKV * s.HD, stride = s.q_stride;
    int64_t rows = (int64_t)s.B * s.Tk, n = rows * stride, n_q = rows * A, n_kv = rows * KV;
    floatX *ddout = device_of_host_x(dout, n_q), *dx = device_nan<floatX>(n), *again = device_nan<floatX>(n);
    attention_backward(dx, dx + A, dx + A + KV, ddout, out, lse, x, x + A, x + A + KV, s, test_stream);
    attention_backward(again, again + A, again + A + KV, ddout, out, lse, x, x + A, x + A + KV, s, test_stream);
    floatX *first = host_of_device(dx, n), *second = host_of_device(again, n);
    check_same(first, second, sizeof(floatX) * (size_t)n, "attention backward, twice");
    float *joint = host_of_device_x(dx, n), *dq = attention_columns(joint, rows, stride, 0, A);
    float *dk = attention_columns(joint, rows, stride, A, KV), *dv = attention_columns(joint, rows, stride, A + KV, KV);
    if (s.Tk > 1) { // with one key the softmax is constant, dq and dk are zero
        attention_check(dq, exact.dq, plain.dq, n_q, 1, c, "dq");
        attention_check(dk, exact.dk, plain.dk, n_kv, 1, c, "dk");
    }
    attention_check(dv, exact.dv, plain.dv, n_kv, 1, c, "dv");
    int clean = 1;
    for (int64_t row = 0; row < rows; row++)
        for (int i = A + 2 * KV; i < stride; i++) clean = clean && isnan(joint[row * stride + i]);
    check(clean, "attention backward: wrote between rows");
    device_release(ddout, n_q, "dout");
    device_release(dx, n, "dqkv");
    device_release(again, n, "dqkv");
    free(first), free(second), free(joint), free(dq), free(dk), free(dv);
}

static void attention_case(const AttentionCase *c) {
    int A = c->NH * c->HD, KV = c->NKV * c->HD, stride = A + 2 * KV + c->pad;
    int64_t n_q = (int64_t)c->B * c->Tq * stride, n = (int64_t)c->B * c->Tk * stride, n_out = (int64_t)c->B * c->Tq * A;
    int64_t n_lse = (int64_t)c->B * c->NH * c->Tq;
    int32_t *starts = c->documents ? attention_starts_of(c->B, c->Tk) : NULL, *dstarts = NULL;
    float *x = host_random_x(n, 40, 1.5f), *queries = host_random_x(n_q, 41, 1.5f),
          *dout = host_random_x(n_out, 42, 1.0f);
    if (c->Tq == c->Tk) memcpy(queries, x, sizeof(float) * (size_t)n);
    AttentionShape s = {c->B, c->Tq, c->Tk, c->NH, c->NKV, c->HD, stride, stride, starts, c->window};
    AttentionInput in = {s, queries, x + A, x + A + KV, dout};
    int tensor = sizeof(floatX) == 2 && (c->HD == 64 || c->HD == 96 || c->HD == 128) && c->pad % 8 == 0;
    AttentionRounding<double> none = {round_not<double>, round_not<double>};
    AttentionRounding<float> kernels = {tensor ? round_to_bf16 : round_not<float>, round_to_x};
    AttentionResult<double> exact = attention_loops(&in, none);
    AttentionResult<float> plain = attention_loops(&in, kernels);

    floatX *dx = device_of_host_x(x, n), *dq = device_of_host_x(queries, n_q), *dout_x = device_nan<floatX>(n_out);
    float *dlse = device_nan<float>(n_lse);
    if (starts != NULL) s.starts = dstarts = device_of_host(starts, (int64_t)c->B * c->Tk);
    attention_forward(dout_x, dlse, dq, dx + A, dx + A + KV, s, test_stream);
    float *out = host_of_device_x(dout_x, n_out), *lse = host_of_device(dlse, n_lse);
    attention_check(out, exact.out, plain.out, n_out, 1, c, "out");
    attention_check(lse, exact.lse, plain.lse, n_lse, 0, c, "lse");
    if (c->Tq == c->Tk) attention_backward_check(c, s, dout, dx, dout_x, dlse, exact, plain);
    device_release(dx, n, "qkv");
    device_release(dq, n_q, "q");
    device_release(dout_x, n_out, "out");
    device_release(dlse, n_lse, "lse");
    if (dstarts != NULL) device_release(dstarts, (int64_t)c->B * c->Tk, "starts");
    attention_result_free(exact);
    attention_result_free(plain);
    free(starts), free(x), free(queries), free(dout), free(out), free(lse);
}

static void test_cuda_attention(void) {
    static const AttentionCase cases[] = {
        {1, 1, 1, 2, 2, 64, 0, 0, 0},       {2, 5, 5, 4, 2, 64, 0, 0, 0},      {1, 63, 63, 3, 1, 64, 0, 0, 0},
        {1, 64, 64, 2, 2, 64, 8, 0, 0},     {1, 65, 65, 4, 2, 64, 0, 0, 0},    {1, 130, 130, 3, 1, 64, 0, 0, 0},
        {2, 210, 210, 2, 1, 64, 0, 1, 0},   {1, 1, 130, 4, 2, 64, 0, 0, 0},    {2, 70, 130, 2, 2, 64, 0, 1, 0},
        {1, 65, 65, 2, 1, 64, 2, 1, 0},     {2, 5, 5, 4, 2, 96, 0, 0, 0},      {1, 130, 130, 3, 1, 96, 0, 1, 0},
        {1, 3, 65, 2, 1, 96, 0, 0, 0},      {1, 65, 65, 2, 2, 96, 0, 0, 0},    {1, 63, 63, 2, 2, 128, 0, 0, 0},
        {1, 130, 130, 2, 1, 128, 0, 1, 0},  {1, 64, 64, 2, 1, 128, 0, 0, 0},   {2, 2, 66, 2, 1, 128, 0, 1, 0},
        {1, 130, 130, 3, 1, 48, 0, 0, 0},   {2, 64, 64, 2, 1, 48, 0, 1, 0},    {2, 65, 65, 2, 1, 80, 0, 1, 0},
        {1, 5, 64, 2, 2, 80, 0, 0, 0},      {2, 130, 130, 4, 2, 6, 0, 1, 0},   {1, 1, 1, 2, 1, 6, 0, 0, 0},
        {1, 35, 35, 2, 1, 256, 0, 1, 0},    {1, 5, 33, 2, 2, 250, 0, 0, 0},    {1, 65, 65, 2, 1, 64, 0, 0, 5},
        {2, 210, 210, 2, 1, 64, 0, 1, 40},  {1, 200, 200, 2, 2, 64, 0, 0, 64}, {1, 300, 300, 1, 1, 64, 0, 0, 2},
        {2, 70, 130, 2, 2, 64, 0, 0, 33},   {1, 1, 130, 4, 2, 64, 0, 0, 65},   {1, 130, 130, 3, 1, 96, 0, 1, 31},
        {1, 130, 130, 2, 1, 128, 0, 0, 17}, {2, 2, 66, 2, 1, 128, 0, 1, 60},   {1, 63, 63, 2, 2, 128, 0, 0, 200},
        {1, 130, 130, 3, 1, 48, 0, 0, 64},  {2, 65, 65, 2, 1, 80, 0, 1, 10},   {1, 5, 64, 2, 2, 80, 0, 0, 3},
        {2, 130, 130, 4, 2, 6, 0, 1, 65},   {1, 35, 35, 2, 1, 256, 0, 0, 16},  {1, 5, 33, 2, 2, 250, 0, 0, 20},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) attention_case(&cases[i]);

    Stream *stream = NULL; // of its own: it fails
    need(stream_create(&stream, PRECISION_BF16, 1), "start");
    AttentionShape wide = {1, 1, 1, 1, 1, 258, 258, 258, NULL, 0};
    attention_forward(NULL, NULL, NULL, NULL, NULL, wide, stream);
    check(stream_check(stream) != 0, "heads of 258 were accepted");
    check_message("heads of up to 256", "heads of 258");
    stream_destroy(stream);
}
