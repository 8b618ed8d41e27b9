"""Models with state (convolutions, recurrent matrices) in the HF engine: decoding is the whole forward pass."""
import functools
import math

import pytest
import torch

from lightrft.config.schema import RolloutConfig
from lightrft.models.activations import ModelShape
from lightrft.models.actor_modality import ActorModality
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.engines import check_family_with_states, check_states
from lightrft.rollout.hf import kv_cache
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.hf.states import StateStore
from lightrft.rollout.tests.test_hf_engine import prompts, requests, same as alike, STOPS
from lightrft.rollout.tests.test_partial import follows, rest
from lightrft.rollout.vllm.launch import engine_arguments
from lightrft.rollout.vllm.states import ON_CPUS, REFUSED
from lightrft.tests.support import naive_decode, tiny
from lightrft.tests.support.episodes import generate, Group, keyed
from lightrft.tests.support.hybrids import IN_FLOAT32
from lightrft.tests.support.stepping import ANSWER, collect, rounds_keep_to_the_protocol, same
from lightrft.tests.support.turns import PARAMS, turns_are_those_by_hand, turns_have_the_scores
from lightrft.types import Key
from lightrft.utils.env import World
from lightrft.utils.errors import UserError

NEW, EXACT = 20, 2e-6
ROOMY, TIGHT = 1 << 24, 70_000  # bytes of cache; three slots, so that they are filled again and prompts wait
OTHERS = sorted(tiny.STATEFUL)
LONG = [*range(70, 150), *range(20, 55)]  # tokens; more than a chunk of 64


@functools.lru_cache(maxsize=None)
def model(family, packed=True):
    hf = tiny.model(family, initializer_range=0.06)
    hf.set_attn_implementation("packed" if packed else "eager")
    if packed:
        ActorModality().adapt(hf)
    return hf


def engine(family="qwen3_5", kv_bytes=ROOMY, **more):
    return HFEngine(model(family), {tiny.tokenizer().eos_token_id}, kv_bytes, **more)


def asked():
    return [Group(LONG, [1, 2]), *requests(), Group(prompts()[0][:1], [5, 6])]


def naive(family, prompt, response, temperature=1.0):
    """The forward pass of transformers over one sequence."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logits = model(family, packed=False)(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1:-1]
    return (logits / temperature).log_softmax(-1).gather(1, ids[0, len(prompt):, None])[:, 0].tolist()


@pytest.mark.parametrize("family,kv_bytes",
                         [("qwen3_5", ROOMY), *((family, TIGHT) for family in tiny.HYBRIDS), *((family, ROOMY)
                                                                                               for family in OTHERS)])
def test_decoding_is_the_forward_pass(family, kv_bytes):
    """Of responses of many lengths, from the state after their prompt that they share, also in slots of others."""
    params, used = SamplingParams(NEW, stop_token_ids=STOPS), engine(family, kv_bytes)
    for request, group in zip(asked(), generate(used, asked(), params), strict=True):
        for done in group:
            assert done.logprobs == pytest.approx(naive(family, request.token_ids, done.token_ids), rel=0, abs=EXACT)
    assert (used._space.cache.plan.slots < 5) is (kv_bytes == TIGHT)
    spec, shape = used._probe()[0], ModelShape.of(used.model.config)
    states = sum(math.prod(size) * dtype.itemsize for kept in spec.states.values() for size, dtype in kept.values())
    assert (shape.kv_bytes(4), shape.cache_bytes(0, 4)) == (spec.bytes_per_token, 2 * states), "what a plan says"


@pytest.mark.parametrize("family,kv_bytes",
                         [("qwen3_5", TIGHT), *((family, ROOMY) for family in (*tiny.HYBRIDS, "jamba", "minimax"))])
def test_turns(family, kv_bytes):
    """The state waits for the answer, or is computed again where another response has taken the slot."""
    groups = turns_are_those_by_hand(engine(family, kv_bytes), requests(), PARAMS)
    turns_have_the_scores(requests(), groups, lambda request, ids: naive(family, request.token_ids, ids))


def test_cuts_of_every_sample_elsewhere(family="qwen3_next"):
    """Responses begin with the state of their prompt or of their prefix."""
    params = SamplingParams(NEW, stop_token_ids=STOPS)
    whole = generate(engine(family), requests(), params)
    continued, cuts = rest(requests(), whole, lambda i, j: (7 * i + 5 * j) % NEW * (j != 1))
    for group, begun, expected in zip(generate(engine(family, TIGHT), continued, params), cuts, whole, strict=True):
        for part, (j, k) in zip(group, begun, strict=True):
            follows(part, expected[j], k)


def test_rounds():
    """Responses of other parameters, waiting ones, aborts; updates and sleep in between drop the states."""
    used = engine()
    rounds_keep_to_the_protocol(used, requests(), lambda: (used.sleep(), used.wake(), used.update_weights([], 1)))
    used.sleep()
    assert used._space is None


def test_a_waiting_response_keeps_its_state_while_others_draw():
    """Its row is among theirs: too few have ended for rows to move."""
    used, group, seen = engine(), [Group(prompts()[0], list(range(24)))], []
    plain, = generate(used, group, SamplingParams(NEW))
    token, i = next(
        (done.token_ids[k], i) for k in range(2, 9) for i, done in enumerate(plain)
        if k < len(done.token_ids) and sum(done.token_ids[k] in other.token_ids[:k + 4]
                                           for other in plain) == 1 == done.token_ids.count(done.token_ids[k]))
    params, key = SamplingParams(NEW, stop_token_ids=(token, )), Key("waits", 0, i)
    used.submit(keyed(group, "waits"), params, waits=True)
    with pytest.MonkeyPatch.context() as patch:
        step = StateStore.step
        patch.setattr(StateStore, "step", lambda self, *args: (seen.append(int(
            (args[-1] == 0).sum())), step(self, *args))[1])
        parts = collect(used, [Key("waits", 0, j) for j in range(24)])
    assert sum(seen) > 2 and parts[key].token_ids[-1] == token
    used.resume(key, ANSWER)
    begun = Group(prompts()[0], [i], (), [[*parts[key].token_ids, *ANSWER.token_ids]])
    same({key: collect(used, [key])[key]}, {key: generate(used, [begun], params)[0][0]})
    used.abort(parts)


def test_states_take_room_of_the_cache():
    """Of every prompt and every row, in the plan and in what is allocated."""
    used = engine(kv_bytes=TIGHT)
    generate(used, asked(), SamplingParams(NEW))
    spec, plan, cache = used._probe()[0], used._space.cache.plan, used._space.cache
    states = sum(x.nbytes for layer in spec.states for x in cache.rows.states.data[layer].values()) / plan.slots
    assert states == 4 * (64 * 4 + 4 * 8 * 8) and spec.tokens_per_sequence * spec.bytes_per_token == states
    tokens = plan.prompts * plan.prompt_len + plan.slots * plan.length
    held = cache.prompts.nbytes + cache.rows.nbytes
    assert held == tokens * spec.bytes_per_token + (plan.prompts + plan.slots) * states <= TIGHT < used._space.nbytes


def test_engines_that_cannot_run_them_are_refused_by_name():
    config, cpu, refused = model("qwen3_5").config, torch.device("cpu"), REFUSED | ON_CPUS
    with pytest.raises(UserError,
                       match="--engine_type sglang: model type 'qwen3_5_text' has layers with state.* of hf, "
                       "vllm"):
        check_states(RolloutConfig(engine_type="sglang"), config)
    with pytest.raises(UserError, match="in bfloat16 alone: add --bf16"):
        engine_arguments(RolloutConfig(engine_type="vllm"), config, cpu, False, World(), 9)
    for family in sorted(tiny.STATEFUL.keys() - IN_FLOAT32):
        with pytest.raises(UserError,
                           match=f"vllm: model type '{family}' has .*{refused.get(family, 'never compared')}"):
            check_family_with_states(RolloutConfig(engine_type="vllm"), tiny.config(family), False, True)
    with pytest.raises(UserError, match="'jamba' .* never compared"):
        check_family_with_states(RolloutConfig(engine_type="vllm"), tiny.config("jamba"), True, True)
    for limited in (tiny.config("falcon_h1", time_step_limit=[0.001, 0.1]), tiny.config("nemotron_h")):
        with pytest.raises(UserError, match="its limited time steps were compared on CPUs alone. Use --engine_type hf"):
            check_family_with_states(RolloutConfig(engine_type="vllm"), limited, True, True)
    for half, changes in ((True, {}), (False, {"layer_types": ["full_attention"] * 2})):
        given = engine_arguments(RolloutConfig(engine_type="vllm"), tiny.config("qwen3_5", **changes), cpu, half,
                                 World(), 9)
        assert ("mamba_ssm_cache_dtype" in given) is half is (given.get("enable_prefix_caching") is False)


def test_one_kernel_attends(monkeypatch):
    """``--fused_decode`` is of the attention; the layers with state are computed beside it."""
    monkeypatch.setattr(kv_cache, "_kernel", lambda: naive_decode.attend)
    params = SamplingParams(8, stop_token_ids=STOPS)
    assert alike(generate(engine(one_kernel=True), requests(), params), generate(engine(), requests(), params))
