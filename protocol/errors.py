"""Errors shown to people and sent to peers: a stable code, the cause and the remedy.

Every failure that is not a bug is raised as a :class:`HetnodeError`. The command line prints it as one
message without a traceback and exits with the status of its family. ``docs/errors.md`` lists all codes; a
test keeps that page complete.
"""

from __future__ import annotations

import logging
from enum import Enum

log = logging.getLogger(__name__)


class ExitCode(int, Enum):
    """Exit status of the ``hetnode`` command. 1 is an unexpected internal failure (with a traceback)."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    DATA = 3
    NETWORK = 4
    REFUSED = 5
    PEER = 6
    STATE = 7
    INTERRUPTED = 130


class ErrorCode(Enum):
    """Stable codes: (name, exit status). Never rename one; add new ones at the end of their family."""

    # The run specification or the command line is wrong.
    UNKNOWN_PRESET = ("unknown-preset", ExitCode.USAGE)
    BAD_SPEC = ("bad-spec", ExitCode.USAGE)
    BAD_OPTION = ("bad-option", ExitCode.USAGE)
    BAD_INVITE = ("bad-invite", ExitCode.USAGE)
    BAD_MATRIX = ("bad-matrix", ExitCode.USAGE)

    # Data, tokenizers and files of the user.
    DATA_UNREADABLE = ("data-unreadable", ExitCode.DATA)
    DATA_TOO_SMALL = ("data-too-small", ExitCode.DATA)
    TOKENIZER_UNREADABLE = ("tokenizer-unreadable", ExitCode.DATA)
    TOKENIZER_MISMATCH = ("tokenizer-mismatch", ExitCode.DATA)
    CHECKPOINT_CORRUPT = ("checkpoint-corrupt", ExitCode.DATA)
    CHECKPOINT_MISSING = ("checkpoint-missing", ExitCode.DATA)
    DISK_FULL = ("disk-full", ExitCode.DATA)
    UNSUPPORTED_MODEL = ("unsupported-model", ExitCode.DATA)
    INITIAL_UNAVAILABLE = ("initial-unavailable", ExitCode.DATA)
    RESULTS_UNREADABLE = ("results-unreadable", ExitCode.DATA)
    RECEIPT_UNREADABLE = ("receipt-unreadable", ExitCode.DATA)
    RECEIPT_FORGED = ("receipt-forged", ExitCode.DATA)
    RECEIPT_MISMATCH = ("receipt-mismatch", ExitCode.DATA)
    INCIDENT_UNREADABLE = ("incident-unreadable", ExitCode.DATA)
    INCIDENT_DIFFERS = ("incident-differs", ExitCode.DATA)

    # The network.
    COORDINATOR_UNREACHABLE = ("coordinator-unreachable", ExitCode.NETWORK)
    PORT_IN_USE = ("port-in-use", ExitCode.NETWORK)
    BAD_ADDRESS = ("bad-address", ExitCode.NETWORK)
    DHT_UNREACHABLE = ("dht-unreachable", ExitCode.NETWORK)
    WRONG_AUTHORITY = ("wrong-authority", ExitCode.NETWORK)

    # The coordinator refused.
    VERSION_MISMATCH = ("version-mismatch", ExitCode.REFUSED)
    SPEC_MISMATCH = ("spec-mismatch", ExitCode.REFUSED)
    RUN_STARTED = ("run-started", ExitCode.REFUSED)
    RUN_FULL = ("run-full", ExitCode.REFUSED)
    ALREADY_ACTIVE = ("already-active", ExitCode.REFUSED)
    UNKNOWN_PEER = ("unknown-peer", ExitCode.REFUSED)
    BAD_REQUEST = ("bad-request", ExitCode.REFUSED)
    INVITE_EXPIRED = ("invite-expired", ExitCode.REFUSED)
    INVITE_USED = ("invite-used", ExitCode.REFUSED)
    INVITE_REVOKED = ("invite-revoked", ExitCode.REFUSED)
    INVITE_UNKNOWN = ("invite-unknown", ExitCode.REFUSED)
    INVITE_FORGED = ("invite-forged", ExitCode.REFUSED)
    CERTIFICATE_REFUSED = ("certificate-refused", ExitCode.REFUSED)
    BANNED = ("banned", ExitCode.REFUSED)
    QUARANTINED = ("quarantined", ExitCode.REFUSED)
    RATE_LIMITED = ("rate-limited", ExitCode.REFUSED)
    SEAT_LOST = ("seat-lost", ExitCode.REFUSED)
    OFFER_TOO_EARLY = ("offer-too-early", ExitCode.REFUSED)
    GROUP_UNKNOWN = ("group-unknown", ExitCode.REFUSED)
    NO_CREDIT = ("no-credit", ExitCode.REFUSED)
    NO_ROLLBACK = ("no-rollback", ExitCode.REFUSED)

    # Another peer failed, or sent invalid data.
    NEIGHBOUR_LOST = ("neighbour-lost", ExitCode.PEER)
    NEIGHBOUR_UNREACHABLE = ("neighbour-unreachable", ExitCode.PEER)
    FRAME_CORRUPT = ("frame-corrupt", ExitCode.PEER)
    FRAME_TOO_LARGE = ("frame-too-large", ExitCode.PEER)
    PAYLOAD_CORRUPT = ("payload-corrupt", ExitCode.PEER)
    PAYLOAD_UNAVAILABLE = ("payload-unavailable", ExitCode.PEER)
    ROUND_IN_DOUBT = ("round-in-doubt", ExitCode.PEER)
    STATE_UNAVAILABLE = ("state-unavailable", ExitCode.PEER)

    # This node's own state.
    ANCHOR_DIVERGED = ("anchor-diverged", ExitCode.STATE)
    WORKER_DIED = ("worker-died", ExitCode.STATE)
    RANK_FAILED = ("rank-failed", ExitCode.STATE)
    HIVEMIND_DIED = ("hivemind-died", ExitCode.STATE)
    STORE_CORRUPT = ("store-corrupt", ExitCode.STATE)
    RUN_FOLDER_IN_USE = ("run-folder-in-use", ExitCode.STATE)
    DEVICE_UNAVAILABLE = ("device-unavailable", ExitCode.STATE)
    SWARM_PROCESS_FAILED = ("swarm-process-failed", ExitCode.STATE)
    NO_CREDENTIALS = ("no-credentials", ExitCode.STATE)
    NODE_NOT_RUNNING = ("node-not-running", ExitCode.STATE)
    SERVICE_FAILED = ("service-failed", ExitCode.STATE)
    MISSING_EXTRA = ("missing-extra", ExitCode.STATE)
    NO_HISTORY = ("no-history", ExitCode.STATE)

    def __init__(self, label: str, exit_code: ExitCode) -> None:
        self.label = label
        self.exit_code = exit_code

    @classmethod
    def from_label(cls, label: str) -> ErrorCode:
        """The code named `label` on the wire; BAD_REQUEST for a label that this version does not know."""
        return next((code for code in cls if code.label == label), cls.BAD_REQUEST)


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
    remedy = "Run the same version of hetnode on every peer; if they already do, that peer is faulty."
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
