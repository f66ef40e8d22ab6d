"""Checks that what `./train --export` writes is what transformers reads: logits, loss and tokenizer.

    python3 dev/reference/check_export.py

Needs torch and transformers, a built ./train, data/base.bin and the prepared medical text. Prints a line a check and
exits 1 if one fails.
"""
import json
import os
import re
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

failed = False


def check(what, ok, detail):
    global failed
    failed |= not ok
    print(f"{'ok  ' if ok else 'FAIL'} {what}: {detail}")


def train(*words):
    return subprocess.run(["./train", *words], check=True, capture_output=True, text=True).stdout


def check_logits(name, folder):
    """The fixture through import and export gives the logits of the dump, in the same class."""
    dump, to = load_file(f"data/fixtures/{name}.dump"), f"{folder}/{os.path.basename(name)}"
    train("-m", f"data/fixtures/{name}", "--export", f"{to}.bin", "--export-dtype", "fp32")
    train("-m", f"{to}.bin", "--export", to, "--export-dtype", "fp32")
    model = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32, attn_implementation="eager")
    with open(f"data/fixtures/{name}/config.json") as file:
        wanted = json.load(file)["architectures"]
    check(f"{name} class", [type(model).__name__] == wanted, type(model).__name__)
    with torch.no_grad():
        logits = model(dump["tokens"].long()).logits
    error = ((logits - dump["logits"]).norm() / dump["logits"].norm()).item()
    check(f"{name} logits", error < 1e-6, f"relative difference {error:.1e}")


def check_loss(folder):
    """transformers and ./train agree on the base model's loss over documents of the held-out medical text."""
    train("-m", "data/base.bin", "--export", f"{folder}/base", "--export-dtype", "fp32")
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/base")
    text = "na\u00efve \U0001f44d: a b\tc\n"
    ids = tokenizer(text)["input_ids"]
    check("tokenizer", ids == [256] + list(text.encode()) and tokenizer.decode(ids, skip_special_tokens=True) == text,
          f"{len(ids)} ids for {len(text.encode())} bytes")
    stream = []
    with open("data/medical/val.jsonl") as file:
        for line in list(file)[:40]:
            stream += tokenizer(json.loads(line)["text"])["input_ids"] + [257]
    with open(f"{folder}/val.jsonl", "w") as out, open("data/medical/val.jsonl") as file:
        out.writelines(list(file)[:40])
    T, total, count = 128, 0.0, 0
    for start in range(0, len(stream) - 1, T):
        window = torch.tensor([stream[start:start + T + 1]])
        with torch.no_grad():
            logits = model(window[:, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
        count += window.shape[1] - 1
    printed = train("-m", "data/base.bin", "--eval", "--val-data", f"{folder}/val.jsonl", "-t", str(T), "--val-tokens", "0",
                    "--precision", "fp32")
    ours = float(re.search(r"loss ([\d.]+) over (\d+)", printed).group(1))
    check("base model's loss", abs(ours - total / count) < 2e-5, f"ours {ours:.6f}, transformers {total / count:.6f}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        families = sorted(f[:-len(".dump")] for f in os.listdir("data/fixtures/families") if f.endswith(".dump"))
        for name in ["tied", "untied"] + [f"families/{family}" for family in families]:
            check_logits(name, folder)
        check_loss(folder)
    sys.exit(failed)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
