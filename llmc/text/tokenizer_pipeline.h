/*
From text to token ids, in the order of Hugging Face tokenizers:
    1  added tokens with normalized = false are cut out of the text
    2  each piece between them is normalised: NFC, Prepend, Replace
    3  added tokens with normalized = true are cut out of the normalised piece
    4  each piece is cut into words (pretokenize.h) and each word is encoded (bpe.h)
    5  the template puts its tokens around the whole (<s> in front)
tokenizer_json.h fills a TokenizerPipeline; afterwards any number of threads may read it. EncodeWork is what one caller
needs beside it: buffers, and the cache of words, which makes it worth keeping for the next text.
A text without pre-tokenizer (Mistral) is one single word. It is cut before every U+2581 behind another character all
the same, when no merge gives a token in which that occurs: then no merge can reach across, and words can be cached.
Cost:   linear, but for the merging of long words (bpe.h); memory: the normalised piece, and 4 bytes for each token.
Errors: none of the text's making: invalid UTF-8 becomes U+FFFD.
Source: huggingface/tokenizers 0.23, tokenizer/added_vocabulary.rs, models/bpe, pre_tokenizers.
*/
#ifndef LLMC_TOKENIZER_PIPELINE_H
#define LLMC_TOKENIZER_PIPELINE_H
#include "bpe.h"          // BpeTable, BpeWork, bpe_merge, bpe_cache_line
#include "pretokenize.h"  // Splitter, word_end, Unicode, nfc_append, ByteBuffer
#include <limits.h>

// ---- 1. What a tokenizer.json says ----

typedef enum { NORMALIZE_NFC, NORMALIZE_PREPEND, NORMALIZE_REPLACE } NormalizeKind;

typedef struct {
    NormalizeKind kind;
    char *from, *to;  // Prepend: to; Replace: both
} NormalizeStep;

typedef struct {
    int id;
    char* content;  // as it is looked for: normalised, if `normalized` says so
    int single_word, lstrip, rstrip, normalized, special;
} AddedToken;

// the contents of added tokens, letter by letter
typedef struct {
    int32_t first_child, next_sibling;  // nodes; 0: none
    int32_t added;                      // the token that ends here, -1: none
    unsigned char byte;
} TrieNode;

typedef struct {
    TrieNode* nodes;  // [0] is the root
    int32_t n, capacity;
    int32_t starts[256];   // node of each first byte, 0: no token begins so
    int only;              // the first byte of all tokens when there is one, -1: several, -2: no tokens
} TokenTrie;

typedef enum { METASPACE_NONE, METASPACE_NEVER, METASPACE_FIRST, METASPACE_ALWAYS } MetaspaceScheme;
enum { MAX_STEPS = 16, MAX_ADDED_BYTES = 4096 };

typedef enum { DECODE_JOIN, DECODE_BYTE_LEVEL, DECODE_PIECES } DecodeKind;
enum { TOKEN_EXISTS = 1, TOKEN_ADDED = 2, TOKEN_SPECIAL = 4, TOKEN_BYTE = 8 };  // TOKEN_BYTE: <0x0A>, decoded as a byte

typedef struct TokenizerPipeline {
    Unicode unicode;
    NormalizeStep normalize[MAX_STEPS];
    AddedToken* added;
    TokenTrie raw, normal;  // added tokens looked for before and after normalising
    Splitter splits[MAX_STEPS];
    int n_normalize, n_added, n_splits;
    int has_regex;  // one of the splits is PCRE2's
    int byte_level, prefix_space;  // words are bytes; a blank is put in front of a piece
    MetaspaceScheme metaspace;
    char marker[5];  // what Metaspace writes for a blank
    int marker_split;
    // model
    BpeTable merges;
    int32_t byte_ids[256];    // of each byte: with byte_level its token, with byte_fallback <0xXX>
    int32_t* char_ids;        // (UNICODE_CODES) of a character that is a token: id + 1; NULL with byte_level
    int byte_fallback, fuse_unk, unk;  // unk -1: none
    int32_t* whole_words;     // hash table of the vocabulary, for ignore_merges; NULL without
    int whole_words_shift;
    ByteBuffer words;         // of whole_words: the bytes of text that each token of the vocabulary stands for
    uint32_t* word_starts;    // (n_tokens + 1)
    int cut_before_marker;    // words may be cut before U+2581
    int *before, *after;      // template
    int n_before, n_after;
    // vocabulary and decoder
    int n_tokens, eot;        // eot -1: none
    unsigned char* bytes;     // what token i decodes to is bytes[starts[i] .. starts[i+1])
    uint32_t* starts;         // (n_tokens + 1)
    unsigned char* flags;     // (n_tokens) TOKEN_EXISTS ...
    const char* left_out;     // what the file asks for and nobody does: "padding"; NULL: nothing
    DecodeKind decode;
    char strip[5];            // a character, UTF-8, of which
    int n_strip;              // so many are taken from the front
} TokenizerPipeline;

static inline void pipeline_free(TokenizerPipeline* p) {
    for (int i = 0; i < p->n_normalize; i++) {
        free(p->normalize[i].from);
        free(p->normalize[i].to);
    }
    for (int i = 0; i < p->n_added; i++) { free(p->added[i].content); }
    for (int i = 0; i < p->n_splits; i++) { pcre2_code_free(p->splits[i].regex); }
    free(p->added);
    free(p->raw.nodes);
    free(p->normal.nodes);
    free(p->merges.slots);
    free(p->char_ids);
    free(p->whole_words);
    free(p->word_starts);
    buffer_free(&p->words);
    free(p->before);
    free(p->after);
    free(p->bytes);
    free(p->starts);
    free(p->flags);
    unicode_free(&p->unicode);
    memset(p, 0, sizeof *p);
}

// ---- 2. The trie of added tokens ----

static inline int32_t trie_node_(TokenTrie* trie, unsigned char byte) {
    if (trie->n == trie->capacity) {
        trie->capacity = 2 * trie->capacity + 64;
        trie->nodes = (TrieNode*)realloc_check(trie->nodes, (size_t)trie->capacity * sizeof(TrieNode), "added tokens");
    }
    TrieNode node = {0, 0, -1, byte};
    trie->nodes[trie->n] = node;
    return trie->n++;
}

static inline void trie_init(TokenTrie* trie) {
    memset(trie, 0, sizeof *trie);
    trie->only = -2;
    trie_node_(trie, 0);
}

static inline int32_t trie_child_(const TokenTrie* trie, int32_t node, unsigned char byte) {
    int32_t child = trie->nodes[node].first_child;
    while (child && trie->nodes[child].byte != byte) { child = trie->nodes[child].next_sibling; }
    return child;
}

// 0 when the content is there already
static inline int trie_add(TokenTrie* trie, const char* content, int added) {
    const unsigned char* s = (const unsigned char*)content;
    int32_t node = 0;
    trie->only = trie->only == -2 || trie->only == s[0] ? s[0] : -1;
    for (; *s; s++) {
        int32_t child = trie_child_(trie, node, *s);
        if (!child) {
            child = trie_node_(trie, *s);
            trie->nodes[child].next_sibling = trie->nodes[node].first_child;
            trie->nodes[node].first_child = child;
            if (node == 0) { trie->starts[*s] = child; }
        }
        node = child;
    }
    if (trie->nodes[node].added >= 0) { return 0; }
    trie->nodes[node].added = added;
    return 1;
}

// the first place from *at on where a token stands, and the longest one there: its index, its end; -1 when there is
// none
static inline int trie_find(const TokenTrie* trie, const unsigned char* s, size_t n, size_t* at, size_t* end) {
    for (; *at < n && trie->only != -2; (*at)++) {
        if (trie->only >= 0) {
            const unsigned char* first = (const unsigned char*)memchr(s + *at, trie->only, n - *at);
            if (!first) { break; }
            *at = (size_t)(first - s);
        }
        int longest = -1;
        int32_t node = trie->starts[s[*at]];
        for (size_t i = *at + 1; node; i++) {
            if (trie->nodes[node].added >= 0) {
                longest = trie->nodes[node].added;
                *end = i;
            }
            node = i < n ? trie_child_(trie, node, s[i]) : 0;
        }
        if (longest >= 0) { return longest; }
    }
    return -1;
}

// ---- 3. Normalising ----

// the first place of a text inside another, or NULL
static inline const unsigned char* pipeline_find_text_(const unsigned char* s, const unsigned char* end,
                                                       const char* text, size_t n) {
    while ((size_t)(end - s) >= n &&
           (s = (const unsigned char*)memchr(s, (unsigned char)text[0], (size_t)(end - s) - n + 1)) != NULL) {
        if (memcmp(s, text, n) == 0) { return s; }
        s++;
    }
    return NULL;
}

static inline void pipeline_replace_append_(ByteBuffer* out, const unsigned char* s, size_t n, const char* from,
                                            const char* to) {
    size_t n_from = strlen(from), n_to = strlen(to);
    for (const unsigned char* end = s + n; s < end;) {
        const unsigned char* found = pipeline_find_text_(s, end, from, n_from);
        buffer_append(out, s, (size_t)((found ? found : end) - s));
        if (!found) { break; }
        buffer_append(out, to, n_to);
        s = found + n_from;
    }
}

// One step from s to `out`; 0 when it would change nothing and nothing was written.
static inline int pipeline_normalize_step_(const TokenizerPipeline* p, const NormalizeStep* step, ByteBuffer* out,
                                           const unsigned char* s, size_t n) {
    out->n = 0;
    if (step->kind == NORMALIZE_NFC && nfc_first_change_(&p->unicode, s, n, 0) == n) { return 0; }
    buffer_reserve(out, n + n / 2);
    if (step->kind == NORMALIZE_NFC) {
        nfc_append(out, &p->unicode, s, n);
    } else if (step->kind == NORMALIZE_PREPEND) {
        buffer_append(out, step->to, n > 0 ? strlen(step->to) : 0);
        buffer_append(out, s, n);
    } else {
        pipeline_replace_append_(out, s, n, step->from, step->to);
    }
    return 1;
}

// all steps: the result is in *s, *n: the text itself, or one of the two buffers
static inline void pipeline_normalize_(const TokenizerPipeline* p, ByteBuffer buffers[2], const unsigned char** s,
                                       size_t* n) {
    int into = 0;
    for (int i = 0; i < p->n_normalize; i++) {
        if (!pipeline_normalize_step_(p, &p->normalize[i], &buffers[into], *s, *n)) { continue; }
        *s = buffers[into].bytes;
        *n = buffers[into].n;
        into = !into;
    }
}

// ---- 4. Words ----

typedef struct {
    const TokenizerPipeline* p;
    BpeWork bpe;
    ByteBuffer repaired, normal[2], spaced;
    RegexWork regex;
    int* tokens;
    size_t n_tokens, capacity;
    void (*take)(void* to, const int* tokens, size_t n);  // gets them in pieces meanwhile; NULL: they stay in `tokens`
    void* to;
    int plain;  // no added tokens: the text is only text
} EncodeWork;

// n_bytes: about how long a text will be, which decides the size of the cache (at most 4 MB)
static inline void encode_work_init(EncodeWork* w, const TokenizerPipeline* p, size_t n_bytes) {
    memset(w, 0, sizeof *w);
    w->p = p;
    bpe_work_init(&w->bpe, n_bytes / 16 < 65536 ? n_bytes / 16 : 65536);
    if (p->has_regex) { regex_work_init(&w->regex); }
}

static inline void encode_work_free(EncodeWork* w) {
    bpe_work_free(&w->bpe);
    buffer_free(&w->repaired);
    buffer_free(&w->normal[0]);
    buffer_free(&w->normal[1]);
    buffer_free(&w->spaced);
    regex_work_free(&w->regex);
    free(w->tokens);
    memset(w, 0, sizeof *w);
}

enum { TOKENS_AT_ONCE = 1 << 16 };  // for `take`; those of a longer word come together

static inline void encode_work_flush(EncodeWork* w) {
    if (w->n_tokens > 0) { w->take(w->to, w->tokens, w->n_tokens); }
    w->n_tokens = 0;
}

static inline void pipeline_append_(EncodeWork* w, const int32_t* ids, size_t n) {
    if (n == 0) { return; }
    if (w->take && w->n_tokens + n > TOKENS_AT_ONCE) { encode_work_flush(w); }
    if (w->take && n > TOKENS_AT_ONCE) {
        w->take(w->to, ids, n);
        return;
    }
    if (n > w->capacity - w->n_tokens) {
        size_t grown = w->capacity + w->capacity / 2 + 16, needed = w->n_tokens + n;
        w->capacity = grown > needed ? grown : needed;
        memory_need((w->capacity - w->n_tokens) * sizeof(int), "tokens of a text");
        w->tokens = (int*)realloc_check(w->tokens, w->capacity * sizeof(int), "tokens");
    }
    memcpy(w->tokens + w->n_tokens, ids, n * sizeof(int));
    w->n_tokens += n;
}

// slot of a word in the table of the whole vocabulary: its id, or -1 for an empty slot
static inline int32_t* pipeline_whole_word_slot_(const TokenizerPipeline* p, const unsigned char* word, size_t n) {
    uint64_t hash = 0xcbf29ce484222325u, mask = ~(uint64_t)0 >> p->whole_words_shift;  // FNV-1a
    for (size_t i = 0; i < n; i++) { hash = (hash ^ word[i]) * 0x100000001b3u; }
    for (uint64_t i = bpe_hash_(hash, p->whole_words_shift);; i = (i + 1) & mask) {
        int32_t id = p->whole_words[i];
        size_t length = id < 0 ? 0 : p->word_starts[id + 1] - p->word_starts[id];
        if (id < 0 || (length == n && memcmp(p->words.bytes + p->word_starts[id], word, n) == 0)) {
            return &p->whole_words[i];
        }
    }
}

// the symbols of a word of characters: a token for each, or for each of its bytes, or unk
static inline size_t pipeline_character_symbols_(const TokenizerPipeline* p, int32_t* ids, const unsigned char* s,
                                                 size_t n) {
    size_t n_ids = 0;
    int unknown_before = 0;
    for (size_t at = 0; at < n;) {
        uint32_t code;
        size_t length = (size_t)utf8_next(s + at, &code);
        int unknown = p->char_ids[code] == 0 && !p->byte_fallback;
        if (p->char_ids[code] > 0) {
            ids[n_ids++] = p->char_ids[code] - 1;
        } else if (p->byte_fallback) {
            for (size_t i = 0; i < length; i++) { ids[n_ids++] = p->byte_ids[s[at + i]]; }
        } else if (!(unknown_before && p->fuse_unk)) {
            ids[n_ids++] = p->unk;
        }
        unknown_before = unknown;
        at += length;
    }
    return n_ids;
}

// the tokens of one word into w->bpe.ids; returns their number
static inline size_t pipeline_encode_word_uncached_(EncodeWork* w, const unsigned char* word, size_t n) {
    const TokenizerPipeline* p = w->p;
    bpe_reserve_ids(&w->bpe, n);
    int32_t* ids = w->bpe.ids;
    if (p->whole_words) {
        int32_t id = *pipeline_whole_word_slot_(p, word, n);
        if (id >= 0) {
            ids[0] = id;
            return 1;
        }
    }
    if (p->byte_level) {
        for (size_t i = 0; i < n; i++) { ids[i] = p->byte_ids[word[i]]; }
    } else {
        n = pipeline_character_symbols_(p, ids, word, n);
    }
    return bpe_merge(&p->merges, &w->bpe, ids, n);
}

// the word s[at .. end) of a text that ends at n
static inline void pipeline_encode_word_(EncodeWork* w, const unsigned char* s, size_t at, size_t end, size_t n) {
    size_t length = end - at;
    if (length > BPE_CACHED_BYTES) {
        size_t n_ids = pipeline_encode_word_uncached_(w, s + at, length);
        pipeline_append_(w, w->bpe.ids, n_ids);
        return;
    }
    uint64_t key[2];
    BpeCacheLine* line = bpe_cache_line(&w->bpe, s + at, length, n - at, key);
    if (line->word[0] != key[0] || line->word[1] != key[1]) {
        size_t n_ids = pipeline_encode_word_uncached_(w, s + at, length);
        if (n_ids > BPE_CACHED_IDS) {
            pipeline_append_(w, w->bpe.ids, n_ids);
            return;
        }
        line->word[0] = key[0];
        line->word[1] = key[1];
        line->n = (uint32_t)n_ids;
        memcpy(line->ids, w->bpe.ids, n_ids * sizeof(int32_t));
    }
    pipeline_append_(w, line->ids, line->n);
}

// Cut before each marker: all of them, or only those behind another character.
static inline void pipeline_encode_marked_(EncodeWork* w, const unsigned char* s, size_t n, const char* marker,
                                           int all) {
    size_t n_marker = strlen(marker), begin = 0;
    for (size_t at = 1; at + n_marker <= n;) {
        const unsigned char* found = (const unsigned char*)memchr(s + at, (unsigned char)marker[0], n - at);
        if (!found) { break; }
        at = (size_t)(found - s);
        int is_marker = n - at >= n_marker && memcmp(found, marker, n_marker) == 0;
        int is_first = at < n_marker || memcmp(found - n_marker, marker, n_marker) != 0;  // of a run of markers
        if (is_marker && (all || is_first)) {
            pipeline_encode_word_(w, s, begin, at, n);
            begin = at;
        }
        at += is_marker ? n_marker : 1;
    }
    if (begin < n) { pipeline_encode_word_(w, s, begin, n, n); }
}

// s[begin .. end) of a text that ends at n, cut by the splitters from number `step` on
static inline void pipeline_encode_words_(EncodeWork* w, const unsigned char* s, size_t begin, size_t end, size_t n,
                                          int step) {
    const TokenizerPipeline* p = w->p;
    size_t match_end = 0;
    if (step == p->n_splits) {
        pipeline_encode_word_(w, s, begin, end, n);
        return;
    }
    // a splitter sees its piece alone, as if the text ended with it
    for (size_t at = 0; at < end - begin;) {
        size_t stop = word_end(&p->splits[step], &p->unicode, &w->regex, s + begin, end - begin, at, &match_end);
        if (step + 1 == p->n_splits) {
            pipeline_encode_word_(w, s, begin + at, begin + stop, n);
        } else {
            pipeline_encode_words_(w, s, begin + at, begin + stop, n, step + 1);
        }
        at = stop;
    }
}

// a normalised piece without added tokens; is_first: the text begins with it
static inline void pipeline_encode_piece_(EncodeWork* w, const unsigned char* s, size_t n, int is_first) {
    const TokenizerPipeline* p = w->p;
    if (p->metaspace != METASPACE_NONE) {
        size_t n_marker = strlen(p->marker);
        int marked = s[0] == ' ' || (n >= n_marker && memcmp(s, p->marker, n_marker) == 0);
        int prepend = p->metaspace == METASPACE_ALWAYS || (p->metaspace == METASPACE_FIRST && is_first);
        w->spaced.n = 0;
        if (prepend && !marked) { buffer_append(&w->spaced, p->marker, n_marker); }
        pipeline_replace_append_(&w->spaced, s, n, " ", p->marker);
    } else if (p->prefix_space && s[0] != ' ') {
        w->spaced.n = 0;
        buffer_append(&w->spaced, " ", 1);
        buffer_append(&w->spaced, s, n);
    }
    if (p->metaspace != METASPACE_NONE || (p->prefix_space && s[0] != ' ')) {
        s = w->spaced.bytes;
        n = w->spaced.n;
    }
    if (p->marker_split) {
        pipeline_encode_marked_(w, s, n, p->marker, 1);
    } else if (p->cut_before_marker) {
        pipeline_encode_marked_(w, s, n, "\xe2\x96\x81", 0);
    } else {
        pipeline_encode_words_(w, s, 0, n, n, 0);
    }
}

// ---- 5. Added tokens ----

static inline int pipeline_word_before_(const Unicode* u, const unsigned char* s, size_t at) {
    int length;
    return at > 0 && (word_flags_at_(u, s, utf8_before(s, at), &length) & UNICODE_WORD);
}

static inline int pipeline_word_after_(const Unicode* u, const unsigned char* s, size_t n, size_t at) {
    int length;
    return at < n && (word_flags_at_(u, s, at, &length) & UNICODE_WORD);
}

// where the white space before `at` begins, at `from` or later
static inline size_t pipeline_space_begin_(const Unicode* u, const unsigned char* s, size_t from, size_t at) {
    int length;
    while (at > from) {
        size_t before = utf8_before(s, at);
        if (!(word_flags_at_(u, s, before, &length) & UNICODE_SPACE)) { break; }
        at = before;
    }
    return at;
}

static inline void pipeline_encode_normalized_(EncodeWork* w, const unsigned char* s, size_t n, int is_first);

static inline void pipeline_encode_gap_(EncodeWork* w, const TokenTrie* trie, const unsigned char* s, size_t n,
                                        int is_first) {
    if (trie == &w->p->raw) {
        pipeline_encode_normalized_(w, s, n, is_first);
    } else {
        pipeline_encode_piece_(w, s, n, is_first);
    }
}

// Cut the tokens of one trie out of a text and encode what is between. White space that rstrip swallowed may hold
// another token's match, which is then emitted too and the text goes on behind it: so does the original. When that
// token has lstrip it begins behind the swallowed white space, so that nothing is left of it.
static inline void pipeline_encode_around_added_(EncodeWork* w, const TokenTrie* trie, const unsigned char* s, size_t n,
                                                 int is_first) {
    const TokenizerPipeline* p = w->p;
    size_t done = 0, spaces_end = 0, at = 0, end = 0;
    for (int found; !w->plain && (found = trie_find(trie, s, n, &at, &end)) >= 0; at = end) {
        const AddedToken* added = &p->added[found];
        size_t from = at, to = end;
        if (added->single_word &&
            (pipeline_word_before_(&p->unicode, s, from) || pipeline_word_after_(&p->unicode, s, n, to))) {
            continue;
        }
        if (added->lstrip) { from = done < from ? pipeline_space_begin_(&p->unicode, s, done, from) : done; }
        if (added->rstrip) {
            if (to >= spaces_end) { spaces_end = word_run_end_(&p->unicode, s, n, to, UNICODE_SPACE, SIZE_MAX); }
            to = spaces_end;
        }
        if (from >= to) { continue; }
        if (done < from) { pipeline_encode_gap_(w, trie, s + done, from - done, is_first && done == 0); }
        pipeline_append_(w, &added->id, 1);
        done = to;
    }
    if (done < n) { pipeline_encode_gap_(w, trie, s + done, n - done, is_first && done == 0); }
}

static inline void pipeline_encode_normalized_(EncodeWork* w, const unsigned char* s, size_t n, int is_first) {
    pipeline_normalize_(w->p, w->normal, &s, &n);
    pipeline_encode_around_added_(w, &w->p->normal, s, n, is_first);
}

// Append the tokens of a text to w->tokens. plain: added tokens are not looked for; template: <s> and the like are put
// around.
static inline void pipeline_encode(EncodeWork* w, const char* text, size_t n, int plain, int use_template) {
    const TokenizerPipeline* p = w->p;
    const unsigned char* s = (const unsigned char*)text;
    size_t valid = utf8_valid_prefix(s, n);
    if (valid < n) {
        w->repaired.n = 0;
        buffer_append(&w->repaired, s, valid);
        utf8_repair(&w->repaired, s + valid, n - valid);
        s = w->repaired.bytes;
        n = w->repaired.n;
    }
    w->plain = plain;
    if (use_template) { pipeline_append_(w, p->before, (size_t)p->n_before); }
    if (p->has_regex) { regex_begin(&w->regex, n); }
    pipeline_encode_around_added_(w, &p->raw, s, n, 1);
    if (p->has_regex) { regex_end(&w->regex); }
    if (use_template) { pipeline_append_(w, p->after, (size_t)p->n_after); }
}
#endif  // LLMC_TOKENIZER_PIPELINE_H
