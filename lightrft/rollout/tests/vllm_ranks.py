"""What ``torchrun`` runs in test_vllm_engine: FSDP2 shards on two ranks feed one vLLM engine of both."""
import sys

import torch

from lightrft.config.schema import ModelConfig, RolloutConfig, StrategyConfig
from lightrft.models.loader import load_actor, load_tokenizer
from lightrft.ops.fingerprint import Piece, fingerprints
from lightrft.rollout import Request, SamplingParams, get_engine
from lightrft.rollout.hf_engine import HFEngine
from lightrft.rollout.tests.ranks import changed
from lightrft.rollout.weight_sync import sync_weights
from lightrft.strategy.strategy import get_strategy
from lightrft.strategy.strategy_base import OptimSpec

REQUESTS = [Request(list(range(5, 12 + 3 * i)), [100 * i + j for j in range(2)]) for i in range(5)]
GREEDY = SamplingParams(12, 0.0, stop_token_ids=(7, 9, 80))
SAMPLED = SamplingParams(12, 0.8)
OPTIONS = {"engine_type": "vllm", "prompt_max_len": 32, "generate_max_len": 32, "engine_kv_mib": 32}


def check(left, right) -> None:
    """Equal tokens, ends and (to 1e-5) log-probs."""
    for ours, theirs in zip(left, right, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason), (a, b)
            assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) < 1e-5, (a, b)


def main(folder: str) -> None:
    """Greedy responses are those of the whole model; sampled ones do not depend on who asked for them."""
    cfg, tokenizer = ModelConfig(pretrain=folder), load_tokenizer(folder)
    alone = load_actor(cfg)
    reference = HFEngine(alone.hf_model, {tokenizer.eos_token_id}, 1 << 22)
    strategy = get_strategy(StrategyConfig())
    strategy.setup()
    prepared = strategy.prepare(load_actor(cfg), OptimSpec(1e-3))
    engine = get_engine(RolloutConfig(engine_tp_size=2, **OPTIONS), prepared.model, strategy, tokenizer)
    mine = slice(strategy.rank, None, strategy.world_size)  # three requests on rank 0, two on rank 1
    for version in (1, 2):
        sync_weights(strategy, prepared, engine, version, 1)
        whole = {name: tensor.clone() for name, tensor in strategy.full_params(prepared.model)}
        assert list(engine.weight_dtypes()) == list(whole)
        expected = fingerprints([Piece(tensor) for tensor in whole.values()])
        assert torch.equal(engine.fingerprints(list(whole)), expected), "the shards do not add up to the weights"
        seen: list[int] = []
        responses = engine.generate(REQUESTS[mine], GREEDY, lambda i, _: seen.append(i))
        check(responses, reference.generate(REQUESTS[mine], GREEDY))
        assert sorted(seen) == list(range(len(REQUESTS[mine]))), seen
        sampled = engine.generate(REQUESTS[mine], SAMPLED)
        check(
            engine.generate(REQUESTS if strategy.rank == 0 else [], SAMPLED)[mine], sampled[:5 * (strategy.rank == 0)])
        changed(prepared.model)
        changed(alone)
    engine.shutdown()
    strategy.barrier()  # the trainer's process group is still there
    assert torch.distributed.is_initialized()
    strategy.teardown()


if __name__ == "__main__":
    main(sys.argv[1])
