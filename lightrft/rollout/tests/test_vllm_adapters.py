"""LoRA that reaches vLLM as adapters beside the base weights: what it computes, what is sent, what is proven."""
import gc
import random

import pytest
import torch

from lightrft.config.schema import ModelConfig, RolloutConfig, StrategyConfig
from lightrft.models.loader import load_actor
from lightrft.models.tokenizer import load_tokenizer
from lightrft.ops.rounding import Arithmetic
from lightrft.rollout import SamplingParams, get_engine
from lightrft.rollout.weight_sync.sync import sync_weights
from lightrft.rollout.weight_sync.verify import WeightSyncVerifier, WeightSyncError
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.strategy import FakeStrategy
from lightrft.tests.support import tiny
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.quick_starts import quick_starts
from lightrft.types import Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.timer import Timer

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.slow]

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.06}
NEW = 12
EXACT = 2e-6


class Rig:
    """A trainer with LoRA in this process, and vLLM with its base weights and adapters."""

    def __init__(self, folder, **model):
        self.strategy, self.version = FakeStrategy(StrategyConfig(), False), -1
        self.strategy.setup()
        actor = load_actor(ModelConfig(pretrain=str(folder), **{"lora_rank": 3, "lora_alpha": 8} | model))
        self.prepared = self.strategy.prepare(actor, OptimSpec(1e-3))
        self.actor = self.prepared.model
        cfg = RolloutConfig(engine_type="vllm", prompt_max_len=40, generate_max_len=NEW, engine_kv_mib=32,
                            lora_sync="adapter")
        with quick_starts():
            self.engine = get_engine(cfg, self.actor, self.strategy, load_tokenizer(str(folder)))
        prompts = [Prompt(str(i), request.token_ids, "") for i, request in enumerate(REQUESTS)]
        self.proof = WeightSyncVerifier(RolloutConfig(sync_proof="both", sync_canary_every=1), self.strategy,
                                        self.prepared, self.engine, prompts, Arithmetic("cpu", "float32"), Timer())
        self.sent = []

    def learn(self):
        generator = torch.Generator().manual_seed(self.version + 7)
        with torch.no_grad():
            for parameter in self.actor.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)

    def sync(self, full_params=None):
        """Weight sync and its proof; what was sent is noted."""
        self.version += 1
        stream = self.strategy.full_params
        self.sent = []

        def noted(*args):
            for name, tensor in (full_params or stream)(*args):
                self.sent.append(name)
                yield name, tensor

        self.strategy.full_params = noted
        try:
            sync_weights(self.strategy, self.prepared, self.engine, self.version, 1, self.proof)
        finally:
            del self.strategy.full_params
        return self.proof.check(self.version)

    def gap(self):
        """Mean and largest difference of log-probs between vLLM and the trainer."""
        gaps = []
        self.actor.hf_model.set_attn_implementation("eager")
        for request, group in zip(REQUESTS, generate(self.engine, REQUESTS, SamplingParams(NEW))):
            for done in group:
                ids = torch.tensor([request.token_ids + done.token_ids])
                with torch.no_grad():
                    logits = self.actor.model(input_ids=ids, use_cache=False).logits[0, len(request.token_ids) - 1:-1]
                own = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0].tolist()
                gaps += [abs(a - b) for a, b in zip(own, done.logprobs, strict=True)]
        self.actor.hf_model.set_attn_implementation("packed")
        return sum(gaps) / len(gaps), max(gaps)


RNG = random.Random(3)
REQUESTS = [Group([RNG.randrange(4, 250) for _ in range(5 + i)], [10 * i, 10 * i + 1]) for i in range(4)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    rig = Rig(tiny.save_model(tmp_path_factory.mktemp("model"), **SIZES))
    yield rig
    rig.engine.shutdown()
    gc.collect()


def test_adapters_alone_after_the_first_sync(rig):
    """Exact before and after updates, and the trainer's own matrices stay as they are."""
    means = []
    for step in range(4):
        before = {name: tensor.clone() for name, tensor in rig.actor.named_parameters()}
        rig.sync()
        assert all(torch.equal(tensor, before[name]) for name, tensor in rig.actor.named_parameters())
        assert all(".lora_" in name for name in rig.sent) == (step > 0) and len(rig.sent) == (28 if step else 54)
        means.append(rig.gap())
        rig.learn()
    assert all(mean < EXACT and most < 2e-5 for mean, most in means), means
    rig.engine.sleep()
    rig.engine.wake()
    with pytest.raises(RuntimeError, match="has no weights yet"):
        generate(rig.engine, REQUESTS, SamplingParams(NEW))
    rig.sync()
    assert rig.gap()[0] < EXACT and all(".lora_" in name for name in rig.sent)


def test_every_matrix_can_be_read_back(rig):
    names = [name for name, _ in rig.strategy.full_params(rig.actor, 1 << 20, False)]
    assert set(names) == set(rig.engine.weight_dtypes()) and sum(".lora_" in name for name in names) == 28


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.v_proj.lora_B.weight", "model.layers.0.mlp.up_proj.weight",
                                  "model.layers.1.mlp.down_proj.lora_A.weight"])  # yapf: disable
def test_a_fault_is_named(name, rig):
    """In an adapter as it is sent, or in a base weight that nobody sent again."""
    rig.sync()
    rig.learn()
    matrix = next(iter(rig.engine.weight_map.held[name].values())).view
    kept = matrix.clone()

    def harmed(*args):
        yield from FakeStrategy.full_params(rig.strategy, *args)
        matrix[1, 1] += 1e-3

    with pytest.raises(WeightSyncError, match=rf"{name} \(layer \d\) differs"):
        rig.sync(harmed)
    if ".lora_" not in name:
        matrix.copy_(kept)
    rig.sync()


def test_an_adapter_that_vllm_passes_over_is_named(rig, monkeypatch):
    rig.sync()
    rig.learn()
    fill, name = rig.engine.adapters._fill, "model.layers.1.mlp.down_proj.lora_B.weight"
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine.adapters, "_fill", lambda one, tensor: None if one == name else fill(one, tensor))
        with pytest.raises(WeightSyncError,
                           match=f"{name} .* still has the values of the previous sync. 1 of 54 weights"):
            rig.sync()
    rig.sync()


def test_adapters_that_were_sent_as_they_were_before(rig):
    """Nothing is wrong between what was sent and what vLLM has: the trainer's own are what is compared."""
    rig.sync()
    old = {name: tensor.clone() for name, tensor in rig.strategy.full_params(rig.actor, 1 << 20, False, True)}
    rig.learn()
    with pytest.raises(WeightSyncError, match=f"{next(iter(old))} .* of the previous sync. 28 of 54 weights differ"):
        rig.sync(lambda *_: iter(old.items()))
    rig.sync()


def test_what_vllm_has_no_room_for(tmp_path, rig):
    with pytest.raises(UserError, match="vLLM has no room for an adapter at model.layers.9.x: use --lora_sync merged"):
        list(rig.engine.adapters.take([("model.layers.9.x.lora_A.weight", torch.zeros(1))]))
    with pytest.raises(UserError, match="--lora_rank 1000: vLLM takes adapters of rank 512 at most"):
        Rig(tiny.save_model(tmp_path, **SIZES), lora_rank=1000)
