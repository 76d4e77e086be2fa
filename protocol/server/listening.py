"""The socket of a service whose address the user chose with an option of the command."""

from __future__ import annotations

import errno
import socket

from protocol.errors import ErrorCode, HetnodeError
from protocol.server.gateway import listen_on
from protocol.trust.host_port import split_host_port


def listen_for(service: str, option: str, address: str, example: str) -> socket.socket:
    """A socket that listens at `address`, the HOST:PORT that the user gave with `option`.

    Args:
        service: in the messages, such as "the dashboard".
        example: an address that would do.

    Raises HetnodeError BAD_ADDRESS, PORT_IN_USE.
    """
    try:
        return listen_on(*split_host_port(address))
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise HetnodeError(
                ErrorCode.PORT_IN_USE,
                f"Another program already listens on {address}, so {service} cannot be served there.",
                f"Stop it, or give {option} another HOST:PORT; port 0 takes a free port.",
            ) from None
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        raise HetnodeError(
            ErrorCode.BAD_ADDRESS,
            f"{service.capitalize()} cannot be served on '{address}': {why}.",
            f"Give {option} an address of this machine, like {example}.",
        ) from None
