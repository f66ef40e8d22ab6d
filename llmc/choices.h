// Multiple-choice questions as MedMCQA, ARC, SciQ and HellaSwag are scored: which choice is the likeliest to follow the
// context. One a line:
//
//   {"context": "Question: ...\nAnswer:", "choices": [" yes", " no"], "answer": 0}
//
// A choice is put behind the context as it stands, so it begins with its space. Both are tokenized as one text; what
// differs from the context's own tokens is the choice's, so that a space or a word that the tokenizer joins over the
// seam is scored and nothing is counted twice. A text begins as the model's texts do; a row too long for the model
// loses tokens at the context's left.
//
//   Quiz quiz; quiz_read(&quiz, path, &tokenizer, T);   // then quiz.choices[c].logprob by a model
//   QuizScore score = quiz_score(&quiz);
#ifndef LLMC_CHOICES_H
#define LLMC_CHOICES_H

#include <jansson.h> // questions, results
#include <math.h>    // sqrt
#include <stdint.h>  // fixed-width integers
#include <stdlib.h>  // malloc, qsort
#include <string.h>  // memcpy

#include "error.h"
#include "file.h" // FileMap, FileWriter
#include "jsonl.h"
#include "tokenizer.h"

// A choice behind its context: tokens[first .. first+n-1] of the quiz, of which the last `scored` are the choice's.
typedef struct {
    int64_t first;
    int n, scored;
    int n_bytes;    // of the choice without the space before it
    double logprob; // nats, the sum over the scored tokens
} Choice;

typedef struct {
    int64_t first; // of its choices
    int n, answer;
    int64_t line; // of the file
} Question;

typedef struct {
    Question *questions;
    Choice *choices;
    uint32_t *tokens;
    int64_t n_questions, n_choices, n_tokens;
    int64_t questions_room, choices_room, tokens_room;
    int64_t n_cut; // choices whose context has lost its left
} Quiz;

// How a choice's log-likelihood is compared with the others': as it is, by byte, by token.
typedef enum { NORM_SUM, NORM_BYTES, NORM_TOKENS, NORMS } Norm;

typedef struct {
    double accuracy[NORMS], error[NORMS]; // share of questions; standard error of that mean
} QuizScore;

static inline void quiz_free(Quiz *quiz) {
    free(quiz->questions);
    free(quiz->choices);
    free(quiz->tokens);
    memset(quiz, 0, sizeof *quiz);
}

// A list with room for `needed` items, itself or a larger one; NULL when out of memory.
static inline void *grown(void *list, int64_t *room, int64_t needed, size_t size) {
    if (needed <= *room) return list;
    *room = needed + needed / 2 + 16;
    return realloc(list, (size_t)*room * size);
}

static inline int quiz_make_room(Quiz *quiz, int64_t n_tokens) {
    void *questions = grown(quiz->questions, &quiz->questions_room, quiz->n_questions + 1, sizeof(Question));
    if (questions != NULL) quiz->questions = (Question *)questions;
    void *choices = grown(quiz->choices, &quiz->choices_room, quiz->n_choices + 1, sizeof(Choice));
    if (choices != NULL) quiz->choices = (Choice *)choices;
    void *tokens = grown(quiz->tokens, &quiz->tokens_room, quiz->n_tokens + n_tokens, sizeof(uint32_t));
    if (tokens != NULL) quiz->tokens = (uint32_t *)tokens;
    return questions != NULL && choices != NULL && tokens != NULL ? 0 : error_set("out of memory for the questions");
}

// What is wrong with a question, NULL if nothing is.
static inline const char *question_fault(const json_t *line) {
    const json_t *choices = json_object_get(line, "choices"), *answer = json_object_get(line, "answer"), *choice;
    size_t i;
    if (!json_is_string(json_object_get(line, "context"))) return "no \"context\" string in it";
    if (!json_is_array(choices) || json_array_size(choices) < 2) return "no \"choices\" of at least two strings in it";
    if (json_array_size(choices) > 1000) return "more than 1000 choices";
    json_array_foreach((json_t *)choices, i, choice) {
        const char *text = json_string_value(choice);
        if (text == NULL) return "a choice is not a string";
        if (strspn(text, " \n\t") == json_string_length(choice)) return "a choice is empty";
    }
    if (!json_is_integer(answer)) return "no \"answer\" in it, the number of the right choice from 0";
    if (json_integer_value(answer) < 0 || json_integer_value(answer) >= (json_int_t)json_array_size(choices))
        return "\"answer\" is not the number of a choice, from 0";
    return NULL;
}

// Scratch of quiz_add: the whole text, its tokens, and the context's alone.
typedef struct {
    char *text;
    uint32_t *whole, *context;
    int64_t n_context;
} QuizText;

// Tokens of context and choice behind each other, cut to T+1, to the quiz. 0, or -1 with the reason alone.
static inline int quiz_add_choice(Quiz *quiz, const Tokenizer *tokenizer, const QuizText *t, int64_t length, int T) {
    int64_t n = tokenizer_encode(tokenizer, t->whole, t->text, length), same = 0;
    if (n < 0) return -1;
    while (same < n && same < t->n_context && t->whole[same] == t->context[same]) same++;
    int64_t scored = n - same;
    int begin = tokenizer->bos >= 0 ? tokenizer->bos : tokenizer->eos;
    int start = tokenizer_adds_bos(tokenizer) || same == 0 ? begin : -1, starts = start >= 0;
    if (same + starts == 0) return error_set("the context is empty, and this model has no token that begins a text");
    if (scored == 0) return error_set("a choice adds no token to its context");
    if (scored > T) return error_set("a choice has %lld tokens, and %d fit", (long long)scored, T);
    int64_t kept = n + starts > T + 1 ? T + 1 - starts : n;
    Choice *choice = &quiz->choices[quiz->n_choices];
    uint32_t *to = quiz->tokens + quiz->n_tokens;
    choice->first = quiz->n_tokens, choice->n = (int)(kept + starts), choice->scored = (int)scored;
    if (starts) *to++ = (uint32_t)start;
    memcpy(to, t->whole + (n - kept), sizeof *to * (size_t)kept);
    quiz->n_tokens += kept + starts, quiz->n_choices++, quiz->n_cut += kept < n;
    return 0;
}

// Adds a question that question_fault has nothing against. 0, or -1 with the reason alone.
static inline int quiz_add(Quiz *quiz, const json_t *line, int64_t number, const Tokenizer *tokenizer, int T) {
    const json_t *context = json_object_get(line, "context"), *choices = json_object_get(line, "choices"), *choice;
    size_t n = json_string_length(context), longest = 0, i;
    json_array_foreach((json_t *)choices, i, choice) {
        if (json_string_length(choice) > longest) longest = json_string_length(choice);
    }
    if (n + longest > INT32_MAX / 8) return error_set("a question of more than 256 MB");
    size_t room = (size_t)tokenizer_room(tokenizer, (int64_t)(n + longest)) + 8;
    if (room < n + longest + 8) room = n + longest + 8; // of the text
    QuizText t = {(char *)malloc(room), (uint32_t *)malloc(room * sizeof(uint32_t)),
                  (uint32_t *)malloc(room * sizeof(uint32_t)), 0};
    int result = t.text != NULL && t.whole != NULL && t.context != NULL ? 0 : error_set("out of memory");
    Question question = {quiz->n_choices, (int)json_array_size(choices),
                         (int)json_integer_value(json_object_get(line, "answer")), number};
    if (result == 0) {
        memcpy(t.text, json_string_value(context), n);
        t.n_context = tokenizer_encode(tokenizer, t.context, t.text, (int64_t)n);
        if (t.n_context < 0) result = -1;
    }
    json_array_foreach((json_t *)choices, i, choice) {
        const char *text = json_string_value(choice);
        size_t length = json_string_length(choice);
        if (result == 0) result = quiz_make_room(quiz, (int64_t)room + 1);
        if (result != 0) break;
        memcpy(t.text + n, text, length);
        quiz->choices[quiz->n_choices].n_bytes = (int)(length - strspn(text, " \n\t"));
        result = quiz_add_choice(quiz, tokenizer, &t, (int64_t)(n + length), T);
    }
    if (result == 0) quiz->questions[quiz->n_questions++] = question;
    free(t.text);
    free(t.whole);
    free(t.context);
    return result;
}

// The error of a line, with its place before what was wrong.
static inline int line_error(const JsonLines *lines, const char *reason) {
    char copy[512];
    snprintf(copy, sizeof copy, "%.511s", reason);
    return error_set("%s: line %lld: %s", lines->path, (long long)lines->line, copy);
}

// Reads and tokenizes a file of questions for a model that takes T tokens at once. 0, or -1 naming file and line.
static inline int quiz_read(Quiz *quiz, const char *path, const Tokenizer *tokenizer, int T) {
    FileMap map;
    JsonLines lines;
    json_t *json = NULL;
    int got, result = 0;
    memset(quiz, 0, sizeof *quiz);
    if (tokenizer_takes_text(tokenizer, path) || file_map(&map, path)) return -1;
    jsonl_begin(&lines, path, (const char *)map.data, map.size);
    while (result == 0 && (got = jsonl_next(&lines, &json)) != 0) {
        const char *fault = got < 0 ? NULL : question_fault(json);
        if (got < 0) {
            result = -1;
        } else {
            result = fault != NULL ? error_set("%s", fault) : quiz_add(quiz, json, lines.line, tokenizer, T);
            if (result != 0) line_error(&lines, error_message);
            json_decref(json);
        }
    }
    if (result == 0 && quiz->n_questions == 0) result = error_set("%s: there are no questions in it", path);
    jsonl_end(&lines);
    file_unmap(&map);
    if (result != 0) quiz_free(quiz);
    return result;
}

// A row to compute: a choice and its inputs.
typedef struct {
    int64_t choice;
    int n;
} QuizRow;

static inline int quiz_row_order(const void *a, const void *b) {
    const QuizRow *x = (const QuizRow *)a, *y = (const QuizRow *)b;
    if (x->n != y->n) return x->n > y->n ? -1 : 1;
    return x->choice < y->choice ? -1 : 1;
}

// All choices, the longest first, so that those computed together are of a length; NULL when out of memory.
static inline QuizRow *quiz_rows(const Quiz *quiz) {
    QuizRow *rows = (QuizRow *)malloc(sizeof(QuizRow) * (size_t)quiz->n_choices);
    if (rows == NULL) {
        error_set("out of memory for the questions");
        return NULL;
    }
    for (int64_t c = 0; c < quiz->n_choices; c++) rows[c].choice = c, rows[c].n = quiz->choices[c].n - 1;
    qsort(rows, (size_t)quiz->n_choices, sizeof *rows, quiz_row_order);
    return rows;
}

static inline double choice_value(const Choice *choice, Norm norm) {
    return choice->logprob / (norm == NORM_BYTES ? choice->n_bytes : norm == NORM_TOKENS ? choice->scored : 1);
}

// The choice with the largest value, the first of equal ones.
static inline int question_pick(const Quiz *quiz, const Question *question, Norm norm) {
    const Choice *choices = quiz->choices + question->first;
    int best = 0;
    for (int i = 1; i < question->n; i++)
        if (choice_value(&choices[i], norm) > choice_value(&choices[best], norm)) best = i;
    return best;
}

// Share of questions answered rightly, with sqrt(a(1-a)/(n-1)), 0 for one question.
static inline QuizScore quiz_score(const Quiz *quiz) {
    QuizScore score;
    double n = (double)quiz->n_questions;
    for (int norm = 0; norm < NORMS; norm++) {
        int64_t right = 0;
        for (int64_t q = 0; q < quiz->n_questions; q++)
            right += question_pick(quiz, &quiz->questions[q], (Norm)norm) == quiz->questions[q].answer;
        double a = (double)right / n;
        score.accuracy[norm] = a, score.error[norm] = n > 1.0 ? sqrt(a * (1.0 - a) / (n - 1.0)) : 0.0;
    }
    return score;
}

// What a question got, as an object: its line, answer, the picks, and of each choice log-likelihood, bytes and tokens.
static inline json_t *question_to_json(const Quiz *quiz, const Question *question) {
    json_t *logprobs = json_array(), *bytes = json_array(), *tokens = json_array();
    for (int i = 0; i < question->n; i++) {
        const Choice *choice = &quiz->choices[question->first + i];
        json_array_append_new(logprobs, json_real(choice->logprob));
        json_array_append_new(bytes, json_integer(choice->n_bytes));
        json_array_append_new(tokens, json_integer(choice->scored));
    }
    return json_pack("{s:I, s:i, s:i, s:i, s:i, s:o, s:o, s:o}", "line", (json_int_t)question->line, "answer",
                     question->answer, "pick", question_pick(quiz, question, NORM_SUM), "pick_bytes",
                     question_pick(quiz, question, NORM_BYTES), "pick_tokens",
                     question_pick(quiz, question, NORM_TOKENS), "logprobs", logprobs, "bytes", bytes, "tokens",
                     tokens);
}

// Appends an object as a line of JSON. Takes over the reference.
static inline int json_write_line(FileWriter *writer, json_t *json) {
    char *text = json != NULL ? json_dumps(json, JSON_COMPACT | JSON_REAL_PRECISION(15)) : NULL;
    json_decref(json);
    if (text == NULL) return error_set("%s: out of memory for a line", writer->path);
    file_write(writer, text, strlen(text));
    file_write(writer, "\n", 1);
    free(text);
    return 0;
}

// Writes a line for each question.
static inline int quiz_write(const Quiz *quiz, FileWriter *writer) {
    for (int64_t q = 0; q < quiz->n_questions; q++)
        if (json_write_line(writer, question_to_json(quiz, &quiz->questions[q]))) return -1;
    return 0;
}

#endif
