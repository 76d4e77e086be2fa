"""``hetnode owner``: whose the credit of this user's nodes is."""

from __future__ import annotations

import getpass
import sys
from typing import TYPE_CHECKING, Annotated

from node.cli.options import option
from node.cli.output import say
from node.command_runner import bad_option
from node.folder import disk_errors_reported

if TYPE_CHECKING:
    from protocol.trust.owner import OwnerKey


def owner(
    recover: Annotated[
        bool, option("Read the recovery phrase of an owner, from a terminal or standard input.", "--recover")
    ] = False,
) -> None:
    """Show the owner of this user's nodes, or make one: credit sums over its machines, also lost ones.

    Each node of this user names the owner when it joins. On another machine, or after a loss, --recover gives
    that user the same owner; nodes that had another one there go over to it. Everybody in a run sees the
    owner's id, which is the same in all runs.
    """
    from node.security.owner import former_file, keep_owner, load_owner, new_owner, owner_file  # noqa: PLC0415

    file = owner_file()
    known = load_owner(file) if not recover else None
    if known is not None:
        say(f"owner  {known.owner}\nfile   {file}: its content is the recovery phrase, a secret")
        return
    key = _recovered() if recover else new_owner()
    with disk_errors_reported(file.parent):
        keep_owner(key, file)
    say(f"owner  {key.owner}\nfile   {file}")
    if not recover:
        say(f"\nWrite this recovery phrase down. Who has it is this owner:\n\n    {key.phrase}\n")
    elif former_file(file).exists():
        say(f"The former phrase is in {former_file(file)}.")
    say("Nodes that run now name the owner when they join again.")


def _recovered() -> OwnerKey:
    """The key of the phrase that a person types, unseen, or that standard input has. Raises BAD_OPTION."""
    from protocol.trust.owner import OwnerKey  # noqa: PLC0415

    try:
        text = getpass.getpass("recovery phrase: ") if sys.stdin.isatty() else sys.stdin.readline(1024)
        return OwnerKey.read(text)
    except (ValueError, EOFError) as error:
        raise bad_option(
            f"This is no recovery phrase: {error}.", "Type the one that 'hetnode owner' has shown."
        ) from None
