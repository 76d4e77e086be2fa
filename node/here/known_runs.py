"""What this machine knows of runs: which identity was let into which, and whose coordinator is here."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import exists, isfile
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_config_path, user_data_path

from node.command_runner import bad_option
from node.security import credentials
from node.security.credentials import Credentials, RunCredentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust import invite
from protocol.trust.invite import Invite
from protocol.trust.run_id import names_authority, spec_name_in
from protocol.trust.short_id import named_by

if TYPE_CHECKING:
    from node.security.identity import Identity


@dataclass(frozen=True)
class Destination:
    """The run to join: with an invite, or by its name and the credentials kept in `folder`, if given."""

    invite: Invite | None
    run: str = ""
    folder: Path | None = None


def _run_named(text: str, of_members: bool = False) -> str:
    """The run of this machine that `text` means by :func:`named_by`; a folder stays as it is.

    `of_members`: no folder of a coordinator is meant, which has the name of the run's specification.
    """
    if "/" in text or exists(text):
        return text
    ids = {path.name for path in user_config_path("hetnode").glob("peer-*.runs/*") if credentials.exist(path)}
    if of_members:
        return named_by(text, ids, "runs")
    here = {path.parent.parent.name for path in _coordinators().glob("*/coordinator/operator.pem")}
    if text not in here and (swarm := swarm_called(text)):
        return str(swarm)
    return text if text in here else named_by(text, ids | here - set(map(spec_name_in, ids)), "runs")


def swarm_called(name: str) -> Path | None:
    """The folder in ./runs of the swarm of this name; None where there is none."""
    folder = Path("runs", name)
    return folder if "/" not in name and (folder / "operator.pem").exists() else None


def destination(text: str | None, invite_file: Path | None = None) -> Destination:
    """Where ``hetnode join`` and ``hetnode relay`` go; `text` may name the file of an invite, too.

    Raises BAD_OPTION unless exactly one argument is given; BAD_INVITE.
    """
    if (text is None) == (invite_file is None):
        raise bad_option(
            "Either an invite, or the name of a run that this machine was in before, is needed.",
            "Ask the operator of a run for an INVITE: give it, the file that holds it, https://HOST/ or RUN. "
            "'hetnode swarm up' needs neither: it trains on this machine alone.",
        )
    if text is not None and invite.is_invite(text):
        return Destination(invite.decode(text))
    file = str(invite_file or text)
    if invite_file is not None or file == "-" or isfile(file):
        return Destination(invite.decode(_first_bytes(Path(file))))
    assert text is not None
    folder = Path(text)
    if credentials.exist(folder):
        return Destination(None, credentials.load(folder).run, folder)
    return Destination(None, _run_named(text, of_members=True))


def identity_for(wanted: Destination, given: Path | None, relays: bool = False) -> Identity:
    """The identity with which to join: `given`, or one of this machine's that no live node uses.

    With an invite, one that is already in the run comes first: it needs no use of the invite. `relays`: it is
    for a relay, which takes no identity of a node, nor a node one of a relay.

    Raises HetnodeError: NO_CREDENTIALS, ALREADY_ACTIVE.
    """
    from node.security.identity import open_free_identity, open_identity  # noqa: PLC0415

    if given is None and wanted.folder is not None:
        given = wanted.folder.parent.with_suffix(".key")
    if given is not None:
        return open_identity(given)
    if wanted.invite is not None:
        return open_free_identity(user_config_path("hetnode"), _let_in(wanted.invite.pin, relays))
    known = list(_identities_in(wanted.run))
    for path in known:
        try:
            return open_identity(path)
        except HetnodeError as error:
            if error.code is not ErrorCode.ALREADY_ACTIVE or path == known[-1]:
                raise
    raise _unknown(wanted.run)


def operator_or_member(text: str | None) -> tuple[str, Credentials]:
    """API address of a run, and credentials that may ask for its status. Raises NO_CREDENTIALS.

    `text` is the name of the run, the folder of its coordinator or of a node's credentials, or None for the
    only coordinator of this machine.
    """
    if text is None:
        return credentials.load_operator(only_coordinator())
    folder = _operator_folder(text)
    known = credentials.load_operator(folder) if folder else member(text)
    if known is None:
        raise _unknown(text)
    return known


def operator_folder(text: str | None) -> Path:
    """The folder of the coordinator of a run, by `text` as :func:`operator_or_member` reads it.

    Raises HetnodeError: BAD_OPTION, NO_CREDENTIALS.
    """
    folder = only_coordinator() if text is None else _operator_folder(text)
    if folder is None:
        raise HetnodeError(
            ErrorCode.NO_CREDENTIALS,
            f"The folder of the coordinator of {text!r:.80} is not on this machine.",
            "Only the operator may do this: give the folder of the coordinator, as the user who started it.",
        )
    return folder


def _operator_folder(text: str) -> Path | None:
    """As :func:`operator_folder`; None if no coordinator of that run has its folder here."""
    text = _run_named(text)
    for folder in (Path(text), _coordinators() / text / "coordinator"):
        if (folder / "operator.pem").exists():
            return folder
    # Its folder has the name of the specification: it was made before there was an authority.
    usual = _coordinators() / spec_name_in(text) / "coordinator"
    is_here = (usual / "operator.pem").exists()
    return usual if is_here and names_authority(text, credentials.load_operator(usual)[1].pin) else None


def member(run: str) -> tuple[str, Credentials] | None:
    """API address of a run and credentials of a peer of this machine; None if there are none here."""
    known = next(memberships(run), None)
    return None if known is None else (known.api, known.tls)


def node_name(folder: Path) -> str:
    """How commands call the node of these credentials, by its key: ``peer-0``."""
    return folder.parent.name.removesuffix(".runs")


def memberships(run: str) -> Iterator[RunCredentials]:
    """What the peers of this machine hold for a run: that in the folder `run`, then all for that name.

    `run` may be a :func:`node_name`, too.
    """
    run = _run_named(run, of_members=True)
    own = sorted(user_config_path("hetnode").glob(f"{run}.runs/*")) if re.fullmatch(r"peer-\d+", run) else []
    for folder in (Path(run), *own, *(credentials.folder_of(path, run) for path in _identities_in(run))):
        if credentials.exist(folder):
            yield credentials.load(folder)


def coordinator_folders(run: str | None) -> Iterator[Path]:
    """Where the coordinator of `run` may have its folder, as :func:`operator_or_member` reads it."""
    if run is None:
        yield from found if len(found := _folders_here()) == 1 else ()
        return
    run = _run_named(run)
    for folder in (Path(run), *(_coordinators() / name / "coordinator" for name in (run, spec_name_in(run)))):
        if (folder / "operator.pem").exists():
            yield folder


def coordinator_folder(run: str | None, file: str = "") -> Path | None:
    """The folder with `file` of the coordinator of `run`, perhaps a copy without its operator's files."""
    folders = [*coordinator_folders(run), *([Path(run)] if run else [])]
    return next((folder for folder in folders if (folder / file).exists()), None)


def runs_here() -> list[str]:
    """The runs that this machine was let into; if there are none, the folders of its coordinators.

    Of several runs, those whose certificates are still good, if there are any. No swarm that has ended.
    """
    good: dict[str, bool] = {}
    for folder in sorted(user_config_path("hetnode").glob("peer-*.runs/*")):
        if credentials.exist(folder):
            is_good = credentials.load(folder).tls.expires > time.time()
            good[folder.name] = good.get(folder.name, False) or is_good
    if not good:
        return [str(folder) for folder in _folders_here(with_ended=False)]
    return [run for run, is_good in good.items() if is_good] or list(good)


def no_coordinator(run: str | None) -> HetnodeError:
    """The refusal of a run whose coordinator is elsewhere."""
    return bad_option(
        f"No coordinator of {run} has its folder on this machine.",
        "Name the folder of a coordinator, on the machine on which it runs.",
    )


def only_coordinator() -> Path:
    """The folder of the one coordinator of :func:`_folders_here`. Raises BAD_OPTION."""
    found = _folders_here()
    if not found:
        raise bad_option(
            f"No coordinator has its folder in {_coordinators()} or ./runs.",
            "Start one with 'hetnode coordinator', or name the folder of the one that you mean.",
        )
    if len(found) > 1:
        raise bad_option(
            f"There are {len(found)} coordinators here.",
            "Name the folder of the one that you mean, with --run or --folder where a command has it: "
            f"{', '.join(map(str, found))}.",
        )
    return found[0]


def has_coordinators() -> bool:
    """Whether any coordinator has its folder here, running or not."""
    return bool(_folders_here())


def _folders_here(with_ended: bool = True) -> list[Path]:
    """The folders of coordinators that were started without --folder, and of the swarms in ./runs.

    Where coordinators run now, only theirs; else, `with_ended`, also those of swarms, which do not come back.
    """
    from node.security.identity import is_in_use  # noqa: PLC0415

    usual = [path.parent for path in _coordinators().glob("*/coordinator/operator.pem")]
    swarms = [path.parent for path in Path("runs").glob("*/operator.pem")]
    running = [folder for folder in (*usual, *swarms) if is_in_use(folder / "identity.key")]
    return sorted(running or [*usual, *(swarms if with_ended else ())])


def _coordinators() -> Path:
    return user_data_path("hetnode") / "runs"


def _identities_in(run: str) -> Iterator[Path]:
    """The key files of this user that hold credentials for `run`."""
    if "/" in run or run in ("", ".", ".."):
        return
    for path in sorted(user_config_path("hetnode").glob("peer-*.key")):
        if credentials.exist(credentials.folder_of(path, run)):
            yield path


def _let_in(pin: bytes, relays: bool) -> list[Path]:
    """The key files of this user with credentials for the run of this authority; first those in date."""
    now, expires = time.time(), {}
    for path in sorted(user_config_path("hetnode").glob("peer-*.key")):
        known = credentials.of_authority(path, pin)
        if known is not None and known.is_of_relay is relays:
            expires[path] = known.tls.expires
    return sorted(expires, key=lambda path: expires[path] <= now)


def _first_bytes(file: Path) -> str:
    """As much of `file`, or for "-" of standard input, as an invite can have."""
    most = invite.MAX_TEXT + 2
    try:
        if file == Path("-"):
            return sys.stdin.readline(most)
        with file.open(errors="replace") as opened:
            return opened.read(most)
    except OSError as error:
        raise bad_option(f"The invite file cannot be read: {error}.", "Check its name.") from None


def _unknown(run: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.NO_CREDENTIALS,
        f"This machine holds no credentials for the run {run!r:.80}.",
        "Ask the run's operator for an invite, and give it in the place of the name.",
    )
