"""What the coordinator's folder says about its dashboard: where it is, and the token of its readers."""

from __future__ import annotations

import secrets
from pathlib import Path

from protocol.trust.private_file import write_private

_URL_FILE, _TOKEN_FILE = "dashboard-url", "dashboard-token"
_TOKEN_BYTES = 32
_NEEDS_TOKEN = "needs a token"


def write_url(folder: Path, url: str, needs_token: bool) -> None:
    """Tell others where the dashboard is."""
    (folder / _URL_FILE).write_text(f"{url}\n{_NEEDS_TOKEN if needs_token else ''}\n")


def forget_url(folder: Path) -> None:
    """Nothing is served any more."""
    (folder / _URL_FILE).unlink(missing_ok=True)


def url_in(folder: Path) -> str | None:
    """The address of the dashboard, without the token; None if none is served."""
    found = _lines(folder)
    return found[0] if found else None


def url_for_readers(folder: Path) -> str | None:
    """As :func:`url_in`, with the token where it is needed. It is behind the #, which no browser sends."""
    found = _lines(folder)
    if found[1:] != [_NEEDS_TOKEN]:
        return found[0] if found else None
    return f"{found[0]}login#{token_of(folder)}"


def token_of(folder: Path) -> str:
    """The token of the run in `folder`, in a file for its owner alone; the first call makes it."""
    path = folder / _TOKEN_FILE
    if not path.exists():
        write_private(path, f"{secrets.token_urlsafe(_TOKEN_BYTES)}\n".encode())
    return path.read_text().strip()


def _lines(folder: Path) -> list[str]:
    path = folder / _URL_FILE
    return path.read_text().strip().splitlines() if path.exists() else []
