"""Sends the figures of a run to a tool that draws them, from a process that the run never waits for."""
