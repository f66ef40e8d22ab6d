# Rows of scripts/run_async.sh -> its tables, in Markdown; and for the plot, in the folder named by -v points, the smoothed
# curves NAME-P.points ("step loss") and NAME.slow ("P slowdown reached").
#   awk -F, -v points=DIR -v folder=CURVES -v window=3 -v steps=1000 -v depth=32 -v baseline=nesterov -v rates="1e-3 3e-3" \
#       -f async.awk rows
# A cell is a name, its layers and its stages; its run is the one with the lowest loss.
function is_number(x) { return x ~ /^[0-9]/ }

# The cell without delay that a cell is measured by.
function own(name, layers) {
    sub(/\+(nostash|aware|reversed)$/, "", name)
    return (name == "pipedream-lr" ? "adamw" : name) SUBSEP layers SUBSEP 1
}

# Reads a cell's curve and smooths it: at[cell, i] steps, curve[cell, i] losses, length_of[cell].
function read_curve(cell,   file, line, f, n, i, sum) {
    file = folder "/" run[cell] ".curve"
    while ((getline line < file) > 0) {
        split(line, f, " ")
        at[cell, ++n] = f[1]; raw[n] = f[2]
    }
    close(file)
    for (i = 1; i <= n; i++) {
        sum += raw[i] - (i > window ? raw[i - window] : 0)
        curve[cell, i] = sum / (i < window ? i : window)
    }
    length_of[cell] = n + 0
}

# The step at which a cell's curve first is at a loss, between validations by a straight line; "" if never.
function reached_at(cell, target,   i, share) {
    for (i = 1; i <= length_of[cell]; i++) {
        if (curve[cell, i] > target) continue
        if (i == 1) return at[cell, 1]
        share = (curve[cell, i - 1] - target) / (curve[cell, i - 1] - curve[cell, i])
        return at[cell, i - 1] + share * (at[cell, i] - at[cell, i - 1])
    }
    return ""
}

# A cell's loss at a step.
function loss_at(cell, step,   i, share) {
    for (i = 2; i <= length_of[cell]; i++)
        if (at[cell, i] >= step) {
            share = (step - at[cell, i - 1]) / (at[cell, i] - at[cell, i - 1])
            return curve[cell, i - 1] + share * (curve[cell, i] - curve[cell, i - 1])
        }
    return ""
}

# Steps to what the cell's own P = 1 has at a step, as a multiple of its; sets was_reached. "" without the two curves.
function slowdown(cell, one, step,   target, first, then) {
    target = loss_at(one, step)
    if (target == "" || !length_of[cell]) return ""
    first = reached_at(one, target)
    then = reached_at(cell, target)
    was_reached = then != ""
    return first > 0 ? (was_reached ? then : steps) / first : ""
}
function told_slowdown(cell, one, step,   times) {
    times = slowdown(cell, one, step)
    return times == "" ? "-" : sprintf("%s%.2f", was_reached ? "" : ">", times)
}

# Steps to the end of the baseline with as many stages, beside all steps.
function told_saving(cell, other,   then) {
    if (!length_of[cell] || !is_number(loss[other])) return "-"
    then = reached_at(cell, loss[other])
    return then == "" ? "not reached" : sprintf("%+.0f%%", 100 * (then / steps - 1) + 1e-9)
}

function print_cell(name, layers, stages,   cell, one) {
    cell = name SUBSEP layers SUBSEP stages
    if (!(cell in run)) return
    one = own(name, layers)
    printf "| %s | %d | %d | %s | %s |", name, layers, stages, lr[cell], \
        is_number(loss[cell]) ? sprintf("%.4f", loss[cell]) : "diverged"
    if (stages == 1) print " 1 | 1 | 1 | - |"
    else
        printf " %s | %s | %s | %s |\n", told_slowdown(cell, one, steps), told_slowdown(cell, one, steps / 3), \
            told_slowdown(cell, one, steps / 10), told_saving(cell, baseline SUBSEP layers SUBSEP stages)
}

function print_head() {
    print "| optimizer | layers | P | best lr | loss | slowdown | to a third | to a tenth | beside the baseline |"
    print "|---|---|---|---|---|---|---|---|---|"
}

function write_points(name, stages,   cell, i, times) {
    cell = name SUBSEP depth SUBSEP stages
    if (!(cell in run)) return
    if (stages == 1 || stages == depth)
        for (i = 1; i <= length_of[cell]; i++) print at[cell, i], curve[cell, i] > (points "/" name "-" stages ".points")
    times = slowdown(cell, own(name, depth), steps / 10)
    if (times != "") print stages, times, was_reached > (points "/" name ".slow")
}

function print_search(name, stages,   i) {
    if (!((name, depth, stages) in run)) return
    printf "| %s | %d |", name, stages
    for (i = 1; i <= n_rates; i++)
        printf " %s |", (name, depth, stages, rate[i]) in tried ? tried[name, depth, stages, rate[i]] : "-"
    printf "\n"
}

{
    cell = $2 SUBSEP $3 SUBSEP $4
    tried[cell, $5] = is_number($7) ? sprintf("%.4f", $7) : "diverged"
    if (!(cell in run) || (is_number($7) && (!is_number(loss[cell]) || $7 + 0 < loss[cell] + 0))) {
        run[cell] = $10; loss[cell] = $7; lr[cell] = $5
    }
}

function print_sizes(   i, s) { # models of as many layers as stages
    print "\nThe model grows with P:\n"
    print_head()
    for (i = 1; i <= n_names; i++) {
        if (names[i] ~ /\+/) continue
        for (s = 2; s <= n_stages; s++)
            if ((own(names[i], list[s]) in run) && ((names[i], list[s], list[s]) in run)) print_cell(names[i], list[s], list[s])
    }
}

END {
    for (cell in run) read_curve(cell)
    n_names = split("adamw adamw+nostash pipedream-lr pipedream-lr+nostash nesterov nesterov+nostash rotate-1st-uni" \
        " rotate-1st-bi rotate-2nd-uni rotate-2nd-bi rotate-2nd-bi+nostash rotate-2nd-bi+seldom rotate-2nd-bi+aware" \
        " rotate-2nd-bi+reversed", names, " ")
    n_stages = split("1 2 4 8 16 32", list, " ")
    print_head()
    for (i = 1; i <= n_names; i++) for (s = 1; s <= n_stages; s++) print_cell(names[i], depth, list[s])
    for (i = 1; i <= n_names; i++)
        for (s = 2; s < n_stages; s++) sizes += (names[i], list[s], list[s]) in run
    if (sizes) print_sizes()
    n_rates = split(rates, rate, " ")
    printf "\nThe search, loss at the end:\n\n| optimizer | P |"
    for (i = 1; i <= n_rates; i++) printf " %s |", rate[i]
    printf "\n|---|---|"
    for (i = 1; i <= n_rates; i++) printf "---|"
    printf "\n"
    for (i = 1; i <= n_names; i++) for (s = 1; s <= n_stages; s++) print_search(names[i], list[s])
    for (i = 1; i <= n_names; i++) for (s = 1; s <= n_stages; s++) write_points(names[i], list[s])
}
