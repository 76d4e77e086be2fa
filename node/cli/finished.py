"""What commands say about a run that is finished, or whose coordinator on this machine does not answer."""

from __future__ import annotations

import shlex
from pathlib import Path
from tempfile import TemporaryFile

from node import command_runner
from node.folder import node_folder_of, run_in, was_finished
from node.here import known_runs
from node.here.known_runs import Destination
from node.net.coordinator_channel import fetch_status
from node.security import credentials
from node.security.credentials import RunCredentials
from node.views.run_history import history_of, read_events
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import RunPhase
from protocol.trust.private_file import FULL_DISK

_ANSWER_SECONDS = 3.0
_AWAY = (ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.WRONG_AUTHORITY)
_EXPORT = (
    "'hetnode export FOLDER DIR' writes it for transformers; if each node has only some of the stages, name "
    "the folders of all."
)


def coordinator_text(folder: Path) -> str:
    """Of the finished run whose coordinator has `folder`: how it ended, and how to go on."""
    from coordinator.api.dashboard import command_for  # noqa: PLC0415  not for every 'hetnode status'

    events = read_events(folder / "metrics.jsonl")
    rounds = max((event["round"] for event in events if event["event"] == "decision"), default=0)
    lines = [f"The run in {folder} is finished{f': {rounds} rounds are decided' if rounds else ''}."]
    if losses := ", ".join(f"{each.last:.4f} (replica {each.index})" for each in history_of(events).replicas):
        lines.append(f"The last validation loss is {losses}.")
    lines.append(f"The model is in the folders of the run's nodes. {_EXPORT}")
    lines.append(f"Its pages: {command_for(folder)}")
    lines.append("To start another run, give another --folder, and the options of that run.")
    return "\n".join(lines)


def has_finished(folder: Path) -> bool:
    """Whether `folder` is that of a coordinator whose run is finished, as far as its metrics tell."""
    return any(event["event"] == "finished" for event in read_events(folder / "metrics.jsonl"))


def reason_of_silence(folder: Path) -> HetnodeError | None:
    """Why the coordinator that has `folder` does not answer: RUN_STARTED, DISK_FULL, COORDINATOR_UNREACHABLE.

    None where nothing on this machine tells.
    """
    from node.security.identity import is_in_use  # noqa: PLC0415  heavy, and only for a failure

    is_running, place = is_in_use(folder / "identity.key"), shlex.quote(str(folder))
    if has_finished(folder) and not is_running:
        cause = f"The run in {folder} is finished, and nobody takes part any more."
        remedy = f"'hetnode status {place}' says what it has reached, 'hetnode credit {place}' who took part."
        return HetnodeError(ErrorCode.RUN_STARTED, cause, remedy)
    if is_running and _is_full(folder):
        cause = f"The disk of {folder} is full, and the coordinator waits for space."
        return HetnodeError(ErrorCode.DISK_FULL, cause, "Make room there: the coordinator goes on by itself.")
    if is_running and not (folder / "address").exists():
        cause = f"The coordinator in {folder} starts, and does not listen yet."
        return HetnodeError(ErrorCode.COORDINATOR_UNREACHABLE, cause, "Ask again in some seconds.")
    if is_running:
        return None
    start = "swarm up --resume" if (folder / "nodes").is_dir() else "coordinator --folder"
    cause = f"The coordinator of the run in {folder} is not running."
    return HetnodeError(
        ErrorCode.COORDINATOR_UNREACHABLE, cause, f"Start it again: 'hetnode {start} {place}'."
    )


def _is_full(folder: Path) -> bool:
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
    except OSError as error:
        return error.errno in FULL_DISK
    return False


def node_text(known: RunCredentials) -> str | None:
    """What a node or a relay of this machine remembers of a run that was finished while it took part.

    None if it remembers nothing, or if its folder has been given to another run.
    """
    if not was_finished(known.folder):
        return None
    folder = node_folder_of(known.folder)
    if folder is None:
        return f"The run {known.run} is finished, and needs no relay any more."
    if run_in(folder) != known.run:
        return None
    return f"The run {known.run} is finished. This node's part of the model is in {folder}.\n{_EXPORT}"


def text_for(wanted: Destination, identity: Path) -> str | None:
    """What to say instead of joining: the run was finished, and no coordinator serves it any more.

    None where there is something to join, or where this machine does not know.
    """
    known, addresses = _known(wanted, identity)
    text = None if known is None else node_text(known)
    if known is None or text is None or not command_runner.run(_is_over(known, addresses)):
        return None
    return text


def _known(wanted: Destination, identity: Path) -> tuple[RunCredentials | None, list[str]]:
    """What the identity file holds for the run, in date or not, and where its coordinator may be."""
    if wanted.invite is not None:
        known = credentials.of_authority(identity, wanted.invite.pin)
        return known, sorted({wanted.invite.api} | ({known.api} if known else set()))
    folder = credentials.folder_of(identity, wanted.run)
    known = credentials.load(folder) if credentials.exist(folder) else None
    return known, [known.api] if known else []


async def _is_over(known: RunCredentials, addresses: list[str]) -> bool:
    for address in addresses:
        try:
            return (await fetch_status(address, known.tls, _ANSWER_SECONDS)).phase is RunPhase.FINISHED
        except HetnodeError as error:
            if error.code not in _AWAY:
                return False  # it refuses this node: the join says why
    return True


def text_of(run: str | None) -> str | None:
    """What ``hetnode status RUN`` says when nothing answers; None unless the run is known to be finished."""
    for folder in known_runs.coordinator_folders(run):
        if has_finished(folder):
            return coordinator_text(folder)
    texts = (node_text(known) for known in known_runs.memberships(run or ""))
    return next((text for text in texts if text is not None), None)
