"""Settings for all tests."""

from hypothesis import settings

# Hypothesis' deadline per example is a wall-clock assertion, which a busy machine would fail.
settings.register_profile("hetnode", deadline=None)
settings.load_profile("hetnode")
