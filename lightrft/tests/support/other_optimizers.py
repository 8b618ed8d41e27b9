"""What every strategy does with SGD and with the optimizer of a plugin: the same as torch's own on one process."""
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightrft.config import tree
from lightrft.config.plugins import import_plugins
from lightrft.config.sft_schema import SFTConfig
from lightrft.strategy.checkpoint import CheckpointManager
from lightrft.strategy.optimizers import OPTIMIZERS
from lightrft.tests.support.strategy_case import assert_same, Case
from lightrft.tests.support.tiny_lm import Reference, SPEC

PLUGIN = Path(__file__).with_name("adagrad.py")
OTHERS: dict[str, tuple[dict[str, Any], Any]] = {  # --optim -> its options, and the optimizer of torch
    "sgd": ({"sgd_momentum": 0.9}, lambda groups: torch.optim.SGD(groups, momentum=0.9, foreach=False)),
    "adagrad": ({"adagrad_decay": 0.5}, lambda groups: torch.optim.Adagrad(groups, lr_decay=0.5, foreach=False)),
}  # yapf: disable


@contextmanager
def plugin() -> Iterator[None]:
    """Context in which ``--plugin adagrad.py`` is imported."""
    extensions = {group: dict(added) for group, added in tree._EXTENSIONS.items()}
    with mock.patch.object(tree, "_EXTENSIONS", extensions), mock.patch.dict(OPTIMIZERS._entries):
        import_plugins([str(PLUGIN)], SFTConfig)
        yield
    sys.modules.pop("lightrft.tests.support.adagrad")


def other_optimizers(case: Case) -> None:
    """Check weights after four steps, two of them after a checkpoint and a move to host memory and back."""
    with plugin():
        for name, (options, build) in OTHERS.items():
            train = tree.build(SFTConfig, {"optim": name, "l2": SPEC.options.l2, **options}).train
            follows_torch(Case(case.strategy, case.folder, replace(SPEC, lr=0.05, options=train)), name, build)


def follows_torch(case: Case, name: str, build: Any) -> None:
    strategy, prepared = case.strategy, case.prepare(tied=False)
    reference, before = Reference(strategy.device, False, build, case.spec.lr), case.weights(prepared)
    case.train(prepared, range(2))
    manager = CheckpointManager(strategy, case.folder / name, asynchronous=False)
    assert manager.save(2, {"actor": prepared}, {}, {"rank": strategy.rank}, {})
    strategy.offload(prepared)
    strategy.reload(prepared)
    case.train(prepared, range(2, 4))
    for step in range(4):
        reference.backward(step)
        reference.step(1.0)
    weights, expected = case.weights(prepared), reference.weights()
    assert_same(weights, expected, atol=3e-5)  # Adagrad divides small gradients, whose rounding differs, by themselves
    moved = max((weights[key] - before[key]).abs().max().item() for key in weights)
    assert moved > 0.01, f"{name} moves no weight by more than {moved}"
    fresh = case.prepare(seed=5, tied=False)
    manager.load(manager.latest(), {"actor": fresh})
    case.train(fresh, range(2, 4))
    assert_same(case.state(fresh), case.state(prepared))
    other = Case(strategy, case.folder).prepare(tied=False)
    with pytest.raises(ValueError, match=f"--optim adamw: .*has the state of --optim {name}, which"):
        manager.load(manager.latest(), {"actor": other})
