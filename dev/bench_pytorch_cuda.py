"""The step of `build/bench_cuda train` in PyTorch on the same GPU, and the ratio to ours.

    python3 dev/bench_pytorch_cuda.py [--ours TOK_S] [--seq 2048] [--steps 5] [--only eager compiled] [--tiny]

Needs torch with CUDA 2.5 or later; without --ours build/bench_cuda is run too. PyTorch runs the Llama-3.2-1B shape with
random weights as one does there: weights, gradients and moments in bf16, scaled_dot_product_attention, fused AdamW,
gradients clipped, one micro-batch a step: the largest that fits of 16, 8, 4, 2, 1 sequences; eager and compiled. Ours
keeps fp32 weights, gradients and moments beside the bf16 ones, so its optimizer moves more bytes. A line a variant:
median tokens/s; then PyTorch's best and the ratio, above 1 where we are quicker.
"""
import argparse
import re
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F

SHAPE = {"d": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256}
TINY = {"d": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": 500}


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(torch.nn.Module):
    def __init__(self, d, heads, kv_heads, ffn):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.ffn = heads, kv_heads, d // heads, ffn
        self.norm1, self.norm2 = torch.nn.RMSNorm(d, eps=1e-5), torch.nn.RMSNorm(d, eps=1e-5)
        self.qkv = torch.nn.Linear(d, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.o = torch.nn.Linear(d, d, bias=False)
        self.gate_up = torch.nn.Linear(d, 2 * ffn, bias=False)
        self.down = torch.nn.Linear(ffn, d, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, self.heads + 2 * self.kv_heads, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        att = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True,
                                             enable_gqa=True)
        x = x + self.o(att.transpose(1, 2).reshape(B, T, C))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(torch.nn.Module):
    def __init__(self, T, d, layers, heads, kv_heads, ffn, vocab):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, d)
        self.layers = torch.nn.ModuleList(Layer(d, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(d, eps=1e-5)
        self.head = torch.nn.Linear(d, vocab, bias=False)
        self.head.weight = self.embed.weight  # tied
        torch.nn.init.normal_(self.embed.weight, std=0.02)
        half = d // heads // 2
        angle = torch.arange(T)[:, None] * 500000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def measure(device, shape, T, B, compiled, steps):
    """Median tokens/s of whole steps of B sequences."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.device(device):
        model = Llama(T, **shape).to(torch.bfloat16)
        tokens, targets = (torch.randint(0, shape["vocab"], (B, T)) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)
    forward = torch.compile(model) if compiled else model
    times = []
    for step in range(steps + 3):  # three to compile, allocate and reach the card's clocks
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        forward(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        if step >= 3:
            times.append(time.perf_counter() - start)
    return B * T / statistics.median(times)


def largest(device, shape, T, compiled, steps):
    """(sequences, tokens/s) of the largest micro-batch that fits."""
    for B in (16, 8, 4, 2, 1):
        try:
            return B, measure(device, shape, T, B, compiled, steps)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    return 0, 0.0


def ours():
    """Our tokens/s, from build/bench_cuda."""
    text = subprocess.run(["build/bench_cuda", "train"], check=True, capture_output=True, text=True).stdout
    return float(re.search(r"B \d+, T \d+ \| +(\d+) \|", text).group(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ours", type=float)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--tiny", action="store_true", help="a small shape, on the CPU too: to try this script")
    args = parser.parse_args()
    device, shape = "cuda" if torch.cuda.is_available() else "cpu", TINY if args.tiny else SHAPE
    if device == "cpu" and not args.tiny:
        parser.error("PyTorch sees no GPU")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}", flush=True)
    best = (0.0, "none fits", 0)
    for name in args.only:
        B, rate = largest(device, shape, args.seq, name == "compiled", args.steps)
        print(f"PyTorch {name:<9} B {B}, T {args.seq}: {rate:9.0f} tok/s", flush=True)
        best = max(best, (rate, name, B))
    mine = args.ours if args.ours else ours()
    print(f"ours {mine:.0f}, PyTorch's best ({best[1]}, B {best[2]}) {best[0]:.0f} tok/s, ratio {mine / best[0]:.2f}")


if __name__ == "__main__":
    main()
