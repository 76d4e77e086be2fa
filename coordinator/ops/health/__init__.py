"""Health of the training: whether payloads agree, losses stay where they were, and norms are in line."""
