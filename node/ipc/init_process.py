"""The first process of a container, when no other init is there.

The kernel hands to process 1 every process whose parent has ended, and no one else can collect it; and it
drops signals for process 1 that have no handler, so a command that still imports could not be stopped. Here
process 1 only collects processes and passes signals on, and the command is its child.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

_PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_AWAITED = {*_PASSED_ON, signal.SIGCHLD}
_BY_KERNEL = 0x80  # si_code SI_KERNEL


def continue_below_init() -> None:
    """Return at once, but if this is process 1, in a child of it.

    Process 1 then stays as long as this child, passes signals on to it, and collects all processes that have
    ended. It ends with the child's status, or with 128 + the number of the signal that has ended the child.
    """
    if os.getpid() != 1:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)  # first: none may be lost
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        return
    while True:
        found = signal.sigwaitinfo(_AWAITED)
        if found.si_signo == signal.SIGCHLD:
            _collect(child)
        elif found.si_code != _BY_KERNEL:  # a terminal has sent its signal to the child too
            with suppress(ProcessLookupError):
                os.kill(child, found.si_signo)


def _collect(child: int) -> None:
    """Collect the processes that have ended. Ends this process if `child` is one of them."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = os.waitstatus_to_exitcode(ended[1])
                os._exit(status if status >= 0 else 128 - status)
