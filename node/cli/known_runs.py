"""What this machine knows of runs: which identity was let into which, and whose coordinator is here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_config_path, user_data_path

from node.security import credentials
from node.security.credentials import Credentials
from node.security.identity import Identity, open_free_identity, open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust import invite
from protocol.trust.invite import Invite


@dataclass(frozen=True)
class Destination:
    """The run to join: with an invite, or by its name and the credentials kept in `folder`, if given."""

    invite: Invite | None
    run: str = ""
    folder: Path | None = None


def destination(text: str | None, invite_file: Path | None) -> Destination:
    """What the argument and the option of ``hetnode join`` mean together.

    Raises:
        HetnodeError: BAD_OPTION unless exactly one of them is given; BAD_INVITE.
    """
    if (text is None) == (invite_file is None):
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            "Either an invite, or the name of a run that this machine was in before, is needed.",
            "Type 'hetnode join INVITE', or 'hetnode join --invite-file FILE', or 'hetnode join RUN'.",
        )
    if invite_file is not None:
        return Destination(invite.decode(_first_bytes(invite_file)))
    assert text is not None
    if invite.is_invite(text):
        return Destination(invite.decode(text))
    folder = Path(text)
    if credentials.exist(folder):
        return Destination(None, credentials.load(folder).run, folder)
    return Destination(None, text)


def identity_for(wanted: Destination, given: Path | None) -> Identity:
    """The identity with which to go there: `given`, or one of this machine's that no live node uses.

    Raises:
        HetnodeError: NO_CREDENTIALS, ALREADY_ACTIVE.
    """
    if given is None and wanted.folder is not None:
        given = wanted.folder.parent.with_suffix(".key")
    if given is not None:
        return open_identity(given)
    if wanted.invite is not None:
        return open_free_identity(user_config_path("hetnode"))
    known = list(_identities_in(wanted.run))
    for path in known:
        try:
            return open_identity(path)
        except HetnodeError as error:
            if error.code is not ErrorCode.ALREADY_ACTIVE or path == known[-1]:
                raise
    raise _unknown(wanted.run)


def operator_or_member(text: str | None) -> tuple[str, Credentials]:
    """API address of a run, and credentials that may ask for its status.

    Args:
        text: name of the run, folder of its coordinator or of a node's credentials, or None for the only
            coordinator of this machine.

    Raises:
        HetnodeError: NO_CREDENTIALS.
    """
    if text is None:
        return credentials.load_operator(only_coordinator())
    for folder in (Path(text), _coordinators() / text / "coordinator"):
        if (folder / "operator.pem").exists():
            return credentials.load_operator(folder)
    for folder in (Path(text), *(credentials.folder_of(path, text) for path in _identities_in(text))):
        if credentials.exist(folder):
            known = credentials.load(folder)
            return known.api, known.tls
    raise _unknown(text)


def only_coordinator() -> Path:
    """The folder of the one coordinator that was started here without --folder.

    Raises:
        HetnodeError: BAD_OPTION where there is none, or several.
    """
    found = [path.parent for path in _coordinators().glob("*/coordinator/address")]
    if len(found) != 1:
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            f"{len(found) or 'No'} coordinators have their folders in {_coordinators()}.",
            "Name the folder of the one that you mean.",
        )
    return found[0]


def _coordinators() -> Path:
    return user_data_path("hetnode") / "runs"


def _identities_in(run: str) -> Iterator[Path]:
    """The key files of this user that hold credentials for `run`."""
    if "/" in run or run in ("", ".", ".."):
        return
    for path in sorted(user_config_path("hetnode").glob("peer-*.key")):
        if credentials.exist(credentials.folder_of(path, run)):
            yield path


def _first_bytes(file: Path) -> str:
    """As much of `file`, or for "-" of standard input, as an invite can have."""
    most = invite.MAX_TEXT + 2
    try:
        if file == Path("-"):
            return sys.stdin.readline(most)
        with file.open(errors="replace") as opened:
            return opened.read(most)
    except OSError as error:
        raise HetnodeError(
            ErrorCode.BAD_OPTION, f"The invite file cannot be read: {error}.", "Check --invite-file."
        ) from None


def _unknown(run: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.NO_CREDENTIALS,
        f"This machine holds no credentials for the run {run!r:.80}.",
        "Ask the run's operator for an invite and type 'hetnode join INVITE'.",
    )
