"""Temperature, power and load of the GPUs of this machine, as nvidia-smi tells them."""

from __future__ import annotations

from dataclasses import dataclass

from node.home.guest.presence import said

_QUERY = "index,name,temperature.gpu,power.draw,power.limit,utilization.gpu,memory.used,memory.total"


@dataclass(frozen=True)
class Gpu:
    """One GPU now. None where the driver does not tell.

    Attributes:
        temperature: in degrees Celsius.
        power, power_limit: in watts.
        load: 0 to 1, of all processes.
        memory, memory_total: in bytes.
    """

    index: int
    name: str
    temperature: float | None = None
    power: float | None = None
    power_limit: float | None = None
    load: float | None = None
    memory: float | None = None
    memory_total: float | None = None


def gpus() -> list[Gpu]:
    """The GPUs of this machine; none without nvidia-smi. May take a second."""
    return gpus_in(said("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits") or "")


def gpus_in(described: str) -> list[Gpu]:
    """The GPUs in what nvidia-smi has printed; lines that are none are left out."""
    found = []
    for line in described.splitlines():
        index, *middle = (part.strip() for part in line.split(","))
        if not index.isdigit() or len(middle) < 7:
            continue
        name, numbers = ", ".join(middle[:-6]), [_number(text) for text in middle[-6:]]
        temperature, power, limit, load, used, total = numbers
        found.append(
            Gpu(
                int(index),
                name,
                temperature,
                power,
                limit,
                None if load is None else load / 100,
                None if used is None else used * 2**20,
                None if total is None else total * 2**20,
            )
        )
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # such as "[N/A]"
        return None
