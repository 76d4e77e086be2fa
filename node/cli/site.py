"""``hetnode site``: the public page of a run as files for a web host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from node.cli.output import say
from node.command_runner import bad_option
from node.extras import require_for_dashboard
from node.folder import disk_errors_reported
from node.here import known_runs
from protocol.errors import HetnodeError
from protocol.wire.run_page import RunPage, open_page


def site(
    run: Annotated[
        str, typer.Argument(help="A run whose coordinator is on this machine, or that coordinator's folder.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; a cron job may do it again.")],
) -> None:
    """Write the public page of a run as files for any web host, and its content as JSON.

    The coordinator may run or not. How to join is on it while a coordinator with --open or --contact runs.
    """
    from coordinator.store.log_copy import LOG_FILE  # noqa: PLC0415

    require_for_dashboard()
    from coordinator.ops.dashboard.site import JSON_FILE, PAGE_FILE, write_site  # noqa: PLC0415

    if (folder := known_runs.coordinator_folder(run, LOG_FILE)) is None:
        raise known_runs.no_coordinator(run)
    own, secret = out.resolve(), folder.resolve()
    if own.is_relative_to(secret) or secret.is_relative_to(own):
        raise bad_option(f"{out} is in or around {folder}, which has secrets.", "Name another.")
    if (out / PAGE_FILE).exists() and not (out / JSON_FILE).exists():
        raise bad_option(f"{out / PAGE_FILE} was not written by this command.", "Name another folder.")
    with disk_errors_reported(out):
        found = write_site(folder, out, _published(folder))
    say(f"{found['title']}, after {found['rounds_decided']} rounds: {out / PAGE_FILE}")


def _published(folder: Path) -> RunPage | None:
    """What the coordinator of `folder` publishes now; None where it does not run, or publishes nothing."""
    from coordinator.api.dashboard import url_in  # noqa: PLC0415
    from node.net.run_page import fetch_page, page_url  # noqa: PLC0415

    url = url_in(folder)
    address = page_url(url) if url else None
    if address is None:
        return None
    try:
        return open_page(fetch_page(address))[0]
    except HetnodeError:
        return None
