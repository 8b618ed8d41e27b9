"""Dynamic sampling: which prompts are used when, nothing lost, always an end, and resumed = straight."""
import json
import re

import pytest
import torch

from lightrft.rewards.base import Outcome
from lightrft.tests.support import runs, tiny_task
from lightrft.tests.support.launch import finish

no_picture = runs.no_picture

BATCH, PROMPTS = 4, 22
OPTIONS = {
    "dynamic_sampling": True, "rollout_batch_size": BATCH, "n_samples_per_prompt": 3, "train_batch_size": 6,
    "max_steps": 0, "actor_learning_rate": 0.0, "save_trajectories": True
}
RANKS = {
    "dynamic_sampling": True, "rollout_batch_size": 4, "max_steps": 0, "num_episodes": 2, "eval_steps": 0,
    "eval_at_start": False, "use_tensorboard": False, "disable_ckpt": True, "best_metric": "none"
}
VOLATILE = re.compile("time/|perf/|.*tokens_per_s$")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = runs.write_home(tmp_path_factory.mktemp("home"))
    tiny_task.write_rows(folder / "train.jsonl", tiny_task.rows(PROMPTS))
    return folder


def judge(item):
    """Flat groups for two thirds of the prompts; of the others some responses cannot be scored."""
    number = int(item.reference) // 2
    value = runs.letters(item).value
    if number % 3 or value is None:
        return Outcome(0.5)
    return Outcome(value, "lost") if round(value * 11) % 7 else Outcome(None, "lost")


def run(home, folder, score=judge, **options):
    values = OPTIONS | options
    return runs.run(home, folder, runs.Judge(runs.config_of(home, folder, **values).reward, score), **values)


def groups_of_all_draws(home, folder, draws):
    """``(uid, rewards)`` of every draw, each generated on its own; the weights never change (learning rate 0)."""
    trainer = runs.ready(home, folder, judge, **OPTIONS)
    found = []
    for _ in range(draws):
        rows, wait = trainer.maker.generate(trainer.loader.draw(1), "draw")
        wait()
        found.append((rows[0].prompt.uid, [row.reward for row in rows]))
    return found


def differs(rewards, threshold=1e-3):
    scored = [reward for reward in rewards if reward is not None]
    return len(scored) > 1 and max(scored) - min(scored) > threshold


def naive_steps(draws, batch, most_rounds):
    """The prompts of every step, and its rounds, refills and rejections: one draw after another."""
    position, waiting, steps = 0, [], []
    while position < len(draws) or waiting:
        drawn = accepted = rounds = refilled = 0
        carried = len(waiting)
        while len(waiting) < batch and rounds < most_rounds and position < len(draws):
            missing = batch - len(waiting)
            count = missing if not drawn else batch
            if drawn and accepted:
                while accepted * (count - 1) >= missing * drawn:
                    count -= 1
            part = draws[position:position + count]
            good = [uid for uid, rewards in part if differs(rewards)]
            position, rounds = position + len(part), rounds + 1
            drawn, accepted, refilled = drawn + len(part), accepted + len(good), refilled + len(part) * (rounds > 1)
            waiting += good
        steps.append((waiting[:batch], rounds, refilled, drawn - accepted, carried))
        waiting = waiting[batch:]
    return steps


@pytest.mark.parametrize("rounds,episodes", [(1, 1), (2, 2), (10, 2)])
def test_prompts_are_used_in_the_order_that_a_loop_finds(rounds, episodes, home, tmp_path):
    draws = groups_of_all_draws(home, tmp_path / "all", PROMPTS * episodes)
    expected = naive_steps(draws, BATCH, rounds)
    done = run(home, tmp_path / "run", num_episodes=episodes, max_gen_rounds=rounds)
    names = ("rollout/rounds", "group/refilled", "group/rejected", "rollout/carried")
    assert [tuple(line[name] for name in names) for line in done.lines] == [step[1:] for step in expected]
    for number, step in enumerate(expected, 1):
        rows = done.rollout(number)
        assert [row["uid"] for row in rows[::3]] == step[0]
        assert [row["group_id"] for row in rows] == [i // 3 for i in range(len(rows))]
    used = [uid for step in expected for uid in step[0]]
    assert used == [uid for uid, rewards in draws if differs(rewards)], "an accepted group was lost or used twice"
    assert len(expected) <= -(-PROMPTS * episodes // BATCH)
    assert done.trainer.step == len(expected) and (done.folder / "hf" / "model.safetensors").exists()
    if rounds == 10:
        assert any(step[4] for step in expected) and len(expected[-1][0]) < BATCH, "nothing was carried or left over"
        rewards = [r for _, group in draws for r in group if r is not None]
        assert sum(line["group/rejected"] for line in done.lines) == len(draws) - len(used)
        assert done.lines[0]["reward/generated_mean"] != done.lines[0]["reward/mean"]
        assert min(rewards) <= done.lines[0]["reward/generated_mean"] <= max(rewards)


def test_a_group_that_masking_empties_is_not_accepted(home, tmp_path):
    """A flat response among those that are cut off differs from them, and may be the only one that stays."""
    limits = {"mask_truncated": True, "generate_max_len": 6, "stop": list("aeiouAEIOU0123456789"), "max_steps": 3}
    plain = run(home, tmp_path / "plain", runs.letters, **limits | {"mask_truncated": False})
    masked = run(home, tmp_path / "masked", runs.letters, **limits)
    cut = [[row["finish_reason"] == "length" for row in plain.rollout(step)] for step in (1, 2, 3)]
    assert any(all(step[i:i + 3]) for step in cut for i in range(0, len(step), 3)), "no group would be emptied"
    for step in (1, 2, 3):
        reasons = [row["finish_reason"] for row in masked.rollout(step)]
        groups = [reasons[i:i + 3] for i in range(0, len(reasons), 3)]
        assert len(groups) == BATCH and all("stop" in group and len(group) == 3 for group in groups)


def test_seeds_never_repeat(home, tmp_path):
    """The same prompt again (next episode) or another prompt of the same round: other noise."""
    made = run(home, tmp_path, max_steps=1).trainer
    seeds = []
    for step in ("draw", 0):
        groups = [made.maker.open(*draw, step) for draw in made.loader.draw(2 * PROMPTS)]
        seeds += [response.seed for group in groups for response in group]
    assert len(set(seeds)) == len(seeds) == 4 * PROMPTS * 3


def test_refill_that_never_fills_is_bounded(home, tmp_path, capsys):
    cfg = runs.config_of(home, tmp_path / "x", **OPTIONS)
    start = runs.weights(runs.trainer_of(cfg, runs.strategy_of(cfg)), "actor")
    done = run(home, tmp_path / "run", lambda item: Outcome(1.0), max_steps=2, max_gen_rounds=3,
               actor_learning_rate=0.1, init_kl_coef=0.1, kl_target=0.1)
    assert [line["rollout/rounds"] for line in done.lines] == [3, 3]
    assert [line["group/rejected"] for line in done.lines] == [3 * BATCH] * 2
    assert [line["rollout/samples"] for line in done.lines] == [0, 0] and done.rollout(1) == []
    assert all("policy/loss" not in line and line["policy/kl_coef"] == 0.1 for line in done.lines)
    assert "step 2: no update, none of 12 groups" in capsys.readouterr().err
    assert all(torch.equal(value, start[name]) for name, value in done.weights.items())


@pytest.mark.parametrize("more", [{"advantage_estimator": "gae", "init_kl_coef": 0.1}, {"max_epochs": 2},
                                  {"micro_train_batch_size": 1, "advantage_estimator": "reinforce++"}])
def test_uneven_batches_train(more, home, tmp_path):
    done = run(home, tmp_path, actor_learning_rate=1e-3, max_gen_rounds=1, **more)
    sizes = [line["rollout/samples"] for line in done.lines]
    assert len({size for size in sizes if size}) > 1, f"the sizes are all the same: {sizes}"
    for line in done.lines:
        passes = line["rollout/samples"] and -(-line["rollout/samples"] // 6) * more.get("max_epochs", 1)
        assert line.get("policy/optimizer_steps", 0) == passes
    assert all(value.isfinite().all() for value in done.weights.values())


def stable(lines):
    return [{key: value for key, value in line.items() if not VOLATILE.match(key)} for line in lines]


def test_a_resumed_run_goes_on_with_what_was_carried_over(home, tmp_path):
    options = {"actor_learning_rate": 1e-2, "disable_ckpt": False, "num_episodes": 3, "save_steps": 1}
    straight = run(home, tmp_path / "a", **options)
    stop = next(i for i, line in enumerate(straight.lines) if line["rollout/carried"])
    cut = run(home, tmp_path / "b", **options | {"max_steps": stop})
    assert len(cut.trainer.source.numbers) == straight.lines[stop]["rollout/carried"] > 0
    done = run(home, tmp_path / "b", **options, load_checkpoint=True)
    assert stable(done.lines) == stable(straight.lines)
    assert all(torch.equal(value, straight.weights[name]) for name, value in done.weights.items())
    assert done.rollout(stop + 1) == straight.rollout(stop + 1)
    again = run(home, tmp_path / "b", **options, load_checkpoint=True)
    assert again.trainer.step == again.trainer.total_steps == straight.trainer.step, "a finished run is finished"


def test_carried_groups_that_no_longer_fit_are_told(home, tmp_path, capsys):
    state = {"rows": [{"group_id": i // 2, "index": i % 2} for i in range(8)], "exp": {}}
    for options, words in (({}, "groups of 2 samples"), ({"dynamic_sampling": False, "max_steps": 1}, "8 samples")):
        cfg = runs.config_of(home, tmp_path, **OPTIONS | options)
        source = runs.trainer_of(cfg, runs.strategy_of(cfg)).source
        capsys.readouterr()
        source.load_state_dict(state)
        told = capsys.readouterr().err
        assert words in told and "dropped" in told and not source.state_dict().get("rows")


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_use_the_groups_that_one_does(tmp_path):
    home = tiny_task.write_home(tmp_path / "home")
    (home / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                                    "    return len(set(solution_str)) / 12 if int(ground_truth) % 3 == 0 else 0.0\n")
    folders = {}
    for ranks in (1, 2):
        folders[ranks] = tmp_path / f"ranks_{ranks}"
        paths = {"pretrain": home / "model", "prompt_data": home / "train.jsonl", "reward": home / "reward.py"}
        options = tiny_task.OPTIONS | RANKS | paths | {"save_path": folders[ranks]}
        finish(folders[ranks], options, ranks)
    lines = {ranks: stable(runs.read_lines(folder / "metrics.jsonl")) for ranks, folder in folders.items()}
    assert any(line["rollout/carried"] for line in lines[1]) and any(line["group/refilled"] for line in lines[1])
    for one, two in zip(lines[1], lines[2], strict=True):
        assert two == pytest.approx(one, abs=1e-5, rel=1e-4)
    for path in (folders[1] / "rollouts").iterdir():
        rows = [[(row["uid"], row["response"]) for row in map(json.loads, (folder / "rollouts" / path.name).open())]
                for folder in folders.values()]
        assert rows[0] == rows[1]
