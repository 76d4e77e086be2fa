"""A whole swarm in one process, without sockets, on a virtual clock: the same seed gives the same run.

All code is production code, except gRPC, the transport, and the process boundary of the worker.
"""
