"""What all parties of a run agree on: types, wire formats and exact arithmetic."""
