"""The limit on open files of this process: every connection takes some."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

_MOST = 1 << 16
"""As many as are ever useful: some systems know no hard limit."""
_ENOUGH = 512


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft if soft != resource.RLIM_INFINITY else _MOST


def few_descriptors() -> str:
    """A sentence, if this process may open so few files that connections will fail; else "".

    The soft limit is raised before.
    """
    if (limit := raise_descriptor_limit()) > _ENOUGH:
        return ""
    return f"this process may open {limit} files at once, by its hard limit: connections beyond that fail"


def warn_of_few_descriptors() -> None:
    """Log :func:`few_descriptors`, with what to do."""
    if found := few_descriptors():
        log.warning("%s. %s", found, MORE_DESCRIPTORS)


MORE_DESCRIPTORS = "Raise it with 'ulimit -Hn 4096' as root, or LimitNOFILE= of the service."
