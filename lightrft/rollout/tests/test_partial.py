"""Responses that are cut off and go on: what comes out is what one go would have given, up to rounding."""
import pytest
import torch

from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.tests.test_hf_engine import NEW, STOPS, engine, naive_logprobs, requests
from lightrft.tests.support import tiny
from lightrft.tests.support.episodes import Group, generate
from lightrft.utils.errors import UserError

TINY = 116 * 2 * 2 * 2 * 8 * 4  # two slots: prompts wait, and their samples start at different times
MANY = {"stop_token_ids": tuple(range(30, 90))}  # responses end at many positions
HOT = {"first_temperature": 8.0, "temperature": 0.7}


def sampling(**more):
    return SamplingParams(NEW, **{"stop_token_ids": STOPS, **more})


def follows(part, whole, begun):
    """``part`` is what comes after ``begun`` tokens of ``whole``, to the token; log-probs to a rounding of float32."""
    end = begun + len(part.token_ids)
    assert part.token_ids == whole.token_ids[begun:end], f"cut at {begun}: other tokens"
    assert part.logprobs == pytest.approx(whole.logprobs[begun:end], abs=5e-6)
    assert (end, part.finish_reason) == (len(whole.token_ids), whole.finish_reason) or part.finish_reason == "abort"


def rest(asked, whole, cut):
    """Requests for the samples of which ``cut(request, sample)`` tokens are there, and where each belongs."""
    found, cuts = [], []
    for i, (request, group) in enumerate(zip(asked, whole)):
        begun = [(j, cut(i, j)) for j, done in enumerate(group) if cut(i, j) < len(done.token_ids)]
        found.append(Group(request.token_ids, [request.seeds[j] for j, _ in begun], (),
                           [group[j].token_ids[:k] for j, k in begun]))  # yapf: disable
        cuts.append(begun)
    return found, cuts


def check(asked, whole, cut, family="qwen2", kv_bytes=1 << 24, **params):
    continued, cuts = rest(asked, whole, cut)
    parts = generate(engine(family, kv_bytes), continued, sampling(**params))
    for group, begun, expected in zip(parts, cuts, whole, strict=True):
        for part, (j, k) in zip(group, begun, strict=True):
            assert part.finish_reason != "abort"
            follows(part, expected[j], k)


@pytest.mark.parametrize("stride,params", [(1, {}), (3, HOT), (3, {"temperature": 0.0}), (3, {"stop_token_ids": ()}),
                                           (3, {"top_k": 5, "min_p": 0.1})])  # yapf: disable
def test_every_cut_point(stride, params):
    whole = generate(engine(), requests(), sampling(**params))
    for position in range(0, NEW, stride):
        check(requests(), whole, lambda i, j: position, **params)


@pytest.mark.parametrize("family,kv_bytes", [("mistral", 1 << 24), ("gemma2", 1 << 24), ("mistral", TINY)])
def test_cuts_of_every_sample_elsewhere(family, kv_bytes):
    """Begun and new samples of one prompt together; a window of 8 tokens begins inside the prefix."""
    whole = generate(engine(family), requests(), sampling(**HOT))
    for shift in (0, 11):
        check(requests(), whole, lambda i, j: (7 * i + 5 * j + shift) % NEW * (j != 1), family, kv_bytes, **HOT)


def test_long_prefixes_take_several_passes(monkeypatch):
    monkeypatch.setattr("lightrft.rollout.hf.passes.PREFILL_TOKENS", 40)
    whole = generate(engine(), requests(), sampling(stop_token_ids=()))
    check(requests(), whole, lambda i, j: 12, stop_token_ids=())


@pytest.mark.parametrize("kv_bytes", [1 << 24, TINY])
@pytest.mark.parametrize("enough", [1, 4])
def test_abort_loses_no_token(enough, kv_bytes):
    """Ended after ``enough`` requests and continued: together they are the responses of one go."""
    whole, calls = generate(engine(), requests(), sampling(**MANY)), []
    parts = generate(engine(kv_bytes=kv_bytes), requests(), sampling(**MANY), lambda i, done: calls.append(
        (i, done)) or len(calls) >= enough)
    done = {i for i, _ in calls}
    assert enough <= len(done) == len(calls) < len(whole) and all(parts[i] is group for i, group in calls)
    flat = [(i, j, part) for i, group in enumerate(parts) for j, part in enumerate(group)]
    cut = {(i, j): len(part.token_ids) for i, j, part in flat}
    for i, j, part in flat:
        follows(part, whole[i][j], 0)
        assert (part.finish_reason == "abort") == (cut[i, j] < len(whole[i][j].token_ids))
        assert i not in done or part.finish_reason != "abort", "a request was called finished"
    kept = [part for i, _, part in flat if i not in done and part.finish_reason != "abort"]
    assert kept or enough > 1 or kv_bytes == TINY, "no finished sample of an unfinished request: a weak test"
    check(requests(), whole, lambda i, j: cut[i, j], kv_bytes=kv_bytes, **MANY)


def test_no_token_is_drawn_after_enough(monkeypatch):
    drawn, record = [], "lightrft.rollout.hf.continuous_batching.sample"
    from lightrft.rollout.hf.continuous_batching import sample
    monkeypatch.setattr(record, lambda *args: drawn.append(len(args[0])) or sample(*args))
    ends = []
    generate(engine(kv_bytes=TINY), requests(), sampling(), lambda i, done: ends.append(len(drawn)) or True)
    assert ends == [len(drawn)]


def test_logprobs_are_those_of_the_weights_that_go_on():
    """A prefix by other weights: what follows is sampled, and scored, by the weights of now."""
    begun = generate(engine("qwen2"), requests(), sampling(stop_token_ids=()))
    hf = tiny.model("qwen2", seed=7, initializer_range=0.12)
    hf.set_attn_implementation("packed")
    continued, _ = rest(requests(), begun, lambda i, j: 4 + 2 * j)
    parts = generate(HFEngine(hf, set(), 1 << 24), continued, SamplingParams(NEW))
    hf.set_attn_implementation("eager")
    for request, group in zip(continued, parts):
        for prefix, part in zip(request.prefixes, group):
            ids = torch.tensor([request.token_ids + prefix + part.token_ids])
            with torch.no_grad():
                scores = hf(input_ids=ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
            assert part.logprobs == pytest.approx(scores[-len(part.token_ids):].tolist(), abs=1e-5)
            old = naive_logprobs("qwen2", request.token_ids, prefix + part.token_ids)[len(prefix):]
            assert max(abs(a - b) for a, b in zip(part.logprobs, old.tolist())) > 1e-2, "the weights are the same"


def test_a_prefix_without_room_is_refused():
    with pytest.raises(UserError, match="response to prompt 0 resumes from 4 tokens, but may have 4.*generate_max_len"):
        generate(engine(), [Group([5], [1], (), [[7] * 4])], SamplingParams(4))
