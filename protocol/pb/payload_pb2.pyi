from protocol.pb import hetnode_pb2 as _hetnode_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PayloadChunk(_message.Message):
    __slots__ = ("data", "announced", "refusal")
    DATA_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    announced: _hetnode_pb2.PayloadDescriptor
    refusal: str
    def __init__(self, data: _Optional[bytes] = ..., announced: _Optional[_Union[_hetnode_pb2.PayloadDescriptor, _Mapping]] = ..., refusal: _Optional[str] = ...) -> None: ...

class RangeRequest(_message.Message):
    __slots__ = ("descriptor", "first", "nbytes")
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    descriptor: _hetnode_pb2.PayloadDescriptor
    first: int
    nbytes: int
    def __init__(self, descriptor: _Optional[_Union[_hetnode_pb2.PayloadDescriptor, _Mapping]] = ..., first: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...

class CountRequest(_message.Message):
    __slots__ = ("group_id", "since", "senders")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    since: int
    senders: bytes
    def __init__(self, group_id: _Optional[bytes] = ..., since: _Optional[int] = ..., senders: _Optional[bytes] = ...) -> None: ...

class CountReply(_message.Message):
    __slots__ = ("senders", "since", "refusal")
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    senders: bytes
    since: int
    refusal: str
    def __init__(self, senders: _Optional[bytes] = ..., since: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...

class SignReply(_message.Message):
    __slots__ = ("signature", "refusal")
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    signature: bytes
    refusal: str
    def __init__(self, signature: _Optional[bytes] = ..., refusal: _Optional[str] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("stage", "part", "round", "index")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    stage: int
    part: str
    round: int
    index: int
    def __init__(self, stage: _Optional[int] = ..., part: _Optional[str] = ..., round: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...
