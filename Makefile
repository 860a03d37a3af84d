# Python packages are installed into .venv from requirements.lock; Rust code is built in filters/target from
# filters/Cargo.lock. Missing Debian packages are installed (as root; otherwise a message names them). A Rust
# toolchain must be installed. ARGS is passed to the command: make run ARGS="--port 6001"

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

RUST := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' filters/Cargo.toml)
MODULE := filters/target/release/libtidevoy.so
# Includes directories: their modification times show that a file was deleted.
MODULE_SOURCES := $(shell find filters \( -name target -o -name fuzz \) -prune -o -print)
# --target-dir is set because a user's cargo settings may set another directory.
CARGO := --manifest-path filters/Cargo.toml --locked --target-dir filters/target
# The benchmarks' load client is not part of that workspace, but shares the dependencies built there.
CLIENT := --manifest-path bench/client/Cargo.toml --locked --target-dir filters/target
FUZZ := --manifest-path filters/fuzz/Cargo.toml --locked --target-dir filters/target
# Jobs that wait for the network, for one compiler or for the linker leave a core to the others.
AT_ONCE := $(MAKE) --no-print-directory --jobs=3 --output-sync=line
# Total time of `make fuzz`.
SECONDS ?= 1800

# Where rustup installs cargo, and Go's own package installs go, in case the login shell has not added them yet.
export PATH := $(PATH):$(HOME)/.cargo/bin:/usr/local/go/bin

# Whether `make run` starts real TiDB servers; then etcd and MariaDB need not be installed.
REAL_TIDB = $(if $(findstring --stand-ins,$(ARGS)),,$(or $(findstring --tidb-bin,$(ARGS)),\
	$(shell $(BIN)/python -m sandbox.tidb_binaries >/dev/null 2>&1 && echo yes)))

.DEFAULT_GOAL := help
.PHONY: help run test test-tidb lint audit fmt bench fuzz matrix soak lock clean
.PHONY: packages-for-tests test-rust test-python test-python-slow lint-python lint-rust

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

run: $(READY) $(MODULE) ## start a whole cluster on this machine; Ctrl-C stops it
	@PYTHON=$(PYTHON) sandbox/install.sh $(if $(REAL_TIDB),python,run)
	@exec $(BIN)/tidevoy run $(ARGS)

test: $(READY) ## run all tests
	@RUST=$(RUST) sandbox/install.sh rust
	@$(AT_ONCE) --silent $(MODULE) packages-for-tests test-rust
	@$(if $(ARGS),exec $(BIN)/pytest $(ARGS),$(AT_ONCE) --silent --output-sync=none test-python test-python-slow)

# Checks for the TiDB binaries first: without them nothing needs to be installed or built.
test-tidb: $(READY) ## run the tests on real TiDB servers, from TIDEVOY_TIDB_BIN or TiUP; not part of `make test`
	@$(BIN)/python -m sandbox.tidb_binaries
	@PYTHON=$(PYTHON) sandbox/install.sh tidb
	@$(MAKE) --no-print-directory $(MODULE)
	@exec $(BIN)/pytest $(or $(ARGS),tests/tidb)

test-python:
	@exec $(BIN)/pytest -m 'not slow'

# The tests marked by tests/support/slow_marker.py: they run with lower priority, and their output is printed at the end.
test-python-slow:
	@output=$$(nice -n 5 $(BIN)/pytest -m slow -p no:cacheprovider 2>&1); code=$$?; echo "$$output"; exit $$code

packages-for-tests:
	@PYTHON=$(PYTHON) sandbox/install.sh test

test-rust:
	@cargo test --quiet --workspace $(CARGO)
	@cargo test --quiet $(CLIENT)

lint: $(READY) ## check style, types and imports
	@RUST=$(RUST) sandbox/install.sh rust
	@$(AT_ONCE) lint-python lint-rust

lint-python:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# libFuzzer is C++ and only needed to link the fuzz targets. The path of a missing file keeps it from being compiled.
lint-rust:
	cargo fmt --all --manifest-path filters/Cargo.toml --check
	cargo fmt --manifest-path filters/fuzz/Cargo.toml --check
	cargo clippy --quiet --workspace --all-targets $(CARGO) -- -D warnings
	CUSTOM_LIBFUZZER_PATH=filters/none.a cargo clippy --quiet $(FUZZ) -- -D warnings
	cargo fmt --manifest-path bench/client/Cargo.toml --check
	cargo clippy --quiet --all-targets $(CLIENT) -- -D warnings

audit: $(READY) ## check all dependencies for known vulnerabilities and licences; ARGS=--strict: skip nothing
	@exec $(BIN)/python -m tests.support.dependency_audit $(ARGS)

fmt: $(READY) ## format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	cargo fmt --all --manifest-path filters/Cargo.toml
	cargo fmt --manifest-path filters/fuzz/Cargo.toml
	cargo fmt --manifest-path bench/client/Cargo.toml

bench: $(READY) $(MODULE) ## run a benchmark; ARGS names it, e.g. ARGS=proxies
	@PYTHON=$(PYTHON) sandbox/install.sh bench
	@exec $(BIN)/tidevoy bench $(or $(ARGS),--help)

fuzz: ## fuzz the parsers of untrusted bytes, for SECONDS=1800 in total; also needs Rust's nightly toolchain
	@RUST=$(RUST) sandbox/install.sh rust
	@filters/fuzz.sh $(SECONDS)

matrix: $(READY) $(MODULE) ## run every client library through Envoy and the module; prints the table
	@PYTHON=$(PYTHON) sandbox/install.sh test
	@exec $(BIN)/pytest --capture=no tests/e2e/clients/test_matrix.py $(ARGS)

soak: $(READY) $(MODULE) ## run the long tests: millions of packets, 200,000 migrated statements, rolling restarts, unhealthy nodes, killed leaders, 30 GB of session states; prints the results
	@PYTHON=$(PYTHON) sandbox/install.sh test
	@TIDEVOY_SOAK=1 exec $(BIN)/pytest --capture=no $(addprefix tests/e2e/,module/test_load.py module/test_migration_load.py engine/test_rolling_restart.py decide/test_unhealthy_node_balance.py rollouts/test_killed_leader.py) $(addprefix tests/integration/module/test_,live_config_stress.py large_states.py) $(ARGS)
	@if $(BIN)/python -m sandbox.tidb_binaries; then TIDEVOY_SOAK=1 $(MAKE) --no-print-directory test-tidb ARGS="--capture=no $(addprefix tests/tidb/test_,kill.py unreachable_nodes.py connection_limit.py)"; else echo "The long tests on real TiDB servers were not run."; fi

lock: $(READY) ## lock the newest allowed versions of all dependencies
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras \
		--generate-hashes --no-header --no-emit-index-url --no-emit-find-links \
		--output-file requirements.lock pyproject.toml

clean: ## remove all build outputs and .venv
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .schemathesis
	rm -rf filters/target filters/fuzz/target
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `touch`, since cargo does not rewrite a module that a change does not affect.
$(MODULE): $(MODULE_SOURCES)
	@RUST=$(RUST) sandbox/install.sh rust
	@echo "Building the module for Envoy, $@ (the first time takes about two minutes)"
	@cargo build --quiet --release --package module $(CARGO)
	@touch $@

$(READY): requirements.lock pyproject.toml hatch_build.py controlplane/etcd/rpc.proto \
		controlplane/observe/envoy_reports/telemetry.proto controlplane/replicas/peer_feed.proto
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON); install Python 3.11 or newer, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=/path/to/python" >&2; exit 1; }
	@PYTHON=$(PYTHON) sandbox/install.sh python
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing Python packages into .venv"
	@$(PIP) install --require-hashes -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
