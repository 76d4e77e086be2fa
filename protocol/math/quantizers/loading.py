"""The quantizers by their names in the specification."""

from __future__ import annotations

from functools import cache
from pkgutil import resolve_name

from protocol.math.quantizers.quantizer import LinkQuantizer, PayloadQuantizer
from protocol.spec.outer import OuterSpec
from protocol.spec.quantizers import LINK_QUANTIZERS, PAYLOAD_QUANTIZERS


@cache
def link_quantizer(dtype: str) -> LinkQuantizer:
    """The quantizer that a link's `dtype` names; KeyError for a name that no specification accepts."""
    quantizer: LinkQuantizer = resolve_name(LINK_QUANTIZERS[dtype].path)()
    return quantizer


def payload_quantizer(outer: OuterSpec) -> PayloadQuantizer:
    """The quantizer of the payloads of a run."""
    return _payload_quantizer(outer.value_quantizer)


@cache
def _payload_quantizer(name: str) -> PayloadQuantizer:
    quantizer: PayloadQuantizer = resolve_name(PAYLOAD_QUANTIZERS[name].path)()
    return quantizer
