"""What all parties of a run agree on: words, wire formats and exact mathematics."""
