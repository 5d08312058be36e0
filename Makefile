# Every target makes its own environment: `make demo` and `make test` are all a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all test-compat lint format bench docs clean

demo: .venv/.installed
	$(BIN)/selfjudge demo

test: .venv/.installed
	$(BIN)/pytest -m "not slow and not gpu"

# the full-size variants
test-all: .venv/.installed
	$(BIN)/pytest -m "slow and not gpu"

# the oldest transformers we support, and the newest that vLLM allows
test-compat: .compat/5.17.0 .compat/5.19.0
	PYTHONPATH=.compat/5.17.0 $(BIN)/pytest tests/unit --ignore tests/unit/test_train.py -k "not pull and not distribution and not sandbox and not tasks"
	PYTHONPATH=.compat/5.19.0 $(BIN)/pytest tests/unit --ignore tests/unit/test_train.py -k "not pull and not distribution and not sandbox and not tasks"

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

docs: .venv/.installed
	$(BIN)/python docs/make_cli.py > docs/cli.md

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,eval]"
	touch $@

.compat/%: .venv/.installed
	rm -rf $@ $@.partial
	$(BIN)/pip install --quiet --disable-pip-version-check --target $@.partial transformers==$*
	mv $@.partial $@

clean:
	rm -rf .venv .compat .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
