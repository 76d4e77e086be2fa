"""The quantizers by their names in the specification."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from protocol.math.quantizers.quantizer import LinkQuantizer, PayloadQuantizer
from protocol.spec.outer import OuterSpec
from protocol.spec.quantizers import LINK_QUANTIZERS, PAYLOAD_QUANTIZERS


@cache
def link_quantizer(dtype: str) -> LinkQuantizer:
    """The quantizer that a link's `dtype` names; KeyError for a name that no specification accepts."""
    quantizer: LinkQuantizer = _class_at(LINK_QUANTIZERS[dtype].path)()
    return quantizer


def payload_quantizer(outer: OuterSpec) -> PayloadQuantizer:
    """The quantizer of the payloads of a run."""
    return _payload_quantizer(outer.value_quantizer)


@cache
def _payload_quantizer(name: str) -> PayloadQuantizer:
    quantizer: PayloadQuantizer = _class_at(PAYLOAD_QUANTIZERS[name])()
    return quantizer


def _class_at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


# All of them now, and not when one is first used: the others of a round wait for the first step.
for _path in (*PAYLOAD_QUANTIZERS.values(), *(each.path for each in LINK_QUANTIZERS.values())):
    _class_at(_path)
