"""A run that is named by the address of its page: it is shown, and this machine learns where to go."""

from __future__ import annotations

from os.path import exists

from node.command_runner import TerminalConsole
from node.here.known_runs import Destination, memberships
from node.net.run_page import fetch_page, page_url
from node.views.text import count
from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.run_page import RunPage, open_page


def published(text: str | None) -> Destination | None:
    """Where ``hetnode join`` goes by the page at `text`; None if `text` is no address of a page.

    Raises HetnodeError: BAD_ADDRESS, COORDINATOR_UNREACHABLE, BAD_REQUEST; NO_CREDENTIALS for a run that
    needs an invite, with the operator's words how to ask for one.
    """
    url = None if text is None or exists(text) else page_url(text)
    if url is None:
        return None
    page, invite = open_page(fetch_page(url))
    _show(page, url.split("/")[2])
    if any(memberships(page.run)):
        return Destination(None, page.run)
    if invite is not None:
        return Destination(invite)
    raise HetnodeError(
        ErrorCode.NO_CREDENTIALS,
        f"The run {page.run} takes members with an invite.",
        f"Ask for one: {page.contact or 'the operator of this page'}. Then type 'hetnode join INVITE'.",
    )


def _show(page: RunPage, host: str) -> None:
    console = TerminalConsole(stderr=True, highlight=False, soft_wrap=True)
    way = "what a newcomer sends counts after some good rounds" if page.invite else "by invite"
    for line in (
        f"run {page.run}, as {host} publishes it",
        *([f"- title: {page.title}"] if page.title else ()),
        f"- model: {count(page.parameters)} parameters",
        f"- rounds: {page.rounds_decided} of {page.rounds} are done",
        f"- members: {page.members} here now",
        f"- operator: who serves {host}{page.contact and f', contact: {page.contact}'}",
        f"- authority: {page.authority}",
        f"- entrance: {way}",
    ):
        console.print(line, markup=False)
