/*
Conversations to learn from: JSON Lines, also packed by gzip (gunzip.h), each line one sample in one of three forms,
told apart by their keys, line by line:
    {"messages": [{"role": "user", "content": "Hi"}, ...], "tools": [...]}             chat_render.h says all of it
    {"conversations": [{"from": "human", "value": "Hi"}, ...], "system": "", "tools": [...]}               ShareGPT
    {"instruction": "Add", "input": "2, 2", "output": "4", "system": "", "history": [["Hi", "Hello"]]}       alpaca
ShareGPT: human or user; gpt, assistant, model or chatgpt; system; tool, observation or function_response; and
function_call, whose value is {"name": ..., "arguments": {...}} as text. Roles may be spelled as in messages instead.
Alpaca: what the user says is the instruction and, a line below, the input if there is one; "response" is another name
of "output"; "history" holds the turns before. "tools" may be a list or its text. Each form may have "images", paths of
image files from the folder of the JSON Lines, or one as "image" (chat_render.h: where in the texts they stand).
    conversations_init     of a template and a tokenizer
    conversations_read     the samples of a path as pathlist.h and filelist.h have it, several with commas between
    conversations_say      how many samples there are, what is learned of them, and why others are left out
    conversations_drop_tokens   once nobody asks for samples any more: what conversations_say needs stays
Each sample is stored as tokens, a learned one as itself, another one as its complement, ~id: from its first token to
the last one that is learned, for what comes behind trains nothing. The first two are never learned: nothing predicts
the first, and both belong to the header of a turn, whatever the template.
Images: with an ImageMeasure (row_images.h) the one <|image_pad|> of each becomes as many placeholders as the model has
for it, before anything is cut; none of them is learned, in an answer neither. `images` says where they begin.
Left out and counted, with the first few of each kind named by file and line:
    no JSON object; no conversation (keys, roles, types); turns or tools that the template does not have;
    no answer, or an empty one;
    a special token or a marker of the template in what somebody says, for it would end the turn;
    too long; nothing that is learned within the length;
    a video, an image in the network, or any image without an ImageMeasure; an image file that cannot be read
A sample longer than so many tokens is left out, or its end is. Then the marker that ends its answer is not learned, but
neither is anything else in its place. A cut that would take an image along, or a part of one, leaves the sample out.
With last_only the last answer of each is learned and no other.
Arguments of tool calls that came as the text of an object become the object where the template would write a text in
quotes (qwen2.5, mistral-v3).
Cost:   a line is in memory at a time, beside 4 bytes a token, placeholders too.
Errors: fail_input where no sample is left at all, with the most frequent reason.
*/
#ifndef LLMC_CONVERSATIONS_H
#define LLMC_CONVERSATIONS_H
#include "../core/print.h"  // progress
#include "chat_render.h"    // ChatText, chat_render, chat_encode, SampleReason
#include "filelist.h"       // FileList, file_list_make
#include "gunzip.h"         // PlainFile, plain_file_open
#include "jsonlines.h"      // JsonLines, json_lines_row
#include "pathlist.h"       // PathList, path_list_make
#include "row_images.h"     // ImageMeasure, ImageFiles

typedef enum { TRUNCATE_DROP, TRUNCATE_END } Truncate;
#define TRUNCATE_NAMES "drop|end"

// in the order of SampleReason
#define SAMPLE_REASONS                                                                                                 \
    "used|no JSON object|no conversation|turns that the template does not have|tools that it does not have|"           \
    "no answer or an empty one|a special token in a text|nothing learned|too long|"                                    \
    "images or videos that this model does not read|an image file that cannot be read"

enum { SAMPLES_NAMED = 3 };

// an image of a sample
typedef struct {
    int64_t at;  // its first placeholder in `tokens`
    int file;    // of `files`
} SampleImage;

typedef struct {
    const ChatTemplate* t;
    const Tokenizer* k;
    const ImageMeasure* measure;  // NULL: the model reads no images
    int choices;                  // of chat_render
    int most_tokens;           // of a sample, 0: any number
    Truncate truncate;
    int last_only;             // of several answers only the last is learned
    const char* limit_option;  // that takes longer ones, for messages; NULL: none does
    int* tokens;               // of all samples; of one that is not learned ~id
    int64_t* starts;           // (n + 1) sample i is tokens[starts[i] .. starts[i+1])
    int64_t n, capacity, tokens_capacity;
    int64_t n_lines, n_learned, n_cut, n_reasons[N_SAMPLE_REASONS];
    int64_t n_longest, n_needed;  // tokens of the longest sample that is used, and of the longest there was
    SampleImage* images;          // of all samples, in the order of their tokens
    int64_t n_images, images_capacity;
    ImageFiles files;
    char folder[PATH_BYTES];      // of the file that is being read
    int* found;                   // the image files of the sample that is being read: of its n-th image
    int found_capacity;
    char* named[N_SAMPLE_REASONS][SAMPLES_NAMED];  // "data.jsonl:3: ..." of the first of each reason
    ChatText text;
    ChatTokens sample;
    TokenizerWork work;
} Conversations;

// k must be able to encode; most_tokens: of a sample, 0: any number
static inline void conversations_init(Conversations* c, const ChatTemplate* t, const Tokenizer* k, int most_tokens,
                                      Truncate truncate) {
    memset(c, 0, sizeof *c);
    c->t = t;
    c->k = k;
    c->most_tokens = most_tokens;
    c->truncate = truncate;
    c->limit_option = "--max-length";
    c->starts = (int64_t*)malloc_check(sizeof(int64_t), "samples");
    c->starts[0] = 0;
    tokenizer_work_init(&c->work, k, 1 << 20);
}

static inline void conversations_drop_tokens(Conversations* c) {
    chat_text_free(&c->text);
    chat_tokens_free(&c->sample);
    tokenizer_work_free(&c->work);
    image_files_free(&c->files);
    free(c->tokens);
    free(c->images);
    free(c->found);
    c->tokens = c->found = NULL;
    c->images = NULL;
}

static inline void conversations_free(Conversations* c) {
    for (int i = 0; i < N_SAMPLE_REASONS * SAMPLES_NAMED; i++) { free(c->named[i / SAMPLES_NAMED][i % SAMPLES_NAMED]); }
    conversations_drop_tokens(c);
    free(c->starts);
    memset(c, 0, sizeof *c);
}

// the tokens of sample i, n of them
static inline const int* conversations_sample(const Conversations* c, int64_t i, int* n) {
    *n = (int)(c->starts[i + 1] - c->starts[i]);
    return c->tokens + c->starts[i];
}

static inline int conversations_id(int token) { return token >= 0 ? token : ~token; }

// ---- 1. Three forms of a line become one ----

static inline void conversations_add_(json_t* messages, const char* role, json_t* content) {
    json_array_append_new(messages, json_pack("{s:s, s:O}", "role", role, "content", content));
}

// a text that is there and not empty
static inline json_t* conversations_text_(const json_t* row, const char* key) {
    json_t* found = json_object_get(row, key);
    return json_is_string(found) && json_string_length(found) > 0 ? found : NULL;
}

// instruction, and on the next line the input
static inline json_t* conversations_question_(const json_t* row) {
    json_t *instruction = json_object_get(row, "instruction"), *input = conversations_text_(row, "input");
    if (!json_is_string(instruction) || !input) { return json_incref(instruction); }
    return json_pack("s%+%+%", json_string_value(instruction), json_string_length(instruction), "\n", (size_t)1,
                     json_string_value(input), json_string_length(input));
}

// 0: the reason
static inline int conversations_from_alpaca_(json_t* messages, const json_t* row, ErrorText* error) {
    const json_t* history = json_object_get(row, "history");
    json_t *output = json_object_get(row, "output"), *system = conversations_text_(row, "system");
    if (!output) { output = json_object_get(row, "response"); }
    if (!json_is_string(json_object_get(row, "instruction")) || !json_is_string(output)) {
        return error_set(error, "expected texts as \"instruction\" and \"output\"");
    }
    if (system) { conversations_add_(messages, "system", system); }
    for (size_t i = 0; i < json_array_size(history); i++) {
        const json_t* turn = json_array_get(history, i);
        if (json_array_size(turn) != 2) { return error_set(error, "expected [question, answer] in \"history\""); }
        conversations_add_(messages, "user", json_array_get(turn, 0));
        conversations_add_(messages, "assistant", json_array_get(turn, 1));
    }
    json_t* question = conversations_question_(row);
    conversations_add_(messages, "user", question);
    conversations_add_(messages, "assistant", output);
    json_decref(question);
    return 1;
}

// The value that a text holds as JSON, an object or a list, within the bounds of a line; NULL: it is something else
static inline json_t* conversations_parse_(const json_t* text) {
    const JsonBudget most = {JSON_LINE_BYTES, JSON_LINE_DEPTH, JSON_LINE_MARKS, 0};
    ByteBuffer object = {NULL, 0, 0};
    json_error_t error;
    if (!json_is_string(text)) { return NULL; }
    buffer_append_text(&object, "{\"value\": ");  // so that a list has one around it, as strict JSON wants
    buffer_append(&object, json_string_value(text), json_string_length(text));
    buffer_append_text(&object, "}");
    json_t* parsed = json_parse_within((const char*)object.bytes, object.n, &most, &error);
    json_t* value = json_object_size(parsed) == 1 ? json_incref(json_object_get(parsed, "value")) : NULL;
    json_decref(parsed);
    buffer_free(&object);
    if (json_is_object(value) || json_is_array(value)) { return value; }
    json_decref(value);
    return NULL;
}

// {"name": ..., "arguments": ...} as text, or a list of them: an answer that calls tools
static inline int conversations_add_calls_(json_t* messages, const json_t* text) {
    json_t* calls = conversations_parse_(text);
    if (json_is_object(calls)) { calls = json_pack("[o]", calls); }
    if (!calls) { return 0; }
    json_t* message = json_pack("{s:s, s:s, s:o}", "role", "assistant", "content", "", "tool_calls", calls);
    json_array_append_new(messages, message);
    return 1;
}

#define SHAREGPT_ROLES                                                                                                 \
    "system|human,user|gpt,assistant,model,chatgpt|tool,observation,function_response,function_results|function_call"

// 0: the reason
static inline int conversations_from_sharegpt_(json_t* messages, const json_t* row, ErrorText* error) {
    static const char* roles[] = {"system", "user", "assistant", "tool"};
    const json_t* turns = json_object_get(row, "conversations");
    json_t* system = conversations_text_(row, "system");
    if (system) { conversations_add_(messages, "system", system); }
    if (!json_is_array(turns)) { return error_set(error, "expected a list of turns as \"conversations\""); }
    for (size_t i = 0; i < json_array_size(turns); i++) {
        const json_t* turn = json_array_get(turns, i);
        const char* from = json_string_value(json_object_get(turn, "from"));
        json_t* value = json_object_get(turn, "value");
        const int role = from ? choice_find(SHAREGPT_ROLES, from) : -1;
        if (json_object_get(turn, "role")) {
            json_array_append(messages, (json_t*)turn);
        } else if (role < 0 || !json_is_string(value)) {
            return error_set(error, "turn %zu: expected \"from\" human, gpt, system or tool and a text as \"value\", "
                                    "found \"%.30s\"", i + 1, from ? from : "");
        } else if (role < 4) {
            conversations_add_(messages, roles[role], value);
        } else if (!conversations_add_calls_(messages, value)) {
            return error_set(error, "turn %zu: expected {\"name\": ..., \"arguments\": {...}} as the value of "
                                    "function_call", i + 1);
        }
    }
    return 1;
}

// "tools" as a list, which may have come as its text; a new reference, NULL: there are none. 0: it is something else
static inline int conversations_tools_(json_t** tools, const json_t* row) {
    json_t* found = json_object_get(row, "tools");
    *tools = NULL;
    if (!json_is_string(found)) {
        *tools = json_incref(found);
        return 1;
    }
    if (json_string_length(found) == 0) { return 1; }
    *tools = conversations_parse_(found);
    return json_is_array(*tools);
}

// where the template writes a text in quotes, or asks for an object, the text of an object becomes the object
static inline void conversations_parse_arguments_(const json_t* messages) {
    for (size_t i = 0; i < json_array_size(messages); i++) {
        const json_t* calls = json_object_get(json_array_get(messages, i), "tool_calls");
        for (size_t k = 0; k < json_array_size(calls); k++) {
            json_t* function = (json_t*)chat_function_(json_array_get(calls, k));
            json_t* object = conversations_parse_(json_object_get(function, "arguments"));
            if (json_is_object(object)) { json_object_set(function, "arguments", object); }
            json_decref(object);
        }
    }
}

// "images", or the one of "image"; a new reference, NULL: there are none
static inline json_t* conversations_images_(const json_t* row) {
    json_t *images = json_object_get(row, "images"), *one = json_object_get(row, "image");
    if (!images || json_is_null(images)) { images = one; }
    return json_is_string(images) ? json_pack("[O]", images) : json_incref(images);
}

// The conversation of a line, a new reference; NULL with the reason
static inline json_t* conversations_form_(const Conversations* c, const json_t* row, ErrorText* error) {
    json_t *messages = json_object_get(row, "messages"), *tools = NULL;
    char keys[128];
    int ok = 1;
    messages = messages ? json_incref(messages) : json_array();
    if (json_object_get(row, "messages")) {
    } else if (json_object_get(row, "conversations")) {
        ok = conversations_from_sharegpt_(messages, row, error);
    } else if (json_object_get(row, "instruction")) {
        ok = conversations_from_alpaca_(messages, row, error);
    } else {
        json_lines_keys_(keys, row);
        ok = error_set(error, "expected \"messages\", \"conversations\" or \"instruction\", found %s",
                       *keys ? keys : "an empty object");
    }
    if (ok && !conversations_tools_(&tools, row)) {
        ok = error_set(error, "expected a list of functions as \"tools\"");
    }
    const int quotes = c->t->kind == CHAT_QWEN2_5 || c->t->kind == CHAT_MISTRAL_V3 || chat_is_qwen3_5(c->t);
    if (ok && quotes) { conversations_parse_arguments_(messages); }
    json_t* conversation = ok ? json_pack("{s:O}", "messages", messages) : NULL;
    if (ok && tools) { json_object_set(conversation, "tools", tools); }
    json_t* images = conversations_images_(row);
    if (ok && images) { json_object_set(conversation, "images", images); }
    json_decref(images);
    json_decref(messages);
    json_decref(tools);
    return conversation;
}

// ---- 2. What cannot be used ----

// Every answer says something, and there is one.
static inline int conversations_answers_(Conversations* c, ErrorText* error) {
    ChatText* text = &c->text;
    int n_answers = 0;
    for (int i = 0; i < text->n_messages; i++) {
        const ChatMessage* m = &text->messages[i];
        if (m->role != CHAT_ASSISTANT) { continue; }
        n_answers++;
        const int thinks = chat_thinks(c->t) && m->reasoning.n > 0;
        if (chat_trim_(m->content).n == 0 && !m->tool_calls && !thinks) {
            return chat_refuse_(text, SAMPLE_EMPTY, error, "message %d: expected an answer, found an empty one", i + 1);
        }
    }
    return n_answers > 0 || chat_refuse_(text, SAMPLE_EMPTY, error, "expected an answer, found none");
}

// Did the template write a marker at text[at]? *i: the first marker that may be it; asked in the order of the text.
static inline int conversations_wrote_(const ChatText* text, size_t at, int* i) {
    while (*i < text->n_markers && text->markers[*i] < at) { ++*i; }
    return *i < text->n_markers && text->markers[*i] == at;
}

static inline int conversations_refuse_marker_(ChatText* text, const void* marker, size_t n, ErrorText* error) {
    return chat_refuse_(text, SAMPLE_MARKER, error,
                        "expected text, found the special token %.*s in what somebody says: take it out",
                        (int)(n < 40 ? n : 40), (const char*)marker);
}

// Special tokens of the tokenizer, and markers that are text to it, stand only where the template wrote them.
static inline int conversations_markers_(Conversations* c, ErrorText* error) {
    static const char *of_chatml[] = {"<|im_start|>", "<|im_end|>", NULL},
                      *of_images[] = {"<|im_start|>", "<|im_end|>", CHAT_VISION_BEGIN, CHAT_IMAGE_PAD, CHAT_VISION_END,
                                      "<|video_pad|>", NULL},
                      *of_glm[] = {"[gMASK]", "<sop>", "<|system|>", GLM_USER, "<|assistant|>", NULL};
    const char *of_mistral[] = {"[INST]", "[/INST]", c->t->bos, c->t->eos, NULL};
    const char** markers = chat_is_mistral(c->t)       ? of_mistral
                           : chat_takes_images(c->t)   ? of_images
                           : c->t->kind == CHAT_GLM5   ? of_glm
                                                       : of_chatml;
    const TokenizerPipeline* p = c->k->pipeline;
    const unsigned char *text = c->text.text.bytes, *end = text + c->text.text.n;
    int i = 0;
    for (; *markers; markers++, i = 0) {
        const size_t n = strlen(*markers);
        for (const unsigned char* at = text; (at = pipeline_find_text_(at, end, *markers, n)) != NULL; at += n) {
            if (conversations_wrote_(&c->text, (size_t)(at - text), &i)) { continue; }
            return conversations_refuse_marker_(&c->text, *markers, n, error);
        }
    }
    size_t at = 0, behind = 0;
    for (int found; p && (found = trie_find(&p->raw, text, c->text.text.n, &at, &behind)) >= 0; at = behind) {
        if (!p->added[found].special || conversations_wrote_(&c->text, at, &i)) { continue; }
        return conversations_refuse_marker_(&c->text, text + at, behind - at, error);
    }
    return 1;
}

// The files of the images of the text, measured; 0: one of them cannot be used
static inline int conversations_files_(Conversations* c, ErrorText* error) {
    ChatText* text = &c->text;
    char path[PATH_BYTES];
    ErrorText why;
    if (text->n_images > c->found_capacity) {
        c->found_capacity = 2 * text->n_images;
        c->found = (int*)realloc_check(c->found, (size_t)c->found_capacity * sizeof(int), "images of a conversation");
    }
    for (int i = 0; i < text->n_images; i++) {
        if (!c->measure) {
            return chat_refuse_(text, SAMPLE_IMAGES, error, "expected texts, found an image: this model reads none");
        }
        if (!image_path(path, c->folder, text->images[i], &why)) {
            return chat_refuse_(text, SAMPLE_IMAGES, error, "%s", why.text);
        }
        c->found[i] = image_files_find(&c->files, path, c->measure, &why);
        if (c->found[i] < 0) { return chat_refuse_(text, SAMPLE_IMAGE_FILE, error, "%s", why.text); }
    }
    return 1;
}

// ---- 3. Samples ----

// is the model's placeholder the tokenizer's?
static inline int conversations_pad_is_(const Conversations* c) {
    int n_bytes = 0;
    const char* name = c->measure->pad < c->k->n_tokens ? tokenizer_bytes_of(c->k, c->measure->pad, &n_bytes) : "";
    return n_bytes == (int)strlen(CHAT_IMAGE_PAD) && memcmp(name, CHAT_IMAGE_PAD, (size_t)n_bytes) == 0;
}

// the one placeholder of each image becomes all of them: in place, from the last token to the first
static inline int conversations_expand_(Conversations* c, ErrorText* error) {
    ChatTokens* sample = &c->sample;
    int64_t n_more = 0;
    int n_pads = 0;
    for (int i = 0; c->measure && i < sample->n; i++) { n_pads += sample->ids[i] == c->measure->pad; }
    for (int i = 0; i < c->text.n_images; i++) { n_more += c->files.of[c->found[i]].n_tokens - 1; }
    if (n_pads != c->text.n_images || (n_pads > 0 && !conversations_pad_is_(c))) {
        return chat_refuse_(&c->text, SAMPLE_IMAGES, error, "expected the tokenizer of the model, to which "
                            CHAT_IMAGE_PAD " is token %d, found another", c->measure->pad);
    }
    if (n_more > INT_MAX / 4 - sample->n) {
        return chat_refuse_(&c->text, SAMPLE_LONG, error, "expected fewer placeholders of images, found %lld",
                            (long long)n_more);
    }
    chat_tokens_reserve(sample, (int)n_more);
    int to = sample->n + (int)n_more, image = n_pads;
    for (int i = sample->n; i-- > 0;) {
        const int id = sample->ids[i], is_pad = c->measure && id == c->measure->pad;
        const int n = is_pad ? c->files.of[c->found[--image]].n_tokens : 1;
        const unsigned char is_learned = !is_pad && sample->learned[i];
        for (int k = 0; k < n; k++) {
            sample->ids[--to] = id;
            sample->learned[to] = is_learned;
        }
    }
    sample->n += (int)n_more;
    return 1;
}

// Of the images among the first `whole` tokens, does none reach beyond the first n?
static inline int conversations_whole_images_(const Conversations* c, int n, int whole) {
    int image = 0;
    for (int i = 0; image < c->text.n_images; image++) {
        while (c->sample.ids[i] != c->measure->pad) { i++; }
        const int end = i + c->files.of[c->found[image]].n_tokens;
        if (i < whole && end > n) { return 0; }
        i = end;
    }
    return 1;
}

// the images among the first n tokens, which are stored from `first` on
static inline void conversations_store_images_(Conversations* c, int64_t first, int n) {
    for (int i = 0, image = 0; image < c->text.n_images; image++) {
        while (c->sample.ids[i] != c->measure->pad) { i++; }
        if (i >= n) { return; }
        if (c->n_images == c->images_capacity) {
            c->images_capacity = 2 * c->images_capacity + 64;
            const size_t n_bytes = (size_t)c->images_capacity * sizeof(SampleImage);
            c->images = (SampleImage*)realloc_check(c->images, n_bytes, "images of conversations");
        }
        const SampleImage found = {first + i, c->found[image]};
        c->images[c->n_images++] = found;
        i += c->files.of[c->found[image]].n_tokens;
    }
}

static inline void conversations_store_(Conversations* c, int n) {
    const int64_t at = c->starts[c->n];
    if (n > c->tokens_capacity - at) {
        c->tokens_capacity = at + n + (at + n) / 2;
        memory_need((size_t)(c->tokens_capacity - at) * sizeof(int), "tokens of conversations");
        c->tokens = (int*)realloc_check(c->tokens, (size_t)c->tokens_capacity * sizeof(int), "tokens of conversations");
    }
    if (c->n + 1 >= c->capacity) {
        c->capacity = 2 * c->capacity + 64;
        c->starts = (int64_t*)realloc_check(c->starts, (size_t)(c->capacity + 1) * sizeof(int64_t), "samples");
    }
    for (int i = 0; i < n; i++) {
        const int is_learned = i > 1 && c->sample.learned[i];
        c->tokens[at + i] = is_learned ? c->sample.ids[i] : ~c->sample.ids[i];
        c->n_learned += is_learned;
    }
    conversations_store_images_(c, at, n);
    c->starts[++c->n] = at + n;
    c->n_longest = n > c->n_longest ? n : c->n_longest;
}

// tokens up to the last of the first n that is learned; 0: none is, but for the first two
static inline int conversations_length_(const ChatTokens* sample, int n) {
    while (n > 2 && !sample->learned[n - 1]) { n--; }
    return n > 2 ? n : 0;
}

// the conversation of one line; 0 with its reason in c->text.reason
static inline int conversations_add_row_(Conversations* c, const json_t* row, ErrorText* error) {
    json_t* conversation = conversations_form_(c, row, error);
    c->text.reason = SAMPLE_FORM;
    const int ok = conversation && chat_render(&c->text, c->t, conversation, c->choices, error) &&
                   conversations_answers_(c, error) && conversations_markers_(c, error) &&
                   conversations_files_(c, error);
    if (ok && c->last_only && c->text.n_learned > 0) {
        c->text.learned[0] = c->text.learned[c->text.n_learned - 1];
        c->text.n_learned = 1;
    }
    if (ok) { chat_encode(&c->sample, c->k, &c->work, &c->text); }
    json_decref(conversation);  // from here on the paths of its images are gone
    if (!ok || !conversations_expand_(c, error)) { return 0; }
    const int whole = conversations_length_(&c->sample, c->sample.n);
    const int is_long = c->most_tokens > 0 && whole > c->most_tokens;
    const int n = is_long ? conversations_length_(&c->sample, c->most_tokens) : whole;
    c->n_needed = whole > c->n_needed ? whole : c->n_needed;
    if (is_long && c->truncate == TRUNCATE_DROP) {
        return chat_refuse_(&c->text, SAMPLE_LONG, error, "expected at most %d tokens, found %d: %s%s"
                            "--truncate end drops its end", c->most_tokens, whole,
                            c->limit_option ? c->limit_option : "", c->limit_option ? " takes more, " : "");
    }
    if (n == 0) {
        return chat_refuse_(&c->text, SAMPLE_UNLEARNED, error, "expected a token that is learned%s, found none",
                            is_long ? " before it is cut" : "");
    }
    if (is_long && !conversations_whole_images_(c, n, whole)) {
        return chat_refuse_(&c->text, SAMPLE_LONG, error, "expected at most %d tokens, found %d: its end has an image, "
                            "which is not cut off", c->most_tokens, whole);
    }
    c->n_cut += is_long;
    conversations_store_(c, n);
    return 1;
}

static inline void conversations_leave_out_(Conversations* c, SampleReason reason, const char* path, const char* line) {
    const int64_t i = c->n_reasons[reason]++;
    if (i >= SAMPLES_NAMED) { return; }
    const size_t n = strlen(path) + strlen(line) + 2;
    c->named[reason][i] = (char*)malloc_check(n, "message");
    snprintf(c->named[reason][i], n, "%s:%s", path, line);
}

static inline void conversations_read_file_(Conversations* c, const char* path) {
    PlainFile file;
    ErrorText error;
    int found;
    plain_file_open(&file, path);
    path_parent(c->folder, path);
    JsonLines lines = {file.bytes, file.n_bytes, 0, 0, NULL};
    while ((found = json_lines_row(&lines, "{\"messages\": [...]}", &error)) != 0) {
        c->n_lines++;
        progress("reading conversations", (int64_t)lines.at, (int64_t)lines.n_bytes);
        if (found < 0) {
            conversations_leave_out_(c, SAMPLE_JSON, path, error.text);
        } else if (!conversations_add_row_(c, lines.row, &error)) {
            ErrorText line;
            error_set(&line, "%lld: %s", lines.number, error.text);
            conversations_leave_out_(c, c->text.reason, path, line.text);
        } else {
            c->n_reasons[SAMPLE_GOOD]++;
        }
    }
    progress("reading conversations", 1, 1);
    json_lines_close(&lines);
    plain_file_close(&file);
}

// of a folder's files those that say what they are
static inline int conversations_is_file_(const char* path) {
    const char* ends[] = {".jsonl", ".jsonl.gz"};
    const size_t n = strlen(path);
    for (int i = 0; i < 2; i++) {
        const size_t n_end = strlen(ends[i]);
        if (n >= n_end && strcasecmp(path + n - n_end, ends[i]) == 0) { return 1; }
    }
    return 0;
}

// where there is none, the most frequent reason says why
static inline void conversations_need_one_(const Conversations* c, const char* path) {
    int most = SAMPLE_GOOD + 1;
    if (c->n > 0) { return; }
    for (int i = most; i < N_SAMPLE_REASONS; i++) { most = c->n_reasons[i] > c->n_reasons[most] ? i : most; }
    if (c->n_reasons[most] > 0) {
        fail_input("%s: no sample of %lld can be used: %s", path, (long long)c->n_lines, c->named[most][0]);
    }
    fail_input("%s: expected conversations as JSON Lines, each {\"messages\": [...]}, found none", path);
}

// path: of one option, several with commas between; behind what was read before
static inline void conversations_read(Conversations* c, const char* path) {
    PathList paths;
    path_list_make(&paths, path);
    for (int i = 0; i < paths.n; i++) {
        FileList list;
        if (paths.of[i].weight > 0.0) {
            fail_input("%s: expected paths without weights, for each sample is taken once", path);
        }
        file_list_make(&list, paths.of[i].path);
        for (int k = 0; k < list.n; k++) {
            const int is_wanted = !list.in_folder || conversations_is_file_(list.paths[k]);
            if (is_wanted) { conversations_read_file_(c, list.paths[k]); }
        }
        file_list_free(&list);
    }
    path_list_free(&paths);
    conversations_need_one_(c, path);
}

// ---- 4. What there is ----

// all that c counts, for people
static inline void conversations_say(const Conversations* c, FILE* out) {
    const int64_t n_tokens = c->starts[c->n];
    fprintf(out, "%lld of %lld samples are used: %lld tokens, %lld of them learned (%.1f%%); the longest has %lld\n",
            (long long)c->n, (long long)c->n_lines, (long long)n_tokens, (long long)c->n_learned,
            100.0 * (double)c->n_learned / (double)(n_tokens > 0 ? n_tokens : 1), (long long)c->n_longest);
    if (c->n_cut > 0) { fprintf(out, "%lld of them lost their end\n", (long long)c->n_cut); }
    for (int i = SAMPLE_GOOD + 1; i < N_SAMPLE_REASONS; i++) {
        if (c->n_reasons[i] == 0) { continue; }
        fprintf(out, "%lld left out, %s:\n", (long long)c->n_reasons[i], choice_name(SAMPLE_REASONS, i).s);
        for (int k = 0; k < SAMPLES_NAMED && c->named[i][k]; k++) { fprintf(out, "    %s\n", c->named[i][k]); }
        if (c->n_reasons[i] > SAMPLES_NAMED) { fprintf(out, "    ...\n"); }
    }
}
#endif  // LLMC_CONVERSATIONS_H
