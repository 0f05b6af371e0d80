/*
Prompts in JSON Lines, and the answers of a model, as JSON Lines again: --generate-file, --eval-generate.
    {"messages": [{"role": "user", "content": "Hi"}], "tools": [...]}     a question in the model's chat template
    {"prompt": "Once upon a time"}                                        a text to go on with, as of --generate
A conversation in any form of conversations.h is a question too; where the last message is an answer, it is no part of
the question, but its "reference", as is "completion" or "answer" beside a prompt. A prompt may be messages, too.
    asker_init       what turns a conversation into a prompt; its chat template is looked for when one is needed
    asker_ask        the prompt of a conversation; asker_check: may somebody have said that?
    asker_most       how many tokens the answer may have
    questions_read   those of a file; each must leave room for a token behind it
    questions_answer   some of them, in order, written one by one:
                       {"messages" or "prompt", "answer": ..., "finish": "stop" or "length", "reference": ...}
    questions_answer_file   all of them, or those that the file does not have yet
Random numbers depend on (--seed, number of the prompt, number of the sample) alone. So an answer does not depend on
those before it, and where --generate-out has the first ones already, only the others are made; a half line is made
anew. What made those that are there is known by a file beside it (answers_file.h).
Cost:   as side_by_side.h, which makes several at a time, has it.
Errors: fail_input with file and line, before the model is read.
*/
#ifndef LLMC_QUESTIONS_H
#define LLMC_QUESTIONS_H
#include "../text/conversations.h"  // conversations_form_, conversations_markers_
#include "answers_file.h"           // answers_open, answers_check, answers_is_begun
#include "chat_options.h"           // ChatOptions, chat_options_template
#include "side_by_side.h"           // Generator, side_by_side, prompt_make

// ---- 1. From a conversation to a prompt ----

typedef struct {
    const ChatOptions* o;
    char folder[PATH_BYTES];  // where the chat template is
    const Tokenizer* k;
    const ImageMeasure* measure;  // NULL: the model reads no images
    char images_folder[PATH_BYTES];  // from which their paths go
    const char* stop_line;    // of --stop
    int is_open, thinks;      // thinks: an answer may have thoughts, where the template has them
    ChatTemplate t;
    Conversations c;          // with t, k and scratch
    StopTexts stop;           // those of --stop, and the marker that ends an answer
} Asker;

// a stays where it is: c looks into it
static inline void asker_init(Asker* a, const ChatOptions* o, const char* folder, const Tokenizer* k,
                              const ImageMeasure* measure, const char* stop_line) {
    memset(a, 0, sizeof *a);
    a->o = o;
    snprintf(a->folder, sizeof a->folder, "%s", folder);
    a->k = k;
    a->measure = measure;
    snprintf(a->images_folder, sizeof a->images_folder, ".");
    a->stop_line = stop_line;
    a->thinks = o->think;
}

static inline void asker_open(Asker* a) {
    ErrorText error;
    if (a->is_open) { return; }
    chat_options_template(&a->t, a->o, a->folder);
    conversations_init(&a->c, &a->t, a->k, 0, TRUNCATE_DROP);
    a->c.measure = a->measure;
    a->c.files.looks_again = 1;
    snprintf(a->c.folder, sizeof a->c.folder, "%s", a->images_folder);
    if (!stop_texts_parse(&a->stop, a->stop_line, &error)) { options_fail("stop", "%s", error.text); }
    stop_texts_add(&a->stop, chat_end_text(&a->t));
    a->is_open = 1;
}

static inline void asker_free(Asker* a) {
    if (!a->is_open) { return; }
    conversations_free(&a->c);
    chat_template_free(&a->t);
    stop_texts_free(&a->stop);
}

static inline int asker_has_thoughts(const Asker* a) { return chat_thinks(&a->t); }

// has nobody said a special token or a marker of turns, or shown what cannot be seen? 0: the reason
static inline int asker_check(Asker* a, const json_t* conversation, ErrorText* error) {
    return chat_render(&a->c.text, &a->t, conversation, CHAT_ASKS, error) && conversations_markers_(&a->c, error) &&
           conversations_files_(&a->c, error);
}

// where the images of the conversation that was rendered stand among its tokens
static inline void asker_place_images_(const Asker* a, TextImages* images) {
    const Conversations* c = &a->c;
    if (c->text.n_images == 0) { return; }
    images->of = (TextImage*)malloc_check(sizeof(TextImage) * (size_t)c->text.n_images, "images of a prompt");
    for (int i = 0; images->n < c->text.n_images; images->n++) {
        const ImageFile* file = &c->files.of[c->found[images->n]];
        while (c->sample.ids[i] != c->measure->pad) { i++; }
        const TextImage one = {i, file->n_tokens, string_copy(file->path), image_file_stamp(file)};
        images->of[images->n] = one;
        i += file->n_tokens;
    }
}

// the tokens up to where an answer begins; to be freed. 0: the reason
static inline int asker_ask(Asker* a, const json_t* conversation, Prompt* p, ErrorText* error) {
    const int choices = CHAT_ASKS | (a->thinks ? CHAT_THINKING : CHAT_NO_THINKING) | chat_options_choices(a->o);
    memset(p, 0, sizeof *p);
    if (!chat_render(&a->c.text, &a->t, conversation, choices, error) || !conversations_files_(&a->c, error)) {
        return 0;
    }
    chat_encode(&a->c.sample, a->k, &a->c.work, &a->c.text);
    if (!conversations_expand_(&a->c, error)) { return 0; }
    asker_place_images_(a, &p->images);
    p->n = a->c.sample.n;
    p->tokens = (int*)malloc_check(sizeof(int) * (size_t)p->n, "prompt");
    memcpy(p->tokens, a->c.sample.ids, sizeof(int) * (size_t)p->n);
    return 1;
}

// The tokens of an answer behind n_prompt of a conversation: the window does not move on, for then the model would no
// longer see what it was asked
static inline int asker_most(const Generator* g, int n_prompt) {
    const int left = g->room - n_prompt + 1;
    return left < g->o->max_new_tokens ? left : g->o->max_new_tokens;
}

// an answer piece by piece, into a ByteBuffer
static inline void asker_take(void* buffer, const char* text, size_t n_bytes) {
    buffer_append((ByteBuffer*)buffer, text, n_bytes);
}

// what was generated as JSON has it
static inline json_t* asker_text(const ByteBuffer* text) {
    ByteBuffer repaired = {NULL, 0, 0};
    utf8_repair(&repaired, text->bytes, text->n);
    json_t* json = json_stringn(repaired.n ? (const char*)repaired.bytes : "", repaired.n);
    buffer_free(&repaired);
    return json;
}

// ---- 2. Questions of a file ----

typedef struct {
    json_t* asked;      // {"messages": ...} or {"prompt": ...}, as the answer's record has it
    json_t* reference;  // NULL: none
    Prompt prompt;
    int is_chat;
    long long line;
} Question;

typedef struct {
    Question* list;
    int n, longest;  // longest: tokens of the longest prompt
    uint64_t xxh3;   // of the file
    json_t* settings;  // of answers_check; NULL: nobody asks what made the answers
} Questions;

enum { QUESTIONS_MAX = 1 << 24 };

static inline void questions_free(Questions* q) {
    for (int i = 0; i < q->n; i++) {
        json_decref(q->list[i].asked);
        json_decref(q->list[i].reference);
        prompt_free(&q->list[i].prompt);
    }
    json_decref(q->settings);
    free(q->list);
}

// a text under one of two names, a new reference; NULL: none
static inline json_t* question_text_(const json_t* row, const char* key, const char* other) {
    json_t* found = json_object_get(row, key);
    if (!json_is_string(found)) { found = json_object_get(row, other); }
    return json_is_string(found) ? json_incref(found) : NULL;
}

// has the line a key that asks? 0: the reason
static inline int question_has_key_(const json_t* row, ErrorText* error) {
    static const char* names[] = {"messages", "conversations", "instruction", "prompt"};
    char keys[128];
    for (int i = 0; i < 4; i++) {
        if (json_object_get(row, names[i])) { return 1; }
    }
    json_lines_keys_(keys, row);
    return error_set(error, "expected \"messages\", \"prompt\", \"conversations\" or \"instruction\", found %s",
                     *keys ? keys : "an empty object");
}

// the question of a conversation; an answer at its end becomes the reference. 0: the reason
static inline int question_of_chat_(Question* q, Asker* a, const json_t* row, ErrorText* error) {
    json_t *prompt = json_object_get(row, "prompt"), *named = NULL;
    if (!question_has_key_(row, error)) { return 0; }
    asker_open(a);
    if (json_is_array(prompt)) { named = json_pack("{s:O}", "messages", prompt); }
    q->is_chat = 1;
    q->asked = conversations_form_(&a->c, named ? named : row, error);
    json_decref(named);
    if (!q->asked) { return 0; }
    json_t* messages = json_object_get(q->asked, "messages");
    const size_t n = json_array_size(messages);
    const json_t* last = n > 0 ? json_array_get(messages, n - 1) : NULL;
    const char* role = json_string_value(json_object_get(last, "role"));
    if (role && strcmp(role, "assistant") == 0) {
        q->reference = question_text_(last, "content", "content");
        json_array_remove(messages, n - 1);
    }
    if (json_array_size(messages) == 0) { return error_set(error, "expected a question, found none"); }
    return asker_check(a, q->asked, error) && asker_ask(a, q->asked, &q->prompt, error);
}

static inline void question_of_text_(Question* q, const RunOptions* o, const Tokenizer* k, const json_t* row) {
    const json_t* text = json_object_get(row, "prompt");
    q->asked = json_pack("{s:O}", "prompt", text);
    q->reference = question_text_(row, "completion", "answer");
    ByteBuffer copy = {NULL, 0, 0};
    buffer_append(&copy, json_string_value(text), json_string_length(text) + 1);
    q->prompt = prompt_make(o, k, (char*)copy.bytes, json_string_length(text));
}

static inline void questions_add_(Questions* q, const Question* one) {
    if ((q->n & (q->n - 1)) == 0) {  // a power of two: full
        const size_t n_grown = q->n ? 2 * (size_t)q->n : 1;
        q->list = (Question*)realloc_check(q->list, n_grown * sizeof *one, "prompts");
    }
    q->list[q->n++] = *one;
    q->longest = one->prompt.n > q->longest ? one->prompt.n : q->longest;
}

// option --name has the path; max_T: positions of the model
static inline void questions_read(Questions* q, Asker* a, const RunOptions* o, const char* name, const char* path,
                                  int max_T) {
    PlainFile file;
    ErrorText error;
    int found;
    memset(q, 0, sizeof *q);
    plain_file_open(&file, path);
    q->xxh3 = XXH3_64bits(file.bytes, file.n_bytes);
    path_parent(a->images_folder, path);
    JsonLines lines = {file.bytes, file.n_bytes, 0, 0, NULL};
    while ((found = json_lines_row(&lines, "{\"messages\": [...]}", &error)) > 0) {
        Question one = {NULL, NULL, {NULL, 0, NULL, 0, {NULL, 0}}, 0, lines.number};
        if (json_is_string(json_object_get(lines.row, "prompt"))) { question_of_text_(&one, o, a->k, lines.row); }
        else if (!question_of_chat_(&one, a, lines.row, &error)) {
            fail_input("%s:%lld: %s", path, lines.number, error.text);
        }
        if (one.prompt.n > max_T) {
            fail_input("%s:%lld: expected a prompt of at most the model's %d positions, found %d tokens", path,
                       lines.number, max_T, one.prompt.n);
        }
        if (q->n == QUESTIONS_MAX) { options_fail(name, "%s: more than %d prompts", path, QUESTIONS_MAX); }
        questions_add_(q, &one);
    }
    if (found < 0) { fail_input("%s:%s", path, error.text); }
    json_lines_close(&lines);
    plain_file_close(&file);
    if (q->n == 0) { options_fail(name, "%s: expected a prompt on each line, found none", path); }
}

// for settings.json; null: none
static inline json_t* questions_to_json(const Questions* q, const char* path) {
    if (q->n == 0) { return json_null(); }
    return json_pack("{s:s, s:i, s:s}", "path", path, "prompts", q->n, "xxh3", hex_text(q->xxh3).s);
}

// ---- 3. Answers ----

// a record as a line of a file; takes the reference
static inline void question_write(FILE* out, json_t* record, const char* path) {
    char* line = json_dumps(record, JSON_COMPACT);
    if (!line) { fail_run("%s: no memory", path); }
    fprintf(out, "%s\n", line);
    if (fflush(out) != 0) { fail_run("%s: cannot be written: %s", path, strerror(errno)); }
    free(line);
    json_decref(record);
}

typedef struct {
    const Generator* g;
    const Asker* asker;
    const Questions* q;
    int n_samples;     // answer k is number k % n_samples of question k / n_samples
    int step;          // in the record; -1: not
    FILE* out;         // NULL: nowhere
    const char* path;  // its name
    ByteBuffer text;   // of the answer whose turn it is
} Answers;

static inline void answers_ask_(void* answers, int64_t k, TextAsked* asked) {
    const Answers* x = (const Answers*)answers;
    const int64_t i = k / x->n_samples;
    const Question* one = &x->q->list[i];
    asked->prompt = &one->prompt;
    asked->most = one->is_chat ? asker_most(x->g, one->prompt.n) : x->g->o->max_new_tokens;
    asked->stop = one->is_chat ? &x->asker->stop : x->g->stop;
    *asked->random = splitmix64(splitmix64((uint64_t)x->g->o->seed, (uint64_t)i), (uint64_t)(k % x->n_samples)) | 1;
}

static inline void answers_take_(void* answers, const char* text, size_t n_bytes) {
    asker_take(&((Answers*)answers)->text, text, n_bytes);
}

static inline void answers_ended_(void* answers, int64_t k, TextEnd end) {
    Answers* x = (Answers*)answers;
    const Question* one = &x->q->list[k / x->n_samples];
    json_t* record = json_copy(one->asked);
    json_object_set_new(record, "answer", asker_text(&x->text));
    json_object_set_new(record, "finish", json_string(end == TEXT_ENDED ? "stop" : "length"));
    if (one->reference) { json_object_set(record, "reference", one->reference); }
    if (x->step >= 0) { json_object_set_new(record, "step", json_integer(x->step)); }
    x->text.n = 0;
    if (!x->out) {
        json_decref(record);
        return;
    }
    question_write(x->out, record, x->path);
    progress("answers", k + 1, (int64_t)x->q->n * x->n_samples);
}

// answers first .. end-1 of n_samples to each question
static inline void questions_answer(Generator* g, const Asker* a, const Questions* q, int64_t first, int64_t end,
                                    int n_samples, int step, FILE* out, const char* path) {
    Answers x = {g, a, q, n_samples, step, out, path, {NULL, 0, 0}};
    const TextJob job = {&x, answers_ask_, answers_take_, answers_ended_};
    side_by_side(g, first, end, &job);
    buffer_free(&x.text);
}

// is the record an answer to this question?
static inline int question_is_of_(const Question* q, const json_t* record) {
    const char* key;
    json_t* value;
    json_object_foreach(q->asked, key, value) {
        if (!json_equal(value, json_object_get(record, key))) { return 0; }
    }
    return json_is_string(json_object_get(record, "answer"));
}

// How many answers the file has from an earlier start, each to its question; what is behind the last whole line goes,
// if the next record begins so
static inline int64_t questions_done_(const Questions* q, const char* path, int n_samples) {
    MappedFile file;
    ErrorText error;
    int64_t n_done = 0;
    if (!answers_is_plain(path)) { return 0; }
    file_map(&file, path);
    const char *bytes = (const char*)file.bytes, *end = (const char*)memrchr(bytes, '\n', file.n_bytes);
    const size_t n_whole = end ? (size_t)(end - bytes) + 1 : 0;
    JsonLines lines = {file.bytes, n_whole, 0, 0, NULL};
    for (int found; (found = json_lines_row(&lines, "{\"answer\": \"...\"}", &error)) != 0; n_done++) {
        const int64_t i = n_done / n_samples;
        if (found > 0 && i < q->n && question_is_of_(&q->list[i], lines.row)) { continue; }
        options_fail("generate-out", "%s:%lld: expected the answer to a prompt of --generate-file, found something "
                     "else: give another name, or remove it", path, lines.number);
    }
    json_lines_close(&lines);
    const int is_half = file.n_bytes > n_whole, has_next = n_done < (int64_t)q->n * n_samples;
    if (is_half && !(has_next && answers_is_begun(q->list[n_done / n_samples].asked, bytes + n_whole,
                                                  file.n_bytes - n_whole))) {
        options_fail("generate-out", "%s: expected answers, found something else%s: give another name, or remove it",
                     path, n_done > 0 ? " behind them" : "");
    }
    file_unmap(&file);
    if (q->settings) { answers_check(path, n_done > 0, q->settings); }
    if (is_half && truncate(path, (off_t)n_whole) != 0) { fail_run("%s: cannot be cut: %s", path, strerror(errno)); }
    return n_done;
}

// --samples answers to each, into the file of --generate-out; "": standard output
static inline void questions_answer_file(Generator* g, const Asker* a, const Questions* q, const char* path) {
    const int n_samples = g->o->samples;
    const int64_t n = (int64_t)q->n * n_samples;
    int64_t first = 0;
    FILE* out = stdout;
    if (*path) {
        out = answers_open(path);
        first = questions_done_(q, path, n_samples);
    }
    if (first > 0) {
        warn_line("%s: has %lld of %lld answers, %s; for new ones remove it", path, (long long)first, (long long)n,
                  first < n ? "the others follow" : "so nothing is left to do");
    }
    questions_answer(g, a, q, first, n, n_samples, -1, out, *path ? path : "standard output");
    if (out != stdout && fclose(out) != 0) { fail_run("%s: cannot be written: %s", path, strerror(errno)); }
}
#endif  // LLMC_QUESTIONS_H
