# meshtune: `make demo` fine-tunes the base model on medical definitions, `make test` proves the mathematics.
#
#   make train              the program
#   make test TEST=name     only the tests whose name contains it; SANITIZE=1: under ASan and UBSan, SANITIZE=thread: under
#                           ThreadSanitizer with one OpenMP thread (meant for TEST=anchor)
#   make bench BENCH=parts  speed against this machine's limits; parts: each op alone
#   make plot RUN=dir       loss curves of a run
#   make lint               format, warnings as errors in C and C++, cppcheck
#   DNNL=dir                oneDNN elsewhere than the compiler looks: dir/include, dir/lib

CXX ?= g++
CFLAGS ?= -O3 -march=native
WARNINGS := -Wall -Wextra
# contract=fast lets a*b+c be one rounding; errno of sqrtf is not looked at. Nothing else is relaxed: NaN stays NaN.
BASE := -D_GNU_SOURCE -ffp-contract=fast -fno-math-errno -fopenmp $(WARNINGS)
LIBS := -ldnnl -lopenblas -ljansson -lm
ifdef DNNL
BASE := -I$(DNNL)/include $(BASE)
LIBS := -L$(DNNL)/lib -Wl,-rpath,$(abspath $(DNNL)/lib) $(LIBS)
endif
HEADERS := $(wildcard llmc/*.h)
SOURCES := train_gpt.cu test_gpt.cu dev/bench.cu $(HEADERS)
RUN ?= $(shell ls -dt runs/* 2>/dev/null | head -1)

ifeq ($(SANITIZE),1)
TEST_FLAGS := -O1 -g -march=native -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
else ifeq ($(SANITIZE),thread)
TEST_FLAGS := -O1 -g -march=native -fsanitize=thread
TEST_ENV := OMP_THREAD_LIMIT=1 TSAN_OPTIONS="halt_on_error=1 suppressions=$(CURDIR)/dev/tsan.supp"
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

build/bench: dev/bench.cu train_gpt.cu $(HEADERS) Makefile
	@mkdir -p build
	$(CC) -x c -std=c11 $(CFLAGS) $(BASE) -Wno-unused-function dev/bench.cu -o $@ $(LIBS)

setup:
	@scripts/setup.sh

medical: data/medical/train.jsonl
data/medical/train.jsonl: data/medical/prepare.sh
	data/medical/prepare.sh

# passive: the tests start many short-lived programs, whose waiting threads should not spin
test: setup
	@$(MAKE) --no-print-directory build/test_gpt$(SANITIZE)
	OMP_WAIT_POLICY=passive $(TEST_ENV) build/test_gpt$(SANITIZE) $(TEST)

demo: setup
	@$(MAKE) --no-print-directory train medical
	@scripts/demo.sh

bench: setup
	@$(MAKE) --no-print-directory build/bench
	build/bench $(BENCH)

plot:
	@scripts/plot.sh $(RUN)

lint:
	@scripts/setup.sh lint
	clang-format --dry-run -Werror $(SOURCES)
	for file in train_gpt.cu test_gpt.cu dev/bench.cu; do \
	    $(CC) -x c -std=c11 $(CFLAGS) $(BASE) -Wno-unused-function -Werror -c $$file -o /dev/null && \
	    $(CXX) -x c++ -std=c++17 $(BASE) -Wno-unused-function -Werror -fsyntax-only $$file || exit 1; \
	done
	cppcheck --quiet --language=c --std=c11 --enable=warning,performance,portability --inline-suppr \
	    --suppress=missingIncludeSystem --error-exitcode=1 -D__GNUC__ train_gpt.cu

clean:
	rm -rf train build
