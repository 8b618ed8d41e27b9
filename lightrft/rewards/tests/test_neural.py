"""Reward models as rewards: numbers of Hugging Face, queues, weights, recipes, refusals."""
import shutil
from dataclasses import replace

import pytest
import torch

from lightrft.config.cli import parse_config
from lightrft.config.options import ConfigError
from lightrft.config.schema import Config, RewardConfig
from lightrft.preflight.hardware import Device, Machine
from lightrft.preflight.memory import memory, reward_sizes
from lightrft.preflight.report import report
from lightrft.preflight.validate import validate
from lightrft.rewards.base import RewardInput
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.neural import NeuralReward
from lightrft.rewards.placement import ScorerSetup
from lightrft.strategy.memory import ModelSize
from lightrft.tests.support import tiny
from lightrft.tests.support.fake_cuda import DOWNLOAD, fake_cuda, SYNC
from lightrft.tests.support.scorers import plain, save_other_scorer, save_scorer
from lightrft.utils.errors import UserError

ITEMS = [RewardInput("ignored", "4" * i, [{"role": "user", "content": f"{i}+{i}?"}], data_source=f"source{i % 2}")
         for i in range(1, 7)]  # yapf: disable


def manager_of(*entries, setup=None, **options):
    return RewardManager(RewardConfig(reward_pretrain=list(entries), **options), setup=setup)


def totals(manager, items=ITEMS):
    return [score.total for score in manager.collect(manager.submit(items))]


def test_rewards_are_those_of_hugging_face(scorers):
    """One queue for all responses of several submissions, in passes of at most so many tokens."""
    a, b = plain(scorers[0], ITEMS), plain(scorers[1], ITEMS)
    manager = manager_of(*scorers, setup=ScorerSetup(max_tokens=100))
    handles = [manager.submit(ITEMS[:4]), manager.submit(ITEMS[4:])]
    assert not manager.begins_early(ITEMS[:1])
    passes = []
    manager.neural["rm1"].model.register_forward_pre_hook(lambda _, args: passes.append(args[0]))
    scores = [score for handle in handles for score in manager.collect(handle)]
    assert [score.parts["rm1"] for score in scores] == pytest.approx(a, rel=1e-4, abs=1e-4)
    assert [score.parts["rm2"] for score in scores] == pytest.approx(b, rel=1e-4, abs=1e-4)
    assert [score.total for score in scores] == pytest.approx([x + y for x, y in zip(a, b)], rel=1e-4, abs=1e-4)
    assert sum(exp.num_seqs for exp in passes) == 6 and all(exp.num_tokens <= 100 for exp in passes) and len(passes) > 1


def test_a_function_that_is_named_like_the_model_does_not_replace_it(scorers, tmp_path):
    (tmp_path / "own.py").write_text("def rm(data_source, solution_str, ground_truth):\n    return 10.0\n")
    manager = manager_of(scorers[0], reward=[str(tmp_path / "own.py")])
    assert totals(manager) == pytest.approx([10 + x for x in plain(scorers[0], ITEMS)], rel=1e-4)
    manager.shutdown()


def test_a_function_of_the_original_gets_their_scores(scorers, tmp_path):
    """As tensors, found by name; its result is the reward, unless the weight of a model says otherwise."""
    a, b = plain(scorers[0], ITEMS), plain(scorers[1], ITEMS)
    (tmp_path / "both.py").write_text("def mix(model_reward_list, labels, queries, refs, label_map):\n"
                                      "    kind, right = (model_reward_list[label_map[n]] for n in ('kind', 'right'))\n"
                                      "    return 2 * kind - right, {'kind_mean': kind.mean()}\n")
    named = [f"kind={scorers[0]}", f"right={scorers[1]}"]
    manager = manager_of(*named, reward=[str(tmp_path / "both.py")])
    scores = manager.collect(manager.submit(ITEMS))
    assert [score.total for score in scores] == pytest.approx([2 * x - y for x, y in zip(a, b)], rel=1e-4, abs=1e-4)
    assert [score.parts["kind"] for score in scores] == pytest.approx(a, rel=1e-4, abs=1e-4)
    assert scores[0].parts["mix/kind_mean"] == pytest.approx(sum(a) / 6, rel=1e-4, abs=1e-4)
    manager.shutdown()
    manager = manager_of(*named, reward=[str(tmp_path / "both.py"), "right=0.5"])
    assert totals(manager) == pytest.approx([2 * x - y / 2 for x, y in zip(a, b)], rel=1e-4, abs=1e-4)
    manager.shutdown()


def test_weights_by_entry_and_by_recipe(scorers):
    a, b = plain(scorers[0], ITEMS), plain(scorers[1], ITEMS)
    named = [f"kind={scorers[0]}", f"right={scorers[1]}"]
    found = totals(manager_of(*named, reward=["kind=0.5"]))
    assert found == pytest.approx([0.5 * x + y for x, y in zip(a, b)], rel=1e-4, abs=1e-4)
    found = totals(manager_of(*named, reward_recipe=["source0:right=2", "source1:kind=1+right=-1"]))
    wanted = [x - y if i % 2 else 2 * y for i, (x, y) in enumerate(zip(a, b), 1)]
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    for wrong in ("right=2", "source:", ":right=2"):
        with pytest.raises(UserError, match="write SOURCE:part=weight"):
            manager_of(*named, reward_recipe=[wrong])
    with pytest.raises(UserError, match="two models are named 'rm2'; give one of them another name"):
        manager_of(f"rm2={scorers[0]}", scorers[1])


def test_normalised_by_the_moments_of_the_evaluation(scorers):
    raw = plain(scorers[1], ITEMS)
    assert totals(manager_of(scorers[1], normalize_reward=True)) == pytest.approx([(x - 0.5) / 2 for x in raw],
                                                                                  rel=1e-4, abs=1e-4)
    with pytest.raises(UserError, match="--normalize_reward: .* has no mean and std"):
        manager_of(scorers[0], normalize_reward=True)


@pytest.mark.parametrize("architecture", ["RewardModel", "Qwen2ForCausalLM", "Qwen2ForSequenceClassification"])
def test_the_head_of_another_program(architecture, tmp_path):
    """By its only name in the files, by that in config.json, or by the option; a wrong name is an error."""
    wanted = totals(manager_of(save_scorer(tmp_path / "own", seed=1)))
    one = save_other_scorer(tmp_path / "one", architecture=architecture, num_labels=1, mean=0.5, std=2.0)
    two = save_other_scorer(tmp_path / "two", ("value_head", "v_head"), architecture)
    named = save_other_scorer(tmp_path / "named", ("value_head", "v_head"), architecture, value_head_prefix="v_head")
    assert totals(manager_of(one)) == wanted and totals(manager_of(one, setup=ScorerSetup(head="value_head"))) == wanted
    assert totals(manager_of(named)) == totals(manager_of(two, setup=ScorerSetup(head="v_head"))) == [
        pytest.approx(2 * value, rel=1e-5) for value in wanted]  # yapf: disable
    for given, head, words in ((one, "score", "has no score.weight; its heads: value_head$"),
                               (two, None, "has the heads v_head,value_head: name one"),
                               (str(tmp_path / "own"), "value_head", "has no value_head.weight; its heads: score$")):
        with pytest.raises(UserError, match=words):
            manager_of(given, setup=ScorerSetup(head=head)).submit(ITEMS)
    assert totals(manager_of(one, normalize_reward=True)) == pytest.approx([(x - 0.5) / 2 for x in wanted], abs=1e-5)
    with pytest.raises(UserError, match="--normalize_reward: .* has no mean and std"):
        manager_of(two, normalize_reward=True)


def test_offloaded_models_visit_the_device(scorers):
    """Nothing comes back with them: the host keeps its copy."""
    row = [([5, 6, 7], [False, False, True])]
    expected = NeuralReward(scorers[0], RewardConfig(), ScorerSetup()).score(row)[0].value
    with fake_cuda() as ledger:
        reward = NeuralReward(scorers[0], RewardConfig(reward_offload=True), ScorerSetup(torch.device("cuda")))
        held = {name: weight.data_ptr() for name, weight in reward.model.named_parameters()}
        for _ in range(2):
            visits = []
            reward.model.register_forward_pre_hook(lambda model, args: visits.append(weight_of(model).is_cuda))
            assert reward.score(row)[0].value == pytest.approx(expected, rel=1e-5) and visits[-1]
            assert held == {name: weight.data_ptr() for name, weight in reward.model.named_parameters()}, "resting"
        assert not weight_of(reward.model).is_cuda and not ledger.total(DOWNLOAD)
        assert not any("VisitingWeights" in site for site in ledger.sites(SYNC)), "a copy blocks"
    resident = NeuralReward(scorers[0], RewardConfig(), ScorerSetup(torch.device("meta")))
    assert weight_of(resident.model).device.type == "meta"


def weight_of(model):
    return next(model.parameters())


def test_what_does_not_fit_is_unscored_and_what_cannot_score_is_refused(scorers, tmp_path):
    manager = manager_of(scorers[0])
    long = RewardInput("", "4" * 600, ITEMS[0].messages)
    fits, unfit = manager.collect(manager.submit([ITEMS[0], long]))
    assert fits.total is not None and unfit.total is None and unfit.error == "too_long"
    shutil.copytree(scorers[0], tmp_path / "marked")
    tiny.tokenizer(extra="<|extra|>").save_pretrained(tmp_path / "marked")  # a token more than the model has
    manager = manager_of(str(tmp_path / "marked"))
    fits, unfit = manager.collect(manager.submit([ITEMS[0], replace(ITEMS[0], response="a<|extra|>")]))
    assert fits.total is not None and unfit.total is None and unfit.error == "unknown_token"
    picture = RewardInput("", "a", [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}])
    with pytest.raises(UserError, match="reads text only, and a prompt has image"):
        manager.collect(manager.submit([picture]))
    with pytest.raises(UserError, match="it is a language model without a reward head"):
        manager_of(str(tiny.save_model(tmp_path / "causal")))
    with pytest.raises(ConfigError, match="--reward_pretrain /nowhere: no such folder"):
        validate(parse_config([], defaults={"reward_pretrain": ["/nowhere"]}, tree=Config).config, 1)


def test_bfloat16_rounds_the_model_and_not_its_head(scorers):
    reward = NeuralReward(scorers[0], RewardConfig(), ScorerSetup(bf16=True))
    types = {name: param.dtype for name, param in reward.model.named_parameters()}
    assert types.pop("model.score.weight") == torch.float32 and set(types.values()) == {torch.bfloat16}
    rough = [outcome.value for outcome in reward.score(reward.encode(ITEMS, [()] * len(ITEMS)))]
    assert rough == pytest.approx(plain(scorers[0], ITEMS), abs=0.2) and rough != pytest.approx(plain(
        scorers[0], ITEMS))


def test_the_plan_counts_their_weights(scorers):
    held = sum(param.numel() for param in NeuralReward(scorers[0], RewardConfig(), ScorerSetup()).model.parameters())
    sizes = reward_sizes(RewardConfig(reward_pretrain=list(scorers)))
    assert [size.total for size in sizes.values()] == [held, held]

    def planned(**options):
        config = parse_config([], defaults={"reward_pretrain": list(scorers), "strategy": "fsdp", **options}).config
        found = memory(config, 2, ModelSize(1000, 100, 200), Device("cuda:0", 10_000, 10_000))["reward models"]
        assert f"{held:,} parameters, " in report(config, {}, Machine.here(2, 0, 2))
        return [found[0] / held, found[1] / held]

    assert planned() == [8, 8] and planned(bf16=True) == [4, 4] and planned(reward_shard=True) == [4, 4]
    assert planned(reward_offload=True) == [0, 4], "one at a time, while it scores"
    assert planned(reward_offload=True, reward_shard=True) == [0, 2]
