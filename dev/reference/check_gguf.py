"""Checks what `./train` reads from a GGUF file, and writes as one, against transformers, tokenizers and gguf.

    python3 dev/reference/check_gguf.py MODEL.gguf [LOGITS]

Needs torch, transformers, tokenizers and gguf, and a built ./train. The model: any small Llama that transformers loads from
a GGUF. LOGITS: a program that takes a model, a file to write and token ids, and writes the logits as fp32. Prints a line a
check and exits 1 if one fails.
"""
import json
import os
import re
import struct
import subprocess
import sys
import tempfile

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = ["Hello world! 123", "Caf\u00e9 d\u00e9j\u00e0 vu.", "  multiple   spaces", "Hello, we can use", "I'll DON'T you'RE\r\n\r\n a",
         "\U0001f44d\U0001f3fd \u0412\u0438\u0434\u043d\u043e \u4e2d\u6587\u3002", "tabs\tand\n\nnewlines   ", "x = y[3.14159] // 2\u00b2\u00bd", "", " ",
         "<|im_start|>user\nHi<|im_end|>"]
failed = False


def check(what, ok, detail):
    global failed
    failed |= not ok
    print(f"{'ok  ' if ok else 'FAIL'} {what}: {detail}")


def train(*words):
    return subprocess.run(["./train", *words], check=True, capture_output=True, text=True).stdout


def fields(path):
    return {k: v.contents() for k, v in GGUFReader(path).fields.items() if not k.startswith("GGUF.")}


def load(folder, file=None):
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32,
                                                attn_implementation="eager").eval()


def check_weights(gguf, folder):
    """Every weight of the import is what transformers dequantizes; returns transformers' model."""
    train("-m", gguf, "--export", f"{folder}/hf", "--export-dtype", "fp32")
    ours, model = load_file(f"{folder}/hf/model.safetensors"), load(os.path.dirname(gguf) or ".", os.path.basename(gguf))
    theirs = model.state_dict()
    worst, n = 0.0, 0
    for name, value in ours.items():
        worst = max(worst, ((value - theirs[name]).abs().max() / theirs[name].abs().max()).item())
        n += value.numel()
    extra = set(theirs) - set(ours) - {"lm_head.weight"}
    check("weights", worst < 1e-6 and not extra, f"{n} values, largest difference {worst:.1e} of the largest value, {extra or ''}")
    return model


def reference_tokenizer(meta):
    """The tokenizer that the metadata describe, by hand; for the ways to cut text that real small models use."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    out = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if meta["tokenizer.ggml.pre"] == "smollm" else []
    out.pre_tokenizer = pre_tokenizers.Sequence(steps + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    out.decoder = decoders.ByteLevel()
    out.add_special_tokens([t for t, k in zip(tokens, meta["tokenizer.ggml.token_type"]) if k == 3])
    return out


def check_tokenizer(meta, folder):
    ours, theirs = Tokenizer.from_file(f"{folder}/hf/tokenizer.json"), reference_tokenizer(meta)
    texts = TEXTS + [open("README.md").read(), open("train_gpt.cu").read()[:200000]]
    differ = [t[:20] for t in texts if ours.encode(t).ids != theirs.encode(t).ids]
    n = sum(len(ours.encode(t).ids) for t in texts)
    check("tokenizer", not differ, f"{len(texts)} texts, {n} ids; different: {differ}")
    auto = AutoTokenizer.from_pretrained(f"{folder}/hf")
    check("tokenizer of the export", auto.bos_token_id == meta["tokenizer.ggml.bos_token_id"] and
          auto.eos_token_id == meta["tokenizer.ggml.eos_token_id"] and
          auto.chat_template == meta.get("tokenizer.chat_template"), f"bos {auto.bos_token}, eos {auto.eos_token}, chat template")


def interleave(rows, head_dim):
    return rows.reshape(-1, 2, head_dim // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def check_export(meta, gguf, folder, dtype, expected):
    """What is exported is read by gguf's reader with the same metadata and with the weights of the import."""
    path = f"{folder}/{dtype}.gguf"
    train("-m", gguf, "--export", path, "--export-dtype", dtype)
    out, source = GGUFReader(path), {t.name: t for t in GGUFReader(gguf).tensors}
    rounds = {"fp32": np.float32, "f16": np.float16}
    worst = 0.0
    for tensor in out.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        other = source[tensor.name]
        wanted = dequantize(other.data, other.tensor_type).reshape(values.shape)
        if values.ndim > 1:
            wanted = (torch.from_numpy(wanted.copy()).bfloat16().float().numpy() if dtype == "bf16" else
                      wanted.astype(rounds[dtype]).astype(np.float32))
        worst = max(worst, np.abs(values - wanted).max() / np.abs(wanted).max())
    same = {t.name for t in out.tensors} == set(source)
    check(f"export as {dtype}", same and worst < (1e-6 if dtype == "fp32" else 1e-2), f"{len(out.tensors)} tensors, difference {worst:.1e}")
    ours = fields(path)
    lost = [k for k, v in meta.items() if not k.startswith("general.") and ours.get(k, v if "scores" in k else None) != v]
    check(f"metadata of {dtype}", not lost, f"{len(ours)} keys, other than in the source: {lost}")
    if dtype == "fp32":
        with torch.no_grad():
            ids = torch.arange(20, 60)[None]
            again = load(folder, f"{dtype}.gguf")(ids).logits
            difference = (again - expected(ids).logits).abs().max().item()
        check("transformers on the export", difference < 1e-4, f"largest difference of a logit {difference:.1e}")


def check_loss(gguf, model, folder):
    """Our loss over tokens is transformers'."""
    ids = torch.randint(20, model.config.vocab_size, (1, 513), generator=torch.Generator().manual_seed(2))
    with open(f"{folder}/ids.bin", "wb") as file:
        file.write(struct.pack("<256I", 0x4E55544D, 1, ids.numel(), 0, model.config.vocab_size, *[0] * 251))
        file.write(ids.numpy().astype(np.uint32).tobytes())
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()
    printed = train("-m", gguf, "--eval", "--val-data", f"{folder}/ids.bin", "-t", "512", "--val-tokens", "0", "--precision", "fp32")
    ours = float(re.search(r"loss ([\d.]+) over (\d+)", printed).group(1))
    check("loss", abs(ours - loss) < 1e-5 * loss, f"ours {ours:.6f}, transformers {loss:.6f}, of 512 tokens")


def check_logits(gguf, model, folder, program):
    ids = list(range(500, 20000, 401))
    subprocess.run([program, gguf, f"{folder}/logits", *map(str, ids)], check=True)
    ours = torch.from_numpy(np.fromfile(f"{folder}/logits", dtype=np.float32)).reshape(len(ids), -1)
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    error = ((ours - theirs).norm() / theirs.norm()).item()
    largest = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    check("logits", error < 1e-5, f"{len(ids)} tokens, relative difference {error:.1e}, largest {largest:.1e} of the largest logit")


def check_scores(folder):
    """A GGUF with SentencePiece's own pieces and scores becomes a tokenizer.json that encodes as SentencePiece does."""
    import sentencepiece
    from gguf import GGUFWriter
    with open("README.md") as file, open(f"{folder}/text", "w") as out:
        out.writelines(line for line in file if line.strip())
    sentencepiece.SentencePieceTrainer.train(input=f"{folder}/text", model_prefix=f"{folder}/sp", vocab_size=900,
                                             model_type="bpe", byte_fallback=True, character_coverage=0.99,
                                             normalization_rule_name="identity", remove_extra_whitespaces=False,
                                             minloglevel=2)
    sp = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/sp.model")
    n, C = sp.vocab_size(), 32
    writer = GGUFWriter(f"{folder}/sp.gguf", "llama")
    for key, value in (("block_count", 1), ("embedding_length", C), ("feed_forward_length", C), ("context_length", 64),
                       ("attention.head_count", 2)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([sp.id_to_piece(i) for i in range(n)])
    writer.add_token_types([2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in range(n)])
    writer.add_token_scores([sp.get_score(i) for i in range(n)])
    writer.add_bos_token_id(sp.bos_id())
    writer.add_eos_token_id(sp.eos_id())
    writer.add_unk_token_id(sp.unk_id())
    one = {"attn_norm": C, "ffn_norm": C}
    for name in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(one.get(name, (C, C)), np.float32))
    writer.add_tensor("token_embd.weight", np.ones((n, C), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(C, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for source, name in (("sp.gguf", "sp_hf"), ("sp_hf", "sp2.gguf"), ("sp2.gguf", "sp2_hf")):
        train("-m", f"{folder}/{source}", "--export", f"{folder}/{name}")
    texts = [t for t in TEXTS[:-1] if t] + open(f"{folder}/text").read().split("\n")
    for name in ("sp_hf", "sp2_hf"):
        ours = Tokenizer.from_file(f"{folder}/{name}/tokenizer.json")
        differ = [t for t in texts if ours.encode(t).ids != [sp.bos_id()] + sp.encode(t)]
        check(f"scores, {name}", not differ, f"{len(texts)} texts, different: {differ[:3]}")


def main():
    gguf = sys.argv[1]
    meta = fields(gguf)
    with tempfile.TemporaryDirectory() as folder:
        model = check_weights(gguf, folder)
        if meta["tokenizer.ggml.model"] == "gpt2":
            check_tokenizer(meta, folder)
        for dtype in ("fp32", "bf16", "f16"):
            check_export(meta, gguf, folder, dtype, model)
        check_loss(gguf, model, folder)
        check_scores(folder)
        if len(sys.argv) > 2:
            check_logits(gguf, model, folder, sys.argv[2])
    sys.exit(failed)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
