"""A node is a guest on its machine: when it has to rest, and how its owner tells it."""
