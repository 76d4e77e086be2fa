"""Which dependencies have wheels for systems that no test runs on: ``python -m benchmarks.wheels``, a minute.

It asks pip for the versions that are installed here, with the tags of another system, and downloads nothing.
What has no wheel there is built from its source, which a pure Python package needs no compiler for.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

PYTHON = "3.11"
EXTRAS = ("dashboard", "hf", "plots")
GLIBC = ("2_17", "2_24", "2_26", "2_27", "2_28")
SYSTEMS = {
    "macOS 14, Apple silicon": ("Darwin", "darwin", "arm64", ("macosx_14_0_arm64",)),
    "Linux, ARM, glibc 2.28": (
        "Linux",
        "linux",
        "aarch64",
        ("manylinux2014_aarch64", *(f"manylinux_{each}_aarch64" for each in GLIBC)),
    ),
}
"""The system, sys.platform and machine of markers, and the tags of wheels."""
_MISSING = re.compile(r"No matching distribution found for ([\w.-]+)==")


def closure(environment: dict[str, str]) -> dict[str, str]:
    """Versions by name of all that hetnode needs there; "" of what only that system needs."""
    found: dict[str, str] = {}
    left = [Requirement(f"hetnode[{','.join(EXTRAS)}]")]
    while left:
        wanted = left.pop()
        for text in requires(wanted.name) or ():
            each = Requirement(text)
            extras = wanted.extras or {""}
            name = each.name.lower().replace("_", "-")
            is_needed = not each.marker or any(
                each.marker.evaluate({**environment, "extra": extra}) for extra in extras
            )
            if not is_needed or name in found or name == "hetnode":
                continue
            try:
                found[name] = version(name)
            except PackageNotFoundError:  # only that system needs it
                found[name] = ""
                continue
            left.append(each)
    return found


def without_wheel(packages: dict[str, str], tags: tuple[str, ...]) -> list[str]:
    """Those of `packages` of which this version has no wheel with these tags."""
    left, missing = dict(packages), list[str]()
    platforms = [word for tag in tags for word in ("--platform", tag)]
    with tempfile.TemporaryDirectory() as folder:
        list_ = Path(folder, "all.txt")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed"]
        command += ["--only-binary=:all:", "--python-version", PYTHON, *platforms]
        command += ["--target", f"{folder}/target", "--requirement", str(list_)]
        while True:
            list_.write_text("".join(f"{name}=={number}\n" for name, number in left.items()))
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                return missing
            failed = _MISSING.search(done.stderr)
            if failed is None:
                raise SystemExit(done.stderr)
            missing.append(failed[1])
            del left[failed[1]]


def main() -> None:
    for name, (system, platform, machine, tags) in SYSTEMS.items():
        names = {"platform_system": system, "sys_platform": platform, "platform_machine": machine}
        packages = closure({**names, "os_name": "posix", "python_version": PYTHON})
        here = {each: number.partition("+")[0] for each, number in packages.items() if number}
        missing = without_wheel(here, tags)
        print(f"{name}: {len(here) - len(missing)} of {len(here)} packages have wheels for Python {PYTHON}")
        print(f"  from source: {', '.join(f'{each} {here[each]}' for each in missing) or 'none'}")
        if unknown := sorted(set(packages) - set(here)):
            print(f"  not installed here, so not asked for: {', '.join(unknown)}")


if __name__ == "__main__":
    main()
