"""Loss of a text by PEFT, with the adapters that a run has written beside a model of bytes (data/base.bin exported).

    ./train -m data/base.bin --export HF --export-dtype fp32
    ./train -m HF -d ... --lora-rank 6 -o RUN
    python3 dev/reference/check_lora.py HF RUN/latest TEXT
    ./train -m RUN --eval --val-data TEXT -t 64 --precision fp32     # the same to six digits

Needs torch, transformers and peft.
"""
import sys

import peft
import torch
import transformers

WINDOW = 64
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="eager").float()
model = peft.PeftModel.from_pretrained(model, sys.argv[2]).eval()
with open(sys.argv[3], "rb") as file:
    ids = [model.config.bos_token_id] + list(file.read()) + [model.config.eos_token_id]
total = 0.0
for at in range(0, len(ids) - 1, WINDOW):
    window = torch.tensor(ids[at:at + WINDOW + 1])
    logits = model(window[None, :-1]).logits[0]
    total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
print(f"loss {total / (len(ids) - 1):.6f} over {len(ids) - 1} targets")
