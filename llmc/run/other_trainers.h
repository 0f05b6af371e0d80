/*
Options that the pages name side by side and only some trainers have: who types one where it is not is told which have
it.
    other_trainers   for options_of_others (options.h)
dev/test_cli.sh compares the table with what each trainer's --help lists.
*/
#ifndef LLMC_OTHER_TRAINERS_H
#define LLMC_OTHER_TRAINERS_H
#include "../core/options.h"  // option_in_list

static inline const char* other_trainers(const char* word, size_t length) {
    static const char* const rows[][2] = {
        {"--pp --pp-chunks", "train_gpt2, train_gpt2cu, train_moe, train_qwen3, train_qwen36, train_deepseek_v4 and "
                             "train_glm5"},
        {"--cp-by", "train_gpt2cu, train_moe, train_qwen3 and train_qwen36"},
        {"--tp", "train_gpt2cu, train_moe, train_qwen3, train_qwen36, train_deepseek_v4 and train_glm5"},
        {"--cp", "train_gpt2cu, train_mamba_hpn, train_moe, train_qwen3, train_qwen36, train_deepseek_v4 and "
                 "train_glm5"},
        {"--ep --ep-room", "train_moe, train_qwen3, train_qwen36, train_deepseek_v4 and train_glm5"},
        {"--recompute", "train_gpt2cu, train_mamba_hpn, train_moe, train_qwen3, train_qwen36, train_deepseek_v4 and "
                        "train_glm5"},
        {"--graph", "train_gpt2cu, train_moe, train_qwen3, train_qwen36, train_deepseek_v4 and train_glm5"},
        {"--weights --chat --pack", "train_moe, train_qwen3, train_qwen36, train_deepseek_v4 and train_glm5"},
        {"--lora --lora-rank", "train_qwen3, train_qwen36, train_deepseek_v4 and train_glm5"},
        {"--dropout", "train_gpt2 and train_gpt2cu"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (option_in_list(rows[i][0], word, length)) { return rows[i][1]; }
    }
    return NULL;
}
#endif  // LLMC_OTHER_TRAINERS_H
