/*
--chat: somebody at a terminal, or lines of a pipe, and the model take turns.
    chat_init, chat_free
    chat          until the input ends, or Ctrl-C at the prompt
    chat_turn     what one line does: a command, or something that is said and answered
Each line is a turn of the user. The whole conversation goes through the model's chat template again (questions.h), and
what its tokens share with those of before stays in the cache (generate.h): a turn costs its own tokens.
    /reset            forget what was said, but for the system text
    /system TEXT      what the model is told to be; without TEXT nothing
    /image FILE       PNG or JPEG, goes with what is said next; several go in their order
    /think on|off     where the template thinks (qwen3 and later, glm5): may an answer begin with thoughts?
    /help             these; /quit or /exit ends, as Ctrl-D does
Ctrl-C ends an answer, which stays as far as it came, and at the prompt the chat. When the conversation no longer fits
the positions of the window, its oldest turns go, each question with its answers, and a line says so; one question that
is too long by itself is not taken. An answer that fills the window ends there, and a line says so.
On a terminal there are a prompt sign and notes; a pipe gets the answers alone, each with a line end, and mistakes on
standard error.
*/
#ifndef LLMC_CHAT_H
#define LLMC_CHAT_H
#include "questions.h"  // Asker, asker_ask, asker_most
#include <poll.h>
#include <signal.h>

typedef struct {
    Generator* g;
    Asker* asker;
    uint64_t* random;
    json_t *system, *turns;  // system: a text, or NULL; turns: messages of user and assistant
    json_t* images;          // that go with what is said next
    FILE *in, *out;
    int is_terminal;
    SafeText safe;            // out, for what the model says
    ByteBuffer line, answer;  // that was read, with a 0 behind it; that is being written
} Chat;

enum { CHAT_LINE_MOST = 16 << 20 };  // bytes of a line that are kept, far more than a window can hold

static inline volatile sig_atomic_t* chat_interrupted_(void) {
    static volatile sig_atomic_t interrupted;  // state of the process, as its signal handlers are
    return &interrupted;
}

static inline void chat_handler_(int signal_number) { *chat_interrupted_() = signal_number; }

// Ctrl-C from now on; a second one ends the process. restarts: not what is being read
static inline void chat_listen_(int restarts) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = chat_handler_;
    action.sa_flags = (int)(SA_RESETHAND | (restarts ? SA_RESTART : 0));
    *chat_interrupted_() = 0;
    sigaction(SIGINT, &action, NULL);
}

// Until a line can be read; 0: Ctrl-C came. To read at once would miss one that comes just before
static inline int chat_wait_(const Chat* c) {
    struct pollfd input = {fileno(c->in), POLLIN, 0};
    sigset_t interrupt, usual;
    int found = -1;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    sigprocmask(SIG_BLOCK, &interrupt, &usual);  // it comes while ppoll waits, or has come
    while (*chat_interrupted_() == 0 && found < 0) {
        found = ppoll(&input, 1, NULL, &usual);
        if (found < 0 && errno != EINTR) { fail_run("--chat: standard input: cannot be read: %s", strerror(errno)); }
    }
    sigprocmask(SIG_SETMASK, &usual, NULL);
    return found > 0;
}

static inline void chat_init(Chat* c, Generator* g, Asker* asker, uint64_t* random, FILE* in, FILE* out,
                             int is_terminal) {
    memset(c, 0, sizeof *c);
    c->g = g;
    c->asker = asker;
    c->random = random;
    c->turns = json_array();
    c->images = json_array();
    c->in = in;
    c->out = c->safe.out = out;
    c->is_terminal = is_terminal;
    asker_open(asker);
    if (is_terminal) { g->interrupted = chat_interrupted_(); }
}

static inline void chat_free(Chat* c) {
    json_decref(c->system);
    json_decref(c->turns);
    json_decref(c->images);
    buffer_free(&c->line);
    buffer_free(&c->answer);
}

// to who sits there; a pipe is told of mistakes alone, by warn_line
__attribute__((format(printf, 2, 3)))
static inline void chat_note_(const Chat* c, const char* format, ...) {
    va_list args;
    if (!c->is_terminal) { return; }
    va_start(args, format);
    vfprintf(c->out, format, args);
    va_end(args);
    fputc('\n', c->out);
}

// ---- 1. What was said ----

static inline json_t* chat_message_(const char* role, json_t* content) {
    return json_pack("{s:s, s:o}", "role", role, "content", content);
}

// all of it as chat_render reads it, to be dereferenced
static inline json_t* chat_conversation_(const Chat* c) {
    json_t* messages = json_array();
    if (c->system) { json_array_append_new(messages, chat_message_("system", json_incref(c->system))); }
    json_array_extend(messages, c->turns);
    return json_pack("{s:o}", "messages", messages);
}

static inline int chat_is_question_(const json_t* message) {
    return strcmp(json_string_value(json_object_get(message, "role")), "user") == 0;
}

// the oldest question goes, with what follows it up to the next; 0: there is only one
static inline int chat_drop_oldest_(Chat* c) {
    size_t n = 1;
    while (n < json_array_size(c->turns) && !chat_is_question_(json_array_get(c->turns, n))) { n++; }
    if (n >= json_array_size(c->turns)) { return 0; }
    for (size_t i = 0; i < n; i++) { json_array_remove(c->turns, 0); }
    return 1;
}

// what is said with the images that wait, a new reference
static inline json_t* chat_content_(const Chat* c, json_t* text) {
    if (json_array_size(c->images) == 0) { return json_incref(text); }
    json_t* content = json_copy(c->images);
    json_array_append_new(content, json_pack("{s:s, s:O}", "type", "text", "text", text));
    return content;
}

// may that be said? It stands alone here: what the model said before is not judged
static inline int chat_may_say_(Chat* c, const char* role, json_t* content, ErrorText* error) {
    json_t* messages = json_array();
    const int is_system = strcmp(role, "system") == 0;
    json_array_append_new(messages, chat_message_(role, json_incref(content)));
    if (is_system) { json_array_append_new(messages, chat_message_("user", json_string("?"))); }
    json_t* conversation = json_pack("{s:o}", "messages", messages);
    const int may = asker_check(c->asker, conversation, error);
    json_decref(conversation);
    return may;
}

// ---- 2. A turn ----

static inline void chat_take_(void* chat, const char* text, size_t n_bytes) {
    Chat* c = (Chat*)chat;
    buffer_append(&c->answer, text, n_bytes);
    text_print_safe_piece(&c->safe, text, n_bytes);
    fflush(c->out);
}

// The prompt of the conversation, from whose beginning goes what does not fit beside an answer. 0: nothing does
static inline int chat_prompt_(Chat* c, Prompt* p) {
    const int room = c->g->room, most = c->g->o->max_new_tokens;
    const int reserve = most < room / 2 ? most : room / 2;  // for the answer
    ErrorText error;
    for (int n_dropped = 0;; n_dropped++) {
        json_t* conversation = chat_conversation_(c);
        const int ok = asker_ask(c->asker, conversation, p, &error);
        json_decref(conversation);
        if (!ok) {
            warn_line("%s", error.text);
            return 0;
        }
        if (p->n + reserve <= room) {
            if (n_dropped > 0) {
                char which[32] = "turn is";
                if (n_dropped > 1) { snprintf(which, sizeof which, "%d turns are", n_dropped); }
                warn_line("the oldest %s forgotten: the conversation no longer fits %d positions", which, room);
            }
            return 1;
        }
        const int n = p->n;
        prompt_free(p);
        if (!chat_drop_oldest_(c)) {
            warn_line("expected at most %d tokens, so that an answer fits %d positions, found %d: not taken",
                      room - reserve, room, n);
            return 0;
        }
    }
}

// 0: the question does not fit and is taken back
static inline int chat_answer_(Chat* c) {
    Prompt p;
    if (!chat_prompt_(c, &p)) {
        json_array_remove(c->turns, json_array_size(c->turns) - 1);
        return 0;
    }
    const int most = asker_most(c->g, p.n);
    const TextAsked asked = {&p, most, &c->asker->stop, c->random, chat_take_, c};
    c->answer.n = 0;
    if (c->is_terminal) { chat_listen_(1); }
    const TextEnd end = generate_to(c->g, &asked);
    text_print_safe_end(&c->safe);
    fputc('\n', c->out);
    fflush(c->out);
    json_array_append_new(c->turns, chat_message_("assistant", asker_text(&c->answer)));
    if (end == TEXT_FULL && most < c->g->o->max_new_tokens) {
        warn_line("the answer is cut after %d tokens: the conversation fills the %d positions of the window", most,
                  c->g->room);
    } else if (end == TEXT_FULL) {
        chat_note_(c, "[cut after %d tokens: --max-new-tokens]", most);
    } else if (c->answer.n == 0) {
        warn_line("the answer is empty%s", asker_has_thoughts(c->asker) && c->asker->thinks
                  ? ": a model that learned without thoughts is asked by --think 0, or after /think off" : "");
    }
    prompt_free(&p);
    return 1;
}

static inline void chat_say_(Chat* c, const char* line, size_t n_bytes) {
    ErrorText error;
    json_t *text = json_stringn(line, n_bytes), *content = text ? chat_content_(c, text) : NULL;
    if (!text) {
        warn_line("expected UTF-8, found something else: not taken");
    } else if (!chat_may_say_(c, "user", content, &error)) {
        warn_line("%s", error.text);
    } else {
        json_array_append_new(c->turns, chat_message_("user", json_incref(content)));
        if (chat_answer_(c)) { json_array_clear(c->images); }
    }
    json_decref(content);
    json_decref(text);
}

// ---- 3. Commands ----

static inline void chat_set_system_(Chat* c, const char* text) {
    ErrorText error;
    json_t* system = *text ? json_string(text) : NULL;
    if (*text && (!system || !chat_may_say_(c, "system", system, &error))) {
        warn_line("/system: %s", system ? error.text : "expected UTF-8");
        json_decref(system);
        return;
    }
    json_decref(c->system);
    c->system = system;
    chat_note_(c, *text ? "[system text set]" : "[no system text]");
}

// one more that waits for what is said next, if it can be seen
static inline void chat_see_(Chat* c, const char* line) {
    ErrorText error;
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s", line);
    for (size_t n = strlen(path); n > 0 && path[n - 1] == ' '; n--) { path[n - 1] = '\0'; }
    json_t *image = json_pack("{s:s, s:s}", "type", "image", "image", path), *alone = json_array();
    if (image) { json_array_append(alone, image); }
    if (!*path) {
        warn_line("/image: expected a file behind it");
    } else if (!image || !chat_may_say_(c, "user", alone, &error)) {
        warn_line("/image: %s", image ? error.text : "expected UTF-8");
    } else {
        json_array_append(c->images, image);
        chat_note_(c, "[goes with what you say next]");
    }
    json_decref(alone);
    json_decref(image);
}

static inline void chat_set_thinking_(Chat* c, const char* text) {
    const int on = strcmp(text, "on") == 0;
    if (!asker_has_thoughts(c->asker)) {
        warn_line("/think: the chat template %s has no thoughts", choice_name(CHAT_NAMES, c->asker->t.kind).s);
    } else if (!on && strcmp(text, "off") != 0) {
        warn_line("/think: expected on or off, found \"%.40s\"", text);
    } else {
        c->asker->thinks = on;
        chat_note_(c, "[answers %s thoughts]", on ? "may begin with" : "have no");
    }
}

static inline void chat_help_(const Chat* c) {
    chat_note_(c, "[/reset forgets the conversation, /system TEXT tells the model what to be%s%s; Ctrl-C ends an "
                  "answer, Ctrl-D the chat]", c->asker->measure ? ", /image FILE shows it one" : "",
               asker_has_thoughts(c->asker) ? ", /think on|off" : "");
}

// the rest of the line if it begins with this word; NULL: it does not
static inline const char* chat_command_(const char* line, const char* word) {
    const size_t n = strlen(word);
    if (strncmp(line, word, n) != 0 || (line[n] && line[n] != ' ')) { return NULL; }
    return line + n + strspn(line + n, " ");
}

// 0: the chat is over. The line ends with a 0, in front of which there may be others
static inline int chat_turn(Chat* c, const char* line, size_t n_bytes) {
    const char* rest;
    if (line[strspn(line, " \t")] == '\0' && strlen(line) == n_bytes) { return 1; }
    if (chat_command_(line, "/quit") || chat_command_(line, "/exit")) { return 0; }
    if (chat_command_(line, "/reset")) {
        json_array_clear(c->turns);
        json_array_clear(c->images);
        chat_note_(c, "[forgotten]");
    } else if ((rest = chat_command_(line, "/system"))) {
        chat_set_system_(c, rest);
    } else if ((rest = chat_command_(line, "/image"))) {
        chat_see_(c, rest);
    } else if ((rest = chat_command_(line, "/think"))) {
        chat_set_thinking_(c, rest);
    } else if (chat_command_(line, "/help")) {
        chat_help_(c);
    } else if (*line == '/') {
        warn_line("%.40s: expected /reset, /system, /image, /think, /help or /quit; to say it, put a blank in front",
                  line);
    } else {
        chat_say_(c, line, n_bytes);
    }
    return 1;
}

// The bytes of the next line, without its end, of which CHAT_LINE_MOST are kept; -1: there is none
static inline int64_t chat_read_line_(Chat* c) {
    int64_t n = 0;
    int byte;
    c->line.n = 0;
    for (; (byte = getc_unlocked(c->in)) != EOF && byte != '\n'; n++) {
        const unsigned char as_read = (unsigned char)byte;
        if (n < CHAT_LINE_MOST) { buffer_append(&c->line, &as_read, 1); }
    }
    if (byte == EOF && (n == 0 || ferror(c->in))) { return -1; }
    for (; n > 0 && n <= CHAT_LINE_MOST && c->line.bytes[n - 1] == '\r'; n--) { c->line.n--; }
    buffer_append(&c->line, "", 1);
    return n;
}

// 0: the chat is over
static inline int chat_next_(Chat* c) {
    const int64_t n = chat_read_line_(c);
    if (n > CHAT_LINE_MOST) {
        warn_line("expected a line of at most %s, found %s: not taken", format_bytes(CHAT_LINE_MOST).s,
                  format_bytes((double)n).s);
        return 1;
    }
    return n >= 0 && chat_turn(c, (const char*)c->line.bytes, (size_t)n);
}

static inline void chat(Chat* c) {
    if (c->is_terminal) {
        chat_note_(c, "[chat template %s, %d positions]", choice_name(CHAT_NAMES, c->asker->t.kind).s, c->g->room);
        chat_help_(c);
    }
    for (;;) {
        if (c->is_terminal) {
            chat_listen_(0);
            fputs("> ", c->out);
            fflush(c->out);
            if (!chat_wait_(c)) { break; }
        }
        if (!chat_next_(c)) { break; }
    }
    if (c->is_terminal) {
        signal(SIGINT, SIG_DFL);
        fputc('\n', c->out);
    }
    const int is_broken = ferror(c->in) && *chat_interrupted_() == 0;
    if (is_broken) { fail_run("--chat: standard input: cannot be read: %s", strerror(errno)); }
}
#endif  // LLMC_CHAT_H
