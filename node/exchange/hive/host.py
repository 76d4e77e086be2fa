"""The hivemind host: a process that only forks, watches and calls hivemind's processes.

``python -m node.exchange.hive.host FD`` answers the calls of
:class:`node.exchange.hive.host_process.HostProcess`.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from cryptography import x509
from hivemind.utils.asyncio import _AsyncContextWrapper
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.mpfuture import MPFuture
from hivemind.utils.multiaddr import Multiaddr

from node.exchange.hive import records
from node.exchange.hive.arbiter import HostedArbiter
from node.exchange.hive.authorizer import CertificateAuthorizer, signer_of
from node.exchange.hive.averager import SparseAverager
from node.exchange.hive.calls import (
    AVERAGER_REQUESTS,
    Admit,
    ArbitratePayload,
    DhtJoined,
    DialPeers,
    DropConnections,
    ForgetPayloads,
    HostArbiter,
    HostStages,
    JoinDht,
    Lookup,
    Publish,
    Wake,
)
from node.exchange.hive.clock import correct_dht_time
from node.exchange.hive.dht import HostedDHT, Whom
from node.exchange.hive.dht_protocol import node_id_of, use_bounded_protocol
from node.exchange.hive.lifetime import kill_descendants
from node.exchange.hive.public_port import announced_addresses, listen
from node.exchange.hive.stream_calls import limit_messages
from node.exchange.hive.values import MAX_VALUE_BYTES, limit_values
from node.ipc.channel import serve
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.interfaces import own_sources
from protocol.server.terminal import log_as
from protocol.trust.endpoints import check_multiaddress
from protocol.trust.envelope import Signer
from protocol.types import PeerId, Verdict
from protocol.wire.typed_calls import Call, Handler, Reply, encode_request, handler, name_of

log = logging.getLogger(__name__)
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames this level for the whole process

_CALL_THREADS = 128
_WATCH_SECONDS = 1.0
MOST_P2PD_BYTES = 768 << 20
"""Of p2pd's resident memory. It takes 40 to 200 MB at work; only a flood of calls takes more."""


class Averagers:
    """The averagers of the hosted stages, and the allow list that all of them share.

    Several threads call this. Each averager either starts with the newest allow list or receives it later.
    """

    def __init__(self) -> None:
        self.by_stage: dict[int, SparseAverager] = {}
        self._allow_list: tuple[PeerId, ...] = ()
        self._lock = threading.Lock()  # protects both

    def start(
        self,
        stages: Iterable[int],
        fork: Callable[[int, Sequence[PeerId]], SparseAverager],
        deadline: float,
    ) -> None:
        """Start an averager for each stage by `fork` (stage, allow list), and wait until all are ready."""
        ends = time.monotonic() + deadline
        for stage in stages:
            with self._lock:  # no new allow list may come between the fork and the entry in the table
                self.by_stage[stage] = fork(stage, self._allow_list)
        for averager in self.by_stage.values():
            averager.wait_until_ready(ends - time.monotonic())

    def admit(self, request: Admit) -> None:
        """Replace the allow list of every averager, and of those that start later."""
        with self._lock:
            self._allow_list = request.peers
            averagers = list(self.by_stage.values())
        for averager in averagers:
            averager.calls.call(encode_request(request))


class Host:
    """Answers each call of the main process (:mod:`node.exchange.hive.calls`) with one method."""

    _folder: Path
    _run: str
    _sign: Signer
    _dht: HostedDHT
    _p2pd: psutil.Process
    _arbiter: HostedArbiter | None = None

    def __init__(self) -> None:
        self._averagers = Averagers()
        self._admitting = threading.Lock()  # only differences are sent, so their order counts
        self._ending = threading.Event()

    def join_dht(self, request: JoinDht) -> DhtJoined:
        entry = request.entry
        correct_dht_time(entry.clock_offset)  # first: every process that is forked later inherits it
        self._folder, self._run = request.folder, entry.run
        self._sign = signer_of(request.identity)
        for address in entry.initial_peers:
            _check_initial_peer(address)
        listener = None if entry.client_mode else listen(entry.listen_host, entry.listen_port)
        told = entry.advertise, entry.advertise_port
        announced = () if listener is None else announced_addresses(listener, *told)
        self._dht = HostedDHT(
            self._folder,
            CertificateAuthorizer(self._run, self._sign, entry.certificate, entry.authority),
            listener,
            {*entry.sources, *own_sources()},
            entry.stays_connected,
            entry.members,
            announce_maddrs=announced or None,
            **_dht_options(request),
        )
        self._dht.start()
        try:
            self._dht.wait_until_ready(request.deadline)
        except Exception as error:
            peers = ", ".join(entry.initial_peers) or "no other peer"
            why = str(error) or type(error).__name__
            raise _unreachable(f"joining it through {peers} failed: {why}") from None
        self._dht.open_port(request.deadline)
        self._dht.keep_greeting()
        self._dht.keep_contacts()
        self._p2pd = next(p for p in psutil.Process(self._dht.pid).children() if p.name() == "p2pd")
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        # hivemind caches both answers here, before the fork, so that the averagers inherit them.
        peer, _client_mode = self._dht.peer_id, self._dht.client_mode
        me = peer.to_base58()
        return DhtJoined(me, tuple(f"{address}/p2p/{me}" for address in announced))

    def host_stages(self, request: HostStages) -> None:
        def fork(stage: int, allow_list: Sequence[PeerId]) -> SparseAverager:
            averager = SparseAverager(
                self._dht, self._run, stage, request.hosted, allow_list, self._sign, self._folder
            )
            averager.launch()
            return averager

        try:
            self._averagers.start(request.hosted.capacities, fork, request.deadline)
        except Exception as error:
            raise HetnodeError(
                ErrorCode.TRANSPORT_DIED,
                f"An averager did not start: {error!r}.",
                "See the end of this node's log, then start the node again.",
            ) from None

    def host_arbiter(self, request: HostArbiter) -> None:
        self._arbiter = HostedArbiter(self._dht, self._run, request.spec, request.folder, request.deadline)

    def arbitrate(self, request: ArbitratePayload) -> Verdict:
        assert self._arbiter is not None, "host_arbiter comes first"
        return self._arbiter.arbitrate(request.descriptor, request.donors, request.deadline)

    def forget(self, request: ForgetPayloads) -> None:
        if self._arbiter is not None:
            self._arbiter.forget(request.before_round)

    def publish(self, request: Publish) -> None:
        record = (self._run, request.peer, request.sealed, request.expires, request.deadline)
        with _dht_answers():
            stored = records.store(self._dht, *record)
            if not stored:
                # A restarted coordinator knows no other peer of the DHT until one connects to it.
                self._dht.greet(request.deadline)
                stored = records.store(self._dht, *record)
        if not stored:
            raise _unreachable("no peer of the DHT accepted this node's record")

    def lookup(self, request: Lookup) -> Mapping[str, bytes]:
        with _dht_answers():
            return records.find(self._dht, self._run, request.deadline)

    def admit(self, request: Admit) -> None:
        self._averagers.admit(request)
        if self._arbiter is not None:
            self._arbiter.admit(request.peers)
        with self._admitting, _dht_answers():
            self._dht.tell(Whom.BANNED, request.banned, request.deadline)
            self._dht.tell(Whom.PEERS, request.peers, request.deadline)
            self._dht.tell(Whom.SOURCES, {*request.sources, *own_sources()}, request.deadline)
            if request.members is not None:
                self._dht.tell(Whom.MEMBERS, request.members, request.deadline)

    def disconnect(self, request: DropConnections) -> None:
        with _dht_answers():
            self._dht.disconnect(request.peers, request.deadline)

    def contact(self, request: DialPeers) -> None:
        with _dht_answers():
            self._dht.contact(request.addresses, request.deadline)

    def handlers(self) -> Mapping[str, Handler]:
        """For :func:`node.ipc.channel.serve`. The answers of averagers are forwarded without decoding."""
        return {
            **handler(Wake, lambda _: None),
            **handler(JoinDht, self.join_dht),
            **handler(HostStages, self.host_stages),
            **handler(HostArbiter, self.host_arbiter),
            **handler(ArbitratePayload, self.arbitrate),
            **handler(ForgetPayloads, self.forget),
            **handler(Publish, self.publish),
            **handler(Lookup, self.lookup),
            **handler(Admit, self.admit),
            **handler(DropConnections, self.disconnect),
            **handler(DialPeers, self.contact),
            **{name_of(request): self._forward for request in AVERAGER_REQUESTS},
        }

    def _forward(self, call: Call) -> Reply:
        return self._averagers.by_stage[json.loads(call.body)["averager"]].calls.call(call)

    def clean_up(self) -> None:
        """End every process below this one, and remove their sockets."""
        self._ending.set()  # before the kill: the watcher must not report these deaths
        kill_descendants()
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        """End all processes when one of them has died: the others are useless."""
        # p2pd is not a child of this process and has no sentinel, so it is polled.
        while _resident_bytes(self._p2pd) in range(1, MOST_P2PD_BYTES):
            children: list[Any] = [self._dht, *self._averagers.by_stage.values()]
            sentinels = [child.sentinel for child in children if child.is_alive()]
            if len(sentinels) < len(children) or multiprocessing.connection.wait(sentinels, _WATCH_SECONDS):
                break
        if self._ending.is_set():
            return
        log.error("a process of hivemind has died, or p2pd is too large: ending the others")
        self.clean_up()
        os._exit(1)


def _resident_bytes(process: psutil.Process) -> int:
    """0 for a process that has ended, also while its parent has not noticed."""
    try:
        return int(process.memory_info().rss) if process.is_running() else 0
    except psutil.NoSuchProcess:
        return 0


@contextmanager
def _dht_answers() -> Iterator[None]:
    """Raise DHT_UNREACHABLE for any exception of the DHT process and for a timeout."""
    try:
        yield
    except Exception as error:
        raise _unreachable(str(error) or type(error).__name__) from None


def _dht_options(request: JoinDht) -> dict[str, Any]:
    """What hivemind's DHT, DHTNode and P2P are told."""
    entry = request.entry
    authority = x509.load_pem_x509_certificate(entry.authority.read_bytes())
    return {
        # hivemind would draw a random id; then others' routing tables would have a restarted peer twice.
        "node_id": node_id_of(request.peer),
        "initial_peers": entry.initial_peers,
        "host_maddrs": None,  # the DHT process chooses a loopback port
        "no_listen": entry.client_mode,
        "client_mode": entry.client_mode,
        "identity_path": str(request.identity),
        "check_if_identity_free": False,  # it reads RSA keys only; the main process locks the key file
        "nat_port_map": False,
        "dht_mode": _dht_mode(entry.initial_peers),
        # AutoNAT would dial the addresses that strangers claim to have.
        "use_relay": False,
        "auto_nat": False,
        "persistent_conn_max_msg_size": MAX_VALUE_BYTES,
        # Copies of what was found would be entries of other peers, which no peer accepts.
        "cache_locally": False,
        "cache_nearest": 0,
        "cache_on_store": False,
        "record_validators": [records.KnownEntryValidator(entry.run, authority)],
    }


def _dht_mode(initial_peers: Sequence[str]) -> str:
    """Whether p2pd answers the questions of libp2p's own DHT, by which it finds the addresses of peers.

    It takes large ones of anyone, as many as are sent. So the first peer alone answers: all others keep
    connected to it.
    """
    return "client" if initial_peers else "server"


def _check_initial_peer(address: str) -> None:
    try:
        Multiaddr(address)["p2p"]
        check_multiaddress(address)
    except Exception as error:
        raise HetnodeError(
            ErrorCode.BAD_ADDRESS,
            f"'{address}' cannot be the multiaddress of a DHT peer: {error}.",
            "Use one that ends in /p2p/ and a peer id, as the coordinator prints it.",
        ) from None


def _unreachable(why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.DHT_UNREACHABLE,
        f"The hivemind DHT is out of reach: {why}.",
        "Check that the coordinator runs, that its DHT port is open to this machine, and that the clocks of "
        "both agree to 3 seconds.",
    )


def _configure_logging() -> None:
    """Hide hivemind's messages unless debugging: it logs expected failures as errors with tracebacks."""
    level = os.environ.get("HETNODE_LOG_LEVEL", "INFO")
    log_as("hivemind", level)
    use_hivemind_log_handler("nowhere")
    if level != "DEBUG":
        for name in ("hivemind", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _make_own_locks() -> None:
    """Replace hivemind's locks: processes that were forked from the same template share the inherited ones.

    A process that is killed while it holds such a lock would block the hosts of all other nodes.
    """
    MPFuture.reset_backend()
    _AsyncContextWrapper.EXECUTOR_LOCK = multiprocessing.Lock()


def main() -> None:
    _configure_logging()
    _make_own_locks()
    limit_messages()
    limit_values()
    use_bounded_protocol()
    # Averagers cannot be pickled. This process holds no device and no event loop: forking it is safe.
    multiprocessing.set_start_method("fork", force=True)
    host = Host()
    serve(int(sys.argv[1]), host.handlers(), threads=_CALL_THREADS, on_close=host.clean_up)


if __name__ == "__main__":
    main()
