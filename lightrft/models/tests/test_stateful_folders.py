"""Families with state, exported and loaded again: as policies and as reward models, whole and with fewer layers."""
import pytest
import torch

from lightrft.config.rm_schema import RewardModelConfig
from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.models.loader import load_actor, load_reward_model, load_scorer
from lightrft.strategy.export import write_model
from lightrft.tests.support import tiny
from lightrft.tests.support.hybrids import FAMILIES
from lightrft.tests.support.shared_prompts import experience
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


@pytest.mark.parametrize("layer,lacks", [(0, "'linear_attention'"), (1, "attention")])
def test_a_family_that_needs_layers_of_both_kinds_is_not_cut_below(layer, lacks, tmp_path):
    folder = tiny.save_model(tmp_path, "olmo_hybrid")
    with pytest.raises(UserError, match=f"--probing_layer {layer}: model type 'olmo_hybrid' .* at least one {lacks}"):
        scorer_of(folder, layer)
