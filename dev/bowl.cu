// The table of scripts/run_thesis.sh: optimizers on the quadratic of bowl.h, with eigenvectors along the weights and
// turned against them, without delay and with one. Prints Markdown.
#include <stdio.h>

#include "bowl.h"

typedef struct {
    const char *name;
    Optimizer optimizer;
} Entry;

static const Entry entries[] = {
    {"AdamW", {OPTIMIZER_ADAMW, ROTATE_1ST, ROTATE_UNI, REFRESH_UNIFORM, 0, 0}},
    {"rotated (1st, uni)", {OPTIMIZER_ROTATE, ROTATE_1ST, ROTATE_UNI, REFRESH_UNIFORM, 10, BOWL_SIDE}},
    {"rotated (1st, bi)", {OPTIMIZER_ROTATE, ROTATE_1ST, ROTATE_BI, REFRESH_UNIFORM, 10, BOWL_SIDE}},
    {"rotated (2nd, uni)", {OPTIMIZER_ROTATE, ROTATE_2ND, ROTATE_UNI, REFRESH_UNIFORM, 10, BOWL_SIDE}},
    {"rotated (2nd, bi)", {OPTIMIZER_ROTATE, ROTATE_2ND, ROTATE_BI, REFRESH_UNIFORM, 10, BOWL_SIDE}},
};
enum { ENTRIES = sizeof entries / sizeof *entries };

int main(void) {
    static const char *const axes[] = {"aligned", "turned"};
    static const int delays[] = {0, BOWL_DELAY};
    Stream *stream = NULL;
    if (stream_create(&stream, PRECISION_FP32, 1)) {
        fprintf(stderr, "bowl: %s\n", error_message);
        return 1;
    }
    printf("| eigenvectors | delay | optimizer | loss | best lr | loss at %g | flips | cosine | travel |\n"
           "|---|---|---|---|---|---|---|---|---|\n",
           (double)BOWL_LR);
    for (int i = 0; i < 4; i++) {
        Bowl bowl;
        bowl_init(&bowl, i / 2);
        for (int e = 0; e < ENTRIES; e++) {
            BowlEnd best = bowl_best(&bowl, &entries[e].optimizer, delays[i % 2], stream);
            BowlEnd same = bowl_descend(&bowl, &entries[e].optimizer, BOWL_LR, delays[i % 2], stream);
            printf("| %s | %d | %s | %.0e | %g | %.0e | %.3f | %.3f | %.1f |\n", axes[i / 2], delays[i % 2],
                   entries[e].name, best.loss, (double)best.lr, same.loss, same.flips, same.cosine, same.travel);
        }
    }
    int failed = stream_check(stream);
    if (failed) fprintf(stderr, "bowl: %s\n", error_message);
    stream_destroy(stream);
    return failed ? 1 : 0;
}
