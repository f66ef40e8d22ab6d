#!/usr/bin/env python3
"""Scores the answers of `./train --eval-generate`: lines of JSON with the input's fields and "output".

  scripts/score.py exact answers.jsonl            a number or a short text against "answer" (GSM8K: what follows ####)
  scripts/score.py code answers.jsonl             Python against its tests, HumanEval's or MBPP's, in a process with limits
  scripts/score.py sql answers.jsonl              a query's rows against those of the query in "gold", on SQLite
  scripts/score.py --self-test

Prints a line of result and then the same as JSON; --details FILE writes what became of each line. Needs Python 3.8 and
nothing else. `code` runs what a model has written: with limits of time, memory and file size, in an empty folder, and
without a network where `unshare` can be had, but it is no sandbox. Run it where nothing is to lose.
"""

import argparse
import collections
import decimal
import json
import math
import os
import pathlib
import re
import resource
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def read_lines(path):
    lines = []
    with open(path, encoding="utf-8-sig") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                sys.exit(f"score: {path}: line {number}: {error}")
            if not isinstance(line, dict) or not isinstance(line.get("output"), str):
                sys.exit(f'score: {path}: line {number}: no "output" string in it; answer it with --eval-generate first')
            line["line"] = number
            lines.append(line)
    if not lines:
        sys.exit(f"score: {path}: there are no answers in it")
    return lines


def need(line, *names):
    """The first of these fields that a line has."""
    for name in names:
        if name in line:
            return line[name]
    sys.exit(f"score: line {line['line']}: none of the fields {', '.join(names)} in it")


# --- exact


def as_number(text):
    """A Decimal without commas, units or a trailing point; None where there is no number."""
    found = NUMBER.search(text)
    return decimal.Decimal(found.group().replace(",", "")) if found else None


def plain(text):
    """Words and digits alone, in lower case, without articles."""
    words = re.sub(r"[^\w\s]", " ", text.lower()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def after_mark(text):
    """The rest of the line behind the first ####, None without one."""
    found = re.search(r"####[ \t]*([^\n]*)", text)
    return found.group(1) if found else None


def same_answer(given, right):
    number = as_number(right)
    if number is None or plain(NUMBER.sub("", right)).count(" ") > 1:  # a sentence that has a number in it is a text
        return plain(given) == plain(right)
    return as_number(given) == number


def score_exact(line):
    """strict: only what follows #### counts, or, where the reference has no mark, the first line; else the last number."""
    right = str(need(line, "answer", "target"))
    marked = after_mark(right)
    right = right if marked is None else marked
    output = line["output"]
    strict = after_mark(output) if marked is not None else output.strip().split("\n")[0]
    result = {"strict": strict is not None and same_answer(strict, right)}
    numbers = NUMBER.findall(output)
    loose = strict if strict is not None else numbers[-1] if numbers else ""
    result["passed"] = same_answer(loose, right)
    return result


# --- code


def fenced(output):
    """What stands in the first code fence, else all of it."""
    found = re.search(r"```[\w+-]*\n(.*?)(?:```|\Z)", output, re.S)
    return found.group(1) if found else output


def code_program(line):
    """What is run: HumanEval's prompt with the output behind it, or the function anew; MBPP's output stands alone."""
    body = fenced(line["output"])
    if "test" in line:
        prompt, name = need(line, "code_prompt", "prompt"), need(line, "entry_point")
        is_anew = not body.lstrip("\n").startswith((" ", "\t")) and re.search(rf"^def {re.escape(name)}\b", body, re.M)
        start = prompt[: max(prompt.rfind(f"def {name}"), 0)] if is_anew else prompt
        return f"{start}{body}\n\n{line['test']}\n\ncheck({name})\n"
    tests = need(line, "test_list", "tests")
    tests = "\n".join(tests) if isinstance(tests, list) else tests
    return f"{body}\n\n{line.get('test_setup_code', '')}\n{tests}\n"


def limit_process(memory_bytes, seconds):
    """In the child: no more than this, no core file, no large file."""
    for what, size in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, math.ceil(seconds) + 1),
        (resource.RLIMIT_FSIZE, 1 << 24),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (size, size))


def without_network():
    """The words before a command that take the network from it, none where this system does not allow it."""
    words = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None:
        return []
    probe = subprocess.run(words + ["true"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return words if probe.returncode == 0 else []


def run_program(program, seconds, memory_bytes, prefix):
    """passed, or the reason why not. It passes if its very last statement is reached, which prints a secret."""
    secret = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "answer.py")
        path.write_text(f"{program}\nprint('{secret}')\n", encoding="utf-8", errors="replace")
        output = pathlib.Path(folder, "output.txt")
        with open(output, "wb") as sink:
            child = subprocess.Popen(
                prefix + [sys.executable, "-I", str(path)],
                cwd=folder,
                env={"PATH": os.environ.get("PATH", ""), "HOME": folder},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: limit_process(memory_bytes, seconds),
            )
        try:
            child.wait(timeout=seconds)
            reason = "timeout" if child.returncode == -signal.SIGXCPU else None
        except subprocess.TimeoutExpired:
            reason = "timeout"
        try:
            os.killpg(child.pid, signal.SIGKILL)  # and what it has started
        except ProcessLookupError:
            pass
        child.wait()
        text = output.read_bytes()[-4096:].decode("utf-8", "replace").rstrip().split("\n")
    if reason is None and child.returncode == 0 and text[-1] == secret:
        return "passed"
    return reason or f"failed: {text[-1][:200]}"


def score_code(line, options):
    became = run_program(code_program(line), options.seconds, options.memory_mb << 20, options.prefix)
    return {"passed": became == "passed", "became": became}


# --- sql


def first_statement(output, prefix=""):
    """A query without fence and comment lines, to the first semicolon or blank line; prefix: the prompt's end begins it."""
    text = re.sub(r"^\s*--.*\n", "", fenced(output), flags=re.M).strip()
    if prefix and not re.match(r"(?:select|with)\b", text, re.I):
        text = f"{prefix} {text}"
    return re.split(r";|\n\s*\n", text)[0].strip()


def open_database(line):
    """In memory from the line's schema, or a file that is only read."""
    if "schema" in line:
        base = sqlite3.connect(":memory:")
        base.executescript(line["schema"])
        base.commit()
    else:
        base = sqlite3.connect(f"{pathlib.Path(need(line, 'db')).resolve().as_uri()}?mode=ro", uri=True)
    base.text_factory = lambda value: value.decode("utf-8", "replace")
    base.execute("PRAGMA query_only = 1")
    return base


def run_query(line, query, seconds):
    """The rows. sqlite3.Error, also where it takes too long."""
    base = open_database(line)
    try:
        end = time.monotonic() + seconds
        base.set_progress_handler(lambda: time.monotonic() > end, 10000)
        return base.execute(query).fetchmany(1000000)
    finally:
        base.close()


def cell(value):
    """Numbers as numbers, equal to nine digits; all else as it is."""
    if isinstance(value, (int, float)):
        return ("number", float(f"{value:.9g}"))
    return ("text", value) if value is not None else ("null", "")


def same_rows(given, right, ordered):
    given, right = ([tuple(map(cell, row)) for row in rows] for rows in (given, right))
    return given == right if ordered else collections.Counter(given) == collections.Counter(right)


def is_ordered(query):
    """Whether ORDER BY stands outside of every bracket and text."""
    text = re.sub(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"", "''", query)
    while "(" in text and re.search(r"\([^()]*\)", text):
        text = re.sub(r"\([^()]*\)", " ", text)
    return re.search(r"\border\s+by\b", text, re.I) is not None


def score_sql(line, options):
    gold = need(line, "gold", "query")
    try:
        right = run_query(line, gold, options.seconds)
    except sqlite3.Error as error:
        sys.exit(f"score: line {line['line']}: the gold query fails: {error}")
    try:
        given = run_query(line, first_statement(line["output"], line.get("output_prefix", "")), options.seconds)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        return {"passed": False, "became": f"failed: {error}"}
    passed = same_rows(given, right, is_ordered(gold))
    return {"passed": passed, "became": "passed" if passed else f"other rows: {len(given)}, not {len(right)}"}


# --- all


def mean(values):
    """Mean and its standard error, sqrt(variance / (n - 1)); 0 for one value."""
    n = len(values)
    average = sum(values) / n
    variance = sum((value - average) ** 2 for value in values) / n
    return average, math.sqrt(variance / (n - 1)) if n > 1 else 0.0


def by_task(lines, results):
    """The share of each task's samples that pass: their mean is pass@1."""
    tasks = collections.OrderedDict()
    for line, result in zip(lines, results):
        tasks.setdefault(line["task_id"] if "task_id" in line else ("line", line["line"]), []).append(result["passed"])
    return [sum(passed) / len(passed) for passed in tasks.values()]


def summary(kind, lines, results, options):
    shares = by_task(lines, results)
    average, error = mean(shares)
    total = {"kind": kind, "n": len(shares), "answers": len(lines), "score": average, "error": error}
    if kind == "exact":
        total["strict"] = sum(result["strict"] for result in results) / len(results)
    if kind == "code":
        total["network"] = "none" if options.prefix else "open"
    return total


def print_summary(total):
    name = {"exact": "exact match", "code": "pass@1", "sql": "execution match"}[total["kind"]]
    strict = f", behind #### or on the first line {total['strict']:.4f}" if "strict" in total else ""
    print(f"{name} {total['score']:.4f} +- {total['error']:.4f} of {total['n']}{strict}")
    print(json.dumps(total))


def score(kind, lines, options):
    if kind == "exact":
        return [score_exact(line) for line in lines]
    return [(score_code if kind == "code" else score_sql)(line, options) for line in lines]


# --- the test of the script itself

HUMAN = {
    "prompt": 'def add(a, b):\n    """Sum."""\n',
    "test": "def check(f):\n    assert f(1, 2) == 3\n    assert f(-1, 1) == 0\n",
    "entry_point": "add",
}
MBPP = {"test_list": ["assert twice(2) == 4", "assert twice('ab') == 'abab'"], "test_setup_code": ""}
SCHEMA = "CREATE TABLE t (id INTEGER, name TEXT, x REAL); INSERT INTO t VALUES (1,'a',.5),(2,'b',1.5),(3,NULL,2);"
EXACT_CASES = [  # answer, output, strict, passed
    ("so 5 + 5 = <<5+5=10>>10\n#### 10", "first 7\n#### 10 apples", True, True),
    ("#### 1,234", "it is\n####1234.0", True, True),
    ("#### 70000", "the profit is $70,000.", False, True),
    ("#### 18", "she makes 18 and then 20", False, False),
    ("#### -3", "#### 3", False, False),
    ("#### 12", "", False, False),
    ("Paris", " the Paris.\nmore", True, True),
    ("Paris", "London", False, False),
    ("42", "42%", True, True),
    ("0.5", ".50", True, True),
]
CODE_CASES = [  # line, output, how what became of it begins
    (HUMAN, "    return a + b\n", "passed"),
    (HUMAN, "    return a - b\n", "failed: AssertionError"),
    (HUMAN, "```python\ndef add(a, b):\n    return a + b\n```\nDone.", "passed"),
    (HUMAN, "    import sys\n    sys.exit(0)\n", "failed"),
    (HUMAN, "    import os\n    os._exit(0)\n", "failed"),
    (HUMAN, "    while True: pass\n", "timeout"),
    (HUMAN, "    return len(bytearray(1 << 33)) and a + b\n", "failed: MemoryError"),
    (HUMAN, "    return a +\n", "failed: SyntaxError"),
    (HUMAN, "    return input()\n", "failed: EOFError"),
    (MBPP, "def twice(x):\n    return x + x\n", "passed"),
    (MBPP, "```python\ndef twice(x):\n    return x * 2\n```", "passed"),
    (MBPP, "def twice(x):\n    return x * 3\n", "failed"),
]
SQL_CASES = [  # gold, output, passed
    ("SELECT name FROM t WHERE id < 3", "SELECT name FROM t WHERE id <= 2 ORDER BY id DESC;", True),
    ("SELECT name FROM t ORDER BY id", "SELECT name FROM t ORDER BY id DESC", False),
    ("SELECT id FROM (SELECT id FROM t ORDER BY x)", "```sql\nSELECT id FROM t ORDER BY id DESC\n```", True),
    ("SELECT count(*) FROM t", "-- how many\nSELECT 3.0", True),
    ("SELECT id FROM t", "SELECT id FROM t UNION ALL SELECT 1", False),
    ("SELECT id FROM t", "SELECT nothing FROM t", False),
    ("SELECT id FROM t", "DELETE FROM t", False),
    ("SELECT id FROM t", "", False),
    ("SELECT name FROM t WHERE id = 3", "SELECT NULL", True),
    ("SELECT 'order by' FROM t, t u", "SELECT 'order by' FROM t a, t b", True),
    ("SELECT 1", "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT max(n) FROM c", False),
]


def self_test(options):
    for answer, output, strict, passed in EXACT_CASES:
        result = score_exact({"answer": answer, "output": output, "line": 1})
        assert result == {"strict": strict, "passed": passed}, (answer, output, result)
    for line, output, became in CODE_CASES:
        options.seconds = 1.0 if became == "timeout" else 60.0  # a busy machine starts Python slowly
        result = score_code(dict(line, output=output, line=1), options)
        assert result["became"].startswith(became), (output, result)
        assert result["passed"] == (became == "passed"), (output, result)
    options.seconds = 1.0
    for gold, output, passed in SQL_CASES:
        result = score_sql({"schema": SCHEMA, "gold": gold, "output": output, "line": 1}, options)
        assert result["passed"] == passed, (gold, output, result)
    assert first_statement(" a FROM t; more", "SELECT") == "SELECT a FROM t"
    samples = [{"task_id": 1}, {"task_id": 1}, {"task_id": 2}]
    shares = by_task(samples, [{"passed": True}, {"passed": False}, {"passed": True}])
    assert shares == [0.5, 1.0] and mean(shares) == (0.75, 0.25), shares
    return len(EXACT_CASES) + len(CODE_CASES) + len(SQL_CASES)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=("exact", "code", "sql"))
    parser.add_argument("answers", nargs="?", help="the output of ./train --eval-generate")
    parser.add_argument("--details", help="write what became of each line")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a program or query (%(default)s)")
    parser.add_argument("--memory-mb", type=int, default=1024, help="of a program (%(default)s)")
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    options.prefix = without_network() if options.kind == "code" or options.self_test else []
    if options.self_test:
        print(f"score: {self_test(options)} cases are scored as they should be")
        return
    if options.kind is None or options.answers is None:
        parser.error("what to score, and a file of answers")
    lines = read_lines(options.answers)
    results = score(options.kind, lines, options)
    if options.details:
        with open(options.details, "w", encoding="utf-8") as file:
            for line, result in zip(lines, results):
                file.write(json.dumps({"line": line["line"], **result}) + "\n")
    print_summary(summary(options.kind, lines, results, options))


if __name__ == "__main__":
    main()
