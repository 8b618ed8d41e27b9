"""Each tripwire on made-up metrics, and a few on real runs."""
import copy
import itertools
import json
import re
from math import nan
from pathlib import Path

import pytest

from lightrft.rewards.base import Outcome
from lightrft.tests.support import runs
from lightrft.tests.support.launch import errors, launch
from lightrft.trainer.checks import tripwires
from lightrft.trainer.checks.tripwires import PATIENCE, Tripwires, UnscoredTraining

no_picture = runs.no_picture

GOOD = {
    "rollout/samples": 8, "reward/unscored": 0, "reward/mean": 0.5, "reward/min": 0.0, "reward/max": 1.0,
    "group/zero_spread_frac": 0.2, "policy/entropy": 1.0, "policy/kl_old": 0.01, "policy/kl_ref": 0.1, "policy/ratio":
    1.0, "policy/ratio_max": 3.0, "rollout/truncated_frac": 0.1
}
FLAT = {"reward/mean": 0.25, "reward/min": 0.25, "reward/max": 0.25}
FAILED = {"reward/unscored": 8, "reward/unscored/timeout": 6, "reward/unscored/none": 2}
NOTHING_ACCEPTED = {
    "reward/mean": None, "rollout/samples": 0, "rollout/rounds": 3, "reward/generated_scored": 8,
    "reward/generated_mean": 0.1, "rollout/truncated_frac": None, "rollout/generated_truncated_frac": 0.1
} | {name: None for name in GOOD if name.startswith("policy/")}  # yapf: disable
CASES = {
    "zero_spread": [{"group/zero_spread_frac": 1.0}, NOTHING_ACCEPTED],
    "constant_reward": [FLAT],
    "unscored": [FAILED, NOTHING_ACCEPTED | {"reward/generated_scored": 0}],
    "partly_unscored": [{"reward/unscored/timeout": 1}, NOTHING_ACCEPTED | {"reward/generated_unscored/none": 1}],
    "entropy_collapse": [{"policy/entropy": 0.04}, {"policy/entropy": None, "rollout/entropy_estimate": 0.04},
                         NOTHING_ACCEPTED | {"rollout/entropy_estimate": 0.04}],
    "kl_explosion": [{"policy/kl_old": 0.6}, {"policy/kl_ref": 2.1}, {"reward/kl": 2.1}],
    "ratio_explosion": [{"policy/ratio": 2.1}, {"policy/ratio": 0.4}, {"policy/ratio_max": 1e5}],
    "length_limit": [{"rollout/truncated_frac": 0.9}, NOTHING_ACCEPTED | {"rollout/generated_truncated_frac": 0.9},
                     {"rollout/rounds": 1, "reward/generated_scored": 9, "rollout/generated_truncated_frac": 1.0}],
}  # yapf: disable


def watched(history, wires=None, **options):
    """[names that are on] for each step, and all that was told."""
    wires, told, on = wires or Tripwires(**{"grouped": True, "max_unscored_steps": 0, **options}), [], []
    for metrics in history:
        values, news = wires.step({key: value for key, value in metrics.items() if value is not None})
        assert values.keys() == {f"tripwire/{name}" for name in CASES} and set(values.values()) <= {0.0, 1.0}
        on.append([name for name in CASES if values[f"tripwire/{name}"]])
        told += news
    return on, told


def test_a_good_run_hears_nothing():
    rewards = [{"reward/mean": 0.1 * i, "reward/max": 0.1 * i} for i in range(30)]
    assert watched([GOOD | reward for reward in rewards]) == ([[]] * 30, [])


@pytest.mark.parametrize("name,bad", [(name, bad) for name, cases in CASES.items() for bad in cases],
                         ids=lambda x: str(x)[:40])
def test_each_wire_waits_tells_once_and_falls_silent(name, bad):
    steps = PATIENCE[name]
    wait = steps - 1 + (name == "constant_reward")  # the first of equal rewards is no repetition
    history = [GOOD] + [GOOD | bad] * (wait + 3) + [GOOD] * 2 + [GOOD | bad] * (wait + 1)
    on, told = watched(history)
    on = [[one for one in step if one == name] for step in on]
    assert on == [[]] * (1 + wait) + [[name]] * 3 + [[]] * (2 + wait) + [[name]]
    mine = [text for text in told if text.startswith(f"tripwire {name}: ")]
    assert len(mine) == 1 and "nan" not in mine[0] and "{" not in mine[0]


LIMITS = {  # the last value that is good, and the first that is bad
    "entropy_collapse": [("policy/entropy", 0.05, 0.0499), ("rollout/entropy_estimate", 0.05, 0.0499)],
    "kl_explosion": [("policy/kl_old", 0.5, 0.501), ("policy/kl_ref", 2.0, 2.001), ("reward/kl", 2.0, 2.001)],
    "ratio_explosion": [("policy/ratio", 2.0, 2.001), ("policy/ratio", 0.5, 0.499),
                        ("policy/ratio_max", 1e4, 10001.0)],
    "length_limit": [("rollout/truncated_frac", 0.899, 0.9), ("rollout/generated_truncated_frac", 0.899, 0.9)],
    "partly_unscored": [("reward/unscored/timeout", 0.79, 0.8)],
    "zero_spread": [("group/zero_spread_frac", 0.999, 1.0)],
}  # yapf: disable


@pytest.mark.parametrize("name,key,good,bad", [(name, *limit) for name, limits in LIMITS.items() for limit in limits])
def test_both_sides_of_each_limit(name, key, good, bad):
    hidden = {"policy/entropy": None} if key == "rollout/entropy_estimate" else {}
    for value, expected in ((good, []), (bad, [name])):
        assert watched([GOOD] + [GOOD | hidden | {key: value}] * 9)[0][-1] == expected


@pytest.mark.parametrize("value,expected", [(0.00101, []), (0.00099, ["entropy_collapse"])])
def test_the_entropy_that_is_low_anyway(value, expected):
    assert watched([GOOD | {"policy/entropy": 0.002}] + [GOOD | {"policy/entropy": value}] * 5)[0][-1] == expected


@pytest.mark.parametrize("down,on", [(0.0199, 0), (0.0201, 1)])
def test_how_far_the_held_out_score_falls(down, on):
    assert evaluated([(.1, .5), (.2, .5 - down / 2), (.3, .5 - down)])[0] == [0, 0, on]


@pytest.mark.parametrize("name", list(CASES))
def test_one_good_step_starts_the_count_anew(name):
    bad = GOOD | CASES[name][0]
    history = [GOOD] + ([bad] * (PATIENCE[name] - 1) + [GOOD]) * 3
    assert all(name not in step for step in watched(history)[0])


def test_what_is_no_cause():
    assert watched([GOOD | {"group/zero_spread_frac": 1.0}] * 6, grouped=False)[1] == []
    assert watched([GOOD | {"policy/entropy": 0.06}] * 9)[1] == [], "it began there"
    assert watched([{**GOOD, **FAILED, "reward/unscored": 7}] * 3)[1] == []
    undefined = {key: nan for key in GOOD if key.startswith("policy/")}
    assert watched([GOOD | undefined] * 9)[1] == [] == watched([{"rollout/samples": 8}] * 9)[1]
    carried = {"rollout/rounds": 0, "reward/generated_scored": 0}
    assert watched([GOOD | carried] * 3)[1] == [], "nothing was generated: the batch was carried over"


@pytest.mark.parametrize("name,gone", [("entropy_collapse", "policy/"), ("kl_explosion", "policy/"),
                                       ("ratio_explosion", "policy/"), ("length_limit", "rollout/truncated_frac")])
@pytest.mark.parametrize("value", [None, nan])
def test_what_was_not_measured_keeps_its_count(value, name, gone):
    """A collapsed policy trains on a few steps only: in the others no group has spread, and nothing is updated."""
    bad = GOOD | CASES[name][0]
    hole = bad | {key: value for key in bad if key.startswith(gone)}
    on, _ = watched([GOOD, *[step for _ in range(PATIENCE[name]) for step in (hole, bad)], hole])
    assert [name in step for step in on] == [False] * 2 * PATIENCE[name] + [True] * 2


def test_only_what_was_measured_is_told():
    assert "KL 0.6 from the policy of the rollout (nats" in watched(
        [GOOD | {"policy/kl_old": .6, "policy/kl_ref": None}] * 3)[1][0]
    assert "KL 0.01 from the policy of the rollout, 2.1 from the reference (nats" in watched(
        [GOOD | {"reward/kl": 2.1}] * 3)[1][0]


def test_an_entropy_low_from_the_start_is_told():
    on, told = watched([GOOD | {"policy/entropy": 0.0009}] * 5)
    assert on[-1] == ["entropy_collapse"] and "0.0009 nats per token, 0.0009 in the first step" in told[0]


def test_unscored_steps_end_the_run_in_time():
    bad, wires, never = GOOD | FAILED, Tripwires(True, 3), Tripwires(True, 0)
    for metrics in (bad, bad, GOOD, bad, bad):
        watched([metrics], wires)
        assert wires.fatal(metrics) is None
    watched([bad], wires)
    assert re.search(r"3 steps in a row \(timeout: 6, none: 2\).*--max_unscored_steps", wires.fatal(bad))
    watched([bad] * 50, never)
    assert never.fatal(bad) is None
    rejected = GOOD | NOTHING_ACCEPTED | {"reward/generated_scored": 0, "reward/generated_unscored/timeout": 24}
    told, wires = watched([rejected])[1], Tripwires(True, 1)
    watched([rejected], wires)
    assert "(timeout: 24)" in told[0] and "(timeout: 24)" in wires.fatal(rejected)


def test_the_share_of_unscored_responses_is_told():
    bad = GOOD | {"reward/unscored/timeout": 2, "reward/unscored/none": 1}
    told = watched([bad] * 5)[1]
    assert len(
        told) == 1 and "at least 10% of the responses could not be scored (now 38%: timeout: 2, none: 1)" in told[0]


def test_a_state_of_a_release_without_a_wire_is_read():
    wires, old = Tripwires(True, 0), Tripwires(True, 0).state_dict()
    wires.load_state_dict({name: value
                           for name, value in old.items() if name != "learnt"} | {"counts": {"zero_spread": 3}})
    assert wires.counts["zero_spread"] == 3 and wires.counts["partly_unscored"] == 0
    watched([GOOD | FAILED], wires)
    assert wires.nothing_learnt() is None, "the steps before may have taught something"


def evaluated(pairs, wires=None):
    """Evaluations, each after one step: [(training reward, held-out score)] -> [on], told."""
    wires, on, told = wires or Tripwires(True, 0), [], []
    for reward, score in pairs:
        wires.step(GOOD | {"reward/mean": reward})
        values, news = wires.evaluation({"eval/all/reward@1": score, "eval/all/len": 5.0})
        on.append(values["tripwire/held_out"])
        told += news
    return on, told


@pytest.mark.parametrize("pairs,on", [
    ([(.1, .5), (.2, .49), (.3, .47), (.4, .46), (.5, .47)], [0, 0, 1, 1, 0]),
    ([(.1, .5), (.2, .51), (.3, .45)], [0, 0, 0]),
    ([(.1, .5), (.2, .49), (.2, .4)], [0, 0, 0]),
    ([(.1, .5), (.2, .495), (.3, .49)], [0, 0, 0]),
])  # yapf: disable
def test_reward_up_and_held_out_down(pairs, on):
    found, told = evaluated(pairs)
    assert found == on and len(told) == any(on)
    if told:
        assert "(0.5, 0.49, 0.47)" in told[0] and "--best_metric" in told[0]


def test_an_evaluation_before_the_first_step_and_one_without_scores():
    wires = Tripwires(True, 0)
    assert wires.evaluation({"eval/all/reward@4": 0.5}) == ({"tripwire/held_out": 0.0}, [])
    assert evaluated([(.1, .4), (.2, .3)], wires)[0] == [0, 1], "the untrained policy is the first of three"
    assert wires.evaluation({}) == ({}, [])


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_resumed_run_goes_on_exactly(cut):
    """Whatever the step at which the state is saved."""
    bad = GOOD | FLAT | {"policy/entropy": 0.04, "group/zero_spread_frac": 1.0}
    history = [GOOD] + [bad] * 4 + [GOOD, bad, GOOD | FAILED] + [bad] * 5
    straight = Tripwires(True, 0)
    on, told = watched(history, straight)
    first, second = Tripwires(True, 0), Tripwires(True, 0)
    before, _ = watched(history[:cut], first), evaluated([(.1, .5), (.2, .4)], straight)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    after = watched(history[cut:], second)
    assert before[0] + after[0] == on and before[1] + after[1] == told
    evaluated([(.1, .5), (.2, .4)], second)
    assert second.state_dict() == straight.state_dict() != Tripwires(True, 0).state_dict()


def test_the_page_has_every_wire():
    page = Path(tripwires.__file__).parents[3] / "docs" / "safety.md"
    if not page.exists():
        pytest.skip("installed without its repository")
    rows = re.findall(r"^\| `(\w+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(PATIENCE)


# -- real runs --------------------------------------------------------------------------------------------------------
def run(home, folder, score, **options):
    trainer = runs.build(home, folder, score, **options)
    trainer.fit()
    return runs.Run(trainer, folder)


def test_a_reward_that_always_fails_stops_the_run(home, tmp_path, capsys):
    failing = lambda item: Outcome(None, "timeout")  # noqa: E731
    with pytest.raises(UnscoredTraining, match=r"2 steps in a row \(timeout: 8\).*; nothing was saved"):
        run(home, tmp_path / "a", failing, max_steps=9, max_unscored_steps=2)
    assert [line["tripwire/unscored"] for line in runs.read_lines(tmp_path / "a" / "metrics.jsonl")] == [1, 1]
    done = run(home, tmp_path / "b", failing, max_steps=4, max_unscored_steps=0)
    assert [line["tripwire/unscored"] for line in done.lines] == [1.0] * 4
    text = capsys.readouterr().err
    assert text.count("tripwire unscored: no response of this step could be scored") == 2
    assert text.count("the run has learnt nothing: in 4 steps no response could be scored") == 1


def test_a_reward_that_fails_under_dynamic_sampling_stops_the_run(home, tmp_path):
    with pytest.raises(UnscoredTraining, match=r"2 steps in a row \(none: 16\)"):
        run(home, tmp_path, lambda item: Outcome(None, "none"), max_steps=9, max_unscored_steps=2,
            dynamic_sampling=True, max_gen_rounds=2)
    line = runs.read_lines(tmp_path / "metrics.jsonl")[-1]
    assert (line["reward/generated_unscored/none"], line["reward/generated_scored"]) == (16, 0)


def test_rejected_groups_at_the_length_limit_are_seen(home, tmp_path, capsys):
    done = run(home, tmp_path, lambda item: Outcome(0.25), max_steps=5, dynamic_sampling=True, max_gen_rounds=2,
               stop=[], generate_max_len=3)  # yapf: disable
    assert spoken(done) == {"length_limit", "zero_spread"} and done.metrics["rollout/generated_truncated_frac"] == 1
    text = capsys.readouterr().err
    assert "hit the length limit (100%)" in text and "(mean reward now 0.25)" in text


def test_the_run_goes_on_once_the_reward_works_again(home, tmp_path):
    """Saved where it ended, though no step was due to be saved; one more bad step ends it again at once."""
    failing, options = lambda item: Outcome(None, "timeout"), {"max_steps": 4, "disable_ckpt": False}
    with pytest.raises(UnscoredTraining, match="3 steps in a row .*; --load_checkpoint resumes from there"):
        run(home, tmp_path, failing, **options)
    with pytest.raises(UnscoredTraining, match="4 steps in a row"):
        run(home, tmp_path, failing, **options | {"max_steps": 9}, load_checkpoint=True)
    done = run(home, tmp_path, runs.letters, **options | {"max_steps": 5}, load_checkpoint=True)
    assert [line["tripwire/unscored"] for line in done.lines] == [1, 1, 1, 1, 0]
    assert done.metrics["policy/optimizer_steps"] == 1


@pytest.mark.dist
def test_the_command_ends_and_tells_the_cause_once(home, tmp_path):
    """On one and on two ranks."""
    (tmp_path /
     "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return [None] * len(queries)\n",
                             encoding="utf-8")
    options = {k: v for k, v in runs.BASE.items() if k not in ("self_test", "reward_probe", "max_steps")}
    options |= {"pretrain": home / "model", "prompt_data": home / "train.jsonl", "reward": tmp_path / "reward.py"}
    options |= {"no_reward_probe": True, "num_episodes": 50}
    started = {ranks: launch(tmp_path / str(ranks), options | {"save_path": tmp_path / str(ranks)}, ranks)
               for ranks in (1, 2)}  # yapf: disable
    for ranks, each in started.items():
        assert each.wait() == [1] * ranks and "Traceback" not in each.output, each.output
        told = errors(each.output)
        assert len(told) == 1 and "no response could be scored for 3 steps in a row (none: 8)" in told[0], each.output
        assert each.output.count("tripwire unscored: no response of this step") == 1, each.output
        lines = runs.read_lines(tmp_path / str(ranks) / "metrics.jsonl")
        assert [(line["step"], line["reward/unscored"], line["policy/optimizer_steps"]) for line in lines] == [
            (1, 8, 0), (2, 8, 0), (3, 8, 0)
        ]  # yapf: disable


def test_a_reward_that_never_differs(home, tmp_path, capsys):
    done = run(home, tmp_path, lambda item: Outcome(0.5), max_steps=6)
    assert [line["tripwire/zero_spread"] for line in done.lines] == [0, 0, 0, 0, 1, 1]
    text = capsys.readouterr().err
    assert text.count("in none of the last 5 steps have the rewards of a group differed") == 1
    assert text.count("the run has learnt nothing: in 6 steps every advantage was 0, because the rewards that ") == 1


def test_responses_at_the_limit_and_the_state_in_a_checkpoint(home, tmp_path, capsys):
    options = {"generate_max_len": 2, "stop": [], "disable_ckpt": False, "eval_data": [str(home / "test.jsonl")],
               "eval_steps": 3}  # yapf: disable
    straight = run(home, tmp_path / "a", runs.letters, max_steps=6, **options)
    assert capsys.readouterr().err.count("tripwire length_limit") == 1
    run(home, tmp_path / "b", runs.letters, max_steps=3, **options)
    resumed = run(home, tmp_path / "b", runs.letters, max_steps=6, load_checkpoint=True, **options)
    wires = [[{k: v for k, v in line.items() if k.startswith("tripwire/")} for line in one.lines]
             for one in (straight, resumed)]  # yapf: disable
    assert wires[0] == wires[1] and [line["tripwire/length_limit"] for line in wires[0]] == [0, 0, 0, 0, 1, 1]
    assert "tripwire/held_out" in wires[0][2] and "tripwire/held_out" not in wires[0][3]
    assert resumed.trainer.tripwires.state_dict() == straight.trainer.tripwires.state_dict()


def spoken(done):
    """The wires that were on in any step."""
    return {name.split("/")[1] for line in done.lines for name, value in line.items()
            if name.startswith("tripwire/") and value}  # yapf: disable


@pytest.mark.parametrize("history,told", [
    ([{"policy/optimizer_steps": 1, "advantage/min": 0, "advantage/max": 0}], "in 1 step every advantage was 0"),
    ([{"policy/optimizer_steps": 1, "advantage/min": 0, "advantage/max": 1}, {"policy/skipped_steps": 1}], ""),
    ([{"policy/optimizer_steps": 0, "rollout/kept_samples": 0}], "--mask_truncated"), ([{}], ""),
    ([NOTHING_ACCEPTED, FAILED, NOTHING_ACCEPTED], "in 2 of 3 steps every advantage was 0"),
    ([FAILED, {"policy/optimizer_steps": 0, "policy/skipped_steps": 1}, {"policy/skipped_steps": 2}], "not finite"),
])  # yapf: disable
def test_why_a_run_has_learnt_nothing(history, told):
    """The most frequent cause; a frozen policy is meant. A resumed run knows of the steps before."""
    wires, resumed = Tripwires(True, 0), Tripwires(True, 0)
    watched([GOOD | metrics for metrics in history], wires)
    resumed.load_state_dict(copy.deepcopy(wires.state_dict()))
    assert wires.nothing_learnt() == resumed.nothing_learnt() and not wires.only_bad_steps
    assert (told in str(wires.nothing_learnt())) and bool(told) is bool(wires.nothing_learnt())


def test_a_run_that_learns_hears_nothing(home, tmp_path, capsys):
    """Long enough for every wire."""
    vowels = lambda item: Outcome(sum(x in "aeiou" for x in item.response) / max(len(item.response), 1))  # noqa: E731
    steps = max(PATIENCE.values()) + 2
    done = run(home, tmp_path, vowels, max_steps=steps, n_samples_per_prompt=8, train_batch_size=32,
               actor_learning_rate=6e-3, eval_data=[str(home / "test.jsonl")], eval_steps=steps // 3)  # yapf: disable
    rewards = [line["reward/mean"] for line in done.lines]
    assert sum(rewards[-6:]) > 1.5 * sum(rewards[:6]), "it does not learn"
    assert spoken(done) == set() and not re.search("tripwire|learnt nothing", capsys.readouterr().err)
    assert {f"tripwire/{name}" for name in PATIENCE} <= done.metrics.keys() | done.lines[steps // 3 * 3 - 1].keys()


def test_a_learning_rate_beyond_all_bounds(home, tmp_path, capsys):
    bad = lambda item: Outcome(-1.0)  # noqa: E731
    done = run(home, tmp_path, bad, max_steps=3, actor_learning_rate=0.1, max_epochs=4, advantage_estimator="reinforce")
    assert spoken(done) == {"kl_explosion", "ratio_explosion"}
    text = capsys.readouterr().err
    assert "from the policy of the rollout (nats per token)" in text and "ratios have been far from 1" in text


def test_a_policy_that_collapses(home, tmp_path, capsys):
    number = itertools.count()
    done = run(home, tmp_path, lambda item: Outcome(float(next(number) % 3)), max_steps=9, actor_learning_rate=1.0,
               max_epochs=6)  # yapf: disable
    assert "entropy_collapse" in spoken(done) and "The policy hardly explores" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{}, {"dynamic_sampling": True, "max_gen_rounds": 1}], ids=str)
def test_a_collapsed_policy_has_no_update_to_tell_its_entropy(options, home, tmp_path, capsys):
    """Every response to a prompt is the same, and so is its reward; without an update only the rollout tells."""
    done = run(home, tmp_path, runs.letters, max_steps=5, temperature=0.01, **options)
    assert all("policy/entropy" not in line and line["rollout/entropy_estimate"] < 1e-3 for line in done.lines)
    assert spoken(done) == {"entropy_collapse", "zero_spread"}
    assert "The policy hardly explores" in capsys.readouterr().err


def test_the_estimate_of_the_entropy(home, tmp_path):
    """Over everything that is sampled; near the exact one of the update, over some hundred tokens."""
    options = {"n_samples_per_prompt": 16, "train_batch_size": 64}
    line = run(home, tmp_path / "a", runs.letters, drop_zero_advantage=False, **options).metrics
    assert line["rollout/tokens"] > 200 and line["policy/entropy"] > 0.5
    assert line["rollout/entropy_estimate"] == pytest.approx(line["policy/entropy"], rel=0.1)


def test_the_reward_rises_and_the_held_out_score_falls(home, tmp_path, capsys):
    path, number = tmp_path / "held.jsonl", itertools.count(1)
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "reference": "held"}) + "\n" for i in range(3)))

    def score(item):
        return Outcome(1 - next(number) / 100 if item.reference == "held" else next(number) / 100)

    done = run(home, tmp_path / "run", score, max_steps=3, eval_data=[str(path)], eval_steps=1)
    assert [line["tripwire/held_out"] for line in done.lines] == [0, 0, 1] and spoken(done) == {"held_out"}
    assert capsys.readouterr().err.count("the training reward has risen and the held-out score has fallen") == 1
