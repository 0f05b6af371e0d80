/*
A conversation as the text that a chat template makes of it (chat_template.h), and as tokens with what is learned.
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": [...]}
    chat_render   its text; where in it the markers of turns stand, and which bytes are learned
    chat_encode   the tokens of that text; of each, is it learned?
    chat_end      the token that ends an answer, for who generates; chat_end_text its name
Messages: "role" is system, user, assistant or tool; "content" a text, or a list of {"type": "text", "text": ...}, which
are joined; it may be absent or null beside "tool_calls". Of an assistant also "reasoning_content", what it thought
(qwen3 and later; "thinking" and "reasoning" are other names of it), and "tool_calls": [{"id": ..., "function": {"name":
..., "arguments": {...}}}]; of a tool "tool_call_id". Other keys are passed over. "tools" are descriptions of functions,
written as they are.
Images, of templates that have them (qwen3.5 and later), stand in a list among texts, in one of these forms; `images`
has their paths in the order of the text, in which each is <|vision_start|><|image_pad|><|vision_end|>:
    {"type": "image", "image": "a.png"}      or "path", or "url", in place of "image"
    {"type": "image_url", "image_url": {"url": "a.png"}}      or the path alone as "image_url"
    {"type": "image"}      the next of the conversation's "images": ["a.png", {"path": "b.png"}]
Where a conversation has "images", <image> in a content that is one text is the next of them too. Each of them must have
its place. A part whose "type" says that it is a text is one, whatever other keys it has. Videos are refused.
Learned is what the model has to say itself: of each turn of an assistant all behind its header, <|im_start|>assistant\n
or [/INST], up to the marker that ends it, <|im_end|> or </s>, this one too; a think block and tool calls are parts of
that. Not the line end behind <|im_end|>, which whoever generates puts there. GLM-5 has no such marker: an answer ends
with that of the next turn, and behind the last one the text has a <|user|> for it.
A token is learned if it has a byte of such a part: where an answer begins with a line end, "\n\n" may be one token that
is header and answer. Of qwen3.5 and later not learned is what the prompt of a deployed model begins its answer with:
<think>\n, and all of <think>\n\n</think>\n\n where nothing was thought; of GLM-5 the same without line ends.
The text is that of transformers' apply_chat_template to the last byte, the tokens are its tokens, and what is learned
is what its return_assistant_tokens_mask says of the template with {% generation %} around that part
(dev/ref/check_chat.py). With CHAT_ASKS the text ends where an answer begins, for generation.
Encoding: the text is cut before markers that are tokens of their own (a special token always ends a word), each piece
is encoded once. Which token has a byte is counted in bytes of tokens: as many as those that the piece has up to there
when it ends there. That holds under NFC and where a blank is put in front; markers that are no special tokens, as with
the byte tokenizer, are text like any other.
Cost:   linear, but for Mistral's turns, whose question is encoded twice. Where markers are no special tokens and the
        tokenizer normalises, all before an answer is encoded again for each answer.
Errors: 0 with the reason and its kind for a conversation that has no such form or that the template refuses.
Source: the chat templates named in chat_template.h; huggingface/transformers 5.23, tokenization_utils_base.py
*/
#ifndef LLMC_CHAT_RENDER_H
#define LLMC_CHAT_RENDER_H
#include "chat_template.h"  // ChatTemplate
#include "python_json.h"    // python_json
#include "tokenizer.h"      // Tokenizer, tokenizer_encode_with

// why a sample cannot be used
typedef enum {
    SAMPLE_GOOD, SAMPLE_JSON, SAMPLE_FORM, SAMPLE_ORDER, SAMPLE_TOOLS, SAMPLE_EMPTY, SAMPLE_MARKER, SAMPLE_UNLEARNED,
    SAMPLE_LONG, SAMPLE_IMAGES, SAMPLE_IMAGE_FILE, N_SAMPLE_REASONS
} SampleReason;

// choices of chat_render: end where an answer begins; as with enable_thinking and preserve_thinking of the templates
enum { CHAT_ASKS = 1, CHAT_NO_THINKING = 2, CHAT_KEEPS_THOUGHTS = 4, CHAT_THINKING = 8 };

typedef enum { CHAT_SYSTEM, CHAT_USER, CHAT_ASSISTANT, CHAT_TOOL } ChatRole;
#define CHAT_ROLES "system|user|assistant|tool"

typedef struct { const char* s; size_t n; } ChatString;

typedef struct {
    ChatRole role;
    ChatString content, reasoning, id;  // s NULL: there is none
    const json_t* tool_calls;           // a list that is not empty, or NULL
    const json_t* json;
    ByteBuffer joined;                  // content that came as a list
    int first_image, n_images;          // of `found`
} ChatMessage;

typedef struct {
    size_t at;         // of its <|vision_start|> in `joined` of its message
    const char* path;
} ChatImage;

typedef struct { size_t begin, end; } ChatSpan;  // of bytes

typedef struct {
    ByteBuffer text;
    ChatSpan* learned;   // in the order of the text
    size_t* markers;     // where they begin
    int n_learned, n_markers, learned_capacity, markers_capacity;
    ChatMessage* messages;
    int n_messages, messages_capacity;
    const json_t *tools, *given;  // lists that are not empty, or NULL; given: "images"
    ChatImage* found;     // images as they were read,
    const char** images;  // and the paths of those that were written, which the conversation holds
    int n_given, n_found, n_images, found_capacity, images_capacity;  // n_given: that were taken
    SampleReason reason;  // of a conversation that was refused
} ChatText;

static inline void chat_text_free(ChatText* out) {
    for (int i = 0; i < out->messages_capacity; i++) { buffer_free(&out->messages[i].joined); }
    buffer_free(&out->text);
    free(out->learned);
    free(out->markers);
    free(out->messages);
    free(out->found);
    free(out->images);
    memset(out, 0, sizeof *out);
}

// ---- 1. Reading messages ----

__attribute__((format(printf, 4, 5)))
static inline int chat_refuse_(ChatText* out, SampleReason reason, ErrorText* error, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error->text, sizeof error->text, format, args);
    va_end(args);
    plain_text(error->text);
    out->reason = reason;
    return 0;
}

// a string of a message; absent or null is none. 0: it is something else, or has a 0 in it
static inline int chat_string_(ChatString* string, const json_t* value) {
    string->s = json_string_value(value);
    string->n = json_string_length(value);
    if (string->s) { return strlen(string->s) == string->n; }
    return !value || json_is_null(value);
}

#define CHAT_IMAGE_TEXT CHAT_VISION_BEGIN CHAT_IMAGE_PAD CHAT_VISION_END
#define CHAT_IMAGE_HERE "<image>"  // in a text, of a conversation that has "images"

// one that stands here; path NULL: the next of the conversation's "images"
static inline int chat_add_image_(ChatText* out, ChatMessage* m, int number, const char* path, ErrorText* error) {
    const json_t* next = path ? NULL : json_array_get(out->given, (size_t)out->n_given++);
    if (!path) { path = json_string_value(json_is_object(next) ? json_object_get(next, "path") : next); }
    if (!path) {
        return chat_refuse_(out, SAMPLE_FORM, error, "message %d: expected the path of its image, beside it or as "
                            "number %d of \"images\", found %s", number, out->n_given, next ? "no text" : "none");
    }
    if (m->role == CHAT_SYSTEM) {
        return chat_refuse_(out, SAMPLE_FORM, error, "message %d: a system text has no images", number);
    }
    if (out->n_found == out->found_capacity) {
        out->found_capacity = 2 * out->found_capacity + 8;
        out->found = (ChatImage*)realloc_check(out->found, (size_t)out->found_capacity * sizeof(ChatImage), "images");
    }
    const ChatImage image = {m->joined.n, path};
    out->found[out->n_found++] = image;
    m->n_images++;
    buffer_append_text(&m->joined, CHAT_IMAGE_TEXT);
    return 1;
}

// The path of {"type": "image", ...}; NULL: it has none. 0: what should be one is something else
static inline int chat_image_path_(const char** path, const json_t* part) {
    static const char* names[] = {"image", "image_url", "path", "url"};
    const json_t* found = NULL;
    for (int i = 0; i < 4 && (!found || json_is_null(found)); i++) { found = json_object_get(part, names[i]); }
    if (json_is_object(found)) { found = json_object_get(found, "url"); }
    ChatString string;
    if (!chat_string_(&string, found)) { return 0; }
    *path = string.s;
    return 1;
}

typedef enum { PART_TEXT, PART_IMAGE, PART_VIDEO, PART_OTHER } ChatPart;

// by its type, which is the key that has it
static inline ChatPart chat_part_kind_(const json_t* part) {
    const char* type = json_string_value(json_object_get(part, "type"));
    if (!type) { return PART_OTHER; }
    if (strcmp(type, "text") == 0) { return PART_TEXT; }
    if (strcmp(type, "image") == 0 || strcmp(type, "image_url") == 0) { return PART_IMAGE; }
    return strncmp(type, "video", 5) == 0 ? PART_VIDEO : PART_OTHER;
}

static inline int chat_refuse_content_(ChatText* out, int number, ErrorText* error) {
    return chat_refuse_(out, SAMPLE_FORM, error, "message %d: expected a text as \"content\", or a list of {\"type\": "
                        "\"text\", \"text\": ...} and of images with their paths, without a 0 in it", number);
}

// [{"type": "text", "text": "a"}, {"type": "image", "image": "a.png"}, ...] joined
static inline int chat_join_(ChatText* out, ChatMessage* m, int number, const json_t* parts, ErrorText* error) {
    m->joined.n = 0;
    for (size_t i = 0; i < json_array_size(parts); i++) {
        const json_t* part = json_array_get(parts, i);
        const ChatPart kind = chat_part_kind_(part);
        const char* path;
        ChatString text;
        if (kind == PART_VIDEO) {
            return chat_refuse_(out, SAMPLE_IMAGES, error, "message %d: has a video, of which only single images are "
                                "read: give some of its frames as images", number);
        }
        if (kind == PART_IMAGE) {
            if (!chat_image_path_(&path, part)) { return chat_refuse_content_(out, number, error); }
            if (!chat_add_image_(out, m, number, path, error)) { return 0; }
            continue;
        }
        if (kind == PART_OTHER || !chat_string_(&text, json_object_get(part, "text")) || !text.s) {
            return chat_refuse_content_(out, number, error);
        }
        buffer_append(&m->joined, text.s, text.n);
    }
    return 1;
}

// a text in which each <image> is the next of "images"
static inline int chat_join_text_(ChatText* out, ChatMessage* m, int number, ChatString text, ErrorText* error) {
    m->joined.n = 0;
    for (const char* at; (at = strstr(text.s, CHAT_IMAGE_HERE)) != NULL;) {
        buffer_append(&m->joined, text.s, (size_t)(at - text.s));
        if (!chat_add_image_(out, m, number, NULL, error)) { return 0; }
        text.n -= (size_t)(at - text.s) + strlen(CHAT_IMAGE_HERE);
        text.s = at + strlen(CHAT_IMAGE_HERE);
    }
    buffer_append(&m->joined, text.s, text.n);
    return 1;
}

static inline int chat_read_content_(ChatText* out, ChatMessage* m, int number, ErrorText* error) {
    const json_t* content = json_object_get(m->json, "content");
    m->first_image = out->n_found;
    m->n_images = 0;
    if (!json_is_array(content)) {
        if (!chat_string_(&m->content, content)) { return chat_refuse_content_(out, number, error); }
        if (!out->given || !m->content.s || !strstr(m->content.s, CHAT_IMAGE_HERE)) { return 1; }
        if (!chat_join_text_(out, m, number, m->content, error)) { return 0; }
    } else if (!chat_join_(out, m, number, content, error)) {
        return 0;
    }
    m->content.n = m->joined.n;
    buffer_append(&m->joined, "", 1);
    m->content.s = (const char*)m->joined.bytes;
    return 1;
}

// {"function": {"name": ..., "arguments": ...}} or what is in it alone
static inline const json_t* chat_function_(const json_t* call) {
    const json_t* function = json_object_get(call, "function");
    return function ? function : call;
}

static inline int chat_read_calls_(ChatText* out, ChatMessage* m, int number, ErrorText* error) {
    const json_t* calls = json_object_get(m->json, "tool_calls");
    m->tool_calls = json_array_size(calls) > 0 ? calls : NULL;
    if (calls && !json_is_array(calls) && !json_is_null(calls)) {
        return chat_refuse_(out, SAMPLE_FORM, error, "message %d: expected a list as \"tool_calls\"", number);
    }
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t* function = chat_function_(json_array_get(calls, i));
        ChatString name;
        if (!chat_string_(&name, json_object_get(function, "name")) || !name.s ||
            !json_object_get(function, "arguments")) {
            return chat_refuse_(out, SAMPLE_FORM, error,
                                "message %d: expected a tool call such as {\"function\": {\"name\": \"f\", "
                                "\"arguments\": {}}}, found one without its name or arguments", number);
        }
    }
    return 1;
}

// under the first of its names that is not null, as transformers takes it
static inline int chat_read_reasoning_(ChatMessage* m) {
    static const char* names[] = {"reasoning_content", "thinking", "reasoning"};
    const json_t* found = NULL;
    for (int i = 0; i < 3 && (!found || json_is_null(found)); i++) { found = json_object_get(m->json, names[i]); }
    return chat_string_(&m->reasoning, found);
}

static inline int chat_read_message_(ChatText* out, ChatMessage* m, const json_t* json, int number, ErrorText* error) {
    const char* role = json_string_value(json_object_get(json, "role"));
    const int found = role ? choice_find(CHAT_ROLES, role) : -1;
    if (found < 0 || strcmp(role, choice_name(CHAT_ROLES, found).s) != 0) {
        return chat_refuse_(out, SAMPLE_FORM, error,
                            "message %d: expected \"role\" system, user, assistant or tool, found \"%.30s\"", number,
                            role ? role : "");
    }
    m->role = (ChatRole)found;
    m->json = json;
    m->tool_calls = NULL;
    if (!chat_read_content_(out, m, number, error)) { return 0; }
    if (!chat_read_reasoning_(m)) {
        return chat_refuse_(out, SAMPLE_FORM, error, "message %d: expected a text as \"reasoning_content\"", number);
    }
    if (!chat_string_(&m->id, json_object_get(json, "tool_call_id"))) {
        return chat_refuse_(out, SAMPLE_FORM, error, "message %d: expected a text as \"tool_call_id\"", number);
    }
    if (m->role == CHAT_ASSISTANT && !chat_read_calls_(out, m, number, error)) { return 0; }
    if (!m->content.s && !m->tool_calls) {
        return chat_refuse_(out, SAMPLE_FORM, error, "message %d: expected a text as \"content\", found none", number);
    }
    if (!m->content.s) { m->content.s = ""; }
    return 1;
}

// Those of "images" have each their place, and the template has them
static inline int chat_check_images_(ChatText* out, const ChatTemplate* t, ErrorText* error) {
    const int n_given = (int)json_array_size(out->given);
    if ((out->n_found > 0 || n_given > 0) && !chat_takes_images(t)) {
        return chat_refuse_(out, SAMPLE_IMAGES, error, "the chat template %s has no images",
                            choice_name(CHAT_NAMES, t->kind).s);
    }
    if (out->n_given == n_given) { return 1; }
    return chat_refuse_(out, SAMPLE_FORM, error, "expected a place for each of its %d \"images\", {\"type\": "
                        "\"image\"} or " CHAT_IMAGE_HERE ", found %d", n_given, out->n_given);
}

static inline int chat_read_(ChatText* out, const ChatTemplate* t, const json_t* conversation, ErrorText* error) {
    const json_t *messages = json_object_get(conversation, "messages"), *tools = json_object_get(conversation, "tools");
    const json_t* images = json_object_get(conversation, "images");
    const int n = (int)json_array_size(messages);
    out->n_messages = out->n_given = out->n_found = out->n_images = 0;
    out->tools = json_array_size(tools) > 0 ? tools : NULL;
    out->given = json_array_size(images) > 0 ? images : NULL;
    if (n == 0) {
        return chat_refuse_(out, SAMPLE_FORM, error, "expected a list of messages as \"messages\", found %s",
                            json_is_array(messages) ? "an empty one" : "none");
    }
    if (tools && !json_is_array(tools) && !json_is_null(tools)) {
        return chat_refuse_(out, SAMPLE_FORM, error, "expected a list of functions as \"tools\"");
    }
    if (images && !json_is_array(images) && !json_is_null(images)) {
        return chat_refuse_(out, SAMPLE_FORM, error, "expected a list of paths as \"images\"");
    }
    if (n > out->messages_capacity) {
        out->messages = (ChatMessage*)realloc_check(out->messages, (size_t)n * sizeof(ChatMessage), "messages");
        memset(out->messages + out->messages_capacity, 0, (size_t)(n - out->messages_capacity) * sizeof(ChatMessage));
        out->messages_capacity = n;
    }
    for (int i = 0; i < n; i++) {
        ChatMessage* m = &out->messages[i];
        if (!chat_read_message_(out, m, json_array_get(messages, (size_t)i), i + 1, error)) { return 0; }
        if (!chat_takes_tools(t) && (out->tools || m->role == CHAT_TOOL || m->tool_calls)) {
            return chat_refuse_(out, SAMPLE_TOOLS, error, "the chat template %s has no tools",
                                choice_name(CHAT_NAMES, t->kind).s);
        }
        out->n_messages++;
    }
    return chat_check_images_(out, t, error);
}

// ---- 2. Writing ----

static inline void chat_put_(ChatText* out, ChatString string) { buffer_append(&out->text, string.s, string.n); }
static inline void chat_write_(ChatText* out, const char* text) { buffer_append_text(&out->text, text); }

// at this byte of the text a marker begins, of turns or of an image, before which the text may be cut
static inline void chat_mark_at_(ChatText* out, size_t at) {
    if (out->n_markers == out->markers_capacity) {
        out->markers_capacity = 2 * out->markers_capacity + 16;
        out->markers = (size_t*)realloc_check(out->markers, (size_t)out->markers_capacity * sizeof(size_t), "markers");
    }
    out->markers[out->n_markers++] = at;
}

static inline void chat_mark_(ChatText* out, const char* marker) {
    chat_mark_at_(out, out->text.n);
    chat_write_(out, marker);
}

static inline void chat_list_image_(ChatText* out, const char* path) {
    if (out->n_images == out->images_capacity) {
        out->images_capacity = 2 * out->images_capacity + 8;
        const size_t n_bytes = (size_t)out->images_capacity * sizeof(char*);
        out->images = (const char**)realloc_check(out->images, n_bytes, "images");
    }
    out->images[out->n_images++] = path;
}

// a part of what a message says, with the images in it
static inline void chat_put_of_(ChatText* out, const ChatMessage* m, ChatString part) {
    const uintptr_t first = (uintptr_t)part.s, end = first + part.n;
    for (int i = 0; i < m->n_images; i++) {
        const ChatImage* image = &out->found[m->first_image + i];
        const uintptr_t at = (uintptr_t)m->joined.bytes + image->at;
        if (at < first || at >= end) { continue; }
        const size_t begin = out->text.n + (at - first), pad = begin + strlen(CHAT_VISION_BEGIN);
        chat_mark_at_(out, begin);
        chat_mark_at_(out, pad);
        chat_mark_at_(out, pad + strlen(CHAT_IMAGE_PAD));
        chat_list_image_(out, image->path);
    }
    chat_put_(out, part);
}

// all that was written from `begin` on
static inline void chat_learn_(ChatText* out, size_t begin) {
    if (out->n_learned == out->learned_capacity) {
        out->learned_capacity = 2 * out->learned_capacity + 16;
        const size_t n_bytes = (size_t)out->learned_capacity * sizeof(ChatSpan);
        out->learned = (ChatSpan*)realloc_check(out->learned, n_bytes, "answers");
    }
    ChatSpan span = {begin, out->text.n};
    out->learned[out->n_learned++] = span;
}

// ---- 3. Strings as Python cuts them ----

// without \n in front
static inline ChatString chat_skip_lines_(ChatString s) {
    while (s.n > 0 && s.s[0] == '\n') { s.s++, s.n--; }
    return s;
}

// without \n at the end
static inline ChatString chat_drop_lines_(ChatString s) {
    while (s.n > 0 && s.s[s.n - 1] == '\n') { s.n--; }
    return s;
}

// split(mark)[0], or with `last` split(mark)[-1]
static inline ChatString chat_split_(ChatString s, const char* mark, int last) {
    const size_t n = strlen(mark);
    for (size_t i = 0; i + n <= s.n; i++) {
        const size_t at = last ? s.n - n - i : i;
        if (memcmp(s.s + at, mark, n) != 0) { continue; }
        const ChatString part = {last ? s.s + at + n : s.s, last ? s.n - at - n : at};
        return part;
    }
    return s;
}

static inline int chat_begins_(ChatString s, const char* with) {
    return s.n >= strlen(with) && memcmp(s.s, with, strlen(with)) == 0;
}

static inline int chat_ends_(ChatString s, const char* with) {
    const size_t n = strlen(with);
    return s.n >= n && memcmp(s.s + s.n - n, with, n) == 0;
}

// what str.strip() takes away
static inline int chat_is_space_(uint32_t code) {
    return (code >= 9 && code <= 13) || (code >= 28 && code <= 32) || code == 0x85 || code == 0xa0 || code == 0x1680 ||
           (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f ||
           code == 0x3000;
}

static inline ChatString chat_trim_(ChatString s) {
    uint32_t code;
    for (int length; s.n > 0; s.s += length, s.n -= (size_t)length) {
        length = utf8_next((const unsigned char*)s.s, &code);
        if (!chat_is_space_(code)) { break; }
    }
    while (s.n > 0) {
        const size_t before = utf8_before((const unsigned char*)s.s, s.n);
        utf8_next((const unsigned char*)s.s + before, &code);
        if (!chat_is_space_(code)) { break; }
        s.n = before;
    }
    return s;
}

// ---- 4. ChatML: Qwen and many others ----

// m: who says it, or NULL
static inline void chatml_turn_(ChatText* out, const char* role, const ChatMessage* m, ChatString content) {
    chat_mark_(out, "<|im_start|>");
    chat_write_(out, role);
    chat_write_(out, "\n");
    if (m) { chat_put_of_(out, m, content); }
    else { chat_put_(out, content); }
    chat_mark_(out, "<|im_end|>");
    chat_write_(out, "\n");
}

// the system turn in front: that of the conversation or the template's, with the tools behind it; or there is none
static inline void chatml_begin_(ChatText* out, const ChatTemplate* t) {
    const ChatMessage* first = out->messages;
    ChatString system = {t->system, t->system ? strlen(t->system) : 0};
    if (first->role == CHAT_SYSTEM) { system = first->content; }
    if (!out->tools) {
        if (system.s) { chatml_turn_(out, "system", NULL, system); }
        return;
    }
    chat_mark_(out, "<|im_start|>");
    chat_write_(out, "system\n");
    if (system.s) {
        chat_put_(out, system);
        chat_write_(out, "\n\n");
    }
    chat_write_(out, CHAT_TOOLS_BEGIN);
    for (size_t i = 0; i < json_array_size(out->tools); i++) {
        chat_write_(out, "\n");
        python_json(&out->text, json_array_get(out->tools, i));
    }
    const char *end = CHAT_TOOLS_END, *marker = strstr(end, "<|im_end|>");
    buffer_append(&out->text, end, (size_t)(marker - end));
    chat_mark_(out, "<|im_end|>");
    chat_write_(out, "\n");
}

// qwen2.5 has \n before each call, qwen3 between them and behind a text; its arguments may be JSON as text
static inline void chatml_calls_(ChatText* out, const ChatTemplate* t, const ChatMessage* m, ChatString content) {
    for (size_t i = 0; i < json_array_size(m->tool_calls); i++) {
        const json_t* function = chat_function_(json_array_get(m->tool_calls, i));
        const json_t* arguments = json_object_get(function, "arguments");
        if (t->kind == CHAT_QWEN2_5 || i > 0 || content.n > 0) { chat_write_(out, "\n"); }
        chat_write_(out, "<tool_call>\n{\"name\": \"");
        chat_write_(out, json_string_value(json_object_get(function, "name")));
        chat_write_(out, "\", \"arguments\": ");
        if (t->kind != CHAT_QWEN2_5 && json_is_string(arguments)) { chat_write_(out, json_string_value(arguments)); }
        else { python_json(&out->text, arguments); }
        chat_write_(out, "}\n</tool_call>");
    }
}

// What qwen3 and later thought, and *content without it: a field of its own, or a think block in the content
static inline ChatString chatml_reasoning_(const ChatMessage* m, ChatString* content) {
    const ChatString none = {"", 0};
    if (m->reasoning.s) { return m->reasoning; }
    const ChatString head = chat_split_(*content, "</think>", 0);
    if (head.n == content->n) { return none; }
    *content = chat_skip_lines_(chat_split_(*content, "</think>", 1));
    return chat_skip_lines_(chat_split_(chat_drop_lines_(head), "<think>", 1));
}

// a question of a user, not what a tool answered
static inline int chatml_is_query_(const ChatMessage* m) {
    const int is_result = chat_begins_(m->content, "<tool_response>") && chat_ends_(m->content, "</tool_response>");
    return m->role == CHAT_USER && !is_result;
}

// the last question, of qwen3 and later: what comes behind it still thinks. None: the last message
static inline int chatml_last_query_(const ChatText* out) {
    for (int i = out->n_messages - 1; i >= 0; i--) {
        if (chatml_is_query_(&out->messages[i])) { return i; }
    }
    return out->n_messages - 1;
}

static inline void chatml_answer_(ChatText* out, const ChatTemplate* t, int i, int last_query) {
    const ChatMessage* m = &out->messages[i];
    ChatString content = m->content;
    chat_mark_(out, "<|im_start|>");
    chat_write_(out, "assistant");
    const size_t header_end = out->text.n + 1;  // behind the \n that follows
    if (t->kind != CHAT_QWEN2_5 || content.n > 0 || !m->tool_calls) { chat_write_(out, "\n"); }
    if (t->kind == CHAT_QWEN3) {
        const ChatString reasoning = chatml_reasoning_(m, &content);
        if (i > last_query && (i == out->n_messages - 1 || reasoning.n > 0)) {
            chat_write_(out, "<think>\n");
            chat_put_(out, chat_drop_lines_(chat_skip_lines_(reasoning)));
            chat_write_(out, "\n</think>\n\n");
            chat_put_(out, chat_skip_lines_(content));
        } else {
            chat_put_(out, content);
        }
    } else {
        chat_put_(out, content);
    }
    chatml_calls_(out, t, m, content);
    chat_mark_(out, "<|im_end|>");
    chat_learn_(out, header_end);
    chat_write_(out, "\n");
}

// results of tools that follow each other share a turn of the user, which qwen3.5 does not begin for the first message
static inline void chatml_result_(ChatText* out, const ChatTemplate* t, int i) {
    const ChatMessage* m = &out->messages[i];
    if (i == 0 ? !chat_is_qwen3_5(t) : m[-1].role != CHAT_TOOL) {
        chat_mark_(out, "<|im_start|>");
        chat_write_(out, "user");
    }
    chat_write_(out, "\n<tool_response>\n");
    chat_put_of_(out, m, m->content);
    chat_write_(out, "\n</tool_response>");
    if (i == out->n_messages - 1 || m[1].role != CHAT_TOOL) {
        chat_mark_(out, "<|im_end|>");
        chat_write_(out, "\n");
    }
}

static inline void chatml_render_(ChatText* out, const ChatTemplate* t, int choices) {
    const int last_query = chatml_last_query_(out);
    chatml_begin_(out, t);
    for (int i = 0; i < out->n_messages; i++) {
        const ChatMessage* m = &out->messages[i];
        if (m->role == CHAT_ASSISTANT) { chatml_answer_(out, t, i, last_query); }
        else if (m->role == CHAT_TOOL) { chatml_result_(out, t, i); }
        else if (m->role == CHAT_USER) { chatml_turn_(out, "user", m, m->content); }
        else if (i > 0) { chatml_turn_(out, "system", m, m->content); }
    }
    if (choices & CHAT_ASKS) {
        chat_mark_(out, "<|im_start|>");
        chat_write_(out, "assistant\n");
        if (t->kind == CHAT_QWEN3 && choices & CHAT_NO_THINKING) { chat_write_(out, "<think>\n\n</think>\n\n"); }
    }
}

// ---- 5. ChatML of Qwen3.5 and Qwen3.6 ----

// what the template, or a filter in it, stops at
static inline int qwen35_check_(ChatText* out, const ChatTemplate* t, ErrorText* error) {
    const ShortText name = choice_name(CHAT_NAMES, t->kind);
    if (!chatml_is_query_(&out->messages[chatml_last_query_(out)])) {
        return chat_refuse_(out, SAMPLE_ORDER, error, "expected a question of a user, as the chat template %s has it, "
                            "found none", name.s);
    }
    for (int i = 0; i < out->n_messages; i++) {
        const ChatMessage* m = &out->messages[i];
        if (m->role == CHAT_SYSTEM && i > 0) {
            return chat_refuse_(out, SAMPLE_ORDER, error, "message %d: a system text stands at the beginning in the "
                                "chat template %s", i + 1, name.s);
        }
        for (size_t k = 0; k < json_array_size(m->tool_calls); k++) {
            const json_t* function = chat_function_(json_array_get(m->tool_calls, k));
            if (json_is_object(json_object_get(function, "arguments"))) { continue; }
            return chat_refuse_(out, SAMPLE_TOOLS, error, "message %d: expected an object as \"arguments\", as the "
                                "chat template %s has it", i + 1, name.s);
        }
    }
    return 1;
}

// the system turn in front, where there is a system text or tools
static inline void qwen35_begin_(ChatText* out) {
    const ChatMessage* first = out->messages;
    const int has_system = first->role == CHAT_SYSTEM;
    if (!out->tools) {
        if (has_system) { chatml_turn_(out, "system", NULL, first->content); }
        return;
    }
    chat_mark_(out, "<|im_start|>");
    chat_write_(out, "system\n" CHAT_FUNCTIONS_BEGIN);
    for (size_t i = 0; i < json_array_size(out->tools); i++) {
        chat_write_(out, "\n");
        python_json(&out->text, json_array_get(out->tools, i));
    }
    chat_write_(out, CHAT_FUNCTIONS_END);
    if (has_system && first->content.n > 0) {
        chat_write_(out, "\n\n");
        chat_put_(out, first->content);
    }
    chat_mark_(out, "<|im_end|>");
    chat_write_(out, "\n");
}

// a text as it is, else JSON; but qwen3.5 writes True, False and None as Python's str has them
static inline void qwen35_value_(ChatText* out, const ChatTemplate* t, const json_t* value) {
    const int is_word = json_is_boolean(value) || json_is_null(value);
    if (json_is_string(value)) { buffer_append(&out->text, json_string_value(value), json_string_length(value)); }
    else if (!is_word || t->kind == CHAT_QWEN3_6) { python_json(&out->text, value); }
    else { chat_write_(out, json_is_null(value) ? "None" : json_is_true(value) ? "True" : "False"); }
}

// <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>
static inline void qwen35_calls_(ChatText* out, const ChatTemplate* t, const ChatMessage* m, ChatString content) {
    for (size_t i = 0; i < json_array_size(m->tool_calls); i++) {
        const json_t* function = chat_function_(json_array_get(m->tool_calls, i));
        const char* key;
        json_t* value;
        if (i > 0 || chat_trim_(content).n > 0) { chat_write_(out, i > 0 ? "\n" : "\n\n"); }
        chat_write_(out, "<tool_call>\n<function=");
        chat_write_(out, json_string_value(json_object_get(function, "name")));
        chat_write_(out, ">\n");
        json_object_foreach(json_object_get(function, "arguments"), key, value) {
            chat_write_(out, "<parameter=");
            chat_write_(out, key);
            chat_write_(out, ">\n");
            qwen35_value_(out, t, value);
            chat_write_(out, "\n</parameter>\n");
        }
        chat_write_(out, "</function>\n</tool_call>");
    }
}

// thinks: behind the last question, or thoughts are kept
static inline void qwen35_answer_(ChatText* out, const ChatTemplate* t, const ChatMessage* m, int thinks) {
    ChatString content = m->content;
    const ChatString reasoning = chat_trim_(chatml_reasoning_(m, &content));
    chat_mark_(out, "<|im_start|>");
    chat_write_(out, "assistant\n");
    if (thinks) { chat_write_(out, "<think>\n"); }
    if (thinks && reasoning.n == 0) { chat_write_(out, "\n</think>\n\n"); }
    const size_t begin = out->text.n;  // what stands before it the prompt of a deployed model has
    if (thinks && reasoning.n > 0) {
        chat_put_of_(out, m, reasoning);
        chat_write_(out, "\n</think>\n\n");
    }
    chat_put_of_(out, m, content);
    qwen35_calls_(out, t, m, content);
    chat_mark_(out, "<|im_end|>");
    chat_learn_(out, begin);
    chat_write_(out, "\n");
}

static inline int qwen35_render_(ChatText* out, const ChatTemplate* t, int choices, ErrorText* error) {
    const int says_not = choices & CHAT_NO_THINKING || (t->kind == CHAT_QWEN3_5_SMALL && !(choices & CHAT_THINKING));
    for (int i = 0; i < out->n_messages; i++) { out->messages[i].content = chat_trim_(out->messages[i].content); }
    if (!qwen35_check_(out, t, error)) { return 0; }
    const int first = chatml_last_query_(out), keeps = t->kind == CHAT_QWEN3_6 && choices & CHAT_KEEPS_THOUGHTS;
    qwen35_begin_(out);
    for (int i = 0; i < out->n_messages; i++) {
        const ChatMessage* m = &out->messages[i];
        if (m->role == CHAT_ASSISTANT) { qwen35_answer_(out, t, m, keeps || i > first); }
        else if (m->role == CHAT_TOOL) { chatml_result_(out, t, i); }
        else if (m->role == CHAT_USER) { chatml_turn_(out, "user", m, m->content); }
    }
    if (!(choices & CHAT_ASKS)) { return 1; }
    chat_mark_(out, "<|im_start|>");
    chat_write_(out, "assistant\n<think>\n");
    if (says_not) { chat_write_(out, "\n</think>\n\n"); }
    return 1;
}

// ---- 6. Mistral ----

// Turns of user and assistant alternate, calls and results of tools aside; a system text stands in front or nowhere.
static inline int mistral_check_(ChatText* out, const ChatTemplate* t, int first, ErrorText* error) {
    int n_turns = 0;
    if (first > 0 && !chat_takes_system(t)) {
        return chat_refuse_(out, SAMPLE_ORDER, error, "the chat template %s has no system text",
                            choice_name(CHAT_NAMES, t->kind).s);
    }
    for (int i = first; i < out->n_messages; i++) {
        const ChatMessage* m = &out->messages[i];
        if (m->role == CHAT_TOOL || m->tool_calls) { continue; }
        const ChatRole expected = n_turns++ % 2 == 0 ? CHAT_USER : CHAT_ASSISTANT;
        if (m->role != expected) {
            return chat_refuse_(out, SAMPLE_ORDER, error,
                                "message %d: expected %s, for the chat template %s has turns of user and assistant in "
                                "turn, found %s", i + 1, choice_name(CHAT_ROLES, expected).s,
                                choice_name(CHAT_NAMES, t->kind).s, choice_name(CHAT_ROLES, m->role).s);
        }
    }
    return 1;
}

// [{"type": "function", "function": {...}}, ...], each text in it as it is, without escapes: so does the template
static inline void mistral_tools_(ChatText* out) {
    chat_mark_(out, "[AVAILABLE_TOOLS]");
    chat_write_(out, " [");
    for (size_t i = 0; i < json_array_size(out->tools); i++) {
        json_t* function = json_object_get(json_array_get(out->tools, i), "function");
        const char *key, *between = "";
        json_t* value;
        if (i > 0) { chat_write_(out, ", "); }
        chat_write_(out, "{\"type\": \"function\", \"function\": {");
        json_object_foreach(function, key, value) {
            if (strcmp(key, "return") == 0) { continue; }
            chat_write_(out, between);
            chat_write_(out, "\"");
            chat_write_(out, key);
            chat_write_(out, json_is_string(value) ? "\": \"" : "\": ");
            if (json_is_string(value)) { chat_write_(out, json_string_value(value)); }
            else { python_json(&out->text, value); }
            if (json_is_string(value)) { chat_write_(out, "\""); }
            between = ", ";
        }
        chat_write_(out, "}}");
    }
    chat_write_(out, "]");
    chat_mark_(out, "[/AVAILABLE_TOOLS]");
}

static inline size_t chat_characters_(ChatString s) {
    size_t n = 0;
    for (size_t i = 0; i < s.n; i++) { n += (s.s[i] & 0xc0) != 0x80; }
    return n;
}

static inline int mistral_check_id_(ChatText* out, ChatString id, int number, ErrorText* error) {
    if (id.s && chat_characters_(id) == 9) { return 1; }
    return chat_refuse_(out, SAMPLE_TOOLS, error,
                        "message %d: expected an id of 9 characters, as the chat template mistral-v3 has for each tool "
                        "call and its result, found \"%.30s\"", number, id.s ? id.s : "");
}

// ids and descriptions that the template has to read
static inline int mistral_check_tools_(ChatText* out, ErrorText* error) {
    for (size_t i = 0; i < json_array_size(out->tools); i++) {
        if (json_is_object(json_object_get(json_array_get(out->tools, i), "function"))) { continue; }
        return chat_refuse_(out, SAMPLE_TOOLS, error, "tool %zu: expected {\"type\": \"function\", \"function\": "
                            "{\"name\": ...}}", i + 1);
    }
    for (int i = 0; i < out->n_messages; i++) {
        const ChatMessage* m = &out->messages[i];
        if (m->role == CHAT_TOOL && !mistral_check_id_(out, m->id, i + 1, error)) { return 0; }
        for (size_t k = 0; k < json_array_size(m->tool_calls); k++) {
            const json_t* call = json_array_get(m->tool_calls, k);
            ChatString id;
            if (!chat_string_(&id, json_object_get(call, "id"))) { id.s = NULL; }
            if (!mistral_check_id_(out, id, i + 1, error)) { return 0; }
            if (json_is_object(json_object_get(call, "function"))) { continue; }
            return chat_refuse_(out, SAMPLE_TOOLS, error, "message %d: expected \"function\" in its tool call", i + 1);
        }
    }
    return 1;
}

// [TOOL_CALLS] [{"name": ..., "arguments": ..., "id": "123456789"}]; a text beside calls is not written
static inline void mistral_calls_(ChatText* out, const ChatMessage* m) {
    chat_mark_(out, "[TOOL_CALLS]");
    chat_write_(out, " [");
    for (size_t i = 0; i < json_array_size(m->tool_calls); i++) {
        const json_t* call = json_array_get(m->tool_calls, i);
        if (i > 0) { chat_write_(out, ", "); }
        python_json(&out->text, json_object_get(call, "function"));
        out->text.n--;  // the closing bracket
        chat_write_(out, ", \"id\": \"");
        chat_write_(out, json_string_value(json_object_get(call, "id")));
        chat_write_(out, "\"}");
    }
    chat_write_(out, "]");
}

static inline void mistral_result_(ChatText* out, const ChatMessage* m) {
    chat_mark_(out, "[TOOL_RESULTS]");
    chat_write_(out, " {\"content\": ");
    chat_put_(out, m->content);
    chat_write_(out, ", \"call_id\": \"");
    chat_put_(out, m->id);
    chat_write_(out, "\"}");
    chat_mark_(out, "[/TOOL_RESULTS]");
}

// the question of message i; system: NULL where it has none
static inline void mistral_question_(ChatText* out, const ChatTemplate* t, int i, const ChatMessage* system) {
    if (t->kind == CHAT_MISTRAL_V1) { chat_write_(out, " "); }
    chat_mark_(out, "[INST]");
    chat_write_(out, " ");
    if (system) {
        chat_put_(out, system->content);
        chat_write_(out, "\n\n");
    }
    chat_put_(out, out->messages[i].content);
    if (t->kind != CHAT_MISTRAL_V3) { chat_write_(out, " "); }
    chat_mark_(out, "[/INST]");
}

static inline void mistral_answer_(ChatText* out, const ChatTemplate* t, const ChatMessage* m) {
    const size_t begin = out->text.n;
    if (m->tool_calls) {
        mistral_calls_(out, m);
    } else {
        if (t->kind >= CHAT_MISTRAL_V1) { chat_write_(out, " "); }
        chat_put_(out, t->trims ? chat_trim_(m->content) : m->content);
    }
    chat_mark_(out, t->eos);
    chat_learn_(out, begin);
    if (t->kind == CHAT_MISTRAL_V0_1) { chat_write_(out, " "); }
}

// Tools stand before the last question, and before each that is the same message, for so the template asks.
static inline int mistral_render_(ChatText* out, const ChatTemplate* t, ErrorText* error) {
    const ChatMessage *system = out->messages[0].role == CHAT_SYSTEM ? out->messages : NULL, *last = NULL;
    const int first = system != NULL;
    if (!mistral_check_(out, t, first, error) || !mistral_check_tools_(out, error)) { return 0; }
    for (int i = first; i < out->n_messages; i++) {
        if (out->messages[i].role == CHAT_USER) { last = &out->messages[i]; }
    }
    chat_mark_(out, t->bos);
    for (int i = first; i < out->n_messages; i++) {
        const ChatMessage* m = &out->messages[i];
        if (m->role == CHAT_TOOL) { mistral_result_(out, m); }
        if (m->role == CHAT_ASSISTANT) { mistral_answer_(out, t, m); }
        if (m->role != CHAT_USER) { continue; }
        const int has_system = t->kind == CHAT_MISTRAL_V3 ? i == out->n_messages - 1 : i == first;
        if (out->tools && json_equal((json_t*)m->json, (json_t*)last->json)) { mistral_tools_(out); }
        mistral_question_(out, t, i, has_system ? system : NULL);
    }
    return 1;
}

// ---- 7. GLM-5 ----

#define GLM_USER "<|user|>"

// Behind its header: what was thought, where no question follows, and the answer. Where in the text it begins to be
// learned comes back
static inline size_t glm_answer_(ChatText* out, const ChatMessage* m, int thinks) {
    ChatString content = m->content;
    const ChatString reasoning = chatml_reasoning_(m, &content);
    const int has_thoughts = thinks && reasoning.n > 0;
    chat_mark_(out, "<think>");
    const size_t thoughts = out->text.n;
    if (has_thoughts) { chat_put_(out, reasoning); }
    chat_mark_(out, "</think>");
    const size_t begin = has_thoughts ? thoughts : out->text.n;
    chat_put_(out, chat_trim_(content));
    return begin;
}

static inline int glm_render_(ChatText* out, int choices) {
    static const char* const headers[] = {"<|system|>", GLM_USER, "<|assistant|>"};  // of ChatRole
    int last = out->n_messages - 1;
    size_t answer = 0;  // where one begins that has not ended
    while (last >= 0 && out->messages[last].role != CHAT_USER) { last--; }
    chat_mark_(out, "[gMASK]");
    chat_mark_(out, "<sop>");
    for (int i = 0; i < out->n_messages; i++) {
        const ChatMessage* m = &out->messages[i];
        chat_mark_(out, headers[m->role]);
        if (answer > 0) { chat_learn_(out, answer); }
        answer = m->role == CHAT_ASSISTANT ? glm_answer_(out, m, i > last) : 0;
        if (m->role != CHAT_ASSISTANT) { chat_put_of_(out, m, m->content); }
    }
    if (choices & CHAT_ASKS) {
        chat_mark_(out, headers[CHAT_ASSISTANT]);
        chat_mark_(out, "<think>");
        if (choices & CHAT_NO_THINKING) { chat_mark_(out, "</think>"); }
    } else if (answer > 0) {
        chat_mark_(out, GLM_USER);
        chat_learn_(out, answer);
    }
    return 1;
}

// the text of a conversation into `out`, which is kept for the next one; 1, or 0 with the reason. choices: CHAT_ASKS ..
static inline int chat_render(ChatText* out, const ChatTemplate* t, const json_t* conversation, int choices,
                              ErrorText* error) {
    out->text.n = 0;
    out->n_learned = out->n_markers = 0;
    out->reason = SAMPLE_GOOD;
    if (!chat_read_(out, t, conversation, error)) { return 0; }
    if (chat_is_mistral(t)) { return mistral_render_(out, t, error); }
    if (chat_is_qwen3_5(t)) { return qwen35_render_(out, t, choices, error); }
    if (t->kind == CHAT_GLM5) { return glm_render_(out, choices); }
    chatml_render_(out, t, choices);
    return 1;
}

// ---- 8. Tokens ----

typedef struct {
    int* ids;
    unsigned char* learned;
    int n, capacity;
} ChatTokens;

static inline void chat_tokens_free(ChatTokens* out) {
    free(out->ids);
    free(out->learned);
    memset(out, 0, sizeof *out);
}

// room for n more
static inline void chat_tokens_reserve(ChatTokens* out, int n) {
    if (n <= out->capacity - out->n) { return; }
    out->capacity = out->n + n + out->capacity / 2;
    out->ids = (int*)realloc_check(out->ids, (size_t)out->capacity * sizeof(int), "tokens of a conversation");
    out->learned = (unsigned char*)realloc_check(out->learned, (size_t)out->capacity, "tokens of a conversation");
}

static inline void chat_tokens_append_(ChatTokens* out, const int* ids, int n) {
    chat_tokens_reserve(out, n);
    if (n > 0) { memcpy(out->ids + out->n, ids, (size_t)n * sizeof(int)); }
    memset(out->learned + out->n, 0, (size_t)n);
    out->n += n;
}

// Is the marker at text[at] a token of its own, one that takes no white space along? Then words end before it.
static inline int chat_cuts_(const Tokenizer* t, const ByteBuffer* text, size_t at) {
    size_t found_at = at, end = 0;
    if (!t->pipeline) { return 0; }
    const int found = trie_find(&t->pipeline->raw, text->bytes, text->n, &found_at, &end);
    if (found < 0 || found_at != at) { return 0; }
    const AddedToken* added = &t->pipeline->added[found];
    return !added->lstrip && !added->rstrip && !added->single_word;
}

static inline const char* chat_end_text(const ChatTemplate* t) {
    return chat_is_mistral(t) ? t->eos : t->kind == CHAT_GLM5 ? GLM_USER : "<|im_end|>";
}

// The token that ends an answer, <|im_end|>, </s> or <|user|>; -1: it is several, as with the byte tokenizer
static inline int chat_end(const ChatTemplate* t, const Tokenizer* k, TokenizerWork* w) {
    const char* end = chat_end_text(t);
    return tokenizer_encode_with(k, w, end, strlen(end), TOKENIZER_ADDED) == 1 ? w->tokens[0] : -1;
}

// Do the tokens of any text stand for as many bytes as it has?
static inline int chat_keeps_bytes_(const Tokenizer* t) {
    const TokenizerPipeline* p = t->pipeline;
    if (!p) { return 1; }
    int keeps = p->byte_level && !p->prefix_space && p->n_normalize == 0 && p->metaspace == METASPACE_NONE;
    for (int i = 0; i < p->n_added && keeps; i++) { keeps = !p->added[i].lstrip && !p->added[i].rstrip; }
    return keeps;
}

// bytes that the tokens of a text stand for, which is more than it has where a blank is put in front
static inline size_t chat_token_bytes_(const Tokenizer* t, TokenizerWork* w, const unsigned char* text, size_t n) {
    if (n == 0 || chat_keeps_bytes_(t)) { return n; }
    const int n_tokens = tokenizer_encode_with(t, w, (const char*)text, n, TOKENIZER_ADDED);
    size_t sum = 0;
    for (int i = 0; i < n_tokens; i++) { sum += t->starts[w->tokens[i] + 1] - t->starts[w->tokens[i]]; }
    return sum;
}

// Tokens first .. out->n are those of the piece text[begin .. end): marks those that have a byte of the span.
static inline void chat_mark_learned_(ChatTokens* out, const Tokenizer* t, TokenizerWork* w, const ByteBuffer* text,
                                      size_t begin, size_t end, ChatSpan span, int first) {
    const size_t from = span.begin > begin ? span.begin : begin, to = span.end < end ? span.end : end;
    if (from >= to) { return; }
    const size_t low = chat_token_bytes_(t, w, text->bytes + begin, from - begin);
    const size_t high = to == end ? SIZE_MAX : chat_token_bytes_(t, w, text->bytes + begin, to - begin);
    size_t at = 0;
    for (int i = first; i < out->n; i++) {
        const size_t next = at + t->starts[out->ids[i] + 1] - t->starts[out->ids[i]];
        out->learned[i] |= next > low && at < high;
        at = next;
    }
}

// the tokens of a rendered conversation into `out`, which is kept for the next one
static inline void chat_encode(ChatTokens* out, const Tokenizer* t, TokenizerWork* w, const ChatText* c) {
    int marker = 0, span = 0;
    out->n = 0;
    for (size_t begin = 0, end; begin < c->text.n; begin = end) {
        const int first = out->n;
        while (marker < c->n_markers && (c->markers[marker] <= begin || !chat_cuts_(t, &c->text, c->markers[marker]))) {
            marker++;
        }
        end = marker < c->n_markers ? c->markers[marker] : c->text.n;
        const int n = tokenizer_encode_with(t, w, (const char*)c->text.bytes + begin, end - begin, TOKENIZER_ADDED);
        chat_tokens_append_(out, w->tokens, n);
        while (span < c->n_learned && c->learned[span].end <= begin) { span++; }
        for (int i = span; i < c->n_learned && c->learned[i].begin < end; i++) {
            chat_mark_learned_(out, t, w, &c->text, begin, end, c->learned[i], first);
        }
    }
}
#endif  // LLMC_CHAT_RENDER_H
