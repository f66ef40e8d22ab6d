#!/bin/sh
# The demo's domain: WordNet's entries of lexicographer files 08 (noun.body) and 26 (noun.state) as "word: gloss".
# 5,560 entries, 0.56 MB; every tenth is held out.
set -eu
cd "$(dirname "$0")"
dict=/usr/share/wordnet
[ -r $dict/data.noun ] || { echo "data/medical: $dict is missing; install the package wordnet-base" >&2; exit 1; }
awk -v lex="08 26" -v val=10 -v val_file=val.jsonl.tmp -f ../wordnet/entries.awk $dict/data.noun > train.jsonl.tmp
mv val.jsonl.tmp val.jsonl
mv train.jsonl.tmp train.jsonl
wc -lc train.jsonl val.jsonl
