#!/usr/bin/env bash
# What a GPU says of this program, in under six minutes: builds it, runs the tests of the ops and of the model on the
# device in bf16 and fp32, compute-sanitizer on the small tests, every kernel's speed, a step of 1B, and PyTorch's where
# it is installed. A table comes last; the logs are in build/gpu_check/. Exits with 1 if a part fails; the others run.
#
#   scripts/gpu_check.sh [build] [tests] [sanitizer] [kernels] [training] [pytorch]      no word: these
#   scripts/gpu_check.sh program        all tests of the program in fp32: 200 runs of it, each of which starts the device
#   DEPS=build/deps.tar.gz scripts/gpu_check.sh     libraries that this machine lacks, from another: scripts/gpu_deps.sh
#   GPU_CHECK_SECONDS=350   what all parts may take together: a part that would start later fails
#   ARCH=native, NVCC=nvcc, SANITIZER=compute-sanitizer, PYTHON=python3
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=build/gpu_check deps=build/gpu_check/deps
limit=${GPU_CHECK_SECONDS:-350} given_deps=${DEPS:-}
unset DEPS # make would take it for a folder
arch=${ARCH:-native} nvcc=${NVCC:-nvcc} sanitizer=${SANITIZER:-compute-sanitizer} python=${PYTHON:-python3}
wanted=" ${*:-build tests sanitizer kernels training pytorch} "
parts=() # in the table's order
mkdir -p $out
rm -f $out/*.status $out/*.log

is_wanted() {
    [[ $wanted == *" $1 "* ]]
}

# part NAME SECONDS COMMAND...: the command for at most so many seconds and what is left; its log and result in $out
part() {
    local name=$1 seconds=$2 left=$((limit - SECONDS)) started=$SECONDS code result=ok
    shift 2
    if [ "$left" -lt "$seconds" ]; then seconds=$left; fi
    if [ "$seconds" -lt 1 ]; then
        echo "no time was left for it" > "$out/$name.log"
        code=124
    else
        timeout -k 5 "$seconds" "$@" > "$out/$name.log" 2>&1
        code=$?
    fi
    case $code in
    0) ;;
    124 | 137) result="FAIL: more than $((seconds > 0 ? seconds : 0)) s" ;;
    *) result="FAIL: status $code" ;;
    esac
    echo "$result|$((SECONDS - started))" > "$out/$name.status"
    echo "gpu_check: $name: $result, $((SECONDS - started)) s"
    [ $code = 0 ] || tail -5 "$out/$name.log" | cut -c1-400 | sed "s/^/    /"
    return $code
}

# ---------------------------------------------------------------------------------------------------------------------
# Libraries

links() { # links LIBRARY...: the compiler finds them
    echo 'int main(void) { return 0; }' > $out/link.cu
    # shellcheck disable=SC2046  # a list of options
    "$nvcc" $out/link.cu -o $out/link -L$deps/lib $(printf -- '-l%s ' "$@") > /dev/null 2>&1
}

includes() {
    printf '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <%s>\n' "$1" > $out/include.cu
    "$nvcc" -E $out/include.cu -I$deps/include > /dev/null 2>&1
}

# cuBLASLt and cuSOLVER of Python's packages, where the toolkit comes without them: under the names that -l looks for.
take_from_python() {
    local folder library name
    for folder in $("$python" -c 'import nvidia; print("\n".join(nvidia.__path__))' 2> /dev/null | sed 's|$|/*/|'); do
        for library in "$folder"lib/lib*.so*; do
            [ -e "$library" ] || continue
            name=$(basename "$library")
            ln -sf "$library" "$deps/lib/$name"
            ln -sf "$library" "$deps/lib/${name%%.so*}.so"
        done
        if [ -d "${folder}include" ]; then cp -rsn "${folder}include/." $deps/include/ 2> /dev/null; fi
    done
}

check_libraries() {
    rm -rf $deps
    mkdir -p $deps/include $deps/lib
    case $given_deps in
    '') ;;
    *.tar.gz) tar -C $out -xzf "$given_deps" ;; # a folder deps/
    *) cp -a "$given_deps/." $deps/ ;;
    esac
    if ! links gomp && [ -d $deps/gomp ]; then cp -a $deps/gomp/. $deps/lib/; fi
    if ! links cublasLt cusolver || ! includes cublasLt.h || ! includes cusolverDn.h; then
        echo "gpu_check: the toolkit has no cuBLASLt or cuSOLVER: looking among Python's packages"
        take_from_python
    fi
    local library missing=
    for library in cublasLt cusolver jansson pcre2-8; do links "$library" || missing+=" $library"; done
    for library in dnnl openblas; do links "$library" || missing+=" $library(of the ops' tests)"; done
    for library in cublasLt.h cusolverDn.h jansson.h pcre2.h dnnl.h; do includes "$library" || missing+=" $library"; done
    [ -z "$missing" ] || echo "gpu_check: not found here:$missing; see scripts/gpu_deps.sh and DEPS"
}

# ---------------------------------------------------------------------------------------------------------------------
# Parts

programs=(build/cuda_ops build/cuda_ops_fp32 build/cuda_gpt build/cuda_gpt_fp32 build/bench_cuda)

run_build() {
    parts+=(build)
    check_libraries
    local flags=(DEVICE=cuda PRECISION=BF16 "ARCH=$arch" "NVCC=$nvcc")
    if compgen -G "$deps/lib/*" > /dev/null; then flags+=("DEPS=$deps"); fi
    part build 170 make -k -j"$(nproc)" "${flags[@]}" train "${programs[@]}"
}

# What test_gpt.cu runs of itself where activations are bf16: the model and a mesh, no runs of the whole program.
model_tests=(model_against_pytorch micro_batches model_masked kv_cache device_mesh)

# Beside each other: they are small, and nothing is timed.
start_tests() {
    # shellcheck disable=SC2016  # the inner shell's
    local each='failed=0; for name in "$@"; do build/cuda_gpt_fp32 "$name" || failed=1; done; exit $failed'
    parts+=(test_ops_bf16 test_ops_fp32 test_gpt_bf16 test_gpt_fp32)
    part test_ops_bf16 90 build/cuda_ops &
    part test_ops_fp32 90 build/cuda_ops_fp32 &
    part test_gpt_bf16 90 build/cuda_gpt &
    part test_gpt_fp32 90 bash -c "$each" each "${model_tests[@]}" &
}

run_program() {
    parts+=(test_program)
    part test_program 300 build/cuda_gpt_fp32
}

# The tests whose kernels are all ours: the libraries' take minutes under it. What is shared between threads: racecheck.
run_sanitizer() {
    local ours=(adamw attention codec cross_entropy embedding mask nesterov outer rmsnorm rope swiglu vector)
    local shared=(attention cross_entropy embedding rmsnorm vector)
    local common=(--error-exitcode 9 --report-api-errors no)
    parts+=(memcheck racecheck synccheck initcheck)
    if ! command -v "$sanitizer" > /dev/null; then
        local tool
        for tool in memcheck racecheck synccheck initcheck; do
            echo "not run: no $sanitizer here|0" > $out/$tool.status
        done
        echo "gpu_check: no $sanitizer here"
        return
    fi
    part memcheck 60 "$sanitizer" --tool memcheck "${common[@]}" build/cuda_ops "${ours[@]}"
    part racecheck 60 "$sanitizer" --tool racecheck "${common[@]}" build/cuda_ops "${shared[@]}"
    part synccheck 30 "$sanitizer" --tool synccheck "${common[@]}" build/cuda_ops "${shared[@]}"
    part initcheck 30 "$sanitizer" --tool initcheck "${common[@]}" build/cuda_ops rmsnorm vector embedding
}

run_kernels() {
    parts+=(kernels)
    part kernels 90 build/bench_cuda kernels && cat $out/kernels.log
}

run_training() {
    parts+=(training)
    part training 60 build/bench_cuda train && cat $out/training.log
}

# Tokens a second, from the training's table.
our_rate() {
    awk -F'|' '/^\| .*, T [0-9]+ / { print $3 + 0 }' $out/training.log 2> /dev/null
}

run_pytorch() {
    local rate
    parts+=(pytorch)
    rate=$(our_rate)
    if ! "$python" -c 'import torch; assert torch.cuda.is_available()' > /dev/null 2>&1; then
        echo "not run: no PyTorch with CUDA here|0" > $out/pytorch.status
    elif part pytorch 120 "$python" dev/bench_pytorch_cuda.py ${rate:+--ours "$rate"}; then
        cat $out/pytorch.log
    fi
}

# ---------------------------------------------------------------------------------------------------------------------
# The table

# Goals for an H200; nothing is printed for parts that did not run.
print_reach() {
    grep -q '^|' $out/kernels.log $out/training.log 2> /dev/null || return 0
    echo "| reach on an H200 | goal | found |"
    awk -F'|' '
        /^\| .*, T [0-9]+ / { print "| MFU at 1B | >= 50% |" $5 "|" }
        /^\| attention forward .* of 64 / { print "| attention forward, of the product | >= 30% |" $7 "|" }
        /^\| attention backward .* of 64 / { print "| attention backward, of the product | >= 25% |" $7 "|" }
        /^\| / && NF == 8 && $5 ~ /%/ && $5 !~ /copy/ && $2 !~ /waits/ {
            n++
            if ($5 + 0 < 85) { below++; name = $2; gsub(/  +/, " ", name); list = list "\n|  " name "| |" $5 "|" }
        }
        END { if (n) print "| memory-bound kernels, of the copy | >= 85% | " n - below " of " n " reach it |" list }
    ' $out/kernels.log $out/training.log 2> /dev/null
}

count_tests() {
    awk '/^[0-9]+ passed, [0-9]+ failed$/ { n++; passed += $1; failed += $3 }
         END { if (n) print ", " passed " passed, " failed " failed" }' "$1"
}

print_table() {
    local name result seconds failed=0
    echo
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader 2> /dev/null | head -1
    echo "| part | result | s |"
    for name in "${parts[@]}"; do
        IFS='|' read -r result seconds < "$out/$name.status"
        case $name in
        test_*) result="$result$(count_tests "$out/$name.log")" ;;
        training) result="$result$(our_rate | sed 's/.*/, & tok\/s/')" ;;
        pytorch) result="$result$(sed -n 's/.*\(, ratio.*\)/\1/p' $out/pytorch.log 2> /dev/null)" ;;
        esac
        [[ $result == ok* || $result == "not run"* ]] || failed=1
        echo "| $name | $result | $seconds |"
    done
    print_reach
    echo "gpu_check: $([ $failed = 0 ] && echo "all parts passed" || echo "FAILED"), $SECONDS s"
    return $failed
}

if [ -z "$(nvidia-smi -L 2> /dev/null)" ]; then
    echo "gpu_check: nvidia-smi lists no GPU here" >&2
    exit 1
fi
if ! command -v "$nvcc" > /dev/null; then
    echo "gpu_check: no nvcc here; it is in the CUDA toolkit, often under /usr/local/cuda/bin" >&2
    exit 1
fi
if is_wanted build; then run_build; fi
if is_wanted tests; then start_tests; fi
if is_wanted sanitizer; then run_sanitizer; fi
wait
if is_wanted program; then run_program; fi
if is_wanted kernels; then run_kernels; fi
if is_wanted training; then run_training; fi
if is_wanted pytorch; then run_pytorch; fi
print_table | tee $out/table.txt
exit "${PIPESTATUS[0]}"
