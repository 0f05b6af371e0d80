/*
What GPUs can do, by their makers' data sheets: for "38% peak" in the step line, and for the plan of a run on cards that
nobody has yet (plan.h).
    card_find   by a part of its name, as CUDA calls it or as somebody types it; NULL: none of the table
Rates are dense, bf16 in and float sums. Links are one direction of one card: between the cards of a machine, and its
share of the network in a machine of the maker's usual build (HGX: 8 cards, an adapter each); 0: not in the table.
Source: NVIDIA's data sheets; memory as nvidia-smi says it
*/
#ifndef LLMC_CARDS_H
#define LLMC_CARDS_H
#include <string.h>
#include <strings.h>

typedef struct {
    const char* name;
    double tflops;
    double gib;                  // of memory
    double gb_machine, gb_network;  // GB/s
    int in_machine;              // cards
} Card;

// the first name that is part of what was asked for counts
static inline const Card* cards(int* n) {
    static const Card table[] = {
        {"H100 PCIe", 756, 79.6, 0, 0, 0},
        {"H100", 989, 79.6, 450, 50, 8},
        {"GH200", 989, 95.6, 0, 0, 0},
        {"H200", 989, 140.4, 450, 50, 8},
        {"H20", 148, 95.6, 0, 0, 0},
        {"A100", 312, 80.0, 300, 25, 8},
        {"A40", 149.7, 45.0, 0, 0, 0},
        {"A10", 125, 22.5, 0, 0, 0},
        {"L40S", 362, 45.0, 0, 0, 0},
        {"L40", 181, 45.0, 0, 0, 0},
        {"L4", 121, 22.5, 0, 0, 0},
        {"RTX 6000 Ada", 182, 48.0, 0, 0, 0},
        {"RTX 3090", 71, 24.0, 0, 0, 0},
        {"RTX 4090", 165.2, 24.0, 0, 0, 0},
        {"B200", 2250, 179.1, 900, 50, 8},
    };
    *n = (int)(sizeof table / sizeof table[0]);
    return table;
}

static inline const Card* card_find(const char* name) {
    int n;
    const Card* table = cards(&n);
    for (int i = 0; i < n; i++) {
        for (const char* at = name; *at; at++) {
            if (strncasecmp(at, table[i].name, strlen(table[i].name)) == 0) { return &table[i]; }
        }
    }
    return NULL;
}
#endif  // LLMC_CARDS_H
