"""Installs the fault hooks. Python imports this at its start where PYTHONPATH names this folder."""

from node import hooks
from tests.support.fault_hooks import FaultHooks
from tests.support.fault_script import from_environment

script = from_environment()
if script is not None:
    hooks.install_in_process(FaultHooks(script))
