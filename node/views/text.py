"""Text of others on a terminal, and figures for people."""

from __future__ import annotations

from rich.text import Text

from protocol.server.terminal import visible

MOST_CHARACTERS = 300
"""Of a text that a peer has written. More than a screen of it helps nobody."""


def plain(text: str, most: int = MOST_CHARACTERS) -> str:
    """`text` without characters that would move the cursor, colour or reverse what follows, cut to `most`."""
    if len(text) > most:
        text = f"{text[: most - 1]}…"  # before the rest: the text may be long
    return visible(text).replace("\n", " ").replace("\t", " ")


def as_text(text: str, style: str = "", most: int = MOST_CHARACTERS) -> Text:
    """:func:`plain` for rich: what looks like markup is text, too."""
    return Text(plain(text, most), style=style)


def short_id(peer: str) -> str:
    """The end of a peer id: all begin alike. As in the messages of the coordinator."""
    return plain(peer[-8:])


def duration(seconds: float | None) -> str:
    """Such as "42 s", "3:05 min", "2 h 10 min" or "5 d 3 h"; "?" for an unknown one."""
    if seconds is None or not seconds < 1e10:
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s" if whole >= 10 or seconds < 0.05 else f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def count(number: float) -> str:
    """Such as "950", "12.4k", "3.1M" or "2.0G"."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000:
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.0f}P"


def megabits(bytes_per_second: float) -> str:
    """Such as "3.2 Mb/s"."""
    rate = bytes_per_second * 8e-6
    return f"{rate:,.0f} Mb/s" if rate >= 100 else f"{rate:.1f} Mb/s"


def bar(share: float, width: int) -> Text:
    """A bar of which `share` (0 to 1) is filled."""
    filled = min(max(0.0, share), 1.0) * width
    whole = int(filled)
    part = " ▏▎▍▌▋▊▉"[int(8 * (filled - whole))] if whole < width else ""
    done = Text("█" * whole + part.strip(), style="cyan")
    return done.append("░" * (width - len(done)), style="bright_black")
