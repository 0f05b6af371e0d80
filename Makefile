# Plain `make` lists what there is. Variables, all of them optional:
#   CC=gcc|clang   ARCH=native|x86-64-v3|x86-64   OPT=-O3   OMP=1|0 (threads)
#   SYSTEM_LIBM=1  the C library's exp, log, tanh, llm.c's order, no fused multiply-add: bit parity with llm.c
#   ASAN=1         address and undefined-behaviour sanitizers
#   MPI=1          ranks over MPI too, for mpirun and srun; over TCP they need nothing (doc/ranks.md)
# Each combination is built in a folder of its own under build/.

ifeq ($(origin CC),default)
CC = gcc
endif
ARCH ?= native
OPT ?= -O3
OMP ?= 1
SYSTEM_LIBM ?= 0
ASAN ?= 0
MPI ?= 0
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

WARNINGS = -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Werror
# -ffp-contract=off: multiply and add are fused where the source says madd, and nowhere else (doc/exactness.md rule 1).
# The next two change no bit: nobody reads errno or traps, so square roots and selects vectorise
EXACT = -ffp-contract=off -fno-math-errno -fno-trapping-math
# -g1: the lines of a backtrace; full -g takes a fifth of the compiler's time. For a debugger: OPT="-O0 -g"
CFLAGS = -std=gnu11 -D_GNU_SOURCE -g1 $(OPT) -march=$(ARCH) $(EXACT) $(WARNINGS) -I.
CFLAGS += $(if $(filter 1,$(OMP)),-fopenmp,-Wno-unknown-pragmas)
CFLAGS += $(if $(filter 1,$(SYSTEM_LIBM)),-DSYSTEM_LIBM)
# who reads by NULL or past an object meets the address sanitizer: to ask each time takes two fifths of the compiler's time
SANITIZE = -fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow -fno-sanitize-recover=all
CFLAGS += $(if $(filter 1,$(ASAN)),$(SANITIZE))
# by default gcc fills only half of a 512-bit register; clang would warn of every loop that it cannot vectorise
CFLAGS += $(if $(findstring clang,$(CC)),-Wno-pass-failed,-mprefer-vector-width=512)
LIBS = -ljansson -lxxhash -lpcre2-8 -lz -lpthread -lm
HEADERS = jansson xxhash pcre2 zlib
# what reads images (llmc/files/image.h) is linked with two more, and nothing else asks for them
IMAGE_PROGRAMS = $(addprefix $(BUILD)/,test_image train_qwen36 train_qwen36_faults) build/fuzz/fuzz_image \
    $(CUDA_BUILD)/train_qwen36 $(SIMT_BUILDS:%=build/%/train_qwen36)
SIMT_BUILDS = simt-exact simt-fast simt-exact-asan simt-fast-asan
IMAGE_LIBS = -lpng -ljpeg
IMAGE_HEADERS = png jpeglib
ifeq ($(MPI),1)
# Open MPI says its flags by --showme, MPICH by -show; its headers are not ours to warn about
MPI_FLAGS := $(shell mpicc --showme:compile 2>/dev/null || mpicc -show 2>/dev/null | tr ' ' '\n' | grep '^-I')
CFLAGS += -DUSE_MPI $(patsubst -I%,-isystem %,$(MPI_FLAGS))
LIBS += $(shell mpicc --showme:link 2>/dev/null || mpicc -show 2>/dev/null | tr ' ' '\n' | grep '^-[LlW]')
endif
comma = ,
space = $() $()

VARIANT = $(notdir $(CC))-$(ARCH)$(OPT)$(if $(filter 0,$(OMP)),-serial)$(if $(filter 1,$(SYSTEM_LIBM)),-libm)$(if $(filter 1,$(ASAN)),-asan)$(if $(filter 1,$(MPI)),-mpi)
BUILD = build/$(VARIANT)
# abc1234, or abc1234-dirty where a file that git knows has changed; --exclude: never the name of a tag
COMMIT := $(shell git describe --always --dirty --exclude '*' 2>/dev/null || echo unknown)
COMMIT_FILE = build/commit-$(COMMIT)
# what settings.json says of the program
BUILT = -DCOMMIT='"$(COMMIT)"' -DFLAGS='"$(OPT) -march=$(ARCH) $(EXACT)"'

TRAINERS = $(sort $(basename $(notdir $(wildcard train_*.c dev/examples/train_*.c))))
# whose .cu is the only source: for CPUs or GPUs
BOTH_TRAINERS = $(filter-out $(TRAINERS),$(sort $(basename $(wildcard train_*.cu))))
TOOLS = inspect tokenize
TESTS = $(patsubst %.c,%,$(sort $(wildcard test_*.c)))

help:
	@echo "make run         train a small GPT-2 on this repository's text, two minutes"
	@echo "make run-mamba   train a small Mamba on the same, about two minutes"
	@echo "make run-moe     train a small mixture of experts on the same, two minutes"
	@echo "make run-lora    a small Qwen3 on the same, then it learns to answer by LoRA"
	@echo "make run-qwen36  a small Qwen3.6 on the same: linear attention, two minutes"
	@echo "make run-deepseek-v4  a small DeepSeek V4: streams and entries, two minutes"
	@echo "make run-glm5    a small GLM-5: short vectors and chosen bytes, two minutes"
	@echo "make run-shapes  a small Qwen3.6 with eyes learns to name shapes, two minutes"
	@echo "make run-digits  Mamba reads handwritten digits: scores and prototypes compared"
	@echo "                 MORE='--steps 9000 --seed 2' RUN=runs/mine: options of yours"
	@echo "make test        build and run every test: about six minutes on 2 cores"
	@echo "make test-all    the rest: compilers, sanitizers, ...: most of an hour"
	@echo "make train_gpt2  build the trainer, then: ./train_gpt2 --help"
	@echo "make train_mamba_hpn  the same for Mamba, on CPUs"
	@echo "make train_moe   a mixture of experts, for this machine: CPU=1 or CUDA=1 say it"
	@echo "make train_qwen3 Qwen2.5, Qwen3, Mistral, Llama: the same"
	@echo "make train_qwen36  Qwen3.6: the same"
	@echo "make train_deepseek_v4  DeepSeek V4: the same"
	@echo "make train_glm5  GLM-5: the same"
	@echo "make tools       build dev/tools/tokenize and dev/tools/inspect: each has --help"
	@echo "make train_gpt2cu   the trainer for GPUs: PRECISION=bf16|fp32|exact; or CPU=1"
	@echo "make cuda        build all for GPUs (make setup-cuda, doc/gpu/README.md)"
	@echo "make ptxas       registers and spills of the kernels"
	@echo "make launch      then: ./launch -n 4 ./train_gpt2 ...: 4 ranks (doc/ranks.md)"
	@echo "make plot        draw loss.png and loss.html: RUN=runs/a; RUN=\"runs/a runs/b\""
	@echo "make dashboard   all runs live in a web page of this machine: RUN=runs PORT=8765"
	@echo "make bench       measure against PyTorch and llm.c (dev/bench/README.md)"
	@echo "make test-simt   the CUDA kernels, run on this CPU (dev/simt/README.md)"
	@echo "make golden      write dev/golden anew by NumPy: the bytes must not change"
	@echo "make check       the tests of one build: make check CC=clang ARCH=x86-64 ASAN=1"
	@echo "make fuzz        mutated files against every parser (dev/fuzz/README.md)"
	@echo "make clean       remove what was built"

setup:
	@dev/setup.sh

setup-cuda:
	@dev/setup.sh cuda
	@rm -f build/cuda_flags

# before a program is built: a failed or stopped compile takes the list of its headers (.d) along, and must not leave the
# program of the last one, which would then be newer than anything that make knows of
FRESH = @mkdir -p $(@D) && rm -f $@

# Once for a folder: are the libraries on this machine? Else one line, where the compiler would say many
build/libraries-images: HEADERS = $(IMAGE_HEADERS)
build/libraries build/libraries-images:
	@for name in $(HEADERS); do \
	    printf '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <stdio.h>\n#include <%s.h>\n' $$name | $(CC) -E -x c - >/dev/null 2>&1 && continue; \
	    echo "make: $$name.h is not on this machine: run dev/setup.sh, which installs what is missing, then make again" >&2; exit 1; \
	done
	@mkdir -p $(@D) && touch $@

$(IMAGE_PROGRAMS): LIBS += $(IMAGE_LIBS)
$(IMAGE_PROGRAMS) $(BUILD)/train_qwen36.o: | build/libraries-images

# programs that hold COMMIT stand on an empty file of that name: it is new when COMMIT is, and then they are built anew
$(COMMIT_FILE):
	@mkdir -p build && rm -f build/commit-* && touch $@

# the binary in the root is always the one of the variables given last
$(TRAINERS): %: $(BUILD)/%
	@cmp -s $< $@ || cp -f $< $@

tools: $(TOOLS:%=dev/tools/%)

$(TOOLS:%=dev/tools/%): dev/tools/%: $(BUILD)/tools/%
	@cmp -s $< $@ || cp -f $< $@

$(BUILD)/tools/%: dev/tools/%.c $(COMMIT_FILE) | build/libraries
	$(FRESH)
	$(CC) $(CFLAGS) $(BUILT) -MMD -MP -MF $@.d $< -o $@ $(LIBS)

# a trainer is compiled once for two programs, of which the second one's calls go through dev/faults/shim.c (dev/test_faults.sh)
$(BUILD)/train_%.o: train_%.c $(COMMIT_FILE) | build/libraries
	$(FRESH)
	$(CC) $(CFLAGS) $(BUILT) -MMD -MP -MF $@.d -c $< -o $@

$(BUILD)/train_%.o: dev/examples/train_%.c $(COMMIT_FILE) | build/libraries
	$(FRESH)
	$(CC) $(CFLAGS) $(BUILT) -MMD -MP -MF $@.d -c $< -o $@

$(BUILD)/train_%.o: train_%.cu $(COMMIT_FILE) | build/libraries
	$(FRESH)
	$(CC) $(CFLAGS) $(BUILT) -MMD -MP -MF $@.d -x c -c $< -o $@

$(BUILD)/train_%: $(BUILD)/train_%.o
	$(FRESH)
	$(CC) $(CFLAGS) $< -o $@ $(LIBS)

FAULTS = open write pwrite read fsync close rename renameat2 unlink rmdir mkdir ftruncate truncate fopen fflush fclose \
    malloc calloc realloc posix_memalign mmap open_memstream clock_gettime XXH3_64bits_withSeed
$(BUILD)/train_%_faults: $(BUILD)/train_%.o dev/faults/shim.c
	$(FRESH)
	$(CC) $(CFLAGS) $^ -o $@ $(FAULTS:%=-Wl,--wrap=%) $(LIBS)

.PRECIOUS: $(BUILD)/train_%.o

$(BUILD)/test_%: test_%.c | build/libraries
	$(FRESH)
	$(CC) $(CFLAGS) -MMD -MP -MF $@.d $< -o $@ $(LIBS)

# make test_gelu: one test, built and run
.PHONY: $(TESTS)
$(TESTS): %: $(BUILD)/%
	@$<

# for dev/test.sh: where these variables build, and the trainers of the root for CPUs
folder:
	@echo $(BUILD)
trainers:
	@echo $(filter $(basename $(wildcard train_*.c)),$(TRAINERS)) $(BOTH_TRAINERS)

# starts ranks on one machine or several: ./launch -n 4 ./train_gpt2 ...
launch: $(BUILD)/launch
	@cmp -s $< $@ || cp -f $< $@

$(BUILD)/launch: dev/tools/launch.c $(wildcard dev/tools/launch_*.h)
	$(FRESH)
	$(CC) $(CFLAGS) $< -o $@

# lists of headers; not of a source that is gone: train_ninth.c may have become train_ninth.cu
-include $(foreach list,$(wildcard $(BUILD)/*.d $(BUILD)/*/*.d),$(if $(wildcard $(firstword $(filter %.c %.cu,$(file <$(list))))),$(list)))

# ---- cuda: the same sources, built by nvcc; doc/gpu/README.md ----
#   PRECISION=bf16|fp32|tf32|exact   how tensors are stored; exact: float, every sum in the plain loop's order, the bits of the CPU
#   NVCC_OPT=-O3                of host code alone: -O0 where nothing of it will run
#   CUDA_ARCH=sm_90             by default that of this machine's GPU, sm_90 where there is none; sm_90a: with wgmma, Hopper alone
#   CPU=1                       a trainer without CUDA: its .cu is C, and the ops run their CPU code
#   CUDA=1                      train_moe by nvcc, also where this machine has no GPU

PRECISION ?= bf16
CUDA_ARCH ?= $(if $(filter cuda% %cu $(BOTH_TRAINERS) build/nvcc-%,$(MAKECMDGOALS)),$(shell dev/cuda_flags.sh arch),sm_90)
CPU ?= 0
HAS_GPU = $(if $(filter $(BOTH_TRAINERS),$(MAKECMDGOALS)),$(shell nvidia-smi -L 2>/dev/null))
CUDA ?= $(if $(filter 1,$(CPU)),0,$(if $(HAS_GPU),1,0))
NVCC_OPT ?= -O3
CUDA_BUILD = build/nvcc-$(CUDA_ARCH)-$(PRECISION)$(filter-out -O3,$(NVCC_OPT))
CUDA_TRAINERS = $(patsubst %,%cu,$(filter $(TRAINERS),$(sort $(basename $(wildcard train_*.cu)))))
CUDA_TESTS := $(patsubst %.c,%,$(shell grep -l '\bto_device\b\|OP_STORED\|include "train_.*cu"' $(sort $(wildcard test_*.c))))  # those with kernels
# what measures speed has no exact build
CUDA_BENCHES = $(if $(filter exact,$(PRECISION)),,$(patsubst dev/%.cu,%,$(sort $(wildcard dev/cuda/*.cu dev/bench/*.cu))))
CUDA_PROGRAMS = $(CUDA_TRAINERS) $(BOTH_TRAINERS) $(CUDA_TESTS) $(CUDA_BENCHES)

NVCC = $(shell dev/cuda_flags.sh nvcc)
NVCC_bf16 =
NVCC_fp32 = -DFP32
NVCC_tf32 = -DFP32 -DTF32
NVCC_exact = -DEXACT --fmad=false -prec-div=true -prec-sqrt=true -ftz=false
# nvcc's own warnings count; gcc's do not, for it sees what nvcc has made of the host code. 1675: a pragma of gcc, 128: a loop that
# this precision never reaches
NVCC_WARNINGS = -Werror all-warnings -diag-suppress 1675,128
# WGMMA: the kernels that only sm_90a has. By -arch=sm_90a nvcc 13.0 assembles PTX of compute_90, which has no wgmma
NVCC_ARCH = $(if $(filter sm_90a,$(CUDA_ARCH)),-DWGMMA) $(if $(filter %a,$(CUDA_ARCH)),-gencode=arch=$(CUDA_ARCH:sm_%=compute_%)$(comma)code=$(CUDA_ARCH),-arch=$(CUDA_ARCH))
NVCC_FLAGS = -std=c++17 $(NVCC_OPT) $(NVCC_ARCH) -lineinfo -I. $(NVCC_$(PRECISION)) $(NVCC_WARNINGS)
NVCC_FLAGS += -Xcompiler $(subst $(space),$(comma),-march=$(ARCH) $(EXACT) -fopenmp)
NVCC_BUILD = $(NVCC) $(NVCC_FLAGS) --options-file build/cuda_flags -MMD -MP -MF $@.d -x cu $< -o $@

# where the libraries are on this machine; `make setup-cuda` has it written anew
build/cuda_flags: dev/cuda_flags.sh
	@mkdir -p build
	@dev/cuda_flags.sh flags >$@

$(CUDA_BUILD)/train_%cu: train_%.cu build/cuda_flags $(COMMIT_FILE) | build/libraries
	$(FRESH)
	$(NVCC_BUILD) -DCOMMIT='"$(COMMIT)"' -DFLAGS='"$(CUDA_ARCH) $(PRECISION) $(NVCC_$(PRECISION))"'

$(CUDA_BUILD)/train_%: train_%.cu build/cuda_flags $(COMMIT_FILE) | build/libraries
	$(FRESH)
	$(NVCC_BUILD) -DCOMMIT='"$(COMMIT)"' -DFLAGS='"$(CUDA_ARCH) $(PRECISION) $(NVCC_$(PRECISION))"'

$(CUDA_BUILD)/test_%: test_%.c build/cuda_flags | build/libraries
	$(FRESH)
	$(NVCC_BUILD)

$(CUDA_BUILD)/%: dev/%.cu build/cuda_flags | build/libraries
	$(FRESH)
	$(NVCC_BUILD)

$(BUILD)/train_%cu: train_%.cu $(COMMIT_FILE) | build/libraries
	$(FRESH)
	$(CC) $(CFLAGS) $(BUILT) -MMD -MP -MF $@.d -x c $< -o $@ $(LIBS)

$(BUILD)/bench/%: dev/bench/%.cu | build/libraries
	$(FRESH)
	$(CC) $(CFLAGS) -MMD -MP -MF $@.d -x c $< -o $@ $(LIBS)

$(CUDA_TRAINERS): %: $(if $(filter 1,$(CPU)),$(BUILD),$(CUDA_BUILD))/%
	@cmp -s $< $@ || cp -f $< $@

$(BOTH_TRAINERS): %: $(if $(filter 1,$(CUDA)),$(CUDA_BUILD),$(BUILD))/%
	@cmp -s $< $@ || cp -f $< $@

-include $(wildcard $(CUDA_BUILD)/*.d $(CUDA_BUILD)/*/*.d)

# one build, all of it or a part: the variables above
cuda_programs: $(CUDA_PROGRAMS:%=$(CUDA_BUILD)/%)
cuda_trainers: $(patsubst %,$(CUDA_BUILD)/%,$(CUDA_TRAINERS) $(BOTH_TRAINERS))

# every program for every card and as it is tested: bf16 and exact
CUDA_ARCHS ?= sm_90 sm_80
cuda:
	+@for arch in $(CUDA_ARCHS); do for precision in bf16 exact; do \
	    $(MAKE) --no-print-directory cuda_programs CUDA_ARCH=$$arch PRECISION=$$precision || exit 1; \
	done; done

# doc/gpu/ptxas.md: registers, shared memory and spills of every kernel
ptxas: build/cuda_flags
	@$(PYTHON) dev/ptxas.py $(PTXAS_OPTIONS) -- $(NVCC) $(filter-out -arch=%,$(NVCC_FLAGS)) --options-file build/cuda_flags

# doc/gpu/tiles.md: instructions that tensor core kernels issue for a tile
sass: build/cuda_flags
	@$(PYTHON) dev/sass.py $(SASS_OPTIONS) -- $(NVCC) $(filter-out -arch=%,$(NVCC_FLAGS)) --options-file build/cuda_flags

# for dev/gpu_check.sh
cuda_folder:
	@echo $(CUDA_BUILD)
cuda_names:
	@echo $(CUDA_PROGRAMS)

# What the first models read: the pages, two trainers, the ops and the loop around them, sentences and C that a reader
# can judge. Without tables, and without the blanks that align columns: a model of bytes would learn these first, and
# its samples be full of them. A copy: it stays as it was when the sources are edited, so --resume goes on.
HELLO = README.md $(wildcard doc/*.md) train_gpt2.c train_mamba_hpn.c $(wildcard llmc/ops/*.h llmc/run/*.h)
build/hello: $(HELLO)
	@rm -rf $@
	@for file in $^; do \
	    mkdir -p $@/$$(dirname $$file) && \
	    sed -E '/^\|/d; s/^ {20,}/        /; s/([^ ]) {2,}/\1 /g' $$file >$@/$$file || exit 1; \
	done

# a thread that waits spins for a microsecond or two, then sleeps: beside other programs the rest cannot stall it for long. An
# OMP_WAIT_POLICY of yours counts instead
SPIN = $(if $(OMP_WAIT_POLICY),,GOMP_SPINCOUNT=1000 )

# the first steps: each has a run folder of its own. Recipes take RUN from the environment, as it is: its name may have blanks.
# MORE: options behind those of its file, make run MORE="--steps 500 --seed 2"
# $(call train,PROGRAM,FOLDER,OPTIONS): a run begins with OPTIONS, or goes on with those that it has
train = $(if $(findstring --run,$(MORE)),$(error MORE: --run is said by RUN=FOLDER)) \
	if $(call begun,$(2)); then set -- --resume; else set -- $(3) --continue; fi; \
	echo ./$(1) "$$@" --run "$(2)" $(MORE); $(SPIN)./$(1) "$$@" --run "$(2)" $(MORE)
begun = ls -d "$(1)"/step_*[0-9] >/dev/null 2>&1
# $(call say_begun,FOLDER); $(call data,FOLDER,TARGET): what a run that begins reads
say_begun = @if $(call begun,$(1)); then echo "$(1) exists: it goes on (another: make $@ RUN=runs/another)"; fi
data = @if ! { $(call begun,$(1)) && [ -e $(2) ]; }; then $(MAKE) --no-print-directory $(2); fi
# $(call draw,FOLDER): not of a run that has only said what it would do
draw = @if [ -e "$(1)/metrics.jsonl" ]; then $(PYTHON) dev/tools/plot.py "$(1)"; fi

run: export RUN ?= runs/hello
run: TRAINER = train_gpt2
run: OPTIONS = dev/hello.txt
run-mamba: export RUN ?= runs/hello-mamba
run-mamba: TRAINER = train_mamba_hpn
run-mamba: OPTIONS = dev/hello_mamba.txt
run-moe: export RUN ?= runs/hello-moe
run-moe: TRAINER = train_moe
run-moe: OPTIONS = dev/hello_moe.txt
run-qwen36: export RUN ?= runs/hello-qwen36
run-qwen36: TRAINER = train_qwen36
run-qwen36: OPTIONS = dev/hello_qwen36.txt
run-deepseek-v4: export RUN ?= runs/hello-deepseek-v4
run-deepseek-v4: TRAINER = train_deepseek_v4
run-deepseek-v4: OPTIONS = dev/hello_deepseek_v4.txt
run-glm5: export RUN ?= runs/hello-glm5
run-glm5: TRAINER = train_glm5
run-glm5: OPTIONS = dev/hello_glm5.txt
run run-mamba run-moe run-qwen36 run-deepseek-v4 run-glm5: setup
	$(call say_begun,$$RUN)
	$(call data,$$RUN,build/hello)
	@$(MAKE) --no-print-directory $(TRAINER) CPU=1
	@$(call train,$(TRAINER),$$RUN,--args $(OPTIONS))
	$(call draw,$$RUN)

# a base model, its answers, an adapter, its answers: two runs in the folder RUN, each of which goes on where it was
run-lora: export RUN ?= runs/hello-lora
run-lora: QUESTIONS = build/questions/prompts.jsonl
run-lora: ANSWER = ./train_qwen3 --from "$$RUN/base" --chat-template chatml --temperature 0 --max-new-tokens 40
run-lora: setup
	$(call say_begun,$$RUN/base)
	$(call data,$$RUN/base,build/hello)
	$(call data,$$RUN/adapter,build/questions)
	@$(MAKE) --no-print-directory train_qwen3 CPU=1
	@$(call begun,$$RUN/adapter) || { $(call train,train_qwen3,$$RUN/base,--args dev/hello_qwen.txt); }  # an adapter is beside that one
	@rm -f "$$RUN/before.jsonl" "$$RUN/after.jsonl"  # of another step, if the run has gone on
	$(ANSWER) --generate-file $(QUESTIONS) --generate-out "$$RUN/before.jsonl"
	@$(call train,train_qwen3,$$RUN/adapter,--args dev/hello_lora.txt --from "$$RUN/base")
	$(ANSWER) --lora "$$RUN/adapter" --generate-file $(QUESTIONS) --generate-out "$$RUN/after.jsonl"
	$(call draw,$$RUN/base)
	$(call draw,$$RUN/adapter)
	@$(PYTHON) dev/data/header_questions.py --show $(QUESTIONS) "$$RUN/before.jsonl" "$$RUN/after.jsonl"
	@echo; echo "talk with it: ./train_qwen3 --from $$RUN/base --lora $$RUN/adapter --chat"

build/questions:
	@$(PYTHON) dev/data/header_questions.py --out $@

# images, a model that learns to name them, its answers to others, counted and drawn
run-shapes: export RUN ?= runs/hello-shapes
run-shapes: SHAPES = build/shapes/prompts.jsonl
run-shapes: setup
	$(call say_begun,$$RUN/model)
	$(call data,$$RUN/model,build/shapes)
	@$(MAKE) --no-print-directory train_qwen36 CPU=1
	@$(call train,train_qwen36,$$RUN/model,--args dev/hello_shapes.txt)
	@rm -f "$$RUN/answers.jsonl"  # of another step, if the run has gone on
	./train_qwen36 --from "$$RUN/model" --generate-file $(SHAPES) --generate-out "$$RUN/answers.jsonl" --temperature 0 --think 0
	@$(PYTHON) dev/data/shapes.py --show $(SHAPES) "$$RUN/answers.jsonl" --picture "$$RUN/answers.png"
	$(call draw,$$RUN/model)
	@echo; echo "show it others: ./train_qwen36 --from $$RUN/model --chat --think 0, then /image build/shapes/images/val_00000.png"

build/shapes:
	@$(PYTHON) dev/data/shapes.py --out $@

run-digits: export RUN ?= runs/digits
run-digits:
	@dev/setup.sh examples
	@$(MAKE) --no-print-directory train_mamba_hpn
	@dev/examples/digits.sh "$$RUN" $(MORE)

plot: export RUN ?= runs/hello
plot:
	@if [ "$$RUN" = runs/hello ] && [ ! -e runs/hello/metrics.jsonl ] && ls runs/*/metrics.jsonl >/dev/null 2>&1; then \
	    echo "plot: there is no runs/hello: choose a run, RUN=$$(cd runs && ls */metrics.jsonl | sed 's#/.*##; s#^#runs/#' | paste -sd' ' | sed 's# # or RUN=#g')"; exit 2; fi
	@$(PYTHON) dev/tools/plot.py "$$RUN"

dashboard: export RUN ?= runs
dashboard:
	@$(PYTHON) dev/tools/dashboard.py "$$RUN" $(if $(findstring command,$(origin PORT)),--port "$(PORT)")

check: $(TESTS:%=$(BUILD)/%)
	@dev/test.sh check $^

# together they are everything that is tested without a GPU
test: setup
	@dev/test.sh quick
test-all: setup
	@dev/test.sh rest

# each program of dev/fuzz for FUZZ_SECONDS; the first finding ends it, with the input in build/fuzz (dev/fuzz/README.md)
FUZZ_SECONDS ?= 60
FUZZ = $(patsubst dev/fuzz/%.c,build/fuzz/%,$(sort $(wildcard dev/fuzz/fuzz_*.c)))
FUZZ_FLAGS = -std=gnu11 -D_GNU_SOURCE -g -O1 -I. -Wno-unused-function -Wno-unknown-pragmas
FUZZ_FLAGS += -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined
build/fuzz/%: dev/fuzz/%.c
	$(FRESH)
	clang $(FUZZ_FLAGS) -MMD -MP -MF $@.d $< -o $@ $(LIBS)

-include $(wildcard build/fuzz/*.d)

fuzz: $(FUZZ)
	@for program in $^; do \
	    name=$${program#build/fuzz/fuzz_}; dict=dev/fuzz/$$name.dict; mkdir -p build/fuzz/corpus_$$name; echo "# $$name"; \
	    $$program -max_total_time=$(FUZZ_SECONDS) -max_len=2048 -close_fd_mask=3 -print_final_stats=1 -verbosity=0 \
	        $$([ ! -e $$dict ] || echo -dict=$$dict) -artifact_prefix=build/fuzz/$$name- build/fuzz/corpus_$$name \
	        dev/fuzz/corpus/$$name || exit 1; \
	done

# ---- simt: the CUDA kernels on this CPU; dev/simt/README.md ----
#   build/simt-exact/test_gelu         with -DEXACT and sanitizers;  build/simt-fast/test_gelu: without EXACT
#   build/simt-exact/train_gpt2cu      a trainer, for speed without sanitizers;  build/simt-exact-asan/train_gpt2cu: with them
SIMT_TESTS = test_simt $(CUDA_TESTS)
SIMT_PROGRAMS = $(foreach build,simt-exact simt-fast,$(SIMT_TESTS:%=build/$(build)/%))
# the exact build of a test looks for everything; the fast one for what only its kernels may do, in half of the time
SIMT_SANITIZE = -Og $(SANITIZE)
SIMT_SANITIZE_FAST = -Og -fsanitize=address,alignment -fno-sanitize-recover=all
# trainers: -Og compiles in a third of -O2's time, and they take a fifth more of it to run
SIMT_OPT = -Og
build/simt-exact/test_% build/simt-exact-asan/% build/simt-fast-asan/%: SIMT_OPT = $(SIMT_SANITIZE)
build/simt-fast/test_%: SIMT_OPT = $(SIMT_SANITIZE_FAST)
# what trains for many seconds under sanitizers does it once, in the fast build; the exact one compares bits
SIMT_LONG_TESTS = test_comm test_vocabulary $(patsubst %.c,%,$(shell grep -l 'include "train_.*cu"' $(sort $(wildcard test_*.c))))
$(SIMT_LONG_TESTS:%=build/simt-exact/%): SIMT_OPT = -Og
build/simt-exact/% build/simt-exact-asan/%: SIMT_EXACT = -DEXACT
SIMT_FLAGS = -x c++ -include cuda_runtime.h -std=gnu++17 -D_GNU_SOURCE -D__CUDACC__ -DSIMT $(SIMT_EXACT) -g1 $(SIMT_OPT) -march=$(ARCH) $(filter-out -ffp-contract%,$(EXACT)) -ffp-contract=off
SIMT_FLAGS += -fopenmp -Ibuild/simt/src -Idev/simt/include -Wall -Werror -Wno-unknown-pragmas -Wno-maybe-uninitialized $(BUILT)
SIMT_INCLUDES = $(wildcard dev/simt/include/*.h)
SIMT_HEADERS = $(patsubst %,build/simt/src/%,$(wildcard llmc/*/*.h train_*.cu))  # what tests include

# the sources, with launches and shared memory rewritten
build/simt/src/%: % dev/simt/rewrite.py
	@dev/simt/rewrite.py build/simt/src $<
.PRECIOUS: build/simt/src/%

define SIMT_COMPILE
$(FRESH)
g++ $(SIMT_FLAGS) -MMD -MP -MF $@.d $< -o $@ $(LIBS)
@sed -i -E 's#[a-z0-9_]+/\.\./##g' $@.d  # each header by the name that the rule above writes
endef
define SIMT_RULES
build/$(1)/test_simt: build/simt/src/dev/simt/test_simt.cu $$(SIMT_INCLUDES) | $$(SIMT_HEADERS)
	$$(SIMT_COMPILE)
build/$(1)/test_%: build/simt/src/test_%.c $$(SIMT_INCLUDES) | $$(SIMT_HEADERS)
	$$(SIMT_COMPILE)
build/$(1)/train_%cu: build/simt/src/train_%.cu $$(SIMT_INCLUDES) $$(COMMIT_FILE) | $$(SIMT_HEADERS)
	$$(SIMT_COMPILE)
build/$(1)/train_%: build/simt/src/train_%.cu $$(SIMT_INCLUDES) $$(COMMIT_FILE) | $$(SIMT_HEADERS)
	$$(SIMT_COMPILE)
build/$(1)/%: build/simt/src/dev/%.cu $$(SIMT_INCLUDES) | $$(SIMT_HEADERS)
	$$(SIMT_COMPILE)
endef
$(foreach build,$(SIMT_BUILDS),$(eval $(call SIMT_RULES,$(build))))

-include $(wildcard build/simt-*/*.d build/simt-*/*/*.d)

# what dev/cuda, dev/bench and tests say in a fast build compiles, as far as a compiler reads without writing a program
CUDA_SOURCES = $(wildcard dev/cuda/*.cu dev/bench/*.cu) $(CUDA_TESTS:%=%.c)
cuda_syntax: $(CUDA_SOURCES:%=build/simt/src/%) | $(SIMT_HEADERS)
	@for source in $^; do g++ $(SIMT_FLAGS) -O0 -fsyntax-only $$source || exit 1; done

simt: $(SIMT_PROGRAMS)
test-simt: $(SIMT_PROGRAMS)
	@dev/test.sh check $^ dev/simt/test_rewrite.py

# for dev/test.sh
simt_tests:
	@echo $(SIMT_TESTS)
simt_long_tests:
	@echo $(filter $(SIMT_TESTS),$(SIMT_LONG_TESTS))

golden:
	$(PYTHON) dev/ref/gpt2.py
	$(PYTHON) dev/ref/mamba_hpn.py
	$(PYTHON) dev/ref/moe.py
	$(PYTHON) dev/ref/qwen.py
	$(PYTHON) dev/ref/gated_delta.py
	$(PYTHON) dev/ref/qwen36.py
	$(PYTHON) dev/ref/qwen36_vision.py
	$(PYTHON) dev/ref/deepseek_v4.py
	$(PYTHON) dev/ref/glm5.py
	$(PYTHON) dev/ref/lora.py
	$(PYTHON) dev/ref/muon.py
	$(PYTHON) dev/ref/fp8_rows.py
	$(PYTHON) dev/ref/rows.py

bench: setup
	@dev/bench/run.sh

clean:
	rm -rf build launch $(TRAINERS) $(BOTH_TRAINERS) $(CUDA_TRAINERS) $(TOOLS:%=dev/tools/%)

.PHONY: build/questions build/shapes help folder setup run run-mamba run-moe run-qwen36 run-deepseek-v4 run-glm5 run-lora run-shapes run-digits plot dashboard check test test-all fuzz golden bench clean launch tools $(TRAINERS) $(BOTH_TRAINERS) $(TOOLS:%=dev/tools/%) \
    setup-cuda cuda cuda_programs cuda_trainers cuda_folder cuda_names cuda_syntax ptxas sass $(CUDA_TRAINERS) simt test-simt simt_tests simt_long_tests trainers
.DELETE_ON_ERROR:
