"""FIRE sampling: the first token at a temperature of its own, with the log-probs of what was really sampled."""
import numpy as np
import pytest
import torch

from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.sampling import uniforms
from lightrft.rollout.tests.test_hf_engine import NEW, STOPS, engine, naive_logprobs, naive_model, requests
from lightrft.tests.support import tiny
from lightrft.tests.support.episodes import generate
from lightrft.trainer.samples import decode
from lightrft.types import Episode, Prompt, Segment

FIRST, REST = 8.0, 0.7


def generated(stop=STOPS, kv_bytes=1 << 24, **params):
    params = {"temperature": REST, "first_temperature": FIRST, **params}
    asked = requests()
    found = generate(engine(kv_bytes=kv_bytes), asked, SamplingParams(NEW, stop_token_ids=stop, **params))
    return [(request.token_ids, seed, done) for request, group in zip(asked, found)
            for seed, done in zip(request.seeds, group)]  # yapf: disable


def first_logprobs(prompt, temperature=1.0):
    """Of every token of the vocabulary after ``prompt``, by Hugging Face."""
    with torch.no_grad():
        logits = naive_model("qwen2")(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    return (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize("kv_bytes", [1 << 24, 60000])
def test_logprobs_are_those_of_the_sampled_distribution(kv_bytes):
    """Against Hugging Face; also where slots run short and a prompt's samples start at different times."""
    for prompt, _, done in generated(kv_bytes=kv_bytes):
        hot, usual = (naive_logprobs("qwen2", prompt, done.token_ids, t).tolist() for t in (FIRST, REST))
        assert done.logprobs == pytest.approx(hot[:1] + usual[1:], abs=1e-4)
        assert abs(hot[0] - usual[0]) > 1e-3, "the two temperatures give the same number"


def test_the_first_token_is_drawn_by_the_first_uniform_at_the_first_temperature():
    for prompt, seed, done in generated():
        cdf = first_logprobs(prompt, FIRST).exp().cumsum(0).numpy()
        assert done.token_ids[0] == np.searchsorted(cdf, uniforms([seed], 1)[0, 0] * cdf[-1], side="right")


def test_top_k_holds_for_the_first_token_too():
    for prompt, _, done in generated(top_k=2):
        assert done.token_ids[0] in first_logprobs(prompt).topk(2).indices and done.logprobs[0] > np.log(0.3)


def test_a_response_may_end_with_its_first_token():
    """Half of the vocabulary ends a response here; nothing is generated after it and its text is empty."""
    end = tiny.tokenizer().eos_token_id
    found = generated(stop=tuple(range(0, 260, 2)))
    short = [(prompt, done) for prompt, _, done in found if len(done.token_ids) == 1]
    assert 3 < len(short) < len(found)
    for prompt, done in short:
        assert done.finish_reason == "stop" and done.token_ids[0] % 2 == 0 and len(done.logprobs) == 1
        assert done.logprobs == pytest.approx(naive_logprobs("qwen2", prompt, done.token_ids, FIRST).tolist(), abs=1e-4)
    prompt, done = short[0]
    episode = Episode.of(Prompt("u", prompt, ""), 0, 0, Segment([end], done.logprobs), "stop")
    sample, = decode(tiny.tokenizer(), [episode])
    assert sample.text == "" and sample.loss_mask == [False] * len(prompt) + [True]


def test_without_it_nothing_changes():
    usual = [done for _, _, done in generated(first_temperature=None)]
    assert usual == [done for _, _, done in generated(first_temperature=REST)]
    assert [done.token_ids[0] for done in usual] != [done.token_ids[0] for _, _, done in generated()]
    hot = generated(temperature=0.0)
    assert all(
        done.logprobs[1:] == pytest.approx(naive_logprobs("qwen2", prompt, done.token_ids)[1:].tolist(), abs=1e-4)
        for prompt, _, done in hot)
