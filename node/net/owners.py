"""A node tells its coordinator whose it is, where its user has an owner's key."""

from __future__ import annotations

import logging
from pathlib import Path

from node.net.coordinator_client import CoordinatorClient
from node.security.identity import Identity
from node.security.owner import former_file, load_owner
from protocol.errors import HetnodeError
from protocol.trust.public_name import shown_peer
from protocol.wire.operator_calls import NameOwner

log = logging.getLogger(__name__)

_SECONDS = 10.0


async def name_owner(coordinator: CoordinatorClient, identity: Identity, file: Path | None) -> None:
    """Bind this node to the owner whose phrase is in `file`, if any. Never raises: credit can wait."""
    try:
        key = load_owner(file) if file is not None else None
        if file is None or key is None:
            return
        run, former = coordinator.credentials.run, load_owner(former_file(file))
        binding = key.bind(run, identity.peer, identity.sign, former)
        await coordinator.ask(NameOwner(binding), _SECONDS)
    except HetnodeError as error:
        log.warning("this node's credit goes to no owner: %s", error)
    else:
        log.info("this node's credit goes to the owner %s", shown_peer(key.owner))
