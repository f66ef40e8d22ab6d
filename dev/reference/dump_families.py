"""Dumps what transformers computes for a tiny random model of each family, for test_gpt to compare with.

    python3 dev/reference/dump_families.py data/fixtures/families [NAME...]
    python3 dev/reference/dump_families.py --count

Needs torch and transformers (with SmolLM3 and OLMo 2: 4.53 or newer). Writes, per model NAME:
    NAME/config.json, NAME/model.safetensors   the model as transformers saves it
    NAME.dump                                  safetensors: tokens, targets, logits, loss, grad.*
--count prints the parameters that transformers counts for the shapes of llmc/config.h's presets.
"""
import json
import os
import sys

import torch
import transformers
from safetensors.torch import save_file

# heads != kv^2, kv > 1, nothing a multiple of a vector; head_dim != d/heads where the family lets it be given
SHAPE = dict(vocab_size=61, hidden_size=24, intermediate_size=38, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=48, bos_token_id=1, eos_token_id=2, pad_token_id=None)
MODELS = {
    "llama": ("LlamaForCausalLM", dict(head_dim=10, rms_norm_eps=1e-5, rope_theta=300.0)),
    "mistral": ("MistralForCausalLM", dict(head_dim=6, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=32)),
    "mistral_window": ("MistralForCausalLM", dict(head_dim=6, rms_norm_eps=1e-5, rope_theta=10000.0,
                                                  sliding_window=5)),
    "smollm3": ("SmolLM3ForCausalLM", dict(rms_norm_eps=1e-6, rope_theta=500.0, no_rope_layers=[1, 0, 1, 0, 0],
                                           num_hidden_layers=5, intermediate_size=22, tie_word_embeddings=True)),
    "smollm3_interval": ("SmolLM3ForCausalLM", dict(rms_norm_eps=1e-6, rope_theta=500.0, no_rope_layer_interval=2,
                                                    num_hidden_layers=4, intermediate_size=22,
                                                    tie_word_embeddings=False)),
    "smollm3_window": ("SmolLM3ForCausalLM", dict(rms_norm_eps=1e-6, rope_theta=500.0, no_rope_layers=[1, 0, 1, 0],
                                                  num_hidden_layers=4, intermediate_size=22, use_sliding_window=True,
                                                  sliding_window=4, tie_word_embeddings=True)),
    "qwen2": ("Qwen2ForCausalLM", dict(rms_norm_eps=1e-6, rope_theta=1000.0, tie_word_embeddings=True)),
    "qwen2_window": ("Qwen2ForCausalLM", dict(rms_norm_eps=1e-6, rope_theta=1000.0, tie_word_embeddings=True,
                                              use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3": ("Qwen3ForCausalLM", dict(head_dim=6, rms_norm_eps=1e-6, rope_theta=1000.0, tie_word_embeddings=False)),
    "olmo": ("OlmoForCausalLM", dict(rope_theta=10000.0, tie_word_embeddings=False)),
    "olmo2": ("Olmo2ForCausalLM", dict(rms_norm_eps=1e-6, rope_theta=500.0, tie_word_embeddings=False)),
}
LEFT_OUT = {"smollm3_interval": ["no_rope_layers", "layer_types"]}  # of the saved config: older ones have the interval only
BATCH, TOKENS = 2, 23


def make_model(name):
    torch.manual_seed(7)
    cls, own = MODELS[name]
    kind = getattr(transformers, cls)
    model = kind(kind.config_class(**{**SHAPE, "attn_implementation": "eager", **own})).float()
    with torch.no_grad():
        for key, p in model.named_parameters():  # larger than usual, so that no gradient is tiny
            if key.endswith(".bias"):
                p.copy_(0.5 * torch.randn_like(p))
            else:
                p.copy_(1 + 0.2 * torch.randn_like(p) if p.dim() == 1 else torch.randn_like(p) * 0.2)
    return model.train()


def dump_model(folder, name):
    model = make_model(name)
    model.save_pretrained(os.path.join(folder, name))
    generated = os.path.join(folder, name, "generation_config.json")
    if os.path.exists(generated):
        os.remove(generated)
    path = os.path.join(folder, name, "config.json")
    with open(path) as file:
        config = json.load(file)
    with open(path, "w") as file:
        json.dump({k: v for k, v in config.items() if k not in LEFT_OUT.get(name, [])}, file, indent=2)
        file.write("\n")
    gen = torch.Generator().manual_seed(11)
    vocab = SHAPE["vocab_size"]
    tokens = torch.randint(0, vocab, (BATCH, TOKENS), generator=gen)
    targets = torch.randint(0, vocab, (BATCH, TOKENS), generator=gen)
    targets[0, 3:9] = -1  # targets that do not count
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, vocab), targets.reshape(-1), ignore_index=-1)
    loss.backward()
    out = dict(tokens=tokens.int(), targets=targets.int(), logits=logits.detach(), loss=loss.detach().reshape(1))
    for key, p in model.named_parameters():
        out["grad." + key] = p.grad.clone()
    save_file({k: v.contiguous() for k, v in out.items()}, os.path.join(folder, name + ".dump"))
    n = sum(p.numel() for p in model.parameters())
    print(f"{name}: {n} parameters, loss {loss.item():.6f}, torch {torch.__version__}, "
          f"transformers {transformers.__version__}")


# the shapes that publishers' config.json give
PRESETS = {
    "mistral-7b": ("MistralForCausalLM", dict(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32,
                                              num_key_value_heads=8, intermediate_size=14336, vocab_size=32000)),
    "smollm3-3b": ("SmolLM3ForCausalLM", dict(num_hidden_layers=36, hidden_size=2048, num_attention_heads=16,
                                              num_key_value_heads=4, intermediate_size=11008, vocab_size=128256)),
    "qwen2.5-0.5b": ("Qwen2ForCausalLM", dict(num_hidden_layers=24, hidden_size=896, num_attention_heads=14,
                                              num_key_value_heads=2, intermediate_size=4864, vocab_size=151936,
                                              tie_word_embeddings=True)),
    "qwen3-0.6b": ("Qwen3ForCausalLM", dict(num_hidden_layers=28, hidden_size=1024, num_attention_heads=16,
                                            num_key_value_heads=8, head_dim=128, intermediate_size=3072,
                                            vocab_size=151936, tie_word_embeddings=True)),
    "olmo-7b": ("OlmoForCausalLM", dict(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32,
                                        intermediate_size=11008, vocab_size=50304)),
    "olmo-2-7b": ("Olmo2ForCausalLM", dict(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32,
                                           intermediate_size=11008, vocab_size=100352)),
}


def count():
    for name, (cls, shape) in PRESETS.items():
        kind = getattr(transformers, cls)
        with torch.device("meta"):
            model = kind(kind.config_class(**shape))
        print(f"{name} {sum(p.numel() for p in model.parameters())}")


def main():
    if sys.argv[1] == "--count":
        return count()
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    for name in sys.argv[2:] or MODELS:
        dump_model(folder, name)


if __name__ == "__main__":
    main()
