from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DialRequest(_message.Message):
    __slots__ = ("peer", "address")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    address: str
    def __init__(self, peer: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class DialReply(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    def __init__(self, token: _Optional[bytes] = ...) -> None: ...

class ExposeRequest(_message.Message):
    __slots__ = ("peer", "dht_port")
    PEER_FIELD_NUMBER: _ClassVar[int]
    DHT_PORT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    dht_port: int
    def __init__(self, peer: _Optional[str] = ..., dht_port: _Optional[int] = ...) -> None: ...

class ExposeReply(_message.Message):
    __slots__ = ("dht_port", "waiting")
    DHT_PORT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    dht_port: int
    waiting: WaitingConnection
    def __init__(self, dht_port: _Optional[int] = ..., waiting: _Optional[_Union[WaitingConnection, _Mapping]] = ...) -> None: ...

class WaitingConnection(_message.Message):
    __slots__ = ("token", "dht", "source")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DHT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    dht: bool
    source: str
    def __init__(self, token: _Optional[bytes] = ..., dht: _Optional[bool] = ..., source: _Optional[str] = ...) -> None: ...

class StageRange(_message.Message):
    __slots__ = ("first", "stop")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    first: int
    stop: int
    def __init__(self, first: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("device", "memory_bytes", "threads", "flops", "uplink", "downlink", "round_trip", "main_bytes")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    UPLINK_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_FIELD_NUMBER: _ClassVar[int]
    MAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    device: str
    memory_bytes: int
    threads: int
    flops: float
    uplink: float
    downlink: float
    round_trip: float
    main_bytes: int
    def __init__(self, device: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., threads: _Optional[int] = ..., flops: _Optional[float] = ..., uplink: _Optional[float] = ..., downlink: _Optional[float] = ..., round_trip: _Optional[float] = ..., main_bytes: _Optional[int] = ...) -> None: ...

class LinkEstimate(_message.Message):
    __slots__ = ("peer", "round_trip", "bandwidth", "incoming")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    INCOMING_FIELD_NUMBER: _ClassVar[int]
    peer: str
    round_trip: float
    bandwidth: float
    incoming: float
    def __init__(self, peer: _Optional[str] = ..., round_trip: _Optional[float] = ..., bandwidth: _Optional[float] = ..., incoming: _Optional[float] = ...) -> None: ...

class Estimates(_message.Message):
    __slots__ = ("capacity", "microbatch_seconds", "links")
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    capacity: Capacity
    microbatch_seconds: float
    links: _containers.RepeatedCompositeFieldContainer[LinkEstimate]
    def __init__(self, capacity: _Optional[_Union[Capacity, _Mapping]] = ..., microbatch_seconds: _Optional[float] = ..., links: _Optional[_Iterable[_Union[LinkEstimate, _Mapping]]] = ...) -> None: ...

class ProbeMessage(_message.Message):
    __slots__ = ("hello", "echo", "data", "tally", "fill")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TALLY_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    hello: str
    echo: int
    data: bytes
    tally: int
    fill: float
    def __init__(self, hello: _Optional[str] = ..., echo: _Optional[int] = ..., data: _Optional[bytes] = ..., tally: _Optional[int] = ..., fill: _Optional[float] = ...) -> None: ...

class PeerRecord(_message.Message):
    __slots__ = ("peer", "protocol_version", "role", "capacity", "endpoint", "stages", "dht")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    DHT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    protocol_version: int
    role: str
    capacity: Capacity
    endpoint: str
    stages: StageRange
    dht: str
    def __init__(self, peer: _Optional[str] = ..., protocol_version: _Optional[int] = ..., role: _Optional[str] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ..., endpoint: _Optional[str] = ..., stages: _Optional[_Union[StageRange, _Mapping]] = ..., dht: _Optional[str] = ...) -> None: ...

class SignedRecord(_message.Message):
    __slots__ = ("record", "signature", "expires", "certificate")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    signature: bytes
    expires: float
    certificate: bytes
    def __init__(self, record: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., expires: _Optional[float] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class EnrollRequest(_message.Message):
    __slots__ = ("protocol_version", "invite_id", "secret", "peer", "tls_public_key", "proof", "oldest_protocol")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INVITE_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    TLS_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    invite_id: str
    secret: bytes
    peer: str
    tls_public_key: bytes
    proof: bytes
    oldest_protocol: int
    def __init__(self, protocol_version: _Optional[int] = ..., invite_id: _Optional[str] = ..., secret: _Optional[bytes] = ..., peer: _Optional[str] = ..., tls_public_key: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., oldest_protocol: _Optional[int] = ...) -> None: ...

class EnrollReply(_message.Message):
    __slots__ = ("certificate_pem", "authority_pem", "coordinator", "api_address", "run", "role")
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_PEM_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    API_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    authority_pem: bytes
    coordinator: str
    api_address: str
    run: str
    role: str
    def __init__(self, certificate_pem: _Optional[bytes] = ..., authority_pem: _Optional[bytes] = ..., coordinator: _Optional[str] = ..., api_address: _Optional[str] = ..., run: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("peer", "tls_public_key", "proof")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TLS_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    peer: str
    tls_public_key: bytes
    proof: bytes
    def __init__(self, peer: _Optional[str] = ..., tls_public_key: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("certificate_pem",)
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    def __init__(self, certificate_pem: _Optional[bytes] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ("from_round", "by", "reason")
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    from_round: int
    by: str
    reason: str
    def __init__(self, from_round: _Optional[int] = ..., by: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Rollback(_message.Message):
    __slots__ = ("round", "restore_round")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RESTORE_ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    restore_round: int
    def __init__(self, round: _Optional[int] = ..., restore_round: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("protocol_version", "peer", "role", "capacity", "endpoint", "spec_hash", "addresses", "any_role", "name", "oldest_protocol")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SPEC_HASH_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ANY_ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    peer: str
    role: str
    capacity: Capacity
    endpoint: str
    spec_hash: str
    addresses: Addresses
    any_role: bool
    name: str
    oldest_protocol: int
    def __init__(self, protocol_version: _Optional[int] = ..., peer: _Optional[str] = ..., role: _Optional[str] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ..., endpoint: _Optional[str] = ..., spec_hash: _Optional[str] = ..., addresses: _Optional[_Union[Addresses, _Mapping]] = ..., any_role: _Optional[bool] = ..., name: _Optional[str] = ..., oldest_protocol: _Optional[int] = ...) -> None: ...

class Addresses(_message.Message):
    __slots__ = ("endpoint", "dht", "relayed")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DHT_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    dht: str
    relayed: bool
    def __init__(self, endpoint: _Optional[str] = ..., dht: _Optional[str] = ..., relayed: _Optional[bool] = ...) -> None: ...

class Reached(_message.Message):
    __slots__ = ("reachability", "endpoint", "dht", "reason", "endpoint_problem", "dht_problem")
    REACHABILITY_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DHT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    DHT_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    reachability: str
    endpoint: bool
    dht: bool
    reason: str
    endpoint_problem: str
    dht_problem: str
    def __init__(self, reachability: _Optional[str] = ..., endpoint: _Optional[bool] = ..., dht: _Optional[bool] = ..., reason: _Optional[str] = ..., endpoint_problem: _Optional[str] = ..., dht_problem: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("spec_json", "spec_hash", "run", "dht_peers", "spec_signature", "time", "reached", "relays", "role", "role_reason", "name", "protocol_version")
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    SPEC_HASH_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    DHT_PEERS_FIELD_NUMBER: _ClassVar[int]
    SPEC_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROLE_REASON_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    spec_json: str
    spec_hash: str
    run: str
    dht_peers: _containers.RepeatedScalarFieldContainer[str]
    spec_signature: bytes
    time: float
    reached: Reached
    relays: _containers.RepeatedCompositeFieldContainer[RelayAddress]
    role: str
    role_reason: str
    name: str
    protocol_version: int
    def __init__(self, spec_json: _Optional[str] = ..., spec_hash: _Optional[str] = ..., run: _Optional[str] = ..., dht_peers: _Optional[_Iterable[str]] = ..., spec_signature: _Optional[bytes] = ..., time: _Optional[float] = ..., reached: _Optional[_Union[Reached, _Mapping]] = ..., relays: _Optional[_Iterable[_Union[RelayAddress, _Mapping]]] = ..., role: _Optional[str] = ..., role_reason: _Optional[str] = ..., name: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class RelayAddress(_message.Message):
    __slots__ = ("peer", "endpoint")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    endpoint: str
    def __init__(self, peer: _Optional[str] = ..., endpoint: _Optional[str] = ...) -> None: ...

class UpdateAddressesRequest(_message.Message):
    __slots__ = ("peer", "addresses")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    addresses: Addresses
    def __init__(self, peer: _Optional[str] = ..., addresses: _Optional[_Union[Addresses, _Mapping]] = ...) -> None: ...

class UpdateAddressesReply(_message.Message):
    __slots__ = ("reached",)
    REACHED_FIELD_NUMBER: _ClassVar[int]
    reached: Reached
    def __init__(self, reached: _Optional[_Union[Reached, _Mapping]] = ...) -> None: ...

class TryAddressesRequest(_message.Message):
    __slots__ = ("peer", "addresses")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    addresses: Addresses
    def __init__(self, peer: _Optional[str] = ..., addresses: _Optional[_Union[Addresses, _Mapping]] = ...) -> None: ...

class TryAddressesReply(_message.Message):
    __slots__ = ("reached", "source", "source_port", "relays")
    REACHED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PORT_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    reached: Reached
    source: str
    source_port: int
    relays: _containers.RepeatedCompositeFieldContainer[RelayAddress]
    def __init__(self, reached: _Optional[_Union[Reached, _Mapping]] = ..., source: _Optional[str] = ..., source_port: _Optional[int] = ..., relays: _Optional[_Iterable[_Union[RelayAddress, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("peer", "end_only", "changes")
    PEER_FIELD_NUMBER: _ClassVar[int]
    END_ONLY_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    end_only: bool
    changes: bool
    def __init__(self, peer: _Optional[str] = ..., end_only: _Optional[bool] = ..., changes: _Optional[bool] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("peer", "stages", "endpoint", "relayed")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    peer: str
    stages: StageRange
    endpoint: str
    relayed: bool
    def __init__(self, peer: _Optional[str] = ..., stages: _Optional[_Union[StageRange, _Mapping]] = ..., endpoint: _Optional[str] = ..., relayed: _Optional[bool] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("k", "dialer")
    K_FIELD_NUMBER: _ClassVar[int]
    DIALER_FIELD_NUMBER: _ClassVar[int]
    k: int
    dialer: str
    def __init__(self, k: _Optional[int] = ..., dialer: _Optional[str] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("index", "members", "links", "weight", "microbatches", "resumes_at", "resumed_in")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    RESUMES_AT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_IN_FIELD_NUMBER: _ClassVar[int]
    index: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    links: _containers.RepeatedCompositeFieldContainer[Link]
    weight: float
    microbatches: int
    resumes_at: int
    resumed_in: int
    def __init__(self, index: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., weight: _Optional[float] = ..., microbatches: _Optional[int] = ..., resumes_at: _Optional[int] = ..., resumed_in: _Optional[int] = ...) -> None: ...

class RunChange(_message.Message):
    __slots__ = ("from_round", "settings", "reason", "first_sample")
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIRST_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    from_round: int
    settings: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    first_sample: int
    def __init__(self, from_round: _Optional[int] = ..., settings: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., first_sample: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("epoch", "from_round", "first_sample", "replicas", "reason", "changes", "repairs")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    FIRST_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    REPAIRS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    from_round: int
    first_sample: int
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    reason: str
    changes: _containers.RepeatedCompositeFieldContainer[RunChange]
    repairs: int
    def __init__(self, epoch: _Optional[int] = ..., from_round: _Optional[int] = ..., first_sample: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., reason: _Optional[str] = ..., changes: _Optional[_Iterable[_Union[RunChange, _Mapping]]] = ..., repairs: _Optional[int] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("peer", "replica", "position", "stages")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    replica: int
    position: int
    stages: StageRange
    def __init__(self, peer: _Optional[str] = ..., replica: _Optional[int] = ..., position: _Optional[int] = ..., stages: _Optional[_Union[StageRange, _Mapping]] = ...) -> None: ...

class MemberSource(_message.Message):
    __slots__ = ("peer", "source")
    PEER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    source: str
    def __init__(self, peer: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class PlanUpdate(_message.Message):
    __slots__ = ("signed_plan", "signature", "waiting", "finished", "banned", "followers", "round", "relays", "sources", "pause", "rollback", "pieces", "same_lists", "succession")
    SIGNED_PLAN_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    FOLLOWERS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    SAME_LISTS_FIELD_NUMBER: _ClassVar[int]
    SUCCESSION_FIELD_NUMBER: _ClassVar[int]
    signed_plan: bytes
    signature: bytes
    waiting: str
    finished: bool
    banned: _containers.RepeatedScalarFieldContainer[str]
    followers: _containers.RepeatedCompositeFieldContainer[Place]
    round: int
    relays: _containers.RepeatedCompositeFieldContainer[RelayAddress]
    sources: _containers.RepeatedCompositeFieldContainer[MemberSource]
    pause: Pause
    rollback: Rollback
    pieces: _containers.RepeatedCompositeFieldContainer[PlanPiece]
    same_lists: bool
    succession: Succession
    def __init__(self, signed_plan: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., waiting: _Optional[str] = ..., finished: _Optional[bool] = ..., banned: _Optional[_Iterable[str]] = ..., followers: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., round: _Optional[int] = ..., relays: _Optional[_Iterable[_Union[RelayAddress, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[MemberSource, _Mapping]]] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ..., rollback: _Optional[_Union[Rollback, _Mapping]] = ..., pieces: _Optional[_Iterable[_Union[PlanPiece, _Mapping]]] = ..., same_lists: _Optional[bool] = ..., succession: _Optional[_Union[Succession, _Mapping]] = ...) -> None: ...

class Succession(_message.Message):
    __slots__ = ("term", "others", "dht_peers")
    TERM_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    DHT_PEERS_FIELD_NUMBER: _ClassVar[int]
    term: bytes
    others: _containers.RepeatedScalarFieldContainer[str]
    dht_peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, term: _Optional[bytes] = ..., others: _Optional[_Iterable[str]] = ..., dht_peers: _Optional[_Iterable[str]] = ...) -> None: ...

class PlanPiece(_message.Message):
    __slots__ = ("offset", "length", "literal")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    LITERAL_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    literal: bytes
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ..., literal: _Optional[bytes] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("peer", "round", "inner_step", "estimates", "waits", "kept")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    round: int
    inner_step: int
    estimates: Estimates
    waits: _containers.RepeatedScalarFieldContainer[str]
    kept: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, peer: _Optional[str] = ..., round: _Optional[int] = ..., inner_step: _Optional[int] = ..., estimates: _Optional[_Union[Estimates, _Mapping]] = ..., waits: _Optional[_Iterable[str]] = ..., kept: _Optional[_Iterable[int]] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("round", "closing", "closes_seconds", "interval")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    CLOSES_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    round: int
    closing: bool
    closes_seconds: float
    interval: float
    def __init__(self, round: _Optional[int] = ..., closing: _Optional[bool] = ..., closes_seconds: _Optional[float] = ..., interval: _Optional[float] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("peer", "reason")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer: str
    reason: str
    def __init__(self, peer: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("peer", "reason")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer: str
    reason: str
    def __init__(self, peer: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportLinkRequest(_message.Message):
    __slots__ = ("peer", "epoch", "neighbour", "address", "reason")
    PEER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOUR_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer: str
    epoch: int
    neighbour: str
    address: str
    reason: str
    def __init__(self, peer: _Optional[str] = ..., epoch: _Optional[int] = ..., neighbour: _Optional[str] = ..., address: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ReportLinkReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RetreatRequest(_message.Message):
    __slots__ = ("peer", "epoch", "reason", "round", "steps")
    PEER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    epoch: int
    reason: str
    round: int
    steps: int
    def __init__(self, peer: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ..., round: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class RetreatReply(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class PayloadDescriptor(_message.Message):
    __slots__ = ("run", "stage", "round", "owner", "anchor_digest", "codec", "weight", "nbytes", "sha256", "signature", "epoch")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run: str
    stage: int
    round: int
    owner: str
    anchor_digest: str
    codec: str
    weight: float
    nbytes: int
    sha256: str
    signature: bytes
    epoch: int
    def __init__(self, run: _Optional[str] = ..., stage: _Optional[int] = ..., round: _Optional[int] = ..., owner: _Optional[str] = ..., anchor_digest: _Optional[str] = ..., codec: _Optional[str] = ..., weight: _Optional[float] = ..., nbytes: _Optional[int] = ..., sha256: _Optional[str] = ..., signature: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("peer", "descriptor", "packs")
    PEER_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    PACKS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    descriptor: PayloadDescriptor
    packs: bool
    def __init__(self, peer: _Optional[str] = ..., descriptor: _Optional[_Union[PayloadDescriptor, _Mapping]] = ..., packs: _Optional[bool] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("group_id", "descriptors", "seconds", "packed", "lines")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    descriptors: _containers.RepeatedCompositeFieldContainer[PayloadDescriptor]
    seconds: float
    packed: bytes
    lines: _containers.RepeatedCompositeFieldContainer[MemberLine]
    def __init__(self, group_id: _Optional[str] = ..., descriptors: _Optional[_Iterable[_Union[PayloadDescriptor, _Mapping]]] = ..., seconds: _Optional[float] = ..., packed: _Optional[bytes] = ..., lines: _Optional[_Iterable[_Union[MemberLine, _Mapping]]] = ...) -> None: ...

class MemberLine(_message.Message):
    __slots__ = ("uplink", "downlink", "is_open")
    UPLINK_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    uplink: int
    downlink: int
    is_open: bool
    def __init__(self, uplink: _Optional[int] = ..., downlink: _Optional[int] = ..., is_open: _Optional[bool] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("peer", "stage", "round", "held", "rejected", "packs", "group", "positions", "result")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    PACKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    stage: int
    round: int
    held: _containers.RepeatedCompositeFieldContainer[PayloadDescriptor]
    rejected: _containers.RepeatedCompositeFieldContainer[Rejection]
    packs: bool
    group: bytes
    positions: bytes
    result: ResultClaim
    def __init__(self, peer: _Optional[str] = ..., stage: _Optional[int] = ..., round: _Optional[int] = ..., held: _Optional[_Iterable[_Union[PayloadDescriptor, _Mapping]]] = ..., rejected: _Optional[_Iterable[_Union[Rejection, _Mapping]]] = ..., packs: _Optional[bool] = ..., group: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., result: _Optional[_Union[ResultClaim, _Mapping]] = ...) -> None: ...

class ResultClaim(_message.Message):
    __slots__ = ("sha256", "nbytes", "without")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    nbytes: int
    without: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sha256: _Optional[str] = ..., nbytes: _Optional[int] = ..., without: _Optional[_Iterable[str]] = ...) -> None: ...

class CommittedResult(_message.Message):
    __slots__ = ("sha256", "nbytes", "holders")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    nbytes: int
    holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sha256: _Optional[str] = ..., nbytes: _Optional[int] = ..., holders: _Optional[_Iterable[str]] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("descriptor", "reason")
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    descriptor: PayloadDescriptor
    reason: str
    def __init__(self, descriptor: _Optional[_Union[PayloadDescriptor, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class AwaitDecisionRequest(_message.Message):
    __slots__ = ("peer", "stage", "round", "withheld", "packs")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    PACKS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    stage: int
    round: int
    withheld: int
    packs: bool
    def __init__(self, peer: _Optional[str] = ..., stage: _Optional[int] = ..., round: _Optional[int] = ..., withheld: _Optional[int] = ..., packs: _Optional[bool] = ...) -> None: ...

class ManifestEntry(_message.Message):
    __slots__ = ("descriptor", "holders")
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    descriptor: PayloadDescriptor
    holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, descriptor: _Optional[_Union[PayloadDescriptor, _Mapping]] = ..., holders: _Optional[_Iterable[str]] = ...) -> None: ...

class DecisionReply(_message.Message):
    __slots__ = ("stage", "round", "committed", "entries", "next_epoch", "reason", "restore_round", "packed", "counted", "result")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RESTORE_ROUND_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    stage: int
    round: int
    committed: bool
    entries: _containers.RepeatedCompositeFieldContainer[ManifestEntry]
    next_epoch: int
    reason: str
    restore_round: int
    packed: bytes
    counted: bytes
    result: CommittedResult
    def __init__(self, stage: _Optional[int] = ..., round: _Optional[int] = ..., committed: _Optional[bool] = ..., entries: _Optional[_Iterable[_Union[ManifestEntry, _Mapping]]] = ..., next_epoch: _Optional[int] = ..., reason: _Optional[str] = ..., restore_round: _Optional[int] = ..., packed: _Optional[bytes] = ..., counted: _Optional[bytes] = ..., result: _Optional[_Union[CommittedResult, _Mapping]] = ...) -> None: ...

class AttestRequest(_message.Message):
    __slots__ = ("peer", "stage", "round", "part", "digest")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    peer: str
    stage: int
    round: int
    part: str
    digest: str
    def __init__(self, peer: _Optional[str] = ..., stage: _Optional[int] = ..., round: _Optional[int] = ..., part: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class AttestReply(_message.Message):
    __slots__ = ("agrees", "expected")
    AGREES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    agrees: bool
    expected: str
    def __init__(self, agrees: _Optional[bool] = ..., expected: _Optional[str] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("peer", "stage", "part", "round")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    peer: str
    stage: int
    part: str
    round: int
    def __init__(self, peer: _Optional[str] = ..., stage: _Optional[int] = ..., part: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class StateRecord(_message.Message):
    __slots__ = ("run", "stage", "part", "round", "digest", "holders")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    run: str
    stage: int
    part: str
    round: int
    digest: str
    holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., stage: _Optional[int] = ..., part: _Optional[str] = ..., round: _Optional[int] = ..., digest: _Optional[str] = ..., holders: _Optional[_Iterable[str]] = ...) -> None: ...

class SignedState(_message.Message):
    __slots__ = ("record", "signature")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    signature: bytes
    def __init__(self, record: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class LocateReply(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedCompositeFieldContainer[SignedState]
    def __init__(self, states: _Optional[_Iterable[_Union[SignedState, _Mapping]]] = ...) -> None: ...

class PayloadAgreement(_message.Message):
    __slots__ = ("stage", "owner", "cosine", "norm", "mean_norm", "alike", "unlike", "likeness")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    COSINE_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    MEAN_NORM_FIELD_NUMBER: _ClassVar[int]
    ALIKE_FIELD_NUMBER: _ClassVar[int]
    UNLIKE_FIELD_NUMBER: _ClassVar[int]
    LIKENESS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    owner: str
    cosine: float
    norm: float
    mean_norm: float
    alike: float
    unlike: float
    likeness: float
    def __init__(self, stage: _Optional[int] = ..., owner: _Optional[str] = ..., cosine: _Optional[float] = ..., norm: _Optional[float] = ..., mean_norm: _Optional[float] = ..., alike: _Optional[float] = ..., unlike: _Optional[float] = ..., likeness: _Optional[float] = ...) -> None: ...

class Measurement(_message.Message):
    __slots__ = ("peer", "round", "replica", "position", "train_loss", "validation_loss", "tokens", "inner_seconds", "outer_seconds", "link_bytes_sent", "link_bytes_dense", "payload_bytes", "payload_bytes_dense", "gradient_norm", "complete", "steps", "extra_steps", "microbatches", "compute_seconds", "progress_norm", "error_norm", "agreements", "nonfinite_step")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TRAIN_LOSS_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    INNER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OUTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_DENSE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_DENSE_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_STEPS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_NORM_FIELD_NUMBER: _ClassVar[int]
    ERROR_NORM_FIELD_NUMBER: _ClassVar[int]
    AGREEMENTS_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_STEP_FIELD_NUMBER: _ClassVar[int]
    peer: str
    round: int
    replica: int
    position: int
    train_loss: float
    validation_loss: float
    tokens: int
    inner_seconds: float
    outer_seconds: float
    link_bytes_sent: int
    link_bytes_dense: int
    payload_bytes: int
    payload_bytes_dense: int
    gradient_norm: float
    complete: bool
    steps: int
    extra_steps: int
    microbatches: int
    compute_seconds: float
    progress_norm: float
    error_norm: float
    agreements: _containers.RepeatedCompositeFieldContainer[PayloadAgreement]
    nonfinite_step: int
    def __init__(self, peer: _Optional[str] = ..., round: _Optional[int] = ..., replica: _Optional[int] = ..., position: _Optional[int] = ..., train_loss: _Optional[float] = ..., validation_loss: _Optional[float] = ..., tokens: _Optional[int] = ..., inner_seconds: _Optional[float] = ..., outer_seconds: _Optional[float] = ..., link_bytes_sent: _Optional[int] = ..., link_bytes_dense: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., payload_bytes_dense: _Optional[int] = ..., gradient_norm: _Optional[float] = ..., complete: _Optional[bool] = ..., steps: _Optional[int] = ..., extra_steps: _Optional[int] = ..., microbatches: _Optional[int] = ..., compute_seconds: _Optional[float] = ..., progress_norm: _Optional[float] = ..., error_norm: _Optional[float] = ..., agreements: _Optional[_Iterable[_Union[PayloadAgreement, _Mapping]]] = ..., nonfinite_step: _Optional[int] = ...) -> None: ...

class MeasureReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("peer", "role", "lifecycle", "round", "inner_step", "seen_seconds_ago", "place")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LIFECYCLE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    SEEN_SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    role: str
    lifecycle: str
    round: int
    inner_step: int
    seen_seconds_ago: float
    place: str
    def __init__(self, peer: _Optional[str] = ..., role: _Optional[str] = ..., lifecycle: _Optional[str] = ..., round: _Optional[int] = ..., inner_step: _Optional[int] = ..., seen_seconds_ago: _Optional[float] = ..., place: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run", "spec_json", "phase", "rounds_decided", "rounds_committed", "rounds_aborted", "peers", "anchors_agree", "time", "round", "tokens_committed", "record")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_DECIDED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_ABORTED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ANCHORS_AGREE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    run: str
    spec_json: str
    phase: str
    rounds_decided: int
    rounds_committed: int
    rounds_aborted: int
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    anchors_agree: bool
    time: float
    round: int
    tokens_committed: int
    record: bytes
    def __init__(self, run: _Optional[str] = ..., spec_json: _Optional[str] = ..., phase: _Optional[str] = ..., rounds_decided: _Optional[int] = ..., rounds_committed: _Optional[int] = ..., rounds_aborted: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., anchors_agree: _Optional[bool] = ..., time: _Optional[float] = ..., round: _Optional[int] = ..., tokens_committed: _Optional[int] = ..., record: _Optional[bytes] = ...) -> None: ...

class TensorHeader(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class FrameId(_message.Message):
    __slots__ = ("epoch", "round", "step", "microbatch", "kind")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    round: int
    step: int
    microbatch: int
    kind: str
    def __init__(self, epoch: _Optional[int] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., microbatch: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "run", "spec_hash", "peer", "replica", "position", "epoch", "round", "oldest_protocol")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SPEC_HASH_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run: str
    spec_hash: str
    peer: str
    replica: int
    position: int
    epoch: int
    round: int
    oldest_protocol: int
    def __init__(self, protocol_version: _Optional[int] = ..., run: _Optional[str] = ..., spec_hash: _Optional[str] = ..., peer: _Optional[str] = ..., replica: _Optional[int] = ..., position: _Optional[int] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., oldest_protocol: _Optional[int] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("id", "tensors", "nbytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    id: FrameId
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHeader]
    nbytes: int
    def __init__(self, id: _Optional[_Union[FrameId, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorHeader, _Mapping]]] = ..., nbytes: _Optional[int] = ...) -> None: ...

class LinkMessage(_message.Message):
    __slots__ = ("hello", "header", "chunk")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    header: FrameHeader
    chunk: bytes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., header: _Optional[_Union[FrameHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...
