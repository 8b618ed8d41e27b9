"""A plugin: the pass of the reference fails on the rank ``EARLY_MISCHIEF``, once the engine has a first group."""
import os

from lightrft.trainer.logprob_pass import LogprobPass


def _fail(self, exp):
    raise RuntimeError("the reference of this rank is a pumpkin")


if os.environ.get("RANK") == os.environ.get("EARLY_MISCHIEF", ""):
    LogprobPass._ref = _fail
