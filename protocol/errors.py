"""Errors shown to people and sent to peers: a stable code, the cause and the remedy.

Every failure that is not a bug is raised as a :class:`HetnodeError`. The command line prints it as one
message without a traceback and exits with the status of its family. The text under each code is its line in
``docs/reference/errors.md``.
"""

from __future__ import annotations

import logging
from enum import Enum

log = logging.getLogger(__name__)


class ExitCode(int, Enum):
    """Exit status of the ``hetnode`` command. 1 is an unexpected internal failure (with a traceback)."""

    OK = 0
    """Done."""
    INTERNAL = 1
    """A bug in hetnode, with a traceback."""
    USAGE = 2
    """The command line or the run specification."""
    DATA = 3
    """Data, tokenizers, checkpoints."""
    NETWORK = 4
    """The network."""
    REFUSED = 5
    """The coordinator refused."""
    PEER = 6
    """Another peer failed, or sent what cannot be used."""
    STATE = 7
    """This node's own state or processes."""
    INTERRUPTED = 130
    """Interrupted by a signal, after leaving in order, or while it waited for its coordinator."""


class ErrorCode(Enum):
    """Stable codes: (name, exit status). Never rename one; add new ones at the end of their family."""

    # The run specification or the command line is wrong.
    UNKNOWN_PRESET = ("unknown-preset", ExitCode.USAGE)
    """There is no preset of that name."""
    BAD_SPEC = ("bad-spec", ExitCode.USAGE)
    """A value of the run specification is out of bounds, contradicts another one, or the run file cannot be
    read."""
    BAD_OPTION = ("bad-option", ExitCode.USAGE)
    """An option for this machine is wrong, such as a file that is not an identity."""
    BAD_INVITE = ("bad-invite", ExitCode.USAGE)
    """The text is not an invite, or one of its characters is missing or wrong."""
    BAD_MATRIX = ("bad-matrix", ExitCode.USAGE)
    """The matrix file of an experiment cannot be read or has an invalid value; names the key."""
    SETTING_REMOVED = ("setting-removed", ExitCode.USAGE)
    """A run file, or an old run, has a setting or a value that runs no longer have; says why, and what to do
    instead."""
    OUTPUT_UNWRITABLE = ("output-unwritable", ExitCode.STATE)
    """What a command prints cannot be written, such as to a full disk, or an export not put on the hub."""

    # Data, tokenizers and files of the user.
    DATA_UNREADABLE = ("data-unreadable", ExitCode.DATA)
    """The data source is missing or malformed, or has many bad records; names the place."""
    DATA_NOT_NAMED = ("data-not-named", ExitCode.DATA)
    """The run names a file, folder or tokenizer of this machine that its owner has not named; nothing was
    read."""
    DATA_TOO_SMALL = ("data-too-small", ExitCode.DATA)
    """Fewer tokens than one training and one validation sample need."""
    TOKENIZER_UNREADABLE = ("tokenizer-unreadable", ExitCode.DATA)
    """The tokenizer file is missing or malformed, or a SentencePiece model that is not supported."""
    TOKENIZER_MISMATCH = ("tokenizer-mismatch", ExitCode.DATA)
    """The tokenizer is not the run's, or its vocabulary exceeds the model's."""
    CHECKPOINT_CORRUPT = ("checkpoint-corrupt", ExitCode.DATA)
    """A checkpoint's bytes do not match its manifest, or its parts do not belong together."""
    CHECKPOINT_MISSING = ("checkpoint-missing", ExitCode.DATA)
    """There is no checkpoint, or it lacks stages."""
    DISK_FULL = ("disk-full", ExitCode.DATA)
    """The disk is full; files that were written before are intact."""
    UNSUPPORTED_MODEL = ("unsupported-model", ExitCode.DATA)
    """A Hugging Face folder is damaged, or hetnode cannot train its model; or `hetnode export`: transformers
    has no such model."""
    INITIAL_UNAVAILABLE = ("initial-unavailable", ExitCode.DATA)
    """The run starts from given parameters, and this machine does not have them or has others."""
    RESULTS_UNREADABLE = ("results-unreadable", ExitCode.DATA)
    """The results file of an experiment cannot be read; names the line."""
    RECEIPT_UNREADABLE = ("receipt-unreadable", ExitCode.DATA)
    """The file is not a receipt: too long, malformed, a field too many or too few, or out of bounds."""
    RECEIPT_FORGED = ("receipt-forged", ExitCode.DATA)
    """The signature of a receipt does not fit its fields: one was changed, or another key has signed it."""
    RECEIPT_MISMATCH = ("receipt-mismatch", ExitCode.DATA)
    """A receipt is signed, but by another coordinator than was meant."""

    # The network.
    COORDINATOR_UNREACHABLE = ("coordinator-unreachable", ExitCode.NETWORK)
    """The coordinator's address does not answer; `hetnode join` waits for it, at most `--join-seconds`.
    `hetnode health`: it has not answered the node for longer than `--away`."""
    PORT_IN_USE = ("port-in-use", ExitCode.NETWORK)
    """A port to listen on is taken, or the address is not this machine's."""
    BAD_ADDRESS = ("bad-address", ExitCode.NETWORK)
    """An address is not HOST:PORT, its host is unknown, or no peer may have it
    (docs/protocol/minimum-peer.md, section 7)."""
    DHT_UNREACHABLE = ("dht-unreachable", ExitCode.NETWORK)
    """The DHT's bootstrap peer cannot be reached, or no peer took a record."""
    WRONG_AUTHORITY = ("wrong-authority", ExitCode.NETWORK)
    """The certificate of the other end, specification or plan is not signed by the run's authority."""

    # The coordinator refused.
    VERSION_MISMATCH = ("version-mismatch", ExitCode.REFUSED)
    """The two ends speak different protocol versions, or the hosts of one peer run different versions of
    hetnode; both are shown."""
    SPEC_MISMATCH = ("spec-mismatch", ExitCode.REFUSED)
    """The two ends have different run specifications; both hashes are shown."""
    RUN_STARTED = ("run-started", ExitCode.REFUSED)
    """The run has finished."""
    RUN_FULL = ("run-full", ExitCode.REFUSED)
    """The run does not wait for another peer of this role."""
    ALREADY_ACTIVE = ("already-active", ExitCode.REFUSED)
    """A live peer already uses this identity."""
    UNKNOWN_PEER = ("unknown-peer", ExitCode.REFUSED)
    """The coordinator or a neighbour does not know this peer: it never joined, left, or was silent for too
    long."""
    BAD_REQUEST = ("bad-request", ExitCode.REFUSED)
    """A message does not follow the protocol."""
    INVITE_EXPIRED = ("invite-expired", ExitCode.REFUSED)
    """The invite has expired."""
    INVITE_USED = ("invite-used", ExitCode.REFUSED)
    """Other peers have used all uses of the invite."""
    INVITE_REVOKED = ("invite-revoked", ExitCode.REFUSED)
    """The operator has revoked the invite."""
    INVITE_UNKNOWN = ("invite-unknown", ExitCode.REFUSED)
    """This coordinator has not made this invite."""
    INVITE_FORGED = ("invite-forged", ExitCode.REFUSED)
    """The coordinator knows the invite's name, but its secret is wrong."""
    CERTIFICATE_REFUSED = ("certificate-refused", ExitCode.REFUSED)
    """The certificate belongs to another peer, or the call needs the operator's certificate."""
    BANNED = ("banned", ExitCode.REFUSED)
    """The operator has banned this peer."""
    QUARANTINED = ("quarantined", ExitCode.REFUSED)
    """This peer sent invalid payloads too often."""
    RATE_LIMITED = ("rate-limited", ExitCode.REFUSED)
    """Too many requests in a short time, or too many at once; try again later."""
    WAITING_LIST = ("waiting-list", ExitCode.REFUSED)
    """An open run has no room yet for a peer without an invite; names its place. The node waits."""
    COORDINATOR_BEHIND = ("coordinator-behind", ExitCode.REFUSED)
    """A node knows later rounds than the coordinator, whose folder is an older copy. The node waits."""
    SEAT_LOST = ("seat-lost", ExitCode.REFUSED)
    """This peer has lost its assignment; it follows the rounds until a later plan gives it another one."""
    OFFER_TOO_EARLY = ("offer-too-early", ExitCode.REFUSED)
    """A payload was offered far sooner than its replica can have trained it; names both times. The node
    offers it again."""
    GROUP_UNKNOWN = ("group-unknown", ExitCode.REFUSED)
    """Payloads were reported by their positions in an exchange group that is not that of the coordinator. The
    node names them one by one."""
    NO_CREDIT = ("no-credit", ExitCode.REFUSED)
    """A receipt was asked for, and no payload of the peer has counted yet."""
    NO_ROLLBACK = ("no-rollback", ExitCode.REFUSED)
    """`hetnode rollback`: the anchors after that round cannot be restored; names what is missing, and the
    rounds that can be."""

    # Another peer failed, or sent invalid data.
    NEIGHBOUR_LOST = ("neighbour-lost", ExitCode.PEER)
    """The link to a neighbour broke or stayed silent."""
    NEIGHBOUR_UNREACHABLE = ("neighbour-unreachable", ExitCode.PEER)
    """The link to a neighbour could not be opened, or its endpoint is one that no peer may have."""
    FRAME_CORRUPT = ("frame-corrupt", ExitCode.PEER)
    """A neighbour sent an invalid frame; its stream is closed."""
    FRAME_TOO_LARGE = ("frame-too-large", ExitCode.PEER)
    """A neighbour announced a frame above the run's limit; its stream is closed."""
    PAYLOAD_CORRUPT = ("payload-corrupt", ExitCode.PEER)
    """A payload's bytes, or its signature, are wrong."""
    PAYLOAD_UNAVAILABLE = ("payload-unavailable", ExitCode.PEER)
    """No holder delivered a committed payload in time."""
    ROUND_IN_DOUBT = ("round-in-doubt", ExitCode.PEER)
    """A round was committed, but this node could not learn or apply the decision."""
    STATE_UNAVAILABLE = ("state-unavailable", ExitCode.PEER)
    """No peer delivered a checkpoint of a stage that this node needs, or none exists yet."""

    # This node's own state.
    ANCHOR_DIVERGED = ("anchor-diverged", ExitCode.STATE)
    """After a round, this node's anchor differs from the run's."""
    WORKER_DIED = ("worker-died", ExitCode.STATE)
    """The worker process has ended, or one of several ranks: names it."""
    RANK_FAILED = ("rank-failed", ExitCode.STATE)
    """A rank of a peer with several devices has failed and the others wait for it, or it cannot reach them;
    the leader and the followers of a peer on several hosts do not find each other, or the leader has
    ended."""
    TRANSPORT_DIED = ("transport-died", ExitCode.STATE)
    """A process of the transport has ended or does not answer."""
    STORE_CORRUPT = ("store-corrupt", ExitCode.STATE)
    """The coordinator's event log, its `.head` or its keys cannot be read, or a row was changed, removed,
    inserted or moved; the message names the row."""
    RUN_FOLDER_IN_USE = ("run-folder-in-use", ExitCode.STATE)
    """The run folder is not empty, or another coordinator uses it. A finished run is no error."""
    COORDINATOR_REPLACED = ("coordinator-replaced", ExitCode.STATE)
    """A standby has taken the run over, and the former coordinator ends; or that one answers, so the standby
    does not take over."""
    DEVICE_UNAVAILABLE = ("device-unavailable", ExitCode.STATE)
    """The torch device cannot be used."""
    SWARM_PROCESS_FAILED = ("swarm-process-failed", ExitCode.STATE)
    """A process that `hetnode swarm up` started has failed; names its log."""
    NO_CREDENTIALS = ("no-credentials", ExitCode.STATE)
    """This machine has no valid credentials for the run: it was never invited, or the files are gone."""
    NODE_NOT_RUNNING = ("node-not-running", ExitCode.STATE)
    """`hetnode pause`, `resume` or `health`: no node answers in that folder."""
    SERVICE_FAILED = ("service-failed", ExitCode.STATE)
    """`hetnode service`: systemd or launchd is not there, or refused; its answer is shown."""
    MISSING_EXTRA = ("missing-extra", ExitCode.STATE)
    """A library that this use of hetnode needs is not installed on this machine; names the extra of the
    package."""
    NO_HISTORY = ("no-history", ExitCode.STATE)
    """The run's `history.sqlite` is missing or cannot be read; the coordinator writes it again from its event
    log when it starts."""

    def __init__(self, label: str, exit_code: ExitCode) -> None:
        self.label = label
        self.exit_code = exit_code

    @classmethod
    def from_label(cls, label: str) -> ErrorCode:
        """The code named `label` on the wire; BAD_REQUEST for a label that this version does not know."""
        return next((code for code in cls if code.label == label), cls.BAD_REQUEST)


FAILURE_FILE = "HETNODE_FAILURE_FILE"
"""The environment variable by which a program has a process that it starts write its failure as JSON."""


class HetnodeError(Exception):
    """A failure with a stable code, its cause and what the reader can do about it.

    Args:
        cause: one sentence: what failed, with the relevant values.
        remedy: one sentence: what the reader can do.
    """

    def __init__(self, code: ErrorCode, cause: str, remedy: str) -> None:
        super().__init__(f"[{code.label}] {cause} {remedy}".strip())
        self.code = code
        self.cause = cause
        self.remedy = remedy


def faulty_peer(cause: str, code: ErrorCode = ErrorCode.BAD_REQUEST) -> HetnodeError:
    """The error for a message that no peer of this version sends."""
    remedy = "Update the program of that peer; if it is the newest, it has a fault."
    return HetnodeError(code, cause, remedy)


def cause_of(error: BaseException) -> str:
    """The cause of a HetnodeError; of another exception its type and text."""
    return error.cause if isinstance(error, HetnodeError) else repr(error)


def first_error(error: BaseException) -> BaseException:
    """The first HetnodeError of an exception group, else its first exception; `error` if it is no group."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_error(inner) for inner in error.exceptions]
    for leaf in leaves:
        if not isinstance(leaf, HetnodeError):
            log.error("an unexpected failure among others", exc_info=leaf)
    return next((leaf for leaf in leaves if isinstance(leaf, HetnodeError)), leaves[0])
