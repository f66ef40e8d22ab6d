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

// Memory that messages pass through: what is wide serves one after the other, the rest is a message's until it is sent.
typedef struct {
    Scratch wide, device;
    void *host;
    size_t host_bytes;
} KltWork;

static inline void klt_work_free(KltWork *work) {
    device_free(work->wide.data);
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

// What a message's tensors need on the device. Of the wide memory: values (n, H) on their way to and from a product,
// predictions (u, H) for the u <= n tokens there are of their kinds, tokens (u) and which of them each row has (n). Of
// the message's own: projected values (n, K), sizes (n), symbols (n, K), scales (n).
typedef struct {
    float *predicted, *centered, *projected, *sizes;
    int16_t *symbols, *scales;
    uint32_t *tokens;
    int32_t *kinds;
} KltBuffers;

static inline size_t klt_rounded_up(size_t n) {
    return (n + 15) / 16 * 16;
}
static inline size_t klt_wide_bytes(size_t n, size_t H) {
    return 4 * (2 * n * H + 2 * klt_rounded_up(n));
}
static inline size_t klt_own_bytes(size_t n, size_t K) {
    return 4 * (klt_rounded_up(n * K) + klt_rounded_up(n)) + 2 * (klt_rounded_up(n * K) + klt_rounded_up(n));
}

static inline int klt_buffers(KltBuffers *b, KltWork *wide, KltWork *own, int n, int H, int K) {
    size_t N = (size_t)n, values = N * (size_t)H, narrow = klt_rounded_up(N * (size_t)K), rows = klt_rounded_up(N);
    float *at = (float *)scratch_get(&wide->wide, klt_wide_bytes(N, (size_t)H));
    float *kept = (float *)scratch_get(&own->device, klt_own_bytes(N, (size_t)K));
    if (at == NULL || kept == NULL) return -1;
    b->predicted = at, b->centered = at + values;
    b->tokens = (uint32_t *)(void *)(b->centered + values), b->kinds = (int32_t *)(void *)(b->tokens + rows);
    b->projected = kept, b->sizes = kept + narrow;
    b->symbols = (int16_t *)(void *)(b->sizes + rows), b->scales = b->symbols + narrow;
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

// A message on its way out of klt_encode_begin: what klt_encode_end needs should it be too long.
typedef struct {
    KltCoding coding;
    KltBuffers b;
    const float *sizes; // (n) on the host
    double size, gain;  // of the message, of its step
    int whole;          // all of it is in the header
} KltSending;

// Quantizes b.projected (n, K) with the gain at hand: symbols and scales to the host, and the header.
static inline void klt_quantize_message(KltSending *m, Stream *stream) {
    KltCoding *c = &m->coding;
    const KltHeader *head = &c->table->head;
    double unit = m->size * m->gain * (double)head->rms;
    float step = (float)(head->flags & KLT_FIXED ? m->size : (double)head->step * m->size * m->gain);
    size_t n_symbols = (size_t)c->n * (size_t)head->K;
    klt_quantize(m->b.symbols, m->b.projected, klt_quantizer(c->table, step, c->key), c->n, stream);
    device_copy(c->symbols, m->b.symbols, sizeof *c->symbols * n_symbols, stream);
    for (int t = 0; t < c->n; t++) c->scales[t] = (int16_t)klt_scale(sqrt((double)m->sizes[t]), unit);
    klt_put_header(c->bytes, head->version, step);
}

// What comes of x (n, H) before it is coded, `out` (cap) being where the message will lie and `own` memory that is the
// message's until klt_encode_end. tokens (n): host memory, for tables with a predictor. Returns 0, or -1: cap is less
// than what a message may need, no memory, or the stream has failed.
static inline int klt_encode_begin(KltEnd *end, KltSending *m, KltWork *own, const KltMessage *message,
                                   const uint32_t *tokens, const floatX *x, int n, int H, void *out, int64_t cap,
                                   Stream *stream) {
    const KltTable *table = end->table;
    int K = table->head.K;
    int64_t most = table->head.flags & KLT_FIXED ? klt_fixed_bytes(table, n) : klt_most(end, n);
    int64_t room_bytes = 4 * klt_most(end, n);
    double mean = 0.0;
    if (most > cap)
        return error_set("klt: a message may have %lld bytes, the buffer %lld", (long long)most, (long long)cap);
    if (klt_has_inputs(end, tokens)) return -1;
    float *sizes = (float *)klt_host(own, klt_host_bytes(n, K, room_bytes));
    if (sizes == NULL || klt_buffers(&m->b, (KltWork *)end->work, own, n, H, K)) return -1;
    int16_t *symbols = (int16_t *)(void *)(sizes + n), *scales = symbols + (size_t)n * (size_t)K;
    KltCoding coding = {table,
                        klt_message_key(message),
                        n,
                        stream->threads,
                        symbols,
                        scales,
                        (unsigned char *)out,
                        most,
                        (unsigned char *)(scales + n),
                        room_bytes,
                        0,
                        0};
    const float *predicted = klt_predict(end, &m->b, tokens, n, H, sizes, stream);
    klt_center(m->b.centered, x, table->head.flags & KLT_OFFSET ? table->offset : NULL, predicted, m->b.kinds, n, H,
               stream);
    klt_product(m->b.projected, m->b.centered, table->basis, 0, n, K, H, stream);
    klt_measure(m->b.sizes, m->b.projected, table->weight, n, K, stream);
    device_copy(sizes, m->b.sizes, sizeof *sizes * (size_t)n, stream);
    for (int t = 0; t < n; t++) mean += (double)sizes[t] / n;
    m->coding = coding, m->sizes = sizes;
    m->size = sqrt(mean) / (double)table->head.rms, m->gain = exp(end->control[0]);
    m->whole = !(m->size > 0.0) || !isfinite(m->size);
    if (!m->whole) klt_quantize_message(m, stream);
    if (m->whole) klt_put_header(coding.bytes, table->head.version, m->size == 0.0 ? 0.0f : NAN);
    return stream_check(stream);
}

// After klt_coding_write of a message that is not whole: its bytes, and the controller moves; or -1. Where they are too
// many the symbols are made and coded again.
static inline int64_t klt_encode_end(KltEnd *end, KltSending *m, Stream *stream) {
    KltCoding *c = &m->coding;
    if (m->whole) return KLT_MESSAGE_HEADER;
    for (int tries = 1; c->n_bytes < 0 && tries < 64 && !stream->failed; tries++) {
        m->gain *= 2.0;
        klt_quantize_message(m, stream);
        if (stream_check(stream) == 0) klt_coding_write(c);
    }
    if (stream_check(stream)) return -1;
    if (c->n_bytes < 0) return error_set("klt: a message cannot be made small enough");
    if (!(c->table->head.flags & KLT_FIXED)) klt_control(end, c->n_bytes, c->n);
    return c->n_bytes;
}

// Writes x (n, H) as a message into out, and moves the controller: begin, write and end at once. Its bytes, or -1.
static inline int64_t klt_encode(KltEnd *end, const KltMessage *message, const uint32_t *tokens, const floatX *x, int n,
                                 int H, void *out, int64_t cap, Stream *stream) {
    KltSending m;
    memset(&m, 0, sizeof m);
    if (klt_encode_begin(end, &m, (KltWork *)end->work, message, tokens, x, n, H, out, cap, stream)) return -1;
    if (!m.whole) klt_coding_write(&m.coding);
    return klt_encode_end(end, &m, stream);
}

// A message of n tokens before it is read, `in` staying where it is and `own` being the message's until klt_decode_end.
// 0, or -1 with a message: its header is none of this table.
static inline int klt_decode_begin(const KltEnd *end, KltCoding *c, KltWork *own, const KltMessage *message,
                                   const void *in, int64_t n_bytes, int n, int threads) {
    const KltTable *table = end->table;
    int K = table->head.K;
    uint32_t version;
    float step;
    if (n_bytes < KLT_MESSAGE_HEADER) return error_set("klt: a message of %lld bytes", (long long)n_bytes);
    memcpy(&version, in, 4);
    memcpy(&step, (const char *)in + 4, 4);
    if (version != table->head.version)
        return error_set("klt: a message of table %u where table %u is in use", version, table->head.version);
    if (n_bytes == KLT_MESSAGE_HEADER ? !(step == 0.0f || isnan(step)) : !(step > 0.0f) || !isfinite(step))
        return error_set("klt: a message of %lld bytes whose step is %g", (long long)n_bytes, (double)step);
    int16_t *symbols = (int16_t *)klt_host(own, klt_host_bytes(n, K, 0));
    if (symbols == NULL) return -1;
    KltCoding coding = {table,
                        klt_message_key(message),
                        n,
                        threads,
                        symbols,
                        symbols + (size_t)n * (size_t)K,
                        (unsigned char *)in,
                        n_bytes,
                        NULL,
                        0,
                        n_bytes,
                        0};
    *c = coding;
    return 0;
}

// x (n, H) = the message that klt_coding_read has read. Returns 0, or -1 with x untouched: the bytes are not a message
// of this table, no memory, or the stream has failed.
static inline int klt_decode_end(const KltEnd *end, const KltCoding *c, const uint32_t *tokens, floatX *x, int H,
                                 Stream *stream) {
    const KltTable *table = c->table;
    int n = c->n, K = table->head.K;
    KltBuffers b;
    float step;
    if (c->failed) return error_set("klt: a message of %lld bytes is damaged", (long long)c->n_bytes);
    if (klt_has_inputs(end, tokens) || klt_buffers(&b, (KltWork *)end->work, (KltWork *)end->work, n, H, K)) return -1;
    memcpy(&step, c->bytes + 4, 4);
    int silent = step == 0.0f && (table->head.flags & KLT_FIXED); // no level of a component need be 0
    KltQuantizer q = klt_quantizer(table, step, c->key);
    if (silent) q.half = q.grid = NULL;
    device_copy(b.symbols, c->symbols, sizeof *c->symbols * (size_t)n * (size_t)K, stream);
    device_copy(b.scales, c->scales, sizeof *c->scales * (size_t)n, stream);
    klt_restore(b.projected, b.symbols, b.scales, q, n, stream);
    const float *predicted = klt_predict(end, &b, tokens, n, H, c->symbols, stream);
    klt_product(b.centered, b.projected, table->dual, 1, n, H, K, stream);
    klt_place(x, b.centered, table->head.flags & KLT_OFFSET ? table->offset : NULL, predicted, b.kinds, n, H, stream);
    return stream_check(stream);
}

// x (n, H) = the message `in`: begin, read and end at once. Nothing beyond n_bytes is read.
static inline int klt_decode(const KltEnd *end, const KltMessage *message, const uint32_t *tokens, const void *in,
                             int64_t n_bytes, floatX *x, int n, int H, Stream *stream) {
    KltCoding c;
    memset(&c, 0, sizeof c);
    if (klt_has_inputs(end, tokens)) return -1;
    if (klt_decode_begin(end, &c, (KltWork *)end->work, message, in, n_bytes, n, stream->threads)) return -1;
    klt_coding_read(&c);
    return klt_decode_end(end, &c, tokens, x, H, stream);
}
