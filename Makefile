# specctl: set up, prove and show. Needs Python 3.11+, make and a C compiler.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TARGET := .cache/targets/smollm2
DEMO   ?= .cache/demo

.PHONY: demo test test-slow check conformance target fixtures bench bench-train bench-growth bench-eval docs format clean

# PyTorch first and pinned, so that a CPU machine does not pull a CUDA build.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: specctl needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[gguf,dev]'
	@touch $@

demo: target
	@SPECCTL=$(BIN)/specctl TARGET=$(TARGET) OUT=$(DEMO) sh fixtures/demo.sh

test: $(READY)
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m pytest tests/test_house.py

target: $(TARGET)/config.json
$(TARGET)/config.json: | $(READY)
	$(BIN)/python -m fixtures.make target

fixtures: $(READY)
	$(BIN)/python -m fixtures.make check

bench: target
	@test -f $(DEMO)/answers.jsonl || $(MAKE) demo
	$(BIN)/python benchmarks/extract.py --target $(TARGET) --chats $(DEMO)/answers.jsonl

# What speculators needs to be imported, and not the video and audio packages that it asks for.
SPECULATORS := .cache/speculators-venv
$(SPECULATORS)/.ready:
	$(PYTHON) -m venv $(SPECULATORS)
	$(SPECULATORS)/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	$(SPECULATORS)/bin/pip install --quiet --disable-pip-version-check \
	  'numpy>=2' 'transformers<=5.19.0' pydantic pydantic-settings loguru openai 'datasets<=5.1.0'
	$(SPECULATORS)/bin/pip install --quiet --disable-pip-version-check --no-deps speculators==0.9.0 hs-connectors==0.9.0
	@touch $@

bench-train: $(SPECULATORS)/.ready | $(READY)
	$(BIN)/python benchmarks/train.py --speculators-venv $(SPECULATORS)

DRAFT ?= $(DEMO)/eagle3/draft
bench-eval: target
	@test -d $(DRAFT) || $(MAKE) demo
	$(BIN)/python benchmarks/eval.py --target $(TARGET) --draft $(DRAFT)

bench-growth: $(READY)
	$(BIN)/python benchmarks/train.py --growth --rounds 1

# A real vLLM on the CPU, 3.5 GB, and half an hour of it.
VLLM := .cache/vllm-venv
$(VLLM)/.ready: conformance/install.sh
	sh conformance/install.sh $(VLLM) $(PYTHON)
	@touch $@

EAGLE3 ?= $(DEMO)/eagle3/draft
PEAGLE ?= $(DEMO)/peagle/draft
conformance: $(VLLM)/.ready target
	@test -d $(EAGLE3) -a -d $(PEAGLE) -a -f $(DEMO)/answers.jsonl || $(MAKE) demo
	$(BIN)/python -m conformance.run --venv $(VLLM) --target $(TARGET) --eagle3 $(EAGLE3) --peagle $(PEAGLE) \
	  --chats $(DEMO)/answers.jsonl

docs: $(READY)
	$(BIN)/python docs/generate.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache build dist specctl.egg-info
