// A line of data as tokens: text, a prompt with its completion, or a conversation in the model's chat template.
//
//   {"text": "..."}                                    BOS text EOS
//   {"prompt": "...", "completion": "..."}             BOS prompt completion EOS
//   {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
//     llama3   <|begin_of_text|> then a message <|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|>, the
//              content without white space around it; what a tool says has the role ipython there, as in Meta's code
//     chatml   a message <|im_start|>role\ncontent<|im_end|>\n
//     plain    BOS then a message "role: content\n", but EOS instead of the line's end behind an assistant's; for
//     models
//              that have no tokens for turns
// These are what the templates of Llama 3 and SmolLM2 give (test_gpt chat_reference), but that no message of the system
// is made up, as SmolLM2's does and the dates of Llama 3.1's and later ones.
//
// A text is trained on whole. Of a prompt with its completion the completion and EOS are; of a conversation what the
// assistant says and the token that ends its turn, never a header. Spellings of special tokens in a text stay text.
// What stands between two special tokens is tokenized as one text, as by who renders a template and then tokenizes it.
#ifndef LLMC_CHAT_H
#define LLMC_CHAT_H

#include <jansson.h> // json_t
#include <stdint.h>  // fixed-width integers
#include <string.h>  // strcmp

#include "error.h"
#include "token_stream.h"
#include "tokenizer.h"

#define CHAT_TEMPLATES "auto|llama3|chatml|plain" // ChatTemplate in words
#define TRAIN_ON       "assistant|completion|all" // TrainOn in words
#define CHAT_ROLE      64                         // bytes of a role's name

typedef enum { CHAT_AUTO, CHAT_LLAMA3, CHAT_CHATML, CHAT_PLAIN } ChatTemplate;

// completion: of a conversation the assistant's last turn alone
typedef enum { TRAIN_ON_ASSISTANT, TRAIN_ON_COMPLETION, TRAIN_ON_ALL } TrainOn;

// Special tokens; -1: the tokenizer has none of that spelling. bos: what begins a text, -1 also where none does.
typedef struct {
    int bos, eos, header_begin, header_end, eot, im_start, im_end;
} ChatTokens;

typedef struct {
    ChatTemplate kind; // not CHAT_AUTO
    TrainOn train_on;
    ChatTokens id;
    const Tokenizer *tokenizer;
} ChatFormat;

typedef enum { SAMPLE_NONE, SAMPLE_TEXT, SAMPLE_PROMPT, SAMPLE_MESSAGES } SampleKind;

static inline ChatTokens chat_tokens(const Tokenizer *tokenizer) {
    ChatTokens id;
    id.bos = tokenizer_adds_bos(tokenizer) ? tokenizer->bos : -1, id.eos = tokenizer->eos;
    id.header_begin = tokenizer_special(tokenizer, "<|start_header_id|>");
    id.header_end = tokenizer_special(tokenizer, "<|end_header_id|>");
    id.eot = tokenizer_special(tokenizer, "<|eot_id|>");
    id.im_start = tokenizer_special(tokenizer, "<|im_start|>");
    id.im_end = tokenizer_special(tokenizer, "<|im_end|>");
    return id;
}

// Which template it is. CHAT_AUTO: the one whose tokens there are. 0, or -1: a template whose tokens there are not.
static inline int chat_format(ChatFormat *format, ChatTemplate wanted, TrainOn train_on, ChatTokens id,
                              const Tokenizer *tokenizer) {
    int is_llama3 = id.header_begin >= 0 && id.header_end >= 0 && id.eot >= 0;
    int is_chatml = id.im_start >= 0 && id.im_end >= 0;
    format->train_on = train_on, format->id = id, format->tokenizer = tokenizer;
    format->kind = wanted != CHAT_AUTO ? wanted : is_llama3 ? CHAT_LLAMA3 : is_chatml ? CHAT_CHATML : CHAT_PLAIN;
    if (format->kind == CHAT_LLAMA3 && !is_llama3)
        return error_set("--chat-template llama3: the model's tokenizer has no <|start_header_id|>, "
                         "<|end_header_id|> and <|eot_id|>; leave it at auto");
    if (format->kind == CHAT_CHATML && !is_chatml)
        return error_set("--chat-template chatml: the model's tokenizer has no <|im_start|> and <|im_end|>; leave it "
                         "at auto");
    return 0;
}

// Lines -----------------------------------------------------------------------------------------------------------

// A field that is there and not null.
static inline const json_t *sample_field(const json_t *line, const char *name) {
    const json_t *field = json_object_get(line, name);
    return json_is_null(field) ? NULL : field;
}

static inline SampleKind sample_kind(const json_t *line) {
    if (sample_field(line, "messages") != NULL) return SAMPLE_MESSAGES;
    if (sample_field(line, "prompt") != NULL && sample_field(line, "completion") != NULL) return SAMPLE_PROMPT;
    return sample_field(line, "text") != NULL ? SAMPLE_TEXT : SAMPLE_NONE;
}

static inline int message_is_good(const json_t *message) {
    const json_t *role = sample_field(message, "role"), *content = sample_field(message, "content");
    size_t n = json_string_length(role);
    return n > 0 && n <= CHAT_ROLE && strlen(json_string_value(role)) == n && json_is_string(content) &&
           sample_field(message, "tool_calls") == NULL;
}

// What is wrong with a line; NULL: nothing.
static inline const char *sample_fault(const json_t *line, SampleKind kind) {
    size_t i;
    const json_t *messages = sample_field(line, "messages"), *message;
    if (kind == SAMPLE_NONE) return "there is no \"text\", no \"messages\", no \"prompt\" with \"completion\" in it";
    if (kind == SAMPLE_TEXT) return json_is_string(sample_field(line, "text")) ? NULL : "its \"text\" is no string";
    if (kind == SAMPLE_PROMPT)
        return json_is_string(sample_field(line, "prompt")) && json_is_string(sample_field(line, "completion"))
                   ? NULL
                   : "its \"prompt\" and \"completion\" are no strings";
    if (!json_is_array(messages)) return "its \"messages\" are no list";
    json_array_foreach((json_t *)messages, i, message) {
        if (!message_is_good(message))
            return "a message in it is not {\"role\": TEXT, \"content\": TEXT}, and calls of tools are not known";
    }
    return NULL;
}

// 1 if there is nothing to learn in a line without fault.
static inline int sample_is_empty(const json_t *line, SampleKind kind) {
    if (kind == SAMPLE_MESSAGES) return json_array_size(sample_field(line, "messages")) == 0;
    return json_string_length(sample_field(line, kind == SAMPLE_TEXT ? "text" : "completion")) == 0;
}

// Templates -------------------------------------------------------------------------------------------------------

// Length of the white space character at s, 0 if it is none: those that Python strips, as templates are written for it.
static inline int space_length(const char *s, int64_t n) {
    const unsigned char *u = (const unsigned char *)s;
    if (n >= 1 && ((u[0] >= 9 && u[0] <= 13) || (u[0] >= 28 && u[0] <= 32))) return 1;
    if (n >= 2 && u[0] == 0xC2 && (u[1] == 0x85 || u[1] == 0xA0)) return 2;
    if (n < 3) return 0;
    int code = (u[0] & 15) << 12 | (u[1] & 63) << 6 | (u[2] & 63), is_three = (u[0] & 0xF0) == 0xE0;
    int is_space = code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 ||
                   code == 0x202F || code == 0x205F || code == 0x3000;
    return is_three && is_space ? 3 : 0;
}

// *text and *n without white space around it; valid UTF-8.
static inline void text_strip(const char **text, int64_t *n) {
    for (int length; (length = space_length(*text, *n)) > 0;) *text += length, *n -= length;
    for (int stripped = 1; stripped;) {
        stripped = 0;
        for (int length = 1; length <= 3 && length <= *n && !stripped; length++)
            if (space_length(*text + *n - length, length) == length) *n -= length, stripped = 1;
    }
}

// Appends the tokens of head and text as those of one text, the head's trained or not; a token that has bytes of both
// is of the text.
static inline int stream_put_behind(TokenStream *stream, const Tokenizer *tokenizer, const char *head, int head_trained,
                                    const char *text, int64_t n, int trained) {
    int64_t n_head = (int64_t)strlen(head), first = stream->n, seen = 0;
    char *joined = (char *)malloc((size_t)(n_head + n + 1));
    if (joined == NULL) return error_set("out of memory for the data");
    memcpy(joined, head, (size_t)n_head);
    memcpy(joined + n_head, text, (size_t)n);
    int result = stream_put_text(stream, tokenizer, joined, n_head + n, trained);
    free(joined);
    for (int64_t i = first; i < stream->n && trained && !head_trained && result == 0; i++) {
        seen += tokenizer_decode(tokenizer, NULL, 0, stream->tokens[i] & ~TOKEN_NO_LOSS);
        if (seen > n_head) break;
        stream->owned[i] |= TOKEN_NO_LOSS;
    }
    return result;
}

// Appends a message. trained: what is said in it is. Not 0: out of memory.
static inline int chat_put_message(TokenStream *stream, const ChatFormat *f, const json_t *message, int trained) {
    const char *role = json_string_value(json_object_get(message, "role"));
    const json_t *content = json_object_get(message, "content");
    const char *text = json_string_value(content);
    int64_t n = (int64_t)json_string_length(content);
    int all = f->train_on == TRAIN_ON_ALL, is_assistant = strcmp(role, "assistant") == 0;
    char head[CHAT_ROLE + 4];
    const ChatTokens *id = &f->id;
    if (f->kind == CHAT_LLAMA3) {
        if (strcmp(role, "tool") == 0) role = "ipython";
        text_strip(&text, &n);
        return stream_put(stream, id->header_begin, all) ||
               stream_put_text(stream, f->tokenizer, role, (int64_t)strlen(role), all) ||
               stream_put(stream, id->header_end, all) ||
               stream_put_behind(stream, f->tokenizer, "\n\n", all, text, n, trained) ||
               stream_put(stream, id->eot, trained);
    }
    snprintf(head, sizeof head, f->kind == CHAT_CHATML ? "%s\n" : "%s: ", role);
    if (f->kind == CHAT_CHATML)
        return stream_put(stream, id->im_start, all) ||
               stream_put_behind(stream, f->tokenizer, head, all, text, n, trained) ||
               stream_put(stream, id->im_end, trained) || stream_put_text(stream, f->tokenizer, "\n", 1, all);
    if (stream_put_behind(stream, f->tokenizer, head, all, text, n, trained)) return -1;
    if (is_assistant && id->eos >= 0) return stream_put(stream, id->eos, trained);
    return stream_put_text(stream, f->tokenizer, "\n", 1, trained);
}

// Whether what a message says is trained on. last: the assistant's last.
static inline int message_is_trained(const ChatFormat *f, const json_t *message, int last) {
    const char *role = json_string_value(json_object_get(message, "role"));
    if (f->train_on == TRAIN_ON_ALL) return 1;
    return strcmp(role, "assistant") == 0 && (f->train_on == TRAIN_ON_ASSISTANT || last);
}

static inline int chat_put_messages(TokenStream *stream, const ChatFormat *f, const json_t *messages) {
    size_t i, last = 0;
    const json_t *message;
    int bos = f->kind != CHAT_CHATML || f->id.bos != f->id.im_start ? f->id.bos : -1; // which begins the first turn
    json_array_foreach((json_t *)messages, i, message) {
        if (strcmp(json_string_value(json_object_get(message, "role")), "assistant") == 0) last = i;
    }
    if (stream_put(stream, bos, 0)) return -1;
    json_array_foreach((json_t *)messages, i, message) {
        if (chat_put_message(stream, f, message, message_is_trained(f, message, i == last))) return -1;
    }
    return 0;
}

// Appends a conversation and what precedes an assistant's answer to it. Not 0: out of memory.
static inline int chat_put_prompt(TokenStream *stream, const ChatFormat *f, const json_t *messages) {
    static const char role[] = "assistant";
    const ChatTokens *id = &f->id;
    const char *head = f->kind == CHAT_LLAMA3 ? "\n\n" : f->kind == CHAT_CHATML ? "assistant\n" : "assistant: ";
    if (chat_put_messages(stream, f, messages)) return -1;
    if (f->kind == CHAT_LLAMA3 &&
        (stream_put(stream, id->header_begin, 0) || stream_put_text(stream, f->tokenizer, role, sizeof role - 1, 0) ||
         stream_put(stream, id->header_end, 0)))
        return -1;
    if (f->kind == CHAT_CHATML && stream_put(stream, id->im_start, 0)) return -1;
    return stream_put_text(stream, f->tokenizer, head, (int64_t)strlen(head), 0);
}

// Appends BOS text EOS as a document. BOS is a target too where documents follow each other.
static inline int stream_put_document(TokenStream *stream, const ChatTokens *id, const Tokenizer *tokenizer,
                                      const char *text, int64_t n) {
    return stream_begin_document(stream) || stream_put(stream, id->bos, 1) ||
                   stream_put_text(stream, tokenizer, text, n, 1) || stream_put(stream, id->eos, 1)
               ? -1
               : 0;
}

// Appends a line without fault as a document. 0, or -1 when out of memory.
static inline int sample_put(TokenStream *stream, const ChatFormat *f, const json_t *line, SampleKind kind) {
    const json_t *prompt = json_object_get(line, "prompt"), *end = json_object_get(line, "completion");
    const json_t *text = json_object_get(line, "text");
    if (kind == SAMPLE_TEXT)
        return stream_put_document(stream, &f->id, f->tokenizer, json_string_value(text),
                                   (int64_t)json_string_length(text));
    if (stream_begin_document(stream)) return -1;
    if (kind == SAMPLE_MESSAGES) return chat_put_messages(stream, f, json_object_get(line, "messages")) ? -1 : 0;
    return stream_put(stream, f->id.bos, 0) ||
                   stream_put_text(stream, f->tokenizer, json_string_value(prompt), (int64_t)json_string_length(prompt),
                                   f->train_on == TRAIN_ON_ALL) ||
                   stream_put_text(stream, f->tokenizer, json_string_value(end), (int64_t)json_string_length(end), 1) ||
                   stream_put(stream, f->id.eos, 1)
               ? -1
               : 0;
}

#endif
