"""Families with state, exported and loaded again: as policies and as reward models, whole and with fewer layers."""
import pytest
import torch

from lightrft.config.schema import StrategyConfig
from lightrft.config.rm_schema import RewardModelConfig
from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.models.loader import load_actor, load_reward_model, load_scorer
from lightrft.strategy.checkpoint import CheckpointManager
from lightrft.strategy.export import write_model
from lightrft.strategy.strategy import FakeStrategy
from lightrft.tests.support import tiny, tiny_vision
from lightrft.tests.support.hybrids import FAMILIES
from lightrft.tests.support.shared_prompts import experience
from lightrft.tests.support.tiny_lm import SPEC
from lightrft.utils.errors import UserError

ROUNDING = 3e-5  # of scores of about 10
EXP = experience().select([0, 3, 4, 5, 8])


def write(model, folder):
    write_model(model, model.export_params(model.named_parameters()), folder, torch.float32)


def scorer_of(folder, layer):
    """A reward model with a head that is not 0."""
    model = load_reward_model(RewardModelConfig(pretrain=str(folder), probing_layer=layer)).eval()
    torch.nn.init.normal_(model.hf_model.score.weight, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_exports_compute_the_same(family, tmp_path):
    """Scores in a pack are those alone, to the rounding of float32. A cut model has the weights of the lower layers."""
    base = tiny.save_model(tmp_path / "base", family)
    policy = load_actor(PolicyModelConfig(pretrain=str(base))).eval()
    write(policy, tmp_path / "policy")
    again = load_actor(PolicyModelConfig(pretrain=str(tmp_path / "policy")), train=False)
    torch.testing.assert_close(again(EXP)[0], policy(EXP)[0], atol=ROUNDING, rtol=0)
    whole = scorer_of(base, -1)
    scores = whole(EXP)
    alone = torch.cat([whole(EXP.select([i])) for i in range(EXP.num_seqs)])
    torch.testing.assert_close(scores, alone, atol=ROUNDING, rtol=0)
    weights, above = whole.hf_model.state_dict(), whole.config.num_hidden_layers
    for layer in (0, 1, -1) if family != "olmo_hybrid" else (-1, ):
        model, kept = scorer_of(base, layer), layer if layer >= 0 else above
        assert len(model.hf_model.model.layers) == kept
        cut = model.hf_model.state_dict()
        assert all(torch.equal(weights[name], tensor) for name, tensor in cut.items())
        assert {name for name in weights if f"layers.{kept - 1}." in name} <= cut.keys()
        write(model, tmp_path / f"scorer{layer}")
        again = load_scorer(str(tmp_path / f"scorer{layer}"))
        torch.testing.assert_close(again(EXP), model(EXP), atol=ROUNDING, rtol=0)
        assert torch.allclose(model(EXP), scores, atol=ROUNDING) is (layer == -1)


def learn(strategy, prepared, seed):
    """A step of the optimizer with gradients that no weight lacks, those of towers included."""
    generator = torch.Generator().manual_seed(seed)
    for weight in prepared.model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)
    strategy.optimizer_step(prepared)


@pytest.mark.parametrize("family", [*FAMILIES, "pictures of qwen3_5", "pictures of qwen3_5_moe"])
def test_a_policy_resumes_bit_by_bit(family, tmp_path):
    """Weights, optimizer and schedule: the step after a checkpoint is that of the run that went on."""
    _, pictures, name = family.rpartition("pictures of ")
    base = (tiny_vision.save_model(tmp_path / "base", name, False) if pictures else
            tiny.save_model(tmp_path / "base", name))  # yapf: disable
    strategy = FakeStrategy(StrategyConfig())
    straight, resumed = (strategy.prepare(load_actor(PolicyModelConfig(pretrain=str(base))), SPEC) for _ in range(2))
    checkpoints = CheckpointManager(strategy, tmp_path / "checkpoints", asynchronous=False)
    learn(strategy, straight, 1)
    assert checkpoints.save(1, {"actor": straight}, {}, {}, {})
    checkpoints.load(checkpoints.latest(), {"actor": resumed})
    for prepared in (straight, resumed):
        learn(strategy, prepared, 2)
    pairs = zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True)
    assert [name for (name, ours), theirs in pairs if not torch.equal(ours, theirs)] == []


@pytest.mark.parametrize("layer,lacks", [(0, "'linear_attention'"), (1, "attention")])
def test_a_family_that_needs_layers_of_both_kinds_is_not_cut_below(layer, lacks, tmp_path):
    folder = tiny.save_model(tmp_path, "olmo_hybrid")
    with pytest.raises(UserError, match=f"--probing_layer {layer}: model type 'olmo_hybrid' .* at least one {lacks}"):
        scorer_of(folder, layer)
