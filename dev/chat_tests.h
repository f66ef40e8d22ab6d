// Conversations in the models' templates against what transformers makes of them (dev/reference/dump_chat.py).
#ifndef DEV_CHAT_TESTS_H
#define DEV_CHAT_TESTS_H

// A tokenizer of the fixtures; llama3's gets the tokens of headers, which the fixture has not.
static Tokenizer chat_tokenizer(const char *name) {
    Tokenizer tokenizer;
    char file[64];
    snprintf(file, sizeof file, "%s.json", name);
    json_t *text = tokenizer_fixture(file), *json = json_loads(json_string_value(text), 0, NULL),
           *files = json_object();
    json_t *added = json_object_get(json, "added_tokens"), *one = json_array_get(added, 0);
    for (int i = 0; strcmp(name, "llama3") == 0 && i < 2; i++) {
        json_t *header = json_deep_copy(one);
        json_object_set_new(header, "id", json_integer(803 + i));
        json_object_set_new(header, "content", json_string(i == 0 ? "<|start_header_id|>" : "<|end_header_id|>"));
        json_array_append_new(added, header);
    }
    char *changed = json_dumps(json, 0);
    json_object_set_new(files, "tokenizer.json", json_string(changed));
    check(tokenizer_open(&tokenizer, files, FIXTURE_VOCAB) == 0, "%s: %s", name, error_message);
    free(changed);
    json_decref(files);
    json_decref(json);
    json_decref(text);
    return tokenizer;
}

static void check_chat_ids(const TokenStream *stream, const json_t *expected, const char *name, size_t talk,
                           const char *what) {
    int64_t n = (int64_t)json_array_size(expected), i = 0;
    while (i < n && i < stream->n &&
           (json_int_t)(stream->tokens[i] & ~TOKEN_NO_LOSS) == json_integer_value(json_array_get(expected, (size_t)i)))
        i++;
    check(n > 0 && i == n && stream->n == n, "%s, conversation %zu%s: %lld ids, not %lld; the first %lld agree", name,
          talk, what, (long long)stream->n, (long long)n, (long long)i);
}

// Must fail for: white space kept or stripped where the other template does, a head tokenized apart from what follows,
// BOS left out or twice, a line's end left out.
static void test_chat_reference(void) {
    static const char *const names[] = {"llama3", "smollm2"};
    json_t *text = tokenizer_fixture("chat.json");
    json_t *expected = json_loadb(json_string_value(text), json_string_length(text), JSON_ALLOW_NUL, NULL), *talk;
    for (int i = 0; i < 2; i++) {
        Tokenizer tokenizer = chat_tokenizer(names[i]);
        ChatTokens id = chat_tokens(&tokenizer);
        ChatFormat format;
        size_t k;
        memset(&format, 0, sizeof format);
        json_t *talks = json_object_get(expected, names[i]);
        check(chat_format(&format, CHAT_AUTO, TRAIN_ON_ASSISTANT, id, &tokenizer) == 0 &&
                  format.kind == (i == 0 ? CHAT_LLAMA3 : CHAT_CHATML),
              "%s: template %d", names[i], format.kind);
        check(json_array_size(talks) >= 10, "chat.json has %zu conversations", json_array_size(talks));
        json_array_foreach(talks, k, talk) {
            TokenStream whole, prompt;
            stream_init(&whole);
            stream_init(&prompt);
            check(chat_put_messages(&whole, &format, json_array_get(talk, 0)) == 0 &&
                      chat_put_prompt(&prompt, &format, json_array_get(talk, 0)) == 0,
                  "%s", error_message);
            check_chat_ids(&whole, json_array_get(talk, 1), names[i], k, "");
            check_chat_ids(&prompt, json_array_get(talk, 2), names[i], k, " before an answer");
            stream_free(&whole);
            stream_free(&prompt);
        }
        tokenizer_free(&tokenizer);
    }
    json_decref(expected);
    json_decref(text);
}

#endif
