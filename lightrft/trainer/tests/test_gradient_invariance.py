"""The self-test at launch: right losses pass, wrong ones stop the run in words, and it leaves no trace."""
import itertools
import math
import re
from contextlib import contextmanager
from copy import copy as copy_of, deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightrft.algorithms.base import CORRECTIONS, POLICY_LOSSES
from lightrft.ops.aggregate import MODES, Denominators, aggregate, count
from lightrft.tests.support import runs, tiny, tiny_task
from lightrft.tests.support.launch import launch
from lightrft.trainer.checks import gradient_invariance as self_test
from lightrft.trainer.checks.gradient_invariance import SelfTestError, choose, cuts, formula, off_policy
from lightrft.trainer.ppo_update import PolicyUpdate
from lightrft.trainer.batch_plan import MicroBatchLimits
from lightrft.utils.env import rng_state
from lightrft.utils.logging import get_logger

no_picture = runs.no_picture

ON = {"self_test": True}
VOLATILE = re.compile("^time/|^perf/|_per_s$")


@pytest.fixture(scope="module", autouse=True)
def wrong_losses():
    """Registered for this module only: other tests list the registry."""
    import lightrft.tests.support.cut_losses  # noqa: F401
    names = [(table, name) for table in (POLICY_LOSSES, CORRECTIONS) for name in table if name.startswith("own_")]
    yield
    for table, name in names:
        del table._entries[name]


@contextmanager
def told(caplog):
    """The log of the library reaches ``caplog``."""
    logger = get_logger()
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)


def message(parts, **algorithm):
    """What the self-test says about a wrong loss."""
    with pytest.raises(SelfTestError) as caught:
        findings(parts, **algorithm)
    return str(caught.value)


OWN = {"own_tokens": "tokens in the loss", "own_seqs": "sequences", "own_length": "tokens, prompts included"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OWN)
def test_a_loss_that_divides_by_its_own_micro_batch(name, mode, parts):
    text = message(parts, policy_loss=name, loss_agg_mode=mode, use_kl_loss=False)
    assert f"--policy_loss {name}" in text and f"divides by the number of its own {OWN[name]}; with" in text


@pytest.mark.parametrize("name", ["own_baseline", "own_weights"])
def test_a_loss_with_a_statistic_of_its_micro_batch(name, parts):
    text = message(parts, policy_loss=name)
    assert "depend on which other samples share its micro-batch" in text and "a baseline" in text


def test_a_correction_with_a_statistic_of_its_micro_batch(parts):
    text = message(parts, rollout_correction="own_mean")
    assert "--rollout_correction own_mean" in text and "a normalisation" in text


@pytest.mark.parametrize("mode,norm_seqs", [(mode, True) for mode in MODES] + [(MODES[3], False)])
def test_the_report_has_the_numbers(mode, norm_seqs, parts):
    text = message(parts, policy_loss="own_tokens", loss_agg_mode=mode, loss_agg_norm_seqs=norm_seqs)
    one, other, apart = (float(x) for x in re.findall(r"norm(?: of the difference)?:? ([\d.e-]+)", text)[:3])
    assert abs(one - other) <= apart <= one + other and "--no_self_test" in text
    shown = text.partition(f"formula ({mode}): ")[2].partition("\n")[0]
    assert shown == {
        ("token-mean", True): f"sum over kept tokens / {''.join(re.findall('[0-9]+', shown))} tokens",
        ("seq-mean-token-mean", True): "sum over sequences of their token mean / 4 seqs",
        ("seq-mean-token-sum", True): "sum over kept tokens / 4 seqs",
        ("seq-mean-token-sum-norm", True): "sum over kept tokens / (norm 12 * 4 seqs)",
        ("seq-mean-token-sum-norm", False): "sum over kept tokens / norm 12",
        ("token-sum", True): "sum over kept tokens",
    }[mode, norm_seqs]


@pytest.mark.parametrize("mode,norm_seqs", list(itertools.product(MODES, (True, False))))
def test_the_formula_is_what_is_computed(mode, norm_seqs):
    """The product of its numbers is what divides; the norm is shown in full."""
    lens = torch.tensor([3, 2, 4])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lens.cumsum(0)]).int()
    loss, mask = torch.arange(9.0).double(), torch.arange(9) != 4
    denominators = Denominators.of(count(mask, cu_seqlens), 1048576)
    shown = formula(mode, norm_seqs, denominators)
    means = mode == "seq-mean-token-mean"
    kept = torch.stack([part.mean() if means else part.sum() for part in (loss[:3], loss[3:4], loss[5:])]).sum()
    divisor = math.prod(int(number) for number in re.findall(r"\d+", shown))
    expected = aggregate(loss, mask, cu_seqlens, mode, denominators, norm_seqs)
    assert kept / divisor == pytest.approx(expected.item(), rel=1e-12) and ("mean" in shown) == means


def test_a_run_stops_before_it_has_learnt_anything(home, tmp_path):
    """Also where the plan has one sample per micro-batch, which such a loss does not notice by itself."""
    trainer = runs.build(home, tmp_path, policy_loss="own_tokens", micro_train_batch_size=1, **ON)
    before = runs.weights(trainer, "actor")
    with pytest.raises(SelfTestError, match="4 micro-batches: norm .*\n.*2 micro-batches: norm"):
        trainer.fit()
    assert trainer.step == 0 and all(torch.equal(v, before[k]) for k, v in runs.weights(trainer, "actor").items())


def test_the_report_in_the_docs_is_a_real_one(parts):
    page = Path(self_test.__file__).parents[3] / "docs" / "safety.md"
    if not page.exists():
        pytest.skip("installed without its repository")
    shown = page.read_text(encoding="utf-8").split("```text\n")[1].split("```")[0]
    text = message(parts, policy_loss="own_tokens", use_kl_loss=False)
    assert re.sub(r"[\d.]+", "#", shown).strip() == re.sub(r"[\d.]+", "#", text).strip()


def test_a_critic_with_such_a_loss(home, tmp_path):
    trainer = runs.build(home, tmp_path, advantage_estimator="gae", **ON)
    forward = trainer.update.value_loss.forward

    def wrong(values, exp, denominators):
        loss, metrics = forward(values, exp, denominators)
        return loss / exp.loss_mask.sum().clamp(min=1), metrics

    trainer.update.value_loss.forward = wrong
    with pytest.raises(SelfTestError, match="gradient of the value loss"):
        trainer.fit()


def test_turned_off_the_wrong_loss_trains(home, tmp_path):
    done = runs.run(home, tmp_path, policy_loss="own_tokens", self_test=False)
    assert done.metrics["policy/optimizer_steps"] == 1 and "time/self_test_s" not in done.metrics


@pytest.fixture(scope="module")
def parts(home, tmp_path_factory):
    """A trainer with a critic and a reference, and its first rollout."""
    options = {"advantage_estimator": "gae", "init_kl_coef": 0.5, "use_kl_loss": True}
    trainer = runs.ready(home, tmp_path_factory.mktemp("run"), **ON, **options)
    return trainer, trainer.maker.make(next(trainer.loader), 0, 0.5)


def holding(rollout, exp):
    """The shards of a rollout on one rank, with other fields."""
    shards = copy_of(rollout.shards)
    shards.exp = shards.held = exp
    return shards


def findings(parts, exp=None, **algorithm):
    """What the self-test finds with other options of the loss: {model: Comparison}; and what is still due."""
    (trainer, rollout), found = parts, {}
    config = replace(trainer.config, algorithm=replace(trainer.config.algorithm, **algorithm))
    update = PolicyUpdate(config, trainer.strategy, *trainer.prepared.values(), trainer.timer)
    judge = update.self_test._judge
    update.self_test._judge = lambda name, what, *args: (found.update({name: what}), judge(name, what, *args))
    update._self_test(replace(rollout, shards=holding(rollout, exp or rollout.exp)),
                      (config.algorithm.init_kl_coef, None), True)
    return found, update.self_test.due


BUILT_IN = {POLICY_LOSSES.get(name).fn: name for name in POLICY_LOSSES}  # one name for each
LOSSES = sorted(name for fn, name in BUILT_IN.items() if fn.__module__.startswith("lightrft.algorithms."))
COMBINED = [{"loss_agg_mode": mode}
            for mode in MODES] + [{"loss_agg_mode": MODES[3], "loss_agg_norm_seqs": False}, {"entropy_coef": 0.1},
                                  {"dual_clip": 1.5}, {"use_kl_loss": False}, {"kl_estimator": "k2"}]


@pytest.mark.parametrize("options", [{"policy_loss": name}
                                     for name in LOSSES] + [{"rollout_correction": name}
                                                            for name in sorted(CORRECTIONS)] + COMBINED, ids=str)
def test_right_losses_pass_with_room_to_spare(options, parts):
    found, due = findings(parts, **options)
    assert set(found) == {"policy", "critic"} and not due
    assert all(what.planned > 0 and what.gap < self_test.TOLERANCE[0] / 10 for what in found.values()), found


def test_rounding_to_bfloat16_stays_below_its_limit():
    """Of a deep random model with sharp logits, off-policy as in the test, against exact gradients."""
    exact = tiny.model("qwen2", num_hidden_layers=24, hidden_size=64, intermediate_size=192, initializer_range=0.08)
    exact.model.norm.weight.data.mul_(8)
    rounded = deepcopy(exact).bfloat16()
    exact.load_state_dict(rounded.state_dict())
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (4, 60), generator=rng)
    shift = torch.tensor(self_test.SHIFTS)[torch.randint(5, (4, 59), generator=rng)]
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None]

    def logprobs(model):
        return model(ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    def gradient(model):
        ratio = (logprobs(model) - logprobs(exact).detach() - shift).exp()
        torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages).mean().backward()
        return torch.cat([param.grad.float().flatten() for param in model.parameters()])

    one, other = gradient(exact), gradient(rounded)
    # 0.07 to 0.2, depending on the vector instructions of the CPU
    assert 0.03 < (one - other).norm() / one.norm() < self_test.TOLERANCE[1]


def test_bfloat16_is_allowed_more(home, tmp_path, caplog):
    with told(caplog):
        runs.run(home, tmp_path, bf16=True, **ON)
    gap = float(re.search(r"relative difference ([\d.e-]+), at most 0.3", caplog.text)[1])
    assert self_test.TOLERANCE[0] < gap < self_test.TOLERANCE[1] / 10, "float32's limit would stop it"


def numbers(done):
    return [{k: v for k, v in line.items() if not VOLATILE.search(k)} for line in done.lines]


@pytest.mark.parametrize("options", [{"lora_rank": 2, "lora_dropout": 0.3}, {"advantage_estimator": "gae"}], ids=str)
def test_it_leaves_no_trace(options, home, tmp_path):
    states, done, kept = [], [], []
    for name, on in (("a", True), ("b", False)):
        done.append(runs.run(home, tmp_path / name, max_steps=2, self_test=on, **options))
        states.append(rng_state())
        trainer = done[-1].trainer
        kept.append({f"{name}/{key}": value for name, prepared in trainer.prepared.items()
                     for key, value in trainer.strategy.state_dict(prepared).items()})  # yapf: disable
    assert numbers(done[0]) == numbers(done[1])
    assert any("/optim/" in key for key in kept[0]) and kept[0].keys() == kept[1].keys()
    assert all(torch.equal(value, kept[1][key]) for key, value in kept[0].items()), "weights, moments, schedule"
    assert torch.equal(states[0]["torch"], states[1]["torch"]) and states[0]["python"] == states[1]["python"]
    assert done[0].lines[0]["time/self_test_s"] > 0 == done[0].lines[1]["time/self_test_s"]


def test_right_after_it_the_trainer_is_as_before(parts):
    before = rng_state()
    findings(parts)
    for prepared in parts[0].prepared.values():
        assert all(parameter.grad is None for parameter in prepared.model.parameters())
        assert prepared.optimizer.backwards == 0 == prepared.scheduler.last_epoch and not prepared.optimizer.state
    assert not any(module.training for module in parts[0].prepared["actor"].model.modules())
    assert torch.equal(before["torch"], rng_state()["torch"]) and parts[1].exp.old_logprobs is None


def test_it_waits_for_something_to_compare(home, tmp_path):
    """Constant rewards give no advantage; the run goes on, and the test comes with the first reward that differs."""
    config = runs.config_of(home, tmp_path, max_steps=3, **ON)
    seen = []

    def score(item):
        seen.append(item)
        return runs.letters(item) if len(seen) > 8 else replace(runs.letters(item), value=0.0)

    trainer = runs.trainer_of(config, runs.strategy_of(config), runs.Judge(config.reward, score))
    due, run = [], trainer.update.run
    trainer.update.run = lambda *args: (run(*args), due.append(set(trainer.update.self_test.due)))[0]
    trainer.fit()
    assert due == [{"policy"}, set(), set()]


def copy(parts):
    exp = parts[1].exp
    return replace(exp, loss_mask=exp.loss_mask.clone(), advantages=exp.advantages.clone())


def test_a_batch_that_keeps_one_sample_is_left_out(parts, caplog):
    exp = copy(parts)
    exp.loss_mask[:] = torch.arange(exp.num_tokens) == exp.loss_mask.int().argmax()
    with told(caplog):
        assert findings(parts, exp) == ({}, {"policy", "critic"})
    assert "postponed to a later step: the batch keeps 1 sample" in caplog.text


def test_the_samples_are_short_and_have_advantages(parts):
    exp = copy(parts)
    exp.loss_mask[exp.cu_seqlens[2]:exp.cu_seqlens[3]] = False
    exp.advantages[:] = 1
    exp.advantages[exp.cu_seqlens[5]:exp.cu_seqlens[6]] = 0
    shards = holding(parts[1], exp)
    order = choose(shards, [[i] for i in range(8)], 8)
    assert sorted(order) == [0, 1, 3, 4, 5, 6, 7] and order[-1] == 5
    assert exp.seq_lens[order[:-1]].diff().min() >= 0 and choose(shards, [[i] for i in range(8)], 3) == order[:3]


def test_the_moved_batch_is_off_policy_by_fixed_amounts(parts):
    exp = parts[1].exp
    moved = off_policy(exp, bypass=False)
    shift = moved.old_logprobs - exp.rollout_logprobs
    assert exp.old_logprobs is None and {round(x, 2) for x in shift.tolist()} == set(self_test.SHIFTS)
    assert torch.allclose(moved.ref_logprobs - exp.ref_logprobs, shift, atol=1e-6)
    gaps = (moved.old_logprobs - moved.rollout_logprobs).abs().split(exp.seq_lens.tolist())
    assert [bool(gap.max() > 0.1) for gap in gaps] == [False, True] * 4 and moved.advantages is exp.advantages
    one = off_policy(exp, bypass=True)
    assert torch.equal(one.rollout_logprobs, one.old_logprobs) and torch.equal(one.old_logprobs, moved.old_logprobs)


@pytest.mark.parametrize("world,rows,tokens", list(itertools.product((1, 2, 3, 4), (0, 1, 2), (10**6, 20))))
def test_two_cuts_of_the_same_samples(world, rows, tokens):
    lens = [3, 5, 8, 9, 4, 7, 6, 2, 9, 1][:4 * world]
    planned, other = cuts(lens, world, MicroBatchLimits(rows, tokens))
    for cut in (planned, other):
        assert sorted(i for rank in cut.parts for part in rank for i in part) == list(range(len(lens)))
        assert len({len(rank) for rank in cut.parts}) == 1 and len(cut.parts) == world
        assert all(len(part) <= max(rows, 2) for rank in other.parts for part in rank)
    assert planned != other
    if world > 1:
        assert other.ranks == (world + 1) // 2 and planned.ranks == world


def test_there_may_be_no_second_cut():
    planned, other = cuts([5, 5], 1, MicroBatchLimits(1, 5))
    assert planned == other


@pytest.fixture(name="launched", scope="module")
def launched_fixture(home, tmp_path_factory):
    """Sharded over two ranks, all at once: a right loss, with and without the self-test, and the wrong ones."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "reward.py").write_text(tiny_task.REWARD, encoding="utf-8")
    common = {k: v for k, v in runs.BASE.items() if k != "self_test"}
    common |= {"pretrain": home / "model", "prompt_data": home / "train.jsonl", "reward": folder / "reward.py"}
    wrong = {"plugin": "lightrft.tests.support.cut_losses", "advantage_estimator": "reinforce"}
    kinds = {"good": {"advantage_estimator": "gae", "critic_learning_rate": 1e-3}}
    kinds["without"] = kinds["good"] | {"no_self_test": True}
    kinds["denominators"] = {"plugin": "lightrft.tests.support.fault_plugin", "advantage_estimator": "reinforce"}
    kinds |= {name: wrong | {"policy_loss": name} for name in ("own_tokens", "own_seqs", "own_baseline", "own_rank")}
    return folder, {
        name: launch(folder / name, common | own | {"save_path": folder / name / "run"}, ranks=2, FAULT=name)
        for name, own in kinds.items()
    }


@pytest.mark.dist
def test_two_ranks_with_a_right_loss(launched):
    """It passes, and leaves no trace."""
    folder, started = launched
    codes = {name: started[name].wait(120) for name in ("good", "without")}
    assert codes == {"good": [0, 0], "without": [0, 0]}, started["good"].output
    text = started["good"].output
    assert text.count("2 micro-batches on 2 of 2 ranks and 8 micro-batches on 1 of 2 ranks give the same gradient") == 2
    assert "give the same" not in started["without"].output
    good, other = (load_file(folder / name / "run" / "hf" / "model.safetensors") for name in ("good", "without"))
    assert all(torch.equal(value, other[name]) for name, value in good.items())
    lines = [[{k: v for k, v in line.items() if not VOLATILE.search(k)}
              for line in runs.read_lines(folder / name / "run" / "metrics.jsonl")] for name in ("good", "without")]
    assert lines[0] == lines[1] != []


@pytest.mark.dist
@pytest.mark.parametrize("name,what", [
    ("own_tokens", "its own tokens in the loss"),
    ("own_seqs", "its own sequences"),
    ("own_baseline", "no count explains it"),
    ("own_rank", "suspect: the rank: the same micro-batches on other ranks"),
])
def test_two_ranks_with_a_wrong_loss(name, what, launched):
    """Both stop; one of them tells the two norms."""
    run = launched[1][name]
    assert run.wait(120) == [1, 1] and "Traceback" not in run.output, run.output
    assert run.output.count("depends on how the batch is cut") == 1 and what in run.output, run.output
    assert re.search(
        r"2 micro-batches on 2 of 2 ranks: norm [\d.e-]+\n.* 8 micro-batches on 1 of 2 ranks: norm [\d.e-]+\n",
        run.output), run.output


@pytest.mark.dist
def test_two_ranks_that_count_only_their_own_samples(launched):
    """The denominators are those of the update: a mistake there stops the run too; each rank shows its own."""
    run = launched[1]["denominators"]
    assert run.wait(120) == [1, 1] and "Traceback" not in run.output, run.output
    shown = re.findall(r"sum over kept tokens / (\d+) tokens", run.output)
    assert len(shown) == len(set(shown)) == 2 and "depends on how the batch is cut" in run.output, run.output
