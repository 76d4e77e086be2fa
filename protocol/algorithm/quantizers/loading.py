"""The quantizers by their names in the specification."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from protocol.algorithm.quantizers.quantizer import LinkQuantizer, PayloadQuantizer
from protocol.spec.outer import OuterSpec
from protocol.spec.quantizers import LINK_QUANTIZERS, PAYLOAD_QUANTIZERS


@cache
def link_quantizer(dtype: str) -> LinkQuantizer:
    """The quantizer that a link's `dtype` names; KeyError for a name that no specification accepts."""
    quantizer: LinkQuantizer = _CLASSES[LINK_QUANTIZERS[dtype].path]()
    return quantizer


def payload_quantizer(outer: OuterSpec) -> PayloadQuantizer:
    """The quantizer of the payloads of a round whose codec is `outer` (OuterSpec.of_round)."""
    return _payload_quantizer(outer.value_quantizer, outer.codebook)


@cache
def _payload_quantizer(name: str, codebook: str) -> PayloadQuantizer:
    quantizer: PayloadQuantizer = _CLASSES[PAYLOAD_QUANTIZERS[name]](codebook == "chunk")
    return quantizer


def _class_at(path: str) -> Any:
    module, _, name = path.partition(".")
    return getattr(import_module(f"protocol.algorithm.quantizers.{module}"), name)


# All of them now, and not when one is first used: the others of a round wait for the first step.
_CLASSES = {
    path: _class_at(path)
    for path in (*PAYLOAD_QUANTIZERS.values(), *(each.path for each in LINK_QUANTIZERS.values()))
}
