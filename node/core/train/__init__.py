"""Training: the inner phase, the outer round, and the process that computes."""
