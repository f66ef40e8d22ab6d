# WordNet data files -> {"text": "word: gloss"} a line.
#   awk -v lex="08 26" -f entries.awk data.noun    only those lexicographer files (noun.body, noun.state)
#   awk -f entries.awk data.noun data.verb ...     all
# With -v val=N every N-th entry goes to the file named by -v val_file instead of standard output.
# A data line: offset lex_filenum ss_type w_cnt word lex_id ... | gloss; the licence lines begin with two spaces.
BEGIN {
    n_wanted = split(lex, wanted, " ")
    for (i = 1; i <= n_wanted; i++) keep[wanted[i]] = 1
}
/^  / { next }
n_wanted > 0 && !($2 in keep) { next }
{
    bar = index($0, "|")
    if (bar == 0) next
    gloss = substr($0, bar + 1)
    gsub(/^ +| +$/, "", gloss)
    word = $5
    sub(/\([a-z]+\)$/, "", word) # adjectives carry their position: (p), (a), (ip)
    gsub(/_/, " ", word)
    text = word ": " gloss
    gsub(/\\/, "\\\\", text)
    gsub(/"/, "\\\"", text)
    line = "{\"text\": \"" text "\"}"
    if (val > 0 && ++n % val == 0)
        print line > val_file
    else
        print line
}
