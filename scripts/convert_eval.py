#!/usr/bin/env python3
"""Turns the files of public benchmarks into those that `./train` takes: JSON, JSON lines or either of them gzipped.

  scripts/convert_eval.py KIND FILE OUT.jsonl [--letters] [--limit N] [--shots N --from FILE]

for --eval-choices:   medqa medmcqa arc sciq hellaswag pubmedqa
for --eval-generate, then scripts/score.py exact, code or sql:   gsm8k; humaneval, mbpp; spider

--letters puts the choices into the context and asks for A, B, C, D, as MedQA and MedMCQA are often told; without it a
choice is its text. --shots N begins each prompt with the first N of another file, answered. --databases DIR: Spider's
folder of DIR/NAME/NAME.sqlite; without it a line has its tables in "schema" or "context". --self-test: on lines of its own.
"""

import argparse
import gzip
import json
import pathlib
import re
import sqlite3
import sys
import tempfile

# --- A choice question is (question, choices, answer), and what stands before the question; see `choice_line`.


def from_medqa(line, _):
    keys = sorted(line["options"])
    return "", line["question"], [line["options"][key] for key in keys], keys.index(line["answer_idx"])


def from_medmcqa(line, options):
    return "", line["question"], [line[key] for key in ("opa", "opb", "opc", "opd")], line["cop"] - options.cop_base


def from_arc(line, _):
    question, choices = line["question"], line.get("choices")
    if isinstance(question, dict):  # the original files; Hugging Face's have lists beside each other
        question, choices = question["stem"], question["choices"]
        choices = {"text": [c["text"] for c in choices], "label": [c["label"] for c in choices]}
    return "", question, choices["text"], choices["label"].index(line["answerKey"])


def from_sciq(line, _):
    wrong = [line["distractor1"], line["distractor2"], line["distractor3"]]
    place = len(line["question"]) % 4  # the right one is not always at one end, where a tie would find it
    choices = wrong[:place] + [line["correct_answer"]] + wrong[place:]
    return line.get("support", "").strip(), line["question"], choices, place


def from_pubmedqa(line, _):
    choices = ["yes", "no", "maybe"]
    text = "Abstract: " + "\n".join(line["CONTEXTS"])
    return text, line["QUESTION"], choices, choices.index(line["final_decision"])


def from_hellaswag(line, _):
    """WikiHow's marks go; the ending follows the text itself."""

    def clean(text):
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return re.sub(r" +", " ", text).strip()

    subject = line.get("activity_label", "")
    text = f"{subject}: {line['ctx']}" if subject else line["ctx"]
    return clean(text), None, [clean(ending) for ending in line["endings"]], int(line["label"])


CHOICES = {
    "medqa": from_medqa,
    "medmcqa": from_medmcqa,
    "arc": from_arc,
    "sciq": from_sciq,
    "hellaswag": from_hellaswag,
    "pubmedqa": from_pubmedqa,
}


def choice_line(parts, letters):
    before, question, choices, answer = parts
    if not 0 <= answer < len(choices):
        raise ValueError(f"the answer is number {answer} of {len(choices)}")
    names = [chr(ord("A") + i) for i in range(len(choices))]
    rows = [before] if before else []
    if question is not None:
        rows.append(f"Question: {question.strip()}")
    if letters:
        rows += [f"{name}. {choice}" for name, choice in zip(names, choices)]
    if letters or question is not None:
        rows.append("Answer:")
    texts = names if letters else [choice.strip() for choice in choices]
    return {"context": "\n".join(rows), "choices": [f" {text}" for text in texts], "answer": answer}


# --- Prompts


def from_gsm8k(line, _):
    return {"prompt": f"Question: {line['question'].strip()}\nAnswer:", "answer": line["answer"]}


def from_humaneval(line, _):
    kept = {key: line[key] for key in ("task_id", "prompt", "test", "entry_point")}
    return dict(kept, code_prompt=line["prompt"])


def from_mbpp(line, _):
    task, tests = line.get("text", line.get("prompt", "")).strip(), line["test_list"]
    setup = line.get("test_setup_code") or "\n".join(line.get("test_imports", []))
    prompt = f"# {task}\n# It passes these tests:\n" + "".join(f"# {test}\n" for test in tests)
    return {"task_id": line["task_id"], "prompt": prompt, "test_list": tests, "test_setup_code": setup}


def tables_of(path):
    """The CREATE statements of a database."""
    base = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        found = base.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL ORDER BY name")
        return ";\n".join(sql for (sql,) in found)
    finally:
        base.close()


def from_spider(line, options):
    if options.databases:
        path = pathlib.Path(options.databases, line["db_id"], f"{line['db_id']}.sqlite")
        tables, where = tables_of(path), {"db": str(path)}
    else:
        tables = line.get("schema", line.get("context"))
        if tables is None:
            raise ValueError('neither "schema" nor "context"; give --databases')
        where = {"schema": tables}
    gold = line.get("query", line.get("answer"))
    prompt = f"{tables.strip()}\n\n-- {line['question'].strip()}\nSELECT"
    return {"prompt": prompt, **where, "gold": gold, "output_prefix": "SELECT"}


PROMPTS = {"gsm8k": from_gsm8k, "humaneval": from_humaneval, "mbpp": from_mbpp, "spider": from_spider}


def answered(kind, line):
    """A line as an example for others."""
    if kind in CHOICES:
        return line["context"] + line["choices"][line["answer"]]
    if kind == "gsm8k":
        return f"{line['prompt']} {line['answer']}"
    sys.exit(f"convert_eval: --shots: {kind} has none")


# --- Files


def read_items(path):
    """Objects of a JSON list, of an object of objects, or of JSON lines."""
    data = pathlib.Path(path).read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(row) for row in text.split("\n") if row.strip()]
    if isinstance(whole, dict) and whole and all(isinstance(value, dict) for value in whole.values()):
        return list(whole.values())
    return whole if isinstance(whole, list) else [whole]


def cop_base(answers):
    if 4 in answers or 0 in answers:
        return 0 if 0 in answers else 1
    sys.exit('convert_eval: "cop" is neither 0 nor 4 anywhere: whether it counts from 0 or 1 cannot be told')


def convert(kind, items, options):
    if kind == "medmcqa":  # the published files count from 1, Hugging Face's from 0
        options.cop_base = cop_base([item.get("cop") for item in items])
    lines = []
    for number, item in enumerate(items, 1):
        try:
            made = CHOICES[kind](item, options) if kind in CHOICES else PROMPTS[kind](item, options)
            lines.append(choice_line(made, options.letters) if kind in CHOICES else made)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            sys.exit(f"convert_eval: item {number} is not {kind}'s: {type(error).__name__}: {error}")
    return lines


def write_lines(path, lines):
    with open(path, "w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def run(options):
    lines = convert(options.kind, read_items(options.file)[: options.limit], options)
    if options.shots > 0:
        if options.examples is None:
            sys.exit("convert_eval: --shots needs --from FILE, with other questions than these")
        shots = convert(options.kind, read_items(options.examples)[: options.shots], options)
        head = "".join(answered(options.kind, shot) + "\n\n" for shot in shots)
        field = "context" if options.kind in CHOICES else "prompt"
        lines = [dict(line, **{field: head + line[field]}) for line in lines]
    write_lines(options.out, lines)
    return len(lines)


# --- the test of the script itself

CASES = [  # kind, item, letters, what its line must have
    (
        "medqa",
        {"question": "What? ", "options": {"A": "flu", "B": "gout"}, "answer_idx": "B"},
        False,
        {"context": "Question: What?\nAnswer:", "choices": [" flu", " gout"], "answer": 1},
    ),
    (
        "medmcqa",
        {"question": "Q", "opa": "a", "opb": "b", "opc": "c", "opd": "d", "cop": 4},
        True,
        {"context": "Question: Q\nA. a\nB. b\nC. c\nD. d\nAnswer:", "choices": [" A", " B", " C", " D"], "answer": 3},
    ),
    (
        "arc",
        {"question": {"stem": "Q", "choices": [{"text": "x", "label": "1"}, {"text": "y", "label": "2"}]}, "answerKey": "2"},
        False,
        {"context": "Question: Q\nAnswer:", "choices": [" x", " y"], "answer": 1},
    ),
    (
        "arc",
        {"question": "Q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A"},
        False,
        {"choices": [" x", " y"], "answer": 0},
    ),
    (
        "sciq",
        {"question": "Why?", "distractor1": "1", "distractor2": "2", "distractor3": "3", "correct_answer": "r", "support": "S. "},
        False,
        {"context": "S.\nQuestion: Why?\nAnswer:", "choices": [" r", " 1", " 2", " 3"], "answer": 0},
    ),
    (
        "hellaswag",
        {"ctx": "[header] How to [title] Do it", "activity_label": "Work", "endings": ["go [step] on", "stop"], "label": "1"},
        False,
        {"context": "Work: How to. Do it", "choices": [" go on", " stop"], "answer": 1},
    ),
    (
        "pubmedqa",
        {"CONTEXTS": ["One.", "Two."], "QUESTION": "Is it?", "final_decision": "maybe"},
        False,
        {"context": "Abstract: One.\nTwo.\nQuestion: Is it?\nAnswer:", "choices": [" yes", " no", " maybe"], "answer": 2},
    ),
    (
        "gsm8k",
        {"question": "How many?", "answer": "2 + 2\n#### 4"},
        False,
        {"prompt": "Question: How many?\nAnswer:", "answer": "2 + 2\n#### 4"},
    ),
    (
        "humaneval",
        {"task_id": "H/0", "prompt": "def f():\n", "test": "def check(f): pass", "entry_point": "f", "canonical_solution": "s"},
        False,
        {"task_id": "H/0", "prompt": "def f():\n", "code_prompt": "def f():\n", "entry_point": "f"},
    ),
    (
        "mbpp",
        {"task_id": 3, "text": "Add.", "test_list": ["assert f(1) == 2"], "test_setup_code": ""},
        False,
        {"task_id": 3, "prompt": "# Add.\n# It passes these tests:\n# assert f(1) == 2\n", "test_list": ["assert f(1) == 2"]},
    ),
    (
        "spider",
        {"question": "How many?", "context": "CREATE TABLE t (a INT)", "answer": "SELECT count(*) FROM t"},
        False,
        {"prompt": "CREATE TABLE t (a INT)\n\n-- How many?\nSELECT", "gold": "SELECT count(*) FROM t"},
    ),
]


def self_test(options):
    for kind, item, letters, expected in CASES:
        options.letters = letters
        (line,) = convert(kind, [item], options)
        for key, value in expected.items():
            assert line[key] == value, (kind, key, line[key], value)
    with tempfile.TemporaryDirectory() as folder:
        first, other, out = (pathlib.Path(folder, name) for name in ("a.json", "b.jsonl.gz", "out.jsonl"))
        first.write_text(json.dumps({"1": CASES[6][1], "2": CASES[6][1]}), encoding="utf-8")
        other.write_bytes(gzip.compress((json.dumps(CASES[6][1]) + "\r\n\n").encode()))
        options.kind, options.file, options.examples, options.out = "pubmedqa", first, other, out
        options.letters, options.shots, options.limit = False, 1, None
        assert run(options) == 2
        line = json.loads(out.read_text(encoding="utf-8").split("\n")[0])
        assert line["context"].count("Answer:") == 2 and "Answer: maybe\n\nAbstract:" in line["context"], line
        database = pathlib.Path(folder, "d", "d.sqlite")
        database.parent.mkdir()
        base = sqlite3.connect(database)
        base.execute("CREATE TABLE t (a INT)")
        base.close()
        options.databases = folder
        (line,) = convert("spider", [{"db_id": "d", "question": "All?", "query": "SELECT a FROM t"}], options)
        assert line["db"] == str(database) and line["prompt"].startswith("CREATE TABLE t (a INT)\n\n-- All?"), line
    return len(CASES) + 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=sorted(CHOICES) + sorted(PROMPTS))
    parser.add_argument("file", nargs="?")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--letters", action="store_true", help="the choices are named in the context")
    parser.add_argument("--limit", type=int, help="only the first ones")
    parser.add_argument("--shots", type=int, default=0, help="answered examples before each question")
    parser.add_argument("--from", dest="examples", help="where the examples come from")
    parser.add_argument("--databases", help="Spider's folder of databases")
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    if options.self_test:
        print(f"convert_eval: {self_test(options)} layouts are read as they should be")
        return
    if options.out is None:
        parser.error("a kind, a file, and where the lines go")
    print(f"{run(options)} lines in {options.out}")


if __name__ == "__main__":
    main()
