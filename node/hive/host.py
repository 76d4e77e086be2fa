"""The hivemind host: a process that does nothing but fork, watch and call hivemind's processes.

``python -m node.hive.host FD``: answers the calls of :class:`node.hive.transport.HivemindTransport`.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from cryptography import x509
from hivemind.dht.routing import DHTID
from hivemind.utils.asyncio import _AsyncContextWrapper
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.mpfuture import MPFuture
from hivemind.utils.multiaddr import Multiaddr

from node.hive import records
from node.hive.allow_list import limit_messages
from node.hive.authorizer import CertificateAuthorizer, signer_of
from node.hive.averager import SparseAverager, Storage
from node.hive.clock import correct_dht_time
from node.hive.dht import HostedDHT
from node.hive.lifetime import kill_descendants
from node.ipc.channel import Buffer, Reply, serve
from protocol.errors import ErrorCode, HetnodeError

log = logging.getLogger(__name__)

Body = Mapping[str, Any]
Blobs = Sequence[Buffer]

_CALL_THREADS = 128
_WATCH_SECONDS = 1.0


class Host:
    """The calls of the main process, one method each."""

    _folder: Path
    _run: str
    _dht: HostedDHT
    _p2pd: psutil.Process

    def __init__(self) -> None:
        self._averagers: dict[int, SparseAverager] = {}
        self._allow_list: tuple[str, ...] = ()
        # Calls come in several threads: each averager begins with the newest roster, or is told it.
        self._rostering = threading.Lock()
        self._ending = threading.Event()

    def start_dht(self, body: Body, _: Blobs) -> Reply:
        """Fork the DHT process and join, or begin, a DHT. Answers the peer id and its multiaddresses."""
        correct_dht_time(body["clock_offset"])
        self._folder, self._run = Path(body["folder"]), body["run"]
        client_mode = body["client_mode"]
        for peer in body["initial_peers"]:
            _check_initial_peer(peer)
        identity, authority = Path(body["identity_path"]), Path(body["authority"])
        self._dht = HostedDHT(
            self._folder,
            CertificateAuthorizer(signer_of(identity), Path(body["certificate"]), authority),
            # Otherwise random, so that a peer that was started again would stand twice in others' tables.
            node_id=DHTID.generate(source=body["peer"]),
            initial_peers=body["initial_peers"],
            host_maddrs=None if client_mode else [body["listen"]],
            announce_maddrs=None if client_mode or body["announce"] is None else [body["announce"]],
            no_listen=client_mode,
            client_mode=client_mode,
            identity_path=str(identity),
            check_if_identity_free=False,  # it knows RSA keys only; and the main process locks the key file
            nat_port_map=False,
            record_validators=[
                records.OwnRecordValidator(self._run, x509.load_pem_x509_certificate(authority.read_bytes()))
            ],
        )
        self._dht.start()
        try:
            self._dht.wait_until_ready(body["deadline"])
        except Exception as error:
            peers = ", ".join(body["initial_peers"]) or "no other peer"
            why = str(error) or type(error).__name__
            raise _unreachable(f"joining it through {peers} failed: {why}") from None
        self._dht.keep_in_touch()
        self._p2pd = next(p for p in psutil.Process(self._dht.pid).children() if p.name() == "p2pd")
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        # Both are asked for once here, so that the averagers inherit the answers.
        peer, _client_mode = self._dht.peer_id, self._dht.client_mode
        addresses = [] if client_mode else [str(address) for address in self._dht.get_visible_maddrs()]
        return Reply({"peer": peer.to_base58(), "addresses": addresses})

    def host_stages(self, body: Body, _: Blobs) -> Reply:
        """Fork one averager for each stage."""
        ends = time.monotonic() + body["deadline"]
        payloads, checkpoints = Path(body["payload_folder"]), Path(body["checkpoint_folder"])
        for stage, capacity in ((int(stage), capacity) for stage, capacity in body["capacities"].items()):
            storage = Storage(capacity, payloads / f"stage-{stage:02d}", body["keep_rounds"], checkpoints)
            with self._rostering:
                averager = SparseAverager(
                    self._dht, self._run, stage, storage, self._allow_list, self._folder
                )
                averager.launch()
                self._averagers[stage] = averager
        try:
            for averager in self._averagers.values():
                averager.wait_until_ready(ends - time.monotonic())
        except Exception as error:
            raise HetnodeError(
                ErrorCode.HIVEMIND_DIED,
                f"An averager did not start: {error!r}.",
                "See this node's log for its last words, then start the node again.",
            ) from None
        return Reply({})

    def publish(self, body: Body, blobs: Blobs) -> Reply:
        sealed = bytes(blobs[0])
        with _dht_answers():
            stored = records.store(
                self._dht, self._run, body["peer"], sealed, body["expires"], body["deadline"]
            )
            if not stored:
                # The coordinator knows nobody any more after it was started again.
                self._dht.greet(body["deadline"])
                stored = records.store(
                    self._dht, self._run, body["peer"], sealed, body["expires"], body["deadline"]
                )
        if not stored:
            raise _unreachable("no peer of the DHT accepted this node's record")
        return Reply({})

    def lookup(self, body: Body, _: Blobs) -> Reply:
        with _dht_answers():
            found = records.find(self._dht, self._run, body["deadline"])
        return Reply({"peers": list(found)}, list(found.values()))

    def exchange(self, body: Body, blobs: Blobs) -> Reply:
        return self._averagers[body["stage"]].calls.call("exchange", body, *blobs)

    def fetch(self, body: Body, blobs: Blobs) -> Reply:
        """From the stage's own averager, which may hold it; any other one can fetch it, too."""
        averager = self._averagers.get(body["stage"]) or self._any_averager(ErrorCode.PAYLOAD_UNAVAILABLE)
        return averager.calls.call("fetch", body, *blobs)

    def fetch_state(self, body: Body, blobs: Blobs) -> Reply:
        return self._any_averager(ErrorCode.STATE_UNAVAILABLE).calls.call("fetch_state", body, *blobs)

    def admit(self, body: Body, _: Blobs) -> Reply:
        """Who may call from now on: the averagers `peers`, the DHT everybody certified but `banned`."""
        with self._rostering:
            allow_list = self._allow_list = tuple(body["peers"])
            averagers = list(self._averagers.values())
        for averager in averagers:
            averager.calls.call("admit", {"peers": allow_list})
        with _dht_answers():
            self._dht.keep_out(body["banned"], body["deadline"])
        return Reply({})

    def _any_averager(self, code: ErrorCode) -> SparseAverager:
        """Averagers alone can call other peers' averagers. Raises HetnodeError `code` where there is none."""
        averager = next(iter(self._averagers.values()), None)
        if averager is None:
            raise HetnodeError(
                code,
                "This node hosts no stage yet, and so cannot fetch anything.",
                "Wait until the node has its place in the run.",
            )
        return averager

    def clean_up(self) -> None:
        """End every process below this one, and remove their sockets."""
        self._ending.set()
        kill_descendants()
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        """One dead process makes the others useless: end them all, for the main process to see."""
        while self._p2pd.is_running():
            children: list[Any] = [self._dht, *self._averagers.values()]
            sentinels = [child.sentinel for child in children if child.is_alive()]
            if len(sentinels) < len(children) or multiprocessing.connection.wait(sentinels, _WATCH_SECONDS):
                break
        if self._ending.is_set():
            return
        log.error("a process of hivemind has died: ending the others")
        self.clean_up()
        os._exit(1)


@contextmanager
def _dht_answers() -> Iterator[None]:
    """Whatever the DHT process raises, or a timeout, means that the DHT is out of reach."""
    try:
        yield
    except Exception as error:
        raise _unreachable(str(error) or type(error).__name__) from None


def _check_initial_peer(address: str) -> None:
    try:
        Multiaddr(address)["p2p"]
    except Exception as error:
        raise HetnodeError(
            ErrorCode.BAD_ADDRESS,
            f"'{address}' is not the multiaddress of a DHT peer: {error}.",
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
    """hivemind reports its expected failures, with tracebacks, as errors: they are for debugging only."""
    level = os.environ.get("HETNODE_LOG_LEVEL", "INFO")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s hivemind: %(message)s")
    use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for everybody
    if level != "DEBUG":
        for name in ("hivemind", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _make_own_locks() -> None:
    """Replace hivemind's locks, which this process shares with all that were forked from the same template.

    A process that is killed while it holds such a lock would block the hosts of all other nodes.
    """
    MPFuture.reset_backend()
    _AsyncContextWrapper.EXECUTOR_LOCK = multiprocessing.Lock()


def main() -> None:
    _configure_logging()
    _make_own_locks()
    limit_messages()
    # Averagers cannot be pickled. This process holds no device and no event loop: forking it is safe.
    multiprocessing.set_start_method("fork", force=True)
    host = Host()
    methods = "start_dht host_stages publish lookup exchange fetch fetch_state admit"
    handlers = {name: getattr(host, name) for name in methods.split()}
    serve(int(sys.argv[1]), handlers, threads=_CALL_THREADS, on_close=host.clean_up)


if __name__ == "__main__":
    main()
