/*
Which chat template a model has: how a conversation becomes the text that it was trained on (chat_render.h writes it).
A folder of Hugging Face says it by a program in Jinja, in chat_template.jinja or as "chat_template" in
tokenizer_config.json. It is not run: it is recognised as one of these, each written out in C:
    name          of                                    a turn
    chatml        many                                  <|im_start|>user\nHI<|im_end|>\n
    qwen2         Qwen2                                 the same; a system text of its own where there is none
    qwen2.5       Qwen2.5, -Coder, -Math, base models   the same with tools
    qwen3         Qwen3, April 2025                     tools; answers think, <think>\n...\n</think>\n\n
    qwen3-2507    Qwen3 Instruct 2507                   tools; none of them thinks
    qwen3.5       Qwen3.5, 4B and larger, 2026          images; calls of tools as <function=NAME>; texts are trimmed
    qwen3.5-small Qwen3.5, 2B and smaller               the same; thinks where it is asked to
    qwen3.6       Qwen3.6, 2026                         qwen3.5, but for True in calls; thoughts may stay
    mistral-v0.1  Mistral 7B Instruct v0.1, 2023        <s>[INST] HI [/INST]HELLO</s> [INST]
    mistral-v0.2  v0.2, Mixtral 8x7B Instruct, 2023     <s>[INST] HI [/INST]HELLO</s>[INST]
    mistral-v1    both of them since 2024               <s> [INST] HI [/INST] HELLO</s> [INST], with a system text
    mistral-v3    v0.3, Mistral Small and Large 2024    <s>[INST] HI[/INST] HELLO</s>[INST], the same with tools
    glm5          GLM-5, by its name alone              <|user|>HI<|assistant|><think></think>HELLO<|user|>
    chat_template_open       of a folder; or by name (--chat-template), whatever the folder says
    chat_template_recognise  of the template's text alone, without an exit
    chat_template_is_of      does a folder say this one?
    chat_template_text       what a folder says, whatever that is
    chat_kind_named          the one that has this name
    chat_template_jinja      the program in Jinja, of those that have one here
A template is recognised, in the spelling of jinja.h, by its vocabulary and by phrases. It may have no text in quotes
and no word of code but those that its row knows, and must have each phrase of the row. So copies that are indented or
commented otherwise are known, one that is only like it is not: whatever is added to a template, a date, a default, a
trim, comes with a word or a text. Two things that differ among copies of one template are read from it: the system text
of qwen2 and qwen2.5 where a conversation has none, and whether mistral-v3 trims answers. Programs of GLM-5 differ among
its releases, and none of them is known here: glm5 is what they have in common, without tools, as --chat-template says.
Errors: fail_input with the names, for a folder without a template or with another one.
Source: the tokenizer_config.json of the models named; of qwen3.5 and qwen3.6 the copies of huggingface/trl,
        trl/chat_templates/qwen3_5_think.jinja, qwen3_5_nothink.jinja, qwen3_6.jinja, which are
        the models' own; huggingface/transformers 5.23, utils/chat_template_utils.py.
*/
#ifndef LLMC_CHAT_TEMPLATE_H
#define LLMC_CHAT_TEMPLATE_H
#include "../core/choice.h"    // choice_find
#include "../core/jsonfile.h"  // json_parse_within
#include "../core/outfile.h"   // path_join, path_exists
#include "jinja.h"             // jinja_canonical, jinja_literal, ByteBuffer

typedef enum {
    CHAT_CHATML, CHAT_QWEN2, CHAT_QWEN2_5, CHAT_QWEN3, CHAT_QWEN3_2507, CHAT_QWEN3_5, CHAT_QWEN3_5_SMALL, CHAT_QWEN3_6,
    CHAT_MISTRAL_V0_1, CHAT_MISTRAL_V0_2, CHAT_MISTRAL_V1, CHAT_MISTRAL_V3, CHAT_GLM5, N_CHAT_KINDS
} ChatKind;
#define CHAT_NAMES                                                                                                     \
    "chatml|qwen2|qwen2.5|qwen3|qwen3-2507|qwen3.5|qwen3.5-small|qwen3.6|mistral-v0.1|mistral-v0.2|mistral-v1|"        \
    "mistral-v3|glm5"

typedef struct {
    ChatKind kind;
    char* system;     // text of the system turn where a conversation has none; NULL: then it has no such turn
    char *bos, *eos;  // of Mistral: <s>, </s>
    int trims;        // mistral-v3: white space around answers goes
} ChatTemplate;

static inline int chat_is_mistral(const ChatTemplate* t) {
    return t->kind >= CHAT_MISTRAL_V0_1 && t->kind <= CHAT_MISTRAL_V3;
}
static inline int chat_is_qwen3_5(const ChatTemplate* t) {
    return t->kind >= CHAT_QWEN3_5 && t->kind < CHAT_MISTRAL_V0_1;
}
static inline int chat_takes_images(const ChatTemplate* t) { return chat_is_qwen3_5(t); }
static inline int chat_thinks(const ChatTemplate* t) {
    return t->kind == CHAT_QWEN3 || chat_is_qwen3_5(t) || t->kind == CHAT_GLM5;
}
static inline int chat_takes_tools(const ChatTemplate* t) {
    return t->kind == CHAT_MISTRAL_V3 || (t->kind >= CHAT_QWEN2_5 && t->kind < CHAT_MISTRAL_V0_1);
}
static inline int chat_takes_system(const ChatTemplate* t) {
    return t->kind != CHAT_MISTRAL_V0_1 && t->kind != CHAT_MISTRAL_V0_2;
}

static inline void chat_template_free(ChatTemplate* t) {
    free(t->system);
    free(t->bos);
    free(t->eos);
    memset(t, 0, sizeof *t);
}

// by its name alone
static inline void chat_template_init(ChatTemplate* t, ChatKind kind) {
    const char* of_qwen2 = "You are a helpful assistant.";
    const char* of_qwen2_5 = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.";
    const char* system = kind == CHAT_QWEN2 ? of_qwen2 : kind == CHAT_QWEN2_5 ? of_qwen2_5 : NULL;
    t->kind = kind;
    t->system = system ? string_copy(system) : NULL;
    t->bos = string_copy("<s>");
    t->eos = string_copy("</s>");
    t->trims = kind == CHAT_MISTRAL_V3;
}

// ---- what the templates say ----

// texts of ChatML with tools, which chat_render.h writes
#define CHAT_TOOLS_BEGIN                                                                                               \
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "  \
    "signatures within <tools></tools> XML tags:\n<tools>"
#define CHAT_TOOLS_END                                                                                                 \
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "              \
    "<tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": "                      \
    "<args-json-object>}\n</tool_call><|im_end|>\n"

// the same of qwen3.5 and later
#define CHAT_FUNCTIONS_BEGIN "# Tools\n\nYou have access to the following functions:\n\n<tools>"
#define CHAT_FUNCTIONS_END                                                                                             \
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"            \
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"          \
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"     \
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified "   \
    "format: an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"        \
    "- Required parameters MUST be specified\n- You may provide optional reasoning for your function call in natural " \
    "language BEFORE the function call, but NOT after\n- If there is no function call available, answer the question " \
    "like normal with your current knowledge and do not tell the user about function calls\n</IMPORTANT>"
#define CHAT_VISION_BEGIN "<|vision_start|>"
#define CHAT_IMAGE_PAD "<|image_pad|>"
#define CHAT_VISION_END "<|vision_end|>"

enum { CHAT_MAX_TEXTS = 48, CHAT_MAX_PHRASES = 12 };

typedef struct {
    const char* texts[CHAT_MAX_TEXTS];      // that it may have in quotes
    const char* words;                      // of code that it may have, with a blank behind each
    const char* phrases[CHAT_MAX_PHRASES];  // that it must have, in the spelling of jinja.h
} ChatSigns;

#define CHAT_WORDS_ "for message in messages endfor if add_generation_prompt endif role content "
#define CHAT_WORDS_TOOLS_                                                                                              \
    CHAT_WORDS_ "else elif tools tool tojson or and not loop first last index0 tool_calls tool_call set function "     \
                "name arguments is string "
#define CHAT_TEXTS_TOOLS_                                                                                              \
    "system", "user", "assistant", "tool", "<|im_start|>", "<|im_start|>system\n", "<|im_start|>user",                 \
        "<|im_start|>assistant\n", "\n", "<|im_end|>\n", CHAT_TOOLS_END, "\", \"arguments\": ", "}\n</tool_call>",     \
        "\n<tool_response>\n", "\n</tool_response>"
#define CHAT_TOOL_CALL_                                                                                                \
    "{{\"<tool_call>\\n{\\\"name\\\": \\\"\"+tool_call.name+\"\\\", \\\"arguments\\\": \"}}"                           \
    "{%if tool_call.arguments is string%}{{tool_call.arguments}}{%else%}{{tool_call.arguments|tojson}}{%endif%}"       \
    "{{\"}\\n</tool_call>\"}}"
#define CHAT_TOOL_CALLS_                                                                                               \
    "{%for tool_call in message.tool_calls%}{%if(loop.first and content)or(not loop.first)%}{{\"\\n\"}}{%endif%}"
#define CHAT_TEXTS_QWEN3_5_                                                                                            \
    "", "image", "image_url", "video", "text", "Picture ", "Video ", ": ",                                             \
        CHAT_VISION_BEGIN CHAT_IMAGE_PAD CHAT_VISION_END, CHAT_VISION_BEGIN "<|video_pad|>" CHAT_VISION_END, "system", \
        "user", "assistant", "tool", "<|im_start|>", "<|im_start|>system\n",                                           \
        "<|im_start|>system\n" CHAT_FUNCTIONS_BEGIN, CHAT_FUNCTIONS_END, "<|im_start|>user",                           \
        "<|im_start|>assistant\n",                                                                                     \
        "\n", "\n\n", "<|im_end|>\n", "<tool_response>", "</tool_response>", "\n<tool_response>\n",                    \
        "\n</tool_response>", "<think>", "</think>", "\n<think>\n", "\n</think>\n\n", "<think>\n\n</think>\n\n",       \
        "<think>\n", "\n\n<tool_call>\n<function=", "<tool_call>\n<function=", "\n<tool_call>\n<function=", ">\n",     \
        "<parameter=", "\n</parameter>\n", "</function>\n</tool_call>"
#define CHAT_WORDS_QWEN3_5_                                                                                            \
    "set image_count namespace value video_count macro render_content content do_vision_count is_system_content "      \
    "false if is string elif iterable and not mapping for item in or type raise_exception endif add_vision_id text "   \
    "else endfor none undefined endmacro messages tools tool tojson role true trim ns multi_step_tool "                \
    "last_query_index length message index loop index0 startswith endswith first reasoning_content split rstrip "      \
    "lstrip defined tool_calls tool_call function name arguments args_name args_value items safe previtem last "       \
    "nextitem add_generation_prompt enable_thinking "
#define CHAT_PHRASES_QWEN3_5_                                                                                          \
    "{%if\"image\"in item or\"image_url\"in item or item.type==\"image\"%}{%if is_system_content%}",                   \
        "{%if add_vision_id%}{{\"Picture \"~image_count.value~\": \"}}{%endif%}",                                      \
        "{%set content=render_content(messages[0].content,false,true)|trim%}{%if content%}{{\"\\n\\n\"+content}}",     \
        "{%set content=render_content(message.content,true)|trim%}{%if message.role==\"system\"%}",                    \
        "and content.endswith(\"</tool_response>\"))%}{%set ns.multi_step_tool=false%}",                               \
        ".split(\"</think>\")[0].rstrip(\"\\n\").split(\"<think>\")[-1].lstrip(\"\\n\")%}{%set content=content.",      \
        "{%if loop.first%}{%if content|trim%}{{\"\\n\\n<tool_call>\\n<function=\"+tool_call.name+\">\\n\"}}{%else%}",  \
        "{%elif message.role==\"tool\"%}{%if loop.previtem and loop.previtem.role!=\"tool\"%}"
#define CHAT_THINKS_QWEN3_5_                                                                                           \
    "%}{{\"<|im_start|>\"+message.role+\"\\n<think>\\n\"+reasoning_content+\"\\n</think>\\n\\n\"+content}}{%else%}"
#define CHAT_LATER_QWEN3_5_                                                                                            \
    "{%set reasoning_content=reasoning_content|trim%}{%if loop.index0>ns.last_query_index" CHAT_THINKS_QWEN3_5_
#define CHAT_VALUES_QWEN3_5_                                                                                           \
    "{%set args_value=args_value|tojson|safe if args_value is mapping or(args_value is sequence and args_value is "    \
    "not string)else args_value|string%}{{args_value+\"\\n</parameter>\\n\"}}"
#define CHAT_ASKS_QWEN3_5_                                                                                             \
    "{%if enable_thinking is defined and enable_thinking is false%}{{\"<think>\\n\\n</think>\\n\\n\"}}{%else%}"
#define CHAT_WORDS_MISTRAL_                                                                                            \
    "bos_token for message in messages if role loop index0 raise_exception endif content elif eos_token else endfor "
#define CHAT_WORDS_SYSTEM_ CHAT_WORDS_MISTRAL_ "set system_message loop_messages first last and is defined "

// in the order of ChatKind
static inline const ChatSigns* chat_signs_(ChatKind kind) {
    static const ChatSigns signs[N_CHAT_KINDS] = {
        {{"<|im_start|>", "\n", "<|im_end|>\n", "<|im_start|>assistant\n"},
         CHAT_WORDS_ "not is defined set false ",
         {"{%for message in messages%}{{\"<|im_start|>\"+message.role+\"\\n\"+message.content+\"<|im_end|>\\n\"}}"
          "{%endfor%}{%if add_generation_prompt%}{{\"<|im_start|>assistant\\n\"}}{%endif%}"}},
        {{"<|im_start|>", "\n", "<|im_end|>\n", "<|im_start|>assistant\n", "system"},
         CHAT_WORDS_ "loop first and ",
         {"{%for message in messages%}{%if loop.first and messages[0].role!=\"system\"%}",
          "{{\"<|im_start|>\"+message.role+\"\\n\"+message.content+\"<|im_end|>\\n\"}}{%endfor%}"}},
        {{CHAT_TEXTS_TOOLS_, "\n\n" CHAT_TOOLS_BEGIN, "\n<tool_call>\n{\"name\": \""},
         CHAT_WORDS_TOOLS_ "defined ",
         {"(message.role==\"assistant\"and not message.tool_calls)%}{{\"<|im_start|>\"+message.role+\"\\n\"+",
          "{%if message.content%}{{\"\\n\"+message.content}}{%endif%}{%for tool_call in message.tool_calls%}",
          "+tool_call.name+\"\\\", \\\"arguments\\\": \"+tool_call.arguments|tojson+\"}\\n</tool_call>\"}}{%endfor%}"}},
        {{CHAT_TEXTS_TOOLS_, CHAT_TOOLS_BEGIN, "<tool_call>\n{\"name\": \"", "\n\n", "<tool_response>",
          "</tool_response>", "", "<think>", "</think>", "\n<think>\n", "\n</think>\n\n", "<think>\n\n</think>\n\n"},
         CHAT_WORDS_TOOLS_ "ns namespace multi_step_tool true false last_query_index length index startswith endswith "
                           "reasoning_content split lstrip rstrip strip defined none enable_thinking ",
         {"{%if loop.index0>ns.last_query_index%}{%if loop.last or(not loop.last and reasoning_content)%}"
          "{{\"<|im_start|>\"+message.role+\"\\n<think>\\n\"+reasoning_content.strip(\"\\n\")+\"\\n</think>\\n\\n\"+"
          "content.lstrip(\"\\n\")}}{%else%}{{\"<|im_start|>\"+message.role+\"\\n\"+content}}{%endif%}{%else%}",
          ".split(\"</think>\")[0].rstrip(\"\\n\").split(\"<think>\")[-1].lstrip(\"\\n\")%}",
          ".split(\"</think>\")[-1].lstrip(\"\\n\")%}",
          "and not(message.content.startswith(\"<tool_response>\")and message.content.endswith(\"</tool_response>\"))",
          "{%if enable_thinking is defined and enable_thinking is false%}{{\"<think>\\n\\n</think>\\n\\n\"}}{%endif%}",
          CHAT_TOOL_CALLS_, CHAT_TOOL_CALL_}},
        {{CHAT_TEXTS_TOOLS_, CHAT_TOOLS_BEGIN, "<tool_call>\n{\"name\": \"", "\n\n", ""},
         CHAT_WORDS_TOOLS_,
         {"{%elif message.role==\"assistant\"%}{{\"<|im_start|>\"+message.role+\"\\n\"+", CHAT_TOOL_CALLS_,
          CHAT_TOOL_CALL_}},
        {{CHAT_TEXTS_QWEN3_5_},
         CHAT_WORDS_QWEN3_5_ "sequence ",
         {CHAT_PHRASES_QWEN3_5_, CHAT_LATER_QWEN3_5_, CHAT_VALUES_QWEN3_5_, CHAT_ASKS_QWEN3_5_}},
        {{CHAT_TEXTS_QWEN3_5_},
         CHAT_WORDS_QWEN3_5_ "sequence ",
         {CHAT_PHRASES_QWEN3_5_, CHAT_LATER_QWEN3_5_, CHAT_VALUES_QWEN3_5_,
          "{%if enable_thinking is defined and enable_thinking is true%}{{\"<think>\\n\"}}{%else%}"}},
        {{CHAT_TEXTS_QWEN3_5_},
         CHAT_WORDS_QWEN3_5_ "preserve_thinking ",
         {CHAT_PHRASES_QWEN3_5_,
          "{%if(preserve_thinking is defined and preserve_thinking is true)or(loop.index0>ns.last_query_index)"
          CHAT_THINKS_QWEN3_5_,
          "{%set args_value=args_value|string if args_value is string else args_value|tojson|safe%}{{args_value+",
          CHAT_ASKS_QWEN3_5_}},
        {{"user", "assistant", "[INST] ", " [/INST]", " "},
         CHAT_WORDS_MISTRAL_,
         {"{{bos_token}}{%for", "{{\"[INST] \"+message.content+\" [/INST]\"}}", "{{message.content+eos_token+\" \"}}"}},
        {{"user", "assistant", "[INST] ", " [/INST]"},
         CHAT_WORDS_MISTRAL_,
         {"{{bos_token}}{%for", "{{\"[INST] \"+message.content+\" [/INST]\"}}", "{{message.content+eos_token}}"}},
        {{"system", "user", "assistant", " [INST] ", " [/INST]", "\n\n", " "},
         CHAT_WORDS_SYSTEM_,
         {"{%if loop.first and system_message is defined%}"
          "{{\" [INST] \"+system_message+\"\\n\\n\"+message.content+\" [/INST]\"}}",
          "{{\" [INST] \"+message.content+\" [/INST]\"}}", "{{\" \"+message.content+eos_token}}", "{{bos_token}}"}},
        {{"system", "role", "equalto", "user", "tool", "tool_results", "assistant", "[AVAILABLE_TOOLS] [",
          "{\"type\": \"function\", \"function\": {", "return", "\"", "\": \"", "\": ", ", ", "}}", "]",
          "[/AVAILABLE_TOOLS]", "[INST] ", "[/INST]", "\n\n", "[TOOL_CALLS] [", ", \"id\": \"", "\"}", " ",
          "[TOOL_RESULTS] {\"content\": ", "\"call_id\": \"", "\"}[/TOOL_RESULTS]"},
         CHAT_WORDS_SYSTEM_ "not tools none user_messages selectattr list ns namespace index or tool_calls tool "
                            "function key val items string tojson tool_call out id length trim tool_call_id ",
         {"{%if loop.last and system_message is defined%}"
          "{{\"[INST] \"+system_message+\"\\n\\n\"+message.content+\"[/INST]\"}}",
          "{{\"[INST] \"+message.content+\"[/INST]\"}}", "{%if tools is not none and(message==user_messages[-1])%}",
          "{%for key,val in tool.items()if key!=\"return\"%}", "{%set out=tool_call.function|tojson%}{{out[:-1]}}",
          "{{\"[TOOL_RESULTS] {\\\"content\\\": \"+content|string+\", \"}}", "{{bos_token}}",
          "{{\"\\\"call_id\\\": \\\"\"+message.tool_call_id+"}},
        {{"[gMASK]<sop>", "user", "assistant", "<|", "|>", "<think>", "</think>", "<|assistant|>", "<think></think>",
          "", "\n"},
         CHAT_WORDS_ "set ns namespace last loop index0 is not defined string and else elif reasoning_content thought "
                     "trim enable_thinking split rstrip lstrip ",
         {"{{\"[gMASK]<sop>\"}}", "{{\"<|\"+message.role+\"|>\"}}",
          "{{\"<think>\"+(thought if loop.index0>ns.last else\"\")+\"</think>\"+content|trim}}",
          "{%set thought=content.split(\"</think>\")[0].rstrip(\"\\n\").split(\"<think>\")[-1].lstrip(\"\\n\")%}",
          "{{\"<|assistant|>\"}}"}}};
    return &signs[kind];
}

// ---- recognising ----

static inline int chat_has_text_(const ChatSigns* signs, const ByteBuffer* text) {
    for (int i = 0; i < CHAT_MAX_TEXTS && signs->texts[i]; i++) {
        const size_t n = strlen(signs->texts[i]);
        if (n == text->n && memcmp(text->n ? (char*)text->bytes : "", signs->texts[i], n) == 0) { return 1; }
    }
    return 0;
}

static inline int chat_has_word_(const ChatSigns* signs, const char* word, size_t n) {
    for (const char* at = signs->words; *at; at += strcspn(at, " ") + 1) {
        if (strcspn(at, " ") == n && memcmp(at, word, n) == 0) { return 1; }
    }
    return 0;
}

// <|im_start|>system\nTEXT<|im_end|>\n in quotes: TEXT is what stands for a system text where there is none
static inline int chat_is_system_(const ByteBuffer* text) {
    const char *begin = "<|im_start|>system\n", *end = "<|im_end|>\n";
    const size_t n_begin = strlen(begin), n_end = strlen(end);
    return text->n > n_begin + n_end && memcmp(text->bytes, begin, n_begin) == 0 && jinja_ends_with_(text, end);
}

// the TEXT of the first one, to be freed; NULL: there is none
static inline char* chat_system_text_(const char* canonical, size_t n) {
    ByteBuffer text = {NULL, 0, 0};
    char* system = NULL;
    for (size_t at = 0; !system && jinja_literal(&text, canonical, n, &at);) {
        if (!chat_is_system_(&text)) { continue; }
        const size_t n_begin = strlen("<|im_start|>system\n"), n_system = text.n - n_begin - strlen("<|im_end|>\n");
        system = (char*)malloc_check(n_system + 1, "system text");
        memcpy(system, text.bytes + n_begin, n_system);
        system[n_system] = '\0';
    }
    buffer_free(&text);
    return system;
}

// Are all texts in quotes known? system: another one that may stand there; what an exception says, nobody sees.
static inline int chat_texts_known_(const ChatSigns* signs, const char* canonical, size_t n, const char* system) {
    ByteBuffer text = {NULL, 0, 0};
    const char* raise = "raise_exception(\"";
    int known = 1;
    for (size_t at = 0, end = 0; known; end = at) {
        if (!jinja_literal(&text, canonical, n, &at)) { break; }
        const char* first = (const char*)memchr(canonical + end, '"', n - end);
        const size_t before = (size_t)(first + 1 - canonical);
        const int is_raised = before >= strlen(raise) && memcmp(first + 1 - strlen(raise), raise, strlen(raise)) == 0;
        const int is_system = system && (chat_is_system_(&text) ||
                                         (text.n == strlen(system) && memcmp(text.bytes, system, text.n) == 0));
        known = is_raised || is_system || chat_has_text_(signs, &text);
    }
    buffer_free(&text);
    return known;
}

static inline int chat_words_known_(const ChatSigns* signs, const char* canonical, size_t n) {
    ByteBuffer text = {NULL, 0, 0};
    int known = 1;
    for (size_t i = 0; i < n && known;) {
        size_t length = 0;
        if (canonical[i] == '"') {
            jinja_literal(&text, canonical, n, &i);
            continue;
        }
        while (i + length < n && jinja_is_word_((unsigned char)canonical[i + length])) { length++; }
        known = length == 0 || isdigit((unsigned char)canonical[i]) || chat_has_word_(signs, canonical + i, length);
        i += length > 0 ? length : 1;
    }
    buffer_free(&text);
    return known;
}

static inline int chat_phrases_found_(const ChatSigns* signs, const char* canonical) {
    for (int i = 0; i < CHAT_MAX_PHRASES && signs->phrases[i]; i++) {
        if (!strstr(canonical, signs->phrases[i])) { return 0; }
    }
    return 1;
}

// the kind of a canonical template, or -1
static inline int chat_find_kind_(const char* canonical, size_t n, const char* system) {
    for (int kind = 0; kind < N_CHAT_KINDS; kind++) {
        const ChatSigns* signs = chat_signs_((ChatKind)kind);
        const int takes_system = kind == CHAT_QWEN2 || kind == CHAT_QWEN2_5;  // a text of its own, which it must have
        if (!takes_system == !system && chat_phrases_found_(signs, canonical) &&
            chat_words_known_(signs, canonical, n) && chat_texts_known_(signs, canonical, n, system)) {
            return kind;
        }
    }
    return -1;
}

// the text of a template: 1, with t to be freed; or 0 with the reason
static inline int chat_template_recognise(ChatTemplate* t, const char* jinja, size_t n_bytes, ErrorText* error) {
    ByteBuffer canonical = {NULL, 0, 0};
    memset(t, 0, sizeof *t);
    if (!jinja_canonical(&canonical, jinja, n_bytes, error)) {
        buffer_free(&canonical);
        return 0;
    }
    const char* text = (const char*)canonical.bytes;
    char* system = chat_system_text_(text, canonical.n);
    const int kind = chat_find_kind_(text, canonical.n, system);
    if (kind >= 0) {
        chat_template_init(t, (ChatKind)kind);
        if (t->system) {
            free(t->system);
            t->system = string_copy(system);
        }
        t->trims = t->trims && strstr(text, "{{\" \"+message.content|trim+eos_token}}");
    }
    free(system);
    buffer_free(&canonical);
    return kind >= 0 ? 1 : error_set(error, "expected one of the chat templates " CHAT_NAMES ", found another");
}

// ---- of a folder ----

// {"content": "<s>", ...} or "<s>" alone
static inline void chat_take_token_(char** token, const json_t* config, const char* key) {
    const json_t* found = json_object_get(config, key);
    const char* text = json_string_value(json_is_object(found) ? json_object_get(found, "content") : found);
    if (!text) { return; }
    free(*token);
    *token = string_copy(text);
}

// "chat_template": a text, or [{"name": "default", "template": a text}, ...]; NULL: there is none
static inline const char* chat_template_of_(const json_t* config) {
    const json_t* found = json_object_get(config, "chat_template");
    for (size_t i = 0; i < json_array_size(found); i++) {
        const json_t* row = json_array_get(found, i);
        const char* name = json_string_value(json_object_get(row, "name"));
        if (name && strcmp(name, "default") == 0) { return json_string_value(json_object_get(row, "template")); }
    }
    return json_string_value(found);
}

static inline void chat_template_take_(ChatTemplate* t, const char* path, const char* jinja, size_t n_bytes) {
    ErrorText error;
    if (!chat_template_recognise(t, jinja, n_bytes, &error)) {
        fail_input("%s: %s: give --chat-template with the name of the one to use", path, error.text);
    }
}

// Its tokenizer_config.json, or NULL; to be dereferenced. Its numbers are read as floats: "model_max_length" is 1e30 in
// many of them, which no integer of JSON's reader holds.
static inline json_t* chat_config_(char path[PATH_BYTES], const char* folder) {
    const JsonBudget most = {JSON_MAX_BYTES, JSON_MAX_DEPTH, JSON_READ_MARKS, JSON_DECODE_INT_AS_REAL};
    MappedFile file;
    json_error_t error;
    if (!*folder || !path_exists(path_join(path, folder, "tokenizer_config.json"))) { return NULL; }
    file_map(&file, path);
    json_t* config = json_parse_within((const char*)file.bytes, file.n_bytes, &most, &error);
    if (!config) { fail_input("%s:%d: expected JSON, found: %s", path, error.line, error.text); }
    file_unmap(&file);
    return config;
}

// Of a folder with this config, "" where there is none: its template, to be freed, and in path its file; NULL:
// it has none
static inline char* chat_template_find_(char path[PATH_BYTES], size_t* n_bytes, const char* folder,
                                        const json_t* config) {
    const char* text = chat_template_of_(config);
    if (*folder && path_exists(path_join(path, folder, "chat_template.jinja"))) {
        MappedFile file;
        file_map(&file, path);
        char* jinja = (char*)malloc_check(file.n_bytes + 1, "a chat template");
        memcpy(jinja, file.bytes, file.n_bytes);
        jinja[file.n_bytes] = '\0';
        *n_bytes = file.n_bytes;
        file_unmap(&file);
        return jinja;
    }
    if (!text) { return NULL; }
    path_join(path, folder, "tokenizer_config.json");
    *n_bytes = strlen(text);
    return string_copy(text);
}

// to be freed; NULL: the folder has none
static inline char* chat_template_text(const char* folder) {
    char path[PATH_BYTES];
    size_t n_bytes;
    json_t* config = chat_config_(path, folder);
    char* jinja = chat_template_find_(path, &n_bytes, folder, config);
    json_decref(config);
    return jinja;
}

// name: of --chat-template
static inline ChatKind chat_kind_named(const char* name) {
    const int kind = choice_find(CHAT_NAMES, name);
    if (kind < 0) { fail_input("--chat-template: expected " CHAT_NAMES ", found \"%s\"", name); }
    return (ChatKind)kind;
}

// folder: of a tokenizer, "" where there is none; name: of --chat-template, "": the folder decides
static inline void chat_template_open(ChatTemplate* t, const char* folder, const char* name) {
    char path[PATH_BYTES];
    size_t n_bytes;
    json_t* config = chat_config_(path, folder);
    char* jinja = *name ? NULL : chat_template_find_(path, &n_bytes, folder, config);
    if (*name) {
        chat_template_init(t, chat_kind_named(name));
    } else if (jinja) {
        chat_template_take_(t, path, jinja, n_bytes);
    } else {
        fail_input("%s: expected a chat template, chat_template.jinja or \"chat_template\" in tokenizer_config.json, "
                   "found none: give --chat-template, one of " CHAT_NAMES, *folder ? folder : "--tokenizer");
    }
    free(jinja);
    chat_take_token_(&t->bos, config, "bos_token");
    chat_take_token_(&t->eos, config, "eos_token");
    json_decref(config);
}

// of a tokenizer, "" where there is none; one that is not known is none of these
static inline int chat_template_is_of(const char* folder, ChatKind kind) {
    char path[PATH_BYTES];
    size_t n_bytes;
    ErrorText error;
    ChatTemplate t;
    json_t* config = chat_config_(path, folder);
    char* jinja = chat_template_find_(path, &n_bytes, folder, config);
    const int is_known = jinja && chat_template_recognise(&t, jinja, n_bytes, &error);
    const int is_same = is_known && t.kind == kind;
    if (is_known) { chat_template_free(&t); }
    free(jinja);
    json_decref(config);
    return is_same;
}

// for those who chat with what was trained by this template; NULL: only its authors' folders have it
static inline const char* chat_template_jinja(ChatKind kind) {
    const char* chatml =
        "{%- for message in messages -%}\n"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n";
    const char* glm5 =
        "{{- '[gMASK]<sop>' -}}\n"
        "{%- set ns = namespace(last=-1) -%}\n"
        "{%- for message in messages -%}\n"
        "{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}\n"
        "{%- endfor -%}\n"
        "{%- for message in messages -%}\n"
        "{{- '<|' + message.role + '|>' -}}\n"
        "{%- if message.role == 'assistant' -%}\n"
        "{%- set thought, content = '', message.content -%}\n"
        "{%- if message.reasoning_content is string -%}{%- set thought = message.reasoning_content -%}\n"
        "{%- elif '</think>' in content -%}\n"
        "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}\n"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}\n"
        "{%- endif -%}\n"
        "{{- '<think>' + (thought if loop.index0 > ns.last else '') + '</think>' + content|trim -}}\n"
        "{%- else -%}{{- message.content -}}{%- endif -%}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}\n"
        "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think></think>' -}}\n"
        "{%- else -%}{{- '<think>' -}}{%- endif -%}{%- endif -%}\n";
    return kind == CHAT_CHATML ? chatml : kind == CHAT_GLM5 ? glm5 : NULL;
}
#endif  // LLMC_CHAT_TEMPLATE_H
