# Rows of scripts/run_codecs.sh -> its tables, in Markdown; and for the plot the files CONFIG.points ("bytes loss", of seed 1;
# bytes are those of boundaries and tables) and start.loss in the folder named by -v points.
#   awk -F, -v points=DIR -v lrs="1e-4 3e-4" -f codecs.awk rows
# A group is a configuration at a rate p. Its figures are means over the seeds at its best learning rate: that of the
# lowest tuning loss with seed 1.
function is_number(x) { return x ~ /^[0-9]/ }
function mean(sum, group) { return sum[group] / seeds[group] }

# Whether the tuning loss a is better than b; a run that diverged is worse than any number.
function is_better(a, b) { return is_number(a) && (!is_number(b) || a + 0 < b + 0) }

function note_search(group) {
    tuned[group, $5] = is_number($8) ? sprintf("%.4f", $8) : "diverged"
    if (lr[group] == "" || is_better($8, best[group])) { best[group] = $8; lr[group] = $5 }
}

# A run with the best learning rate. The share of a gain kept is that of the gain of none with the same seed.
function add_run(group, f) {
    seeds[group]++
    loss[group] += f[9]; added[group] += f[10] - f[8]; cosine[group] += f[11]; filtered[group] += f[12]
    boundary[group] += f[13]; tables[group] += f[14]; speed[group] += f[18]
    if (!is_number(f[9]) || !is_number(f[10])) diverged[group] = 1
    if (f[6] == 1) first[group] = f[9]
    if (seeds[group] == 1 || f[9] + 0 < low[group]) low[group] = f[9] + 0
    if (seeds[group] == 1 || f[9] + 0 > high[group]) high[group] = f[9] + 0
    if (gain[f[6]] > 0) { kept[group] += (start - f[9]) / gain[f[6]]; pairs[group]++ }
}

function told_loss(group,   text) {
    if (diverged[group]) return "diverged"
    text = sprintf("%.4f", mean(loss, group))
    return seeds[group] > 1 ? text sprintf(" ± %.4f", (high[group] - low[group]) / 2) : text
}

function print_group(config, p, group,   share, extra, factor, beside) {
    share = !diverged[group] && pairs[group] ? sprintf("%.1f%%", 100 * kept[group] / pairs[group]) : "-"
    extra = diverged[group] ? "-" : sprintf("%+.4f", mean(added, group))
    beside = config ~ /filter|bias/ ? sprintf("%.3f", mean(filtered, group)) : "-"
    factor = whole > 0 && boundary[group] > 0 ? sprintf("%.1f", whole / mean(boundary, group)) : "-"
    printf "| %s | %s | %s | %s | %d | %s | %s | %.3f | %s | %.1f | %s | %.1f | %.1fk |\n", config, p, lr[group], \
        told_loss(group), seeds[group], share, extra, mean(cosine, group), beside, mean(boundary, group), factor, \
        mean(tables, group), 0.001 * mean(speed, group)
    if (is_number(first[group]))
        print mean(boundary, group) + mean(tables, group), first[group] > (points "/" config ".points")
}

function print_search(config, p, group,   i) {
    printf "| %s | %s |", config, p
    for (i = 1; i <= n_lrs; i++) printf " %s |", (group, lr_list[i]) in tuned ? tuned[group, lr_list[i]] : "-"
    printf "\n"
}

$2 == "start" { start = $9; next }
{ row[++n] = $0 }
$6 == 1 { note_search($2 SUBSEP $4) }

END {
    none = "none" SUBSEP "-"
    for (i = 1; i <= n; i++) {
        split(row[i], f)
        if (f[2] == "none" && f[5] == lr[none]) { whole = f[13]; if (is_number(f[9])) gain[f[6]] = start - f[9] }
    }
    for (i = 1; i <= n; i++) {
        split(row[i], f)
        if (f[5] == lr[f[2], f[4]]) add_run(f[2] SUBSEP f[4], f)
    }
    if (is_number(start)) printf "Before training %.4f.\n\n", start
    print "| codec | p | best lr | loss | seeds | gain kept | codec adds | cosine | filtered | boundary bytes" \
        " | times fewer | table bytes | simulated tokens/s |"
    print "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    n_configs = split("none quant8 quant4 aqsgd tahquant klt klt+filter klt+bias klt+flat klt+even klt+unpredicted klt+fixed" \
        " klt+often klt+seldom topk bottleneck mask mask+filter mask+bias", configs, " ")
    n_rates = split("- 0.90 0.95 0.975 0.9875", rates, " ")
    for (c = 1; c <= n_configs; c++)
        for (r = 1; r <= n_rates; r++)
            if (seeds[configs[c], rates[r]]) print_group(configs[c], rates[r], configs[c] SUBSEP rates[r])
    n_lrs = split(lrs, lr_list, " ")
    printf "\nThe search, tuning loss with seed 1:\n\n| codec | p |"
    for (i = 1; i <= n_lrs; i++) printf " %s |", lr_list[i]
    printf "\n|---|---|"
    for (i = 1; i <= n_lrs; i++) printf "---|"
    printf "\n"
    for (c = 1; c <= n_configs; c++)
        for (r = 1; r <= 3; r += 2) # at its own rate, or 20x
            if (seeds[configs[c], rates[r]]) print_search(configs[c], rates[r], configs[c] SUBSEP rates[r])
    if (is_number(start)) print start > (points "/start.loss")
}
