"""The limit on open files of this process: every connection takes some."""

from __future__ import annotations

import resource

_MOST = 1 << 16
"""As many as are ever useful: some systems know no hard limit."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft if soft != resource.RLIM_INFINITY else _MOST
