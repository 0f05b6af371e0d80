/*
Conversations as text and tokens: Jinja in one spelling (jinja.h), JSON as Python writes it (python_json.h), which
template a model has (chat_template.h), its text and what is learned (chat_render.h). What transformers gives stands in
dev/golden/chat.jsonl; dev/ref/check_chat.py compares with the published templates themselves.
*/
#include "llmc/test/test.h"         // Test, check, check_exit, test_main
#include "llmc/test/testfiles.h"    // temp_folder, temp_file
#include "llmc/text/chat_render.h"  // chat_render, chat_encode; chat_template.h

// ---- Jinja ----

static void test_jinja(Test* t) {
    const struct { const char *jinja, *canonical; } cases[] = {
        {"{{ a['role'] }}", "{{a.role}}"},
        {"{{a[\"role\"]}}", "{{a.role}}"},
        {"{{ a[0]['x'] + b['y z'] }}", "{{a[0].x+b[\"y z\"]}}"},
        {"{{ ['role'] }}", "{{[\"role\"]}}"},
        {"{% if  a is\n defined %}", "{%if a is defined%}"},
        {"{% if '}}' == a %}", "{%if\"}}\"==a%}"},
        {"{{ 'it\\'s \"so\"\\n' }}", "{{\"it's \\\"so\\\"\\n\"}}"},
        {"{{ 'a' + 'b' }}{{ 'c' + x }}{{ 'd' }}", "{{\"abc\"+x+\"d\"}}"},
        {"{#- why 'not -#}{{ a }}", "{{a}}"},
        {"{%- generation %}{{ a }}{% endgeneration -%}", "{{a}}"},
        {"text {{ a }}", "{{\"text \"+a}}"},
        {"{{ a }}\n{{ b }}", "{{a+\"\\n\"+b}}"},           // {{ }} keeps the line end behind it
        {"{% set a=1 %}\n{{ b }}", "{%set a=1%}{{b}}"},    // {% %} does not
        {"{{ a }}\n   {%- if b %}", "{{a}}{%if b%}"},
        {"{{ a }}\n   {% if b %}", "{{a+\"\\n\"}}{%if b%}"},
        {"{{ a }} {% if b %}", "{{a+\" \"}}{%if b%}"},     // not alone in its line
        {"{% if b -%}  \n x", "{%if b%}{{\"x\"}}"},
        {"{% if a %}\n\n", "{%if a%}"},
        {"{% if a %}\r\n{{ 'x\r\ny' }}", "{%if a%}{{\"x\\ny\"}}"},
        {"", ""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ByteBuffer out = {NULL, 0, 0};
        ErrorText error;
        const int ok = jinja_canonical(&out, cases[i].jinja, strlen(cases[i].jinja), &error);
        check(t, ok && strcmp((char*)out.bytes, cases[i].canonical) == 0, "%s: expected %s, found %s", cases[i].jinja,
              cases[i].canonical, ok ? (char*)out.bytes : error.text);
        buffer_free(&out);
    }
    const char* wrong[] = {"{{ a", "{% if 'a %}", "{# a", "{{ 'a }}", "{"};
    for (int i = 0; i < 5; i++) {
        ByteBuffer out = {NULL, 0, 0};
        ErrorText error;
        const int ok = jinja_canonical(&out, wrong[i], strlen(wrong[i]), &error);
        check(t, ok == (i == 4), "%s is %s", wrong[i], ok ? "taken" : "refused");
        buffer_free(&out);
    }
}

// ---- JSON ----

static void test_python_json(Test* t) {
    // what json.dumps(json.loads(text), ensure_ascii=False) gives
    const char* cases[][2] = {
        {"{\"b\": 1, \"a\": [true, false, null]}", "{\"b\": 1, \"a\": [true, false, null]}"},
        {"{}", "{}"}, {"[]", "[]"}, {"[{}, []]", "[{}, []]"},
        {"\"\\u00e9\\u65e5\\u2028\\u007f\"", "\"é日\xe2\x80\xa8\x7f\""},
        {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\"", "\"\\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\""},
        {"\"a\\u0000b\"", "\"a\\u0000b\""},
        {"[0, -1, -0, 9223372036854775807]", "[0, -1, 0, 9223372036854775807]"},
        {"[-9223372036854775808]", "[-9223372036854775808]"},
        {"[1.0, -0.0, 0.1, 100000.0, 1e15, 1e16, 1.5e16, 123456789012345680.0]",
         "[1.0, -0.0, 0.1, 100000.0, 1000000000000000.0, 1e+16, 1.5e+16, 1.2345678901234568e+17]"},
        {"[0.0001, 0.00001, 1.5e-7, 0.30000000000000004, 5e-324, 1e308, 1e22, 12.5, 0.001234]",
         "[0.0001, 1e-05, 1.5e-07, 0.30000000000000004, 5e-324, 1e+308, 1e+22, 12.5, 0.001234]"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ByteBuffer out = {NULL, 0, 0};
        json_t* value = json_loads(cases[i][0], JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        python_json(&out, value);
        buffer_append(&out, "", 1);
        check(t, strcmp((char*)out.bytes, cases[i][1]) == 0, "%s: expected %s, found %s", cases[i][0], cases[i][1],
              (char*)out.bytes);
        json_decref(value);
        buffer_free(&out);
    }
}

// ---- which template ----

// No template, but all phrases of one; then `more`, in the spelling of jinja.h
static int kind_of_phrases(ChatKind kind, const char* more) {
    const ChatSigns* signs = chat_signs_(kind);
    const int takes_system = kind == CHAT_QWEN2 || kind == CHAT_QWEN2_5;
    ByteBuffer out = {NULL, 0, 0};
    for (int i = 0; i < CHAT_MAX_PHRASES && signs->phrases[i]; i++) { buffer_append_text(&out, signs->phrases[i]); }
    if (takes_system) { buffer_append_text(&out, "{{\"<|im_start|>system\\nHI<|im_end|>\\n\"}}{{\"HI\"}}"); }
    buffer_append_text(&out, more);
    buffer_append(&out, "", 1);
    const int found = chat_find_kind_((char*)out.bytes, out.n - 1, takes_system ? "HI" : NULL);
    buffer_free(&out);
    return found;
}

// the kind of a template, or -1
static int recognised(const char* jinja) {
    ChatTemplate c;
    ErrorText error;
    const int ok = chat_template_recognise(&c, jinja, strlen(jinja), &error);
    const int kind = ok ? (int)c.kind : -1;
    if (ok) { chat_template_free(&c); }
    return kind;
}

static const char* chatml =
    "{% for message in messages %}\n    {{- '<|im_start|>' + message['role'] + \"\\n\" + message.content }}"
    "{#- the end -#}{{ '<|im_end|>\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n";
static const char* qwen2 =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe "
    "\"kind\".<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

static char* with(const char* text, const char* old, const char* now) {
    const char* at = strstr(text, old);
    if (!at) { fail_run("test: %s is not there", old); }
    char* out = (char*)malloc_check(strlen(text) + strlen(now) + 1, "text");
    sprintf(out, "%.*s%s%s", (int)(at - text), text, now, at + strlen(old));
    return out;
}

static void test_recognise(Test* t) {
    ChatTemplate c;
    ErrorText error;
    check(t, recognised(chatml) == CHAT_CHATML, "chatml, spelled otherwise");
    for (int kind = 0; kind < N_CHAT_KINDS; kind++) {
        const char* own = chat_template_jinja((ChatKind)kind);
        check(t, own ? recognised(own) == kind : kind != CHAT_CHATML, "the program that goes along, of kind %d", kind);
    }
    check(t, chat_template_recognise(&c, qwen2, strlen(qwen2), &error) && c.kind == CHAT_QWEN2 &&
                 strcmp(c.system, "Be \"kind\".") == 0, "qwen2 with another system text: %s", error.text);
    chat_template_free(&c);
    // what makes it another template
    const char* changes[][2] = {{"message.content", "message.content|trim"},
                                {"message.content", "message.content.strip()"},
                                {"{% for", "{{ bos_token }}{% for"},
                                {"{% for", "{{ '<s>' }}{% for"},
                                {"{% for", "{{ '<|im_start|>system\\nx<|im_end|>\\n' }}{% for"},
                                {"{% for", "x{% for"},
                                {"<|im_end|>\\n", "<|im_end|>"},
                                {"\"\\n\"", "' '"},
                                {"assistant\\n", "assistant\\n<think>\\n"},
                                {"{{- '<|im_start|>'", "{{ '<|im_start|>'"},  // a line end is written then
                                {"{%- endfor %}", "{%- endfor %}{{ '' }}"}};
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        char* other = with(chatml, changes[i][0], changes[i][1]);
        check(t, recognised(other) == -1, "chatml with %s for %s is recognised", changes[i][1], changes[i][0]);
        free(other);
    }
    const char* others[] = {"", "{{ messages }}", "[INST] {{ messages[0].content }} [/INST]", "{% for", "\xff{{ x }}"};
    for (int i = 0; i < 5; i++) { check(t, recognised(others[i]) == -1, "%s is recognised", others[i]); }
}

// A row of chat_signs_ that had a mistake would not know its own phrases
static void test_signs(Test* t) {
    for (int kind = 0; kind < N_CHAT_KINDS; kind++) {
        const char* name = choice_name(CHAT_NAMES, kind).s;
        const int found = kind_of_phrases((ChatKind)kind, "");
        check(t, found == kind, "%s: its phrases are those of %d", name, found);
        check(t, kind_of_phrases((ChatKind)kind, "{{strftime_now}}") == -1, "%s with another word", name);
        check(t, kind_of_phrases((ChatKind)kind, "{{\"Hello\"}}") == -1, "%s with another text", name);
        const int raises = kind_of_phrases((ChatKind)kind, "{{raise_exception(\"Hello\")}}") == kind;
        check(t, raises == (kind >= CHAT_QWEN3_5 && kind != CHAT_GLM5), "%s with what an exception says", name);
    }
    check(t, chat_find_kind_("", 0, NULL) == -1, "nothing is a template");
}

// ---- of a folder ----

typedef struct { const char *folder, *name; } Asked;

static void open_template(void* asked) {
    ChatTemplate c;
    chat_template_open(&c, ((Asked*)asked)->folder, ((Asked*)asked)->name);
    chat_template_free(&c);
}

static void write_json(const TempPath* folder, const char* name, json_t* json) {
    char* text = json_text(json, "test");
    temp_file(folder, name, text, strlen(text));
    free(text);
}

static void test_folder(Test* t) {
    TempPath folder = temp_folder();
    ChatTemplate c;
    Asked asked = {folder.s, ""};
    check_exit(t, "an empty folder", open_template, &asked, 2, "expected a chat template");
    write_json(&folder, "tokenizer_config.json",
               json_pack("{s:s, s:{s:s}, s:s}", "chat_template", qwen2, "bos_token", "content", "<a>", "eos_token",
                         "<b>"));
    chat_template_open(&c, folder.s, "");
    check(t, c.kind == CHAT_QWEN2 && strcmp(c.bos, "<a>") == 0 && strcmp(c.eos, "<b>") == 0, "tokenizer_config.json");
    chat_template_free(&c);
    temp_file(&folder, "chat_template.jinja", chatml, strlen(chatml));
    chat_template_open(&c, folder.s, "");
    check(t, c.kind == CHAT_CHATML, "chat_template.jinja is taken before tokenizer_config.json");
    check(t, chat_template_is_of(folder.s, CHAT_CHATML) && !chat_template_is_of(folder.s, CHAT_QWEN2) &&
                 !chat_template_is_of("", CHAT_CHATML), "which template a folder says");
    chat_template_free(&c);
    temp_file(&folder, "chat_template.jinja", "{{ messages }}", 14);
    check_exit(t, "another template", open_template, &asked, 2, "/chat_template.jinja: expected one of the chat temp");
    asked.name = "llama";
    check_exit(t, "an unknown name", open_template, &asked, 2, "--chat-template: expected chatml|qwen2|");
    chat_template_open(&c, folder.s, "Mistral-v3");
    check(t, c.kind == CHAT_MISTRAL_V3 && c.trims && strcmp(c.eos, "<b>") == 0, "a name is taken before the folder's");
    chat_template_free(&c);
    TempPath listed = temp_folder();
    write_json(&listed, "tokenizer_config.json",
               json_pack("{s:[{s:s, s:s}, {s:s, s:s}]}", "chat_template", "name", "tool_use", "template", "x", "name",
                         "default", "template", chatml));
    chat_template_open(&c, listed.s, "");
    check(t, c.kind == CHAT_CHATML && strcmp(c.eos, "</s>") == 0, "the default one of a list");
    chat_template_free(&c);
    // as published: a number beyond any integer
    const char* large = "{\"model_max_length\": 1000000000000000019884624838656, \"eos_token\": \"<c>\"}";
    temp_file(&listed, "tokenizer_config.json", large, strlen(large));
    temp_file(&listed, "chat_template.jinja", chatml, strlen(chatml));
    chat_template_open(&c, listed.s, "");
    check(t, strcmp(c.eos, "<c>") == 0, "a number beyond 2^63 beside it");
    chat_template_free(&c);
    temp_file(&listed, "tokenizer_config.json", "{", 1);
    asked.folder = listed.s, asked.name = "";
    check_exit(t, "a broken file", open_template, &asked, 2, "tokenizer_config.json:1: expected JSON");
    temp_remove(&folder);
    temp_remove(&listed);
}

// ---- text and tokens: dev/golden/chat.jsonl ----

typedef struct {
    ChatText text;
    ChatTokens tokens;
    Tokenizer tokenizers[4];  // as many as are open
    char* names[4];
    int n_tokenizers;
} Golden;

static const Tokenizer* golden_tokenizer(Golden* g, const char* name) {
    for (int i = 0; i < g->n_tokenizers; i++) {
        if (strcmp(g->names[i], name) == 0) { return &g->tokenizers[i]; }
    }
    char path[200];
    snprintf(path, sizeof path, "dev/golden/tokenizers/%s.json", name);
    tokenizer_open(&g->tokenizers[g->n_tokenizers], path);
    g->names[g->n_tokenizers] = string_copy(name);
    return &g->tokenizers[g->n_tokenizers++];
}

static void check_golden_tokens(Test* t, Golden* g, const json_t* row, int number) {
    const json_t *ids = json_object_get(row, "ids"), *learned = json_object_get(row, "learned");
    const Tokenizer* k = golden_tokenizer(g, json_string_value(json_object_get(row, "tokenizer")));
    TokenizerWork w;
    tokenizer_work_init(&w, k, g->text.text.n);
    chat_encode(&g->tokens, k, &w, &g->text);
    tokenizer_work_free(&w);
    const int n = g->tokens.n, n_expected = (int)json_array_size(ids);
    if (!check(t, n == n_expected, "line %d: expected %d tokens, found %d", number, n_expected, n)) { return; }
    unsigned char* mask = (unsigned char*)new_array((size_t)n, 1);
    for (size_t i = 0; i < json_array_size(learned); i++) {
        const json_t* run = json_array_get(learned, i);
        const int64_t first = json_integer_value(json_array_get(run, 0));
        const int64_t end = json_integer_value(json_array_get(run, 1));
        memset(mask + first, 1, (size_t)(end - first));
    }
    for (int i = 0; i < n; i++) {
        const int id = (int)json_integer_value(json_array_get(ids, (size_t)i));
        check(t, g->tokens.ids[i] == id, "line %d: token %d is %d, expected %d", number, i, g->tokens.ids[i], id);
        check(t, g->tokens.learned[i] == mask[i], "line %d: token %d is %slearned", number, i, mask[i] ? "not " : "");
    }
    free(mask);
}

static void check_golden_row(Test* t, Golden* g, const json_t* row, int number) {
    ChatTemplate c;
    ErrorText error;
    const json_t* text = json_object_get(row, "text");
    chat_template_init(&c, (ChatKind)choice_find(CHAT_NAMES, json_string_value(json_object_get(row, "template"))));
    const int ok = chat_render(&g->text, &c, json_object_get(row, "conversation"),
                               (int)json_integer_value(json_object_get(row, "choices")), &error);
    chat_template_free(&c);
    check(t, ok == json_is_string(text), "line %d: %s", number, ok ? "is not refused" : error.text);
    check(t, ok == (g->text.reason == SAMPLE_GOOD), "line %d: has reason %d", number, g->text.reason);
    if (!ok) { return; }
    const size_t n = json_string_length(text);
    check(t, g->text.text.n == n && memcmp(g->text.text.bytes, json_string_value(text), n) == 0,
          "line %d: another text: %.*s", number, (int)g->text.text.n, g->text.text.bytes);
    if (json_object_get(row, "ids")) { check_golden_tokens(t, g, row, number); }
}

static void test_golden(Test* t) {
    Golden g;
    FILE* file = fopen("dev/golden/chat.jsonl", "r");
    char* line = NULL;
    size_t room = 0;
    int number = 0;
    memset(&g, 0, sizeof g);
    if (!file) {
        skip(t, "dev/golden/chat.jsonl is not here");
        return;
    }
    while (getline(&line, &room, file) > 0) {
        json_t* row = json_loads(line, 0, NULL);
        check_golden_row(t, &g, row, ++number);
        json_decref(row);
    }
    check(t, number > 100, "expected more than 100 conversations, found %d", number);
    for (int i = 0; i < g.n_tokenizers; i++) {
        tokenizer_free(&g.tokenizers[i]);
        free(g.names[i]);
    }
    chat_text_free(&g.text);
    chat_tokens_free(&g.tokens);
    free(line);
    fclose(file);
}

// ---- what is refused, and what is read ----

// JSON with ' for "
static json_t* json_of(const char* text) {
    char* copy = string_copy(text);
    for (char* c = copy; *c; c++) { *c = *c == '\'' ? '"' : *c; }
    json_t* json = json_loads(copy, JSON_ALLOW_NUL, NULL);
    free(copy);
    return json;
}

#define ONE(message) "{'messages': [" message "]}"
#define IMAGE "{'type': 'image', 'image': 'a.png'}"
#define CALLS(calls) ONE("{'role': 'user', 'content': ''}, {'role': 'assistant', 'tool_calls': [" calls "]}")

static const struct {
    ChatKind kind;
    SampleReason reason;
    const char *json, *text;
} refused[] = {
    {CHAT_CHATML, SAMPLE_FORM, "{}", "expected a list of messages as \"messages\", found none"},
    {CHAT_CHATML, SAMPLE_FORM, "{'messages': []}", "found an empty one"},
    {CHAT_CHATML, SAMPLE_FORM, "{'messages': {'role': 'user'}}", "found none"},
    {CHAT_CHATML, SAMPLE_FORM, ONE("{'role': 'critic', 'content': ''}"), "message 1: expected \"role\""},
    {CHAT_CHATML, SAMPLE_FORM, ONE("{'role': 'User', 'content': ''}"), "found \"User\""},
    {CHAT_CHATML, SAMPLE_FORM, ONE("{'content': 'a'}"), "message 1: expected \"role\""},
    {CHAT_CHATML, SAMPLE_FORM, ONE("7"), "message 1: expected \"role\""},
    {CHAT_CHATML, SAMPLE_FORM, ONE("{'role': 'user'}"), "expected a text as \"content\", found none"},
    {CHAT_CHATML, SAMPLE_FORM, ONE("{'role': 'user', 'content': 7}"), "expected a text as \"content\""},
    {CHAT_CHATML, SAMPLE_FORM, ONE("{'role': 'user', 'content': 'a\\u0000b'}"), "without a 0 in it"},
    {CHAT_CHATML, SAMPLE_FORM, ONE("{'role': 'user', 'content': [{'type': 'text'}]}"), "or a list of {\"type\""},
    {CHAT_CHATML, SAMPLE_FORM, ONE("{'role': 'user', 'content': [{'type': 'audio'}]}"), "or a list of {\"type\""},
    {CHAT_CHATML, SAMPLE_FORM, ONE("{'role': 'user', 'content': [{'text': 'a'}]}"), "or a list of {\"type\""},
    {CHAT_QWEN3, SAMPLE_IMAGES, ONE("{'role': 'user', 'content': [" IMAGE "]}"), "qwen3 has no images"},
    {CHAT_CHATML, SAMPLE_IMAGES, "{'images': ['a.png'], 'messages': [{'role': 'user', 'content': 'a'}]}", "no images"},
    {CHAT_QWEN3_6, SAMPLE_IMAGES, ONE("{'role': 'user', 'content': [{'type': 'video', 'video': 'a.mp4'}]}"), "a video"},
    {CHAT_QWEN3_5, SAMPLE_IMAGES, ONE("{'role': 'user', 'content': [{'type': 'video_url'}]}"), "has a video"},
    {CHAT_QWEN3_6, SAMPLE_FORM, ONE("{'role': 'user', 'content': [{'type': 'image'}]}"), "\"images\", found none"},
    {CHAT_QWEN3_6, SAMPLE_FORM, ONE("{'role': 'user', 'content': [{'type': 'image', 'image': 7}]}"), "their paths"},
    {CHAT_QWEN3_6, SAMPLE_FORM, ONE("{'role': 'user', 'content': [{'type': 'image', 'url': '\\u0000'}]}"), "a 0 in it"},
    {CHAT_QWEN3_6, SAMPLE_FORM, "{'images': [7], 'messages': [{'role': 'user', 'content': '<image>'}]}", "no text"},
    {CHAT_QWEN3_6, SAMPLE_FORM, "{'images': 'a', 'messages': [{'role': 'user', 'content': 'a'}]}", "a list of paths"},
    {CHAT_QWEN3_6, SAMPLE_FORM, "{'images': ['a', 'b'], 'messages': [{'role': 'user', 'content': 'a <image>'}]}",
     "a place for each of its 2 \"images\", {\"type\": \"image\"} or <image>, found 1"},
    {CHAT_QWEN3_6, SAMPLE_FORM, "{'images': ['a'], 'messages': [{'role': 'user', 'content': '<image> <image>'}]}",
     "message 1: expected the path of its image, beside it or as number 2"},
    {CHAT_QWEN3_6, SAMPLE_FORM, ONE("{'role': 'system', 'content': [" IMAGE "]}, {'role': 'user', 'content': ''}"),
     "message 1: a system text has no images"},
    {CHAT_QWEN3_6, SAMPLE_ORDER, ONE("{'role': 'assistant', 'content': 'a'}"), "expected a question of a user"},
    {CHAT_QWEN3_5, SAMPLE_ORDER, ONE("{'role': 'user', 'content': ' <tool_response></tool_response>\\n'}"), "expected"},
    {CHAT_QWEN3_6, SAMPLE_ORDER, ONE("{'role': 'user', 'content': 'a'}, {'role': 'system', 'content': 'b'}"),
     "message 2: a system text stands at the beginning"},
    {CHAT_QWEN3_6, SAMPLE_TOOLS, CALLS("{'name': 'f', 'arguments': '7'}"), "message 2: expected an object as"},
    {CHAT_QWEN3, SAMPLE_FORM, ONE("{'role': 'assistant', 'content': '', 'reasoning': 7}"), "\"reasoning_content\""},
    {CHAT_QWEN3, SAMPLE_FORM, "{'messages': [{'role': 'user', 'content': ''}], 'tools': 7}", "\"tools\""},
    {CHAT_QWEN3, SAMPLE_FORM, ONE("{'role': 'assistant', 'content': '', 'tool_calls': 7}"), "expected a list"},
    {CHAT_QWEN3, SAMPLE_FORM, CALLS("{}"), "message 2: expected a tool call"},
    {CHAT_QWEN3, SAMPLE_FORM, CALLS("{'function': {'name': 'f'}}"), "without its name or arguments"},
    {CHAT_CHATML, SAMPLE_TOOLS, ONE("{'role': 'tool', 'content': ''}"), "chatml has no tools"},
    {CHAT_MISTRAL_V1, SAMPLE_TOOLS, "{'messages': [{'role': 'user', 'content': ''}], 'tools': [{}]}", "no tools"},
    {CHAT_MISTRAL_V0_1, SAMPLE_ORDER, ONE("{'role': 'system', 'content': ''}"), "has no system text"},
    {CHAT_MISTRAL_V1, SAMPLE_ORDER, ONE("{'role': 'assistant', 'content': ''}"), "message 1: expected user"},
    {CHAT_MISTRAL_V3, SAMPLE_TOOLS, "{'messages': [{'role': 'user', 'content': ''}], 'tools': [{}]}", "tool 1"},
    {CHAT_GLM5, SAMPLE_TOOLS, "{'messages': [{'role': 'user', 'content': ''}], 'tools': [{'function': {}}]}", "glm5"},
    {CHAT_MISTRAL_V3, SAMPLE_TOOLS,
     ONE("{'role': 'user', 'content': ''}, {'role': 'tool', 'content': '', 'tool_call_id': '12345678'}"),
     "message 2: expected an id of 9 characters"},
    {CHAT_MISTRAL_V3, SAMPLE_TOOLS, CALLS("{'id': '123456789', 'name': 'f', 'arguments': {}}"),
     "message 2: expected \"function\""},
};

static void test_refused(Test* t) {
    ChatText text;
    memset(&text, 0, sizeof text);
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        ChatTemplate c;
        ErrorText error = {""};
        json_t* json = json_of(refused[i].json);
        chat_template_init(&c, refused[i].kind);
        const int ok = chat_render(&text, &c, json, 0, &error);
        check(t, !ok && text.reason == refused[i].reason && strstr(error.text, refused[i].text), "%s: reason %d, %s",
              refused[i].json, text.reason, error.text);
        chat_template_free(&c);
        json_decref(json);
    }
    chat_text_free(&text);
}

static void check_choice(Test* t, ChatKind kind, int choices, const char* json, const char* want) {
    ChatText text;
    ChatTemplate c;
    ErrorText error = {""};
    json_t* conversation = json_of(json);
    memset(&text, 0, sizeof text);
    chat_template_init(&c, kind);
    const int ok = chat_render(&text, &c, conversation, choices, &error);
    check(t, ok && text.text.n == strlen(want) && memcmp(text.text.bytes, want, text.text.n) == 0,
          "%s: expected %s, found %.*s%s", json, want, (int)text.text.n, (char*)text.text.bytes, error.text);
    chat_template_free(&c);
    chat_text_free(&text);
    json_decref(conversation);
}

static void check_text(Test* t, ChatKind kind, const char* json, const char* want) {
    check_choice(t, kind, 0, json, want);
}

static void test_read(Test* t) {
    check_text(t, CHAT_CHATML,
               "{'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': "
               "'b'}]}], 'tools': [], 'id': 7}", "<|im_start|>user\nab<|im_end|>\n");
    check_text(t, CHAT_CHATML, "{'messages': [{'role': 'user', 'content': [], 'tool_calls': [7]}], 'tools': null}",
               "<|im_start|>user\n<|im_end|>\n");
    // only behind the last question does an answer keep what it thought
    check_text(t, CHAT_QWEN3,
               ONE("{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': '<think>x</think>\\n\\nb'}, "
                   "{'role': 'user', 'content': 'c'}, {'role': 'assistant', 'content': 'd', 'reasoning': 'y'}"),
               "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
               "<|im_start|>assistant\n<think>\ny\n</think>\n\nd<|im_end|>\n");
    // what a tool answered is no question, though a user says it
    check_text(t, CHAT_QWEN3,
               ONE("{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': '<think>x</think>\\n\\nb'}, "
                   "{'role': 'user', 'content': '<tool_response>c</tool_response>'}, {'role': 'assistant', 'content': "
                   "'d'}"),
               "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nx\n</think>\n\nb<|im_end|>\n"
               "<|im_start|>user\n<tool_response>c</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n"
               "</think>\n\nd<|im_end|>\n");
}

#define SEEN "<|vision_start|><|image_pad|><|vision_end|>"

// where images stand, and their paths in the order of the text; what is thought away takes its image along
static void test_images(Test* t) {
    const char* said =
        "{'images': ['b.png', {'path': 'c.png'}, 'g'], 'messages': [{'role': 'user', 'content': [{'type': 'image', "
        "'image': 'a.png'}, {'type': 'text', 'text': '<image>', 'image': null}, {'type': 'image'}]}, {'role': "
        "'assistant', 'content': [{'type': 'text', 'text': '<think>'}, {'type': 'image', 'path': 'lost'}, {'type': "
        "'text', 'text': '</think>'}, {'type': 'image_url', 'image_url': 'd.png'}]}, {'role': 'tool', 'content': "
        "[{'type': 'image', 'url': 'e.png'}]}, {'role': 'user', 'content': ' <image>?<image> '}, {'role': 'assistant', "
        "'content': [{'type': 'text', 'text': ' f </think> '}, {'type': 'image_url', 'image_url': {'url': "
        "'f.png'}}]}]}";
    const char* want =
        "<|im_start|>user\n" SEEN "<image>" SEEN "<|im_end|>\n<|im_start|>assistant\n" SEEN "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n" SEEN "\n</tool_response><|im_end|>\n<|im_start|>user\n" SEEN "?" SEEN
        "<|im_end|>\n<|im_start|>assistant\n<think>\nf\n</think>\n\n " SEEN "<|im_end|>\n";
    const char* paths[] = {"a.png", "b.png", "d.png", "e.png", "c.png", "g", "f.png"};
    ChatText text;
    ChatTemplate c;
    ErrorText error = {""};
    json_t* conversation = json_of(said);
    memset(&text, 0, sizeof text);
    chat_template_init(&c, CHAT_QWEN3_6);
    for (int again = 0; again < 2; again++) {  // nothing stays of the conversation before
        const int ok = chat_render(&text, &c, conversation, 0, &error);
        check(t, ok && text.text.n == strlen(want) && memcmp(text.text.bytes, want, text.text.n) == 0, "found %.*s%s",
              (int)text.text.n, (char*)text.text.bytes, error.text);
        check(t, text.n_images == 7, "%d images", text.n_images);
        for (int i = 0; i < text.n_images && i < 7; i++) {
            check(t, strcmp(text.images[i], paths[i]) == 0, "image %d is %s", i, text.images[i]);
        }
    }
    for (int i = 0; i < text.n_markers; i++) {
        const char* at = (const char*)text.text.bytes + text.markers[i];
        check(t, strncmp(at, "<|", 2) == 0 && (i == 0 || text.markers[i] > text.markers[i - 1]), "marker %d: %.12s", i,
              at);
    }
    check(t, text.n_markers == 2 * 6 - 2 + 3 * 7, "%d markers", text.n_markers);
    chat_template_free(&c);
    chat_text_free(&text);
    json_decref(conversation);
}

// with which an answer begins: thoughts, none, or those of the template
static void test_asks(Test* t) {
    const char* said = ONE("{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b', 'reasoning': 'c'}, "
                           "{'role': 'user', 'content': 'd'}");
#define BEFORE(thought)                                                                                                \
    "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n" thought "b<|im_end|>\n<|im_start|>user\nd<|im_end|>\n"    \
    "<|im_start|>assistant\n<think>\n"
    const char *thinks = BEFORE(""), *not_now = BEFORE("") "\n</think>\n\n";
    check_choice(t, CHAT_QWEN3_6, CHAT_ASKS, said, thinks);
    check_choice(t, CHAT_QWEN3_6, CHAT_ASKS | CHAT_NO_THINKING, said, not_now);
    check_choice(t, CHAT_QWEN3_5_SMALL, CHAT_ASKS, said, not_now);
    check_choice(t, CHAT_QWEN3_5_SMALL, CHAT_ASKS | CHAT_THINKING, said, thinks);
    check_choice(t, CHAT_QWEN3_6, CHAT_ASKS | CHAT_KEEPS_THOUGHTS, said, BEFORE("<think>\nc\n</think>\n\n"));
    check_choice(t, CHAT_QWEN3_5, CHAT_ASKS | CHAT_KEEPS_THOUGHTS, said, thinks);  // it has no such choice
}

// thoughts before the last question go, the next turn ends an answer, and nothing is left to end the last one
static void test_glm(Test* t) {
    const char* said = ONE("{'role': 'system', 'content': 's'}, {'role': 'user', 'content': ' a\\n'}, {'role': "
                           "'assistant', 'content': ' b ', 'reasoning_content': 'c'}, {'role': 'user', 'content': "
                           "'d'}");
    const char* answered = ONE("{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': "
                               "'<think>\\nc</think> b'}");
#define GLM_BEFORE "[gMASK]<sop><|system|>s<|user|> a\n<|assistant|><think></think>b<|user|>d"
    check_choice(t, CHAT_GLM5, 0, said, GLM_BEFORE);
    check_choice(t, CHAT_GLM5, CHAT_ASKS, said, GLM_BEFORE "<|assistant|><think>");
    check_choice(t, CHAT_GLM5, CHAT_ASKS | CHAT_NO_THINKING, said, GLM_BEFORE "<|assistant|><think></think>");
    check_choice(t, CHAT_GLM5, 0, answered, "[gMASK]<sop><|user|>a<|assistant|><think>c</think>b<|user|>");
}

// ---- what is learned, in bytes ----

// With the byte tokenizer a token is a byte: those that are learned are the answers and their ends, and nothing else.
static void test_learned(Test* t) {
    const struct { ChatKind kind; const char* learned; } cases[] = {
        {CHAT_CHATML, "é<|im_end|>\nd<|im_end|>"}, {CHAT_QWEN3, "é<|im_end|><think>\n\n</think>\n\nd<|im_end|>"},
        {CHAT_QWEN3_6, "é<|im_end|>d<|im_end|>"},
        {CHAT_MISTRAL_V0_1, "é</s>\nd</s>"}, {CHAT_MISTRAL_V3, " é</s> d</s>"},
        {CHAT_GLM5, "é<|user|>d<|user|>"}};
    json_t* conversation =
        json_of(ONE("{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'é'}, {'role': 'user', "
                    "'content': 'c'}, {'role': 'assistant', 'content': '\\nd', 'reasoning': ''}"));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ChatText text;
        ChatTokens tokens;
        ChatTemplate c;
        Tokenizer k;
        TokenizerWork w;
        ErrorText error;
        char found[200];
        size_t n = 0;
        memset(&text, 0, sizeof text);
        memset(&tokens, 0, sizeof tokens);
        chat_template_init(&c, cases[i].kind);
        tokenizer_open(&k, "bytes");
        tokenizer_work_init(&w, &k, 100);
        check(t, chat_render(&text, &c, conversation, 0, &error), "refused");
        chat_encode(&tokens, &k, &w, &text);
        check(t, tokens.n == (int)text.text.n, "a token is a byte");
        for (int b = 0; b < tokens.n; b++) {
            check(t, tokens.ids[b] == text.text.bytes[b], "byte %d is another token", b);
            if (tokens.learned[b] && n < sizeof found - 1) { found[n++] = (char)tokens.ids[b]; }
        }
        found[n] = '\0';
        check(t, strcmp(found, cases[i].learned) == 0, "%s: learned is %s, expected %s",
              choice_name(CHAT_NAMES, c.kind).s, found, cases[i].learned);
        tokenizer_work_free(&w);
        tokenizer_free(&k);
        chat_template_free(&c);
        chat_text_free(&text);
        chat_tokens_free(&tokens);
    }
    json_decref(conversation);
}

static void test_end(Test* t) {
    const struct { ChatKind kind; const char* tokenizer; int end; } cases[] = {
        {CHAT_QWEN3, "dev/golden/tokenizers/qwen2.json", 776},
        {CHAT_MISTRAL_V1, "dev/golden/tokenizers/mistral-v0.1.json", 2},
        {CHAT_MISTRAL_V3, "dev/golden/tokenizers/mistral-v0.3.json", 2}, {CHAT_CHATML, "bytes", -1},
        {CHAT_CHATML, "dev/golden/tokenizers/gpt2.json", -1}};
    if (access(cases[0].tokenizer, R_OK) != 0) {
        skip(t, "dev/golden/tokenizers is not here");
        return;
    }
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ChatTemplate c;
        Tokenizer k;
        TokenizerWork w;
        chat_template_init(&c, cases[i].kind);
        tokenizer_open(&k, cases[i].tokenizer);
        tokenizer_work_init(&w, &k, 100);
        const int end = chat_end(&c, &k, &w);
        check(t, end == cases[i].end, "%s: expected %d, found %d", cases[i].tokenizer, cases[i].end, end);
        tokenizer_work_free(&w);
        tokenizer_free(&k);
        chat_template_free(&c);
    }
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"jinja", "spellings of one template become one", test_jinja},
        {"python json", "numbers, escapes and blanks are those of json.dumps", test_python_json},
        {"recognise", "another spelling is the same template, another text or word is not", test_recognise},
        {"signs", "the phrases of each kind are its own, and nothing may stand beside them", test_signs},
        {"folder", "chat_template.jinja, tokenizer_config.json, a name; others are refused", test_folder},
        {"golden", "text, tokens and what is learned are those of transformers", test_golden},
        {"refused", "what is no conversation, or none for this template, is refused with its reason", test_refused},
        {"read", "lists of texts, empty tools, thoughts", test_read},
        {"images", "stand where they are said, in each of their forms", test_images},
        {"asks", "an answer begins with thoughts, without, or as the template has it", test_asks},
        {"glm", "turns without ends, thoughts, what ends the last answer", test_glm},
        {"learned", "answers and their ends, byte by byte", test_learned},
        {"end", "the token that ends an answer, where it is one", test_end},
    };
    json_never_null();
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
