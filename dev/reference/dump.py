"""Dumps what PyTorch computes for two tiny Llamas, for test_gpt to compare with.

    python3 dev/reference/dump.py data/fixtures

Needs torch and transformers (any version with LlamaForCausalLM). Writes, per model NAME:
    NAME/config.json, NAME/model.safetensors   the model as transformers saves it
    NAME.dump                                  safetensors: tokens, targets, logits, loss, grad.*, after.* (parameters
                                               after 10 AdamW steps on the same batch), losses
and rope.dump with transformers' cos and sin at positions where a wrong scaling shows.
"""
import json
import math
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

MODELS = {
    # grouped heads with heads != kv^2, llama3 scaling that bites within the sequence, tied head
    "tied": dict(
        config=dict(vocab_size=203, hidden_size=48, intermediate_size=112, num_hidden_layers=3, num_attention_heads=6,
                    num_key_value_heads=2, max_position_embeddings=96, rms_norm_eps=1e-5, tie_word_embeddings=True,
                    rope_theta=500.0, bos_token_id=1, eos_token_id=2,
                    rope_scaling=dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                      original_max_position_embeddings=24)),
        batch=3, tokens=37),
    # head_dim != d/heads, nothing a multiple of a vector, own head, plain RoPE
    "untied": dict(
        config=dict(vocab_size=101, hidden_size=42, intermediate_size=71, num_hidden_layers=2, num_attention_heads=6,
                    num_key_value_heads=3, head_dim=10, max_position_embeddings=64, rms_norm_eps=1e-6,
                    tie_word_embeddings=False, rope_theta=10000.0, bos_token_id=1, eos_token_id=2),
        batch=2, tokens=29),
}
ADAMW = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
STEPS = 10


def make_model(spec):
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(attn_implementation="eager", **spec["config"])).float()
    with torch.no_grad():
        for name, p in model.named_parameters():  # larger than usual, so that no gradient is tiny
            p.copy_(1 + 0.2 * torch.randn_like(p) if p.dim() == 1 else torch.randn_like(p) * 0.15)
    return model.train()


def loss_of(model, tokens, targets):
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1),
                                             ignore_index=-1)
    return logits, loss


def dump_model(folder, name, spec):
    model = make_model(spec)
    model.save_pretrained(os.path.join(folder, name))
    generated = os.path.join(folder, name, "generation_config.json")
    if os.path.exists(generated):
        os.remove(generated)
    gen = torch.Generator().manual_seed(11)
    vocab = spec["config"]["vocab_size"]
    tokens = torch.randint(0, vocab, (spec["batch"], spec["tokens"]), generator=gen)
    targets = torch.randint(0, vocab, (spec["batch"], spec["tokens"]), generator=gen)
    targets[0, 3:9] = -1  # targets that do not count
    out = dict(tokens=tokens.int(), targets=targets.int())
    logits, loss = loss_of(model, tokens, targets)
    loss.backward()
    out["logits"], out["loss"] = logits.detach(), loss.detach().reshape(1)
    for key, p in model.named_parameters():
        out["grad." + key] = p.grad.clone()
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([dict(params=decay), dict(params=plain, weight_decay=0.0)], **ADAMW)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        _, loss = loss_of(model, tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    for key, p in model.named_parameters():
        out["after." + key] = p.detach().clone()
    out["losses"] = torch.tensor(losses)
    save_file({k: v.contiguous() for k, v in out.items()}, os.path.join(folder, name + ".dump"))
    print(name, "loss", losses[0], "->", losses[-1], "torch", torch.__version__)


def dump_rope(folder):
    """cos and sin of Llama-3.2-1B's and a plain RoPE at a few positions, from transformers' own module."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    positions = torch.tensor([[0, 1, 127, 128, 2047, 8191]])
    out = dict(positions=positions.int())
    scaled = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                  original_max_position_embeddings=8192)
    for name, theta, scaling in (("scaled", 500000.0, scaled), ("plain", 10000.0, None)):
        config = LlamaConfig(hidden_size=128, num_attention_heads=2, head_dim=64, rope_theta=theta,
                             rope_scaling=scaling, max_position_embeddings=131072)
        rope = LlamaRotaryEmbedding(config)
        cos, sin = rope(torch.zeros(1, 1, 64), positions)
        out[name + ".inv_freq"] = rope.inv_freq.float()
        out[name + ".cos"], out[name + ".sin"] = cos[0, :, :32].contiguous(), sin[0, :, :32].contiguous()
    save_file(out, os.path.join(folder, "rope.dump"))


def main():
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    for name, spec in MODELS.items():
        dump_model(folder, name, spec)
    dump_rope(folder)


if __name__ == "__main__":
    main()
