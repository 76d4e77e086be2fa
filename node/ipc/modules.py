"""The modules of a node's processes, by name: each process imports its own, the template all of them."""

_ROOT = __name__.removesuffix("node.ipc.modules")  # "hetnode." if a wheel has installed this
TRANSPORT = f"{_ROOT}node.exchange.hive"
"""The package of the transport, as :mod:`node.exchange.transport` describes it."""
COMMAND, WORKER = f"{_ROOT}node.__main__", f"{_ROOT}node.worker.process"
CHILD_MODULES = ("torch", WORKER, f"{TRANSPORT}.host")
"""What the children of a node import: the worker and the host of the transport."""
_COMMANDS = (f"{_ROOT}node.cli.join", f"{_ROOT}node.cli.coordinator")
COMMAND_MODULES = (*CHILD_MODULES, *_COMMANDS, f"{_ROOT}node.process", f"{_ROOT}coordinator.app")
"""The same, and what ``hetnode join`` and ``hetnode coordinator`` import."""
