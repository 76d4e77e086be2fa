"""Prints what the package of pyproject.toml needs, a line each: python requirements.py EXTRA,EXTRA."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [project["optional-dependencies"][name] for name in sys.argv[1].split(",") if name]
print(*project["dependencies"], *(each for extra in extras for each in extra), sep="\n")
