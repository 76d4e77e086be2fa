"""What this machine knows of runs: its nodes, coordinators, swarms and credentials."""
