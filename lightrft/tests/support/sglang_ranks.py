"""Program of sglang_processes for two ranks: FSDP2 shards on two ranks feed one SGLang of both."""
import os
import sys
from dataclasses import replace

import torch

from lightrft.config.schema import ModelConfig, RolloutConfig, StrategyConfig
from lightrft.models.loader import load_actor
from lightrft.models.tokenizer import load_tokenizer
from lightrft.ops.fingerprint import Piece, fingerprints
from lightrft.rollout import get_engine
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.weight_sync.sync import sync_weights
from lightrft.rollout.weight_sync.verify import WeightSyncError
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support.engine_rig import reports_responses_as_they_end
from lightrft.tests.support.episodes import generate
from lightrft.tests.support.faulty_sync import TARGET, break_sync
from lightrft.tests.support.sglang_rig import verifier
from lightrft.tests.support.turns import turns_of_a_group
from lightrft.tests.support.vllm_ranks import GREEDY, LIMIT_S, REQUESTS, SAMPLED, check, limit_of
from lightrft.tests.support.weight_sync_ranks import changed
from lightrft.types import Experience

OPTIONS = {"engine_type": "sglang", "prompt_max_len": 32, "generate_max_len": 32, "engine_kv_mib": 4,
           "sync_bucket_mib": 1, "sync_canary_every": 1}  # yapf: disable
EXACT = 2e-6  # nats, mean over the tokens; float32


class Ranks:
    """A trainer over both ranks, whose whole model each of them also has."""

    def __init__(self, folder):
        cfg, self.tokenizer = ModelConfig(pretrain=folder), load_tokenizer(folder)
        self.alone = load_actor(cfg)
        self.reference = HFEngine(self.alone.hf_model, {self.tokenizer.eos_token_id}, 1 << 22)
        self.strategy = get_strategy(StrategyConfig(dist_timeout_s=LIMIT_S))
        self.strategy.setup()
        self.prepared = self.strategy.prepare(load_actor(cfg), OptimSpec(1e-3))
        self.mine = slice(self.strategy.rank, None, self.strategy.world_size)  # three requests on rank 0, two on rank 1
        self.version = 0

    def engine(self, tp_size):
        """SGLang and the proof of its syncs."""
        cfg = RolloutConfig(engine_tp_size=tp_size, **OPTIONS)
        engine = get_engine(cfg, self.prepared.model, self.strategy, self.tokenizer)
        assert tp_size == 1 or limit_of(engine.group) == self.strategy.cfg.collective_limit_s
        return engine, verifier(cfg, self.strategy, self.prepared, engine)

    def sync(self, engine, proof):
        """The gap of the canaries."""
        self.version += 1
        sync_weights(self.strategy, self.prepared, engine, self.version, 1, proof)
        return proof.check(self.version)["rollout/canary_gap"]

    def learn(self):
        changed(self.prepared.model)
        changed(self.alone)

    def gap(self, asked, responses):
        """Mean difference of the log-probs to the sharded trainer's, at the temperature of SAMPLED."""
        rows = [(request.token_ids, one) for request, group in zip(asked, responses) for one in group]
        lens = torch.tensor([0] + [len(prompt) + len(one.token_ids) for prompt, one in rows])
        exp = Experience(
            token_ids=torch.tensor([token for prompt, one in rows for token in [*prompt, *one.token_ids]]),
            cu_seqlens=lens.cumsum(0).to(torch.int32),
            loss_mask=torch.tensor([k for p, one in rows for k in [False] * len(p) + [True] * len(one.token_ids)]),
            media=[() for _ in rows])  # yapf: disable
        with torch.no_grad():
            scored = self.prepared.model(exp)[0][exp.loss_mask].double()
        self.strategy.free_full(self.prepared.model)
        reported = torch.tensor([value for _, one in rows for value in one.logprobs], dtype=torch.float64)
        return (scored - reported).abs().mean().item()


def facts(ranks, tp_size):
    """Before and after an update: log-probs, greedy responses, seeds, fingerprints, the callback, the proof."""
    engine, proof = ranks.engine(tp_size)
    mine, sampled = ranks.mine, replace(SAMPLED, temperature=1.0)
    for _ in range(2):
        assert ranks.sync(engine, proof) < 1e-5
        whole = {name: tensor.clone() for name, tensor in ranks.strategy.full_params(ranks.prepared.model)}
        assert set(engine.weight_dtypes()) == set(whole)
        expected = fingerprints([Piece(tensor) for tensor in whole.values()])
        assert torch.equal(engine.fingerprints(list(whole)), expected), "the shards do not add up to the weights"
        seen = []
        responses = generate(engine, REQUESTS[mine], GREEDY, lambda i, _: seen.append(i))
        check(responses, generate(ranks.reference, REQUESTS[mine], GREEDY))
        assert sorted(seen) == list(range(len(REQUESTS[mine]))), seen
        reports_responses_as_they_end(engine, REQUESTS[mine], replace(sampled, stop_token_ids=tuple(range(4, 40))))
        drawn = generate(engine, REQUESTS[mine], sampled)
        assert ranks.gap(REQUESTS[mine], drawn) < EXACT
        asked = REQUESTS if ranks.strategy.rank == 0 else []
        check(generate(engine, asked, sampled)[mine], drawn[:5 * (ranks.strategy.rank == 0)])
        turns_of_a_group(engine, ranks.reference, REQUESTS, mine, ranks.strategy.rank == 0)
        short = generate(engine, REQUESTS[mine], sampled, lambda i, _: True)  # until both ranks have enough
        assert all(one.token_ids == full.token_ids[:len(one.token_ids)] for cut, whole in zip(short, drawn)
                   for one, full in zip(cut, whole))  # yapf: disable
        engine.sleep()
        engine.wake()
        ranks.learn()
    right = engine.update_weights
    if ranks.strategy.rank == 0:
        break_sync(engine, "scaled")
    try:
        ranks.sync(engine, proof)
        raise AssertionError("not noticed")
    except WeightSyncError as error:
        assert TARGET in str(error) and "on rank 0" in str(error), error
    engine.update_weights = right
    engine.shutdown()


def main(folder: str) -> None:
    """One SGLang of both ranks. With one each, the quickstart trains in sglang_processes."""
    environment, ranks = dict(os.environ), Ranks(folder)
    facts(ranks, 2)
    assert dict(os.environ) == environment
    ranks.strategy.barrier()  # the trainer's process group is still there
    assert torch.distributed.is_initialized()
    ranks.strategy.teardown()


if __name__ == "__main__":
    main(sys.argv[1])
