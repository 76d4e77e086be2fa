"""Several hosts as one peer: a leader, which is the node, and followers, which run the workers of its ranks.

A leaf: ``hetnode join`` registers it (:mod:`node.hosts.command`), and no other part of a node knows it.
"""
