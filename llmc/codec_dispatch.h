// Which codec a message goes to, the same on the CPU and on a device: part of codec.h and of codec.cuh, which bring
// codec_mask_encode, codec_encode_dense, the other codecs and their decoders. No include guard: a program that has both
// backends, each in its namespace, includes it twice.

// The end of a klt message; NULL with a message: no table has come yet.
static inline KltEnd *codec_klt_end(CodecEnd *end, const CodecContext *context) {
    KltEnd *klt = &end->klt[context->direction];
    if (klt->table != NULL) return klt;
    error_set("klt: there is no table yet for boundary %d; the anchor brings them", context->boundary);
    return NULL;
}

static inline KltMessage codec_klt_message(const Codec *codec, const CodecContext *context) {
    KltMessage message = {codec->seed, context->replica, context->boundary, context->step, context->micro_batch};
    return message;
}

static inline int64_t codec_klt_encode(const Codec *codec, CodecEnd *end, const CodecContext *context, const floatX *x,
                                       int n, int H, void *out, int64_t cap, Stream *stream) {
    KltEnd *klt = codec_klt_end(end, context);
    KltMessage message = codec_klt_message(codec, context);
    if (klt == NULL) return -1;
    KltEnd before = *klt;
    int64_t n_bytes = klt_encode(klt, &message, context->tokens, x, n, H, out, cap, stream);
    if (!context->training) *klt = before; // a look at the model moves no controller
    return n_bytes;
}

static inline int codec_klt_decode(const Codec *codec, CodecEnd *end, const CodecContext *context, const void *in,
                                   int64_t n_bytes, floatX *x, int n, int H, Stream *stream) {
    const KltEnd *klt = codec_klt_end(end, context);
    KltMessage message = codec_klt_message(codec, context);
    return klt == NULL ? -1 : klt_decode(klt, &message, context->tokens, in, n_bytes, x, n, H, stream);
}

// Writes x (n, H) as a message into out. Returns its bytes, at most codec_cap() of them, or -1: they are more than cap,
// the context is none the codec can tell apart (mask_check), or the stream has failed.
static inline int64_t codec_encode(const Codec *codec, CodecEnd *end, const CodecContext *context, const floatX *x,
                                   int n, int H, void *out, int64_t cap, Stream *stream) {
    switch (codec_is_dense(codec, context, H) ? CODEC_NONE : codec->kind) {
    case CODEC_MASK: return codec_mask_encode(codec, context, x, n, H, out, cap, stream);
    case CODEC_QUANT8:
    case CODEC_QUANT4:
    case CODEC_TAHQUANT: return codec_quant_encode(codec, context, x, n, H, out, cap, stream);
    case CODEC_TOPK: return codec_topk_encode(codec, end, context, x, n, H, out, cap, stream);
    case CODEC_BOTTLENECK: return codec_bottleneck_encode(codec, end, context, x, n, H, out, cap, stream);
    case CODEC_AQSGD: return codec_aqsgd_encode(codec, end, context, x, n, H, out, cap, stream);
    case CODEC_KLT: return codec_klt_encode(codec, end, context, x, n, H, out, cap, stream);
    default: return codec_encode_dense(codec, x, (int64_t)n * H, out, cap, stream);
    }
}

// x (n, H) = the message `in`. Returns 0, or -1: the bytes are no such message or the context is none the codec can
// tell apart, and x is untouched; or the stream has failed.
static inline int codec_decode(const Codec *codec, CodecEnd *end, const CodecContext *context, const void *in,
                               int64_t n_bytes, floatX *x, int n, int H, Stream *stream) {
    switch (codec_is_dense(codec, context, H) ? CODEC_NONE : codec->kind) {
    case CODEC_MASK: return codec_mask_decode(codec, context, in, n_bytes, x, n, H, stream);
    case CODEC_QUANT8:
    case CODEC_QUANT4:
    case CODEC_TAHQUANT: return codec_quant_decode(codec, context, in, n_bytes, x, n, H, stream);
    case CODEC_TOPK: return codec_topk_decode(codec, end, context, in, n_bytes, x, n, H, stream);
    case CODEC_BOTTLENECK: return codec_bottleneck_decode(codec, end, context, in, n_bytes, x, n, H, stream);
    case CODEC_AQSGD: return codec_aqsgd_decode(codec, end, context, in, n_bytes, x, n, H, stream);
    case CODEC_KLT: return codec_klt_decode(codec, end, context, in, n_bytes, x, n, H, stream);
    default: return codec_decode_dense(codec, in, n_bytes, x, (int64_t)n * H, stream);
    }
}
