"""What the operator of a run tells everyone about it: a small document at a well-known path of its dashboard.

It says where a run is, and nothing in it is secret. Who joins pins the authority that it names, as an invite
pins one, so only the server of the document must be trusted, and only the first time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from protocol.errors import HetnodeError, faulty_peer
from protocol.trust.endpoints import check_endpoint
from protocol.trust.invite import MAX_TEXT, OPEN_INVITE, Invite, decode
from protocol.trust.run_id import names_authority
from protocol.wire.record_codec import Bounds, RecordCodec

PATH = "/.well-known/hetnode.json"
MOST_BYTES = 8192
MOST_CONTACT, MOST_TITLE = 300, 100


@dataclass(frozen=True)
class RunPage:
    """A run, for those who do not take part yet.

    Attributes:
        run: its id.
        authority: sha-256 of the DER certificate of its authority, hex.
        members: peers that are here now.
        contact: how to ask for an invite, in the words of the operator.
        invite: that of an open run, which is for everyone; "" where an invite must be asked for.
        title: of the run, in the words of the operator, or "".
    """

    run: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    authority: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    parameters: Annotated[int, Field(ge=0)]
    rounds: Annotated[int, Field(ge=0)]
    rounds_decided: Annotated[int, Field(ge=0)]
    members: Annotated[int, Field(ge=0)]
    contact: Annotated[str, Field(max_length=MOST_CONTACT)] = ""
    invite: Annotated[str, Field(max_length=MAX_TEXT)] = ""
    title: Annotated[str, Field(max_length=MOST_TITLE)] = ""


RUN_PAGE = RecordCodec[RunPage](RunPage, Bounds(MOST_BYTES, 256), ignores_unknown=True)


def open_page(data: bytes) -> tuple[RunPage, Invite | None]:
    """The document, and the invite in that of an open run.

    Raises BAD_REQUEST for other bytes, an invite that is not for everyone, and one of another authority.
    """
    page = RUN_PAGE.decode(data)
    try:
        pin, found = bytes.fromhex(page.authority), decode(page.invite) if page.invite else None
        if not names_authority(page.run, pin) or (found and (found.id, found.pin) != (OPEN_INVITE, pin)):
            raise ValueError("it names several authorities, or holds somebody's own invite")
        for address in (found.api, found.enrollment) if found else ():
            check_endpoint(address)
    except (ValueError, HetnodeError) as error:
        raise faulty_peer(f"The page of this run contradicts itself: {error}.") from None
    return page, found
