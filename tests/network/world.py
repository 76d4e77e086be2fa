"""A small internet in network namespaces: public hosts on one bridge, and homes behind their own NAT routers.

    with World(public=["coord", "dc"], homes={"h1": Home(), "h2": Home(Nat.RANDOM)}) as world:
        subprocess.Popen(world.command("h1", ["hetnode", "join", ...]))

Public hosts are 44.10.0.1, 44.10.0.2, and so on, and 2a0e:1234::1, and so on. They have no route to any
private network. A name leads to both addresses of its host. Every home has IPv4 alone and is in its own
192.168.1.0/24, as homes are; home number i is 192.168.1.(10 + i) unless it says otherwise. A router lets
nothing in that was not asked for. Needs root, ip, tc, iptables and util-linux: see :func:`missing`.

203.0.113.0/24 and 2001:db8::/32 would be the networks for examples, but libp2p takes them for private and
announces nothing in them.
"""

from __future__ import annotations

import enum
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

_PUBLIC, _PUBLIC6 = "44.10.0", "2a0e:1234:"
_ROUTER = "192.168.1.1"
_FIRST_HOME = 101  # last byte of the public address of the first home's router


class Nat(enum.Enum):
    """How a router chooses the public port of an outgoing connection."""

    MASQUERADE = "masquerade"  # the port of the home itself, if it is free
    RANDOM = "random"  # another port for every connection, as symmetric NAT has


@dataclass(frozen=True)
class Home:
    """A home behind a router.

    Args:
        address: its private address; "" gives every home another one.
        ports: the router lets out TCP to these ports only; empty lets out all.
    """

    nat: Nat = Nat.MASQUERADE
    address: str = ""
    ports: tuple[int, ...] = ()


@cache
def missing() -> str:
    """Why no world can be built on this machine; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "tc", "iptables", "unshare", "nsenter") if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    tried = subprocess.run(
        ["unshare", "--net", "iptables", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE"],
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        f"this kernel gives no network namespace with NAT: {tried.stderr.strip()}" if tried.returncode else ""
    )


class World:
    """Hosts by name. Use as a context manager.

    Args:
        names: of public hosts, such as {"coord.test": "coord"}.

    Each namespace is held by one process, which ends with this one by whatever signal: no namespace remains.

    Attributes:
        address: the address of every host in its own network.
        address6: the IPv6 address of every public host.
        seen_as: the address from which the public hosts see a host: its own, or that of its router.
    """

    def __init__(
        self,
        public: Sequence[str],
        homes: Mapping[str, Home] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.public, self.homes = tuple(public), dict(homes or {})
        self._names = dict(names or {})
        self.address: dict[str, str] = {}
        self.address6: dict[str, str] = {}
        self.seen_as: dict[str, str] = {}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._line: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """`command` as it runs on `host`. The process that it starts is the command itself."""
        space = f"/proc/{self._holders[host].pid}/ns"
        # For the names; a process that enters it without --wd works in its root.
        mounts = [f"--mount={space}/mnt", f"--wdns={Path.cwd()}"] if self._names else []
        return ["nsenter", f"--net={space}/net", *mounts, "--", *command]

    def run(self, host: str, line: str) -> str:
        """What a command line prints on `host`; RuntimeError with its last output if it fails."""
        return _run(*self.command(host, line.split()))

    def shape(self, host: str, mbit: float, delay_ms: float = 0.0, down: float = 0.0) -> None:
        """Give a host's line this rate in each direction, and a delay, which needs the kernel's netem.

        `down`: Mb/s that it receives, if these are others than it sends.
        """
        for (end, device), each in zip(self._line[host], (mbit, down or mbit), strict=True):
            rate = f"{each:g}mbit"
            limits = f"netem rate {rate} delay {delay_ms:g}ms limit 1000" if delay_ms else ""
            self.run(
                end,
                f"tc qdisc replace dev {device} root {limits or f'tbf rate {rate} burst 20kb latency 100ms'}",
            )

    def unshape(self, host: str) -> None:
        """Take back :meth:`shape`."""
        for end, device in self._line[host]:
            self.run(end, f"tc qdisc del dev {device} root")

    def unplug(self, host: str) -> None:
        """Take a host, or a home with its router, off the bridge. It is not told: its own devices stay up."""
        end, device = self._line[host][1]
        self.run(end, f"ip link set {device} down")

    def plug(self, host: str) -> None:
        """Take back :meth:`unplug`."""
        end, device = self._line[host][1]
        self.run(end, f"ip link set {device} up")

    def move_home(self, home: str, address: str) -> None:
        """A new lease of the router: the home's address is `address`, its open connections are dead."""
        self.run(home, f"ip address del {self.address[home]}/24 dev lan")
        self.run(home, f"ip address add {address}/24 dev lan")
        self.run(home, f"ip route replace default via {_ROUTER}")
        self.address[home] = address

    def move_router(self, home: str, address: str) -> None:
        """A new lease of the provider: the router has the public `address`, open connections are dead."""
        router = router_of(home)
        self.run(router, f"ip address del {self.seen_as[home]}/24 dev wan")
        self.run(router, f"ip address add {address}/24 dev wan")
        self.seen_as[home] = address

    def move_public(self, host: str, address: str) -> None:
        """A public host gets another address; its open connections are dead."""
        self.run(host, f"ip address del {self.address[host]}/24 dev wan")
        self.run(host, f"ip address add {address}/24 dev wan")
        self.address[host] = self.seen_as[host] = address

    def drop(self, host: str, version: int) -> None:
        """A public host loses its address of IP `version`; connections from there are dead."""
        self.run(host, f"ip address del {self._with_length(host, version)} dev wan")

    def restore(self, host: str, version: int) -> None:
        """Take back :meth:`drop`."""
        self.run(
            host, f"ip address add {self._with_length(host, version)} dev wan{' nodad' * (version == 6)}"
        )

    def _with_length(self, host: str, version: int) -> str:
        return f"{self.address[host]}/24" if version == 4 else f"{self.address6[host]}/64"

    def carry(self, host: str, home: str, address: str) -> None:
        """A public host is carried into the network of a home, where it has the private `address`."""
        self.run(host, "ip link del wan")
        self._plug(host, address, router_of(home), f"c-{self.public.index(host)}")
        self.run(host, f"ip route add default via {_ROUTER}")
        self.address[host], self.seen_as[host] = address, self.seen_as[home]

    def forward(self, home: str, port: int) -> None:
        """The owner's port forwarding: the router sends `port` of its public address on to the home."""
        router, target = router_of(home), f"{self.address[home]}:{port}"
        self.run(router, f"iptables -t nat -A PREROUTING -i wan -p tcp --dport {port} -j DNAT --to {target}")
        self.run(router, f"iptables -I FORWARD -i wan -p tcp --dport {port} -j ACCEPT")

    def _build(self) -> None:
        self._namespace("internet")
        self.run("internet", "ip link add name br0 type bridge")
        self.run("internet", "ip link set br0 up")
        for number, host in enumerate(self.public, 1):
            self._namespace(host)
            self._plug(host, f"{_PUBLIC}.{number}", "internet", f"p-{number}")
            self.address[host] = self.seen_as[host] = f"{_PUBLIC}.{number}"
            self.address6[host] = f"{_PUBLIC6}:{number}"
            self.restore(host, 6)
            self._line[host] = ((host, "wan"), ("internet", f"p-{number}"))
        for number, (name, home) in enumerate(self.homes.items()):
            self._build_router(number, name, home)
            self._namespace(name)
            self.address[name] = home.address or f"192.168.1.{10 + number}"
            self._plug(name, self.address[name], router_of(name), f"h-{number}", device="lan")
            self.run(name, f"ip route add default via {_ROUTER}")

    def _build_router(self, number: int, name: str, home: Home) -> None:
        router, port = router_of(name), f"r-{number}"
        self._namespace(router)
        self.run(router, "sysctl -qw net.ipv4.ip_forward=1")  # else inherited from the machine
        self.seen_as[name] = f"{_PUBLIC}.{_FIRST_HOME + number}"
        self._plug(router, self.seen_as[name], "internet", port)
        self._line[name] = ((router, "wan"), ("internet", port))
        self.run(router, "ip link add name br0 type bridge")
        self.run(router, f"ip address add {_ROUTER}/24 dev br0")
        self.run(router, "ip link set br0 up")
        random = " --random" if home.nat is Nat.RANDOM else ""
        self.run(router, f"iptables -t nat -A POSTROUTING -o wan -j MASQUERADE{random}")
        # The private address of another home is unreachable, as on the internet.
        refuse = "-j REJECT --reject-with icmp-net-unreachable"
        self.run(router, f"iptables -A FORWARD -o wan -d 192.168.0.0/16 {refuse}")
        for chain in ("INPUT", "FORWARD"):
            answers = "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
            self.run(router, f"iptables -A {chain} -i wan {answers}")
            self.run(router, f"iptables -A {chain} -i wan -j DROP")
        if home.ports:
            ports = ",".join(map(str, home.ports))
            self.run(router, f"iptables -A FORWARD -o wan -p tcp -m multiport ! --dports {ports} -j REJECT")
            self.run(router, "iptables -A FORWARD -o wan -p udp -j REJECT")

    def _namespace(self, name: str) -> None:
        mounts, bind = ["--mount"] * bool(self._names), ""
        if self._names:
            bind = f"mount --bind {self._hosts_file()} /etc/hosts && "
        holder = subprocess.Popen(
            ["unshare", "--net", *mounts, "--", "sh", "-c", f"{bind}echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert holder.stdin is not None
        assert holder.stdout is not None
        # The end of its input ends `cat`, and the kernel closes our end with our process.
        self._stack.callback(holder.stdout.close)
        self._stack.callback(holder.wait)
        self._stack.callback(holder.stdin.close)
        holder.stdout.readline()  # it is in its namespace
        self._holders[name] = holder
        self.run(name, "ip link set lo up")

    def _hosts_file(self) -> Path:
        """As /etc/hosts, with the names of this world."""
        folder = self._stack.enter_context(TemporaryDirectory())
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for name, host in self._names.items():
            number = self.public.index(host) + 1
            lines += [f"{_PUBLIC}.{number} {name}", f"{_PUBLIC6}:{number} {name}"]
        file = Path(folder, "hosts")
        file.write_text("\n".join(lines) + "\n")
        return file

    def _plug(self, host: str, address: str, switch: str, port: str, device: str = "wan") -> None:
        """Connect `host` to the bridge of `switch` by a cable with the ends `device` and `port`."""
        here, there = (self._holders[name].pid for name in (host, switch))
        _run(
            *f"ip link add name {device} netns {here} type veth peer name {port} netns {there}".split(),
        )
        self.run(switch, f"ip link set {port} master br0")
        self.run(switch, f"ip link set {port} up")
        self.run(host, f"ip address add {address}/24 dev {device}")
        self.run(host, f"ip link set {device} up")


def router_of(home: str) -> str:
    """The name of its router, which is a host of its own."""
    return f"{home}-router"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
