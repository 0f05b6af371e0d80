// llmc/text/chat_render.h as a shared library, for dev/ref/check_chat.py: plain functions that ctypes can call.
#include "llmc/text/chat_render.h"  // ChatTemplate, chat_render, chat_encode
#include "tokenizer_shared.c"       // shared_open, shared_close, shared_save_bytes

typedef struct {
    ChatTemplate t;
    ChatText text;
    ChatTokens tokens;
    char reason[1000];  // of what was refused last
} SharedChat;

void shared_chat_begin(void) { json_never_null(); }

// NULL: not recognised. name: its own, of at least 32 bytes
SharedChat* shared_chat_open(const char* jinja, size_t n_bytes, char* name) {
    SharedChat* c = (SharedChat*)calloc(1, sizeof *c);
    ErrorText error;
    if (!chat_template_recognise(&c->t, jinja, n_bytes, &error)) {
        free(c);
        return NULL;
    }
    snprintf(name, 32, "%s", choice_name(CHAT_NAMES, c->t.kind).s);
    return c;
}

void shared_chat_close(SharedChat* c) {
    chat_template_free(&c->t);
    chat_text_free(&c->text);
    chat_tokens_free(&c->tokens);
    free(c);
}

const char* shared_chat_reason(const SharedChat* c) { return c->reason; }

// the text of a conversation, a JSON object, of *n_bytes; NULL: refused
const char* shared_chat_render(SharedChat* c, const char* json, int choices, size_t* n_bytes) {
    ErrorText error;
    json_t* conversation = json_loads(json, 0, NULL);
    const int ok = chat_render(&c->text, &c->t, conversation, choices, &error);
    json_decref(conversation);
    *n_bytes = c->text.text.n;
    if (!ok) { snprintf(c->reason, sizeof c->reason, "%s", error.text); }
    return ok ? (const char*)c->text.text.bytes : NULL;
}

// the tokens of the text rendered last: their number; ids and learned stay until the next call
int shared_chat_encode(SharedChat* c, const Tokenizer* t, const int** ids, const unsigned char** learned) {
    TokenizerWork w;
    tokenizer_work_init(&w, t, c->text.text.n);
    chat_encode(&c->tokens, t, &w, &c->text);
    tokenizer_work_free(&w);
    *ids = c->tokens.ids;
    *learned = c->tokens.learned;
    return c->tokens.n;
}

int shared_chat_spans(const SharedChat* c, const ChatSpan** spans) {
    *spans = c->text.learned;
    return c->text.n_learned;
}
