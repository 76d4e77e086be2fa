"""Takes out of an event log what names people, machines and places, and nothing that a decision depends on.

What happens to a value follows from its type. Numbers, times, enumerations and the structure stay. Peer ids
become pseudonyms, in the same order. For each field with text or bytes there is a line in :data:`RULES`; a
field without one cannot be redacted, and a test names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum, auto
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from coordinator.membership.presence import FINISHED
from coordinator.ops.incident.pseudonyms import Labels, ReplacedAddresses, pseudonyms
from coordinator.run.state import events
from coordinator.run.state.events import Event
from coordinator.run.state.records import LastSeen, OpenPlace
from protocol.run_files.presets import PRESETS
from protocol.spec.run import RunSpec
from protocol.spec.sections import DataSpec
from protocol.types import (
    Capacity,
    CommittedResult,
    Decision,
    Member,
    Part,
    PayloadDescriptor,
    PeerId,
    Plan,
    ResultClaim,
    Verdict,
)

RUN = "incident"
"""Takes the place of the id of the run."""


class Rule(Enum):
    """What happens to the text, or the bytes, of a field. An empty text stays empty with each of them."""

    ADDRESS = auto()
    """``host:port`` becomes an address for documentation."""
    CODEC = auto()
    DEVICE = auto()
    """The name of a device as torch writes it stays; other text becomes a label."""
    DIGEST = auto()
    """A digest becomes a number with 64 digits."""
    GROUP = auto()
    """The id of an exchange group gets another run."""
    INVITE = auto()
    NAME = auto()
    """A public name becomes a label that is one, too."""
    PART = auto()
    """A part of a checkpoint stays; other text becomes a label."""
    REASON = auto()
    """A sentence becomes a label, with those of PHRASES that it contains."""
    RUN = auto()
    SECRET = auto()
    """The digest of a secret becomes a number with 64 digits."""
    SIGNATURE = auto()
    """A signature is left out; a replay signs with the key of the pseudonym."""


PHRASES = (
    "takes the place of",  # the invariants look for this one in the reason of a plan
    "starts anew",
    "the first plan",
    "joins",
    "comes back",
    "is gone",
    "are held by at least",
    "which too few of the group hold",
    "payloads is held by",
    "and more than half must",
    "no replica had a payload to offer",
    "no peer offered a payload before the round closed",
    "it has answered in none of the last",
    "it has no turn in this round",
    "already offered another payload",
    "it signed two payloads",
    "its payload is not valid",
    "is not signed by it",
    "asked to leave",
    "interrupted",
    "banned",
    "timed out",
    "refused",
)
"""Parts of sentences that stay, because they help readers and come from this program."""

RULES: Mapping[tuple[type, str], Rule] = {
    (events.OwnRelayTold, "endpoint"): Rule.ADDRESS,
    (events.RunPaused, "reason"): Rule.REASON,
    (events.AlarmRaised, "reason"): Rule.REASON,
    (events.RunRolledBack, "reason"): Rule.REASON,
    (events.AnchorDigest, "part"): Rule.PART,
    (events.AnchorDigest, "digest"): Rule.DIGEST,
    (events.PeerJoined, "endpoint"): Rule.ADDRESS,
    (events.PeerJoined, "claimed"): Rule.ADDRESS,
    (events.PeerJoined, "problem"): Rule.REASON,
    (events.PeerJoined, "role_reason"): Rule.REASON,
    (events.PeerNamed, "name"): Rule.NAME,
    (events.RoleChanged, "reason"): Rule.REASON,
    (events.AddressesChanged, "endpoint"): Rule.ADDRESS,
    (events.AddressesChanged, "claimed"): Rule.ADDRESS,
    (events.AddressesChanged, "problem"): Rule.REASON,
    (events.PeerLeft, "reason"): Rule.REASON,
    (events.PeerDraining, "reason"): Rule.REASON,
    (events.PeerRetreated, "reason"): Rule.REASON,
    (events.LinkFailed, "address"): Rule.ADDRESS,
    (events.LinkFailed, "reason"): Rule.REASON,
    (events.InviteCreated, "invite"): Rule.INVITE,
    (events.InviteCreated, "secret_sha256"): Rule.SECRET,
    (events.InviteUsed, "invite"): Rule.INVITE,
    (events.InviteRevoked, "invite"): Rule.INVITE,
    (events.PlaceAsked, "source"): Rule.ADDRESS,
    (OpenPlace, "source"): Rule.ADDRESS,
    (events.PeerBanned, "reason"): Rule.REASON,
    (events.GroupClosed, "group_id"): Rule.GROUP,
    (events.GroupClosed, "anchor_digest"): Rule.DIGEST,
    (events.PayloadRejected, "reason"): Rule.REASON,
    (ResultClaim, "sha256"): Rule.DIGEST,
    (CommittedResult, "sha256"): Rule.DIGEST,
    (events.PeerStruck, "reason"): Rule.REASON,
    (LastSeen, "ahead"): Rule.DIGEST,
    (events.DigestAttested, "part"): Rule.PART,
    (events.DigestAttested, "digest"): Rule.DIGEST,
    (events.AnchorDiverged, "part"): Rule.PART,
    (events.AnchorDiverged, "digest"): Rule.DIGEST,
    (events.AnchorDiverged, "expected"): Rule.DIGEST,
    (Capacity, "device"): Rule.DEVICE,
    (Member, "endpoint"): Rule.ADDRESS,
    (Plan, "reason"): Rule.REASON,
    (PayloadDescriptor, "run"): Rule.RUN,
    (PayloadDescriptor, "anchor_digest"): Rule.DIGEST,
    (PayloadDescriptor, "codec"): Rule.CODEC,
    (PayloadDescriptor, "sha256"): Rule.DIGEST,
    (PayloadDescriptor, "signature"): Rule.SIGNATURE,
    **{(kind, "reason"): Rule.REASON for kind in get_args(Decision)},
    (Verdict, "reason"): Rule.REASON,
}

_DEVICE = re.compile(r"(cpu|mps|(cuda|xpu|hip)(:[0-9]{1,3})?)")
_GROUP = re.compile(r".*(/[0-9]{1,9}/[0-9]{1,9})", re.DOTALL)

_Mapper = Callable[["Redactor", Any], Any]


class NoRule(TypeError):
    """A field has text, bytes or a type of which :data:`RULES` says nothing. The text names it."""


class Redactor:
    """Maps the values of one log. Equal values stay equal, and different ones different.

    Args:
        peers: all that occur in the log (:func:`peers_in`).
        rules: for each field with text or bytes.
    """

    def __init__(self, peers: Iterable[PeerId], rules: Mapping[tuple[type, str], Rule] = RULES) -> None:
        self._peers = pseudonyms(set(peers))
        self._forms = _Forms(rules)
        codec, reason, other = Labels("codec-{}"), Labels("reason {}"), Labels("text-{}")
        digest, secret, invite = Labels("{:064x}"), Labels("{:064x}"), Labels("invite-{}")
        self._texts: dict[Rule, Callable[[Any], Any]] = {
            Rule.ADDRESS: ReplacedAddresses(),
            Rule.CODEC: codec,
            Rule.DEVICE: lambda text: text if _DEVICE.fullmatch(text) else other(text),
            Rule.DIGEST: lambda text: text if text in tuple(Part) else digest(text),
            Rule.GROUP: lambda text: f"{RUN}{found[1]}" if (found := _GROUP.fullmatch(text)) else other(text),
            Rule.INVITE: invite,
            Rule.NAME: Labels("name-{}"),
            Rule.PART: lambda text: text if text in tuple(Part) else other(text),
            Rule.REASON: lambda text: _reason(text, reason),
            Rule.RUN: lambda text: RUN,
            Rule.SECRET: secret,
            Rule.SIGNATURE: lambda signature: type(signature)(),
        }

    @property
    def peers(self) -> Sequence[PeerId]:
        """The pseudonyms."""
        return tuple(self._peers.values())

    def event(self, event: Event) -> Event:
        """`event` without what identifies anybody. Raises NoRule."""
        redacted: Event = self.value(event, type(event))
        return redacted

    def value(self, value: Any, hint: Any) -> Any:
        """`value`, whose type is `hint`, redacted. Raises NoRule."""
        mapper = self._forms.mapper(hint)
        return mapper(self, value) if mapper else value

    def peer(self, peer: PeerId) -> PeerId:
        return self._peers[peer]

    def text(self, rule: Rule, value: Any) -> Any:
        return self._texts[rule](value) if value else value


def peers_in(log: Iterable[Event]) -> set[PeerId]:
    """All peers that the events name."""
    collector = _Collector()
    for event in log:
        collector.value(event, type(event))
    return collector.found


def redacted_log(log: Sequence[Event]) -> tuple[Event, ...]:
    """All events of a log, redacted. Raises NoRule."""
    redactor = Redactor(peers_in(log))
    return tuple(map(redactor.event, log))


def redacted_spec(spec: RunSpec) -> RunSpec:
    """`spec` without the names of files, data sets and digests of models; its hash is another one."""
    data = {name: DataSpec.model_fields[name].default for name in DATA_TEXTS}
    preset = spec.preset if spec.preset in PRESETS else RUN
    changes = {"data": spec.data.model_copy(update=data), "preset": preset, "initial": None}
    return RunSpec.model_validate(spec.model_copy(update=changes).model_dump())


DATA_TEXTS = ("source", "text_field", "tokenizer", "tokenizer_sha256", "end_token")
"""Settings of the data that get their defaults: they may be paths, or say which model it is."""


class _Collector(Redactor):
    """Notes the peers that it sees, and changes nothing of interest."""

    def __init__(self) -> None:
        super().__init__(())
        self.found: set[PeerId] = set()

    def peer(self, peer: PeerId) -> PeerId:
        self.found.add(peer)
        return peer

    def text(self, rule: Rule, value: Any) -> Any:
        return value


class _Forms:
    """How values of each type are mapped, worked out once for each type."""

    def __init__(self, rules: Mapping[tuple[type, str], Rule]) -> None:
        self._rules = rules
        self._known: dict[Any, _Mapper | None] = {}

    def mapper(self, hint: Any, rule: Rule | None = None, where: str = "") -> _Mapper | None:
        """What maps a value with the annotation `hint`; None if it stays as it is. Raises NoRule."""
        key = hint, rule
        if key not in self._known:
            self._known[key] = self._new(hint, rule, where or str(hint))
        return self._known[key]

    def _new(self, hint: Any, rule: Rule | None, where: str) -> _Mapper | None:  # noqa: PLR0911
        if hint is PeerId:
            return lambda redactor, value: redactor.peer(value)
        if hint in (str, bytes):
            if rule is None:
                raise NoRule(f"{where} is {hint.__name__}, and has no rule of redaction")
            return lambda redactor, value: redactor.text(rule, value)
        if isinstance(hint, type) and is_dataclass(hint):
            return self._record(hint)
        if hint is NoneType or hint is Any:
            return None
        if isinstance(hint, type) and issubclass(hint, bool | int | float | Enum):
            return None
        if hint is RunSpec:
            return lambda redactor, value: redacted_spec(value)
        return self._container(hint, rule, where)

    def _record(self, kind: type) -> _Mapper | None:
        hints = get_type_hints(kind)
        mappers = []
        for field in fields(kind):
            where = f"{kind.__name__}.{field.name}"
            mapper = self.mapper(hints[field.name], self._rules.get((kind, field.name)), where)
            if mapper is not None:
                mappers.append((field.name, mapper))

        names = [field.name for field in fields(kind)]

        def mapped(redactor: Redactor, value: Any) -> Any:
            changed = {name: mapper(redactor, getattr(value, name)) for name, mapper in mappers}
            return kind(**{name: changed.get(name, getattr(value, name)) for name in names})

        return mapped if mappers else None

    def _container(self, hint: Any, rule: Rule | None, where: str) -> _Mapper | None:
        origin, arguments = get_origin(hint), get_args(hint)
        inner = [self.mapper(each, rule, where) for each in arguments if each is not Ellipsis]
        if origin in (Union, UnionType):
            optional = [each for each in arguments if each is not NoneType]
            if len(optional) == 1:
                mapper = self.mapper(optional[0], rule, where)
                return mapper and (
                    lambda redactor, value: value if value is None else mapper(redactor, value)
                )
            if all(is_dataclass(each) for each in arguments):
                return lambda redactor, value: redactor.value(value, type(value))
        elif (origin is tuple and arguments[-1] is Ellipsis) or origin is frozenset:
            (item,) = inner
            if item is None:
                return None
            mapped = item
            return lambda redactor, value: origin(mapped(redactor, each) for each in value)
        elif origin is tuple:
            return lambda redactor, value: tuple(
                each if item is None else item(redactor, each)
                for item, each in zip(inner, value, strict=True)
            )
        elif isinstance(origin, type) and issubclass(origin, Mapping):
            key, item = inner
            return lambda redactor, value: {
                (key(redactor, name) if key else name): (item(redactor, each) if item else each)
                for name, each in value.items()
            }
        raise NoRule(f"{where} has the type {hint}, which redaction does not know")


def _reason(text: str, label: Labels) -> str:
    if text == FINISHED:  # the coordinator decides by this one
        return text
    known = ", ".join(phrase for phrase in PHRASES if phrase in text)
    return f"{label(text)} ({known})" if known else label(text)
