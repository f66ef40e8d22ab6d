// Tokens as text for people: what is trained on stands out, the rest is dim. What a terminal would obey is spelled out,
// special tokens are named.
#ifndef LLMC_SHOW_H
#define LLMC_SHOW_H

#include <stdint.h> // fixed-width integers
#include <stdio.h>  // FILE

#include "token_stream.h" // TOKEN_NO_LOSS
#include "tokenizer.h"

// A byte of text. Line ends and tabs stay.
static inline void show_byte(FILE *out, unsigned char byte) {
    if ((byte < 32 && byte != '\n' && byte != '\t') || byte == 127)
        fprintf(out, "\\x%02x", byte);
    else
        fputc(byte, out);
}

// A token that stands for no bytes.
static inline void show_special(FILE *out, const Tokenizer *tokenizer, uint32_t id) {
    static const char *const names[] = {"<|begin_of_text|>",
                                        "<|end_of_text|>",
                                        "<|start_header_id|>",
                                        "<|end_header_id|>",
                                        "<|eot_id|>",
                                        "<|im_start|>",
                                        "<|im_end|>",
                                        "<|endoftext|>",
                                        "<|bos|>",
                                        "<|eos|>",
                                        "<s>",
                                        "</s>"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (tokenizer_special(tokenizer, names[i]) != (int)id) continue;
        fputs(names[i], out);
        return;
    }
    fprintf(out, "<%u>", id);
}

static inline void show_token(FILE *out, const Tokenizer *tokenizer, uint32_t id) {
    char bytes[1024];
    int n = tokenizer_decode(tokenizer, bytes, sizeof bytes, id), fits = n > 0 && n <= (int)sizeof bytes;
    for (int i = 0; i < n && fits; i++) show_byte(out, (unsigned char)bytes[i]);
    if (!fits) show_special(out, tokenizer, id);
}

// tokens (n) as TokenStream has them; the first is never a target. terminal: bold and dim, else [[...]] around what is
// trained on.
static inline void show_tokens(FILE *out, const Tokenizer *tokenizer, const uint32_t *tokens, int64_t n, int terminal) {
    int bold = 0;
    if (terminal) fputs("\033[2m", out);
    for (int64_t i = 0; i < n; i++) {
        int trained = i > 0 && !(tokens[i] & TOKEN_NO_LOSS);
        if (trained && !bold) fputs(terminal ? "\033[0;1m" : "[[", out);
        if (!trained && bold) fputs(terminal ? "\033[0;2m" : "]]", out);
        show_token(out, tokenizer, tokens[i] & ~TOKEN_NO_LOSS);
        bold = trained;
    }
    if (!terminal && bold) fputs("]]", out);
    fputs(terminal ? "\033[0m\n" : "\n", out);
}

#endif
