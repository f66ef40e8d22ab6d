// meshtune: fine-tunes models of the Llama kind. One program, read from top to bottom:
//
//   Options        the command line, one table
//   Model          the table of tensors, a stage's memory, initial weights, loading and saving
//   Forward and backward        one layer after the other, by hand
//   Optimizer      clipping and a step of the optimizer over the table
//   Evaluation and generation   held-out loss, sampling with a key/value cache
//   Mesh           cells, links, who holds which layers
//   Pipeline       the gradients of a step, through codec and link
//   Data parallelism            dense averages, or outer steps with PowerSGD
//   Anchor         the thread that computes unmasked gradients and their factors
//   Plan           what a run will need, before it starts
//   Run            the output folder: log, checkpoints, resume
//   Training       the loop
//   main
//
// Shapes, the same letters everywhere: B sequences, T tokens of one, N = B*T rows, C channels, NH query heads, NKV
// key/value heads, HD head size, A = NH*HD, QKV = (NH + 2*NKV)*HD, F ffn size, V vocabulary, L layers.
// The file is C11 and C++17. Errors: functions return -1 with a line in error_message; main prints it and exits 1.

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <math.h>
#include <net/if.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "llmc/adapter.h"
#include "llmc/alignment.h"
#include "llmc/channel.h"
#include "llmc/checkpoint.h"
#include "llmc/choices.h"
#include "llmc/cli.h"
#include "llmc/clock.h"
#include "llmc/codec_table.h"
#include "llmc/coder.h"
#include "llmc/config.h"
#include "llmc/dataset.h"
#include "llmc/error.h"
#include "llmc/estimate.h"
#include "llmc/file.h"
#include "llmc/flow.h"
#include "llmc/host_memory.h"
#include "llmc/launch.h"
#include "llmc/link.h"
#include "llmc/meeting.h"
#include "llmc/membership.h"
#include "llmc/mesh_view.h"
#include "llmc/model_file.h"
#include "llmc/net.h"
#include "llmc/optimizer.h"
#include "llmc/oscillation.h"
#include "llmc/packer.h"
#include "llmc/partition.h"
#include "llmc/prune.h"
#include "llmc/rand.h"
#include "llmc/safetensors.h"
#include "llmc/schedule.h"
#include "llmc/show.h"
#include "llmc/status_page.h"
#include "llmc/tokenizer.h"
#include "llmc/versions.h"

// Ops come in pairs of one name: those of the CPU, and of a CUDA device (make DEVICE=cuda).
#ifdef DEVICE_CUDA
#include "llmc/adamw.cuh"
#include "llmc/attention.cuh"
#include "llmc/bias.cuh"
#include "llmc/codec.cuh"
#include "llmc/cross_entropy.cuh"
#include "llmc/device.cuh"
#include "llmc/embedding.cuh"
#include "llmc/klt.cuh"
#include "llmc/layernorm.cuh"
#include "llmc/linalg.cuh"
#include "llmc/lora.cuh"
#include "llmc/mask.cuh"
#include "llmc/matmul.cuh"
#include "llmc/muon.cuh"
#include "llmc/nccl.cuh"
#include "llmc/nesterov.cuh"
#include "llmc/outer.cuh"
#include "llmc/powersgd.cuh"
#include "llmc/qk_norm.cuh"
#include "llmc/residual.cuh"
#include "llmc/rmsnorm.cuh"
#include "llmc/rope.cuh"
#include "llmc/rotate.cuh"
#include "llmc/spectral.cuh"
#include "llmc/store.cuh"
#include "llmc/swiglu.cuh"
#include "llmc/vector.cuh"
#else
#include "llmc/adamw.h"
#include "llmc/attention.h"
#include "llmc/bias.h"
#include "llmc/codec.h"
#include "llmc/cross_entropy.h"
#include "llmc/device.h"
#include "llmc/embedding.h"
#include "llmc/klt.h"
#include "llmc/layernorm.h"
#include "llmc/linalg.h"
#include "llmc/lora.h"
#include "llmc/mask.h"
#include "llmc/matmul.h"
#include "llmc/muon.h"
#include "llmc/nccl.h"
#include "llmc/nesterov.h"
#include "llmc/outer.h"
#include "llmc/powersgd.h"
#include "llmc/qk_norm.h"
#include "llmc/residual.h"
#include "llmc/rmsnorm.h"
#include "llmc/rope.h"
#include "llmc/rotate.h"
#include "llmc/spectral.h"
#include "llmc/store.h"
#include "llmc/swiglu.h"
#include "llmc/vector.h"
#endif
#include "llmc/klt_estimate.h" // of the tables above

static volatile sig_atomic_t interrupts; // Ctrl-C: the first finishes the step and saves, the second leaves at once

#define MESHTUNE_VERSION "0.1.0"

// ---------------------------------------------------------------------------------------------------------------------
// Options. One table parses, checks, prints help, is written into each run's log and read back by --resume.

typedef struct {
    char model[CLI_TEXT], init[CLI_TEXT], out[CLI_TEXT], generate[CLI_TEXT], export_to[CLI_TEXT];
    TextList data, val_data;
    char anchor_delay[CLI_TEXT], gpus[CLI_TEXT];
    float val_fraction, lr, lr_final, wd, beta1, beta2, adam_eps, clip, temperature, top_p, mask_rate;
    float anchor_beta, alpha, tau, outer_lr, outer_momentum, mix, link_mbps, link_ms, device_tflops;
    int batch, micro_batch, seq, schedule_lr, precision, recompute, threads, keep, export_dtype, max_tokens;
    int replicas, stages, eval, dry_run, resume, check_weights, val_every, sample_every, save_every, help;
    int wire, mask_scale, eval_masked, anchor, anchor_batch, anchor_rank, anchor_debias, anchor_threads, tau_relative;
    int dp, local_steps, fragments, overlap, powersgd_rank, probe, codec;
    int codec_coding, coder, klt_predict, anchor_use, schedule, no_stash;
    float klt_metric, klt_forward;
    int no_cell, min_replicas, status_port;
    float peer_timeout, anchor_timeout;
    char host[CLI_TEXT], join[CLI_TEXT], listen[CLI_TEXT], status_address[CLI_TEXT];
    char tokenize[CLI_TEXT];
    int train_on, chat_template, pack, too_long, show_data;
    char eval_choices[CLI_TEXT], eval_generate[CLI_TEXT];
    TextList stop;
    float prune;
    int optimizer, rotate_source, rotate_geometry, rotate_every, rotate_max_dim, refresh, measure_alignment;
    int optimizer_dtype, param_dtype, grad_dtype;
    int lora_rank;
    float lora_alpha;
    char lora_targets[CLI_TEXT], lora[CLI_TEXT];
    int64_t steps, warmup, stop_after, seed, val_tokens;
} Options;

#define MESH_MAX_REPLICAS 256

static const char lr_shapes[] = "cosine|linear|constant"; // LrShape in words
#define LORA_LR 2e-4f
static const char codec_names[] = CODEC_NAMES;
static const char chat_templates[] = CHAT_TEMPLATES, train_on_names[] = TRAIN_ON;
static const char pack_names[] = PACK_NAMES, too_long_names[] = TOO_LONG_NAMES;
static const char anchor_uses[] = "filter|bias|both|none"; // AnchorUse in words
static const char optimizer_names[] = OPTIMIZER_NAMES, rotate_sources[] = ROTATE_SOURCES;
static const char rotate_geometries[] = ROTATE_GEOMETRY, refresh_names[] = REFRESH_NAMES;

#define FIELD(name) OPTION_FIELD(Options, name)
// clang-format off
static const Option option_table[] = {
// flag  name            type           field              default   min    max     choices   help
{ "-m", "model",         OPTION_TEXT,   FIELD(model),        "",     0,     0,      NULL, "model: a .bin, a .gguf, a Hugging Face folder, or a run's folder" },
{ "",   "init",          OPTION_TEXT,   FIELD(init),         "",     0,     0,      NULL, "random model instead: a preset, a config.json, or d=256,layers=8,..." },
{ "-d", "data",          OPTION_LIST,   FIELD(data),         "",     0,     0,      NULL, "training data: .txt, .jsonl, token .bin; several, patterns" },
{ "",   "val-data",      OPTION_LIST,   FIELD(val_data),     "",     0,     0,      NULL, "held-out data; without it a part of -d is held out" },
{ "",   "val-fraction",  OPTION_FLOAT,  FIELD(val_fraction), "0.05", 0,     0.5,    NULL, "share of -d held out" },
{ "",   "train-on",      OPTION_CHOICE, FIELD(train_on),     "assistant", 0, 0,     train_on_names, "conversations: all that the assistant says, or its last turn only, or everything; prompts: their completions, or everything" },
{ "",   "chat-template", OPTION_CHOICE, FIELD(chat_template), "auto", 0,   0,       chat_templates, "how conversations are spelled; auto: by the tokens that the model's tokenizer has" },
{ "",   "pack",          OPTION_CHOICE, FIELD(pack),         "auto", 0,     0,      pack_names, "several documents in one sequence: mask: whole, seeing themselves only; nomask: whole, seeing all; plain: cut where sequences end; auto: mask for conversations and prompts, plain for text" },
{ "",   "too-long",      OPTION_CHOICE, FIELD(too_long),     "auto", 0,     0,      too_long_names, "packed documents of more than --seq + 1 tokens; auto: truncate, but text is split" },
{ "",   "show-data",     OPTION_INT,    FIELD(show_data),    "0",    0,     1e9,    NULL, "print so many documents in their order of training, with what is trained on marked, then exit" },
{ "",   "tokenize",      OPTION_TEXT,   FIELD(tokenize),     "",     0,     0,      NULL, "write -d as token files NAME_train_00000.bin and so on, --val-data as NAME_val_*, then exit" },
{ "-o", "out",           OPTION_TEXT,   FIELD(out),          "",     0,     0,      NULL, "folder of the run; default: the next free runs/N; of --eval-choices and --eval-generate: the file of results" },
{ "-b", "batch",         OPTION_INT,    FIELD(batch),        "32",   1,     1e6,    NULL, "sequences a step" },
{ "",   "micro-batch",   OPTION_INT,    FIELD(micro_batch),  "0",    0,     1e6,    NULL, "sequences computed at once; 0 = tokens that suit the device: 1024 on CPUs, 8192 on GPUs" },
{ "-t", "seq",           OPTION_INT,    FIELD(seq),          "0",    0,     1e6,    NULL, "tokens of a sequence; 0 = min(2048, the model's context)" },
{ "-n", "steps",         OPTION_INT64,  FIELD(steps),        "0",    0,     1e9,    NULL, "optimizer steps; 0 = max(200, 3 epochs)" },
{ "-l", "lr",            OPTION_FLOAT,  FIELD(lr),           "2e-5", 0,     10,     NULL, "peak learning rate; of adapters 2e-4 unless given" },
{ "",   "warmup",        OPTION_INT64,  FIELD(warmup),       "-1",   -1,    1e9,    NULL, "steps of linear warm-up; -1 = 3% of the steps" },
{ "",   "schedule-lr",   OPTION_CHOICE, FIELD(schedule_lr),  "cosine", 0,   0,      lr_shapes, "after the warm-up" },
{ "",   "lr-final",      OPTION_FLOAT,  FIELD(lr_final),     "0.1",  0,     1,      NULL, "last learning rate as a share of the peak" },
{ "",   "wd",            OPTION_FLOAT,  FIELD(wd),           "0.01", 0,     10,     NULL, "weight decay, not on norms" },
{ "",   "optimizer",     OPTION_CHOICE, FIELD(optimizer),    "adamw", 0,    0,      optimizer_names, "rotate and muon: of layers' matrices, AdamW for the rest" },
{ "",   "rotate-source", OPTION_CHOICE, FIELD(rotate_source), "2nd", 0,     0,      rotate_sources, "rotate: bases from the momentum, or from second moments" },
{ "",   "rotate-geometry", OPTION_CHOICE, FIELD(rotate_geometry), "bi", 0,  0,      rotate_geometries, "rotate: a matrix's smaller side, or both" },
{ "",   "rotate-every",  OPTION_INT,    FIELD(rotate_every), "10",   1,     1e6,    NULL, "rotate: steps between refreshes of a basis, on average over the stages" },
{ "",   "rotate-max-dim", OPTION_INT,   FIELD(rotate_max_dim), "4096", 1,   65536,  NULL, "rotate: longer sides are not rotated" },
{ "",   "refresh",       OPTION_CHOICE, FIELD(refresh),      "uniform", 0,  0,      refresh_names, "rotate: bases of all stages as often, or as their delay is long, or the reverse (study)" },
{ "",   "optimizer-dtype", OPTION_CHOICE, FIELD(optimizer_dtype), "fp32", 0, 0,    STORE_NAMES, "how the optimizer's moments are kept; smaller where the memory asks for it and none is given (docs/memory.md)" },
{ "",   "param-dtype",   OPTION_CHOICE, FIELD(param_dtype),  "fp32", 0,     0,      STORE_HALF_NAMES, "how matrices are kept; bf16: rounded at random, norms stay fp32" },
{ "",   "grad-dtype",    OPTION_CHOICE, FIELD(grad_dtype),   "fp32", 0,     0,      STORE_HALF_NAMES, "how matrices' gradients are kept, but the embedding's; sums are fp32" },
{ "",   "lora-rank",     OPTION_INT,    FIELD(lora_rank),    "0",    0,     ADAPTER_RANK_MAX, NULL, "train adapters of this rank beside the model's matrices, which stay as they are (LoRA); 0 = the model itself" },
{ "",   "lora-alpha",    OPTION_FLOAT,  FIELD(lora_alpha),   "0",    0,     1e6,    NULL, "adapters count alpha / rank; 0 = twice the rank" },
{ "",   "lora-targets",  OPTION_TEXT,   FIELD(lora_targets), "all",  0,     0,      NULL, "matrices of a layer that have adapters: some of q,k,v,o,gate,up,down, or all" },
{ "",   "lora",          OPTION_TEXT,   FIELD(lora),         "",     0,     0,      NULL, "adapters of -m, a folder as PEFT writes it or a run: to train on, or merged for all else" },
{ "",   "beta1",         OPTION_FLOAT,  FIELD(beta1),        "-1",   -1,    0.9999, NULL, "of the optimizer; below 0 = 0.9, 0.99 with nesterov" },
{ "",   "beta2",         OPTION_FLOAT,  FIELD(beta2),        "0.999", 0,    0.99999, NULL, "of the optimizer" },
{ "",   "adam-eps",      OPTION_FLOAT,  FIELD(adam_eps),     "1e-8", 0,     1,      NULL, "of the optimizer" },
{ "",   "clip",          OPTION_FLOAT,  FIELD(clip),         "1",    0,     1e9,    NULL, "gradient norm limit; 0 = none" },
{ "",   "val-every",     OPTION_INT,    FIELD(val_every),    "0",    0,     1e9,    NULL, "steps between validations; 0 = a tenth of the run" },
{ "",   "val-tokens",    OPTION_INT64,  FIELD(val_tokens),   "65536", 0,    1e15,   NULL, "held-out tokens looked at; 0 = all" },
{ "",   "sample-every",  OPTION_INT,    FIELD(sample_every), "0",    0,     1e9,    NULL, "steps between printed samples; 0 = none" },
{ "",   "save-every",    OPTION_INT,    FIELD(save_every),   "0",    0,     1e9,    NULL, "steps between checkpoints; 0 = a fifth of the run" },
{ "",   "keep",          OPTION_INT,    FIELD(keep),         "2",    0,     1e6,    NULL, "checkpoints kept; 0 = all" },
{ "",   "resume",        OPTION_FLAG,   FIELD(resume),       "0",    0,     1,      NULL, "go on with the run in -o, or the newest under runs/" },
{ "",   "stop-after",    OPTION_INT64,  FIELD(stop_after),   "0",    0,     1e9,    NULL, "save and stop after this step; 0 = at the end" },
{ "",   "seed",          OPTION_INT64,  FIELD(seed),         "1",    0,     9e15,   NULL, "of weights, data order and sampling" },
{ "",   "threads",       OPTION_INT,    FIELD(threads),      "0",    0,     1024,   NULL, "0 = one a core" },
{ "",   "gpus",          OPTION_TEXT,   FIELD(gpus),         "1",    0,     0,      NULL, "GPUs of this machine that share a cell's micro-batches: a number, or all" },
{ "",   "precision",     OPTION_CHOICE, FIELD(precision),    "auto", 0,     0,      "auto|bf16|fp32", "inputs of matrix products; auto = bf16 where the CPU has it" },
{ "",   "recompute",     OPTION_FLAG,   FIELD(recompute),    "0",    0,     1,      NULL, "recompute activations in backward: less memory, same bits" },
{ "-p", "mask-rate",     OPTION_FLOAT,  FIELD(mask_rate),    "0",    0,     0.999,  NULL, "share of a boundary's bytes that is not sent" },
{ "",   "codec",         OPTION_CHOICE, FIELD(codec),        "mask", 0,     0,      codec_names, "how boundary tensors travel" },
{ "",   "codec-coding",  OPTION_CHOICE, FIELD(codec_coding), "entropy", 0,  0,      "entropy|fixed", "klt: symbols of any length, or a fixed number of bits a component" },
{ "",   "coder",         OPTION_CHOICE, FIELD(coder),        "auto", 0,     0,      "auto|thread|inline", "klt's entropy coder: on a thread of its own, or between passes; auto: a thread on GPUs or beside fewer --threads than cores" },
{ "",   "klt-predict",   OPTION_INT,    FIELD(klt_predict),  "1",    0,     1,      NULL, "klt: 1 = states are predicted from their tokens' first embeddings" },
{ "",   "klt-forward",   OPTION_FLOAT,  FIELD(klt_forward),  "0.7", 0.05,  0.95,   NULL, "klt: share of the bytes that states get; gradients get the rest" },
{ "",   "klt-metric",    OPTION_FLOAT,  FIELD(klt_metric),   "1",    0,     1,      NULL, "klt: states are coded by what the loss feels: power of their gradients' covariance; 0 = all errors count alike" },
{ "-x", "replicas",      OPTION_INT,    FIELD(replicas),     "0",    0,     MESH_MAX_REPLICAS, NULL, "replicas, the anchor among them; 0 = 2 if -p or a codec is given, else 1" },
{ "-y", "stages",        OPTION_INT,    FIELD(stages),       "0",    0,     4096,   NULL, "pipeline stages; 0 = min(4, layers) if -p or a codec is given, else 1" },
{ "",   "schedule",      OPTION_CHOICE, FIELD(schedule),     "sync", 0,     0,      "sync|async", "sync: stages wait for a whole step; async: a step is one micro-batch, and stages run ahead with older weights" },
{ "",   "no-stash",      OPTION_FLAG,   FIELD(no_stash),     "0",    0,     1,      NULL, "--schedule async: backward with the newest weights, not with those of the forward" },
{ "",   "wire",          OPTION_CHOICE, FIELD(wire),         "bf16", 0,     0,      "bf16|fp32", "type of values between cells" },
{ "",   "mask-scale",    OPTION_CHOICE, FIELD(mask_scale),   "none", 0,     0,      "none|sqrt|inverse", "survivors of the mask times 1, sqrt(H/K) or H/K" },
{ "",   "anchor",        OPTION_INT,    FIELD(anchor),       "-1",   -1,    1,      NULL, "the last replica is the anchor: 1 or 0; -1 = if boundaries are compressed and -x is 2 or more" },
{ "",   "anchor-delay",  OPTION_TEXT,   FIELD(anchor_delay), "20",   0,     0,      NULL, "fast steps from snapshot to factors, or auto: when they are ready" },
{ "",   "anchor-batch",  OPTION_INT,    FIELD(anchor_batch), "0",    0,     1e6,    NULL, "sequences of an anchor pass; 0 = -b" },
{ "",   "anchor-rank",   OPTION_INT,    FIELD(anchor_rank),  "-1",   -1,    1e6,    NULL, "rank of the factors; -1 = an eighth of the model's width, 0 = full" },
{ "",   "anchor-beta",   OPTION_FLOAT,  FIELD(anchor_beta),  "0.9",  0,     0.9999, NULL, "momentum of the anchor's gradients" },
{ "",   "anchor-debias", OPTION_FLAG,   FIELD(anchor_debias), "0",   0,     1,      NULL, "divide the momentum by 1 - beta^passes" },
{ "",   "anchor-threads", OPTION_INT,   FIELD(anchor_threads), "0",  0,     1024,   NULL, "of the anchor; 0 = half of --threads" },
{ "",   "anchor-use",    OPTION_CHOICE, FIELD(anchor_use),   "filter", 0,   0,      anchor_uses, "the anchor's factors: of its gradients, as a filter; of the codec's bias, which is added back; tables of klt come in any case" },
{ "",   "alpha",         OPTION_FLOAT,  FIELD(alpha),        "0.3",  0,     1,      NULL, "share of the gradient that passes beside the filter" },
{ "",   "tau",           OPTION_FLOAT,  FIELD(tau),          "1e-3", 0,     1e9,    NULL, "singular value at which the filter lets half pass" },
{ "",   "tau-relative",  OPTION_FLAG,   FIELD(tau_relative), "0",    0,     1,      NULL, "--tau counts in the largest singular value" },
{ "",   "dp",            OPTION_CHOICE, FIELD(dp),           "diloco", 0,   0,      "none|diloco|dense", "how replicas meet: never, in outer steps, every gradient" },
{ "",   "local-steps",   OPTION_INT,    FIELD(local_steps),  "10",   1,     1e6,    NULL, "steps between a fragment's outer steps" },
{ "",   "outer-lr",      OPTION_FLOAT,  FIELD(outer_lr),     "0.7",  0,     10,     NULL, "of the outer steps" },
{ "",   "outer-momentum", OPTION_FLOAT, FIELD(outer_momentum), "0.9", 0,    0.9999, NULL, "Nesterov's, of the outer steps" },
{ "",   "fragments",     OPTION_INT,    FIELD(fragments),    "0",    0,     4096,   NULL, "parts of a stage that meet at different steps; 0 = min(4, --local-steps)" },
{ "",   "overlap",       OPTION_INT,    FIELD(overlap),      "-1",   -1,    1e6,    NULL, "steps a fragment's average takes in the background; -1 = 1 where it fits" },
{ "",   "mix",           OPTION_FLOAT,  FIELD(mix),          "0.5",  0,     1,      NULL, "share of the local parameters kept at a merge" },
{ "",   "powersgd-rank", OPTION_INT,    FIELD(powersgd_rank), "0",   0,     1e6,    NULL, "rank of outer averages; 0 = the largest that gives 64x, of adapters half of theirs" },
{ "",   "link-mbps",     OPTION_FLOAT,  FIELD(link_mbps),    "0",    0,     1e9,    NULL, "simulated uplink of a cell in Mbit/s; 0 = infinitely fast" },
{ "",   "link-ms",       OPTION_FLOAT,  FIELD(link_ms),      "0",    0,     1e6,    NULL, "simulated latency of a link" },
{ "",   "device-tflops", OPTION_FLOAT,  FIELD(device_tflops), "0",   0,     1e9,    NULL, "simulated speed of a cell; 0 = as fast as it computes here" },
{ "",   "probe",         OPTION_INT,    FIELD(probe),        "0",    0,     1e9,    NULL, "steps between comparisons with the unmasked gradient; 0 = none" },
{ "",   "measure-alignment", OPTION_INT, FIELD(measure_alignment), "0", 0,  1e9,    NULL, "steps between estimates of the sum of the Hessian's sizes, in raw and rotated bases, and of how updates swing along its leading directions; 0 = none" },
{ "",   "host",          OPTION_TEXT,   FIELD(host),         "",     0,     0,      NULL, "coordinate a mesh of several processes from here: tcp://0.0.0.0:29500; prints what the others join with" },
{ "",   "join",          OPTION_TEXT,   FIELD(join),         "",     0,     0,      NULL, "join a run: the token that its coordinator prints, @FILE or env:NAME with it" },
{ "",   "listen",        OPTION_TEXT,   FIELD(listen),       "tcp://0.0.0.0:*", 0, 0,  NULL, "--join: where other cells can dial this one; none: they cannot, all goes through the coordinator" },
{ "",   "no-cell",       OPTION_FLAG,   FIELD(no_cell),      "0",    0,     1,      NULL, "--host: this process has no cell of the model" },
{ "",   "min-replicas",  OPTION_INT,    FIELD(min_replicas), "0",    0,     MESH_MAX_REPLICAS, NULL, "--host: replicas that training begins with, the others may come later; 0 = all" },
{ "",   "peer-timeout",  OPTION_FLOAT,  FIELD(peer_timeout), "10",   3,     3600,   NULL, "--host: seconds without a word after which a process is given up; 30 times as many if only its main thread is silent" },
{ "",   "anchor-timeout", OPTION_FLOAT, FIELD(anchor_timeout), "600", 0,    1e9,    NULL, "--host: seconds without an anchor after which its last factors are not used any more" },
{ "",   "status-port",   OPTION_INT,    FIELD(status_port),  "0",    0,     65535,  NULL, "--host: a page that shows the run, and /metrics for Prometheus, on this port; 0 = none" },
{ "",   "status-address", OPTION_TEXT,  FIELD(status_address), "127.0.0.1", 0, 0,   NULL, "--status-port: where; all who reach it can look" },
{ "",   "eval-masked",   OPTION_FLAG,   FIELD(eval_masked),  "0",    0,     1,      NULL, "--eval masks the boundaries as training does (study)" },
{ "",   "eval",          OPTION_FLAG,   FIELD(eval),         "0",    0,     1,      NULL, "print held-out loss and bits per byte, then exit" },
{ "",   "eval-choices",  OPTION_TEXT,   FIELD(eval_choices), "",     0,     0,      NULL, "answer the multiple-choice questions of this .jsonl by likelihood, then exit; -o FILE: each question's result" },
{ "",   "eval-generate", OPTION_TEXT,   FIELD(eval_generate), "",    0,     0,      NULL, "answer the prompts of this .jsonl, by default with the likeliest tokens, into -o FILE, then exit" },
{ "",   "stop",          OPTION_LIST,   FIELD(stop),         "",     0,     0,      NULL, "--eval-generate: texts before which an answer ends" },
{ "",   "prune",         OPTION_FLOAT,  FIELD(prune),        "0",    0,     1,      NULL, "share of each layer matrix's weights, the smallest ones, set to zero before evaluation, generation or export" },
{ "",   "generate",      OPTION_TEXT,   FIELD(generate),     "",     0,     0,      NULL, "continue this text, then exit" },
{ "",   "max-tokens",    OPTION_INT,    FIELD(max_tokens),   "200",  1,     1e6,    NULL, "length of what is generated" },
{ "",   "temperature",   OPTION_FLOAT,  FIELD(temperature),  "0.8",  0,     100,    NULL, "of sampling; 0 = the likeliest token" },
{ "",   "top-p",         OPTION_FLOAT,  FIELD(top_p),        "0.95", 0.01,  1,      NULL, "sample from the likeliest tokens of this total probability" },
{ "",   "export",        OPTION_TEXT,   FIELD(export_to),    "",     0,     0,      NULL, "write the model: NAME.bin, NAME.gguf, or a folder for transformers; then exit" },
{ "",   "export-dtype",  OPTION_CHOICE, FIELD(export_dtype), "bf16", 0,     0,      "bf16|fp32|f16", "of exported weights" },
{ "",   "check-weights", OPTION_FLAG,   FIELD(check_weights), "0",   0,     1,      NULL, "look for NaN and infinity in a loaded model" },
{ "",   "dry-run",       OPTION_FLAG,   FIELD(dry_run),      "0",    0,     1,      NULL, "print parameters, memory, tokens and steps, then exit" },
{ "-h", "help",          OPTION_FLAG,   FIELD(help),         "0",    0,     1,      NULL, "print this" },
};
// clang-format on
enum { OPTION_COUNT = sizeof option_table / sizeof *option_table };

typedef enum { ANCHOR_USE_FILTER, ANCHOR_USE_BIAS, ANCHOR_USE_BOTH, ANCHOR_USE_NONE } AnchorUse;

enum { PRECISION_OPTION_AUTO, PRECISION_OPTION_BF16, PRECISION_OPTION_FP32 };
enum { SCHEDULE_SYNC, SCHEDULE_ASYNC };

// ---------------------------------------------------------------------------------------------------------------------
// Model

// One tensor of the stage. Offsets count floats from the start of an arena. Parameters, gradients and moments may be
// kept as something smaller (llmc/store_format.h): stage_values says where and how.
typedef struct {
    char name[80]; // the Hugging Face name
    int64_t shape[2];
    int n_dims;
    int64_t offset, n;
    int index;       // its number in a table of the whole model, whatever stage it is on
    int block;       // a matrix of a layer: the spectral filter applies, rotation and Muon do
    int fragment;    // which part of the stage it is synchronised with
    int decay;       // weight decay applies
    int accumulated; // its gradient is always added to, so it is zeroed at the start of a step
    float init_std;  // 0: all of them `fill`
    float fill;
    float init_bound;          // above 0: uniform up to this instead
    int joined;                // follows the one before without a gap
    int left_out;              // has no gradient, and no place in arenas but the parameters'
    int frozen;                // is in no arena: adapters are trained beside it
    float *data;               // of a frozen one: where it is
    int64_t place, grad_place; // bytes to its parameter and its gradient
    int64_t first_block;       // blocks of STORE_BLOCK values of the tensors before it
} Tensor;

// Pointers into the parameters or the gradients. q, k, v lie one after the other and are multiplied as one matrix, gate
// and up too. NULL: the family has none. Of matrices that are kept as bf16 only stage_weight knows what a pointer is
// to.
typedef struct {
    float *attn_norm;            // (C)       of what attention takes, or gives
    float *qkv;                  // (QKV, C)
    float *qkv_bias;             // (QKV)
    float *q_norm;               // (HD) or (A)
    float *k_norm;               // (HD) or (NKV*HD)
    float *o;                    // (C, A)
    float *ffn_norm;             // (C)       of what the MLP takes, or gives
    float *gate_up;              // (2F, C)
    float *down;                 // (C, F)
    float *lora_a[LORA_MODULES]; // (R, inputs) of each module that has an adapter; those of a group follow each other
    float *lora_b[LORA_MODULES]; // (outputs, R)
} LayerTensors;

typedef struct {
    float *embed; // (V, C)
    LayerTensors *layers;
    float *norm; // (C)
    float *head; // (V, C), the embedding itself when tied
} ModelTensors;

// What the forward pass leaves for the backward one, per layer and micro-batch in flight. With --recompute only x is
// kept for each and the rest is one set that all use in turn.
typedef struct {
    floatX *x;                 // (N, C)   input of the layer
    floatX *norm1;             // (N, C)   post-norm: what attention gives
    floatX *qkv;               // (N, QKV) RoPE applied to q and k
    floatX *qk;                // (N, A + NKV*HD) q and k before their norms, or NULL
    floatX *att;               // (N, A)
    floatX *mid;               // (N, C)   after the attention's residual
    floatX *norm2;             // (N, C)   post-norm: what the MLP gives
    floatX *gate_up;           // (N, 2F)
    floatX *hidden;            // (N, F)
    floatX *lora[LORA_GROUPS]; // (N, n*R) what adapters' A give
    float *lse;                // (B, NH, T)
    float *rstd1;              // (N)
    float *rstd2;              // (N)
    float *rstd_qk;            // (N, parts of q), then (N, parts of k): config_qk_rows
} LayerActs;

// Gradients on their way down, used by one layer after the other.
typedef struct {
    floatX *dx;      // (N, C)  of the residual stream
    floatX *dnorm;   // (N, C)
    floatX *dhidden; // (N, max(F, A))
    floatX *dwide;   // (N, max(2F, QKV))
    floatX *dlora;   // (N, 3R) of what adapters' A give
} Grads;

// The memories of a stage that have its table's layout.
typedef enum {
    ARENA_PARAMS,
    ARENA_GRADS,
    ARENA_M,
    ARENA_V,
    ARENA_DELTA,
    ARENA_GLOBAL,
    ARENA_OUTER,
    ARENA_ERROR,
    ARENA_PENDING
} Arena;

// A run of layers with all it owns. The stages of one model are a list; a model of one stage is a list of one.
typedef struct Stage {
    struct Stage *next;
    Config config;
    Stream *stream;            // who moves its memory, from stage_alloc on
    int first_layer, n_layers; // of the model's
    int has_embed, has_head;
    int64_t A, QKV;
    // the table and its arenas
    Tensor *tensors;
    int n_tensors, per_layer; // per_layer: of one layer
    int64_t arena_floats, n_params;
    int64_t param_bytes, grad_bytes, n_blocks;
    // with adapters, which are the table then: the model's own tensors. No arena has them, and nothing changes them
    Tensor *frozen;
    int n_frozen, borrows_frozen; // borrows_frozen: another stage of this process has their memory
    int64_t frozen_params, frozen_bytes;
    Store frozen_store; // how their matrices are kept
    float *frozen_memory;
    Store param_store, grad_store, moment_store; // how matrices, their gradients and the moments are kept
    uint64_t seed;                               // of what is rounded at random
    float *params, *grads, *m, *v;               // grads, m, v are NULL unless training; floats if the store says so
    float *used;                                 // the weights at work: params, or an older version of them
    uint16_t *rounded;                           // bf16 copy of those for the products, or NULL
    // of an asynchronous pipeline: by how many updates forwards are behind, and the versions before params (versions.h)
    int delay;
    float *versions; // (delay, param_bytes); NULL: delay 0
    // what else the optimizer keeps
    Optimizer optimizer;
    float *delta;             // how weights have moved in an update, averaged; NULL but for PipeMare
    float *rotation;          // bases of the block matrices and their second moments, one after the other; or NULL
    int has_basis;            // 1 once the bases are there
    NesterovProduct nesterov; // of the last step
    int position, n_stages;   // in the pipeline
    // of a replica that meets others in outer steps, else NULL: merged parameters, outer momentum, what compression has
    // left out, the averaged pseudo-gradient that waits to be merged
    float *global, *outer, *error, *pending;
    ModelTensors p, g; // of `used` and grads
    // activations for at most max_B sequences of max_T tokens, of `slots` micro-batches in flight
    int max_B, max_T, slots, recompute, training, n_moments;
    int meets;     // keeps the state of outer steps
    int borrows;   // with --recompute: what is needed only while it computes is the stream's, for all cells in turn
    int unrounded; // keeps no bf16 copy of its weights: other cells need the memory
    void *acts_arena;
    int64_t acts_bytes, turn_bytes; // of its own; borrowed
    LayerActs *acts;                // (slots, n_layers)
    floatX *last;                   // (N, C) output of the last layer
    floatX *normed;                 // (N, C)
    float *rstd;                    // (N)
    floatX *logits;                 // (chunk, V)
    int logits_rows;
    Grads d;
    float *losses;      // (N)
    double *loss_sum;   // (1) of the targets since it was taken, in nats
    uint32_t *tokens;   // (slots, N) inputs
    int32_t *targets;   // (N) -1 = not counted
    int32_t *positions; // (N) of each row in its document
    int32_t *starts;    // (N) the row of its sequence at which a document begins
    int packed;         // the micro-batch at work has several documents in a sequence: starts count
    float *rope_cos, *rope_sin;
    float *staging; // (STAGING) the host's side of copies to and from the arenas
} Stage;

// Floats moved at once between files and tensor memory; a multiple of STORE_BLOCK.
#ifdef TESTING
#define STAGING ((int64_t)768) // small tensors take several pieces too
#else
#define STAGING ((int64_t)1 << 20)
#endif

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int64_t round_up(int64_t n, int64_t unit) {
    return (n + unit - 1) / unit * unit;
}

// Appends a tensor to the table: a matrix, or a vector of ones if cols is 0. index: its place in the whole model's
// table; joined: it follows the one before without a gap.
static Tensor *table_add(Stage *stage, const char *name, int layer, int index, int64_t rows, int64_t cols,
                         float init_std, int joined) {
    Tensor *tensor = &stage->tensors[stage->n_tensors++];
    memset(tensor, 0, sizeof *tensor);
    if (layer >= 0)
        snprintf(tensor->name, sizeof tensor->name, "model.layers.%d.%s", layer, name);
    else
        snprintf(tensor->name, sizeof tensor->name, "%s", name);
    tensor->shape[0] = rows, tensor->shape[1] = cols;
    tensor->n_dims = cols > 0 ? 2 : 1;
    tensor->n = rows * (cols > 0 ? cols : 1);
    tensor->offset = joined ? stage->arena_floats : round_up(stage->arena_floats, DEVICE_ALIGN / 4);
    tensor->index = index, tensor->block = layer >= 0 && cols > 0, tensor->joined = joined;
    tensor->decay = cols > 0, tensor->accumulated = cols == 0, tensor->init_std = init_std, tensor->fill = 1.0f;
    stage->arena_floats = tensor->offset + tensor->n;
    stage->n_params += tensor->n;
    return tensor;
}

enum { LAYER_TENSORS_MAX = 14 }; // all that any family has

// How many tensors a layer has.
static int layer_tensors(const Config *config) {
    const FamilyTraits *family = config_traits(config);
    return 7 + (family->plain_norm ? 0 : 2) + (family->qkv_bias ? 3 : 0) + (family->qk_norm != QK_NORM_NONE ? 2 : 0);
}

// Appends layer l's tensors, which model_point finds again in this order.
static void table_add_layer(Stage *stage, int l) {
    const Config *config = &stage->config;
    const FamilyTraits *family = config_traits(config);
    int C = config->channels, kv = (int)config_kv_dim(config), at = 1 + stage->per_layer * l;
    float std = config->init_std, residual_std = std / sqrtf(2.0f * (float)config->n_layers);
    int norms = !family->plain_norm, post = family->post_norm;
    const char *attn_norm = post ? "post_attention_layernorm.weight" : "input_layernorm.weight";
    const char *ffn_norm = post ? "post_feedforward_layernorm.weight" : "post_attention_layernorm.weight";
    if (norms) table_add(stage, attn_norm, l, at++, C, 0, 0, 0);
    table_add(stage, "self_attn.q_proj.weight", l, at++, stage->A, C, std, 0);
    table_add(stage, "self_attn.k_proj.weight", l, at++, kv, C, std, 1);
    table_add(stage, "self_attn.v_proj.weight", l, at++, kv, C, std, 1);
    if (family->qkv_bias) {
        table_add(stage, "self_attn.q_proj.bias", l, at++, stage->A, 0, 0, 0)->fill = 0.0f;
        table_add(stage, "self_attn.k_proj.bias", l, at++, kv, 0, 0, 1)->fill = 0.0f;
        table_add(stage, "self_attn.v_proj.bias", l, at++, kv, 0, 0, 1)->fill = 0.0f;
    }
    if (family->qk_norm != QK_NORM_NONE) {
        table_add(stage, "self_attn.q_norm.weight", l, at++, config_q_norm(config), 0, 0, 0);
        table_add(stage, "self_attn.k_norm.weight", l, at++, config_k_norm(config), 0, 0, 0);
    }
    table_add(stage, "self_attn.o_proj.weight", l, at++, C, stage->A, residual_std, 0);
    if (norms) table_add(stage, ffn_norm, l, at++, C, 0, 0, 0);
    table_add(stage, "mlp.gate_proj.weight", l, at++, config->ffn, C, std, 0);
    table_add(stage, "mlp.up_proj.weight", l, at++, config->ffn, C, std, 1);
    table_add(stage, "mlp.down_proj.weight", l, at++, C, config->ffn, residual_std, 0);
}

// Appends the adapters of layer l: of each group of modules the A one below the other, then the B.
static void table_add_adapters(Stage *stage, int l) {
    const Config *config = &stage->config;
    const Lora *lora = &config->lora;
    int at = 1 + stage->per_layer * l, R = lora->rank, M, K;
    for (int group = 0; group < LORA_GROUPS; group++) {
        for (int is_b = 0; is_b < 2; is_b++) {
            int joined = 0;
            for (int m = lora_group_first[group]; m < lora_group_first[group + 1]; m++) {
                if (!lora_has(lora, m)) continue;
                lora_module_shape(m, config->channels, stage->A, config_kv_dim(config), config->ffn, &M, &K);
                Tensor *tensor = table_add(stage, "", l, at++, is_b ? M : R, is_b ? R : K, 0, joined && !is_b);
                adapter_name(tensor->name, sizeof tensor->name, l, m, is_b);
                tensor->fill = 0.0f, tensor->init_bound = is_b ? 0.0f : 1.0f / sqrtf((float)K);
                joined = 1;
            }
        }
    }
}

// The table becomes that of adapters, what was in it is frozen.
static int table_freeze(Stage *stage) {
    stage->frozen = stage->tensors, stage->n_frozen = stage->n_tensors, stage->frozen_params = stage->n_params;
    for (int i = 0; i < stage->n_frozen; i++) stage->frozen[i].frozen = 1;
    stage->n_tensors = 0, stage->n_params = stage->arena_floats = 0;
    stage->per_layer = 2 * lora_layer_adapters(&stage->config.lora);
    stage->tensors = (Tensor *)calloc((size_t)(stage->per_layer * stage->n_layers), sizeof(Tensor));
    if (stage->tensors == NULL) return error_set("out of memory for the table of adapters");
    for (int l = 0; l < stage->n_layers; l++) table_add_adapters(stage, stage->first_layer + l);
    return 0;
}

// Fills the table of n_layers layers from first_layer on, the embedding with the first layer, norm and head with the
// last; with adapters those of the layers. No memory but the tables' own.
static int stage_table(Stage *stage, const Config *config, int first_layer, int n_layers) {
    int C = config->channels, L = config->n_layers, at = 1 + layer_tensors(config) * L;
    float std = config->init_std;
    memset(stage, 0, sizeof *stage);
    stage->config = *config;
    stage->first_layer = first_layer, stage->n_layers = n_layers, stage->slots = 1, stage->n_moments = 2;
    stage->has_embed = first_layer == 0, stage->has_head = first_layer + n_layers == L;
    stage->A = config_q_dim(config), stage->QKV = stage->A + 2 * config_kv_dim(config);
    stage->per_layer = layer_tensors(config);
    stage->tensors = (Tensor *)calloc((size_t)(stage->per_layer * n_layers + 3), sizeof(Tensor));
    if (stage->tensors == NULL) return error_set("out of memory for the table of tensors");
    if (stage->has_embed) {
        table_add(stage, "model.embed_tokens.weight", -1, 0, config->vocab, C, std, 0);
        stage->tensors[0].accumulated = !config->tied; // tied: the head's product writes it first
    }
    for (int l = first_layer; l < first_layer + n_layers; l++) table_add_layer(stage, l);
    if (stage->has_head && !config_traits(config)->plain_norm)
        table_add(stage, "model.norm.weight", -1, at++, C, 0, 0, 0);
    if (stage->has_head && !config->tied) table_add(stage, "lm_head.weight", -1, at, config->vocab, C, std, 0);
    return config->lora.rank > 0 ? table_freeze(stage) : 0;
}

// The layer of the model that a tensor of one belongs to.
static int tensor_layer(const Stage *stage, const Tensor *tensor) {
    return (tensor->index - 1) / stage->per_layer;
}

// All that the stage has: tensors of the table, then frozen ones.
static int stage_n_all(const Stage *stage) {
    return stage->n_tensors + stage->n_frozen;
}

static Tensor *stage_any(const Stage *stage, int i) {
    return i < stage->n_tensors ? &stage->tensors[i] : &stage->frozen[i - stage->n_tensors];
}

// The first stage's embedding.
static const Tensor *stage_embedding(const Stage *stage) {
    return stage->n_frozen > 0 ? &stage->frozen[0] : &stage->tensors[0];
}

// How many tensors of the table lie before those of the layers.
static int stage_lead(const Stage *stage) {
    return stage->has_embed && stage->n_frozen == 0;
}

static Store param_store(const Stage *stage, const Tensor *t) {
    return t->n_dims != 2 ? STORE_FP32 : t->frozen ? stage->frozen_store : stage->param_store;
}

// Products write all of a gradient that is not fp32: the embedding's is added to row by row.
static Store grad_store(const Stage *stage, const Tensor *t) {
    return t->n_dims == 2 && t->index != 0 ? stage->grad_store : STORE_FP32;
}

// Says where tensors lie, once it is known how they are kept and which are left out.
static void stage_layout(Stage *stage) {
    stage->arena_floats = stage->param_bytes = stage->grad_bytes = stage->n_blocks = stage->frozen_bytes = 0;
    for (int i = 0; i < stage->n_frozen; i++) {
        Tensor *t = &stage->frozen[i];
        t->place = round_up(stage->frozen_bytes, t->joined ? 1 : DEVICE_ALIGN);
        stage->frozen_bytes = t->place + store_bytes(param_store(stage, t), t->n);
    }
    stage->frozen_bytes = round_up(stage->frozen_bytes, 4);
    for (int i = 0; i < stage->n_tensors; i++) {
        Tensor *t = &stage->tensors[i];
        int64_t unit = t->joined ? 1 : DEVICE_ALIGN;
        t->place = round_up(stage->param_bytes, unit);
        stage->param_bytes = t->place + store_bytes(param_store(stage, t), t->n);
        if (t->left_out) continue;
        t->offset = round_up(stage->arena_floats, t->joined ? 1 : DEVICE_ALIGN / 4);
        t->grad_place = round_up(stage->grad_bytes, unit);
        t->first_block = stage->n_blocks;
        stage->arena_floats = t->offset + t->n;
        stage->grad_bytes = t->grad_place + store_bytes(grad_store(stage, t), t->n);
        stage->n_blocks += (t->n + STORE_BLOCK - 1) / STORE_BLOCK;
    }
}

// Bytes of a moment of all tensors: of 8-bit ones the codes, then the scales.
static int64_t moment_codes(const Stage *stage) {
    return round_up(stage->arena_floats, DEVICE_ALIGN);
}

static int64_t moment_bytes(const Stage *stage) {
    if (stage->moment_store == STORE_INT8) return moment_codes(stage) + 4 * stage->n_blocks;
    return store_bytes(stage->moment_store, stage->arena_floats);
}

// Where a tensor lies in the memory of the parameters, or of the gradients; NULL: it has none there. A frozen one is
// where it is.
static float *tensor_in(float *memory, const Tensor *t, int is_grad) {
    if (is_grad && (t->left_out || t->frozen)) return NULL;
    if (t->frozen) return t->data;
    return (float *)(void *)((char *)memory + (is_grad ? t->grad_place : t->place));
}

// Points to a layer's adapters, in the order of table_add_adapters. Returns the tensor behind them.
static const Tensor *adapters_point(LayerTensors *layer, const Lora *lora, const Tensor *tensor, float *arena,
                                    int is_grad) {
    for (int group = 0; group < LORA_GROUPS; group++)
        for (int is_b = 0; is_b < 2; is_b++)
            for (int m = lora_group_first[group]; m < lora_group_first[group + 1]; m++)
                if (lora_has(lora, m)) (is_b ? layer->lora_b : layer->lora_a)[m] = tensor_in(arena, tensor++, is_grad);
    return tensor;
}

// Points a ModelTensors that has its layers into a memory of the parameters' layout, or of the gradients'.
static void model_point(ModelTensors *view, const Stage *stage, float *arena) {
    const FamilyTraits *family = config_traits(&stage->config);
    int L = stage->n_layers, norms = !family->plain_norm, is_grad = view == &stage->g;
    const Tensor *tensor = stage->n_frozen > 0 ? stage->frozen : stage->tensors, *adapter = stage->tensors;
    if (stage->has_embed) view->embed = tensor_in(arena, tensor++, is_grad);
    for (int l = 0; l < L; l++) {
        LayerTensors *layer = &view->layers[l];
        if (norms) layer->attn_norm = tensor_in(arena, tensor++, is_grad);
        layer->qkv = tensor_in(arena, tensor, is_grad), tensor += 3;
        if (family->qkv_bias) layer->qkv_bias = tensor_in(arena, tensor, is_grad), tensor += 3;
        if (family->qk_norm != QK_NORM_NONE) {
            layer->q_norm = tensor_in(arena, tensor++, is_grad);
            layer->k_norm = tensor_in(arena, tensor++, is_grad);
        }
        layer->o = tensor_in(arena, tensor++, is_grad);
        if (norms) layer->ffn_norm = tensor_in(arena, tensor++, is_grad);
        layer->gate_up = tensor_in(arena, tensor, is_grad), tensor += 2;
        layer->down = tensor_in(arena, tensor++, is_grad);
        adapter = adapters_point(layer, &stage->config.lora, adapter, arena, is_grad);
    }
    if (!stage->has_head) return;
    if (norms) view->norm = tensor_in(arena, tensor++, is_grad);
    view->head = stage->config.tied ? view->embed : tensor_in(arena, tensor, is_grad);
}

// The same for a new one.
static int model_view(ModelTensors *view, const Stage *stage, float *arena) {
    view->layers = (LayerTensors *)calloc((size_t)stage->n_layers, sizeof(LayerTensors));
    if (view->layers == NULL) return error_set("out of memory for %d layers", stage->n_layers);
    model_point(view, stage, arena);
    return 0;
}

static void stage_free(Stage *stage) {
    device_free(stage->params);
    device_free(stage->frozen_memory);
    device_free(stage->rounded);
    device_free(stage->versions);
    device_free(stage->grads);
    device_free(stage->m);
    device_free(stage->v);
    device_free(stage->delta);
    device_free(stage->rotation);
    device_free(stage->global);
    device_free(stage->outer);
    device_free(stage->error);
    device_free(stage->pending);
    device_free(stage->acts_arena);
    free(stage->p.layers);
    free(stage->g.layers);
    free(stage->acts);
    device_host_free(stage->staging);
    free(stage->tensors);
    free(stage->frozen);
    memset(stage, 0, sizeof *stage);
}

#ifdef TESTING
#define LOGITS_MAX 4000 // small shapes have several chunks too
#else
#define LOGITS_MAX DEVICE_LOGITS
#endif

// Rows of logits that exist at once: whole tiles of a matrix product where there are some.
static int logits_chunk(const Config *config, int64_t N) {
    int64_t rows = LOGITS_MAX / config->vocab, tile = 256;
    if (rows < 1) rows = 1;
    if (rows > tile) rows -= rows % tile;
    return (int)(rows < N ? rows : N);
}

// Hands out pieces of an arena, or only counts when base is NULL.
typedef struct {
    char *base;
    int64_t used;
    int is_shared; // others lay it out otherwise: gaps are no forbidden ground
} Carver;

static void *carve(Carver *carver, int64_t n, size_t size) {
    char *piece = carver->base != NULL ? carver->base + carver->used : NULL;
    int64_t n_bytes = n * (int64_t)size, taken = round_up(n_bytes, DEVICE_ALIGN) + DEVICE_GAP;
    if (piece != NULL && !carver->is_shared) device_forbid(piece + n_bytes, (size_t)(taken - n_bytes));
    carver->used += taken;
    return piece;
}

static floatX *carve_x(Carver *carver, int64_t n) {
    return (floatX *)carve(carver, n, sizeof(floatX));
}

static float *carve_f(Carver *carver, int64_t n) {
    return (float *)carve(carver, n, sizeof(float));
}

// What the A of n modules give; NULL: there are none.
static floatX *carve_adapters(Carver *carver, const Lora *lora, int n, int64_t N) {
    return n > 0 ? carve_x(carver, N * n * lora->rank) : NULL;
}

static void carve_layer(Carver *carver, LayerActs *acts, const Stage *stage, int64_t N) {
    const Config *config = &stage->config;
    int64_t C = config->channels, F = config->ffn;
    acts->norm1 = carve_x(carver, N * C);
    acts->qkv = carve_x(carver, N * stage->QKV);
    acts->att = carve_x(carver, N * stage->A);
    acts->mid = carve_x(carver, N * C);
    acts->norm2 = carve_x(carver, N * C);
    acts->gate_up = carve_x(carver, N * 2 * F);
    acts->hidden = carve_x(carver, N * F);
    acts->lse = carve_f(carver, N * config->heads);
    acts->rstd1 = carve_f(carver, N);
    acts->rstd2 = carve_f(carver, N);
    for (int group = 0; group < LORA_GROUPS; group++)
        acts->lora[group] = carve_adapters(carver, &config->lora, lora_group_size(&config->lora, group), N);
    if (config_traits(config)->qk_norm == QK_NORM_NONE) return;
    acts->qk = carve_x(carver, N * (stage->A + config_kv_dim(config)));
    acts->rstd_qk = carve_f(carver, N * config_qk_rows(config));
}

// The gradients that exist only while a layer is computed.
static void carve_layer_grads(Carver *carver, Grads *d, const Stage *stage, int64_t N) {
    int64_t F = stage->config.ffn;
    d->dhidden = carve_x(carver, N * larger(F, stage->A));
    d->dwide = carve_x(carver, N * larger(2 * F, stage->QKV));
    d->dlora = carve_adapters(carver, &stage->config.lora, stage->n_frozen > 0 ? 3 : 0, N);
}

// Lays out (base != NULL) or counts what a stage that borrows needs while it computes; returns bytes.
static int64_t stage_carve_turn(Stage *stage, void *base) {
    int64_t N = (int64_t)stage->max_B * stage->max_T;
    Carver carver = {(char *)base, 0, 1};
    LayerActs shared;
    carve_layer(&carver, &shared, stage, N);
    for (int i = 0; i < stage->slots * stage->n_layers; i++) {
        shared.x = stage->acts[i].x;
        stage->acts[i] = shared;
    }
    carve_layer_grads(&carver, &stage->d, stage, N);
    return carver.used;
}

// Before a stage that borrows computes: the stream's memory is its own. -1: there is none, the stream fails.
static int stage_borrow(Stage *stage, Stream *stream) {
    if (!stage->borrows) return 0;
    void *memory = scratch_get(&stream->scratch[SCRATCH_TURN], (size_t)stage_carve_turn(stage, NULL));
    if (memory == NULL) return stream->failed = 1, -1;
    stage_carve_turn(stage, memory);
    return 0;
}

// Lays out (base != NULL) or counts the activations; returns bytes. One set of a layer's inner activations is enough
// for inference and for --recompute.
static int64_t stage_carve(Stage *stage, void *base) {
    const Config *config = &stage->config;
    int64_t N = (int64_t)stage->max_B * stage->max_T, C = config->channels;
    int shared = stage->recompute || !stage->training;
    Carver carver = {(char *)base, 0, 0};
    for (int i = 0; i < stage->slots * stage->n_layers; i++) {
        LayerActs *acts = &stage->acts[i];
        if (!stage->borrows && (i == 0 || !shared))
            carve_layer(&carver, acts, stage, N);
        else if (!stage->borrows)
            *acts = stage->acts[0];
        acts->x = i < 2 || stage->training ? carve_x(&carver, N * C) : stage->acts[i - 2].x; // inference: two in turn
    }
    stage->last = carve_x(&carver, N * C);
    if (stage->has_head) {
        stage->normed = carve_x(&carver, N * C);
        stage->rstd = carve_f(&carver, N);
        stage->logits_rows = logits_chunk(config, N);
        stage->logits = carve_x(&carver, (int64_t)stage->logits_rows * config->vocab);
        stage->losses = carve_f(&carver, N);
        stage->loss_sum = (double *)carve(&carver, 1, sizeof(double));
        stage->targets = (int32_t *)carve(&carver, N, sizeof(int32_t));
    }
    stage->rope_cos = carve_f(&carver, (int64_t)stage->max_T * config->head_dim / 2);
    stage->rope_sin = carve_f(&carver, (int64_t)stage->max_T * config->head_dim / 2);
    if (stage->has_embed) stage->tokens = (uint32_t *)carve(&carver, stage->slots * N, sizeof(uint32_t));
    stage->positions = (int32_t *)carve(&carver, N, sizeof(int32_t));
    stage->starts = (int32_t *)carve(&carver, N, sizeof(int32_t));
    if (stage->training) {
        stage->d.dx = carve_x(&carver, N * C);
        stage->d.dnorm = carve_x(&carver, N * C);
    }
    if (stage->training && !stage->borrows) carve_layer_grads(&carver, &stage->d, stage, N);
    return carver.used;
}

// Floats of the bases of the table's first n_tensors tensors.
static int64_t rotation_floats(const Stage *stage, int n_tensors) {
    int64_t floats = 0;
    if (stage->optimizer.kind != OPTIMIZER_ROTATE) return 0;
    for (int i = 0; i < n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        if (!t->block) continue;
        RotateSides sides = rotate_sides(&stage->optimizer, t->shape[0], t->shape[1]);
        floats += rotate_state_floats(sides, stage->optimizer.source, t->shape[0], t->shape[1]);
    }
    return floats;
}

// Values whose former state PipeMare's step keeps at once.
#ifdef TESTING
#define PIPEMARE_PIECE ((int64_t)500) // small tensors take several pieces too
#else
#define PIPEMARE_PIECE ((int64_t)4 << 20)
#endif

// How many tensors from a block matrix on are rotated together: those of its shape that follow at equal distances, as
// far as that gains (ROTATE_GROUP). They are of one layer, so that what is computed together does not depend on where a
// model is cut into stages.
static int rotation_group(const Stage *stage, int first) {
    const Tensor *t = &stage->tensors[first];
    int count = 1;
    while (first + count < stage->n_tensors && (count + 1) * t->n <= ROTATE_GROUP) {
        const Tensor *next = &t[count];
        if (!next->block || next->shape[0] != t->shape[0] || next->shape[1] != t->shape[1]) break;
        if (tensor_layer(stage, next) != tensor_layer(stage, t)) break;
        if (next->offset - t->offset != count * (t[1].offset - t->offset)) break;
        count++;
    }
    return count;
}

// Floats that the optimizer's step of a tensor, or from it on, passes through.
static int64_t optimizer_scratch_floats(const Stage *stage, int tensor) {
    const Optimizer *optimizer = &stage->optimizer;
    const Tensor *t = &stage->tensors[tensor];
    int64_t m = t->shape[0], n = t->shape[1];
    if (optimizer->kind == OPTIMIZER_PIPEMARE) return t->n < PIPEMARE_PIECE ? t->n : PIPEMARE_PIECE;
    if (!t->block) return 0;
    if (optimizer->kind == OPTIMIZER_MUON) return muon_scratch_floats(m, n);
    if (optimizer->kind != OPTIMIZER_ROTATE) return 0;
    return rotate_scratch_floats(rotate_sides(optimizer, m, n), m, n, rotation_group(stage, tensor));
}

// What a stage takes, in bytes. moments: all that the optimizer keeps.
typedef struct {
    int64_t params, rounded, versions, grads, moments, outer, acts, scratch, frozen;
} StageBytes;

static int64_t stage_bytes_sum(const StageBytes *bytes) {
    return bytes->params + bytes->frozen + bytes->rounded + bytes->versions + bytes->grads + bytes->moments +
           bytes->outer + bytes->acts + bytes->scratch;
}

// 1 if a quarter of the memory stays free beside so many bytes, or the memory is not known: there is no device.
static int leaves_room(int64_t n_bytes) {
    int64_t memory = device_memory();
    return memory == 0 || n_bytes <= memory / 4 * 3;
}

// Floats of what is kept as something else that exist at once: of an update's pieces, or whole matrices for Muon; of a
// product's gradient; of a matrix that is filtered or decomposed; of what a file holds.
static int64_t wide_floats(const Stage *stage) {
    int halves = stage->grad_store != STORE_FP32, packed = stage->moment_store != STORE_FP32;
    int n_wide = (stage->param_store != STORE_FP32) + halves + 2 * packed;
    int64_t most = stage->param_store != STORE_FP32 || stage->frozen_store != STORE_FP32 ? STAGING : 0;
    if (!stage->training || n_wide == 0) return most;
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        int whole = stage->optimizer.kind == OPTIMIZER_MUON && t->block;
        if (t->left_out) continue;
        int64_t piece = whole || t->n < STORE_PIECE ? t->n : STORE_PIECE;
        most = larger(most, piece * (n_wide - (whole && packed)));
        if (grad_store(stage, t) != STORE_FP32) most = larger(most, matmul_grad_floats(t->n));
        if (t->block && (halves || (packed && stage->n_moments == 1))) most = larger(most, t->n);
    }
    return most;
}

// rounded: where a quarter of the memory stays free. scratch: what the ops keep between calls, attention's blocks and
// bf16 copies of operands.
static StageBytes stage_bytes(const Stage *stage, Precision precision, int threads) {
    const Config *config = &stage->config;
    int64_t C = config->channels, F = config->ffn, N = (int64_t)stage->max_B * stage->max_T, V = config->vocab;
    int64_t floats = stage->arena_floats, T = stage->max_T;
    AttentionShape shape = {stage->max_B,     (int)T, (int)T, config->heads, config->kv_heads,
                            config->head_dim, 0,      0,      NULL,          0};
    int64_t attention = (int64_t)attention_bytes(shape, precision, threads);
    int64_t weight = larger(larger(2 * F, stage->QKV), V) * C, inputs = N * larger(larger(C, F), stage->A);
    int64_t wide = larger(larger(2 * F, stage->QKV) * N, (int64_t)stage->logits_rows * V);
    StageBytes bytes = {stage->param_bytes,
                        0,
                        stage->param_bytes * stage->delay,
                        0,
                        0,
                        0,
                        stage->acts_bytes,
                        attention,
                        stage->borrows_frozen ? 0 : stage->frozen_bytes};
    if (stage->training) bytes.grads = stage->grad_bytes, bytes.moments = moment_bytes(stage) * stage->n_moments;
    if (stage->training && stage->n_moments > 1) {
        int64_t largest = 0;
        for (int i = 0; i < stage->n_tensors; i++) largest = larger(largest, optimizer_scratch_floats(stage, i));
        bytes.moments += 4 * rotation_floats(stage, stage->n_tensors);
        if (stage->optimizer.kind == OPTIMIZER_PIPEMARE) bytes.moments += floats * 4;
        bytes.scratch += 4 * largest;
    }
    if (stage->meets) bytes.outer = floats * 16;
    bytes.scratch += matmul_bytes(weight, inputs, stage->training ? wide : 0, precision);
    bytes.scratch += 4 * wide_floats(stage) + stage->turn_bytes;
    if (precision == PRECISION_BF16 && (stage->training || DEVICE_KEEPS_BF16) && !stage->unrounded &&
        stage->param_store == STORE_FP32 && stage->n_frozen == 0 &&
        leaves_room(stage_bytes_sum(&bytes) + stage->param_bytes / 2))
        bytes.rounded = stage->param_bytes / 2;
    return bytes;
}

// Sets what the stage will be used for and counts its memory; nothing large is allocated yet. stage->slots, n_moments,
// optimizer, meets, delay and the stores may be changed before.
static int stage_plan(Stage *stage, int B, int T, int training, int recompute) {
    size_t n = (size_t)stage->slots * (size_t)stage->n_layers;
    stage->max_B = B, stage->max_T = T, stage->training = training, stage->recompute = recompute;
    stage_layout(stage);
    free(stage->acts);
    stage->acts = (LayerActs *)calloc(n, sizeof(LayerActs));
    if (stage->acts == NULL) return error_set("out of memory for %zu layers", n);
    stage->acts_bytes = stage_carve(stage, NULL);
    stage->turn_bytes = stage->borrows ? stage_carve_turn(stage, NULL) : 0;
    return 0;
}

static float *stage_arena(const Stage *stage, Arena arena) {
    switch (arena) {
    case ARENA_PARAMS: return stage->params;
    case ARENA_GRADS: return stage->grads;
    case ARENA_M: return stage->m;
    case ARENA_V: return stage->v;
    case ARENA_DELTA: return stage->delta;
    case ARENA_GLOBAL: return stage->global;
    case ARENA_OUTER: return stage->outer;
    case ARENA_ERROR: return stage->error;
    case ARENA_PENDING: return stage->pending;
    }
    return NULL;
}

// Bytes of one of the stage's memories.
static int64_t stage_arena_bytes(const Stage *stage, Arena arena) {
    switch (arena) {
    case ARENA_PARAMS: return stage->param_bytes;
    case ARENA_GRADS: return stage->grad_bytes;
    case ARENA_M:
    case ARENA_V: return moment_bytes(stage);
    default: return 4 * stage->arena_floats;
    }
}

// A tensor's parameter in a memory of the parameters' layout: the newest, or an older version.
static Stored stage_param(const Stage *stage, const float *params, const Tensor *t) {
    void *data = t->frozen ? (void *)t->data : (char *)params + t->place;
    Stored values = {data, NULL, param_store(stage, t), 1};
    return values;
}

// A tensor's values in one of the stage's memories.
static Stored stage_values(const Stage *stage, Arena arena, const Tensor *t) {
    float *memory = stage_arena(stage, arena);
    if (arena == ARENA_PARAMS) return stage_param(stage, memory, t);
    Stored values = stored_floats(memory + t->offset);
    if (arena == ARENA_GRADS) values.data = tensor_in(memory, t, 1), values.store = grad_store(stage, t);
    if ((arena != ARENA_M && arena != ARENA_V) || stage->moment_store == STORE_FP32) return values;
    values.store = stage->moment_store, values.is_signed = arena == ARENA_M;
    values.data = (char *)memory + (values.store == STORE_BF16 ? 2 : 1) * t->offset;
    values.scales = (float *)(void *)((char *)memory + moment_codes(stage)) + t->first_block;
    return values;
}

// Floats of elements at .. at+n-1: where they are, or a copy in *room, which begins behind it afterwards.
static float *stored_open(Stored kept, int64_t at, int64_t n, float **room, Stream *stream) {
    float *copy = *room;
    if (kept.store == STORE_FP32) return (float *)kept.data + at;
    *room += n;
    stored_read(copy, kept, at, n, stream);
    return copy;
}

// Puts back what has been opened and changed.
static void stored_close(Stored kept, int64_t at, const float *values, int64_t n, Rounding rounding, Stream *stream) {
    if (kept.store != STORE_FP32) stored_write(kept, at, values, n, rounding, stream);
}

// Scratch for what is opened; without memory the stream fails.
static float *wide_scratch(int64_t floats, Stream *stream) {
    float *room = (float *)scratch_get(&stream->scratch[SCRATCH_WIDE], sizeof(float) * (size_t)floats);
    if (room == NULL) stream->failed = 1;
    return room;
}

// A whole matrix as floats: where it is, or a copy in scratch. NULL: no memory, the stream fails.
static float *stored_matrix(Stored kept, int64_t n, Stream *stream) {
    float *room = kept.store == STORE_FP32 ? NULL : wide_scratch(n, stream);
    return kept.store != STORE_FP32 && room == NULL ? NULL : stored_open(kept, 0, n, &room, stream);
}

// Sum of the squares of n values.
static double stored_squares(Stored kept, int64_t n, Stream *stream) {
    double sum = 0.0;
    float *scratch = kept.store == STORE_FP32 ? NULL : wide_scratch(STORE_PIECE, stream);
    if (kept.store == STORE_FP32) return sum_of_squares((const float *)kept.data, n, stream);
    for (int64_t at = 0; at < n && scratch != NULL; at += STORE_PIECE) {
        int64_t count = n - at < STORE_PIECE ? n - at : STORE_PIECE;
        stored_read(scratch, kept, at, count, stream);
        sum += sum_of_squares(scratch, count, stream);
    }
    return scratch != NULL ? sum : (double)NAN;
}

// Copies n values that are kept alike, or on one side as floats; then to the nearest.
static void stored_copy(Stored to, Stored from, int64_t n, Stream *stream) {
    if (to.store == from.store)
        device_copy(to.data, from.data, (size_t)store_bytes(to.store, n), stream);
    else if (to.store == STORE_FP32)
        stored_read((float *)to.data, from, 0, n, stream);
    else
        stored_write(to, 0, (const float *)from.data, n, rounding_nearest(), stream);
}

// What the optimizer keeps beside moments.
static int stage_alloc_optimizer(Stage *stage) {
    int64_t rotation = rotation_floats(stage, stage->n_tensors);
    if (rotation > 0 && (stage->rotation = (float *)device_alloc(sizeof(float) * (size_t)rotation)) == NULL) return -1;
    if (stage->optimizer.kind != OPTIMIZER_PIPEMARE) return 0;
    stage->delta = (float *)device_alloc(sizeof(float) * (size_t)stage->arena_floats);
    return stage->delta != NULL ? 0 : -1;
}

// The frozen tensors' memory. What is borrowed is there already.
static int stage_alloc_frozen(Stage *stage) {
    if (stage->n_frozen == 0 || stage->borrows_frozen) return 0;
    stage->frozen_memory = (float *)device_alloc((size_t)stage->frozen_bytes);
    if (stage->frozen_memory == NULL) return -1;
    for (int i = 0; i < stage->n_frozen; i++)
        stage->frozen[i].data = (float *)(void *)((char *)stage->frozen_memory + stage->frozen[i].place);
    return 0;
}

// Lets a stage that borrows use the frozen tensors of a model's stages, which have its own layers.
static void stage_borrow_frozen(Stage *stage, const Stage *model) {
    int at = 0;
    for (; model != NULL; model = model->next)
        for (int i = 0; i < model->n_frozen && at < stage->n_frozen; i++)
            stage->frozen[at++].data = model->frozen[i].data;
}

// Allocates what stage_plan has counted.
static int stage_alloc(Stage *stage, Stream *stream) {
    float inv_freq[2048];
    size_t bytes = sizeof(float) * (size_t)stage->arena_floats;
    StageBytes plan = stage_bytes(stage, stream->precision, stream->threads);
    stage->stream = stream;
    if (stage_alloc_frozen(stage)) return -1;
    stage->params = (float *)device_alloc((size_t)plan.params);
    if (plan.rounded > 0 && (stage->rounded = (uint16_t *)device_alloc((size_t)plan.rounded)) == NULL) return -1;
    if (stage->params == NULL || model_view(&stage->p, stage, stage->params)) return -1;
    stage->used = stage->params;
    if (plan.versions > 0 && (stage->versions = (float *)device_alloc((size_t)plan.versions)) == NULL) return -1;
    if (stage->training) {
        size_t of_moment = (size_t)moment_bytes(stage);
        if ((stage->grads = (float *)device_alloc((size_t)plan.grads)) == NULL) return -1;
        if (stage->n_moments > 0 && (stage->m = (float *)device_alloc(of_moment)) == NULL) return -1;
        if (stage->n_moments > 1 && (stage->v = (float *)device_alloc(of_moment)) == NULL) return -1;
        if (stage->n_moments > 1 && stage_alloc_optimizer(stage)) return -1;
        if (model_view(&stage->g, stage, stage->grads)) return -1;
    }
    if (stage->meets) {
        stage->global = (float *)device_alloc(bytes), stage->outer = (float *)device_alloc(bytes);
        stage->error = (float *)device_alloc(bytes), stage->pending = (float *)device_alloc(bytes);
        if (stage->global == NULL || stage->outer == NULL || stage->error == NULL || stage->pending == NULL) return -1;
    }
    stage->acts_arena = device_alloc((size_t)stage->acts_bytes);
    if (stage->acts_arena == NULL) return -1;
    stage_carve(stage, stage->acts_arena);
    stage->staging = (float *)device_host_alloc(sizeof(float) * STAGING);
    if (stage->staging == NULL) return error_set("out of memory for the staging buffer");
    rope_inv_freq(inv_freq, stage->config.head_dim, &stage->config.rope);
    rope_tables(stage->rope_cos, stage->rope_sin, inv_freq, stage->max_T, stage->config.head_dim, stream);
    return 0;
}

// A weight of this stage as the products take it.
static Weight stage_weight(const Stage *stage, const float *weight) {
    int is_frozen = stage->n_frozen > 0, half_grad = stage->grad_store != STORE_FP32 && weight != stage->p.embed;
    Weight half = {NULL, (const uint16_t *)(const void *)weight, half_grad}, full = {weight, NULL, 0};
    if ((is_frozen ? stage->frozen_store : stage->param_store) != STORE_FP32) return half;
    if (is_frozen) return full;
    Weight view = {weight, stage->rounded != NULL ? stage->rounded + (weight - stage->used) : NULL, half_grad};
    return view;
}

// Brings the bf16 copies up to date, where they are kept: before the products of a step or an evaluation.
static void stage_round(Stage *stage, Stream *stream) {
    for (int i = 0; stage->rounded != NULL && i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        if (t->n_dims == 2)
            bf16_round(stage->rounded + t->place / 4, stage->used + t->place / 4, t->shape[0], t->shape[1], t->shape[1],
                       stream);
    }
}

static void model_round(Stage *model, Stream *stream) {
    for (Stage *stage = model; stage != NULL; stage = stage->next) stage_round(stage, stream);
}

// Lets the stage work with other weights, of the parameters' layout; stage_round is due then.
static void stage_use(Stage *stage, float *weights) {
    stage->used = weights;
    model_point(&stage->p, stage, weights);
}

static float *stage_slot(const Stage *stage, int slot) {
    return (float *)(void *)((char *)stage->versions + slot * stage->param_bytes);
}

// Where the weights of a version lie that the stage still has, after `done` updates.
static float *stage_version(const Stage *stage, int64_t done, int64_t version) {
    int slot = versions_slot(stage->delay, done, version);
    return slot < 0 ? stage->params : stage_slot(stage, slot);
}

// Keeps the newest weights as an older version, before the update that makes version done + 1 of them.
static void stage_keep_version(Stage *stage, int64_t done) {
    if (stage->delay == 0) return;
    float *to = stage_slot(stage, versions_next_slot(stage->delay, done));
    device_copy(to, stage->params, (size_t)stage->param_bytes, stage->stream);
}

// What stands for the forward's weights in a backward without stashed ones: w - delay*delta (PipeMare: Yang et al.
// 2021). It lies where the coming update keeps the newest weights; what the forward has used is gone then.
static float *stage_corrected(Stage *stage, int64_t done) {
    int64_t n = stage->arena_floats;
    float *to = stage_slot(stage, versions_next_slot(stage->delay, done));
    device_copy(to, stage->delta, sizeof(float) * (size_t)n, stage->stream);
    vector_scale(to, n, (float)stage->delay, stage->stream);
    vector_subtract(to, stage->params, n, stage->stream);
    vector_scale(to, n, -1.0f, stage->stream);
    return to;
}

// Elements at .. at+n-1 of `to` = staging (n <= STAGING), the host's.
static void stored_upload(Stored to, int64_t at, const float *staging, int64_t n, Stream *stream) {
    float *values = to.store == STORE_FP32 ? (float *)to.data + at : wide_scratch(STAGING, stream);
    if (values == NULL) return;
    device_copy(values, staging, sizeof(float) * (size_t)n, stream);
    stored_close(to, at, values, n, rounding_nearest(), stream);
}

// staging (n <= STAGING), the host's = elements at .. at+n-1 of `from`; without memory the stream fails.
static void stored_download(float *staging, Stored from, int64_t at, int64_t n, Stream *stream) {
    float *room = from.store == STORE_FP32 ? NULL : wide_scratch(STAGING, stream);
    if (from.store != STORE_FP32 && room == NULL) return;
    const float *values = stored_open(from, at, n, &room, stream);
    device_copy(staging, values, sizeof(float) * (size_t)n, stream);
}

// Elements 4*index .. 4*index+3 of a tensor's first values: normal with the tensor's deviation (the two products that
// write the residual stream are smaller by sqrt(2L), Radford et al. 2019), norms one, biases zero; of adapters A
// uniform up to 1/sqrt(inputs), as PEFT's Kaiming's, B zero. A value depends on seed, tensor and element alone.
static void tensor_init4(float values[4], const Tensor *tensor, uint64_t seed, uint64_t index) {
    for (int k = 0; k < 4; k++) values[k] = tensor->fill;
    if (tensor->init_bound > 0.0f) {
        Philox block = rand_block(seed, RAND_ADAPTER, (uint32_t)tensor->index, index);
        for (int k = 0; k < 4; k++) values[k] = tensor->init_bound * ((float)(block.v[k] >> 8) * 0x1p-23f - 1.0f);
    } else if (tensor->init_std > 0.0f) {
        rand_normal4(values, seed, RAND_INIT, (uint32_t)tensor->index, index);
        for (int k = 0; k < 4; k++) values[k] *= tensor->init_std;
    }
}

// Random weights of a tensor to `to` in tensor memory, through staging (STAGING).
static void tensor_init(const Tensor *tensor, Stored to, float *staging, uint64_t seed, Stream *stream) {
    for (int64_t at = 0; at < tensor->n; at += STAGING) {
        int64_t n = tensor->n - at < STAGING ? tensor->n - at : STAGING;
#pragma omp parallel for
        for (int64_t j = 0; j < n; j += 4) {
            float values[4];
            tensor_init4(values, tensor, seed, (uint64_t)(at + j) / 4);
            for (int64_t k = j; k < j + 4 && k < n; k++) staging[k] = values[k - j];
        }
        stored_upload(to, at, staging, n, stream);
    }
}

// The first weights of the table: all, or the adapters.
static void stage_init_table(Stage *stage, uint64_t seed) {
    for (int i = 0; i < stage->n_tensors; i++)
        tensor_init(&stage->tensors[i], stage_values(stage, ARENA_PARAMS, &stage->tensors[i]), stage->staging, seed,
                    stage->stream);
}

static void stage_init(Stage *stage, uint64_t seed) {
    stage_init_table(stage, seed);
    for (int i = 0; i < stage->n_frozen && !stage->borrows_frozen; i++)
        tensor_init(&stage->frozen[i], stage_values(stage, ARENA_PARAMS, &stage->frozen[i]), stage->staging, seed,
                    stage->stream);
}

// The name under which a file holds a tensor: a head that has been untied starts as the embedding.
static const char *tensor_source(const Tensor *tensor, const ModelFile *file) {
    int untied = file->config.tied && strcmp(tensor->name, "lm_head.weight") == 0;
    return untied ? "model.embed_tokens.weight" : tensor->name;
}

static int model_has(const Stage *model, const char *name) {
    for (const Stage *stage = model; stage != NULL; stage = stage->next)
        for (int t = 0; t < stage_n_all(stage); t++)
            if (strcmp(stage_any(stage, t)->name, name) == 0) return 1;
    return 0;
}

// 1 if the file need not have a tensor: adapters may begin anew, but all of them.
static int is_optional(const Stage *stage, const Tensor *tensor, const ModelFile *file) {
    return stage->n_frozen > 0 && !tensor->frozen && file->config.lora.rank == 0;
}

// Every tensor of the model's tables is in the file with the right shape, and nothing else that would change the
// result.
static int model_match(const Stage *model, const ModelFile *file) {
    for (const Stage *stage = model; stage != NULL; stage = stage->next) {
        for (int i = 0; i < stage_n_all(stage); i++) {
            const Tensor *tensor = stage_any(stage, i);
            if (is_optional(stage, tensor, file)) continue;
            if (model_file_expect(file, tensor_source(tensor, file), tensor->shape, tensor->n_dims) == NULL) return -1;
        }
    }
    for (int s = 0; s < file->n_shards; s++) {
        for (int i = 0; i < file->shards[s].n_tensors; i++) {
            const char *name = file->shards[s].tensors[i].name; // not in the table, but harmless:
            int harmless =
                ends_with(name, "rotary_emb.inv_freq") || (file->config.tied && strcmp(name, "lm_head.weight") == 0);
            if (model->n_frozen == 0 && file->config.lora.rank > 0) // it is merged
                harmless |= adapter_belongs(name, &file->config.lora, model->config.n_layers);
            if (!harmless && !model_has(model, name))
                return error_set("%s: tensor %s is not part of a %s of this config", file->shards[s].path, name,
                                 config_traits(&file->config)->name);
        }
    }
    return 0;
}

// to (n) = a file's tensor, through the stage's staging buffer; check: refuses values that are not
// finite.
static int stage_read(Stage *stage, Stored to, int64_t n, const SafeTensor *from, int check) {
    for (int64_t at = 0; at < n; at += STAGING) {
        int64_t count = n - at < STAGING ? n - at : STAGING;
        if (safetensor_read(stage->staging, from, at, count)) return -1;
        for (int64_t j = 0; check && j < count; j++)
            if (!isfinite(stage->staging[j]))
                return error_set("%s: element %lld is %g", from->name, (long long)(at + j), (double)stage->staging[j]);
        stored_upload(to, at, stage->staging, count, stage->stream);
    }
    return stream_check(stage->stream);
}

// Appends n values to a file's current tensor.
static void stage_append(const Stage *stage, SafeTensorsWriter *writer, Stored from, int64_t n, Dtype dtype) {
    for (int64_t at = 0; at < n; at += STAGING) {
        int64_t count = n - at < STAGING ? n - at : STAGING;
        stored_download(stage->staging, from, at, count, stage->stream);
        safetensors_append(writer, stage->staging, count, dtype);
    }
}

// Copies the weights of a matched file into the parameters and frozen tensors.
static int model_load(Stage *model, const ModelFile *file, int check) {
    for (Stage *stage = model; stage != NULL; stage = stage->next) {
        for (int i = 0; i < stage_n_all(stage); i++) {
            const Tensor *tensor = stage_any(stage, i);
            const char *path = "";
            char reason[ERROR_MAX];
            if (is_optional(stage, tensor, file)) continue;
            const SafeTensor *from = model_file_find(file, tensor_source(tensor, file), &path);
            if (stage_read(stage, stage_values(stage, ARENA_PARAMS, tensor), tensor->n, from, check) == 0) continue;
            memcpy(reason, error_message, sizeof reason);
            return error_set("%.400s: %.500s", path, reason);
        }
    }
    return 0;
}

// Adds what a file's adapter makes of one matrix to it: alpha/rank B A, in fp32.
static int tensor_add_adapter(Stage *stage, const Tensor *tensor, const ModelFile *file, int layer, int module) {
    const Lora *lora = &file->config.lora;
    int64_t a_shape[2] = {lora->rank, tensor->shape[1]}, b_shape[2] = {tensor->shape[0], lora->rank};
    int64_t n_a = a_shape[0] * a_shape[1], n_b = b_shape[0] * b_shape[1];
    char name[2][128];
    for (int i = 0; i < 2; i++) adapter_name(name[i], sizeof name[i], layer, module, i);
    const SafeTensor *from_a = model_file_expect(file, name[0], a_shape, 2);
    const SafeTensor *from_b = from_a != NULL ? model_file_expect(file, name[1], b_shape, 2) : NULL;
    if (from_b == NULL) return -1;
    float *a = (float *)device_alloc(sizeof(float) * (size_t)n_a),
          *b = (float *)device_alloc(sizeof(float) * (size_t)n_b);
    int result = a == NULL || b == NULL ? -1 : 0;
    if (result == 0) result = stage_read(stage, stored_floats(a), n_a, from_a, 1);
    if (result == 0) result = stage_read(stage, stored_floats(b), n_b, from_b, 1);
    Stored kept = stage_values(stage, ARENA_PARAMS, tensor);
    float *values = result == 0 ? stored_matrix(kept, tensor->n, stage->stream) : NULL;
    if (values != NULL) {
        vector_scale(a, n_a, lora_scale(lora), stage->stream);
        matmul_product(values, a_shape[1], b, lora->rank, 0, a, a_shape[1], 0, b_shape[0], a_shape[1], lora->rank, 0, 1,
                       stage->stream);
        stored_close(kept, 0, values, tensor->n, rounding_nearest(), stage->stream);
    }
    if (stream_check(stage->stream)) result = -1;
    device_free(a);
    device_free(b);
    return result;
}

// Merges a matched file's adapters: each matrix W becomes W + alpha/rank B A.
static int model_add_adapters(Stage *model, const ModelFile *file) {
    char name[128];
    for (Stage *stage = model; stage != NULL; stage = stage->next) {
        for (int i = 0; i < stage->n_tensors; i++) {
            const Tensor *tensor = &stage->tensors[i];
            int layer = tensor_layer(stage, tensor);
            for (int m = 0; tensor->block && m < LORA_MODULES; m++) {
                snprintf(name, sizeof name, "model.layers.%d.%s.weight", layer, lora_modules[m]);
                if (!lora_has(&file->config.lora, m) || strcmp(name, tensor->name) != 0) continue;
                if (tensor_add_adapter(stage, tensor, file, layer, m)) return -1;
            }
        }
    }
    return 0;
}

// Declares (begun = 0) or writes the tensors of an arena of a stage, as prefix + their name; what is kept as bf16 stays
// that.
static int stage_put(SafeTensorsWriter *writer, int begun, const Stage *stage, Arena arena, const char *prefix,
                     Dtype dtype) {
    char name[128];
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        if (tensor->left_out && arena != ARENA_PARAMS) continue;
        Stored values = stage_values(stage, arena, tensor);
        Dtype as = values.store == STORE_BF16 ? DTYPE_BF16 : dtype;
        snprintf(name, sizeof name, "%s%s", prefix, tensor->name);
        if (!begun && safetensors_declare(writer, name, as, tensor->shape, tensor->n_dims)) return -1;
        if (begun) stage_append(stage, writer, values, tensor->n, as);
    }
    return 0;
}

// The same for all stages of a model.
static int model_put_arena(SafeTensorsWriter *writer, int begun, const Stage *model, Arena arena, const char *prefix,
                           Dtype dtype) {
    for (const Stage *stage = model; stage != NULL; stage = stage->next)
        if (stage_put(writer, begun, stage, arena, prefix, dtype)) return -1;
    return 0;
}

// Writes an arena of a model as a safetensors file. Takes over the reference to metadata.
static int model_write_arena(const Stage *model, Arena arena, const char *path, json_t *metadata, Dtype dtype) {
    SafeTensorsWriter writer;
    if (safetensors_writer_init(&writer, metadata)) return -1;
    if (model_put_arena(&writer, 0, model, arena, "", dtype) || safetensors_begin(&writer, path)) return -1;
    model_put_arena(&writer, 1, model, arena, "", dtype);
    return file_writer_close(&writer.file);
}

// Writes weights as one safetensors file, aside and then renamed: `path` holds the old file or the whole new one.
// arena: the parameters, or the merged ones of all replicas.
static int model_write_weights(const Stage *model, Arena arena, const char *path, json_t *metadata, Dtype dtype) {
    char aside[PATH_MAX];
    if (snprintf(aside, sizeof aside, "%s.tmp", path) >= (int)sizeof aside) {
        json_decref(metadata);
        return error_set("%.200s: the path is too long", path);
    }
    if (model_write_arena(model, arena, aside, metadata, dtype) || file_replace(aside, path)) {
        unlink(aside);
        return -1;
    }
    return 0;
}

// What a config.json calls a type of weights.
static const char *torch_name(Dtype dtype) {
    return dtype == DTYPE_F32 ? "float32" : dtype == DTYPE_F16 ? "float16" : "bfloat16";
}

// Metadata of a native file: config and side files; NULL with an error message.
static json_t *native_metadata(const Config *config, const json_t *side_files, Dtype dtype, const char *path) {
    json_t *metadata = json_copy((json_t *)side_files);
    json_t *json = config_to_json(config, torch_name(dtype));
    char *text = json != NULL ? json_dumps(json, JSON_COMPACT | JSON_FLOAT_DIGITS) : NULL;
    json_decref(json);
    if (metadata != NULL && text != NULL && json_object_set_new(metadata, "format", json_string("pt")) == 0 &&
        json_object_set_new(metadata, "config", json_string(text)) == 0) {
        free(text);
        return metadata;
    }
    free(text);
    json_decref(metadata);
    error_set("%s: out of memory", path);
    return NULL;
}

// Writes the native file: weights, config and side files in one.
static int model_save_native(const Stage *model, Arena arena, const json_t *side_files, const char *path, Dtype dtype) {
    json_t *metadata = native_metadata(&model->config, side_files, dtype, path);
    return metadata != NULL ? model_write_weights(model, arena, path, metadata, dtype) : -1;
}

// Writes adapters as PEFT keeps them: the weights of an arena in fp32, and adapter_config.json. base: their model.
static int model_save_adapter(const Stage *model, Arena arena, const char *base, const char *folder) {
    char path[PATH_MAX];
    if (file_make_folders(folder) || path_join(path, folder, ADAPTER_WEIGHTS)) return -1;
    if (model_write_weights(model, arena, path, json_pack("{s:s}", "format", "pt"), DTYPE_F32)) return -1;
    return adapter_write_config(&model->config.lora, base, folder);
}

// Writes a folder that transformers loads: config.json, model.safetensors and the side files.
static int model_save_folder(const Stage *model, const json_t *side_files, const char *folder, Dtype dtype) {
    char path[PATH_MAX];
    const char *name;
    json_t *config = config_to_json(&model->config, torch_name(dtype)), *side;
    char *text = config != NULL ? json_dumps(config, JSON_INDENT(2) | JSON_FLOAT_DIGITS) : NULL;
    json_decref(config);
    if (text == NULL) return error_set("%s: out of memory", folder);
    int result = file_make_folders(folder);
    if (result == 0) result = path_join(path, folder, "model.safetensors");
    if (result == 0) result = model_write_weights(model, ARENA_PARAMS, path, json_pack("{s:s}", "format", "pt"), dtype);
    if (result == 0) result = path_join(path, folder, "config.json");
    if (result == 0) result = file_write_text(path, text);
    free(text);
    json_object_foreach((json_t *)side_files, name, side) {
        if (result == 0) result = path_join(path, folder, name);
        if (result == 0) result = file_write_text(path, json_string_value(side));
    }
    return result;
}

// Norms and biases stay F32 in a GGUF.
static Dtype gguf_dtype(const Tensor *tensor, Dtype dtype) {
    return tensor->n_dims > 1 ? dtype : DTYPE_F32;
}

// Appends a tensor's values to a GGUF. HD: heads of so many rows are interleaved, 0: rows as they are.
static void gguf_put_tensor(const Stage *stage, FileWriter *file, const Tensor *tensor, int HD, Dtype dtype) {
    int64_t columns = tensor->n_dims > 1 ? tensor->shape[1] : 1, count;
    Stored values = stage_values(stage, ARENA_PARAMS, tensor);
    for (int64_t at = 0; at < tensor->n; at += count) {
        int64_t left = HD > 0 ? columns - at % columns : tensor->n - at;
        int64_t from = HD > 0 ? gguf_source_row(at / columns, HD) * columns + at % columns : at;
        count = left < STAGING ? left : STAGING;
        stored_download(stage->staging, values, from, count, stage->stream);
        floats_write(file, stage->staging, count, gguf_dtype(tensor, dtype));
    }
    gguf_put_padding(file);
}

// The table (begun = 0) or the data of a model's tensors, with the factors of a scaled RoPE as the first.
static void gguf_put_model(FileWriter *file, int begun, const Stage *model, int family, Dtype dtype) {
    char name[2 * GGUF_MAX_NAME];
    float factors[2048] = {0};
    int post_norm = strcmp(gguf_families[family].arch, "olmo2") == 0, HD = model->config.head_dim;
    int64_t half = HD / 2;
    uint64_t offset = 0;
    if (model->config.rope.scaled && !begun) gguf_put_entry(file, "rope_freqs.weight", DTYPE_F32, &half, 1, &offset);
    if (model->config.rope.scaled && begun) {
        gguf_rope_factors(factors, &model->config.rope, HD);
        floats_write(file, factors, half, DTYPE_F32);
        gguf_put_padding(file);
    }
    for (const Stage *stage = model; stage != NULL; stage = stage->next) {
        for (int i = 0; i < stage->n_tensors; i++) {
            const Tensor *tensor = &stage->tensors[i];
            int rotated = gguf_families[family].interleaved && gguf_is_rotated(tensor->name);
            gguf_rename(name, sizeof name, tensor->name, 0, post_norm);
            if (begun)
                gguf_put_tensor(stage, file, tensor, rotated ? HD : 0, dtype);
            else
                gguf_put_entry(file, name, gguf_dtype(tensor, dtype), tensor->shape, tensor->n_dims, &offset);
        }
    }
    if (!begun) gguf_put_padding(file);
}

// Writes a GGUF file, aside and then renamed. *named = 1 if the tokenizer is in it, 0 if GGUF has no name for its kind.
static int model_save_gguf(const Stage *model, const json_t *side_files, const char *path, Dtype dtype, int *named) {
    char aside[PATH_MAX];
    FileWriter file;
    const Config *config = &model->config;
    int64_t n_tensors = config->rope.scaled;
    for (const Stage *stage = model; stage != NULL; stage = stage->next) n_tensors += stage->n_tensors;
    if (snprintf(aside, sizeof aside, "%s.tmp", path) >= (int)sizeof aside)
        return error_set("%.200s: the path is too long", path);
    json_t *json = config_to_json(config, torch_name(dtype));
    int family = gguf_export_family(json, path);
    json_t *metadata = family >= 0 ? gguf_metadata(json, &config->rope, family, dtype) : NULL;
    json_decref(json);
    if (metadata == NULL) return -1;
    *named = gguf_put_tokenizer(metadata, side_files, config->vocab, config->bos_id, config->eos_id);
    int result = file_writer_open(&file, aside);
    if (result == 0) {
        gguf_put_head(&file, metadata, n_tensors);
        gguf_put_model(&file, 0, model, family, dtype);
        gguf_put_model(&file, 1, model, family, dtype);
        result = file_writer_close(&file);
        if (result == 0) result = file_replace(aside, path);
        if (result != 0) unlink(aside);
    }
    json_decref(metadata);
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward

// Keys and values of what a sequence has seen, for generation: (T_max, 2*NKV*HD) a layer, k then v in a row.
typedef struct {
    floatX *rows; // (L, T_max, 2*NKV*HD)
    int T_max, used;
} KvCache;

// The family's norm of C channels. out, x (N, C), rstd (N).
static void norm_forward(const Stage *stage, floatX *out, float *rstd, const floatX *x, const float *weight, int N,
                         Stream *stream) {
    int C = stage->config.channels;
    if (config_traits(&stage->config)->plain_norm)
        layernorm_forward(out, rstd, x, N, C, stage->config.norm_eps, stream);
    else
        rmsnorm_forward(out, rstd, x, weight, N, C, stage->config.norm_eps, stream);
}

// dx, dweight +=; x is what went into the norm, out what came out of it.
static void norm_backward(const Stage *stage, floatX *dx, float *dweight, const floatX *dout, const floatX *x,
                          const floatX *out, const float *weight, const float *rstd, int N, Stream *stream) {
    int C = stage->config.channels;
    if (config_traits(&stage->config)->plain_norm)
        layernorm_backward(dx, dout, out, rstd, N, C, stream);
    else
        rmsnorm_backward(dx, dweight, dout, x, weight, rstd, N, C, stream);
}

// Where k's rstd begins in rstd_qk, and the parts of q and k.
typedef struct {
    int q, k; // parts of a row
    int q_width, k_width;
    int64_t k_rstd;
} QkParts;

static QkParts qk_parts(const Config *config, int N) {
    int head = config_traits(config)->qk_norm == QK_NORM_HEAD;
    QkParts parts = {head ? config->heads : 1, head ? config->kv_heads : 1, (int)config_q_norm(config),
                     (int)config_k_norm(config), 0};
    parts.k_rstd = (int64_t)N * parts.q;
    return parts;
}

// The norms of q and k in place in acts->qkv; what they were stays in acts->qk.
static void qk_forward(const Stage *stage, LayerActs *acts, const LayerTensors *w, int N, Stream *stream) {
    const Config *config = &stage->config;
    QkParts parts = qk_parts(config, N);
    int A = (int)stage->A, QKV = (int)stage->QKV, QK = A + (int)config_kv_dim(config);
    qk_norm_forward(acts->qkv, acts->qk, acts->rstd_qk, w->q_norm, N, parts.q, parts.q_width, QKV, QK, config->norm_eps,
                    stream);
    qk_norm_forward(acts->qkv + A, acts->qk + A, acts->rstd_qk + parts.k_rstd, w->k_norm, N, parts.k, parts.k_width,
                    QKV, QK, config->norm_eps, stream);
}

// dqkv (N, QKV): gradients of the normalised q and k in, of the plain ones out.
static void qk_backward(const Stage *stage, floatX *dqkv, const LayerActs *acts, const LayerTensors *w,
                        const LayerTensors *g, int N, Stream *stream) {
    const Config *config = &stage->config;
    QkParts parts = qk_parts(config, N);
    int A = (int)stage->A, QKV = (int)stage->QKV, QK = A + (int)config_kv_dim(config);
    qk_norm_backward(dqkv, g->q_norm, acts->qk, w->q_norm, acts->rstd_qk, N, parts.q, parts.q_width, QKV, QK, stream);
    qk_norm_backward(dqkv + A, g->k_norm, acts->qk + A, w->k_norm, acts->rstd_qk + parts.k_rstd, N, parts.k,
                     parts.k_width, QKV, QK, stream);
}

// The groups of modules with adapters.
enum { LORA_QKV, LORA_O, LORA_GATE_UP, LORA_DOWN };

// A group's adapters in a layer, with their gradients in a backward; g is NULL in a forward.
static LoraGroup layer_lora(const Stage *stage, int group, const LayerTensors *w, const LayerTensors *g) {
    const Config *config = &stage->config;
    const Lora *lora = &config->lora;
    LoraGroup adapters;
    int at = 0, M, K;
    memset(&adapters, 0, sizeof adapters);
    for (int m = lora_group_first[group]; m < lora_group_first[group + 1]; m++, at += M) {
        lora_module_shape(m, config->channels, stage->A, config_kv_dim(config), config->ffn, &M, &K);
        if (!lora_has(lora, m)) continue;
        int i = adapters.n++;
        adapters.at[i] = at, adapters.width[i] = M, adapters.b[i] = w->lora_b[m];
        if (i == 0) adapters.a = w->lora_a[m], adapters.rank = lora->rank, adapters.scale = lora_scale(lora);
        if (g != NULL) adapters.db[i] = g->lora_b[m];
        if (g != NULL && i == 0) adapters.da = g->lora_a[m];
    }
    return adapters;
}

// y (N, M) += what the group's adapters make of x (N, K). y NULL: recomputing, only what backward needs.
static void adapters_forward(const Stage *stage, int group, floatX *y, const LayerActs *acts, const LayerTensors *w,
                             const floatX *x, int N, int K, int M, Stream *stream) {
    LoraGroup adapters = layer_lora(stage, group, w, NULL);
    if (adapters.n == 0) return;
    lora_reduce(acts->lora[group], x, &adapters, N, K, stream);
    if (y != NULL) lora_expand(y, acts->lora[group], &adapters, N, M, stream);
}

// dx (N, K) += their share; their gradients overwritten on the first micro-batch of a step, else added to.
static void adapters_backward(const Stage *stage, int group, floatX *dx, const floatX *dy, const LayerActs *acts,
                              const LayerTensors *w, const LayerTensors *g, const Grads *d, const floatX *x, int N,
                              int K, int M, int first, Stream *stream) {
    LoraGroup adapters = layer_lora(stage, group, w, g);
    if (adapters.n > 0) lora_backward(dx, d->dlora, dy, acts->lora[group], x, &adapters, N, K, M, !first, stream);
}

// What attention or the MLP gives: a product that joins the residual stream, with its norm behind it in some families.
typedef struct {
    const floatX *inner; // (N, K)
    const float *matrix, *norm;
    floatX *given; // (N, C) post-norm: the product
    float *rstd;   // (N)    of its norm
    int K, group;  // group: of its adapters
} Branch;

static Branch attention_branch(const Stage *stage, const LayerActs *acts, const LayerTensors *w) {
    Branch branch = {acts->att, w->o, w->attn_norm, acts->norm1, acts->rstd1, (int)stage->A, LORA_O};
    return branch;
}

static Branch mlp_branch(const Stage *stage, const LayerActs *acts, const LayerTensors *w) {
    Branch branch = {acts->hidden, w->down, w->ffn_norm, acts->norm2, acts->rstd2, stage->config.ffn, LORA_DOWN};
    return branch;
}

// out (N, C) = x + product, and with post-norm out = x + norm(product), the product being kept.
static void branch_forward(const Stage *stage, floatX *out, const floatX *x, Branch branch, const LayerActs *acts,
                           const LayerTensors *w, int N, Stream *stream) {
    int C = stage->config.channels, post = config_traits(&stage->config)->post_norm;
    floatX *product = post ? branch.given : out;
    matmul_forward(product, branch.inner, stage_weight(stage, branch.matrix), N, branch.K, C, post ? NULL : x, stream);
    adapters_forward(stage, branch.group, product, acts, w, branch.inner, N, branch.K, C, stream);
    if (!post) return;
    norm_forward(stage, out, branch.rstd, branch.given, branch.norm, N, stream);
    residual_add(out, x, (int64_t)N * C, stream);
}

// Bytes of a cache for T_max tokens of one sequence.
static int64_t kv_cache_bytes(const Config *config, int T_max) {
    return (int64_t)sizeof(floatX) * config->n_layers * T_max * 2 * config_kv_dim(config);
}

// A cache for T_max tokens of one sequence; device_free its rows.
static int kv_cache_alloc(KvCache *cache, const Config *config, int T_max) {
    cache->T_max = T_max, cache->used = 0;
    cache->rows = (floatX *)device_alloc((size_t)kv_cache_bytes(config, T_max));
    return cache->rows != NULL ? 0 : -1;
}

// Attention of B sequences of T tokens, each behind what its own cache holds; they add themselves to it.
static void cached_attention(const Stage *stage, LayerActs *acts, int layer, int B, int T, const KvCache *caches,
                             Stream *stream) {
    const Config *config = &stage->config;
    int NH = config->heads, NKV = config->kv_heads, HD = config->head_dim, KV = NKV * HD, QKV = (int)stage->QKV;
    for (int b = 0; b < B; b++) {
        const KvCache *cache = &caches[b];
        const floatX *q = acts->qkv + (size_t)b * T * QKV, *k = q + stage->A;
        floatX *rows = cache->rows + (size_t)layer * cache->T_max * 2 * KV, *keys = rows;
        int window = config_window(config, layer), Tk = cache->used + T;
        for (int t = 0; t < T; t++)
            device_copy(rows + (size_t)(cache->used + t) * 2 * KV, k + (size_t)t * QKV, sizeof(floatX) * 2 * KV,
                        stream);
        if (window > 0 && window - 1 < cache->used) // what the first of the queries does not see
            keys += (size_t)(cache->used - window + 1) * 2 * KV, Tk = T + window - 1;
        AttentionShape shape = {1, T, Tk, NH, NKV, HD, QKV, 2 * KV, NULL, window < Tk ? window : 0};
        attention_forward(acts->att + (size_t)b * T * stage->A, acts->lse + (size_t)b * NH * T, q, keys, keys + KV,
                          shape, stream);
    }
}

// Of a layer's attention over whole sequences. A window that is no shorter than they are hides nothing.
static AttentionShape layer_attention(const Stage *stage, int layer, int B, int T) {
    const Config *config = &stage->config;
    int window = config_window(config, layer), QKV = (int)stage->QKV;
    AttentionShape shape = {B, T, T, config->heads, config->kv_heads, config->head_dim, QKV, QKV, NULL, 0};
    if (stage->packed) shape.starts = stage->starts;
    if (window < T) shape.window = window;
    return shape;
}

// One layer: acts->x (N, C) -> out (N, C). layer: its number in the model. With caches, one a sequence, the batch goes
// on where each of them ends.
static void layer_forward(const Stage *stage, LayerActs *acts, const LayerTensors *w, floatX *out, int layer, int B,
                          int T, KvCache *cache, Stream *stream) {
    const Config *config = &stage->config;
    const FamilyTraits *family = config_traits(config);
    int N = B * T, C = config->channels, A = (int)stage->A, QKV = (int)stage->QKV, F = config->ffn;
    int NH = config->heads, NKV = config->kv_heads, HD = config->head_dim, KV = NKV * HD, post = family->post_norm;
    const floatX *entry = post ? acts->x : acts->norm1, *middle = post ? acts->mid : acts->norm2;
    if (!post) norm_forward(stage, acts->norm1, acts->rstd1, acts->x, w->attn_norm, N, stream);
    matmul_forward(acts->qkv, entry, stage_weight(stage, w->qkv), N, C, QKV, NULL, stream);
    adapters_forward(stage, LORA_QKV, acts->qkv, acts, w, entry, N, C, QKV, stream);
    if (family->qkv_bias) bias_forward(acts->qkv, w->qkv_bias, N, QKV, stream);
    if (family->qk_norm != QK_NORM_NONE) qk_forward(stage, acts, w, N, stream);
    if (config_has_rope(config, layer))
        rope_forward(acts->qkv, stage->rope_cos, stage->rope_sin, stage->positions, N, NH + NKV, HD, QKV, stream);
    AttentionShape shape = layer_attention(stage, layer, B, T);
    const floatX *k = acts->qkv + A;
    if (cache != NULL)
        cached_attention(stage, acts, layer, B, T, cache, stream);
    else
        attention_forward(acts->att, acts->lse, acts->qkv, k, k + KV, shape, stream);
    branch_forward(stage, acts->mid, acts->x, attention_branch(stage, acts, w), acts, w, N, stream);
    if (!post) norm_forward(stage, acts->norm2, acts->rstd2, acts->mid, w->ffn_norm, N, stream);
    matmul_forward(acts->gate_up, middle, stage_weight(stage, w->gate_up), N, C, 2 * F, NULL, stream);
    adapters_forward(stage, LORA_GATE_UP, acts->gate_up, acts, w, middle, N, C, 2 * F, stream);
    swiglu_forward(acts->hidden, acts->gate_up, N, F, stream);
    if (out == NULL) // recomputing: the output is known
        adapters_forward(stage, LORA_DOWN, NULL, acts, w, acts->hidden, N, F, C, stream);
    else
        branch_forward(stage, out, acts->mid, mlp_branch(stage, acts, w), acts, w, N, stream);
}

// The gradient of what attention or the MLP gives: that of the residual stream, or with post-norm the one before the
// norm, in d->dnorm. dnorm_weight +=.
static const floatX *branch_backward(const Stage *stage, const Grads *d, float *dnorm_weight, const floatX *given,
                                     const float *norm, const float *rstd, int N, Stream *stream) {
    if (!config_traits(&stage->config)->post_norm) return d->dx;
    device_zero(d->dnorm, sizeof(floatX) * (size_t)N * (size_t)stage->config.channels, stream);
    norm_backward(stage, d->dnorm, dnorm_weight, d->dx, given, NULL, norm, rstd, N, stream);
    return d->dnorm;
}

// The residual stream's gradient takes up d->dnorm, the gradient of what attention or the MLP takes from it: through
// the norm, or with post-norm as it is.
static void entry_backward(const Stage *stage, const Grads *d, float *dnorm_weight, const floatX *x,
                           const floatX *normed, const float *norm, const float *rstd, int N, Stream *stream) {
    if (config_traits(&stage->config)->post_norm)
        residual_add(d->dx, d->dnorm, (int64_t)N * stage->config.channels, stream);
    else
        norm_backward(stage, d->dx, dnorm_weight, d->dnorm, x, normed, norm, rstd, N, stream);
}

// d->dx: gradient of the layer's output in, of its input out. g: weight gradients, matrices overwritten on the first
// micro-batch of a step and added to afterwards. layer: its number in the model.
static void layer_backward(const Stage *stage, const LayerActs *acts, const LayerTensors *w, const LayerTensors *g,
                           const Grads *d, int layer, int B, int T, int first, Stream *stream) {
    const Config *config = &stage->config;
    const FamilyTraits *family = config_traits(config);
    int N = B * T, C = config->channels, A = (int)stage->A, QKV = (int)stage->QKV, F = config->ffn;
    int NH = config->heads, NKV = config->kv_heads, HD = config->head_dim, KV = NKV * HD, post = family->post_norm;
    AttentionShape shape = layer_attention(stage, layer, B, T);
    const floatX *entry = post ? acts->x : acts->norm1, *middle = post ? acts->mid : acts->norm2;
    const floatX *q = acts->qkv, *dout;
    dout = branch_backward(stage, d, g->ffn_norm, acts->norm2, w->ffn_norm, acts->rstd2, N, stream);
    matmul_backward(d->dhidden, g->down, dout, acts->hidden, stage_weight(stage, w->down), N, F, C, !first, stream);
    adapters_backward(stage, LORA_DOWN, d->dhidden, dout, acts, w, g, d, acts->hidden, N, F, C, first, stream);
    swiglu_backward(d->dwide, d->dhidden, acts->gate_up, N, F, stream);
    matmul_backward(d->dnorm, g->gate_up, d->dwide, middle, stage_weight(stage, w->gate_up), N, C, 2 * F, !first,
                    stream);
    adapters_backward(stage, LORA_GATE_UP, d->dnorm, d->dwide, acts, w, g, d, middle, N, C, 2 * F, first, stream);
    entry_backward(stage, d, g->ffn_norm, acts->mid, acts->norm2, w->ffn_norm, acts->rstd2, N, stream);
    dout = branch_backward(stage, d, g->attn_norm, acts->norm1, w->attn_norm, acts->rstd1, N, stream);
    matmul_backward(d->dhidden, g->o, dout, acts->att, stage_weight(stage, w->o), N, A, C, !first, stream);
    adapters_backward(stage, LORA_O, d->dhidden, dout, acts, w, g, d, acts->att, N, A, C, first, stream);
    attention_backward(d->dwide, d->dwide + A, d->dwide + A + KV, d->dhidden, acts->att, acts->lse, q, q + A,
                       q + A + KV, shape, stream);
    if (config_has_rope(config, layer))
        rope_backward(d->dwide, stage->rope_cos, stage->rope_sin, stage->positions, N, NH + NKV, HD, QKV, stream);
    if (family->qk_norm != QK_NORM_NONE) qk_backward(stage, d->dwide, acts, w, g, N, stream);
    if (g->qkv_bias != NULL) bias_backward(g->qkv_bias, d->dwide, N, QKV, stream);
    matmul_backward(d->dnorm, g->qkv, d->dwide, entry, stage_weight(stage, w->qkv), N, C, QKV, !first, stream);
    adapters_backward(stage, LORA_QKV, d->dnorm, d->dwide, acts, w, g, d, entry, N, C, QKV, first, stream);
    entry_backward(stage, d, g->attn_norm, acts->x, acts->norm1, w->attn_norm, acts->rstd1, N, stream);
}

// Told while a pass over a micro-batch goes on; either may be NULL.
typedef struct {
    // backward: the gradients of tensors first .. last-1 are complete: norm and head, each layer, the embedding, be it
    // that they have none
    void (*done)(void *context, int first, int last);
    void (*enter)(void *context, int layer); // forward: the input of the stage's layer, not its first, is there
    void *context;
} PassHook;

// Positions of a micro-batch's rows, and which documents it has. starts (B, T): as Batch has them, NULL: a sequence is
// one document, which goes on where its cache (B) ends; NULL: it begins.
static void stage_place(Stage *stage, const int32_t *starts, int B, int T, const KvCache *cache, Stream *stream) {
    stage->packed = starts != NULL;
    if (starts != NULL) {
        device_upload(stage->starts, starts, sizeof *starts * (size_t)B * (size_t)T, stream);
        rope_document_positions(stage->positions, stage->starts, B * T, T, stream);
    } else if (cache == NULL) {
        rope_positions(stage->positions, B * T, T, 0, stream);
    }
    for (int b = 0; cache != NULL && b < B; b++)
        rope_positions(stage->positions + (size_t)b * T, T, T, cache[b].used, stream);
}

// x (N, C) = the embeddings of tokens (N).
static void stage_embed(const Stage *stage, floatX *x, const uint32_t *tokens, int N, Stream *stream) {
    Weight embed = stage_weight(stage, stage->p.embed);
    if (embed.full != NULL)
        embedding_forward(x, tokens, embed.full, N, stage->config.channels, stream);
    else
        embedding_forward_bf16(x, tokens, embed.rounded, N, stage->config.channels, stream);
}

// The layers of a stage on one micro-batch, kept in `slot` for the backward. The first stage embeds tokens (B, T);
// others take the boundary tensor that lies in stage_input(). What leaves is stage->last (B*T, C), and in the last
// stage also stage->normed, the final norm's output. starts (B, T), cache (B) and hook: may be NULL.
static void stage_forward(Stage *stage, int slot, const uint32_t *tokens, const int32_t *starts, int B, int T,
                          KvCache *cache, const PassHook *hook, Stream *stream) {
    int N = B * T, L = stage->n_layers;
    LayerActs *acts = stage->acts + slot * L;
    if (stage_borrow(stage, stream)) return;
    stage_place(stage, starts, B, T, cache, stream);
    if (stage->has_embed) {
        uint32_t *kept = stage->tokens + (int64_t)slot * stage->max_B * stage->max_T;
        device_upload(kept, tokens, sizeof *tokens * (size_t)N, stream);
        stage_embed(stage, acts[0].x, kept, N, stream);
    }
    for (int l = 0; l < L; l++) {
        if (hook != NULL && hook->enter != NULL && l > 0) hook->enter(hook->context, l);
        layer_forward(stage, &acts[l], &stage->p.layers[l], l + 1 < L ? acts[l + 1].x : stage->last,
                      stage->first_layer + l, B, T, cache, stream);
    }
    if (stage->has_head) norm_forward(stage, stage->normed, stage->rstd, stage->last, stage->p.norm, N, stream);
}

// Where the boundary tensor (N, C) of a micro-batch enters a stage that is not the first.
static floatX *stage_input(const Stage *stage, int slot) {
    return stage->acts[slot * stage->n_layers].x;
}

// All stages of a model one after the other, nothing kept; returns the last stage. Boundaries are handed on whole, or
// through `pass` where that is given.
typedef int (*BoundaryPass)(void *context, int boundary, const uint32_t *tokens, floatX *to, const floatX *from, int N,
                            int C, Stream *stream);

static Stage *model_forward(Stage *model, const uint32_t *tokens, const int32_t *starts, int B, int T, KvCache *cache,
                            BoundaryPass pass, void *context, Stream *stream) {
    int N = B * T, C = model->config.channels, boundary = 0;
    Stage *stage = model;
    for (;; stage = stage->next, boundary++) {
        stage_forward(stage, 0, tokens, starts, B, T, cache, NULL, stream);
        if (stage->next == NULL) break;
        floatX *to = stage_input(stage->next, 0);
        if (pass == NULL)
            device_copy(to, stage->last, sizeof(floatX) * (size_t)N * C, stream);
        else if (pass(context, boundary, tokens, to, stage->last, N, C, stream))
            stream->failed = 1;
    }
    for (int b = 0; cache != NULL && b < B; b++) cache[b].used += T;
    return stage;
}

// Head and loss over chunks of rows, targets (N): adds the targets' losses to stage->loss_sum. In training, d.dnorm
// becomes the gradient of the normed output and the head's gradient is written, both times `scale` (1 / targets of the
// step).
static void head_loss(Stage *stage, const int32_t *targets, int N, int backward, float scale, int first,
                      Stream *stream) {
    int C = stage->config.channels, V = stage->config.vocab;
    device_upload(stage->targets, targets, sizeof *targets * (size_t)N, stream);
    for (int n = 0; n < N; n += stage->logits_rows) {
        int rows = N - n < stage->logits_rows ? N - n : stage->logits_rows;
        floatX *normed = stage->normed + (size_t)n * C;
        matmul_forward(stage->logits, normed, stage_weight(stage, stage->p.head), rows, C, V, NULL, stream);
        cross_entropy(stage->losses + n, stage->logits, stage->targets + n, rows, V, scale, backward, stream);
        if (!backward) continue;
        matmul_backward(stage->d.dnorm + (size_t)n * C, stage->g.head, stage->logits, normed,
                        stage_weight(stage, stage->p.head), rows, C, V, !first || n > 0, stream);
    }
    vector_sum(stage->loss_sum, stage->losses, N, stream);
}

// The losses added up since the last time, 0 for a stage without a head. Waits for the stream.
static double stage_take_loss(Stage *stage, Stream *stream) {
    double sum = 0.0;
    if (!stage->has_head) return 0.0;
    device_copy(&sum, stage->loss_sum, sizeof sum, stream);
    device_zero(stage->loss_sum, sizeof sum, stream);
    return sum;
}

static void grads_done(const PassHook *hook, int first, int last) {
    if (hook != NULL && hook->done != NULL) hook->done(hook->context, first, last);
}

// Gradients of the micro-batch in `slot`, after stage_forward, with the same starts, and, in the last stage, head_loss.
// Other stages take the gradient of what they sent from stage->d.dx, where the gradient of what they received is
// afterwards.
static void stage_backward(Stage *stage, int slot, const int32_t *starts, int B, int T, int first, const PassHook *hook,
                           Stream *stream) {
    int N = B * T, C = stage->config.channels, L = stage->n_layers, per_layer = stage->per_layer;
    int lead = stage_lead(stage);
    LayerActs *acts = stage->acts + slot * L;
    // recomputing: an output is known, but with post-norm what it is the norm of is not
    floatX *again = config_traits(&stage->config)->post_norm ? stage->d.dnorm : NULL;
    if (stage_borrow(stage, stream)) return;
    if (stage->has_head) {
        device_zero(stage->d.dx, sizeof(floatX) * (size_t)N * C, stream);
        norm_backward(stage, stage->d.dx, stage->g.norm, stage->d.dnorm, stage->last, stage->normed, stage->p.norm,
                      stage->rstd, N, stream);
        grads_done(hook, lead + per_layer * L, stage->n_tensors);
    }
    stage_place(stage, starts, B, T, NULL, stream);
    for (int l = L - 1; l >= 0; l--) {
        if (stage->recompute && (stage->borrows || stage->slots > 1 || l + 1 < L)) // the last one's are still there
            layer_forward(stage, &acts[l], &stage->p.layers[l], again, stage->first_layer + l, B, T, NULL, stream);
        layer_backward(stage, &acts[l], &stage->p.layers[l], &stage->g.layers[l], &stage->d, stage->first_layer + l, B,
                       T, first, stream);
        grads_done(hook, lead + per_layer * l, lead + per_layer * (l + 1));
    }
    if (stage->has_embed && stage->g.embed != NULL)
        embedding_backward(stage->g.embed, stage->d.dx, stage->tokens + (int64_t)slot * stage->max_B * stage->max_T, N,
                           C, stream);
    grads_done(hook, 0, lead);
}

// Before the first backward of a step: gradients that are only added to.
static void stage_zero_grads(Stage *stage, Stream *stream) {
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        if (t->accumulated && !t->left_out)
            device_zero(tensor_in(stage->grads, t, 1), (size_t)store_bytes(grad_store(stage, t), t->n), stream);
    }
}

// Before the first micro-batch of a step: the same, the loss, and the weights' bf16 copies.
static void stage_begin(Stage *stage, Stream *stream) {
    stage_round(stage, stream);
    if (stage->has_head) device_zero(stage->loss_sum, sizeof(double), stream);
    stage_zero_grads(stage, stream);
}

// The sequences of one optimizer step.
typedef struct {
    uint32_t *tokens; // (b, T)
    int32_t *targets; // (b, T), -1 = not counted
    int32_t *starts;  // (b, T) the row of its sequence at which the document of a row begins
    int64_t *samples; // (b) which window of the training data
    int b, T;
    int masked; // documents of one sequence do not see each other; 0: starts are not looked at
    int64_t n_valid;
} Batch;

static int batch_alloc(Batch *batch, int b, int T) {
    batch->b = b, batch->T = T, batch->n_valid = 0, batch->masked = 0;
    batch->tokens = (uint32_t *)device_host_alloc(sizeof(uint32_t) * (size_t)b * (size_t)T);
    batch->targets = (int32_t *)device_host_alloc(sizeof(int32_t) * (size_t)b * (size_t)T);
    batch->starts = (int32_t *)device_host_alloc(sizeof(int32_t) * (size_t)b * (size_t)T);
    batch->samples = (int64_t *)calloc((size_t)b, sizeof(int64_t));
    return batch->tokens != NULL && batch->targets != NULL && batch->starts != NULL && batch->samples != NULL
               ? 0
               : error_set("out of memory for a batch");
}

static void batch_free(Batch *batch) {
    device_host_free(batch->tokens);
    device_host_free(batch->targets);
    device_host_free(batch->starts);
    free(batch->samples);
    batch->tokens = NULL, batch->targets = NULL, batch->starts = NULL, batch->samples = NULL;
}

// Where documents begin in the sequences of a batch from number b on; NULL: each is one.
static const int32_t *batch_starts(const Batch *batch, int b) {
    return batch->masked ? batch->starts + (size_t)b * (size_t)batch->T : NULL;
}

// Reads a window of the data as sequence number b of a batch; returns how many of its targets count.
static int batch_read(Batch *batch, int b, const Split *split, int64_t window) {
    size_t at = (size_t)b * (size_t)batch->T;
    batch->masked = split->masked;
    return split_read(split, window, batch->T, batch->tokens + at, batch->targets + at, batch->starts + at);
}

// Seconds spent in the parts of a step, for `make bench`; NULL elsewhere.
typedef struct {
    double forward, backward, optimizer;
} StepTimes;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Gradients of a whole step of a model of one stage into stage->grads, micro-batch by micro-batch; *loss = mean over
// the step's targets in nats. hook: told during every micro-batch; may be NULL.
static int stage_gradients(Stage *stage, const Batch *batch, int micro_batch, double *loss, StepTimes *times,
                           const PassHook *hook, Stream *stream) {
    float scale = batch->n_valid > 0 ? 1.0f / (float)batch->n_valid : 0.0f;
    stage_begin(stage, stream);
    for (int b = 0; b < batch->b; b += micro_batch) {
        int B = batch->b - b < micro_batch ? batch->b - b : micro_batch, N = B * batch->T;
        size_t at = (size_t)b * (size_t)batch->T;
        double start = seconds();
        stage_forward(stage, 0, batch->tokens + at, batch_starts(batch, b), B, batch->T, NULL, hook, stream);
        double middle = seconds();
        head_loss(stage, batch->targets + at, N, 1, scale, b == 0, stream);
        double headed = seconds();
        stage_backward(stage, 0, batch_starts(batch, b), B, batch->T, b == 0, hook, stream);
        if (times != NULL) { // of the head's three products one is forward
            times->forward += middle - start + (headed - middle) / 3.0;
            times->backward += seconds() - headed + (headed - middle) * 2.0 / 3.0;
        }
    }
    double sum = stage_take_loss(stage, stream);
    *loss = batch->n_valid > 0 ? sum / (double)batch->n_valid : 0.0;
    return stream_check(stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Optimizer

// Norm of all gradients of the stage: of floats the whole arena at once, whose gaps stay zero.
static double stage_grad_norm(const Stage *stage, Stream *stream) {
    double sum = 0.0;
    if (stage->grad_store == STORE_FP32) return sqrt(sum_of_squares(stage->grads, stage->arena_floats, stream));
    for (int i = 0; i < stage->n_tensors; i++)
        if (!stage->tensors[i].left_out)
            sum += stored_squares(stage_values(stage, ARENA_GRADS, &stage->tensors[i]), stage->tensors[i].n, stream);
    return sqrt(sum);
}

// What is the same for all tensors of a step.
typedef struct {
    AdamW adam;
    float lr, wd, scale;                   // scale: what gradients are multiplied by
    int64_t step;                          // from 1
    NesterovStep nesterov, nesterov_plain; // the latter without decay
} Update;

// AdamW, and delta follows how far the weights have moved.
static void pipemare_update(Stage *stage, int tensor, const Update *u, Stream *stream) {
    const Tensor *t = &stage->tensors[tensor];
    int64_t piece = optimizer_scratch_floats(stage, tensor);
    float *before = (float *)scratch_get(&stream->scratch[SCRATCH_STEP], sizeof(float) * (size_t)piece);
    if (before == NULL) {
        stream->failed = 1;
        return;
    }
    for (int64_t at = 0; at < t->n; at += piece) {
        int64_t n = t->n - at < piece ? t->n - at : piece, from = t->offset + at;
        device_copy(before, stage->params + from, sizeof(float) * (size_t)n, stream);
        adamw_update(stage->params + from, stage->grads + from, stage->m + from, stage->v + from, n, u->adam, u->lr,
                     t->decay ? u->wd : 0.0f, u->scale, u->step, stream);
        vector_drift(stage->delta + from, stage->params + from, before, pipemare_decay(stage->delay), n, stream);
    }
}

// What a step of the block matrix number `phase` of the stage does to its bases.
static RotateRefresh rotation_refresh(const Stage *stage, int64_t step, int phase) {
    if (!stage->has_basis) return ROTATE_COLD;
    return rotate_is_due(&stage->optimizer, stage->position, stage->n_stages, step, phase) ? ROTATE_WARM : ROTATE_KEEP;
}

// Where a pass over the block matrices has come.
typedef struct {
    int phase;      // the next matrix's number
    int64_t floats; // where its bases begin
} RotatedPass;

// One step of the block matrices from `tensor` on that go together; returns how many.
static int rotated_update(Stage *stage, int tensor, RotatedPass *pass, const Update *u, Stream *stream) {
    const Tensor *t = &stage->tensors[tensor];
    int count = rotation_group(stage, tensor), m = (int)t->shape[0], n = (int)t->shape[1];
    float *state = stage->rotation != NULL ? stage->rotation + pass->floats : NULL;
    RotateRefresh refresh[LAYER_TENSORS_MAX];
    for (int i = 0; i < count; i++) refresh[i] = rotation_refresh(stage, u->step, pass->phase++);
    rotate_update_group(stage->params + t->offset, stage->grads + t->offset, stage->m + t->offset, stage->v + t->offset,
                        state, m, n, count, count > 1 ? t[1].offset - t->offset : 0, &stage->optimizer, refresh,
                        u->adam, u->lr, u->wd, u->scale, u->step, stream);
    RotateSides sides = rotate_sides(&stage->optimizer, m, n);
    pass->floats += count * rotate_state_floats(sides, stage->optimizer.source, m, n);
    return count;
}

// One step of a tensor by its own values: of floats where they are, of what is kept otherwise piece by piece.
static void tensor_update(Stage *stage, const Tensor *t, const Update *u, Stream *stream) {
    OptimizerKind kind = stage->optimizer.kind;
    int is_muon = kind == OPTIMIZER_MUON && t->block, index = t->index;
    Stored param = stage_values(stage, ARENA_PARAMS, t), grad = stage_values(stage, ARENA_GRADS, t);
    Stored m = stage_values(stage, ARENA_M, t), v = stage_values(stage, ARENA_V, t);
    int n_wide = (param.store != STORE_FP32) + (grad.store != STORE_FP32);
    n_wide += (m.store != STORE_FP32) * (is_muon ? 1 : 2);
    int64_t piece = n_wide == 0 || is_muon || t->n < STORE_PIECE ? t->n : STORE_PIECE;
    float *scratch = n_wide > 0 ? wide_scratch(n_wide * piece, stream) : NULL, wd = t->decay ? u->wd : 0.0f;
    if (n_wide > 0 && scratch == NULL) return;
    for (int64_t at = 0; at < t->n; at += piece) {
        int64_t n = t->n - at < piece ? t->n - at : piece;
        float *room = scratch, *p = stored_open(param, at, n, &room, stream);
        const float *g = stored_open(grad, at, n, &room, stream);
        float *mean = stored_open(m, at, n, &room, stream), *square = NULL;
        if (!is_muon) square = stored_open(v, at, n, &room, stream);
        if (is_muon)
            muon_update(p, g, mean, (int)t->shape[0], (int)t->shape[1], u->lr, wd, u->scale, stream);
        else if (kind == OPTIMIZER_NESTEROV)
            nesterov_update(p, g, mean, square, n, t->decay ? u->nesterov : u->nesterov_plain, stream);
        else
            adamw_update(p, g, mean, square, n, u->adam, u->lr, wd, u->scale, u->step, stream);
        stored_close(param, at, p, n, rounding_of(stage->seed, index, ROUND_PARAM, u->step), stream);
        stored_close(m, at, mean, n, rounding_of(stage->seed, index, ROUND_M, u->step), stream);
        if (!is_muon) stored_close(v, at, square, n, rounding_of(stage->seed, index, ROUND_V, u->step), stream);
    }
}

// One step (from 1) of the stage's optimizer with gradients scaled to the clip norm (0: never).
static void stage_update(Stage *stage, AdamW adam, float lr, float wd, double grad_norm, float clip, int64_t step,
                         Stream *stream) {
    float scale = clip > 0.0f && grad_norm > (double)clip ? (float)((double)clip / (grad_norm + 1e-6)) : 1.0f;
    OptimizerKind kind = stage->optimizer.kind;
    RotatedPass pass = {0, 0};
    Update u;
    memset(&u, 0, sizeof u);
    u.adam = adam, u.lr = lr, u.wd = wd, u.scale = scale, u.step = step;
    if (kind == OPTIMIZER_NESTEROV) {
        u.nesterov = nesterov_step(adam, lr, wd, scale, step, &stage->nesterov);
        u.nesterov_plain = nesterov_step(adam, lr, 0.0f, scale, step, &stage->nesterov);
    }
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        if (kind == OPTIMIZER_ROTATE && t->block)
            i += rotated_update(stage, i, &pass, &u, stream) - 1;
        else if (kind == OPTIMIZER_PIPEMARE)
            pipemare_update(stage, i, &u, stream);
        else
            tensor_update(stage, t, &u, stream);
    }
    stage->has_basis = 1;
}

// Multiplications and additions of the optimizer's step beyond passes over the values.
static double update_flops(const Stage *stage) {
    double flops = 0.0;
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        if (t->block) flops += optimizer_flops(&stage->optimizer, (double)t->shape[0], (double)t->shape[1]);
    }
    return flops;
}

// ---------------------------------------------------------------------------------------------------------------------
// Evaluation and generation

typedef struct {
    double sum, loss; // nats; mean nats a target
    int64_t n_targets, n_bytes;
    double bits_per_byte; // NaN where the tokenizer does not say bytes
} Evaluation;

// Held-out windows that are looked at: at most max_tokens of them, 0: all.
static int64_t evaluation_windows(const Dataset *data, int64_t max_tokens) {
    int64_t limit = (max_tokens + data->T - 1) / data->T;
    return max_tokens > 0 && limit < data->val.n_windows ? limit : data->val.n_windows;
}

// Reads the windows from w on, as many as the batch holds; returns how many.
static int evaluation_read(Evaluation *eval, const Dataset *data, int64_t w, int64_t n_windows, Batch *batch) {
    int b = n_windows - w < batch->b ? (int)(n_windows - w) : batch->b;
    for (int i = 0; i < b; i++) eval->n_targets += batch_read(batch, i, &data->val, w + i);
    return b;
}

// Adds the losses of b windows that the last stage has normed outputs of.
static void evaluation_add(Evaluation *eval, Stage *last, const Batch *batch, int b, const Tokenizer *tokenizer,
                           Stream *stream) {
    head_loss(last, batch->targets, b * batch->T, 0, 0.0f, 0, stream);
    eval->sum += stage_take_loss(last, stream);
    for (int n = 0; n < b * batch->T; n++)
        if (batch->targets[n] >= 0) eval->n_bytes += tokenizer_decode(tokenizer, NULL, 0, (uint32_t)batch->targets[n]);
}

static void evaluation_end(Evaluation *eval) {
    eval->loss = eval->n_targets > 0 ? eval->sum / (double)eval->n_targets : (double)NAN;
    eval->bits_per_byte = eval->n_bytes > 0 ? eval->sum / log(2.0) / (double)eval->n_bytes : (double)NAN;
}

// Held-out loss over the first windows of the split, at most max_tokens of them (0: all). pass: as for model_forward.
static int evaluate(Stage *model, const Dataset *data, const Tokenizer *tokenizer, int64_t max_tokens,
                    BoundaryPass pass, void *context, Evaluation *out, Stream *stream) {
    int T = data->T, B = model->max_B;
    int64_t n_windows = evaluation_windows(data, max_tokens);
    Batch batch;
    memset(out, 0, sizeof *out);
    if (T > model->max_T) return error_set("sequences of %d tokens in a stage made for %d", T, model->max_T);
    if (batch_alloc(&batch, B, T)) {
        batch_free(&batch);
        return -1;
    }
    model_round(model, stream);
    for (int64_t w = 0; w < n_windows; w += B) {
        int b = evaluation_read(out, data, w, n_windows, &batch);
        const int32_t *starts = batch_starts(&batch, 0);
        Stage *last = model_forward(model, batch.tokens, starts, b, T, NULL, pass, context, stream);
        evaluation_add(out, last, &batch, b, tokenizer, stream);
    }
    batch_free(&batch);
    evaluation_end(out);
    return stream_check(stream);
}

typedef struct {
    float probability;
    int id;
} Candidate;

static int candidate_order(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    if (x->probability != y->probability) return x->probability > y->probability ? -1 : 1;
    return x->id - y->id;
}

// Draws the next token from logits (V): temperature 0 is the likeliest, top_p keeps the smallest set of likeliest
// tokens that reaches that probability (Holtzman et al. 2020). u in [0, 1). -1 if a logit is not finite.
static int sample_token(const float *logits, int V, float temperature, float top_p, float u, Candidate *work) {
    float max = logits[0];
    double total = 0.0, kept = 0.0;
    int best = 0, n = 0;
    for (int v = 1; v < V; v++)
        if (logits[v] > max) max = logits[v], best = v;
    for (int v = 0; v < V; v++) {
        work[v].probability = expf((logits[v] - max) / (temperature > 0.0f ? temperature : 1.0f)), work[v].id = v;
        total += (double)work[v].probability;
    }
    if (!isfinite(total)) return error_set("the model gives logits that are not finite; see --check-weights");
    if (temperature <= 0.0f) return best;
    qsort(work, (size_t)V, sizeof *work, candidate_order);
    while (n < V && kept < (double)top_p * total) kept += (double)work[n++].probability;
    double point = (double)u * kept;
    for (int i = 0; i < n; i++) {
        point -= (double)work[i].probability;
        if (point < 0.0) return work[i].id;
    }
    return work[n - 1].id;
}

// What the choice of the next tokens passes through.
typedef struct {
    Candidate *work; // (V)
    float *logits;   // (V)
    floatX *row;     // (V)
} Sampler;

static void sampler_free(Sampler *sampler) {
    free(sampler->work);
    free(sampler->logits);
    free(sampler->row);
}

static int sampler_alloc(Sampler *sampler, int V) {
    sampler->work = (Candidate *)malloc(sizeof(Candidate) * (size_t)V);
    sampler->logits = (float *)malloc(sizeof(float) * (size_t)V);
    sampler->row = (floatX *)malloc(sizeof(floatX) * (size_t)V);
    if (sampler->work != NULL && sampler->logits != NULL && sampler->row != NULL) return 0;
    return error_set("out of memory for generation");
}

// ids (n) = the token after each of n rows of normed outputs; u (n): where in their distribution, in [0, 1).
static int draw_tokens(uint32_t *ids, Stage *last, const floatX *normed, int n, const float *u, float temperature,
                       float top_p, Sampler *sampler, Stream *stream) {
    int C = last->config.channels, V = last->config.vocab;
    for (int at = 0; at < n; at += last->logits_rows) {
        int rows = n - at < last->logits_rows ? n - at : last->logits_rows;
        matmul_forward(last->logits, normed + (size_t)at * C, stage_weight(last, last->p.head), rows, C, V, NULL,
                       stream);
        if (stream_check(stream)) return -1;
        for (int r = 0; r < rows; r++) {
            device_copy(sampler->row, last->logits + (size_t)r * V, sizeof(floatX) * (size_t)V, stream);
            for (int v = 0; v < V; v++) sampler->logits[v] = (float)sampler->row[v];
            int id = sample_token(sampler->logits, V, temperature, top_p, u[at + r], sampler->work);
            if (id < 0) return -1;
            ids[at + r] = (uint32_t)id;
        }
    }
    return 0;
}

// The prompt's tokens as the model's texts begin; something must, so that an empty prompt has a mark in any case.
// tokens has room for one more than the prompt's. Returns how many, or -1.
static int64_t prompt_tokens(uint32_t *tokens, const Tokenizer *tokenizer, const char *prompt) {
    int64_t length = (int64_t)strlen(prompt), begun = 0;
    int begin = tokenizer->bos >= 0 ? tokenizer->bos : tokenizer->eos;
    if (tokenizer_adds_bos(tokenizer) || (length == 0 && begin >= 0)) tokens[begun++] = (uint32_t)begin;
    int64_t n = tokenizer_encode(tokenizer, tokens + begun, prompt, length);
    if (n == 0 && begun == 0)
        return error_set("--generate: the prompt is empty, and the model has no mark to begin with");
    return n < 0 ? -1 : begun + n;
}

// Continues the prompt and writes the text to `out` as it comes. The model must hold one sequence of the prompt's
// length; the result is a function of the weights, the prompt and the seed.
static int generate(Stage *model, const Tokenizer *tokenizer, const char *prompt, const Options *opts, FILE *out,
                    Stream *stream) {
    int V = model->config.vocab, C = model->config.channels, n = 0, result = 0;
    int T_max = model->max_T < model->config.context ? model->max_T : model->config.context;
    if (tokenizer_takes_text(tokenizer, "--generate")) return -1;
    int64_t room = tokenizer_room(tokenizer, (int64_t)strlen(prompt)) + 1;
    uint32_t *tokens = (uint32_t *)malloc(sizeof(uint32_t) * (size_t)room);
    Sampler sampler;
    KvCache cache = {NULL, T_max, 0};
    if (sampler_alloc(&sampler, V) || tokens == NULL || kv_cache_alloc(&cache, &model->config, T_max)) {
        result = error_set("out of memory for generation");
    } else {
        int64_t n_prompt = prompt_tokens(tokens, tokenizer, prompt);
        n = n_prompt < T_max ? (int)n_prompt : T_max;
        if (n < 0) result = -1;
        if (n == T_max)
            result = error_set("--generate: the prompt has %lld tokens, the context is %d; nothing is left to generate",
                               (long long)n_prompt, T_max);
    }
    model_round(model, stream);
    for (int i = 0; result == 0 && i < opts->max_tokens && cache.used + n <= T_max; i++) {
        char text[1024] = "";
        uint32_t id;
        float u = rand_uniform((uint64_t)opts->seed, RAND_SAMPLE, (uint64_t)i);
        Stage *last = model_forward(model, tokens, NULL, 1, n, &cache, NULL, NULL, stream);
        const floatX *normed = last->normed + (size_t)(n - 1) * (size_t)C;
        result = draw_tokens(&id, last, normed, 1, &u, opts->temperature, opts->top_p, &sampler, stream);
        if (result != 0 || (int)id == tokenizer->eos || (int)id == model->config.eos_id) break;
        int n_bytes = tokenizer_decode(tokenizer, text, sizeof text, id);
        fwrite(text, 1, n_bytes <= (int)sizeof text ? (size_t)n_bytes : 0, out);
        fflush(out);
        tokens[0] = id, n = 1;
    }
    device_free(cache.rows);
    sampler_free(&sampler);
    free(tokens);
    return result;
}

// --- Multiple choice

// Inputs and targets of rows that are computed together, padded to the first one's length, which is the longest. Their
// outputs that count are gathered one after the other: from[i] is the row of number i, targets[i] its target. Returns
// how many.
static int quiz_batch(const Quiz *quiz, const QuizRow *rows, int B, uint32_t *tokens, int *from, int32_t *targets) {
    int T = rows[0].n, n = 0;
    for (int b = 0; b < B; b++) {
        const Choice *choice = &quiz->choices[rows[b].choice];
        const uint32_t *own = quiz->tokens + choice->first;
        for (int t = 0; t < T; t++) tokens[b * T + t] = t < rows[b].n ? own[t] : own[0];
        for (int t = rows[b].n - choice->scored; t < rows[b].n; t++) {
            from[n] = b * T + t;
            targets[n++] = (int32_t)own[t + 1];
        }
    }
    return n;
}

// Log-likelihoods of B choices from their rows' outputs; losses: room for as many as there are targets, n of them.
static int quiz_take(Quiz *quiz, const QuizRow *rows, int B, Stage *last, const int *from, const int32_t *targets,
                     int n, float *losses, Stream *stream) {
    size_t C = (size_t)last->config.channels;
    for (int i = 0; i < n; i++) // forward only: what is read has not been written yet
        if (from[i] != i) device_copy(last->normed + i * C, last->normed + from[i] * C, sizeof(floatX) * C, stream);
    head_loss(last, targets, n, 0, 0.0f, 0, stream);
    device_copy(losses, last->losses, sizeof(float) * (size_t)n, stream);
    stage_take_loss(last, stream);
    if (stream_check(stream)) return -1;
    for (int b = 0, at = 0; b < B; b++) {
        Choice *choice = &quiz->choices[rows[b].choice];
        choice->logprob = 0.0;
        for (int i = 0; i < choice->scored; i++) choice->logprob -= (double)losses[at++];
        if (!isfinite(choice->logprob)) return error_set("--eval-choices: a loss is not finite; see --check-weights");
    }
    return 0;
}

// The log-likelihood of every choice, as many at once as the model's rows hold.
static int quiz_answer(Quiz *quiz, Stage *model, Stream *stream) {
    int N = model->max_B * model->max_T, result = 0;
    QuizRow *rows = quiz_rows(quiz);
    uint32_t *tokens = (uint32_t *)device_host_alloc(sizeof(uint32_t) * (size_t)N);
    int32_t *targets = (int32_t *)device_host_alloc(sizeof(int32_t) * (size_t)N);
    int *from = (int *)malloc(sizeof(int) * (size_t)N);
    float *losses = (float *)malloc(sizeof(float) * (size_t)N);
    if (rows == NULL || tokens == NULL || targets == NULL || from == NULL || losses == NULL)
        result = error_set("out of memory for the questions");
    model_round(model, stream);
    for (int64_t c = 0; c < quiz->n_choices && result == 0;) {
        int T = rows[c].n, B = N / T < quiz->n_choices - c ? N / T : (int)(quiz->n_choices - c);
        int n = quiz_batch(quiz, rows + c, B, tokens, from, targets);
        Stage *last = model_forward(model, tokens, NULL, B, T, NULL, NULL, NULL, stream);
        result = quiz_take(quiz, rows + c, B, last, from, targets, n, losses, stream);
        c += B;
    }
    free(rows);
    device_host_free(tokens);
    device_host_free(targets);
    free(from);
    free(losses);
    return result;
}

// --- Answers to a file of prompts, several at once: each has a cache of its own, and when one ends the next prompt
// takes its place.

// An answer on its way.
typedef struct {
    int64_t line; // which one
    char *text;   // so far
    int64_t length, room;
    int n_tokens;
    uint32_t next; // the last token, not yet seen by the model
} Answer;

typedef struct {
    json_t **lines; // (n) those of the file; "output" joins when it is there
    int64_t n, next, written, n_cut;
    const Tokenizer *tokenizer;
    ChatFormat chat; // of prompts that are conversations
    int end_id;      // the config's, -1: none
    const Options *opts;
    float temperature;
    int T_max;
    uint32_t *tokens; // (T_max) of a prompt
    Sampler sampler;
    Answer *answers; // (slots) of which `active` are at work
    KvCache *caches; // (slots)
    int slots, active;
    FileWriter writer;
} Answering;

// text (n) as a JSON string, with what is no UTF-8 replaced by U+FFFD; NULL when out of memory.
static json_t *text_to_json(const char *text, int64_t n) {
    char *clean = (char *)malloc((size_t)n * 3 + 1);
    size_t out = 0;
    if (clean == NULL) return NULL;
    for (int64_t i = 0; i < n;) {
        int length = utf8_length((const unsigned char *)text + i, (size_t)(n - i));
        memcpy(clean + out, length > 0 ? text + i : "\xEF\xBF\xBD", length > 0 ? (size_t)length : 3);
        out += length > 0 ? (size_t)length : 3, i += length > 0 ? length : 1;
    }
    json_t *json = json_stringn(clean, out);
    free(clean);
    return json;
}

// Cuts the answer before the first of the --stop texts, which must end in its last n_new bytes. 1 if there is one.
static int answer_stops(Answer *answer, const TextList *stops, int64_t n_new) {
    int64_t first = answer->length;
    for (int i = 0; i < stops->n; i++) {
        int64_t size = (int64_t)strlen(stops->item[i]), at = answer->length - n_new - size + 1;
        for (at = at > 0 ? at : 0; size > 0 && at + size <= answer->length; at++)
            if (at < first && memcmp(answer->text + at, stops->item[i], (size_t)size) == 0) first = at;
    }
    int found = first < answer->length;
    answer->length = first;
    return found;
}

// Takes the next token of an answer. 1 if it ends with it, 0 if not, -1 when out of memory.
static int answer_take(Answering *a, Answer *answer, const KvCache *cache, uint32_t id) {
    const int ends[] = {a->tokenizer->eos, a->end_id, a->chat.id.eot, a->chat.id.im_end};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if ((int)id == ends[i]) return 1;
    int n_bytes = tokenizer_decode(a->tokenizer, NULL, 0, id);
    void *text = grown(answer->text, &answer->room, answer->length + n_bytes + 1, 1);
    if (text == NULL) return error_set("out of memory for an answer");
    answer->text = (char *)text;
    tokenizer_decode(a->tokenizer, answer->text + answer->length, n_bytes, id);
    answer->length += n_bytes, answer->next = id;
    if (answer_stops(answer, &a->opts->stop, n_bytes)) return 1;
    return ++answer->n_tokens == a->opts->max_tokens || cache->used == a->T_max;
}

// The place in its answer's distribution from which a token is drawn; that of the first line as generate() has it.
static float answer_uniform(const Answering *a, const Answer *answer) {
    uint64_t index = (uint64_t)answer->line << 24 | (uint64_t)answer->n_tokens;
    return rand_uniform((uint64_t)a->opts->seed, RAND_SAMPLE, index);
}

// Appends the tokens of a line's prompt as the model's texts begin, or of a conversation up to where the answer begins.
static int stream_put_prompt(TokenStream *stream, const Answering *a, const json_t *line) {
    const json_t *prompt = json_object_get(line, "prompt"), *messages = sample_field(line, "messages");
    const Tokenizer *tokenizer = a->tokenizer;
    int64_t length = (int64_t)json_string_length(prompt);
    int begin = tokenizer->bos >= 0 ? tokenizer->bos : tokenizer->eos;
    if (messages != NULL) return chat_put_prompt(stream, &a->chat, messages);
    return stream_put(stream, tokenizer_adds_bos(tokenizer) || length == 0 ? begin : -1, 0) ||
           stream_put_text(stream, tokenizer, json_string_value(prompt), length, 0);
}

// Tokens of a line's prompt; one that leaves too little room for an answer loses its left, but not the token that
// begins a text. Returns how many, or -1.
static int answer_prompt(Answering *a, int64_t line) {
    TokenStream prompt;
    int64_t room = a->T_max - a->opts->max_tokens;
    stream_init(&prompt);
    int result = stream_put_prompt(&prompt, a, a->lines[line]);
    int64_t n = prompt.n, begun = n > 0 && (prompt.tokens[0] & ~TOKEN_NO_LOSS) == (uint32_t)a->tokenizer->bos;
    if (room < a->T_max / 2) room = a->T_max / 2;
    int64_t kept = n < room ? n : room;
    for (int64_t i = 0; i < kept && result == 0; i++)
        a->tokens[i] = prompt.tokens[i < begun ? i : n - kept + i] & ~TOKEN_NO_LOSS;
    a->n_cut += kept < n;
    stream_free(&prompt);
    return result != 0 ? -1 : (int)kept;
}

// What is wrong with a line, NULL if nothing is.
static const char *prompt_fault(const json_t *line, const Tokenizer *tokenizer) {
    const json_t *prompt = json_object_get(line, "prompt");
    if (sample_field(line, "messages") != NULL)
        return sample_is_empty(line, SAMPLE_MESSAGES) ? "its \"messages\" are empty"
                                                      : sample_fault(line, SAMPLE_MESSAGES);
    if (!json_is_string(prompt)) return "no \"prompt\" string and no \"messages\" in it";
    if (json_string_length(prompt) == 0 && tokenizer->bos < 0 && tokenizer->eos < 0)
        return "the prompt is empty, and this model has no token that begins a text";
    return NULL;
}

// Writes the finished answers that are next in the file's order.
static int answers_write(Answering *a) {
    while (a->written < a->n && json_object_get(a->lines[a->written], "output") != NULL) {
        if (json_write_line(&a->writer, a->lines[a->written])) return -1;
        a->lines[a->written++] = NULL;
    }
    return 0;
}

// Puts an answer that has ended into its line, and the last one at work into its place.
static int answer_end(Answering *a, int slot) {
    Answer *answer = &a->answers[slot], *last = &a->answers[a->active - 1], ended = *answer;
    json_t *output = text_to_json(answer->text, answer->length);
    if (output == NULL || json_object_set_new(a->lines[answer->line], "output", output) != 0)
        return error_set("out of memory for an answer");
    KvCache cache = a->caches[slot];
    *answer = *last, a->caches[slot] = a->caches[a->active - 1];
    *last = ended, a->caches[a->active - 1] = cache; // its text and its cache are used again
    a->active--;
    return answers_write(a);
}

// Begins the answers to further prompts while there are slots.
static int answers_begin(Answering *a, Stage *model, Stream *stream) {
    int C = model->config.channels;
    while (a->active < a->slots && a->next < a->n) {
        Answer *answer = &a->answers[a->active];
        KvCache *cache = &a->caches[a->active];
        uint32_t id;
        answer->line = a->next, answer->length = 0, answer->n_tokens = 0, cache->used = 0;
        int n = answer_prompt(a, a->next++);
        if (n < 0) return -1;
        Stage *last = model_forward(model, a->tokens, NULL, 1, n, cache, NULL, NULL, stream);
        float u = answer_uniform(a, answer);
        const floatX *normed = last->normed + (size_t)(n - 1) * (size_t)C;
        if (draw_tokens(&id, last, normed, 1, &u, a->temperature, a->opts->top_p, &a->sampler, stream)) return -1;
        a->active++;
        int ends = answer_take(a, answer, cache, id);
        if (ends < 0 || (ends && answer_end(a, a->active - 1))) return -1;
    }
    return 0;
}

// One more token of every answer at work.
static int answers_step(Answering *a, Stage *model, uint32_t *ids, float *u, Stream *stream) {
    int n = a->active;
    for (int i = 0; i < n; i++) ids[i] = a->answers[i].next, u[i] = answer_uniform(a, &a->answers[i]);
    Stage *last = model_forward(model, ids, NULL, n, 1, a->caches, NULL, NULL, stream);
    if (draw_tokens(ids, last, last->normed, n, u, a->temperature, a->opts->top_p, &a->sampler, stream)) return -1;
    for (int i = n - 1; i >= 0; i--) { // from the end: who has ended changes places with one that has been looked at
        int ends = answer_take(a, &a->answers[i], &a->caches[i], ids[i]);
        if (ends < 0 || (ends && answer_end(a, i))) return -1;
    }
    return 0;
}

// Reads the prompts.
static int answers_read(Answering *a, const char *path) {
    FileMap map;
    JsonLines lines;
    json_t *json = NULL;
    int got = 0, result = 0;
    int64_t room = 0;
    if (tokenizer_takes_text(a->tokenizer, path) || file_map(&map, path)) return -1;
    jsonl_begin(&lines, path, (const char *)map.data, map.size);
    while (result == 0 && (got = jsonl_next(&lines, &json)) > 0) {
        void *list = grown(a->lines, &room, a->n + 1, sizeof *a->lines);
        if (list != NULL) a->lines = (json_t **)list;
        if (list == NULL)
            result = error_set("out of memory for the prompts");
        else if (prompt_fault(json, a->tokenizer) != NULL)
            result = line_error(&lines, prompt_fault(json, a->tokenizer));
        json_object_del(json, "output"); // an older answer, or a reference one
        if (result != 0)
            json_decref(json);
        else
            a->lines[a->n++] = json;
    }
    if (result == 0 && got < 0) result = -1;
    if (result == 0 && a->n == 0) result = error_set("%s: there are no prompts in it", path);
    jsonl_end(&lines);
    file_unmap(&map);
    return result;
}

// Memory for `slots` answers at once.
static int answers_alloc(Answering *a, const Stage *model, int slots) {
    int context = model->config.context;
    a->T_max = model->max_T < context ? model->max_T : context, a->end_id = model->config.eos_id;
    if (a->T_max < 2) return error_set("--eval-generate: --seq %d leaves no room for an answer", a->T_max);
    a->slots = a->n < slots ? (int)a->n : slots;
    a->tokens = (uint32_t *)malloc(sizeof(uint32_t) * (size_t)a->T_max);
    a->answers = (Answer *)calloc((size_t)a->slots, sizeof(Answer));
    a->caches = (KvCache *)calloc((size_t)a->slots, sizeof(KvCache));
    if (a->tokens == NULL || a->answers == NULL || a->caches == NULL) return error_set("out of memory for generation");
    for (int i = 0; i < a->slots; i++)
        if (kv_cache_alloc(&a->caches[i], &model->config, a->T_max)) return -1;
    return sampler_alloc(&a->sampler, model->config.vocab);
}

static void answers_free(Answering *a) {
    for (int i = 0; a->caches != NULL && i < a->slots; i++) device_free(a->caches[i].rows);
    for (int i = 0; a->answers != NULL && i < a->slots; i++) free(a->answers[i].text);
    for (int64_t i = 0; i < a->n; i++) json_decref(a->lines[i]);
    free(a->lines);
    free(a->tokens);
    free(a->answers);
    free(a->caches);
    sampler_free(&a->sampler);
}

// Answers all prompts into the writer, which is open. The model must hold max(slots, context) rows.
static int answers_make(Answering *a, Stage *model, Stream *stream) {
    uint32_t *ids = (uint32_t *)malloc(sizeof(uint32_t) * (size_t)a->slots);
    float *u = (float *)malloc(sizeof(float) * (size_t)a->slots);
    int result = ids != NULL && u != NULL ? 0 : error_set("out of memory for generation");
    model_round(model, stream);
    while (result == 0 && (a->active > 0 || a->next < a->n)) {
        result = answers_begin(a, model, stream);
        if (result == 0 && a->active > 0) result = answers_step(a, model, ids, u, stream);
    }
    free(ids);
    free(u);
    return result;
}

// --- Pruning

// Sets the share of a tensor's values that are the smallest to zero, through staging; returns how many.
static int64_t tensor_prune(const Stage *stage, const Tensor *tensor, double share, PruneSearch *search) {
    int64_t k = prune_share(tensor->n, share);
    Stored values = stage_values(stage, ARENA_PARAMS, tensor);
    if (k == 0) return 0;
    prune_begin(search, k);
    for (int pass = 0; pass < 3; pass++) { // two to find the threshold, one to apply it
        for (int64_t at = 0; at < tensor->n; at += STAGING) {
            int64_t n = tensor->n - at < STAGING ? tensor->n - at : STAGING;
            stored_download(stage->staging, values, at, n, stage->stream);
            if (pass < 2) {
                prune_look(search, stage->staging, n);
            } else {
                prune_apply(search, stage->staging, n);
                stored_upload(values, at, stage->staging, n, stage->stream);
            }
        }
        if (pass < 2) prune_pass_end(search);
    }
    return k;
}

// The same for each matrix of the layers; embeddings, norms and head are left alone. *of: the weights of those
// matrices.
static int model_prune(Stage *model, double share, int64_t *pruned, int64_t *of) {
    PruneSearch *search = (PruneSearch *)malloc(sizeof *search);
    *pruned = *of = 0;
    if (search == NULL) return error_set("out of memory for pruning");
    for (Stage *stage = model; stage != NULL; stage = stage->next) {
        for (int i = 0; i < stage->n_tensors; i++) {
            if (!stage->tensors[i].block) continue;
            *pruned += tensor_prune(stage, &stage->tensors[i], share, search);
            *of += stage->tensors[i].n;
        }
    }
    free(search);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Mesh: replicas x stages cells. Each cell has a stage of the model; the stages of a replica are a pipeline whose
// boundary tensors travel through codec and link. All cells of this process run in turn, in a fixed order.

enum { MAX_GPUS = 16 };

typedef enum { TRAFFIC_FORWARD, TRAFFIC_BACKWARD, TRAFFIC_DP, TRAFFIC_ANCHOR, TRAFFIC_KINDS } Traffic;

typedef struct {
    int64_t bytes[TRAFFIC_KINDS];
} Sent;

// A message of klt that the entropy coder writes while its cell goes on. The cell sends it once it is done.
typedef struct {
    CoderJob job;
    KltSending sending;
    KltEnd *end;
    unsigned char *message;
    double took; // seconds of coding
    int active, gpu, counted;
    Traffic kind;
    Link *to;
    double ready; // simulated time at which the coder has begun
} Outgoing;

// A message of klt that the entropy coder reads before its cell needs it.
typedef struct {
    CoderJob job;
    KltCoding coding;
    KltWork work; // of the host's memory only
    unsigned char *message;
    double took, arrival;
    int active;
} Incoming;

typedef struct {
    int replica, index; // index: which stage
    int hosted;         // it is of this process: its stage has memory
    Stage stage;
    Stage *more;    // (n_gpus - 1) the same stage on further GPUs: parameters, gradients and activations
    Work *schedule; // (2 * micro-batches)
    int n_work, next_work;
    float *powersgd_q; // warm starts of the stage's matrices, one after the other; NULL unless replicas meet
    float grad_scale;  // 1 / targets that the step's loss counts
    double grad_norm, loss_sum;
    int64_t updates;                           // of the weights so far
    int skipped_in_a_row;                      // the last steps that gave no update
    int64_t forward_version, backward_version; // of the weights that the last micro-batch saw; asynchronous
    Clock clock;
    Flow flow;        // of an asynchronous pipeline
    double *merge_at; // (fragments) simulated time at which the average in flight is complete
    Sent step, total;
    Outgoing outgoing;
    Incoming incoming[2]; // by direction
} Cell;

// What one GPU codes messages of klt with. Each has a copy, made of the same bytes.
typedef struct {
    KltTable *tables; // (n_stages - 1, 2) in use, by boundary and direction; NULL: another codec
    float *embed;     // (V, C) the embedding the run has begun with; NULL: states are not predicted
    KltWork work;     // what messages pass through, one after the other
    KltWork *own;     // (cells) of the messages that the entropy coder writes; NULL: it has no thread
} KltPlace;

typedef struct {
    int n_replicas, n_stages; // of the fast circuit
    int asynchronous, stash;  // a step is one micro-batch, seen by versions of the weights; backward by the forward's
    int micro_batch;
    int living[MESH_MAX_REPLICAS]; // (n_replicas) which replicas are in the run: averages are theirs
    Cell *cells;                   // (n_replicas, n_stages)
    Link *forward, *backward;      // (n_replicas, n_stages - 1)
    Link *check;                   // the same: states in a validation that several processes do together
    Meeting *meetings;             // (n_stages) the average at work; NULL: one replica
    struct Node *node;             // how others' cells are reached; NULL: all cells are of this process
    Codec codec;
    CodecEnd *ends; // (n_replicas, n_stages - 1, 2): of each boundary the stage before it, the stage behind it
    LinkSpeed speed;
    double device_flops; // of a cell, 0: the time it takes here counts
    unsigned char *message;
    int64_t message_bytes;
    float *exchange; // (n_replicas, exchange_floats) a share of an average, while it is sent or met
    int64_t exchange_floats;
    Stream *stream;
    // the GPUs of a cell: micro-batch m is computed by number m % n_gpus, the first has all state
    int n_gpus;
    Nccl *nccl;
    Stream *streams[MAX_GPUS]; // one a GPU; the first is `stream`
    KltPlace klt[MAX_GPUS];
    Coder coder;
} Mesh;

static Cell *mesh_cell(const Mesh *mesh, int replica, int stage) {
    return &mesh->cells[replica * mesh->n_stages + stage];
}

static int mesh_cells(const Mesh *mesh) {
    return mesh->n_replicas * mesh->n_stages;
}

// The cells of this process, in order: the first for NULL, then the one behind `cell`; NULL after the last.
static Cell *mesh_next(const Mesh *mesh, const Cell *cell) {
    for (int i = cell == NULL ? 0 : (int)(cell - mesh->cells) + 1; i < mesh_cells(mesh); i++)
        if (mesh->cells[i].hosted) return &mesh->cells[i];
    return NULL;
}

// The stage of a cell as GPU number `gpu` holds it.
static Stage *cell_stage(Cell *cell, int gpu) {
    return gpu == 0 ? &cell->stage : &cell->more[gpu - 1];
}

static Stage *mesh_model(const Mesh *mesh, int replica) {
    return &mesh_cell(mesh, replica, 0)->stage;
}

// behind: 0 for the end of the stage before the boundary, 1 for that of the stage behind it.
static CodecEnd *mesh_end(const Mesh *mesh, int replica, int boundary, int behind) {
    return &mesh->ends[2 * (replica * (mesh->n_stages - 1) + boundary) + behind];
}

// The same for messages that GPU number `gpu` codes: what an end remembers is the host's, tables are of a GPU.
static CodecEnd *mesh_end_on(const Mesh *mesh, int replica, int boundary, int behind, int gpu) {
    CodecEnd *end = mesh_end(mesh, replica, boundary, behind);
    const KltPlace *place = &mesh->klt[gpu];
    for (int d = 0; d < 2 && place->tables != NULL; d++) {
        const KltTable *table = &place->tables[2 * boundary + d];
        end->klt[d].table = table->blob != NULL ? table : NULL;
        end->klt[d].work = (void *)&place->work, end->klt[d].embed = place->embed;
    }
    return end;
}

static void klt_place_free(KltPlace *place, int n_tables, int n_cells) {
    for (int i = 0; i < n_tables && place->tables != NULL; i++) klt_table_free(&place->tables[i]);
    for (int i = 0; i < n_cells && place->own != NULL; i++) klt_work_free(&place->own[i]);
    free(place->own);
    free(place->tables);
    device_free(place->embed);
    klt_work_free(&place->work);
    memset(place, 0, sizeof *place);
}

// Of a meeting in zeroed memory: nothing.
static void meeting_destroy(Meeting *meeting) {
    for (int r = 0; r < meeting->n_replicas && meeting->seats != NULL; r++) device_free(meeting->seats[r].values);
    meeting_free(meeting);
}

static void mesh_free(Mesh *mesh) {
    int n_cells = mesh_cells(mesh), n_links = n_cells - mesh->n_replicas;
    coder_stop(&mesh->coder); // before the messages it works on go
    nccl_destroy(mesh->nccl); // its sums end before their memory goes
    for (int g = 1; g < mesh->n_gpus; g++) {
        if (mesh->streams[g] != NULL) stream_use(mesh->streams[g]);
        for (int i = 0; i < n_cells; i++)
            if (mesh->cells[i].more != NULL) stage_free(cell_stage(&mesh->cells[i], g));
        klt_place_free(&mesh->klt[g], 2 * (mesh->n_stages - 1), n_cells);
    }
    if (mesh->stream != NULL) stream_use(mesh->stream);
    klt_place_free(&mesh->klt[0], 2 * (mesh->n_stages - 1), n_cells);
    for (int i = 0; i < n_cells && mesh->cells != NULL; i++) {
        free(mesh->cells[i].more);
        stage_free(&mesh->cells[i].stage);
        free(mesh->cells[i].schedule);
        flow_free(&mesh->cells[i].flow);
        device_free(mesh->cells[i].powersgd_q);
        free(mesh->cells[i].merge_at);
        free(mesh->cells[i].outgoing.message);
        for (int d = 0; d < 2; d++) {
            free(mesh->cells[i].incoming[d].message);
            klt_work_free(&mesh->cells[i].incoming[d].work);
        }
    }
    for (int i = 0; i < n_links && mesh->forward != NULL && mesh->backward != NULL; i++) {
        link_free(&mesh->forward[i]);
        link_free(&mesh->backward[i]);
        if (mesh->check != NULL) link_free(&mesh->check[i]);
    }
    for (int s = 0; s < mesh->n_stages && mesh->meetings != NULL; s++) meeting_destroy(&mesh->meetings[s]);
    for (int i = 0; i < 2 * n_links && mesh->ends != NULL; i++) codec_end_free(&mesh->ends[i]);
    free(mesh->ends);
    free(mesh->cells);
    free(mesh->forward);
    free(mesh->backward);
    free(mesh->check);
    free(mesh->meetings);
    device_host_free(mesh->message);
    device_free(mesh->exchange);
    for (int g = 1; g < mesh->n_gpus; g++) stream_destroy(mesh->streams[g]);
    memset(mesh, 0, sizeof *mesh);
}

// Cuts the model into cells: tables and links, no memory for tensors yet. A tied model of several stages is untied.
static int mesh_table(Mesh *mesh, const Config *config, int n_replicas, int n_stages, int T) {
    int first[CONFIG_MAX_LAYERS + 1];
    size_t n_cells = (size_t)n_replicas * (size_t)n_stages;
    Config cut = *config;
    if (partition_layers(first, config, n_stages, T)) return -1;
    if (n_stages > 1) cut.tied = 0;
    mesh->n_replicas = n_replicas, mesh->n_stages = n_stages, mesh->n_gpus = 1;
    mesh->cells = (Cell *)calloc(n_cells, sizeof(Cell));
    mesh->forward = (Link *)calloc(n_cells, sizeof(Link));
    mesh->backward = (Link *)calloc(n_cells, sizeof(Link));
    mesh->check = (Link *)calloc(n_cells, sizeof(Link));
    if (mesh->cells == NULL || mesh->forward == NULL || mesh->backward == NULL || mesh->check == NULL)
        return error_set("out of memory for a mesh of %zu cells", n_cells);
    for (int r = 0; r < n_replicas; r++) {
        mesh->living[r] = 1;
        for (int s = 0; s < n_stages; s++) {
            Cell *cell = mesh_cell(mesh, r, s);
            cell->replica = r, cell->index = s, cell->hosted = 1;
            if (stage_table(&cell->stage, &cut, first[s], first[s + 1] - first[s])) return -1;
            cell->stage.next = s + 1 < n_stages ? &mesh_cell(mesh, r, s + 1)->stage : NULL;
            cell->stage.position = s, cell->stage.n_stages = n_stages;
        }
    }
    return 0;
}

// 1 if the steps of a stage overlap: forwards run ahead of the updates by its delay. In one process they do not need
// to: older versions of the weights give the same.
static int mesh_runs_ahead(const Mesh *mesh) {
    return mesh->asynchronous && mesh->node != NULL;
}

// Sets sizes and schedules for steps of `batch` sequences; counts memory, allocates nothing large. mesh->asynchronous
// and stash are set before; an asynchronous step is one micro-batch.
static int mesh_plan(Mesh *mesh, int batch, int micro_batch, int T, int training, int recompute, int meets) {
    int n_micro = training ? (batch + micro_batch - 1) / micro_batch : 1;
    Cell *first = mesh_next(mesh, NULL);
    int many = first != NULL && mesh_next(mesh, first) != NULL; // cells of this process
    mesh->micro_batch = micro_batch;
    for (int i = 0; i < mesh_cells(mesh); i++) {
        Cell *cell = &mesh->cells[i];
        cell->stage.borrows = training && recompute && many;
        int in_flight = training ? schedule_in_flight(cell->index, mesh->n_stages, n_micro) : 1;
        cell->stage.slots = (in_flight + mesh->n_gpus - 1) / mesh->n_gpus; // each GPU has its share of them
        cell->stage.meets = meets;
        cell->stage.borrows_frozen = cell->replica > 0 && mesh_cell(mesh, 0, cell->index)->hosted;
        cell->stage.delay = mesh->asynchronous ? versions_delay(cell->index, mesh->n_stages) : 0;
        if (mesh_runs_ahead(mesh)) cell->stage.slots = cell->stage.delay + 1;
        flow_free(&cell->flow);
        if (mesh->asynchronous && flow_init(&cell->flow, cell->stage.delay, mesh->n_stages)) return -1;
        if (stage_plan(&cell->stage, micro_batch, T, training, recompute)) return -1;
        free(cell->schedule);
        cell->n_work = 2 * n_micro;
        cell->schedule = (Work *)malloc(sizeof(Work) * (size_t)cell->n_work);
        if (cell->schedule == NULL) return error_set("out of memory for the schedule");
        schedule_1f1b(cell->schedule, cell->index, mesh->n_stages, n_micro);
    }
    int C = mesh->cells[0].stage.config.channels;
    mesh->message_bytes =
        larger((int64_t)sizeof(float) * micro_batch * T * C, codec_cap(&mesh->codec, micro_batch * T, C));
    return 0;
}

// The further GPUs: a stream each, and every cell's stage once more without moments.
static int mesh_alloc_gpus(Mesh *mesh) {
    if (mesh->n_gpus > 1 && nccl_create(&mesh->nccl, mesh->n_gpus)) return -1;
    for (int g = 1; g < mesh->n_gpus; g++) {
        if (stream_create_on(&mesh->streams[g], g, mesh->stream->precision, mesh->stream->threads)) return -1;
        for (Cell *cell = mesh_next(mesh, NULL); cell != NULL; cell = mesh_next(mesh, cell)) {
            const Stage *first = &cell->stage;
            if (cell->more == NULL) cell->more = (Stage *)calloc((size_t)mesh->n_gpus - 1, sizeof(Stage));
            if (cell->more == NULL) return error_set("out of memory for %d GPUs", mesh->n_gpus);
            Stage *stage = cell_stage(cell, g);
            if (stage_table(stage, &first->config, first->first_layer, first->n_layers)) return -1;
            stage->slots = first->slots, stage->n_moments = 0, stage->unrounded = first->unrounded;
            stage->param_store = first->param_store, stage->frozen_store = first->frozen_store;
            stage->borrows_frozen = first->borrows_frozen;
            if (stage_plan(stage, first->max_B, first->max_T, 1, first->recompute)) return -1;
            if (stage->borrows_frozen) stage_borrow_frozen(stage, cell_stage(mesh_cell(mesh, 0, cell->index), g));
            if (stage_alloc(stage, mesh->streams[g])) return -1;
        }
    }
    stream_use(mesh->stream);
    return stream_check(mesh->stream);
}

static int mesh_alloc(Mesh *mesh, Stream *stream) {
    mesh->stream = mesh->streams[0] = stream;
    for (Cell *cell = mesh_next(mesh, NULL); cell != NULL; cell = mesh_next(mesh, cell)) {
        if (cell->stage.borrows_frozen) stage_borrow_frozen(&cell->stage, &mesh_cell(mesh, 0, cell->index)->stage);
        if (stage_alloc(&cell->stage, stream)) return -1;
    }
    mesh->message = (unsigned char *)device_host_alloc((size_t)mesh->message_bytes);
    return mesh->message != NULL ? mesh_alloc_gpus(mesh) : error_set("out of memory for messages");
}

// The shape of end number i. n_samples: windows of the training data, 0 without training.
static CodecShape mesh_end_shape(const Mesh *mesh, int i, int64_t n_samples) {
    const Stage *before = &mesh_cell(mesh, 0, i / 2 % (mesh->n_stages - 1))->stage;
    int T = before->max_T, in_flight = before->slots * mesh->n_gpus;
    CodecShape shape = {before->config.channels, before->max_B * T, T, in_flight, n_samples};
    return shape;
}

static int mesh_n_ends(const Mesh *mesh) {
    return 2 * mesh->n_replicas * (mesh->n_stages - 1);
}

// 1 if end number i is of a cell of this process.
static int mesh_hosts_end(const Mesh *mesh, int i) {
    int boundaries = mesh->n_stages - 1;
    return mesh_cell(mesh, i / 2 / boundaries, i / 2 % boundaries + i % 2)->hosted;
}

// What the ends of all boundaries remember.
static int mesh_alloc_ends(Mesh *mesh, int64_t n_samples) {
    int n_ends = mesh_n_ends(mesh);
    mesh->ends = (CodecEnd *)calloc((size_t)n_ends + 1, sizeof(CodecEnd));
    if (mesh->ends == NULL) return error_set("out of memory for the codec");
    for (int i = 0; i < n_ends; i++)
        if (mesh_hosts_end(mesh, i) && codec_end_init(&mesh->ends[i], &mesh->codec, mesh_end_shape(mesh, i, n_samples)))
            return -1;
    return 0;
}

// The further GPUs have the first one's frozen embedding from here on.
static int mesh_share_embed(Mesh *mesh) {
    const Config *config = &mesh->cells[0].stage.config;
    float *embed[MAX_GPUS];
    if (mesh->n_gpus == 1 || mesh->klt[0].embed == NULL) return 0;
    for (int g = 0; g < mesh->n_gpus; g++) embed[g] = mesh->klt[g].embed;
    return nccl_share(mesh->nccl, embed, (int64_t)config->vocab * config->channels, mesh->streams) ||
                   nccl_wait(mesh->nccl, mesh->streams)
               ? -1
               : 0;
}

// The further GPUs have the first one's frozen tensors from here on.
static int mesh_share_frozen(Mesh *mesh) {
    float *frozen[MAX_GPUS];
    for (Cell *cell = mesh_next(mesh, NULL); cell != NULL && mesh->n_gpus > 1; cell = mesh_next(mesh, cell)) {
        if (cell->stage.frozen_memory == NULL) continue;
        for (int g = 0; g < mesh->n_gpus; g++) frozen[g] = cell_stage(cell, g)->frozen_memory;
        if (nccl_share(mesh->nccl, frozen, cell->stage.frozen_bytes / 4, mesh->streams) ||
            nccl_wait(mesh->nccl, mesh->streams))
            return -1;
    }
    return 0;
}

// What each GPU needs for messages of klt: room for tables, and the first replica's embedding as it is now.
static int mesh_alloc_klt(Mesh *mesh, int predicts) {
    const Stage *first = &mesh->cells[0].stage;
    size_t embed_bytes = sizeof(float) * (size_t)first->config.vocab * (size_t)first->config.channels;
    for (int g = mesh->n_gpus - 1; g >= 0; g--) { // the first last: its device is current from here on
        KltPlace *place = &mesh->klt[g];
        stream_use(mesh->streams[g]);
        place->tables = (KltTable *)calloc(2 * (size_t)mesh->n_stages, sizeof(KltTable));
        if (place->tables == NULL) return error_set("out of memory for the transform codec's tables");
        if (predicts && (place->embed = (float *)device_alloc(embed_bytes)) == NULL) return -1;
    }
    if (predicts && first->p.embed != NULL)
        stored_copy(stored_floats(mesh->klt[0].embed), stage_values(first, ARENA_PARAMS, stage_embedding(first)),
                    stage_embedding(first)->n, mesh->stream);
    return mesh_share_embed(mesh);
}

// Gives the entropy coder a thread, and each cell the memory of a message it sends and two it receives.
static int mesh_start_coder(Mesh *mesh) {
    for (Cell *cell = mesh_next(mesh, NULL); cell != NULL; cell = mesh_next(mesh, cell)) {
        unsigned char **messages[] = {&cell->outgoing.message, &cell->incoming[0].message, &cell->incoming[1].message};
        for (int m = 0; m < 3; m++)
            if ((*messages[m] = (unsigned char *)malloc((size_t)mesh->message_bytes)) == NULL)
                return error_set("out of memory for messages");
    }
    for (int g = 0; g < mesh->n_gpus; g++) {
        mesh->klt[g].own = (KltWork *)calloc((size_t)mesh_cells(mesh), sizeof(KltWork));
        if (mesh->klt[g].own == NULL) return error_set("out of memory for messages");
    }
    return coder_start(&mesh->coder);
}

// Simulated time of the mesh: its latest cell's.
static double mesh_now(const Mesh *mesh) {
    double now = 0.0;
    for (Cell *cell = mesh_next(mesh, NULL); cell != NULL; cell = mesh_next(mesh, cell))
        now = fmax(now, cell->clock.now);
    return now;
}

// The merged parameters of a replica that meets others begin as its own.
static void stage_begin_meeting(Stage *stage) {
    for (int i = 0; stage->meets && i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        stored_copy(stage_values(stage, ARENA_GLOBAL, t), stage_values(stage, ARENA_PARAMS, t), t->n, stage->stream);
    }
}

// All replicas start from the weights of the first.
static void mesh_spread(Mesh *mesh) {
    for (Cell *cell = mesh_next(mesh, NULL); cell != NULL; cell = mesh_next(mesh, cell)) {
        Stage *stage = &cell->stage, *first = &mesh_cell(mesh, 0, cell->index)->stage;
        if (stage != first) device_copy(stage->params, first->params, (size_t)stage->param_bytes, stage->stream);
        stage_begin_meeting(stage);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Node: this process as one of several that have a mesh together. Its Mesh has the table of all cells and the memory of
// the one of its role. Links to others' cells lead through the net (llmc/net.h); what comes from there is put into
// links by node_poll, which is called between two pieces of work and wherever something is waited for.
//
// The coordinator (section "Coordinator") orders what all must do alike. Its orders reach every node in one sequence:
//
//   setup   this is your role, these are the settings
//   place   from step t on these are the cells, your state comes from there; an epoch begins
//   go      a gate is open: all cells of the run have come as far
//   living  these replicas are left; averages that no gate has let through begin anew
//   out     your replica is out of the run, until you are placed
//   skip    this replica's snapshots give no factors from one on
//   pace    asynchronous: all cells are through with a step; all stand still at this one
//   grant   asynchronous: all have the factors of a snapshot
//   save    the anchor is to give its state once it is through with a snapshot
//   end     the run is over
//
// Messages of boundaries, averages, snapshots and factors are of an epoch: older ones are thrown away, newer ones kept
// until this node is placed too.

#define NODE_NOBODY UINT32_MAX
enum {
    NODE_COORDINATOR = 0,
    NODE_WAIT_MS = 100,
    NODE_IMPATIENCE = 15,
    NODE_PATIENCE = 600,  /* seconds without a word of the coordinator */
    NODE_SETUP = 64 << 20 /* bytes of its longest message */
};

// A message that no link takes, or not yet.
typedef struct Parcel {
    struct Parcel *next;
    NetEvent event;
} Parcel;

typedef struct {
    Parcel *first, *last;
} Parcels;

typedef struct Node {
    Net *net;
    Mesh *mesh; // NULL: there is none yet
    LinkCarrier carrier;
    int role;                              // a cell, or the anchor; -1: none yet
    uint32_t node_of[CHANNEL_ROLES];       // who has each role, NODE_NOBODY: no one
    uint32_t epoch;                        // of the last place, 0: none yet
    int turn;                              // how often replicas were lost in it
    int average, average_turn;             // the number of the average at work, its last 16 bits; the turn it began in
    Parcel *factors;                       // of the snapshot that is waited for, until they are used
    int factors_sent;                      // the anchor's: those of its last pass
    int has_embed;                         // what messages are predicted from is here
    int has_frozen;                        // and what adapters stand beside
    int64_t open;                          // the last gate that is open
    json_t *go, *setup, *place, *save;     // orders that wait to be obeyed, the last of each kind
    int64_t lost_after[MESH_MAX_REPLICAS]; // a replica's snapshots after this one give no factors
    int launched_from;                     // the replica that gave the snapshot at work, -1: not known
    int has_lost;            // the anchor's: replicas are lost, and the others do not know what it has of them
    int fetches;             // files asked for so far
    int anchor_up;           // the anchor is there, as far as is known
    int is_alone;            // this process has nothing but the node: Ctrl-C ends it
    const int *host_is_gone; // the coordinator of this process has left
    double heard;            // when the coordinator was there last
    int complained;          // that it does not answer
    int forgotten;           // by the coordinator
    int interrupted, ended;  // what is being done is of no use any more; the run is over, -1: has failed
    // of an asynchronous run
    int64_t granted; // the last snapshot whose factors all have
    int64_t had;     // the last whose are here
    int64_t paced;   // the last step that all cells are through with
    int64_t halt_at; // the step at which all stand still, -1: none is known
    int halt_then;   // and what follows there
    Parcels inbox, early;
    json_t *wants;    // files that others wait for: [[node, channel]]
    uint64_t works;   // grows with what is done, for the coordinator to see
    double links_due; // when it is told next how links are used
    NetToken token;   // as it was dialled
    const char *token_text;
    double token_due;    // when its file is looked at next
    int (*idle)(void *); // what can go on beside other work; -1: it has failed
    void *context;
    // of the run, as all nodes know it
    int drawing[MESH_MAX_REPLICAS]; // replicas that take sequences from the data in this step
    int has_anchor;                 // snapshots are taken
    int is_stale;                   // there has been no anchor for too long: its factors are not used any more
    int then;                       // ThenKind: what follows the step
    char scratch[PATH_MAX];         // folder of files on their way
} Node;

static void parcels_add(Parcels *parcels, Parcel *parcel) {
    parcel->next = NULL;
    if (parcels->last != NULL)
        parcels->last->next = parcel;
    else
        parcels->first = parcel;
    parcels->last = parcel;
}

// Takes out the first parcel of a kind (CHANNEL_KINDS: any) from a role (-1: any); NULL: there is none.
static Parcel *parcels_take(Parcels *parcels, ChannelKind kind, int from) {
    Parcel *before = NULL, *at = parcels->first;
    for (; at != NULL; before = at, at = at->next) {
        Channel channel = channel_parts(at->event.channel);
        if ((kind == CHANNEL_KINDS || channel.kind == kind) && (from < 0 || channel.from == from)) break;
    }
    if (at == NULL) return NULL;
    if (before != NULL)
        before->next = at->next;
    else
        parcels->first = at->next;
    if (parcels->last == at) parcels->last = before;
    return at;
}

// The first parcel of a kind, which stays; NULL: there is none.
static const Parcel *parcels_find(const Parcels *parcels, ChannelKind kind) {
    const Parcel *at = parcels->first;
    while (at != NULL && channel_parts(at->event.channel).kind != kind) at = at->next;
    return at;
}

static void parcel_free(Parcel *parcel) {
    if (parcel == NULL) return;
    free(parcel->event.data);
    free(parcel);
}

static void parcels_free(Parcels *parcels, ChannelKind kind, int from) {
    Parcel *parcel;
    while ((parcel = parcels_take(parcels, kind, from)) != NULL) parcel_free(parcel);
}

// Sends an object to a node as text; takes over the reference.
static int send_order(Net *net, uint32_t to, json_t *order) {
    char *text = order != NULL ? json_dumps(order, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(order);
    if (text == NULL) return error_set("out of memory for a message");
    int result = net_send(net, to, 1, channel_number(CHANNEL_CONTROL, 0, 0, 0), text, (int64_t)strlen(text));
    free(text);
    return result;
}

// LinkCarrier of a node. What is for a role that nobody has is lost: its replica is out of the run.
static int node_carry(void *context, uint64_t channel, const void *data, int64_t n_bytes) {
    Node *node = (Node *)context;
    uint32_t to = node->node_of[channel_parts(channel).to];
    return to == NODE_NOBODY ? 0 : net_send(node->net, to, 0, channel, data, n_bytes);
}

static int cell_role(const Mesh *mesh, int replica, int stage) {
    return replica * mesh->n_stages + stage;
}

// Gives a link the node as its carrier if its other end is elsewhere.
static void node_connect(Node *node, Link *link, ChannelKind kind, int from, int to, int tag) {
    const Cell *cells = node->mesh->cells;
    if (!cells[from].hosted || cells[to].hosted) return;
    link->carrier = &node->carrier, link->channel = channel_number(kind, from, to, tag);
}

// The links of boundaries.
static void node_connect_boundaries(Node *node) {
    Mesh *mesh = node->mesh;
    for (int r = 0; r < mesh->n_replicas; r++) {
        for (int b = 0; b + 1 < mesh->n_stages; b++) {
            int at = r * (mesh->n_stages - 1) + b, before = cell_role(mesh, r, b), behind = before + 1;
            node_connect(node, &mesh->forward[at], CHANNEL_FORWARD, before, behind, 0);
            node_connect(node, &mesh->backward[at], CHANNEL_BACKWARD, behind, before, 0);
            node_connect(node, &mesh->check[at], CHANNEL_CHECK, before, behind, 0);
        }
    }
}

// The tag of an average's messages: its number and the turn.
static int node_average_tag(const Node *node, int average) {
    return (average & 0xFFFF) << 8 | (node->turn & 0xFF);
}

// The links of the average at work in a stage.
static void node_connect_meeting(Node *node, const Meeting *meeting) {
    Mesh *mesh = node->mesh;
    for (int r = 0; r < mesh->n_replicas; r++) {
        for (int owner = 0; owner < mesh->n_replicas; owner++) {
            int member = cell_role(mesh, r, meeting->stage), keeper = cell_role(mesh, owner, meeting->stage);
            int tag = node_average_tag(node, node->average);
            node_connect(node, meeting_up(meeting, r, owner), CHANNEL_SHARE, member, keeper, tag);
            node_connect(node, meeting_down(meeting, r, owner), CHANNEL_MEAN, keeper, member, tag);
        }
    }
}

// Where messages of a channel go: a link, or NULL: to no cell of this process.
static Link *node_link(const Node *node, Channel channel) {
    Mesh *mesh = node->mesh;
    int n = mesh_cells(mesh), S = mesh->n_stages;
    if (channel.from >= n || channel.to >= n || !mesh->cells[channel.to].hosted) return NULL;
    const Cell *to = &mesh->cells[channel.to], *from = &mesh->cells[channel.from];
    int before = to->replica * (S - 1) + to->index - 1;
    int comes_from_before = to->index > 0 && channel.from == channel.to - 1;
    switch (channel.kind) {
    case CHANNEL_FORWARD: return comes_from_before ? &mesh->forward[before] : NULL;
    case CHANNEL_CHECK: return comes_from_before ? &mesh->check[before] : NULL;
    case CHANNEL_BACKWARD:
        return to->index + 1 < S && channel.from == channel.to + 1 ? &mesh->backward[before + 1] : NULL;
    case CHANNEL_SHARE:
    case CHANNEL_MEAN: {
        const Meeting *meeting = mesh->meetings != NULL ? &mesh->meetings[to->index] : NULL;
        if (meeting == NULL || from->index != to->index) return NULL;
        return channel.kind == CHANNEL_SHARE ? meeting_up(meeting, from->replica, to->replica)
                                             : meeting_down(meeting, to->replica, from->replica);
    }
    default: return NULL;
    }
}

// -1: a message of an average that is over, 0: of the one at work, 1: of one that has not begun here.
static int node_average_age(const Node *node, int tag) {
    int average = tag >> 8, turn = tag & 0xFF, ahead;
    if (node->average < 0) return 1;
    ahead = (average - node->average) & 0xFFFF;
    if (ahead == 0) ahead = ((turn - node->turn) & 0xFF) << 8;
    return ahead == 0 ? 0 : ahead < 0x8000 ? 1 : -1;
}

// Takes over the event's data.
static int parcels_put(Parcels *parcels, const NetEvent *event) {
    Parcel *parcel = (Parcel *)malloc(sizeof(Parcel));
    if (parcel == NULL) {
        free(event->data);
        return error_set("out of memory for a message");
    }
    parcel->event = *event;
    parcels_add(parcels, parcel);
    return 0;
}

// A message of this epoch goes into its link, or into the inbox. Takes over the event's data.
static int node_deliver(Node *node, const NetEvent *event) {
    Channel channel = channel_parts(event->channel);
    int of_average = channel.kind == CHANNEL_SHARE || channel.kind == CHANNEL_MEAN;
    int age = of_average ? node_average_age(node, channel.tag) : 0;
    Link *link = event->kind == NET_MESSAGE && node->mesh != NULL ? node_link(node, channel) : NULL;
    if (age > 0) return parcels_put(&node->early, event);
    if (age == 0 && link == NULL) return parcels_put(&node->inbox, event);
    int64_t most = node->mesh->message_bytes;
    int result = age < 0                  ? 0
                 : event->n_bytes <= most ? link_send(link, event->data, event->n_bytes, 0.0)
                                          : error_set("node %u sends %lld bytes, at most %lld are expected",
                                                      event->from, (long long)event->n_bytes, (long long)most);
    free(event->data);
    return result;
}

// The same for any epoch.
static int node_keep(Node *node, const NetEvent *event) {
    if (event->generation == node->epoch) return node_deliver(node, event);
    if (event->generation > node->epoch) return parcels_put(&node->early, event);
    free(event->data);
    return 0;
}

// Once more for what has come early, as an epoch or an average has begun.
static int node_sort(Node *node) {
    Parcels early = node->early;
    Parcel *parcel;
    int result = 0;
    node->early.first = node->early.last = NULL;
    while ((parcel = parcels_take(&early, CHANNEL_KINDS, -1)) != NULL) {
        if (node_keep(node, &parcel->event)) result = -1;
        free(parcel);
    }
    return result;
}

// 1 if a node has a role.
static int node_knows(const Node *node, uint32_t id) {
    int role = 0;
    while (role < CHANNEL_ROLES && node->node_of[role] != id) role++;
    return role < CHANNEL_ROLES;
}

// Takes down who has which role, and how to reach them: [{"role", "node", "endpoint", "key"}]. Who is not in the list
// any more is forgotten.
static int node_meet(Node *node, const json_t *nodes) {
    size_t i;
    const json_t *entry;
    uint32_t *before = (uint32_t *)malloc(sizeof node->node_of);
    int result = before != NULL ? 0 : error_set("out of memory for a list of nodes");
    if (before != NULL) memcpy(before, node->node_of, sizeof node->node_of);
    for (int r = 0; r < CHANNEL_ROLES; r++) node->node_of[r] = NODE_NOBODY;
    json_array_foreach((json_t *)nodes, i, entry) {
        int64_t role = json_size(json_object_get(entry, "role")), id = json_size(json_object_get(entry, "node"));
        const char *key = json_string_value(json_object_get(entry, "key"));
        if (result == 0 && (role < 0 || role >= CHANNEL_ROLES || id < 1 || id >= CHANNEL_ROLES || key == NULL))
            result = error_set("the coordinator names a node %lld in role %lld", (long long)id, (long long)role);
        if (result != 0) break;
        node->node_of[role] = (uint32_t)id;
        if (role != node->role)
            result = net_peer(node->net, (uint32_t)id, json_string_value(json_object_get(entry, "endpoint")), key);
    }
    for (int r = 0; r < CHANNEL_ROLES && result == 0; r++)
        if (before[r] != NODE_NOBODY && !node_knows(node, before[r])) net_drop(node->net, before[r]);
    free(before);
    return result;
}

// flags (n) = 1 for the numbers of a list.
static int read_members(const json_t *list, int *flags, int n) {
    size_t i;
    const json_t *entry;
    memset(flags, 0, sizeof(int) * (size_t)n);
    json_array_foreach((json_t *)list, i, entry) {
        int64_t number = json_size(entry);
        if (number < 0 || number >= n) return error_set("the coordinator names a replica %lld", (long long)number);
        flags[number] = 1;
    }
    return 0;
}

static void order_keep(json_t **kept, json_t *order) {
    json_decref(*kept);
    *kept = json_incref(order);
}

// Some replicas, or the anchor, are lost. Averages are begun anew by who waits for them (node_agree).
static int node_lose(Node *node, const json_t *order) {
    if (node->mesh == NULL || node->epoch == 0) return 0;
    node->turn = (int)json_integer_value(json_object_get(order, "turn")), node->has_lost = 1;
    node->anchor_up = json_is_true(json_object_get(order, "anchor"));
    return read_members(json_object_get(order, "living"), node->mesh->living, node->mesh->n_replicas) ||
                   node_meet(node, json_object_get(order, "nodes"))
               ? -1
               : 0;
}

static int node_obey(Node *node, json_t *order) {
    const char *type = json_string_value(json_object_get(order, "type"));
    if (type == NULL) return error_set("an order without a type");
    if (strcmp(type, "go") == 0) {
        node->open = json_integer_value(json_object_get(order, "gate"));
        order_keep(&node->go, order);
    } else if (strcmp(type, "pace") == 0) {
        node->paced = json_integer_value(json_object_get(order, "step"));
        node->halt_at = json_integer_value(json_object_get(order, "halt"));
        node->halt_then = (int)json_integer_value(json_object_get(order, "then"));
    } else if (strcmp(type, "grant") == 0) {
        node->granted = json_integer_value(json_object_get(order, "snapshot"));
    } else if (strcmp(type, "living") == 0) {
        return node_lose(node, order);
    } else if (strcmp(type, "place") == 0 || strcmp(type, "out") == 0) {
        node->interrupted = 1;
        if (strcmp(type, "place") == 0) order_keep(&node->place, order);
    } else if (strcmp(type, "skip") == 0) {
        int64_t replica = json_size(json_object_get(order, "replica"));
        if (replica >= 0 && replica < MESH_MAX_REPLICAS)
            node->lost_after[replica] = json_integer_value(json_object_get(order, "after"));
    } else if (strcmp(type, "setup") == 0) {
        order_keep(&node->setup, order);
    } else if (strcmp(type, "save") == 0) {
        order_keep(&node->save, order);
    } else if (strcmp(type, "end") == 0) {
        const char *reason = json_string_value(json_object_get(order, "reason"));
        node->ended = reason == NULL ? 1 : -1, node->interrupted = 1;
        return reason != NULL ? error_set("the coordinator has ended the run: %.900s", reason) : 0;
    }
    return 0;
}

// A control message: an order of the coordinator's, or another node's wish for a file.
static int node_listen(Node *node, const NetEvent *event) {
    json_t *order = json_loadb((const char *)event->data, (size_t)event->n_bytes, 0, NULL);
    const char *type = json_string_value(json_object_get(order, "type"));
    int result = 0;
    if (event->from == NODE_COORDINATOR)
        result = json_is_object(order) ? node_obey(node, order) : error_set("an order that is no JSON object");
    else if (type != NULL && strcmp(type, "want") == 0)
        json_array_append_new(node->wants, json_pack("[I, I]", (json_int_t)event->from,
                                                     json_integer_value(json_object_get(order, "channel"))));
    json_decref(order);
    return result;
}

// Nothing of what was ordered, or wished, is of use any more.
static void node_forget_orders(Node *node) {
    json_t **orders[] = {&node->go, &node->setup, &node->place, &node->save};
    for (int i = 0; i < 4; i++) {
        json_decref(*orders[i]);
        *orders[i] = NULL;
    }
    json_array_clear(node->wants);
}

// Takes an event; its data are freed or kept.
static int node_take(Node *node, NetEvent *event) {
    int result = 0;
    switch (event->kind) {
    case NET_MESSAGE:
        if (!event->control) return node_keep(node, event);
        result = node_listen(node, event);
        free(event->data);
        return result;
    case NET_FILE: return parcels_put(&node->inbox, event);
    case NET_FILE_FAILED: return error_set("a file on its way: %.900s", event->text);
    case NET_REFUSED: return error_set("the coordinator does not take this node: %.900s", event->text);
    case NET_UNKNOWN: // the coordinator has forgotten this node, which begins anew
        node->interrupted = node->forgotten = 1, node->epoch = 0;
        node_forget_orders(node);
        for (int r = 0; r < CHANNEL_ROLES; r++) node->node_of[r] = NODE_NOBODY;
        net_hello(node->net);
        return 0;
    case NET_FILE_SENT: unlink(event->text); return 0;
    default: free(event->data); return 0;
    }
}

// 1 once the coordinator has not been heard of for too long, be it that it has never taken this node.
static int node_is_left_alone(Node *node) {
    NetStatus status;
    double now = seconds();
    if (net_status(node->net, NODE_COORDINATOR, &status) == 0) node->heard = now - status.silence;
    if (now - node->heard > NODE_IMPATIENCE && !node->complained) {
        node->complained = 1;
        printf("the coordinator does not answer: it is away, or the token is of another run; trying for %d s\n",
               NODE_PATIENCE);
        fflush(stdout);
    }
    if (now - node->heard < NODE_IMPATIENCE) node->complained = 0;
    return now - node->heard > NODE_PATIENCE;
}

// Tells the coordinator once a second how this node's connections are used. It is only looked at: a failure is none.
static void node_tell_links(Node *node) {
    NetTotals total;
    double now = seconds();
    if (node->role < 0 || now < node->links_due) return;
    node->links_due = now + 1.0;
    net_totals(node->net, &total);
    json_t *about =
        json_pack("{s:s, s:I, s:I, s:I, s:f, s:f, s:i, s:i}", "type", "links", "up", (json_int_t)total.wire_up, "down",
                  (json_int_t)total.wire_down, "relayed", (json_int_t)total.relayed, "up_rate", total.up_rate,
                  "down_rate", total.down_rate, "direct", total.n_direct, "by_relay", total.n_relayed);
    (void)send_order(node->net, NODE_COORDINATOR, about);
}

// Takes what has come; wait: at most a moment is waited for something. How many events, or -1.
static int node_pump(Node *node, int wait) {
    NetEvent event;
    int n = 0, got;
    net_progress(node->net, node->works);
    if (node->is_alone && interrupts > 0) return error_set("interrupted");
    if (node->host_is_gone != NULL && __atomic_load_n(node->host_is_gone, __ATOMIC_ACQUIRE))
        return error_set("the coordinator has left");
    if (node_is_left_alone(node)) return error_set("the coordinator has been silent for %d s", NODE_PATIENCE);
    node_tell_links(node);
    if (wait && net_wait(node->net, 1e-3 * NODE_WAIT_MS) < 0) return -1;
    while ((got = net_next(node->net, &event)) > 0) {
        n++;
        if (node_take(node, &event)) return -1;
    }
    if (got < 0 || (node->idle != NULL && node->idle(node->context))) return -1;
    return n;
}

// The same in the middle of something, which is given up should the node be interrupted.
static int node_poll(Node *node, int wait) {
    int n = node_pump(node, wait);
    return n >= 0 && node->interrupted ? error_set("the step is given up") : n;
}

// 1 if what has just failed did so because it is of no use any more, as the next events may say: the coordinator or a
// peer has been forgotten by the net before. error_message stays.
static int node_was_interrupted(Node *node) {
    char reason[ERROR_MAX];
    memcpy(reason, error_message, sizeof reason);
    if (!node->interrupted) node_pump(node, 0);
    memcpy(error_message, reason, sizeof reason);
    return node->interrupted;
}

// Waits until not too much is on its way to a role.
static int node_throttle(Node *node, int role) {
    enum { MOST = 64 << 20 };
    while (node->node_of[role] != NODE_NOBODY && net_queued(node->net, node->node_of[role]) > MOST)
        if (node_poll(node, 1) < 0) return -1;
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline: the gradients of a step

// A pass of batches through pipelines.
typedef struct {
    const Batch *batches; // (n_replicas)
    int64_t step;         // steps done: names the masks and the versions of weights
    int masked;           // 0: boundaries travel whole
    int counted;          // 0: a measurement, neither bytes nor simulated time count
    StepTimes *times;
    int64_t ahead; // updates by which the forward of an asynchronous pipeline of several processes is ahead
} Pass;

// Multiplications and additions of a stage's forward over N rows.
static double stage_flops(const Stage *stage, double N, int T) {
    const Config *c = &stage->config;
    double matrices = 0.0;
    for (int i = 0; i < stage_n_all(stage); i++)
        if (stage_any(stage, i)->block) matrices += (double)stage_any(stage, i)->n;
    if (stage->has_head) matrices += (double)c->vocab * c->channels;
    return (2.0 * matrices + 2.0 * T * (double)stage->A * stage->n_layers) * N;
}

// The same of its backward: of every product two, but frozen matrices have no gradient.
static double stage_backward_flops(const Stage *stage, double N, int T) {
    double frozen = 0.0;
    for (int i = 0; i < stage->n_frozen; i++)
        if (stage->frozen[i].block) frozen += (double)stage->frozen[i].n;
    if (stage->n_frozen > 0 && stage->has_head) frozen += (double)stage->config.vocab * stage->config.channels;
    return 2.0 * stage_flops(stage, N, T) - 2.0 * frozen * N;
}

// The message of micro-batch `micro`, whose first sequence is number b of the batch.
static CodecContext boundary_context(const Pass *pass, int replica, int boundary, int micro, int b,
                                     CodecDirection direction) {
    const Batch *batch = &pass->batches[replica];
    CodecContext context = codec_context(boundary, replica, micro, pass->step, pass->masked);
    context.direction = direction, context.training = pass->masked, context.T = batch->T;
    context.samples = batch->samples + b, context.tokens = batch->tokens + (size_t)b * batch->T;
    return context;
}

// Encodes a boundary tensor of a GPU into the mesh's message; bytes, or -1.
static int64_t cell_encode(Mesh *mesh, const CodecContext *context, const floatX *x, int N, int gpu) {
    CodecEnd *end = mesh_end_on(mesh, context->replica, context->boundary, context->direction == CODEC_BACKWARD, gpu);
    return codec_encode(&mesh->codec, end, context, x, N, mesh->cells[0].stage.config.channels, mesh->message,
                        mesh->message_bytes, mesh->streams[gpu]);
}

// Books time the cell computes. That of an asynchronous pipeline passes once the step is whole (flow.h).
static void cell_spend(Mesh *mesh, Cell *cell, FlowPart part, double time) {
    if (mesh->asynchronous)
        flow_now(&cell->flow)->seconds[part] += time;
    else
        clock_compute(&cell->clock, time);
}

// Sends a message that is ready at some simulated time. kind: forward or backward.
static int cell_send(Mesh *mesh, Cell *cell, Link *link, const void *message, int64_t n_bytes, Traffic kind,
                     int counted, double ready) {
    double arrival = 0.0;
    if (counted) {
        cell->step.bytes[kind] += n_bytes;
        if (mesh->asynchronous)
            flow_now(&cell->flow)->bytes[kind] += n_bytes;
        else
            arrival = clock_send_at(&cell->clock, ready, mesh->speed, n_bytes);
    }
    return link_send(link, message, n_bytes, arrival);
}

// Ends a step of asynchronous pipelines in simulated time. drain: no other follows.
static void mesh_flow(Mesh *mesh, int drain) {
    int n_cells = mesh_cells(mesh), work = 1;
    for (int i = 0; i < n_cells; i++) flow_record(&mesh->cells[i].flow);
    while (work > 0) {
        work = 0;
        for (int i = 0; i < n_cells; i++) {
            Cell *cell = &mesh->cells[i];
            Flow *before = cell->index > 0 ? &cell[-1].flow : NULL;
            Flow *behind = cell->index + 1 < mesh->n_stages ? &cell[1].flow : NULL;
            work += flow_advance(&cell->flow, &cell->clock, before, behind, mesh->speed, drain);
        }
    }
}

static Link *link_before(const Mesh *mesh, Link *links, const Cell *cell) {
    return &links[cell->replica * (mesh->n_stages - 1) + cell->index - 1];
}

static Link *link_behind(const Mesh *mesh, Link *links, const Cell *cell) {
    return &links[cell->replica * (mesh->n_stages - 1) + cell->index];
}

// The link that a cell's forwards, or backwards, get their input from; NULL: they need none.
static Link *cell_source(const Mesh *mesh, const Cell *cell, WorkKind kind) {
    if (kind == WORK_FORWARD) return cell->stage.has_embed ? NULL : link_before(mesh, mesh->forward, cell);
    return cell->stage.has_head ? NULL : link_behind(mesh, mesh->backward, cell);
}

// 1 if the coder's thread takes messages of this context.
static int cell_overlaps(const Mesh *mesh, const CodecContext *context) {
    return mesh->coder.started && mesh->codec.kind == CODEC_KLT &&
           !codec_is_dense(&mesh->codec, context, mesh->cells[0].stage.config.channels);
}

static void outgoing_run(void *context) {
    Outgoing *out = (Outgoing *)context;
    double start = seconds();
    if (!out->sending.whole) klt_coding_write(&out->sending.coding);
    out->took = seconds() - start;
}

static void incoming_run(void *context) {
    Incoming *in = (Incoming *)context;
    double start = seconds();
    klt_coding_read(&in->coding);
    in->took = seconds() - start;
}

// Simulated time of coding that took so many seconds here.
static double coder_time(const Mesh *mesh, double took) {
    return mesh->device_flops > 0.0 ? 0.0 : took;
}

// Sends what the coder has written for the cell; waits for it.
static int cell_flush(Mesh *mesh, Cell *cell) {
    Outgoing *out = &cell->outgoing;
    Stream *stream = mesh->streams[out->gpu];
    if (!out->active) return 0;
    coder_wait(&mesh->coder, &out->job);
    out->active = 0;
    stream_use(stream);
    int64_t n_bytes = klt_encode_end(out->end, &out->sending, stream);
    if (n_bytes < 0) return -1;
    return cell_send(mesh, cell, out->to, out->message, n_bytes, out->kind, out->counted,
                     out->ready + coder_time(mesh, out->took));
}

// Gives the coder a boundary tensor of a GPU; the cell's last message is sent before.
static int cell_code(Mesh *mesh, Cell *cell, const CodecContext *context, const floatX *x, int N, int gpu) {
    Outgoing *out = &cell->outgoing;
    CodecEnd *end = mesh_end_on(mesh, context->replica, context->boundary, context->direction == CODEC_BACKWARD, gpu);
    KltMessage message = codec_klt_message(&mesh->codec, context);
    KltWork *own = &mesh->klt[gpu].own[cell - mesh->cells];
    if (cell_flush(mesh, cell)) return -1;
    stream_use(mesh->streams[gpu]);
    out->end = codec_klt_end(end, context), out->gpu = gpu;
    if (out->end == NULL ||
        klt_encode_begin(out->end, &out->sending, own, &message, context->tokens, x, N,
                         mesh->cells[0].stage.config.channels, out->message, mesh->message_bytes, mesh->streams[gpu]))
        return -1;
    out->sending.coding.threads = 1;
    return 0;
}

// The coder writes what cell_code has given it.
static void cell_post(Mesh *mesh, Cell *cell, Link *to, Traffic kind, int counted) {
    Outgoing *out = &cell->outgoing;
    CoderJob job = {outgoing_run, out, 0, NULL};
    out->job = job, out->active = 1;
    out->to = to, out->kind = kind, out->counted = counted, out->ready = cell->clock.now;
    coder_submit(&mesh->coder, &out->job);
}

// What a piece of work receives or sends at the boundary before its stage, or at the one behind it.
static CodecContext work_context(const Mesh *mesh, const Cell *cell, const Pass *pass, Work work, int behind) {
    return boundary_context(pass, cell->replica, cell->index - !behind, work.micro_batch,
                            work.micro_batch * mesh->micro_batch,
                            work.kind == WORK_FORWARD ? CODEC_FORWARD : CODEC_BACKWARD);
}

// Sequences of a micro-batch.
static int work_batch(const Mesh *mesh, const Batch *batch, Work work) {
    int left = batch->b - work.micro_batch * mesh->micro_batch;
    return left < mesh->micro_batch ? left : mesh->micro_batch;
}

// Gives the coder the message that is there for the cell's next work of a kind. 1 if there is one, or -1.
static int cell_fetch(Mesh *mesh, Cell *cell, WorkKind kind, const Pass *pass) {
    Incoming *in = &cell->incoming[kind == WORK_BACKWARD];
    Link *from = cell_source(mesh, cell, kind);
    const Batch *batch = &pass->batches[cell->replica];
    int at = cell->next_work, gpu, behind = kind == WORK_BACKWARD;
    int64_t n_bytes;
    if (in->active || from == NULL || link_waiting(from) == 0) return 0;
    while (at < cell->n_work && cell->schedule[at].kind != kind) at++;
    if (at == cell->n_work) return error_set("a message that no work is left for");
    Work work = cell->schedule[at];
    CodecContext context = work_context(mesh, cell, pass, work, behind);
    if (!cell_overlaps(mesh, &context)) return 0;
    gpu = work.micro_batch % mesh->n_gpus;
    CodecEnd *end = mesh_end_on(mesh, context.replica, context.boundary, !behind, gpu);
    const KltEnd *klt = codec_klt_end(end, &context);
    KltMessage message = codec_klt_message(&mesh->codec, &context);
    if (klt == NULL || link_recv(from, in->message, mesh->message_bytes, &n_bytes, &in->arrival) != LINK_OK) return -1;
    if (klt_decode_begin(klt, &in->coding, &in->work, &message, in->message, n_bytes,
                         work_batch(mesh, batch, work) * batch->T, 1))
        return -1;
    CoderJob job = {incoming_run, in, 0, NULL};
    in->job = job, in->active = 1;
    coder_submit(&mesh->coder, &in->job);
    return 1;
}

// The next message of a kind of work as x, which a GPU holds. It is there.
static int cell_receive(Mesh *mesh, Cell *cell, WorkKind kind, const CodecContext *context, floatX *x, int N,
                        int counted, int gpu) {
    Incoming *in = &cell->incoming[kind == WORK_BACKWARD];
    int C = mesh->cells[0].stage.config.channels;
    int64_t n_bytes;
    double arrival;
    CodecEnd *end = mesh_end_on(mesh, context->replica, context->boundary, context->direction == CODEC_FORWARD, gpu);
    if (in->active) {
        coder_wait(&mesh->coder, &in->job);
        in->active = 0;
        if (counted) clock_receive(&cell->clock, in->arrival + coder_time(mesh, in->took));
        const KltEnd *klt = codec_klt_end(end, context);
        return klt == NULL ? -1 : klt_decode_end(klt, &in->coding, context->tokens, x, C, mesh->streams[gpu]);
    }
    if (link_recv(cell_source(mesh, cell, kind), mesh->message, mesh->message_bytes, &n_bytes, &arrival) != LINK_OK)
        return -1;
    if (counted) clock_receive(&cell->clock, arrival);
    return codec_decode(&mesh->codec, end, context, mesh->message, n_bytes, x, N, C, mesh->streams[gpu]);
}

// 1 if the cell's next work has its input.
static int cell_runnable(Mesh *mesh, Cell *cell) {
    if (cell->next_work == cell->n_work) return 0;
    WorkKind kind = cell->schedule[cell->next_work].kind;
    Incoming *in = &cell->incoming[kind == WORK_BACKWARD];
    const Link *from = cell_source(mesh, cell, kind);
    return from == NULL || (in->active ? coder_is_done(&mesh->coder, &in->job) : link_waiting(from) > 0);
}

// PassHook of a cell's last backward: its GPUs sum the gradients of tensors first .. last-1 while it goes on. The other
// GPUs' streams hold the end of their last backward by then.
typedef struct {
    Mesh *mesh;
    Cell *cell;
    int failed;
} CellSum;

static void cell_sum_grads(void *context, int first, int last) {
    CellSum *sum = (CellSum *)context;
    const Tensor *from = &sum->cell->stage.tensors[first], *to = &sum->cell->stage.tensors[last - 1];
    float *values[MAX_GPUS];
    if (last == first) return;
    for (int g = 0; g < sum->mesh->n_gpus; g++)
        values[g] = cell_stage(sum->cell, g)->grads + from->offset; // fp32: decide_stores
    sum->failed |= nccl_sum(sum->mesh->nccl, values, to->offset + to->n - from->offset, sum->mesh->streams);
}

// 1 if the clock of each cell wants the time its own work takes here: then it is waited for.
static int cells_are_timed(const Mesh *mesh) {
    return mesh_cells(mesh) > 1 && mesh->device_flops == 0.0;
}

// Gives a backward the weights it sees. Those of the last forward are at work.
static void cell_turn(const Mesh *mesh, Cell *cell, int64_t done) {
    Stage *stage = &cell->stage;
    int64_t version = cell->backward_version = versions_backward(stage->delay, done, mesh->stash);
    int corrects = !mesh->stash && stage->delta != NULL && stage->delay > 0;
    int at_work = mesh_runs_ahead(mesh) ? stage->delay == 0 : version == cell->forward_version;
    if (!corrects && at_work) return;
    float *weights = corrects ? stage_corrected(stage, done) : stage_version(stage, done, version);
    stage_use(stage, weights);
    stage_round(stage, stage->stream);
}

// Does the cell's next work: receive, compute, send.
static int cell_run(Mesh *mesh, Cell *cell, const Pass *pass) {
    Work work = cell->schedule[cell->next_work++];
    int m = work.micro_batch, gpu = m % mesh->n_gpus, is_first = m < mesh->n_gpus, overlaps = 0;
    Stage *stage = cell_stage(cell, gpu);
    Stream *stream = stage->stream;
    const Batch *batch = &pass->batches[cell->replica];
    int b = m * mesh->micro_batch, T = batch->T;
    int slot = mesh_runs_ahead(mesh) ? (int)(pass->step % stage->slots) : m / mesh->n_gpus % stage->slots;
    int B = work_batch(mesh, batch, work), N = B * T;
    CodecContext before = work_context(mesh, cell, pass, work, 0), behind = work_context(mesh, cell, pass, work, 1);
    Link *to = NULL;
    int64_t n_bytes = 0;
    CellSum sum = {mesh, cell, 0};
    PassHook hook = {cell_sum_grads, NULL, &sum};
    int is_last = mesh->n_gpus > 1 && m == cell->n_work / 2 - 1;
    double start = seconds(), head_seconds = 0.0;
    stream_use(stream);
    if (work.kind == WORK_FORWARD) {
        if (!stage->has_embed &&
            cell_receive(mesh, cell, work.kind, &before, stage_input(stage, slot), N, pass->counted, gpu))
            return -1;
        stage_forward(stage, slot, batch->tokens + (size_t)b * T, batch_starts(batch, b), B, T, NULL, NULL, stream);
        if (stage->has_head) {
            double middle = seconds();
            head_loss(stage, batch->targets + (size_t)b * T, N, 1, cell->grad_scale, is_first, stream);
            head_seconds = seconds() - middle;
        } else {
            to = link_behind(mesh, mesh->forward, cell), overlaps = cell_overlaps(mesh, &behind);
            n_bytes = overlaps ? cell_code(mesh, cell, &behind, stage->last, N, gpu)
                               : cell_encode(mesh, &behind, stage->last, N, gpu);
        }
    } else {
        if (!stage->has_head && cell_receive(mesh, cell, work.kind, &behind, stage->d.dx, N, pass->counted, gpu))
            return -1;
        if (mesh->asynchronous) cell_turn(mesh, cell, pass->step);
        stage_backward(stage, slot, batch_starts(batch, b), B, T, is_first, is_last ? &hook : NULL, stream);
        if (!stage->has_embed) {
            to = link_before(mesh, mesh->backward, cell), overlaps = cell_overlaps(mesh, &before);
            n_bytes = overlaps ? cell_code(mesh, cell, &before, stage->d.dx, N, gpu)
                               : cell_encode(mesh, &before, stage->d.dx, N, gpu);
        }
    }
    if (cells_are_timed(mesh)) stream_wait(stream);
    double took = seconds() - start;
    double flops = work.kind == WORK_FORWARD ? stage_flops(stage, N, T) : stage_backward_flops(stage, N, T);
    if (pass->times != NULL) { // of the head's three products one is forward, of a frozen one's two
        double share = stage->g.head != NULL ? 2.0 / 3.0 : 0.5;
        double backward = work.kind == WORK_FORWARD ? head_seconds * share : took;
        pass->times->backward += backward, pass->times->forward += took - backward;
    }
    if (pass->counted)
        cell_spend(mesh, cell, work.kind == WORK_FORWARD ? FLOW_FORWARD : FLOW_BACKWARD,
                   mesh->device_flops > 0.0 ? flops / mesh->device_flops : took);
    if (n_bytes < 0 || sum.failed || stream_check(stream)) return -1;
    Traffic kind = work.kind == WORK_FORWARD ? TRAFFIC_FORWARD : TRAFFIC_BACKWARD;
    if (to == NULL) return 0;
    if (!overlaps) return cell_send(mesh, cell, to, mesh->message, n_bytes, kind, pass->counted, cell->clock.now);
    cell_post(mesh, cell, to, kind, pass->counted);
    return 0;
}

// Before a pass: all GPUs of a cell have its parameters, an asynchronous one the version of its forward, and begin.
static int cell_begin(Mesh *mesh, Cell *cell, const Pass *pass) {
    float *params[MAX_GPUS];
    if (mesh->asynchronous) {
        cell->forward_version = versions_forward(cell->stage.delay, pass->step);
        stage_use(&cell->stage, stage_version(&cell->stage, pass->step - pass->ahead, cell->forward_version));
    }
    for (int g = 0; g < mesh->n_gpus; g++) params[g] = cell_stage(cell, g)->params;
    if (mesh->n_gpus > 1 && (nccl_share(mesh->nccl, params, cell->stage.param_bytes / 4, mesh->streams) ||
                             nccl_wait(mesh->nccl, mesh->streams)))
        return -1;
    for (int g = 0; g < mesh->n_gpus; g++) {
        stream_use(mesh->streams[g]);
        stage_begin(cell_stage(cell, g), mesh->streams[g]);
    }
    return stream_check(mesh->stream);
}

// After a pass: the first GPU's gradients are the sum, the loss is known, the newest weights are at work.
static int cell_end(Mesh *mesh, Cell *cell) {
    stage_use(&cell->stage, cell->stage.params);
    if (mesh->n_gpus > 1 && nccl_wait(mesh->nccl, mesh->streams)) return -1;
    cell->loss_sum = 0.0;
    for (int g = mesh->n_gpus - 1; g >= 0; g--) { // the first last: its device is current from here on
        stream_use(mesh->streams[g]);
        cell->loss_sum += stage_take_loss(cell_stage(cell, g), mesh->streams[g]);
        if (stream_check(mesh->streams[g])) return -1;
    }
    return 0;
}

// Sends what the coder has written for a cell by now, and gives it what has come. How many messages, or -1.
static int cell_exchange(Mesh *mesh, Cell *cell, const Pass *pass) {
    int sent = cell->outgoing.active && coder_is_done(&mesh->coder, &cell->outgoing.job);
    if (sent && cell_flush(mesh, cell)) return -1;
    int forward = cell_fetch(mesh, cell, WORK_FORWARD, pass);
    int backward = forward < 0 ? -1 : cell_fetch(mesh, cell, WORK_BACKWARD, pass);
    return backward < 0 ? -1 : sent + forward + backward;
}

// Where no cell has its input: waits for the coder. 0, or -1 with a message: it has nothing to do either.
static int mesh_wait(Mesh *mesh, int from, int to, int left) {
    for (int i = from; i < to; i++)
        if (mesh->cells[i].hosted && mesh->cells[i].outgoing.active) return cell_flush(mesh, &mesh->cells[i]);
    for (int i = from; i < to; i++) {
        Cell *cell = &mesh->cells[i];
        if (!cell->hosted || cell->next_work == cell->n_work) continue;
        Incoming *in = &cell->incoming[cell->schedule[cell->next_work].kind == WORK_BACKWARD];
        if (!in->active) continue;
        coder_wait(&mesh->coder, &in->job);
        return 0;
    }
    if (mesh->node != NULL) return node_poll(mesh->node, 1) < 0 ? -1 : 0;
    return error_set("the pipeline is stuck with %d pieces of work left", left);
}

// Runs replicas first .. last-1 through the pass: in turn, each cell whose next work has its input does it. Gradients
// are in the stages' arenas afterwards, the sum of the targets' losses in the last stages' loss_sum.
static int mesh_run(Mesh *mesh, int first, int last, const Pass *pass) {
    int from = first * mesh->n_stages, to = last * mesh->n_stages, left = 0;
    for (int i = from; i < to; i++) {
        Cell *cell = &mesh->cells[i];
        if (!cell->hosted) continue;
        if (cell_begin(mesh, cell, pass)) return -1;
        cell->next_work = 0;
        left += cell->n_work;
    }
    while (left > 0) {
        int moved = mesh->node != NULL ? node_poll(mesh->node, 0) : 0;
        if (moved < 0) return -1;
        for (int i = from; i < to; i++) {
            if (!mesh->cells[i].hosted) continue;
            int exchanged = cell_exchange(mesh, &mesh->cells[i], pass), runs = cell_runnable(mesh, &mesh->cells[i]);
            if (exchanged < 0 || (runs && cell_run(mesh, &mesh->cells[i], pass))) return -1;
            left -= runs, moved += exchanged + runs;
        }
        if (moved == 0 && mesh_wait(mesh, from, to, left)) return -1;
    }
    for (int i = from; i < to; i++)
        if (mesh->cells[i].hosted && (cell_flush(mesh, &mesh->cells[i]) || cell_end(mesh, &mesh->cells[i]))) return -1;
    return 0;
}

// to (N, C) = what comes of `from` on the way between two ends, which may be the same memory. Bytes of the message, or
// -1.
static int64_t codec_pass(const Codec *codec, CodecEnd *sender, CodecEnd *receiver, const CodecContext *context,
                          floatX *to, const floatX *from, int N, int C, unsigned char *message, int64_t message_bytes,
                          Stream *stream) {
    int64_t n_bytes = codec_encode(codec, sender, context, from, N, C, message, message_bytes, stream);
    if (n_bytes < 0 || codec_decode(codec, receiver, context, message, n_bytes, to, N, C, stream)) return -1;
    return n_bytes;
}

// BoundaryPass of an evaluation that compresses as a training step would. context: a MaskedEvaluation.
typedef struct {
    Mesh *mesh;
    int micro_batch; // counts the calls, so that every batch has masks of its own
} MaskedEvaluation;

static int pass_masked(void *context, int boundary, const uint32_t *tokens, floatX *to, const floatX *from, int N,
                       int C, Stream *stream) {
    MaskedEvaluation *masked = (MaskedEvaluation *)context;
    Mesh *mesh = masked->mesh;
    CodecContext where = codec_context(boundary, 0, masked->micro_batch++ & 0xFFF, 0, 1);
    where.tokens = tokens;
    return codec_pass(&mesh->codec, mesh_end_on(mesh, 0, boundary, 0, 0), mesh_end_on(mesh, 0, boundary, 1, 0), &where,
                      to, from, N, C, mesh->message, mesh->message_bytes, stream) < 0
               ? -1
               : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Data parallelism: dense averages of gradients, or Streaming DiLoCo (Douillard et al. 2025) with PowerSGD

enum { MAX_FRAGMENTS = 4096 };

typedef struct {
    int local_steps, n_fragments, overlap, rank;
    float lr, momentum, mix;
    int64_t begun[MAX_FRAGMENTS]; // step at which the average in flight began, 0: none
} Outer;

// Tensor ranks: full for small ones.
static int powersgd_rank(const Tensor *tensor, int rank) {
    int64_t small = tensor->shape[0] < tensor->shape[1] ? tensor->shape[0] : tensor->shape[1];
    return small < rank ? (int)small : rank;
}

// Where a tensor's warm start lies in powersgd_q.
static int64_t powersgd_offset(const Stage *stage, int at, int rank) {
    int64_t offset = 0;
    for (int i = 0; i < at; i++)
        if (stage->tensors[i].n_dims == 2)
            offset += stage->tensors[i].shape[1] * powersgd_rank(&stage->tensors[i], rank);
    return offset;
}

// Which fragment each tensor belongs to, strided by layer: embedding with the first, norm and head with the last.
static void stage_fragments(Stage *stage, int n_fragments) {
    for (int i = 0; i < stage->n_tensors; i++) {
        Tensor *tensor = &stage->tensors[i];
        int layer = tensor_layer(stage, tensor) - stage->first_layer;
        tensor->fragment = tensor->index == 0 ? 0 : layer >= stage->n_layers ? n_fragments - 1 : layer % n_fragments;
    }
}

// Warm starts of a cell of a replica that meets others; they start equal.
static int cell_warm_start(const Mesh *mesh, Cell *cell, const Outer *outer, uint64_t seed) {
    const Stage *stage = &cell->stage;
    for (int t = 0; t < stage->n_tensors; t++) {
        const Tensor *tensor = &stage->tensors[t];
        if (tensor->n_dims != 2) continue;
        if (powersgd_init(cell->powersgd_q + powersgd_offset(stage, t, outer->rank), (int)tensor->shape[1],
                          powersgd_rank(tensor, outer->rank), seed, (uint32_t)tensor->index, mesh->stream))
            return -1;
    }
    return 0;
}

static int cell_meet(const Mesh *mesh, Cell *cell, const Outer *outer, uint64_t seed) {
    int64_t floats = powersgd_offset(&cell->stage, cell->stage.n_tensors, outer->rank);
    cell->powersgd_q = (float *)device_alloc(sizeof(float) * (size_t)(floats > 0 ? floats : 1));
    cell->merge_at = (double *)calloc((size_t)outer->n_fragments, sizeof(double));
    if (cell->powersgd_q == NULL || cell->merge_at == NULL) return error_set("out of memory for PowerSGD");
    return cell_warm_start(mesh, cell, outer, seed);
}

// n values as the wire will round them.
static void wire_round(Wire wire, float *values, int64_t n, Stream *stream) {
    if (wire == WIRE_BF16) vector_round_bf16(values, n, stream);
}

// Multiplications and additions of PowerSGD's four products for one tensor.
static double powersgd_flops(const Tensor *tensor, int rank) {
    return tensor->n_dims == 2 ? 8.0 * (double)tensor->n * powersgd_rank(tensor, rank) : 0.0;
}

// One average of a stage is a meeting (llmc/meeting.h) over the tensors of a fragment, or over all gradients:
//
//   begin     error += global - local of the fragment; the list of shares
//   advance   1-d      SEND error, as the wire rounds it                        TAKE its mean
//             matrix   SEND left = error Q        MEET orthonormal mean         TAKE it
//                      SEND right = error^T left, as the wire rounds it         TAKE its mean
//   commit    1-d      error -= what was sent                                   pending = mean
//             matrix   error -= left right^T      Q = mean of right             pending = left Q^T
//
//            meeting_begin            meeting_advance             meeting_commit
//   no delta -------------> advancing ---------------> complete -------------------> pending waits for mesh_merge
//                            |   ^                        |
//                            +---+------------------------+ meeting_restart, with the replicas that are left
//
// A cell keeps means and its own right factors beside its state, which does not change from begin to commit. So an
// average can be begun anew at any time before, from the same delta: it gives what it would have given without the
// replicas that are gone. All replicas commit the same average, so none may before all are complete; to see to that is
// the caller's.

enum { ALL_GRADIENTS = -1 }; // in place of a fragment

// Floats between two pieces of a seat's memory.
static int64_t share_room(int64_t n) {
    return round_up(n, DEVICE_ALIGN / 4);
}

// Appends a share. Its owner: one for a fragment, for gradients the members in turn.
static void meeting_append(Meeting *meeting, ShareKind kind, const Stage *stage, int t, int64_t n, int after) {
    int64_t turn = meeting->fragment == ALL_GRADIENTS ? stage->tensors[t].index : meeting->turn;
    Share share = {kind, t, meeting_member(meeting, (int)(turn % meeting->n_members)), after, n, meeting->floats};
    meeting_add(meeting, share);
    meeting->floats += share_room(n) * (kind == SHARE_RIGHT ? 2 : 1); // the replica's own right factor behind the mean
}

// The list of shares, in the order of the table, right factors last.
static void meeting_list(Meeting *meeting, const Stage *stage) {
    for (int t = 0; t < stage->n_tensors; t++) {
        const Tensor *tensor = &stage->tensors[t];
        int is_gradient = meeting->fragment == ALL_GRADIENTS, r = powersgd_rank(tensor, meeting->rank);
        if (is_gradient || (tensor->fragment == meeting->fragment && tensor->n_dims == 1))
            meeting_append(meeting, SHARE_VALUES, stage, t, tensor->n, -1);
        else if (tensor->fragment == meeting->fragment)
            meeting_append(meeting, SHARE_LEFT, stage, t, tensor->shape[0] * r, -1);
    }
    for (int i = 0, n = meeting->n_shares; i < n; i++) {
        const Tensor *tensor = &stage->tensors[meeting->shares[i].tensor];
        if (meeting->shares[i].kind == SHARE_LEFT)
            meeting_append(meeting, SHARE_RIGHT, stage, meeting->shares[i].tensor,
                           tensor->shape[1] * powersgd_rank(tensor, meeting->rank), i);
    }
}

// Gives every hosted seat at least the memory that the list needs; what was in it is lost.
static int meeting_reserve(Meeting *meeting) {
    int64_t room = larger(meeting->room, meeting->floats);
    if (meeting->in_place) return 0;
    for (int r = 0; r < meeting->n_replicas; r++) {
        Seat *seat = &meeting->seats[r];
        if (!seat->hosted || (seat->values != NULL && room == meeting->room)) continue;
        device_free(seat->values);
        seat->values = (float *)device_alloc(sizeof(float) * (size_t)(room > 0 ? room : 1));
        if (seat->values == NULL) return error_set("out of memory for averages");
    }
    meeting->room = room;
    return 0;
}

// Begins a meeting anew, from what the replicas had when it began: with those that are living now, as if there had
// never been others. What is still on its way from before must not come into its links. Returns 0 or -1.
static int meeting_restart(const Mesh *mesh, Meeting *meeting) {
    int hosted[MESH_MAX_REPLICAS];
    if (meeting->is_open && meeting->in_place)
        return error_set("an average whose members are all of this process is not begun anew");
    for (int r = 0; r < mesh->n_replicas; r++) hosted[r] = mesh_cell(mesh, r, meeting->stage)->hosted;
    meeting_close(meeting);
    meeting_open(meeting, mesh->living, hosted);
    if (meeting->n_members == 0) return error_set("an average without replicas");
    meeting_list(meeting, &mesh_cell(mesh, 0, meeting->stage)->stage);
    return 0;
}

// Sends part of an average while the cell computes on, once it is at `ready`; returns the arrival. The uplink's time is
// taken at once: where the data are not there yet, other messages use it meanwhile.
static double cell_send_behind(const Mesh *mesh, Cell *cell, double ready, int64_t n_bytes) {
    Clock sender = {fmax(ready, cell->clock.now), cell->clock.uplink_free};
    double arrival = clock_send(&sender, mesh->speed, n_bytes);
    clock_send(&cell->clock, mesh->speed, n_bytes);
    return arrival;
}

// Simulated time of one share's messages.
static void share_clock(const Mesh *mesh, Meeting *meeting, const Share *share) {
    int64_t n_bytes = share->n * codec_size(&mesh->codec);
    Seat *keeper = &meeting->seats[share->owner];
    double met = keeper->time;
    for (int r = 0; r < mesh->n_replicas; r++) {
        if (r == share->owner || !meeting->seats[r].member) continue;
        met = fmax(met, cell_send_behind(mesh, mesh_cell(mesh, r, meeting->stage), meeting->seats[r].time, n_bytes));
    }
    keeper->time = met;
    for (int r = 0; r < mesh->n_replicas; r++) {
        Seat *seat = &meeting->seats[r];
        if (r == share->owner || !seat->member) continue;
        seat->time = fmax(seat->time,
                          cell_send_behind(mesh, mesh_cell(mesh, share->owner, meeting->stage), keeper->time, n_bytes));
    }
}

// Simulated time of the whole average, which begins now, one tensor after the other. Messages of other processes have
// none: an average with strangers ends when it begins.
static void meeting_clock(const Mesh *mesh, Meeting *meeting) {
    int right = 0;
    for (int r = 0; r < mesh->n_replicas; r++) meeting->seats[r].time = mesh_cell(mesh, r, meeting->stage)->clock.now;
    if (!meeting_hosts_all(meeting)) return;
    while (right < meeting->n_shares && meeting->shares[right].kind != SHARE_RIGHT) right++;
    for (int i = 0; i < meeting->n_shares && meeting->shares[i].kind != SHARE_RIGHT; i++) {
        const Share *share = &meeting->shares[i];
        for (int r = 0; r < mesh->n_replicas; r++) {
            Cell *cell = mesh_cell(mesh, r, meeting->stage);
            if (share->kind == SHARE_LEFT && meeting->seats[r].member && mesh->device_flops > 0.0)
                clock_compute(&cell->clock,
                              powersgd_flops(&cell->stage.tensors[share->tensor], meeting->rank) / mesh->device_flops);
        }
        share_clock(mesh, meeting, share);
        if (share->kind == SHARE_LEFT) share_clock(mesh, meeting, &meeting->shares[right++]);
    }
}

// Adds (global - local) of the meeting's fragment to what a cell has left out before.
static void cell_add_delta(const Mesh *mesh, Cell *cell, int fragment) {
    const Stage *stage = &cell->stage;
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        Stored local = stage_values(stage, ARENA_PARAMS, t);
        float *scratch = local.store == STORE_FP32 ? NULL : wide_scratch(STORE_PIECE, mesh->stream);
        if (t->fragment != fragment || (local.store != STORE_FP32 && scratch == NULL)) continue;
        int64_t piece = local.store == STORE_FP32 ? t->n : STORE_PIECE;
        for (int64_t at = 0; at < t->n; at += piece) {
            int64_t n = t->n - at < piece ? t->n - at : piece, from = t->offset + at;
            float *room = scratch;
            outer_delta(stage->error + from, stage->global + from, stored_open(local, at, n, &room, mesh->stream), n,
                        mesh->stream);
        }
    }
}

// Begins an average of the living replicas: of a fragment's pseudo-gradients (global - local, and what was left out
// before), or of ALL_GRADIENTS, then outer is NULL and each replica's come out summed. turn >= 0 chooses the owner.
// Nothing is sent yet. Returns 0 or -1.
static int meeting_begin(const Mesh *mesh, Meeting *meeting, const Outer *outer, int stage, int fragment,
                         int64_t turn) {
    meeting_close(meeting);
    meeting->stage = stage, meeting->fragment = fragment, meeting->turn = turn;
    meeting->rank = outer != NULL ? outer->rank : 0, meeting->in_place = 0;
    if (meeting_restart(mesh, meeting)) return -1;
    meeting->in_place = fragment == ALL_GRADIENTS && meeting_hosts_all(meeting);
    if (meeting_reserve(meeting)) return -1;
    for (int r = 0; r < mesh->n_replicas && fragment != ALL_GRADIENTS; r++)
        if (meeting_hosts(meeting, r)) cell_add_delta(mesh, mesh_cell(mesh, r, stage), fragment);
    meeting_clock(mesh, meeting);
    return 0;
}

// Where replica r takes the mean of a share to.
static float *meeting_mean(const Mesh *mesh, const Meeting *meeting, int r, const Share *share) {
    const Stage *stage = &mesh_cell(mesh, r, meeting->stage)->stage;
    return meeting->in_place ? stage->grads + stage->tensors[share->tensor].offset
                             : meeting->seats[r].values + share->at;
}

// A replica's own right factor.
static float *meeting_own(const Meeting *meeting, int r, const Share *share) {
    return meeting->seats[r].values + share->at + share_room(share->n);
}

// A replica's memory of mesh->exchange.
static float *mesh_exchange(const Mesh *mesh, int replica) {
    return mesh->exchange + replica * mesh->exchange_floats;
}

// What replica r has to send for a share: it is in place, or computed now.
static const float *meeting_part(const Mesh *mesh, const Meeting *meeting, int r, const Share *share) {
    const Cell *cell = mesh_cell(mesh, r, meeting->stage);
    const Stage *stage = &cell->stage;
    const Tensor *tensor = &stage->tensors[share->tensor];
    const float *error = stage->error + (stage->meets ? tensor->offset : 0);
    const float *Q =
        cell->powersgd_q + (share->kind == SHARE_LEFT ? powersgd_offset(stage, share->tensor, meeting->rank) : 0);
    int m = (int)tensor->shape[0], n = (int)tensor->shape[1], rank = powersgd_rank(tensor, meeting->rank);
    float *part = share->kind == SHARE_RIGHT ? meeting_own(meeting, r, share) : mesh_exchange(mesh, r);
    if (share->kind == SHARE_VALUES && meeting->fragment != ALL_GRADIENTS) return error;
    if (share->kind == SHARE_VALUES) {
        device_copy(part, stage->grads + tensor->offset, sizeof(float) * (size_t)share->n, mesh->stream);
        vector_scale(part, share->n, (float)meeting->n_members, mesh->stream);
    } else if (share->kind == SHARE_LEFT) {
        powersgd_left(part, error, Q, m, n, rank, mesh->stream);
    } else {
        powersgd_right(part, error, meeting_mean(mesh, meeting, r, &meeting->shares[share->after]), m, n, rank,
                       mesh->stream);
        wire_round(mesh->codec.wire, part, share->n, mesh->stream);
    }
    return part;
}

// Sends n_bytes of mesh->message; only what leaves the cell is traffic.
static int meeting_post(const Mesh *mesh, const Meeting *meeting, Link *link, int from, int to, int64_t n_bytes) {
    if (from != to) mesh_cell(mesh, from, meeting->stage)->step.bytes[TRAFFIC_DP] += n_bytes;
    return link_send(link, mesh->message, n_bytes, 0.0);
}

// Takes a share's next message off a link into values (n). Returns 0, or -1: the peer's message is of another size.
static int meeting_receive(const Mesh *mesh, const Meeting *meeting, Link *link, int from, const Share *share,
                           float *values) {
    int64_t n_bytes, expected = share->n * codec_size(&mesh->codec);
    double arrival;
    if (link_recv(link, mesh->message, mesh->message_bytes, &n_bytes, &arrival) != LINK_OK) return -1;
    if (n_bytes != expected)
        return error_set("average of stage %d: replica %d sends %lld bytes of %s, %lld are expected", meeting->stage,
                         from, (long long)n_bytes,
                         mesh_cell(mesh, from, meeting->stage)->stage.tensors[share->tensor].name, (long long)expected);
    return codec_decode_fp32(&mesh->codec, mesh->message, n_bytes, values, share->n, mesh->stream);
}

static int meeting_send(const Mesh *mesh, const Meeting *meeting, int r, const Share *share) {
    const float *part = meeting_part(mesh, meeting, r, share);
    int64_t n_bytes = codec_encode_fp32(&mesh->codec, part, share->n, mesh->message, mesh->message_bytes, mesh->stream);
    if (n_bytes < 0) return -1;
    return meeting_post(mesh, meeting, meeting_up(meeting, r, share->owner), r, share->owner, n_bytes);
}

// The owner's part: the mean, in the order of the replicas, whose own values have gone through the wire's rounding too.
static int meeting_meet(const Mesh *mesh, const Meeting *meeting, const Share *share) {
    float *values[MESH_MAX_REPLICAS], *mean = mesh_exchange(mesh, share->owner);
    int n = 0, m = (int)mesh_cell(mesh, 0, meeting->stage)->stage.tensors[share->tensor].shape[0];
    for (int r = 0; r < mesh->n_replicas; r++) {
        if (!meeting->seats[r].member) continue;
        values[n] = mesh_exchange(mesh, r);
        if (meeting_receive(mesh, meeting, meeting_up(meeting, r, share->owner), r, share, values[n++])) return -1;
    }
    vector_mean(mean, values, n, share->n, mesh->stream);
    if (share->kind == SHARE_LEFT && orthonormalize(mean, m, (int)(share->n / m), mesh->stream)) return -1;
    int64_t n_bytes = codec_encode_fp32(&mesh->codec, mean, share->n, mesh->message, mesh->message_bytes, mesh->stream);
    if (n_bytes < 0) return -1;
    for (int r = 0; r < mesh->n_replicas; r++)
        if (meeting->seats[r].member &&
            meeting_post(mesh, meeting, meeting_down(meeting, r, share->owner), share->owner, r, n_bytes))
            return -1;
    return 0;
}

static int meeting_take(const Mesh *mesh, const Meeting *meeting, int r, const Share *share) {
    return meeting_receive(mesh, meeting, meeting_down(meeting, r, share->owner), share->owner, share,
                           meeting_mean(mesh, meeting, r, share));
}

// Goes one message further. Returns 1; 0: nothing can be done before something comes; -1: a peer's message is wrong, or
// an average is not finite.
static int meeting_advance(const Mesh *mesh, Meeting *meeting) {
    Move move = meeting_next(meeting);
    if (move.kind == MOVE_NONE) return 0;
    const Share *share = &meeting->shares[move.share];
    int result = move.kind == MOVE_TAKE   ? meeting_take(mesh, meeting, move.replica, share)
                 : move.kind == MOVE_MEET ? meeting_meet(mesh, meeting, share)
                                          : meeting_send(mesh, meeting, move.replica, share);
    if (result) return -1;
    meeting_moved(meeting, move);
    return 1;
}

// One tensor of a replica: the average, and what is left out. What a replica's Q or vector loses on the wire is left
// out too, so it comes with the next delta; only the rounding of the average on its way back is nobody's. Of what is
// left out now, a share `mix` is still in (global - local) after the merge; only the rest is remembered. Remembering
// all of it counted that share again and again, and runs diverged.
static void share_commit(const Mesh *mesh, const Meeting *meeting, const Outer *outer, int r, const Share *share) {
    const Cell *cell = mesh_cell(mesh, r, meeting->stage);
    const Stage *stage = &cell->stage;
    const Tensor *tensor = &stage->tensors[share->tensor];
    const float *mean = meeting_mean(mesh, meeting, r, share);
    float *error = stage->error + tensor->offset, *pending = stage->pending + tensor->offset;
    size_t n_bytes = sizeof(float) * (size_t)share->n;
    if (share->kind == SHARE_VALUES) {
        device_copy(pending, error, n_bytes, mesh->stream);
        wire_round(mesh->codec.wire, pending, share->n, mesh->stream);
        vector_subtract(error, pending, share->n, mesh->stream);
        device_copy(pending, mean, n_bytes, mesh->stream);
    } else {
        const float *left = meeting_mean(mesh, meeting, r, &meeting->shares[share->after]);
        int m = (int)tensor->shape[0], n = (int)tensor->shape[1], rank = powersgd_rank(tensor, meeting->rank);
        powersgd_error(error, error, left, meeting_own(meeting, r, share), m, n, rank, mesh->stream);
        device_copy(cell->powersgd_q + powersgd_offset(stage, share->tensor, meeting->rank), mean, n_bytes,
                    mesh->stream);
        powersgd_expand(pending, left, mean, m, n, rank, mesh->stream);
    }
    vector_scale(error, tensor->n, 1.0f - outer->mix, mesh->stream);
}

// The end of a complete average: pending, error and warm starts of the fragment, or the gradients. The meeting is
// closed then. outer as in meeting_begin. Returns 0 or -1.
static int meeting_commit(const Mesh *mesh, Meeting *meeting, const Outer *outer) {
    if (!meeting_complete(meeting)) return error_set("an average of stage %d is not complete", meeting->stage);
    for (int r = 0; r < mesh->n_replicas; r++) {
        Cell *cell = mesh_cell(mesh, r, meeting->stage);
        if (!meeting_hosts(meeting, r)) continue;
        for (int i = 0; i < meeting->n_shares; i++) {
            const Share *share = &meeting->shares[i];
            if (outer != NULL && share->kind != SHARE_LEFT) share_commit(mesh, meeting, outer, r, share);
            if (outer == NULL && !meeting->in_place)
                device_copy(cell->stage.grads + cell->stage.tensors[share->tensor].offset,
                            meeting_mean(mesh, meeting, r, share), sizeof(float) * (size_t)share->n, mesh->stream);
        }
        if (outer != NULL)
            cell->merge_at[meeting->fragment] = meeting->seats[r].time;
        else
            clock_receive(&cell->clock, meeting->seats[r].time);
    }
    meeting_close(meeting);
    return stream_check(mesh->stream);
}

// A whole average of replicas that are all of this process.
static int mesh_average(const Mesh *mesh, const Outer *outer, int stage, int fragment, int64_t turn) {
    Meeting *meeting = &mesh->meetings[stage];
    int moved = meeting_begin(mesh, meeting, outer, stage, fragment, turn) ? -1 : 1;
    while (moved > 0) moved = meeting_advance(mesh, meeting);
    if (moved < 0) return -1;
    if (!meeting_complete(meeting))
        return error_set("an average is stuck: stage %d waits, and nothing is on its way", stage);
    return meeting_commit(mesh, meeting, outer);
}

// Memory of the averages of a stage: links, list, and with outer steps the seats' for the largest fragment.
static int meeting_create(const Mesh *mesh, Meeting *meeting, int stage, const Outer *outer) {
    const Stage *first = &mesh_cell(mesh, 0, stage)->stage;
    if (meeting_alloc(meeting, mesh->n_replicas, 2 * first->n_tensors)) return -1;
    meeting->stage = stage, meeting->rank = outer->rank;
    for (int f = 0; f < outer->n_fragments && first->meets; f++) {
        meeting->fragment = f;
        if (meeting_restart(mesh, meeting) || meeting_reserve(meeting)) return -1;
    }
    meeting_close(meeting);
    return 0;
}

// Memory and warm starts of replicas that meet.
static int mesh_meet(Mesh *mesh, const Outer *outer, uint64_t seed) {
    int64_t largest = 0;
    for (int i = 0; i < mesh_cells(mesh); i++) {
        Cell *cell = &mesh->cells[i];
        stage_fragments(&cell->stage, outer->n_fragments);
        for (int t = 0; t < cell->stage.n_tensors; t++) largest = larger(largest, cell->stage.tensors[t].n);
        if (cell->stage.meets && cell->hosted && cell_meet(mesh, cell, outer, seed)) return -1;
    }
    if (mesh->n_replicas == 1) return 0;
    mesh->meetings = (Meeting *)calloc((size_t)mesh->n_stages, sizeof(Meeting));
    mesh->exchange_floats = largest;
    mesh->exchange = (float *)device_alloc(sizeof(float) * (size_t)largest * (size_t)mesh->n_replicas);
    if (mesh->meetings == NULL || mesh->exchange == NULL) return error_set("out of memory for averages");
    for (int s = 0; s < mesh->n_stages; s++)
        if (meeting_create(mesh, &mesh->meetings[s], s, outer)) return -1;
    if (mesh->message_bytes >= 4 * largest) return 0;
    device_host_free(mesh->message);
    mesh->message_bytes = 4 * largest;
    mesh->message = (unsigned char *)device_host_alloc((size_t)mesh->message_bytes);
    return mesh->message != NULL ? 0 : error_set("out of memory for messages");
}

// --dp dense: every replica gets the sum of all gradients of its stage. They are scaled by the targets of all already.
static int mesh_sum_gradients(Mesh *mesh) {
    for (int s = 0; s < mesh->n_stages; s++)
        if (mesh_average(mesh, NULL, s, ALL_GRADIENTS, 0)) return -1;
    return 0;
}

// Outer steps happen after `done` local steps: fragment f begins its average every local_steps steps, at its own phase,
// and merges it `overlap` steps later.
static int outer_begins(const Outer *outer, int fragment, int64_t done) {
    int phase = fragment * outer->local_steps / outer->n_fragments;
    return done > 0 && done % outer->local_steps == phase;
}

static int outer_merges(const Outer *outer, int fragment, int64_t done) {
    return outer->begun[fragment] > 0 && done >= outer->begun[fragment] + outer->overlap;
}

// The average of a fragment's pseudo-gradients, with all that is left out.
static int mesh_begin_merge(Mesh *mesh, const Outer *outer, int fragment, int64_t turn) {
    for (int s = 0; s < mesh->n_stages; s++)
        if (mesh_average(mesh, outer, s, fragment, turn)) return -1;
    return 0;
}

// The outer step of a tensor and its merge into the local one, piece by piece where that is no float. To the nearest:
// what this loses is part of the next pseudo-gradient.
static void tensor_merge(const Stage *stage, const Tensor *t, const Outer *outer, float mix, Stream *stream) {
    Stored local = stage_values(stage, ARENA_PARAMS, t);
    int64_t piece = local.store == STORE_FP32 ? t->n : STORE_PIECE;
    float *scratch = local.store == STORE_FP32 ? NULL : wide_scratch(piece, stream);
    if (local.store != STORE_FP32 && scratch == NULL) return;
    for (int64_t at = 0; at < t->n; at += piece) {
        int64_t n = t->n - at < piece ? t->n - at : piece, from = t->offset + at;
        float *room = scratch, *values = stored_open(local, at, n, &room, stream);
        outer_step(stage->global + from, stage->outer + from, values, stage->pending + from, outer->lr, outer->momentum,
                   mix, n, stream);
        stored_close(local, at, values, n, rounding_nearest(), stream);
    }
}

// The outer Nesterov step of a fragment, and its merge into the local parameters: mix = share of the local ones.
static void mesh_merge(Mesh *mesh, const Outer *outer, int fragment, float mix) {
    for (int i = 0; i < mesh_cells(mesh); i++) {
        Cell *cell = &mesh->cells[i];
        Stage *stage = &cell->stage;
        if (!cell->hosted) continue;
        for (int t = 0; t < stage->n_tensors; t++)
            if (stage->tensors[t].fragment == fragment)
                tensor_merge(stage, &stage->tensors[t], outer, mix, mesh->stream);
        clock_receive(&cell->clock, cell->merge_at[fragment]);
    }
}

// What is due after `done` local steps.
static int mesh_outer(Mesh *mesh, Outer *outer, int64_t done) {
    for (int f = 0; f < outer->n_fragments; f++) {
        if (outer_begins(outer, f, done)) {
            if (mesh_begin_merge(mesh, outer, f, f + done / outer->local_steps)) return -1;
            outer->begun[f] = done;
        }
        if (!outer_merges(outer, f, done)) continue;
        mesh_merge(mesh, outer, f, outer->mix);
        outer->begun[f] = 0;
    }
    return 0;
}

// The end of a run: averages in flight are merged, then everything once more, without mixing: all replicas are equal.
static int mesh_outer_finish(Mesh *mesh, Outer *outer) {
    for (int f = 0; f < outer->n_fragments; f++) {
        if (outer->begun[f] > 0) mesh_merge(mesh, outer, f, outer->mix);
        outer->begun[f] = 0;
        if (mesh_begin_merge(mesh, outer, f, f)) return -1;
        mesh_merge(mesh, outer, f, 0.0f);
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Anchor: the unmasked circuit. A thread takes a snapshot of the fast circuit's parameters, computes their unmasked
// gradient on data of its own, adds it to a momentum and decomposes that: M = U S V^T of each block matrix. The fast
// circuit filters its gradients with the last factors delivered and never waits for the next, unless it is told after
// how many steps they come. With --anchor-use bias the thread also computes, on the same data, the gradient Gc that the
// boundaries' codec would have given: the mean of G - Gc is the codec's bias, whose factors the fast circuit adds to
// its gradients, before the filter if there is one.
//
//   idle --launch (fast circuit)--> working --(thread)--> ready | failed --deliver (fast circuit)--> idle
//   any --anchor_stop--> leaving
// Only the fast circuit moves to working and idle, only the thread to ready and failed; the factors that the thread
// writes are never those the fast circuit reads.

typedef enum { ANCHOR_IDLE, ANCHOR_WORKING, ANCHOR_READY, ANCHOR_FAILED, ANCHOR_LEAVING } AnchorState;

// The factors of one matrix (m, n) of rank r.
typedef struct {
    int m, n, r;
    float *u; // (m, r)
    float *s; // (r)
    float *v; // (n, r)
    float *d; // (r) response of the filter
} Factor;

typedef struct {
    float *memory;
    int64_t n_floats;
    Factor *of; // by Tensor.index; r = 0 for what is no block matrix
} FactorSet;

// What the anchor learns of the boundaries of its pass for the transform codec (llmc/klt_learn.h); of each there are
// two directions.
#define LEARNER_DECAY 0.5f // of moments, a pass: states drift, and a pass has many more rows than a row has values
enum { LEARNER_ROWS = 1024 /* of a sample */ };

typedef struct {
    // fixed at start
    int n_boundaries, predicts, fixed, C, V;
    double budget[2], metric; // bytes of a token by direction; gamma (klt_learn.h)
    const float *embed;       // (V, C) the embedding the run has begun with, as the first GPU has it
    const KltTable *tables;   // (n_boundaries, 2) in use there
    // the anchor thread's
    KltMoments *moments;  // (n_boundaries, 2)
    KltMoments embedding; // of embed's rows
    KltWork work;
    float *e;              // (micro-batch * T, C)
    int stride, failed;    // stride: every so many rows there is one of the sample
    unsigned char **blobs; // (n_boundaries, 2) tables of the last pass; NULL: none
    int64_t *blob_bytes;
    KltReport *reports; // (n_boundaries, 2) of those
    // the fast circuit's
    KltReport *used_reports; // (n_boundaries, 2) of the tables in use
    int embed_counted;
} Learner;

// The boundaries' codec in the anchor's pass that measures its bias: ends, message and work of its own.
typedef struct {
    // fixed at start
    const Codec *codec;
    int replica;    // names the messages: no fast one has this number
    CodecEnd *ends; // (n_boundaries, 2): before the boundary, behind it
    unsigned char *message;
    int64_t message_bytes;
    KltWork work;
    // of the pass
    int failed;
    int64_t sent[2]; // bytes by direction; 0: the pass had no compressed part
} CodedPass;

typedef struct {
    // fixed at start
    const Dataset *data;
    int batch, micro_batch, T, rank, debias, threads;
    int filters, corrects, learns; // gives factors of gradients, of the codec's bias, gives tables
    int n_boundaries;
    int layer[CONFIG_MAX_LAYERS]; // boundary b lies before this layer
    Precision precision;
    uint64_t seed;
    float beta, tau;
    int tau_relative, unrounded;
    Store param_store, grad_store, moment_store; // of the fast circuit
    Store frozen_store;
    const Stage *lender; // whose frozen tensors its model uses; NULL: it has its own
    Wire wire;
    // the thread's own while it works
    Stage stage; // the whole model: snapshot, gradient, and as its moments the momentum and the codec's bias
    Stream *stream;
    Batch tokens;
    int64_t row;                           // of the batch, at which the micro-batch at work begins
    int64_t samples, passes, coded_passes; // sequences taken, gradients in the momentum, differences in the bias
    int useless;                           // the last gradient was not finite: momentum and factors stay
    double loss, seconds;                  // of the last pass
    FactorSet sets[2], bias[2];            // of the momentum; of the bias, where u is U diag(s)
    Learner learner;
    CodedPass coded;
    // the fast circuit's
    int front, deliveries;
    int64_t launched, delivered; // fast step of the snapshot at work, and of the factors in front; -1: none
    double delivered_loss, delivered_seconds; // of the pass that gave the factors in front
    int64_t factor_bytes, boundary_bytes[2];  // sent to the replicas; between the anchor's own stages, by direction
    double launched_at;                       // simulated time at which the snapshot was there
    // between the two, under the mutex
    pthread_t thread;
    int running;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    AnchorState state;
    char error[ERROR_MAX];
    int held; // tests keep a finished pass back with this
} Anchor;

// Rank of a block matrix's factors; rank 0 asks for the full one.
static int factor_rank(const Tensor *tensor, int rank) {
    int small = (int)(tensor->shape[0] < tensor->shape[1] ? tensor->shape[0] : tensor->shape[1]);
    return rank == 0 || small < rank ? small : rank;
}

// Floats of one set of factors.
static int64_t factor_floats(const Stage *stage, int rank) {
    int64_t floats = 0;
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        if (tensor->block) floats += (tensor->shape[0] + tensor->shape[1] + 2) * factor_rank(tensor, rank);
    }
    return floats;
}

static int factor_set_alloc(FactorSet *set, const Stage *stage, int rank) {
    const Tensor *last = &stage->tensors[stage->n_tensors - 1];
    set->n_floats = factor_floats(stage, rank);
    set->memory = (float *)device_alloc(sizeof(float) * (size_t)set->n_floats);
    set->of = (Factor *)calloc((size_t)last->index + 1, sizeof(Factor));
    if (set->memory == NULL || set->of == NULL) return error_set("out of memory for the anchor's factors");
    float *at = set->memory;
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        if (!tensor->block) continue;
        int m = (int)tensor->shape[0], n = (int)tensor->shape[1], r = factor_rank(tensor, rank);
        float *s = at + (int64_t)m * r, *v = s + r, *d = v + (int64_t)n * r;
        Factor factor = {m, n, r, at, s, v, d};
        set->of[tensor->index] = factor;
        at = d + r;
    }
    return 0;
}

// Decomposes the block matrices of an arena into the set the fast circuit does not read, warm from the one in front.
// All of it but the singular values is rounded as it travels.
static int anchor_decompose(Anchor *anchor, FactorSet sets[2], Arena arena, int warm) {
    FactorSet *from = &sets[anchor->front], *to = &sets[1 - anchor->front];
    for (int i = 0; i < anchor->stage.n_tensors; i++) {
        const Tensor *tensor = &anchor->stage.tensors[i];
        if (!tensor->block) continue;
        const Factor *old = &from->of[tensor->index];
        Factor *factor = &to->of[tensor->index];
        if (warm) device_copy(factor->v, old->v, sizeof(float) * (size_t)factor->n * (size_t)factor->r, anchor->stream);
        const float *values = stored_matrix(stage_values(&anchor->stage, arena, tensor), tensor->n, anchor->stream);
        if (values == NULL || svd_truncated(factor->u, factor->s, factor->v, values, factor->m, factor->n, factor->r,
                                            warm, anchor->seed, (uint32_t)tensor->index, anchor->stream))
            return -1;
        wire_round(anchor->wire, factor->u, (int64_t)factor->m * factor->r, anchor->stream);
        wire_round(anchor->wire, factor->v, (int64_t)factor->n * factor->r, anchor->stream);
    }
    return 0;
}

// 1 / (1 - beta^n): the mean of n values, of what a running mean that began at 0 has become.
static float anchor_debiased(const Anchor *anchor, int64_t n) {
    return 1.0f / (1.0f - powf(anchor->beta, (float)n));
}

// The factors of the momentum and the filter's response.
static int anchor_factors(Anchor *anchor) {
    float debias = anchor->debias ? anchor_debiased(anchor, anchor->passes) : 1.0f;
    if (anchor_decompose(anchor, anchor->sets, ARENA_M, anchor->deliveries > 0)) return -1;
    for (int i = 0; i < anchor->stage.n_tensors; i++) {
        const Tensor *tensor = &anchor->stage.tensors[i];
        const Factor *factor = &anchor->sets[1 - anchor->front].of[tensor->index];
        if (!tensor->block) continue;
        vector_scale(factor->s, factor->r, debias, anchor->stream);
        spectral_response(factor->d, factor->s, factor->r, anchor->tau, anchor->tau_relative, anchor->stream);
    }
    return 0;
}

// The factors of the codec's bias D: V as it travels, and D V, which is U diag(s), in place of U. No bias: all zero.
static int anchor_bias_factors(Anchor *anchor) {
    FactorSet *to = &anchor->bias[1 - anchor->front];
    if (anchor->coded_passes == 0) {
        device_zero(to->memory, sizeof(float) * (size_t)to->n_floats, anchor->stream);
        return 0;
    }
    if (anchor_decompose(anchor, anchor->bias, ARENA_V, anchor->coded_passes > 1)) return -1;
    for (int i = 0; i < anchor->stage.n_tensors; i++) {
        const Tensor *tensor = &anchor->stage.tensors[i];
        const Factor *f = &to->of[tensor->index];
        int64_t n = (int64_t)f->m * f->r;
        if (!tensor->block) continue;
        matmul_product(f->u, f->r, anchor->stage.v + tensor->offset, f->n, 0, f->v, f->r, 0, f->m, f->r, f->n, 0, 0,
                       anchor->stream);
        vector_scale(f->u, n, anchor_debiased(anchor, anchor->coded_passes), anchor->stream);
        wire_round(anchor->wire, f->u, n, anchor->stream);
    }
    return 0;
}

static void learner_free(Learner *learner) {
    for (int i = 0; i < 2 * learner->n_boundaries; i++) {
        if (learner->moments != NULL) klt_moments_free(&learner->moments[i]);
        if (learner->blobs != NULL) free(learner->blobs[i]);
    }
    klt_moments_free(&learner->embedding);
    klt_work_free(&learner->work);
    free(learner->moments);
    free(learner->blobs);
    free(learner->blob_bytes);
    free(learner->reports);
    free(learner->used_reports);
    device_free(learner->e);
    memset(learner, 0, sizeof *learner);
}

// Memory of tables and reports.
static int learner_alloc_tables(Learner *learner) {
    size_t n = 2 * (size_t)learner->n_boundaries;
    learner->blobs = (unsigned char **)calloc(n, sizeof(unsigned char *));
    learner->blob_bytes = (int64_t *)calloc(n, sizeof(int64_t));
    learner->reports = (KltReport *)calloc(n, sizeof(KltReport));
    learner->used_reports = (KltReport *)calloc(n, sizeof(KltReport));
    return learner->blobs != NULL && learner->blob_bytes != NULL && learner->reports != NULL &&
                   learner->used_reports != NULL
               ? 0
               : error_set("out of memory for the transform codec's tables");
}

// Memory. The fields fixed at start are set by the caller. rows: of a micro-batch and a pass.
static int learner_alloc(Learner *learner, int micro_rows, int64_t pass_rows) {
    size_t n = 2 * (size_t)learner->n_boundaries;
    learner->stride = (int)larger(pass_rows / LEARNER_ROWS, 1);
    learner->moments = (KltMoments *)calloc(n, sizeof(KltMoments));
    if (learner->moments == NULL || learner_alloc_tables(learner))
        return error_set("out of memory for the transform codec's tables");
    for (size_t i = 0; i < n; i++)
        if (klt_moments_alloc(&learner->moments[i], learner->C, learner->predicts && i % 2 == CODEC_FORWARD,
                              LEARNER_ROWS))
            return -1;
    if (!learner->predicts) return 0;
    learner->e = (float *)device_alloc(sizeof(float) * (size_t)micro_rows * (size_t)learner->C);
    return learner->e == NULL ? -1 : klt_moments_alloc(&learner->embedding, learner->C, 0, 0);
}

static void learner_begin(Learner *learner, Stream *stream) {
    learner->failed = 0;
    for (int i = 0; i < 2 * learner->n_boundaries; i++) klt_moments_begin(&learner->moments[i], LEARNER_DECAY, stream);
    if (learner->predicts) klt_moments_begin(&learner->embedding, LEARNER_DECAY, stream);
}

// learner->e = the micro-batch's embeddings, whose moments are added. as_stored: (N, C) that may be overwritten.
static int learner_embed(Learner *learner, const uint32_t *tokens, floatX *as_stored, int N, Stream *stream) {
    embedding_forward(as_stored, tokens, learner->embed, N, learner->C, stream);
    klt_embed(learner->e, tokens, learner->embed, N, learner->C, stream);
    return klt_moments_add(&learner->embedding, as_stored, NULL, NULL, N, 1, 0, &learner->work, stream);
}

// Rows of the micro-batch at work.
static int anchor_rows(const Anchor *anchor) {
    int64_t left = (int64_t)anchor->batch * anchor->T - anchor->row, most = (int64_t)anchor->micro_batch * anchor->T;
    return (int)(left < most ? left : most);
}

// The boundary before a layer, or -1.
static int anchor_boundary(const Anchor *anchor, int layer) {
    int b = anchor->n_boundaries - 1;
    while (b >= 0 && anchor->layer[b] != layer) b--;
    return b;
}

// PassHook of the anchor's backward, told after each layer: at a boundary the layer's input is the state that travels
// there, and d.dx its gradient. The embedding's turn ends the micro-batch.
static void anchor_see(void *context, int first, int last) {
    Anchor *anchor = (Anchor *)context;
    Learner *learner = &anchor->learner;
    const Stage *stage = &anchor->stage;
    const uint32_t *tokens = anchor->tokens.tokens + anchor->row;
    int N = anchor_rows(anchor), lead = stage_lead(stage), layer = (first - lead) / stage->per_layer;
    int b = anchor_boundary(anchor, layer);
    if (last == lead) {
        anchor->row += N;
        return;
    }
    if (learner->predicts && layer == stage->n_layers - 1 && // dnorm is free between layers
        learner_embed(learner, stage->tokens, stage->d.dnorm, N, anchor->stream))
        learner->failed = 1;
    if (b < 0 || learner->failed) return;
    KltMoments *moments = &learner->moments[2 * b];
    learner->failed |= klt_moments_add(&moments[CODEC_FORWARD], stage->acts[layer].x, learner->e, tokens, N,
                                       learner->stride, 0, &learner->work, anchor->stream);
    learner->failed |= klt_moments_add(&moments[CODEC_BACKWARD], stage->d.dx, NULL, NULL, N, learner->stride, 1,
                                       &learner->work, anchor->stream);
}

// x (rows of the micro-batch, C), if there is a boundary before the layer = what the codec makes of it there.
static void anchor_code(Anchor *anchor, int layer, CodecDirection direction, floatX *x) {
    CodedPass *coded = &anchor->coded;
    int b = anchor_boundary(anchor, layer), backward = direction == CODEC_BACKWARD;
    int64_t micro = anchor->row / ((int64_t)anchor->micro_batch * anchor->T);
    if (b < 0 || coded->failed) return;
    CodecContext where = codec_context(b, coded->replica, (int)(micro & 0xFFF), anchor->launched, 1);
    where.direction = direction, where.training = 1, where.T = anchor->T;
    where.tokens = anchor->tokens.tokens + anchor->row;
    CodecEnd *ends = &coded->ends[2 * b];
    int64_t n_bytes = codec_pass(coded->codec, &ends[backward], &ends[!backward], &where, x, x, anchor_rows(anchor),
                                 anchor->stage.config.channels, coded->message, coded->message_bytes, anchor->stream);
    coded->failed = n_bytes < 0;
    if (!coded->failed) coded->sent[direction] += n_bytes;
}

// PassHook of the compressed pass: the states that travel in its forward, their gradients in its backward.
static void anchor_code_state(void *context, int layer) {
    Anchor *anchor = (Anchor *)context;
    anchor_code(anchor, layer, CODEC_FORWARD, anchor->stage.acts[layer].x);
}

static void anchor_code_gradient(void *context, int first, int last) {
    Anchor *anchor = (Anchor *)context;
    int lead = stage_lead(&anchor->stage);
    if (last == lead)
        anchor->row += anchor_rows(anchor);
    else
        anchor_code(anchor, (first - lead) / anchor->stage.per_layer, CODEC_BACKWARD, anchor->stage.d.dx);
}

// The tables of a pass, as they travel. A boundary of which nothing was seen keeps the one it has.
static int learner_tables(Learner *learner, int64_t pass, uint64_t seed, Stream *stream) {
    if (learner->failed) return -1;
    for (int i = 0; i < 2 * learner->n_boundaries; i++) {
        int backward = i % 2 == CODEC_BACKWARD, predicts = learner->predicts && !backward;
        const KltMoments *gradients = &learner->moments[2 * (i / 2) + CODEC_BACKWARD];
        int weighs = !backward && learner->metric > 0.0 && gradients->weight > 0.0;
        KltSources from = {&learner->moments[i], predicts ? &learner->embedding : NULL, weighs ? gradients : NULL,
                           learner->embed};
        KltSettings settings = {(uint32_t)pass,
                                backward,
                                learner->fixed,
                                0.45f,
                                backward ? KLT_FLOOR_BACKWARD : KLT_FLOOR,
                                1e-3,
                                8.0 * learner->budget[backward],
                                seed,
                                learner->metric};
        free(learner->blobs[i]);
        learner->blobs[i] = NULL;
        if (learner->moments[i].n_sample == 0) continue;
        learner->blobs[i] =
            klt_learn(&from, &settings, &learner->work, &learner->blob_bytes[i], &learner->reports[i], stream);
        if (learner->blobs[i] == NULL) return -1;
    }
    return 0;
}

// The reports of the tables in use for the log: of each boundary, forward then backward, bits a token, the share
// of the variance that is lost, and the least share that a Gaussian of this covariance could lose.
static json_t *learner_reports(const Learner *learner) {
    json_t *list = json_array();
    for (int i = 0; i < 2 * learner->n_boundaries; i++) {
        const KltReport *report = &learner->used_reports[i];
        json_array_append_new(list, json_pack("[f, f, f]", report->bits, report->lost, report->bound));
    }
    return list;
}

// Puts a table into use at the ends of its boundary.
static int learner_use_table(Mesh *mesh, const Learner *learner, int table, const void *bytes, int64_t n_bytes) {
    for (int g = mesh->n_gpus - 1; g >= 0; g--) { // the first last: its device is current from here on
        KltTable *place = &mesh->klt[g].tables[table];
        stream_use(mesh->streams[g]);
        klt_table_free(place);
        if (klt_table_load(place, (const unsigned char *)bytes, n_bytes, learner->C, mesh->streams[g])) return -1;
    }
    return 0;
}

// Puts the tables of the last pass into use at all ends of their boundaries. Returns bytes a replica, or -1.
static int64_t learner_use(Mesh *mesh, Learner *learner) {
    int64_t n_bytes = 0;
    for (int i = 0; i < 2 * learner->n_boundaries; i++) {
        if (learner->blobs[i] == NULL) continue;
        if (learner_use_table(mesh, learner, i, learner->blobs[i], learner->blob_bytes[i])) return -1;
        learner->used_reports[i] = learner->reports[i];
        n_bytes += klt_table_sent(&mesh->klt[0].tables[i].head);
    }
    return n_bytes;
}

// Before a compressed pass: 1 if the codec has all it needs, the tables of klt that the fast circuit has in use.
static int coded_begin(Anchor *anchor) {
    CodedPass *coded = &anchor->coded;
    const KltTable *tables = anchor->learner.tables;
    coded->failed = 0;
    for (int i = 0; i < 2 * anchor->n_boundaries && anchor->learns; i++) {
        if (tables[i].blob == NULL) return 0;
        for (int behind = 0; behind < 2; behind++) {
            KltEnd *end = &coded->ends[2 * (i / 2) + behind].klt[i % 2];
            end->table = &tables[i], end->work = &coded->work, end->embed = anchor->learner.embed;
        }
    }
    return 1;
}

// The bias of the boundaries' codec, D <- beta D + (1-beta) (G - Gc), and its factors. stage->grads holds G, and Gc
// afterwards: its share of D is taken off once it is there. Should it not be finite, the mean begins anew.
static int anchor_bias(Anchor *anchor) {
    Stage *stage = &anchor->stage;
    double loss;
    PassHook hook = {anchor_code_gradient, anchor_code_state, anchor};
    if (!coded_begin(anchor)) return anchor_bias_factors(anchor);
    vector_momentum(stage->v, stage->grads, anchor->beta, stage->arena_floats, anchor->stream);
    anchor->row = 0;
    if (stage_gradients(stage, &anchor->tokens, anchor->micro_batch, &loss, NULL, &hook, anchor->stream)) return -1;
    if (anchor->coded.failed) return -1;
    if (isfinite(stage_grad_norm(stage, anchor->stream))) {
        vector_scale(stage->grads, stage->arena_floats, 1.0f - anchor->beta, anchor->stream);
        vector_subtract(stage->v, stage->grads, stage->arena_floats, anchor->stream);
        anchor->coded_passes++;
    } else {
        device_zero(stage->v, sizeof(float) * (size_t)stage->arena_floats, anchor->stream);
        anchor->coded_passes = 0;
    }
    return anchor_bias_factors(anchor);
}

// M <- beta M + (1-beta) G: of floats at once, otherwise of the block matrices, which are all that is decomposed, piece
// by piece.
static void anchor_momentum(Anchor *anchor) {
    Stage *stage = &anchor->stage;
    Stream *stream = anchor->stream;
    if (stage->moment_store == STORE_FP32 && stage->grad_store == STORE_FP32) {
        vector_momentum(stage->m, stage->grads, anchor->beta, stage->arena_floats, stream);
        return;
    }
    float *scratch = wide_scratch(2 * STORE_PIECE, stream);
    for (int i = 0; i < stage->n_tensors && scratch != NULL; i++) {
        const Tensor *t = &stage->tensors[i];
        Rounding rounding = rounding_of(stage->seed, t->index, ROUND_ANCHOR, anchor->passes);
        for (int64_t at = 0; t->block && at < t->n; at += STORE_PIECE) {
            int64_t n = t->n - at < STORE_PIECE ? t->n - at : STORE_PIECE;
            Stored kept = stage_values(stage, ARENA_M, t);
            float *room = scratch, *m = stored_open(kept, at, n, &room, stream);
            const float *g = stored_open(stage_values(stage, ARENA_GRADS, t), at, n, &room, stream);
            vector_momentum(m, g, anchor->beta, n, stream);
            stored_close(kept, at, m, n, rounding, stream);
        }
    }
}

// One pass over the snapshot: gradient, momentum, factors.
static int anchor_pass(Anchor *anchor) {
    Stage *stage = &anchor->stage;
    Batch *tokens = &anchor->tokens;
    double start = seconds();
    tokens->n_valid = 0;
    for (int b = 0; b < tokens->b; b++) {
        int64_t window = split_order(&anchor->data->train, anchor->samples + b, anchor->seed ^ 0xA5C402u); // own order
        tokens->n_valid += batch_read(tokens, b, &anchor->data->train, window);
    }
    anchor->samples += tokens->b;
    anchor->row = 0, anchor->coded.sent[0] = anchor->coded.sent[1] = 0;
    PassHook hook = {anchor_see, NULL, anchor};
    if (anchor->learns) learner_begin(&anchor->learner, anchor->stream);
    if (stage_gradients(stage, tokens, anchor->micro_batch, &anchor->loss, NULL, anchor->learns ? &hook : NULL,
                        anchor->stream))
        return -1;
    anchor->useless = !isfinite(anchor->loss) || !isfinite(stage_grad_norm(stage, anchor->stream));
    if (!anchor->useless) {
        anchor->passes++;
        if (anchor->learns && learner_tables(&anchor->learner, anchor->passes, anchor->seed, anchor->stream)) return -1;
        anchor_momentum(anchor);
        if (anchor->filters && anchor_factors(anchor)) return -1;
        if (anchor->corrects && anchor_bias(anchor)) return -1;
    }
    stream_wait(anchor->stream);
    anchor->seconds = seconds() - start;
    return stream_check(anchor->stream);
}

static void *anchor_thread(void *argument) {
    Anchor *anchor = (Anchor *)argument;
    stream_use(anchor->stream); // a new thread begins with device 0
    pthread_mutex_lock(&anchor->mutex);
    for (;;) {
        while (anchor->state != ANCHOR_WORKING && anchor->state != ANCHOR_LEAVING)
            pthread_cond_wait(&anchor->changed, &anchor->mutex);
        if (anchor->state == ANCHOR_LEAVING) break;
        pthread_mutex_unlock(&anchor->mutex);
        omp_set_num_threads(anchor->stream->threads); // of this thread's regions
        int failed = anchor_pass(anchor);
        pthread_mutex_lock(&anchor->mutex);
        while (anchor->held && anchor->state == ANCHOR_WORKING) pthread_cond_wait(&anchor->changed, &anchor->mutex);
        if (failed) memcpy(anchor->error, error_message, sizeof anchor->error);
        if (anchor->state == ANCHOR_WORKING) anchor->state = failed ? ANCHOR_FAILED : ANCHOR_READY;
        pthread_cond_broadcast(&anchor->changed);
    }
    pthread_mutex_unlock(&anchor->mutex);
    return NULL;
}

// Sets the thread to work on the snapshot of a step, which is there.
static void anchor_work(Anchor *anchor, int64_t step) {
    anchor->launched = step;
    pthread_mutex_lock(&anchor->mutex);
    anchor->state = ANCHOR_WORKING;
    pthread_cond_broadcast(&anchor->changed);
    pthread_mutex_unlock(&anchor->mutex);
}

// Takes the snapshot of a model's arena and sets the thread to work. rounded: values are rounded as they would travel.
static void anchor_launch(Anchor *anchor, const Stage *model, Arena arena, int rounded, int64_t step) {
    int at = 0;
    for (const Stage *stage = model; stage != NULL; stage = stage->next) {
        for (int i = 0; i < stage->n_tensors; i++) {
            const Tensor *from = &stage->tensors[i], *to = &anchor->stage.tensors[at++];
            Stored values = stage_values(&anchor->stage, ARENA_PARAMS, to);
            stored_copy(values, stage_values(stage, arena, from), from->n, stage->stream);
            if (rounded && values.store == STORE_FP32)
                wire_round(WIRE_BF16, (float *)values.data, from->n, stage->stream);
        }
    }
    stream_wait(model->stream);
    anchor_work(anchor, step);
}

// The state now; wait != 0: once no pass is at work.
static AnchorState anchor_state(Anchor *anchor, int wait) {
    pthread_mutex_lock(&anchor->mutex);
    while (wait && anchor->state == ANCHOR_WORKING) pthread_cond_wait(&anchor->changed, &anchor->mutex);
    AnchorState state = anchor->state;
    pthread_mutex_unlock(&anchor->mutex);
    return state;
}

// Swaps the finished factors to the front; tables are put into use by learner_deliver. 0, or -1 if the pass failed.
static int anchor_deliver(Anchor *anchor) {
    pthread_mutex_lock(&anchor->mutex);
    int failed = anchor->state == ANCHOR_FAILED;
    if (failed) error_set("anchor: %.900s", anchor->error);
    anchor->state = ANCHOR_IDLE;
    pthread_mutex_unlock(&anchor->mutex);
    if (failed) return -1;
    if (!anchor->useless) anchor->front = 1 - anchor->front, anchor->deliveries++, anchor->delivered = anchor->launched;
    anchor->delivered_loss = anchor->loss, anchor->delivered_seconds = anchor->seconds;
    return 0;
}

// What an end of the anchor's compressed pass is made for.
static CodecShape coded_shape(int micro_batch, int T, int C) {
    CodecShape shape = {C, micro_batch * T, T, 1, 0};
    return shape;
}

// Ends, each of which has one micro-batch in flight, and the message.
static int coded_alloc(Anchor *anchor) {
    CodedPass *coded = &anchor->coded;
    CodecShape shape = coded_shape(anchor->micro_batch, anchor->T, anchor->stage.config.channels);
    coded->ends = (CodecEnd *)calloc(2 * (size_t)anchor->n_boundaries, sizeof(CodecEnd));
    coded->message_bytes = codec_cap(coded->codec, shape.n, shape.H);
    coded->message = (unsigned char *)device_host_alloc((size_t)coded->message_bytes);
    if (coded->ends == NULL || coded->message == NULL) return error_set("out of memory for the anchor's codec");
    for (int i = 0; i < 2 * anchor->n_boundaries; i++)
        if (codec_end_init(&coded->ends[i], coded->codec, shape)) return -1;
    return 0;
}

static void coded_free(CodedPass *coded, int n_boundaries) {
    for (int i = 0; i < 2 * n_boundaries && coded->ends != NULL; i++) codec_end_free(&coded->ends[i]);
    free(coded->ends);
    device_host_free(coded->message);
    klt_work_free(&coded->work);
}

// The anchor's model: gradients of all but embedding and head, which nobody wants; the momentum is kept as floats, or
// as bf16 where the optimizer's moments are smaller. The codec's bias is a small difference: with it all are floats.
static int anchor_table(Stage *stage, const Anchor *anchor, const Config *config) {
    if (stage_table(stage, config, 0, config->n_layers)) return -1;
    for (int i = 0; i < stage->n_tensors; i++)
        stage->tensors[i].left_out = stage->tensors[i].n_dims == 2 && !stage->tensors[i].block;
    stage->n_moments = 1 + anchor->corrects, stage->seed = anchor->seed;
    stage->param_store = anchor->param_store;
    stage->frozen_store = anchor->frozen_store, stage->borrows_frozen = anchor->lender != NULL;
    if (anchor->corrects) return 0;
    stage->grad_store = anchor->grad_store;
    stage->moment_store = anchor->moment_store == STORE_FP32 ? STORE_FP32 : STORE_BF16;
    return 0;
}

// Memory and thread. The fields fixed at start are set by the caller.
static int anchor_start(Anchor *anchor, const Config *config, int recompute) {
    int threads = omp_get_max_threads(), result;
    anchor->launched = anchor->delivered = -1;
    pthread_mutex_init(&anchor->mutex, NULL);
    pthread_cond_init(&anchor->changed, NULL);
    result = stream_create(&anchor->stream, anchor->precision, anchor->threads);
    omp_set_num_threads(threads); // of the calling thread: its products are planned for all of them
    if (result != 0) return -1;
    if (anchor_table(&anchor->stage, anchor, config)) return -1;
    anchor->stage.unrounded = anchor->unrounded;
    if (stage_plan(&anchor->stage, anchor->micro_batch, anchor->T, 1, recompute)) return -1;
    if (anchor->lender != NULL) stage_borrow_frozen(&anchor->stage, anchor->lender);
    if (stage_alloc(&anchor->stage, anchor->stream) || batch_alloc(&anchor->tokens, anchor->batch, anchor->T))
        return -1;
    for (int i = 0; i < 2; i++) {
        if (anchor->filters && factor_set_alloc(&anchor->sets[i], &anchor->stage, anchor->rank)) return -1;
        if (anchor->corrects && factor_set_alloc(&anchor->bias[i], &anchor->stage, anchor->rank)) return -1;
    }
    if (anchor->corrects && coded_alloc(anchor)) return -1;
    if (anchor->learns &&
        learner_alloc(&anchor->learner, anchor->micro_batch * anchor->T, (int64_t)anchor->batch * anchor->T))
        return -1;
    if (pthread_create(&anchor->thread, NULL, anchor_thread, anchor) != 0)
        return error_set("the anchor's thread does not start");
    anchor->running = 1;
    return 0;
}

static void anchor_stop(Anchor *anchor) {
    if (anchor->running) {
        pthread_mutex_lock(&anchor->mutex);
        anchor->state = ANCHOR_LEAVING;
        pthread_cond_broadcast(&anchor->changed);
        pthread_mutex_unlock(&anchor->mutex);
        pthread_join(anchor->thread, NULL);
        pthread_mutex_destroy(&anchor->mutex);
        pthread_cond_destroy(&anchor->changed);
    }
    for (int i = 0; i < 2; i++) {
        device_free(anchor->sets[i].memory);
        device_free(anchor->bias[i].memory);
        free(anchor->sets[i].of);
        free(anchor->bias[i].of);
    }
    coded_free(&anchor->coded, anchor->n_boundaries);
    learner_free(&anchor->learner);
    batch_free(&anchor->tokens);
    stage_free(&anchor->stage);
    stream_destroy(anchor->stream);
    memset(anchor, 0, sizeof *anchor);
}

// Bytes of one delivery's factors that concern a stage, as they travel: of the filter U and V in the wire's type and s
// in fp32, of the codec's bias U diag(s) and V in the wire's type.
static int64_t anchor_factor_bytes(const Anchor *anchor, const Stage *stage) {
    int64_t n_bytes = 0, size = anchor->wire == WIRE_BF16 ? 2 : 4;
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        int64_t r = factor_rank(tensor, anchor->rank), sides = size * (tensor->shape[0] + tensor->shape[1]) * r;
        if (!tensor->block) continue;
        if (anchor->filters) n_bytes += sides + 4 * r;
        if (anchor->coded_passes > 0) n_bytes += sides;
    }
    return n_bytes;
}

// Adds the codec's bias to the gradients of a stage's block matrices, from the factors in front.
static void stage_correct(Stage *stage, const Anchor *anchor, Stream *stream) {
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        const Factor *f = &anchor->bias[anchor->front].of[tensor->index];
        if (!tensor->block) continue;
        Stored kept = stage_values(stage, ARENA_GRADS, tensor);
        float *values = stored_matrix(kept, tensor->n, stream);
        if (values == NULL) return;
        matmul_product(values, f->n, f->u, f->r, 0, f->v, f->r, 1, f->m, f->n, f->r, 0, 1, stream);
        stored_close(kept, 0, values, tensor->n, rounding_nearest(), stream);
    }
}

// Filters the gradients of a stage's block matrices with the factors in front, in place.
static void stage_filter(Stage *stage, const Anchor *anchor, float alpha, Stream *stream) {
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        const Factor *f = &anchor->sets[anchor->front].of[tensor->index];
        if (!tensor->block) continue;
        Stored kept = stage_values(stage, ARENA_GRADS, tensor);
        float *values = stored_matrix(kept, tensor->n, stream);
        if (values == NULL) return;
        spectral_filter(values, f->u, f->d, f->v, f->m, f->n, f->r, alpha, stream);
        stored_close(kept, 0, values, tensor->n, rounding_nearest(), stream);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Run: the output folder

static void on_interrupt(int signal_number) {
    (void)signal_number;
    if (++interrupts > 1) _exit(130);
}

static void catch_interrupts(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_interrupt, action.sa_flags = SA_RESTART;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

// Where a training stands; saved with every checkpoint.
typedef struct {
    int64_t step;       // steps done
    int64_t adam_steps; // of them, those that updated all weights
    int64_t samples;    // sequences taken from the data
    int64_t tokens;     // tokens trained on
    double elapsed;     // seconds, over all sessions of the run
    double best_val;    // lowest validation loss, infinity before the first
} Progress;

typedef struct {
    char path[PATH_MAX];
    FILE *log;
    int lock;           // descriptor that holds the folder
    int log_failed;     // a line could not be written; said once
    int terminal;       // stdout is one: a live line instead of a line a step
    int live;           // the live line is on the screen
    int64_t saved_step; // newest checkpoint of this process, -1: none
} Run;

// Along what the loss curves most, as --measure-alignment has found it last, and how updates have swung there since.
typedef struct {
    float *directions; // (LEADING, a model's arenas) orthonormal, zero beside the block matrices; NULL: not found yet
    Oscillation swing;
} Leading;

// Everything a training or an evaluation works with.
typedef struct {
    Options opts;
    unsigned char given[CLI_OPTIONS];
    Config config;      // of the model as it is trained: untied where stages part its ends
    Config base;        // of the model file
    json_t *side_files; // tokenizer and others that travel with the model
    int64_t n_params;
    Mesh mesh;
    Anchor anchor;
    Outer outer;
    Dataset data;
    Tokenizer tokenizer;
    Stream *stream;
    Run run;
    Progress progress;
    Leading leading;
    Launch launch;     // size 1: by hand
    struct Node *node; // as one process of several; NULL: the only one
    int host_is_gone;  // of a guest: the coordinator of this process has left
    // decided from the options, the model and the data
    char model_path[PATH_MAX]; // what is loaded: -m, or the checkpoint a run goes on from; "" for --init
    char base_path[PATH_MAX];  // the model that adapters belong to
    int B, T, threads;
    int64_t cache_bytes;        // of what is generated
    int anchored, anchor_delay; // anchor_delay 0: deliver when ready
    MeshDp dp;                  // MESH_DP_NONE with one fast replica
    Precision precision;
    int64_t n_steps, warmup, val_every, save_every;
} Trainer;

static void run_clear_line(Run *run) {
    if (run->live) printf("\r\033[J"); // and the table below it
    run->live = 0;
}

// 1 if the option was on the command line.
static int is_given(const Trainer *trainer, const char *name) {
    for (int i = 0; i < OPTION_COUNT; i++)
        if (strcmp(option_table[i].name, name) == 0) return trainer->given[i];
    return 0;
}

// Highest N of the folders runs/N, 0 if there is none.
static int run_highest(void) {
    DIR *folder = opendir("runs");
    struct dirent *entry;
    int highest = 0, number, used;
    if (folder == NULL) return 0;
    while ((entry = readdir(folder)) != NULL)
        if (sscanf(entry->d_name, "%d%n", &number, &used) == 1 && entry->d_name[used] == '\0' && number > highest)
            highest = number;
    closedir(folder);
    return highest;
}

// Names the folder: -o, else for a new run the next runs/N, else the last of them.
static int run_find(Run *run, const Options *opts) {
    int number = run_highest();
    if (opts->out[0] != '\0') {
        strcpy(run->path, opts->out); // an option is shorter than a path
        return 0;
    }
    if (opts->resume && number == 0) return error_set("--resume: there is no run under runs/; name its folder with -o");
    snprintf(run->path, sizeof run->path, "runs/%d", opts->resume ? number : number + 1);
    return 0;
}

// Takes the folder for this process until it ends; two that write one run would ruin it.
static int run_lock(Run *run) {
    char path[PATH_MAX];
    if (path_join(path, run->path, "lock")) return -1;
    run->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (run->lock < 0) return error_set("%s: open: %s", path, strerror(errno));
    if (flock(run->lock, LOCK_EX | LOCK_NB) == 0) return 0;
    return error_set("%s is in use by another process; wait for it, or give another -o", run->path);
}

// Makes the folder of a new run and takes it. A number that another start has taken meanwhile is passed over.
static int run_create(Run *run, const Options *opts) {
    char parent[PATH_MAX], path[PATH_MAX];
    path_parent(parent, run->path);
    if (file_make_folders(parent)) return -1;
    while (mkdir(run->path, 0777) != 0) {
        if (errno != EEXIST) return error_set("%s: mkdir: %s", run->path, strerror(errno));
        if (opts->out[0] != '\0' && !file_is_folder(run->path))
            return error_set("%s: exists and is not a folder", run->path);
        if (opts->out[0] != '\0') break;
        snprintf(run->path, sizeof run->path, "runs/%d", run_highest() + 1);
    }
    if (file_sync_folder(parent) || run_lock(run) || path_join(path, run->path, "log.jsonl")) return -1;
    if (!file_exists(path) && checkpoint_latest(run->path) < 0) return 0;
    return error_set("%s already holds a run; go on with it by --resume, or give another -o", run->path);
}

// Adds a line to log.jsonl. A log that cannot be written is said once and does not stop a training.
static void run_append(Run *run, json_t *line) {
    char *text = line != NULL ? json_dumps(line, JSON_COMPACT | JSON_FLOAT_DIGITS) : NULL;
    json_decref(line);
    int failed = text == NULL || fprintf(run->log, "%s\n", text) < 0 || fflush(run->log) != 0;
    free(text);
    if (!failed || run->log_failed) return;
    run_clear_line(run);
    printf("train: write %s/log.jsonl: %s; the run goes on, its log has a gap\n", run->path, strerror(errno));
    run->log_failed = 1;
}

// Opens log.jsonl; a resumed run drops what was logged after the step it goes on from.
static int run_open_log(Run *run, int64_t resume_step) {
    char path[PATH_MAX], aside[PATH_MAX], *line = NULL;
    size_t room = 0;
    ssize_t n;
    FileWriter kept;
    if (path_join(path, run->path, "log.jsonl") || path_join(aside, run->path, "log.jsonl.tmp")) return -1;
    FILE *old = resume_step >= 0 ? fopen(path, "re") : NULL;
    if (old != NULL) {
        if (file_writer_open(&kept, aside)) {
            fclose(old);
            return -1;
        }
        while ((n = getline(&line, &room, old)) > 0) {
            json_t *json = json_loads(line, 0, NULL);
            const json_t *step = json_object_get(json, "step");
            int keep = json != NULL && (step == NULL || (resume_step > 0 && json_integer_value(step) <= resume_step));
            json_decref(json);
            if (keep) file_write(&kept, line, (size_t)n);
        }
        free(line);
        fclose(old);
        if (file_writer_close(&kept) || file_replace(aside, path)) {
            unlink(aside);
            return -1;
        }
    }
    run->log = fopen(path, "ae");
    return run->log != NULL ? 0 : error_set("%s: open: %s", path, strerror(errno));
}

// By how many updates the forwards of each stage are behind.
static json_t *delays_to_json(const Mesh *mesh) {
    json_t *list = json_array();
    for (int s = 0; s < mesh->n_stages; s++)
        json_array_append_new(list, json_integer(mesh_cell(mesh, 0, s)->stage.delay));
    return list;
}

// The start line: every setting, the versions and the machine.
static void run_log_start(Trainer *trainer, const char *kind) {
    char library[64];
    device_library(library, sizeof library);
    json_t *line = json_pack(
        "{s:s, s:s, s:s, s:s, s:i, s:s, s:I, s:I, s:I, s:I, s:i, s:o, s:o}", "type", kind, "meshtune", MESHTUNE_VERSION,
        "library", library, "compiler", __VERSION__, "threads", trainer->threads, "precision",
        trainer->precision == PRECISION_BF16 ? "bf16" : "fp32", "parameters", (json_int_t)trainer->n_params,
        "train_windows", (json_int_t)trainer->data.train.n_windows, "steps", (json_int_t)trainer->n_steps, "warmup",
        (json_int_t)trainer->warmup, "seq", trainer->T, "options",
        cli_to_json(option_table, OPTION_COUNT, &trainer->opts), "config", config_to_json(&trainer->config, "float32"));
    if (trainer->mesh.asynchronous) json_object_set_new(line, "delays", delays_to_json(&trainer->mesh));
    run_append(&trainer->run, line);
}

// The training data's hash as run.json holds it.
static json_t *data_hash(const Trainer *trainer) {
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)split_hash(&trainer->data.train));
    return json_string(text);
}

// The hashes of both sides of the data, for processes that must have the same.
static json_t *data_hashes(const Trainer *trainer) {
    char text[64];
    snprintf(text, sizeof text, "%016llx %016llx", (unsigned long long)split_hash(&trainer->data.train),
             (unsigned long long)split_hash(&trainer->data.val));
    return json_string(text);
}

static int stage_is_finite(const Stage *stage, Stream *stream) {
    double sum = 0.0;
    for (int i = 0; i < stage->n_tensors; i++)
        sum += stored_squares(stage_values(stage, ARENA_PARAMS, &stage->tensors[i]), stage->tensors[i].n, stream);
    return isfinite(sum);
}

static int model_is_finite(const Stage *model, Stream *stream) {
    int finite = 1;
    for (const Stage *stage = model; stage != NULL && finite; stage = stage->next)
        finite = stage_is_finite(stage, stream);
    return finite;
}

static int mesh_is_finite(const Mesh *mesh, Stream *stream) {
    int finite = 1;
    for (int r = 0; r < mesh->n_replicas && finite; r++) finite = model_is_finite(mesh_model(mesh, r), stream);
    return finite;
}

static json_t *real_or_null(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

// Declares (begun = 0) or writes what the codec's ends (n_boundaries, 2) remember.
static int put_codec(SafeTensorsWriter *writer, int begun, const CodecEnd *ends, int n_boundaries) {
    char name[64];
    CodecState states[CODEC_STATES];
    for (int i = 0; i < 2 * n_boundaries; i++) {
        int n = codec_end_states(&ends[i], states);
        for (int k = 0; k < n; k++) {
            snprintf(name, sizeof name, "codec.%d.%d.%s", i / 2, i % 2, states[k].name);
            if (!begun && safetensors_declare(writer, name, DTYPE_U8, &states[k].n_bytes, 1)) return -1;
            if (begun) file_write(&writer->file, states[k].data, (size_t)states[k].n_bytes);
        }
    }
    return 0;
}

static int load_codec(const SafeTensors *file, const CodecEnd *ends, int n_boundaries) {
    char name[64];
    CodecState states[CODEC_STATES];
    for (int i = 0; i < 2 * n_boundaries; i++) {
        int n = codec_end_states(&ends[i], states);
        for (int k = 0; k < n; k++) {
            snprintf(name, sizeof name, "codec.%d.%d.%s", i / 2, i % 2, states[k].name);
            const SafeTensor *tensor = safetensors_find(file, name);
            if (tensor == NULL || tensor->dtype != DTYPE_U8 || safetensor_count(tensor) != states[k].n_bytes)
                return error_set("%s: tensor %s is missing or of another size", file->path, name);
            memcpy(states[k].data, tensor->data, (size_t)states[k].n_bytes);
        }
    }
    return 0;
}

// Declares or writes n floats of tensor memory.
static int put_floats(const Stage *stage, SafeTensorsWriter *writer, int begun, const char *name, const float *from,
                      int64_t n) {
    if (!begun) return safetensors_declare(writer, name, DTYPE_F32, &n, 1);
    stage_append(stage, writer, stored_floats((float *)from), n, DTYPE_F32);
    return 0;
}

// The tensor of a state file, n elements of fp32; NULL with an error message.
static const SafeTensor *state_tensor(const SafeTensors *file, const char *name, int64_t n) {
    const SafeTensor *tensor = safetensors_find(file, name);
    if (tensor != NULL && tensor->dtype == DTYPE_F32 && safetensor_count(tensor) == n) return tensor;
    error_set("%s: tensor %s is missing or of another shape", file->path, name);
    return NULL;
}

// Declares (begun = 0) or writes bytes as the tensor `name`; none where there are none.
static int put_bytes(SafeTensorsWriter *writer, int begun, const char *name, const void *bytes, int64_t n_bytes) {
    if (bytes == NULL) return 0;
    if (!begun) return safetensors_declare(writer, name, DTYPE_U8, &n_bytes, 1);
    file_write(&writer->file, bytes, (size_t)n_bytes);
    return 0;
}

// What the anchor knows of the boundaries: tables in use and of the last pass, moments and their weights, and the
// embedding the run has begun with.
static int learner_put(const Anchor *anchor, const Mesh *mesh, SafeTensorsWriter *writer, int begun) {
    const Learner *learner = &anchor->learner;
    const KltTable *tables = mesh->klt[0].tables;
    char name[64];
    for (int i = 0; i < 2 * learner->n_boundaries; i++) {
        const KltMoments *moments = &learner->moments[i];
        snprintf(name, sizeof name, "klt.%d.%d.moments", i / 2, i % 2);
        if (put_floats(&anchor->stage, writer, begun, name, moments->xx, moments->n_floats)) return -1;
        snprintf(name, sizeof name, "klt.%d.%d.weight", i / 2, i % 2);
        if (put_bytes(writer, begun, name, &moments->weight, sizeof moments->weight)) return -1;
        snprintf(name, sizeof name, "klt.%d.%d.table", i / 2, i % 2);
        if (put_bytes(writer, begun, name, tables[i].blob, tables[i].n_bytes)) return -1;
        snprintf(name, sizeof name, "klt.%d.%d.next", i / 2, i % 2);
        if (put_bytes(writer, begun, name, learner->blobs[i], learner->blob_bytes[i])) return -1;
        snprintf(name, sizeof name, "klt.%d.%d.report", i / 2, i % 2);
        if (put_bytes(writer, begun, name, &learner->reports[i], sizeof *learner->reports)) return -1;
    }
    if (!learner->predicts || learner->n_boundaries == 0) return 0;
    int64_t embed_floats = (int64_t)learner->V * learner->C;
    return put_floats(&anchor->stage, writer, begun, "klt.embedding", learner->embedding.xx,
                      learner->embedding.n_floats) ||
                   put_bytes(writer, begun, "klt.embedding.weight", &learner->embedding.weight, sizeof(double)) ||
                   put_floats(&anchor->stage, writer, begun, "klt.embed", learner->embed, embed_floats)
               ? -1
               : 0;
}

// to (n) in tensor memory = the tensor of a state file.
static int load_floats(Anchor *anchor, const SafeTensors *file, const char *name, float *to, int64_t n) {
    const SafeTensor *tensor = state_tensor(file, name, n);
    return tensor == NULL ? -1 : stage_read(&anchor->stage, stored_floats(to), n, tensor, 0);
}

// A tensor of a state file, which has its values as they are kept.
static int load_values(Anchor *anchor, const SafeTensors *file, const char *name, Stored to, int64_t n) {
    const SafeTensor *tensor = safetensors_find(file, name);
    if (to.store == STORE_FP32) return load_floats(anchor, file, name, (float *)to.data, n);
    if (tensor == NULL || tensor->dtype != store_dtype(to.store, to.is_signed) || safetensor_count(tensor) != n)
        return error_set("%s: tensor %s is missing or of another type", file->path, name);
    return stage_read(&anchor->stage, to, n, tensor, 0);
}

// `to` = n_bytes of a state file.
static int load_bytes(const SafeTensors *file, const char *name, void *to, size_t n_bytes) {
    const SafeTensor *tensor = safetensors_find(file, name);
    if (tensor == NULL || tensor->dtype != DTYPE_U8 || safetensor_count(tensor) != (int64_t)n_bytes)
        return error_set("%s: tensor %s is missing or of another size", file->path, name);
    memcpy(to, tensor->data, n_bytes);
    return 0;
}

// A copy of a table's bytes, if the file has one; the caller frees it.
static int load_blob(const SafeTensors *file, const char *name, unsigned char **blob, int64_t *n_bytes) {
    const SafeTensor *tensor = safetensors_find(file, name);
    *blob = NULL, *n_bytes = 0;
    if (tensor == NULL) return 0;
    *n_bytes = safetensor_count(tensor);
    if (tensor->dtype != DTYPE_U8 || *n_bytes < 1) return error_set("%s: tensor %s is not bytes", file->path, name);
    *blob = (unsigned char *)malloc((size_t)*n_bytes);
    if (*blob == NULL) return error_set("out of memory for a table of the transform codec");
    memcpy(*blob, tensor->data, (size_t)*n_bytes);
    return 0;
}

static int learner_load(Anchor *anchor, const SafeTensors *file) {
    Learner *learner = &anchor->learner;
    char name[64];
    for (int i = 0; i < 2 * learner->n_boundaries; i++) {
        KltMoments *moments = &learner->moments[i];
        snprintf(name, sizeof name, "klt.%d.%d.moments", i / 2, i % 2);
        if (load_floats(anchor, file, name, moments->xx, moments->n_floats)) return -1;
        snprintf(name, sizeof name, "klt.%d.%d.weight", i / 2, i % 2);
        if (load_bytes(file, name, &moments->weight, sizeof moments->weight)) return -1;
        snprintf(name, sizeof name, "klt.%d.%d.table", i / 2, i % 2); // as if it had been delivered
        if (load_blob(file, name, &learner->blobs[i], &learner->blob_bytes[i])) return -1;
    }
    return 0;
}

// Once the tables in use are: those of the last pass, and what predictions need.
static int learner_load_next(Anchor *anchor, Mesh *mesh, const SafeTensors *file) {
    Learner *learner = &anchor->learner;
    char name[64];
    for (int i = 0; i < 2 * learner->n_boundaries; i++) {
        snprintf(name, sizeof name, "klt.%d.%d.next", i / 2, i % 2);
        free(learner->blobs[i]);
        if (load_blob(file, name, &learner->blobs[i], &learner->blob_bytes[i])) return -1;
        snprintf(name, sizeof name, "klt.%d.%d.report", i / 2, i % 2);
        if (load_bytes(file, name, &learner->reports[i], sizeof *learner->reports)) return -1;
    }
    if (!learner->predicts || learner->n_boundaries == 0) return 0;
    if (load_floats(anchor, file, "klt.embedding", learner->embedding.xx, learner->embedding.n_floats)) return -1;
    if (load_bytes(file, "klt.embedding.weight", &learner->embedding.weight, sizeof(double))) return -1;
    if (load_floats(anchor, file, "klt.embed", mesh->klt[0].embed, (int64_t)learner->V * learner->C)) return -1;
    return mesh_share_embed(mesh);
}

// Declares or writes both sets of factors of one kind, if the anchor has that kind.
static int put_factors(const Stage *stage, SafeTensorsWriter *writer, int begun, const char *kind,
                       const FactorSet sets[2]) {
    char name[32];
    for (int i = 0; i < 2 && sets[i].memory != NULL; i++) {
        snprintf(name, sizeof name, "%s.%d", kind, i);
        if (put_floats(stage, writer, begun, name, sets[i].memory, sets[i].n_floats)) return -1;
    }
    return 0;
}

static int load_factors(Anchor *anchor, const SafeTensors *file, const char *kind, FactorSet sets[2]) {
    char name[32];
    for (int i = 0; i < 2 && sets[i].memory != NULL; i++) {
        snprintf(name, sizeof name, "%s.%d", kind, i);
        if (load_floats(anchor, file, name, sets[i].memory, sets[i].n_floats)) return -1;
    }
    return 0;
}

// Reads an arena of the anchor's stage, tensors named prefix + their name.
static int load_arena(Anchor *anchor, const SafeTensors *file, const char *prefix, Arena arena) {
    char name[128];
    for (int i = 0; i < anchor->stage.n_tensors; i++) {
        const Tensor *of = &anchor->stage.tensors[i];
        if (of->left_out) continue;
        snprintf(name, sizeof name, "%s%s", prefix, of->name);
        if (load_values(anchor, file, name, stage_values(&anchor->stage, arena, of), of->n)) return -1;
    }
    return 0;
}

// The anchor's state: momentum, the codec's bias, both sets of their factors, and what its codec remembers. run_save
// has waited for the pass at work, so that the file and what run.json says of it fit together; the factors wait in
// their set as they would in memory.
static int anchor_save(Trainer *trainer, const char *folder) {
    char path[PATH_MAX];
    Anchor *anchor = &trainer->anchor;
    SafeTensorsWriter writer;
    if (path_join(path, folder, "anchor.bin") || safetensors_writer_init(&writer, NULL)) return -1;
    for (int begun = 0; begun < 2; begun++) {
        if (model_put_arena(&writer, begun, &anchor->stage, ARENA_M, "m.", DTYPE_F32)) return -1;
        if (put_factors(&anchor->stage, &writer, begun, "factors", anchor->sets)) return -1;
        if (anchor->corrects && (model_put_arena(&writer, begun, &anchor->stage, ARENA_V, "d.", DTYPE_F32) ||
                                 put_factors(&anchor->stage, &writer, begun, "bias", anchor->bias) ||
                                 put_codec(&writer, begun, anchor->coded.ends, anchor->n_boundaries)))
            return -1;
        if (learner_put(anchor, &trainer->mesh, &writer, begun)) return -1;
        if (!begun && safetensors_begin(&writer, path)) return -1;
    }
    return file_writer_close(&writer.file);
}

static json_t *anchor_to_json(const Anchor *anchor) {
    const int64_t *coded = anchor->coded.sent, *boundary = anchor->boundary_bytes;
    return json_pack("{s:b, s:b, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:[I,I], s:I, s:[I,I], s:f, s:f, s:o}", "ready",
                     anchor->state == ANCHOR_READY, "useless", anchor->useless, "front", anchor->front, "deliveries",
                     anchor->deliveries, "launched", (json_int_t)anchor->launched, "delivered",
                     (json_int_t)anchor->delivered, "samples", (json_int_t)anchor->samples, "passes",
                     (json_int_t)anchor->passes, "coded_passes", (json_int_t)anchor->coded_passes, "coded_bytes",
                     (json_int_t)coded[0], (json_int_t)coded[1], "factor_bytes", (json_int_t)anchor->factor_bytes,
                     "boundary_bytes", (json_int_t)boundary[0], (json_int_t)boundary[1], "launched_at",
                     anchor->launched_at, "seconds", anchor->seconds, "loss", real_or_null(anchor->loss));
}

static int anchor_load(Trainer *trainer, const char *folder, const json_t *state) {
    char path[PATH_MAX];
    Anchor *anchor = &trainer->anchor;
    const json_t *saved = json_object_get(state, "anchor");
    SafeTensors file;
    int result = 0;
    if (!json_is_object(saved)) return error_set("--resume: the run had no anchor; start a new run, or use --anchor 0");
    anchor->front = json_integer_value(json_object_get(saved, "front")) == 1;
    anchor->deliveries = (int)json_integer_value(json_object_get(saved, "deliveries"));
    anchor->launched = json_integer_value(json_object_get(saved, "launched"));
    anchor->delivered = json_integer_value(json_object_get(saved, "delivered"));
    anchor->samples = json_integer_value(json_object_get(saved, "samples"));
    anchor->passes = json_integer_value(json_object_get(saved, "passes"));
    anchor->factor_bytes = json_integer_value(json_object_get(saved, "factor_bytes"));
    anchor->launched_at = json_number_value(json_object_get(saved, "launched_at"));
    anchor->seconds = json_number_value(json_object_get(saved, "seconds"));
    anchor->loss = json_number_value(json_object_get(saved, "loss"));
    anchor->coded_passes = json_integer_value(json_object_get(saved, "coded_passes"));
    for (size_t d = 0; d < 2; d++) {
        anchor->coded.sent[d] = json_integer_value(json_array_get(json_object_get(saved, "coded_bytes"), d));
        anchor->boundary_bytes[d] = json_integer_value(json_array_get(json_object_get(saved, "boundary_bytes"), d));
    }
    anchor->useless = json_is_true(json_object_get(saved, "useless"));
    if (path_join(path, folder, "anchor.bin") || safetensors_open(&file, path)) return -1;
    result = load_arena(anchor, &file, "m.", ARENA_M);
    if (result == 0) result = load_factors(anchor, &file, "factors", anchor->sets);
    if (result == 0 && anchor->corrects) result = load_arena(anchor, &file, "d.", ARENA_V);
    if (result == 0) result = load_factors(anchor, &file, "bias", anchor->bias);
    if (result == 0 && anchor->corrects) result = load_codec(&file, anchor->coded.ends, anchor->n_boundaries);
    if (result == 0) result = learner_load(anchor, &file);
    if (result == 0 && learner_use(&trainer->mesh, &anchor->learner) < 0) result = -1;
    anchor->learner.embed_counted = anchor->deliveries > 0;
    if (result == 0) result = learner_load_next(anchor, &trainer->mesh, &file);
    safetensors_close(&file);
    if (result == 0 && anchor->launched >= 0 && !json_is_true(json_object_get(saved, "ready")))
        result = error_set("--resume: the anchor's pass in the checkpoint is not finished");
    pthread_mutex_lock(&anchor->mutex);
    if (result == 0 && anchor->launched >= 0) anchor->state = ANCHOR_READY;
    pthread_mutex_unlock(&anchor->mutex);
    return result;
}

// The simulated time of an asynchronous pipeline's stage, for its shard: micro-batches simulated, and those of which
// something is left: seconds, bytes, arrivals.
static json_t *flow_to_json(const Flow *flow) {
    if (flow->flights == NULL) return json_null();
    json_t *flights = json_array();
    for (int64_t micro = flow->backwards; micro < flow->recorded; micro++) {
        const Flight *f = flow_at(flow, micro);
        json_array_append_new(flights, json_pack("[f, f, f, I, I, f, f]", f->seconds[0], f->seconds[1], f->seconds[2],
                                                 (json_int_t)f->bytes[0], (json_int_t)f->bytes[1], f->arrival[0],
                                                 f->arrival[1]));
    }
    return json_pack("{s:I, s:I, s:o}", "forwards", (json_int_t)flow->forwards, "backwards",
                     (json_int_t)flow->backwards, "flights", flights);
}

// -1: not what the shard at `path`, of step `done`, should hold.
static int flow_from_json(Flow *flow, const json_t *saved, int64_t done, const char *path) {
    const json_t *flights = json_object_get(saved, "flights");
    flow->recorded = done;
    flow->forwards = json_size(json_object_get(saved, "forwards"));
    flow->backwards = json_size(json_object_get(saved, "backwards"));
    if (flow->backwards < 0 || flow->forwards < flow->backwards || flow->forwards > done ||
        done - flow->backwards >= flow->n || json_array_size(flights) != (size_t)(done - flow->backwards))
        return error_set("%s: does not say where the asynchronous pipeline stands", path);
    for (size_t i = 0; i < json_array_size(flights); i++) {
        const json_t *from = json_array_get(flights, i);
        Flight *f = flow_at(flow, flow->backwards + (int64_t)i);
        for (size_t k = 0; k < FLOW_PARTS; k++) f->seconds[k] = json_number_value(json_array_get(from, k));
        for (size_t k = 0; k < 2; k++) f->bytes[k] = json_integer_value(json_array_get(from, 3 + k));
        for (size_t k = 0; k < 2; k++) f->arrival[k] = json_number_value(json_array_get(from, 5 + k));
    }
    return 0;
}

// What a shard holds and needs beside its cell.
typedef struct {
    int64_t step;                   // steps done
    int powersgd_rank, n_fragments; // of outer steps
    const CodecEnd *ends[2];        // the cell's, of the boundary before it and of the one behind it; NULL: none
} CellState;

static CellState cell_state(const Trainer *trainer, const Cell *cell) {
    const Mesh *mesh = &trainer->mesh;
    int r = cell->replica, s = cell->index, last = mesh->n_stages - 1;
    CellState state = {trainer->progress.step,
                       trainer->outer.rank,
                       trainer->outer.n_fragments,
                       {s > 0 ? mesh_end(mesh, r, s - 1, 1) : NULL, s < last ? mesh_end(mesh, r, s, 0) : NULL}};
    return state;
}

enum { SHARD_VERSION = 1 };

// What a cell's shard says of itself: whose it is, the cell's updates, what it has sent and its simulated time.
static json_t *cell_to_json(const Cell *cell, const CellState *about) {
    const int64_t *total = cell->total.bytes;
    json_t *merge_at = json_array();
    for (int f = 0; f < about->n_fragments && cell->merge_at != NULL; f++)
        json_array_append_new(merge_at, json_real(cell->merge_at[f]));
    return json_pack("{s:i, s:I, s:i, s:i, s:i, s:I, s:[I,I,I,I], s:f, s:f, s:o, s:o}", "shard", SHARD_VERSION, "step",
                     (json_int_t)about->step, "replica", cell->replica, "stage", cell->index, "stages",
                     cell->stage.n_stages, "updates", (json_int_t)cell->updates, "sent", (json_int_t)total[0],
                     (json_int_t)total[1], (json_int_t)total[2], (json_int_t)total[3], "now", cell->clock.now,
                     "uplink_free", cell->clock.uplink_free, "merge_at", merge_at, "flow", flow_to_json(&cell->flow));
}

static int cell_from_json(Cell *cell, const CellState *about, const json_t *saved, const char *path) {
    const json_t *sent = json_object_get(saved, "sent"), *merge_at = json_object_get(saved, "merge_at");
    cell->updates = json_size(json_object_get(saved, "updates"));
    if (cell->updates < 0 || cell->updates > about->step)
        return error_set("%s: does not say how many updates the cell has made", path);
    if (json_array_size(merge_at) != (cell->merge_at != NULL ? (size_t)about->n_fragments : 0))
        return error_set("%s: does not say when the cell's averages are there", path);
    for (int k = 0; k < TRAFFIC_KINDS; k++) cell->total.bytes[k] = json_integer_value(json_array_get(sent, (size_t)k));
    cell->clock.now = json_number_value(json_object_get(saved, "now"));
    cell->clock.uplink_free = json_number_value(json_object_get(saved, "uplink_free"));
    for (size_t f = 0; f < json_array_size(merge_at); f++)
        cell->merge_at[f] = json_number_value(json_array_get(merge_at, f));
    if (cell->flow.flights == NULL) return 0;
    return flow_from_json(&cell->flow, json_object_get(saved, "flow"), about->step, path);
}

// A tensor of a shard, and where the cell keeps it.
typedef struct {
    char name[128];
    int n_dims;
    int64_t shape[2], n;
    Dtype dtype;
    void *data; // tensor memory; of what the codec remembers the host's
} ShardTensor;

typedef struct {
    ShardTensor *list;
    int n;
} ShardTensors;

// A row of n values; none for n = 0.
static void pieces_add(ShardTensors *pieces, const char *prefix, const char *name, Dtype dtype, void *data, int64_t n) {
    ShardTensor *piece = &pieces->list[pieces->n];
    if (n == 0) return;
    snprintf(piece->name, sizeof piece->name, "%s%s", prefix, name);
    piece->n_dims = 1, piece->shape[0] = piece->n = n;
    piece->dtype = dtype, piece->data = data;
    pieces->n++;
}

// A tensor as prefix + its name, as it is kept; of 8-bit values the scales too.
static void pieces_add_values(ShardTensors *pieces, const Tensor *tensor, Stored values, const char *prefix) {
    ShardTensor *piece = &pieces->list[pieces->n];
    char scales[48];
    pieces_add(pieces, prefix, tensor->name, store_dtype(values.store, values.is_signed), values.data, tensor->n);
    piece->n_dims = tensor->n_dims;
    piece->shape[0] = tensor->shape[0], piece->shape[1] = tensor->shape[1];
    if (values.store != STORE_INT8) return;
    snprintf(scales, sizeof scales, "%sscale.", prefix);
    pieces_add(pieces, scales, tensor->name, DTYPE_F32, values.scales, (tensor->n + STORE_BLOCK - 1) / STORE_BLOCK);
}

// The tensors of an arena; none of an arena that the stage has not.
static void pieces_add_arena(ShardTensors *pieces, const Stage *stage, Arena arena, const char *prefix) {
    for (int i = 0; i < stage->n_tensors && stage_arena(stage, arena) != NULL; i++)
        pieces_add_values(pieces, &stage->tensors[i], stage_values(stage, arena, &stage->tensors[i]), prefix);
}

// All that a cell's shard holds, in the order of the file: parameters if wanted, moments, PipeMare's delta, the state
// of outer steps, the older versions of the weights, the rotation's bases and PowerSGD's warm starts as one row each,
// and what the codec remembers of the cell's ends. The caller frees the list.
static int cell_pieces(ShardTensors *pieces, const Cell *cell, const CellState *about, int with_params) {
    static const char *const end_names[2] = {"codec.before.", "codec.behind."};
    const Stage *stage = &cell->stage;
    int n_older = versions_held(stage->delay, about->step);
    size_t room = (size_t)stage->n_tensors * (size_t)(10 + n_older) + 2 + 2 * CODEC_STATES; // two of them scales
    char prefix[32];
    CodecState states[CODEC_STATES];
    pieces->n = 0, pieces->list = (ShardTensor *)calloc(room, sizeof(ShardTensor));
    if (pieces->list == NULL) return error_set("out of memory for the list of a shard's tensors");
    if (with_params) pieces_add_arena(pieces, stage, ARENA_PARAMS, "p.");
    pieces_add_arena(pieces, stage, ARENA_M, "m.");
    pieces_add_arena(pieces, stage, ARENA_V, "v.");
    pieces_add_arena(pieces, stage, ARENA_DELTA, "delta.");
    pieces_add_arena(pieces, stage, ARENA_GLOBAL, "global.");
    pieces_add_arena(pieces, stage, ARENA_OUTER, "outer.");
    pieces_add_arena(pieces, stage, ARENA_ERROR, "error.");
    pieces_add_arena(pieces, stage, ARENA_PENDING, "pending.");
    for (int age = 1; age <= n_older; age++) {
        snprintf(prefix, sizeof prefix, "older.%d.", age);
        const float *older = stage_version(stage, about->step, about->step - age);
        for (int i = 0; i < stage->n_tensors; i++)
            pieces_add_values(pieces, &stage->tensors[i], stage_param(stage, older, &stage->tensors[i]), prefix);
    }
    pieces_add(pieces, "", "bases", DTYPE_F32, stage->rotation, rotation_floats(stage, stage->n_tensors));
    if (cell->powersgd_q != NULL)
        pieces_add(pieces, "", "powersgd", DTYPE_F32, cell->powersgd_q,
                   powersgd_offset(stage, stage->n_tensors, about->powersgd_rank));
    for (int e = 0; e < 2; e++) {
        int n = about->ends[e] != NULL ? codec_end_states(about->ends[e], states) : 0;
        for (int k = 0; k < n; k++)
            pieces_add(pieces, end_names[e], states[k].name, DTYPE_U8, states[k].data, states[k].n_bytes);
    }
    return 0;
}

// Appends n_bytes of tensor memory, or of the host's, to a file's current tensor.
static void stage_append_bytes(const Stage *stage, SafeTensorsWriter *writer, const void *data, int64_t n_bytes) {
    int64_t piece = (int64_t)sizeof(float) * STAGING;
    for (int64_t at = 0; at < n_bytes; at += piece) {
        int64_t count = n_bytes - at < piece ? n_bytes - at : piece;
        device_copy(stage->staging, (const char *)data + at, (size_t)count, stage->stream);
        file_write(&writer->file, stage->staging, (size_t)count);
    }
}

// Writes a cell's shard: all that another machine needs to go on with it, in a safetensors container whose metadata say
// whose it is. The same state gives the same bytes. with_params: the parameters too, else the model file has them.
static int cell_save(const Cell *cell, const CellState *about, const char *path, int with_params) {
    ShardTensors pieces;
    SafeTensorsWriter writer;
    json_t *json = cell_to_json(cell, about);
    char *text = json != NULL ? json_dumps(json, JSON_COMPACT) : NULL;
    json_t *metadata = text != NULL ? json_pack("{s:s}", "cell", text) : NULL;
    free(text);
    json_decref(json);
    if (metadata == NULL) return error_set("%s: out of memory for the cell's description", path);
    if (safetensors_writer_init(&writer, metadata)) return -1;
    if (cell_pieces(&pieces, cell, about, with_params)) {
        json_decref(writer.header);
        return -1;
    }
    int result = 0;
    for (int i = 0; i < pieces.n && result == 0; i++) {
        const ShardTensor *piece = &pieces.list[i];
        result = safetensors_declare(&writer, piece->name, piece->dtype, piece->shape, piece->n_dims);
    }
    if (result == 0) result = safetensors_begin(&writer, path);
    for (int i = 0; i < pieces.n && result == 0; i++) {
        const ShardTensor *piece = &pieces.list[i];
        stage_append_bytes(&cell->stage, &writer, piece->data, piece->n * (int64_t)dtype_size(piece->dtype));
    }
    free(pieces.list);
    return result == 0 ? file_writer_close(&writer.file) : -1;
}

// What a shard says of itself: that it is of this stage of so many after `step` steps (-1: any number of them), of
// whatever replica. NULL with an error message; the caller drops the reference.
static json_t *shard_about(const SafeTensors *file, int stage, int n_stages, int64_t step) {
    const char *text = json_string_value(json_object_get(file->metadata, "cell"));
    json_t *saved = text != NULL ? json_loads(text, JSON_REJECT_DUPLICATES, NULL) : NULL;
    int64_t version = json_size(json_object_get(saved, "shard")), of_step = json_size(json_object_get(saved, "step"));
    int64_t at = json_size(json_object_get(saved, "stage")), n = json_size(json_object_get(saved, "stages"));
    if (version < 0)
        error_set("%s: does not say which cell of a run it is of", file->path);
    else if (version != SHARD_VERSION)
        error_set("%s: is of version %lld, this program reads version %d", file->path, (long long)version,
                  SHARD_VERSION);
    else if (at != stage || n != n_stages)
        error_set("%s: is of stage %lld of %lld, stage %d of %d is needed", file->path, (long long)at, (long long)n,
                  stage, n_stages);
    else if (of_step < 0 || (step >= 0 && of_step != step))
        error_set("%s: is of step %lld, step %lld is needed", file->path, (long long)of_step, (long long)step);
    else
        return saved;
    json_decref(saved);
    return NULL;
}

// The tensor of a shard, of this dtype and shape; NULL with an error message.
static const SafeTensor *shard_tensor(const SafeTensors *file, const char *name, Dtype dtype, const int64_t *shape,
                                      int n_dims) {
    char found[192], wanted[64];
    const SafeTensor *tensor = safetensors_find(file, name);
    if (tensor == NULL) {
        error_set("%s: tensor %s is missing", file->path, name);
        return NULL;
    }
    shape_text(found, sizeof found, tensor->shape, tensor->n_dims);
    shape_text(wanted, sizeof wanted, shape, n_dims);
    if (tensor->dtype == dtype && strcmp(found, wanted) == 0) return tensor;
    error_set("%s: %s is %s %s, not %s %s", file->path, name, dtype_name(tensor->dtype), found, dtype_name(dtype),
              wanted);
    return NULL;
}

static const SafeTensor *shard_piece(const SafeTensors *file, const ShardTensor *piece) {
    return shard_tensor(file, piece->name, piece->dtype, piece->shape, piece->n_dims);
}

// Checks all of the pieces before the first is read.
static int shard_read(const SafeTensors *file, Stage *stage, const ShardTensors *pieces) {
    for (int i = 0; i < pieces->n; i++)
        if (shard_piece(file, &pieces->list[i]) == NULL) return -1;
    if (file->n_tensors != pieces->n)
        return error_set("%s: holds %d tensors, the cell has %d", file->path, file->n_tensors, pieces->n);
    for (int i = 0; i < pieces->n; i++) {
        const ShardTensor *piece = &pieces->list[i];
        const SafeTensor *tensor = shard_piece(file, piece);
        device_copy(piece->data, tensor->data, (size_t)(tensor->end - tensor->begin), stage->stream);
    }
    return stream_check(stage->stream);
}

// Reads a shard of the cell's stage after about->step steps, be it of this replica or of another. with_params: it must
// hold the parameters, else those that the cell has stay if it holds none. Whatever bytes the file holds, the result is
// 0, or -1 with one line that names it; the cell may then be between its old state and the new one.
static int cell_load(Cell *cell, const CellState *about, const char *path, int with_params) {
    char first[128];
    Stage *stage = &cell->stage;
    SafeTensors file;
    ShardTensors pieces = {NULL, 0};
    if (safetensors_open(&file, path)) return -1;
    snprintf(first, sizeof first, "p.%s", stage->tensors[0].name);
    if (safetensors_find(&file, first) != NULL) with_params = 1;
    json_t *saved = shard_about(&file, cell->index, stage->n_stages, about->step);
    int result = saved != NULL ? cell_pieces(&pieces, cell, about, with_params) : -1;
    if (result == 0) result = shard_read(&file, stage, &pieces);
    if (result == 0) result = cell_from_json(cell, about, saved, path);
    if (result == 0) stage->has_basis = cell->updates > 0;
    free(pieces.list);
    json_decref(saved);
    safetensors_close(&file);
    return result;
}

// path (PATH_MAX) = folder/cell_R_S.bin
static int shard_path(char *path, const char *folder, int replica, int stage) {
    char name[64];
    snprintf(name, sizeof name, "cell_%d_%d.bin", replica, stage);
    return path_join(path, folder, name);
}

// Opens the shards of a replica's stages, all of one step. shards (n_stages) is zero before; the caller closes them.
static int merge_open(SafeTensors *shards, const char *folder, int n_stages, int replica) {
    char path[PATH_MAX];
    int64_t step = -1;
    for (int s = 0; s < n_stages; s++) {
        if (shard_path(path, folder, replica, s) || safetensors_open(&shards[s], path)) return -1;
        json_t *saved = shard_about(&shards[s], s, n_stages, step);
        if (saved == NULL) return -1;
        step = json_size(json_object_get(saved, "step"));
        json_decref(saved);
    }
    return 0;
}

// 1 if the shards have merged weights: the first one has the first tensor of all.
static int merge_is_merged(const SafeTensors *shards, const Stage *table) {
    char name[128];
    snprintf(name, sizeof name, "global.%s", table->tensors[0].name);
    return safetensors_find(&shards[0], name) != NULL;
}

// A weight of the model in the shard that has it: the merged one, or the replica's.
static const SafeTensor *merge_find(const SafeTensors *shards, int n_stages, int merged, const Tensor *tensor) {
    char name[128];
    int s = 0;
    snprintf(name, sizeof name, "%s%s", merged ? "global." : "p.", tensor->name);
    while (s + 1 < n_stages && safetensors_find(&shards[s], name) == NULL) s++;
    const SafeTensor *found = safetensors_find(&shards[s], name); // weights may be kept as bf16
    Dtype dtype = found != NULL && found->dtype == DTYPE_BF16 && tensor->n_dims == 2 ? DTYPE_BF16 : DTYPE_F32;
    return shard_tensor(&shards[s], name, dtype, tensor->shape, tensor->n_dims);
}

// Writes the table's weights as the shards have them. Takes over the reference to metadata.
static int merge_write(const SafeTensors *shards, int n_stages, const Stage *table, json_t *metadata,
                       const char *path) {
    SafeTensorsWriter writer;
    int merged = merge_is_merged(shards, table);
    if (safetensors_writer_init(&writer, metadata)) return -1;
    for (int i = 0; i < table->n_tensors; i++) {
        const Tensor *tensor = &table->tensors[i];
        const SafeTensor *from = merge_find(shards, n_stages, merged, tensor);
        if (from == NULL) {
            json_decref(writer.header);
            return -1;
        }
        if (safetensors_declare(&writer, tensor->name, from->dtype, tensor->shape, tensor->n_dims)) return -1;
    }
    if (safetensors_begin(&writer, path)) return -1;
    for (int i = 0; i < table->n_tensors; i++) {
        const SafeTensor *from = merge_find(shards, n_stages, merged, &table->tensors[i]);
        file_write(&writer.file, from->data, (size_t)(from->end - from->begin));
    }
    return file_writer_close(&writer.file);
}

// Writes a model file from the shards of a replica's stages in `folder`, the bytes that model_save_native would write
// in fp32, or model_save_adapter's weights, without memory for them: merged ones where replicas meet, else the
// replica's, which the shards must hold then. config: the stages', untied where there are several. Aside first, then
// renamed.
static int model_merge(const char *folder, const Config *config, int n_stages, int replica, const json_t *side_files,
                       const char *path) {
    char aside[PATH_MAX];
    Stage table;
    SafeTensors *shards = (SafeTensors *)calloc((size_t)n_stages, sizeof *shards);
    if (shards == NULL) return error_set("out of memory for %d shards", n_stages);
    int result = stage_table(&table, config, 0, config->n_layers);
    if (result == 0 && snprintf(aside, sizeof aside, "%s.tmp", path) >= (int)sizeof aside)
        result = error_set("%.200s: the path is too long", path);
    if (result == 0) result = merge_open(shards, folder, n_stages, replica);
    json_t *metadata = result != 0             ? NULL
                       : config->lora.rank > 0 ? json_pack("{s:s}", "format", "pt")
                                               : native_metadata(config, side_files, DTYPE_F32, path);
    if (metadata == NULL) result = -1;
    if (result == 0) {
        result = merge_write(shards, n_stages, &table, metadata, aside) || file_replace(aside, path) ? -1 : 0;
        if (result != 0) unlink(aside);
    }
    for (int s = 0; s < n_stages; s++) safetensors_close(&shards[s]);
    free(shards);
    stage_free(&table);
    return result;
}

// What run.json of a checkpoint says.
static json_t *progress_to_json(const Trainer *trainer) {
    const Progress *p = &trainer->progress;
    json_t *begun = json_array();
    for (int f = 0; f < trainer->outer.n_fragments; f++)
        json_array_append_new(begun, json_integer((json_int_t)trainer->outer.begun[f]));
    return json_pack("{s:s, s:I, s:I, s:I, s:I, s:f, s:o, s:o, s:i, s:i, s:o, s:o, s:o}", "meshtune", MESHTUNE_VERSION,
                     "step", (json_int_t)p->step, "adam_steps", (json_int_t)p->adam_steps, "samples",
                     (json_int_t)p->samples, "tokens", (json_int_t)p->tokens, "elapsed", p->elapsed, "best_val",
                     isfinite(p->best_val) ? json_real(p->best_val) : json_null(), "data_hash", data_hash(trainer),
                     "replicas", trainer->mesh.n_replicas, "stages", trainer->mesh.n_stages, "averages_begun", begun,
                     "anchor", trainer->anchored ? anchor_to_json(&trainer->anchor) : json_null(), "options",
                     cli_to_json(option_table, OPTION_COUNT, &trainer->opts));
}

// Where a checkpoint's parameters of a cell are: in its shard, or in model.bin, which has those of the first replica
// unless replicas meet: then it has the merged ones. Adapters are in the shard in any case.
static int cell_keeps_params(const Cell *cell) {
    return cell->replica > 0 || cell->stage.meets || cell->stage.n_frozen > 0;
}

// The shards of all cells.
static int run_save_cells(const Trainer *trainer, const char *folder) {
    char path[PATH_MAX];
    const Mesh *mesh = &trainer->mesh;
    for (const Cell *cell = mesh_next(mesh, NULL); cell != NULL; cell = mesh_next(mesh, cell)) {
        CellState about = cell_state(trainer, cell);
        if (shard_path(path, folder, cell->replica, cell->index)) return -1;
        if (cell_save(cell, &about, path, cell_keeps_params(cell))) return -1;
    }
    return 0;
}

static int run_load_cells(Trainer *trainer, const char *folder) {
    char path[PATH_MAX];
    Mesh *mesh = &trainer->mesh;
    for (Cell *cell = mesh_next(mesh, NULL); cell != NULL; cell = mesh_next(mesh, cell)) {
        CellState about = cell_state(trainer, cell);
        if (shard_path(path, folder, cell->replica, cell->index)) return -1;
        if (cell_load(cell, &about, path, cell_keeps_params(cell))) return -1;
    }
    return 0;
}

// The model file of a checkpoint whose shards are in the folder, from those of a replica: model.bin, or adapters.
static int run_merge_model(const Trainer *trainer, const Config *config, const char *folder, int replica) {
    char path[PATH_MAX];
    int adapted = config->lora.rank > 0;
    if (path_join(path, folder, adapted ? ADAPTER_WEIGHTS : "model.bin") ||
        model_merge(folder, config, trainer->mesh.n_stages, replica, trainer->side_files, path))
        return -1;
    return adapted ? adapter_write_config(&config->lora, trainer->base_path, folder) : 0;
}

// The model file of a checkpoint whose shards are written: where replicas meet, they hold what it does.
static int run_save_model(const Trainer *trainer, const char *folder) {
    char path[PATH_MAX];
    const Stage *model = mesh_model(&trainer->mesh, 0);
    if (model->meets) return run_merge_model(trainer, &model->config, folder, 0);
    if (model->n_frozen > 0) return model_save_adapter(model, ARENA_PARAMS, trainer->base_path, folder);
    if (path_join(path, folder, "model.bin")) return -1;
    return model_save_native(model, ARENA_PARAMS, trainer->side_files, path, DTYPE_F32);
}

// Saves step_N: a shard of every cell, the anchor's state, model.bin (fp32, usable with -m) or adapters, run.json. A
// weight that is not a number is never saved. On failure what was whole before is still whole.
static int run_save(Trainer *trainer) {
    char folder[PATH_MAX], path[PATH_MAX];
    Mesh *mesh = &trainer->mesh;
    Run *run = &trainer->run;
    int64_t step = trainer->progress.step;
    if (run->saved_step == step) return 0;
    if (trainer->anchored && anchor_state(&trainer->anchor, 1) == ANCHOR_FAILED)
        return error_set("anchor: %.900s", trainer->anchor.error);
    if (!mesh_is_finite(mesh, trainer->stream))
        return error_set("step %lld: a weight is not finite; not saved", (long long)step);
    json_t *json = progress_to_json(trainer);
    char *text = json != NULL ? json_dumps(json, JSON_INDENT(1)) : NULL;
    json_decref(json);
    if (text == NULL) return error_set("out of memory for run.json");
    int result = checkpoint_begin(folder, run->path, step);
    if (result == 0) result = run_save_cells(trainer, folder);
    if (result == 0) result = run_save_model(trainer, folder);
    if (result == 0 && trainer->anchored) result = anchor_save(trainer, folder);
    if (result == 0) result = path_join(path, folder, "run.json");
    if (result == 0) result = file_write_text(path, text);
    free(text);
    if (result == 0) result = checkpoint_commit(run->path, step);
    if (result == 0) {
        run->saved_step = step;
        checkpoint_sweep(run->path, trainer->opts.keep);
    }
    if (result != 0 && checkpoint_path(path, run->path, step, ".tmp") == 0 && file_exists(path)) {
        char reason[ERROR_MAX]; // keep the first message: clearing up may fail for the same reason
        memcpy(reason, error_message, sizeof reason);
        file_remove_folder(path);
        memcpy(error_message, reason, sizeof reason);
    }
    return result;
}

// Keeps the weights with the lowest validation loss as best.bin, adapters in the folder best.
static int run_save_best(Trainer *trainer) {
    char path[PATH_MAX];
    const Stage *model = mesh_model(&trainer->mesh, 0);
    if (path_join(path, trainer->run.path, model->n_frozen > 0 ? "best" : "best.bin")) return -1;
    if (!model_is_finite(model, trainer->stream)) return error_set("a weight is not finite; %s not saved", path);
    if (model->n_frozen > 0) return model_save_adapter(model, ARENA_PARAMS, trainer->base_path, path);
    return model_save_native(model, ARENA_PARAMS, trainer->side_files, path, DTYPE_F32);
}

// Reads the state to go on from: run.json of the latest checkpoint or, if the run ended before its first, the start
// line of its log.
static int resume_read(Trainer *trainer, json_t **state) {
    char folder[PATH_MAX], path[PATH_MAX], *line = NULL;
    json_error_t error;
    Run *run = &trainer->run;
    size_t room = 0;
    if (path_join(path, run->path, "log.jsonl")) return -1;
    if (checkpoint_latest(run->path) < 0 && !file_exists(path))
        return error_set("--resume: %s holds no run", run->path);
    if (!trainer->opts.dry_run && run_lock(run)) return -1; // before reading, so that nobody writes meanwhile
    int64_t step = checkpoint_latest(run->path);
    if (step >= 0) {
        if (checkpoint_path(folder, run->path, step, "") || path_join(path, folder, "optimizer.bin")) return -1;
        if (file_exists(path))
            return error_set("%s is of an older version: finish the run with that, or start a new one with -m %s", path,
                             run->path);
        AdapterConfig adapter; // their shards have the adapters: what is needed is the model they belong to
        if (path_join(path, folder, "run.json") || path_join(trainer->model_path, folder, "model.bin")) return -1;
        if (adapter_is_folder(folder) && adapter_read_config(&adapter, folder)) return -1;
        if (adapter_is_folder(folder)) memcpy(trainer->model_path, adapter.base, sizeof trainer->model_path);
        *state = json_load_file(path, 0, &error);
        if (*state == NULL) return error_set("%s: line %d: %s", path, error.line, error.text);
        if (json_size(json_object_get(*state, "step")) == step) return 0;
        return error_set("%s: is not of step %lld, whose folder it lies in", path, (long long)step);
    }
    FILE *log = fopen(path, "re");
    if (log != NULL && getline(&line, &room, log) > 0) *state = json_loads(line, 0, NULL);
    if (log != NULL) fclose(log);
    free(line);
    if (json_is_object(json_object_get(*state, "options"))) return 0;
    return error_set("--resume: %s holds no checkpoint, and its log has no start line", run->path);
}

// Takes the settings of the run that are not given on this command line.
static int resume_settings(Trainer *trainer, json_t **state) {
    if (resume_read(trainer, state)) return -1;
    const json_t *saved = json_object_get(*state, "options");
    if (cli_from_json(option_table, OPTION_COUNT, &trainer->opts, trainer->given, saved)) return -1;
    trainer->opts.resume = 1;
    // of a session, not of the run
    if (!is_given(trainer, "stop-after")) trainer->opts.stop_after = 0;
    if (!is_given(trainer, "host")) trainer->opts.host[0] = '\0';
    json_t *now = cli_to_json(option_table, OPTION_COUNT, &trainer->opts);
    int result = 0;
    for (int i = 0; i < OPTION_COUNT && result == 0; i++) {
        const char *name = option_table[i].name;
        if (!trainer->given[i] || json_equal(json_object_get(saved, name), json_object_get(now, name))) continue;
        static const char *const fixed[] = {"model",
                                            "init",
                                            "seq",
                                            "dp",
                                            "local-steps",
                                            "fragments",
                                            "overlap",
                                            "powersgd-rank",
                                            "anchor-rank",
                                            "codec",
                                            "codec-coding",
                                            "klt-predict",
                                            "optimizer-dtype",
                                            "param-dtype",
                                            "grad-dtype",
                                            "klt-forward",
                                            "anchor-use",
                                            "schedule",
                                            "no-stash",
                                            "optimizer",
                                            "rotate-source",
                                            "rotate-geometry",
                                            "rotate-max-dim",
                                            "lora-rank",
                                            "lora-alpha",
                                            "lora-targets",
                                            "lora"};
        int is_fixed = 0;
        for (size_t f = 0; f < sizeof fixed / sizeof *fixed; f++) is_fixed |= strcmp(name, fixed[f]) == 0;
        if (is_fixed)
            result = error_set("--resume: --%s differs from the run's; leave it out, or start a new run", name);
        else if (strcmp(name, "resume") != 0 && strcmp(name, "stop-after") != 0 && strcmp(name, "out") != 0 &&
                 strcmp(name, "dry-run") != 0 && strcmp(name, "host") != 0)
            printf("resume: --%s differs from the run's; the run goes on with the new value\n", name);
    }
    json_decref(now);
    return result;
}

// Where the checkpoint stands.
static int resume_progress(Trainer *trainer, const json_t *state) {
    Progress *p = &trainer->progress;
    Mesh *mesh = &trainer->mesh;
    int64_t replicas = json_size(json_object_get(state, "replicas"));
    int64_t stages = json_size(json_object_get(state, "stages"));
    const struct {
        const char *name;
        int64_t *field;
    } counters[] = {
        {"step", &p->step}, {"adam_steps", &p->adam_steps}, {"samples", &p->samples}, {"tokens", &p->tokens}};
    for (int i = 0; i < 4; i++) {
        *counters[i].field = json_size(json_object_get(state, counters[i].name));
        if (*counters[i].field < 0)
            return error_set("--resume: %s in the checkpoint's run.json is not a count", counters[i].name);
    }
    p->elapsed = json_real_value(json_object_get(state, "elapsed"));
    const json_t *best = json_object_get(state, "best_val"), *saved_hash = json_object_get(state, "data_hash");
    p->best_val = json_is_real(best) ? json_real_value(best) : (double)INFINITY;
    json_t *hash = data_hash(trainer);
    int same_data = json_equal(saved_hash, hash);
    json_decref(hash);
    if (!same_data)
        return error_set("--resume: the data differ from the run's; to train on other data start a new run with -m %s",
                         trainer->run.path);
    if (replicas != mesh->n_replicas || stages != mesh->n_stages)
        return error_set("--resume: the run had %lld fast replicas of %lld stages, now there are %d of %d",
                         (long long)replicas, (long long)stages, mesh->n_replicas, mesh->n_stages);
    for (int f = 0; f < trainer->outer.n_fragments; f++)
        trainer->outer.begun[f] =
            json_integer_value(json_array_get(json_object_get(state, "averages_begun"), (size_t)f));
    trainer->run.saved_step = p->step;
    return 0;
}

// Position and moments from the checkpoint whose weights are loaded.
static int resume_state(Trainer *trainer, const json_t *state) {
    char folder[PATH_MAX];
    if (resume_progress(trainer, state)) return -1;
    if (checkpoint_path(folder, trainer->run.path, trainer->progress.step, "")) return -1;
    if (run_load_cells(trainer, folder)) return -1;
    return trainer->anchored ? anchor_load(trainer, folder, state) : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Plan: what a run needs and does, printed before it starts and by --dry-run

static int is_node(const Trainer *trainer);

static void print_count(const char *label, double value, const char *unit) {
    const char *scale = value >= 1e9 ? " G" : value >= 1e6 ? " M" : value >= 1e3 ? " k" : " ";
    double divisor = value >= 1e9 ? 1e9 : value >= 1e6 ? 1e6 : value >= 1e3 ? 1e3 : 1.0;
    printf("  %-28s %10.2f%s%s\n", label, value / divisor, scale, unit);
}

// The same of bytes, with how matrices are kept there.
static void print_kept(const char *what, Store store, int64_t n_bytes) {
    char name[16], label[64];
    cli_choice_name(name, sizeof name, STORE_NAMES, store);
    snprintf(label, sizeof label, "%s (%s)", what, name);
    print_count(label, (double)n_bytes, "B");
}

static void bytes_add(StageBytes *sum, const StageBytes *more) {
    sum->frozen += more->frozen;
    sum->params += more->params, sum->rounded += more->rounded, sum->grads += more->grads;
    sum->versions += more->versions;
    sum->moments += more->moments, sum->outer += more->outer, sum->acts += more->acts;
    sum->scratch = larger(sum->scratch, more->scratch); // cells take turns
}

// What the process takes, in bytes. With --gpus: what the first GPU does, which has all state.
typedef struct {
    StageBytes cells;
    int64_t codec;  // the cells' boundaries, tensors' memory
    int64_t anchor; // all of it, with what it learns of the boundaries
    int64_t caches; // of sequences that are generated
    int64_t host;   // the host's: messages, what the ends of boundaries remember, the entropy coder
} MeshBytes;

// The transform codec's sizes in this run.
static KltShape klt_shape(const Trainer *trainer) {
    const Options *opts = &trainer->opts;
    const Config *config = &trainer->config;
    KltShape shape = {config->channels,
                      opts->klt_predict ? config->vocab : 0,
                      trainer->mesh.micro_batch * trainer->T,
                      LEARNER_ROWS,
                      opts->codec_coding == 1,
                      opts->klt_metric > 0.0f,
                      {codec_klt_budget(&trainer->mesh.codec, CODEC_FORWARD, config->channels),
                       codec_klt_budget(&trainer->mesh.codec, CODEC_BACKWARD, config->channels)}};
    return shape;
}

// 1 if klt's entropy coder runs on a thread of its own. Beside as many threads as there are cores it would only make
// them wait for each other.
static int coder_has_thread(const Trainer *trainer) {
    int spare = !DEVICE_IS_HOST || trainer->threads < omp_get_num_procs();
    return trainer->opts.codec == CODEC_KLT && (trainer->opts.coder == 1 || (trainer->opts.coder == 0 && spare));
}

// Bytes of the anchor's model and factors; 0 where they cannot be planned.
static int64_t anchor_bytes(const Trainer *trainer) {
    const Mesh *mesh = &trainer->mesh;
    Stage whole;
    int64_t n_bytes = 0;
    if (anchor_table(&whole, &trainer->anchor, &trainer->config) == 0) {
        whole.unrounded = mesh->cells[0].stage.unrounded;
        if (stage_plan(&whole, mesh->micro_batch, trainer->T, 1, trainer->opts.recompute) == 0) {
            StageBytes bytes = stage_bytes(&whole, trainer->precision, trainer->threads);
            int n_sets = 2 * (trainer->anchor.filters + trainer->anchor.corrects);
            n_bytes = stage_bytes_sum(&bytes) + 4 * n_sets * factor_floats(&whole, trainer->anchor.rank);
        }
    }
    stage_free(&whole);
    return n_bytes;
}

// Windows of the training data that the ends of boundaries may remember.
static int64_t mesh_samples(const Trainer *trainer) {
    return mesh_model(&trainer->mesh, 0)->training ? trainer->data.train.n_windows : 0;
}

// What all cells of this process take, and the anchor.
static MeshBytes mesh_bytes(const Trainer *trainer) {
    const Mesh *mesh = &trainer->mesh;
    MeshBytes bytes;
    int64_t largest = 0;
    memset(&bytes, 0, sizeof bytes);
    for (Cell *cell = mesh_next(mesh, NULL); cell != NULL; cell = mesh_next(mesh, cell)) {
        StageBytes of_cell = stage_bytes(&cell->stage, trainer->precision, trainer->threads);
        bytes_add(&bytes.cells, &of_cell);
        for (int t = 0; t < cell->stage.n_tensors; t++) largest = larger(largest, cell->stage.tensors[t].n);
    }
    if (mesh->n_replicas > 1) bytes.cells.outer += mesh->n_replicas * 4 * largest; // what averages pass through
    bytes.host = mesh->message_bytes;
    bytes.caches = trainer->cache_bytes;
    for (int i = 0; i < mesh_n_ends(mesh); i++) {
        CodecShape shape = mesh_end_shape(mesh, i, mesh_samples(trainer));
        if (mesh_hosts_end(mesh, i)) bytes.host += codec_end_memory(&mesh->codec, &shape);
    }
    if (!trainer->anchored) return bytes;
    bytes.anchor = !is_node(trainer) || mesh_next(mesh, NULL) == NULL ? anchor_bytes(trainer) : 0;
    int C = trainer->config.channels;
    if (trainer->anchor.corrects) {
        CodecShape shape = coded_shape(mesh->micro_batch, trainer->T, C);
        bytes.host +=
            codec_cap(&mesh->codec, shape.n, C) + 2 * (mesh->n_stages - 1) * codec_end_memory(&mesh->codec, &shape);
    }
    if (mesh->codec.kind != CODEC_KLT) return bytes;
    KltShape shape = klt_shape(trainer);
    KltMemory cells = klt_memory_cells(&shape, shape.H, mesh->n_stages - 1);
    KltMemory anchor = klt_memory_anchor(&shape, mesh->n_stages - 1);
    KltMemory work = klt_memory_work(&shape, C, C); // of the anchor's compressed pass
    if (trainer->anchor.corrects) anchor = klt_memory_sum(anchor, work);
    bytes.codec = cells.device, bytes.anchor += anchor.device, bytes.host += cells.host + anchor.host;
    if (!coder_has_thread(trainer)) return bytes;
    KltMemory overlap = klt_memory_overlap(&shape, mesh_cells(mesh), mesh->message_bytes);
    bytes.codec += overlap.device, bytes.host += overlap.host;
    return bytes;
}

// What the device's memory has to hold.
static int64_t mesh_bytes_device(const MeshBytes *bytes) {
    return stage_bytes_sum(&bytes->cells) + bytes->codec + bytes->anchor + bytes->caches +
           (DEVICE_IS_HOST ? bytes->host : 0);
}

// Gives up the bf16 copies of weights where they would not leave a quarter of the memory free.
static void decide_rounding(Trainer *trainer) {
    MeshBytes bytes = mesh_bytes(trainer);
    if (leaves_room(mesh_bytes_device(&bytes))) return;
    for (int i = 0; i < mesh_cells(&trainer->mesh); i++) trainer->mesh.cells[i].stage.unrounded = 1;
}

// 0, or -1 if this machine cannot hold the mesh: the device, or the host beside it.
static int mesh_fits(const Trainer *trainer) {
    MeshBytes bytes = mesh_bytes(trainer);
    int64_t memory = device_memory(), needed = mesh_bytes_device(&bytes);
    if (!DEVICE_IS_HOST && bytes.host > host_memory())
        return error_set("%.1f GB of the host's memory are needed for messages and what codecs remember, it has %.1f",
                         1e-9 * (double)bytes.host, 1e-9 * (double)host_memory());
    if (needed <= memory || memory == 0) return 0; // no device: stream_create says so
    const StageBytes *cells = &bytes.cells;
    return error_set(
        "%.1f GB are needed (parameters and optimizer %.1f, activations %.1f, anchor %.1f, codec %.1f), the machine "
        "has %.1f%s",
        1e-9 * (double)needed, 1e-9 * (double)(stage_bytes_sum(cells) - cells->acts - cells->scratch),
        1e-9 * (double)(cells->acts + cells->scratch), 1e-9 * (double)bytes.anchor,
        1e-9 * (double)(bytes.codec + (DEVICE_IS_HOST ? bytes.host : 0)), 1e-9 * (double)memory,
        !mesh_model(&trainer->mesh, 0)->training ? ""
        : trainer->mesh.asynchronous             ? "; try --recompute, a smaller --batch or --seq, fewer --stages"
                                                 : "; try --recompute, a smaller --micro-batch or --seq");
}

// What the machine still has for tensors; 0: not known.
static int64_t memory_left(void) {
    int64_t left = device_memory_left();
    return left - left / 20; // a plan is right within 5%
}

// Says so where another codec is known to learn more from as many bytes.
static void print_better_codec(const Trainer *trainer) {
    const Codec *codec = &trainer->mesh.codec;
    CodecKind better = codec_better(codec, trainer->config.channels);
    if (better == codec->kind) return;
    printf("codec: at this budget %s keeps more of what is learned (README, \"What it achieves\")", codec_name(better));
    printf(better == CODEC_KLT ? "; --codec klt needs an anchor, -x 2 or more\n" : "\n");
}

// The mesh in words.
static void print_mesh(const Trainer *trainer) {
    static const char *const meetings[] = {"never meeting", "outer steps", "every gradient averaged"};
    const Mesh *mesh = &trainer->mesh;
    const Options *opts = &trainer->opts;
    char codec[128], use[16];
    codec_describe(codec, sizeof codec, &mesh->codec, trainer->config.channels);
    printf("mesh: %d fast replica%s of %d stages, codec %s", mesh->n_replicas, mesh->n_replicas > 1 ? "s" : "",
           mesh->n_stages, codec);
    if (mesh->n_replicas > 1) printf(", %s", meetings[trainer->dp]);
    if (trainer->dp == MESH_DP_DILOCO)
        printf(" (every %d steps, %d fragments, rank %d)", trainer->outer.local_steps, trainer->outer.n_fragments,
               trainer->outer.rank);
    printf("\n");
    cli_choice_name(use, sizeof use, anchor_uses, opts->anchor_use);
    if (trainer->anchored)
        printf("      anchor: %s, rank %d, delay %s, momentum %g, alpha %g, tau %g%s\n", use, trainer->anchor.rank,
               opts->anchor_delay, (double)opts->anchor_beta, (double)opts->alpha, (double)opts->tau,
               opts->tau_relative ? " of the largest singular value" : "");
    for (int s = 0; s < mesh->n_stages && mesh->n_stages > 1; s++) {
        const Stage *stage = &mesh_cell(mesh, 0, s)->stage;
        printf("      stage %d: layers %d..%d%s%s, %lld parameters, ", s, stage->first_layer,
               stage->first_layer + stage->n_layers - 1, stage->has_embed ? ", embedding" : "",
               stage->has_head ? ", head" : "", (long long)stage->n_params);
        printf(mesh->asynchronous ? "%d updates behind\n" : "%d micro-batches in flight\n",
               mesh->asynchronous ? stage->delay : stage->slots);
    }
    if (mesh->asynchronous)
        printf("      asynchronous: a step is one micro-batch, backward with %s weights\n",
               mesh->stash ? "the forward's" : "the newest");
    if (mesh->n_stages > 1) print_better_codec(trainer);
}

// The optimizer in words, unless it is AdamW.
static void print_optimizer(const Options *opts) {
    char name[32], source[32], geometry[32], refresh[32];
    if (opts->optimizer == OPTIMIZER_ADAMW) return;
    cli_choice_name(name, sizeof name, optimizer_names, opts->optimizer);
    cli_choice_name(source, sizeof source, rotate_sources, opts->rotate_source);
    cli_choice_name(geometry, sizeof geometry, rotate_geometries, opts->rotate_geometry);
    cli_choice_name(refresh, sizeof refresh, refresh_names, opts->refresh);
    printf("     optimizer %s", name);
    if (opts->optimizer == OPTIMIZER_ROTATE)
        printf(", bases (%s, %s) refreshed every %d steps, %s, of sides up to %d", source, geometry, opts->rotate_every,
               refresh, opts->rotate_max_dim);
    printf("\n");
}

// What stays frozen and what is trained instead.
static void print_lora(const Trainer *trainer) {
    const Lora *lora = &trainer->config.lora;
    char targets[64];
    double frozen = 0.0;
    lora_targets_text(lora, targets, sizeof targets);
    printf("lora: rank %d, alpha %g, of %s; the model itself is frozen\n", lora->rank, (double)lora->alpha, targets);
    for (const Stage *stage = mesh_model(&trainer->mesh, 0); stage != NULL; stage = stage->next)
        frozen += (double)stage->frozen_params;
    print_count("frozen parameters", frozen, "");
}

static void print_plan(const Trainer *trainer) {
    const Config *c = &trainer->config;
    const Options *opts = &trainer->opts;
    const Mesh *mesh = &trainer->mesh;
    int training = mesh_model(mesh, 0)->training;
    MeshBytes all = mesh_bytes(trainer);
    StageBytes bytes = all.cells;
    int64_t epoch = trainer->data.train.n_windows;
    char schedule[32];
    printf("model: %d layers, d %d, heads %d/%d of %d, ffn %d, vocabulary %d, context %d, %s head\n", c->n_layers,
           c->channels, c->heads, c->kv_heads, c->head_dim, c->ffn, c->vocab, c->context, c->tied ? "tied" : "own");
    const Stage *first = mesh_model(mesh, 0);
    if (first->n_frozen > 0) print_lora(trainer);
    print_count(first->n_frozen > 0 ? "parameters of adapters" : "parameters", (double)trainer->n_params, "");
    printf("memory:\n");
    if (first->n_frozen > 0) print_kept("frozen weights", first->frozen_store, bytes.frozen);
    print_kept(first->n_frozen > 0 ? "adapters" : "parameters", first->param_store, bytes.params);
    if (bytes.rounded > 0) print_count("parameters (bf16 copy)", (double)bytes.rounded, "B");
    if (training) {
        print_kept("gradients", first->grad_store, bytes.grads);
        print_kept(first->optimizer.kind == OPTIMIZER_ADAMW ? "AdamW moments" : "optimizer state", first->moment_store,
                   bytes.moments);
    }
    if (bytes.versions > 0) print_kept("older weights", first->param_store, bytes.versions);
    if (bytes.outer > 0) print_count("outer steps (4 x fp32)", (double)bytes.outer, "B");
    print_count(opts->recompute ? "activations (recompute)" : "activations", (double)bytes.acts, "B");
    print_count("scratch of the ops", (double)bytes.scratch, "B");
    if (all.anchor > 0) print_count("anchor", (double)all.anchor, "B");
    if (all.codec > 0) print_count("codec", (double)all.codec, "B");
    if (all.caches > 0) print_count("caches of generation", (double)all.caches, "B");
    print_count("messages, codec (host)", (double)all.host, "B");
    print_count("in all", (double)(stage_bytes_sum(&bytes) + all.anchor + all.codec + all.caches + all.host), "B");
    if (device_memory() > 0)
        print_count("this device has", (double)device_memory(), "B");
    else
        printf("  %-28s %10s\n", "this device has", "n/a");
    if (!training) return;
    cli_choice_name(schedule, sizeof schedule, lr_shapes, opts->schedule_lr);
    printf("run: %lld steps of %d x %d tokens in micro-batches of %d, %.2f epochs of %lld windows\n",
           (long long)trainer->n_steps, opts->batch * mesh->n_replicas, trainer->T, trainer->B,
           epoch > 0 ? (double)trainer->n_steps * opts->batch * mesh->n_replicas / (double)epoch : 0.0,
           (long long)epoch);
    printf("     lr %g (%s), warm-up %lld, weight decay %g, clip %g, seed %lld, %s, %d threads\n", (double)opts->lr,
           schedule, (long long)trainer->warmup, (double)opts->wd, (double)opts->clip, (long long)opts->seed,
           trainer->precision == PRECISION_BF16 ? "bf16 products" : "fp32 products", trainer->threads);
    print_optimizer(opts);
    if (mesh_cells(mesh) > 1 || trainer->anchored || mesh->asynchronous) print_mesh(trainer);
}

// What an outer average sends of each tensor at PowerSGD's ranks: of the first layer, which stands for all, of what is
// no layer's, and in total.
static void print_compression(const Trainer *trainer) {
    double whole = 0.0, sent = 0.0;
    printf("outer averages, values of a tensor and of what is sent of it:\n");
    for (const Stage *stage = mesh_model(&trainer->mesh, 0); stage != NULL; stage = stage->next) {
        for (int i = 0; i < stage->n_tensors; i++) {
            const Tensor *t = &stage->tensors[i];
            int rank = t->n_dims == 2 ? powersgd_rank(t, trainer->outer.rank) : 0;
            double values = rank > 0 ? (double)rank * (double)(t->shape[0] + t->shape[1]) : (double)t->n;
            whole += (double)t->n, sent += values;
            int layer = tensor_layer(stage, t);
            if (t->index > 0 && layer > 0 && layer < trainer->config.n_layers) continue;
            printf("  %-44s %12lld %10.0f %8.1fx", t->name, (long long)t->n, values, (double)t->n / values);
            printf(rank > 0 ? "  rank %d\n" : "\n", rank);
        }
    }
    printf("  %-44s %12.0f %10.0f %8.1fx\n", "in all", whole, sent, whole / sent);
}

// Tables of klt, and what predictions need once.
static void print_tables(const KltShape *shape) {
    int64_t forward = klt_estimate_table(shape, 0), backward = klt_estimate_table(shape, 1);
    printf("tables of klt, an estimate: %.1f kB forward and %.1f kB backward a boundary and delivery, to the stages on "
           "both "
           "sides; %d and %d of %d components\n",
           1e-3 * (double)forward, 1e-3 * (double)backward, klt_estimate_components(shape, CODEC_FORWARD),
           klt_estimate_components(shape, CODEC_BACKWARD), shape->H);
    printf("  the first deliveries are more frequent, of steps 0, 0, 1, 2, 4 and so on up to --anchor-delay\n");
    if (shape->V > 0)
        printf("  and once the first embedding, %lld values, to all stages but the first; not counted below\n",
               (long long)shape->V * shape->H);
}

// The run as a plan, over a link of --link-mbps (200 where it is not given) between cells of --device-tflops (90).
static MeshPlan estimate_plan(const Trainer *trainer) {
    const Options *opts = &trainer->opts;
    const Mesh *mesh = &trainer->mesh;
    MeshPlan plan;
    int64_t rows = (int64_t)trainer->B * trainer->T;
    memset(&plan, 0, sizeof plan);
    plan.config = trainer->config;
    plan.replicas = mesh->n_replicas + trainer->anchored, plan.stages = mesh->n_stages;
    plan.batch = opts->batch, plan.T = trainer->T, plan.micro_batch = trainer->B, plan.recompute = opts->recompute;
    plan.logits_floats = (int64_t)logits_chunk(&trainer->config, rows) * trainer->config.vocab;
    plan.mask_rate = codec_rate(&mesh->codec, trainer->config.channels), plan.anchor = trainer->anchored,
    plan.anchor_rank = trainer->anchor.rank, plan.factor_sets = trainer->anchor.filters + trainer->anchor.corrects;
    plan.anchor_delay = trainer->anchor_delay > 0 ? trainer->anchor_delay : 20;
    plan.asynchronous = mesh->asynchronous, plan.stash = mesh->asynchronous && mesh->stash;
    plan.dp = (MeshDp)opts->dp, plan.local_steps = opts->local_steps, plan.powersgd_rank = opts->powersgd_rank;
    plan.wire_bytes = opts->wire == WIRE_BF16 ? 2 : 4;
    plan.link_mbps = opts->link_mbps > 0.0f ? (double)opts->link_mbps : 200.0;
    plan.link_ms = (double)opts->link_ms;
    plan.device_tflops = opts->device_tflops > 0.0f ? (double)opts->device_tflops : 90.0;
    plan.keeps_delta = opts->optimizer == OPTIMIZER_PIPEMARE;
    plan.param_size = opts->param_dtype == STORE_BF16 ? 2.0 : 4.0;
    plan.frozen_size = trainer->anchor.frozen_store == STORE_BF16 ? 2.0 : 4.0;
    plan.grad_size = opts->grad_dtype == STORE_BF16 ? 2.0 : 4.0;
    plan.moment_size = (double)store_bytes((Store)opts->optimizer_dtype, STORE_BLOCK) / STORE_BLOCK;
    plan.rotation_bytes = 4.0 * (double)rotation_floats(&mesh->cells[0].stage, mesh->cells[0].stage.n_tensors) /
                          mesh->cells[0].stage.n_layers;
    if (mesh->codec.kind == CODEC_KLT && trainer->anchored) {
        KltShape shape = klt_shape(trainer);
        plan.table_bytes = (double)(klt_estimate_table(&shape, 0) + klt_estimate_table(&shape, 1));
        plan.table_memory = (double)klt_memory_tables(&shape, shape.H).device;
        plan.codec_memory = (double)klt_memory_cells(&shape, shape.H, 0).device;
        plan.learn_memory = (double)klt_memory_anchor(&shape, 1).device;
    }
    return plan;
}

// What the mesh will cost, beside the variants of the method.
static int print_estimate(const Trainer *trainer) {
    MeshPlan plan = estimate_plan(trainer);
    KltShape shape = klt_shape(trainer);
    if (plan.table_bytes > 0.0) print_tables(&shape);
    if (mesh_estimate_print(stdout, &plan)) return -1;
    if (trainer->dp == MESH_DP_DILOCO) print_compression(trainer);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Training

// What a process of several does in the place of meet_anchor and mesh_outer (section "Joining").
static int node_meet_anchor(Trainer *trainer);
static int node_outer(Trainer *trainer, int64_t done);

static int is_node(const Trainer *trainer) {
    return trainer->node != NULL;
}

// Fills the batch of every replica that is in the run with the next sequences of the data's order.
static void next_batches(Trainer *trainer, Batch *batches) {
    const Split *train = &trainer->data.train;
    for (int r = 0; r < trainer->mesh.n_replicas; r++) {
        Batch *batch = &batches[r];
        batch->n_valid = 0;
        if (is_node(trainer) && !trainer->node->drawing[r]) continue;
        for (int b = 0; b < batch->b; b++) {
            int64_t window = split_order(train, trainer->progress.samples + b, (uint64_t)trainer->opts.seed);
            batch->samples[b] = window;
            batch->n_valid += batch_read(batch, b, train, window);
        }
        trainer->progress.samples += batch->b;
        trainer->progress.tokens += (int64_t)batch->b * batch->T;
    }
}

// What one step did.
typedef struct {
    double loss, grad_norm;
    float lr;
    int finite;    // losses and gradients are
    int skipped;   // cells that left their weights as they were: a loss or gradient was not finite
    int delivered; // the anchor's factors came at this step
    Sent sent;     // bytes of all cells, and the anchor's
    double
        probe[3]; // cosine of the fast gradient with the unmasked one: all, block matrices, filtered; NaN: not probed
    double alignment[2]; // sum of the Hessian's sizes, raw and in the rotated bases; NaN: not measured
    Oscillation swing;   // of the updates since the last measurement; nothing seen: there was none
} StepResult;

// Whose weights the anchor follows: the merged ones, which reach it with every outer step, or those of the first
// replica, which are sent to it.
static int anchor_follows(const Trainer *trainer) {
    return mesh_model(&trainer->mesh, 0)->meets;
}

// Hands the anchor its next snapshot.
static void launch_anchor(Trainer *trainer) {
    Mesh *mesh = &trainer->mesh;
    int follows = anchor_follows(trainer), size = trainer->anchor.wire == WIRE_BF16 ? 2 : 4;
    double there = mesh_now(mesh);
    for (int s = 0; s < mesh->n_stages && !follows; s++) {
        Cell *cell = mesh_cell(mesh, 0, s);
        cell->step.bytes[TRAFFIC_ANCHOR] += size * cell->stage.n_params;
        there = fmax(there, clock_send(&cell->clock, mesh->speed, size * cell->stage.n_params));
    }
    trainer->anchor.launched_at = there;
    anchor_launch(&trainer->anchor, mesh_model(mesh, 0), follows ? ARENA_GLOBAL : ARENA_PARAMS,
                  !follows && trainer->anchor.wire == WIRE_BF16, trainer->progress.step);
}

// Takes the tables of the last pass into use. Returns bytes a replica: each table goes to the stages on both sides of
// its boundary, and once the embedding to all but the first; -1 if it failed.
static int64_t deliver_tables(Trainer *trainer) {
    Mesh *mesh = &trainer->mesh;
    Learner *learner = &trainer->anchor.learner;
    int64_t n_bytes = trainer->anchor.useless ? 0 : learner_use(mesh, learner);
    if (n_bytes < 0) return -1;
    if (learner->predicts && !learner->embed_counted)
        n_bytes += (int64_t)codec_size(&mesh->codec) * learner->V * learner->C * learner->n_boundaries;
    learner->embed_counted = 1;
    return n_bytes;
}

// Books a delivery: the factors go to every replica, each of which passes them on; the anchor's own stages have sent
// each other whole boundaries, and compressed ones if there was such a pass too. In simulated time the pass ran on as
// many cells as a replica has, and a fast circuit that waits for a fixed delay waits there too.
static void book_anchor(Trainer *trainer, int64_t table_bytes, StepResult *result) {
    Anchor *anchor = &trainer->anchor;
    Mesh *mesh = &trainer->mesh;
    int64_t size = anchor->wire == WIRE_BF16 ? 2 : 4, tokens = (int64_t)anchor->batch * anchor->T, factors = 0;
    int64_t whole = size * tokens * trainer->config.channels * (mesh->n_stages - 1);
    int64_t boundaries = 2 * whole + anchor->coded.sent[0] + anchor->coded.sent[1];
    double passes = anchor->coded.sent[0] > 0 ? 2.0 : 1.0;
    for (int s = 0; s < mesh->n_stages && !anchor->useless; s++)
        factors += anchor_factor_bytes(anchor, &mesh_cell(mesh, 0, s)->stage);
    factors += table_bytes;
    double flops = stage_flops(&anchor->stage, (double)tokens, anchor->T) +
                   stage_backward_flops(&anchor->stage, (double)tokens, anchor->T);
    double took = mesh->device_flops > 0.0 ? passes * flops / (mesh->device_flops * mesh->n_stages) : anchor->seconds;
    Clock sender = {anchor->launched_at + took, 0.0};
    clock_send(&sender, mesh->speed, boundaries / mesh->n_stages);
    double ready = clock_send(&sender, mesh->speed, factors / mesh->n_stages);
    for (int i = 0; i < mesh_cells(mesh) && trainer->anchor_delay > 0; i++) clock_receive(&mesh->cells[i].clock, ready);
    result->sent.bytes[TRAFFIC_ANCHOR] += mesh->n_replicas * factors;
    anchor->factor_bytes += mesh->n_replicas * factors;
    for (int d = 0; d < 2; d++) anchor->boundary_bytes[d] += whole + anchor->coded.sent[d];
}

static int take_delivery(Trainer *trainer, StepResult *result) {
    Anchor *anchor = &trainer->anchor;
    if (anchor_deliver(anchor)) return -1;
    int64_t table_bytes = anchor->learns ? deliver_tables(trainer) : 0;
    if (table_bytes < 0) return -1;
    result->delivered = !anchor->useless;
    book_anchor(trainer, table_bytes, result);
    return 0;
}

// The fast step at which the factors of a snapshot are due. Tables grow old quickest at the start, where weights move
// most: there a pass is due after as many steps as were done before it, so tables are of step 0, 0, 1, 2, 4, 8 and so
// on.
static int64_t delivery_step(const Trainer *trainer, int64_t launched) {
    int64_t delay = trainer->anchor_delay;
    return launched + (trainer->anchor.learns && launched < delay ? larger(launched, 1) : delay);
}

// Before a step: takes the anchor's factors if they are due, and gives it the next snapshot.
static int meet_anchor(Trainer *trainer, StepResult *result) {
    Anchor *anchor = &trainer->anchor;
    if (anchor->launched >= 0) {
        int due = trainer->anchor_delay > 0 && trainer->progress.step >= delivery_step(trainer, anchor->launched);
        if (trainer->anchor_delay > 0 && !due) return 0;
        if (anchor_state(anchor, due) == ANCHOR_WORKING) return 0;
        if (take_delivery(trainer, result)) return -1;
    } else if (anchor->learns) { // boundaries need tables from the first step on
        launch_anchor(trainer);
        anchor_state(anchor, 1);
        if (take_delivery(trainer, result)) return -1;
        if (anchor->useless) return error_set("--codec klt: the model's loss or gradient is not finite at the start");
    }
    launch_anchor(trainer);
    return 0;
}

// 1 once the anchor has delivered factors of its gradients, or of the codec's bias.
static int is_filtered(const Trainer *trainer) {
    int stale = is_node(trainer) && trainer->node->is_stale;
    return trainer->anchored && trainer->anchor.filters && trainer->anchor.deliveries > 0 && !stale;
}

static int is_corrected(const Trainer *trainer) {
    int stale = is_node(trainer) && trainer->node->is_stale;
    return trainer->anchored && trainer->anchor.corrects && trainer->anchor.deliveries > 0 && !stale;
}

// Copies of gradients for --probe: the fast circuit's and the unmasked one's, of the first replica.
typedef struct {
    float *fast, *whole;
} Probe;

static int64_t model_floats(const Stage *model) {
    int64_t floats = 0;
    for (const Stage *stage = model; stage != NULL; stage = stage->next) floats += stage->arena_floats;
    return floats;
}

static void model_copy_grads(float *to, const Stage *model) {
    for (const Stage *stage = model; stage != NULL; to += stage->arena_floats, stage = stage->next)
        device_copy(to, stage->grads, sizeof(float) * (size_t)stage->arena_floats, stage->stream);
}

// Cosine between a model's gradients and a copy of others; only_blocks: over block matrices.
static double model_cosine(const Stage *model, const float *other, int only_blocks) {
    double dot = 0.0, a2 = 0.0, b2 = 0.0;
    for (const Stage *stage = model; stage != NULL; other += stage->arena_floats, stage = stage->next) {
        for (int i = 0; i < stage->n_tensors; i++) {
            const Tensor *tensor = &stage->tensors[i];
            const float *a = stage->grads + tensor->offset, *b = other + tensor->offset;
            if (!tensor->block && only_blocks) continue;
            dot += vector_dot(a, b, tensor->n, stage->stream);
            a2 += sum_of_squares(a, tensor->n, stage->stream), b2 += sum_of_squares(b, tensor->n, stage->stream);
        }
    }
    return dot / sqrt(a2 * b2);
}

static void model_put_grads(Stage *model, const float *from) {
    for (Stage *stage = model; stage != NULL; from += stage->arena_floats, stage = stage->next)
        device_copy(stage->grads, from, sizeof(float) * (size_t)stage->arena_floats, stage->stream);
}

// Compares the fast gradient of the first replica's batch with the unmasked one of the same batch, before and after
// what the anchor's factors do to it; the fast one is put back.
static int probe_gradients(Trainer *trainer, const Batch *batches, Probe *probe, StepResult *result) {
    Stage *model = mesh_model(&trainer->mesh, 0);
    size_t n_bytes = sizeof(float) * (size_t)model_floats(model);
    Pass pass = {batches, trainer->progress.step, 0, 0, NULL, 0};
    if (probe->fast == NULL) probe->fast = (float *)device_alloc(n_bytes);
    if (probe->whole == NULL) probe->whole = (float *)device_alloc(n_bytes);
    if (probe->fast == NULL || probe->whole == NULL) return -1;
    model_copy_grads(probe->fast, model);
    if (mesh_run(&trainer->mesh, 0, 1, &pass)) return -1;
    model_copy_grads(probe->whole, model);
    model_put_grads(model, probe->fast);
    result->probe[0] = model_cosine(model, probe->whole, 0);
    result->probe[1] = model_cosine(model, probe->whole, 1);
    for (Stage *stage = model; stage != NULL; stage = stage->next) {
        if (is_corrected(trainer)) stage_correct(stage, &trainer->anchor, trainer->stream);
        if (is_filtered(trainer)) stage_filter(stage, &trainer->anchor, trainer->opts.alpha, trainer->stream);
    }
    result->probe[2] = model_cosine(model, probe->whole, 1);
    model_put_grads(model, probe->fast);
    return stream_check(trainer->stream);
}

static int is_due(int64_t step, int64_t every) {
    return every > 0 && step % every == 0;
}

// Leading directions that are followed, and rounds of products that find them.
enum { LEADING = 4, LEADING_ROUNDS = 8 };

// Memory of a measurement: arenas of a model's stages, one after the other, and what has been found.
typedef struct {
    float *start, *grads, *direction, *plus; // parameters and gradients to come back to; v, and gradients beyond it
    float *values;                           // of one tensor, the host's
    float *rows;                             // (ALIGNMENT_ROWS and one a tensor, ALIGNMENT_DRAWS), the host's
    int64_t n_blocks, n_rows;                // values of all block matrices; rows that are looked at
} Alignment;

static void alignment_free(Alignment *a) {
    device_free(a->start);
    device_free(a->grads);
    device_free(a->direction);
    device_free(a->plus);
    free(a->values);
    free(a->rows);
}

static int64_t alignment_rows(const Alignment *a, const Tensor *t) {
    int64_t rows = ALIGNMENT_ROWS * t->n / a->n_blocks;
    return rows < 1 ? 1 : rows < t->n ? rows : t->n;
}

static int alignment_alloc(Alignment *a, const Stage *model) {
    size_t n_bytes = sizeof(float) * (size_t)model_floats(model);
    int64_t largest = 0;
    memset(a, 0, sizeof *a);
    for (const Stage *stage = model; stage != NULL; stage = stage->next)
        for (int i = 0; i < stage->n_tensors; i++)
            if (stage->tensors[i].block)
                a->n_blocks += stage->tensors[i].n, largest = larger(largest, stage->tensors[i].n);
    for (const Stage *stage = model; stage != NULL; stage = stage->next)
        for (int i = 0; i < stage->n_tensors; i++)
            if (stage->tensors[i].block) a->n_rows += alignment_rows(a, &stage->tensors[i]);
    a->start = (float *)device_alloc(n_bytes), a->grads = (float *)device_alloc(n_bytes);
    a->direction = (float *)device_alloc(n_bytes), a->plus = (float *)device_alloc(n_bytes);
    a->values = (float *)malloc(sizeof(float) * (size_t)largest);
    a->rows = (float *)malloc(sizeof(float) * ALIGNMENT_DRAWS * (size_t)a->n_rows);
    if (a->start == NULL || a->grads == NULL || a->direction == NULL || a->plus == NULL) return -1;
    return a->values != NULL && a->rows != NULL ? 0 : error_set("out of memory to measure the alignment");
}

// A block matrix in place into its bases, or back out of them.
static int alignment_turn(const Stage *stage, int tensor, float *matrix, int back) {
    const Tensor *t = &stage->tensors[tensor];
    int m = (int)t->shape[0], n = (int)t->shape[1];
    RotateSides sides = rotate_sides(&stage->optimizer, m, n);
    RotateGroup one = {m, n, 1, 0, 0};
    RotateWork work;
    if (!sides.left && !sides.right) return 0;
    RotateBasis basis =
        rotate_basis(stage->rotation + rotation_floats(stage, tensor), sides, stage->optimizer.source, m, n);
    if (rotate_work(&work, sides, m, n, 1, stage->stream)) return -1;
    rotate_turn(work.a, matrix, 0, work.c, &basis, &one, back, stage->stream);
    device_copy(matrix, work.a, sizeof(float) * (size_t)t->n, stage->stream);
    return 0;
}

// The draw's vector v over the block matrices, in raw or rotated bases. Returns its norm over that of the weights, NaN
// if it failed.
static double alignment_draw(Alignment *a, const Stage *model, int draw, int rotated, uint64_t seed) {
    double squares = 0.0, weights = 0.0;
    int64_t at = 0;
    uint64_t index = 0;
    for (const Stage *stage = model; stage != NULL; at += stage->arena_floats, stage = stage->next) {
        for (int i = 0; i < stage->n_tensors; i++) {
            const Tensor *t = &stage->tensors[i];
            float *v = a->direction + at + t->offset;
            if (!t->block) continue;
            for (int64_t j = 0; j < t->n; j++) a->values[j] = alignment_cauchy(seed, (uint32_t)draw, index++);
            device_copy(v, a->values, sizeof(float) * (size_t)t->n, stage->stream);
            if (rotated && alignment_turn(stage, i, v, 1)) return (double)NAN;
            squares += sum_of_squares(v, t->n, stage->stream);
            weights += sum_of_squares(stage->params + t->offset, t->n, stage->stream);
        }
    }
    return sqrt(squares / weights);
}

static void alignment_put_params(Stage *model, const Alignment *a) {
    const float *from = a->start;
    for (Stage *stage = model; stage != NULL; from += stage->arena_floats, stage = stage->next)
        device_copy(stage->params, from, sizeof(float) * (size_t)stage->arena_floats, stage->stream);
}

// Parameters = where they were + distance * v; their gradients on the batch.
static int alignment_gradients(Trainer *trainer, const Alignment *a, float distance, const Batch *batches) {
    Pass pass = {batches, trainer->progress.step, 0, 0, NULL, 0};
    Stage *model = mesh_model(&trainer->mesh, 0);
    int64_t at = 0;
    alignment_put_params(model, a);
    for (Stage *stage = model; stage != NULL; at += stage->arena_floats, stage = stage->next)
        vector_blend(stage->params, a->direction + at, 1.0f, distance, 1.0f, stage->arena_floats, stage->stream);
    return mesh_run(&trainer->mesh, 0, 1, &pass);
}

// rows of this draw = plus / (2 distance), a sample of each block matrix.
static int alignment_take(Alignment *a, const Stage *model, int draw, int rotated, float distance, uint64_t seed) {
    float *row = a->rows + draw;
    int64_t at = 0;
    for (const Stage *stage = model; stage != NULL; at += stage->arena_floats, stage = stage->next) {
        for (int i = 0; i < stage->n_tensors; i++) {
            const Tensor *t = &stage->tensors[i];
            float *difference = a->plus + at + t->offset;
            if (!t->block) continue;
            if (rotated && alignment_turn(stage, i, difference, 0)) return -1;
            device_copy(a->values, difference, sizeof(float) * (size_t)t->n, stage->stream);
            for (int64_t j = 0; j < alignment_rows(a, t); j++, row += ALIGNMENT_DRAWS) {
                uint64_t which = rand_permute((uint64_t)j, (uint64_t)t->n, seed, RAND_ALIGNMENT, (uint64_t)t->index);
                *row = a->values[which] / (2.0f * distance);
            }
        }
    }
    return stream_check(model->stream);
}

// plus = 2 distance H v, v the direction: central differences of unmasked gradients. Parameters are put back.
static int alignment_difference(Trainer *trainer, Alignment *a, float distance, const Batch *batches) {
    Stage *model = mesh_model(&trainer->mesh, 0);
    int64_t at = 0;
    if (!isfinite(distance)) return error_set("--measure-alignment: the weights are not finite");
    if (alignment_gradients(trainer, a, distance, batches)) return -1;
    model_copy_grads(a->plus, model);
    if (alignment_gradients(trainer, a, -distance, batches)) return -1;
    alignment_put_params(model, a);
    for (Stage *stage = model; stage != NULL; at += stage->arena_floats, stage = stage->next)
        vector_subtract(a->plus + at, stage->grads, stage->arena_floats, stage->stream);
    return 0;
}

// A draw's products with H into the rows, by points a hundredth of the weights' norm away.
static int alignment_product(Trainer *trainer, Alignment *a, int draw, int rotated, const Batch *batches) {
    Stage *model = mesh_model(&trainer->mesh, 0);
    uint64_t seed = (uint64_t)trainer->opts.seed;
    float distance = (float)(1e-2 / alignment_draw(a, model, draw, rotated, seed));
    if (alignment_difference(trainer, a, distance, batches)) return -1;
    return alignment_take(a, model, draw, rotated, distance, seed);
}

// The sum of |H_ij| over the first replica's block matrices, H of the mean loss of its batch, in raw or rotated bases.
static int alignment_measure(Trainer *trainer, Alignment *a, int rotated, const Batch *batches, double *sum) {
    for (int draw = 0; draw < ALIGNMENT_DRAWS; draw++)
        if (alignment_product(trainer, a, draw, rotated, batches)) return -1;
    *sum = alignment_sum(a->rows, a->n_rows) * (double)a->n_blocks / (double)a->n_rows;
    return 0;
}

// Memory, and what is to be put back.
static int alignment_begin(Alignment *a, const Stage *model) {
    int64_t at = 0;
    if (alignment_alloc(a, model)) return -1;
    model_copy_grads(a->grads, model);
    for (const Stage *stage = model; stage != NULL; at += stage->arena_floats, stage = stage->next)
        device_copy(a->start + at, stage->params, sizeof(float) * (size_t)stage->arena_floats, stage->stream);
    return 0;
}

// v (a model's arenas) = the block matrices of plus, less what `directions` (n_before) have of them, and of length 1.
static void leading_take(Leading *leading, int n_before, const Alignment *a, const Stage *model) {
    int64_t n = model_floats(model), at = 0;
    float *v = leading->directions + n_before * n;
    for (const Stage *stage = model; stage != NULL; at += stage->arena_floats, stage = stage->next)
        for (int i = 0; i < stage->n_tensors; i++)
            if (stage->tensors[i].block)
                device_copy(v + at + stage->tensors[i].offset, a->plus + at + stage->tensors[i].offset,
                            sizeof(float) * (size_t)stage->tensors[i].n, stage->stream);
    for (int k = 0; k < n_before; k++) {
        const float *other = leading->directions + k * n;
        vector_blend(v, other, 1.0f, -(float)vector_dot(v, other, n, model->stream), 1.0f, n, model->stream);
    }
    vector_scale(v, n, (float)(1.0 / sqrt(sum_of_squares(v, n, model->stream))), model->stream);
}

// Directions that come to span the leading eigenvectors of the Hessian: from random ones, rounds of products with it,
// by points a thousandth of the weights' norm away, and of Gram and Schmidt. The same whatever was found before.
static int leading_find(Trainer *trainer, Alignment *a, const Batch *batches) {
    Leading *leading = &trainer->leading;
    Stage *model = mesh_model(&trainer->mesh, 0);
    int64_t n = model_floats(model);
    double weights = 0.0; // norm of the block matrices
    if (leading->directions == NULL) leading->directions = (float *)device_alloc(sizeof(float) * LEADING * (size_t)n);
    if (leading->directions == NULL) return -1;
    for (int round = 0; round < LEADING_ROUNDS; round++) {
        for (int k = 0; k < LEADING; k++) {
            double length = 1.0;
            if (round == 0) {
                double share = alignment_draw(a, model, ALIGNMENT_DRAWS + k, 0, (uint64_t)trainer->opts.seed);
                length = sqrt(sum_of_squares(a->direction, n, model->stream)), weights = length / share;
            } else {
                device_copy(a->direction, leading->directions + k * n, sizeof(float) * (size_t)n, model->stream);
            }
            if (alignment_difference(trainer, a, (float)(1e-3 * weights / length), batches)) return -1;
            leading_take(leading, k, a, model);
        }
    }
    return stream_check(model->stream);
}

// Notes where the first replica's weights are along the leading directions.
static void leading_watch(Trainer *trainer) {
    Leading *leading = &trainer->leading;
    const Stage *model = mesh_model(&trainer->mesh, 0);
    double coordinates[LEADING] = {0.0};
    const float *along = leading->directions;
    for (int k = 0; k < LEADING && along != NULL; k++)
        for (const Stage *stage = model; stage != NULL; along += stage->arena_floats, stage = stage->next)
            coordinates[k] += vector_dot(along, stage->params, stage->arena_floats, stage->stream);
    if (along != NULL) oscillation_add(&leading->swing, coordinates, LEADING);
}

// 1 if all stages of a model have bases.
static int model_has_basis(const Stage *model) {
    int has = 1;
    for (const Stage *stage = model; stage != NULL; stage = stage->next)
        has &= stage->rotation != NULL && stage->has_basis;
    return has;
}

// Both sums into the result, the second one once there are bases; how updates have swung along the leading directions
// found the last time; and those of now. Of the newest weights, as a synchronous pass sees them. Parameters and
// gradients are put back.
static int measure_alignment(Trainer *trainer, const Batch *batches, StepResult *result) {
    Stage *model = mesh_model(&trainer->mesh, 0);
    int asynchronous = trainer->mesh.asynchronous;
    Alignment a;
    trainer->mesh.asynchronous = 0;
    int failed = alignment_begin(&a, model) || alignment_measure(trainer, &a, 0, batches, &result->alignment[0]) ||
                 (model_has_basis(model) && alignment_measure(trainer, &a, 1, batches, &result->alignment[1])) ||
                 leading_find(trainer, &a, batches);
    trainer->mesh.asynchronous = asynchronous;
    result->swing = trainer->leading.swing;
    memset(&trainer->leading.swing, 0, sizeof trainer->leading.swing);
    if (!failed) model_put_grads(model, a.grads);
    alignment_free(&a);
    if (failed) return -1;
    leading_watch(trainer);
    return stream_check(trainer->stream);
}

// Multiplications and additions of the filter over a stage's block matrices.
static double filter_flops(const Stage *stage, const Anchor *anchor) {
    double flops = 0.0;
    for (int i = 0; i < stage->n_tensors; i++) {
        const Factor *f = &anchor->sets[0].of[stage->tensors[i].index];
        double m = f->m, n = f->n, r = f->r;
        if (stage->tensors[i].block) flops += 4.0 * m * n * r + 4.0 * r * r * fmin(m, n);
    }
    return flops;
}

// The same of the codec's bias.
static double correct_flops(const Stage *stage, const Anchor *anchor) {
    double flops = 0.0;
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *tensor = &stage->tensors[i];
        if (tensor->block) flops += 2.0 * (double)tensor->n * factor_rank(tensor, anchor->rank);
    }
    return flops;
}

// Adds the codec's bias to a cell's gradients, on its clock.
static void correct_cell(Trainer *trainer, Cell *cell) {
    Mesh *mesh = &trainer->mesh;
    double start = seconds();
    stage_correct(&cell->stage, &trainer->anchor, trainer->stream);
    if (cells_are_timed(mesh)) stream_wait(trainer->stream);
    cell_spend(mesh, cell, FLOW_UPDATE,
               mesh->device_flops > 0.0 ? correct_flops(&cell->stage, &trainer->anchor) / mesh->device_flops
                                        : seconds() - start);
}

// Adds the codec's bias to the gradients of every cell and takes their norms. The norm told is the first replica's.
static void measure_cells(Trainer *trainer, StepResult *result) {
    Mesh *mesh = &trainer->mesh;
    double squares = 0.0;
    result->finite = isfinite(result->loss);
    for (Cell *cell = mesh_next(mesh, NULL); cell != NULL; cell = mesh_next(mesh, cell)) {
        if (is_corrected(trainer)) correct_cell(trainer, cell);
        cell->grad_norm = stage_grad_norm(&cell->stage, trainer->stream);
        result->finite = result->finite && isfinite(cell->grad_norm);
        if (cell->replica == 0) squares += cell->grad_norm * cell->grad_norm;
    }
    result->grad_norm = mesh->n_stages == 1 ? mesh->cells[0].grad_norm : sqrt(squares);
}

// Filter and the optimizer's step of every cell.
//
// A loss or gradient that is not finite anywhere leaves out the updates of all cells of a synchronous step, which ends
// in a flush and is over for all of them alike. The stages of an asynchronous pipeline are not at the same micro-batch:
// when stage s of P finds out, the last one has updated by that one and by P-1-s more. So each stage decides by its own
// gradient and by nothing else; replicas that average every gradient find the same. A version of its weights is then
// the same as the one before, so that delays stay as they are.
static void update_cells(Trainer *trainer, StepResult *result) {
    const Options *opts = &trainer->opts;
    Mesh *mesh = &trainer->mesh;
    Progress *p = &trainer->progress;
    AdamW adam = {opts->beta1 >= 0.0f ? opts->beta1 : optimizer_beta1((OptimizerKind)opts->optimizer), opts->beta2,
                  opts->adam_eps};
    int filtered = is_filtered(trainer);
    for (Cell *cell = mesh_next(mesh, NULL); cell != NULL; cell = mesh_next(mesh, cell)) {
        double start = seconds();
        int skips = mesh->asynchronous ? !isfinite(cell->grad_norm) : !result->finite;
        result->skipped += skips;
        cell->skipped_in_a_row = skips ? cell->skipped_in_a_row + 1 : 0;
        if (skips) continue;
        cell->updates++;
        if (filtered) stage_filter(&cell->stage, &trainer->anchor, opts->alpha, trainer->stream);
        float lr = optimizer_lr(cell->stage.optimizer.kind, result->lr, cell->stage.delay, p->step, trainer->n_steps);
        stage_update(&cell->stage, adam, lr, opts->wd, cell->grad_norm, opts->clip, cell->updates, trainer->stream);
        if (cells_are_timed(mesh)) stream_wait(trainer->stream);
        double flops = update_flops(&cell->stage);
        if (filtered && opts->alpha != 1.0f) flops += filter_flops(&cell->stage, &trainer->anchor);
        cell_spend(mesh, cell, FLOW_UPDATE, mesh->device_flops > 0.0 ? flops / mesh->device_flops : seconds() - start);
    }
    p->adam_steps += result->skipped == 0;
}

static void clear_result(StepResult *result) {
    memset(result, 0, sizeof *result);
    for (int i = 0; i < 3; i++) result->probe[i] = (double)NAN;
    result->alignment[0] = result->alignment[1] = (double)NAN;
}

// The learning rate of a step.
static float step_lr(const Trainer *trainer, int64_t step) {
    const Options *opts = &trainer->opts;
    return lr_at((LrShape)opts->schedule_lr, opts->lr, opts->lr_final, step, trainer->warmup, trainer->n_steps);
}

// The next sequences of all replicas, and what their losses are divided by. Returns their targets.
static int64_t draw_batches(Trainer *trainer, Batch *batches) {
    Mesh *mesh = &trainer->mesh;
    int64_t valid = 0;
    next_batches(trainer, batches);
    for (int r = 0; r < mesh->n_replicas; r++) valid += batches[r].n_valid;
    for (int i = 0; i < mesh_cells(mesh); i++) {
        int64_t counted = trainer->dp == MESH_DP_DENSE ? valid : batches[mesh->cells[i].replica].n_valid;
        mesh->cells[i].grad_scale = counted > 0 ? 1.0f / (float)counted : 0.0f;
    }
    return valid;
}

// Begins a step: nothing is sent yet, the anchor is met, the batches and what their losses are divided by are there.
// Returns the targets of all replicas, or -1.
static int64_t begin_step(Trainer *trainer, Batch *batches, StepResult *result) {
    Mesh *mesh = &trainer->mesh;
    clear_result(result);
    for (int i = 0; i < mesh_cells(mesh); i++) memset(&mesh->cells[i].step, 0, sizeof mesh->cells[i].step);
    if (trainer->anchored && (is_node(trainer) ? node_meet_anchor(trainer) : meet_anchor(trainer, result))) return -1;
    int64_t valid = draw_batches(trainer, batches);
    result->lr = step_lr(trainer, trainer->progress.step);
    return valid;
}

// What is due of outer steps after `done` steps.
static int outer_steps(Trainer *trainer, int64_t done) {
    Mesh *mesh = &trainer->mesh;
    if (is_node(trainer)) return node_outer(trainer, done);
    if (mesh_outer(mesh, &trainer->outer, done)) return -1;
    return done == trainer->n_steps ? mesh_outer_finish(mesh, &trainer->outer) : 0;
}

// The update of a step whose gradients are there, and what follows it.
static int end_step(Trainer *trainer, StepResult *result) {
    Progress *p = &trainer->progress;
    Mesh *mesh = &trainer->mesh;
    for (Cell *cell = mesh_next(mesh, NULL); cell != NULL; cell = mesh_next(mesh, cell))
        stage_keep_version(&cell->stage, p->step);
    update_cells(trainer, result);
    p->step++;
    if (mesh->asynchronous && !is_node(trainer)) mesh_flow(mesh, p->step == trainer->n_steps);
    if (trainer->dp == MESH_DP_DILOCO && outer_steps(trainer, p->step)) return -1;
    for (Cell *cell = mesh_next(mesh, NULL); cell != NULL; cell = mesh_next(mesh, cell)) {
        for (int k = 0; k < TRAFFIC_KINDS; k++) {
            result->sent.bytes[k] += cell->step.bytes[k];
            cell->total.bytes[k] += cell->step.bytes[k];
        }
    }
    return stream_check(trainer->stream);
}

static int train_step(Trainer *trainer, Batch *batches, Probe *probe, StepResult *result, StepTimes *times) {
    const Options *opts = &trainer->opts;
    Mesh *mesh = &trainer->mesh;
    double loss = 0.0;
    int64_t step = trainer->progress.step, valid = begin_step(trainer, batches, result);
    Pass pass = {batches, step, 1, 1, times, 0};
    if (valid < 0 || mesh_run(mesh, 0, mesh->n_replicas, &pass)) return -1;
    for (int r = 0; r < mesh->n_replicas; r++) loss += mesh_cell(mesh, r, mesh->n_stages - 1)->loss_sum;
    result->loss = valid > 0 ? loss / (double)valid : 0.0;
    if (is_due(step, opts->probe) && probe_gradients(trainer, batches, probe, result)) return -1;
    if (is_due(step, opts->measure_alignment) && measure_alignment(trainer, batches, result)) return -1;
    if (trainer->dp == MESH_DP_DENSE && mesh_sum_gradients(mesh)) return -1;
    double start = seconds();
    measure_cells(trainer, result);
    if (end_step(trainer, result)) return -1;
    if (times != NULL) times->optimizer += seconds() - start;
    leading_watch(trainer);
    return 0;
}

// Prints a step: a live line on a terminal, a plain line elsewhere.
static void print_step(Trainer *trainer, const StepResult *result, double tok_s, double step_seconds) {
    Run *run = &trainer->run;
    long long step = (long long)trainer->progress.step, left = (long long)trainer->n_steps - step;
    int eta = (int)fmin((double)left * step_seconds, 3.6e8);
    char line[256];
    snprintf(line, sizeof line, "step %lld/%lld  loss %.4f  lr %.2e  norm %.3f  %.0f tok/s  ETA %d:%02d:%02d", step,
             (long long)trainer->n_steps, result->loss, (double)result->lr, result->grad_norm, tok_s, eta / 3600,
             eta / 60 % 60, eta % 60);
    if (run->terminal) {
        printf("\r\033[K\033[?7l%s\033[?7h", line); // what is too long is cut, not wrapped
        run->live = 1;
    } else {
        printf("%s\n", line);
    }
    fflush(stdout);
}

static void print_validation(Trainer *trainer, int64_t step, double loss, double bits_per_byte) {
    run_clear_line(&trainer->run);
    printf("step %lld  validation loss %.4f", (long long)step, loss);
    if (isfinite(bits_per_byte)) printf("  %.4f bits a byte", bits_per_byte);
    printf("\n");
    fflush(stdout);
}

// Validation loss, printed; keeps the best weights. *loss is NaN when there is no held-out data.
static int validate(Trainer *trainer, double *loss) {
    Evaluation eval;
    *loss = (double)NAN;
    if (trainer->data.val.n_windows == 0) return 0;
    if (evaluate(mesh_model(&trainer->mesh, 0), &trainer->data, &trainer->tokenizer, trainer->opts.val_tokens, NULL,
                 NULL, &eval, trainer->stream))
        return -1;
    *loss = eval.loss;
    print_validation(trainer, trainer->progress.step, eval.loss, eval.bits_per_byte);
    if (!(eval.loss < trainer->progress.best_val)) return 0;
    if (trainer->progress.step > 0 && run_save_best(trainer))
        printf("train: %s; the run goes on\n", error_message);
    else
        trainer->progress.best_val = eval.loss;
    return 0;
}

static int print_sample(Trainer *trainer) {
    static const char prompt[] = "";
    run_clear_line(&trainer->run);
    printf("--- sample at step %lld\n", (long long)trainer->progress.step);
    int result =
        generate(mesh_model(&trainer->mesh, 0), &trainer->tokenizer, prompt, &trainer->opts, stdout, trainer->stream);
    printf("\n---\n");
    return result;
}

enum { MAX_SKIPPED = 20 }; // steps in a row without a cell's update before the run gives up

// What is safe on the disk, in words.
static const char *saved_text(const Run *run, char *text, size_t size) {
    if (run->saved_step >= 0)
        snprintf(text, size, "step %lld is whole", (long long)run->saved_step);
    else
        snprintf(text, size, "nothing is saved yet");
    return text;
}

// Says which step was not an update of all weights.
static void print_skipped(Trainer *trainer, const StepResult *result) {
    const Progress *p = &trainer->progress;
    const Mesh *mesh = &trainer->mesh;
    run_clear_line(&trainer->run);
    if (mesh->asynchronous)
        printf("step %lld: the gradient is not finite in %d of %d cells; their updates skipped", (long long)p->step,
               result->skipped, mesh_cells(mesh));
    else
        printf("step %lld: loss or gradient is not finite; update skipped", (long long)p->step);
    printf(" (%lld in all)\n", (long long)(p->step - p->adam_steps));
}

// The cell that has been without an update for too long, or NULL.
static const Cell *stuck_cell(const Mesh *mesh) {
    for (int i = 0; i < mesh_cells(mesh); i++)
        if (mesh->cells[i].skipped_in_a_row >= MAX_SKIPPED) return &mesh->cells[i];
    return NULL;
}

// Ends a run whose gradients stay infinite. The skipped updates left the weights as they were, so they are saved.
static int give_up(Trainer *trainer, const Cell *stuck) {
    char text[64], who[64] = "", reason[ERROR_MAX] = "";
    if (trainer->mesh.asynchronous) snprintf(who, sizeof who, "replica %d stage %d: ", stuck->replica, stuck->index);
    if (run_save(trainer)) snprintf(reason, sizeof reason, " (%.700s)", error_message);
    return error_set("%s%d steps in a row gave no finite gradient; stopped, %s%.800s", who, MAX_SKIPPED,
                     saved_text(&trainer->run, text, sizeof text), reason);
}

static int64_t step_tokens(const Trainer *trainer) {
    return (int64_t)trainer->mesh.n_replicas * trainer->opts.batch * trainer->T;
}

// Bytes a cell of the fast circuit sends for a token of its replica, on average over the cells: what one uplink
// carries.
static double bytes_per_token(const Trainer *trainer, int64_t n_bytes, int64_t n_tokens) {
    return n_tokens > 0 ? (double)n_bytes / trainer->mesh.n_stages / (double)n_tokens : 0.0;
}

// The versions of weights that a step's micro-batch saw in each stage, [forward, backward]. All replicas' are the same.
static json_t *versions_to_json(const Mesh *mesh) {
    json_t *list = json_array();
    for (int s = 0; s < mesh->n_stages; s++) {
        const Cell *cell = mesh_cell(mesh, 0, s);
        json_array_append_new(
            list, json_pack("[I, I]", (json_int_t)cell->forward_version, (json_int_t)cell->backward_version));
    }
    return list;
}

// The cells that left out their update, as numbers in the order of the log's cells; of a synchronous step true, for
// all.
static json_t *skipped_to_json(const Mesh *mesh) {
    if (!mesh->asynchronous) return json_true();
    json_t *list = json_array();
    for (int i = 0; i < mesh_cells(mesh); i++)
        if (mesh->cells[i].skipped_in_a_row > 0) json_array_append_new(list, json_integer(i));
    return list;
}

// A step's line in the log. Traffic in bytes: of all cells, and for each cell [forward, backward, dp, anchor].
static json_t *step_to_json(Trainer *trainer, const StepResult *result, double tok_s) {
    const Progress *p = &trainer->progress;
    const Mesh *mesh = &trainer->mesh;
    const int64_t *sent = result->sent.bytes;
    json_t *line =
        json_pack("{s:I, s:o, s:f, s:o, s:I, s:f, s:f}", "step", (json_int_t)p->step, "loss",
                  real_or_null(result->loss), "lr", (double)result->lr, "grad_norm", real_or_null(result->grad_norm),
                  "tokens", (json_int_t)p->tokens, "tok_s", tok_s, "elapsed", p->elapsed);
    if (result->skipped > 0) json_object_set_new(line, "skipped", skipped_to_json(mesh));
    if (mesh->asynchronous) json_object_set_new(line, "versions", versions_to_json(mesh));
    if (result->delivered)
        json_object_set_new(line, "anchor",
                            json_pack("{s:I, s:f, s:f}", "snapshot", (json_int_t)trainer->anchor.delivered, "loss",
                                      trainer->anchor.delivered_loss, "seconds", trainer->anchor.delivered_seconds));
    if (result->delivered && trainer->anchor.learns)
        json_object_set_new(line, "tables", learner_reports(&trainer->anchor.learner));
    if (isfinite(result->probe[0]))
        json_object_set_new(line, "cosine",
                            json_pack("{s:f, s:f, s:f}", "all", result->probe[0], "blocks", result->probe[1],
                                      "filtered", result->probe[2]));
    if (isfinite(result->alignment[0]))
        json_object_set_new(
            line, "hessian_sizes",
            json_pack("{s:f, s:o}", "raw", result->alignment[0], "rotated", real_or_null(result->alignment[1])));
    if (result->swing.signs > 0)
        json_object_set_new(line, "oscillation",
                            json_pack("{s:f, s:o, s:o}", "flips", oscillation_flips(&result->swing), "cosine",
                                      real_or_null(oscillation_cosine(&result->swing)), "travel",
                                      real_or_null(oscillation_travel(&result->swing))));
    if (mesh_cells(mesh) == 1 && !trainer->anchored) return line;
    json_t *cells = json_array();
    int64_t all = sent[0] + sent[1] + sent[2] + sent[3];
    for (int i = 0; i < mesh_cells(mesh); i++) {
        const int64_t *bytes = mesh->cells[i].step.bytes;
        json_array_append_new(cells, json_pack("[I,I,I,I]", (json_int_t)bytes[0], (json_int_t)bytes[1],
                                               (json_int_t)bytes[2], (json_int_t)bytes[3]));
    }
    json_object_set_new(line, "bytes",
                        json_pack("{s:I, s:I, s:I, s:I, s:f, s:o}", "forward", (json_int_t)sent[0], "backward",
                                  (json_int_t)sent[1], "dp", (json_int_t)sent[2], "anchor", (json_int_t)sent[3],
                                  "per_token", bytes_per_token(trainer, all, step_tokens(trainer)), "cells", cells));
    double now = mesh_now(mesh);
    json_object_set_new(line, "sim_elapsed", json_real(now));
    json_object_set_new(line, "sim_tok_s", json_real(now > 0.0 ? (double)p->tokens / now : 0.0));
    return line;
}

// With --probe: held-out loss behind masked boundaries, beside the unmasked one.
static int probe_validation(Trainer *trainer, json_t *line) {
    Evaluation eval;
    MaskedEvaluation masked = {&trainer->mesh, 0};
    if (trainer->data.val.n_windows == 0 || trainer->mesh.n_stages == 1) return 0;
    if (evaluate(mesh_model(&trainer->mesh, 0), &trainer->data, &trainer->tokenizer, trainer->opts.val_tokens,
                 pass_masked, &masked, &eval, trainer->stream))
        return -1;
    json_object_set_new(line, "val_loss_masked", real_or_null(eval.loss));
    return 0;
}

// What travelled, at the end of a run of several cells.
static void print_traffic(const Trainer *trainer) {
    static const char *const names[TRAFFIC_KINDS] = {"forward", "backward", "replicas", "anchor"};
    const Mesh *mesh = &trainer->mesh;
    const Anchor *anchor = &trainer->anchor;
    int64_t kinds[TRAFFIC_KINDS] = {0, 0, 0, anchor->factor_bytes}, all = 0, tokens = trainer->progress.tokens;
    if (mesh_cells(mesh) == 1 && !trainer->anchored) return;
    printf("traffic, MB sent    %12s %12s %12s %12s\n", names[0], names[1], names[2], names[3]);
    for (int i = 0; i < mesh_cells(mesh); i++) {
        const Cell *cell = &mesh->cells[i];
        printf("  replica %d stage %d ", cell->replica, cell->index);
        for (int k = 0; k < TRAFFIC_KINDS; k++) {
            printf(" %12.3f", 1e-6 * (double)cell->total.bytes[k]);
            kinds[k] += cell->total.bytes[k];
        }
        printf("\n");
    }
    if (trainer->anchored)
        printf("  anchor            %12.3f %12.3f %12s %12.3f\n", 1e-6 * (double)anchor->boundary_bytes[0],
               1e-6 * (double)anchor->boundary_bytes[1], "", 1e-6 * (double)anchor->factor_bytes);
    printf("  bytes a token    ");
    for (int k = 0; k < TRAFFIC_KINDS; k++) {
        printf(" %12.1f", bytes_per_token(trainer, kinds[k], tokens));
        all += kinds[k];
    }
    printf("\n  in all %.1f bytes a token and cell; simulated: %.1f s, %.0f tokens/s\n",
           bytes_per_token(trainer, all, tokens), mesh_now(mesh),
           mesh_now(mesh) > 0.0 ? (double)tokens / mesh_now(mesh) : 0.0);
}

// The last words of a run whose state is saved.
static void print_end(const Trainer *trainer) {
    int adapted = trainer->config.lora.rank > 0;
    const Progress *p = &trainer->progress;
    print_traffic(trainer);
    if (p->step < trainer->n_steps)
        printf("stopped after step %lld of %lld, saved; go on with: ./train -o %s --resume\n", (long long)p->step,
               (long long)trainer->n_steps, trainer->run.path);
    else
        printf("done: %lld steps in %.0f s; the %s %s/latest%s\n", (long long)p->step, p->elapsed,
               adapted ? "adapters are" : "model is", trainer->run.path, adapted ? "" : "/model.bin");
}

static int train_loop(Trainer *trainer, Batch *batches, Probe *probe) {
    const Options *opts = &trainer->opts;
    Progress *p = &trainer->progress;
    Run *run = &trainer->run;
    int64_t stop = opts->stop_after > 0 && opts->stop_after < trainer->n_steps ? opts->stop_after : trainer->n_steps;
    double val_loss, step_seconds = 0.0;
    char text[64], reason[ERROR_MAX];
    if (p->step == 0) {
        if (validate(trainer, &val_loss)) return -1;
        if (isfinite(val_loss)) run_append(run, json_pack("{s:i, s:f}", "step", 0, "val_loss", val_loss));
    }
    while (p->step < stop && !interrupts) {
        StepResult result;
        double start = seconds();
        if (train_step(trainer, batches, probe, &result, NULL)) return -1;
        double took = seconds() - start;
        step_seconds = step_seconds == 0.0 ? took : 0.9 * step_seconds + 0.1 * took;
        p->elapsed += took;
        double tok_s = (double)step_tokens(trainer) / took;
        print_step(trainer, &result, tok_s, step_seconds);
        if (result.skipped > 0) print_skipped(trainer, &result);
        json_t *line = step_to_json(trainer, &result, tok_s);
        if (is_due(p->step, trainer->val_every) || p->step == trainer->n_steps) {
            if (validate(trainer, &val_loss)) return -1;
            if (isfinite(val_loss)) json_object_set_new(line, "val_loss", json_real(val_loss));
            if (opts->probe > 0 && probe_validation(trainer, line)) return -1;
        }
        run_append(run, line);
        const Cell *stuck = stuck_cell(&trainer->mesh);
        if (stuck != NULL) return give_up(trainer, stuck);
        if (is_due(p->step, opts->sample_every) && print_sample(trainer)) return -1;
        if (is_due(p->step, trainer->save_every) && p->step < stop && run_save(trainer)) {
            run_clear_line(run);
            printf("train: %s; %s; training goes on\n", error_message, saved_text(run, text, sizeof text));
        }
    }
    run_clear_line(run);
    if (run_save(trainer)) {
        memcpy(reason, error_message, sizeof reason);
        return error_set("%.700s; %s", reason, saved_text(run, text, sizeof text));
    }
    print_end(trainer);
    return 0;
}

static void batches_free(Batch *batches, int n) {
    for (int r = 0; r < n; r++) batch_free(&batches[r]);
    free(batches);
}

// Batches of all replicas.
static Batch *batches_alloc(const Trainer *trainer) {
    int n = trainer->mesh.n_replicas, failed = 0;
    Batch *batches = (Batch *)calloc((size_t)n, sizeof(Batch));
    for (int r = 0; r < n && batches != NULL; r++) failed |= batch_alloc(&batches[r], trainer->opts.batch, trainer->T);
    if (batches != NULL && !failed) return batches;
    if (batches != NULL) batches_free(batches, n);
    error_set("out of memory for batches");
    return NULL;
}

// The whole of a training once model and data are loaded.
static int train(Trainer *trainer, const json_t *resume) {
    Run *run = &trainer->run;
    Probe probe = {NULL, NULL};
    int resumed = json_object_get(resume, "step") != NULL;
    run->terminal = isatty(STDOUT_FILENO), run->saved_step = -1;
    trainer->progress.best_val = (double)INFINITY;
    if (resume == NULL && run_create(run, &trainer->opts)) return -1;
    if (resumed && resume_state(trainer, resume)) return -1;
    if (trainer->progress.step >= trainer->n_steps) {
        printf("%s is complete: %lld of %lld steps; a larger -n goes on\n", run->path,
               (long long)trainer->progress.step, (long long)trainer->n_steps);
        return 0;
    }
    checkpoint_sweep(run->path, 0);
    if (run_open_log(run, resume != NULL ? trainer->progress.step : -1)) return -1;
    run_log_start(trainer, resumed ? "resume" : "start");
    catch_interrupts();
    printf("run: %s\n", run->path);
    Batch *batches = batches_alloc(trainer);
    int result = batches == NULL ? -1 : train_loop(trainer, batches, &probe);
    if (batches != NULL) batches_free(batches, trainer->mesh.n_replicas);
    device_free(probe.fast);
    device_free(probe.whole);
    if (run->log != NULL) fclose(run->log);
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Joining: a process that has one cell of a mesh, or its anchor. It asks the coordinator to join, gets a role and the
// settings, makes room, is placed at a step with the state of its cell, and trains: the same steps as in one process,
// but that it waits for the others at gates. Of every step, or boundary between two, in this order:
//
//   GATE_DUE            asynchronous: an average that is due is here
//   GATE_AVERAGES + f   an average that ends where it begins is here
//   GATE_FINISH + f     the same at the end of the run
//   GATE_SAVE           what a shard needs is here
//   GATE_HOLD           the same, before all are placed anew
//   GATE_FACTORS        whether a snapshot's factors are here; they are used if all say so
//   GATE_GRADIENTS      --dp dense: the averages are here
//   GATE_STEP           loss and norm; averages that are due are here. What opens it says how it goes on

enum {
    GATE_DUE,
    GATE_AVERAGES,
    GATE_FINISH = GATE_AVERAGES + MAX_FRAGMENTS,
    GATE_SAVE = GATE_FINISH + MAX_FRAGMENTS,
    GATE_HOLD,
    GATE_FACTORS,
    GATE_GRADIENTS,
    GATE_STEP,
    GATES
};

typedef enum { THEN_RUN, THEN_HOLD, THEN_STOP } ThenKind; // wait to be placed; save and end

static int64_t gate_number(int64_t step, int gate) {
    return step * GATES + gate;
}

// The cell of this process, NULL: it has the anchor.
static Cell *node_cell(const Trainer *trainer) {
    return mesh_next(&trainer->mesh, NULL);
}

// The averages of its stage, NULL: there are none.
static Meeting *node_meeting(const Trainer *trainer) {
    const Cell *cell = node_cell(trainer);
    return cell != NULL && trainer->mesh.meetings != NULL ? &trainer->mesh.meetings[cell->index] : NULL;
}

// Tells the coordinator something; takes over the reference.
static int node_tell(Node *node, const char *type, json_t *about) {
    json_object_set_new(about, "type", json_string(type));
    return send_order(node->net, NODE_COORDINATOR, about);
}

// What an opened gate says about the run: who takes sequences, whether there is an anchor, what follows.
static int node_heed(Node *node, const json_t *go) {
    node->has_anchor = json_is_true(json_object_get(go, "anchor"));
    node->is_stale = json_is_true(json_object_get(go, "stale"));
    node->then = (int)json_integer_value(json_object_get(go, "then"));
    int kind = (int)((json_integer_value(json_object_get(go, "gate")) + GATES) % GATES); // the first of a run is -1
    // Asynchronous stages go through these at different steps, and who leads must be the same for all.
    if (node->mesh->asynchronous && (kind < GATE_SAVE || kind == GATE_GRADIENTS)) return 0;
    return read_members(json_object_get(go, "living"), node->drawing, node->mesh->n_replicas);
}

// Waits until the average at work is complete.
static int node_wait_average(const Trainer *trainer) {
    const Meeting *meeting = node_meeting(trainer);
    while (!meeting_complete(meeting))
        if (node_poll(trainer->node, 1) < 0) return -1;
    return 0;
}

// Reports at a gate and waits until it opens; should replicas be lost meanwhile, once more. waits: the average at work
// must be complete before. Takes over report. Returns what opened the gate, which the caller frees, or NULL.
static json_t *node_agree(Trainer *trainer, int gate, json_t *report, int waits) {
    Node *node = trainer->node;
    int64_t number = gate_number(trainer->progress.step, gate);
    int failed = report == NULL || cell_flush(&trainer->mesh, node_cell(trainer)); // nobody is to wait for it at a gate
    json_object_set_new(report, "gate", json_integer((json_int_t)number));
    while (!failed && node->open < number) {
        failed = waits && node_wait_average(trainer);
        int turn = node->turn;
        json_object_set_new(report, "turn", json_integer(turn));
        if (!failed) failed = node_tell(node, "report", json_deep_copy(report));
        while (!failed && node->open < number && node->turn == turn)
            failed = node_poll(node, 1) < 0 && node->open < number;
    }
    json_decref(report);
    if (failed || node_heed(node, node->go)) return NULL;
    json_t *go = node->go;
    node->go = NULL;
    return go;
}

// --- Averages

// Goes on with the average at work as far as it can; anew, should replicas be lost. idle of a node.
static int node_average(void *context) {
    Trainer *trainer = (Trainer *)context;
    Node *node = trainer->node;
    Mesh *mesh = &trainer->mesh;
    Meeting *meeting = node_meeting(trainer);
    int moved = 1;
    if (meeting == NULL || !meeting->is_open || node->interrupted) return 0;
    if (node->average_turn != node->turn) {
        node->average_turn = node->turn;
        if (meeting_restart(mesh, meeting)) return -1;
        node_connect_meeting(node, meeting);
        if (node_sort(node)) return -1;
    }
    while (moved > 0) moved = meeting_advance(mesh, meeting);
    return moved;
}

static int node_begin_average(Trainer *trainer, const Outer *outer, int fragment, int64_t turn) {
    Node *node = trainer->node;
    Meeting *meeting = node_meeting(trainer);
    if (meeting_begin(&trainer->mesh, meeting, outer, node_cell(trainer)->index, fragment, turn)) return -1;
    node->average = (node->average + 1) & 0xFFFF, node->average_turn = node->turn;
    node_connect_meeting(node, meeting);
    return node_sort(node) || node_average(trainer) ? -1 : 0;
}

// The end of an average that all have.
static int node_settle(Trainer *trainer, const Outer *outer, int gate) {
    json_t *go = node_agree(trainer, gate, json_object(), 1);
    if (go == NULL) return -1;
    json_decref(go);
    return meeting_commit(&trainer->mesh, node_meeting(trainer), outer);
}

// 1 if there is an average at work that must end before `done` steps are done: it is merged then, or another begins.
static int node_average_due(const Trainer *trainer, int64_t done) {
    const Meeting *meeting = node_meeting(trainer);
    const Outer *outer = &trainer->outer;
    if (meeting == NULL || !meeting->is_open) return 0;
    int due = done == trainer->n_steps || done >= outer->begun[meeting->fragment] + outer->overlap;
    for (int f = 0; f < outer->n_fragments; f++) due |= outer_begins(outer, f, done);
    return due;
}

// --dp dense over several processes (mesh_sum_gradients).
static int node_sum_gradients(Trainer *trainer) {
    return node_begin_average(trainer, NULL, ALL_GRADIENTS, 0) || node_settle(trainer, NULL, GATE_GRADIENTS) ? -1 : 0;
}

// The outer steps that are due after `done` local steps, over several processes (mesh_outer, mesh_outer_finish).
static int node_outer(Trainer *trainer, int64_t done) {
    Outer *outer = &trainer->outer;
    Mesh *mesh = &trainer->mesh;
    if (mesh->asynchronous && node_average_due(trainer, done) && node_settle(trainer, outer, GATE_DUE)) return -1;
    for (int f = 0; f < outer->n_fragments; f++) {
        if (outer_begins(outer, f, done)) {
            if (node_begin_average(trainer, outer, f, f + done / outer->local_steps)) return -1;
            outer->begun[f] = done;
            int ends = outer->overlap == 0 || done == trainer->n_steps;
            if (ends && node_settle(trainer, outer, GATE_AVERAGES + f)) return -1;
        }
        if (!outer_merges(outer, f, done)) continue;
        mesh_merge(mesh, outer, f, outer->mix);
        outer->begun[f] = 0;
    }
    for (int f = 0; f < outer->n_fragments && done == trainer->n_steps; f++) {
        if (outer->begun[f] > 0) mesh_merge(mesh, outer, f, outer->mix);
        outer->begun[f] = 0;
        if (node_begin_average(trainer, outer, f, f) || node_settle(trainer, outer, GATE_FINISH + f)) return -1;
        mesh_merge(mesh, outer, f, 0.0f);
    }
    return 0;
}

// --- The anchor, as a cell sees it

static int anchor_role(const Trainer *trainer) {
    return mesh_cells(&trainer->mesh);
}

// Sends n values of tensor memory in pieces, as bf16 or whole. Returns bytes, or -1.
static int64_t node_send_values(Trainer *trainer, uint64_t channel, Wire wire, Stored values, int64_t n) {
    Mesh *mesh = &trainer->mesh;
    Codec codec = mesh->codec;
    int64_t most = mesh->message_bytes / 4,
            piece = values.store == STORE_FP32 || most < STORE_PIECE ? most : STORE_PIECE;
    int64_t sent = 0;
    float *scratch = values.store == STORE_FP32 ? NULL : wide_scratch(piece, trainer->stream);
    if (values.store != STORE_FP32 && scratch == NULL) return -1;
    codec.wire = wire;
    for (int64_t at = 0; at < n; at += piece) {
        int64_t count = n - at < piece ? n - at : piece;
        float *room = scratch;
        const float *from = stored_open(values, at, count, &room, trainer->stream);
        int64_t n_bytes = codec_encode_fp32(&codec, from, count, mesh->message, mesh->message_bytes, trainer->stream);
        if (n_bytes < 0 || node_carry(trainer->node, channel, mesh->message, n_bytes)) return -1;
        if (node_throttle(trainer->node, channel_parts(channel).to)) return -1;
        sent += n_bytes;
    }
    return sent;
}

// Gives the anchor the next snapshot: the leading replica sends its weights, the others only know of it.
static int node_launch(Trainer *trainer) {
    Node *node = trainer->node;
    Cell *cell = node_cell(trainer);
    Stage *stage = &cell->stage;
    int follows = anchor_follows(trainer), lead = 0;
    int64_t step = trainer->progress.step, sent;
    uint64_t channel = channel_number(CHANNEL_SNAPSHOT, node->role, anchor_role(trainer), 0);
    trainer->anchor.launched = node->has_anchor ? step : -1;
    while (!node->drawing[lead]) lead++;
    node->launched_from = lead;
    if (cell->replica != lead || !node->has_anchor) return 0;
    if (node_carry(node, channel, &step, sizeof step)) return -1;
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        Stored from = stage_values(stage, follows ? ARENA_GLOBAL : ARENA_PARAMS, t);
        sent = node_send_values(trainer, channel, follows ? WIRE_FP32 : trainer->anchor.wire, from, t->n);
        if (sent < 0) return -1;
        cell->step.bytes[TRAFFIC_ANCHOR] += sent;
    }
    return 0;
}

// What a message of factors begins with.
typedef struct {
    int64_t snapshot, useless, coded_passes;
    double loss, seconds;
} FactorsHead;

// Appends n floats of tensor memory as they travel.
static int pack_floats(Packer *packer, const Trainer *trainer, const float *values, int64_t n) {
    int64_t n_bytes = n * codec_size(&trainer->mesh.codec);
    void *room = pack_room(packer, n_bytes);
    return room == NULL || codec_encode_fp32(&trainer->mesh.codec, values, n, room, n_bytes, trainer->stream) < 0 ? -1
                                                                                                                  : 0;
}

static int unpack_floats(Unpacker *unpacker, const Trainer *trainer, float *values, int64_t n) {
    int64_t n_bytes = n * codec_size(&trainer->mesh.codec);
    const void *bytes = unpack(unpacker, n_bytes);
    return bytes == NULL ? -1 : codec_decode_fp32(&trainer->mesh.codec, bytes, n_bytes, values, n, trainer->stream);
}

// What concerns a stage of the factors in use, or of the new ones, as a message: of the filter U, V and its response,
// of the codec's bias U diag(s) and V; then the tables of the boundaries around it.
static int pack_factors(Packer *packer, const Trainer *trainer, const Stage *stage, int in_use) {
    const Anchor *anchor = &trainer->anchor;
    const Learner *learner = &anchor->learner;
    int set = in_use ? anchor->front : 1 - anchor->front, useless = !in_use && anchor->useless;
    FactorsHead head = {in_use ? anchor->delivered : anchor->launched, useless, anchor->coded_passes, anchor->loss,
                        anchor->seconds};
    pack(packer, &head, sizeof head);
    if (useless) return packer->failed ? -1 : 0;
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        if (!t->block) continue;
        if (anchor->filters) {
            const Factor *f = &anchor->sets[set].of[t->index];
            if (pack_floats(packer, trainer, f->u, (int64_t)f->m * f->r)) return -1;
            if (pack_floats(packer, trainer, f->v, (int64_t)f->n * f->r)) return -1;
            void *room = pack_room(packer, 4 * f->r);
            if (room == NULL) return -1;
            device_copy(room, f->d, sizeof(float) * (size_t)f->r, trainer->stream);
        }
        if (anchor->corrects) {
            const Factor *f = &anchor->bias[set].of[t->index];
            if (pack_floats(packer, trainer, f->u, (int64_t)f->m * f->r)) return -1;
            if (pack_floats(packer, trainer, f->v, (int64_t)f->n * f->r)) return -1;
        }
    }
    for (int b = stage->position - 1; b <= stage->position; b++) {
        for (int d = 0; d < 2 && b >= 0 && b < learner->n_boundaries; d++) {
            const KltTable *table = &trainer->mesh.klt[0].tables[2 * b + d];
            const unsigned char *blob = in_use ? table->blob : learner->blobs[2 * b + d];
            int64_t n_bytes = blob == NULL ? 0 : in_use ? table->n_bytes : learner->blob_bytes[2 * b + d];
            pack(packer, &n_bytes, sizeof n_bytes);
            pack(packer, blob, n_bytes);
        }
    }
    return packer->failed ? -1 : 0;
}

// A table of the message, into use or passed over.
static int unpack_table(Unpacker *unpacker, Trainer *trainer, int table, int uses) {
    Learner *learner = &trainer->anchor.learner;
    int64_t n_bytes;
    if (unpack_to(unpacker, &n_bytes, sizeof n_bytes)) return -1;
    const void *bytes = unpack(unpacker, n_bytes);
    if (bytes == NULL) return -1;
    return n_bytes > 0 && uses ? learner_use_table(&trainer->mesh, learner, table, bytes, n_bytes) : 0;
}

// Factors of U and V, into use or passed over.
static int unpack_factor(Unpacker *unpacker, const Trainer *trainer, const Factor *f, int uses) {
    int64_t m = (int64_t)f->m * f->r, n = (int64_t)f->n * f->r;
    if (!uses) return unpack(unpacker, (m + n) * codec_size(&trainer->mesh.codec)) == NULL ? -1 : 0;
    return unpack_floats(unpacker, trainer, f->u, m) || unpack_floats(unpacker, trainer, f->v, n) ? -1 : 0;
}

// What of a message of factors is taken into use: an asynchronous pipeline's forwards are ahead.
enum { FACTORS_FORWARD = 1 /* tables of states */, FACTORS_REST = 2, FACTORS_ALL = 3 };

// Takes a message of factors into use, or a part of it.
static int node_use_factors(Trainer *trainer, const NetEvent *event, int parts) {
    Anchor *anchor = &trainer->anchor;
    const Learner *learner = &anchor->learner;
    const Stage *stage = &node_cell(trainer)->stage;
    Unpacker unpacker = {event->data, event->n_bytes, 0};
    FactorsHead head;
    int to = 1 - anchor->front, rest = (parts & FACTORS_REST) != 0;
    if (unpack_to(&unpacker, &head, sizeof head)) return -1;
    if (head.useless) return 0;
    for (int i = 0; i < stage->n_tensors; i++) {
        const Tensor *t = &stage->tensors[i];
        if (!t->block) continue;
        if (anchor->filters) {
            const Factor *f = &anchor->sets[to].of[t->index];
            if (unpack_factor(&unpacker, trainer, f, rest)) return -1;
            const void *d = unpack(&unpacker, 4 * f->r);
            if (d == NULL) return -1;
            if (rest) device_copy(f->d, d, sizeof(float) * (size_t)f->r, trainer->stream);
        }
        if (anchor->corrects && unpack_factor(&unpacker, trainer, &anchor->bias[to].of[t->index], rest)) return -1;
    }
    for (int b = stage->position - 1; b <= stage->position; b++)
        for (int d = 0; d < 2 && b >= 0 && b < learner->n_boundaries; d++)
            if (unpack_table(&unpacker, trainer, 2 * b + d,
                             parts & (d == CODEC_FORWARD ? FACTORS_FORWARD : FACTORS_REST)))
                return -1;
    stream_wait(trainer->stream); // the message is gone then
    if (!rest) return 0;
    anchor->front = to, anchor->deliveries++, anchor->delivered = head.snapshot;
    anchor->coded_passes = head.coded_passes;
    return 0;
}

// 1 if the snapshot at work gives no factors: its replica was lost before it was whole.
static int node_is_skipped(const Trainer *trainer) {
    const Node *node = trainer->node;
    int from = node->launched_from;
    return from >= 0 && trainer->anchor.launched > node->lost_after[from];
}

// The factors of the snapshot at work, if they are here. waits: until they are, or are known never to come.
static int node_find_factors(Trainer *trainer, int waits) {
    Node *node = trainer->node;
    int64_t snapshot = trainer->anchor.launched, of;
    for (;;) {
        Parcel *parcel = node->factors != NULL ? NULL : parcels_take(&node->inbox, CHANNEL_FACTORS, -1);
        if (parcel != NULL && parcel->event.n_bytes >= (int64_t)sizeof of) {
            memcpy(&of, parcel->event.data, sizeof of);
            if (of == snapshot)
                node->factors = parcel;
            else
                parcel_free(parcel); // of a snapshot that is not waited for any more
            continue;
        }
        parcel_free(parcel);
        if (node->factors != NULL || !waits || node_is_skipped(trainer) || !node->anchor_up) return 0;
        if (node_poll(node, 1) < 0) return -1;
    }
}

// Takes the factors of the snapshot at work into use if all have them. waits: they are due.
static int node_take_delivery(Trainer *trainer, int waits) {
    Node *node = trainer->node;
    Anchor *anchor = &trainer->anchor;
    if (node_find_factors(trainer, waits)) return -1;
    json_t *go =
        node_agree(trainer, GATE_FACTORS,
                   json_pack("{s:I, s:b}", "factors", (json_int_t)(node->factors != NULL ? anchor->launched : -1),
                             "skipped", node_is_skipped(trainer)),
                   0);
    if (go == NULL) return -1;
    int taken = json_is_true(json_object_get(go, "deliver")), failed = 0;
    int over = taken || waits || json_is_true(json_object_get(go, "skip"));
    json_decref(go);
    if (taken && node->factors == NULL) return error_set("the coordinator wants factors to be used that are not here");
    if (taken) failed = node_use_factors(trainer, &node->factors->event, FACTORS_ALL);
    if (over) {
        parcel_free(node->factors);
        node->factors = NULL, anchor->launched = -1;
    }
    return failed;
}

// Before a step, over several processes (meet_anchor).
static int node_meet_anchor(Trainer *trainer) {
    Anchor *anchor = &trainer->anchor;
    int due = trainer->anchor_delay > 0 && anchor->launched >= 0 &&
              trainer->progress.step >= delivery_step(trainer, anchor->launched);
    if (anchor->launched >= 0) {
        if (trainer->anchor_delay > 0 && !due) return 0;
        if (node_take_delivery(trainer, due)) return -1;
        if (anchor->launched >= 0) return 0;                // not yet
    } else if (anchor->learns && anchor->deliveries == 0) { // boundaries need tables from the first step on
        if (node_launch(trainer) || node_take_delivery(trainer, 1)) return -1;
        if (anchor->deliveries == 0) return error_set("the anchor gives no tables to begin with");
    }
    return node_launch(trainer);
}

// --- The anchor's own process

// Elements at .. at+n-1 of what is kept = the values of a message.
static int node_take_piece(Trainer *trainer, const Codec *codec, const Parcel *parcel, Stored values, int64_t at,
                           int64_t n) {
    Stream *stream = trainer->stream;
    float *room = values.store == STORE_FP32 ? (float *)values.data + at : wide_scratch(n, stream);
    if (room == NULL || codec_decode_fp32(codec, parcel->event.data, parcel->event.n_bytes, room, n, stream)) return -1;
    stored_close(values, at, room, n, rounding_nearest(), stream);
    return 0;
}

// n values from a role into tensor memory, as they travel (wire) or whole. 1: the role is out of the run meanwhile.
static int node_take_values(Trainer *trainer, int from, Wire wire, Stored values, int64_t n) {
    Mesh *mesh = &trainer->mesh;
    Codec codec = mesh->codec;
    codec.wire = wire;
    for (int64_t at = 0; at < n;) {
        Parcel *parcel = parcels_take(&trainer->node->inbox, CHANNEL_SNAPSHOT, from);
        if (parcel == NULL) {
            if (!mesh->living[from / mesh->n_stages]) return 1;
            if (node_poll(trainer->node, 1) < 0) return -1;
            continue;
        }
        int64_t count = parcel->event.n_bytes / codec_size(&codec);
        int failed = count < 1 || count > n - at ? error_set("role %d sends %lld weights where %lld are left", from,
                                                             (long long)count, (long long)(n - at))
                                                 : node_take_piece(trainer, &codec, parcel, values, at, count);
        stream_wait(trainer->stream);
        parcel_free(parcel);
        if (failed) return -1;
        at += count;
    }
    return 0;
}

// The step of a snapshot, which is what a stage sends first of it. 1: its replica is out of the run meanwhile.
static int node_take_step(Trainer *trainer, int from, int64_t *step) {
    const Mesh *mesh = &trainer->mesh;
    Parcel *parcel;
    while ((parcel = parcels_take(&trainer->node->inbox, CHANNEL_SNAPSHOT, from)) == NULL) {
        if (!mesh->living[from / mesh->n_stages]) return 1;
        if (node_poll(trainer->node, 1) < 0) return -1;
    }
    int fits = parcel->event.n_bytes == (int64_t)sizeof *step;
    if (fits) memcpy(step, parcel->event.data, sizeof *step);
    parcel_free(parcel);
    return fits ? 0 : error_set("role %d sends a snapshot that does not begin with its step", from);
}

// Takes a snapshot of which something is here, from all stages of its replica. Returns 0; 1: it will never be whole; or
// -1.
static int node_take_snapshot(Trainer *trainer, int lead, int64_t *step) {
    Mesh *mesh = &trainer->mesh;
    Anchor *anchor = &trainer->anchor;
    Wire wire = anchor_follows(trainer) ? WIRE_FP32 : anchor->wire;
    int at = 0, result = 0;
    for (int s = 0; s < mesh->n_stages && result == 0; s++) {
        const Stage *stage = &mesh_cell(mesh, lead, s)->stage;
        int from = cell_role(mesh, lead, s);
        result = node_take_step(trainer, from, step);
        for (int i = 0; i < stage->n_tensors && result == 0; i++, at++)
            result = node_take_values(trainer, from, wire,
                                      stage_values(&anchor->stage, ARENA_PARAMS, &anchor->stage.tensors[at]),
                                      stage->tensors[i].n);
    }
    for (int s = 0; s < mesh->n_stages && result == 1; s++)
        parcels_free(&trainer->node->inbox, CHANNEL_SNAPSHOT, cell_role(mesh, lead, s));
    return result;
}

// Sends the factors in use, or the new ones, to all cells of the run.
static int node_send_factors(Trainer *trainer, int in_use) {
    Mesh *mesh = &trainer->mesh;
    Node *node = trainer->node;
    const Anchor *anchor = &trainer->anchor;
    int64_t sent = 0;
    for (int i = 0; i < mesh_cells(mesh); i++) {
        Packer packer = {NULL, 0, 0, 0};
        if (!mesh->living[mesh->cells[i].replica]) continue;
        int failed = pack_factors(&packer, trainer, &mesh->cells[i].stage, in_use) ||
                     node_carry(node, channel_number(CHANNEL_FACTORS, node->role, i, 0), packer.bytes, packer.n);
        sent += packer.n;
        packer_free(&packer);
        if (failed) return -1;
    }
    if (in_use) return 0;
    return node_tell(node, "factors",
                     json_pack("{s:I, s:o, s:f, s:I, s:b}", "snapshot", (json_int_t)anchor->launched, "loss",
                               real_or_null(anchor->loss), "seconds", anchor->seconds, "bytes", (json_int_t)sent,
                               "useless", anchor->useless));
}

// What the last pass has given is in use from here on.
static int node_take_over(Trainer *trainer) {
    Anchor *anchor = &trainer->anchor;
    if (anchor_deliver(anchor)) return -1;
    return anchor->learns && !anchor->useless && learner_use(&trainer->mesh, &anchor->learner) < 0 ? -1 : 0;
}

// Tells all of lost replicas which of their snapshots came whole; the cells wait in vain for factors of later ones.
static int node_tell_lost(Trainer *trainer) {
    Node *node = trainer->node;
    const Mesh *mesh = &trainer->mesh;
    if (!node->has_lost || parcels_find(&node->inbox, CHANNEL_SNAPSHOT) != NULL) return 0;
    node->has_lost = 0;
    for (int r = 0; r < mesh->n_replicas; r++)
        if (!mesh->living[r] &&
            node_tell(node, "skip",
                      json_pack("{s:i, s:I}", "replica", r, "after", (json_int_t)trainer->anchor.launched)))
            return -1;
    return 0;
}

// The next snapshot to the thread, if there is one; what the last has given is in use then.
static int node_serve_snapshot(Trainer *trainer) {
    int64_t step = -1;
    Anchor *anchor = &trainer->anchor;
    const Parcel *first = parcels_find(&trainer->node->inbox, CHANNEL_SNAPSHOT);
    if (first == NULL) return 0;
    int result = node_take_snapshot(trainer, channel_parts(first->event.channel).from / trainer->mesh.n_stages, &step);
    if (result != 0) return result < 0 ? -1 : 0;
    if (anchor_state(anchor, 0) == ANCHOR_READY && node_take_over(trainer)) return -1;
    trainer->node->factors_sent = 0;
    anchor_work(anchor, step);
    return 0;
}

// Validation and shards -----------------------------------------------------------------------------------------------

// The states that come over a boundary in a validation, or go.
static int node_check_in(Trainer *trainer, Cell *cell, int N) {
    Mesh *mesh = &trainer->mesh;
    Link *link = link_before(mesh, mesh->check, cell);
    int64_t n_bytes, expected = (int64_t)sizeof(floatX) * N * trainer->config.channels;
    double arrival;
    while (link_waiting(link) == 0)
        if (node_poll(trainer->node, 1) < 0) return -1;
    if (link_recv(link, mesh->message, mesh->message_bytes, &n_bytes, &arrival) != LINK_OK) return -1;
    if (n_bytes != expected)
        return error_set("validation: a boundary of %lld bytes where %lld are expected", (long long)n_bytes,
                         (long long)expected);
    device_copy(stage_input(&cell->stage, 0), mesh->message, (size_t)n_bytes, trainer->stream);
    return 0;
}

static int node_check_out(Trainer *trainer, Cell *cell, int N) {
    Mesh *mesh = &trainer->mesh;
    int64_t n_bytes = (int64_t)sizeof(floatX) * N * trainer->config.channels;
    device_copy(mesh->message, cell->stage.last, (size_t)n_bytes, trainer->stream);
    return link_send(link_behind(mesh, mesh->check, cell), mesh->message, n_bytes, 0.0) ||
                   node_throttle(trainer->node, trainer->node->role + 1)
               ? -1
               : 0;
}

// Held-out loss of the leading replica, whose cells compute it together; the last of them tells it.
static int node_validate(Trainer *trainer) {
    Node *node = trainer->node;
    Cell *cell = node_cell(trainer);
    Stage *stage = &cell->stage;
    const Dataset *data = &trainer->data;
    int T = data->T, lead = 0, result = 0;
    int64_t n_windows = evaluation_windows(data, trainer->opts.val_tokens);
    Evaluation eval;
    Batch batch;
    while (!node->drawing[lead]) lead++;
    if (cell->replica != lead || n_windows == 0) return 0;
    memset(&eval, 0, sizeof eval);
    if (batch_alloc(&batch, stage->max_B, T)) result = -1;
    stage_round(stage, trainer->stream);
    for (int64_t w = 0; w < n_windows && result == 0; w += stage->max_B) {
        int b = evaluation_read(&eval, data, w, n_windows, &batch);
        if (!stage->has_embed) result = node_check_in(trainer, cell, b * T);
        if (result != 0) break;
        stage_forward(stage, 0, batch.tokens, batch_starts(&batch, 0), b, T, NULL, NULL, trainer->stream);
        if (stage->has_head)
            evaluation_add(&eval, stage, &batch, b, &trainer->tokenizer, trainer->stream);
        else
            result = node_check_out(trainer, cell, b * T);
        node->works++;
    }
    batch_free(&batch);
    evaluation_end(&eval);
    if (result != 0 || stream_check(trainer->stream)) return -1;
    if (!stage->has_head) return 0;
    return node_tell(node, "validation",
                     json_pack("{s:I, s:o, s:o}", "step", (json_int_t)trainer->progress.step, "loss",
                               real_or_null(eval.loss), "bits_per_byte", real_or_null(eval.bits_per_byte)));
}

// The tag of shards: what is still on its way from before all were placed anew is not taken for them.
static int save_tag(uint32_t epoch, int64_t step) {
    return (int)(epoch & 0xFF) << 16 | (int)(step & 0xFFFF);
}

// Sends a file of the scratch folder to the coordinator.
static int node_send_state(Node *node, const char *path, int64_t step) {
    return net_send_file(node->net, NODE_COORDINATOR,
                         channel_number(CHANNEL_STATE, node->role, 0, save_tag(node->epoch, step)), path);
}

// What this process has sent and received so far (NetTotals): payload up and down, wire up and down, frames up and
// down.
static json_t *totals_to_json(Net *net) {
    NetTotals t;
    net_totals(net, &t);
    return json_pack("[I,I,I,I,I,I]", (json_int_t)t.payload_up, (json_int_t)t.payload_down, (json_int_t)t.wire_up,
                     (json_int_t)t.wire_down, (json_int_t)t.frames_up, (json_int_t)t.frames_down);
}

// Agrees with all that the run stands still here, as far as it concerns state: an average at work ends. Returns what
// opened the gate, which the caller frees, or NULL.
static json_t *node_stand(Trainer *trainer, int gate) {
    const Cell *cell = node_cell(trainer);
    const Progress *p = &trainer->progress;
    Meeting *meeting = node_meeting(trainer);
    int waits = meeting != NULL && meeting->is_open;
    flow_stand(&node_cell(trainer)->flow, p->step); // simulated time is one process's
    json_t *begun = json_array();
    for (int f = 0; f < trainer->outer.n_fragments; f++)
        json_array_append_new(begun, json_integer((json_int_t)trainer->outer.begun[f]));
    int finite = stage_is_finite(&cell->stage, trainer->stream);
    json_t *go = node_agree(trainer, gate,
                            json_pack("{s:o, s:b, s:I, s:I, s:I, s:o, s:I}", "net", totals_to_json(trainer->node->net),
                                      "finite", finite, "adam_steps", (json_int_t)p->adam_steps, "samples",
                                      (json_int_t)p->samples, "tokens", (json_int_t)p->tokens, "begun", begun,
                                      "launched", (json_int_t)trainer->anchor.launched),
                            waits);
    if (go == NULL || !waits || meeting_commit(&trainer->mesh, meeting, &trainer->outer) == 0) return go;
    json_decref(go);
    return NULL;
}

// Gives the coordinator the cell's shard, once what it needs is here.
static int node_save(Trainer *trainer) {
    char path[PATH_MAX], name[64];
    Node *node = trainer->node;
    const Cell *cell = node_cell(trainer);
    int64_t step = trainer->progress.step;
    json_t *go = node_stand(trainer, GATE_SAVE);
    if (go == NULL) return -1;
    int saves = json_is_true(json_object_get(go, "save"));
    json_decref(go);
    if (!saves) return 0;
    CellState about = cell_state(trainer, cell);
    snprintf(name, sizeof name, "cell_%u_%lld.bin", node->epoch, (long long)step);
    if (path_join(path, node->scratch, name) || cell_save(cell, &about, path, 1)) return -1;
    return node_send_state(node, path, step);
}

// Sends the cell's state to those who want it.
static int node_give(Trainer *trainer) {
    char path[PATH_MAX], name[64];
    Node *node = trainer->node;
    const Cell *cell = node_cell(trainer);
    CellState about;
    while (cell != NULL && json_array_size(node->wants) > 0) {
        const json_t *wish = json_array_get(node->wants, 0);
        int64_t to = json_integer_value(json_array_get(wish, 0)), channel = json_integer_value(json_array_get(wish, 1));
        json_array_remove(node->wants, 0);
        if (!node_knows(node, (uint32_t)to)) continue; // it is lost meanwhile
        about = cell_state(trainer, cell);
        snprintf(name, sizeof name, "give_%lld_%d.bin", (long long)to, channel_parts((uint64_t)channel).tag);
        if (path_join(path, node->scratch, name) || cell_save(cell, &about, path, 1)) return -1;
        if (net_send_file(node->net, (uint32_t)to, (uint64_t)channel, path)) return -1;
    }
    return 0;
}

// A file from a node into the scratch folder: path (PATH_MAX) = where it is. what: as the sender knows it. Each has a
// number, so that one that was asked for before, and comes when nobody waits for it any more, is not taken for it.
static int node_fetch(Node *node, uint32_t from, ChannelKind kind, const char *what, char *path) {
    static const int64_t any_size = (int64_t)1 << 50;
    char name[64];
    node->fetches = (node->fetches + 1) & (CHANNEL_TAGS - 1);
    uint64_t channel = channel_number(kind, from == NODE_COORDINATOR ? 0 : 1, node->role, node->fetches);
    snprintf(name, sizeof name, "%.40s_%d", what, node->fetches);
    if (path_join(path, node->scratch, name) || net_expect_file(node->net, from, channel, path, any_size)) return -1;
    if (send_order(node->net, from,
                   json_pack("{s:s, s:s, s:I}", "type", "want", "what", what, "channel", (json_int_t)channel)))
        return -1;
    for (;;) {
        Parcel *parcel = parcels_take(&node->inbox, kind, -1);
        int is_it = parcel != NULL && parcel->event.channel == channel;
        if (parcel != NULL && !is_it) unlink(parcel->event.text);
        parcel_free(parcel);
        if (is_it) return 0;
        if (parcel == NULL && node_poll(node, 1) < 0) return -1;
    }
}

// --- Being placed

// Nothing of what was going on is left: the coder's work, messages, averages.
static void mesh_reset(Mesh *mesh) {
    for (Cell *cell = mesh_next(mesh, NULL); cell != NULL; cell = mesh_next(mesh, cell)) {
        if (cell->outgoing.active) coder_wait(&mesh->coder, &cell->outgoing.job);
        cell->outgoing.active = 0;
        for (int d = 0; d < 2; d++) {
            if (cell->incoming[d].active) coder_wait(&mesh->coder, &cell->incoming[d].job);
            cell->incoming[d].active = 0;
        }
        stage_use(&cell->stage, cell->stage.params);
        cell->skipped_in_a_row = 0;
    }
    for (int i = 0; i < mesh->n_replicas * (mesh->n_stages - 1); i++) {
        link_empty(&mesh->forward[i]);
        link_empty(&mesh->backward[i]);
        link_empty(&mesh->check[i]);
    }
    for (int s = 0; s < mesh->n_stages && mesh->meetings != NULL; s++) meeting_close(&mesh->meetings[s]);
}

// A stage as it is before its first step, but for its weights.
static int cell_clear(Trainer *trainer, Cell *cell) {
    Stage *stage = &cell->stage;
    static const Arena arenas[] = {ARENA_M, ARENA_V, ARENA_DELTA, ARENA_OUTER, ARENA_ERROR, ARENA_PENDING};
    for (int i = 0; i < 6; i++) {
        float *memory = stage_arena(stage, arenas[i]);
        if (memory != NULL) device_zero(memory, (size_t)stage_arena_bytes(stage, arenas[i]), trainer->stream);
    }
    stage->has_basis = 0, cell->updates = 0;
    memset(&cell->total, 0, sizeof cell->total);
    memset(&stage->nesterov, 0, sizeof stage->nesterov);
    return cell->powersgd_q == NULL
               ? 0
               : cell_warm_start(&trainer->mesh, cell, &trainer->outer, (uint64_t)trainer->opts.seed);
}

// n tensors of a stage, in a row of its tables, from a file that the coordinator makes of the model's.
static int node_fetch_tensors(Trainer *trainer, Stage *stage, const char *what, const Tensor *tensors, int n) {
    char path[PATH_MAX];
    SafeTensors file;
    if (node_fetch(trainer->node, NODE_COORDINATOR, CHANNEL_STATE, what, path)) return -1;
    if (safetensors_open(&file, path)) return -1;
    int result = 0;
    for (int i = 0; i < n && result == 0; i++) {
        const Tensor *t = &tensors[i];
        const SafeTensor *tensor = state_tensor(&file, t->name, t->n);
        result = tensor == NULL ? -1 : stage_read(stage, stage_values(stage, ARENA_PARAMS, t), t->n, tensor, 0);
    }
    safetensors_close(&file);
    unlink(path);
    return result;
}

// Once: the weights that adapters stand beside, of the cell's stage or, for the anchor, of all.
static int node_fetch_frozen(Trainer *trainer) {
    Mesh *mesh = &trainer->mesh;
    Cell *cell = node_cell(trainer);
    Stage *stage = cell != NULL ? &cell->stage : &trainer->anchor.stage;
    if (stage->n_frozen == 0 || trainer->node->has_frozen) return 0;
    const Tensor *from = stage->frozen; // the anchor's table is the stages' one after the other
    for (int s = 0; s < mesh->n_stages; s++) {
        char what[32];
        int n = mesh_cell(mesh, 0, s)->stage.n_frozen;
        if (cell != NULL && cell->index != s) continue;
        snprintf(what, sizeof what, "frozen.%d", s);
        if (node_fetch_tensors(trainer, stage, what, from, n)) return -1;
        from += n;
    }
    trainer->node->has_frozen = 1;
    return mesh_share_frozen(mesh);
}

// The state of the cell at the step at which it is placed. from: {"weights": "init" | "file" | "keep", "shard": the
// node that has it, or -1}.
static int node_fetch_cell(Trainer *trainer, Cell *cell, const json_t *from) {
    char path[PATH_MAX];
    Stage *stage = &cell->stage;
    const char *weights = json_string_value(json_object_get(from, "weights"));
    int64_t shard = json_integer_value(json_object_get(from, "shard"));
    if (weights == NULL) return error_set("the coordinator does not say where weights come from");
    if (strcmp(weights, "keep") == 0) return 0;
    if (strcmp(weights, "init") == 0)
        stage_init_table(stage, (uint64_t)trainer->opts.seed);
    else if (strcmp(weights, "file") == 0 &&
             node_fetch_tensors(trainer, stage, "weights", stage->tensors, stage->n_tensors))
        return -1;
    trainer->anchor.deliveries = 0; // factors and tables of before are not this state's
    stage_begin_meeting(stage);
    if (cell_clear(trainer, cell)) return -1;
    if (shard < 0) return 0;
    CellState about = cell_state(trainer, cell);
    if (node_fetch(trainer->node, (uint32_t)shard, CHANNEL_STATE, "shard", path)) return -1;
    int result = cell_load(cell, &about, path, 0);
    unlink(path);
    return result;
}

// The embedding that the run has begun with, for predictions of the transform codec.
static int node_fetch_embed(Trainer *trainer, const json_t *from) {
    char path[PATH_MAX];
    Mesh *mesh = &trainer->mesh;
    const Tensor *tensor = stage_embedding(mesh_model(mesh, 0));
    float *embed = mesh->klt[0].embed;
    SafeTensors file;
    if (embed == NULL || trainer->node->has_embed) return 0;
    trainer->node->has_embed = 1;
    float *staging = (float *)device_host_alloc(sizeof(float) * STAGING);
    if (staging == NULL) return error_set("out of memory for the staging buffer");
    Stage stage;
    memset(&stage, 0, sizeof stage);
    stage.staging = staging, stage.stream = trainer->stream;
    int result = 0;
    if (json_is_true(json_object_get(from, "init"))) {
        tensor_init(tensor, stored_floats(embed), staging, (uint64_t)trainer->opts.seed, trainer->stream);
    } else {
        result = node_fetch(trainer->node, NODE_COORDINATOR, CHANNEL_STATE, "embed", path);
        if (result == 0) result = safetensors_open(&file, path);
        if (result == 0) {
            const SafeTensor *from_file = state_tensor(&file, tensor->name, tensor->n);
            result = from_file == NULL ? -1 : stage_read(&stage, stored_floats(embed), tensor->n, from_file, 0);
            safetensors_close(&file);
            unlink(path);
        }
    }
    device_host_free(staging);
    if (param_store(mesh_model(mesh, 0), tensor) != STORE_FP32) // what the first stage has
        wire_round(WIRE_BF16, embed, tensor->n, trainer->stream);
    return result != 0 ? -1 : mesh_share_embed(mesh);
}

// The anchor's state: of a checkpoint, what it has, or none. What is in use goes to the cells, which may have lost it.
// exact: the run goes on where the checkpoint was; else what the last pass has given is in use now.
static int node_fetch_anchor(Trainer *trainer, const json_t *from, int exact) {
    char path[PATH_MAX], named[PATH_MAX];
    Anchor *anchor = &trainer->anchor;
    if (json_is_object(json_object_get(from, "anchor"))) {
        if (node_fetch(trainer->node, NODE_COORDINATOR, CHANNEL_STATE, "anchor.bin", path)) return -1;
        if (path_join(named, trainer->node->scratch, "anchor.bin")) return -1;
        if (rename(path, named) != 0) return error_set("rename %s: %s", path, strerror(errno));
        if (anchor_load(trainer, trainer->node->scratch, from)) return -1;
        unlink(named);
    }
    if (!exact && anchor_state(anchor, 0) == ANCHOR_READY && node_take_over(trainer)) return -1;
    trainer->node->factors_sent = 0;
    return anchor->deliveries > 0 ? node_send_factors(trainer, 1) : 0;
}

// What the epoch begins with, as all know it.
static int node_enter(Trainer *trainer, const json_t *order) {
    Node *node = trainer->node;
    Progress *p = &trainer->progress;
    Anchor *anchor = &trainer->anchor;
    const json_t *begun = json_object_get(order, "begun");
    node->epoch = (uint32_t)json_integer_value(json_object_get(order, "epoch"));
    node->turn = 0, node->average = -1, node->interrupted = 0, node->has_lost = 0, node->launched_from = -1;
    for (int r = 0; r < MESH_MAX_REPLICAS; r++) node->lost_after[r] = INT64_MAX;
    node->granted = node->had = -1;
    node->halt_at = json_integer_value(json_object_get(order, "halt")), node->halt_then = THEN_STOP;
    p->step = json_size(json_object_get(order, "step")), p->samples = json_size(json_object_get(order, "samples"));
    p->adam_steps = json_size(json_object_get(order, "adam_steps"));
    p->tokens = json_size(json_object_get(order, "tokens"));
    if (p->step < 0 || p->samples < 0 || p->adam_steps < 0 || p->tokens < 0 || p->step > trainer->n_steps)
        return error_set("the coordinator does not say where the run is");
    node->open = gate_number(p->step, 0) - 1, node->paced = p->step - 1;
    json_decref(node->go);
    node->go = NULL;
    for (int f = 0; f < trainer->outer.n_fragments; f++)
        trainer->outer.begun[f] = json_integer_value(json_array_get(begun, (size_t)f));
    if (node_cell(trainer) != NULL) anchor->launched = json_integer_value(json_object_get(order, "launched"));
    node->anchor_up = json_is_true(json_object_get(order, "has_anchor"));
    net_generation(node->net, node->epoch);
    return read_members(json_object_get(order, "living"), trainer->mesh.living, trainer->mesh.n_replicas) ||
                   node_meet(node, json_object_get(order, "nodes")) || node_sort(node)
               ? -1
               : 0;
}

// Takes the place that was ordered, and waits until all have theirs.
static int node_take_place(Trainer *trainer) {
    Node *node = trainer->node;
    Cell *cell = node_cell(trainer);
    json_t *order = node->place;
    const json_t *from = json_object_get(order, "from");
    node->place = NULL;
    mesh_reset(&trainer->mesh);
    parcels_free(&node->inbox, CHANNEL_KINDS, -1);
    parcel_free(node->factors);
    node->factors = NULL;
    int failed = node_enter(trainer, order) || node_fetch_frozen(trainer) || node_fetch_embed(trainer, from) ||
                 (cell != NULL ? node_fetch_cell(trainer, cell, from)
                               : node_fetch_anchor(trainer, from, json_is_true(json_object_get(order, "exact"))));
    int has_factors = json_is_true(json_object_get(order, "factors"));
    if (cell != NULL && trainer->anchor.learns && node->anchor_up && !has_factors)
        trainer->anchor.deliveries = 0; // an anchor without tables: all begin with new ones
    if (!failed && cell != NULL && has_factors) {
        Parcel *parcel = NULL;
        while (!failed && (parcel = parcels_take(&node->inbox, CHANNEL_FACTORS, -1)) == NULL)
            failed = node_poll(node, 1) < 0;
        if (!failed) failed = node_use_factors(trainer, &parcel->event, FACTORS_ALL);
        parcel_free(parcel);
    }
    if (!failed) failed = stream_check(trainer->stream);
    if (!failed) failed = node_tell(node, "at", json_pack("{s:I}", "epoch", (json_int_t)node->epoch));
    while (!failed && node->go == NULL) failed = node_poll(node, 1) < 0 || node_give(trainer);
    if (!failed) failed = node_heed(node, node->go);
    json_decref(order);
    json_decref(node->go);
    node->go = NULL;
    return failed ? -1 : 0;
}

// Training ------------------------------------------------------------------------------------------------------------

// What a cell tells of a step whose gradients it has.
static json_t *node_report(const Cell *cell, const Batch *batches, int64_t gate) {
    const int64_t *bytes = cell->step.bytes;
    return json_pack("{s:I, s:o, s:I, s:o, s:[I,I,I,I]}", "gate", (json_int_t)gate, "loss",
                     real_or_null(cell->loss_sum), "valid", (json_int_t)batches[cell->replica].n_valid, "norm",
                     real_or_null(cell->grad_norm), "bytes", (json_int_t)bytes[0], (json_int_t)bytes[1],
                     (json_int_t)bytes[2], (json_int_t)bytes[3]);
}

// One step of the cell (train_step).
static int node_step(Trainer *trainer, Batch *batches) {
    Node *node = trainer->node;
    Mesh *mesh = &trainer->mesh;
    Cell *cell = node_cell(trainer);
    StepResult result;
    int64_t step = trainer->progress.step, valid = begin_step(trainer, batches, &result);
    Pass pass = {batches, step, 1, 1, NULL, 0};
    if (valid < 0 || mesh_run(mesh, cell->replica, cell->replica + 1, &pass)) return -1;
    if (trainer->dp == MESH_DP_DENSE && node_sum_gradients(trainer)) return -1;
    result.loss = cell->loss_sum;
    measure_cells(trainer, &result);
    int due = node_average_due(trainer, step + 1);
    json_t *go = node_agree(trainer, GATE_STEP, node_report(cell, batches, 0), due);
    if (go == NULL) return -1;
    result.finite = json_is_true(json_object_get(go, "apply"));
    json_decref(go);
    if (due && meeting_commit(mesh, node_meeting(trainer), &trainer->outer)) return -1;
    node->works++;
    return end_step(trainer, &result);
}

// An asynchronous pipeline over several processes: a cell does forwards as far ahead of its updates as its delay
// allows, a backward whenever its gradient is there, and nothing waits for the whole pipeline (llmc/flow.h). Before a
// validation, a shard or a halt no forward from beyond is done, so that the pipeline runs empty; older versions of the
// weights, which the first forwards behind it need, are kept as ever.
typedef struct {
    Batch **ring;     // (slots) of the micro-batches in flight, each for all replicas
    int n;            // slots
    int64_t from;     // the step at which the pipeline was empty
    int64_t next;     // the next forward
    int64_t drawn;    // batches so far
    int64_t launched; // the snapshot whose tables the forwards take next
} Ahead;

static void ahead_free(const Trainer *trainer, Ahead *ahead) {
    for (int i = 0; i < ahead->n; i++)
        if (ahead->ring[i] != NULL) batches_free(ahead->ring[i], trainer->mesh.n_replicas);
    free(ahead->ring);
}

static int ahead_alloc(const Trainer *trainer, Ahead *ahead) {
    memset(ahead, 0, sizeof *ahead);
    int n = node_cell(trainer)->stage.slots;
    ahead->ring = (Batch **)calloc((size_t)n, sizeof(Batch *));
    if (ahead->ring == NULL) return error_set("out of memory for batches");
    ahead->n = n, ahead->next = ahead->drawn = trainer->progress.step, ahead->launched = trainer->anchor.launched;
    for (int i = 0; i < n; i++)
        if ((ahead->ring[i] = batches_alloc(trainer)) == NULL) return -1;
    return 0;
}

// The step, behind the one at which it was empty last, before which the pipeline is to be empty.
static int64_t ahead_limit(const Trainer *trainer, const Ahead *ahead) {
    const Node *node = trainer->node;
    int64_t step = ahead->from, limit = trainer->n_steps;
    int64_t every[] = {trainer->val_every, trainer->save_every};
    for (int i = 0; i < 2; i++)
        if (every[i] > 0 && (step / every[i] + 1) * every[i] < limit) limit = (step / every[i] + 1) * every[i];
    return node->halt_at >= 0 && node->halt_at < limit ? node->halt_at : limit;
}

// Steps that a cell may be ahead of the slowest: so many that nobody waits for it, and so few that a halt can be
// announced in time.
static int64_t ahead_window(int n_stages) {
    return 2 * n_stages + 2;
}

// Notes factors that have come, and tells the coordinator of them.
static int ahead_sort_factors(Trainer *trainer) {
    Node *node = trainer->node;
    int64_t snapshot = node->had;
    for (const Parcel *at = node->inbox.first; at != NULL; at = at->next) {
        int64_t of;
        if (channel_parts(at->event.channel).kind != CHANNEL_FACTORS || at->event.n_bytes < (int64_t)sizeof of)
            continue;
        memcpy(&of, at->event.data, sizeof of);
        if (of > snapshot) snapshot = of;
    }
    if (snapshot == node->had) return 0;
    node->had = snapshot;
    return node_tell(node, "have", json_pack("{s:I}", "snapshot", (json_int_t)snapshot));
}

// The factors of a snapshot, which stay in the inbox; NULL: they are not here.
static const Parcel *ahead_factors(const Node *node, int64_t snapshot) {
    for (const Parcel *at = node->inbox.first; at != NULL; at = at->next) {
        int64_t of;
        if (channel_parts(at->event.channel).kind != CHANNEL_FACTORS || at->event.n_bytes < (int64_t)sizeof of)
            continue;
        memcpy(&of, at->event.data, sizeof of);
        if (of == snapshot) return at;
    }
    return NULL;
}

// Whether it is settled for all what becomes of a snapshot: its factors are used (1), or there are none (-1); 0: not
// yet.
static int ahead_settled(const Trainer *trainer, int64_t snapshot) {
    const Node *node = trainer->node;
    int is_lost = !node->anchor_up || (snapshot == trainer->anchor.launched && node_is_skipped(trainer));
    return node->granted >= snapshot ? 1 : is_lost ? -1 : 0;
}

// Brings the tables of states up to what a forward needs. 1; 0: they are not there yet; or -1.
static int ahead_forward_tables(Trainer *trainer, Ahead *ahead, int64_t step) {
    Node *node = trainer->node;
    while (ahead->launched >= 0 && step >= delivery_step(trainer, ahead->launched)) {
        int64_t due = delivery_step(trainer, ahead->launched);
        int settled = ahead_settled(trainer, ahead->launched);
        const Parcel *parcel = settled > 0 ? ahead_factors(node, ahead->launched) : NULL;
        if (settled == 0) return 0;
        if (parcel != NULL && (cell_flush(&trainer->mesh, node_cell(trainer)) ||
                               node_use_factors(trainer, &parcel->event, FACTORS_FORWARD)))
            return -1;
        ahead->launched = due;
    }
    return 1;
}

// Factors up to those of a snapshot are not needed any more.
static void ahead_drop_factors(Node *node, int64_t snapshot) {
    Parcels others = {NULL, NULL};
    Parcel *parcel;
    while ((parcel = parcels_take(&node->inbox, CHANNEL_FACTORS, -1)) != NULL) {
        int64_t of = -1;
        if (parcel->event.n_bytes >= (int64_t)sizeof of) memcpy(&of, parcel->event.data, sizeof of);
        if (of > snapshot)
            parcels_add(&others, parcel);
        else
            parcel_free(parcel);
    }
    while ((parcel = parcels_take(&others, CHANNEL_KINDS, -1)) != NULL) parcels_add(&node->inbox, parcel);
}

// The tables that boundaries need from the first step on, as nothing is under way yet.
static int ahead_first_factors(Trainer *trainer) {
    Anchor *anchor = &trainer->anchor;
    if (anchor->launched >= 0) return 0;
    if (anchor->learns && anchor->deliveries == 0 && (node_launch(trainer) || node_take_delivery(trainer, 1)))
        return -1;
    if (anchor->learns && anchor->deliveries == 0) return error_set("the anchor gives no tables to begin with");
    return node_launch(trainer);
}

// Before an update: factors that are due, and the next snapshot. 1; 0: they are not there yet; or -1.
static int ahead_meet_anchor(Trainer *trainer) {
    Node *node = trainer->node;
    Anchor *anchor = &trainer->anchor;
    int64_t step = trainer->progress.step;
    if (anchor->launched >= 0) {
        if (step < delivery_step(trainer, anchor->launched)) return 1;
        int settled = ahead_settled(trainer, anchor->launched);
        const Parcel *parcel = settled > 0 ? ahead_factors(node, anchor->launched) : NULL;
        int parts = anchor->learns ? FACTORS_REST : FACTORS_ALL;
        if (settled == 0) return 0;
        if (cell_flush(&trainer->mesh, node_cell(trainer))) return -1;
        if (parcel != NULL && node_use_factors(trainer, &parcel->event, parts)) return -1;
        ahead_drop_factors(node, anchor->launched);
    }
    return node_launch(trainer) ? -1 : 1;
}

// Does the next forward if it can be done. 1, 0, or -1.
static int ahead_forward(Trainer *trainer, Ahead *ahead) {
    Mesh *mesh = &trainer->mesh;
    Cell *cell = node_cell(trainer);
    int64_t step = ahead->next, done = trainer->progress.step;
    if (step >= ahead_limit(trainer, ahead) || step - done > cell->stage.delay) return 0;
    int ready = trainer->anchor.learns ? ahead_forward_tables(trainer, ahead, step) : 1;
    if (ready <= 0) return ready;
    Batch *batches = ahead->ring[step % ahead->n];
    if (ahead->drawn == step) draw_batches(trainer, batches), ahead->drawn++;
    Pass pass = {batches, step, 1, 1, NULL, step - done};
    cell->next_work = 0;
    if (cell_fetch(mesh, cell, WORK_FORWARD, &pass) < 0) return -1;
    if (!cell_runnable(mesh, cell)) return 0;
    if (cell_begin(mesh, cell, &pass) || cell_run(mesh, cell, &pass)) return -1;
    ahead->next++;
    return 1;
}

// The update of a step whose backward is done.
static int ahead_update(Trainer *trainer, const Batch *batches) {
    Mesh *mesh = &trainer->mesh;
    Cell *cell = node_cell(trainer);
    int64_t step = trainer->progress.step;
    StepResult result;
    memset(&result, 0, sizeof result);
    if (cell_end(mesh, cell)) return -1;
    if (trainer->dp == MESH_DP_DENSE && node_sum_gradients(trainer)) return -1;
    result.lr = step_lr(trainer, step);
    result.loss = cell->loss_sum;
    measure_cells(trainer, &result);
    if (node_tell(trainer->node, "report", node_report(cell, batches, gate_number(step, GATE_STEP)))) return -1;
    int failed = end_step(trainer, &result);
    memset(&cell->step, 0, sizeof cell->step);
    trainer->node->works++;
    return failed;
}

// Does the next backward and its update if it can be done. 1, 0, or -1.
static int ahead_backward(Trainer *trainer, Ahead *ahead) {
    Mesh *mesh = &trainer->mesh;
    Cell *cell = node_cell(trainer);
    int64_t step = trainer->progress.step;
    if (ahead->next <= step || step > trainer->node->paced + ahead_window(mesh->n_stages)) return 0;
    int ready = trainer->anchored ? ahead_meet_anchor(trainer) : 1;
    if (ready <= 0) return ready;
    Batch *batches = ahead->ring[step % ahead->n];
    Pass pass = {batches, step, 1, 1, NULL, 0};
    cell->next_work = 1;
    if (cell_fetch(mesh, cell, WORK_BACKWARD, &pass) < 0) return -1;
    if (!cell_runnable(mesh, cell)) return 0;
    stage_zero_grads(&cell->stage, trainer->stream);
    return cell_run(mesh, cell, &pass) || ahead_update(trainer, batches) ? -1 : 1;
}

// Where neither can be done: for the coder, or for what comes from others.
static int ahead_wait(Trainer *trainer) {
    Mesh *mesh = &trainer->mesh;
    Cell *cell = node_cell(trainer);
    if (cell->outgoing.active) return cell_flush(mesh, cell);
    for (int d = 0; d < 2; d++) {
        Incoming *in = &cell->incoming[d];
        if (!in->active || coder_is_done(&mesh->coder, &in->job)) continue;
        coder_wait(&mesh->coder, &in->job);
        return 0;
    }
    return node_poll(trainer->node, 1) < 0 ? -1 : 0;
}

// Trains up to the next step at which the pipeline is empty. 0 or -1.
static int ahead_run(Trainer *trainer, Ahead *ahead) {
    Node *node = trainer->node;
    Mesh *mesh = &trainer->mesh;
    Cell *cell = node_cell(trainer);
    ahead->from = trainer->progress.step;
    while (trainer->progress.step < ahead_limit(trainer, ahead)) {
        if (node_poll(node, 0) < 0 || ahead_sort_factors(trainer)) return -1;
        if (cell->outgoing.active && coder_is_done(&mesh->coder, &cell->outgoing.job) && cell_flush(mesh, cell))
            return -1;
        int moved = ahead_forward(trainer, ahead);
        if (moved == 0) moved = ahead_backward(trainer, ahead);
        if (moved < 0 || (moved == 0 && ahead_wait(trainer))) return -1;
    }
    if (trainer->progress.step == node->halt_at) node->then = node->halt_then;
    return cell_flush(mesh, cell); // what others need to come as far
}

// What is due where steps end for all: validation, shards.
static int node_rest(Trainer *trainer) {
    const Progress *p = &trainer->progress;
    int last = p->step == trainer->n_steps || trainer->node->then == THEN_STOP;
    if ((is_due(p->step, trainer->val_every) || p->step == trainer->n_steps) && node_validate(trainer)) return -1;
    return last || is_due(p->step, trainer->save_every) ? node_save(trainer) : 0;
}

// Steps until the end, or until the coordinator has something else in mind.
static int node_run_steps(Trainer *trainer, Batch *batches) {
    Node *node = trainer->node;
    const Progress *p = &trainer->progress;
    Ahead ahead;
    int asynchronous = trainer->mesh.asynchronous, failed = asynchronous ? ahead_alloc(trainer, &ahead) : 0;
    while (p->step < trainer->n_steps && node->then == THEN_RUN && !failed) {
        failed = asynchronous ? ahead_run(trainer, &ahead) : node_step(trainer, batches);
        if (!failed) failed = node_rest(trainer);
    }
    if (asynchronous) ahead_free(trainer, &ahead);
    return failed;
}

// Trains from the place on until the coordinator has something else in mind. -1: interrupted or failed.
static int node_train(Trainer *trainer, Batch *batches) {
    Node *node = trainer->node;
    const Progress *p = &trainer->progress;
    if (p->step == 0 && node_validate(trainer)) return -1;
    if (trainer->mesh.asynchronous && trainer->anchored && ahead_first_factors(trainer)) return -1;
    if (node_run_steps(trainer, batches)) return -1;
    if (p->step < trainer->n_steps && node->then == THEN_HOLD) {
        json_t *go = node_stand(trainer, GATE_HOLD);
        if (go == NULL) return -1;
        json_decref(go);
    }
    while (node_poll(node, 1) >= 0) continue; // to be placed, or the end
    return -1;
}

// The anchor's state for the coordinator, once it is through with the snapshot that the cells have launched last.
static int node_save_anchor(Trainer *trainer) {
    char made[PATH_MAX], path[PATH_MAX], name[64];
    Node *node = trainer->node;
    Anchor *anchor = &trainer->anchor;
    int64_t wanted = json_integer_value(json_object_get(node->save, "launched"));
    int64_t step = json_integer_value(json_object_get(node->save, "step"));
    int whole = anchor->launched >= wanted || node->turn > 0; // else its replica may be lost: it may never come
    if (anchor_state(anchor, 0) == ANCHOR_WORKING || !whole) return 0;
    json_decref(node->save);
    node->save = NULL;
    snprintf(name, sizeof name, "anchor_%u_%lld.bin", node->epoch, (long long)step);
    if (anchor_save(trainer, node->scratch) || path_join(made, node->scratch, "anchor.bin") ||
        path_join(path, node->scratch, name))
        return -1;
    if (rename(made, path) != 0) return error_set("rename %s: %s", made, strerror(errno));
    if (node_tell(node, "anchor", json_pack("{s:I, s:o}", "step", (json_int_t)step, "anchor", anchor_to_json(anchor))))
        return -1;
    return node_send_state(node, path, step);
}

// The anchor's life from its place on.
static int node_serve(Trainer *trainer) {
    Node *node = trainer->node;
    Anchor *anchor = &trainer->anchor;
    while (node_poll(node, 1) >= 0) {
        AnchorState state = anchor_state(anchor, 0);
        if (state == ANCHOR_FAILED) return anchor_deliver(anchor);
        if (state == ANCHOR_READY && !node->factors_sent) {
            if (node_send_factors(trainer, 0)) return -1;
            node->factors_sent = 1;
        }
        if (node->save != NULL && node_save_anchor(trainer)) return -1;
        if (state != ANCHOR_WORKING && (node_serve_snapshot(trainer) || node_tell_lost(trainer))) return -1;
        node->works++;
    }
    return -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// main

static const char medical_train[] = "data/medical/train.jsonl", medical_val[] = "data/medical/val.jsonl";

// The tokenizer of the side files; marks that they do not name are the config's.
static int open_tokenizer(Trainer *trainer) {
    Tokenizer *tokenizer = &trainer->tokenizer;
    const Config *config = &trainer->config;
    if (tokenizer_open(tokenizer, trainer->side_files, config->vocab)) return -1;
    if (tokenizer->bos < 0) tokenizer->bos = config->bos_id;
    if (tokenizer->eos < 0) tokenizer->eos = config->eos_id;
    return 0;
}

// Opens the model and its tokenizer, or takes the config of --init.
static int open_model(Trainer *trainer, ModelFile *file) {
    const Options *opts = &trainer->opts;
    int resumed = trainer->model_path[0] != '\0'; // from a checkpoint
    memset(file, 0, sizeof *file);
    if (!resumed) {
        if (opts->model[0] != '\0' && opts->init[0] != '\0') return error_set("give -m or --init, not both");
        if (opts->model[0] == '\0' && opts->init[0] == '\0')
            return error_set("no model: give -m FILE, or --init for a random one (--help lists everything)");
        if (opts->init[0] != '\0') {
            if (opts->lora[0] != '\0') return error_set("--lora goes with -m: adapters belong to a model in a file");
            if (config_from_spec(&trainer->config, opts->init)) return -1;
            trainer->side_files = trainer->config.vocab == BYTE_VOCAB ? tokenizer_byte_files() : json_object();
            return trainer->side_files != NULL ? open_tokenizer(trainer) : -1;
        }
        snprintf(trainer->model_path, sizeof trainer->model_path, "%s", opts->model);
    }
    int adapted = !resumed && opts->lora[0] != '\0';
    if (adapted ? model_file_open_with(file, trainer->model_path, opts->lora)
                : model_file_open(file, trainer->model_path))
        return -1;
    trainer->config = file->config;
    memcpy(trainer->base_path, file->path, sizeof trainer->base_path);
    trainer->side_files = json_incref(file->side_files);
    return open_tokenizer(trainer);
}

// How lines become tokens and tokens windows, as the options say.
static void dataset_rules(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    Dataset *data = &trainer->data;
    data->train_on = (TrainOn)opts->train_on, data->chat_template = (ChatTemplate)opts->chat_template;
    data->pack = (PackMode)opts->pack, data->too_long = (TooLong)opts->too_long;
    data->T = opts->tokenize[0] != '\0' ? 0 : trainer->T;
}

// What was read and how it is packed, in one line.
static void print_data(const Dataset *data) {
    const PackCounts *packed = &data->packed;
    const struct {
        int64_t n;
        const char *what;
    } counts[] = {{data->n_empty, "empty ones left out"},     {data->n_repaired, "with broken UTF-8 repaired"},
                  {packed->truncated, "too long and cut"},    {packed->split, "too long and split"},
                  {packed->dropped, "too long and left out"}, {packed->untrained, "left out with nothing to train on"}};
    printf("data: %lld tokens for training, %lld held out", (long long)data->train.n_tokens,
           (long long)data->val.n_tokens);
    if (data->n_documents > 0) printf(", from %lld documents", (long long)data->n_documents);
    if (data->n_samples > 0)
        printf(", %s %lld conversations and prompts, %lld targets", data->n_documents > 0 ? "and" : "from",
               (long long)data->n_samples, (long long)data->train.n_targets);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (counts[i].n > 0) printf(", %lld %s", (long long)counts[i].n, counts[i].what);
    if (packed->windows > 0)
        printf(", packed into %lld sequences that are %.1f%% full%s", (long long)packed->windows,
               100.0 * (double)packed->rows / ((double)packed->windows * data->T),
               data->pack == PACK_NOMASK ? " and see all of themselves" : "");
    printf("\n");
}

// -1 if --too-long was given and nothing is packed.
static int check_too_long(const Trainer *trainer) {
    const Dataset *data = &trainer->data;
    int packed = 0;
    for (int i = 0; i < data->train.n_streams; i++) packed += data->train.streams[i].packing.firsts != NULL;
    for (int i = 0; i < data->val.n_streams; i++) packed += data->val.streams[i].packing.firsts != NULL;
    if (packed > 0 || data->too_long == TOO_LONG_AUTO) return 0;
    return error_set("--too-long has no effect: text is cut wherever a sequence ends; give --pack mask");
}

static int open_data(Trainer *trainer) {
    Options *opts = &trainer->opts;
    Dataset *data = &trainer->data;
    data->val_share = opts->val_data.n > 0 || opts->tokenize[0] != '\0' ? 0.0 : (double)opts->val_fraction;
    dataset_rules(trainer);
    if (opts->data.n == 0 && !(opts->eval && opts->val_data.n > 0)) {
        if (!file_exists(medical_train))
            return error_set("no -d given, and the medical text is not prepared: run data/medical/prepare.sh");
        printf("data: no -d given, the prepared medical text is used (%s)\n", medical_train);
        strcpy(opts->data.item[opts->data.n++], medical_train);
        if (opts->val_data.n == 0) strcpy(opts->val_data.item[opts->val_data.n++], medical_val);
        data->val_share = 0.0;
    }
    for (int i = 0; i < opts->data.n; i++)
        if (dataset_read(data, &data->train, opts->data.item[i], &trainer->tokenizer)) return -1;
    for (int i = 0; i < opts->val_data.n; i++)
        if (dataset_read(data, &data->val, opts->val_data.item[i], &trainer->tokenizer)) return -1;
    if (opts->tokenize[0] != '\0') return 0;
    if (dataset_finish(data, trainer->T)) return -1;
    print_data(data);
    return check_too_long(trainer);
}

enum { MAX_ROWS = 1 << 22 }; // tokens computed at once; counts of rows are ints

static const char *const anchor_options[] = {"anchor-delay",  "anchor-batch",   "anchor-rank", "anchor-beta",
                                             "anchor-debias", "anchor-threads", "alpha",       "tau",
                                             "tau-relative",  "anchor-use",     NULL};
static const char *const outer_options[] = {"local-steps", "outer-lr", "outer-momentum", "fragments",
                                            "overlap",     "mix",      "powersgd-rank",  NULL};

static const char *const rotate_options[] = {"rotate-source",  "rotate-geometry", "rotate-every",
                                             "rotate-max-dim", "refresh",         NULL};

// -1 if one of these options was given although nothing uses it.
static int given_in_vain(const Trainer *trainer, const char *const *names, const char *reason) {
    for (; *names != NULL; names++)
        if (is_given(trainer, *names)) return error_set("--%s has no effect: %s", *names, reason);
    return 0;
}

// 1 if boundaries travel compressed.
static int is_compressed(const Options *opts) {
    return opts->codec == CODEC_MASK ? opts->mask_rate > 0.0f : opts->codec != CODEC_NONE;
}

// 1 in the first process of several.
static int is_host(const Options *opts) {
    return opts->host[0] != '\0';
}

// Takes rank, alpha and targets of the file's adapters as the options, so that the log and other processes have them.
static int lora_from_file(Trainer *trainer, const Lora *lora) {
    Options *opts = &trainer->opts;
    Lora asked = *lora;
    char targets[64];
    if (is_given(trainer, "lora-rank") && opts->lora_rank != lora->rank)
        return error_set("--lora-rank %d: the adapters given have rank %d", opts->lora_rank, lora->rank);
    if (is_given(trainer, "lora-alpha") && opts->lora_alpha != lora->alpha)
        return error_set("--lora-alpha %g: the adapters given have alpha %g", (double)opts->lora_alpha,
                         (double)lora->alpha);
    lora_targets_text(lora, targets, sizeof targets);
    if (is_given(trainer, "lora-targets") && lora_parse_targets(&asked, opts->lora_targets)) return -1;
    if (asked.targets != lora->targets)
        return error_set("--lora-targets %.100s: the adapters given are of %s", opts->lora_targets, targets);
    opts->lora_rank = lora->rank, opts->lora_alpha = lora->alpha;
    snprintf(opts->lora_targets, sizeof opts->lora_targets, "%s", targets);
    return 0;
}

// What of a model is trained: adapters of the file, new ones, or all of it. For anything else they are merged.
static int decide_lora(Trainer *trainer, const ModelFile *file, int training) {
    static const char *const needs_rank[] = {"lora-alpha", "lora-targets", NULL};
    Options *opts = &trainer->opts;
    Config *config = &trainer->config;
    Lora lora = file->config.lora;
    int M, K;
    memset(&config->lora, 0, sizeof config->lora);
    if (!training && opts->lora_rank > 0) return error_set("--lora-rank goes with training; --lora names adapters");
    if (training && lora.rank > 0 && lora_from_file(trainer, &lora)) return -1;
    if (opts->lora_rank == 0) return given_in_vain(trainer, needs_rank, "no adapters are trained (--lora-rank)");
    if (opts->init[0] != '\0')
        return error_set("--lora-rank with --init: adapters belong to a model in a file; give -m");
    if (opts->grad_dtype != STORE_FP32)
        return error_set("--grad-dtype bf16: adapters' gradients are few and stay fp32; leave it out");
    lora.rank = opts->lora_rank, lora.alpha = opts->lora_alpha > 0.0f ? opts->lora_alpha : 2.0f * (float)lora.rank;
    if (lora_parse_targets(&lora, opts->lora_targets)) return -1;
    for (int m = 0; m < LORA_MODULES; m++) {
        lora_module_shape(m, config->channels, config_q_dim(config), config_kv_dim(config), config->ffn, &M, &K);
        if (lora_has(&lora, m) && (lora.rank > M || lora.rank > K))
            return error_set("--lora-rank %d is beyond %s, a matrix of %d x %d", lora.rank, lora_modules[m], M, K);
    }
    if (!is_given(trainer, "lr") && !opts->resume && !is_node(trainer)) opts->lr = LORA_LR;
    config->lora = lora;
    return 0;
}

// The mesh: how many cells, who is the anchor, how replicas meet.
static int decide_mesh(Trainer *trainer, int training, int *n_replicas, int *n_stages) {
    const Options *opts = &trainer->opts;
    int masked = is_compressed(opts), L = trainer->config.n_layers, X = opts->replicas;
    char *end;
    if (X == 0) X = masked ? 2 : 1;
    *n_stages = opts->stages > 0 ? opts->stages : masked ? (L < 4 ? L : 4) : 1;
    if (*n_stages > L) return error_set("--stages %d: the model has %d layers", *n_stages, L);
    trainer->anchored = opts->anchor >= 0 ? opts->anchor : masked && X >= 2;
    if (trainer->anchored && X < 2) return error_set("--anchor 1 takes the last of at least two replicas; give -x 2");
    if (trainer->anchored && !masked)
        return error_set("--anchor 1 without -p or a codec: nothing is masked, all replicas are of the fast circuit");
    if (training && masked && *n_stages == 1)
        return error_set("-p and --codec compress what stages send each other, and there is one stage; give -y 2 or "
                         "more, or -p 0");
    if (training && !trainer->anchored && opts->codec == CODEC_KLT)
        return error_set("--codec klt learns its tables from the anchor; give -x 2 or more");
    int use = opts->anchor_use;
    trainer->anchor.filters = use == ANCHOR_USE_FILTER || use == ANCHOR_USE_BOTH;
    trainer->anchor.corrects = use == ANCHOR_USE_BIAS || use == ANCHOR_USE_BOTH;
    if (training && trainer->anchored && trainer->anchor.corrects && opts->codec == CODEC_AQSGD)
        return error_set(
            "--anchor-use %s: aqsgd's caches follow the fast circuit's data, which the anchor does not see; "
            "leave it at filter, or choose another codec",
            use == ANCHOR_USE_BIAS ? "bias" : "both");
    trainer->anchor.rank = opts->anchor_rank >= 0 ? opts->anchor_rank : (int)larger(trainer->config.channels / 8, 1);
    *n_replicas = X - trainer->anchored;
    trainer->dp = *n_replicas > 1 ? (MeshDp)opts->dp : MESH_DP_NONE;
    if (!training) *n_replicas = 1, trainer->anchored = 0, trainer->dp = MESH_DP_NONE;
    if (training && !trainer->anchored && given_in_vain(trainer, anchor_options, "there is no anchor (-p and -x 2)"))
        return -1;
    if (training && trainer->dp != MESH_DP_DILOCO &&
        given_in_vain(trainer, outer_options, "there are no outer steps (two fast replicas and --dp diloco)"))
        return -1;
    if (strcmp(opts->anchor_delay, "auto") != 0) {
        long delay = strtol(opts->anchor_delay, &end, 10);
        if (end == opts->anchor_delay || *end != '\0' || delay < 1 || delay > 1000000)
            return error_set("--anchor-delay %s: a number of steps from 1 on, or auto", opts->anchor_delay);
        trainer->anchor_delay = (int)delay;
    }
    return 0;
}

// Every cell's optimizer.
static int decide_optimizer(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    Mesh *mesh = &trainer->mesh;
    Optimizer optimizer = {(OptimizerKind)opts->optimizer,
                           (RotateSource)opts->rotate_source,
                           (RotateGeometry)opts->rotate_geometry,
                           (Refresh)opts->refresh,
                           opts->rotate_every,
                           opts->rotate_max_dim};
    if (optimizer.kind != OPTIMIZER_ROTATE &&
        given_in_vain(trainer, rotate_options, "nothing is rotated (--optimizer rotate)"))
        return -1;
    if (opts->measure_alignment > 0 && trainer->precision != PRECISION_FP32)
        return error_set(
            "--measure-alignment takes differences of gradients, too fine for bf16; give --precision fp32");
    if (opts->measure_alignment > 0 && mesh->n_stages > 1 && opts->wire != WIRE_FP32)
        return error_set(
            "--measure-alignment takes differences of gradients, too fine for a bf16 boundary; give --wire "
            "fp32");
    if (optimizer.refresh != REFRESH_UNIFORM && mesh->n_stages == 1)
        return error_set("--refresh goes by the stages' delays, and there is one stage; give -y 2 or more");
    for (int i = 0; i < mesh_cells(mesh); i++) mesh->cells[i].stage.optimizer = optimizer;
    return 0;
}

// What wants floats where something smaller is asked for; NULL: nothing.
static const char *wants_floats(const Trainer *trainer) {
    const Options *opts = &trainer->opts;
    int others = opts->param_dtype != STORE_FP32 || opts->grad_dtype != STORE_FP32;
    int any = others || opts->optimizer_dtype != STORE_FP32, halves = opts->grad_dtype != STORE_FP32;
    if (any && opts->optimizer == OPTIMIZER_ROTATE) return "--optimizer rotate";
    if (any && opts->optimizer == OPTIMIZER_PIPEMARE) return "--optimizer pipemare";
    if (others && opts->measure_alignment > 0) return "--measure-alignment";
    if (halves && opts->probe > 0) return "--probe";
    if (halves && trainer->mesh.n_gpus > 1) return "--gpus";
    if (halves && trainer->dp == MESH_DP_DENSE) return "--dp dense";
    return NULL;
}

// How parameters, gradients and moments are kept, on every cell and the anchor.
static int decide_stores(Trainer *trainer, int training) {
    const Options *opts = &trainer->opts;
    const char *wants = training ? wants_floats(trainer) : NULL;
    Anchor *anchor = &trainer->anchor;
    if (wants != NULL)
        return error_set("%s works on fp32 values; leave out --optimizer-dtype, --param-dtype and --grad-dtype", wants);
    anchor->seed = (uint64_t)opts->seed;
    anchor->param_store = (Store)opts->param_dtype, anchor->grad_store = (Store)opts->grad_dtype;
    anchor->moment_store = (Store)opts->optimizer_dtype;
    anchor->lender = NULL;
    if (trainer->config.lora.rank > 0) { // frozen matrices are kept as products take them, adapters as floats
        anchor->frozen_store = trainer->precision == PRECISION_BF16 ? STORE_BF16 : anchor->param_store;
        anchor->param_store = STORE_FP32;
        if (!is_node(trainer) && !is_host(opts)) anchor->lender = mesh_model(&trainer->mesh, 0);
    }
    for (int i = 0; i < mesh_cells(&trainer->mesh); i++) {
        Stage *stage = &trainer->mesh.cells[i].stage;
        stage->seed = anchor->seed, stage->unrounded = 0;
        stage->param_store = anchor->param_store, stage->grad_store = anchor->grad_store;
        stage->frozen_store = anchor->frozen_store;
        stage->moment_store = anchor->moment_store;
    }
    return 0;
}

// How replicas meet in outer steps.
static int decide_outer(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    Outer *outer = &trainer->outer;
    int H = opts->local_steps, untied = trainer->mesh.n_stages > 1;
    outer->local_steps = H;
    outer->n_fragments = opts->fragments > 0 ? opts->fragments : H < 4 ? H : 4;
    outer->overlap = opts->overlap >= 0 ? opts->overlap : H > 1 ? 1 : 0;
    outer->lr = opts->outer_lr, outer->momentum = opts->outer_momentum, outer->mix = opts->mix;
    outer->rank = opts->powersgd_rank > 0 ? opts->powersgd_rank : powersgd_auto_rank(&trainer->config, untied, 64.0);
    if (trainer->dp != MESH_DP_DILOCO) return 0;
    if (outer->n_fragments > H)
        return error_set("--fragments %d: there are only %d steps between outer steps (--local-steps)",
                         outer->n_fragments, H);
    if (outer->overlap >= H)
        return error_set("--overlap %d: it must be less than --local-steps, %d", outer->overlap, H);
    return 0;
}

// What the asynchronous schedule does not go with.
static int decide_schedule(const Options *opts) {
    int asynchronous = opts->schedule == SCHEDULE_ASYNC;
    if (opts->no_stash && !asynchronous) return error_set("--no-stash goes with --schedule async");
    if (asynchronous && opts->micro_batch > 0 && opts->micro_batch != opts->batch)
        return error_set(
            "--micro-batch %d: with --schedule async a step is one micro-batch, all of --batch %d; leave it "
            "out",
            opts->micro_batch, opts->batch);
    if (opts->no_stash && opts->recompute)
        return error_set("--no-stash with --recompute: backward would recompute activations with other weights");
    if (opts->no_stash && opts->probe > 0)
        return error_set("--no-stash with --probe: a second pass would need the weights that are not kept");
    return 0;
}

// Settings that were left to the program.
static int decide(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    const Config *config = &trainer->config;
    if (opts->sample_every > 0 && tokenizer_takes_text(&trainer->tokenizer, "--sample-every")) return -1;
    int context = config->context;
    trainer->T = opts->seq > 0 ? opts->seq : context < 2048 ? context : 2048;
    if (trainer->T > context) return error_set("--seq %d is beyond the model's context of %d", trainer->T, context);
    if (decide_schedule(opts)) return -1;
    trainer->B = opts->schedule == SCHEDULE_ASYNC ? opts->batch : opts->micro_batch;
    if (trainer->B == 0) trainer->B = DEVICE_MICRO_TOKENS / trainer->T > 1 ? DEVICE_MICRO_TOKENS / trainer->T : 1;
    if (trainer->B > opts->batch) trainer->B = opts->batch;
    if ((int64_t)trainer->B * trainer->T > MAX_ROWS)
        return error_set("--micro-batch %d of --seq %d: at most %d tokens at once", trainer->B, trainer->T, MAX_ROWS);
    trainer->threads = opts->threads > 0 ? opts->threads : omp_get_num_procs();
    if (trainer->threads > omp_get_thread_limit()) trainer->threads = omp_get_thread_limit();
    if (opts->precision == PRECISION_OPTION_BF16 && !device_has_bf16())
        return error_set("--precision bf16: this device or build does not multiply bf16; use fp32");
    if (opts->precision == PRECISION_OPTION_FP32 && !device_has_fp32())
        return error_set("--precision fp32: this build computes in bf16; build with make PRECISION=FP32");
    trainer->precision =
        opts->precision == PRECISION_OPTION_FP32 || !device_has_bf16() ? PRECISION_FP32 : PRECISION_BF16;
    return 0;
}

// How many GPUs share the micro-batches of a cell.
static int decide_gpus(Trainer *trainer, int training) {
    const Options *opts = &trainer->opts;
    int present = nccl_devices(), n_micro = (opts->batch + trainer->B - 1) / trainer->B;
    char *end;
    long n = strcmp(opts->gpus, "all") == 0 ? (present > 1 ? present : 1) : strtol(opts->gpus, &end, 10);
    if (strcmp(opts->gpus, "all") != 0 && (end == opts->gpus || *end != '\0' || n < 1 || n > MAX_GPUS))
        return error_set("--gpus %s: a number from 1 to %d, or all", opts->gpus, MAX_GPUS);
    if (n > MAX_GPUS) n = MAX_GPUS;
    trainer->mesh.n_gpus = training ? (int)n : 1;
    if (trainer->mesh.n_gpus > n_micro)
        return error_set("--gpus %ld: a step of %d sequences has %d micro-batches of %d to share; give a smaller "
                         "--micro-batch or a larger --batch",
                         n, opts->batch, n_micro, trainer->B);
    return 0;
}

// Counts the mesh's memory with the settings as they are now.
static int plan_mesh(Trainer *trainer, int B, int T, int training) {
    Mesh *mesh = &trainer->mesh;
    if (decide_stores(trainer, training)) return -1;
    if (mesh_plan(mesh, trainer->opts.batch, B, T, training, trainer->opts.recompute, trainer->dp == MESH_DP_DILOCO))
        return -1;
    decide_rounding(trainer);
    return 0;
}

// Multiplications and additions a second of a thread, for a guess how long a step takes here: oneDNN on a Zen 5, less
// what is no matrix product.
#define GUESSED_BF16 250e9
#define GUESSED_FP32 100e9
#define LONGEST_STEP 60.0 // seconds

// Seconds that a sequence of every fast replica takes, forward and backward.
static double guess_seconds(const Trainer *trainer) {
    const Mesh *mesh = &trainer->mesh;
    double flops = 0.0, rate = trainer->precision == PRECISION_BF16 ? GUESSED_BF16 : GUESSED_FP32;
    for (const Stage *stage = mesh_model(mesh, 0); stage != NULL; stage = stage->next)
        flops += stage_flops(stage, (double)trainer->T, trainer->T) * (trainer->opts.recompute ? 2.0 : 1.0) +
                 stage_backward_flops(stage, (double)trainer->T, trainer->T);
    return flops * mesh->n_replicas / (rate * trainer->threads);
}

// What is picked where the user has left it to the program, in this order: what costs nothing but time, then what
// changes results, the least first.
typedef enum { PICK_MICRO_BATCH, PICK_RECOMPUTE, PICK_BF16, PICK_PARAMS, PICK_GRADS, PICK_INT8, PICK_RANK, PICKS } Pick;

// Makes a pick. 0: the user has decided, or there is nothing to pick.
static int pick_one(Trainer *trainer, Pick pick) {
    static const char *const names[PICKS] = {"micro-batch", "recompute",       "optimizer-dtype", "param-dtype",
                                             "grad-dtype",  "optimizer-dtype", "anchor-rank"};
    Options *opts = &trainer->opts;
    int rank = (int)larger(trainer->config.channels / 16, 1);
    if (is_given(trainer, names[pick])) return 0;
    if (pick == PICK_MICRO_BATCH && (trainer->B == 1 || opts->schedule == SCHEDULE_ASYNC)) return 0;
    if (trainer->config.lora.rank > 0 &&
        (pick == PICK_GRADS || (pick == PICK_PARAMS && trainer->precision == PRECISION_BF16)))
        return 0;
    if (pick == PICK_RECOMPUTE && (opts->recompute || opts->no_stash)) return 0;
    if (pick == PICK_RANK && (!trainer->anchored || trainer->anchor.rank <= rank)) return 0;
    switch (pick) {
    case PICK_MICRO_BATCH: trainer->B = opts->micro_batch = 1; break;
    case PICK_RECOMPUTE: opts->recompute = 1; break;
    case PICK_BF16: opts->optimizer_dtype = STORE_BF16; break;
    case PICK_PARAMS: opts->param_dtype = STORE_BF16; break;
    case PICK_GRADS: opts->grad_dtype = STORE_BF16; break;
    case PICK_INT8: opts->optimizer_dtype = STORE_INT8; break;
    default: trainer->anchor.rank = opts->anchor_rank = rank; break;
    }
    if (wants_floats(trainer) == NULL) return 1;
    opts->optimizer_dtype = opts->param_dtype = opts->grad_dtype = STORE_FP32; // none was given, else it were refused
    return 0;
}

// Makes picks until the plan fits into `room` bytes; 1 if it does. What was needed before comes to *before.
static int pick_memory(Trainer *trainer, int64_t room, int64_t *before) {
    MeshBytes bytes = mesh_bytes(trainer);
    int64_t needed = *before = mesh_bytes_device(&bytes);
    for (int pick = 0; pick < PICKS && needed > room; pick++) {
        if (!pick_one(trainer, (Pick)pick)) continue;
        if (plan_mesh(trainer, trainer->B, trainer->T, 1)) return -1;
        bytes = mesh_bytes(trainer);
        needed = mesh_bytes_device(&bytes);
    }
    return needed <= room;
}

// Says which options have been picked, as they would be given. Returns how many.
static int print_picks(const Options *before, const Options *now) {
    int n = 0;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const Option *option = &option_table[i];
        int was, is;
        char value[16];
        if (option->type != OPTION_INT && option->type != OPTION_FLAG && option->type != OPTION_CHOICE) continue;
        memcpy(&was, (const char *)before + option->offset, sizeof was);
        memcpy(&is, (const char *)now + option->offset, sizeof is);
        if (was == is) continue;
        printf("%s --%s", n++ == 0 ? "picked:" : ",", option->name);
        if (option->type == OPTION_CHOICE) cli_choice_name(value, sizeof value, option->choices, is);
        if (option->type == OPTION_INT) snprintf(value, sizeof value, "%d", is);
        if (option->type != OPTION_FLAG) printf(" %s", value);
    }
    return n;
}

// The batch and what else the user has left open, so that a run of this process alone fits into `room` bytes and, on a
// CPU, its steps take no longer than a minute or so; says what it has picked. Where nothing helps all stays as it was:
// the plan says what is missing. Of a mesh of several machines, and of a run that goes on, it changes nothing.
static int pick_settings(Trainer *trainer, int64_t room) {
    Options *opts = &trainer->opts, before = *opts;
    int64_t needed;
    int B = trainer->B, rank = trainer->anchor.rank;
    if (is_node(trainer) || is_host(opts) || opts->resume) return 0;
    double of_one = guess_seconds(trainer);
    if (DEVICE_IS_HOST && !is_given(trainer, "batch") && opts->schedule == SCHEDULE_SYNC &&
        opts->batch * of_one > LONGEST_STEP) {
        opts->batch = of_one < LONGEST_STEP ? (int)(LONGEST_STEP / of_one) : 1;
        if (trainer->B > opts->batch) trainer->B = opts->batch;
        if (plan_mesh(trainer, trainer->B, trainer->T, 1)) return -1;
    }
    int fits = pick_memory(trainer, room > 0 ? room : INT64_MAX, &needed);
    if (fits < 0) return -1;
    if (!fits) {
        memcpy(opts, &before, sizeof before);
        trainer->B = B, trainer->anchor.rank = rank;
        return plan_mesh(trainer, B, trainer->T, 1);
    }
    if (print_picks(&before, opts) == 0) return 0;
    if (opts->batch != before.batch) printf(", for steps of about %.0f s", opts->batch * guess_seconds(trainer));
    if (room > 0 && needed > room)
        printf(", where %.1f GB were needed and %.1f are free", 1e-9 * (double)needed, 1e-9 * (double)room);
    printf("; what you give is not changed\n");
    return 0;
}

// The length of the run, once the data are known.
static int decide_steps(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    int64_t windows = trainer->data.train.n_windows;
    const PackCounts *packed = &trainer->data.packed;
    if (!opts->dry_run && trainer->data.train.n_targets == 0 && (windows > 0 || packed->untrained > 0))
        return error_set("nothing would be trained: no token of the data is a target (--train-on %s, --seq %d); look "
                         "at them with --show-data 3 --train-on all",
                         opts->train_on == TRAIN_ON_ALL          ? "all"
                         : opts->train_on == TRAIN_ON_COMPLETION ? "completion"
                                                                 : "assistant",
                         trainer->T);
    if (windows == 0 && !opts->dry_run && packed->dropped > 0)
        return error_set("nothing would be trained: all is longer than --seq %d, and --too-long drop leaves it out",
                         trainer->T);
    if (windows == 0 && !opts->dry_run) return error_set("the data hold no training tokens");
    int64_t step = (int64_t)opts->batch * trainer->mesh.n_replicas, epochs3 = (3 * windows + step - 1) / step;
    trainer->n_steps = opts->steps > 0 ? opts->steps : epochs3 > 200 ? epochs3 : 200;
    trainer->warmup = opts->warmup >= 0 ? opts->warmup : (trainer->n_steps * 3 + 99) / 100;
    trainer->val_every = opts->val_every > 0 ? opts->val_every : (trainer->n_steps + 9) / 10;
    trainer->save_every = opts->save_every > 0 ? opts->save_every : (trainer->n_steps + 4) / 5;
    return 0;
}

static int export_model(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    static const Dtype dtypes[] = {DTYPE_BF16, DTYPE_F32, DTYPE_F16};
    Dtype dtype = dtypes[opts->export_dtype];
    if (opts->param_dtype != STORE_FP32)
        return error_set("--param-dtype has no effect: exported weights are of --export-dtype");
    const Stage *model = mesh_model(&trainer->mesh, 0);
    int result, has_tokenizer = 1;
    if (ends_with(opts->export_to, ".bin"))
        result = model_save_native(model, ARENA_PARAMS, trainer->side_files, opts->export_to, dtype);
    else if (ends_with(opts->export_to, ".gguf"))
        result = model_save_gguf(model, trainer->side_files, opts->export_to, dtype, &has_tokenizer);
    else
        result = model_save_folder(model, trainer->side_files, opts->export_to, dtype);
    if (result != 0) return -1;
    int window = ends_with(opts->export_to, ".gguf") ? config_window(&trainer->config, 0) : 0;
    if (window > 0 && window < trainer->config.context)
        printf("%s: llama.cpp does not look at the sliding window of %d; its results differ beyond so many tokens\n",
               opts->export_to, window);
    if (!has_tokenizer) printf("%s has no tokenizer: GGUF has no name for the model's\n", opts->export_to);
    printf("exported %lld parameters as %s to %s\n", (long long)trainer->n_params, dtype_name(dtype), opts->export_to);
    return 0;
}

static int print_evaluation(Trainer *trainer) {
    Evaluation eval;
    if (trainer->data.val.n_windows == 0) return error_set("--eval: there is no held-out data");
    MaskedEvaluation masked = {&trainer->mesh, 0};
    int is_masked = trainer->opts.eval_masked;
    if (is_masked && (trainer->mesh.n_stages == 1 || !is_compressed(&trainer->opts)))
        return error_set("--eval-masked: there is no masked boundary; give -p or --codec, and -y");
    if (evaluate(mesh_model(&trainer->mesh, 0), &trainer->data, &trainer->tokenizer, trainer->opts.val_tokens,
                 is_masked ? pass_masked : NULL, &masked, &eval, trainer->stream))
        return -1;
    if (!isfinite(eval.loss)) return error_set("--eval: the loss is not finite; see --check-weights");
    printf("validation loss %.6f over %lld targets", eval.loss, (long long)eval.n_targets);
    if (isfinite(eval.bits_per_byte))
        printf(", %.6f bits a byte over %lld bytes", eval.bits_per_byte, (long long)eval.n_bytes);
    printf("\n");
    return 0;
}

// Results of a question each, with -o also into a file.
static int print_choices(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    Quiz quiz;
    FileWriter writer;
    int writes = opts->out[0] != '\0';
    if (quiz_read(&quiz, opts->eval_choices, &trainer->tokenizer, trainer->T)) return -1;
    int result = writes ? file_writer_open(&writer, opts->out) : 0, opened = writes && result == 0;
    if (result == 0) result = quiz_answer(&quiz, mesh_model(&trainer->mesh, 0), trainer->stream);
    if (result == 0 && writes) result = quiz_write(&quiz, &writer);
    if (opened && file_writer_close(&writer)) result = -1;
    if (result == 0) {
        QuizScore score = quiz_score(&quiz);
        printf("choices: %lld questions, accuracy %.4f +- %.4f, by bytes %.4f +- %.4f, by tokens %.4f +- %.4f",
               (long long)quiz.n_questions, score.accuracy[NORM_SUM], score.error[NORM_SUM], score.accuracy[NORM_BYTES],
               score.error[NORM_BYTES], score.accuracy[NORM_TOKENS], score.error[NORM_TOKENS]);
        if (quiz.n_cut > 0)
            printf("; %lld of %lld contexts cut at their left to %d tokens", (long long)quiz.n_cut,
                   (long long)quiz.n_choices, trainer->T);
        printf("\n");
    }
    quiz_free(&quiz);
    return result;
}

// Where the answers to prompts go: -o, or NAME.answers.jsonl beside NAME.jsonl.
static int answers_path(const Options *opts, char *path, size_t size) {
    const char *given = opts->eval_generate;
    int stem = (int)strlen(given) - (ends_with(given, ".jsonl") ? 6 : 0);
    int n = opts->out[0] != '\0' ? snprintf(path, size, "%s", opts->out)
                                 : snprintf(path, size, "%.*s.answers.jsonl", stem, given);
    return n < (int)size ? 0 : error_set("--eval-generate: the path is too long");
}

enum { ANSWERS_AT_ONCE = 16 }; // products of so many rows take bf16 inputs where the CPU has them

// Prompts that --eval-generate answers at once.
static int answers_at_once(const Trainer *trainer) {
    int at_once = trainer->opts.micro_batch > 0 ? trainer->opts.micro_batch : ANSWERS_AT_ONCE;
    return at_once < trainer->T ? at_once : trainer->T;
}

static int print_answers(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    char path[PATH_MAX];
    Answering a;
    int at_once = answers_at_once(trainer), result = 0;
    double start = seconds();
    memset(&a, 0, sizeof a);
    a.tokenizer = &trainer->tokenizer, a.opts = opts;
    a.temperature = is_given(trainer, "temperature") ? opts->temperature : 0.0f;
    result =
        answers_path(opts, path, sizeof path) ||
        chat_format(&a.chat, (ChatTemplate)opts->chat_template, TRAIN_ON_ALL, chat_tokens(a.tokenizer), a.tokenizer) ||
        answers_read(&a, opts->eval_generate) || answers_alloc(&a, mesh_model(&trainer->mesh, 0), at_once) ||
        file_writer_open(&a.writer, path);
    if (result == 0) {
        result = answers_make(&a, mesh_model(&trainer->mesh, 0), trainer->stream);
        if (file_writer_close(&a.writer)) result = -1;
    }
    if (result == 0) {
        printf("answers: %lld prompts in %.1f s to %s", (long long)a.n, seconds() - start, path);
        if (a.n_cut > 0) printf("; %lld prompts cut at their left", (long long)a.n_cut);
        printf("\n");
    }
    answers_free(&a);
    return result != 0 ? -1 : 0;
}

// Prunes as --prune says.
static int prune(Trainer *trainer) {
    int64_t pruned, of;
    double share = (double)trainer->opts.prune;
    if (share == 0.0) return 0;
    if (model_prune(mesh_model(&trainer->mesh, 0), share, &pruned, &of)) return -1;
    printf("pruned: %lld of %lld weights of the layers' matrices\n", (long long)pruned, (long long)of);
    return 0;
}

typedef enum {
    ACTION_TRAIN,
    ACTION_EVAL,
    ACTION_CHOICES,
    ACTION_ANSWERS,
    ACTION_GENERATE,
    ACTION_EXPORT,
    ACTION_SHOW,
    ACTION_TOKENIZE
} Action;
enum { ACTIONS = ACTION_TOKENIZE + 1 };

// What the command line asks for; -1 if that is several things.
static int choose_action(const Trainer *trainer, Action *action) {
    static const char *const names[ACTIONS] = {"",         "eval",   "eval-choices", "eval-generate",
                                               "generate", "export", "show-data",    "tokenize"};
    *action = ACTION_TRAIN;
    for (int i = 1; i < ACTIONS; i++) {
        if (!is_given(trainer, names[i]) || (i == ACTION_EVAL && !trainer->opts.eval)) continue;
        if (i == ACTION_SHOW && trainer->opts.show_data == 0) continue;
        if (*action != ACTION_TRAIN) return error_set("--%s and --%s: one at a time", names[*action], names[i]);
        *action = (Action)i;
    }
    if (trainer->opts.resume && *action != ACTION_TRAIN) return error_set("--resume goes with training only");
    if (trainer->opts.eval_masked && *action != ACTION_EVAL) return error_set("--eval-masked goes with --eval");
    if (trainer->opts.stop.n > 0 && *action != ACTION_ANSWERS) return error_set("--stop goes with --eval-generate");
    if (trainer->opts.prune > 0.0f && *action == ACTION_TRAIN)
        return error_set("--prune goes with --eval, --eval-choices, --eval-generate, --generate and --export");
    return 0;
}

// Sequences and tokens the stage is made for.
static void decide_size(const Trainer *trainer, Action action, int *B, int *T) {
    int64_t wanted = (int64_t)strlen(trainer->opts.generate) + 1 + trainer->opts.max_tokens;
    int context = trainer->config.context;
    *B = action == ACTION_TRAIN || action == ACTION_EVAL || action == ACTION_CHOICES ? trainer->B : 1;
    *T = action == ACTION_EXPORT     ? 1
         : action != ACTION_GENERATE ? trainer->T
         : wanted < context          ? (int)wanted
                                     : context;
}

// Bytes of the caches that an action needs, for sequences of at most T tokens.
static int64_t action_cache_bytes(const Trainer *trainer, Action action, int T) {
    int one = action == ACTION_GENERATE || (action == ACTION_TRAIN && trainer->opts.sample_every > 0);
    int n = action == ACTION_ANSWERS ? answers_at_once(trainer) : one;
    return n * kv_cache_bytes(&trainer->config, T);
}

// Prints what is trained on: documents in the order of training.
static int show_data(const Trainer *trainer) {
    const Split *split = &trainer->data.train;
    const TokenStream *stream;
    const Segment *segments;
    Segment own;
    int shown = 0, most = trainer->opts.show_data, terminal = isatty(STDOUT_FILENO);
    for (int64_t sample = 0; sample < split->n_windows && shown < most; sample++) {
        int64_t window = split_order(split, sample, (uint64_t)trainer->opts.seed);
        int64_t n = split_segments(split, window, trainer->T, &stream, &segments, &own);
        for (int64_t s = 0; s < n && shown < most; s++, shown++) {
            int64_t first = segments[s].at, last = first + segments[s].rows + 1;
            printf("--- %d: %lld tokens, %lld trained on, in sequence %lld\n", shown + 1, (long long)(last - first),
                   (long long)stream_trained(stream, first + 1, last), (long long)window);
            show_tokens(stdout, &trainer->tokenizer, stream->tokens + first, last - first, terminal);
        }
    }
    if (shown == 0) printf("there is nothing to train on\n");
    return 0;
}

// Writes the data as token files.
static int tokenize_data(const Trainer *trainer) {
    char name[CLI_TEXT + 8];
    const Split *sides[2] = {&trainer->data.train, &trainer->data.val};
    int n_files[2];
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "%s_%s", trainer->opts.tokenize, i == 0 ? "train" : "val");
        if (token_files_write(sides[i]->streams, sides[i]->n_streams, trainer->config.vocab, name, TOKEN_FILE_MOST,
                              &n_files[i]))
            return -1;
    }
    printf("tokenized %lld documents and %lld conversations and prompts into %d files %s_train_*.bin",
           (long long)trainer->data.n_documents, (long long)trainer->data.n_samples, n_files[0],
           trainer->opts.tokenize);
    if (n_files[1] > 0) printf(" and %d %s_val_*.bin", n_files[1], trainer->opts.tokenize);
    printf("\n");
    return 0;
}

static int print_generation(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    printf("%s", opts->generate);
    int result =
        generate(mesh_model(&trainer->mesh, 0), &trainer->tokenizer, opts->generate, opts, stdout, trainer->stream);
    printf("\n");
    return result;
}

// Setting up ----------------------------------------------------------------------------------------------------------

// Options that a joiner may give; the coordinator says the others.
static const char *const joiner_options[] = {"join", "listen",         "out",   "data", "val-data", "threads",
                                             "gpus", "anchor-threads", "coder", NULL};

static int check_joiner(const Trainer *trainer) {
    for (int i = 0; i < OPTION_COUNT; i++) {
        int allowed = !trainer->given[i];
        for (int j = 0; joiner_options[j] != NULL; j++) allowed |= strcmp(joiner_options[j], option_table[i].name) == 0;
        if (!allowed) return error_set("--%s is for the coordinator to say; leave it out", option_table[i].name);
    }
    return 0;
}

// The data as the coordinator has them: its own file, or what was given here if it is the same.
static int node_open_data(Trainer *trainer) {
    char path[PATH_MAX];
    Dataset *data = &trainer->data;
    const json_t *setup = trainer->node->setup;
    if (is_given(trainer, "data")) {
        if (open_data(trainer)) return -1;
    } else {
        if (node_fetch(trainer->node, NODE_COORDINATOR, CHANNEL_DATA, "data", path)) return -1;
        int result = dataset_load(data, path, trainer->config.vocab);
        unlink(path);
        if (result != 0) return -1;
        dataset_rules(trainer);
        if (dataset_finish(data, trainer->T)) return -1;
    }
    json_t *hash = data_hashes(trainer);
    int same = json_equal(hash, json_object_get(setup, "data"));
    json_decref(hash);
    return same ? 0 : error_set("the data differ from the coordinator's; leave -d out, or give the same files");
}

// Settings, model and role of the coordinator's setup.
static int node_settle_in(Trainer *trainer) {
    Node *node = trainer->node;
    const json_t *setup = node->setup;
    const char *version = json_string_value(json_object_get(setup, "meshtune"));
    if (version == NULL || strcmp(version, MESHTUNE_VERSION) != 0)
        return error_set("the coordinator runs meshtune %.40s, this is %s; use the same everywhere",
                         version != NULL ? version : "of another age", MESHTUNE_VERSION);
    if (cli_from_json(option_table, OPTION_COUNT, &trainer->opts, trainer->given, json_object_get(setup, "options")) ||
        config_from_json(&trainer->config, json_object_get(setup, "config"), "the coordinator's config"))
        return -1;
    trainer->side_files = json_deep_copy(json_object_get(setup, "side_files"));
    if (!json_is_object(trainer->side_files)) return error_set("the coordinator sends no tokenizer");
    if (open_tokenizer(trainer)) return -1;
    node->role = (int)json_integer_value(json_object_get(setup, "role"));
    return 0;
}

// Which of the mesh's cells are of this process.
static int node_host(Trainer *trainer) {
    Node *node = trainer->node;
    Mesh *mesh = &trainer->mesh;
    int anchor = trainer->anchored ? mesh_cells(mesh) : -1;
    if (node->role < 0 || (node->role >= mesh_cells(mesh) && node->role != anchor))
        return error_set("the coordinator gives role %d in a mesh of %d cells", node->role, mesh_cells(mesh));
    for (int i = 0; i < mesh_cells(mesh); i++) mesh->cells[i].hosted = i == node->role;
    mesh->node = node, node->mesh = mesh;
    node_connect_boundaries(node);
    return 0;
}

// What a cell needs of the anchor that is elsewhere: room for factors and tables.
static int node_start_anchor(Trainer *trainer) {
    Anchor *anchor = &trainer->anchor;
    const Cell *cell = node_cell(trainer);
    anchor->launched = anchor->delivered = -1;
    for (int i = 0; i < 2; i++) {
        if (anchor->filters && factor_set_alloc(&anchor->sets[i], &cell->stage, anchor->rank)) return -1;
        if (anchor->corrects && factor_set_alloc(&anchor->bias[i], &cell->stage, anchor->rank)) return -1;
    }
    return anchor->learns ? learner_alloc_tables(&anchor->learner) : 0;
}

// Opens model and data, decides what is left open, and counts the memory; no large allocation yet.
static int prepare(Trainer *trainer, ModelFile *file, Action action) {
    int B, T, n_replicas = 1, n_stages = 1, training = action == ACTION_TRAIN;
    const Options *opts = &trainer->opts;
    Mesh *mesh = &trainer->mesh;
    if ((!is_node(trainer) && open_model(trainer, file)) || decide(trainer)) return -1;
    if (decide_lora(trainer, file, training)) return -1;
    if (decide_mesh(trainer, training, &n_replicas, &n_stages)) return -1;
    // without training only a masked evaluation has boundaries
    if (!training && !(action == ACTION_EVAL && opts->eval_masked)) n_stages = 1;
    trainer->base = trainer->config;
    if (mesh_table(mesh, &trainer->config, n_replicas, n_stages, trainer->T)) return -1;
    if (is_node(trainer) && node_host(trainer)) return -1;
    if (is_host(opts)) // only to plan: the memory that is told is one cell's
        for (int i = 1; i < mesh_cells(mesh); i++) mesh->cells[i].hosted = 0;
    if (decide_gpus(trainer, training)) return -1;
    trainer->config = mesh_model(mesh, 0)->config;
    for (const Stage *stage = mesh_model(mesh, 0); stage != NULL; stage = stage->next)
        trainer->n_params += stage->n_params;
    if (file->n_shards > 0 && model_match(mesh_model(mesh, 0), file)) return -1;
    if (decide_outer(trainer) || (training && decide_optimizer(trainer))) return -1;
    int needs_data = (training && !(opts->dry_run && opts->data.n == 0)) || action == ACTION_EVAL ||
                     action == ACTION_SHOW || action == ACTION_TOKENIZE;
    if (needs_data && (is_node(trainer) ? node_open_data(trainer) : open_data(trainer))) return -1;
    decide_size(trainer, action, &B, &T);
    trainer->cache_bytes = action_cache_bytes(trainer, action, T);
    codec_init(&mesh->codec, trainer->config.channels, opts->mask_rate, (MaskScale)opts->mask_scale, (Wire)opts->wire,
               (uint64_t)opts->seed);
    mesh->codec.kind = (CodecKind)opts->codec, mesh->codec.klt_forward = opts->klt_forward;
    if (codec_check(&mesh->codec, trainer->config.channels)) return -1;
    mesh->speed.bytes_per_second = (double)opts->link_mbps * 1e6 / 8.0,
    mesh->speed.latency = (double)opts->link_ms * 1e-3;
    mesh->device_flops = (double)opts->device_tflops * 1e12;
    if (training && opts->codec == CODEC_MASK && opts->mask_rate > 0.0f && (opts->batch + B - 1) / B > 4095)
        return error_set(
            "--micro-batch %d: a step of %d sequences has more than 4095 micro-batches, masks tell no more "
            "apart; give a larger one",
            B, opts->batch);
    mesh->asynchronous = training && opts->schedule == SCHEDULE_ASYNC, mesh->stash = !opts->no_stash;
    if (plan_mesh(trainer, B, T, training)) return -1;
    if (training && pick_settings(trainer, memory_left())) return -1;
    if (training && decide_steps(trainer)) return -1;
    if ((training && !is_node(trainer)) || opts->dry_run) print_plan(trainer);
    return 0;
}

// The anchor's settings, memory and thread.
static int start_anchor(Trainer *trainer) {
    const Options *opts = &trainer->opts;
    Anchor *anchor = &trainer->anchor;
    anchor->data = &trainer->data;
    anchor->batch = opts->anchor_batch > 0 ? opts->anchor_batch : opts->batch;
    anchor->micro_batch = trainer->B < anchor->batch ? trainer->B : anchor->batch, anchor->T = trainer->T;
    anchor->debias = opts->anchor_debias, anchor->precision = trainer->precision;
    anchor->threads = opts->anchor_threads > 0 ? opts->anchor_threads : (trainer->threads + 1) / 2;
    anchor->beta = opts->anchor_beta, anchor->tau = opts->tau;
    anchor->tau_relative = opts->tau_relative, anchor->wire = (Wire)opts->wire;
    anchor->unrounded = trainer->mesh.cells[0].stage.unrounded;
    anchor->learns = opts->codec == CODEC_KLT, anchor->n_boundaries = trainer->mesh.n_stages - 1;
    for (int b = 0; b < anchor->n_boundaries; b++)
        anchor->layer[b] = mesh_cell(&trainer->mesh, 0, b + 1)->stage.first_layer;
    anchor->coded.codec = &trainer->mesh.codec, anchor->coded.replica = trainer->mesh.n_replicas;
    Learner *learner = &anchor->learner;
    learner->predicts = opts->klt_predict, learner->metric = (double)opts->klt_metric,
    learner->fixed = opts->codec_coding == 1;
    learner->C = trainer->config.channels, learner->V = trainer->config.vocab;
    for (int d = 0; d < 2; d++)
        learner->budget[d] = codec_klt_budget(&trainer->mesh.codec, (CodecDirection)d, learner->C);
    learner->n_boundaries = anchor->learns ? anchor->n_boundaries : 0;
    if (anchor->learns && mesh_alloc_klt(&trainer->mesh, learner->predicts)) return -1;
    if (coder_has_thread(trainer) && mesh_start_coder(&trainer->mesh)) return -1;
    learner->embed = trainer->mesh.klt[0].embed, learner->tables = trainer->mesh.klt[0].tables;
    if (is_node(trainer) && node_cell(trainer) != NULL) return node_start_anchor(trainer);
    return anchor_start(anchor, &trainer->config, opts->recompute);
}

// Memory and weights.
static int load(Trainer *trainer, ModelFile *file) {
    Mesh *mesh = &trainer->mesh;
    Stage *model = mesh_model(mesh, 0);
    uint64_t seed = (uint64_t)trainer->opts.seed;
    if (mesh_fits(trainer)) return -1;
    if (stream_create(&trainer->stream, trainer->precision, trainer->threads)) return -1;
    if (mesh_alloc(mesh, trainer->stream)) return -1;
    if (is_node(trainer)) { // weights come when it is placed
    } else if (file->n_shards > 0) {
        for (Stage *stage = model; stage != NULL && stage->n_frozen > 0; stage = stage->next)
            stage_init_table(stage, seed); // adapters, unless the file has some
        if (model_load(model, file, trainer->opts.check_weights)) return -1;
        if (file->config.lora.rank > 0 && model->n_frozen == 0 && model_add_adapters(model, file)) return -1;
    } else {
        for (Stage *stage = model; stage != NULL; stage = stage->next) stage_init(stage, seed);
    }
    if (!is_node(trainer)) mesh_spread(mesh);
    if (!is_node(trainer) && mesh_share_frozen(mesh)) return -1;
    if (mesh_alloc_ends(mesh, mesh_samples(trainer))) return -1;
    if (mesh_meet(mesh, &trainer->outer, seed)) return -1;
    return trainer->anchored ? start_anchor(trainer) : 0;
}

static void node_free(Node *node) {
    if (node == NULL) return;
    if (node->net != NULL) net_close(node->net);
    parcels_free(&node->inbox, CHANNEL_KINDS, -1);
    parcels_free(&node->early, CHANNEL_KINDS, -1);
    parcel_free(node->factors);
    json_t *orders[] = {node->go, node->setup, node->place, node->save, node->wants};
    for (int i = 0; i < 5; i++) json_decref(orders[i]);
    if (node->scratch[0] != '\0') file_remove_folder(node->scratch);
    free(node);
}

static void trainer_free(Trainer *trainer) {
    anchor_stop(&trainer->anchor);
    device_free(trainer->leading.directions);
    mesh_free(&trainer->mesh);
    json_decref(trainer->side_files);
    tokenizer_free(&trainer->tokenizer);
    dataset_close(&trainer->data);
    stream_destroy(trainer->stream);
    node_free(trainer->node);
}

// Connects to the run of the node's token.
static int node_dial(Trainer *trainer) {
    Node *node = trainer->node;
    const char *listen_at = trainer->opts.listen;
    NetLimits limits;
    memset(&limits, 0, sizeof limits);
    limits.control_bytes = NODE_SETUP; // the coordinator's setup has the model's tokenizer in it
    node->net = net_join(&node->token, strcmp(listen_at, "none") == 0 ? NULL : listen_at, &limits);
    return node->net != NULL ? 0 : -1;
}

// Dials anew if the file of the token has another one by now: its coordinator was started again, or what was read was
// left by an earlier one. Only before there is a setup; once a second.
static int node_follow(Trainer *trainer) {
    NetToken token;
    Node *node = trainer->node;
    double now = seconds();
    if (node->token_text[0] != '@' || now < node->token_due) return 0;
    node->token_due = now + 1.0;
    if (net_token_parse(&token, node->token_text) || memcmp(&token, &node->token, sizeof token) == 0) return 0;
    net_close(node->net);
    node->token = token;
    return node_dial(trainer);
}

// The mesh and all that belongs to it, so that another role can be taken.
static void node_clear_out(Trainer *trainer) {
    Node *node = trainer->node;
    anchor_stop(&trainer->anchor);
    mesh_free(&trainer->mesh);
    json_decref(trainer->side_files);
    tokenizer_free(&trainer->tokenizer);
    dataset_close(&trainer->data);
    stream_destroy(trainer->stream);
    trainer->side_files = NULL, trainer->stream = NULL, trainer->n_params = 0;
    memset(&trainer->data, 0, sizeof trainer->data);
    node->mesh = NULL, node->idle = NULL, node->has_embed = node->has_frozen = 0, node->epoch = 0;
}

// Takes the role of the coordinator's setup: memory and data, unless it is the cell it had. An anchor begins anew.
static int node_move_in(Trainer *trainer) {
    Node *node = trainer->node;
    ModelFile none;
    int role = (int)json_integer_value(json_object_get(node->setup, "role"));
    int is_cell = node->mesh != NULL && node_cell(trainer) != NULL;
    memset(&none, 0, sizeof none);
    node->interrupted = node->forgotten = 0;
    if (!is_cell || role != node->role) {
        if (node->mesh != NULL) node_clear_out(trainer);
        if (node_settle_in(trainer) || prepare(trainer, &none, ACTION_TRAIN) || load(trainer, &none)) {
            if (!node_was_interrupted(node) || !node->forgotten) return -1;
            node_clear_out(trainer); // half-way: the next setup begins anew
            return 0;
        }
        node->idle = node_average, node->context = trainer;
    }
    json_decref(node->setup);
    node->setup = NULL;
    return node_tell(node, "loaded", json_object()) == 0 || node_was_interrupted(node) ? 0 : -1;
}

// A place, from its beginning to whatever ends it. 0, or -1: this node cannot go on.
static int node_fill_place(Trainer *trainer) {
    Node *node = trainer->node;
    Batch *batches = batches_alloc(trainer);
    if (batches == NULL) return -1;
    if (node_take_place(trainer) == 0) {
        if (node_cell(trainer) != NULL)
            node_train(trainer, batches);
        else
            node_serve(trainer);
    }
    batches_free(batches, trainer->mesh.n_replicas);
    return node_was_interrupted(node) && !(node->is_alone && interrupts > 0) ? 0 : -1;
}

// From the first word with the coordinator to the last.
static int node_live(Trainer *trainer) {
    Node *node = trainer->node;
    int result = 0;
    while (result == 0 && !node->ended) {
        if (node->setup != NULL)
            result = node_move_in(trainer);
        else if (node->place != NULL && node->mesh != NULL)
            result = node_fill_place(trainer);
        else
            result = (node->mesh == NULL && node_follow(trainer)) || node_pump(node, 1) < 0 ? -1 : 0;
    }
    return node->ended != 0 ? (node->ended > 0 ? 0 : -1) : result;
}

// Tells the coordinator why this node goes, and gives the message a moment.
static void node_say_goodbye(Node *node) {
    char reason[ERROR_MAX];
    const double until = seconds() + 2.0;
    memcpy(reason, error_message, sizeof reason);
    if (node_tell(node, "failed", json_pack("{s:s%}", "reason", reason, (size_t)strnlen(reason, 200))) == 0)
        while (net_queued(node->net, NODE_COORDINATOR) > 0 && seconds() < until) net_wait(node->net, 0.01);
    memcpy(error_message, reason, sizeof reason);
}

// What this process has sent and received, for who compares it with the counters of its interface.
static void print_totals(Net *net) {
    NetTotals t;
    net_totals(net, &t);
    printf(
        "network: %lld bytes up and %lld down; on the wire, before CURVE and TCP, %lld in %lld frames up and %lld in "
        "%lld down\n",
        (long long)t.payload_up, (long long)t.payload_down, (long long)t.wire_up, (long long)t.frames_up,
        (long long)t.wire_down, (long long)t.frames_down);
    fflush(stdout);
}

// Joins the run of a token.
static int node_join(Trainer *trainer, const char *token_text) {
    NetToken token;
    if (check_joiner(trainer) || net_token_parse(&token, token_text)) return -1;
    Node *node = trainer->node = (Node *)calloc(1, sizeof(Node));
    if (node == NULL) return error_set("out of memory for a node");
    node->role = -1, node->wants = json_array(), node->open = -1;
    node->is_alone = trainer->opts.join[0] != '\0' || trainer->launch.size > 0;
    if (node->is_alone) catch_interrupts();
    node->carrier.send = node_carry, node->carrier.context = node;
    const char *temporary = getenv("TMPDIR");
    snprintf(node->scratch, sizeof node->scratch, "%s/meshtune-XXXXXX", temporary != NULL ? temporary : "/tmp");
    if (mkdtemp(node->scratch) == NULL) {
        int reason = errno;
        node->scratch[0] = '\0';
        return error_set("a folder for files on their way: mkdtemp: %s", strerror(reason));
    }
    node->token = token, node->token_text = token_text;
    for (int r = 0; r < CHANNEL_ROLES; r++) node->node_of[r] = NODE_NOBODY;
    node->heard = seconds(), node->host_is_gone = &trainer->host_is_gone;
    int result = node_dial(trainer) ? -1 : node_live(trainer);
    if (node->is_alone && node->net != NULL) print_totals(node->net);
    if (result == 0) return 0;
    if (node->net != NULL && !node->ended) node_say_goodbye(node);
    return -1;
}

// Waits until rank 0 has written its token to a file.
static int wait_for_token(const Launch *launch, const char *text, double patience) {
    const double until = seconds() + patience;
    NetToken token;
    while (net_token_parse(&token, text) != 0) {
        if (seconds() >= until)
            return error_set("%s started %d processes, and rank 0 has not written %s within %.0f s; is -o on a file "
                             "system that all of them see?",
                             launch->by, launch->size, text + 1, patience);
        usleep(100000);
    }
    return 0;
}

// Joins as one of the processes of a launcher. All have the same command line: what is for the coordinator to say is
// taken back.
static int launch_join(Trainer *trainer) {
    char path[PATH_MAX], text[PATH_MAX + 1];
    const Launch *launch = &trainer->launch;
    if (path_join(path, trainer->opts.out, "join")) return -1;
    snprintf(text, sizeof text, "@%s", path);
    for (int i = 0; i < OPTION_COUNT; i++) {
        const Option *option = &option_table[i];
        int keeps = 0;
        for (int j = 0; joiner_options[j] != NULL; j++) keeps |= strcmp(joiner_options[j], option->name) == 0;
        if (keeps || option->type == OPTION_LIST) continue;
        trainer->given[i] = 0;
        if (cli_set(option, &trainer->opts, option->fallback)) return -1;
    }
    return wait_for_token(launch, text, NODE_PATIENCE) ? -1 : node_join(trainer, text);
}

// ---------------------------------------------------------------------------------------------------------------------
// Coordinator: the first process of a mesh of several. It has the run's folder and the settings, but no cell of the
// model: a thread beside it joins like any other node, unless --no-cell. It gives roles to who joins, places all at a
// step, opens the gates that all have reached, takes their shards, and takes out of the run who is not heard of.
//
//   FORMING --all that a run begins with are ready--> PLACING --all have their state--> GOING --last shards--> OVER
//      ^                                                 ^                                |
//      |                                                 +---- at a boundary: the lost are replaced
//      +---------------------------------- no replica is whole any more ------------------+

typedef enum { RUN_FORMING, RUN_PLACING, RUN_GOING, RUN_OVER } RunPhase;

typedef enum { SHARD_NONE, SHARD_DUE, SHARD_HERE } ShardState;

// How a member is reached, and what it has said at the gate.
typedef struct {
    uint32_t node;
    char endpoint[NET_ENDPOINT], key[NET_KEY];
    json_t *report;
    json_t *totals;  // what it had sent and received when it last said so (totals_to_json)
    json_t **steps;  // (PACE_STEPS) asynchronous: what it has said of steps that not all are through with
    int64_t had;     // the last snapshot whose factors it has
    NetTotals links; // as it has told last
    int has_links;
    double spoke; // when its main thread was heard last, which tells of its links each second
} Contact;

// Times --peer-timeout: a node whose network answers but whose main thread says nothing hangs. No part of its work
// takes so long between two looks at what has come.
#define MEMBER_HANGS 30.0

typedef struct {
    Trainer *trainer;
    const ModelFile *file; // of the base model; no shards: --init
    Net *net;
    NetKeys keys;
    Membership members;
    Contact *contacts;
    int n_contacts;
    uint32_t next_node, epoch;
    double watched, grace; // when members were looked at last; until when nobody is given up
    int turn;
    RunPhase phase;
    int64_t gate;        // the last that was opened
    int64_t waits;       // a gate that waits until shards are here, -1: none
    int64_t restored;    // step of the checkpoint that cells begin with, -1: none
    int64_t launched;    // the last snapshot
    int64_t *stage_gate; // (n_stages) asynchronous: the last gate of a stage alone
    int64_t halt_at;     // asynchronous: the step at which all stand still, -1: none
    int halt_then;
    int64_t granted;    // the last snapshot whose factors all have
    int deliveries;     // whose factors were used
    int exact;          // the run goes on where a checkpoint was, beyond which nobody has gone
    int began;          // once
    double anchor_lost; // when the anchor was there last
    json_t *line;       // of the last step, until its validation is known
    int64_t validated;  // the step of the last validation, and its loss
    double val_loss;
    int holds; // all wait to be placed behind this step
    double step_began, step_seconds;
    int skipped_in_a_row, stops; // the next step is the last
    int64_t factor_bytes;        // the anchor has sent since the last step
    json_t *factors;             // what the anchor has told of the last ones
    // shards on their way
    int64_t saving;        // step, -1: none
    unsigned char *shards; // (roles) ShardState
    json_t *anchor;        // the anchor's state in the checkpoint `restored`, as run.json has it; NULL: it has none
    json_t *next_anchor;   // in the one that is being made
    json_t *saved;         // run.json
    char scratch[PATH_MAX];
    // the thread that has a cell
    pthread_t thread;
    int has_thread;
    Trainer *guest;
    char token[NET_TOKEN];
    // what others see
    StatusPage *page;                          // NULL: none
    double loss, tok_s, member_tok_s, seen_at; // of the last step; of each of its replicas; when it was shown last
} Coordinator;

static int lose_member(Coordinator *c, uint32_t node, const char *reason);

// Steps of an asynchronous pipeline that may be under way at once.
static size_t pace_steps(const Coordinator *c) {
    return (size_t)ahead_window(c->members.n_stages) + 4;
}

static Contact *contact_of(const Coordinator *c, uint32_t node) {
    for (int i = 0; i < c->n_contacts; i++)
        if (c->contacts[i].node == node) return &c->contacts[i];
    return NULL;
}

static void clear_reports(Coordinator *c) {
    for (int i = 0; i < c->n_contacts; i++) {
        json_decref(c->contacts[i].report);
        c->contacts[i].report = NULL;
    }
}

// What has been said of steps under way, too.
static void clear_steps(Coordinator *c) {
    for (int i = 0; i < c->n_contacts; i++) {
        c->contacts[i].had = -1;
        for (size_t k = 0; k < pace_steps(c); k++) {
            json_decref(c->contacts[i].steps[k]);
            c->contacts[i].steps[k] = NULL;
        }
    }
    c->granted = c->halt_at = -1;
}

static int member_is_cell(const Coordinator *c, const Member *member) {
    return member->role >= 0 && member->role < membership_cells(&c->members);
}

// 1 for a replica that is in the run or being placed.
static int replica_lives(const Coordinator *c, int replica) {
    return membership_has(&c->members, replica, MEMBER_PLACED);
}

static json_t *living_to_json(const Coordinator *c) {
    json_t *list = json_array();
    for (int r = 0; r < c->members.n_replicas; r++)
        if (replica_lives(c, r)) json_array_append_new(list, json_integer(r));
    return list;
}

// Who is in the run, and how to reach them.
static json_t *nodes_to_json(const Coordinator *c) {
    json_t *list = json_array();
    for (int i = 0; i < c->members.n; i++) {
        const Member *member = &c->members.members[i];
        const Contact *contact = contact_of(c, member->node);
        if (member->state < MEMBER_PLACED || contact == NULL) continue;
        json_t *entry =
            json_pack("{s:i, s:I, s:s}", "role", member->role, "node", (json_int_t)member->node, "key", contact->key);
        if (contact->endpoint[0] != '\0') json_object_set_new(entry, "endpoint", json_string(contact->endpoint));
        json_array_append_new(list, entry);
    }
    return list;
}

// An order to all that are placed; only_cells: not to the anchor. Takes over the reference.
static int order_all(Coordinator *c, json_t *order, int only_cells) {
    int result = 0;
    for (int i = 0; i < c->members.n && result == 0; i++) {
        const Member *member = &c->members.members[i];
        if (member->state < MEMBER_PLACED || (only_cells && !member_is_cell(c, member))) continue;
        result = send_order(c->net, member->node, json_deep_copy(order));
    }
    json_decref(order);
    return result;
}

// --- Roles

// The settings of the run and what a role needs to know.
static json_t *setup_order(const Coordinator *c, int role) {
    static const char *const own[] = {
        "model",   "init",    "data",        "val-data",       "out",       "host",     "join",  "listen",
        "resume",  "threads", "gpus",        "anchor-threads", "generate",  "export",   "coder", "min-replicas",
        "no-cell", "dry-run", "status-port", "status-address", "show-data", "tokenize", NULL};
    const Trainer *trainer = c->trainer;
    json_t *options = cli_to_json(option_table, OPTION_COUNT, &trainer->opts);
    for (int i = 0; own[i] != NULL; i++) json_object_del(options, own[i]);
    json_object_set_new(options, "steps", json_integer((json_int_t)trainer->n_steps));
    return json_pack("{s:s, s:s, s:i, s:o, s:o, s:O, s:o}", "type", "setup", "meshtune", MESHTUNE_VERSION, "role", role,
                     "options", options, "config", config_to_json(&trainer->base, "float32"), "side_files",
                     trainer->side_files, "data", data_hashes(trainer));
}

// Gives the roles that are free to members without one.
static int give_roles(Coordinator *c) {
    for (int i = 0; i < c->members.n; i++) {
        Member *member = &c->members.members[i];
        Contact *contact = contact_of(c, member->node);
        int role = member->state == MEMBER_SPARE ? membership_vacancy(&c->members) : -1;
        if (role < 0) continue;
        member->role = role, member->state = MEMBER_LOADING;
        if (contact != NULL) contact->spoke = seconds(); // spares say nothing
        if (send_order(c->net, member->node, setup_order(c, role))) return -1;
    }
    return 0;
}

static const char *role_text(const Coordinator *c, int role, char *text, size_t size) {
    int S = c->members.n_stages;
    if (role == membership_cells(&c->members))
        snprintf(text, size, "the anchor");
    else
        snprintf(text, size, "replica %d stage %d", role / S, role % S);
    return text;
}

// Somebody asks to join.
static int admit_node(Coordinator *c, const NetEvent *event) {
    char host[NET_TEXT], text[64];
    uint32_t id = c->next_node++;
    Contact *contacts = (Contact *)realloc(c->contacts, sizeof(Contact) * (size_t)(c->n_contacts + 1));
    if (contacts == NULL) return error_set("out of memory for a node");
    c->contacts = contacts;
    Contact *contact = &contacts[c->n_contacts++];
    memset(contact, 0, sizeof *contact);
    contact->node = id, contact->had = -1, contact->spoke = seconds();
    contact->steps = (json_t **)calloc(pace_steps(c), sizeof(json_t *));
    if (contact->steps == NULL) return error_set("out of memory for a node");
    memcpy(contact->key, event->public_key, sizeof contact->key);
    snprintf(host, sizeof host, "%s", event->text);
    if (event->port > 0) snprintf(contact->endpoint, sizeof contact->endpoint, "tcp://%.240s:%d", host, event->port);
    if (net_admit(c->net, event->from, id)) {
        free(contact->steps);
        c->n_contacts--;
        return net_refuse(c->net, event->from, "the coordinator takes no more nodes");
    }
    if (membership_add(&c->members, id) == NULL || give_roles(c)) return -1;
    const Member *member = membership_find(&c->members, id);
    run_clear_line(&c->trainer->run);
    printf("node %u from %s: %s\n", id, host,
           member->role < 0 ? "a spare" : role_text(c, member->role, text, sizeof text));
    fflush(stdout);
    return 0;
}

// --- Places

// path (PATH_MAX) = the shard of a cell in the checkpoint of a step, or of another replica's cell of that stage.
static int checkpoint_shard(const Trainer *trainer, int64_t step, int replica, int stage, char *path) {
    char folder[PATH_MAX];
    if (checkpoint_path(folder, trainer->run.path, step, "") || shard_path(path, folder, replica, stage)) return -1;
    for (int r = 0; r < trainer->mesh.n_replicas && !file_exists(path); r++)
        if (shard_path(path, folder, r, stage)) return -1;
    return file_exists(path) ? 0 : error_set("%s: there is no shard of stage %d", folder, stage);
}

// 1 if a shard has its cell's parameters beside the rest.
static int shard_has_params(const char *path, const Stage *stage) {
    char name[128];
    SafeTensors file;
    if (safetensors_open(&file, path)) return 0;
    snprintf(name, sizeof name, "p.%s", stage->tensors[0].name);
    int has = safetensors_find(&file, name) != NULL;
    safetensors_close(&file);
    return has;
}

// 1 if the run's first weights are random: its model is, or its adapters.
static int begins_anew(const Coordinator *c) {
    int adapted = c->trainer->config.lora.rank > 0;
    return c->file->n_shards == 0 || (adapted && c->file->config.lora.rank == 0);
}

// Where the state of a cell comes from that is not in the run: the checkpoint, the beginning, or a cell of the same
// stage that is in the run (donor).
static json_t *newcomer_source(const Coordinator *c, const Member *member, const Member *donor) {
    char path[PATH_MAX];
    const Trainer *trainer = c->trainer;
    int S = c->members.n_stages, stage = member->role % S, is_init = c->file->n_shards == 0;
    if (donor != NULL)
        return json_pack("{s:b, s:s, s:I}", "init", is_init, "weights", "none", "shard", (json_int_t)donor->node);
    if (c->restored < 0)
        return json_pack("{s:b, s:s, s:i}", "init", is_init, "weights", begins_anew(c) ? "init" : "file", "shard", -1);
    int held = checkpoint_shard(trainer, c->restored, member->role / S, stage, path) == 0 &&
               shard_has_params(path, &mesh_cell(&trainer->mesh, 0, stage)->stage);
    return json_pack("{s:b, s:s, s:i}", "init", is_init, "weights", held ? "none" : "file", "shard", NODE_COORDINATOR);
}

// Where a member's state comes from. lead: a replica that has the state of the step at which the run is, -1: none.
static json_t *place_source(const Coordinator *c, const Member *member, int lead) {
    int S = c->members.n_stages, is_init = c->file->n_shards == 0;
    if (member->stands) return json_pack("{s:b, s:s}", "init", is_init, "weights", "keep");
    if (member_is_cell(c, member))
        return newcomer_source(c, member,
                               lead < 0 ? NULL : membership_of_role(&c->members, lead * S + member->role % S));
    json_t *from = json_pack("{s:b}", "init", is_init);
    if (c->restored >= 0 && c->anchor != NULL) json_object_set(from, "anchor", c->anchor);
    return from;
}

// 1 if the anchor that is to be placed has factors: it has been in the run, or a checkpoint has them.
static int anchor_has_factors(const Coordinator *c) {
    const Member *member = membership_of_role(&c->members, membership_cells(&c->members));
    if (member != NULL && member->stands) return c->deliveries > 0;
    return c->restored >= 0 && json_integer_value(json_object_get(c->anchor, "deliveries")) > 0;
}

// Begins an epoch at the step at which the run is: with all whole replicas, and the anchor if it is there.
static int place_all(Coordinator *c) {
    const Trainer *trainer = c->trainer;
    const Progress *p = &trainer->progress;
    Membership *m = &c->members;
    int anchor = membership_has_anchor(m, MEMBER_READY), lead = membership_standing(m), result = 0;
    int whole[MESH_MAX_REPLICAS];
    clear_steps(c);
    for (int s = 0; s < m->n_stages; s++) c->stage_gate[s] = -1;
    int64_t stop_after = trainer->opts.stop_after;
    if (trainer->mesh.asynchronous && stop_after > p->step && stop_after < trainer->n_steps)
        c->halt_at = stop_after, c->halt_then = THEN_STOP;
    c->epoch++, c->turn = 0, c->phase = RUN_PLACING, c->gate = gate_number(p->step, 0) - 1, c->waits = -1;
    for (int r = 0; r < m->n_replicas; r++) whole[r] = membership_has(m, r, MEMBER_READY);
    for (int i = 0; i < m->n; i++) {
        Member *member = &m->members[i];
        if (member->state < MEMBER_READY) continue;
        if (member_is_cell(c, member) ? whole[member->role / m->n_stages] : anchor)
            member->state = MEMBER_PLACED, member->gate = c->gate;
    }
    json_t *begun = json_array();
    for (int f = 0; f < trainer->outer.n_fragments; f++)
        json_array_append_new(begun, json_integer((json_int_t)trainer->outer.begun[f]));
    net_generation(c->net, c->epoch);
    for (int i = 0; i < m->n && result == 0; i++) {
        const Member *member = &m->members[i];
        if (member->state != MEMBER_PLACED) continue;
        json_t *order =
            json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:O, s:I, s:o, s:o, s:o, s:b, s:b, s:b}", "type", "place",
                      "epoch", (json_int_t)c->epoch, "step", (json_int_t)p->step, "samples", (json_int_t)p->samples,
                      "adam_steps", (json_int_t)p->adam_steps, "tokens", (json_int_t)p->tokens, "begun", begun,
                      "launched", (json_int_t)(c->exact ? c->launched : -1), "living", living_to_json(c), "nodes",
                      nodes_to_json(c), "from", place_source(c, member, lead), "has_anchor", anchor, "factors",
                      anchor && anchor_has_factors(c), "exact", c->exact);
        json_object_set_new(order, "halt", json_integer((json_int_t)c->halt_at));
        result = send_order(c->net, member->node, order);
    }
    c->exact = 0;
    json_decref(begun);
    return result;
}

// What every opened gate says.
static json_t *go_order(const Coordinator *c, int64_t gate, int then) {
    int anchor = membership_has_anchor(&c->members, MEMBER_PLACED);
    int stale = !anchor && seconds() - c->anchor_lost > (double)c->trainer->opts.anchor_timeout;
    return json_pack("{s:s, s:I, s:o, s:b, s:i, s:b}", "type", "go", "gate", (json_int_t)gate, "living",
                     living_to_json(c), "anchor", anchor, "then", then, "stale", stale);
}

// A member has its state; once all have, the run goes on.
static int member_is_at(Coordinator *c, Member *member, const json_t *about) {
    if (json_integer_value(json_object_get(about, "epoch")) != (json_int_t)c->epoch) return 0;
    if (member->state != MEMBER_PLACED) return 0;
    member->state = MEMBER_RUNNING, member->stands = 1;
    for (int i = 0; i < c->members.n; i++)
        if (c->members.members[i].state == MEMBER_PLACED) return 0;
    c->phase = RUN_GOING, c->step_began = seconds();
    c->members.min_replicas = 1, c->began = 1; // from here on
    if (c->deliveries > 0) c->members.needs_anchor = 0;
    return order_all(c, go_order(c, c->gate, THEN_RUN), 0);
}

static int try_begin(Coordinator *c) {
    return c->phase == RUN_FORMING && membership_may_begin(&c->members) ? place_all(c) : 0;
}

// 1 if there are whole replicas, or an anchor, that wait to come into the run, and can.
static int has_newcomers(const Coordinator *c) {
    const Membership *m = &c->members;
    int anchor = membership_has_anchor(m, MEMBER_READY), newcomers = 0;
    for (int r = 0; r < m->n_replicas; r++)
        newcomers += membership_has(m, r, MEMBER_READY) && !membership_has(m, r, MEMBER_PLACED);
    if (newcomers > 0 && c->trainer->opts.codec == CODEC_KLT && !anchor) return 0; // who would give them tables
    return newcomers > 0 || (anchor && !membership_has_anchor(m, MEMBER_PLACED));
}

// The run is where the last checkpoint was, or at its beginning: what came after it is lost.
static int rewind_run(Coordinator *c) {
    char folder[PATH_MAX], path[PATH_MAX];
    Trainer *trainer = c->trainer;
    Progress *p = &trainer->progress;
    json_error_t error;
    double elapsed = p->elapsed;
    if (c->restored >= 0) {
        if (checkpoint_path(folder, trainer->run.path, c->restored, "") || path_join(path, folder, "run.json"))
            return -1;
        json_t *state = json_load_file(path, 0, &error);
        if (state == NULL) return error_set("%s: line %d: %s", path, error.line, error.text);
        int result = resume_progress(trainer, state);
        json_decref(c->anchor);
        c->anchor = json_incref(json_object_get(state, "anchor"));
        json_decref(state);
        if (result != 0) return -1;
    } else {
        memset(p, 0, sizeof *p);
        memset(trainer->outer.begun, 0, sizeof trainer->outer.begun);
        p->best_val = (double)INFINITY;
    }
    p->elapsed = elapsed;
    c->launched = json_is_object(c->anchor) ? json_integer_value(json_object_get(c->anchor, "launched")) : -1;
    c->deliveries = (int)json_integer_value(json_object_get(c->anchor, "deliveries"));
    c->exact = 1, c->stops = 0;
    c->members.needs_anchor = trainer->anchored && trainer->opts.codec == CODEC_KLT;
    for (int i = 0; i < c->members.n; i++) {
        Member *member = &c->members.members[i];
        member->stands = 0;
        if (member->role != membership_cells(&c->members) || member->state != MEMBER_READY) continue;
        member->state = MEMBER_LOADING; // it is to begin anew too
        if (send_order(c->net, member->node, setup_order(c, member->role))) return -1;
    }
    json_decref(c->line);
    c->line = NULL;
    fclose(trainer->run.log);
    trainer->run.log = NULL;
    run_clear_line(&trainer->run);
    printf("no replica is whole any more; the run waits, and goes on from step %lld\n", (long long)p->step);
    fflush(stdout);
    return run_open_log(&trainer->run, p->step);
}

// Files that nodes want -----------------------------------------------------------------------------------------------

// Writes n tensors of a stage's table from the base model as a file of their own.
static int write_weights(const ModelFile *file, const Tensor *tensors, int n, const char *path) {
    SafeTensorsWriter writer;
    float *staging = (float *)malloc(sizeof(float) * STAGING);
    if (staging == NULL) return error_set("out of memory for weights");
    int result = safetensors_writer_init(&writer, NULL);
    for (int i = 0; i < n && result == 0; i++)
        result = safetensors_declare(&writer, tensors[i].name, DTYPE_F32, tensors[i].shape, tensors[i].n_dims);
    if (result == 0) result = safetensors_begin(&writer, path);
    int begun = result == 0;
    for (int i = 0; i < n && result == 0; i++) {
        const char *where;
        const SafeTensor *from = model_file_find(file, tensor_source(&tensors[i], file), &where);
        for (int64_t at = 0; at < tensors[i].n && result == 0; at += STAGING) {
            int64_t count = tensors[i].n - at < STAGING ? tensors[i].n - at : STAGING;
            result = from == NULL ? error_set("%s is not in the model's file", tensors[i].name)
                                  : safetensor_read(staging, from, at, count);
            if (result == 0) safetensors_append(&writer, staging, count, DTYPE_F32);
        }
    }
    free(staging);
    if (result == 0) return file_writer_close(&writer.file);
    char reason[ERROR_MAX];
    memcpy(reason, error_message, sizeof reason);
    if (begun) file_writer_close(&writer.file), unlink(path);
    memcpy(error_message, reason, sizeof reason);
    return -1;
}

// The same of the embedding the run has begun with, which the anchor's state holds.
static int write_embed(const Coordinator *c, const char *path) {
    char folder[PATH_MAX], from[PATH_MAX];
    SafeTensors file;
    SafeTensorsWriter writer;
    const Tensor *tensor = stage_embedding(&mesh_cell(&c->trainer->mesh, 0, 0)->stage);
    if (checkpoint_path(folder, c->trainer->run.path, c->restored, "") || path_join(from, folder, "anchor.bin") ||
        safetensors_open(&file, from))
        return -1;
    const SafeTensor *embed = state_tensor(&file, "klt.embed", tensor->n);
    int result = embed == NULL ? -1 : safetensors_writer_init(&writer, NULL);
    if (result == 0) result = safetensors_declare(&writer, tensor->name, DTYPE_F32, tensor->shape, tensor->n_dims);
    if (result == 0) result = safetensors_begin(&writer, path);
    if (result == 0) file_write(&writer.file, embed->data, sizeof(float) * (size_t)tensor->n);
    if (result == 0) result = file_writer_close(&writer.file);
    safetensors_close(&file);
    return result;
}

// Files that are made for members once and kept.
typedef enum { MADE_DATA, MADE_WEIGHTS, MADE_EMBED, MADE_FROZEN, MADE_NOTHING } Made;
static const char *const made_names[] = {"data", "weights", "embed", "frozen", ""};

// Which of them a member asks for, by nothing but its name. *part: the stage of frozen.STAGE.
static Made made_file(const Coordinator *c, const char *what, int *part) {
    char frozen[32];
    *part = 0;
    for (int made = 0; made < MADE_FROZEN; made++)
        if (strcmp(what, made_names[made]) == 0) return (Made)made;
    for (int s = 0; s < c->members.n_stages; s++) {
        snprintf(frozen, sizeof frozen, "frozen.%d", s);
        if (strcmp(what, frozen) == 0) return *part = s, MADE_FROZEN;
    }
    return MADE_NOTHING;
}

// path (PATH_MAX) = the file that a member wants, made if it is not there.
static int find_wanted(Coordinator *c, const Member *member, const char *what, char *path) {
    char name[64];
    const Trainer *trainer = c->trainer;
    int stage = member_is_cell(c, member) ? member->role % c->members.n_stages : 0, part;
    const Stage *table = &mesh_cell(&trainer->mesh, 0, stage)->stage;
    if (strcmp(what, "shard") == 0)
        return checkpoint_shard(trainer, c->restored, member->role / c->members.n_stages, stage, path);
    if (strcmp(what, "anchor.bin") == 0) {
        char folder[PATH_MAX];
        return checkpoint_path(folder, trainer->run.path, c->restored, "") || path_join(path, folder, what) ? -1 : 0;
    }
    Made made = made_file(c, what, &part);
    snprintf(name, sizeof name, "%s_%d", made_names[made],
             made == MADE_WEIGHTS  ? stage
             : made == MADE_FROZEN ? part
                                   : 0);
    if (made == MADE_NOTHING) return error_set("node %u wants a file '%.40s'", member->node, what);
    if (path_join(path, c->scratch, name)) return -1;
    if (file_exists(path)) return 0;
    if (made == MADE_DATA) return dataset_save(&trainer->data, path);
    if (made == MADE_WEIGHTS) return write_weights(c->file, table->tensors, table->n_tensors, path);
    if (made == MADE_EMBED && c->restored >= 0) return write_embed(c, path);
    const Stage *first = &mesh_cell(&trainer->mesh, 0, 0)->stage;
    if (made == MADE_EMBED) return write_weights(c->file, stage_embedding(first), 1, path);
    table = &mesh_cell(&trainer->mesh, 0, part)->stage;
    return write_weights(c->file, table->frozen, table->n_frozen, path);
}

static int serve_file(Coordinator *c, const Member *member, const json_t *wish) {
    char path[PATH_MAX];
    const char *what = json_string_value(json_object_get(wish, "what"));
    uint64_t channel = (uint64_t)json_integer_value(json_object_get(wish, "channel"));
    if (find_wanted(c, member, what != NULL ? what : "", path) || net_send_file(c->net, member->node, channel, path))
        return lose_member(c, member->node, error_message);
    return 0;
}

// --- Gates

// What a cell has said at the gate; NULL: nothing.
static const json_t *report_of(const Coordinator *c, int replica, int stage) {
    const Member *member = membership_of_role(&c->members, replica * c->members.n_stages + stage);
    const Contact *contact = member != NULL ? contact_of(c, member->node) : NULL;
    return contact != NULL && member->state == MEMBER_RUNNING ? contact->report : NULL;
}

// A number of a report; null is one that is not finite.
static double report_number(const json_t *report, const char *key) {
    const json_t *value = json_object_get(report, key);
    return json_is_number(value) ? json_number_value(value) : (double)NAN;
}

// Sums a step over the replicas, as train_step would.
static void sum_reports(Coordinator *c, StepResult *result, int64_t *n_tokens) {
    Mesh *mesh = &c->trainer->mesh;
    int lead = membership_lead(&c->members), S = mesh->n_stages;
    double loss = 0.0, squares = 0.0;
    int64_t valid = 0;
    clear_result(result);
    result->finite = 1, *n_tokens = 0;
    for (int r = 0; r < mesh->n_replicas; r++) {
        for (int s = 0; s < S; s++) {
            const json_t *report = report_of(c, r, s), *bytes = json_object_get(report, "bytes");
            Cell *cell = mesh_cell(mesh, r, s);
            memset(&cell->step, 0, sizeof cell->step);
            if (report == NULL) continue;
            double norm = report_number(report, "norm");
            if (s + 1 == S) loss += report_number(report, "loss"), valid += json_size(json_object_get(report, "valid"));
            if (s + 1 == S) *n_tokens += (int64_t)c->trainer->opts.batch * c->trainer->T;
            if (r == lead) squares += norm * norm, result->grad_norm = norm;
            result->finite = result->finite && isfinite(norm);
            cell->skipped_in_a_row = isfinite(norm) ? 0 : cell->skipped_in_a_row + 1;
            result->skipped += mesh->asynchronous && !isfinite(norm);
            for (int k = 0; k < TRAFFIC_KINDS; k++) {
                cell->step.bytes[k] = json_integer_value(json_array_get(bytes, (size_t)k));
                cell->total.bytes[k] += cell->step.bytes[k], result->sent.bytes[k] += cell->step.bytes[k];
            }
        }
    }
    if (S > 1) result->grad_norm = sqrt(squares);
    result->loss = valid > 0 ? loss / (double)valid : 0.0;
    result->finite = result->finite && isfinite(result->loss);
    if (!mesh->asynchronous) result->skipped = result->finite ? 0 : mesh_cells(mesh);
}

// Puts a validation into the line of its step, whichever comes first.
static void note_validation(Coordinator *c) {
    int of_line = c->line != NULL && json_integer_value(json_object_get(c->line, "step")) == c->validated;
    if (of_line && isfinite(c->val_loss)) json_object_set_new(c->line, "val_loss", json_real(c->val_loss));
}

// Writes the line of the last step, whose validation is known by now, or will not be.
static void flush_line(Coordinator *c) {
    if (c->line != NULL) run_append(&c->trainer->run, c->line);
    c->line = NULL;
}

// 1 if the run is to end before its last step.
static int wants_stop(const Coordinator *c) {
    const Trainer *trainer = c->trainer;
    int64_t stop_after = trainer->opts.stop_after;
    return interrupts > 0 || (stop_after > 0 && trainer->progress.step >= stop_after) ||
           c->skipped_in_a_row >= MAX_SKIPPED;
}

// The versions of the weights that a step has seen, for the log.
static void note_versions(Mesh *mesh, int64_t step) {
    for (int i = 0; i < mesh_cells(mesh) && mesh->asynchronous; i++) {
        Cell *cell = &mesh->cells[i];
        cell->forward_version = versions_forward(cell->stage.delay, step);
        cell->backward_version = versions_backward(cell->stage.delay, step, mesh->stash);
    }
}

// How an asynchronous pipeline goes on. Should it stop or take newcomers in, a step is named which no forward has
// reached yet.
static json_t *pace_order(Coordinator *c) {
    const Trainer *trainer = c->trainer;
    int64_t step = trainer->progress.step, S = c->members.n_stages;
    int stop = wants_stop(c);
    if (c->halt_at < 0 && (stop || has_newcomers(c)))
        c->halt_at = step + ahead_window((int)S) + S + 2, c->halt_then = stop ? THEN_STOP : THEN_HOLD;
    if (c->halt_at >= trainer->n_steps) c->halt_at = -1; // the run ends before
    c->stops = step == trainer->n_steps || (step == c->halt_at && c->halt_then == THEN_STOP);
    return json_pack("{s:s, s:I, s:I, s:i}", "type", "pace", "step", (json_int_t)(step - 1), "halt",
                     (json_int_t)c->halt_at, "then", c->halt_then);
}

// All cells have gradients of a step: its loss is known, and how it goes on.
static json_t *close_step(Coordinator *c, int64_t gate) {
    Trainer *trainer = c->trainer;
    Progress *p = &trainer->progress;
    StepResult result;
    int64_t n_tokens, step = gate / GATES;
    sum_reports(c, &result, &n_tokens);
    result.lr = step_lr(trainer, step);
    result.sent.bytes[TRAFFIC_ANCHOR] += c->factor_bytes;
    trainer->anchor.factor_bytes += c->factor_bytes, c->factor_bytes = 0;
    double now = seconds(), took = now - c->step_began;
    c->step_began = now, c->step_seconds = c->step_seconds == 0.0 ? took : 0.9 * c->step_seconds + 0.1 * took;
    p->step = step + 1, p->elapsed += took, p->adam_steps += result.skipped == 0, p->tokens += n_tokens;
    p->samples += n_tokens / trainer->T;
    double tok_s = (double)n_tokens / took;
    c->loss = result.loss, c->tok_s = tok_s, c->member_tok_s = (double)trainer->opts.batch * trainer->T / took;
    print_step(trainer, &result, tok_s, c->step_seconds);
    if (result.skipped > 0) print_skipped(trainer, &result);
    c->skipped_in_a_row = result.skipped == 0 ? 0 : c->skipped_in_a_row + 1;
    note_versions(&trainer->mesh, step);
    flush_line(c);
    c->line = step_to_json(trainer, &result, tok_s);
    if (c->factors != NULL) json_object_set_new(c->line, "anchor", c->factors);
    c->factors = NULL;
    note_validation(c);
    if (trainer->mesh.asynchronous) return pace_order(c);
    int stop = wants_stop(c);
    c->stops = stop || p->step == trainer->n_steps;
    c->holds = !c->stops && has_newcomers(c);
    json_t *go = go_order(c, gate, stop ? THEN_STOP : c->holds ? THEN_HOLD : THEN_RUN);
    json_object_set_new(go, "apply", json_boolean(result.finite));
    return go;
}

// Whether all have the factors of one snapshot.
static int all_have_factors(const Coordinator *c, int64_t *snapshot) {
    int all = 1, any = 0;
    for (int r = 0; r < c->members.n_replicas; r++) {
        for (int s = 0; s < c->members.n_stages; s++) {
            const json_t *report = report_of(c, r, s);
            if (report == NULL) continue;
            int64_t has = json_integer_value(json_object_get(report, "factors"));
            all = all && has >= 0 && (!any || has == *snapshot);
            *snapshot = has, any = 1;
        }
    }
    return all && any;
}

// Whether a cell knows that the snapshot at work gives no factors.
static int any_skips(const Coordinator *c) {
    int any = 0;
    for (int r = 0; r < c->members.n_replicas; r++)
        for (int s = 0; s < c->members.n_stages; s++)
            any = any || json_is_true(json_object_get(report_of(c, r, s), "skipped"));
    return any;
}

static json_t *close_factors(Coordinator *c, int64_t gate) {
    int64_t snapshot = -1;
    int all = all_have_factors(c, &snapshot);
    json_t *go = go_order(c, gate, THEN_RUN);
    json_object_set_new(go, "deliver", json_boolean(all));
    json_object_set_new(go, "skip", json_boolean(!all && any_skips(c)));
    if (all) c->launched = snapshot, c->deliveries++, c->members.needs_anchor = 0;
    return go;
}

// --- Shards

// Expects a file from a role, into the checkpoint that is being made.
static int expect_shard(Coordinator *c, const Member *member, const char *folder, int64_t step) {
    static const int64_t any_size = (int64_t)1 << 50;
    char path[PATH_MAX];
    int S = c->members.n_stages;
    if (member_is_cell(c, member) ? shard_path(path, folder, member->role / S, member->role % S)
                                  : path_join(path, folder, "anchor.bin"))
        return -1;
    c->shards[member->role] = SHARD_DUE;
    return net_expect_file(c->net, member->node,
                           channel_number(CHANNEL_STATE, member->role, 0, save_tag(c->epoch, step)), path, any_size);
}

// Where the cells stand that have reported at a gate between two steps.
static void take_position(Coordinator *c) {
    Trainer *trainer = c->trainer;
    const json_t *lead = report_of(c, membership_lead(&c->members), 0), *begun = json_object_get(lead, "begun");
    for (int f = 0; f < trainer->outer.n_fragments; f++)
        trainer->outer.begun[f] = json_integer_value(json_array_get(begun, (size_t)f));
    c->launched = json_integer_value(json_object_get(lead, "launched"));
}

// What cells have sent and received up to such a gate.
static void take_totals(Coordinator *c) {
    for (int i = 0; i < c->n_contacts; i++) {
        json_t *totals = json_object_get(c->contacts[i].report, "net");
        if (!json_is_array(totals)) continue;
        json_decref(c->contacts[i].totals);
        c->contacts[i].totals = json_incref(totals);
    }
}

// All cells are ready to give their shards: says whether they do.
static json_t *close_save(Coordinator *c, int64_t gate) {
    char folder[PATH_MAX];
    Trainer *trainer = c->trainer;
    int64_t step = gate / GATES;
    int finite = 1, result = 0;
    json_t *go = go_order(c, gate, THEN_RUN);
    for (int r = 0; r < c->members.n_replicas; r++)
        for (int s = 0; s < c->members.n_stages; s++)
            if (report_of(c, r, s) != NULL)
                finite = finite && json_is_true(json_object_get(report_of(c, r, s), "finite"));
    take_position(c);
    if (!finite) result = error_set("step %lld: a weight is not finite; not saved", (long long)step);
    if (result == 0) result = checkpoint_begin(folder, trainer->run.path, step);
    memset(c->shards, SHARD_NONE, (size_t)membership_roles(&c->members));
    json_decref(c->next_anchor);
    c->next_anchor = NULL;
    for (int i = 0; i < c->members.n && result == 0; i++) {
        const Member *member = &c->members.members[i];
        if (member->state != MEMBER_RUNNING) continue;
        result = expect_shard(c, member, folder, step);
        if (result == 0 && !member_is_cell(c, member)) {
            result = send_order(c->net, member->node,
                                json_pack("{s:s, s:I, s:I}", "type", "save", "step", (json_int_t)step, "launched",
                                          (json_int_t)c->launched));
        }
    }
    if (result == 0) {
        c->saving = step;
        json_decref(c->saved);
        c->saved = progress_to_json(trainer);
    } else {
        run_clear_line(&trainer->run);
        printf("train: %s; training goes on\n", error_message);
    }
    json_object_set_new(go, "save", json_boolean(result == 0));
    return go;
}

// Replicas that have given no shard have the first one's.
static int fill_shards(const Coordinator *c, const char *folder, int lead) {
    char from[PATH_MAX], to[PATH_MAX];
    for (int r = 0; r < c->members.n_replicas; r++) {
        for (int s = 0; s < c->members.n_stages; s++) {
            if (shard_path(from, folder, lead, s) || shard_path(to, folder, r, s)) return -1;
            if (c->shards[r * c->members.n_stages + s] == SHARD_HERE) continue;
            unlink(to); // a part of it may be there
            if (link(from, to) != 0) return error_set("link %s: %s", to, strerror(errno));
        }
    }
    return 0;
}

// The first replica all of whose shards are here, -1: none.
static int saved_replica(const Coordinator *c) {
    int S = c->members.n_stages;
    for (int r = 0; r < c->members.n_replicas; r++) {
        int all = 1;
        for (int s = 0; s < S; s++) all &= c->shards[r * S + s] == SHARD_HERE;
        if (all) return r;
    }
    return -1;
}

// All shards are here: the checkpoint becomes whole.
static int end_save(Coordinator *c) {
    char folder[PATH_MAX], path[PATH_MAX];
    Trainer *trainer = c->trainer;
    int64_t step = c->saving;
    int lead = saved_replica(c);
    c->saving = -1;
    if (lead < 0) return error_set("step %lld: the cells that were to be saved are lost", (long long)step);
    if (c->next_anchor != NULL) json_object_set(c->saved, "anchor", c->next_anchor);
    char *text = json_dumps(c->saved, JSON_INDENT(1));
    int result = text != NULL ? checkpoint_path(folder, trainer->run.path, step, ".tmp") : -1;
    if (result == 0) result = run_merge_model(trainer, &trainer->config, folder, lead);
    if (result == 0) result = fill_shards(c, folder, lead);
    if (result == 0) result = path_join(path, folder, "run.json");
    if (result == 0) result = file_write_text(path, text);
    free(text);
    if (result == 0) result = checkpoint_commit(trainer->run.path, step);
    if (result == 0) {
        trainer->run.saved_step = step, c->restored = step;
        json_decref(c->anchor);
        c->anchor = c->next_anchor, c->next_anchor = NULL;
        checkpoint_sweep(trainer->run.path, trainer->opts.keep);
    }
    return result;
}

// The run is over once its last shards are here.
static int finish_run(Coordinator *c, const char *reason) {
    json_t *order = json_pack("{s:s}", "type", "end");
    if (reason != NULL) json_object_set_new(order, "reason", json_string(reason));
    c->phase = RUN_OVER;
    for (int i = 0; i < c->members.n; i++)
        if (send_order(c->net, c->members.members[i].node, json_deep_copy(order))) break;
    json_decref(order);
    return 0;
}

// 1 for a gate that the cells of a stage go through alone: steps of an asynchronous pipeline end for each stage at
// another time.
static int is_stage_gate(const Coordinator *c, int64_t gate) {
    int kind = (int)(gate % GATES);
    return c->trainer->mesh.asynchronous && (kind < GATE_SAVE || kind == GATE_GRADIENTS);
}

// Opens a gate for the cells of one stage.
static int open_stage_gate(Coordinator *c, int64_t gate, int stage) {
    int result = 0;
    json_t *go = go_order(c, gate, THEN_RUN);
    c->stage_gate[stage] = gate;
    for (int r = 0; r < c->members.n_replicas && result == 0; r++) {
        const Member *member = membership_of_role(&c->members, r * c->members.n_stages + stage);
        if (member != NULL && member->state == MEMBER_RUNNING)
            result = send_order(c->net, member->node, json_deep_copy(go));
    }
    json_decref(go);
    return result;
}

// What follows the step at which the run is.
static int then_now(const Coordinator *c) {
    int halts = c->trainer->progress.step == c->halt_at;
    if (c->trainer->mesh.asynchronous) return halts ? c->halt_then : THEN_RUN;
    return c->stops ? THEN_STOP : c->holds ? THEN_HOLD : THEN_RUN;
}

// Lets nobody wait for a coordinator that has failed. error_message stays.
static void give_up_run(Coordinator *c) {
    char reason[ERROR_MAX];
    memcpy(reason, error_message, sizeof reason);
    finish_run(c, reason);
    memcpy(error_message, reason, sizeof reason);
}

static int open_gate(Coordinator *c, int64_t gate) {
    int kind = (int)(gate % GATES);
    if ((kind == GATE_SAVE || kind == GATE_HOLD) && c->saving >= 0) { // the last one first
        c->waits = gate;
        return 0;
    }
    if (kind == GATE_HOLD) c->holds = 0;
    json_t *go = kind == GATE_STEP      ? close_step(c, gate)
                 : kind == GATE_FACTORS ? close_factors(c, gate)
                 : kind == GATE_SAVE    ? close_save(c, gate)
                                        : go_order(c, gate, THEN_RUN);
    if (kind != GATE_STEP) json_object_set_new(go, "then", json_integer(then_now(c)));
    int saves = kind != GATE_SAVE || json_is_true(json_object_get(go, "save"));
    c->gate = gate, c->waits = -1;
    if (kind == GATE_HOLD) take_position(c);
    if (kind == GATE_HOLD || kind == GATE_SAVE) take_totals(c);
    clear_reports(c);
    if (order_all(c, go, 1)) return -1;
    if (kind == GATE_HOLD) return place_all(c);
    return c->stops && !saves ? finish_run(c, NULL) : 0;
}

static int shard_is_here(Coordinator *c) {
    int anchor = membership_cells(&c->members), due = 0;
    for (int i = 0; i < membership_roles(&c->members); i++) due |= c->shards[i] == SHARD_DUE;
    if (c->saving < 0 || due) return 0;
    if (c->members.anchored && c->shards[anchor] == SHARD_HERE && c->next_anchor == NULL) return 0;
    int stops = c->stops && c->saving == c->trainer->progress.step, result = end_save(c);
    if (result != 0 && !stops) {
        run_clear_line(&c->trainer->run);
        printf("train: %s; training goes on\n", error_message);
        result = 0;
    }
    if (result != 0) return -1;
    if (stops) return finish_run(c, NULL);
    return c->waits >= 0 ? open_gate(c, c->waits) : 0;
}

// The report of a member on a step that is under way.
static json_t **step_report(const Coordinator *c, const Member *member, int64_t step) {
    return &contact_of(c, member->node)->steps[step % (int64_t)pace_steps(c)];
}

// Closes all steps of an asynchronous pipeline that all cells are through with.
static int close_paced(Coordinator *c) {
    Progress *p = &c->trainer->progress;
    for (;;) {
        int n = 0;
        for (int i = 0; i < c->members.n; i++) {
            const Member *member = &c->members.members[i];
            if (member->state != MEMBER_RUNNING || !member_is_cell(c, member)) continue;
            if (*step_report(c, member, p->step) == NULL) return 0;
            n++;
        }
        if (n == 0 || p->step == c->trainer->n_steps) return 0;
        for (int i = 0; i < c->members.n; i++) {
            const Member *member = &c->members.members[i];
            Contact *contact = contact_of(c, member->node);
            if (member->state != MEMBER_RUNNING || !member_is_cell(c, member)) continue;
            json_t **report = step_report(c, member, p->step);
            json_decref(contact->report);
            contact->report = *report, *report = NULL;
        }
        json_t *order = close_step(c, gate_number(p->step, GATE_STEP));
        clear_reports(c);
        if (order_all(c, order, 1)) return -1;
    }
}

static int member_paces(Coordinator *c, Member *member, json_t *report, int64_t step) {
    if (step < c->trainer->progress.step) return 0;
    if (step >= c->trainer->progress.step + (int64_t)pace_steps(c))
        return lose_member(c, member->node, "it is ahead of all others");
    json_t **kept = step_report(c, member, step);
    json_decref(*kept);
    *kept = json_incref(report);
    return close_paced(c);
}

// Factors that all have by now may be used.
static int grant_factors(Coordinator *c) {
    int64_t all = INT64_MAX;
    for (int i = 0; i < c->members.n; i++) {
        const Member *member = &c->members.members[i];
        if (member->state != MEMBER_RUNNING || !member_is_cell(c, member)) continue;
        int64_t had = contact_of(c, member->node)->had;
        if (had < all) all = had;
    }
    if (all == INT64_MAX || all <= c->granted) return 0;
    c->granted = all, c->deliveries++;
    return order_all(c, json_pack("{s:s, s:I}", "type", "grant", "snapshot", (json_int_t)all), 1);
}

// A cell has come to a gate.
static int member_reports(Coordinator *c, Member *member, json_t *report) {
    int64_t gate = json_integer_value(json_object_get(report, "gate"));
    Contact *contact = contact_of(c, member->node);
    if (member->state != MEMBER_RUNNING || contact == NULL || gate < 0 || !member_is_cell(c, member)) return 0;
    if (c->trainer->mesh.asynchronous && gate % GATES == GATE_STEP)
        return member_paces(c, member, report, gate / GATES);
    int stage = is_stage_gate(c, gate) ? member->role % c->members.n_stages : -1;
    if (gate <= (stage >= 0 ? c->stage_gate[stage] : c->gate)) return 0;
    if (json_integer_value(json_object_get(report, "turn")) != c->turn) return 0; // it will report again
    json_decref(contact->report);
    contact->report = json_incref(report);
    member->gate = gate;
    if (!membership_all_at(&c->members, gate, stage)) return 0;
    return stage >= 0 ? open_stage_gate(c, gate, stage) : open_gate(c, gate);
}

// --- Losses

// Shards of a replica, or the anchor's, that will not come any more.
static void give_up_shards(Coordinator *c, int first, int n) {
    for (int role = first; role < first + n && c->saving >= 0; role++)
        if (c->shards[role] == SHARD_DUE || (role == membership_cells(&c->members) && c->next_anchor == NULL))
            c->shards[role] = SHARD_NONE;
}

// Nobody is in the run any more: what is left of it waits to be placed.
static int stand_down(Coordinator *c) {
    char folder[PATH_MAX];
    for (int i = 0; i < c->members.n; i++) {
        Member *member = &c->members.members[i];
        if (member->state < MEMBER_PLACED) continue;
        member->state = MEMBER_READY, member->gate = -1;
        if (send_order(c->net, member->node, json_pack("{s:s}", "type", "out"))) return -1;
    }
    if (c->saving >= 0 && checkpoint_path(folder, c->trainer->run.path, c->saving, ".tmp") == 0)
        file_remove_folder(folder);
    json_decref(c->next_anchor);
    c->next_anchor = NULL;
    c->saving = c->waits = -1, c->holds = 0, c->phase = RUN_FORMING;
    clear_reports(c);
    return 0;
}

// Replicas, or the anchor, are out of the run, and it goes on without them.
static int carry_on(Coordinator *c, int replica) {
    int S = c->members.n_stages;
    c->turn++;
    for (int i = 0; i < c->members.n; i++) {
        Member *other = &c->members.members[i];
        if (other->state == MEMBER_RUNNING) other->gate = -1;
        if (replica >= 0 && member_is_cell(c, other) && other->role / S == replica &&
            send_order(c->net, other->node, json_pack("{s:s}", "type", "out")))
            return -1;
    }
    clear_reports(c);
    c->waits = -1; // those that are left report again
    if (c->trainer->mesh.asynchronous && (close_paced(c) || grant_factors(c))) return -1;
    return order_all(c,
                     json_pack("{s:s, s:i, s:o, s:o, s:b}", "type", "living", "turn", c->turn, "living",
                               living_to_json(c), "nodes", nodes_to_json(c), "anchor",
                               membership_has_anchor(&c->members, MEMBER_PLACED)),
                     0);
}

// A member is gone: its replica is out of the run, the others go on.
static int lose_member(Coordinator *c, uint32_t node, const char *reason) {
    char text[64];
    Member *member = membership_find(&c->members, node);
    if (member == NULL) return 0;
    int role = member->role, was_placed = member->state >= MEMBER_PLACED, is_cell = member_is_cell(c, member);
    run_clear_line(&c->trainer->run);
    printf("node %u (%s) is lost: %s\n", node, role < 0 ? "a spare" : role_text(c, role, text, sizeof text), reason);
    fflush(stdout);
    int replica = membership_remove(&c->members, node), result = 0;
    net_drop(c->net, node);
    if (was_placed && !is_cell) c->anchor_lost = seconds();
    if (was_placed && (replica >= 0 || !is_cell)) {
        give_up_shards(c, is_cell ? replica * c->members.n_stages : role, is_cell ? c->members.n_stages : 1);
        int left = membership_replicas(&c->members, MEMBER_RUNNING);
        int hopeless = c->members.needs_anchor && !is_cell && c->began;
        if (c->phase == RUN_GOING && left > 0 && !hopeless) {
            result = carry_on(c, replica);
        } else {
            result = stand_down(c);
            int lost = c->began && (membership_standing(&c->members) < 0 || hopeless);
            if (result == 0 && lost) result = rewind_run(c);
        }
        if (result == 0 && c->saving >= 0) result = shard_is_here(c);
    }
    if (result != 0 || give_roles(c)) return -1;
    return try_begin(c);
}

// Why a member is to be given up: 1 and the reason, or 0.
static int member_is_lost(const Coordinator *c, const Member *member, double now, char *reason, size_t size) {
    NetStatus status;
    const Contact *contact = contact_of(c, member->node);
    double limit = (double)c->trainer->opts.peer_timeout, hangs = contact != NULL ? now - contact->spoke : 0.0;
    if (net_status(c->net, member->node, &status)) return 0;
    if (status.silence >= limit || status.deafness >= limit)
        snprintf(reason, size, "%s for %.0f s", status.silence < limit ? "it hears nothing" : "silent",
                 fmax(status.silence, status.deafness));
    else if (member->role >= 0 && hangs >= MEMBER_HANGS * limit)
        snprintf(reason, size, "it answers, but has not got on for %.0f s", hangs);
    else
        return 0;
    return 1;
}

// Looks who has not been heard of for too long. Should this process itself have stood still, others get their time
// anew.
static int watch_members(Coordinator *c) {
    char reason[64];
    double limit = (double)c->trainer->opts.peer_timeout, now = seconds(), stood = now - c->watched;
    if (stood > 0.5 * limit) {
        c->grace = now + limit;
        for (int i = 0; i < c->n_contacts; i++) c->contacts[i].spoke += stood;
    }
    c->watched = now;
    if (now < c->grace) return 0;
    for (int i = 0; i < c->members.n; i++) {
        if (!member_is_lost(c, &c->members.members[i], now, reason, sizeof reason)) continue;
        if (lose_member(c, c->members.members[i].node, reason)) return -1;
        i = -1; // the list is another
    }
    return 0;
}

// --- Messages

static void take_validation(Coordinator *c, const json_t *about) {
    Trainer *trainer = c->trainer;
    double loss = report_number(about, "loss"), bits = report_number(about, "bits_per_byte");
    int64_t step = json_integer_value(json_object_get(about, "step"));
    print_validation(trainer, step, loss, bits);
    if (step == 0 && isfinite(loss)) run_append(&trainer->run, json_pack("{s:i, s:f}", "step", 0, "val_loss", loss));
    c->validated = step, c->val_loss = loss;
    note_validation(c);
    if (loss < trainer->progress.best_val) trainer->progress.best_val = loss;
}

// How a node uses its connections. Its numbers are only shown; those that are none are 0.
static void take_links(const Coordinator *c, const Member *member, const json_t *about) {
    Contact *contact = contact_of(c, member->node);
    if (contact == NULL) return;
    NetTotals *links = &contact->links;
    contact->has_links = 1;
    links->wire_up = json_integer_value(json_object_get(about, "up"));
    links->wire_down = json_integer_value(json_object_get(about, "down"));
    links->relayed = json_integer_value(json_object_get(about, "relayed"));
    links->up_rate = json_number_value(json_object_get(about, "up_rate"));
    links->down_rate = json_number_value(json_object_get(about, "down_rate"));
    links->n_direct = (int)json_integer_value(json_object_get(about, "direct"));
    links->n_relayed = (int)json_integer_value(json_object_get(about, "by_relay"));
}

static int take_message(Coordinator *c, Member *member, json_t *about) {
    const char *type = json_string_value(json_object_get(about, "type"));
    if (type == NULL) return lose_member(c, member->node, "it sends what is no message");
    if (strcmp(type, "report") == 0) return member_reports(c, member, about);
    if (strcmp(type, "at") == 0) return member_is_at(c, member, about);
    if (strcmp(type, "want") == 0) return serve_file(c, member, about);
    if (strcmp(type, "loaded") == 0 && member->state == MEMBER_LOADING) {
        member->state = MEMBER_READY;
        return try_begin(c);
    }
    if (strcmp(type, "failed") == 0) {
        const char *reason = json_string_value(json_object_get(about, "reason"));
        error_set("%.200s", reason != NULL ? reason : "it has failed"); // what a peer sends must not steer a terminal
        return lose_member(c, member->node, error_message);
    }
    if (strcmp(type, "have") == 0) {
        contact_of(c, member->node)->had = json_integer_value(json_object_get(about, "snapshot"));
        return grant_factors(c);
    }
    if (strcmp(type, "validation") == 0) take_validation(c, about);
    if (strcmp(type, "links") == 0) take_links(c, member, about);
    if (strcmp(type, "skip") == 0 && member->state == MEMBER_RUNNING) {
        return order_all(c,
                         json_pack("{s:s, s:I, s:I}", "type", "skip", "replica",
                                   json_integer_value(json_object_get(about, "replica")), "after",
                                   json_integer_value(json_object_get(about, "after"))),
                         1);
    }
    if (strcmp(type, "factors") == 0) {
        c->factor_bytes += json_integer_value(json_object_get(about, "bytes"));
        json_decref(c->factors);
        c->factors = json_pack("{s:O, s:O, s:O}", "snapshot", json_object_get(about, "snapshot"), "loss",
                               json_object_get(about, "loss"), "seconds", json_object_get(about, "seconds"));
    }
    int of_this = json_integer_value(json_object_get(about, "step")) == (json_int_t)c->saving;
    if (strcmp(type, "anchor") == 0 && c->saving >= 0 && of_this && !member_is_cell(c, member)) {
        json_decref(c->next_anchor);
        c->next_anchor = json_incref(json_object_get(about, "anchor"));
        return shard_is_here(c);
    }
    return 0;
}

static int take_event(Coordinator *c, NetEvent *event) {
    int result = 0;
    Member *member = membership_find(&c->members, event->from);
    Contact *contact = contact_of(c, event->from);
    if (event->kind == NET_HELLO) return admit_node(c, event);
    if (contact != NULL && event->kind == NET_MESSAGE) contact->spoke = seconds();
    if (event->kind == NET_INTRUDER) {
        run_clear_line(&c->trainer->run);
        printf("refused: %s\n", event->text);
        fflush(stdout);
    }
    if (member != NULL && event->kind == NET_MESSAGE && event->control) {
        json_t *about = json_loadb((const char *)event->data, (size_t)event->n_bytes, 0, NULL);
        result = json_is_object(about) ? take_message(c, member, about)
                                       : lose_member(c, event->from, "it sends what is no message");
        json_decref(about);
    } else if (event->kind == NET_FILE) {
        Channel channel = channel_parts(event->channel);
        int is_due = c->saving >= 0 && channel.from < membership_roles(&c->members) &&
                     channel.tag == save_tag(c->epoch, c->saving) && c->shards[channel.from] == SHARD_DUE;
        if (is_due) c->shards[channel.from] = SHARD_HERE;
        if (is_due) result = shard_is_here(c);
    } else if (member != NULL && event->kind == NET_FILE_FAILED) {
        result = lose_member(c, event->from, event->text);
    }
    free(event->data);
    return result;
}

// The last line of the log: bytes and frames (totals_to_json) of the coordinator, and of nodes up to the last
// checkpoint.
static void log_network(Coordinator *c) {
    json_t *nodes = json_object();
    char name[16];
    for (int i = 0; i < c->n_contacts; i++) {
        snprintf(name, sizeof name, "%u", c->contacts[i].node);
        if (c->contacts[i].totals != NULL) json_object_set(nodes, name, c->contacts[i].totals);
    }
    run_append(&c->trainer->run,
               json_pack("{s:s, s:o, s:o}", "type", "network", "coordinator", totals_to_json(c->net), "nodes", nodes));
    run_clear_line(&c->trainer->run);
    print_totals(c->net);
}

// What others see
// -----------------------------------------------------------------------------------------------------------

// How a node reaches the others.
static void way_text(const NetTotals *links, char *text, size_t size) {
    int n = links->n_direct + links->n_relayed;
    if (n == 0)
        snprintf(text, size, "-");
    else if (links->n_relayed == 0)
        snprintf(text, size, "direct");
    else if (links->n_direct == 0)
        snprintf(text, size, "relay");
    else
        snprintf(text, size, "relay %d/%d", links->n_relayed, n);
}

static void view_member(const Coordinator *c, const Member *member, CellView *cell) {
    NetStatus status;
    const Contact *contact = contact_of(c, member->node);
    int is_cell = member_is_cell(c, member), runs = member->state == MEMBER_RUNNING;
    memset(cell, 0, sizeof *cell);
    cell->node = member->node, cell->step = -1;
    cell->tokens_per_second = cell->up_rate = cell->down_rate = cell->progress_age = (double)NAN;
    snprintf(cell->state, sizeof cell->state, "%s", view_states[member->state]);
    if (member->role >= 0)
        role_text(c, member->role, cell->role, sizeof cell->role);
    else
        snprintf(cell->role, sizeof cell->role, "none");
    if (runs && is_cell)
        cell->step = member->gate / GATES,
        cell->tokens_per_second = c->member_tok_s > 0.0 ? c->member_tok_s : (double)NAN;
    if (runs && !is_cell) cell->step = c->launched;
    if (net_status(c->net, member->node, &status) == 0) {
        cell->progress_age = status.progress_age;
        snprintf(cell->address, sizeof cell->address, "%s", status.address);
    }
    snprintf(cell->route, sizeof cell->route, "-");
    if (contact == NULL || !contact->has_links) return;
    cell->up_bytes = contact->links.wire_up, cell->down_bytes = contact->links.wire_down;
    cell->relayed_bytes = contact->links.relayed;
    cell->up_rate = contact->links.up_rate, cell->down_rate = contact->links.down_rate;
    way_text(&contact->links, cell->route, sizeof cell->route);
}

// The run as it stands, cells (members) in the order of their roles.
static void view_run(const Coordinator *c, MeshView *view, CellView *cells) {
    static const char *const phases[] = {"waiting for processes", "placing cells", "training", "over"};
    const Progress *p = &c->trainer->progress;
    const Membership *m = &c->members;
    NetTotals total;
    int known = p->step > 0 && c->tok_s > 0.0;
    memset(view, 0, sizeof *view);
    net_totals(c->net, &total);
    view->version = MESHTUNE_VERSION, view->phase = phases[c->phase], view->cells = cells;
    view->step = p->step, view->n_steps = c->trainer->n_steps, view->tokens = p->tokens, view->elapsed = p->elapsed;
    view->loss = known ? c->loss : (double)NAN, view->tokens_per_second = known ? c->tok_s : (double)NAN;
    view->n_roles = membership_roles(m);
    view->up_bytes = total.wire_up, view->down_bytes = total.wire_down, view->relayed_bytes = total.relayed;
    for (int role = 0; role < view->n_roles; role++) {
        const Member *member = membership_of_role(m, role);
        if (member != NULL) view_member(c, member, &cells[view->n_cells++]);
    }
    for (int i = 0; i < m->n; i++)
        if (m->members[i].role < 0) view_member(c, &m->members[i], &cells[view->n_cells++]);
}

// Draws the table below the step's line, which is drawn too where nothing is.
static void draw_run(Run *run, const MeshView *view) {
    struct winsize size;
    int known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 0 && size.ws_col > 0;
    if (!run->live)
        printf("\r\033[K\033[?7lstep %lld/%lld  %s: %d nodes, %d roles\033[?7h", (long long)view->step,
               (long long)view->n_steps, view->phase, view->n_cells, view->n_roles);
    run->live = 1;
    view_table(stdout, view, known ? size.ws_row - 1 : 23, known ? size.ws_col : 80);
    fflush(stdout);
}

static void publish_run(StatusPage *page, const MeshView *view) {
    char *texts[2] = {NULL, NULL};
    size_t size;
    for (int i = 0; i < 2; i++) {
        FILE *out = open_memstream(&texts[i], &size);
        if (out == NULL) continue; // no memory: nothing is shown, the run goes on
        if (i == 0)
            view_html(out, view);
        else
            view_metrics(out, view);
        fclose(out);
    }
    status_page_publish(page, texts[0], texts[1]);
}

// Shows the run once a second, and again where a message has taken the table's place.
static void show_run(Coordinator *c) {
    MeshView view;
    Run *run = &c->trainer->run;
    double now = seconds();
    int draws = run->terminal && (!run->live || now >= c->seen_at + 1.0);
    int publishes = c->page != NULL && now >= c->seen_at + 1.0;
    if (!draws && !publishes) return;
    CellView *cells = (CellView *)calloc((size_t)c->members.n + 1, sizeof(CellView));
    if (cells == NULL) return;
    if (now >= c->seen_at + 1.0) c->seen_at = now;
    view_run(c, &view, cells);
    if (draws) draw_run(run, &view);
    if (publishes) publish_run(c->page, &view);
    free(cells);
}

// Serves what is shown, if --status-port says so.
static int open_status(Coordinator *c) {
    const Options *opts = &c->trainer->opts;
    if (opts->status_port == 0) return 0;
    c->page = status_page_open(opts->status_address, opts->status_port);
    if (c->page == NULL) return -1;
    printf("status: http://%s:%d/ and /metrics\n", opts->status_address, c->page->port);
    return 0;
}

static int coordinate(Coordinator *c) {
    NetEvent event;
    int got = 0;
    while (c->phase != RUN_OVER) {
        if (net_wait(c->net, 1e-3 * NODE_WAIT_MS) < 0) return -1;
        while (c->phase != RUN_OVER && (got = net_next(c->net, &event)) > 0)
            if (take_event(c, &event)) return -1;
        if (got < 0 || watch_members(c)) return -1;
        show_run(c);
        if (interrupts > 0 && c->phase != RUN_GOING) return error_set("stopped before the run had begun");
    }
    flush_line(c);
    log_network(c);
    return 0;
}

// --- The first process

static void *guest_thread(void *context) {
    Coordinator *c = (Coordinator *)context;
    if (node_join(c->guest, c->token)) {
        run_clear_line(&c->trainer->run);
        fprintf(stderr, "train: this process's cell: %s\n", error_message);
    }
    trainer_free(c->guest);
    return NULL;
}

// 1 for an endpoint that is bound to all addresses of the machine.
static int is_everywhere(const char *endpoint) {
    return strstr(endpoint, "//0.0.0.0:") != NULL || strstr(endpoint, "//*:") != NULL;
}

// Lets this process join its own run.
static int invite_guest(Coordinator *c) {
    char endpoint[NET_ENDPOINT];
    const char *bound = net_endpoint(c->net), *port = strrchr(bound, ':');
    if (is_everywhere(bound))
        snprintf(endpoint, sizeof endpoint, "tcp://127.0.0.1%s", port != NULL ? port : "");
    else
        snprintf(endpoint, sizeof endpoint, "%s", bound);
    c->guest = (Trainer *)calloc(1, sizeof(Trainer));
    if (c->guest == NULL) return error_set("out of memory for a cell");
    if (net_token_print(c->token, sizeof c->token, &c->keys, endpoint)) return -1;
    if (cli_defaults(option_table, OPTION_COUNT, &c->guest->opts)) return -1;
    c->guest->opts.threads = c->trainer->opts.threads, c->guest->opts.anchor_threads = c->trainer->opts.anchor_threads;
    c->guest->opts.coder = c->trainer->opts.coder;
    memcpy(c->guest->opts.gpus, c->trainer->opts.gpus, sizeof c->guest->opts.gpus);
    if (pthread_create(&c->thread, NULL, guest_thread, c) != 0) return error_set("the cell's thread does not start");
    c->has_thread = 1;
    return 0;
}

// out (NET_ENDPOINT) = a bound endpoint as others can dial it: where it is bound to all addresses, with this machine's
// first one that leads out.
static int host_seen(char *out, const char *endpoint) {
    char address[64] = "127.0.0.1";
    const char *port = strrchr(endpoint, ':');
    struct ifaddrs *list = NULL;
    if (!is_everywhere(endpoint)) {
        snprintf(out, NET_ENDPOINT, "%s", endpoint);
        return 0;
    }
    if (getifaddrs(&list) != 0) return error_set("this machine's addresses: getifaddrs: %s", strerror(errno));
    for (const struct ifaddrs *at = list; at != NULL; at = at->ifa_next) {
        if (at->ifa_addr == NULL || at->ifa_addr->sa_family != AF_INET || (at->ifa_flags & IFF_LOOPBACK)) continue;
        const struct sockaddr_in *inet = (const struct sockaddr_in *)(const void *)at->ifa_addr;
        if (inet_ntop(AF_INET, &inet->sin_addr, address, sizeof address) != NULL) break;
    }
    freeifaddrs(list);
    snprintf(out, NET_ENDPOINT, "tcp://%s%s", address, port != NULL ? port : "");
    return 0;
}

// The line that others join with, and the token in a file that only the owner reads.
static int print_invitation(Coordinator *c) {
    char text[NET_TOKEN], endpoint[NET_ENDPOINT], path[PATH_MAX];
    const Launch *launch = &c->trainer->launch;
    if (host_seen(endpoint, net_endpoint(c->net))) return -1;
    const char *port = strrchr(net_endpoint(c->net), ':');
    if (launch->host[0] != '\0' && port != NULL) snprintf(endpoint, sizeof endpoint, "tcp://%s%s", launch->host, port);
    if (net_token_print(text, sizeof text, &c->keys, endpoint)) return -1;
    if (path_join(path, c->trainer->run.path, "join") || net_write_private(path, text)) return -1;
    if (launch->size > 1) {
        printf("%s started %d processes; the others join by %s\n", launch->by, launch->size, path);
        fflush(stdout);
        return 0;
    }
    printf("others join with:\n  ./train --join '%s'\n", text);
    printf("  (the same is in %s: --join @FILE)\n", path);
    fflush(stdout);
    return 0;
}

// Waits until all have heard the last order, or a while.
static void say_goodbye(const Coordinator *c) {
    const double until = seconds() + 5.0;
    int left = 1;
    while (left > 0 && seconds() < until) {
        left = 0;
        for (int i = 0; i < c->members.n; i++) left += net_queued(c->net, c->members.members[i].node) > 0;
        if (left > 0 && net_wait(c->net, 0.01) < 0) return;
    }
}

static void coordinator_free(Coordinator *c) {
    if (c->net != NULL) say_goodbye(c);
    if (c->net != NULL) net_close(c->net);
    if (c->has_thread) __atomic_store_n(&c->guest->host_is_gone, 1, __ATOMIC_RELEASE);
    if (c->has_thread) pthread_join(c->thread, NULL);
    status_page_close(c->page);
    run_clear_line(&c->trainer->run);
    clear_reports(c);
    clear_steps(c);
    for (int i = 0; i < c->n_contacts; i++) {
        free(c->contacts[i].steps);
        json_decref(c->contacts[i].totals);
    }
    free(c->contacts);
    free(c->stage_gate);
    free(c->guest);
    json_decref(c->line);
    json_decref(c->factors);
    json_decref(c->anchor);
    json_decref(c->next_anchor);
    json_decref(c->saved);
    membership_free(&c->members);
    free(c->shards);
    if (c->scratch[0] != '\0' && file_exists(c->scratch)) file_remove_folder(c->scratch);
}

// The run's folder, keys and sockets.
static int open_house(Coordinator *c, const json_t *resume) {
    char path[PATH_MAX];
    Trainer *trainer = c->trainer;
    Run *run = &trainer->run;
    const Options *opts = &trainer->opts;
    run->terminal = isatty(STDOUT_FILENO), run->saved_step = -1;
    trainer->progress.best_val = (double)INFINITY;
    if (resume == NULL && run_create(run, opts)) return -1;
    if (json_object_get(resume, "step") != NULL) {
        if (resume_progress(trainer, resume)) return -1;
        c->restored = trainer->progress.step;
        c->anchor = json_incref(json_object_get(resume, "anchor"));
        if (json_is_object(c->anchor)) c->launched = json_integer_value(json_object_get(c->anchor, "launched"));
        c->deliveries = (int)json_integer_value(json_object_get(c->anchor, "deliveries"));
        c->exact = 1;
    }
    checkpoint_sweep(run->path, 0);
    if (run_open_log(run, resume != NULL ? trainer->progress.step : -1)) return -1;
    run_log_start(trainer, json_object_get(resume, "step") != NULL ? "resume" : "start");
    if (path_join(c->scratch, run->path, "net") || file_make_folders(c->scratch)) return -1;
    if (path_join(path, run->path, "keys")) return -1;
    if (file_exists(path) ? net_keys_load(&c->keys, path) : net_keys_make(&c->keys) || net_keys_save(&c->keys, path))
        return -1;
    c->net = net_host(opts->host, &c->keys, NULL);
    if (c->net == NULL) return -1;
    catch_interrupts();
    printf("run: %s\n", run->path);
    if (print_invitation(c) || open_status(c)) return -1;
    return opts->no_cell ? 0 : invite_guest(c);
}

// Trains on a mesh of several processes, of which this is the first. file: the base model.
static int host_run(Trainer *trainer, const ModelFile *file, const json_t *resume) {
    Coordinator *c = (Coordinator *)calloc(1, sizeof(Coordinator));
    if (c == NULL) return error_set("out of memory for the coordinator");
    const Run *run = &trainer->run;
    c->trainer = trainer, c->file = file, c->next_node = 1;
    c->restored = c->saving = c->waits = c->launched = -1;
    c->members.n_replicas = trainer->mesh.n_replicas, c->members.n_stages = trainer->mesh.n_stages;
    c->members.anchored = trainer->anchored,
    c->members.needs_anchor =
        trainer->anchored && (trainer->opts.codec == CODEC_KLT || trainer->opts.min_replicas == 0);
    c->members.min_replicas = trainer->opts.min_replicas > 0 ? trainer->opts.min_replicas : trainer->mesh.n_replicas;
    c->granted = c->halt_at = -1;
    c->shards = (unsigned char *)calloc((size_t)membership_roles(&c->members), 1);
    c->stage_gate = (int64_t *)calloc((size_t)c->members.n_stages, sizeof(int64_t));
    int result = c->shards == NULL || c->stage_gate == NULL ? error_set("out of memory for the coordinator")
                                                            : open_house(c, resume);
    if (result == 0) {
        result = coordinate(c);
        if (result != 0) give_up_run(c);
    }
    coordinator_free(c);
    free(c);
    if (run->log != NULL) fclose(run->log);
    if (result != 0) return -1;
    print_end(trainer);
    return 0;
}

// Takes this process's role from the environment where a launcher has started several to train and the command line
// names none.
static int find_launch(Trainer *trainer, Action action) {
    const Options *opts = &trainer->opts;
    trainer->launch.size = 1;
    if (action != ACTION_TRAIN || opts->dry_run || is_host(opts)) return 0;
    if (launch_read(&trainer->launch, launch_getenv, NULL)) return -1;
    if (trainer->launch.size > 1 && opts->out[0] == '\0')
        return error_set("%s started %d processes, which find each other by the run's folder: give -o FOLDER, on a "
                         "file system that all of them see",
                         trainer->launch.by, trainer->launch.size);
    return 0;
}

// Rank 0 of several: it hosts a mesh that has as many cells.
static int check_launch(const Trainer *trainer) {
    const Launch *launch = &trainer->launch;
    int cells = mesh_cells(&trainer->mesh), needed = cells + trainer->anchored + trainer->opts.no_cell;
    if (launch->size == 1 || launch->size == needed) return 0;
    return error_set("%s started %d processes; %d replicas of %d stages%s%s need %d", launch->by, launch->size,
                     trainer->mesh.n_replicas, trainer->mesh.n_stages, trainer->anchored ? " and the anchor" : "",
                     trainer->opts.no_cell ? " and a coordinator without a cell" : "", needed);
}

// Does what the command line asks for.
static int run_program(Trainer *trainer) {
    Action action;
    ModelFile file;
    json_t *resume = NULL;
    memset(&file, 0, sizeof file);
    if (trainer->opts.join[0] != '\0') return node_join(trainer, trainer->opts.join);
    if (choose_action(trainer, &action) || find_launch(trainer, action)) return -1;
    if (trainer->launch.rank > 0) return launch_join(trainer);
    int result = action == ACTION_TRAIN ? run_find(&trainer->run, &trainer->opts) : 0;
    if (result == 0 && trainer->opts.resume) result = resume_settings(trainer, &resume);
    if (trainer->launch.size > 1) strcpy(trainer->opts.host, "tcp://0.0.0.0:*");
    if (result == 0) result = prepare(trainer, &file, action);
    if (result == 0) result = check_launch(trainer);
    if (result == 0 && trainer->opts.dry_run) {
        int cells = mesh_cells(&trainer->mesh) + trainer->anchored;
        if (cells > 1) result = print_estimate(trainer);
        int too_large = result == 0 && mesh_fits(trainer);
        if (too_large && cells == 1) result = -1;
        if (too_large && cells > 1) { // a mesh may be planned on a machine that cannot hold all of it
            printf("all cells in one process: %s\n", error_message);
        }
    } else if (result == 0 && action == ACTION_SHOW) {
        result = show_data(trainer);
    } else if (result == 0 && action == ACTION_TOKENIZE) {
        result = tokenize_data(trainer);
    } else if (result == 0 && is_host(&trainer->opts)) {
        result = host_run(trainer, &file, resume);
    } else if (result == 0) {
        result = load(trainer, &file);
        model_file_close(&file);
        if (result == 0) result = prune(trainer);
        if (result == 0) {
            switch (action) {
            case ACTION_TRAIN: result = train(trainer, resume); break;
            case ACTION_EVAL: result = print_evaluation(trainer); break;
            case ACTION_CHOICES: result = print_choices(trainer); break;
            case ACTION_ANSWERS: result = print_answers(trainer); break;
            case ACTION_GENERATE: result = print_generation(trainer); break;
            case ACTION_EXPORT: result = export_model(trainer); break;
            default: break; // done before weights are loaded
            }
        }
    }
    model_file_close(&file);
    json_decref(resume);
    return result;
}

// The program but for leaving it: 0, or 1 after one line about what is wrong.
static int program(int argc, char **argv) {
    static Trainer trainer;
    int result;
    result = cli_defaults(option_table, OPTION_COUNT, &trainer.opts);
    if (result == 0) result = cli_parse(option_table, OPTION_COUNT, &trainer.opts, trainer.given, argc, argv);
    if (result == 0 && trainer.opts.help) {
        printf("meshtune %s: fine-tunes a Llama\n  ./train -m model.bin -d text.jsonl\n\n", MESHTUNE_VERSION);
        cli_help(option_table, OPTION_COUNT, stdout);
        return 0;
    }
    if (result == 0) result = run_program(&trainer);
    if (result != 0) {
        run_clear_line(&trainer.run);
        fflush(stdout);
        fprintf(stderr, "train: %s\n", error_message);
        result = 1;
    }
    trainer_free(&trainer);
    return result;
}

#if !defined(TESTING) && !defined(BENCHMARK)
int main(int argc, char **argv) {
    // A thread that waits for the others should spin a moment and then sleep. libgomp's default spins for milliseconds:
    // beside one other busy program training ran 10 times slower. It reads its settings before main, hence the new
    // start.
    char self[PATH_MAX] = "";
    if (getenv("OMP_WAIT_POLICY") == NULL && getenv("GOMP_SPINCOUNT") == NULL &&
        readlink("/proc/self/exe", self, sizeof self - 1) > 0) {
        setenv("GOMP_SPINCOUNT", "20000", 1);
        execv(self, argv); // if it fails, the default will do
    }
    return program(argc, argv);
}
#endif
