"""Fused layers of a decode step against transformers' generate, the plain layers, and LoRA that is not merged."""
import pytest
import torch

from lightrft.models.actor_language import ActorLanguage
from lightrft.models.lora import add_lora
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.hf.fused_layers import find_fused, FusedCalls
from lightrft.rollout.tests.test_hf_engine import engine, model, naive_model, NEW, requests, same, STOPS
from lightrft.tests.support import tiny
from lightrft.tests.support.episodes import generate
from lightrft.types import Experience

PARAMS = SamplingParams(NEW, stop_token_ids=STOPS)


def fused(made):
    """The engine, which takes fused layers as on a GPU."""
    made.fuses = True
    return made


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_tokens_are_those_of_generate_and_of_plain_layers(family):
    eos, made = tiny.tokenizer().eos_token_id, fused(engine(family))
    assert same(generate(made, requests(), PARAMS), generate(engine(family), requests(), PARAMS))
    assert isinstance(made._probed[1], FusedCalls)
    greedy = generate(made, requests(samples=1), SamplingParams(NEW, temperature=0.0, stop_token_ids=STOPS))
    for request, (c, ) in zip(requests(), greedy):
        out = naive_model(family).generate(torch.tensor([request.token_ids]), do_sample=False, max_new_tokens=NEW,
                                           eos_token_id=[eos, *STOPS], pad_token_id=0)
        assert c.token_ids == out[0, len(request.token_ids):].tolist()


def test_other_layers_and_copies_without_room_stay_as_they_are():
    for family in ("gemma2", "gemma3"):
        made = fused(engine(family))
        generate(made, requests()[:1], SamplingParams(2))
        assert not isinstance(made._probed[1], FusedCalls)
    calls, device = engine()._probe()[1], torch.device("cpu")
    size = find_fused(calls, device, 1 << 30).nbytes
    assert size == 2 * 4 * 32 * (32 + 16 + 16 + 2 * 64), "qkv, gate and up of two layers in float32"
    assert find_fused(calls, device, size) and find_fused(calls, device, size - 1) is None


def test_a_layer_with_other_numbers_is_refused(monkeypatch):
    """The trial sees a norm that adds one to its weight."""
    hf = tiny.model("qwen2")
    hf.set_attn_implementation("packed")
    norm = hf.model.layers[1].post_attention_layernorm
    plain = norm.forward
    monkeypatch.setattr(norm, "forward", lambda x: plain(x) + x)
    assert find_fused(HFEngine(hf, [3], 1 << 20)._probe()[1], torch.device("cpu"), 1 << 30) is None


def test_lora_is_merged_into_copies_of_every_rollout():
    """The weights of the trainer stay what they are, to the bit; an update of the adapters is in the next rollout."""
    hf = tiny.model("qwen2", initializer_range=0.12)
    hf.set_attn_implementation("packed")
    peft = add_lora(hf, 4, 8, 0.0, ["all-linear"])
    plain, made, rollouts = HFEngine(hf, [3], 1 << 24), fused(HFEngine(hf, [3], 1 << 24)), []
    for scale in (0.1, 0.2):
        for name, weight in peft.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(weight, std=scale)
        before = {name: weight.clone() for name, weight in peft.named_parameters()}
        rollouts.append(generate(made, requests(), PARAMS))
        assert same(rollouts[-1], generate(plain, requests(), PARAMS)) and isinstance(made._probed[1], FusedCalls)
        assert all(torch.equal(before[name], weight) for name, weight in peft.named_parameters())
    assert not same(*rollouts)
    held = made._probed[1].layers[0].weights
    made.sleep()
    assert not held, "the copies are freed"


def gap_to_the_trainer(fuses):
    """Mean difference of the log-probs of an engine in bfloat16, and of the trainer, which does not merge adapters."""
    torch.manual_seed(0)
    hf = tiny.model("qwen2", initializer_range=0.08, hidden_size=128, intermediate_size=384, num_hidden_layers=3,
                    attn_implementation="packed").to(torch.bfloat16)  # yapf: disable
    peft = add_lora(hf, 8, 16, 0.0, ["all-linear"]).to(torch.bfloat16)
    for name, weight in peft.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=0.003)  # deltas of a hundredth of the weights
    made = HFEngine(hf, [], 1 << 26)
    made.fuses = fuses
    groups = generate(made, requests(samples=2), SamplingParams(NEW))
    assert isinstance(made._probed[1], FusedCalls) == fuses
    rows = [(request.token_ids, c) for request, group in zip(requests(), groups) for c in group]
    exp = Experience.pack([prompt + c.token_ids for prompt, c in rows],
                          [[False] * len(prompt) + [True] * len(c.token_ids) for prompt, c in rows],
                          prompt_lens=[len(prompt) for prompt, _ in rows]).to("cpu")  # yapf: disable
    with torch.no_grad():
        scored = ActorLanguage(peft, 64)(exp)[0][exp.loss_mask]
    return (scored - torch.tensor([value for _, c in rows for value in c.logprobs])).abs().mean().item()


def test_merged_lora_in_bfloat16_is_about_as_near_to_the_trainer():
    """A merged weight is rounded once more, from float32."""
    assert 0 < gap_to_the_trainer(True) < 1.6 * gap_to_the_trainer(False)


def test_a_copy_of_the_weights_is_joined_again_after_every_update():
    own = fused(HFEngine(tiny.model("llama", seed=9, attn_implementation="packed"), {3}, 1 << 24, owns_model=True))
    for seed in (3, 4):
        source = tiny.model("llama", seed=seed, attn_implementation="packed")
        own.update_weights(source.named_parameters(), seed)
        assert same(generate(own, requests(), PARAMS), generate(HFEngine(source, {3}, 1 << 24), requests(), PARAMS))


def test_the_model_itself_is_not_changed():
    names = [name for name, _ in model().named_parameters()]
    generate(fused(engine()), requests()[:1], SamplingParams(2))
    assert [name for name, _ in model().named_parameters()] == names
