// What codecs were measured to keep of what is learned, and whether another one than the user's keeps more of it for
// the same bytes.
//
//   CodecKind better = codec_better(&codec, H);      codec.kind: none is known to be better
#ifndef LLMC_CODEC_TABLE_H
#define LLMC_CODEC_TABLE_H

#include "codec_format.h" // Codec, codec_row_bytes, codec_budget

typedef struct {
    CodecKind kind;
    float rate; // dense bytes of a boundary over those sent
    float kept; // percent of a dense run's improvement of held-out loss over the same steps; 0 where it got worse
} CodecFigure;

// Measured by scripts/run_codecs.sh: the base model on all of WordNet, 100 steps of one fast replica in four stages,
// each codec at its best learning rate; 100 is --codec none. mask at 2x: scripts/run_variants.sh, the medical
// definitions. To bring it up to date, replace the figures; rows of a codec in the order of their rates.
static const CodecFigure codec_figures[] = {
    {CODEC_MASK, 2.0f, 36.0f},        {CODEC_MASK, 10.0f, 32.0f},       {CODEC_MASK, 20.0f, 33.0f},
    {CODEC_MASK, 40.0f, 33.0f},       {CODEC_TOPK, 10.0f, 69.0f},       {CODEC_TOPK, 20.0f, 54.0f},
    {CODEC_TOPK, 40.0f, 42.0f},       {CODEC_BOTTLENECK, 10.0f, 29.0f}, {CODEC_BOTTLENECK, 20.0f, 25.0f},
    {CODEC_BOTTLENECK, 40.0f, 20.0f}, {CODEC_QUANT8, 2.0f, 100.0f},     {CODEC_QUANT4, 4.0f, 98.9f},
    {CODEC_KLT, 10.0f, 99.7f},        {CODEC_KLT, 20.0f, 98.8f},        {CODEC_KLT, 40.0f, 96.5f},
    {CODEC_KLT, 80.0f, 93.3f},
};
enum { CODEC_FIGURES = sizeof codec_figures / sizeof *codec_figures };

static inline int codec_has_rate(CodecKind kind) {
    return kind == CODEC_QUANT8 || kind == CODEC_QUANT4;
}

// What a codec keeps at a rate: the figure of the nearest rate at or below it, or of the only one it has; -1 where
// there is none.
static inline float codec_kept(CodecKind kind, double rate) {
    float kept = -1.0f;
    for (int i = 0; i < CODEC_FIGURES; i++)
        if (codec_figures[i].kind == kind && (codec_has_rate(kind) || (double)codec_figures[i].rate <= rate))
            kept = codec_figures[i].kept;
    return kept;
}

// The codec that keeps most of what is learned with the bytes that -p leaves of a token's H values; the user's own
// where no other is known to keep more. Codecs with a rate of their own count where they fit.
static inline CodecKind codec_better(const Codec *codec, int H) {
    double rate = 1.0001 / (1.0 - (double)codec->mask_rate); // -p is a float
    CodecKind best = codec->kind;
    if (codec->mask_rate == 0.0f || codec_kept(best, rate) < 0.0f) return best;
    for (int i = 0; i < CODEC_FIGURES; i++) {
        Codec other = *codec;
        other.kind = codec_figures[i].kind;
        if (codec_has_rate(other.kind) && codec_row_bytes(&other, CODEC_FORWARD, H) > codec_budget(codec, H)) continue;
        if (codec_kept(other.kind, rate) > codec_kept(best, rate)) best = other.kind;
    }
    return best;
}

#endif
