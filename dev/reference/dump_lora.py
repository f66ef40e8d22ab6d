"""Dumps what PEFT computes with adapters beside the tiny models of dump_families.py, for test_gpt to compare with.

    python3 dev/reference/dump_lora.py data/fixtures/families data/fixtures/lora [NAME...]

Needs torch, transformers and peft. Writes, per case NAME:
    NAME/adapter_config.json, NAME/adapter_model.safetensors   the adapters as PEFT saves them
    NAME.dump                                                  safetensors: tokens, targets, logits, loss, grad.*
"""
import os
import sys

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "llama": ("llama", dict(r=3, lora_alpha=5, target_modules=ALL)),
    "olmo2": ("olmo2", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])),
    "qwen2": ("qwen2", dict(r=5, lora_alpha=7, target_modules=["k_proj", "o_proj", "up_proj"], use_rslora=True)),
}


def adapted(families, name):
    base, lora = CASES[name]
    path = os.path.join(families, base)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **lora))
    model.peft_config["default"].base_model_name_or_path = path
    with torch.no_grad():
        for key, p in model.named_parameters():
            if ".lora_" in key:
                p.copy_((torch.randn_like(p) * 0.3).float())  # values that the file can hold
    return model.double().train()


def loss_of(model, dump):
    tokens, targets = dump["tokens"].long(), dump["targets"].long()
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-1)
    return logits, loss


def dump_case(families, folder, name):
    model = adapted(families, name)
    out = load_file(os.path.join(families, CASES[name][0] + ".dump"))
    out = dict(tokens=out["tokens"], targets=out["targets"])
    logits, loss = loss_of(model, out)
    loss.backward()
    out.update(logits=logits.detach().float(), loss=loss.detach().float().reshape(1))
    for key, p in model.named_parameters():
        if p.grad is not None:
            out["grad." + key.replace(".default.", ".")] = p.grad.float()
    model.float().save_pretrained(os.path.join(folder, name))
    readme = os.path.join(folder, name, "README.md")
    if os.path.exists(readme):
        os.remove(readme)
    save_file({k: v.contiguous() for k, v in out.items()}, os.path.join(folder, name + ".dump"))
    print(f"{name}: loss {loss.item():.6f}, torch {torch.__version__}, peft {peft.__version__}")


if __name__ == "__main__":
    os.makedirs(sys.argv[2], exist_ok=True)
    for case in sys.argv[3:] or CASES:
        dump_case(sys.argv[1], sys.argv[2], case)
