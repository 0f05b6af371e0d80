/*
Options that only some trainers have: who types one where it is not is told which have it.
    other_trainers   for options_of_others (options.h)
dev/test_cli.sh compares the table with what each trainer's --help lists, and finds what it lacks.
*/
#ifndef LLMC_OTHER_TRAINERS_H
#define LLMC_OTHER_TRAINERS_H
#include "../core/options.h"  // option_in_list

static inline const char* other_trainers(const char* word, size_t length) {
    static const char* const rows[][2] = {
        {"--pp --pp-chunks",
         "train_gpt2, train_gpt2cu, train_moe, train_qwen3, train_qwen36, train_deepseek_v4 and train_glm5"},
        {"--cp --recompute",
         "train_gpt2cu, train_mamba_hpn, train_moe, train_qwen3, train_qwen36, train_deepseek_v4 and train_glm5"},
        {"--graph --tp --head-rows",
         "train_gpt2cu, train_moe, train_qwen3, train_qwen36, train_deepseek_v4 and train_glm5"},
        {"--weights --generate-batch --ep --ep-room --chat-template --learn --truncate --pack --preserve-thinking "
         "--eval-generate --chat --generate-file --generate-out --think",
         "train_moe, train_qwen3, train_qwen36, train_deepseek_v4 and train_glm5"},
        {"--cp-by", "train_gpt2cu, train_moe, train_qwen3 and train_qwen36"},
        {"--act-fp8 --export-lora --merge --lora --lora-rank --lora-alpha --lora-rslora --lora-dropout "
         "--lora-targets --lora-parameters --lora-rank-pattern --lora-alpha-pattern",
         "train_qwen3, train_qwen36, train_deepseek_v4 and train_glm5"},
        {"--tied --aux-alpha", "train_moe, train_qwen3 and train_qwen36"},
        {"--bias-rate", "train_moe, train_deepseek_v4 and train_glm5"},
        {"--mtp --mtp-weight", "train_qwen36, train_deepseek_v4 and train_glm5"},
        {"--export-bin --decay-all --dropout", "train_gpt2 and train_gpt2cu"},
        {"--indexer --indexer-alone --seq-balance", "train_deepseek_v4 and train_glm5"},
        {"--gelu-fusion --master-weights", "train_gpt2cu"},
        {"--d-model --d-state --d-conv --expand --dt-rank --base-layers --vocab-size --target-layers --placement "
         "--freeze-embedding --task --fail-on-non-finite --human-log --embeddings-out --scan-chunk --token-file "
         "--token-dir --val-token-file --val-token-dir --shard-ext --shuffle-shards --packed-sequences "
         "--carry-state --doc-sep --prefetch-workers --prefetch-buffer --head --proto --proto-init --proto-dim "
         "--proto-separation --hpn-scale --classes --ff-lr --bp-cadence-steps --ff-threshold --ff-corrupt "
         "--gradient-surgery-method --gradient-surgery-epsilon --gradnorm-alpha --cagrad-lambda",
         "train_mamba_hpn"},
        {"--rope-alpha --balance --z-lambda", "train_moe"},
        {"--vision --image-max-pixels", "train_qwen36"},
        {"--inject --absorb", "train_glm5"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (option_in_list(rows[i][0], word, length)) { return rows[i][1]; }
    }
    return NULL;
}
#endif  // LLMC_OTHER_TRAINERS_H
