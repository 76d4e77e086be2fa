"""A whole swarm in one process, for questions about the algorithm rather than about the network."""
