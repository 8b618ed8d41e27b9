"""Run by test_weight_sync under torchrun: two ranks generate what one process does, before and after new weights."""
import sys

import torch

from lightrft.config.schema import ModelConfig, RolloutConfig, StrategyConfig
from lightrft.models.loader import load_actor
from lightrft.models.tokenizer import load_tokenizer
from lightrft.ops.rounding import Arithmetic
from lightrft.rollout import SamplingParams, get_engine
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.weight_sync.sync import sync_weights
from lightrft.rollout.weight_sync.verify import WeightSyncError, get_weight_sync_verifier
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support.episodes import Group, generate
from lightrft.types import Prompt
from lightrft.utils.timer import Timer

PARAMS = SamplingParams(12, stop_token_ids=tuple(range(40, 52)))
REQUESTS = [Group([5 + i, 60, 70 + 2 * i], [100 * i + j for j in range(3)]) for i in range(6)]


def flat(groups):
    return [(c.token_ids, c.logprobs) for group in groups for c in group]


def equal(left, right):
    return len(left) == len(right) and all(a == b and max(abs(x - y) for x, y in zip(p, q)) < 1e-5
                                           for (a, p), (b, q) in zip(left, right))


def changed(model):
    """Weights as after a training step, the same on every rank; of those that DeepSpeed divides their pieces."""
    with torch.no_grad():
        for parameter in model.parameters():
            held = vars(parameter).get("ds_tensor", parameter)
            held.add_(held * 0.05)


def proof_of(strategy, prepared, engine):
    prompts = [Prompt(str(i), request.token_ids, "") for i, request in enumerate(REQUESTS)]
    return get_weight_sync_verifier(RolloutConfig(sync_canary_every=1), strategy, prepared, engine, prompts,
                                    Arithmetic("cpu", "float32"), Timer())


def faulty_gather(strategy, prepared, engine, proof):
    """A wrong row in what one rank gathers, and sends: the proof looks at what the trainer holds. Both ranks stop."""
    gathered = strategy.gathered

    def gather(model, bucket_bytes, *names):
        for name, tensor in gathered(model, bucket_bytes, *names):
            if strategy.rank == 1 and "1.mlp.down_proj" in name:
                tensor = tensor.roll(1, 0)
            yield name, tensor

    strategy.gathered = gather
    sync_weights(strategy, prepared, engine, 3, 1, proof)
    try:
        proof.check(3)
    except WeightSyncError as error:
        assert "model.layers.1.mlp.down_proj.weight (layer 1) differs between engine and trainer on rank 1" in str(
            error)
    else:
        raise AssertionError("a faulty gather passed")
    strategy.gathered = gathered


def lora(folder, strategy):
    """Merged weights, which no rank holds."""
    prepared = strategy.prepare(load_actor(ModelConfig(pretrain=folder, lora_rank=2)), OptimSpec(1e-3))
    engine = get_engine(RolloutConfig(engine_kv_mib=1), prepared.model, strategy, load_tokenizer(folder))
    proof = proof_of(strategy, prepared, engine)
    for version in (1, 2):
        sync_weights(strategy, prepared, engine, version, 512, proof)
        assert proof.check(version)["rollout/canary_gap"] < 1e-5
        strategy.free_full(prepared.model)
        changed(prepared.model)


def main(folder: str, config: StrategyConfig) -> None:
    cfg, rollout = ModelConfig(pretrain=folder), RolloutConfig(engine_kv_mib=1)
    alone = load_actor(cfg)
    reference = HFEngine(alone.hf_model, {load_tokenizer(folder).eos_token_id}, 1 << 20)
    strategy = get_strategy(config)
    strategy.setup()
    prepared = strategy.prepare(load_actor(cfg), OptimSpec(1e-3))
    random_state = torch.get_rng_state()
    engine = get_engine(rollout, prepared.model, strategy, load_tokenizer(folder))
    assert torch.equal(torch.get_rng_state(), random_state), "building the engine drew random numbers"
    assert engine.owns_model, "a sharded actor cannot be shared"
    proof = proof_of(strategy, prepared, engine)
    mine = slice(strategy.rank, None, strategy.world_size)
    for version, bucket_mib in ((1, 512), (2, 1)):
        seconds = sync_weights(strategy, prepared, engine, version, bucket_mib, proof)
        assert proof.check(version)["rollout/canary_gap"] < 1e-5
        assert 0 < seconds < 60 and engine.weight_version == version, (seconds, engine.weight_version)
        expected = generate(reference, REQUESTS, PARAMS)
        assert equal(flat(generate(engine, REQUESTS[mine], PARAMS)), flat(expected[mine])), f"version {version} differs"
        engine.sleep()
        engine.wake()
        strategy.free_full(prepared.model)
        changed(prepared.model)
        changed(alone)
        assert not equal(flat(generate(reference, REQUESTS, PARAMS)), flat(expected)), "the change changes nothing"
    faulty_gather(strategy, prepared, engine, proof)
    lora(folder, strategy)
    strategy.barrier()
    strategy.teardown()


if __name__ == "__main__":
    main(sys.argv[1], StrategyConfig(strategy=sys.argv[2], zero_stage=3))
