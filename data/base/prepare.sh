#!/bin/bash
# The base model's text, about 40 MB from Debian's packages: Python's and Perl's documentation, manual pages, the King
# James Bible through its reader, two dictionaries of computing, and fortune cookies. No WordNet in it.
# Writes one .txt a source into this folder. Needs the packages named below.
set -euo pipefail
cd "$(dirname "$0")"
packages="python3.11-doc perl-doc manpages manpages-dev man-db groff-base bsdextrautils bible-kjv bible-kjv-text \
dict-foldoc dict-jargon fortunes"
for package in $packages; do
    dpkg -s "$package" > /dev/null 2>&1 || { echo "data/base: install first: apt-get install $packages" >&2; exit 1; }
done

find -L /usr/share/doc/python3.11/html/_sources -name '*.txt' | LC_ALL=C sort | xargs -d '\n' cat > python.txt
find /usr/share/perl -name '*.pod' | LC_ALL=C sort | xargs -d '\n' cat > perl.txt
dpkg -L manpages manpages-dev man-db groff-base bsdextrautils | grep -E '/man/man.*\.gz$' | LC_ALL=C sort |
    while read -r page; do
        MANWIDTH=80 man -l "$page" 2> /dev/null | col -b
    done > man.txt
bible -l75 gen1:1-rev22:21 < /dev/null > bible.txt
zcat /usr/share/dictd/foldoc.dict.dz > foldoc.txt
zcat /usr/share/dictd/jargon.dict.dz > jargon.txt
find /usr/share/games/fortunes -type f ! -name '*.*' ! -name '*art*' | LC_ALL=C sort | xargs -d '\n' cat > fortunes.txt
wc -c ./*.txt
