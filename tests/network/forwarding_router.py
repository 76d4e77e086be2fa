"""A home's router that forwards ports on request: miniupnpd, which is in many real routers.

The Debian package miniupnpd-nftables is enough. The one for iptables needs the kernel's old tables.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.network.world import World, router_of
from tests.support.waiting import wait_until

_PROGRAM = "miniupnpd"
_TABLE, _CHAIN = "inet filter", "miniupnpd"


def missing() -> str:
    """Why no such router can run here; "" if it can."""
    absent = [name for name in (_PROGRAM, "nft") if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


@contextmanager
def forwarding(world: World, home: str, folder: Path, *, upnp: bool, nat_pmp: bool) -> Iterator[None]:
    """The router of `home` forwards ports by these protocols, within."""
    router = router_of(home)
    for hook, priority, kind, jump in (
        ("forward", "0", "filter", _CHAIN),
        ("prerouting", "-100", "nat", f"prerouting_{_CHAIN}"),
        ("postrouting", "100", "nat", f"postrouting_{_CHAIN}"),
    ):
        world.run(router, f"nft add table {_TABLE}")
        world.run(router, f"nft add chain {_TABLE} {jump}")
        attached = f"{{ type {kind} hook {hook} priority {priority} ; policy accept ; }}"
        world.run(router, f"nft add chain {_TABLE} {hook} {attached}")
        world.run(router, f"nft add rule {_TABLE} {hook} jump {jump}")
    # What the router itself has sent on passes its firewall, as in a real one.
    world.run(router, "iptables -I FORWARD -i wan -m conntrack --ctstate DNAT -j ACCEPT")
    settings = folder / f"{router}.conf"
    settings.write_text(
        "\n".join(
            (
                "ext_ifname=wan",
                "listening_ip=br0",
                f"enable_upnp={'yes' if upnp else 'no'}",
                f"enable_natpmp={'yes' if nat_pmp else 'no'}",
                "secure_mode=yes",
                "http_port=0",
                "uuid=11111111-2222-3333-4444-555555555555",
                "allow 1024-65535 192.168.1.0/24 1024-65535",
                "deny 0-65535 0.0.0.0/0 0-65535",
                "",
            )
        )
    )
    log = folder / f"{router}.log"
    command = [_PROGRAM, "-d", "-f", str(settings), "-P", str(folder / f"{router}.pid")]
    with log.open("wb") as output:
        process = subprocess.Popen(world.command(router, command), stdout=output, stderr=output)
    try:
        listens = "HTTP listening on port" if upnp else "Listening for NAT-PMP"
        wait_until(lambda: listens in log.read_text(), 30, log.read_text)
        yield
    finally:
        process.terminate()
        process.wait()


def forwarded(world: World, home: str) -> list[str]:
    """``address:port`` of every port that the router of `home` forwards, as its kernel has it."""
    rules = world.run(router_of(home), f"nft list chain {_TABLE} prerouting_{_CHAIN}").splitlines()
    return [line.rpartition("dnat ip to ")[2].split()[0] for line in rules if "dnat" in line]
