"""Temperature and power of GPUs, as nvidia-smi prints them."""

from __future__ import annotations

from node.home.guest.sensors import Gpu, gpus_in


def test_what_the_driver_tells() -> None:
    described = (
        "0, NVIDIA GeForce RTX 4090, 61, 312.45, 450.00, 97, 20123, 24564\n"
        "1, Tesla K80, Rev, B, 40, [N/A], [Not Supported], 0, 1, 11441\n"
    )
    assert gpus_in(described) == [
        Gpu(0, "NVIDIA GeForce RTX 4090", 61.0, 312.45, 450.0, 0.97, 20123 * 2**20, 24564 * 2**20),
        Gpu(1, "Tesla K80, Rev, B", 40.0, None, None, 0.0, 2**20, 11441 * 2**20),
    ]


def test_what_is_no_gpu_is_left_out() -> None:
    assert gpus_in("") == gpus_in("No devices were found\n\n7, short\n") == []
