/*
Reads a tokenizer.json of Hugging Face tokenizers into a TokenizerPipeline (tokenizer_pipeline.h has what each part
does).
    normalizer      null, NFC, Prepend, Replace {String}, a Sequence of them
    pre_tokenizer   null, Split {Regex, Isolated}, ByteLevel, Metaspace, a Sequence
    model           BPE: vocab, merges ("a b" or [a, b]), byte_fallback, unk_token, fuse_unk, ignore_merges
    added_tokens    with single_word, lstrip, rstrip, normalized, special
    post_processor  null, ByteLevel (does nothing to ids), TemplateProcessing, a Sequence
    decoder         null, ByteLevel, or Replace, ByteFallback, Fuse, Strip in this order
truncation and padding are not applied: a text is never cut or filled up; `left_out` names them, for a warning. Whatever
else a file asks for is refused, for other ids would go unnoticed.
Errors: pipeline_parse_ returns 0 with one line; it never exits because of the file, and allocates no more than about
100 times its size, so ids must be below the number of the file's bytes. JSON: UTF-8, no key twice, no \u0000, at most
64 deep (16 Sequences in each other are 36), size and number of values as json_parse_bounded allows.
Source: huggingface/tokenizers 0.23, the serialization.rs of each part.
*/
#ifndef LLMC_TOKENIZER_JSON_H
#define LLMC_TOKENIZER_JSON_H
#include "../core/jsonfile.h"  // json_parse_bounded
#include "tokenizer_pipeline.h"

enum { MAX_TEMPLATE = 256, MAX_GROWTH = 16, MAX_PATTERN = 4096, MAX_NESTING = 64 };

// what one reading of a file needs; all texts belong to `root`
typedef struct {
    TokenizerPipeline* p;
    json_t *root, *vocab, *added;
    const char** pieces;  // (n_tokens) the text of each token, as the decoder sees it; NULL: no token has this id
    size_t n_file;
    ErrorText* error;
} TokenizerReader;

// ---- 1. Fields of JSON objects ----

static inline const char* pipeline_json_kind_(const json_t* value) {
    const char* kinds[] = {"an object", "a list", "a text", "an integer", "a number", "true", "false", "null"};
    return value ? kinds[json_typeof(value)] : "nothing";
}

// object[key] as a text; null or missing: `missing`, where that is NULL an error
static inline int pipeline_json_text_(TokenizerReader* r, const char* where, const json_t* object, const char* key,
                                      const char** text, const char* missing) {
    const json_t* value = json_object_get(object, key);
    *text = json_is_string(value) ? json_string_value(value) : missing;
    if (json_is_string(value) || ((!value || json_is_null(value)) && missing)) { return 1; }
    return error_set(r->error, "%s: expected a text as \"%s\", found %s", where, key, pipeline_json_kind_(value));
}

// object[key] as true or false; null or missing: `missing`, where that is -1 an error
static inline int pipeline_json_bool_(TokenizerReader* r, const char* where, const json_t* object, const char* key,
                                      int* flag, int missing) {
    const json_t* value = json_object_get(object, key);
    *flag = json_is_boolean(value) ? json_is_true(value) : missing;
    if (json_is_boolean(value) || ((!value || json_is_null(value)) && missing >= 0)) { return 1; }
    return error_set(r->error, "%s: expected true or false as \"%s\", found %s", where, key,
                     pipeline_json_kind_(value));
}

// an id: a number below that of the file's bytes, for each token takes several of them
static inline int pipeline_json_id_(TokenizerReader* r, const char* where, const char* token, const json_t* value,
                                    int* id) {
    json_int_t x = json_integer_value(value), most = r->n_file < (1 << 24) ? (json_int_t)r->n_file : 1 << 24;
    *id = (int)x;
    if (json_is_integer(value) && x >= 0 && x < most) { return 1; }
    if (!json_is_integer(value)) {
        return error_set(r->error, "%s: \"%.100s\": expected an integer as id, found %s", where, token,
                         pipeline_json_kind_(value));
    }
    return error_set(r->error, "%s: \"%.100s\": expected an id 0..%lld in a file of %zu bytes, found %lld", where,
                     token, (long long)most - 1, r->n_file, (long long)x);
}

static inline const char* pipeline_json_type_(const json_t* object) {
    const char* type = json_string_value(json_object_get(object, "type"));
    return type ? type : "";
}

// null, one step, or a Sequence of steps, nested at will: a flat list
static inline int pipeline_json_steps_(TokenizerReader* r, const char* where, const char* list_name, json_t* node,
                                       json_t** steps, int* n, int depth) {
    if (!node || json_is_null(node)) { return 1; }
    if (!json_is_object(node)) {
        return error_set(r->error, "%s: expected an object or null, found %s", where, pipeline_json_kind_(node));
    }
    if (strcmp(pipeline_json_type_(node), "Sequence") == 0) {
        json_t *list = json_object_get(node, list_name), *step;
        size_t i;
        if (!json_is_array(list)) {
            return error_set(r->error, "%s: Sequence: expected a list as \"%s\", found %s", where, list_name,
                             pipeline_json_kind_(list));
        }
        if (depth >= MAX_STEPS) {
            return error_set(r->error, "%s: expected at most %d Sequences in each other", where, MAX_STEPS);
        }
        json_array_foreach(list, i, step) {
            if (!pipeline_json_steps_(r, where, list_name, step, steps, n, depth + 1)) { return 0; }
        }
        return 1;
    }
    if (*n == MAX_STEPS) { return error_set(r->error, "%s: expected at most %d steps, found more", where, MAX_STEPS); }
    steps[(*n)++] = node;
    return 1;
}

static inline int pipeline_refuse_step_(TokenizerReader* r, const char* where, const json_t* step, const char* known) {
    return error_set(r->error, "%s: expected %s, found \"%.60s\", which is not implemented", where, known,
                     pipeline_json_type_(step));
}

// {"pattern": {"String": ...}}
static inline int pipeline_json_pattern_(TokenizerReader* r, const char* where, const json_t* step, const char* kind,
                                         const char** pattern) {
    if (!pipeline_json_text_(r, where, json_object_get(step, "pattern"), kind, pattern, NULL)) { return 0; }
    if (**pattern && strlen(*pattern) <= MAX_PATTERN) { return 1; }
    return error_set(r->error, "%s: expected a pattern of 1..%d bytes, found %zu", where, MAX_PATTERN,
                     strlen(*pattern));
}

// a text of one character; `character` holds it
static inline int pipeline_json_character_(TokenizerReader* r, const char* where, const json_t* step, const char* key,
                                           char character[5]) {
    const char* text;
    uint32_t code;
    if (!pipeline_json_text_(r, where, step, key, &text, NULL)) { return 0; }
    size_t n = *text ? (size_t)utf8_next((const unsigned char*)text, &code) : 0;
    if (n == 0 || text[n]) {
        return error_set(r->error, "%s: expected one character as \"%s\", found \"%.40s\"", where, key, text);
    }
    memcpy(character, text, n + 1);
    return 1;
}

// ---- 2. Vocabulary and added tokens ----

// pieces[id] of the model's vocabulary, and the number of tokens
static inline int pipeline_read_vocab_(TokenizerReader* r, json_t* model) {
    const char* name;
    json_t* value;
    int id, n_tokens = 0;
    size_t i;
    r->vocab = json_object_get(model, "vocab");
    r->added = json_object_get(r->root, "added_tokens");
    if (!json_is_object(r->vocab) || json_object_size(r->vocab) == 0) {
        return error_set(r->error, "model: expected an object {token: id, ...} as \"vocab\", found %s",
                         pipeline_json_kind_(r->vocab));
    }
    if (r->added && !json_is_null(r->added) && !json_is_array(r->added)) {
        return error_set(r->error, "added_tokens: expected a list, found %s", pipeline_json_kind_(r->added));
    }
    json_object_foreach(r->vocab, name, value) {
        if (!pipeline_json_id_(r, "vocab", name, value, &id)) { return 0; }
        n_tokens = id >= n_tokens ? id + 1 : n_tokens;
    }
    json_array_foreach(r->added, i, value) {
        if (!pipeline_json_text_(r, "added_tokens", value, "content", &name, NULL)) { return 0; }
        if (!pipeline_json_id_(r, "added_tokens", name, json_object_get(value, "id"), &id)) { return 0; }
        n_tokens = id >= n_tokens ? id + 1 : n_tokens;
    }
    r->p->n_tokens = n_tokens;
    r->pieces = (const char**)calloc((size_t)n_tokens, sizeof(char*));
    r->p->flags = (unsigned char*)calloc((size_t)n_tokens, 1);
    if (!r->pieces || !r->p->flags) { fail_run("tokenizer: no memory for %d tokens", n_tokens); }
    json_object_foreach(r->vocab, name, value) {
        id = (int)json_integer_value(value);
        if (!*name) { return error_set(r->error, "vocab: id %d: expected a text, found an empty one", id); }
        if (r->pieces[id]) {
            return error_set(r->error, "vocab: id %d belongs to \"%.100s\" and to \"%.100s\"", id, r->pieces[id], name);
        }
        r->pieces[id] = name;
    }
    return 1;
}

// One added token. Hugging Face gives those that are not in the vocabulary the ids from its size on, whatever the file
// says.
static inline int pipeline_read_added_token_(TokenizerReader* r, json_t* object, int* next_id) {
    AddedToken a;
    const char *where = "added_tokens", *content = json_string_value(json_object_get(object, "content"));
    const json_t* known = json_object_get(r->vocab, content);
    memset(&a, 0, sizeof a);
    int expected = known ? (int)json_integer_value(known) : (*next_id)++;
    a.id = (int)json_integer_value(json_object_get(object, "id"));
    if (!*content || strlen(content) > MAX_ADDED_BYTES) {
        return error_set(r->error, "added_tokens: id %d: expected 1..%d bytes of content, found %zu", a.id,
                         MAX_ADDED_BYTES, strlen(content));
    }
    if (a.id != expected) {
        return error_set(r->error, "added_tokens: \"%.100s\": expected id %d%s, found %d", content, expected,
                         known ? " as in the vocabulary" : ", the next after the vocabulary", a.id);
    }
    if (!known && r->pieces[a.id]) {
        return error_set(r->error,
                         "added_tokens: \"%.100s\": expected an id of its own, found %d, which is \"%.100s\": the ids "
                         "of the vocabulary's %zu tokens must be 0..%zu", content, a.id, r->pieces[a.id],
                         json_object_size(r->vocab), json_object_size(r->vocab) - 1);
    }
    if (!pipeline_json_bool_(r, where, object, "single_word", &a.single_word, 0) ||
        !pipeline_json_bool_(r, where, object, "lstrip", &a.lstrip, 0) ||
        !pipeline_json_bool_(r, where, object, "rstrip", &a.rstrip, 0) ||
        !pipeline_json_bool_(r, where, object, "normalized", &a.normalized, 1) ||
        !pipeline_json_bool_(r, where, object, "special", &a.special, 0)) {
        return 0;
    }
    ByteBuffer buffers[2] = {{NULL, 0, 0}, {NULL, 0, 0}};
    const unsigned char* s = (const unsigned char*)content;
    size_t n = strlen(content);
    if (a.normalized) { pipeline_normalize_(r->p, buffers, &s, &n); }
    a.content = (char*)malloc_check(n + 1, "added token");
    memcpy(a.content, s, n);
    a.content[n] = '\0';
    buffer_free(&buffers[0]);
    buffer_free(&buffers[1]);
    int index = r->p->n_added++;
    r->p->added[index] = a;
    r->pieces[a.id] = a.content;  // what decoding gives: the normalised form
    // one that its normalisation changed is not recognised as special when decoding
    if (a.special && strcmp(a.content, content) == 0) { r->p->flags[a.id] |= TOKEN_SPECIAL; }
    int again = r->p->flags[a.id] & TOKEN_ADDED;
    r->p->flags[a.id] |= TOKEN_ADDED;
    if (n > 0 && !again && trie_add(a.normalized ? &r->p->normal : &r->p->raw, a.content, index)) { return 1; }
    return error_set(r->error, "added_tokens: \"%.100s\": expected a text of its own, found %s", content,
                     n > 0 ? "it twice" : "nothing left of it by the normalizer");
}

static inline int pipeline_read_added_(TokenizerReader* r) {
    size_t i;
    json_t* object;
    int next_id = (int)json_object_size(r->vocab);
    r->p->added = (AddedToken*)malloc_check(json_array_size(r->added) * sizeof(AddedToken), "added tokens");
    trie_init(&r->p->raw);
    trie_init(&r->p->normal);
    json_array_foreach(r->added, i, object) {
        if (!pipeline_read_added_token_(r, object, &next_id)) { return 0; }
    }
    return 1;
}

// ---- 3. Normalizer, pre-tokenizer, template ----

// Steps that each make a text longer could make it longer than any memory: all together at most MAX_GROWTH times.
// U+2581 for a blank and before the text, as Llama 2 has them, is 9 times in this count; no file that we know has more.
static inline int pipeline_check_growth_(TokenizerReader* r, const char* where, const char* from, const char* to,
                                         size_t* growth) {
    size_t n_from = *from ? strlen(from) : 1, n_to = strlen(to);
    *growth *= n_to > n_from ? (n_to + n_from - 1) / n_from : 1;
    if (*growth <= MAX_GROWTH) { return 1; }
    return error_set(r->error, "%s: expected steps that make a text at most %d times longer, found %zu times", where,
                     MAX_GROWTH, *growth);
}

static inline int pipeline_read_normalizer_(TokenizerReader* r) {
    json_t* steps[MAX_STEPS];
    size_t growth = 1;
    int n = 0;
    if (!pipeline_json_steps_(r, "normalizer", "normalizers", json_object_get(r->root, "normalizer"), steps, &n, 0)) {
        return 0;
    }
    for (int i = 0; i < n; i++) {
        NormalizeStep* step = &r->p->normalize[i];
        const char *type = pipeline_json_type_(steps[i]), *from = "", *to = "";
        memset(step, 0, sizeof *step);
        if (strcmp(type, "NFC") == 0) {
            step->kind = NORMALIZE_NFC;
        } else if (strcmp(type, "Prepend") == 0) {
            step->kind = NORMALIZE_PREPEND;
            if (!pipeline_json_text_(r, "normalizer: Prepend", steps[i], "prepend", &to, NULL)) { return 0; }
        } else if (strcmp(type, "Replace") == 0) {
            step->kind = NORMALIZE_REPLACE;
            if (!pipeline_json_pattern_(r, "normalizer: Replace", steps[i], "String", &from)) { return 0; }
            if (!pipeline_json_text_(r, "normalizer: Replace", steps[i], "content", &to, NULL)) { return 0; }
        } else {
            return pipeline_refuse_step_(r, "normalizer", steps[i], "NFC, Prepend or Replace");
        }
        step->from = string_copy(from);
        step->to = string_copy(to);
        r->p->n_normalize = i + 1;
        if (!pipeline_check_growth_(r, "normalizer", from, to, &growth)) { return 0; }
    }
    return 1;
}

static inline int pipeline_add_splitter_(TokenizerReader* r, const char* regex) {
    ErrorText why;
    if (splitter_parse_(&r->p->splits[r->p->n_splits], regex, &why)) {
        r->p->has_regex |= r->p->splits[r->p->n_splits++].kind == SPLIT_REGEX;
        return 1;
    }
    return error_set(r->error, "pre_tokenizer: %s", why.text);
}

static inline int pipeline_read_split_(TokenizerReader* r, const json_t* step) {
    const char *where = "pre_tokenizer: Split", *regex, *behavior;
    int invert;
    if (!pipeline_json_pattern_(r, where, step, "Regex", &regex) ||
        !pipeline_json_text_(r, where, step, "behavior", &behavior, NULL) ||
        !pipeline_json_bool_(r, where, step, "invert", &invert, 0)) {
        return 0;
    }
    if (strcmp(behavior, "Isolated") != 0 || invert) {
        return error_set(r->error,
                         "%s: expected behavior \"Isolated\" and invert false, found \"%.40s\" and %s, which is not "
                         "implemented",
                         where, behavior, invert ? "true" : "false");
    }
    return pipeline_add_splitter_(r, regex);
}

static inline int pipeline_read_metaspace_(TokenizerReader* r, const json_t* step) {
    const char *where = "pre_tokenizer: Metaspace", *scheme;
    int prefix;  // the older way to say never
    if (!pipeline_json_character_(r, where, step, "replacement", r->p->marker) ||
        !pipeline_json_text_(r, where, step, "prepend_scheme", &scheme, "always") ||
        !pipeline_json_bool_(r, where, step, "split", &r->p->marker_split, 1) ||
        !pipeline_json_bool_(r, where, step, "add_prefix_space", &prefix, 1)) {
        return 0;
    }
    r->p->metaspace = strcmp(scheme, "never") == 0 ? METASPACE_NEVER : strcmp(scheme, "first") == 0 ? METASPACE_FIRST
                    : strcmp(scheme, "always") == 0 ? METASPACE_ALWAYS : METASPACE_NONE;
    if (r->p->metaspace == METASPACE_NONE || (!prefix && r->p->metaspace != METASPACE_NEVER) ||
        r->p->marker[0] == ' ') {
        return error_set(r->error,
                         "%s: expected a replacement other than a blank and prepend_scheme never, first or "
                         "always that agrees with add_prefix_space, found \"%s\" and \"%.40s\"",
                         where, r->p->marker, scheme);
    }
    return 1;
}

static inline int pipeline_read_pre_tokenizer_(TokenizerReader* r) {
    json_t* steps[MAX_STEPS];
    int n = 0, use_regex;
    TokenizerPipeline* p = r->p;
    if (!pipeline_json_steps_(r, "pre_tokenizer", "pretokenizers", json_object_get(r->root, "pre_tokenizer"), steps, &n,
                              0)) {
        return 0;
    }
    for (int i = 0; i < n; i++) {
        const char* type = pipeline_json_type_(steps[i]);
        if (p->byte_level || p->metaspace != METASPACE_NONE) {
            return error_set(r->error, "pre_tokenizer: expected nothing after ByteLevel or Metaspace, found \"%.60s\"",
                             type);
        }
        if (strcmp(type, "Split") == 0) {
            if (!pipeline_read_split_(r, steps[i])) { return 0; }
        } else if (strcmp(type, "ByteLevel") == 0) {
            p->byte_level = 1;
            if (!pipeline_json_bool_(r, "pre_tokenizer: ByteLevel", steps[i], "add_prefix_space", &p->prefix_space,
                                     -1) ||
                !pipeline_json_bool_(r, "pre_tokenizer: ByteLevel", steps[i], "use_regex", &use_regex, 1)) {
                return 0;
            }
            if (p->prefix_space && i > 0) {
                return error_set(r->error,
                                 "pre_tokenizer: ByteLevel: add_prefix_space after a Split is not implemented");
            }
            if (use_regex && !pipeline_add_splitter_(r, regex_gpt2_())) { return 0; }
        } else if (strcmp(type, "Metaspace") == 0 && i == 0) {
            if (!pipeline_read_metaspace_(r, steps[i])) { return 0; }
        } else {
            return pipeline_refuse_step_(r, "pre_tokenizer", steps[i], "Split, ByteLevel or Metaspace alone");
        }
    }
    return 1;
}

// the ids of special_tokens[name], appended to a list
static inline int pipeline_read_template_token_(TokenizerReader* r, const json_t* step, const char* name, int** ids,
                                                int* n) {
    json_t *list = json_object_get(json_object_get(json_object_get(step, "special_tokens"), name), "ids"), *value;
    size_t i;
    if (!json_is_array(list)) {
        return error_set(r->error,
                         "post_processor: TemplateProcessing: expected a list special_tokens[\"%.60s\"].ids, found %s",
                         name, pipeline_json_kind_(list));
    }
    if (json_array_size(list) > MAX_TEMPLATE - (size_t)*n) {
        return error_set(r->error, "post_processor: TemplateProcessing: expected at most %d tokens, found more",
                         MAX_TEMPLATE);
    }
    *ids = (int*)realloc_check(*ids, MAX_TEMPLATE * sizeof(int), "template");
    json_array_foreach(list, i, value) {
        if (!pipeline_json_id_(r, "post_processor", name, value, &(*ids)[*n])) { return 0; }
        if ((*ids)[*n] >= r->p->n_tokens || !r->pieces[(*ids)[*n]]) {
            return error_set(r->error, "post_processor: \"%.60s\": no token has id %d", name, (*ids)[*n]);
        }
        (*n)++;
    }
    return 1;
}

static inline int pipeline_read_template_(TokenizerReader* r, const json_t* step) {
    TokenizerPipeline* p = r->p;
    json_t *single = json_object_get(step, "single"), *item;
    int n_texts = 0;
    size_t i;
    if (!json_is_array(single)) {
        return error_set(r->error, "post_processor: TemplateProcessing: expected a list as \"single\", found %s",
                         pipeline_json_kind_(single));
    }
    json_array_foreach(single, i, item) {
        json_t *special = json_object_get(item, "SpecialToken"), *sequence = json_object_get(item, "Sequence");
        const char* name = json_string_value(json_object_get(special ? special : sequence, "id"));
        if (!name || (sequence && strcmp(name, "A") != 0)) {
            return error_set(r->error,
                             "post_processor: TemplateProcessing: expected SpecialToken or Sequence A as item %zu", i);
        }
        n_texts += sequence != NULL;
        if (special && !pipeline_read_template_token_(r, step, name, n_texts ? &p->after : &p->before,
                                                      n_texts ? &p->n_after : &p->n_before)) {
            return 0;
        }
    }
    if (n_texts == 1) { return 1; }
    return error_set(r->error,
                     "post_processor: TemplateProcessing: expected Sequence A once in \"single\", found it %d times",
                     n_texts);
}

static inline int pipeline_read_post_processor_(TokenizerReader* r) {
    json_t* steps[MAX_STEPS];
    int n = 0, n_templates = 0;
    if (!pipeline_json_steps_(r, "post_processor", "processors", json_object_get(r->root, "post_processor"), steps, &n,
                              0)) {
        return 0;
    }
    for (int i = 0; i < n; i++) {
        int is_template = strcmp(pipeline_json_type_(steps[i]), "TemplateProcessing") == 0;
        if (!is_template && strcmp(pipeline_json_type_(steps[i]), "ByteLevel") != 0) {
            return pipeline_refuse_step_(r, "post_processor", steps[i], "ByteLevel or TemplateProcessing");
        }
        if (is_template && n_templates++ > 0) {
            return error_set(r->error, "post_processor: expected one TemplateProcessing, found two");
        }
        if (is_template && !pipeline_read_template_(r, steps[i])) { return 0; }
    }
    return 1;
}

// ---- 4. The model ----

// GPT-2 writes each byte as a visible character: bytes 33-126, 161-172, 174-255 as themselves, the other 68 in their
// order as U+0100 .. U+0143. to_byte[character] is the byte, -1 for none.
enum { N_BYTE_CHARS = 0x144 };
static inline void pipeline_byte_characters_(short to_byte[N_BYTE_CHARS]) {
    int next = 0x100;
    for (int i = 0; i < N_BYTE_CHARS; i++) { to_byte[i] = -1; }
    for (int byte = 0; byte < 256; byte++) {
        int visible = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
        to_byte[visible ? byte : next++] = (short)byte;
    }
}

// append the bytes that a token of such characters stands for; 0, with nothing appended, when one is none of them
static inline int pipeline_append_byte_level_(ByteBuffer* out, const short to_byte[N_BYTE_CHARS], const char* piece) {
    size_t n_before = out->n;
    uint32_t code;
    for (const unsigned char* s = (const unsigned char*)piece; *s;) {
        s += utf8_next(s, &code);
        if (code >= N_BYTE_CHARS || to_byte[code] < 0) {
            out->n = n_before;
            return 0;
        }
        unsigned char byte = (unsigned char)to_byte[code];
        buffer_append(out, &byte, 1);
    }
    return 1;
}

// the smallest tokens: of bytes, or of characters
static inline int pipeline_read_symbols_(TokenizerReader* r, const char* unk) {
    TokenizerPipeline* p = r->p;
    short to_byte[N_BYTE_CHARS];
    const char* name;
    json_t* value;
    uint32_t code;
    pipeline_byte_characters_(to_byte);
    for (int byte = 0; byte < 256; byte++) { p->byte_ids[byte] = -1; }
    if (!p->byte_level) { p->char_ids = (int32_t*)calloc(UNICODE_CODES, sizeof(int32_t)); }
    if (!p->byte_level && !p->char_ids) { fail_run("tokenizer: no memory"); }
    json_object_foreach(r->vocab, name, value) {
        int id = (int)json_integer_value(value), n = utf8_next((const unsigned char*)name, &code);
        if (name[n] == '\0' && !p->byte_level) { p->char_ids[code] = id + 1; }
        if (name[n] == '\0' && p->byte_level && code < N_BYTE_CHARS && to_byte[code] >= 0) {
            p->byte_ids[to_byte[code]] = id;
        }
    }
    for (int byte = 0; byte < 256 && (p->byte_level || p->byte_fallback); byte++) {
        char spelled[8];
        snprintf(spelled, sizeof spelled, "<0x%02X>", byte);
        value = json_object_get(r->vocab, spelled);
        if (!p->byte_level) { p->byte_ids[byte] = value ? (int)json_integer_value(value) : -1; }
        if (p->byte_ids[byte] < 0) {
            return error_set(r->error, "vocab: expected a token for each of the 256 bytes, found none for 0x%02x%s",
                             byte, p->byte_level ? "" : " (byte_fallback)");
        }
    }
    value = json_object_get(r->vocab, unk);
    p->unk = value ? (int)json_integer_value(value) : -1;
    if (p->byte_level || p->byte_fallback || value) { return 1; }
    return error_set(r->error,
                     "model: expected ByteLevel, byte_fallback or an unk_token of the vocabulary, found \"%.60s\": "
                     "some characters would get no token", unk);
}

// both halves of merge i: "a b" or ["a", "b"]; `joined` becomes their text, *n_left the length of the first
static inline int pipeline_read_merge_(TokenizerReader* r, const json_t* merge, size_t i, ByteBuffer* joined,
                                       size_t* n_left) {
    const char *left = json_string_value(json_array_get(merge, 0)),
               *right = json_string_value(json_array_get(merge, 1));
    const char* text = json_string_value(merge);
    joined->n = 0;
    if (text) {
        *n_left = strcspn(text, " ");
        if (text[*n_left] != ' ' || strchr(text + *n_left + 1, ' ')) {
            return error_set(r->error, "merges[%zu]: expected two tokens with one blank between them, found \"%.100s\"",
                             i, text);
        }
        buffer_append(joined, text, *n_left);
        buffer_append(joined, text + *n_left + 1, strlen(text) - *n_left);  // with the 0 at the end
        return 1;
    }
    if (!left || !right || json_array_size(merge) != 2) {
        return error_set(r->error, "merges[%zu]: expected \"a b\" or [\"a\", \"b\"], found %s", i,
                         pipeline_json_kind_(merge));
    }
    *n_left = strlen(left);
    buffer_append(joined, left, *n_left);
    buffer_append(joined, right, strlen(right) + 1);
    return 1;
}

// Does a character other than U+2581 stand before a U+2581?
static inline int pipeline_marker_inside_(const char* text) {
    for (const char* s = text + 1; *s && (s = strstr(s, "\xe2\x96\x81")) != NULL; s += 3) {
        if (s - text < 3 || memcmp(s - 3, "\xe2\x96\x81", 3) != 0) { return 1; }
    }
    return 0;
}

static inline int pipeline_add_merge_(TokenizerReader* r, size_t i, const ByteBuffer* joined, size_t n_left) {
    const char* whole = (const char*)joined->bytes;
    char left[256], *long_left = NULL;
    if (n_left >= sizeof left) { long_left = (char*)malloc_check(n_left + 1, "merge"); }
    char* first = long_left ? long_left : left;
    memcpy(first, whole, n_left);
    first[n_left] = '\0';
    const json_t *a = json_object_get(r->vocab, first), *b = json_object_get(r->vocab, whole + n_left),
                 *ab = json_object_get(r->vocab, whole);
    free(long_left);
    if (!a || !b || !ab) {
        const char* missing = a && !b ? whole + n_left : whole;
        int length = a ? 100 : n_left < 100 ? (int)n_left : 100;
        return error_set(r->error, "merges[%zu]: \"%.*s\" is not in the vocabulary", i, length, missing);
    }
    if (!bpe_table_add(&r->p->merges, (int)json_integer_value(a), (int)json_integer_value(b),
                       (int)json_integer_value(ab))) {
        return error_set(r->error, "merges[%zu]: this pair, which gives \"%.100s\", stands in the list before", i,
                         whole);
    }
    if (pipeline_marker_inside_(whole)) { r->p->cut_before_marker = 0; }
    return 1;
}

static inline int pipeline_read_merges_(TokenizerReader* r, const json_t* model) {
    json_t *merges = json_object_get(model, "merges"), *merge;
    ByteBuffer joined = {NULL, 0, 0};
    size_t i, n_left = 0;
    int ok = 1;
    if (!json_is_array(merges)) {
        return error_set(r->error, "model: expected a list as \"merges\", found %s", pipeline_json_kind_(merges));
    }
    bpe_table_init(&r->p->merges, json_array_size(merges));
    for (i = 0; ok && i < json_array_size(merges); i++) {
        merge = json_array_get(merges, i);
        const char* text = json_string_value(merge);
        if (text && strncmp(text, "#version", 8) == 0) { continue; }  // a line of the older merges.txt
        ok = pipeline_read_merge_(r, merge, i, &joined, &n_left) && pipeline_add_merge_(r, i, &joined, n_left);
    }
    buffer_free(&joined);
    return ok;
}

// the table of all words that are tokens by themselves
static inline void pipeline_read_whole_words_(TokenizerReader* r) {
    TokenizerPipeline* p = r->p;
    short to_byte[N_BYTE_CHARS];
    pipeline_byte_characters_(to_byte);
    const char** names = (const char**)calloc((size_t)p->n_tokens, sizeof(char*));  // of the vocabulary alone
    const char* name;
    json_t* value;
    if (!names) { fail_run("tokenizer: no memory"); }
    json_object_foreach(r->vocab, name, value) { names[json_integer_value(value)] = name; }
    p->word_starts = (uint32_t*)malloc_check(((size_t)p->n_tokens + 1) * sizeof(uint32_t), "vocabulary");
    p->whole_words_shift = bpe_table_shift_((size_t)p->n_tokens);
    size_t n_slots = (size_t)1 << (64 - p->whole_words_shift);
    p->whole_words = (int32_t*)memset(malloc_check(n_slots * sizeof(int32_t), "vocabulary"), 0xff,
                                      n_slots * sizeof(int32_t));
    for (int id = 0; id < p->n_tokens; id++) {
        p->word_starts[id] = (uint32_t)p->words.n;
        if (names[id] && p->byte_level) { pipeline_append_byte_level_(&p->words, to_byte, names[id]); }
        if (names[id] && !p->byte_level) { buffer_append(&p->words, names[id], strlen(names[id])); }
    }
    p->word_starts[p->n_tokens] = (uint32_t)p->words.n;
    for (int id = 0; id < p->n_tokens; id++) {
        size_t n = p->word_starts[id + 1] - p->word_starts[id];
        if (n > 0) { *pipeline_whole_word_slot_(p, p->words.bytes + p->word_starts[id], n) = id; }
    }
    free(names);
}

static inline int pipeline_read_model_(TokenizerReader* r, const json_t* model) {
    TokenizerPipeline* p = r->p;
    const char *unk, *prefix, *suffix;
    const json_t* dropout = json_object_get(model, "dropout");
    int ignore_merges;
    if (!pipeline_json_bool_(r, "model", model, "byte_fallback", &p->byte_fallback, 0) ||
        !pipeline_json_bool_(r, "model", model, "fuse_unk", &p->fuse_unk, 0) ||
        !pipeline_json_bool_(r, "model", model, "ignore_merges", &ignore_merges, 0) ||
        !pipeline_json_text_(r, "model", model, "unk_token", &unk, "") ||
        !pipeline_json_text_(r, "model", model, "continuing_subword_prefix", &prefix, "") ||
        !pipeline_json_text_(r, "model", model, "end_of_word_suffix", &suffix, "")) {
        return 0;
    }
    if (*prefix || *suffix) {
        return error_set(r->error,
                         "model: expected no continuing_subword_prefix and no end_of_word_suffix, found \"%.40s\" and "
                         "\"%.40s\", which are not implemented",
                         prefix, suffix);
    }
    if (dropout && !json_is_null(dropout) && !(json_is_number(dropout) && json_number_value(dropout) == 0.0)) {
        return error_set(r->error, "model: expected dropout null or 0, found %s: ids would be random",
                         pipeline_json_kind_(dropout));
    }
    if (!pipeline_read_symbols_(r, unk)) { return 0; }
    p->cut_before_marker = !p->byte_level && p->n_splits == 0 && !p->marker_split && !ignore_merges &&
                           p->char_ids[0x2581] > 0;
    if (!pipeline_read_merges_(r, model)) { return 0; }
    if (ignore_merges) { pipeline_read_whole_words_(r); }
    return 1;
}

// ---- 5. The decoder, and the bytes of each token ----

// what the steps of a decoder do, besides the strip that the pipeline keeps
typedef struct {
    const char *from[MAX_STEPS], *to[MAX_STEPS];  // Replace
    int n_replace, byte_fallback, fuse;
    size_t growth;  // of all Replaces
} DecoderSteps;

static inline int pipeline_read_decoder_step_(TokenizerReader* r, const json_t* step, DecoderSteps* d) {
    const char *type = pipeline_json_type_(step), *where = "decoder: Strip";
    if (strcmp(type, "Replace") == 0 && !d->byte_fallback && !d->fuse) {
        int i = d->n_replace++;
        return pipeline_json_pattern_(r, "decoder: Replace", step, "String", &d->from[i]) &&
               pipeline_json_text_(r, "decoder: Replace", step, "content", &d->to[i], NULL) &&
               pipeline_check_growth_(r, "decoder", d->from[i], d->to[i], &d->growth);
    }
    if (strcmp(type, "ByteFallback") == 0 && !d->byte_fallback && !d->fuse) { return d->byte_fallback = 1; }
    if (strcmp(type, "Fuse") == 0) { return d->fuse = 1; }
    if (strcmp(type, "Strip") == 0 && d->fuse && !r->p->strip[0]) {
        const json_t *start = json_object_get(step, "start"), *stop = json_object_get(step, "stop");
        json_int_t n = json_integer_value(start);
        if (!pipeline_json_character_(r, where, step, "content", r->p->strip)) { return 0; }
        if (!json_is_integer(start) || n < 0 || n > INT_MAX || !json_is_integer(stop) ||
            json_integer_value(stop) != 0) {
            return error_set(r->error,
                             "%s: expected start 0 or more and stop 0, found others, which are not implemented", where);
        }
        r->p->n_strip = (int)n;
        return 1;
    }
    return pipeline_refuse_step_(r, "decoder", step,
                                 "ByteLevel alone, or Replace, ByteFallback, Fuse, Strip in this order");
}

static inline int pipeline_read_decoder_(TokenizerReader* r, DecoderSteps* d) {
    json_t* steps[MAX_STEPS];
    int n = 0;
    memset(d, 0, sizeof *d);
    d->growth = 1;
    if (!pipeline_json_steps_(r, "decoder", "decoders", json_object_get(r->root, "decoder"), steps, &n, 0)) {
        return 0;
    }
    r->p->decode = n == 0 ? DECODE_JOIN : DECODE_PIECES;
    if (n == 1 && strcmp(pipeline_json_type_(steps[0]), "ByteLevel") == 0) {
        r->p->decode = DECODE_BYTE_LEVEL;
        return 1;
    }
    for (int i = 0; i < n; i++) {
        if (!pipeline_read_decoder_step_(r, steps[i], d)) { return 0; }
    }
    return 1;
}

// the byte that "<0x0A>" names, -1 for other texts; as Rust reads numbers, "+A" is one
static inline int pipeline_byte_token_(const unsigned char* s, size_t n) {
    if (n != 6 || memcmp(s, "<0x", 3) != 0 || s[5] != '>' || !isxdigit(s[4]) || (s[3] != '+' && !isxdigit(s[3]))) {
        return -1;
    }
    char digits[3] = {(char)(s[3] == '+' ? '0' : s[3]), (char)s[4], '\0'};
    return (int)strtol(digits, NULL, 16);
}

// append what a piece decodes to; 1 when it is a byte token
static inline int pipeline_append_decoded_(ByteBuffer* out, const char* piece, const DecoderSteps* d) {
    ByteBuffer text = {NULL, 0, 0}, next = {NULL, 0, 0};
    buffer_append(&text, piece, strlen(piece));
    for (int i = 0; i < d->n_replace; i++) {
        next.n = 0;
        pipeline_replace_append_(&next, text.bytes, text.n, d->from[i], d->to[i]);
        ByteBuffer swapped = text;
        text = next;
        next = swapped;
    }
    int byte = d->byte_fallback ? pipeline_byte_token_(text.bytes, text.n) : -1;
    unsigned char c = (unsigned char)byte;
    buffer_append(out, byte >= 0 ? &c : text.bytes, byte >= 0 ? 1 : text.n);
    buffer_free(&text);
    buffer_free(&next);
    return byte >= 0;
}

static inline int pipeline_make_token_bytes_(TokenizerReader* r, const DecoderSteps* d) {
    TokenizerPipeline* p = r->p;
    ByteBuffer out = {NULL, 0, 0};
    short to_byte[N_BYTE_CHARS];
    pipeline_byte_characters_(to_byte);
    p->starts = (uint32_t*)malloc_check(((size_t)p->n_tokens + 1) * sizeof(uint32_t), "vocabulary");
    buffer_reserve(&out, 1);
    for (int id = 0; id < p->n_tokens; id++) {
        const char* piece = r->pieces[id];
        p->starts[id] = (uint32_t)out.n;
        if (!piece) { continue; }
        p->flags[id] |= TOKEN_EXISTS;
        if (p->decode == DECODE_BYTE_LEVEL) {
            if (!pipeline_append_byte_level_(&out, to_byte, piece)) { buffer_append(&out, piece, strlen(piece)); }
        } else if (pipeline_append_decoded_(&out, piece, d)) {
            p->flags[id] |= TOKEN_BYTE;
        }
    }
    p->starts[p->n_tokens] = (uint32_t)out.n;
    p->bytes = out.bytes;
    if (out.n <= INT_MAX) { return 1; }
    return error_set(r->error, "expected tokens of less than 2 GiB together, found %zu bytes", out.n);
}

// end of text by the names that models give it; -1: none of them
static inline int pipeline_find_eot_(const TokenizerReader* r) {
    const char* names[] = {"<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|im_end|>"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const json_t* known = json_object_get(r->vocab, names[i]);
        if (known) { return (int)json_integer_value(known); }
        for (size_t j = 0; j < json_array_size(r->added); j++) {
            const json_t* added = json_array_get(r->added, j);
            if (strcmp(json_string_value(json_object_get(added, "content")), names[i]) == 0) {
                return (int)json_integer_value(json_object_get(added, "id"));
            }
        }
    }
    return -1;
}

// ---- 6. The whole ----

static inline const char* pipeline_find_left_out_(const json_t* root) {
    const json_t *truncation = json_object_get(root, "truncation"), *padding = json_object_get(root, "padding");
    int cuts = truncation && !json_is_null(truncation), fills = padding && !json_is_null(padding);
    return cuts && fills ? "truncation and padding" : cuts ? "truncation" : fills ? "padding" : NULL;
}

static inline int pipeline_read_(TokenizerReader* r) {
    DecoderSteps decoder;
    json_t* model = json_object_get(r->root, "model");
    const char* type = pipeline_json_type_(model);
    if (!json_is_object(model)) {
        return error_set(r->error, "expected an object as \"model\", found %s: is this a tokenizer.json?",
                         pipeline_json_kind_(model));
    }
    if (*type && strcmp(type, "BPE") != 0) { return pipeline_refuse_step_(r, "model", model, "BPE"); }
    if (!pipeline_read_vocab_(r, model) || !pipeline_read_normalizer_(r) || !pipeline_read_added_(r) ||
        !pipeline_read_pre_tokenizer_(r) || !pipeline_read_model_(r, model) || !pipeline_read_post_processor_(r) ||
        !pipeline_read_decoder_(r, &decoder) || !pipeline_make_token_bytes_(r, &decoder)) {
        return 0;
    }
    r->p->eot = pipeline_find_eot_(r);
    r->p->left_out = pipeline_find_left_out_(r->root);
    return 1;
}

// The reader on bytes in memory, without an exit: 1, or 0 with the reason in `error` and nothing left to free.
static inline int pipeline_parse_(TokenizerPipeline* p, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    TokenizerReader r;
    json_error_t json_error;
    memset(p, 0, sizeof *p);
    memset(&r, 0, sizeof r);
    r.p = p;
    r.error = error;
    r.n_file = n_bytes;
    r.root = json_parse_bounded((const char*)bytes, n_bytes, MAX_NESTING, &json_error);
    if (!r.root) {
        return error_set(error, "expected a tokenizer.json: line %d, column %d: %.300s", json_error.line,
                         json_error.column, json_error.text);
    }
    unicode_init(&p->unicode);
    int ok = pipeline_read_(&r);
    if (!ok) { pipeline_free(p); }
    json_decref(r.root);
    free(r.pieces);
    return ok;
}
#endif  // LLMC_TOKENIZER_JSON_H
