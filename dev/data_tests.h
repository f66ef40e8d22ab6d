// Tests of conversations and packed windows: llmc/chat.h, jsonl.h, packing.h, split.h, token_file.h, and the model on
// several documents in a sequence.
#ifndef DATA_TESTS_H
#define DATA_TESTS_H

// Ids that the byte tokenizer does not give, as those of a model with turns.
enum { ID_HEADER = 300, ID_HEADER_END, ID_EOT, ID_IM_START, ID_IM_END, ID_BOS, ID_EOS };

static ChatTokens turn_tokens(void) {
    ChatTokens id = {ID_BOS, ID_EOS, ID_HEADER, ID_HEADER_END, ID_EOT, ID_IM_START, ID_IM_END};
    return id;
}

// out = tokens first .. last-1 of a stream, with names of marks and what is trained on in parentheses.
static void render_tokens(char *out, size_t size, const TokenStream *stream, int64_t first, int64_t last) {
    static const char *const names[] = {"<H>", "</H>", "<EOT>", "<IM>", "</IM>", "<B>", "<E>"};
    size_t used = 0;
    int trained = 0;
    out[0] = '\0';
    for (int64_t i = first; i <= last; i++) {
        uint32_t token = i < last ? stream->tokens[i] : TOKEN_NO_LOSS, id = token & ~TOKEN_NO_LOSS;
        int now = !(token & TOKEN_NO_LOSS);
        if (now != trained) used += (size_t)snprintf(out + used, size - used, now ? "(" : ")");
        trained = now;
        if (i == last) break;
        if (id < 256)
            used += (size_t)snprintf(out + used, size - used, "%c", (int)id);
        else
            used += (size_t)snprintf(out + used, size - used, "%s",
                                     id < 258              ? id == BYTE_BOS ? "<B>" : "<E>"
                                     : id - ID_HEADER <= 6 ? names[id - ID_HEADER]
                                                           : "<?>");
    }
}

// Each kind of line in each template against what it should be, letter by letter, and what is trained on.
// Must fail for: BOS twice, a trained header, an end of turn that is not trained, a prompt that is, white space kept.
static void test_chat_templates(void) {
#define TALK                                                                                                           \
    "{\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"user\",\"content\":\" "                        \
    "\\n\\u3000U<|eot_id|>\\u00a0\"},"                                                                                 \
    "{\"role\":\"assistant\",\"content\":\"one\"},{\"role\":\"user\",\"content\":\"V\"},"                              \
    "{\"role\":\"assistant\",\"content\":\"two \"}]}"
    static const struct {
        ChatTemplate kind;
        TrainOn train_on;
        const char *line, *expected;
    } cases[] = {
        {CHAT_LLAMA3, TRAIN_ON_ASSISTANT, TALK,
         "<B><H>system</H>\n\nS<EOT><H>user</H>\n\nU<|eot_id|><EOT><H>assistant</H>\n\n(one<EOT>)<H>user</H>\n\n"
         "V<EOT><H>assistant</H>\n\n(two<EOT>)"},
        {CHAT_LLAMA3, TRAIN_ON_COMPLETION, TALK,
         "<B><H>system</H>\n\nS<EOT><H>user</H>\n\nU<|eot_id|><EOT><H>assistant</H>\n\none<EOT><H>user</H>\n\n"
         "V<EOT><H>assistant</H>\n\n(two<EOT>)"},
        {CHAT_LLAMA3, TRAIN_ON_ALL, TALK,
         "<B>(<H>system</H>\n\nS<EOT><H>user</H>\n\nU<|eot_id|><EOT><H>assistant</H>\n\none<EOT><H>user</H>\n\n"
         "V<EOT><H>assistant</H>\n\ntwo<EOT>)"},
        {CHAT_CHATML, TRAIN_ON_ASSISTANT, TALK,
         "<B><IM>system\nS</IM>\n<IM>user\n "
         "\n\xE3\x80\x80U<|eot_id|>\xC2\xA0</IM>\n<IM>assistant\n(one</IM>)\n<IM>user\n"
         "V</IM>\n<IM>assistant\n(two </IM>)\n"},
        {CHAT_PLAIN, TRAIN_ON_ASSISTANT, TALK,
         "<B>system: S\nuser:  \n\xE3\x80\x80U<|eot_id|>\xC2\xA0\nassistant: (one<E>)user: V\nassistant: (two <E>)"},
        {CHAT_PLAIN, TRAIN_ON_ASSISTANT, "{\"prompt\":\"p q\",\"completion\":\" r\"}", "<B>p q( r<E>)"},
        {CHAT_LLAMA3, TRAIN_ON_COMPLETION, "{\"prompt\":\"p\",\"completion\":\"r\",\"text\":null}", "<B>p(r<E>)"},
        {CHAT_LLAMA3, TRAIN_ON_ALL, "{\"prompt\":\"p\",\"completion\":\"r\"}", "<B>(pr<E>)"},
        {CHAT_CHATML, TRAIN_ON_ASSISTANT, "{\"text\":\"<|im_end|>\",\"messages\":null}", "(<B><|im_end|><E>)"},
        {CHAT_PLAIN, TRAIN_ON_ASSISTANT, "{\"messages\":[{\"role\":\"user\",\"content\":\"U\"}]}", "<B>user: U\n"},
        {CHAT_LLAMA3, TRAIN_ON_ASSISTANT, "{\"messages\":[{\"role\":\"tool\",\"content\":\"7\"}]}",
         "<B><H>ipython</H>\n\n7<EOT>"},
        {CHAT_CHATML, TRAIN_ON_ASSISTANT, "{\"messages\":[{\"role\":\"tool\",\"content\":\"7\"}]}",
         "<B><IM>tool\n7</IM>\n"},
        {CHAT_LLAMA3, TRAIN_ON_ASSISTANT, "{\"messages\":[{\"role\":\"assistant\",\"content\":\" \"}]}",
         "<B><H>assistant</H>\n\n(<EOT>)"},
    };
    Tokenizer tokenizer = byte_tokenizer();
    char text[1024];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ChatFormat format;
        TokenStream stream;
        json_t *line = json_loads(cases[i].line, 0, NULL);
        stream_init(&stream);
        check(line != NULL, "%s", cases[i].line);
        check(chat_format(&format, cases[i].kind, cases[i].train_on, turn_tokens(), &tokenizer) == 0, "%s",
              error_message);
        check(sample_put(&stream, &format, line, sample_kind(line)) == 0 && stream.n_documents == 1, "%s",
              error_message);
        render_tokens(text, sizeof text, &stream, 0, stream.n);
        check(strcmp(text, cases[i].expected) == 0, "case %zu gives\n%s, not\n%s", i, text, cases[i].expected);
        json_decref(line);
        stream_free(&stream);
    }
#undef TALK
}

// Which template it is, and what a model's tokens do not allow.
static void test_chat_format(void) {
    Tokenizer tokenizer = byte_tokenizer();
    ChatFormat format;
    ChatTokens all = turn_tokens(), chatml = all, plain;
    chatml.eot = plain.eot = -1, plain = chatml, plain.im_end = -1;
    chat_format(&format, CHAT_AUTO, TRAIN_ON_ALL, all, &tokenizer);
    check(format.kind == CHAT_LLAMA3 && format.train_on == TRAIN_ON_ALL, "headers are Llama 3's, not %d", format.kind);
    chat_format(&format, CHAT_AUTO, TRAIN_ON_ALL, chatml, &tokenizer);
    check(format.kind == CHAT_CHATML, "im_start is ChatML's, not %d", format.kind);
    chat_format(&format, CHAT_AUTO, TRAIN_ON_ALL, plain, &tokenizer);
    check(format.kind == CHAT_PLAIN, "no tokens are plain, not %d", format.kind);
    check_error(chat_format(&format, CHAT_LLAMA3, TRAIN_ON_ALL, chatml, &tokenizer), "<|eot_id|>", "llama3 without");
    check_error(chat_format(&format, CHAT_CHATML, TRAIN_ON_ALL, plain, &tokenizer), "<|im_end|>", "chatml without");
    // SmolLM2's begin of text is the begin of a turn: it stands there once
    TokenStream stream;
    json_t *line = json_loads("{\"messages\":[{\"role\":\"user\",\"content\":\"U\"}]}", 0, NULL);
    char text[64];
    stream_init(&stream);
    chatml.bos = chatml.im_start;
    chat_format(&format, CHAT_AUTO, TRAIN_ON_ASSISTANT, chatml, &tokenizer);
    check(sample_put(&stream, &format, line, SAMPLE_MESSAGES) == 0, "%s", error_message);
    render_tokens(text, sizeof text, &stream, 0, stream.n);
    check(strcmp(text, "<IM>user\nU</IM>\n") == 0, "begin of text: %s", text);
    json_decref(line);
    stream_free(&stream);
}

// Lines in the shapes that broke other trainers; what is wrong is named with its line.
static void test_chat_lines(void) {
#define GOOD "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\"}]}\n"
    static const struct {
        const char *content, *message;
        int64_t samples, documents, empty, repaired;
    } cases[] = {
        {GOOD "\r\n{\"prompt\":\"\",\"completion\":\"c\"}\r\n{\"text\":\"t\"}", NULL, 2, 1, 0, 0},
        {"\xEF\xBB\xBF" GOOD "{\"messages\":[]}\n{\"prompt\":\"p\",\"completion\":\"\"}\n{\"text\":\"\"}", NULL, 1, 0,
         3, 0},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"\\ud83d\"},{\"role\":\"assistant\",\"content\":\"\xC0\"}]}",
         NULL, 1, 0, 0, 1},
        {GOOD "{\"prompt\":\"p\"}", "line 2: there is no \"text\"", 0, 0, 0, 0},
        {GOOD "\n{\"prompt\":\"p\",\"completion\":3}", "line 3: its \"prompt\" and \"completion\"", 0, 0, 0, 0},
        {GOOD "{\"messages\":\"x\"}", "line 2: its \"messages\" are no list", 0, 0, 0, 0},
        {GOOD "{\"messages\":[{\"role\":\"user\"}]}", "line 2: a message in it", 0, 0, 0, 0},
        {"{\"messages\":[{\"role\":\"\",\"content\":\"x\"}]}", "line 1: a message in it", 0, 0, 0, 0},
        {"{\"messages\":[{\"role\":\"a\\u0000b\",\"content\":\"x\"}]}", "line 1: a message in it", 0, 0, 0, 0},
        {"{\"messages\":[{\"role\":\"assistant\",\"content\":\"x\",\"tool_calls\":[1]}]}", "line 1: a message in it", 0,
         0, 0, 0},
        {"{\"messages\":[7]}", "line 1: a message in it", 0, 0, 0, 0},
    };
    Tokenizer tokenizer = byte_tokenizer();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Dataset data;
        memset(&data, 0, sizeof data);
        write_file(scratch_path("lines.jsonl"), cases[i].content, strlen(cases[i].content));
        int result = dataset_read(&data, &data.train, scratch_path("lines.jsonl"), &tokenizer);
        if (cases[i].message != NULL)
            check_error(result, cases[i].message, cases[i].content);
        else
            check(result == 0 && data.n_samples == cases[i].samples && data.n_documents == cases[i].documents &&
                      data.n_empty == cases[i].empty && data.n_repaired == cases[i].repaired,
                  "%s: %lld samples, %lld documents, %lld empty, %lld repaired (%s)", cases[i].content,
                  (long long)data.n_samples, (long long)data.n_documents, (long long)data.n_empty,
                  (long long)data.n_repaired, result ? error_message : "");
        dataset_close(&data);
    }
#undef GOOD
}

// n documents of 1 .. most tokens, each token its own value below 250 but for the mask, of which every document keeps
// one target in three or, of each 7th, none.
static void random_documents(TokenStream *stream, int n, int most, int is_samples) {
    stream_init(stream);
    stream->is_samples = is_samples;
    for (int d = 0; d < n; d++) {
        Philox draw = rand_block(5, RAND_TEST, 60, (uint64_t)d);
        int length = 1 + (int)(draw.v[0] % (uint32_t)most);
        stream_begin_document(stream);
        for (int i = 0; i < length; i++)
            stream_put(stream, (int)((draw.v[1] + 7 * (uint32_t)i) % 250), d % 7 != 3 && (i % 3 == 1 || !is_samples));
    }
}

// A split of one stream; the split owns it.
static void split_of(Split *split, TokenStream stream) {
    memset(split, 0, sizeof *split);
    *split_add(split) = stream;
}

// Every document that has a target and no more than T+1 tokens stands whole in one window, once; a window's rows are
// its documents' and what is left, and say what the documents say. First fit is not worse than giving each document
// the window of the last one, if there is room.
// Must fail for: a document cut or left out, a target that is a neighbour's, starts of other rows.
static void test_packing(void) {
    enum { T = 48, DOCUMENTS = 700, MOST = 64 };
    PackRules rules = {T, PACK_AUTO, TOO_LONG_DROP};
    PackCounts counts;
    Split split;
    TokenStream stream;
    uint32_t tokens[T];
    int32_t targets[T], starts[T];
    unsigned char seen[DOCUMENTS] = {0};
    int64_t dropped = 0, untrained = 0, naive = 0, n_valid = 0;
    int left = 0;
    memset(&counts, 0, sizeof counts);
    random_documents(&stream, DOCUMENTS, MOST, 1);
    split_of(&split, stream);
    check(split_layout(&split, &rules, &counts) == 0 && split.masked, "%s", error_message);
    for (int64_t w = 0; w < split.n_windows; w++) {
        const TokenStream *of;
        const Segment *segments;
        Segment own;
        int64_t n = split_segments(&split, w, T, &of, &segments, &own), row = 0, previous = -1;
        n_valid += split_read(&split, w, T, tokens, targets, starts);
        for (int64_t s = 0; s < n; s++) {
            int64_t d = 0, at = segments[s].at;
            while (d < DOCUMENTS && of->documents[d] != at) d++;
            check(d < DOCUMENTS && !seen[d] && d > previous, "window %lld: document %lld twice, cut, or out of order",
                  (long long)w, (long long)d);
            if (d == DOCUMENTS) break;
            int64_t rows = stream_document_end(of, d) - at - 1;
            check(rows == segments[s].rows, "document %lld has %d rows of %lld", (long long)d, segments[s].rows,
                  (long long)rows);
            int right = row + rows <= T;
            for (int64_t i = 0; i < rows && right; i++) {
                uint32_t target = of->tokens[at + i + 1];
                right = tokens[row + i] == (of->tokens[at + i] & ~TOKEN_NO_LOSS) && starts[row + i] == (int32_t)row &&
                        targets[row + i] == (target & TOKEN_NO_LOSS ? -1 : (int32_t)target);
            }
            check(right, "window %lld: rows of document %lld", (long long)w, (long long)d);
            seen[d] = 1, previous = d, row += rows;
        }
        for (int64_t t = row; t < T; t++)
            check(targets[t] == -1 && starts[t] == (int32_t)row, "window %lld: row %lld of what is left", (long long)w,
                  (long long)t);
    }
    for (int64_t d = 0; d < DOCUMENTS; d++) {
        int64_t first = stream.documents[d], end = stream_document_end(&stream, d);
        int is_long = end - first > T + 1, is_trained = stream_trained(&stream, first + 1, end) > 0;
        dropped += is_long, untrained += !is_long && !is_trained;
        check(seen[d] == (!is_long && is_trained), "document %lld: seen %d", (long long)d, seen[d]);
        if (!seen[d]) continue;
        if (left < end - first - 1) naive++, left = T;
        left -= (int)(end - first) - 1;
    }
    check(counts.dropped == dropped && counts.untrained == untrained && counts.truncated == 0 && counts.split == 0,
          "counts: %lld dropped, %lld untrained", (long long)counts.dropped, (long long)counts.untrained);
    check(n_valid == split.n_targets && n_valid > 0, "%lld targets, counted %lld", (long long)n_valid,
          (long long)split.n_targets);
    check(split.n_windows < naive && split.n_windows * T >= counts.rows, "%lld windows, %lld the simple way",
          (long long)split.n_windows, (long long)naive);
    split_free(&split);
}

// What becomes of a document of n tokens, in windows of 8.
static void test_too_long(void) {
    static const struct {
        TooLong policy;
        int is_samples, n;
        int64_t windows, targets, truncated, split, dropped; // windows -1: refused
    } cases[] = {
        {TOO_LONG_AUTO, 1, 9, 1, 8, 0, 0, 0},    {TOO_LONG_AUTO, 1, 10, 1, 8, 1, 0, 0},
        {TOO_LONG_AUTO, 0, 10, 2, 9, 0, 1, 0},   {TOO_LONG_SPLIT, 1, 25, 3, 24, 0, 1, 0},
        {TOO_LONG_SPLIT, 1, 26, 4, 25, 0, 1, 0}, {TOO_LONG_TRUNCATE, 0, 26, 1, 8, 1, 0, 0},
        {TOO_LONG_DROP, 1, 10, 0, 0, 0, 0, 1},   {TOO_LONG_DROP, 1, 9, 1, 8, 0, 0, 0},
        {TOO_LONG_ERROR, 1, 10, -1, 0, 0, 0, 0}, {TOO_LONG_ERROR, 1, 9, 1, 8, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        PackRules rules = {8, PACK_MASK, cases[i].policy};
        PackCounts counts;
        Split split;
        TokenStream stream;
        memset(&counts, 0, sizeof counts);
        stream_init(&stream);
        stream.is_samples = cases[i].is_samples;
        stream_begin_document(&stream);
        for (int t = 0; t < cases[i].n; t++) stream_put(&stream, t, 1);
        split_of(&split, stream);
        int result = split_layout(&split, &rules, &counts);
        if (cases[i].windows < 0)
            check_error(result, "--too-long error", "a document that is too long");
        else
            check(result == 0 && split.n_windows == cases[i].windows && split.n_targets == cases[i].targets &&
                      counts.truncated == cases[i].truncated && counts.split == cases[i].split &&
                      counts.dropped == cases[i].dropped,
                  "case %zu: %lld windows, %lld targets, %lld %lld %lld", i, (long long)split.n_windows,
                  (long long)split.n_targets, (long long)counts.truncated, (long long)counts.split,
                  (long long)counts.dropped);
        split_free(&split);
    }
    // a prompt as long as the context leaves nothing to train on
    Dataset data;
    Tokenizer tokenizer = byte_tokenizer();
    static const char line[] = "{\"prompt\":\"123456789\",\"completion\":\"x\"}";
    memset(&data, 0, sizeof data);
    write_file(scratch_path("prompt.jsonl"), line, strlen(line));
    check(dataset_read(&data, &data.train, scratch_path("prompt.jsonl"), &tokenizer) == 0 &&
              dataset_finish(&data, 9) == 0 && data.train.n_windows == 0 && data.packed.untrained == 1,
          "a prompt as long as the context: %lld windows", (long long)data.train.n_windows);
    dataset_close(&data);
    memset(&data, 0, sizeof data);
    data.too_long = TOO_LONG_ERROR, data.T = 9;
    check_error(dataset_read(&data, &data.train, scratch_path("prompt.jsonl"), &tokenizer), "line 1: 12 tokens",
                "a line that is too long");
    dataset_close(&data);
}

// Windows of a side, row by row.
static int same_windows(const Split *a, const Split *b, int T) {
    enum { MOST = 64 };
    uint32_t tokens[2][MOST];
    int32_t targets[2][MOST], starts[2][MOST];
    int same = a->n_windows == b->n_windows && a->n_targets == b->n_targets && a->masked == b->masked && T <= MOST;
    for (int64_t w = 0; w < a->n_windows && same; w++) {
        split_read(a, w, T, tokens[0], targets[0], starts[0]);
        split_read(b, w, T, tokens[1], targets[1], starts[1]);
        same = memcmp(tokens[0], tokens[1], sizeof(uint32_t) * (size_t)T) == 0 &&
               memcmp(targets[0], targets[1], sizeof(int32_t) * (size_t)T) == 0 &&
               memcmp(starts[0], starts[1], sizeof(int32_t) * (size_t)T) == 0;
    }
    return same;
}

// What another process gets is the same data with the same hash; the hash sees what is trained on and how it is packed.
static void test_data_sent(void) {
    Tokenizer tokenizer = byte_tokenizer();
    uint64_t hashes[5];
    static const char lines[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"U\"},{\"role\":\"assistant\",\"content\":"
        "\"A\"}]}\n{\"text\":\"some text\"}\n{\"prompt\":\"p\",\"completion\":\"c\"}\n"
        "{\"prompt\":\"qq\",\"completion\":\"ccc\"}\n";
    write_file(scratch_path("sent.jsonl"), lines, strlen(lines));
    for (int i = 0; i < 5; i++) {
        Dataset data, got;
        memset(&data, 0, sizeof data);
        data.val_share = 0.5;
        if (i == 1) data.train_on = TRAIN_ON_ALL;
        if (i == 2) data.pack = PACK_NOMASK;
        if (i == 4) data.pack = PACK_PLAIN;
        got = data;
        check(dataset_read(&data, &data.train, scratch_path("sent.jsonl"), &tokenizer) == 0 &&
                  dataset_finish(&data, i == 3 ? 20 : 40) == 0 && dataset_save(&data, scratch_path("sent.bin")) == 0 &&
                  dataset_load(&got, scratch_path("sent.bin"), BYTE_VOCAB) == 0 &&
                  dataset_finish(&got, i == 3 ? 20 : 40) == 0,
              "%s", error_message);
        hashes[i] = split_hash(&data.train);
        check(same_windows(&data.train, &got.train, data.T) && same_windows(&data.val, &got.val, data.T), "case %d", i);
        check(hashes[i] == split_hash(&got.train) && split_hash(&data.val) == split_hash(&got.val), "hash of case %d",
              i);
        for (int j = 0; j < i; j++) check(hashes[i] != hashes[j], "cases %d and %d have the same hash", i, j);
        dataset_close(&data);
        dataset_close(&got);
    }
}

// Token files of several documents: what is written is read again, in files of a certain size; what is broken is
// refused.
static void test_token_files(void) {
    enum { T = 48 };
    Tokenizer tokenizer = byte_tokenizer();
    TokenStream streams[2];
    Split split;
    Dataset data;
    PackRules rules = {T, PACK_AUTO, TOO_LONG_AUTO};
    PackCounts counts;
    int n_files = 0;
    char name[512], path[600];
    random_documents(&streams[0], 40, 30, 1);
    random_documents(&streams[1], 9, 70, 0);
    memset(&split, 0, sizeof split);
    for (int i = 0; i < 2; i++) *split_add(&split) = streams[i];
    snprintf(name, sizeof name, "%s", scratch_path("some"));
    check(token_files_write(split.streams, 2, BYTE_VOCAB, name, 300, &n_files) == 0 && n_files >= 3, "%d files: %s",
          n_files, error_message);
    check_error(token_files_write(split.streams, 2, BYTE_VOCAB, name, 300, &n_files), "there already", "a second time");
    for (int i = 0; i < 99; i++) {
        snprintf(path, sizeof path, "%s_%05d.bin", name, i);
        unlink(path);
    }
    // one document a file at least, and nothing lost
    for (int most = 1; most <= 100000; most *= 100) {
        int64_t n = 0, n_documents = 0;
        check(token_files_write(split.streams, 2, BYTE_VOCAB, name, most, &n_files) == 0, "%s", error_message);
        memset(&data, 0, sizeof data);
        snprintf(path, sizeof path, "%s_*.bin", name);
        check(dataset_read(&data, &data.train, path, &tokenizer) == 0 && data.train.n_streams == n_files, "%s",
              error_message);
        int64_t at[2] = {0, 0};
        for (int i = 0; i < data.train.n_streams; i++) {
            const TokenStream *got = &data.train.streams[i], *of = &split.streams[!got->is_samples];
            int64_t *from = &at[!got->is_samples];
            check(got->n == 0 || memcmp(got->tokens, of->tokens + *from, sizeof(uint32_t) * (size_t)got->n) == 0,
                  "tokens of file %d", i);
            check(got->n <= most || got->n_documents == 1, "file %d has %lld tokens", i, (long long)got->n);
            for (int64_t d = 0; d < got->n_documents; d++, n_documents++) {
                int64_t in_all = got->is_samples ? n_documents : n_documents - split.streams[0].n_documents;
                check(got->documents[d] + *from == of->documents[in_all], "document %lld", (long long)n_documents);
            }
            *from += got->n, n += got->n;
        }
        check(n == split.streams[0].n + split.streams[1].n, "%lld tokens", (long long)n);
        if (most == 10000) { // whole: the same windows
            memset(&counts, 0, sizeof counts);
            check(n_files == 2 && split_layout(&split, &rules, &counts) == 0 && dataset_finish(&data, T) == 0 &&
                      same_windows(&split, &data.train, T) && split_hash(&split) == split_hash(&data.train),
                  "windows of token files");
        }
        dataset_close(&data);
        for (int i = 0; i < n_files; i++) {
            snprintf(path, sizeof path, "%s_%05d.bin", name, i);
            if (i > 0 || most < 10000) unlink(path);
        }
    }
    // the file that is left, broken
    FileMap map;
    snprintf(path, sizeof path, "%s_00000.bin", name);
    check(file_map(&map, path) == 0, "%s", error_message);
    size_t n_whole = map.size;
    static const struct {
        int64_t at; // of 4 bytes, from the end if negative; 0: the file is cut short by 8
        uint32_t value;
        const char *message;
    } bad[] = {{0, 0, "cut short"},       {4, 3, "not a token file"},      {20, 41, "cut short"},
               {24, 1, "cut short"},      {24, 0x80000000u, "cut short"},  {12, 0x80000000u, "cut short"},
               {-8, 0, "not behind"},     {-4, 0x80000000u, "not behind"}, {-320, 1, "not behind"},
               {1024, 258, "vocabulary"}, {-8, 0x7fffffffu, "not behind"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        unsigned char *copy = (unsigned char *)malloc(n_whole);
        memcpy(copy, map.data, n_whole);
        size_t at = bad[i].at < 0 ? n_whole - (size_t)-bad[i].at : (size_t)bad[i].at;
        if (at > 0) memcpy(copy + at, &bad[i].value, 4);
        write_file(scratch_path("bad.bin"), copy, n_whole - (at == 0 ? 8 : 0));
        free(copy);
        memset(&data, 0, sizeof data);
        check_error(dataset_read(&data, &data.train, scratch_path("bad.bin"), &tokenizer), bad[i].message,
                    bad[i].message);
        dataset_close(&data);
    }
    file_unmap(&map);
    // held out are whole documents of the end
    memset(&data, 0, sizeof data);
    data.val_share = 0.25;
    check(dataset_read(&data, &data.train, path, &tokenizer) == 0 && data.val.n_streams == 1, "%s", error_message);
    const TokenStream *train = &data.train.streams[0], *val = &data.val.streams[0];
    check(train->n_documents + val->n_documents == 40 && train->n == split.streams[0].documents[train->n_documents] &&
              val->documents[0] == 0 && val->tokens == train->tokens + train->n && val->is_samples &&
              val->documents[1] == split.streams[0].documents[train->n_documents + 1] - train->n,
          "held out: %lld and %lld documents", (long long)train->n_documents, (long long)val->n_documents);
    dataset_close(&data);
    // version 1 has no documents
    memset(&data, 0, sizeof data);
    data.pack = PACK_MASK;
    check(dataset_read(&data, &data.train, write_tokens(20, 258, TOKENS_MAGIC, 0), &tokenizer) == 0, "%s",
          error_message);
    check_error(dataset_finish(&data, 8), "version 1", "packing of version 1");
    check_error(token_files_write(data.train.streams, 1, 258, scratch_path("again"), 10, &n_files), "version 1",
                "version 1 once more");
    dataset_close(&data);
    split_free(&split);
}

// --- The model

// A small model with heads the tensor cores take, and sequences of several documents of it.
typedef struct {
    Stage stage;
    Stream *stream;
    Batch packed, apart; // apart: a document a sequence
    float *grads[2];
    double loss[2];
} PackedModel;

enum { PACKED_T = 150, PACKED_B = 2 };

// Documents of the two sequences; one row, whole blocks of attention, across them.
static const int packed_lengths[PACKED_B][6] = {{1, 63, 64, 20, 2, 0}, {130, 17, 3, 0, 0, 0}};

static void packed_batches(PackedModel *m, int vocab) {
    int n = 0;
    for (int b = 0; b < PACKED_B; b++) {
        for (int i = 0, row = 0; packed_lengths[b][i] > 0; row += packed_lengths[b][i++], n++) {
            for (int t = 0; t < packed_lengths[b][i]; t++) {
                Philox draw = rand_block(3, RAND_TEST, 61, (uint64_t)(n * 1000 + t));
                size_t at = (size_t)b * PACKED_T + (size_t)(row + t), own = (size_t)n * PACKED_T + (size_t)t;
                m->packed.tokens[at] = m->apart.tokens[own] = draw.v[0] % (uint32_t)vocab;
                m->packed.targets[at] = m->apart.targets[own] =
                    t % 3 == 2 ? -1 : (int32_t)(draw.v[1] % (uint32_t)vocab);
                m->packed.starts[at] = row;
            }
            for (int t = packed_lengths[b][i]; t < PACKED_T; t++)
                m->apart.tokens[n * PACKED_T + t] = 0, m->apart.targets[n * PACKED_T + t] = -1;
        }
    }
    for (int i = 0; i < PACKED_B * PACKED_T; i++) m->packed.n_valid += m->packed.targets[i] >= 0;
    m->packed.masked = 1, m->apart.n_valid = m->packed.n_valid;
}

static void packed_gradients(PackedModel *m, int which, int micro_batch) {
    const Batch *batch = which ? &m->apart : &m->packed;
    check(stage_gradients(&m->stage, batch, micro_batch, &m->loss[which], NULL, NULL, m->stream) == 0, "%s",
          error_message);
    memcpy(m->grads[which], seen(m->stage.grads, m->stage.arena_floats, m->stream),
           sizeof(float) * (size_t)m->stage.arena_floats);
}

static void packed_case(Precision precision, int recompute, double tol) {
    enum { DOCUMENTS = 8 };
    PackedModel m;
    Config config;
    memset(&m, 0, sizeof m);
    m.stream = test_stream(precision, 2);
    check(config_from_spec(&config, "d=128,layers=2,heads=2,kv=1,ffn=96,vocab=97,ctx=256") == 0, "%s", error_message);
    check(stage_table(&m.stage, &config, 0, config.n_layers) == 0 &&
              stage_plan(&m.stage, 4, PACKED_T, 1, recompute) == 0 && stage_alloc(&m.stage, m.stream) == 0 &&
              batch_alloc(&m.packed, PACKED_B, PACKED_T) == 0 && batch_alloc(&m.apart, DOCUMENTS, PACKED_T) == 0,
          "%s", error_message);
    stage_init(&m.stage, 5);
    vector_scale(m.stage.params, m.stage.arena_floats, 3.0f, m.stream); // attention that is not flat
    for (int i = 0; i < 2; i++) m.grads[i] = (float *)malloc(sizeof(float) * (size_t)m.stage.arena_floats);
    packed_batches(&m, config.vocab);
    packed_gradients(&m, 1, 4);
    packed_gradients(&m, 0, 1);
    double loss_tol = tol < 1e-3 ? tol : 1e-3;
    check(fabs(m.loss[0] - m.loss[1]) <= loss_tol * m.loss[1], "packed loss %.9g, apart %.9g", m.loss[0], m.loss[1]);
    check_close(m.grads[0], m.grads[1], m.stage.arena_floats, tol, "gradient of packed documents");
    packed_gradients(&m, 0, 2);
    check_close(m.grads[0], m.grads[1], m.stage.arena_floats, tol, "gradient of both sequences at once");
    m.packed.masked = 0;
    packed_gradients(&m, 0, 2);
    double away = relative_error(m.grads[0], m.grads[1], m.stage.arena_floats);
    check(away > 4.0 * tol && away > 0.02, "without the mask the gradient is only %.3g away", away);
    check(fabs(m.loss[0] - m.loss[1]) > 4.0 * loss_tol * m.loss[1], "without the mask the loss is %g too", m.loss[0]);
    // with nothing to learn the gradient is zero, and beside what has it changes nothing
    m.packed.masked = 1;
    packed_gradients(&m, 0, 1);
    memcpy(m.grads[1], m.grads[0], sizeof(float) * (size_t)m.stage.arena_floats);
    for (int t = 0; t < PACKED_T; t++) m.packed.n_valid -= m.packed.targets[t] >= 0, m.packed.targets[t] = -1;
    packed_gradients(&m, 0, 1);
    check(isfinite(m.loss[0]) && m.loss[0] > 0.1 && relative_error(m.grads[0], m.grads[1], m.stage.arena_floats) > 0.1,
          "half of it: loss %g", m.loss[0]);
    for (int t = 0; t < PACKED_B * PACKED_T; t++) m.packed.targets[t] = -1;
    m.packed.n_valid = 0;
    packed_gradients(&m, 0, 1);
    double size = 0.0;
    for (int64_t i = 0; i < m.stage.arena_floats; i++) size += fabs((double)m.grads[0][i]);
    check(size == 0.0 && m.loss[0] == 0.0, "nothing to learn: loss %g, gradient %g", m.loss[0], size);
    for (int i = 0; i < 2; i++) free(m.grads[i]);
    stage_free(&m.stage);
    batch_free(&m.packed);
    batch_free(&m.apart);
    stream_destroy(m.stream);
}

// Packed documents give the loss and the gradient that they give in sequences of their own, to rounding, and without
// the mask they do not.
// Must fail for: positions that go on, a mask that is left out in forward or backward or when activations are
// recomputed, starts of another micro-batch.
static void test_packed_model(void) {
    for (int recompute = 0; recompute < 2; recompute++) {
        if (device_has_fp32()) packed_case(PRECISION_FP32, recompute, 1e-6);
        if (device_has_bf16()) packed_case(PRECISION_BF16, recompute, model_tol(3e-3, 2e-2));
    }
}

// --- The program

static void write_talk(void) {
    FILE *file = fopen(scratch_path("talk.jsonl"), "w");
    for (int i = 0; i < 60; i++) {
        if (i % 3 == 2)
            fprintf(file, "{\"prompt\": \"%d squared: \", \"completion\": \"%d\"}\n", i, i * i);
        else
            fprintf(
                file,
                "{\"messages\": [{\"role\": \"user\", \"content\": \"%d?\"}, {\"role\": \"assistant\", \"content\": "
                "\"%s\"}]}\n",
                i, i % 2 ? "odd" : "even");
    }
    fclose(file);
}

#define TALK                                                                                                           \
    "--init d=24,layers=6,heads=4,kv=2,ffn=40,vocab=258,ctx=128 -d @/talk.jsonl -b 5 --micro-batch 2 -t 64 -l 1e-2 "   \
    "--threads 2 --precision fp32 --wire fp32 --val-tokens 300 "

#ifndef DEVICE_CUDA // reads the host's tensors
// What the cells of a pipeline compute of packed windows is what the model by itself does.
// Must fail for: starts that a cell leaves out, forward or backward, or takes from another micro-batch.
static void test_packed_cells(void) {
    static const char *const words[] = {"-y 1", "-y 3", "-y 2 --recompute"};
    write_talk();
    for (int i = 0; i < 3; i++) {
        char command[1024];
        double loss;
        int64_t n, n_model;
        snprintf(command, sizeof command, TALK "-n 9 -l 0 --clip 0 %s", words[i]);
        MeshRun *run = mesh_run_open(command), *one = mesh_run_open(TALK "-n 9 -l 0 -y 1");
        Stage *model = mesh_model(&one->trainer.mesh, 0);
        mesh_run_step(run);
        float *cells = replica_values(run, 0, ARENA_GRADS, &n);
        check(run->batches->masked && run->batches->starts[63] > 0, "nothing is packed");
        check(stage_gradients(model, run->batches, 2, &loss, NULL, NULL, one->trainer.stream) == 0, "%s",
              error_message);
        float *whole = replica_values(one, 0, ARENA_GRADS, &n_model);
        check(n == n_model && fabs(loss - run->result.loss) <= 1e-12 * loss, "%s: loss %.17g, not %.17g", words[i],
              run->result.loss, loss);
        check(memcmp(cells, whole, sizeof(float) * (size_t)n) == 0, "%s: other gradients, %.3g away", words[i],
              relative_error(cells, whole, n));
        free(cells);
        free(whole);
        mesh_run_close(run);
        mesh_run_close(one);
    }
}
#endif

// Runs on packed conversations: stages, token files and a resumed run give the same losses.
static void test_packed_runs(void) {
    char command[1024];
    write_talk();
    check_run(0, NULL, TALK "-n 6 --clip 0 -y 1 -o @/talk1", "packed into");
    char *one = logged_losses("talk1");
    static const char *const others[] = {"-y 3 --recompute", "-y 6"};
    for (int i = 0; i < 2; i++) {
        snprintf(command, sizeof command, TALK "-n 6 --clip 0 %s -o @/talk_y%d", others[i], i);
        check_run(0, NULL, command, "done: 6 steps");
        snprintf(command, sizeof command, "talk_y%d", i);
        char *these = logged_losses(command);
        check(strlen(one) > 40 && strcmp(one, these) == 0, "%s: other losses:\n%s\n%s", others[i], one, these);
        free(these);
    }
    check_run(0, NULL, TALK "-n 6 --clip 0 --pack nomask -o @/talk_open", "see all of themselves");
    char *open_losses = logged_losses("talk_open");
    check(strcmp(one, open_losses) != 0, "the mask changes nothing");
    free(open_losses);
    check_run(0, NULL, TALK "-n 6 --stop-after 3 -o @/talk_half", "stopped after step 3");
    check_run(0, NULL, "--resume -o @/talk_half", "done: 6 steps");
    check_run(0, NULL, TALK "-n 6 -o @/talk_whole", "done: 6 steps");
    check_same_run("talk_whole", "talk_half");
    check_run(1, NULL, "--resume -o @/talk_half --train-on all", "");
    // token files: conversations keep their masks and documents
    check_run(0, NULL, TALK "--tokenize @/talk", "60 conversations and prompts into 1 files");
    check_run(1, NULL, TALK "--tokenize @/talk", "there already");
    check_run(0, NULL, TALK "-n 6 --clip 0 --val-data @/talk.jsonl -o @/talk_text", "done: 6 steps");
    check_run(0, NULL,
              "--init d=24,layers=6,heads=4,kv=2,ffn=40,vocab=258,ctx=128 -d @/talk_train_00000.bin -b 5 "
              "--micro-batch 2 -t 64 -l 1e-2 --threads 2 --precision fp32 --wire fp32 --val-tokens 300 -n 6 --clip 0 "
              "--val-data @/talk.jsonl -o @/talk_file",
              "done: 6 steps");
    char *text = logged_losses("talk_text"), *file = logged_losses("talk_file");
    check(strlen(text) > 40 && strcmp(text, file) == 0, "token files: other losses:\n%s\n%s", text, file);
    free(text);
    free(file);
    free(one);
    // fewer sequences than a batch, and an anchor that trains on them
    check_run(0, NULL, TALK "-n 3 -b 40 -o @/talk_few", "done: 3 steps");
    check_run(0, NULL, TALK "-n 4 -y 3 -p 0.5 -x 2 --anchor-delay 1 -o @/talk_anchor", "done: 4 steps");
}

// What is shown, and what is refused.
static void test_show_data(void) {
    static const char lines[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\\u001b[1m\"},{\"role\":\"assistant\","
        "\"content\":\"b\"}]}\n";
    static const char deaf[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"nobody answers\"}]}\n";
    write_file(scratch_path("shown.jsonl"), lines, strlen(lines));
    write_file(scratch_path("deaf.jsonl"), deaf, strlen(deaf));
#define SHOW "--init d=24,layers=2,heads=2,kv=1,ffn=32,vocab=258,ctx=64 -b 2 -t 32 --threads 1 --val-fraction 0 "
    check_run(0, NULL, SHOW "-d @/shown.jsonl --show-data 3", "<|bos|>user: a\\x1b[1m\nassistant: [[b<|eos|>]]\n");
    check(strstr(run_output, "--- 1:") != NULL && strstr(run_output, "--- 2:") == NULL, "shown: %s", run_output);
    check_run(0, NULL, SHOW "-d @/shown.jsonl --show-data 1 -t 6 --too-long split --train-on all", " [[a\\x1b[1m\n]]");
    check_run(1, NULL, SHOW "-d @/deaf.jsonl -n 1 -o @/deaf", "nothing would be trained");
    check(strstr(run_output, "--train-on assistant") != NULL, "the option is not named: %s", run_output);
    check_run(1, NULL, SHOW "-d @/deaf.jsonl -n 1 --pack plain -o @/deaf", "nothing would be trained");
    check_run(0, NULL, SHOW "-d @/deaf.jsonl -n 1 --train-on all -o @/deaf_all", "done: 1 steps");
    check_run(1, NULL, SHOW "-d @/deaf.jsonl -t 8 -n 1 --train-on all --too-long drop -o @/dropped", "--too-long drop");
    check_run(1, NULL, SHOW "-d @/deaf.jsonl -t 8 --too-long error --show-data 1", "deaf.jsonl: line 1:");
    check_run(1, NULL, SHOW "-d @/shown.jsonl --chat-template llama3 --show-data 1", "<|start_header_id|>");
    write_corpus();
    check_run(1, NULL, SHOW "-d @/corpus.jsonl --too-long drop --show-data 1", "--too-long has no effect");
    check_run(1, NULL, SHOW "-d @/corpus.jsonl --tokenize @/x --show-data 1", "one at a time");
    check_run(0, NULL, SHOW "-d @/corpus.jsonl --pack mask --show-data 1", "packed into");
#undef SHOW
}

#ifdef WITH_ZMQ
#ifndef DEVICE_CUDA
// The data that joiners get are the coordinator's, masks and documents too: the same bits as in one process.
static void test_packed_processes(void) {
    static const struct {
        const char *words;
        int joiners;
    } cases[] = {{"-y 3", 2}, {"-x 2 -y 2 -p 0.5 --anchor-delay 2", 2}, {ASYNC "-y 3", 2}};
    char words[1024], name[32];
    write_talk();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(name, sizeof name, "talk%zu", i);
        snprintf(words, sizeof words, TALK "%s -n 6 --val-every 3 --save-every 4", cases[i].words);
        check_processes_as_one(words, name, cases[i].joiners, "done: 6 steps", i == 1);
    }
}
#endif
#endif
#undef TALK

#endif
