"""Python without what only Linux has, for every process of a test that has this folder in PYTHONPATH.

Our own modules see macOS: the name of the system, no pidfd, no prctl, and neither /proc nor /sys. Libraries
see the Linux for which they were built. How macOS lays out a lock in memory cannot be played here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from traceback import walk_stack
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
OURS = tuple(str(ROOT / name) + os.sep for name in ("node", "protocol", "coordinator"))
LINUX_INSIDE = {"node.folder"}
HIDDEN = ("/proc", "/sys")


def called_by_us() -> bool:
    """Whether the nearest caller outside the standard library is a module of ours."""
    for frame, _ in walk_stack(None):
        file = frame.f_code.co_filename
        if file.startswith(OURS):
            return True
        if "site-packages" in file or not file.startswith(("<frozen", sys.base_prefix, __file__)):
            return False
    return False


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(HIDDEN):
        if called_by_us():
            raise FileNotFoundError(2, "macOS has none", str(arguments[0]))
    elif event == "ctypes.dlsym" and arguments[1] == "prctl":
        raise AttributeError("macOS has no prctl")


def hidden(real: Callable[..., Any]) -> Callable[..., Any]:
    def looked_up(path: Any, *arguments: Any, **named: Any) -> Any:
        if str(path).startswith(HIDDEN) and called_by_us():
            raise FileNotFoundError(2, "macOS has none", str(path))
        return real(path, *arguments, **named)

    return looked_up


class MacLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        text = self.get_data(path).replace(b"sys.platform", b"'darwin'")
        return compile(text, path, "exec", dont_inherit=True)


class MacFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in ("node", "protocol", "coordinator") or fullname in LINUX_INSIDE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = MacLoader(fullname, spec.loader.path)
        return spec


for module, names in ((os, ("pidfd_open", "sched_getaffinity")), (signal, ("pidfd_send_signal",))):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
os.stat = hidden(os.stat)
sys.meta_path.insert(0, MacFinder())
sys.addaudithook(watch)
