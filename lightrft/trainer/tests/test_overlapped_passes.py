"""``--overlap_passes``: the same numbers as without, from passes that run while the engine still generates."""
import re
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightrft.tests.support import launch, runs, tiny
from lightrft.trainer.overlapped_passes import OverlappedPasses

no_picture = runs.no_picture
OPTIONS = {"overlap_passes": True, "advantage_estimator": "gae", "init_kl_coef": 0.1, "high_entropy_token_ratio": 0.3,
           "max_epochs": 2, "micro_rollout_batch_size": 2, "micro_train_batch_size": 2, "max_steps": 2,
           "n_samples_per_prompt": 4, "train_batch_size": 8}  # yapf: disable
FIELDS = ("old_logprobs", "entropies", "ref_logprobs", "values")
VOLATILE = re.compile("time/|perf/|.*tokens_per_s$")


def trainer(home, folder, **options):
    return runs.ready(home, folder, **OPTIONS | options)


def rollout(made):
    made.engine.wake()
    return made.maker.make([made.loader.dataset[i] for i in range(4)], 0, 0.1)


def steady(lines):
    return [{key: value for key, value in line.items() if not VOLATILE.match(key)} for line in lines]


def test_the_numbers_are_those_of_the_passes_afterwards(home, tmp_path):
    early, late = (rollout(trainer(home, tmp_path / str(flag), overlap_passes=flag)).exp for flag in (True, False))
    assert torch.equal(early.token_ids, late.token_ids)
    for name in FIELDS:
        one, other = getattr(early, name), getattr(late, name)
        assert other.abs().max() > 0.1 or name == "values", name
        assert torch.allclose(one, other, atol=1e-5), name
    assert early.values is not None and torch.equal(early.old_logprobs != 0, early.loss_mask)


def count_steps(engine):
    """How often the engine has gone through its model, in a list of one."""
    steps = [0]
    if hasattr(engine, "native"):
        step = engine.native.step
        engine.native.step = lambda: (step(), steps.append(steps.pop() + 1))[0]
    else:
        engine.model.model.layers[0].register_forward_pre_hook(
            lambda *_: steps.append(steps.pop() + (threading.current_thread() is threading.main_thread())))
    return steps


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=[pytest.mark.engine, pytest.mark.slow])])
def test_rewards_and_passes_start_before_generation_ends(engine, home, tmp_path):
    """The engine is held up after the first group until both have begun; then it goes on generating."""
    if engine == "vllm":
        pytest.importorskip("vllm")
        tiny.save_model(tmp_path / "model", hidden_size=128, initializer_range=0.06)
        made = trainer(home, tmp_path, engine_type="vllm", pretrain=str(tmp_path / "model"), engine_kv_mib=64)
    else:
        made = trainer(home, tmp_path)
    steps, seen, begun, at = count_steps(made.engine), [], threading.Event(), {"begin": [], "pass": []}
    begin = made.maker.rewards.begin
    made.prepared["actor"].model.register_forward_pre_hook(
        lambda *_: (seen.append(threading.current_thread().name), begun.set())[1])
    made.maker.rewards.begin = lambda them: at["begin"].extend([steps[0]] * len(them)) or begin(them)

    made.maker.listeners.append(
        SimpleNamespace(during=lambda groups: nullcontext(), wants_each=lambda prompts: False,
                        arrived=lambda samples: None,
                        finished=lambda group: (begun.wait(30), at["pass"].append(steps[0]))))
    rollout(made)
    made.engine.shutdown()
    assert begun.is_set() and at["begin"][0] < at["pass"][0] < steps[0] and len(at["begin"]) == 16, (at, steps)
    assert set(seen) == {"overlapped passes"} and len(seen) == 8, "16 samples, 2 in a pass, each seen once"
    assert made.timer.seconds("old_logprobs") == 0 < made.timer.seconds("overlapped_passes")
    assert "overlapped passes" not in [thread.name for thread in threading.enumerate()]


def test_timing_changes_nothing(home, tmp_path):
    """Two runs, one of them with passes that come late, are equal to the bit."""
    first = runs.run(home, tmp_path / "a", **OPTIONS)
    made = runs.trainer_of(cfg := runs.config_of(home, tmp_path / "b", **OPTIONS), runs.strategy_of(cfg))
    slow = threading.Event()
    made.prepared["actor"].model.register_forward_pre_hook(lambda *_: slow.wait(0.01) or None)
    made.fit()
    second = runs.Run(made, tmp_path / "b")
    assert steady(first.lines) == steady(second.lines)
    assert all(torch.equal(value, second.weights[name]) for name, value in first.weights.items())
    assert first.lines[0]["policy/first_ratio_gap"] < 1e-5 and isinstance(made.maker.overlapped, OverlappedPasses)
    assert "time/overlapped_passes_s" in first.metrics


@pytest.mark.parametrize("where", ["pass", "engine"])
def test_an_error_in_either_thread_ends_the_run_with_its_own_message(where, home, tmp_path):
    made = trainer(home, tmp_path)

    def fail(*_):
        raise RuntimeError("a pass went wrong" if where == "pass" else "the engine went wrong")

    if where == "pass":
        made.prepared["critic"].model.register_forward_pre_hook(fail)
    else:
        made.engine.step = fail
    with pytest.raises(RuntimeError, match=f"{'a pass' if where == 'pass' else 'the engine'} went wrong"):
        rollout(made)
    assert made.timer.phase().startswith(("rollout", "overlapped_passes"))


JUDGE = """
def judge(prompts, completions, **columns):
    return [sum(map(ord, text)) % 11 / 11 for text in completions]
"""


def of_ranks(home, folder, **options):
    """The options of a run from the command line: 5 prompts, of which the first of two ranks gets 3."""
    folder.mkdir()
    (folder / "judge.py").write_text(JUDGE, encoding="utf-8")
    return runs.BASE | OPTIONS | {
        "rollout_batch_size": 5, "train_batch_size": 20, "pretrain": str(home / "model"), "reward": "judge.py",
        "prompt_data": str(home / "train.jsonl"), "critic_learning_rate": 1e-3, "self_test": "False",
        "reward_probe": "False", "save_path": str(folder / "run")} | options  # yapf: disable


@pytest.mark.dist
def test_two_ranks_with_unequal_packs_learn_what_one_does(home, tmp_path):
    lines = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        launch.finish(folder, of_ranks(home, folder), ranks)
        lines.append(steady(runs.read_lines(folder / "run" / "metrics.jsonl")))
    assert len(lines[0]) == 2 and lines[0][0]["policy/first_ratio_gap"] < 1e-5
    for one, two in zip(*lines, strict=True):
        for key in ("policy/loss", "reward/kl", "policy/ratio_max", "critic/loss", "rollout/tokens"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key


@pytest.mark.dist
def test_a_pass_that_fails_on_one_rank_ends_all(home, tmp_path):
    options = of_ranks(home, tmp_path / "a", plugin="lightrft.tests.support.fault_plugin")
    run = launch.launch(tmp_path / "a", options, 2, FAULT="reference@1")
    assert all(run.wait(60)), run.output
    assert "the reference of this rank is broken" in run.log(1)
    assert re.search("rank 1 .*in phase (rollout|overlapped_passes)", run.log(0)), run.output
