#!/bin/sh
# All of WordNet as "word: gloss", one entry a line (117,659 entries, 10 MB): the larger study domain.
set -eu
cd "$(dirname "$0")"
dict=/usr/share/wordnet
[ -r $dict/data.noun ] || { echo "data/wordnet: $dict is missing; install the package wordnet-base" >&2; exit 1; }
awk -v val=20 -v val_file=val.jsonl.tmp -f entries.awk $dict/data.noun $dict/data.verb $dict/data.adj $dict/data.adv \
    > train.jsonl.tmp
mv val.jsonl.tmp val.jsonl
mv train.jsonl.tmp train.jsonl
wc -lc train.jsonl val.jsonl
