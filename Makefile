# Python packages are installed into .venv from requirements.lock; Rust code is built in filters/target from
# filters/Cargo.lock. As root, make also installs missing Debian packages; otherwise it only names them. A Rust
# toolchain must be installed. ARGS is passed to the command: make run ARGS="--port 6001"

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

RUST := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' filters/Cargo.toml)
MODULE := filters/target/release/libtidevoy.so
# The list includes directories: their modification times show that a file was deleted.
MODULE_SOURCES := $(shell find filters \( -name target -o -name fuzz \) -prune -o -print)
# --target-dir is set because a user's cargo settings may set another directory.
CARGO := --manifest-path filters/Cargo.toml --locked --target-dir filters/target
# The benchmarks' load client is not part of the workspace in filters, but uses the dependencies that are built there.
CLIENT := --manifest-path bench/client/Cargo.toml --locked --target-dir filters/target
LOAD_CLIENT := filters/target/release/tidevoy-load
FUZZ := --manifest-path filters/fuzz/Cargo.toml --locked --target-dir filters/target
# Four jobs run at the same time: while one waits for the network, a compiler or the linker, others use its core.
IN_PARALLEL := $(MAKE) --no-print-directory --jobs=4 --output-sync=line
BUILDS := $(MODULE) $(LOAD_CLIENT) packages-for-tests clients
# Many tests wait for other processes or for timeouts, so more tests than cores run at the same time. The directories
# with the longest tests come first.
ALL_TESTS := --numprocesses=3 --dist=loadfile --no-loadscope-reorder $(addprefix tests/,e2e integration unit)

# The directories in which rustup installs cargo and Go's own package installs go. The login shell may lack them.
export PATH := $(PATH):$(HOME)/.cargo/bin:/usr/local/go/bin
# Without bytecode files, each of the tests' thousands of processes would compile all Python modules again.
unexport PYTHONDONTWRITEBYTECODE

# Whether `make run` starts real TiDB servers; then etcd and MariaDB need not be installed.
REAL_TIDB = $(if $(findstring --fake-tidb,$(ARGS)),,$(or $(findstring --tidb-bin,$(ARGS)),\
	$(shell $(BIN)/python -m sandbox.tidb_binaries >/dev/null 2>&1 && echo yes)))

.DEFAULT_GOAL := help
.PHONY: help run ci test test-tidb test-releases test-upgrade test-kubernetes dist test-dist lint audit advisories fmt bench fuzz matrix
.PHONY: soak test-switches lock clean
.PHONY: packages-for-tests clients helm test-rust lint-python lint-rust test-python

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

run: $(READY) $(MODULE) ## start a whole cluster on this machine; Ctrl-C stops it
	@PYTHON=$(PYTHON) sandbox/install.sh $(if $(REAL_TIDB),python,run)
	@exec $(BIN)/tidevoy run $(ARGS)

ci: $(READY) ## lint, test and audit, with several jobs at the same time
	@RUST=$(RUST) sandbox/install.sh rust
	@$(IN_PARALLEL) $(BUILDS) lint-python
	@$(IN_PARALLEL) PRIORITY="nice -n 19" STRICT=--strict test-python helm audit lint-rust test-rust

# The Python tests spend a quarter of their time waiting. In `make ci`, the other checks run in that time.
# `+` makes make print the tests' progress at once. The output of other commands appears when they end.
test-python:
	+@exec $(BIN)/pytest $(ALL_TESTS)

test: $(READY) ## run all tests
	@RUST=$(RUST) sandbox/install.sh rust
	@$(IN_PARALLEL) --silent test-rust $(BUILDS) helm
	@exec $(BIN)/pytest $(or $(ARGS),$(ALL_TESTS))

# These tests measure the CPU, so no other tests run beside them.
ALONE := tests/tidb/test_balance.py tests/tidb/test_bench_proxies.py

# Checks for the TiDB binaries first, because without them nothing needs to be installed or built.
test-tidb: $(READY) ## run the tests on real TiDB servers, from TIDEVOY_TIDB_BIN or TiUP; not part of `make test`
	@$(BIN)/python -m sandbox.tidb_binaries
	@PYTHON=$(PYTHON) sandbox/install.sh tidb
	@$(MAKE) --no-print-directory $(MODULE)
	@$(if $(ARGS),exec $(BIN)/pytest $(ARGS),$(BIN)/pytest --numprocesses=2 --dist=loadfile tests/tidb \
		$(addprefix --ignore=,$(ALONE)) && exec $(BIN)/pytest $(ALONE))

test-releases: $(READY) ## test all releases of TiDB that are here, and write docs/reference/tidb-releases.md
	@TIDEVOY_RELEASE_PAGE=docs/reference/tidb-releases.md $(MAKE) --no-print-directory test-tidb ARGS=tests/tidb/releases

test-upgrade: $(READY) $(MODULE) ## upgrade and roll back Tidevoy itself: this build, TIDEVOY_PREVIOUS_REV, and one like the next release
	@PYTHON=$(PYTHON) sandbox/install.sh test
	@exec $(BIN)/pytest --capture=no $(or $(ARGS),tests/upgrade)

# The shell is the first process of the new namespace, and reaps orphans.
ISOLATED := unshare --net --mount --pid --fork --kill-child --mount-proc sh -c
# In the second part, containers run. It needs root, and namespaces of its own, with which all its processes end.
test-kubernetes: $(READY) helm ## test the Helm chart in a Kubernetes cluster, whose programs are built with Go
	@PYTHON=$(PYTHON) sandbox/install.sh test
	@$(BIN)/python -m tests.support.kubernetes.server_programs
	@$(BIN)/pytest tests/kubernetes/test_installation.py $(ARGS)
	@if [ "$$(id -u)" = 0 ]; then $(BIN)/python -m tests.support.kubernetes.container_images && \
		$(ISOLATED) '$(BIN)/pytest tests/kubernetes/pods $(ARGS); exit $$?'; \
		else echo "tests/kubernetes/pods were not run, since only root can run containers"; fi

packages-for-tests:
	@PYTHON=$(PYTHON) sandbox/install.sh test

clients: packages-for-tests
	@exec $(BIN)/python -m tests.support.clients.client_builds

# For the tests of the Helm chart, which are among the last ones. They are skipped without Helm; `make ci` fails then.
helm: $(READY)
	@exec $(PRIORITY) $(BIN)/python -m tests.support.kubernetes.go_program $(STRICT)

# `--tests` leaves out documentation tests, because there are none.
test-rust:
	@$(PRIORITY) cargo test --quiet --tests --workspace $(CARGO)
	@$(PRIORITY) cargo test --quiet --tests $(CLIENT)

lint: $(READY) ## check style, types and imports
	@RUST=$(RUST) sandbox/install.sh rust
	@$(IN_PARALLEL) lint-python lint-rust

lint-python:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Only linking the fuzz targets needs libFuzzer. With CUSTOM_LIBFUZZER_PATH, even of a missing file, cargo does not
# compile its C++ code.
lint-rust:
	$(PRIORITY) cargo fmt --all --manifest-path filters/Cargo.toml --check
	$(PRIORITY) cargo fmt --manifest-path filters/fuzz/Cargo.toml --check
	$(PRIORITY) cargo clippy --quiet --workspace --all-targets $(CARGO) -- -D warnings
	CUSTOM_LIBFUZZER_PATH=filters/none.a $(PRIORITY) cargo clippy --quiet $(FUZZ) -- -D warnings
	$(PRIORITY) cargo fmt --manifest-path bench/client/Cargo.toml --check
	$(PRIORITY) cargo clippy --quiet --all-targets $(CLIENT) -- -D warnings

audit: $(READY) ## check all dependencies for known vulnerabilities and licences; ARGS=--strict: skip nothing
	@$(PRIORITY) $(BIN)/python -m tests.support.dependency_audit $(ARGS)

# `git clone` accepts a directory too, such as a mirror.
RUSTSEC ?= https://github.com/rustsec/advisory-db
PYPA ?= https://github.com/pypa/advisory-database

advisories: $(READY) ## copy the advisories of RustSec and PyPA for the locked packages into the repository
	@directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
		git clone --quiet --depth 1 --branch osv $(RUSTSEC) "$$directory/rustsec" && \
		git clone --quiet --depth 1 $(PYPA) "$$directory/pypa" && \
		$(BIN)/python -m tests.support.pin_advisories "$$directory/rustsec" "$$directory/pypa"

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
	@filters/fuzz.sh $(or $(SECONDS),1800)

matrix: $(READY) $(MODULE) ## run every client library with and without TLS against MariaDB and the simulated TiDB; prints the tables
	@PYTHON=$(PYTHON) sandbox/install.sh test
	@TIDEVOY_SOAK=1 exec $(BIN)/pytest --capture=no tests/e2e/clients/test_matrix.py $(ARGS)

soak: $(READY) $(MODULE) ## run the long tests: millions of packets, 200,000 migrated statements, rolling restarts, unhealthy nodes, connection pools, killed leaders, a virtual address that moves, 30 GB of session states; on real TiDB servers, a run of SECONDS=28800 under load; prints the results
	@PYTHON=$(PYTHON) sandbox/install.sh test
	@TIDEVOY_SOAK=1 exec $(BIN)/pytest --capture=no $(addprefix tests/e2e/,module/test_load.py module/test_robustness.py module/test_migration_load.py engine/test_rolling_restart.py decide/test_unhealthy_node_balance.py pools/test_envoy_replacement.py rollouts/test_killed_leader.py virtual_ip/test_keepalived.py) $(addprefix tests/integration/module/test_,live_config_stress.py large_states.py) $(ARGS)
	@if $(BIN)/python -m sandbox.tidb_binaries; then TIDEVOY_SOAK=1 TIDEVOY_LONG_RUN_SECONDS=$(SECONDS) $(MAKE) --no-print-directory test-tidb ARGS="--capture=no $(addprefix tests/tidb/test_,compose.py kill.py kill_by_client_id.py unreachable_nodes.py connection_limit.py differential.py rolling_restart.py large_drain.py long_run.py) tests/tidb/drills"; else echo "The long tests on real TiDB servers were not run."; fi

MODULE_TESTS := --numprocesses=3 --dist=loadfile tests/integration/module

dist: $(READY) $(MODULE) ## build all files of a release into dist; ARGS="--skip images" leaves out the images
	@PYTHON=$(PYTHON) sandbox/install.sh python
	@exec $(BIN)/python -m release $(ARGS)

test-dist: $(READY) $(MODULE) ## install the files of a release on a clean Debian, and use them
	@PYTHON=$(PYTHON) sandbox/install.sh dist
	@exec $(BIN)/pytest --capture=no $(or $(ARGS),tests/release)

test-switches: $(READY) $(MODULE) ## run the module's tests with offloading switched off, and with migrations switched off
	@PYTHON=$(PYTHON) sandbox/install.sh test
	@TIDEVOY_SWITCHED_OFF=offload $(BIN)/pytest $(MODULE_TESTS) -m "not needs_offload"
	@TIDEVOY_SWITCHED_OFF=migration $(BIN)/pytest $(MODULE_TESTS) -m "not needs_migration"

lock: $(READY) ## lock the newest allowed versions of all dependencies
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras \
		--generate-hashes --no-header --no-emit-index-url --no-emit-find-links \
		--output-file requirements.lock pyproject.toml

clean: ## remove all build outputs and .venv
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .schemathesis
	rm -rf filters/target filters/fuzz/target
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `touch`, because cargo does not rewrite the module if a change of its sources does not affect it.
$(MODULE): $(MODULE_SOURCES)
	@RUST=$(RUST) sandbox/install.sh rust
	@echo "Building the module and the programs for Envoy, $@ (the first time takes about two minutes)"
	@cargo build --quiet --release --package tidevoy-module --package tidevoy-envoy --package statement-rules \
		--package tidevoy-replay $(CARGO)
	@touch $@

$(LOAD_CLIENT): $(shell find bench/client filters/mysql-proto/src filters/mysql-proto/Cargo.toml -print) | $(MODULE)
	@cargo build --quiet --release $(CLIENT)
	@touch $@

$(READY): requirements.lock pyproject.toml hatch_build.py controlplane/etcd/rpc.proto \
		$(addprefix controlplane/observe/envoy_reports/,statements.proto telemetry.proto) \
		controlplane/replicas/peer_feed.proto controlplane/sessions/commands.proto
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON); install Python 3.11 or newer, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=/path/to/python" >&2; exit 1; }
	@PYTHON=$(PYTHON) sandbox/install.sh python
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing Python packages into .venv"
	@$(PIP) install --require-hashes -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
