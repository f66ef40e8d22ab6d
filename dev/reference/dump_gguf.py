"""Makes the GGUF fixtures of test_gpt with the `gguf` package, and what they must give.

    python3 dev/reference/dump_gguf.py data/fixtures

Needs numpy, torch, transformers and gguf. Writes into gguf/:
    quants.dump    random blocks of every quantized type (NAME.blocks) and gguf's values of them (NAME.values)
    untied.gguf    the model of untied/, F32, with a tokenizer of scores; untied.json is the tokenizer's merges
    mixed.gguf     a small Llama with grouped heads and scaled RoPE, its matrices in eight types
    mixed.dump     tokens, and the logits of transformers with the weights as gguf dequantizes them
"""
import json
import os
import sys

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, TokenType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.tokenization_utils_base import generate_merges

QUANTS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}  # where a block has its scale and minimum
NAMES = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def dump_quants(path):
    rng = np.random.default_rng(5)
    out = {}
    for name in QUANTS:
        size, n_bytes = GGML_QUANT_SIZES[Type[name]]
        n = 9 if size == 32 else 4
        blocks = rng.integers(0, 256, (n, n_bytes), dtype=np.uint8)
        for at in HALVES[name]:
            blocks[:, at:at + 2] = rng.normal(0, 0.1, (n, 1)).astype(np.float16).view(np.uint8)
        values = dequantize(blocks.reshape(1, -1), Type[name]).reshape(-1)
        out[name + ".blocks"], out[name + ".values"] = torch.from_numpy(blocks.copy()), torch.from_numpy(values.copy())
    save_file(out, path)


def gguf_name(name):
    stem, suffix = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{suffix}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{suffix}"


def interleave(rows, heads):
    """Half-split rows of Q or K as llama.cpp wants them: (head, half, pair) -> (head, pair, half)."""
    half = rows.shape[0] // heads // 2
    return np.ascontiguousarray(rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape))


def put_config(writer, c, theta):
    writer.add_block_count(c.num_hidden_layers)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(c.vocab_size)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def score_tokenizer():
    """101 tokens, scored at random; some can be made in several ways."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in b"\n\xc3\xa9"] + ["\u2581"] + list("aehilnorst") + ["\u00e9"]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 3 + [TokenType.NORMAL] * 12
    rng = np.random.default_rng(3)
    while len(tokens) < 101:
        a, b = rng.integers(6, len(tokens), 2)
        if tokens[a] + tokens[b] not in tokens and len(tokens[a] + tokens[b]) <= 6:
            tokens.append(tokens[a] + tokens[b])
            types.append(TokenType.NORMAL)
    scores = [0.0] * 6 + [float(s) for s in -rng.permutation(95).astype(np.float32)]
    scores[40] = scores[41]
    return tokens, types, scores


def write_untied(folder):
    config = LlamaConfig.from_pretrained(os.path.join(folder, "untied"))
    weights = load_file(os.path.join(folder, "untied", "model.safetensors"))
    writer = GGUFWriter(os.path.join(folder, "gguf", "untied.gguf"), "llama")
    put_config(writer, config, 10000.0)
    tokens, types, scores = score_tokenizer()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in weights.items():
        rows = tensor.float().numpy()
        if "q_proj" in name:
            rows = interleave(rows, config.num_attention_heads)
        if "k_proj" in name:
            rows = interleave(rows, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), rows)
    finish(writer)
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = generate_merges(vocab, {t: s for t, s, k in zip(tokens, scores, types) if k == TokenType.NORMAL})
    with open(os.path.join(folder, "gguf", "untied.json"), "w") as file:
        json.dump([list(m) for m in merges], file, ensure_ascii=False)


def write_mixed(folder):
    torch.manual_seed(9)
    scaling = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=24)
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
                         rms_norm_eps=1e-5, rope_theta=500.0, rope_scaling=scaling, tie_word_embeddings=False,
                         bos_token_id=3, eos_token_id=4, attn_implementation="eager")
    model = LlamaForCausalLM(config).float().eval()
    plain = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "rope_parameters": None, "rope_scaling": None,
                                            "rope_theta": 500.0}))
    factors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    writer = GGUFWriter(os.path.join(folder, "gguf", "mixed.gguf"), "llama")
    put_config(writer, config, 500.0)
    writer.add_rope_scaling_orig_ctx_len(24)
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(4)
    writer.add_tensor("rope_freqs.weight", factors.numpy().astype(np.float32))
    types = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32"]
    matrix = 0
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.2 * torch.randn_like(p) if p.dim() == 1 else torch.randn_like(p) * 0.15)
            kind = Type["F32"]
            if p.dim() == 2:
                kind = Type[types[(matrix + matrix // 7) % len(types)]]  # not the same kinds in both layers
                matrix += 1
            blocks = quantize(p.numpy(), kind)
            p.copy_(torch.from_numpy(np.array(dequantize(blocks, kind))))
            heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
            writer.add_tensor(gguf_name(name), interleave(blocks, heads) if heads else blocks, raw_dtype=kind)
    finish(writer)
    tokens = torch.randint(0, 128, (2, 37), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = model(tokens).logits
    save_file(dict(tokens=tokens.int(), targets=tokens.int(), logits=logits.contiguous()),
              os.path.join(folder, "gguf", "mixed.dump"))


def main():
    folder = sys.argv[1]
    os.makedirs(os.path.join(folder, "gguf"), exist_ok=True)
    dump_quants(os.path.join(folder, "gguf", "quants.dump"))
    write_untied(folder)
    write_mixed(folder)


if __name__ == "__main__":
    main()
