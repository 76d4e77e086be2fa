"""The default gateway, as operating systems tell it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from node.home.router.gateway import gateway_in_linux_routes, gateway_in_macos_route

HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
LAN = "wlan0\t0001A8C0\t00000000\t0001\t0\t0\t600\t00FFFFFF\t0\t0\t0\n"
HOME = "wlan0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n"
CABLE = "eth0\t00000000\tFE01A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
MACOS = """   route to: default
destination: default
       mask: default
    gateway: 192.168.1.1
  interface: en0
"""


def test_the_default_route_of_the_lowest_metric_counts() -> None:
    assert gateway_in_linux_routes(HEAD + LAN) is None
    assert gateway_in_linux_routes(HEAD + LAN + HOME) == "192.168.1.1"
    assert gateway_in_linux_routes(HEAD + HOME + LAN + CABLE) == "192.168.1.254"


def test_macos_tells_a_gateway_or_an_interface() -> None:
    assert gateway_in_macos_route(MACOS) == "192.168.1.1"
    assert gateway_in_macos_route(MACOS.replace("192.168.1.1", "utun3")) is None


@settings(max_examples=50)
@given(st.text(max_size=100))
def test_any_other_text_holds_none(text: str) -> None:
    assert gateway_in_macos_route(text) is None
    assert gateway_in_linux_routes(HEAD + text) is None
