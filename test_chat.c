/*
Talking with a model: --chat (chat.h), prompts in files and their answers (questions.h), and which data are
conversations (chat_data.h), with their images when a run goes on (same_data.h). The model is a script: it answers what
stands there, and notes what it was asked for.
*/
#include "llmc/run/chat.h"
#include "llmc/run/chat_data.h"
#include "llmc/run/same_data.h"   // data_to_json, data_sum_images, data_check
#include "llmc/test/test.h"       // Test, check, check_exit, test_main
#include "llmc/test/testfiles.h"  // temp_folder, temp_file

#define END "<|im_end|>"
enum { V = 257 };

typedef struct {
    const char* script;          // what it says next, byte by byte
    int interrupts_at;           // byte of the script at which somebody presses Ctrl-C, -1: nobody does
    int is_asked;                // the first call for a prompt has come
    int n_cached;                // in that call
    int n_prompt;                // tokens of the prompt
    char prompt[4096];           // and its bytes
    float logits[V];
} Script;

static const float* script_logits(void* model, const int* tokens, int n_cached, int n) {
    Script* s = (Script*)model;
    memset(s->logits, 0, sizeof s->logits);
    if (!s->is_asked) {
        s->is_asked = 1;
        s->n_cached = n_cached;
        s->n_prompt = n;
        for (int i = 0; i < n && i < 4095; i++) { s->prompt[i] = (char)tokens[i]; }
        s->prompt[n < 4095 ? n : 4095] = '\0';
    }
    if (s->interrupts_at-- == 0) { raise(SIGINT); }
    s->logits[*s->script ? (unsigned char)*s->script++ : V - 1] = 9.0f;
    return s->logits;
}

typedef struct {
    RunOptions o;
    ChatOptions chat_o;
    Tokenizer k;
    StopTexts stop;
    Script script;
    Generator g;
    Asker asker;
    Chat chat;
    uint64_t random;
    TempPath folder;
    char* said;      // what it has written
    size_t n_said;
    FILE* out;
} Talk;

static void talk_open(Talk* x, const char* name, int room, int most, int is_terminal) {
    memset(x, 0, sizeof *x);
    x->folder = temp_folder();
    x->o.max_new_tokens = most;
    x->o.samples = x->o.prompt_eot = 1;
    x->o.top_p = x->o.repetition_penalty = 1.0f;
    x->o.stop = "";
    x->chat_o.chat_template = name;
    x->chat_o.think = 1;
    x->script.interrupts_at = -1;
    x->random = 1;
    tokenizer_open(&x->k, "bytes");
    x->g.o = &x->o;
    x->g.tokenizer = &x->k;
    x->g.stop = &x->stop;
    x->g.next_logits = script_logits;
    x->g.model = &x->script;
    x->g.V = V;
    x->g.room = x->g.piece = room;
    x->g.n_rows = 1;
    x->g.eot = x->k.eot;
    generator_init(&x->g);
    x->out = open_memstream(&x->said, &x->n_said);
    asker_init(&x->asker, &x->chat_o, "", &x->k, NULL, "");
    chat_init(&x->chat, &x->g, &x->asker, &x->random, NULL, x->out, is_terminal);
}

static void talk_close(Talk* x) {
    chat_free(&x->chat);
    asker_free(&x->asker);
    generator_free(&x->g);
    tokenizer_free(&x->k);
    fclose(x->out);
    free(x->said);
    temp_remove(&x->folder);
}

// a line, to which the model answers with the script; what it has said by then
static const char* talk_say(Talk* x, const char* line, const char* script) {
    char* copy = string_copy(line);
    x->script.script = script;
    x->script.n_prompt = x->script.is_asked = 0;
    rewind(x->out);
    chat_turn(&x->chat, copy, strlen(copy));
    fputc('\0', x->out);
    fflush(x->out);
    free(copy);
    return x->said;
}

static void check_text(Test* t, const char* what, const char* found, const char* want) {
    check(t, strcmp(found, want) == 0, "%s: found \"%s\", expected \"%s\"", what, found, want);
}

// ---- turns ----

static void test_turns(Test* t) {
    Talk x;
    talk_open(&x, "chatml", 1000, 50, 0);
    check_text(t, "the first answer", talk_say(&x, "Hi", "Hello" END "and more"), "Hello\n");
    check_text(t, "its prompt", x.script.prompt, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    const int n_first = x.script.n_prompt + (int)strlen("Hello");
    check_text(t, "the second", talk_say(&x, "And?", "Well." END), "Well.\n");
    check_text(t, "its prompt", x.script.prompt,
               "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
               "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n");
    check(t, x.script.n_cached >= n_first, "%d of %d positions were cached", x.script.n_cached, n_first);
    talk_say(&x, "/reset", "");
    check(t, x.script.n_prompt == 0, "a command was answered");
    talk_say(&x, " /reset", "b" END);
    check_text(t, "after /reset, a text that begins like it", x.script.prompt,
               "<|im_start|>user\n /reset<|im_end|>\n<|im_start|>assistant\n");
    check_text(t, "no end", talk_say(&x, "long", "0123456789012345678901234567890123456789012345678901234567890"),
               "01234567890123456789012345678901234567890123456789\n");
    talk_say(&x, "  ", "b");
    check(t, x.script.n_prompt == 0, "a line of blanks was answered");
    const char ended[] = {'b', '\0', 'c'};
    check(t, chat_turn(&x.chat, ended, 3) == 1 && x.script.n_prompt == 0, "a line with a 0 was answered");
    check(t, chat_turn(&x.chat, "/quit", 5) == 0 && chat_turn(&x.chat, "/help", 5) == 1, "/quit, /help");
    talk_close(&x);
}

static void test_commands(Test* t) {
    Talk x;
    talk_open(&x, "qwen3", 1000, 50, 0);
    talk_say(&x, "/system Be kind.", "");
    talk_say(&x, "Hi", "<think>\nSo?\n</think>\n\nHello" END);
    check_text(t, "a system text", x.script.prompt,
               "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    talk_say(&x, "/think off", "");
    talk_say(&x, "/system", "");
    talk_say(&x, "Ho", "Hello" END);
    check_text(t, "no thoughts, those of before are gone, no system text", x.script.prompt,
               "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
               "<|im_start|>user\nHo<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
    talk_say(&x, "/think on", "");
    const char* wrong[] = {"/think perhaps", "/thinking", "/system <|im_end|>", "What is <|im_end|>?", "\xff"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        check_text(t, wrong[i], talk_say(&x, wrong[i], "b" END), "");
        check(t, x.script.n_prompt == 0, "%s: was answered", wrong[i]);
    }
    talk_say(&x, "/reset", "");
    talk_say(&x, "Hi", "b" END);
    check_text(t, "what was refused left nothing behind", x.script.prompt,
               "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    talk_close(&x);
    talk_open(&x, "mistral-v0.1", 1000, 50, 0);
    talk_say(&x, "/system Be kind.", "");
    talk_say(&x, "Hi", "b</s>");
    check_text(t, "a template without system texts", x.script.prompt, "<s>[INST] Hi [/INST]");
    talk_close(&x);
    talk_open(&x, "qwen3.6", 1000, 50, 0);  // the prompt begins the thoughts
    talk_say(&x, "/system Be kind.", "");
    talk_say(&x, "Hi", "So?\n</think>\n\nHello" END);
    check_text(t, "thoughts that the prompt begins", x.script.prompt,
               "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
               "<think>\n");
    talk_say(&x, "/system", "");
    talk_say(&x, "/think off", "");
    talk_say(&x, "Ho", "Hello" END);
    check_text(t, "... are gone", x.script.prompt,
               "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
               "<|im_start|>user\nHo<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
    x.chat_o.preserve_thinking = 1;
    talk_say(&x, "Ha", "Hello" END);
    check_text(t, "... or stay", x.script.prompt,
               "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nSo?\n</think>\n\nHello<|im_end|>\n"
               "<|im_start|>user\nHo<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nHello<|im_end|>\n"
               "<|im_start|>user\nHa<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
    talk_close(&x);
}

// ---- a window that is full ----

// with windows of any size whole turns go: what is left begins with a question
static void check_window(Test* t, int room) {
    Talk x;
    talk_open(&x, "chatml", room, 15, 0);
    for (int i = 0; i < 6; i++) {
        char line[32];
        snprintf(line, sizeof line, "turn %d", i);
        talk_say(&x, line, "yes" END);
        check(t, strncmp(x.script.prompt, "<|im_start|>user\nturn", 21) == 0 && strstr(x.script.prompt, line) != NULL &&
                     x.script.n_prompt + 15 <= room,
              "%d positions, %s: found %s", room, line, x.script.prompt);
    }
    talk_close(&x);
}

static void test_overflow(Test* t) {
    Talk x;
    for (int room = 100; room < 200; room += 7) { check_window(t, room); }
    talk_open(&x, "chatml", 160, 15, 0);
    for (int i = 0; i < 6; i++) {
        char line[32];
        snprintf(line, sizeof line, "turn %d", i);
        check_text(t, line, talk_say(&x, line, "yes" END), "yes\n");
        check(t, x.script.n_prompt + 15 <= 160, "%s: a prompt of %d tokens", line, x.script.n_prompt);
        check(t, strstr(x.script.prompt, line) != NULL, "%s: is not in the prompt", line);
    }
    check_text(t, "the oldest turns are gone whole", x.script.prompt,
               "<|im_start|>user\nturn 4<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
               "<|im_start|>user\nturn 5<|im_end|>\n<|im_start|>assistant\n");
    char large[200];
    memset(large, 'x', sizeof large);
    large[199] = '\0';
    check_text(t, "a question that fits no window", talk_say(&x, large, "yes" END), "");
    check_text(t, "... the next one", talk_say(&x, "ok", "yes" END), "yes\n");
    check_text(t, "... it was not taken", x.script.prompt, "<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n");
    x.o.max_new_tokens = 1000;
    talk_say(&x, "/reset", "");
    char endless[1001];
    memset(endless, 'y', sizeof endless);
    endless[1000] = '\0';
    const char* all = talk_say(&x, "go", endless);
    check(t, (int)strlen(all) - 1 + x.script.n_prompt == 161, "an answer of %zu tokens behind %d in 160 positions",
          strlen(all) - 1, x.script.n_prompt);
    talk_close(&x);
}

// ---- Ctrl-C, notes ----

static void test_terminal(Test* t) {
    Talk x;
    talk_open(&x, "chatml", 1000, 50, 1);
    x.script.interrupts_at = 4;
    check_text(t, "an answer that Ctrl-C ends", talk_say(&x, "Hi", "Hello, how do you do?" END), "Hello\n");
    x.script.interrupts_at = -1;
    check_text(t, "the next", talk_say(&x, "So?", "So." END), "So.\n");
    check(t, strstr(x.script.prompt, "assistant\nHello<|im_end|>\n") != NULL, "found %s", x.script.prompt);
    check_text(t, "a note", talk_say(&x, "/reset", ""), "[forgotten]\n");
    signal(SIGINT, SIG_DFL);
    talk_close(&x);
}

// somebody presses Ctrl-C as soon as there is a prompt sign, before anything is read
static ssize_t interrupting_write(void* unused, const char* text, size_t n) {
    (void)unused;
    if (n >= 2 && memcmp(text + n - 2, "> ", 2) == 0) { raise(SIGINT); }
    return (ssize_t)n;
}

static void interrupt_in_child(void* talk) {
    Chat* c = &((Talk*)talk)->chat;
    const cookie_io_functions_t functions = {NULL, interrupting_write, NULL, NULL};
    int ends[2];
    if (pipe(ends) != 0) { fail_run("pipe: %s", strerror(errno)); }
    c->in = fdopen(ends[0], "r");
    c->out = fopencookie(NULL, "w", functions);
    alarm(20);  // it would read for ever
    chat(c);
    fclose(c->in);
    fclose(c->out);
}

static void test_prompt(Test* t) {
    Talk x;
    talk_open(&x, "chatml", 1000, 50, 1);
    check_exit(t, "Ctrl-C between the prompt sign and the first read", interrupt_in_child, &x, 0, "");
    talk_close(&x);
}

static void test_pipe(Test* t) {
    Talk x;
    talk_open(&x, "chatml", 1000, 50, 0);
    char lines[] = "a\r\n\n/reset\nb\n/quit\nc\n";
    x.chat.in = fmemopen(lines, strlen(lines), "r");
    x.script.script = "1" END "2" END "3" END;
    chat(&x.chat);
    fclose(x.chat.in);
    fputc('\0', x.out);
    fflush(x.out);
    check_text(t, "answers alone", x.said, "1\n2\n");
    check_text(t, "the first prompt", x.script.prompt, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
    talk_close(&x);
}

// ---- prompts in files ----

static const char* const forms[][3] = {  // a line, the prompt, the reference
    {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}",
     "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", ""},
    {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}",
     "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", "b"},
    {"{\"instruction\": \"a\", \"output\": \"b\", \"history\": [[\"c\", \"d\"]]}",
     "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
     "<|im_start|>assistant\n", "b"},
    {"{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}]}",
     "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", ""},
    {"{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}]}",
     "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", ""},
    {"{\"prompt\": \"Once\", \"completion\": \" upon\"}", "Once", " upon"}};
enum { N_FORMS = sizeof forms / sizeof forms[0] };

static TempPath forms_file(Talk* x) {
    ByteBuffer all = {NULL, 0, 0};
    for (int i = 0; i < N_FORMS; i++) {
        buffer_append_text(&all, forms[i][0]);
        buffer_append_text(&all, "\n");
    }
    TempPath path = temp_file(&x->folder, "q.jsonl", (char*)all.bytes, all.n);
    buffer_free(&all);
    return path;
}

// the record of answer i, to be dereferenced
static json_t* answer_of(Talk* x, const Questions* q, int i) {
    char* line;
    size_t n_bytes;
    FILE* out = open_memstream(&line, &n_bytes);
    questions_answer(&x->g, &x->asker, q, i, i + 1, 1, -1, out, "memory");
    fclose(out);
    json_t* record = json_loadb(line, n_bytes, 0, NULL);
    free(line);
    return record;
}

static void test_questions(Test* t) {
    Talk x;
    Questions q;
    talk_open(&x, "chatml", 1000, 20, 0);
    questions_read(&q, &x.asker, &x.o, "generate-file", forms_file(&x).s, 1000);
    check(t, q.n == N_FORMS, "%d prompts", q.n);
    for (int i = 0; i < q.n; i++) {
        const int is_text = i == N_FORMS - 1;  // end of text stands before it
        x.script.script = "so" END " it goes" END;
        x.script.is_asked = 0;
        json_t* record = answer_of(&x, &q, i);
        const char *answer = json_string_value(json_object_get(record, "answer")),
                   *reference = json_string_value(json_object_get(record, "reference"));
        check_text(t, forms[i][0], x.script.prompt + is_text, forms[i][1]);
        check_text(t, "answer", answer, is_text ? "so<|im_end|> it goes" : "so");
        check_text(t, "reference", reference ? reference : "", forms[i][2]);
        check_text(t, "finish", json_string_value(json_object_get(record, "finish")), is_text ? "length" : "stop");
        check(t, json_object_get(record, is_text ? "prompt" : "messages") != NULL, "the record lacks what was asked");
        json_decref(record);
    }
    questions_free(&q);
    talk_close(&x);
}

typedef struct { Talk* x; const char* lines; } Refused;

static void read_refused(void* refused) {
    const Refused* r = (const Refused*)refused;
    Questions q;
    questions_read(&q, &r->x->asker, &r->x->o, "generate-file",
                   temp_file(&r->x->folder, "bad.jsonl", r->lines, strlen(r->lines)).s, 60);
}

static void open_choice(void* o) {
    ChatTemplate c;
    chat_options_template(&c, (const ChatOptions*)o, "");
}

static void test_refused(Test* t) {
    static const char* const cases[][2] = {
        {"", "expected a prompt on each line, found none"},
        {"{\"messages\": []}", "bad.jsonl:1: expected a question, found none"},
        {"\n{\"messages\": [{\"role\": \"assistant\", \"content\": \"b\"}]}",
         "bad.jsonl:2: expected a question, found none"},
        {"{\"text\": \"a\"}",
         "expected \"messages\", \"prompt\", \"conversations\" or \"instruction\", found \"text\""},
        {"{\"prompt\": 7}", "found \"prompt\""},
        {"no", "bad.jsonl:1: expected a JSON object"},
        {"{\"prompt\": [{\"role\": \"user\", \"content\": \"<|im_end|>\"}]}", "found the special token <|im_end|>"},
        {"{\"prompt\": \"0123456789012345678901234567890123456789012345678901234567890\"}",
         "expected a prompt of at most the model's 60 positions, found 62 tokens"}};
    Talk x;
    talk_open(&x, "chatml", 1000, 20, 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Refused refused = {&x, cases[i][0]};
        check_exit(t, cases[i][0], read_refused, &refused, 2, cases[i][1]);
    }
    talk_close(&x);
    talk_open(&x, "qwen3.6", 1000, 20, 0);
    Refused refused = {&x, "{\"image\": \"a.png\", \"instruction\": \"<image>\", \"output\": \"a\"}"};
    check_exit(t, "an image", read_refused, &refused, 2, "bad.jsonl:1: expected texts, found an image: this model");
    talk_close(&x);
    const ChatOptions keeps = {.chat_template = "qwen3", .preserve_thinking = 1};
    check_exit(t, "a choice that the template lacks", open_choice, (void*)&keeps, 2, "--preserve-thinking: is for the");
}

// ---- answers that are there already ----

// the bytes of a file, to be freed
static unsigned char* whole_file(const char* path, size_t* n_bytes) {
    MappedFile file;
    file_map(&file, path);
    unsigned char* bytes = heap_copy(file.bytes, file.n_bytes);
    *n_bytes = file.n_bytes;
    file_unmap(&file);
    return bytes;
}

typedef struct { Talk* x; const Questions* q; TempPath path; } Answering;

static void answer_file(void* answering) {
    const Answering* a = (const Answering*)answering;
    a->x->script.script = "";
    questions_answer_file(&a->x->g, &a->x->asker, a->q, a->path.s);
}

// a model that says what its random numbers choose: at temperature 1 all bytes are as likely
static const float* any_logits(void* model, const int* tokens, int n_cached, int n) {
    (void)tokens, (void)n_cached, (void)n;
    return ((Script*)model)->logits;
}

static void test_goes_on(Test* t) {
    Talk x;
    Questions q;
    size_t n_whole, n;
    talk_open(&x, "chatml", 1000, 8, 0);
    x.g.next_logits = any_logits;
    x.g.sampling.temperature = 1.0f;
    x.o.samples = 2;
    questions_read(&q, &x.asker, &x.o, "generate-file", forms_file(&x).s, 1000);
    Answering a = {&x, &q, temp_path(&x.folder, "out.jsonl")};
    answer_file(&a);
    unsigned char* whole = whole_file(a.path.s, &n_whole);
    for (size_t cut = 0; cut < n_whole; cut += cut / 3 + 7) {
        temp_file(&x.folder, "out.jsonl", whole, cut);
        answer_file(&a);
        unsigned char* again = whole_file(a.path.s, &n);
        check(t, n == n_whole && memcmp(again, whole, n) == 0, "cut after %zu bytes: %zu bytes, expected %zu", cut, n,
              n_whole);
        free(again);
    }
    temp_file(&x.folder, "out.jsonl", "{\"messages\": []}\n", 17);
    check_exit(t, "somebody's other file", answer_file, &a, 2, "out.jsonl:1: expected the answer to a prompt of");
    temp_file(&x.folder, "out.jsonl", "no line", 7);
    check_exit(t, "a file without a line", answer_file, &a, 2, "out.jsonl: expected answers, found something else: give");
    const size_t n_first = (size_t)((unsigned char*)memchr(whole, '\n', n_whole) - whole) + 1;
    unsigned char* behind = heap_copy(whole, n_first + 4);
    memcpy(behind + n_first, "{\"a\"", 4);
    temp_file(&x.folder, "out.jsonl", behind, n_first + 4);
    check_exit(t, "half a line of another kind", answer_file, &a, 2, "found something else behind them");
    free(behind);
    free(whole);
    questions_free(&q);
    talk_close(&x);
}

// ---- texts side by side ----

enum { SIDE_ROOM = 100, SIDE_ROWS = 8 };

// A model whose cache is the tokens themselves. What it says next follows from all of them as the cache has them, so
// that a wrong row, or one that was not filled, says something else
typedef struct {
    int cache[SIDE_ROWS][SIDE_ROOM];
    float logits[SIDE_ROWS][V];
    int n_passes, n_computed, n_most, n_longest;  // passes, positions; most texts, and positions of one, in a pass
    int is_wrong;                      // has asked for something that the cache does not have
} CacheModel;

static const float* cache_logits(void* model, const CachedText* texts, int n) {
    CacheModel* m = (CacheModel*)model;
    int n_of_row[SIDE_ROWS] = {0};
    m->n_passes++;
    m->n_most = n > m->n_most ? n : m->n_most;
    for (int i = 0; i < n; i++) {
        const CachedText* x = &texts[i];
        int* cache = m->cache[x->row];
        uint64_t hash = 1;
        m->is_wrong |= n_of_row[x->row]++ > 0 || x->n > SIDE_ROOM || x->n <= x->n_cached;
        m->is_wrong |= n > 1 && x->n - x->n_cached > 1;
        m->is_wrong |= memcmp(cache, x->tokens, sizeof(int) * (size_t)x->n_cached) != 0;
        m->n_computed += x->n - x->n_cached;
        m->n_longest = x->n - x->n_cached > m->n_longest ? x->n - x->n_cached : m->n_longest;
        memcpy(cache + x->n_cached, x->tokens + x->n_cached, sizeof(int) * (size_t)(x->n - x->n_cached));
        for (int t = 0; t < x->n; t++) { hash = splitmix64(hash, (uint64_t)cache[t]); }
        for (int v = 0; v < V; v++) { m->logits[i][v] = v >= 'a' && v <= 'z' ? (float)(hash >> (v % 40) & 3) : -9.0f; }
        if (hash % 24 == 0) { m->logits[i][V - 1] = 9.0f; }
    }
    return m->logits[0];
}

static const float* cache_logits_of_one(void* model, const int* tokens, int n_cached, int n) {
    const CachedText text = {tokens, 0, n_cached, n, NULL};
    return cache_logits(model, &text, 1);
}

static void cache_share(void* model, int to, int from, int n) {
    CacheModel* m = (CacheModel*)model;
    m->is_wrong |= to == from || n < 1;
    memcpy(m->cache[to], m->cache[from], sizeof(int) * (size_t)n);
}

// conversations, and texts of 1 to 79 letters, which outgrow the window
static TempPath lengths_file(Talk* x) {
    ByteBuffer all = {NULL, 0, 0};
    for (int i = 0; i < 30; i++) {
        char line[256], text[80];
        const int n = 1 + (int)(splitmix64(5, (uint64_t)i) % (i % 3 == 0 ? 20 : 79));
        memset(text, 'a' + i / 10, sizeof text);
        text[n - 1] = (char)('a' + i % 26), text[n] = '\0';
        snprintf(line, sizeof line, i % 3 == 0 ? "{\"messages\": [{\"role\": \"user\", \"content\": \"%s\"}]}\n"
                                               : "{\"prompt\": \"%s\"}\n", text);
        buffer_append_text(&all, line);
    }
    TempPath path = temp_file(&x->folder, "lengths.jsonl", (char*)all.bytes, all.n);
    buffer_free(&all);
    return path;
}

// the answers of n_rows side by side, to be freed; one_by_one: of a model that cannot do else. is_cut: the file has
// some already
static unsigned char* side_answers(Talk* x, const Questions* q, CacheModel* m, int n_rows, int one_by_one, int is_cut,
                                   size_t* n_bytes) {
    const Answering a = {x, q, temp_path(&x->folder, "side.jsonl")};
    if (!is_cut) { remove(a.path.s); }
    memset(m, 0, sizeof *m);
    generator_free(&x->g);
    x->g.n_rows = n_rows;
    generator_init(&x->g);
    x->g.model = m;
    x->g.next_logits = cache_logits_of_one;
    x->g.next_of_each = one_by_one ? NULL : cache_logits;
    x->g.share_text = one_by_one ? NULL : cache_share;
    answer_file((void*)(uintptr_t)&a);
    return whole_file(a.path.s, n_bytes);
}

static void test_side_by_side(Test* t) {
    static const int rows[] = {1, 2, 3, SIDE_ROWS};
    Talk x;
    Questions q;
    CacheModel *one = (CacheModel*)new_array(1, sizeof *one), *m = (CacheModel*)new_array(1, sizeof *m);
    size_t n_whole, n;
    ErrorText error;
    talk_open(&x, "chatml", SIDE_ROOM, 60, 0);
    x.o.temperature = 1.0f;
    x.o.samples = 3;
    check(t, stop_texts_parse(&x.stop, "ab\\|zz", &error), "%s", error.text);
    questions_read(&q, &x.asker, &x.o, "generate-file", lengths_file(&x).s, SIDE_ROOM);
    unsigned char* whole = side_answers(&x, &q, one, 1, 1, 0, &n_whole);
    for (int i = 0; i < 4; i++) {
        unsigned char* found = side_answers(&x, &q, m, rows[i], 0, 0, &n);
        check(t, n == n_whole && memcmp(found, whole, n) == 0, "%d side by side: %zu bytes, other than one by one's %zu",
              rows[i], n, n_whole);
        check(t, !m->is_wrong && m->n_most == rows[i], "%d side by side: %d in a pass%s", rows[i], m->n_most,
              m->is_wrong ? ", and the cache lacks something" : "");
        check(t, m->n_passes < one->n_passes * 3 / (2 * rows[i]), "%d side by side: %d passes, one by one %d", rows[i],
              m->n_passes, one->n_passes);
        check(t, m->n_computed <= one->n_computed, "%d side by side: %d positions computed, one by one %d", rows[i],
              m->n_computed, one->n_computed);
        free(found);
        for (size_t cut = n_whole / 3; cut < n_whole; cut += n_whole / 4) {
            temp_file(&x.folder, "side.jsonl", whole, cut);
            found = side_answers(&x, &q, m, rows[i], 0, 1, &n);
            check(t, n == n_whole && memcmp(found, whole, n) == 0, "%d side by side, cut after %zu bytes", rows[i], cut);
            free(found);
        }
    }
    free(whole), free(one), free(m);
    questions_free(&q);
    talk_close(&x);
    stop_texts_free(&x.stop);
}

// the longest prompt fills the window, and half of it comes anew when the window moves on
static void test_pieces(Test* t) {
    static const int pieces[] = {1, 7, 50, SIDE_ROOM - 1};
    Talk x;
    Questions q;
    CacheModel* m = (CacheModel*)new_array(1, sizeof *m);
    size_t n_whole, n;
    talk_open(&x, "chatml", SIDE_ROOM, 60, 0);
    x.o.temperature = 1.0f;
    questions_read(&q, &x.asker, &x.o, "generate-file", lengths_file(&x).s, SIDE_ROOM);
    unsigned char* whole = side_answers(&x, &q, m, 1, 1, 0, &n_whole);
    const int n_computed = m->n_computed, n_longest = m->n_longest;
    for (int i = 0; i < 8; i++) {
        x.g.piece = pieces[i / 2];
        unsigned char* found = side_answers(&x, &q, m, 1 + i % 2 * 2, i % 2 == 0, 0, &n);
        check(t, n == n_whole && memcmp(found, whole, n) == 0 && !m->is_wrong, "pieces of %d: %zu bytes, whole %zu",
              x.g.piece, n, n_whole);
        const int most = x.g.piece < n_longest ? x.g.piece : n_longest;  // less where a row begins as another does
        check(t, (m->n_longest == most || (i % 2 == 1 && m->n_longest < most)) && m->n_computed <= n_computed,
              "pieces of %d: one of %d, and %d positions, whole %d", x.g.piece, m->n_longest, m->n_computed, n_computed);
        free(found);
    }
    free(whole), free(m);
    questions_free(&q);
    talk_close(&x);
}

// ---- which data are conversations ----

static void data_is(void* path) {
    const ChatOptions o = {.chat_template = CHAT_AUTO, .learn = LEARN_AUTO};
    const int is = chat_data_is(&o, "train", (const char*)path);
    warn_line("%s", is ? "conversations" : "texts");
    exit(is ? 40 : 41);
}

static void test_data_is(Test* t) {
    TempPath folder = temp_folder();
    const struct { const char *name, *lines; int is; } files[] = {
        {"a.jsonl", "{\"messages\": []}\n{\"text\": \"a\"}\n", 1},
        {"b.JSONL", "\nno JSON\n{\"id\": 1}\n{\"conversations\": []}\n", 1},
        {"c.jsonl", "{\"instruction\": \"a\", \"output\": \"b\"}\n", 1},
        {"d.jsonl", "{\"text\": \"a\"}\n{\"messages\": []}\n", 0},
        {"e.jsonl", "{\"id\": 1}\n", 0},
        {"f.txt", "{\"messages\": []}\n", 0}};
    char list[1100];
    TempPath paths[6];
    for (int i = 0; i < 6; i++) {
        paths[i] = temp_file(&folder, files[i].name, files[i].lines, strlen(files[i].lines));
        check_exit(t, files[i].name, data_is, paths[i].s, files[i].is ? 40 : 41,
                   files[i].is ? "conversations" : "texts");
    }
    snprintf(list, sizeof list, "%s,%s", paths[0].s, paths[2].s);
    check_exit(t, "two of conversations", data_is, list, 40, "conversations");
    snprintf(list, sizeof list, "%s,%s", paths[0].s, paths[3].s);
    check_exit(t, "one of each kind", data_is, list, 2, "--train: expected conversations or texts, found both");
    TempPath both = temp_file(&folder, "g.jsonl", "{\"text\": \"a\", \"instruction\": \"b\"}", 33);
    check_exit(t, "a line that could be both", data_is, both.s, 2,
               "g.jsonl:1: has \"text\" and \"instruction\": say by --learn text or --learn answers");
    TempPath listed = temp_file(&folder, "h.json", "[\n  {\"instruction\": 1}]", 23);
    check_exit(t, "one list of conversations", data_is, listed.s, 2,
               "h.json: expected JSON Lines, found a list in JSON");
    TempPath object = temp_file(&folder, "i.json", "{\"a\": [{}]}", 12);
    check_exit(t, "an object", data_is, object.s, 41, "texts");
    ChatOptions o = {.chat_template = CHAT_AUTO, .learn = LEARN_TEXT};
    check(t, !chat_data_is(&o, "train", both.s), "--learn text");
    o.learn = LEARN_LAST;
    check(t, chat_data_is(&o, "train", both.s) && !chat_data_is(NULL, "train", paths[0].s), "--learn last; no options");
    temp_remove(&folder);
}

// ---- images of a run ----

enum { SEEN_T = 64, SEEN_PAD = 786 };  // of dev/golden/tokenizers/qwen3.5.json

// a file has its number of placeholders as text
static int seen_tokens(void* of, const char* path, ErrorText* error) {
    MappedFile file;
    (void)of;
    if (!file_map_or_not(&file, path, error)) { return 0; }
    const int n = file.n_bytes > 0 ? atoi((const char*)file.bytes) : 0;
    file_unmap(&file);
    return n;
}

// a start of a run: its options, its data and what it notes of them
typedef struct {
    RunOptions o;
    ChatOptions chat;
    Option table[MAX_OPTIONS];
    int n_options;
    Tokenizer k;
    RunData d;
    json_t* now;
} Seen;

// step: of the checkpoint it goes on with, -1: it begins
static void seen_open(Seen* x, const char* folder, int step) {
    static const ImageMeasure measure = {NULL, seen_tokens, SEEN_PAD, 0};
    char run[PATH_BYTES], train[PATH_BYTES];
    const char* argv[] = {"test", "--train", path_join(train, folder, "a.jsonl"), "--run",
                          path_join(run, folder, "run"), "--val-fraction", "0.25", "--chat-template", "qwen3.6",
                          "--steps", "1"};
    memset(x, 0, sizeof *x);
    x->n_options = chat_options(x->table, run_options(x->table, &x->o, ""), &x->chat);
    options_parse(x->table, x->n_options, (int)(sizeof argv / sizeof argv[0]), (char**)argv, "");
    for (int i = 0; i < x->n_options; i++) { x->table[i].flags &= ~OPTION_TYPED; }  // as a checkpoint brings them back
    tokenizer_open(&x->k, "dev/golden/tokenizers/qwen3.5.json");
    x->d.chat.o = &x->chat;
    data_open(&x->d, &x->o, &x->k);
    data_read_chat(&x->d, &x->o, &x->k, &measure, SEEN_T, "");
    data_plan(&x->d, &x->o, SEEN_T, x->k.n_tokens, x->k.n_tokens, 1);
    data_sums(&x->d);
    x->now = data_to_json(&x->d, x->o.seed, json_null());
    data_sum_images(&x->d, &x->o, step, x->now);
}

static void seen_close(Seen* x) {
    json_decref(x->now);
    data_close(&x->d);
    tokenizer_free(&x->k);
    options_free(x->table, x->n_options);
}

// goes on with the checkpoint; ends with 0 where the data are what they were
static void seen_goes_on(void* folder) {
    Seen x;
    seen_open(&x, (const char*)folder, 1);
    const int val_is_new = data_check(&x.o, 1, x.table, x.n_options, &x.d, x.now);
    warn_line("the same");
    exit(val_is_new ? 40 : 41);
}

// does data_changed name this file? What was only touched it says once
static int seen_changed(Seen* x, const char* name) {
    const char* path = data_changed(&x->d);
    return path && strstr(path, name);
}

static void seen_write(const TempPath* folder, int i, const char* text, const struct timespec* time) {
    char name[16];
    snprintf(name, sizeof name, "%d.png", i);
    TempPath path = temp_file(folder, name, text, strlen(text));
    const struct timespec times[2] = {*time, *time};
    if (utimensat(AT_FDCWD, path.s, times, 0) != 0) { fail_run("%s: cannot be touched", path.s); }
}

static void test_images_of_run(Test* t) {
    enum { N = 8 };
    const struct timespec then = {1000000, 7}, later = {2000000, 0};
    if (access("dev/golden/tokenizers/qwen3.5.json", R_OK) != 0) {
        skip(t, "dev/golden/tokenizers is not here");
        return;
    }
    TempPath folder = temp_folder();
    char lines[2000], path[PATH_BYTES];
    size_t n = 0;
    Seen x;
    for (int i = 1; i <= N; i++) {
        char text[16];
        n += (size_t)snprintf(lines + n, sizeof lines - n, "{\"image\": \"%d.png\", \"instruction\": \"<image>\", "
                              "\"output\": \"yes\"}\n", i);
        snprintf(text, sizeof text, "%d ", i);
        seen_write(&folder, i, text, &then);
    }
    temp_file(&folder, "a.jsonl", lines, n);
    seen_open(&x, folder.s, -1);
    check(t, x.d.train.images.n == 6 && x.d.val.images.n == 2 && x.d.chat.val.n_placeholders == 7 + 8 &&
                 x.d.chat.train.n_images == 6, "%lld images to train on, %lld to validate with",
          (long long)x.d.train.images.n, (long long)x.d.val.images.n);
    check(t, strstr(x.d.val.images.of[0].path, "/7.png") || strstr(x.d.val.images.of[1].path, "/7.png"),
          "validation has %s and %s", x.d.val.images.of[0].path, x.d.val.images.of[1].path);
    temp_path(&folder, "run/step_000001/x");
    json_t* manifest = json_pack("{s:O}", "data", x.now);
    json_write(path_join(path, folder.s, "run/step_000001/manifest.json"), manifest);
    check(t, data_changed(&x.d) == NULL, "nothing has changed");
    check_exit(t, "nothing was touched", seen_goes_on, folder.s, 41, "the same");
    seen_write(&folder, 3, "3 ", &later);
    check(t, seen_changed(&x, "/3.png"), "a time of change ends a run");
    check_exit(t, "... which goes on with the same bytes", seen_goes_on, folder.s, 41, "the same");
    seen_write(&folder, 3, "3x", &later);
    check_exit(t, "other bytes", seen_goes_on, folder.s, 2,
               "a.jsonl: images of the training data have changed, the last of them");
    seen_write(&folder, 3, "3x", &then);
    check_exit(t, "... are not looked for where size and time are what they were", seen_goes_on, folder.s, 41,
               "the same");
    check(t, seen_changed(&x, ".png"), "... but while it runs they are noticed");
    seen_write(&folder, 3, "3 ", &then);
    seen_write(&folder, 8, "8x", &later);
    check_exit(t, "... of validation", seen_goes_on, folder.s, 2, "images of the validation data have changed");
    seen_write(&folder, 8, "8 ", &then);
    seen_write(&folder, 4, "5 ", &then);
    check_exit(t, "another number of placeholders", seen_goes_on, folder.s, 2, "the training data has changed since");
    remove(path_join(path, folder.s, "4.png"));
    check(t, seen_changed(&x, "/4.png"), "one that is gone ends a run");
    check_exit(t, "... which does not go on", seen_goes_on, folder.s, 2, "the training data has changed since");
    seen_close(&x);
    temp_remove(&folder);
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"turns", "each goes through the template with all before it, which stays in the cache", test_turns},
        {"commands", "/system, /think, /reset; what nobody may say is not taken", test_commands},
        {"overflow", "the oldest turns go whole; what fits no window is not taken", test_overflow},
        {"terminal", "Ctrl-C ends an answer, the chat goes on", test_terminal},
        {"prompt", "Ctrl-C at the prompt ends the chat, whenever it comes", test_prompt},
        {"pipe", "each line is a turn, answers stand alone", test_pipe},
        {"questions", "each form of a line is asked and answered, its answer is the reference", test_questions},
        {"refused", "lines that ask nothing are named", test_refused},
        {"goes on", "answers that are there stay, the others are those of one start", test_goes_on},
        {"side by side", "answers do not depend on how many are made at once", test_side_by_side},
        {"pieces", "a prompt that comes piece by piece has the answer of the whole one", test_pieces},
        {"images", "that are others or gone end a run, or one that goes on; their bytes decide", test_images_of_run},
        {"data", "JSON Lines that are conversations are known by their keys", test_data_is},
    };
    json_never_null();
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
