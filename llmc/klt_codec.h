// The transform codec, the part that is the same on the CPU and on the GPU: boundary tensors to messages and back with
// the tables the anchor has learned. It sees tensors only through the ops of klt.h or klt.cuh. The entropy coder runs
// on the host in both builds, a thread a piece of the message.
//
//   KltTable table;  klt_table_load(&table, blob, n_bytes, H, stream);     what has been shipped, klt_table.h
//   KltEnd end = {&table, &work, embed, budget, {0, 0}};
//   int64_t n_bytes = klt_encode(&end, &message, tokens, x, n, H, out, cap, stream);
//   if (klt_decode(&other_end, &message, tokens, out, n_bytes, x, n, H, stream)) ...
//
// One message: of each token x
//   c = x - offset - W e(token)          W the predictor, e the frozen embedding of the first checkpoint
//   y = U^T c                            U (H, K) the components kept
//   s = quantized y / step               klt_quantizer.h; step = table's * gain * size of this message
//   x' = offset + W e(token) + U y'      y' what the symbols stand for
// The size of a message is that of its whitened values, root of mean_{n,k} (y / sigma_k)^2, against the table's rms:
// the gradients of two steps differ in scale, the bytes should not. What a token's own size differs from it, in half
// octaves, travels before the token's symbols and moves the classes of all its components.
//
//   byte  size  little-endian
//      0     4  version of the table
//      4     4  step, fp32; 0: all values are 0. NaN: they were not finite, and none is afterwards
//   nothing more if step is 0 or NaN. Else entropy-coded, pieces of 256 tokens:
//            4  a piece: bytes of each
//               the pieces, streams of rans.h: of each token its scale, -15: all symbols are 0, else then K symbols
//   or fixed bits:
//               (n * bits of a token + 7) / 8 bytes, token after token, component after component, low bits first
//
// A controller keeps the average of the bytes at the budget: after each message
//   excess += bytes / budget - 1;   log gain += 0.3 (bytes / budget - 1) + 0.05 excess
// within -10 .. 10 and -3 .. 3. Only the sender has one: the step travels. A message of more than twice the budget is
// made again with a doubled step, so the size is bounded.
//
// No include guard: klt.h and klt.cuh include it once each, and a program that compares them has both.

// Memory that an end's messages pass through; ends that take turns share it.
typedef struct {
    Scratch device;
    void *host;
    size_t host_bytes;
} KltWork;

static inline void klt_work_free(KltWork *work) {
    device_free(work->device.data);
    device_host_free(work->host);
    memset(work, 0, sizeof *work);
}

// Host memory of n_bytes; NULL with a message without memory.
static inline void *klt_host(KltWork *work, size_t n_bytes) {
    if (n_bytes <= work->host_bytes) return work->host;
    device_host_free(work->host);
    work->host = device_host_alloc(n_bytes);
    work->host_bytes = work->host != NULL ? n_bytes : 0;
    if (work->host == NULL) error_set("out of memory for a message of the transform codec");
    return work->host;
}

static inline void klt_table_free(KltTable *table) {
    free(table->blob);
    free(table->coder);
    device_free(table->memory);
    memset(table, 0, sizeof *table);
}

// Values of a table's matrices, and floats of its other arrays, as klt_table_arrays lays them out.
static inline size_t klt_table_matrices(const KltHeader *head) {
    size_t H = (size_t)head->H, K = (size_t)head->K;
    return H * K * (head->flags & KLT_DUAL ? 2 : 1) + (head->flags & KLT_PREDICTED ? H * H : 0);
}
static inline size_t klt_table_floats(const KltHeader *head) {
    return klt_table_matrices(head) + (size_t)head->H + 4 * (size_t)head->K + 2 * KLT_CLASSES;
}

// Bytes of the backend's memory: the floats, and the matrices in bf16.
static inline size_t klt_table_memory(const KltHeader *head) {
    return sizeof(float) * klt_table_floats(head) + sizeof(uint16_t) * klt_table_matrices(head);
}

static inline void klt_table_arrays(KltTable *table) {
    size_t H = (size_t)table->head.H, K = (size_t)table->head.K, matrices = klt_table_matrices(&table->head);
    size_t dual = table->head.flags & KLT_DUAL ? H * K : 0, predictor = dual + H * K;
    float *full = table->memory;
    uint16_t *rounded = (uint16_t *)(void *)(full + klt_table_floats(&table->head));
    table->basis.full = full, table->basis.rounded = rounded;
    table->dual.full = full + dual, table->dual.rounded = rounded + dual;
    table->predictor.full = full + predictor, table->predictor.rounded = rounded + predictor;
    table->offset = full + matrices, table->weight = table->offset + H, table->grid = table->weight + K;
    table->half = table->grid + K, table->first_class = table->half + K, table->centroids = table->first_class + K;
}

// A matrix of n values from bf16 at `from`; returns where they end.
static inline const unsigned char *klt_take_matrix(KltMatrix to, const unsigned char *from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        memcpy(&to.rounded[i], from + 2 * i, 2);
        to.full[i] = float_of_bf16(to.rounded[i]);
    }
    return from + 2 * n;
}

// The arrays of a host image of table->memory from the blob. 0, or -1 with a message.
static inline int klt_table_parse(KltTable *table, float *image) {
    const KltHeader *head = &table->head;
    size_t H = (size_t)head->H, K = (size_t)head->K;
    int n_tables = klt_scales(head->flags) + 1;
    KltTable shape = *table;
    shape.memory = image;
    klt_table_arrays(&shape);
    const unsigned char *at = klt_take_matrix(shape.basis, table->blob + KLT_HEADER, H * K);
    if (head->flags & KLT_DUAL) at = klt_take_matrix(shape.dual, at, H * K);
    if (head->flags & KLT_OFFSET) memcpy(shape.offset, at, 4 * H), at += 4 * H;
    if (head->flags & KLT_PREDICTED) at = klt_take_matrix(shape.predictor, at, H * H);
    table->bits = table->blob + (at - table->blob), at += K;
    table->token_bits = 0;
    for (size_t k = 0; k < K; k++) {
        int number = table->bits[k];
        float sigma = head->step * exp2f(0.5f * (float)(number - KLT_CLASS_OF_ONE));
        if (head->flags & KLT_FIXED) {
            memcpy(&sigma, at + 4 * k, 4);
            if (number < 1 || number > KLT_MAX_BITS || !(sigma > 0.0f))
                return error_set("klt: a table with %d bits or a spread that is not positive", number);
            shape.half[k] = 0.5f * (float)((1 << number) - 1);
            shape.grid[k] = sigma * klt_reach(number, head->flags & KLT_STOCHASTIC) / shape.half[k];
            table->token_bits += number;
        } else if (number >= KLT_CLASSES) {
            return error_set("klt: a table with class %d", number);
        }
        shape.first_class[k] = (float)number, shape.weight[k] = 1.0f / (sigma * sigma);
    }
    for (size_t i = 0; i < klt_table_floats(head); i++)
        if (!isfinite(image[i])) return error_set("klt: a table with a value that is not finite");
    if (head->flags & KLT_FIXED) return 0;
    for (int i = 0; i < n_tables; i++, at += 2 * RANS_SYMBOLS) {
        uint16_t freq[RANS_SYMBOLS];
        memcpy(freq, at, sizeof freq);
        if (rans_table(&table->coder[i], freq)) return error_set("klt: a table whose frequencies do not add up");
    }
    for (int i = 0; i < 2 * KLT_CLASSES; i++) shape.centroids[i] = (float)(signed char)at[i] / 256.0f;
    return 0;
}

// Makes a table of a blob of n_bytes, which is copied. 0, or -1: it is none for H values, or there is no memory.
static inline int klt_table_load(KltTable *table, const void *blob, int64_t n_bytes, int H, Stream *stream) {
    memset(table, 0, sizeof *table);
    if (klt_table_head(&table->head, blob, n_bytes, H)) return -1;
    size_t n_memory = klt_table_memory(&table->head);
    float *image = (float *)calloc(n_memory, 1);
    table->blob = (unsigned char *)malloc((size_t)n_bytes), table->n_bytes = n_bytes;
    table->coder = (RansTable *)calloc((size_t)klt_scales(table->head.flags) + 1, sizeof(RansTable));
    table->memory = (float *)device_alloc(n_memory);
    int result = 0;
    if (image == NULL || table->blob == NULL || table->coder == NULL || table->memory == NULL)
        result = error_set("out of memory for a table of the transform codec");
    if (result == 0) memcpy(table->blob, blob, (size_t)n_bytes), result = klt_table_parse(table, image);
    if (result == 0) device_copy(table->memory, image, n_memory, stream);
    free(image);
    if (result == 0) {
        klt_table_arrays(table);
        return stream_check(stream);
    }
    klt_table_free(table);
    return -1;
}

static inline KltQuantizer klt_quantizer(const KltTable *table, float step, uint64_t key) {
    int fixed = (table->head.flags & KLT_FIXED) != 0;
    KltQuantizer q = {table->head.K,
                      (table->head.flags & KLT_STOCHASTIC) != 0,
                      step,
                      table->head.theta,
                      key,
                      fixed ? table->grid : NULL,
                      fixed ? table->half : NULL,
                      table->first_class,
                      table->centroids};
    return q;
}

// What a message's tensors need on the device, in one piece of scratch: values (n, H) on their way to and from a
// product, predictions (u, H) for the u <= n tokens there are of their kinds, projected values (n, K), sizes (n),
// symbols (n, K), scales (n), tokens (u) and which of them each row has (n).
typedef struct {
    float *predicted, *centered, *projected, *sizes;
    int16_t *symbols, *scales;
    uint32_t *tokens;
    int32_t *kinds;
} KltBuffers;

static inline int klt_buffers(KltBuffers *b, KltWork *work, int n, int H, int K) {
    size_t N = (size_t)n, wide = N * (size_t)H, narrow = (N * (size_t)K + 15) / 16 * 16, rows = (N + 15) / 16 * 16;
    size_t bytes = 4 * (2 * wide + narrow + 3 * rows) + 2 * (narrow + rows);
    float *at = (float *)scratch_get(&work->device, bytes);
    if (at == NULL) return -1;
    b->projected = at, b->sizes = at + narrow, b->tokens = (uint32_t *)(void *)(b->sizes + rows);
    b->kinds = (int32_t *)(void *)(b->tokens + rows);
    b->symbols = (int16_t *)(void *)(b->kinds + rows), b->scales = b->symbols + narrow;
    b->predicted = (float *)(void *)(b->scales + rows), b->centered = b->predicted + wide;
    return 0;
}

// out (n, cols) = a (n, inner) times `matrix`, which is stored (inner, cols), or (cols, inner) if transposed. Where the
// model's products round what they read, a is rounded too.
static inline void klt_product(float *out, const float *a, KltMatrix matrix, int transposed, int n, int cols, int inner,
                               Stream *stream) {
    int64_t ld = transposed ? inner : cols;
    if (!klt_rounds(n, stream)) {
        matmul_product(out, cols, a, inner, 0, matrix.full, ld, transposed, n, cols, inner, 0, 0, stream);
        return;
    }
    uint16_t *halves = (uint16_t *)scratch_get(&stream->scratch[SCRATCH_A], 2 * (size_t)n * (size_t)inner);
    if (halves == NULL) {
        stream->failed = 1;
        return;
    }
    bf16_round(halves, a, n, inner, inner, stream);
    matmul_product(out, cols, halves, inner, 0, matrix.rounded, ld, transposed, n, cols, inner, 1, 0, stream);
}

// The kinds of tokens in the order of their first rows, and which kind each of the n rows has; returns how many there
// are. seen (klt_kinds_slots(n)): memory.
static inline size_t klt_kinds_slots(int n) {
    size_t slots = 64;
    while (slots < 2 * (size_t)n) slots *= 2;
    return slots;
}
static inline int klt_kinds(uint32_t *distinct, int32_t *kinds, const uint32_t *tokens, int n, int32_t *seen) {
    size_t slots = klt_kinds_slots(n);
    int n_kinds = 0;
    for (size_t i = 0; i < slots; i++) seen[i] = -1;
    for (int t = 0; t < n; t++) {
        size_t at = tokens[t] * 2654435761u & (slots - 1);
        while (seen[at] >= 0 && distinct[seen[at]] != tokens[t]) at = (at + 1) & (slots - 1);
        if (seen[at] < 0) distinct[n_kinds] = tokens[t], seen[at] = n_kinds++;
        kinds[t] = seen[at];
    }
    return n_kinds;
}

// Host memory of a message: sizes, symbols and scales, and room for pieces; before them klt_predict's kinds.
static inline size_t klt_host_bytes(int n, int K, int64_t room) {
    size_t kinds = 4 * (2 * (size_t)n + klt_kinds_slots(n));
    size_t symbols = 4 * (size_t)n + 2 * (size_t)n * (size_t)(K + 1) + (size_t)room;
    return kinds > symbols ? kinds : symbols;
}

// b->predicted = W e(token) of each kind of token, where the table has a predictor; returns it, or NULL. Text says the
// same tokens again and again, and a prediction takes nothing else. host: 4 * (2 n + klt_kinds_slots(n)) bytes.
static inline const float *klt_predict(const KltEnd *end, KltBuffers *b, const uint32_t *tokens, int n, int H,
                                       void *host, Stream *stream) {
    const KltTable *table = end->table;
    if (!(table->head.flags & KLT_PREDICTED) || tokens == NULL) return NULL;
    uint32_t *distinct = (uint32_t *)host;
    int32_t *kinds = (int32_t *)(void *)(distinct + n);
    int n_kinds = klt_kinds(distinct, kinds, tokens, n, kinds + n);
    device_copy(b->tokens, distinct, sizeof *distinct * (size_t)n_kinds, stream);
    device_copy(b->kinds, kinds, sizeof *kinds * (size_t)n, stream);
    klt_embed(b->centered, b->tokens, end->embed, n_kinds, H, stream);
    klt_product(b->predicted, b->centered, table->predictor, 1, n_kinds, H, H, stream);
    return b->predicted;
}

// 0, or -1 with a message: the predictor's inputs are missing.
static inline int klt_has_inputs(const KltEnd *end, const uint32_t *tokens) {
    if (!(end->table->head.flags & KLT_PREDICTED) || (tokens != NULL && end->embed != NULL)) return 0;
    return error_set("klt: a table with a predictor, and no tokens or embedding to predict from");
}

// A token's scale: half octaves from the message's size, with the gain on the step as more of them.
static inline int klt_scale(double size, double unit) {
    double half_octaves = size > 0.0 ? 2.0 * log2(size / unit) : -KLT_SCALE_MAX;
    return half_octaves <= -KLT_SCALE_MAX  ? -KLT_SCALE_MAX
           : half_octaves >= KLT_SCALE_MAX ? KLT_SCALE_MAX
                                           : (int)lround(half_octaves);
}

// What components first .. first+count-1 of a token are coded with: the table, the bits that travel as they are, and
// the sign that the context of a draw gives the symbol.
typedef struct {
    int coder[KLT_RUN], shift[KLT_RUN], sign[KLT_RUN];
} KltRun;

static inline int klt_run(KltRun *run, const KltTable *table, uint64_t key, int token, int scale, int first) {
    int count = table->head.K - first < KLT_RUN ? table->head.K - first : KLT_RUN;
    const unsigned char *bits = table->bits + first;
    uint32_t draws[KLT_RUN];
#pragma omp simd
    for (int i = 0; i < count; i++)
        run->coder[i] = klt_class(bits[i], scale), run->shift[i] = klt_shift(run->coder[i]), run->sign[i] = 1;
    if (!(table->head.flags & KLT_STOCHASTIC)) return count;
    klt_draws_run(draws, key, token, first);
#pragma omp simd
    for (int i = 0; i < count; i++)
        run->coder[i] = run->coder[i] * KLT_CONTEXTS + klt_context(draws[i]), run->sign[i] = klt_sign(draws[i]);
    return count;
}

// symbols (K) of one token.
static inline void klt_write_token(RansWriter *writer, const KltTable *table, uint64_t key, int token, int scale,
                                   const int16_t *symbols) {
    RansWriter w = *writer; // in registers
    int K = table->head.K, any = 0;
    KltRun run;
    for (int k = 0; k < K; k++) any |= symbols[k];
    int sent = any != 0 ? scale : KLT_SILENT;
    for (int first = (K - 1) / KLT_RUN * KLT_RUN; first >= 0 && any != 0; first -= KLT_RUN)
        for (int i = klt_run(&run, table, key, token, scale, first) - 1; i >= 0; i--)
            rans_write_symbol(&w, &table->coder[run.coder[i]], run.shift[i], run.sign[i] * symbols[first + i]);
    rans_write_symbol(&w, &table->coder[klt_scales(table->head.flags)], 0, sent);
    *writer = w;
}

// The next token's scale; 0 and no symbols follow if it is silent.
static inline int klt_read_scale(RansReader *r, const KltTable *table, int16_t *scale) {
    *scale = (int16_t)rans_read_symbol(r, &table->coder[klt_scales(table->head.flags)], 0);
    return *scale != KLT_SILENT;
}

static inline int16_t klt_read_one(RansReader *r, const KltTable *table, const KltRun *run, int i) {
    return (int16_t)(run->sign[i] * rans_read_symbol(r, &table->coder[run->coder[i]], run->shift[i]));
}

// Symbols (K) of the next token, whose scale has been read.
static inline void klt_read_token(RansReader *reader, const KltTable *table, uint64_t key, int token, int scale,
                                  int16_t *symbols) {
    RansReader r = *reader; // in registers
    KltRun run;
    for (int first = 0; first < table->head.K; first += KLT_RUN) {
        int count = klt_run(&run, table, key, token, scale, first);
        for (int i = 0; i < count; i++) symbols[first + i] = klt_read_one(&r, table, &run, i);
    }
    *reader = r;
}

// The same of two streams at once: each waits for itself only, so that two take little longer than one.
static inline void klt_read_tokens(RansReader readers[2], const KltTable *table, uint64_t key, const int tokens[2],
                                   const int16_t *scales, int16_t *symbols) {
    RansReader a = readers[0], b = readers[1];
    size_t K = (size_t)table->head.K;
    int16_t *to_a = symbols + (size_t)tokens[0] * K, *to_b = symbols + (size_t)tokens[1] * K;
    KltRun run_a, run_b;
    for (int first = 0; first < table->head.K; first += KLT_RUN) {
        int count = klt_run(&run_a, table, key, tokens[0], scales[tokens[0]], first);
        klt_run(&run_b, table, key, tokens[1], scales[tokens[1]], first);
        for (int i = 0; i < count; i++) {
            to_a[first + i] = klt_read_one(&a, table, &run_a, i);
            to_b[first + i] = klt_read_one(&b, table, &run_b, i);
        }
    }
    readers[0] = a, readers[1] = b;
}

// Symbols (n, K) and scales (n) as pieces; `room` is a buffer of room_bytes to write them in. Bytes of the message, or
// -1: more than `most`.
static inline int64_t klt_write_pieces(const KltTable *table, uint64_t key, const int16_t *symbols,
                                       const int16_t *scales, int n, unsigned char *out, int64_t most,
                                       unsigned char *room, int64_t room_bytes, Stream *stream) {
    int n_pieces = klt_pieces(n);
    int64_t each = room_bytes / n_pieces, at = KLT_MESSAGE_HEADER + 4 * (int64_t)n_pieces;
    int full = 0;
#pragma omp parallel for num_threads(stream->threads) reduction(| : full)
    for (int p = 0; p < n_pieces; p++) {
        RansWriter w;
        int first = p * KLT_PIECE, last = first + KLT_PIECE < n ? first + KLT_PIECE : n;
        rans_write_begin(&w, room + p * each + 4, each - 4);
        for (int t = last - 1; t >= first && !w.full; t--)
            klt_write_token(&w, table, key, t, scales[t], symbols + (size_t)t * (size_t)table->head.K);
        int64_t n_bytes = rans_write_end(&w);
        uint32_t size = n_bytes < 0 ? 0 : (uint32_t)n_bytes;
        memcpy(room + p * each, &size, 4);
        full |= n_bytes < 0;
    }
    for (int p = 0; p < n_pieces && !full; p++) {
        uint32_t size;
        memcpy(&size, room + p * each, 4);
        if (at + size > most) return -1;
        memcpy(out + KLT_MESSAGE_HEADER + 4 * p, &size, 4);
        memcpy(out + at, room + (p + 1) * each - size, size);
        at += size;
    }
    return full ? -1 : at;
}

static inline int64_t klt_fixed_bytes(const KltTable *table, int n) {
    return KLT_MESSAGE_HEADER + (table->token_bits * n + 7) / 8;
}

static inline void klt_write_fixed(const KltTable *table, const int16_t *symbols, int n, unsigned char *out) {
    uint64_t pending = 0;
    int n_pending = 0;
    unsigned char *at = out + KLT_MESSAGE_HEADER;
    for (int t = 0; t < n; t++) {
        for (int k = 0; k < table->head.K; k++) {
            pending |= (uint64_t)symbols[(size_t)t * (size_t)table->head.K + (size_t)k] << n_pending;
            n_pending += table->bits[k];
            for (; n_pending >= 8; n_pending -= 8, pending >>= 8) *at++ = (unsigned char)pending;
        }
    }
    if (n_pending > 0) *at = (unsigned char)pending;
}

static inline void klt_read_fixed(const KltTable *table, int16_t *symbols, int n, const unsigned char *in) {
    uint64_t pending = 0;
    int n_pending = 0;
    const unsigned char *at = in + KLT_MESSAGE_HEADER;
    for (int t = 0; t < n; t++) {
        for (int k = 0; k < table->head.K; k++) {
            int bits = table->bits[k];
            for (; n_pending < bits; n_pending += 8) pending |= (uint64_t)*at++ << n_pending;
            symbols[(size_t)t * (size_t)table->head.K + (size_t)k] = (int16_t)(pending & ((1u << bits) - 1u));
            pending >>= bits, n_pending -= bits;
        }
    }
}

static inline void klt_put_header(unsigned char *out, uint32_t version, float step) {
    memcpy(out, &version, 4);
    memcpy(out + 4, &step, 4);
}

static inline int64_t klt_most(const KltEnd *end, int n) {
    return klt_most_bytes(end->budget, n);
}

// After a message of n tokens.
static inline void klt_control(KltEnd *end, int64_t n_bytes, int n) {
    double error = (double)n_bytes / (end->budget * n) - 1.0;
    double *log_gain = &end->control[0], *excess = &end->control[1];
    *excess = fmin(fmax(*excess + error, -10.0), 10.0);
    *log_gain = fmin(fmax(*log_gain + 0.3 * error + 0.05 * *excess, -3.0), 3.0);
}

// Quantizes and codes b->projected (n, K) with the step it is given; bytes, or -1: they are more than `most`, or the
// stream has failed. unit: a token's size at scale 0.
static inline int64_t klt_code(const KltEnd *end, KltBuffers *b, float step, double unit, uint64_t key,
                               const float *sizes, int n, unsigned char *out, int64_t most, Stream *stream) {
    const KltTable *table = end->table;
    size_t n_symbols = (size_t)n * (size_t)table->head.K;
    int16_t *symbols = (int16_t *)(void *)(sizes + n), *scales = symbols + n_symbols;
    unsigned char *room = (unsigned char *)(scales + n);
    klt_quantize(b->symbols, b->projected, klt_quantizer(table, step, key), n, stream);
    device_copy(symbols, b->symbols, sizeof *symbols * n_symbols, stream);
    if (stream_check(stream)) return -1;
    klt_put_header(out, table->head.version, step);
    if (table->head.flags & KLT_FIXED) {
        klt_write_fixed(table, symbols, n, out);
        return klt_fixed_bytes(table, n);
    }
    for (int t = 0; t < n; t++) scales[t] = (int16_t)klt_scale(sqrt((double)sizes[t]), unit);
    return klt_write_pieces(table, key, symbols, scales, n, out, most, room, 4 * klt_most(end, n), stream);
}

// Writes x (n, H) as a message into out, and moves the controller. tokens (n): host memory, for tables with a
// predictor. Returns its bytes, or -1: cap is less than what a message may need, no memory, or the stream has failed.
static inline int64_t klt_encode(KltEnd *end, const KltMessage *message, const uint32_t *tokens, const floatX *x, int n,
                                 int H, void *out, int64_t cap, Stream *stream) {
    const KltTable *table = end->table;
    int K = table->head.K, fixed = (table->head.flags & KLT_FIXED) != 0;
    int64_t most = fixed ? klt_fixed_bytes(table, n) : klt_most(end, n), n_bytes = -1;
    size_t host_bytes = klt_host_bytes(n, K, 4 * klt_most(end, n));
    KltBuffers b;
    double mean = 0.0;
    if (most > cap)
        return error_set("klt: a message may have %lld bytes, the buffer %lld", (long long)most, (long long)cap);
    if (klt_has_inputs(end, tokens)) return -1;
    float *sizes = (float *)klt_host((KltWork *)end->work, host_bytes);
    if (sizes == NULL || klt_buffers(&b, (KltWork *)end->work, n, H, K)) return -1;
    const float *predicted = klt_predict(end, &b, tokens, n, H, sizes, stream);
    klt_center(b.centered, x, table->head.flags & KLT_OFFSET ? table->offset : NULL, predicted, b.kinds, n, H, stream);
    klt_product(b.projected, b.centered, table->basis, 0, n, K, H, stream);
    klt_measure(b.sizes, b.projected, table->weight, n, K, stream);
    device_copy(sizes, b.sizes, sizeof *sizes * (size_t)n, stream);
    for (int t = 0; t < n; t++) mean += (double)sizes[t] / n;
    double size = sqrt(mean) / (double)table->head.rms, gain = exp(end->control[0]);
    uint64_t key = klt_message_key(message);
    if (!(size > 0.0) || !isfinite(size)) {
        klt_put_header((unsigned char *)out, table->head.version, size == 0.0 ? 0.0f : NAN);
        return stream_check(stream) ? -1 : KLT_MESSAGE_HEADER;
    }
    for (int tries = 0; n_bytes < 0 && tries < 64 && !stream->failed; tries++, gain *= 2.0) {
        double step = fixed ? size : (double)table->head.step * size * gain;
        n_bytes = klt_code(end, &b, (float)step, size * gain * (double)table->head.rms, key, sizes, n,
                           (unsigned char *)out, most, stream);
    }
    if (n_bytes < 0) return stream->failed ? -1 : error_set("klt: a message cannot be made small enough");
    if (!fixed) klt_control(end, n_bytes, n);
    return n_bytes;
}

// Where piece p of a message lies; the sizes add up to the message's.
static inline int klt_open_piece(RansReader *r, const unsigned char *in, int n_pieces, int p) {
    int64_t from = KLT_MESSAGE_HEADER + 4 * (int64_t)n_pieces;
    uint32_t size = 0;
    for (int i = 0; i <= p; i++) from += size, memcpy(&size, in + KLT_MESSAGE_HEADER + 4 * i, 4);
    return rans_read_begin(r, in + from, size);
}

// Pieces p and, if there is one, p + 1. 0, or -1.
static inline int klt_read_two(const KltTable *table, uint64_t key, int16_t *symbols, int16_t *scales, int n,
                               const unsigned char *in, int p) {
    int n_pieces = klt_pieces(n), n_readers = p + 1 < n_pieces ? 2 : 1;
    RansReader readers[2];
    for (int i = 0; i < n_readers; i++)
        if (klt_open_piece(&readers[i], in, n_pieces, p + i)) return -1;
    for (int t = 0; t < KLT_PIECE; t++) {
        int tokens[2] = {p * KLT_PIECE + t, (p + 1) * KLT_PIECE + t}, follow[2] = {0, 0};
        for (int i = 0; i < n_readers; i++)
            follow[i] = tokens[i] < n && klt_read_scale(&readers[i], table, &scales[tokens[i]]);
        if (follow[0] && follow[1]) {
            klt_read_tokens(readers, table, key, tokens, scales, symbols);
            continue;
        }
        for (int i = 0; i < n_readers; i++)
            if (follow[i])
                klt_read_token(&readers[i], table, key, tokens[i], scales[tokens[i]],
                               symbols + (size_t)tokens[i] * (size_t)table->head.K);
    }
    int failed = 0;
    for (int i = 0; i < n_readers; i++) failed |= rans_read_end(&readers[i]);
    return failed;
}

// Symbols (n, K) and scales (n) of a message's pieces. 0, or -1: they are not what a sender writes.
static inline int klt_read_pieces(const KltTable *table, uint64_t key, int16_t *symbols, int16_t *scales, int n,
                                  const unsigned char *in, int64_t n_bytes, Stream *stream) {
    int n_pieces = klt_pieces(n), failed = 0;
    int64_t sum = KLT_MESSAGE_HEADER + 4 * (int64_t)n_pieces;
    if (n_bytes < sum) return -1;
    for (int p = 0; p < n_pieces; p++) {
        uint32_t size;
        memcpy(&size, in + KLT_MESSAGE_HEADER + 4 * p, 4);
        sum += size;
    }
    if (sum != n_bytes) return -1;
#pragma omp parallel for num_threads(stream->threads) reduction(| : failed)
    for (int p = 0; p < n_pieces; p += 2) failed |= klt_read_two(table, key, symbols, scales, n, in, p);
    return failed ? -1 : 0;
}

// The symbols of a whole message. 0, or -1 with a message.
static inline int klt_read(const KltTable *table, uint64_t key, int16_t *symbols, int16_t *scales, float *step, int n,
                           const unsigned char *in, int64_t n_bytes, Stream *stream) {
    uint32_t version;
    if (n_bytes < KLT_MESSAGE_HEADER) return error_set("klt: a message of %lld bytes", (long long)n_bytes);
    memcpy(&version, in, 4);
    memcpy(step, in + 4, 4);
    if (version != table->head.version)
        return error_set("klt: a message of table %u where table %u is in use", version, table->head.version);
    memset(symbols, 0, sizeof *symbols * (size_t)n * (size_t)table->head.K);
    memset(scales, 0, sizeof *scales * (size_t)n);
    if (n_bytes == KLT_MESSAGE_HEADER && (*step == 0.0f || isnan(*step))) return 0;
    if (!(*step > 0.0f) || !isfinite(*step)) return error_set("klt: a message whose step is %g", (double)*step);
    if (table->head.flags & KLT_FIXED) {
        if (n_bytes != klt_fixed_bytes(table, n))
            return error_set("klt: a message of %lld bytes where %lld are expected", (long long)n_bytes,
                             (long long)klt_fixed_bytes(table, n));
        klt_read_fixed(table, symbols, n, in);
        return 0;
    }
    if (klt_read_pieces(table, key, symbols, scales, n, in, n_bytes, stream))
        return error_set("klt: a message of %lld bytes is damaged", (long long)n_bytes);
    return 0;
}

// x (n, H) = the message `in`. Returns 0, or -1 with x untouched: the bytes are not a message of this table (nothing
// beyond n_bytes is read), no memory, or the stream has failed.
static inline int klt_decode(const KltEnd *end, const KltMessage *message, const uint32_t *tokens, const void *in,
                             int64_t n_bytes, floatX *x, int n, int H, Stream *stream) {
    const KltTable *table = end->table;
    int K = table->head.K;
    size_t n_symbols = (size_t)n * (size_t)K;
    float step = 0.0f;
    uint64_t key = klt_message_key(message);
    KltBuffers b;
    if (klt_has_inputs(end, tokens)) return -1;
    int16_t *symbols = (int16_t *)klt_host((KltWork *)end->work, klt_host_bytes(n, K, 0));
    if (symbols == NULL || klt_buffers(&b, (KltWork *)end->work, n, H, K)) return -1;
    int16_t *scales = symbols + n_symbols;
    if (klt_read(table, key, symbols, scales, &step, n, (const unsigned char *)in, n_bytes, stream)) return -1;
    int silent = step == 0.0f && (table->head.flags & KLT_FIXED); // no level of a component need be 0
    KltQuantizer q = klt_quantizer(table, step, key);
    if (silent) q.half = q.grid = NULL;
    device_copy(b.symbols, symbols, sizeof *symbols * n_symbols, stream);
    device_copy(b.scales, scales, sizeof *scales * (size_t)n, stream);
    klt_restore(b.projected, b.symbols, b.scales, q, n, stream);
    const float *predicted = klt_predict(end, &b, tokens, n, H, symbols, stream);
    klt_product(b.centered, b.projected, table->dual, 1, n, H, K, stream);
    klt_place(x, b.centered, table->head.flags & KLT_OFFSET ? table->offset : NULL, predicted, b.kinds, n, H, stream);
    return stream_check(stream);
}
