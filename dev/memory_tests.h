// Tests of parameters, gradients and moments that are kept as bf16 or in 8 bits, and of the plan of a run's memory.
#ifndef DEV_MEMORY_TESTS_H
#define DEV_MEMORY_TESTS_H

// ---------------------------------------------------------------------------------------------------------------------
// Ways to keep values

// The levels, decade by decade from the smallest, in doubles. Returns how many.
static int plain_levels(double levels[300], int is_signed) {
    int n = 0;
    levels[n++] = 0.0;
    for (int e = 6; e >= 0; e--) {
        int count = (is_signed ? 64 : 128) >> e;
        for (int j = 1; j <= count; j++) levels[n++] = pow(10.0, -e) * (0.1 + 0.9 * j / count);
    }
    return n;
}

// Must fail for: decades of another number of levels, levels that are not those of the formula, the last not 1.
static void test_memory_levels(void) {
    for (int is_signed = 0; is_signed < 2; is_signed++) {
        double levels[300];
        int n = plain_levels(levels, is_signed);
        check(n == (is_signed ? 128 : 255), "%d levels", n);
        for (int k = 0; k < n; k++) {
            double ours = (double)store_level(k, is_signed);
            check(fabs(ours - levels[k]) <= 1e-7 * levels[k], "level %d is %.9g, not %.9g", k, ours, levels[k]);
            for (uint32_t random = 0; random < 65536; random += 4369)
                check(store_number((float)ours, is_signed, random) == k, "level %d is not kept with random bits %u", k,
                      random);
        }
        check(store_level(n - 1, is_signed) == 1.0f, "the last level is not 1");
    }
}

#ifndef DEVICE_CUDA // reads and writes the host's tensors; test_cuda.cu has the device's
// The block's generator and the single one give the same bits, whatever the seed's and the step's size.
static void test_memory_random(void) {
    Rounding rounding = rounding_of(0x123456789ABCDEFull, 40, ROUND_V, 1234567);
    uint32_t random[STORE_BLOCK];
    double sum = 0.0;
    for (uint64_t first = 0; first < 1ull << 33; first = first * 2 + 8 * STORE_BLOCK) {
        rounding_block(random, &rounding, first);
        for (uint64_t i = 0; i < STORE_BLOCK; i++) {
            check(random[i] == rounding_bits(&rounding, first + i), "element %llu", (unsigned long long)(first + i));
            sum += (double)random[i];
        }
    }
    check(sum > 0.0, "no bits");
}

// Values of all sizes, some zero, for tensors whose last block is short.
static void memory_values(float *values, int n, int positive) {
    for (int i = 0; i < n; i++) {
        Philox block = rand_block(3, RAND_TEST, 70, (uint64_t)i);
        float size = powf(10.0f, -9.0f * (float)(block.v[0] >> 8) * 0x1p-24f);
        values[i] = block.v[1] % 16 == 0 ? 0.0f : block.v[1] % 2 == 0 || positive ? size : -size;
    }
}

// The neighbours of a value among levels times scale: what may come back for it.
static void plain_neighbours(double *low, double *high, double x, double scale, int is_signed) {
    double levels[300];
    int n = plain_levels(levels, is_signed), k = 0;
    while (k + 1 < n && levels[k + 1] * scale <= fabs(x) * (1.0 + 1e-6)) k++;
    *low = levels[k] * scale, *high = levels[k + 1 < n ? k + 1 : k] * scale;
}

// One of two neighbours comes back, in the mean the value; the largest of a block comes back as it is, and of values
// without a sign none above 0 as 0. Must fail for: blocks of another size, the scale of another block, rounding that
// goes down or to the nearest only, the same bits in every step.
static void test_memory_int8(void) {
    enum { N = 3 * STORE_BLOCK + 77, DRAWS = 2000 };
    Stream *stream = test_stream(PRECISION_FP32, 1);
    float values[N], back[N], scales[4];
    static uint8_t codes[N];
    static double means[N];
    for (int is_signed = 0; is_signed < 2; is_signed++) {
        Stored kept = {codes, scales, STORE_INT8, is_signed};
        memory_values(values, N, !is_signed);
        memset(means, 0, sizeof means);
        for (int draw = 0; draw < DRAWS; draw++) {
            stored_write(kept, 0, values, N, rounding_of(5, 1, ROUND_M, draw), stream);
            stored_read(back, kept, 0, N, stream);
            for (int i = 0; i < N; i++) means[i] += (double)back[i] / DRAWS;
        }
        for (int i = 0; i < N; i++) {
            double scale = 0.0, low, high, x = (double)values[i], y = fabs((double)back[i]);
            for (int j = i / STORE_BLOCK * STORE_BLOCK; j < N && j / STORE_BLOCK == i / STORE_BLOCK; j++)
                scale = fmax(scale, fabs((double)values[j]));
            plain_neighbours(&low, &high, x, scale, is_signed);
            int near = fabs(y - low) <= 1e-6 * low || fabs(y - high) <= 1e-6 * high;
            check(near && (double)back[i] * x >= 0.0, "%g in a block of %g comes back as %g, not %g or %g", x, scale,
                  (double)back[i], low, high);
            if (!is_signed && x > 0.0) check(y > 0.0, "%g becomes 0", x);
            if (!is_signed && low == 0.0) continue; // never 0, so not right in the mean
            check(fabs(fabs(means[i]) - fabs(x)) <= 5.0 * (high - low) / sqrt((double)DRAWS) * 0.5 + 1e-6 * fabs(x),
                  "%g in a block of %g is %g in the mean", x, scale, means[i]);
        }
        stored_write(kept, 0, values, N, rounding_nearest(), stream);
        stored_read(back, kept, 0, N, stream);
        for (int i = 0; i < N; i++) {
            double scale = (double)scales[i / STORE_BLOCK], low, high;
            plain_neighbours(&low, &high, (double)values[i], scale, is_signed);
            double error = fabs((double)back[i] - (double)values[i]), most = 0.5 * (high - low) * (1.0 + 1e-3);
            if (is_signed || low > 0.0)
                check(error <= most + 1e-6 * high, "%g is not at the nearest", (double)values[i]);
        }
    }
    stream_destroy(stream);
}

// The same of bf16; infinity and NaN stay what they are, and pieces and threads change no bit.
static void test_memory_bf16(void) {
    enum { N = 5 * STORE_BLOCK + 3, DRAWS = 2000 };
    Stream *stream = test_stream(PRECISION_FP32, 1), *threads = test_stream(PRECISION_FP32, 3);
    static float values[N], back[N];
    static uint16_t halves[N], others[N];
    static double means[N];
    Stored kept = {halves, NULL, STORE_BF16, 1}, other = {others, NULL, STORE_BF16, 1};
    memory_values(values, N, 0);
    memset(means, 0, sizeof means);
    for (int draw = 0; draw < DRAWS; draw++) {
        stored_write(kept, 0, values, N, rounding_of(5, 1, ROUND_PARAM, draw), stream);
        stored_read(back, kept, 0, N, stream);
        for (int i = 0; i < N; i++) means[i] += (double)back[i] / DRAWS;
    }
    for (int i = 0; i < N; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        float low = float_of_bits(bits & 0xFFFF0000u), high = float_of_bits((bits & 0xFFFF0000u) + 0x10000u);
        int exact = (bits & 0xFFFFu) == 0;
        check(back[i] == low || (!exact && back[i] == high), "%g comes back as %g", (double)values[i], (double)back[i]);
        check(fabs(means[i] - (double)values[i]) <= 2.5 * fabs((double)high - (double)low) / sqrt((double)DRAWS),
              "%g is %g in the mean", (double)values[i], means[i]);
    }
    Rounding rounding = rounding_of(7, 2, ROUND_PARAM, 3);
    stored_write(kept, 0, values, N, rounding, stream);
    stored_write(other, 0, values, 2 * STORE_BLOCK, rounding, threads);
    stored_write(other, 2 * STORE_BLOCK, values + 2 * STORE_BLOCK, N - 2 * STORE_BLOCK, rounding, threads);
    check(memcmp(halves, others, sizeof halves) == 0, "pieces on three threads give other bits");
    values[0] = INFINITY, values[1] = -INFINITY, values[2] = NAN;
    stored_write(kept, 0, values, 3, rounding, stream);
    stored_read(back, kept, 0, 3, stream);
    check(back[0] == INFINITY && back[1] == -INFINITY && isnan(back[2]), "%g %g %g", (double)back[0], (double)back[1],
          (double)back[2]);
    stream_destroy(stream);
    stream_destroy(threads);
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// Training

#ifndef DEVICE_CUDA // long, and the order of a product's sums depends on the stages there
static const char *const memory_cases[] = {"--optimizer-dtype bf16",
                                           "--optimizer-dtype int8",
                                           "--param-dtype bf16",
                                           "--grad-dtype bf16",
                                           "--optimizer-dtype int8 --param-dtype bf16 --grad-dtype bf16",
                                           "--optimizer nesterov --optimizer-dtype int8",
                                           "--optimizer muon --optimizer-dtype bf16 --param-dtype bf16"};
enum { MEMORY_CASES = sizeof memory_cases / sizeof *memory_cases };

// Mean loss of a run's last 20 steps.
static double memory_last_loss(const char *run) {
    json_t *steps = logged_steps(run);
    size_t n = json_array_size(steps);
    double sum = 0.0;
    for (size_t i = n - 20; i < n; i++) sum += json_number_value(json_object_get(json_array_get(steps, i), "loss"));
    json_decref(steps);
    return sum / 20.0;
}

// A run of 60 steps comes to where fp32 does, within 3% of its loss, and not by the same bits. Must fail for: moments
// that stand still or vanish, parameters that are rounded down, a gradient that is not summed over micro-batches.
static void test_memory_training(void) {
    char command[1024], run[32], plain[32];
    write_corpus();
    for (int i = 0; i < MEMORY_CASES; i++) {
        const char *dtype = strstr(memory_cases[i], "-dtype");
        while (dtype > memory_cases[i] && dtype[-1] != ' ') dtype--; // what stands before is of fp32 too
        snprintf(plain, sizeof plain, "memory_fp32_%d", i), snprintf(run, sizeof run, "memory_small_%d", i);
        snprintf(command, sizeof command, SMALL "-l 3e-3 -n 60 --micro-batch 2 -o @/%s %.*s", plain,
                 (int)(dtype - memory_cases[i]), memory_cases[i]);
        check_run(0, NULL, command, "done: 60 steps");
        snprintf(command, sizeof command, SMALL "-l 3e-3 -n 60 --micro-batch 2 -o @/%s %s", run, memory_cases[i]);
        check_run(0, NULL, command, "done: 60 steps");
        double expected = memory_last_loss(plain), loss = memory_last_loss(run);
        check(expected < 4.0 && fabs(loss - expected) <= 0.03 * expected, "%s: loss %g, with fp32 %g", memory_cases[i],
              loss, expected);
        check(loss != expected, "%s: changes nothing", memory_cases[i]);
        printf("     %-60s loss %.4f, with fp32 %.4f\n", memory_cases[i], loss, expected);
    }
}

// N steps equal N/2, stop, resume, N/2, byte for byte; another way to keep things is refused.
static void test_memory_resume(void) {
    char command[1024], whole[40], half[40];
    write_corpus();
    for (int i = 0; i < MEMORY_CASES; i++) {
        snprintf(whole, sizeof whole, "memory_whole_%d", i), snprintf(half, sizeof half, "memory_half_%d", i);
        snprintf(command, sizeof command, SMALL "-n 12 %s -o @/%s", memory_cases[i], whole);
        check_run(0, NULL, command, "done: 12 steps");
        snprintf(command, sizeof command, SMALL "-n 12 %s -o @/%s --stop-after 5", memory_cases[i], half);
        check_run(0, NULL, command, "--resume");
        snprintf(command, sizeof command, "-o @/%s --resume", half);
        check_run(0, NULL, command, "done: 12 steps");
        check_same_run(whole, half);
    }
    check_run(1, NULL, "-o @/memory_half_4 --resume --optimizer-dtype bf16", "--optimizer-dtype differs");
    check_run(1, NULL, "-o @/memory_half_4 --resume --param-dtype fp32", "--param-dtype differs");
    check_run(1, NULL, "-o @/memory_half_4 --resume --grad-dtype fp32", "--grad-dtype differs");
}

// Any number of stages and threads gives the same bits: rounding goes by tensors, blocks of 8-bit values belong to one.
// Must fail for: random bits or blocks that count from the beginning of a stage.
static void test_memory_stages(void) {
    static const char *const layouts[] = {"-y 1", "-y 3", "-y 6 --threads 1 --recompute"};
    char command[1024], name[40], first[40];
    write_corpus();
    for (int i = 0; i < MEMORY_CASES; i++) {
        char *losses = NULL;
        for (int k = 0; k < 3; k++) {
            snprintf(name, sizeof name, "memory_y%d_%d", k, i);
            snprintf(command, sizeof command, DEEP "-n 4 --wire fp32 --clip 0 %s %s -o @/%s", memory_cases[i],
                     layouts[k], name);
            check_run(0, NULL, command, "done: 4 steps");
            char *theirs = logged_losses(name);
            if (k == 0) snprintf(first, sizeof first, "%s", name), losses = strdup(theirs);
            check(strcmp(losses, theirs) == 0, "%s %s: losses %s, not %s", memory_cases[i], layouts[k], theirs, losses);
            if (k > 0) check_same_model(first, name);
            free(theirs);
        }
        free(losses);
    }
}

#endif

#define MEMORY_ALL "--optimizer-dtype int8 --param-dtype bf16 --grad-dtype bf16 "

// What else a mesh does works with all of it: outer steps, an anchor, older weights, codecs that learn; a run goes on
// from its middle with the same bits, and what it exports is what transformers reads.
static void test_memory_meshes(void) {
    static const char *const cases[] = {"-x 3 -y 2 --local-steps 3", "-x 2 -y 3 -p 0.6 --anchor-delay 2",
                                        "--schedule async --micro-batch 5 -y 3",
                                        "-x 2 -y 2 --codec klt -p 0.8 --anchor-delay 2 --anchor-use both"};
    char command[1024], whole[40], half[40];
    write_corpus();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(whole, sizeof whole, "memory_mesh_%zu", i), snprintf(half, sizeof half, "memory_meshed_%zu", i);
        snprintf(command, sizeof command, DEEP MEMORY_ALL "%s -n 6 -o @/%s", cases[i], whole);
        check_run(0, NULL, command, "done: 6 steps");
        snprintf(command, sizeof command, DEEP MEMORY_ALL "%s -n 6 --stop-after 3 -o @/%s", cases[i], half);
        check_run(0, NULL, command, "--resume");
        snprintf(command, sizeof command, "-o @/%s --resume", half);
        check_run(0, NULL, command, "done: 6 steps");
        check_same_model(whole, half);
        char *a = logged_losses(whole), *b = logged_losses(half);
        check(strcmp(a, b) == 0, "%s: losses %s, resumed %s", cases[i], a, b);
        free(a);
        free(b);
        snprintf(command, sizeof command, "-m @/%s --eval -d @/corpus.jsonl --param-dtype bf16", whole);
        check_run(0, NULL, command, "validation loss");
    }
}

static void test_memory_refused(void) {
    write_corpus();
    check_run(1, NULL, SMALL "-n 2 --optimizer rotate --optimizer-dtype int8", "--optimizer rotate works on fp32");
    check_run(1, NULL, SMALL "-n 2 --optimizer pipemare --param-dtype bf16", "--optimizer pipemare works on fp32");
    check_run(1, NULL, SMALL "-n 2 --probe 1 --grad-dtype bf16 -y 2 -p 0.5", "--probe works on fp32");
    check_run(1, NULL, DEEP "-n 2 -x 2 --dp dense --grad-dtype bf16", "--dp dense works on fp32");
    check_run(1, NULL, SMALL "-n 2 --param-dtype int8", "param-dtype");
    check_run(1, NULL, "--init d=32,layers=2,heads=4,kv=2,ffn=48,vocab=258,ctx=64 --export @/x.bin --param-dtype bf16",
              "--param-dtype has no effect");
}

#if defined(WITH_ZMQ) && !defined(DEVICE_CUDA)
// One process and several give the same bits, joiners get the state as it is kept.
static void test_memory_processes(void) {
    static const char *const words[] = {"-x 2 -y 2 --local-steps 4", "-x 2 -y 3 -p 0.6 --anchor-delay 2",
                                        "-x 2 -y 2 -p 0.8 --codec klt --anchor-delay 2"};
    static const int joiners[] = {3, 3, 2};
    char all[1024], name[32];
    write_corpus();
    for (size_t i = 0; i < sizeof joiners / sizeof *joiners; i++) {
        snprintf(name, sizeof name, "memory_cells%zu", i);
        snprintf(all, sizeof all, DEEP MEMORY_ALL "%s -n 8 --val-every 3 --save-every 5", words[i]);
        check_processes_as_one(all, name, joiners[i], "done: 8 steps", i > 0);
    }
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// The plan

#ifndef DEVICE_CUDA // counts the host's memory
#define PLANNED_INIT "--init d=256,layers=4,heads=4,kv=2,ffn=640,vocab=258,ctx=64"
#define PLANNED      "-d @/corpus.jsonl -b 2 -t 64 -n 100 --threads 1 "

// Three steps of a run, and what they have taken beside its plan.
static void check_planned(const char *words) {
    int64_t before = __atomic_load_n(&device_taken, __ATOMIC_SEQ_CST);
    MeshRun *run = mesh_run_open(words);
    for (int step = 0; step < 3; step++) mesh_run_step(run);
    if (run->trainer.anchored) anchor_state(&run->trainer.anchor, 1);
    int64_t used = __atomic_load_n(&device_taken, __ATOMIC_SEQ_CST) - before;
    MeshBytes bytes = mesh_bytes(&run->trainer);
    double plan = (double)mesh_bytes_device(&bytes);
    check(fabs((double)used - plan) <= 0.05 * plan, "%s: %.3f MB are used, %.3f MB planned", words, 1e-6 * (double)used,
          1e-6 * plan);
    mesh_run_close(run);
}

// What a run takes of tensor memory, scratch included, is within 5% of its plan: less by no more than what ops of this
// shape leave untouched, and never more. Must fail for: any of the plan's parts left out or counted twice.
static void test_memory_plan(void) {
    static const char *const cases[] = {
        "",
        "--recompute",
        "--optimizer-dtype int8",
        MEMORY_ALL,
        "--optimizer muon " MEMORY_ALL,
        "-y 2 -x 2 --local-steps 2 --param-dtype bf16",
        "-y 2 -x 2 -p 0.6 --anchor-delay 1",
        "-y 2 -x 2 -p 0.6 --anchor-delay 1 " MEMORY_ALL,
        "-y 2 --schedule async --param-dtype bf16",
    };
    char words[1024];
    write_corpus();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(words, sizeof words, PLANNED_INIT " " PLANNED "%s", cases[i]);
        check_planned(words);
    }
}
// What is picked for so much memory, in which order, and that nothing is changed which was given, or which does not
// help. Must fail for: picks that go on when the plan fits, a batch that is not smaller where steps take too long.
static void test_memory_picks(void) {
    write_corpus();
    MeshRun *run = mesh_run_open(DEEP "-n 100 -y 2 -x 2 -p 0.6");
    Trainer *trainer = &run->trainer;
    Options *opts = &trainer->opts, before = *opts;
    MeshBytes bytes = mesh_bytes(trainer);
    int64_t needed = mesh_bytes_device(&bytes), all;
    check(pick_settings(trainer, needed) == 0 && memcmp(opts, &before, sizeof before) == 0, "picks where all fits");
    check(pick_settings(trainer, 1) == 0 && memcmp(opts, &before, sizeof before) == 0, "picks where nothing helps");
    check(pick_settings(trainer, needed - 1) == 0 && opts->micro_batch == 2 && opts->recompute == 1 &&
              opts->optimizer_dtype == STORE_FP32,
          "a byte too much: micro-batch %d, recompute %d", opts->micro_batch, opts->recompute);
    memcpy(opts, &before, sizeof before);
    check(pick_memory(trainer, 1, &needed) == 0 && opts->optimizer_dtype == STORE_INT8 &&
              opts->param_dtype == STORE_BF16 && opts->grad_dtype == STORE_BF16 && opts->anchor_rank == 1,
          "not all is picked");
    bytes = mesh_bytes(trainer), all = mesh_bytes_device(&bytes);
    check(all < needed * 3 / 4, "all picks save %lld of %lld bytes", (long long)(needed - all), (long long)needed);
    memcpy(opts, &before, sizeof before);
    check(plan_mesh(trainer, trainer->B, trainer->T, 1) == 0, "%s", error_message);
    mesh_run_close(run);
}

// The headline command's mesh of Llama 3.2 1B in 24 GB less a twentieth, on two threads, from the defaults; and the
// whole model alone, at a batch and length that are given and stay.
static void test_memory_headline(void) {
    static const char *const words[] = {
        "train --init llama-3.2-1b -p 0.95 --threads 2 --precision fp32 --dry-run",
        "train --init llama-3.2-1b -b 1 -t 1024 --threads 2 --dry-run",
    };
    for (int i = 0; i < 2; i++) {
        Trainer *trainer = (Trainer *)calloc(1, sizeof *trainer);
        ModelFile file;
        char text[128], *argv[32];
        int argc = 0;
        snprintf(text, sizeof text, "%s", words[i]);
        for (char *word = strtok(text, " "); word != NULL; word = strtok(NULL, " ")) argv[argc++] = word;
        memset(&file, 0, sizeof file);
        int result = cli_defaults(option_table, OPTION_COUNT, &trainer->opts) ||
                     cli_parse(option_table, OPTION_COUNT, &trainer->opts, trainer->given, argc, argv);
        Options before = trainer->opts, *opts = &trainer->opts;
        if (!check(result == 0 && prepare(trainer, &file, ACTION_TRAIN) == 0, "%s", error_message)) exit(1);
        memcpy(opts, &before, sizeof before); // what this machine's memory has asked for
        trainer->B = 1, trainer->anchor.rank = 256;
        check(plan_mesh(trainer, 1, trainer->T, 1) == 0, "%s", error_message);
        int64_t room = (int64_t)24e9 / 20 * 19;
        check(pick_settings(trainer, room) == 0, "%s", error_message);
        MeshBytes bytes = mesh_bytes(trainer);
        int64_t needed = mesh_bytes_device(&bytes);
        check(needed <= room && needed > room / 2, "%s: %.2f GB", words[i], 1e-9 * (double)needed);
        check(i == 1 || (opts->batch == 1 && trainer->T == 2048 && opts->replicas == 0), "batch %d of %d", opts->batch,
              trainer->T);
        check(i == 0 || (opts->batch == 1 && trainer->T == 1024 && opts->param_dtype == STORE_FP32), "batch %d of %d",
              opts->batch, trainer->T);
        trainer_free(trainer);
        free(trainer);
    }
}
#endif

#endif
