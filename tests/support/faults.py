"""Plans faults for the named members of a swarm, and proves that each of them has happened."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.support.fault_script import FILE_VARIABLE, Action, Fault, Fired, Moment, read_report, to_json
from tests.support.paths import ROOT

_SITE = ROOT / "tests" / "support" / "fault_site"
"""Its ``sitecustomize.py``, which Python imports at its start, installs the hooks in each process."""


class FaultPlan:
    """The faults of a swarm. Each member has a script and a report of its own below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._faults: defaultdict[str, list[Fault]] = defaultdict(list)

    def fail_at(
        self,
        member: str,
        stage: int | None,
        round_number: int | None,
        moment: Moment,
        action: Action,
        **more: Any,
    ) -> FaultPlan:
        """Plan that `action` strikes `member` when it comes to `moment` of (stage, round); None fits all.

        `more`: the other fields of :class:`Fault`.
        """
        self._faults[member].append(Fault(moment, action, stage, round_number, **more))
        return self

    def faults_of(self, member: str) -> tuple[Fault, ...]:
        return tuple(self._faults[member])

    def report_of(self, member: str) -> Path:
        return self.folder / f"{member}.fired.jsonl"

    def environment(self, member: str) -> dict[str, str]:
        """Write the script of `member`, and return the variables that its processes need."""
        if not self._faults[member]:
            return {}
        self.folder.mkdir(parents=True, exist_ok=True)
        script = self.folder / f"{member}.faults.json"
        script.write_text(to_json(self.report_of(member), self._faults[member]))
        paths = [str(_SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return {FILE_VARIABLE: str(script), "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def fired(self, member: str) -> list[Fired]:
        return list(read_report(self.report_of(member)))

    def pending(self) -> list[str]:
        """The planned faults that have not happened, as text."""
        return [
            f"{member}: {fault}"
            for member, faults in self._faults.items()
            for number, fault in enumerate(faults)
            if number not in {fired.fault for fired in self.fired(member)}
        ]

    def assert_all_fired(self) -> None:
        """Fail unless every planned fault has happened. Without its fault a test proves nothing."""
        pending = self.pending()
        assert not pending, f"these planned faults never happened: {'; '.join(pending)}"
