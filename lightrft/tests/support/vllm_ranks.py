"""What ``torchrun`` runs in tests of vLLM: what FSDP2 or ZeRO-3 divides between two ranks feeds one engine of both, or
one each."""
import sys
from contextlib import nullcontext
from dataclasses import replace

import torch

from lightrft.config.schema import ModelConfig, RolloutConfig, StrategyConfig
from lightrft.models.loader import load_actor
from lightrft.models.tokenizer import load_tokenizer
from lightrft.ops.fingerprint import Piece, fingerprints
from lightrft.rollout import SamplingParams, get_engine
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.weight_sync.sync import sync_weights
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support.engine_rig import reports_responses_as_they_end
from lightrft.tests.support.episodes import Group, Response, generate
from lightrft.tests.support.forks import branches_of_a_group
from lightrft.tests.support.turns import turns_of_a_group
from lightrft.tests.support.vllm_async import scheduled_ahead
from lightrft.tests.support.weight_sync_ranks import changed

REQUESTS = [Group(list(range(5, 12 + 3 * i)), [100 * i + j for j in range(2)]) for i in range(5)]
GREEDY = SamplingParams(12, 0.0, stop_token_ids=(7, 9, 80))
SAMPLED = SamplingParams(12, 0.8)
FIRE = SamplingParams(24, 0.7, stop_token_ids=tuple(range(30, 60)), first_temperature=8.0)
LIMIT_S = 1234  # of a collective
OPTIONS = {"engine_type": "vllm", "prompt_max_len": 32, "generate_max_len": 32, "engine_kv_mib": 32}


def limit_of(group) -> float:
    """Seconds after which a collective of a CPU group is an error."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def check(left, right) -> None:
    """Equal tokens, ends and (to 1e-5) log-probs."""
    for ours, theirs in zip(left, right, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason), (a, b)
            assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) < 1e-5, (a, b)


def counted(engine):
    """A list that grows with every pass of the model."""
    steps, step = [], engine.native.step
    engine.native.step = lambda: steps.append(1) or step()
    return steps


def stop_early(engine, asked, model, wanted: int) -> None:
    """It stops once every rank has had the requests that it wants; what was cut off goes on, and nothing is lost."""
    steps, reported = counted(engine), []
    whole, passes = generate(engine, asked, FIRE), len(steps)
    parts = generate(engine, asked, FIRE, lambda i, _: reported.append(i) or len(reported) >= wanted)
    assert len(reported) >= wanted and len(steps) < 2 * passes, "no pass was saved"
    cut = [(i, j) for i, group in enumerate(parts) for j, done in enumerate(group) if done.finish_reason == "abort"]
    assert not {i for i, _ in cut} & set(reported), "a request was called finished"
    rest = [replace(asked[i], seeds=[asked[i].seeds[j]], prefixes=[parts[i][j].token_ids]) for i, j in cut]
    for (i, j), (more, ) in zip(cut, generate(engine, rest, FIRE), strict=True):
        begun = parts[i][j]
        assert begun.token_ids == whole[i][j].token_ids[:len(begun.token_ids)] != whole[i][j].token_ids
        parts[i][j] = Response(begun.token_ids + more.token_ids, begun.logprobs + more.logprobs, more.finish_reason)
    for i, (request, group) in enumerate(zip(asked, parts, strict=True)):
        for j, (done, full) in enumerate(zip(group, whole[i], strict=True)):
            assert (i, j) in cut or done.token_ids == full.token_ids, "what was not cut off is another response"
            assert done.finish_reason == "stop" or len(done.token_ids) == FIRE.max_new_tokens
            expected = scores(model, request.token_ids, done.token_ids)
            assert max(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)) < 1e-5, (i, j)
    del engine.native.step


def scores(model, prompt: list[int], response: list[int]) -> list[float]:
    """Log-probs by the whole model: the first token's at its own temperature."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        model.set_attn_implementation("eager")
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1:-1].float()
        model.set_attn_implementation("packed")
    logits[0], logits[1:] = logits[0] / FIRE.first_temperature, logits[1:] / FIRE.temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def harm_one_copy(engine, names: list[str], expected: torch.Tensor, rank: int) -> None:
    """Weights that each rank has a copy of, wrong on rank 1 only: seen there, whoever of the group reads them."""
    norms = [name for name in names if "norm" in name]
    weights = [next(iter(engine.weight_map.held[name].values())).view for name in norms]
    for weight in weights if rank == 1 else ():
        weight.data[0] *= 1.001
    wrong = [name for name, same in zip(names, engine.fingerprints(names) == expected) if not same]
    assert wrong == (norms if rank == 1 else []), wrong
    for weight in weights if rank == 1 else ():
        weight.data[0] /= 1.001


def from_zero(cfg: ModelConfig, engine, reference: HFEngine, mine: slice) -> None:
    """DeepSpeed with stage 3 feeds the same engine: what it generates is what the whole model generates."""
    strategy = get_strategy(StrategyConfig(strategy="deepspeed", zero_stage=3))
    strategy.setup()
    prepared, fresh = strategy.prepare(load_actor(cfg), OptimSpec(1e-3)), load_actor(cfg)
    reference.model.load_state_dict(fresh.hf_model.state_dict())
    for version in (3, 4):
        sync_weights(strategy, prepared, engine, version, 1)
        check(generate(engine, REQUESTS[mine], GREEDY), generate(reference, REQUESTS[mine], GREEDY))
        strategy.free_full(prepared.model)
        changed(prepared.model)
        changed(reference.model)
    strategy.teardown()


def main(folder: str, tp: int, early: bool) -> None:
    """Greedy responses are those of the whole model; sampled ones do not depend on who asked for them. ``early``: some
    stop early, ZeRO-3 too feeds the engine, and it schedules ahead."""
    cfg, tokenizer = ModelConfig(pretrain=folder), load_tokenizer(folder)
    alone = load_actor(cfg)
    reference = HFEngine(alone.hf_model, {tokenizer.eos_token_id}, 1 << 22)
    strategy = get_strategy(StrategyConfig(dist_timeout_s=LIMIT_S))
    strategy.setup()
    prepared = strategy.prepare(load_actor(cfg), OptimSpec(1e-3))
    with scheduled_ahead() if early else nullcontext():
        engine = get_engine(RolloutConfig(engine_tp_size=tp, **OPTIONS), prepared.model, strategy, tokenizer)
    assert tp == 1 or limit_of(engine.group) == strategy.cfg.collective_limit_s
    mine = slice(strategy.rank, None, strategy.world_size)  # three requests on rank 0, two on rank 1
    for version in (1, 2):
        sync_weights(strategy, prepared, engine, version, 1)
        whole = {name: tensor.clone() for name, tensor in strategy.full_params(prepared.model)}
        names = list(whole)
        assert list(engine.weight_dtypes()) == names
        expected = fingerprints([Piece(whole[name]) for name in names])
        assert torch.equal(engine.fingerprints(names), expected), "the shards do not add up to the weights"
        if version == 1:
            harm_one_copy(engine, names, expected, strategy.rank)
            sync_weights(strategy, prepared, engine, version, 1)
        seen: list[int] = []
        responses = generate(engine, REQUESTS[mine], GREEDY, lambda i, _: seen.append(i))
        check(responses, generate(reference, REQUESTS[mine], GREEDY))
        assert sorted(seen) == list(range(len(REQUESTS[mine]))), seen
        reports_responses_as_they_end(engine, REQUESTS[mine], replace(SAMPLED, stop_token_ids=tuple(range(4, 40))))
        sampled = generate(engine, REQUESTS[mine], SAMPLED)
        check(
            generate(engine, REQUESTS if strategy.rank == 0 else [], SAMPLED)[mine], sampled[:5 * (strategy.rank == 0)])
        turns_of_a_group(engine, reference, REQUESTS, mine, strategy.rank == 0)
        branches_of_a_group(engine, REQUESTS, mine, strategy.rank == 0)
        for wanted in ((1, 1), (2, 1), (0, 1)) if early else ():
            stop_early(engine, REQUESTS[mine] if wanted[strategy.rank] else [], alone.hf_model, wanted[strategy.rank])
        changed(prepared.model)
        changed(alone)
    if early:
        from_zero(cfg, engine, reference, mine)
    engine.shutdown()
    strategy.barrier()  # the trainer's process group is still there
    assert torch.distributed.is_initialized()
    strategy.teardown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "early" in sys.argv)
