"""A whole swarm in one process, without sockets, on a clock that jumps: the same seed gives the same run.

Everything is production code but for gRPC, hivemind, and the process boundary of the worker.
"""
