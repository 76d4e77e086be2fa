# The commands of the README. All make a virtual environment in .venv and install hetnode into it.
PYTHON ?= python3.11
VENV ?= .venv

.PHONY: swarm test check bench install

swarm: $(VENV)/installed
	$(VENV)/bin/hetnode swarm up

test: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest

check: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Below 10 minutes. BENCH="--write docs/performance.md" replaces the generated section there.
bench: $(VENV)/installed-test
	$(VENV)/bin/python -m benchmarks $(BENCH)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(VENV)/bin/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --editable '.[test]'
	touch $@
