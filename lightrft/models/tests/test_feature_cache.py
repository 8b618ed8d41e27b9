"""Features of frozen towers that are computed once."""
import pytest
import torch

from lightrft.config.schema import DataConfig, ModelConfig, StrategyConfig
from lightrft.models.loader import load_actor
from lightrft.models.media_features import FeatureCache
from lightrft.models.towers import Features, Tower
from lightrft.rollout import SamplingParams
from lightrft.rollout.hf.engine import HFEngine
from lightrft.strategy.strategy import SingleProcessStrategy
from lightrft.tests.support import tiny_vision
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.media_rig import MediaRig
from lightrft.trainer.model_media import connect_media, feature_cache
from lightrft.utils.errors import UserError

pytest.importorskip("torchvision")
FROZEN = {"qwen3_vl": ["visual"], "qwen2_audio": ["audio", "projector"], "internvl": ["visual", "projector"]}


@pytest.fixture(scope="module", params=FROZEN)
def rig(request, tmp_path_factory):
    """Deepstack features and M-RoPE; sounds; pictures of several tiles, and frames."""
    family = tiny_vision.FAMILIES[request.param]
    rig = MediaRig(family.save(tmp_path_factory.mktemp("model"), tied=False), family.placeholders, family)
    rig.frozen = FROZEN[request.param]
    return rig


@pytest.fixture(name="passes")
def passes_fixture(monkeypatch):
    """Number of media in each pass of a tower."""
    seen, right = [], Tower.of
    monkeypatch.setattr(Tower, "of",
                        lambda self, hf, kind, media: seen.append(len(media)) or right(self, hf, kind, media))
    return seen


def actor_of(rig, mib=None, **options):
    """An actor with a frozen tower; ``mib``: and with a cache."""
    actor = load_actor(ModelConfig(pretrain=str(rig.folder), **{"freeze_prefix": rig.frozen} | options))
    cfg = DataConfig(cache_features=mib is not None, feature_cache_mib=mib or 0)
    connect_media(actor, rig.source, SingleProcessStrategy(StrategyConfig()), feature_cache(cfg))
    return actor


def gradients(actor, exp):
    """Log-probs, and gradients of all that is trained."""
    actor.zero_grad()
    logprobs = actor(exp)[0]
    logprobs.sum().backward()
    return logprobs, {name: one.grad.clone() for name, one in actor.named_parameters() if one.requires_grad}


def test_log_probs_and_gradients_are_those_of_the_plain_way(rig, passes):
    """Bit for bit where a sequence has one medium; of several the tower's arithmetic may round otherwise."""
    plain, kept = actor_of(rig), actor_of(rig, 64)
    samples = rig.samples()
    for some in (*([one] for one in samples), samples, samples[1:2]):
        exp = rig.pack(some)
        expected, found = gradients(plain, exp), gradients(kept, exp)
        limit = 0.0 if len(some) == 1 and len(some[0][2]) < 2 else 1e-5
        assert (expected[0] - found[0]).abs().max() <= limit
        assert all((grad - found[1][name]).abs().max() <= 20 * limit for name, grad in expected[1].items())
    unique = {key for *_, keys in samples for key in keys}
    assert kept.modality.cache.take_counts()[0] == len(unique) and kept.modality.cache.take_counts() == (0, 0)
    passes.clear()
    kept(rig.pack(samples))
    kept(rig.pack(samples[1:2]))  # no medium
    assert passes == [] and kept.modality.cache.take_counts() == (0, len(unique))


def test_without_room_all_are_computed_again_and_the_oldest_go(rig, passes):
    exp, unique = rig.pack(rig.samples()), len({key for *_, keys in rig.samples() for key in keys})
    tight = actor_of(rig, 0)
    with torch.no_grad():
        assert torch.equal(tight(exp)[0], tight(exp)[0])
    assert passes == [1] * (2 * unique)
    one = Features([torch.zeros(1 << 18)])  # a MiB
    cache, computed = FeatureCache(2), []
    for keys in (["a"], ["b"], ["a"], ["c"], ["a"], ["b"]):
        cache.features(keys, lambda key: computed.append(key) or one, int)
    assert computed == ["a", "b", "c", "b"] and cache.take_counts() == (4, 2)


def test_the_hf_engine_reads_them_too(rig, passes):
    actor = actor_of(rig, 64)
    requests = [Group(prompt, [3], media=keys) for prompt, keys in zip(rig.prompts, rig.keys)]
    expected = generate(HFEngine(rig.hf, [], 1 << 22, modality=rig.actor.modality), requests, SamplingParams(6))
    passes.clear()
    found = generate(HFEngine(actor.hf_model, [], 1 << 22, modality=actor.modality), requests, SamplingParams(6))
    assert [one.token_ids for some in found for one in some] == [one.token_ids for some in expected for one in some]
    unique = {key for keys in rig.keys for key in keys}
    assert passes == [1] * len(unique)
    actor(rig.pack([(prompt, done[0].token_ids, keys) for prompt, done, keys in zip(rig.prompts, found, rig.keys)]))
    assert len(passes) == len(unique), "the trainer computes them again"


def test_trained_features_are_refused(rig):
    for options in ({"freeze_prefix": []}, {"freeze_prefix": rig.frozen[1:] or ["visual.blocks"]},
                    {"freeze_prefix": [], "lora_rank": 2, "target_modules": ["all-linear", rig.frozen[0]]}):
        with pytest.raises(UserError, match=r"--cache_features: model\..* is trained.* add --freeze_prefix visual"):
            actor_of(rig, 64, **options)
    assert actor_of(rig, 64, freeze_prefix=[], lora_rank=2).modality.cache is not None


def test_ranks_run_a_divided_tower_equally_often(rig, passes):
    """Here another rank lacks three media: the passes that this one adds are of blank media."""
    actor = actor_of(rig, 64)
    actor.modality.passes = lambda count: max(count, 3)
    actor(rig.pack(rig.samples()[:1]))
    actor(rig.pack(rig.samples()[1:2]))
    assert passes == [1] * 6 * len(actor.modality.kinds) and len(actor.modality.cache._kept) == 1
    assert actor.modality.of_a_copy().passes is None
