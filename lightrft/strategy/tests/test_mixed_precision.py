"""Computing in bfloat16 with float32 weights: one copy, the numbers of FSDP2, gradients and what is frozen."""
import threading

import pytest
import torch
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder, Qwen2AudioEncoderConfig

from lightrft.config.schema import ModelConfig, RolloutConfig, StrategyConfig
from lightrft.models import attention
from lightrft.models.loader import load_actor, load_critic
from lightrft.models.tokenizer import load_tokenizer
from lightrft.rollout import SamplingParams
from lightrft.rollout.engines import get_engine
from lightrft.rollout.hf.engine import _inference
from lightrft.strategy.mixed_precision import compute_weights, round_frozen, round_in_passes
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.strategy import SingleProcessStrategy, get_strategy
from lightrft.tests.support import naive_model, tiny
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.strategy_case import Case, assert_same
from lightrft.tests.support.tiny_lm import TinyLM, loss_of, micro_batch

CPU = torch.device("cpu")
HALF = torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.save_model(tmp_path_factory.mktemp("model"), initializer_range=0.12))


def single(tmp_path="."):
    return Case(SingleProcessStrategy(StrategyConfig(), bf16=True), tmp_path)


def actor_of(folder, **model):
    case = single()
    return case.strategy, case.strategy.prepare(load_actor(ModelConfig(pretrain=folder, **model)), OptimSpec(1e-3))


@pytest.mark.parametrize("tied", [True, False])
def test_the_numbers_are_those_of_fsdp2(tied):
    """Bit for bit, over three steps of four micro-batches: the same operations on the same rounded weights."""
    fsdp = Case(get_strategy(StrategyConfig(strategy="fsdp"), bf16=True), ".")
    fsdp.strategy.setup()
    try:
        other = fsdp.prepare(tied=tied)
        norms, weights = fsdp.train(other, range(3)), fsdp.weights(other)
    finally:
        fsdp.strategy.teardown()
    case = single()
    prepared = case.prepare(tied=tied)
    assert case.train(prepared, range(3)) == norms
    assert_same(case.weights(prepared), weights)


def test_gradients_of_micro_batches_add_up_in_float32():
    case = single()
    prepared, expected = case.prepare(), {}
    for number in range(3):
        alone = case.prepare()
        case.strategy.backward(loss_of(alone.model, micro_batch(0, number, CPU)), alone)
        for name, param in alone.model.named_parameters():
            assert torch.equal(param.grad, param.grad.to(HALF)), "a pass gives a gradient in bfloat16"
            expected[name] = expected[name] + param.grad if number else param.grad
        case.strategy.backward(loss_of(prepared.model, micro_batch(0, number, CPU)), prepared)
    assert_same(case.strategy.gradients(prepared), expected)
    assert any(not torch.equal(grad, grad.to(HALF)) for grad in expected.values()), "nothing to lose in bfloat16"


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"lora_rank": 2}])
def test_attention_gets_bfloat16_from_passes_and_generation(folder, options, monkeypatch):
    """Queries, keys and values: on CUDA only half precision takes the fused kernels."""
    strategy, prepared = actor_of(folder, **options)
    engine = get_engine(RolloutConfig(), prepared.model, strategy, load_tokenizer(folder), True)
    seen, attend = set(), attention._attend_rows
    monkeypatch.setattr(attention, "_attend_rows", lambda q, k, v, *rest: seen.add(
        (q.dtype, k.dtype, v.dtype)) or attend(q, k, v, *rest))
    found = prepared.model(naive_model.experience(), entropy=True)
    strategy.backward(found[0].sum(), prepared)  # with checkpointing it runs the layers again
    assert seen == {(HALF, HALF, HALF)} and all(values.dtype == torch.float32 for values in found)
    generate(engine, [Group([5, 6, 7], [1])], SamplingParams(2))
    assert seen == {(HALF, HALF, HALF)} and engine._probe()[0].dtype == HALF


def test_the_engine_has_the_logits_of_the_trainer(folder):
    """Of the copy, in float32: rounded to bfloat16 they would be off by 2^-9 of their size."""
    _, prepared = actor_of(folder)
    hf, exp = prepared.model.hf_model, naive_model.experience([30])
    head, trained = hf.get_output_embeddings(), prepared.model(exp)[0][exp.loss_mask]
    with torch.no_grad(), _inference(hf):
        logits = hf(**prepared.model.modality.inputs(exp, hf)).logits[0]
    assert logits.dtype == torch.float32 and "forward" not in vars(head)
    logprobs = logits.log_softmax(-1)[:-1].gather(-1, exp.token_ids[1:, None])[:, 0]
    torch.testing.assert_close(logprobs[exp.loss_mask[1:]], trained[-int(exp.loss_mask[1:].sum()):], atol=1e-5, rtol=0)


def test_a_critic_computes_in_bfloat16(folder, monkeypatch):
    case, seen = single(), set()
    critic = case.strategy.prepare(load_critic(ModelConfig(pretrain=folder)), OptimSpec(1e-3))
    attend = attention._attend_rows
    monkeypatch.setattr(attention, "_attend_rows", lambda *given: seen.add(given[0].dtype) or attend(*given))
    values = critic.model(naive_model.experience())
    case.strategy.backward(values.sum(), critic)
    assert seen == {HALF} and values.dtype == torch.float32
    assert critic.model.hf_model._parameters == {} and critic.model.hf_model.score.weight.dtype == HALF
    assert all(param.grad.dtype == torch.float32 for param in critic.model.parameters())


def test_checkpointing_changes_no_gradient(folder):
    grads = []
    for checkpointing in (False, True):
        strategy, prepared = actor_of(folder, gradient_checkpointing=checkpointing)
        strategy.backward(prepared.model(naive_model.experience())[0].sum(), prepared)
        grads.append(strategy.gradients(prepared))
    assert_same(*grads)


def test_there_is_one_copy_and_it_follows_the_weights():
    case = single()
    prepared = case.prepare()
    addresses = {name: weight.data_ptr() for name, weight in compute_weights(prepared.model)}
    assert addresses["model.model.embed_tokens.weight"] == addresses["model.lm_head.weight"], "tied"
    assert len(prepared.copy.copies) == 26 and all(weight.dtype == HALF for weight in prepared.copy.copies)
    before = case.weights(prepared)
    case.train(prepared, range(2))
    assert not prepared.copy.stale() and case.weights(prepared).keys() == before.keys()
    assert addresses == {name: weight.data_ptr() for name, weight in compute_weights(prepared.model)}, "not in place"
    fresh = case.prepare(seed=5)
    case.strategy.load_state_dict(fresh, case.state(prepared))
    assert not fresh.copy.stale() and loss_of(fresh.model, micro_batch(1, 0, CPU)) == loss_of(
        prepared.model, micro_batch(1, 0, CPU))
    with torch.no_grad():
        fresh.model.model.model.norm.weight.add_(1)
    assert fresh.copy.stale() == ["model.model.norm.weight"]


def test_weights_that_change_between_the_passes_are_an_error():
    """Autograd notices it, as it does for parameters."""
    case = single()
    prepared = case.prepare()
    loss = loss_of(prepared.model, micro_batch(0, 0, CPU))
    prepared.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_offload_drops_the_copy_and_reload_makes_it_again():
    case = single()
    prepared, twin = case.prepare(), case.prepare()
    for each in (prepared, twin):
        case.train(each, range(1))
    case.strategy.offload(prepared)
    assert not prepared.copy.copies and not any(weight.dtype == HALF for _, weight in compute_weights(prepared.model))
    with torch.no_grad():  # as a pass before log-probs
        case.strategy.reload(prepared)
    assert case.train(prepared, range(1, 3)) == case.train(twin, range(1, 3))
    assert_same(case.state(prepared), case.state(twin))


def test_frozen_weights_are_held_in_bfloat16_alone(folder):
    """Under LoRA the base has no float32 copy; merged weights and adapters are float32."""
    strategy, prepared = actor_of(folder, lora_rank=2)
    held = dict(prepared.model.named_parameters())
    assert all(param.dtype == (torch.float32 if "lora_" in name else HALF) for name, param in held.items())
    assert len(prepared.copy.copies) == sum("lora_" in name for name in held)
    exp = naive_model.experience()
    base = strategy.prepare(load_actor(ModelConfig(pretrain=folder), train=False))
    assert base.copy is None and {param.dtype for param in base.model.parameters()} == {HALF}
    strategy.backward(prepared.model(exp)[0].sum(), prepared)
    strategy.optimizer_step(prepared)
    with prepared.model.adapter_disabled(), torch.no_grad():
        assert torch.equal(prepared.model(exp)[0], base.model(exp)[0]), "the reference is the base"
    assert not torch.equal(prepared.model(exp)[0], base.model(exp)[0]) and not prepared.copy.stale()
    name = "model.layers.0.self_attn.q_proj"
    merged = {name: weight for name, weight in strategy.full_params(prepared.model)}[f"{name}.weight"]
    layer = prepared.model.hf_model.get_submodule(name)
    a, b = (part["default"]._parameters["weight"] for part in (layer.lora_A, layer.lora_B))
    expected = layer.base_layer.weight.float() + layer.scaling["default"] * (b @ a)
    assert merged.dtype == torch.float32 and torch.equal(merged, expected)


def test_exports_are_float32(folder, tmp_path):
    strategy, prepared = actor_of(folder, lora_rank=2)
    strategy.save_model(prepared, tmp_path)
    assert {param.dtype for param in load_actor(ModelConfig(pretrain=str(tmp_path))).parameters()} == {torch.float32}


def test_passes_in_a_thread_compute_what_they_compute_alone(folder):
    strategy, prepared = actor_of(folder)
    exp, found = naive_model.experience(), []
    alone = prepared.model(exp)[0].detach()

    @torch.no_grad()
    def passes():
        found.extend(prepared.model(exp)[0] for _ in range(3))

    thread = threading.Thread(target=passes)
    thread.start()
    strategy.backward(prepared.model(exp)[0].sum(), prepared)
    thread.join()
    assert len(found) == 3 and all(torch.equal(one, alone) for one in found)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_rounding_in_each_pass_gives_the_same_numbers(checkpointing):
    """As with ZeRO-3, whose weights are whole only during the pass of their module."""
    case = single()
    prepared, model = case.prepare(tied=False), TinyLM(tied=False)
    round_in_passes(model)
    if checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.train(checkpointing)
    for each in (prepared.model, model):
        loss = loss_of(each, micro_batch(0, 0, CPU))
        loss.backward()
        assert loss.dtype == torch.float32
    assert_same(*({name: param.grad for name, param in each.named_parameters()} for each in (prepared.model, model)))
    assert not any(module._parameters.keys() & vars(module).keys() for module in model.modules()), "a copy is left"


def test_rounding_in_each_pass_takes_a_tower_that_reads_weights_of_its_parts():
    """Of its positions, which stay float32 and are added to what the layers are given."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 8,
             "max_source_positions": 10}  # yapf: disable
    tower = Qwen2AudioEncoder(Qwen2AudioEncoderConfig(**sizes)).eval()
    features = torch.randn(1, 8, 20)
    expected = tower(features).last_hidden_state
    round_in_passes(tower)
    rounded = tower(features).last_hidden_state
    rounded.sum().backward()
    assert rounded.dtype == HALF and tower.layers[0].fc1.weight.grad.dtype == torch.float32
    torch.testing.assert_close(rounded.float(), expected, atol=0.05, rtol=0.05)


def test_only_what_is_frozen_is_rounded():
    model = TinyLM()
    model.model.model.layers[0].requires_grad_(False)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    round_frozen(model)
    for name, param in model.named_parameters():
        assert param.dtype == (HALF if ".layers.0." in name else torch.float32)
        assert torch.equal(param, before[name].to(param.dtype))
