# The two commands of the README. Both make a virtual environment in .venv and install hetnode into it.
PYTHON ?= python3.11
VENV ?= .venv

.PHONY: swarm test check install

swarm: $(VENV)/installed
	$(VENV)/bin/hetnode swarm up

test: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest

check: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(VENV)/bin/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --editable '.[test]'
	touch $@
