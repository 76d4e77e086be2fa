"""Terminal views: a run specification, a coordinator's status, and a local swarm."""
