"""The id of a run: it names the specification and the authority.

Two runs of one specification have different ids. What peers sign contains the id, so nothing that was signed
for one run is valid in another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.trust.names import wrong_authority

if TYPE_CHECKING:
    from protocol.spec.run import RunSpec

_AUTHORITY_DIGITS = 32  # 128 bits: no one can make another authority with the same digits


def run_id_of(spec: RunSpec, pin: bytes) -> str:
    """The id of the run of `spec` under the authority with this pin (:func:`protocol.trust.tls.pin_of`)."""
    return f"{spec.name}-{_digits(pin)}"


def spec_name_in(run: str) -> str:
    """The name of the specification in the id of a run."""
    return run.rpartition("-")[0]


def names_authority(run: str, pin: bytes) -> bool:
    """Whether `run` may be a run of the authority with this pin."""
    return run.endswith(f"-{_digits(pin)}")


def check_run_id(told: str, spec: RunSpec, pin: bytes) -> None:
    """Raises WRONG_AUTHORITY unless `told` is the id of the run of `spec` under this authority."""
    expected = run_id_of(spec, pin)
    if told != expected:
        raise wrong_authority(
            f"The run is called {told!r:.140}, but by its specification and its authority it is {expected}."
        )


def _digits(pin: bytes) -> str:
    return pin.hex()[:_AUTHORITY_DIGITS]
