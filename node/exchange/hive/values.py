"""Decodes the values of the DHT, which any member of the run may have written.

hivemind's serializer calls itself for every extension type inside another one, so a value of 1 kB can end the
process. Here a value is a scalar or one dictionary of scalars; everything else is refused before it is built.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer

MAX_VALUE_BYTES = 1 << 19
"""Largest value: a dictionary with the records of about 700 peers. Answers of calls have the same bound."""

_MAX_ENTRIES = 4096
_DICTIONARY = 0x50  # hivemind's code of DictionaryDHTValue
_SCALARS = (type(None), bool, int, float, str, bytes)


def decode(data: bytes) -> Any:
    """The scalar or DictionaryDHTValue in `data`. Raises ValueError for anything else."""
    if len(data) > MAX_VALUE_BYTES:
        raise ValueError(f"a value of {len(data)} bytes, more than {MAX_VALUE_BYTES}")
    value = msgpack.unpackb(data, raw=False, ext_hook=_dictionary, max_array_len=0, max_map_len=0)
    # Empty arrays and msgpack's own timestamps pass the limits above.
    if not isinstance(value, (*_SCALARS, DictionaryDHTValue)):
        raise ValueError(f"a value of type {type(value).__name__}")
    return value


def limit_values() -> None:
    """Use :func:`decode` wherever hivemind decodes values, in this process and in those that it forks."""
    # hivemind has no option for this bound. Forked processes inherit the replaced function.
    MSGPackSerializer.loads = staticmethod(decode)


def _dictionary(code: int, data: bytes) -> DictionaryDHTValue:
    if code != _DICTIONARY:
        raise ValueError(f"a value of the extension type {code}")
    unpacked = msgpack.unpackb(data, raw=False, max_array_len=_MAX_ENTRIES, max_map_len=0, max_ext_len=0)
    match unpacked:
        # Its bound of entries and its end follow from the entries; those that the sender claims do not count.
        case [_, _, list(entries)]:
            dictionary = DictionaryDHTValue()
            for entry in entries:
                dictionary.store(*_checked(entry))
            return dictionary
    raise ValueError("a dictionary of another form")


def _checked(entry: object) -> tuple[str | bytes, bytes, float]:
    match entry:
        case [str() | bytes() as subkey, bytes(value), float(expires)] if math.isfinite(expires):
            return subkey, value, expires
    raise ValueError("an entry of another form")
