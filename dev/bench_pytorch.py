"""The shapes of `make bench` in PyTorch, and the ratio to ours, measured in one run.

    python3 dev/bench_pytorch.py [--steps 2] [--rounds 5] [--seq 256 1024] [--only bf16 fp32]

Needs torch (the official wheel); build/bench is built first by `make build/bench`. PyTorch runs the same model (RMSNorm,
RoPE, scaled_dot_product_attention, SwiGLU, own head), the same 4,096 tokens a step, fused AdamW, fp32 and bf16 autocast,
eager and compiled, in micro-batches of 1,024 and of 4,096 tokens. First a line a variant: median tokens/s. Then
PyTorch's best variant of each shape and ours take turns, `rounds` times: the ratio is the median of the rounds'.
"""
import argparse
import os
import re
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F

D, LAYERS, HEADS, FFN, VOCAB, TOKENS = 768, 12, 12, 2048, 32000, 4096


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.RMSNorm(D, eps=1e-5), torch.nn.RMSNorm(D, eps=1e-5)
        self.qkv = torch.nn.Linear(D, 3 * D, bias=False)
        self.o = torch.nn.Linear(D, D, bias=False)
        self.gate_up = torch.nn.Linear(D, 2 * FFN, bias=False)
        self.down = torch.nn.Linear(FFN, D, bias=False)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(att.transpose(1, 2).reshape(B, T, D))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Llama(torch.nn.Module):
    def __init__(self, T):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, D)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = torch.nn.RMSNorm(D, eps=1e-5)
        self.head = torch.nn.Linear(D, VOCAB, bias=False)
        half = D // HEADS // 2
        angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def stepper(T, micro, bf16, compiled):
    """A function that does a whole step (forward, backward, clip, AdamW) and returns its tokens/s."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Llama(T)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    forward = torch.compile(model) if compiled else model
    tokens = torch.randint(0, VOCAB, (TOKENS // T, T))
    targets = torch.randint(0, VOCAB, (TOKENS // T, T))

    def step():
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for b in range(0, TOKENS // T, micro):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = forward(tokens[b:b + micro], targets[b:b + micro]) * (micro * T / TOKENS)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return TOKENS / (time.perf_counter() - start)

    step()  # compiles and allocates
    return step


def ours(T, precision):
    """Our tokens/s, from build/bench."""
    text = subprocess.run(["build/bench", "124m", str(T), precision], check=True, capture_output=True, text=True).stdout
    return float(re.search(r"([\d.]+) tok/s", text).group(1))


def compare(T, precision, steps, rounds):
    best, best_rate = None, 0.0
    for compiled in (False, True):
        for micro in (1024 // T, 4096 // T):
            step = stepper(T, micro, precision == "bf16", compiled)
            rate = statistics.median(step() for _ in range(steps))
            name = f"{'compiled' if compiled else 'eager'}, micro-batch {micro}"
            print(f"T {T:<5} {precision} PyTorch {name:<26} {rate:8.1f} tok/s", flush=True)
            if rate > best_rate:
                best, best_rate = (micro, compiled, name), rate
    step = stepper(T, best[0], precision == "bf16", best[1])
    pairs = [(ours(T, precision), statistics.median(step() for _ in range(3))) for _ in range(rounds)]
    mine, theirs = (statistics.median(column) for column in zip(*pairs))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"T {T:<5} {precision} ours {mine:8.1f}  PyTorch's best ({best[2]}) {theirs:8.1f} tok/s  ratio {ratio:.2f}  of "
          + " ".join(f"{a / b:.2f}" for a, b in pairs), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seq", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--only", nargs="+", default=["bf16", "fp32"])
    args = parser.parse_args()
    subprocess.run(["make", "-s", "build/bench"], check=True)
    torch.set_num_threads(os.cpu_count())
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for precision in args.only:
        for T in args.seq:
            compare(T, precision, args.steps, args.rounds)


if __name__ == "__main__":
    main()
