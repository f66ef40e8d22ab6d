"""Makes a llama2.c file of version 2 (int8 with scales) for test_gpt, and what transformers computes with its values.

    python3 dev/reference/dump_llama2c.py data/fixtures/llama2c

Needs numpy, torch and transformers. The layout is that which llama2.c's runq.c maps. Writes
    q8.bin, q8_tied.bin    groups of 16 values, some of which go on in the next row
    NAME.bin.dump          tokens, targets, logits, and weight.*: the values under Hugging Face's names
"""
import os
import struct
import sys

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

GROUP = 16
MATRICES = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
            "mlp.down_proj", "mlp.up_proj"]


def interleave(rows, heads):
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


def half_split(rows, heads):
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def quantize(rows):
    """int8 values, scales, and what they stand for."""
    groups = rows.astype(np.float32).reshape(-1, GROUP)
    scales = (np.abs(groups).max(axis=1) / np.float32(127.0)).astype(np.float32)
    q = np.round(groups / scales[:, None]).astype(np.int8)
    return q, scales, (q.astype(np.float32) * scales[:, None]).reshape(rows.shape)


def write(folder, name, tied):
    torch.manual_seed(13)
    config = LlamaConfig(vocab_size=64, hidden_size=48, intermediate_size=40, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=1e-5,
                         rope_theta=10000.0, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
                         attn_implementation="eager")
    model = LlamaForCausalLM(config).float().eval()
    params = dict(model.named_parameters())
    order = ["model.embed_tokens.weight"]
    order += [f"model.layers.{layer}.{part}.weight" for part in MATRICES for layer in range(config.num_hidden_layers)]
    order += [] if tied else ["lm_head.weight"]
    norms = [f"model.layers.{layer}.{part}.weight" for part in ["input_layernorm", "post_attention_layernorm"]
             for layer in range(config.num_hidden_layers)] + ["model.norm.weight"]
    with torch.no_grad(), open(os.path.join(folder, name + ".bin"), "wb") as file:
        for p in params.values():
            p.copy_(1 + 0.2 * torch.randn_like(p) if p.dim() == 1 else 0.2 * torch.randn_like(p))
        head = struct.pack("<Ii7iBi", 0x616B3432, 2, config.hidden_size, config.intermediate_size,
                           config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads,
                           config.vocab_size, config.max_position_embeddings, tied, GROUP)
        file.write(head + bytes(256 - len(head)))
        for key in norms:
            file.write(params[key].numpy().astype("<f4").tobytes())
        for key in order:
            heads = 4 if "q_proj" in key else 2 if "k_proj" in key else 0
            rows = params[key].numpy()
            q, scales, values = quantize(interleave(rows, heads) if heads else rows)
            file.write(q.tobytes() + scales.astype("<f4").tobytes())
            params[key].copy_(torch.from_numpy(half_split(values, heads) if heads else values))
    tokens = torch.randint(0, config.vocab_size, (2, 19), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = model(tokens).logits
    out = dict(tokens=tokens.int(), targets=tokens.int(), logits=logits)
    out.update({"weight." + key: p.detach().clone() for key, p in params.items()})
    save_file({key: value.contiguous() for key, value in out.items()}, os.path.join(folder, name + ".bin.dump"))


def main():
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    write(folder, "q8", False)
    write(folder, "q8_tied", True)


if __name__ == "__main__":
    main()
