# meshtune: `make demo` fine-tunes the base model on medical definitions, `make test` proves the mathematics.
#
#   make train          the program            make bench    speed against this machine's limits
#   make plot RUN=dir   loss curves            make lint     format, warnings, cppcheck
# `make test TEST=name` runs the tests whose name contains it.
# Variables: PRECISION is a run-time option (--precision); SANITIZE=1 builds test_gpt with ASan and UBSan.

CC ?= gcc
CXX ?= g++
CFLAGS ?= -O3 -march=native
WARNINGS := -Wall -Wextra -Werror
# contract=fast lets a*b+c be one rounding; errno of sqrtf is not looked at. Nothing else is relaxed: NaN stays NaN.
BASE := -D_GNU_SOURCE -ffp-contract=fast -fno-math-errno -fopenmp $(WARNINGS)
LIBS := -ldnnl -ljansson -lm
HEADERS := $(wildcard llmc/*.h)
RUN ?= $(shell ls -dt runs/* 2>/dev/null | head -1)

ifeq ($(SANITIZE),1)
TEST_FLAGS := -O1 -g -march=native -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
else
TEST_FLAGS := $(CFLAGS)
endif

.PHONY: all setup demo test bench lint plot clean medical
all: train

train: train_gpt.cu $(HEADERS) Makefile
	$(CC) -x c -std=c11 $(CFLAGS) $(BASE) train_gpt.cu -o $@ $(LIBS)

build/test_gpt$(SANITIZE): test_gpt.cu train_gpt.cu $(HEADERS) Makefile
	@mkdir -p build
	$(CC) -x c -std=c11 $(TEST_FLAGS) $(BASE) test_gpt.cu -o $@ $(LIBS)

setup:
	@scripts/setup.sh

medical: data/medical/train.jsonl
data/medical/train.jsonl: data/medical/prepare.sh
	data/medical/prepare.sh

test: setup
	@$(MAKE) --no-print-directory build/test_gpt$(SANITIZE) train medical
	OMP_WAIT_POLICY=passive build/test_gpt$(SANITIZE) $(TEST)

demo: setup
	@$(MAKE) --no-print-directory train medical
	@scripts/demo.sh

plot:
	@scripts/plot.sh $(RUN)

build/bench: dev/bench.cu train_gpt.cu $(HEADERS) Makefile
	@mkdir -p build
	$(CC) -x c -std=c11 $(CFLAGS) $(BASE) -Wno-unused-function dev/bench.cu -o $@ $(LIBS)

# BENCH: which parts, e.g. `make bench BENCH="124m 1b"`
bench: setup build/bench
	build/bench $(BENCH)

SOURCES := train_gpt.cu test_gpt.cu dev/bench.cu $(HEADERS)
lint:
	@scripts/setup.sh lint
	clang-format --dry-run -Werror $(SOURCES)
	$(CXX) -x c++ -std=c++17 $(BASE) -fsyntax-only train_gpt.cu
	$(CXX) -x c++ -std=c++17 $(BASE) -fsyntax-only test_gpt.cu
	cppcheck --quiet --language=c --std=c11 --enable=warning,performance,portability --inline-suppr \
	    --suppress=missingIncludeSystem --error-exitcode=1 -D__GNUC__ train_gpt.cu

clean:
	rm -rf train build
