"""Prompts that sequences share are forwarded once; every result is that of each sequence alone."""
import pytest
import torch
from torch import nn

from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.models import shared_prompts
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.packed_model import Critic
from lightrft.models.recomputation import recompute
from lightrft.models.shared_prompts import forward_row, SegmentRow
from lightrft.tests.support import naive_model, tiny
from lightrft.tests.support.shared_prompts import experience, GROUPS
from lightrft.types import Experience


def actor(family: str = "qwen2") -> ActorLanguage:
    hf = tiny.model(family)
    hf.set_attn_implementation("packed")
    return ActorLanguage(hf)


def grads(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def backward(logprobs: torch.Tensor, entropy: torch.Tensor) -> None:
    weight = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1))
    (logprobs * weight + 0.1 * entropy).sum().backward()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_all_is_as_alone(family):
    """Log-probs, entropies and the gradients of all weights, against Hugging Face's eager attention."""
    exp, model, twin = experience(), actor(family), tiny.model(family)
    twin.set_attn_implementation("eager")
    found, expected = model(exp, entropy=True), naive_model.logprobs(twin, exp)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    backward(*found)
    backward(*expected)
    mine = grads(model)
    for name, grad in grads(twin).items():
        torch.testing.assert_close(mine[f"model.{name}"], grad, atol=1e-5 * float(grad.abs().max() + 1), rtol=0,
                                   msg=name)


def test_values_are_as_alone():
    from transformers import AutoModelForSequenceClassification
    torch.manual_seed(0)
    config = tiny.config("mistral", num_labels=1)
    critic = Critic(
        AutoModelForSequenceClassification.from_config(config, attn_implementation="packed", dtype=torch.float32))
    exp = experience()
    alone = torch.cat([critic(exp.select([i])) for i in range(exp.num_seqs)])
    torch.testing.assert_close(critic(exp), alone, atol=1e-5, rtol=0)
    assert alone.abs().max() > 0


def test_the_row_has_each_prompt_once():
    exp = experience()
    row = forward_row(exp).row
    assert row.num_tokens == sum(prompt + sum(tails) for prompt, tails in GROUPS)
    assert forward_row(exp, share=False).row is exp
    sequence, (start, end) = [], row.cu_seqlens[:2].tolist()
    assert row.before[0] == -1 and row.before[1] == 0 and row.positions[end] == end - start
    for number, (start, end) in enumerate(naive_model.bounds(row)):
        head = row.before[number]
        ahead = row.token_ids[slice(*row.cu_seqlens[head:head + 2])].tolist() if head >= 0 else []
        sequence.append(ahead + row.token_ids[start:end].tolist())
    for start, end in naive_model.bounds(exp):
        assert exp.token_ids[start:end].tolist() in sequence


def test_each_token_has_its_place():
    """That of a shared prompt is the same for all its sequences."""
    exp = experience()
    row, index = forward_row(exp)
    assert torch.equal(row.token_ids[index], exp.token_ids)
    assert torch.equal(row.positions[index], exp.positions)


@pytest.mark.parametrize("name", ["index", "positions", "before"])
def test_wrong_indices_are_noticed(name, monkeypatch):
    """The tests above can fail: each part of the row, broken on purpose, changes log-probs."""
    exp, model = experience(), actor()
    right, plain = model(exp)[0], forward_row(exp)
    if name == "index":
        broken = shared_prompts.ForwardRow(plain.row, (plain.places - 1).clamp_min(0))
        monkeypatch.setattr("lightrft.models.packed_model.forward_row", lambda *args: broken)
    elif name == "positions":
        monkeypatch.setattr(SegmentRow, "positions", Experience.positions)
    else:
        plain.row.before = [-1] * plain.row.num_seqs
        monkeypatch.setattr("lightrft.models.packed_model.forward_row", lambda *args: plain)
    assert (model(exp)[0] - right).abs().max() > 0.05


def packed(*rows: tuple[list[int], list[int]], **more) -> Experience:
    return Experience.pack([prompt + tail for prompt, tail in rows],
                           [[False] * len(prompt) + [True] * len(tail) for prompt, tail in rows],
                           **{"prompt_lens": [len(prompt) for prompt, _ in rows]} | more)


@pytest.mark.parametrize(
    "exp, tokens",
    [
        (packed(([5, 6, 7], [8]), ([5, 6, 7], [9, 9])), 6),
        (packed(([5, 6, 7], [8]), ([5, 6, 8], [9, 9])), 9),  # another last token
        (packed(([5, 6, 7], [8]), ([5, 6], [7, 9, 9])), 9),  # the same tokens, but its prompt ends earlier
        (packed(([], [8, 8]), ([], [8, 9, 9])), 5),
        (packed(([5, 6, 7], []), ([5, 6, 7], [9, 9]), ([5, 6, 7], [])), 5),
        (packed(([5, 6], [8]), ([5, 6], [9]), prompt_lens=None), 6),
        (packed(([5, 6], [8]), ([5, 6], [9]), media=[("image:0", ), ("image:0", )]), 4),
        (packed(([5, 6], [8]), ([5, 6], [9]), media=[("image:0", ), ("image:1", )]), 6),
    ],
    ids=["same", "last token", "length", "empty", "no response", "unknown", "same picture", "other picture"])
def test_only_equal_prompts_are_shared(exp, tokens):
    row, index = forward_row(exp)
    assert row.num_tokens == tokens and (index is None) == (tokens == exp.num_tokens)
    assert torch.equal(row.token_ids[slice(None) if index is None else index], exp.token_ids)


def test_prompts_are_not_shared_under_dropout():
    """Each sequence has masks of its own; in evaluation, and without dropout, there are none."""
    hf = tiny.model()
    hf.model.layers[0].mlp.down_proj = nn.Sequential(hf.model.layers[0].mlp.down_proj, nn.Dropout(0.5))
    hf.set_attn_implementation("packed")
    model, seen = ActorLanguage(hf), []
    hf.get_decoder().register_forward_pre_hook(lambda *args: seen.append(args[2]["input_ids"].shape[1]),
                                               with_kwargs=True)
    exp = experience()
    model.train()(exp)
    model.eval()(exp)
    assert seen == [exp.num_tokens, forward_row(exp).row.num_tokens]


def test_gradient_checkpointing_changes_no_gradient():
    exp, results = experience(), []
    for mode in (False, True, "selective"):
        model = actor("gemma2").train()
        recompute(model.hf_model, PolicyModelConfig(gradient_checkpointing=mode))
        backward(*model(exp, entropy=True))
        results.append(grads(model))
    for name, grad in results[0].items():
        assert torch.equal(grad, results[1][name]) and torch.equal(grad, results[2][name])
