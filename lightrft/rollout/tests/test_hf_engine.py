"""The HF engine against Hugging Face itself, against itself under other batches and budgets, and its errors."""
import functools
import itertools
import random
import weakref

import pytest
import torch

from lightrft.models.actor_modality import ActorModality
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.hf.cache_plan import KVPlan, LayerProbe
from lightrft.rollout.hf.module_calls import find_decode_pass, ModuleCalls, whole_pass
from lightrft.tests.support import tiny
from lightrft.tests.support.engine_rig import reports_responses_as_they_end
from lightrft.tests.support.episodes import Group, generate
from lightrft.utils.env import total_memory

FAMILIES = ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3"]
STOPS = tuple(range(40, 52))
NEW = 20


@functools.lru_cache(maxsize=None)
def model(family="qwen2"):
    hf = tiny.model(family, initializer_range=0.12)
    hf.set_attn_implementation("packed")
    return hf


def engine(family="qwen2", kv_bytes=1 << 24):
    return HFEngine(model(family), {tiny.tokenizer().eos_token_id}, kv_bytes)


@functools.lru_cache(maxsize=None)
def prompts(count=7):
    rng = random.Random(5)
    return [[rng.randrange(4, 250) for _ in range(length)] for length in rng.sample(range(1, 24), count)]


def requests(samples=3):
    return [Group(prompt, [1000 * i + j for j in range(samples)]) for i, prompt in enumerate(prompts())]


@functools.lru_cache(maxsize=None)
def naive_model(family):
    hf = tiny.model(family, initializer_range=0.12)
    hf.set_attn_implementation("eager")
    return hf


def naive_logprobs(family, prompt, response, temperature=1.0):
    """A Hugging Face forward of this one sequence, with its own eager attention."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logits = naive_model(family)(input_ids=ids).logits[0, len(prompt) - 1:-1].float() / (temperature or 1.0)
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt):, None])[:, 0]


def close(left, right):
    return max((abs(a - b) for a, b in zip(left, right)), default=0.0) < 1e-5 and len(left) == len(right)


def same(left, right):
    flat = [(a, b) for x, y in zip(left, right) for a, b in zip(x, y)]
    return len(left) == len(right) and all(
        a.token_ids == b.token_ids and a.finish_reason == b.finish_reason and close(a.logprobs, b.logprobs)
        for a, b in flat)


@pytest.mark.parametrize("temperature,family",
                         [*itertools.product((0.0, 0.7, 1.0), FAMILIES), *((1.0, family) for family in tiny.LATENT)])
def test_logprobs_equal_a_hugging_face_forward(family, temperature):
    params = SamplingParams(NEW, temperature, stop_token_ids=STOPS)
    for request, completions in zip(requests(), generate(engine(family), requests(), params)):
        for c in completions:
            naive = naive_logprobs(family, request.token_ids, c.token_ids, temperature).tolist()
            assert close(c.logprobs, naive), f"{family}: {c.logprobs} instead of {naive}"


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family):
    eos = tiny.tokenizer().eos_token_id
    params = SamplingParams(NEW, temperature=0.0, stop_token_ids=STOPS)
    responses = generate(engine(family), requests(samples=1), params)
    for request, (c, ) in zip(requests(), responses):
        out = naive_model(family).generate(torch.tensor([request.token_ids]), do_sample=False, max_new_tokens=NEW,
                                           eos_token_id=[eos, *STOPS], pad_token_id=0)
        assert c.token_ids == out[0, len(request.token_ids):].tolist(), f"{family}: another greedy response"


@pytest.mark.parametrize("kv_bytes", [1 << 24, 1 << 17])
def test_a_repetition_penalty_is_that_of_generate(kv_bytes):
    """Of the tokens of prompt and response; also where slots are filled again and rows move."""
    params = SamplingParams(NEW, temperature=0.0, repetition_penalty=3.0)
    responses = generate(engine(kv_bytes=kv_bytes), requests(), params)
    assert not same(responses, generate(engine(kv_bytes=kv_bytes), requests(), SamplingParams(NEW, temperature=0.0)))
    for request, group in zip(requests(), responses):
        prompt = torch.tensor([request.token_ids])
        out = naive_model("qwen2").generate(prompt, do_sample=False, max_new_tokens=NEW, repetition_penalty=3.0,
                                            eos_token_id=tiny.tokenizer().eos_token_id, pad_token_id=0)
        assert [c.token_ids for c in group] == [out[0, len(request.token_ids):].tolist()] * len(group)


@functools.lru_cache(maxsize=None)
def reference():
    return generate(engine(), requests(), SamplingParams(NEW, stop_token_ids=STOPS))


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_steps_call_the_layers_alone(family):
    """The same bits as whole passes of Hugging Face. Gemma 2 caps its logits after the head: it takes whole passes."""
    params, passes = SamplingParams(NEW, stop_token_ids=STOPS), []
    first, second = engine(family), engine(family)
    spec, _ = second._probe()
    second._probed = spec, whole_pass(second.model, second.modality)
    first._probe()
    hook = model(family).get_decoder().register_forward_hook(lambda *call: passes.append(1))
    found = generate(first, requests(), params)
    alone = len(passes)
    assert found == generate(second, requests(), params), "a bit is different"
    hook.remove()
    whole = len(passes) - alone
    assert alone == (whole if family == "gemma2" else 1) and whole > 5, (alone, whole)


def test_a_decode_step_holds_no_output_that_it_has_read():
    hf, alive, outputs = model(), [], []
    decode_pass = find_decode_pass(hf, ActorModality())
    hooks = [
        layer.register_forward_hook(lambda *call: outputs.append(weakref.ref(call[2]))) for layer in hf.model.layers
    ]
    hooks.append(
        hf.lm_head.register_forward_pre_hook(lambda *call: alive.extend(each() is not None for each in outputs)))
    with torch.no_grad():
        decode_pass(torch.tensor([[1, 2]]), torch.tensor([[0, 3]]), LayerProbe())
    for hook in hooks:
        hook.remove()
    assert isinstance(decode_pass, ModuleCalls) and alive == [False, False]


class Between(torch.nn.Module):
    """A body that computes an argument of its norm by itself."""

    def __init__(self, body, argument):
        super().__init__()
        self.body, self.argument = body, argument
        self.norm = torch.nn.Identity()  # in place of the body's own, whose output is not changed

    def forward(self, **inputs):
        out = self.body(**inputs)
        out.last_hidden_state = self.norm(self.argument(out.last_hidden_state))
        return out


@pytest.mark.parametrize("argument,alone", [(lambda hidden: hidden, True), (lambda hidden: hidden * 2, False),
                                            (lambda hidden: hidden.mul_(2), False)])
def test_a_pass_that_computes_between_its_layers_stays_whole(argument, alone):
    """A new tensor has no call that made it; one that is changed in place shows in the comparison."""
    hf = tiny.model("qwen2")
    hf.set_attn_implementation("packed")
    hf.eval()
    body = hf.model
    hf.model = Between(body, argument)
    hf.model.embed_tokens, hf.model.rotary_emb, hf.model.layers = body.embed_tokens, body.rotary_emb, body.layers
    hf.model.inner_norm = body.norm
    hf.get_decoder = lambda: hf.model
    assert isinstance(find_decode_pass(hf, ActorModality()), ModuleCalls) is alone


def test_lengths_differ_and_samples_differ():
    """The other tests need ragged responses; and n samples of one prompt must not be copies."""
    lengths = {len(c.token_ids) for group in reference() for c in group}
    assert len(lengths) > 6, f"responses of {lengths} tokens only"
    assert {c.finish_reason for group in reference() for c in group} == {"stop", "length"}
    assert all(len({tuple(c.token_ids) for c in group}) > 1 for group in reference()), "samples of a prompt are copies"


@pytest.mark.parametrize("tokens, prompt_slots, slots", [(39, 1, 1), (116, 2, 2), (200, 5, 5), (368, 7, 12)])
def test_results_do_not_depend_on_the_budget(tokens, prompt_slots, slots):
    """Few slots: groups are split, their prompt is shared later, slots are refilled and moved."""
    assert (max(map(len, prompts())), NEW) == (20, 20)
    small = engine(kv_bytes=tokens * 2 * 2 * 2 * 8 * 4)  # layers x (key, value) x heads x dim x float32
    assert same(generate(small, requests(), SamplingParams(NEW, stop_token_ids=STOPS)), reference())
    assert small._cache.plan == KVPlan(prompt_slots, 20, slots, 19), "the budget was not used as given"
    held = sum(store.data.nbytes for store in (small._cache.prompts, small._cache.rows))
    assert held <= small.kv_bytes, "more than the budget"


def test_results_do_not_depend_on_order_or_company():
    params, expected = SamplingParams(NEW, stop_token_ids=STOPS), reference()
    backwards = generate(engine(), requests()[::-1], params)
    assert same(backwards[::-1], expected), "another order, another response"
    ranks = [generate(engine(), requests()[r::2], params) for r in range(2)]
    assert same(ranks[0], expected[0::2]) and same(ranks[1], expected[1::2]), "two ranks, another response"
    alone = generate(engine(), [Group(requests()[4].token_ids, requests()[4].seeds[1:2])], params)
    assert same(alone, [expected[4][1:2]]), "alone, another response"


def test_each_prompt_is_prefilled_once(monkeypatch):
    from lightrft.rollout.hf import passes
    seen = []

    class Counting(passes.Prefill):

        def __init__(self, cache, layout, prompt_slots):
            seen.extend(layout.lens)
            super().__init__(cache, layout, prompt_slots)

    monkeypatch.setattr(passes, "Prefill", Counting)
    generate(engine(kv_bytes=2 * 2 * 2 * 8 * 4 * (23 + NEW) * 2), requests(), SamplingParams(NEW, stop_token_ids=STOPS))
    assert sorted(seen) == sorted(map(len, prompts())), "a prompt was computed more than once"


def test_seeds_reproduce_and_matter():
    params = SamplingParams(NEW)
    again = generate(engine(), requests(), params)
    assert same(generate(engine(), requests(), params), again), "equal seeds, another response"
    other = [Group(r.token_ids, [s + 7 for s in r.seeds]) for r in requests()]
    assert not same(generate(engine(), other, params), again), "other seeds, the same responses"


def test_the_global_generator_is_left_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    generate(engine(), requests(), SamplingParams(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_stop_and_length():
    params = SamplingParams(NEW, stop_token_ids=STOPS)
    stops = {*STOPS, tiny.tokenizer().eos_token_id}
    for c in (c for group in reference() for c in group):
        assert not stops & set(c.token_ids[:-1]), "a response goes on after a stop token"
        assert c.finish_reason == ("stop" if c.token_ids[-1] in stops else "length")
        assert c.finish_reason == "stop" or len(c.token_ids) == NEW, "a response was cut short"
        assert len(c.logprobs) == len(c.token_ids)
    free = generate(engine(), requests(), SamplingParams(NEW))
    assert max(len(c.token_ids) for g in free for c in g) == NEW
    assert not same(free, reference()), "stop ids change nothing"
    first = reference()[0][0].token_ids[0]
    eos = generate(HFEngine(model(), {first}, 1 << 24), requests()[:1], params)[0][0]
    assert eos.token_ids == [first] and eos.finish_reason == "stop", "eos_token_ids do not end a response"
    assert all(len(c.token_ids) == 1 for g in generate(engine(), requests(), SamplingParams(1)) for c in g)


@pytest.mark.parametrize(
    "change", [{"temperature": 0.3}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}, {"repetition_penalty": 5.0}])
def test_every_sampling_option_changes_the_responses(change):
    assert not same(generate(engine(), requests(), SamplingParams(NEW, stop_token_ids=STOPS, **change)), reference())


@pytest.mark.parametrize("kv_bytes", [1 << 24, 20000])
def test_callback_comes_once_per_request_as_soon_as_it_is_done(kv_bytes):
    params, calls = SamplingParams(NEW, stop_token_ids=STOPS), []
    asked = [*requests(), Group([9], [])]
    responses = generate(engine(kv_bytes=kv_bytes), asked, params, lambda i, done: calls.append((i, done)))
    assert sorted(i for i, _ in calls) == list(range(len(asked))), "not once per request"
    assert all(responses[i] is completions for i, completions in calls), "the callback got something else"
    assert responses[-1] == []
    if kv_bytes == 1 << 24:
        slowest = [max(len(c.token_ids) for c in responses[i]) for i, _ in calls[1:]]
        assert slowest == sorted(slowest), "a request was handed over late"


@pytest.mark.parametrize("kv_bytes", [1 << 24, 20000])
def test_responses_are_reported_as_soon_as_they_end(kv_bytes):
    asked = [*requests(), Group([9], [])]
    reports_responses_as_they_end(engine(kv_bytes=kv_bytes), asked, SamplingParams(NEW, stop_token_ids=STOPS))


def test_budget_error_names_the_numbers():
    with pytest.raises(ValueError, match=r"23 prompt \+ 400 new tokens needs 0\.1 MiB.*0\.0 MiB.*--engine_kv_mib"):
        generate(engine(kv_bytes=3000), [Group([5] * 23, [1])], SamplingParams(400))


def test_the_default_budget_is_a_share_of_the_whole_memory_and_so_the_same_in_every_run():
    automatic = engine(kv_bytes=0)
    assert same(generate(automatic, requests(), SamplingParams(NEW, stop_token_ids=STOPS)), reference())
    assert automatic.kv_bytes == total_memory(torch.device("cpu")) // 4


@pytest.mark.parametrize("request_, message", [
    (Group([], [1]), "prompt 0 is empty"),
    (Group([5], [1], ("cat.png", )), "text only"),
    (Group([5, 1000], [1]), "prompt 0 has token 1000, and the model has embeddings of 260 tokens"),
    (Group([5, -1], [1]), "prompt 0 has token -1, "),
    (Group([5], [1], prefixes=[[1000]]), "prompt 0 has token 1000, "),
])
def test_bad_requests(request_, message):
    with pytest.raises(ValueError, match=message):
        generate(engine(), [request_], SamplingParams(4))
    assert generate(engine(), [], SamplingParams(4)) == []


def test_a_model_without_packed_attention_is_refused():
    with pytest.raises(ValueError, match="attn_implementation='packed'"):
        HFEngine(naive_model("qwen2"), {1}, 1 << 20)


def test_asleep_there_is_no_cache_and_no_generation():
    napping = engine()
    generate(napping, requests(), SamplingParams(2))
    napping.sleep()
    assert napping._cache is None, "sleep keeps the cache"
    with pytest.raises(RuntimeError, match="asleep"):
        generate(napping, requests(), SamplingParams(2))
    napping.wake()
    assert same(generate(napping, requests(), SamplingParams(NEW, stop_token_ids=STOPS)), reference())


def test_training_modes_and_gradients_survive():
    hf = model()
    hf.train()
    hf.model.layers[0].eval()
    before = {name: module.training for name, module in hf.named_modules()}
    responses = generate(engine(), requests(), SamplingParams(NEW, stop_token_ids=STOPS))
    assert {name: module.training for name, module in hf.named_modules()} == before, "modes were not restored"
    hf.eval()
    assert same(responses, reference()) and torch.is_grad_enabled()
    assert not any(p.is_inference() or p.grad is not None for p in hf.parameters())


def test_own_copy_needs_exactly_the_weights_of_the_model():
    source = tiny.model("llama", seed=3)
    weights = dict(source.named_parameters())
    own = HFEngine(tiny.model("llama", seed=9, attn_implementation="packed"), {3}, 1 << 24, owns_model=True)
    with pytest.raises(RuntimeError, match="no weights yet"):
        generate(own, requests(), SamplingParams(2))
    with pytest.raises(ValueError, match="'model.surprise' is not one of the model"):
        own.update_weights([*weights.items(), ("model.surprise", torch.zeros(1))], 1)
    with pytest.raises(ValueError, match="1 weights did not arrive, the first is 'lm_head.weight'"):
        own.update_weights([(n, w) for n, w in weights.items() if n != "lm_head.weight"], 1)
    with pytest.raises(ValueError, match=r"'model.norm.weight' has shape \[3\]"):
        own.update_weights({**weights, "model.norm.weight": torch.zeros(3)}.items(), 1)
    with pytest.raises(RuntimeError, match="no weights yet"):
        generate(own, requests(), SamplingParams(2))
    assert own.weight_version == 0
    own.update_weights(iter(weights.items()), 4)
    assert own.weight_version == 4
    shared = tiny.model("llama", seed=3, attn_implementation="packed")
    params = SamplingParams(NEW, stop_token_ids=STOPS)
    assert same(generate(own, requests(), params), generate(HFEngine(shared, {3}, 1 << 24), requests(), params))


def test_tied_weights_come_once_and_are_cast():
    source = tiny.model("qwen2", seed=3)
    own = HFEngine(tiny.model("qwen2", seed=9, attn_implementation="packed").bfloat16(), {3}, 1 << 24, owns_model=True)
    own.update_weights(source.named_parameters(), 1)
    assert torch.equal(own.model.lm_head.weight, source.lm_head.weight.bfloat16())
    assert generate(own, requests(), SamplingParams(3))[0][0].logprobs


def test_a_copy_of_the_weights_is_freed_in_sleep_and_filled_by_the_next_update():
    """Tied weights share one storage. Nothing is generated from what the memory holds after wake()."""
    source = tiny.model("qwen2", seed=3)
    own = HFEngine(tiny.model("qwen2", seed=9, attn_implementation="packed"), {3}, 1 << 24, owns_model=True)
    shapes = [weight.shape for weight in own.model.parameters()]
    params = SamplingParams(NEW, stop_token_ids=STOPS)
    found = []
    for version in range(2):
        own.update_weights(source.named_parameters(), version)
        found.append(generate(own, requests(), params))
        own.sleep()
        own.sleep()
        assert not any(weight.untyped_storage().nbytes() for weight in own.model.parameters()), "weights were kept"
        own.wake()
        own.wake()
        assert [weight.shape for weight in own.model.parameters()] == shapes
        with pytest.raises(RuntimeError, match="no weights yet"):
            generate(own, requests(), params)
    assert same(*found) and own.model.lm_head.weight is own.model.model.embed_tokens.weight


def test_a_shared_model_only_counts_updates():
    shared = engine()
    shared.update_weights(iter([]), 7)
    assert shared.weight_version == 7


def test_shutdown_ends_it():
    gone = engine()
    gone.shutdown()
    with pytest.raises(RuntimeError):
        generate(gone, requests(), SamplingParams(2))
