/*
The options of a trainer that takes conversations: those of its data (chat_data.h), of prompts in files (questions.h)
and of --chat (chat.h).
    chat_options   the rows
    chat_options_template   the chat template that they mean, chat_options_choices its choices
*/
#ifndef LLMC_CHAT_OPTIONS_H
#define LLMC_CHAT_OPTIONS_H
#include "../core/options.h"        // Option, options_append
#include "../text/chat_template.h"  // chat_template_open
#include "../text/conversations.h"  // TRUNCATE_NAMES

typedef enum { LEARN_AUTO, LEARN_TEXT, LEARN_ANSWERS, LEARN_LAST } Learn;
#define LEARN_NAMES "auto|text|answers|last"
#define CHAT_AUTO "auto"  // of --chat-template: the model's training says it, or the folder

typedef struct {
    const char* chat_template;
    int is_recalled;  // nobody has typed it now: the model was trained with it
    int learn, truncate, pack, preserve_thinking;          // data; the last one of prompts too
    const char *eval_generate, *generate_file, *generate_out;  // prompts
    int chat, think;
} ChatOptions;

// appends the rows to the n of a table; returns how many there are now
static inline int chat_options(Option* t, int n, ChatOptions* o) {
    const Option rows[] = {
        {"conversations", "chat-template", "", OPTION_TEXT, &o->chat_template, CHAT_AUTO, 0, 0, "NAME",
         "how a conversation becomes text: chatml, qwen3, mistral-v3 or another name that we know (a wrong one lists "
         "them); auto: the one that was typed when the model or its adapter was trained, else as the folder of the "
         "adapter says, or that of the tokenizer", 0},
        {"conversations", "learn", "", OPTION_CHOICE, &o->learn, "auto", 0, 0, LEARN_NAMES,
         "of --train and --val: every token of their texts, all answers of their conversations or the last of each; "
         "auto: text, or answers where a line of JSON has messages, conversations or instruction", 0},
        {"conversations", "truncate", "", OPTION_CHOICE, &o->truncate, "drop", 0, 0, TRUNCATE_NAMES,
         "a conversation that is longer than a row is left out, or loses its end", 0},
        {"conversations", "pack", "", OPTION_SWITCH, &o->pack, "1", 0, 0, "0|1",
         "several conversations in a row, each as if it had one of its own; 0: one in each row", 0},
        {"conversations", "preserve-thinking", "", OPTION_SWITCH, &o->preserve_thinking, "0", 0, 0, "0|1",
         "with the chat template qwen3.6: 1 leaves earlier answers their thoughts, learned and in prompts", 0},
        {"conversations", "eval-generate", "", OPTION_TEXT, &o->eval_generate, "", 0, 0, "FILE",
         "answer these prompts with each --sample-every, or without it with each validation, into answers.jsonl of "
         "the run; lines as of --generate-file", OPTION_READS},
        {"conversations", "chat", "", OPTION_SWITCH, &o->chat, "0", 0, 0, "0|1",
         "talk with the model of --from; each line of standard input is a turn. Positions: --seq-len, or those of the "
         "model, at most 4096", OPTION_WORK},
        {"conversations", "generate-file", "", OPTION_TEXT, &o->generate_file, "", 0, 0, "FILE",
         "answer the prompts of JSON Lines: {\"messages\": [...]}, {\"prompt\": \"...\"}, or a conversation, whose "
         "last answer is kept as the reference", OPTION_READS | OPTION_WORK},
        {"conversations", "generate-out", "", OPTION_TEXT, &o->generate_out, "", 0, 0, "FILE",
         "the answers, in the same order; goes on where an earlier start stopped, if FILE.settings.json says that the "
         "same model and options made them. Empty: standard output",
         OPTION_WRITES},
        {"conversations", "think", "", OPTION_SWITCH, &o->think, "1", 0, 0, "0|1",
         "with the chat templates qwen3 and later, and glm5: 0 asks for answers without thoughts", 0},
    };
    return options_append(t, n, rows, (int)(sizeof rows / sizeof rows[0]));
}

// of chat_render, for data; prompts have more of them
static inline int chat_options_choices(const ChatOptions* o) { return o->preserve_thinking ? CHAT_KEEPS_THOUGHTS : 0; }

// folder: where the chat template is, of the adapter or the tokenizer; "" where there is none
static inline void chat_options_template(ChatTemplate* t, const ChatOptions* o, const char* folder) {
    chat_template_open(t, folder, strcmp(o->chat_template, CHAT_AUTO) == 0 ? "" : o->chat_template);
    if (o->preserve_thinking && t->kind != CHAT_QWEN3_6) {
        options_fail("preserve-thinking", "is for the chat template qwen3.6, which leaves the choice, found %s",
                     choice_name(CHAT_NAMES, t->kind).s);
    }
}
#endif  // LLMC_CHAT_OPTIONS_H
