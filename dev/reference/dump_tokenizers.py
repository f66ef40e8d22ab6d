"""Trains small tokenizers of every kind that is read, and dumps what their own libraries make of difficult texts.

    python3 dev/reference/dump_tokenizers.py data/fixtures/tokenizers

Needs tokenizers, tiktoken and sentencepiece. Learns from this repository's sources and the texts below. Writes
    NAME.json       a tokenizer.json: llama3, smollm2, gpt2, gpt2_prefix, qwen, olmo, llama2, mistral,
                    metaspace
    ranks.model     Llama 3's form of tiktoken file, with llama3's tokens
    llama2c.bin     SentencePiece's tokens and scores in llama2.c's form
    expected.json   {"texts": [...], NAME: [ids of each text]}; ranks by tiktoken, llama2c by SentencePiece
Special tokens' spellings in text stay text.
"""
import base64
import glob
import io
import json
import os
import random
import struct
import sys

import sentencepiece
import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace("{1,3}", "")
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
          r"\s*[\r\n]|\s+(?!\S)|\s+")
SPACES = "\t \x0b\x0c\x1c\x1f\x85\xa0\u1680\u180e\u2000\u2003\u2009\u200a\u200b\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"

SEEDS = [
    "Die größte Straße führt über die Brücke; così è la vita, señor. Việt Nam có nhiều sông.",
    "Привет, мир! Как дела сегодня? Ελληνικά γράμματα και λέξεις.",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002 "
    "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002\ud55c\uad6d\uc5b4 \ubb38\uc7a5",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd. \u0645\u0631\u062d\u0628\u0627 "
    "\u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e \U0001f44d\U0001f3fd \U0001f600",
    "I'll say don't, you're late; they've gone and we'd know it's 2024 or 1999. The patient's blood pressure is 120/80.",
]

TEXTS = [
    "", " ", "  ", "   ", "a", " a", "  a", "a ", "a  ", "Hello world!", "Hello  world", "I'll DON'T you'RE",
    "12345678 9", "1234567890123", " Vi\u1ec7t", "\r\n\r\n a", "trailing   ", "\U0001f44d\U0001f3fd",
    "<|eot_id|>", "a<|eot_id|>b", "<|im_start|>user\n<|im_end|>", "<s>[INST] x </s>", "<unk><0x0A>", "\ufffd",
    "'s'S'\u017f'ſt 'LL'lL'Ve'RE'm'D 'x ''s", "it's IT'S it'\u017f", "don\u2019t", "\n", "\n\n", "\n\n\n", " \n", "\n ",
    " \n \n  x", "x \n\n y", "a\r\nb\rc\nd", "\r", "\t\tif (x) {\n\t\t\treturn 0;\n\t\t}\n", "    four\n        eight",
    "a" * 40, "a" * 100, "ab" * 70, " " * 50 + "x", " " * 33, "\n" * 40 + "y", "-" * 60, "=" * 17, "0" * 50, "1 2 3",
    "3.14159, 1,000,000 and 0x7F", "\u0661\u0662\u0663\u0664", "\u2167 \u00bd \u00b2\u00b3 \u2460",
    "x\x00y", "\x00", "\x00\x00 \x01\x7f", "\x1c\x1d a", "e\u0301", "\u00e9", "caf\u0065\u0301 caf\u00e9", "a\u0323\u0307",
    "a\u0307\u0323 q\u0323\u0307", "\u1e9b\u0323", "\u212b \u2126 \u212a", "\u0958\u0928\u093c", "\u1100\u1161\u11a8 \uac00\u11a8",
    "\ufb01 \ufb1d \uf900", "\u0344 \u0340", "o\u0308\u0304 \u022b", "\u0300abc", " \u0301x",
    "\u0645\u064f\u062d\u064e\u0645\u0651\u064e\u062f", "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd",
    "\u0915\u094d\u0937\u093f \u0928\u093f", "\u0e01\u0e33 \u0e19\u0e49\u0e33",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f1e9\U0001f1ea\U0001f1eb",
    "\u2764\ufe0f", "\u200d\u200c\u200b", "\u202eabc\u202c", "\ufeffbom", "\u4f60\u597d\uff0c\u4e16\u754c 123",
    "\u3053\u3093\u306b\u3061\u306f\u3001\u4e16\u754c\uff01", "\ud55c\uad6d\uc5b4", "\u2581", "a\u2581b", "\u2581\u2581 \u2581x", " \u2581",
    "\U0001d54f\U00020000\U0010ffff", "Stra\u00dfe STRASSE", "\u0130\u0131 \u01c5", "na\u00efve r\u00e9sum\u00e9",
    "x=1;y=2;//comment", "foo_bar.baz(qux[3])->z", "https://example.org/a?b=c&d=%20#e", "user@example.org",
    "#include <stdio.h>\nint main(void) { return 0; }", "{\"a\": [1, 2.5e-3, null]}", "$100 \u20ac5 \u00a37", "...!!!???",
    "a'b", "'", "''", "' s", "'sx", "O'Neill's", "l'\u00e9t\u00e9", "rock 'n' roll", "The THE the tHe",
    "!\n!\x00\n!", "<tool_call>x</tool_call>", "a <tool_call> b", "<tool_call> <tool_call>x<tool_call>", "<tool_call", "word  two   three    four", "a\t\tb", " \t \t",
    "x" + "\u00a0" * 3 + "y", "a\u3000b", "1\u00a0000", "\u0303" * 5, "a" + "\u0323\u0307" * 20, "\u00ad-\u2010\u2013\u2014",
] + ["x" + s + "y" for s in SPACES] + ["x" + s + s + "y" + s for s in SPACES] + ["1" + s + "'s" for s in SPACES]


def random_texts(n):
    draw = random.Random(7)
    alphabets = ["abcdefgh '", "aA1 .\n", "0123456789 ,", " \t\r\n\u00a0\u3000x", "\u00e9e\u0301\u0323\u0307o\u0308 ",
                 "\u1100\u1161\u11a8\uac00\uac01 ", "<|>imend_start", "'sStTlLvVeErRdDmM\u017f ", "\u4f60\u597d\uff0c \u3002a1",
                 "\u2581 ab", "\U0001f44d\U0001f3fd\u200d\ufe0f ", "".join(chr(c) for c in range(32, 127)),
                 "".join(chr(c) for c in range(0x20, 0x250)), SPACES + "a1!"]
    return ["".join(draw.choice(draw.choice([a, b])) for _ in range(draw.randint(1, 40)))
            for a, b in [draw.sample(alphabets, 2) for _ in range(n)]]


def corpus(root):
    texts = SEEDS * 30
    for path in sorted(glob.glob(os.path.join(root, "llmc/net*.h")) + glob.glob(os.path.join(root, "docs/*.md"))):
        with open(path, encoding="utf-8") as file:
            texts += file.read().split("\n\n")
    return texts


def train_bytes(texts, size, specials, normalizer, pre, alphabet=None):
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=specials, show_progress=False,
                                  initial_alphabet=alphabet or pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def level(**settings):
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": False, **settings})


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior, invert), level()])


def begins_with(tokenizer, mark):
    template = processors.TemplateProcessing(single=f"{mark} $A", special_tokens=[(mark, tokenizer.token_to_id(mark))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])


def make_llama3(texts):
    tokenizer = train_bytes(texts, 800, [], None, split(LLAMA3))
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    begins_with(tokenizer, "<|begin_of_text|>")
    data = json.loads(tokenizer.to_str())
    data["model"]["ignore_merges"] = True
    return drop_merges(data)


def drop_merges(data):
    """Leaves tokens that no merges lead to: they are found by looking up whole pieces, or not at all."""
    data["model"]["merges"] = [merge for i, merge in enumerate(data["model"]["merges"]) if i % 9 != 8]
    return data


def make_qwen(texts):
    tokenizer = train_bytes(texts, 700, [], normalizers.NFC(), split(QWEN))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>")])
    data = json.loads(tokenizer.to_str())
    data["model"]["merges"] = [" ".join(merge) for merge in data["model"]["merges"]]  # the older form
    return data


def make_olmo(texts):
    tokenizer = train_bytes(texts, 600, ["<|endoftext|>"], normalizers.NFC(), split(CL100K, "removed", True))
    tokenizer.add_tokens([AddedToken(" " * n, normalized=True) for n in range(12, 1, -1)])
    return json.loads(tokenizer.to_str())


def add_plain(data, content):
    """A token that is looked for in text, so that what lies before and behind it is encoded apart."""
    used = list(data["model"]["vocab"].values()) + [token["id"] for token in data["added_tokens"]]
    data["added_tokens"].append({"id": max(used) + 1, "content": content, "single_word": False, "lstrip": False,
                                 "rstrip": False, "normalized": False, "special": False})
    return data


def make_scores(texts):
    """Llama 2's form: trained word by word, then spaces as the older or the newer files have them."""
    marks = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False, limit_alphabet=120,
                                  special_tokens=marks + [f"<0x{b:02X}>" for b in range(256)])
    tokenizer.train_from_iterator(texts, trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][:3]
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    for n in (2, 4, 8):
        vocab["\u2581" * n] = len(vocab)
        merges.insert(n * 20, ["\u2581" * (n // 2)] * 2)
    return add_plain(data, "<tool_call>")


def make_llama2(texts):
    data = make_scores(texts)
    data["pre_tokenizer"] = None
    data["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}
    data["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                 {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
    return data


def make_metaspace(texts, scheme, splits):
    data = make_scores(texts)
    data["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": splits}
    return data


def write_ranks(path, data):
    """The tokens of a byte-level vocabulary in the order of their ids, which is that of their merges."""
    codes = {}
    shift = 256
    for byte in range(256):
        printable = 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174
        codes[chr(byte if printable else shift)] = byte
        shift += not printable
    vocab = sorted(data["model"]["vocab"].items(), key=lambda item: item[1])
    ranks = {bytes(codes[c] for c in token): rank for rank, (token, _) in enumerate(vocab)}
    with open(path, "w") as file:
        for token, rank in ranks.items():
            file.write(f"{base64.b64encode(token).decode()} {rank}\n")
    return tiktoken.Encoding("ranks", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})


def write_llama2c(path, texts):
    model = io.BytesIO()
    lines = [line for text in texts for line in text.split("\n") if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=700, byte_fallback=True,
        character_coverage=0.99, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, split_digits=True, minloglevel=2)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokens = []
    for i in range(processor.vocab_size()):
        token = {1: "\n<s>\n", 2: "\n</s>\n"}.get(i, processor.id_to_piece(i)).replace("\u2581", " ").encode()
        tokens.append((processor.get_score(i), token))
    with open(path, "wb") as file:
        file.write(struct.pack("<i", max(len(token) for _, token in tokens)))
        for score, token in tokens:
            file.write(struct.pack("<fi", score, len(token)) + token)
    return processor


def main():
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    texts = corpus(os.path.join(os.path.dirname(__file__), "../.."))
    samples = TEXTS + random_texts(120)
    smollm2 = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level(use_regex=True)])
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    files = {
        "llama3": make_llama3(texts),
        # as the real one, without bytes that its text never had
        "smollm2": json.loads(train_bytes(texts, 700, marks, None, smollm2, [chr(c) for c in range(33, 127)]).to_str()),
        "gpt2": drop_merges(
            json.loads(train_bytes(texts, 600, ["<|endoftext|>"], None, level(use_regex=True)).to_str())),
        "gpt2_prefix": add_plain(json.loads(
            train_bytes(texts, 500, [], None, level(use_regex=True, add_prefix_space=True)).to_str()), "<tool_call>"),
        "qwen": make_qwen(texts),
        "olmo": make_olmo(texts),
        "llama2": make_llama2(texts),
        "mistral": make_metaspace(texts, "first", False),
        "metaspace": make_metaspace(texts, "always", True),
    }
    out = {"texts": samples}
    for name, data in files.items():
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as file:
            file.write(text + "\n")
        tokenizer = Tokenizer.from_str(text)
        tokenizer.encode_special_tokens = True
        out[name] = [tokenizer.encode(sample, add_special_tokens=False).ids for sample in samples]
    ranks = write_ranks(os.path.join(folder, "ranks.model"), files["llama3"])
    out["ranks"] = [ranks.encode_ordinary(sample) for sample in samples]
    scores = write_llama2c(os.path.join(folder, "llama2c.bin"), texts)
    out["llama2c"] = [scores.encode(sample) for sample in samples]
    with open(os.path.join(folder, "expected.json"), "w", encoding="utf-8") as file:
        json.dump(out, file, ensure_ascii=True, separators=(",", ":"))
        file.write("\n")


main()
