"""Everything of a node that touches a socket or another process."""
