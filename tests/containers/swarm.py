"""A swarm of containers, as docker/compose.yaml describes it, on the engine of this machine."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.checkpoint import global_model
from node.checkpoint.global_model import Checkpoint
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

PROJECT, TAG = "hetnode-test", "test"
NODES = ("replica", "stage")
START_SECONDS = 240.0
"""For containers to start and to train, also on a busy machine."""


@dataclass(frozen=True)
class Container:
    """One container of the swarm. `exit_code` is 0 while it runs."""

    name: str
    service: str
    state: str
    health: str
    exit_code: int


def missing() -> str:
    """Why there can be no swarm of containers here; "" if there can be one."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    for command in (("docker", "version"), ("docker", "compose", "version")):
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return f"'{' '.join(command)}' fails: no container engine runs, or it has no Compose 2"
    return ""


def build() -> str:
    """Build the image of this checkout and return its name."""
    ContainerSwarm(TAG).compose("build")
    return TAG


class ContainerSwarm:
    """A Compose project of its own. `settings` are the variables of docker/compose.yaml."""

    def __init__(self, tag: str) -> None:
        self.settings = {"HETNODE_TAG": tag}

    def compose(self, *arguments: str) -> str:
        """The output of ``docker compose``. Raises CalledProcessError."""
        file = ROOT / "docker" / "compose.yaml"
        return self._run("docker", "compose", "--file", str(file), "--project-name", PROJECT, *arguments)

    def docker(self, *arguments: str) -> str:
        return self._run("docker", *arguments)

    def containers(self, *services: str) -> list[Container]:
        """All, or those of `services`, whether they run or not."""
        lines = self.compose("ps", "--all", "--format", "json", *services).splitlines()
        found = (json.loads(line) for line in lines)
        return [
            Container(each["Name"], each["Service"], each["State"], each["Health"], each["ExitCode"])
            for each in found
        ]

    def logs(self, *services: str) -> str:
        return self.compose("logs", "--no-color", *services)

    def events(self) -> list[dict[str, Any]]:
        """What the coordinator has measured and decided so far."""
        run = self.settings.get("HETNODE_RUN", "first")
        try:
            text = self.compose("exec", "-T", "coordinator", "cat", f"runs/{run}/metrics.jsonl")
        except subprocess.CalledProcessError:
            return []  # it is starting
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def last_round(self) -> int:
        """The newest committed round."""
        rounds = (
            each["round"] for each in self.events() if each["event"] == "decision" and each["committed"]
        )
        return max(rounds, default=0)

    def wait_rounds(self, count: int, replicas: set[int] | None = None, number: int = 0) -> None:
        """Wait for `count` more rounds, in which these replicas, `number` in all, have measured losses."""
        until, measured = self.last_round() + count, set[int]()

        def is_there() -> bool:
            found = [each for each in self.events() if each.get("round", 0) >= until]
            measured.update(each["replica"] for each in found if each["event"] == "measurement")
            return bool(found) and measured >= (replicas or set()) and len(measured) >= number

        wait_until(is_there, START_SECONDS, lambda: f"round {until}; measured by {measured}")

    def wait_ended(self, seconds: float) -> None:
        """Wait until every container has ended with status 0."""
        wait_until(
            lambda: all(each.state == "exited" for each in self.containers()),
            seconds,
            lambda: f"the end of {self.containers()}",
        )
        assert {each.exit_code for each in self.containers()} == {0}, self.containers()

    def wait_healthy(self, *services: str) -> None:
        wait_until(
            lambda: {each.health for each in self.containers(*services)} == {"healthy"},
            START_SECONDS,
            lambda: f"the health of {self.containers(*services)}",
        )

    def kept_in(self, volume: str, folder: Path) -> Iterator[Path]:
        """The folders of the nodes whose home is this volume, copied into `folder`."""
        archive = subprocess.run(
            [
                *("docker", "run", "--rm", "--volume", f"{PROJECT}_{volume}:/volume:ro"),
                *("--entrypoint", "tar", f"hetnode:{TAG}", "--directory", "/volume", "--create", "."),
            ],
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            opened.extractall(folder / volume, filter="data")
        yield from sorted((folder / volume / ".local" / "share" / "hetnode" / "nodes").iterdir())

    def models(self, folder: Path) -> list[Checkpoint]:
        """What each node holds of the model, read with all its checks."""
        found = (place for volume in NODES for place in self.kept_in(volume, folder))
        places = (global_model.find(place) for place in found)
        return [global_model.read(place) for place in places]

    def _run(self, *command: str) -> str:
        result = subprocess.run(
            command, env={**os.environ, **self.settings}, capture_output=True, text=True, check=False
        )
        if result.returncode:
            print(result.stdout, result.stderr)
        result.check_returncode()
        return result.stdout
