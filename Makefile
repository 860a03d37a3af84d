# Everything is made in .venv from requirements.lock; Debian packages are installed where they are missing
# (as root; else one sentence names them). ARGS goes to the command: make run ARGS="--port 6001"

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help run test lint fmt bench lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

run: $(READY) ## start a whole cluster on this machine; Ctrl-C ends it
	@PYTHON=$(PYTHON) sandbox/install.sh run
	@exec $(BIN)/tidevoy run $(ARGS)

test: $(READY) ## run all tests
	@PYTHON=$(PYTHON) sandbox/install.sh test
	@exec $(BIN)/pytest $(ARGS)

lint: $(READY) ## check style, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(READY) ## format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(READY) ## measure; tables here, JSON under bench/results/
	@PYTHON=$(PYTHON) sandbox/install.sh bench
	@exec $(BIN)/tidevoy bench $(ARGS)

lock: $(READY) ## lock the newest allowed versions of all dependencies
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras \
		--generate-hashes --no-header --no-emit-index-url --no-emit-find-links \
		--output-file requirements.lock pyproject.toml

clean: ## remove what was built, and .venv
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .schemathesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements.lock pyproject.toml hatch_build.py controlplane/etcd/rpc.proto
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON); install Python 3.11 or newer, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=/path/to/python" >&2; exit 1; }
	@PYTHON=$(PYTHON) sandbox/install.sh python
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing Python packages into .venv"
	@$(PIP) install --require-hashes -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
