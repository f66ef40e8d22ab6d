"""Dumps what transformers makes of conversations in the chat templates of Llama 3 and SmolLM2, for test_gpt.

    python3 dev/reference/dump_chat.py data/fixtures/tokenizers LLAMA3.jinja SMOLLM2.gguf

Needs transformers and gguf. The template texts are the models' own and not in this repository: LLAMA3.jinja is the
chat_template in the tokenizer_config.json of Meta-Llama-3-8B-Instruct, SMOLLM2.gguf any GGUF of SmolLM2-Instruct. The
tokenizers are the small ones of the fixtures, llama3's with the two tokens of headers added. Writes
    chat.json   {"llama3": [[messages, ids, ids up to the assistant's answer]...], "smollm2": ...}
SmolLM2's template makes up a message of the system where there is none; it is taken out of the ids here.
"""
import json
import os
import sys

from gguf import GGUFReader
from transformers import PreTrainedTokenizerFast

HEADERS = ["<|start_header_id|>", "<|end_header_id|>"]
TALKS = [
    [("user", "Hello world!")],
    [("system", "You are terse."), ("user", "What is 12345678 + 9?"), ("assistant", "12345687.")],
    [("system", "S"), ("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"), ("user", "five")],
    [("system", ""), ("user", "An empty message of the system."), ("assistant", "")],
    [("system", " \n\t "), ("user", "  \n leading, and trailing \n\n"), ("assistant", "\n\n\tcode:\n    x = 1\n")],
    [("user", "\u00a0\u3000wide\u2003\u2028"), ("assistant", "\x1c\x85a\u200b \ufeff"), ("user", "\u1680 x \u180e")],
    [("user", "Vi\u1ec7t Nam, na\u00efve caf\u0065\u0301 \U0001f44d\U0001f3fd \u4f60\u597d\uff0c\u4e16\u754c\u3002"),
     ("assistant", "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947")],
    [("assistant", "I begin."), ("user", "7"), ("assistant", "'s it"), ("user", "-"), ("system", "late"), ("user", "\r\n.")],
    [("user", "I'll DON'T you'RE\n\n\n"), ("assistant", "\n"), ("narrator", "an unusual role")],
    [("user", "    if (x) {\n        return 0;"), ("assistant", "        y = 2;\n    }")],
    [("user", "{{ bos_token }} {% if x %} system\nuser: assistant"), ("assistant", "a" * 60 + "\n" * 5 + " " * 9 + "b")],
]


def make_llama3(folder, path):
    with open(path) as file:
        template = file.read()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, "llama3.json"),
                                        bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot_id|>"] + HEADERS})
    assert tokenizer.convert_tokens_to_ids(HEADERS) == [803, 804]
    return tokenizer


def make_smollm2(folder, path):
    template = GGUFReader(path).fields["tokenizer.chat_template"].contents()
    return PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, "smollm2.json"), bos_token="<|im_start|>",
                                   eos_token="<|im_end|>", chat_template=template)


def ids_of(tokenizer, talk, prompt):
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=prompt)
    ids = tokenizer.apply_chat_template(talk, tokenize=True, add_generation_prompt=prompt, return_dict=False)
    made_up = "<|im_start|>system\nYou are a helpful AI assistant"
    if talk[0]["role"] != "system" and text.startswith(made_up):
        kept = text[text.index("<|im_end|>\n") + len("<|im_end|>\n"):]
        without = tokenizer(kept, add_special_tokens=False)["input_ids"]
        assert ids[-len(without):] == without
        return without
    return ids


def main():
    folder, llama3, smollm2 = sys.argv[1:4]
    out = {}
    for name, tokenizer in [("llama3", make_llama3(folder, llama3)), ("smollm2", make_smollm2(folder, smollm2))]:
        talks = [[{"role": role, "content": content} for role, content in talk] for talk in TALKS]
        out[name] = [[talk, ids_of(tokenizer, talk, False), ids_of(tokenizer, talk, True)] for talk in talks]
        print(f"{name}: {len(talks)} conversations, {sum(len(ids) for _, ids, _ in out[name])} ids")
    with open(os.path.join(folder, "chat.json"), "w") as file:
        json.dump(out, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
