# The commands of the README. All make a virtual environment in .venv and install hetnode into it.
PYTHON ?= python3
VENV ?= .venv
SMALL = benchmarks/reproduction/small.toml
QUICK = benchmarks/reproduction/quick.toml

# The many processes of the tests share compiled files, also where an environment says to write none.
COMPILED = PYTHONDONTWRITEBYTECODE=

.PHONY: swarm test test-slow search test-network test-containers test-browser hostile check package bench gpu \
    reproduce reproduce-quick reproduce-claims reproduce-larger reproduce-dithered reproduce-gpu

swarm: $(VENV)/installed
	$(VENV)/bin/hetnode swarm up

# All that gates a change. JOBS is the number of tests that run at the same time.
JOBS = 4
test: $(VENV)/installed-test
	$(COMPILED) $(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal

# Tests that take minutes each.
test-slow: $(VENV)/installed-test
	$(COMPILED) $(VENV)/bin/python -m pytest -m slow

# What the gate, which repeats, does not look at: other random examples, and virtual swarms on another network.
ifndef SEED
SEED := $(shell date +%s)
endif
search: $(VENV)/installed-test
	$(COMPILED) HETNODE_SEARCH=$(SEED) $(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal \
	    --hypothesis-profile=search --hypothesis-seed=$(SEED) -m '(hypothesis or virtual) and not slow and not hostile'

# Homes behind NAT, in network namespaces: needs root, iproute2 and iptables, and is skipped with a reason elsewhere.
test-network: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest -m 'network and not slow' -rs tests/network

# Swarms of containers: needs a container engine with Compose 2, and is skipped with a reason elsewhere.
test-containers: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest -m containers -rs tests/containers

# The dashboard in a real browser: needs chromium and chromedriver, and is skipped with a reason elsewhere.
test-browser: $(VENV)/installed-test
	$(COMPILED) $(VENV)/bin/python -m pytest -m browser -rs tests/browser

# Attacks of independent peers on honest swarms: below 15 minutes.
hostile: $(VENV)/installed-test
	$(COMPILED) $(VENV)/bin/python -m pytest -m hostile tests/hostile

check: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Wheel and sdist, built, and used in a fresh environment outside the checkout: two minutes.
package: $(VENV)/installed-test
	PYTHON=$(VENV)/bin/python .ci/package

# Below 15 minutes. BENCH="--only codec rounds" measures these parts alone.
bench: $(VENV)/installed-test
	$(VENV)/bin/python -m benchmarks $(BENCH)

# All that a GPU shows, below 10 minutes: tests, parity, speed, memory, links, a swarm on the card. Without an
# environment of this checkout it takes the python3 that has torch; nothing is installed or fetched.
GPU_PYTHON = $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3)
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(GPU)

# Run the matrix $(1) in the folder $(2), or go on with it, and write the page $(3) with its figures in the folder $(4).
HETNODE = $(VENV)/bin/hetnode
define page
	$(HETNODE) experiment run $(1) --out $(2)
	$(HETNODE) experiment report $(1) --results $(2)/results.jsonl --write $(3) --figures $(4)
endef

# The paper's tables in small, docs/reproduction/small.md: about three hours.
reproduce: $(VENV)/installed-hf
	$(call page,$(SMALL),runs/reproduction,docs/reproduction/small.md,docs/reproduction)
	cp runs/reproduction/results.jsonl docs/reproduction/small.jsonl

# Its orderings on a short schedule, in a quarter of an hour at most.
reproduce-quick: $(VENV)/installed-hf
	$(call page,$(QUICK),runs/reproduction-quick,runs/reproduction-quick/page.md,runs/reproduction-quick/figures)

# H = 1, weight projection and Grassmann updates with five seeds and 1,000 steps: two hours. A larger model: half an hour.
# Dithered links: 35 minutes.
reproduce-claims reproduce-larger reproduce-dithered: reproduce-%: $(VENV)/installed-hf
	$(call page,benchmarks/reproduction/$*.toml,runs/$*,docs/reproduction/$*.md,docs/reproduction/$*)
	cp runs/$*/results.jsonl docs/reproduction/$*.jsonl

# AdamW and Muon with links at 34M parameters: half an hour of one GPU, with the Python of 'make gpu'.
reproduce-gpu: HETNODE = $(GPU_PYTHON) -m node
reproduce-gpu:
	$(call page,benchmarks/reproduction/gpu.toml,runs/reproduce-gpu,docs/reproduction/gpu.md,docs/reproduction/gpu)
	cp runs/reproduce-gpu/results.jsonl docs/reproduction/gpu.jsonl

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	@echo "installs hetnode and its libraries into $(VENV): some minutes, torch alone is hundreds of MB"
	$(VENV)/bin/python -m pip install --editable '.[dashboard,plots]'
	touch $@

$(VENV)/installed-hf: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --editable '.[dashboard,hf,plots]'
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --editable '.[test]'
	touch $@
