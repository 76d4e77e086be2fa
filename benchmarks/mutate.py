"""Makes nearly valid inputs for a decoder from valid ones: changes of fields and of bytes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

MAX_BYTES = 1 << 14

_INTEGERS = (0, 1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_FLOATS = (0.0, -0.0, -1.0, 0.5, 1e-9, 5e-324, 1e21, 1e308, math.nan, math.inf, -math.inf)
_TEXTS = (
    "",
    "\0",
    "x" * 129,
    "é" * 1001,
    "stage",
    "replica",
    "embedding",
    "no such name",
    "f32",
    "forward",
    ":0",
)
_SIZES = (0, 1, 16, 31, 32, 33, 63, 64, 65, 300, 2100, 9000)
_COPIES = (1, 2, 20, 300)
_LONG = 200
"""Bytes of an element from which on a list gets only one more of it."""
_MOST_COPIES = 600
"""In one change, lists inside lists included. Their sum would fill the memory before the input is cut."""
_INTEGER_BITS = {
    FieldDescriptor.CPPTYPE_UINT32: 32,
    FieldDescriptor.CPPTYPE_INT32: 31,
    FieldDescriptor.CPPTYPE_UINT64: 64,
    FieldDescriptor.CPPTYPE_INT64: 63,
    FieldDescriptor.CPPTYPE_ENUM: 3,
}


class Mutator:
    """Makes random inputs. The same seed gives the same inputs."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._chance = self._random.random
        self._copies = 0

    def mutated(self, corpus: Sequence[bytes], message: type[Message] | None) -> bytes:
        """A changed input of `corpus`. If it is a `message`, half of the changes are to its fields."""
        data = self._choose(corpus)
        if message is not None and message.DESCRIPTOR.fields and self._chance() < 0.5:
            try:
                parsed = message.FromString(data)
            except DecodeError:
                pass
            else:
                self._copies = 0
                for _ in range(self._random.randint(1, 3)):
                    self._change_field(parsed)
                return parsed.SerializeToString()[:MAX_BYTES]
        changed = bytearray(data)
        for _ in range(self._choose((1, 1, 2, 4))):
            self._change_bytes(changed, corpus)
        return bytes(changed[:MAX_BYTES])

    def _change_field(self, message: Message) -> None:
        choose = self._choose
        field = choose(message.DESCRIPTOR.fields)
        if self._chance() < 0.1:
            message.ClearField(field.name)
        elif not field.is_repeated:
            if field.message_type is None:
                setattr(message, field.name, self._value(field))
            elif self._chance() < 0.9:
                self._change_field(getattr(message, field.name))
            else:
                getattr(message, field.name).SetInParent()
        else:
            self._change_elements(getattr(message, field.name), field)

    def _change_elements(self, values: object, field: FieldDescriptor) -> None:
        choose, elements = self._choose, values
        if field.message_type is None:
            value = self._value(field)
            is_long = isinstance(value, (str, bytes)) and len(value) > _LONG
            elements.extend([value] * (1 if is_long else choose(_COPIES)))  # type: ignore[attr-defined]
        elif not len(elements) or self._chance() < 0.3:  # type: ignore[arg-type]
            for number in range(choose(_COPIES)):
                # Measured again: the first one may be the first of these.
                is_long = len(elements) and elements[0].ByteSize() > _LONG  # type: ignore[arg-type, index]
                if number and (is_long or self._copies >= _MOST_COPIES):
                    break
                self._copies += 1
                added = elements.add()  # type: ignore[attr-defined]
                if len(elements) > 1:  # type: ignore[arg-type]
                    added.CopyFrom(elements[0])  # type: ignore[index]
                self._change_field(added)
        else:
            self._change_field(choose(elements))  # type: ignore[call-overload]

    def _value(self, field: FieldDescriptor) -> object:
        choose, chance = self._choose, self._chance
        kind = field.cpp_type
        if kind in _INTEGER_BITS:
            value = choose(_INTEGERS) if chance() < 0.7 else self._random.getrandbits(64)
            return value & (1 << _INTEGER_BITS[kind]) - 1
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return chance() < 0.5
        if field.type == FieldDescriptor.TYPE_STRING:
            return (
                choose(_TEXTS) if chance() < 0.8 else "".join(chr(choose(range(1, 1000))) for _ in range(9))
            )
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._random.randbytes(choose(_SIZES))
        return choose(_FLOATS) if chance() < 0.8 else self._random.gauss(0, 1e6)

    def _change_bytes(self, data: bytearray, corpus: Sequence[bytes]) -> None:
        pick = self._pick
        at = pick(len(data) + 1)
        end = min(len(data), at + 1 + pick(16))
        match pick(8):
            case 0 if at < len(data):
                data[at] ^= 1 << pick(8)
            case 1 if at < len(data):
                data[at] = pick(256)
            case 2:
                data[at:at] = self._random.randbytes(1 + pick(8))
            case 3:
                del data[at:end]
            case 4:
                data[at:at] = data[at:end] * self._choose((1, 4, 64))
            case 5:
                del data[at:]
            case 6:
                number, size = self._choose(_INTEGERS), self._choose((1, 2, 4, 8))
                number &= (1 << 8 * size) - 1
                data[at : at + size] = number.to_bytes(size, self._choose(("little", "big")))
            case _:
                other = self._choose(corpus)
                start = pick(len(other) + 1)
                data[at:] = other[start:]

    def _pick(self, limit: int) -> int:
        """A number from 0 to limit - 1. Twice as fast as randrange, and uniform enough here."""
        return int(self._chance() * limit)

    def _choose(self, values: Sequence[Any]) -> Any:
        return values[self._pick(len(values))]
