"""The ranks of one peer: its processes, one for each of its devices, and what they share."""
