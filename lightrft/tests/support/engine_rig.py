"""A trainer and a real engine on its weights, in one process; and what every engine has to do there."""
import random
import re

import pytest
import torch

from lightrft.config.schema import StrategyConfig
from lightrft.models.freezing import freeze
from lightrft.models.tokenizer import load_tokenizer
from lightrft.rollout.hf.engine import HFEngine, eos_ids
from lightrft.rollout.sampling import restrict
from lightrft.rollout.weight_sync.sync import manifest, sync_weights
from lightrft.rollout.weight_sync.verify import WeightSyncError
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.strategy import FakeStrategy
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.faulty_sync import FAULTS, TARGET, TWIN, break_sync

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.06}
STOPS = tuple(range(40, 52))
NEW, LIMIT = 20, 64
EXACT = 2e-6  # nats, mean over the tokens of a batch; float32
LARGEST = 1e-5  # of one token after media; measured with and without vector kernels: 7e-6


class EngineRig:
    """A trainer in this process, and the HF engine on its own weights. ``engine``: the one that is looked at."""

    def __init__(self, folder, actor):
        self.strategy = FakeStrategy(StrategyConfig(), False)
        self.strategy.setup()
        self.prepared = self.strategy.prepare(actor, OptimSpec(1e-3))
        self.actor, self.tokenizer = self.prepared.model, load_tokenizer(str(folder))
        self.hf = HFEngine(self.actor.hf_model, eos_ids(self.actor.hf_model, self.tokenizer), 1 << 22)
        self.version, self.proof = 0, None

    def learn(self):
        """Weights as after training steps."""
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in (one for one in self.actor.parameters() if one.requires_grad):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.003)

    def sync(self):
        """The gap of the canaries where the sync is proven."""
        self.version += 1
        sync_weights(self.strategy, self.prepared, self.engine, self.version, proof=self.proof)
        return self.proof.check(self.version)["rollout/canary_gap"] if self.proof else None

    def ready(self):
        """Awake and with the trainer's weights, whatever the test before left."""
        self.engine.wake()
        self.sync()
        return self

    def logprobs(self, request, response, params, begun=()):
        """The trainer's, under the distribution that was sampled."""
        ids = torch.tensor([*request.token_ids, *begun, *response])
        with torch.no_grad():
            logits = self.naive(ids[None], torch.arange(len(ids))[None])[0, -len(response) - 1:-1]
        if params.temperature:
            logits = restrict(logits / params.temperature, params)
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()

    def naive(self, ids, positions):
        model = self.actor.hf_model
        model.set_attn_implementation("eager")
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
        model.set_attn_implementation("packed")
        return logits

    def gap(self, asked, params):
        """Mean and largest difference of log-probs between the engine and the trainer."""
        gaps = [
            abs(a - b) for request, group in zip(asked, generate(self.engine, asked, params)) for done in group
            for a, b in zip(done.logprobs, self.logprobs(request, done.token_ids, params), strict=True)
        ]
        return sum(gaps) / len(gaps), max(gaps)


def requests(samples=3, count=6):
    rng = random.Random(5)
    prompts = [[rng.randrange(4, 250) for _ in range(length)] for length in rng.sample(range(1, 24), count)]
    return [Group(prompt, [1000 * i + j for j in range(samples)]) for i, prompt in enumerate(prompts)]


def tokens(groups):
    return [[(done.token_ids, done.finish_reason) for done in group] for group in groups]


def names_a_fault(rig, kind, target=TARGET, twin=TWIN):
    """Of the next sync, in a weight that is compared. The ``twin`` has its shape."""
    right, wrong = rig.engine.update_weights, {target, twin} if kind == "swapped" else {target}
    compared = list(rig.proof.fingerprints.trainer)
    break_sync(rig.engine, kind, target, twin)
    with pytest.raises(WeightSyncError) as caught:
        rig.sync()
    rig.engine.update_weights = right
    said, first = str(caught.value), min(wrong, key=compared.index)
    layer = "".join(f" (layer {number})" for number in re.findall(r"layers\.(\d+)\.", first))
    assert f": {first}{layer} differs between engine and trainer on rank 0: " in said and FAULTS[kind][1] in said, said
    assert f". {len(wrong)} of {len(compared)} weights differ" in said, said


def reports_responses_as_they_end(engine, asked, params):
    """Each once, before its request, and the first ones of a request while its others are still generated."""
    order = []
    groups = generate(engine, asked, params, lambda i, done: order.append([(i, None, done)]),
                      lambda ended: order.append(ended))
    when = {(i, j): (turn, reported) for turn, ended in enumerate(order) for i, j, reported in ended}
    assert len(when) == sum(map(len, order)) == len(asked) + sum(len(request.seeds)
                                                                 for request in asked), "reported twice"
    early = 0
    for i, group in enumerate(groups):
        turns = [when[i, j][0] for j in range(len(group))]
        assert [when[i, j][1] for j in range(len(group))] == group == when[i, None][1]
        assert max(turns, default=-1) < when[i, None][0], "the request was reported before its last response"
        early += len(set(turns)) > 1
    assert early, "no response was reported before the last one of its request had ended"


def frozen_weights_come_once(rig, word, frozen):
    """Those of ``--freeze_prefix word``, ``frozen`` among them, and again once the engine has lost them; they are
    compared after every sync. Bytes are counted where they reach the engine."""
    engine, right, every, sizes = rig.engine, rig.engine.update_weights, rig.engine.weights, []
    freeze(rig.actor.model, [word], rig.actor.modality)
    engine.weights = manifest(rig.actor)._replace(names=every.names)
    fixed = sum(4 * every.shapes[name].numel() for name in engine.weights.frozen)
    total = sum(4 * shape.numel() for shape in every.shapes.values())
    assert frozen in engine.weights.frozen and 0 < fixed < total

    def counted(stream, version):
        sizes.append(0)

        def weights():
            for name, tensor in stream:
                sizes[-1] += tensor.nbytes
                yield name, tensor

        right(weights(), version)

    with pytest.raises(ValueError, match="did not arrive"):  # whatever it had, it has lost
        right(iter(()), 98)
    engine.update_weights, engine.sleeps = counted, True  # on a CPU nothing is freed
    for _ in range(3):
        assert rig.sync() < 1e-5
        assert set(rig.proof.fingerprints.trainer) == every.shapes.keys()
        rig.learn()
    engine.sleep()
    engine.wake()
    rig.sync()
    weight = rig.actor.hf_model.get_parameter(frozen)
    weight.data, before = weight.data + 1e-3, weight.data
    with pytest.raises(WeightSyncError, match=f": {frozen}.* differs .* still has the values of the previous sync"):
        rig.sync()
    weight.data = before
    assert sizes == [total, total - fixed, total - fixed, total, total - fixed]
    engine.update_weights, engine.sleeps, engine.weights = right, False, every
    rig.actor.requires_grad_(True)


EXPERT_FAULTS = {
    "scaled": lambda now, before: now * (1 + 1e-3), "stale": lambda now, before: before,
    "transposed": lambda now, before: now.t().contiguous().view(now.shape)
}  # yapf: disable


def names_faults_of_experts(rig):
    """Of the last expert of a MoE, or of all of them, in each of its tensors."""
    right, router = rig.engine.update_weights, "model.layers.1.mlp.gate.weight"
    rig.sync()
    rig.proof.wants_canary = False

    def broken(name, change):
        rig.version += 1
        sync_weights(rig.strategy, rig.prepared, rig.engine, rig.version, proof=rig.proof)
        rig.proof.check(rig.version)
        before = {one: tensor.clone() for one, tensor in rig.strategy.full_params(rig.actor)}[name]
        rig.learn()
        rig.engine.update_weights = lambda stream, version: right(
            ((one, change(tensor.clone(), before) if one == name else tensor) for one, tensor in stream), version)
        with pytest.raises(WeightSyncError) as caught:
            rig.sync()
        rig.engine.update_weights = right
        said = str(caught.value)
        assert f": {name} (layer 1) differs" in said and ". 1 of " in said, said

    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
        for change in EXPERT_FAULTS.values():

            def last(now, before, change=change):
                now[-1] = change(now[-1], before[-1])
                return now

            broken(name, last)
        broken(name, lambda now, before: now.roll(1, 0))  # experts are exchanged
    broken(router, lambda now, before: now * (1 + 1e-3))
    rig.proof.wants_canary = True
