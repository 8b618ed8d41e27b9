"""Launchers of ranks: their variables get the names that torchrun gives them."""
import os
from collections.abc import MutableMapping

_NAMES = {"LOCAL_WORLD_SIZE": "LOCAL_SIZE"}  # of torchrun -> of the launcher of DeepSpeed


def adopt_launcher(environ: MutableMapping[str, str] | None = None) -> None:
    """Set the variables of torchrun that the launcher of DeepSpeed sets under other names; others stay unchanged."""
    env = os.environ if environ is None else environ
    if "RANK" not in env:
        return
    for name, other in _NAMES.items():
        if name not in env and other in env:
            env[name] = env[other]
