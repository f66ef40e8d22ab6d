# meshtune: `make demo` fine-tunes the base model on medical definitions, `make test` proves the mathematics.
#
#   make train              the program, for the GPU of this machine if it has one and nvcc, else for the CPU
#   make train DEVICE=cuda  for GPUs in any case; DEVICE=cpu. PRECISION=FP32: fp32 activations there, not bf16;
#                           ARCH=sm_90: for one kind of GPU, ARCH=all: for all that nvcc knows; NCCL=1: for several GPUs
#   make test TEST=name     only the tests whose name contains it; SANITIZE=1: under ASan and UBSan, SANITIZE=thread: under
#                           ThreadSanitizer with one OpenMP thread (meant for TEST=anchor)
#   make bench BENCH=parts  speed against this machine's limits; parts: each op alone
#   make bench BENCH="tokenizer X.json Y.txt"  a tokenizer's speed on a text
#   make bench DEVICE=cuda  the same for a GPU, every kernel and a step of 1B; K=name: only kernels whose name contains it
#   make fuzz               any bytes as files, messages, tables and frames, FUZZ_SECONDS=20 a fuzzer; needs clang with libFuzzer
#   make plot RUN=dir       loss curves of a run
#   make lint               format, warnings as errors in C and C++, cppcheck
#   ZMQ=0                   without ZeroMQ, that is without a network, though libzmq is here
#   DNNL=dir                oneDNN elsewhere than the compiler looks: dir/include, dir/lib
#   DEPS=dir                the same for the libraries of CUDA builds (scripts/gpu_deps.sh)

CXX ?= g++
comma := ,
NVCC ?= nvcc
CFLAGS ?= -O3 -march=native
WARNINGS := -Wall -Wextra
# contract=fast lets a*b+c be one rounding; errno of sqrtf is not looked at. Nothing else is relaxed: NaN stays NaN.
BASE := -D_GNU_SOURCE -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp $(WARNINGS)
LIBS := -ldnnl -lopenblas -ljansson -lpcre2-8 -lm
ifdef DNNL
BASE := -I$(DNNL)/include $(BASE)
LIBS := -L$(DNNL)/lib -Wl,-rpath,$(abspath $(DNNL)/lib) $(LIBS)
endif
# The network, where libzmq and its header are.
ifndef ZMQ
ZMQ := $(shell echo 'int main(void) { return zmq_has("curve") != 1; }' | \
    $(CC) -include zmq.h -x c - -o /dev/null -lzmq 2> /dev/null && echo 1)
endif
ifeq ($(ZMQ),1)
ZMQ_FLAGS := -DWITH_ZMQ
ZMQ_LIBS := -lzmq
BASE += $(ZMQ_FLAGS)
LIBS += $(ZMQ_LIBS)
endif
HEADERS := $(wildcard llmc/*.h llmc/*.cuh dev/*.h)
EMULATOR := $(wildcard dev/cuda_emulator/*.h dev/cuda_tests/*.h)
SOURCES := train_gpt.cu test_gpt.cu test_cuda.cu dev/bowl.cu dev/bench.cu dev/bench_cuda.cu $(HEADERS) $(EMULATOR) \
    $(wildcard dev/fuzz/*)
RUN ?= $(shell ls -dt runs/* 2>/dev/null | head -1)

# The device: what DEVICE says, else a GPU that nvcc can build for.
HAS_NVCC := $(shell command -v $(NVCC))
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | head -1)
ifndef DEVICE
DEVICE := $(if $(HAS_NVCC),$(if $(HAS_GPU),cuda,cpu),cpu)
endif
ifeq ($(filter $(DEVICE),cpu cuda),)
$(error DEVICE=$(DEVICE): it is cpu or cuda)
endif
ifneq ($(filter-out FP32 BF16,$(PRECISION)),)
$(error PRECISION=$(PRECISION): it is BF16 or FP32, of the activations of a CUDA build)
endif

# nvcc's side. Without a GPU to ask, the kinds of GPU from Ampere on that this nvcc knows.
ALL_ARCHS := sm_80 sm_89 sm_90 sm_100 sm_120
ARCH ?= $(if $(HAS_GPU),native,all)
KNOWN_ARCHS = $(filter $(ALL_ARCHS),$(shell $(NVCC) --list-gpu-code 2>/dev/null))
ARCH_FLAGS = $(if $(filter all,$(ARCH)),$(foreach a,$(KNOWN_ARCHS),-gencode arch=$(a:sm_%=compute_%),code=$(a)),-arch=$(ARCH))
CUDA_FLAGS = -x cu -std=c++17 -O3 -DDEVICE_CUDA -D_GNU_SOURCE $(ARCH_FLAGS) --Werror all-warnings \
    -Xcompiler -Wall,-Wextra,-Werror,-fopenmp $(if $(filter FP32,$(PRECISION)),-DFLOATX_FP32) $(if $(NCCL),-DWITH_NCCL) $(ZMQ_FLAGS)
CUDA_LIBS = -lcublasLt -lcusolver $(if $(NCCL),-lnccl) $(ZMQ_LIBS) -ljansson -lpcre2-8 -lm
ifdef DEPS
CUDA_FLAGS += -I$(DEPS)/include
CUDA_LIBS += -L$(DEPS)/lib -Xlinker -rpath,$(abspath $(DEPS)/lib),-rpath-link,$(abspath $(DEPS)/lib)
endif

# -g1, lines alone: with variables too the compiler takes four times as long.
ifeq ($(SANITIZE),1)
TEST_FLAGS := -O1 -g1 -march=native -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
else ifeq ($(SANITIZE),thread)
TEST_FLAGS := -O1 -g1 -march=native -fsanitize=thread
TEST_ENV := OMP_THREAD_LIMIT=1 TSAN_OPTIONS="halt_on_error=1 suppressions=$(CURDIR)/dev/tsan.supp"
else
TEST_FLAGS := $(CFLAGS)
endif
# The emulator runs the CUDA program on the CPU. Kernels there are -O2: most of a build is compiling.
EMULATED := -x c++ -std=c++17 -DDEVICE_CUDA -DCUDA_EMULATOR -DWITH_NCCL -Idev/cuda_emulator -Wno-unknown-pragmas -fno-strict-aliasing
EMULATED_FLAGS := $(if $(SANITIZE),$(TEST_FLAGS),-O2 -march=native)

.PHONY: all setup demo soak test test-programs bench fuzz lint plot clean medical FORCE
all: train

# Says what is built, and builds anew what was built for something else.
build/train.target: FORCE
	@mkdir -p build
	@echo "$(DEVICE) $(PRECISION) $(NCCL) $(ZMQ_FLAGS) $(if $(filter cuda,$(DEVICE)),$(ARCH))" | cmp -s - $@ || \
	    echo "$(DEVICE) $(PRECISION) $(NCCL) $(ZMQ_FLAGS) $(if $(filter cuda,$(DEVICE)),$(ARCH))" > $@

train: train_gpt.cu $(HEADERS) Makefile build/train.target
ifeq ($(DEVICE),cuda)
	@echo "make: CUDA, $(if $(filter FP32,$(PRECISION)),fp32,bf16), $(if $(filter all,$(ARCH)),$(KNOWN_ARCHS),$(ARCH))$(if $(NCCL),$(comma) NCCL)$(comma) ZeroMQ: $(if $(ZMQ_LIBS),yes,none), GPU here: $(or $(HAS_GPU),none)"
	$(NVCC) $(CUDA_FLAGS) train_gpt.cu -o $@ $(CUDA_LIBS)
else
	@echo "make: CPU (nvcc: $(or $(HAS_NVCC),none), GPU: $(or $(HAS_GPU),none), ZeroMQ: $(if $(ZMQ_LIBS),yes,none))"
	$(CC) -x c -std=c11 $(CFLAGS) $(BASE) train_gpt.cu -o $@ $(LIBS)
endif

build/test_gpt$(SANITIZE) build/onednn3/test_gpt: test_gpt.cu train_gpt.cu $(HEADERS) Makefile
	@mkdir -p build
	$(CC) -x c -std=c11 $(TEST_FLAGS) $(BASE) test_gpt.cu -o $@ $(LIBS)

build/emulated_ops$(SANITIZE) build/emulated_ops_fp32$(SANITIZE): test_cuda.cu train_gpt.cu $(HEADERS) $(EMULATOR) Makefile
	@mkdir -p build
	$(CXX) $(EMULATED) $(EMULATED_FLAGS) $(BASE) $(if $(findstring fp32,$@),-DFLOATX_FP32) test_cuda.cu -o $@ $(LIBS)

build/emulated_gpt$(SANITIZE) build/emulated_gpt_fp32$(SANITIZE): test_gpt.cu train_gpt.cu $(HEADERS) $(EMULATOR) Makefile
	@mkdir -p build
	$(CXX) $(EMULATED) $(EMULATED_FLAGS) $(BASE) $(if $(findstring fp32,$@),-DFLOATX_FP32) test_gpt.cu -o $@ $(LIBS)

# The same tests and the speed on a GPU, X_fp32 with fp32 activations whatever PRECISION says. The ops' tests need the
# CPU's libraries, whose results they compare with. What does not build leaves no older program behind.
ONLY_FP32 = $(if $(findstring fp32,$@),$(if $(filter FP32,$(PRECISION)),,-DFLOATX_FP32))
build/cuda_ops build/cuda_ops_fp32: test_cuda.cu train_gpt.cu $(HEADERS) $(EMULATOR) Makefile build/train.target
	@rm -f $@
	$(NVCC) $(CUDA_FLAGS) $(ONLY_FP32) test_cuda.cu -o $@ -ldnnl -lopenblas $(CUDA_LIBS)

build/cuda_gpt build/cuda_gpt_fp32: test_gpt.cu train_gpt.cu $(HEADERS) Makefile build/train.target
	@rm -f $@
	$(NVCC) $(CUDA_FLAGS) $(ONLY_FP32) test_gpt.cu -o $@ $(CUDA_LIBS)

# Beside main, nothing of the program's upper half is called there.
build/bench_cuda build/bench_cuda_fp32: dev/bench_cuda.cu train_gpt.cu $(HEADERS) Makefile build/train.target
	@rm -f $@
	$(NVCC) $(CUDA_FLAGS) $(ONLY_FP32) --diag-suppress 177 -Xcompiler -Wno-unused-function dev/bench_cuda.cu -o $@ $(CUDA_LIBS)

build/bench: dev/bench.cu train_gpt.cu $(HEADERS) Makefile
	@mkdir -p build
	$(CC) -x c -std=c11 $(CFLAGS) $(BASE) -Wno-unused-function dev/bench.cu -o $@ $(LIBS)

# The quadratic with a delay: scripts/run_thesis.sh.
build/bowl: dev/bowl.cu $(HEADERS) Makefile
	@mkdir -p build
	$(CC) -x c -std=c11 $(CFLAGS) $(BASE) dev/bowl.cu -o $@ $(LIBS)

setup:
	@scripts/setup.sh

medical: data/medical/train.jsonl
data/medical/train.jsonl: data/medical/prepare.sh
	data/medical/prepare.sh

# The CPU's program, and the CUDA one through the emulator: its ops, its model and a mesh in both types of activation.
TESTS := build/test_gpt$(SANITIZE)
ifneq ($(SANITIZE),thread)
TESTS += build/emulated_ops$(SANITIZE) build/emulated_ops_fp32$(SANITIZE) build/emulated_gpt$(SANITIZE)
endif
ifndef SANITIZE # of the model in fp32 the sanitizers see nothing that they do not in bf16
TESTS += build/emulated_gpt_fp32
endif

ifeq ($(DEVICE),cuda)
TESTS += build/cuda_ops build/cuda_gpt
endif

# passive: the tests start many short-lived programs, whose waiting threads should not spin
test-programs: $(TESTS)

test: setup
	@$(MAKE) --no-print-directory $(TESTS)
	@OMP_WAIT_POLICY=passive EMU_DEVICES=3 $(TEST_ENV) dev/run_tests.sh "$(TEST)" $(TESTS)

# Half an hour of a mesh in trouble; SEED=N for the same troubles again.
SOAK_SECONDS ?= 1800
soak: setup
	@$(MAKE) --no-print-directory train
	@SOAK_SECONDS=$(SOAK_SECONDS) $(if $(SEED),SEED=$(SEED)) scripts/soak.sh

demo: setup
	@$(MAKE) --no-print-directory train medical
	@scripts/demo.sh

BENCH_PROGRAM := $(if $(filter cuda,$(DEVICE)),build/bench_cuda,build/bench)
bench: setup
	@$(MAKE) --no-print-directory $(BENCH_PROGRAM)
	$(BENCH_PROGRAM) $(BENCH) $(if $(K),K=$(K))

# Sanitizers of clang, one thread. What is found lies in build/: give it to the fuzzer as an argument.
FUZZ_SECONDS ?= 20
FUZZERS := $(patsubst dev/fuzz/%.c,build/fuzz_%,$(wildcard dev/fuzz/*.c))
build/fuzz_%: dev/fuzz/%.c dev/fuzz/fuzz.h $(HEADERS) Makefile
	@mkdir -p build
	clang -std=c11 -O1 -g -march=native -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $(BASE) -Wno-pass-failed $< -o $@ $(LIBS)

fuzz:
	@command -v clang > /dev/null || { echo "make fuzz: there is no clang; Debian has it in the package clang"; exit 1; }
	@$(MAKE) --no-print-directory $(FUZZERS)
	@for fuzzer in $(FUZZERS); do \
	    OMP_WAIT_POLICY=passive $$fuzzer -max_total_time=$(FUZZ_SECONDS) -max_len=32768 -timeout=20 -verbosity=0 \
	        -print_final_stats=1 -artifact_prefix=build/ > $$fuzzer.log 2>&1 || { cat $$fuzzer.log; exit 1; }; \
	    sed -n "s|^stat::number_of_executed_units: *|$$fuzzer: inputs |p" $$fuzzer.log; \
	done

plot:
	@scripts/plot.sh $(RUN)

# Each file by itself, so that -j helps.
LINT_C := $(addprefix lint-c/,train_gpt.cu test_gpt.cu dev/bench.cu dev/bowl.cu)
LINT_CUDA := $(addprefix lint-cuda/,train_gpt.cu test_gpt.cu test_cuda.cu dev/bench_cuda.cu)
.PHONY: lint-format lint-cppcheck $(LINT_C) $(LINT_CUDA)
lint:
	@scripts/setup.sh lint
	@$(MAKE) --no-print-directory lint-format lint-cppcheck $(LINT_C) $(LINT_CUDA)

lint-format:
	@clang-format --dry-run -Werror $(SOURCES)

$(LINT_C): lint-c/%:
	$(CC) -x c -std=c11 $(CFLAGS) $(BASE) -Wno-unused-function -Werror -c $* -o /dev/null
	$(CXX) -x c++ -std=c++17 $(BASE) -Wno-unused-function -Werror -fsyntax-only $*

$(LINT_CUDA): lint-cuda/%:
	$(CXX) $(EMULATED) $(BASE) -Wno-unused-function -Werror -fsyntax-only $*
	$(CXX) $(EMULATED) $(BASE) -Wno-unused-function -Werror -DFLOATX_FP32 -fsyntax-only $*

lint-cppcheck:
	cppcheck --quiet --language=c --std=c11 --enable=warning,performance,portability --inline-suppr \
	    --suppress=missingIncludeSystem --error-exitcode=1 -D__GNUC__ -UDEVICE_CUDA train_gpt.cu

clean:
	rm -rf train build
