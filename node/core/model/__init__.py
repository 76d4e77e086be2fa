"""The model: LLaMA cut into stages, and its parameters before round 1."""
