"""The trainers on fixed data under DeepSpeed's ZeRO 3 on two ranks, against one process without it.

The judge has no start of its own, so FSDP2 is here too; other trainers have it in their own tests. Frequencies that
depend on the length of a sequence are tried with all of them: the ranks differ in the frequencies that they compute.
"""
from pathlib import Path

import pytest
import torch

from lightrft.tests.support import preference_runs as runs
from lightrft.tests.support.launch import torchrun
from lightrft.tests.support.preference_runs import EVERY, home
from lightrft.tests.support.runs import no_picture

no_picture, home = no_picture, home  # fixtures; the module draws no curve


@pytest.fixture(scope="module")
def ranks(home, tmp_path_factory):
    """Two steps of every trainer, all in one start of two ranks."""
    pytest.importorskip("deepspeed")
    save = tmp_path_factory.mktemp("ranks")
    runs.write_lengths(home)
    runs.write_states(home)
    torchrun("lightrft.tests.support.preference_runs", home, save)
    return save


def share_apart(one, two, limit=2e-5):
    """The share of weights that differ by more: Adam enlarges the rounding of the few gradients that are nearly 0."""
    assert one.keys() == two.keys()
    apart = [((one[name] - two[name]).abs() > limit).flatten() for name in one]
    return torch.cat(apart).float().mean().item()


def learned(weights, start):
    """The largest change of a weight; an export has the names of its family, and perhaps a head that is new."""
    before = {name.replace("language_model.", ""): weight for name, weight in start.items()}
    gaps = [(weight - before[key]).abs().max().item() for name, weight in weights.items()
            if (key := name.replace("language_model.", "")) in before]
    assert len(gaps) == len(start)
    return max(gaps)


@pytest.mark.dist
@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_are_one(name, ranks, home, tmp_path):
    """The process trains one sequence, or one pair, at a time; the ranks pack two."""
    trainer = runs.run_of(name, home, tmp_path, micro_train_batch_size=1)
    start = runs.load_file(Path(trainer.config.model.pretrain) / "model.safetensors")
    assert learned(runs.exported(tmp_path), start) > 1e-3
    for of_ranks in ranks.glob(f"*/{name}"):
        assert share_apart(runs.exported(tmp_path), runs.exported(of_ranks)) < 1e-3, of_ranks
        for a, b in zip(runs.metrics(tmp_path), runs.metrics(of_ranks), strict=True):
            assert a == pytest.approx(b, rel=1e-3, abs=1e-5), of_ranks
