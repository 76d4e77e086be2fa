"""The modules of a node's processes, by name: each process imports its own, the template all of them."""

TRANSPORT = "node.exchange.hive"
"""The package of the transport, as :mod:`node.exchange.transport` describes it."""
CHILD_MODULES = ("torch", "node.worker.process", f"{TRANSPORT}.host")
"""What the children of a node import: the worker and the host of the transport."""
COMMAND_MODULES = (*CHILD_MODULES, "node.cli.join", "node.cli.coordinator", "node.process", "coordinator.app")
"""The same, and what ``hetnode join`` and ``hetnode coordinator`` import."""
