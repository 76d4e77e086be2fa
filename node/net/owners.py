"""A node tells its coordinator whose it is, where its user has an owner's key."""

from __future__ import annotations

import logging
from pathlib import Path

from node.net.coordinator_channel import CoordinatorChannel
from node.security.credentials import RunCredentials
from node.security.identity import Identity
from node.security.owner import former_file, load_owner
from protocol.errors import HetnodeError
from protocol.trust.public_name import shown_peer
from protocol.wire.operator_calls import NameOwner

log = logging.getLogger(__name__)


async def name_owner(credentials: RunCredentials, identity: Identity, file: Path | None) -> None:
    """Bind this node to the owner whose phrase is in `file`, if any. Never raises: credit can wait."""
    try:
        key = load_owner(file) if file is not None else None
        if file is None or key is None:
            return
        binding = key.bind(credentials.run, identity.peer, identity.sign, load_owner(former_file(file)))
        async with CoordinatorChannel(credentials.api, credentials.tls) as channel:
            await channel.ask(NameOwner(binding))
    except HetnodeError as error:
        log.warning("this node's credit goes to no owner: %s", error)
    else:
        log.info("this node's credit goes to the owner %s", shown_peer(key.owner))
