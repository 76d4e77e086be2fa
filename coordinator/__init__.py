"""The coordinator: membership, grouping and the one commit log. Tensors never pass through it."""
