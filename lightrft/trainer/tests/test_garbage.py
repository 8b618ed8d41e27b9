"""A step leaves no tensors in reference cycles: memory is free when its last user is done, without the collector."""
import gc

import pytest
import torch

from lightrft.tests.support import runs
from lightrft.utils import env
from lightrft.utils.env import rare_garbage_collection


def unreachable():
    """What only the collector can free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = list(gc.garbage)
    gc.garbage.clear()
    return found


@pytest.mark.parametrize("options", [
    {"micro_train_batch_size": 2},
    {"advantage_estimator": "gae", "init_kl_coef": 0.01, "gradient_checkpointing": True},
    {"dynamic_sampling": True, "max_epochs": 2, "train_batch_size": 4},
    {"overlap_passes": True, "rollout_correction": "tis", "high_entropy_token_ratio": 0.5},
], ids=" ".join)  # yapf: disable
def test_a_step_leaves_no_tensors_to_the_collector(home, tmp_path, options):
    cfg = runs.config_of(home, tmp_path, max_steps=3, report=False, **options)
    trainer, left = runs.trainer_of(cfg, runs.strategy_of(cfg)), []
    step = trainer.train_step

    def watched():
        gc.collect()
        gc.disable()
        metrics = step()
        left.append([type(each) for each in unreachable() if isinstance(each, torch.Tensor)])
        gc.enable()
        return metrics

    trainer.train_step = watched
    trainer.fit()
    assert left == [[]] * 3


@pytest.fixture(name="thawed")
def fixture_thawed(monkeypatch):
    """The collector is that of a program that begins to train; yields how many objects are frozen, which is 0 but in
    Python 3.12, whose collections freeze a few."""
    thresholds = gc.get_threshold()
    monkeypatch.setattr(env, "_open_freezes", 0)
    gc.set_threshold(700, 10, 10)
    gc.unfreeze()
    gc.collect()
    yield gc.get_freeze_count()
    gc.freeze()
    gc.set_threshold(*thresholds)


def test_the_collector_is_as_before_after_training(thawed):
    before = gc.get_threshold()
    with pytest.raises(KeyError), rare_garbage_collection():
        assert gc.get_threshold()[0] > before[0] and gc.get_freeze_count() > thawed
        raise KeyError
    assert gc.get_threshold() == before and gc.get_freeze_count() <= thawed


def test_an_inner_call_leaves_what_an_outer_one_froze(thawed):
    with rare_garbage_collection():
        with rare_garbage_collection():
            pass
        assert gc.get_freeze_count() > thawed
    assert gc.get_freeze_count() <= thawed
