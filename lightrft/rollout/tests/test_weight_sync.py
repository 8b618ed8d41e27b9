"""get_engine and sync_weights: in place on one process, own copies under FSDP2 and ZeRO-3 on two ranks."""

import pytest
import torch
from transformers import GenerationConfig

from lightrft.config.schema import ModelConfig, RolloutConfig, StrategyConfig
from lightrft.models.loader import load_actor
from lightrft.models.tokenizer import load_tokenizer
from lightrft.rollout import SamplingParams, get_engine
from lightrft.rollout.hf import kv_cache
from lightrft.rollout.hf.engine import eos_ids
from lightrft.rollout.weight_sync.sync import sync_weights
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.strategy import FakeStrategy
from lightrft.tests.support import naive_decode, tiny, weight_sync_ranks as ranks
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.launch import torchrun
from lightrft.tests.support.packages import needs_deepspeed
from lightrft.utils import watchdog


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.save_model(tmp_path_factory.mktemp("model"), initializer_range=0.12))


def prepare(folder, bf16=False, **model):
    strategy = FakeStrategy(StrategyConfig(), bf16)
    strategy.setup()
    return strategy, strategy.prepare(load_actor(ModelConfig(pretrain=folder, **model)), OptimSpec(1e-3))


def engine_of(folder, strategy, prepared, bf16=False, **rollout):
    return get_engine(RolloutConfig(**rollout), prepared.model, strategy, load_tokenizer(folder), bf16)


def test_one_process_shares_the_weights(folder):
    strategy, prepared = prepare(folder)
    engine = engine_of(folder, strategy, prepared)
    assert engine.model is prepared.model.hf_model and not engine.owns_model
    before = ranks.flat(generate(engine, ranks.REQUESTS, ranks.PARAMS))
    ranks.changed(prepared.model)
    assert sync_weights(strategy, prepared, engine, 5) < 1 and engine.weight_version == 5
    assert not ranks.equal(ranks.flat(generate(engine, ranks.REQUESTS, ranks.PARAMS)), before), "old weights are in use"


def test_the_budget_option_reaches_the_engine(folder):
    strategy, prepared = prepare(folder)
    assert engine_of(folder, strategy, prepared, engine_kv_mib=3).kv_bytes == 3 << 20
    with pytest.raises(ValueError, match="--engine_kv_mib"):
        generate(engine_of(folder, strategy, prepared, engine_kv_mib=1), [Group([5], [1])], SamplingParams(9000))


def test_the_sequences_at_once_reach_the_engine(folder):
    strategy, prepared = prepare(folder)
    many, few = engine_of(folder, strategy, prepared), engine_of(folder, strategy, prepared, engine_max_seqs=3)
    before = watchdog.Progress.ticks
    responses = [generate(engine, ranks.REQUESTS, ranks.PARAMS) for engine in (many, few)]
    assert watchdog.Progress.ticks - before > ranks.PARAMS.max_new_tokens, "the watchdog sees no progress"
    assert few._cache.plan.slots == 3 < many._cache.plan.slots
    assert ranks.equal(*map(ranks.flat, responses)), "responses wait for each other, and are the same"


def test_the_kernel_of_a_decode_step_reaches_it(folder, monkeypatch):
    """Of every layer and step; what stands for it here attends as the products do."""
    calls = []
    monkeypatch.setattr(kv_cache, "_kernel", lambda: lambda *args: calls.append(args) or naive_decode.attend(*args))
    strategy, prepared = prepare(folder)
    usual, one = engine_of(folder, strategy, prepared), engine_of(folder, strategy, prepared, fused_decode=True)
    responses = [ranks.flat(generate(engine, ranks.REQUESTS, ranks.PARAMS)) for engine in (usual, one)]
    assert ranks.equal(*responses) and len(calls) >= 2 * (ranks.PARAMS.max_new_tokens - 1)


def test_lora_adapters_take_part_in_place(folder):
    strategy, prepared = prepare(folder, lora_rank=2)
    engine = engine_of(folder, strategy, prepared)
    before = ranks.flat(generate(engine, ranks.REQUESTS, ranks.PARAMS))
    with torch.no_grad():
        for name, parameter in prepared.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    assert not ranks.equal(ranks.flat(generate(engine, ranks.REQUESTS, ranks.PARAMS)), before), "adapters are ignored"


def test_bf16_computes_in_bfloat16_and_keeps_the_weights(folder):
    strategy, prepared = prepare(folder, bf16=True)
    engine = engine_of(folder, strategy, prepared, bf16=True)
    half = ranks.flat(generate(engine, ranks.REQUESTS, ranks.PARAMS))
    assert engine._probe()[0].dtype == torch.bfloat16, "the cache is not in bfloat16"
    assert {p.dtype for p in prepared.model.parameters()} == {torch.float32}
    full = ranks.flat(generate(engine_of(folder, *prepare(folder)), ranks.REQUESTS, ranks.PARAMS))
    assert not ranks.equal(half, full), "bf16 changes nothing"


def test_eos_comes_from_tokenizer_and_generation_config(folder):
    actor, tokenizer = load_actor(ModelConfig(pretrain=folder)), load_tokenizer(folder)
    actor.hf_model.generation_config = GenerationConfig(eos_token_id=[7, 9])
    assert eos_ids(actor.hf_model, tokenizer) == {7, 9, tokenizer.eos_token_id}
    actor.hf_model.generation_config = GenerationConfig()
    assert eos_ids(actor.hf_model, tokenizer) == {tokenizer.eos_token_id}


def test_unknown_engine(folder):
    strategy, prepared = prepare(folder)
    with pytest.raises(ValueError, match="unknown engine_type 'x'; known: hf"):
        engine_of(folder, strategy, prepared, engine_type="x")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_two_ranks_generate_what_one_process_does(folder, strategy):
    torchrun(ranks.__name__, folder, strategy)
