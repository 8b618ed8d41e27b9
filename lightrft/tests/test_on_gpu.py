"""Tests that only a CUDA device can run: its kernels and its memory against references. ``make gpu`` runs them too."""
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightrft.config.schema import RolloutConfig, StrategyConfig
from lightrft.models import attention
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.attention import PackedLayout
from lightrft.ops.logprobs import chunked_logprobs
from lightrft.rollout import SamplingParams
from lightrft.rollout.engines import get_engine
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.weight_sync.sync import sync_weights
from lightrft.strategy.host_buffers import pinned
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import naive_decode, tiny, tiny_task
from lightrft.tests.support.episodes import Group, generate

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
]  # yapf: disable
LENS = [700, 3, 64, 130, 1, 513]
HEADS = {"0.5b": (14, 2, 64), "7b": (28, 4, 128)}


def error(found, exact):
    """Largest difference, relative to the largest number."""
    return ((found.double() - exact.double()).abs().max() / exact.double().abs().max()).item()


@pytest.mark.parametrize("size", HEADS)
@pytest.mark.parametrize("window", [None, 100])
def test_varlen_attention_is_as_exact_as_rows(size, window):
    heads, kv_heads, width = HEADS[size]
    torch.manual_seed(0)
    inputs = [torch.randn(sum(LENS), h, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
              for h in (heads, kv_heads, kv_heads)]  # yapf: disable
    layout = PackedLayout.build(torch.tensor([0, *LENS], device="cuda").cumsum(0))
    weight = torch.randn(sum(LENS), heads, width, device="cuda")
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    exact = attention._attend_rows(*doubles, layout, None, window, None)
    exact = [exact, *torch.autograd.grad((exact * weight).sum(), doubles)]
    kernels = {
        "varlen": lambda: attention._attend_varlen(*inputs, layout, None, window), "rows":
        lambda: attention._attend_rows(*inputs, layout, None, window, None)
    }
    found = {}
    for name, kernel in kernels.items():
        out = kernel()
        grads = torch.autograd.grad((out.float() * weight).sum(), inputs)
        found[name] = [error(a, b) for a, b in zip((out, *grads), exact)]
    for varlen, rows in zip(found["varlen"], found["rows"]):
        assert varlen <= 2 * rows + 1e-3, found


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("fused", [False, True], ids=["elementwise", "one pass"])
def test_fused_logprobs_are_the_naive_ones(dtype, limit, fused):
    if fused:
        pytest.importorskip("triton")
    torch.manual_seed(0)
    tokens, hidden, vocab = 300, 256, 5000
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocab, hidden, device="cuda") * 0.2).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens, ), device="cuda")
    sums = torch.randn(2, tokens, device="cuda")

    def gradients(logprobs, entropy, inputs):
        loss = (sums[0] * logprobs + sums[1] * entropy).sum()
        return [logprobs, entropy, *torch.autograd.grad(loss, inputs)]

    doubles = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    logp = (doubles[0] @ doubles[1].t()).log_softmax(-1)
    exact = gradients(logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), doubles)
    found = gradients(*chunked_logprobs(x, weight, targets, chunk_mib=1, fused=fused), [x, weight])
    for name, one, other in zip(("logprobs", "entropy", "hidden", "weight"), found, exact):
        assert error(one, other) <= limit, name
    without = chunked_logprobs(x, weight, targets, chunk_mib=1, entropy=False, fused=fused)[0]
    assert torch.equal(without, found[0]), "the chunks depend on what is computed"


@pytest.mark.parametrize("flags", [[], ["--lora_rank", "8"], ["--init_kl_coef", "0.01"],
                                   ["--gradient_checkpointing", "selective"], ["--fused_decode", "--fused_logprobs"]],
                         ids=["plain", "lora", "reference", "checkpointing", "kernels"])
def test_step_1_facts_hold_in_bfloat16(tmp_path, flags):
    home = tiny_task.write_home(tmp_path)
    command = [sys.executable, "-m", "lightrft.cli.train", "--pretrain", str(home / "model"), "--prompt_data",
               str(home / "train.jsonl"), "--reward", f"{home / 'reward.py'}:compute_score", "--save_path",
               str(home / "run"), "--bf16", "--rollout_batch_size", "8", "--n_samples_per_prompt", "4",
               "--train_batch_size", "16", "--prompt_max_len", "64", "--generate_max_len", "24", "--max_steps", "2",
               "--disable_ckpt", "--actor_learning_rate", "1e-3", *flags]  # yapf: disable
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and "step-1 facts hold" in done.stderr + done.stdout, done.stderr


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("dim, queries, window, softcap", [(64, 7, None, None), (128, 4, 18, None),
                                                           (256, 2, None, 50.0)])
def test_the_kernel_of_a_decode_step_computes_what_a_loop_does(dim, queries, window, softcap, dtype, limit):
    """Tokens that do not exist are not read: they are not numbers."""
    pytest.importorskip("triton")
    from lightrft.rollout.hf import attention_kernel
    torch.manual_seed(dim)
    lengths, newest = [90, 17, 0], [0, 150, 70]  # of prompts, and the last token of each row; a row without a prompt
    prompts, rows = (torch.randn(2, 3, 2, 200, dim).to(dtype) for _ in range(2))
    for i in range(3):
        prompts[:, i, :, lengths[i]:] = torch.nan
        rows[:, i, :, newest[i] + 1:] = torch.nan
    inputs = [torch.randn(6, queries + 2, dim).to(dtype)[:, :-2], prompts, rows,
              *(torch.tensor(x) for x in ([0, 1, -1], lengths, newest))]  # yapf: disable
    found = attention_kernel.attend(*(x.cuda() for x in inputs), 0.1, window, softcap).cpu()
    expected = naive_decode.attend(inputs[0].double(), *inputs[1:], 0.1, window, softcap)
    assert error(found, expected) <= limit


@pytest.fixture
def trainer(tmp_path):
    folder = tiny.save_model(tmp_path / "model", hidden_size=512, intermediate_size=4096, num_hidden_layers=8)
    strategy = get_strategy(StrategyConfig(strategy="single"), bf16=True)
    strategy.setup()
    model = tiny.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="packed", dtype=torch.float32)
    yield strategy, strategy.prepare(ActorLanguage(model))
    strategy.teardown()


def used():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def check_sleep(engine, strategy, prepared, weights):
    """Asleep the device has the weights' bytes more; awake and synced, the same seed gives the same response."""
    request, params = [Group([5, 6, 7], [0, 1])], SamplingParams(8)
    sync_weights(strategy, prepared, engine, 1)
    before, awake = generate(engine, request, params), used()
    engine.sleep()
    asleep = used()
    assert awake - asleep >= weights, (awake, asleep, weights)
    engine.wake()
    sync_weights(strategy, prepared, engine, 2)
    after = generate(engine, request, params)
    assert [c.token_ids for group in before for c in group] == [c.token_ids for group in after for c in group]


def test_a_sleeping_hf_engine_frees_its_copy(trainer, monkeypatch):
    monkeypatch.setattr("lightrft.rollout.hf.engine.HF_KEPT_PART", 1 << 40)  # it is small, and would stay
    strategy, prepared = trainer
    copy = tiny.AutoModelForCausalLM.from_config(prepared.model.hf_model.config, attn_implementation="packed",
                                                 dtype=torch.bfloat16).cuda().requires_grad_(False)  # yapf: disable
    weights = sum(parameter.nbytes for parameter in copy.parameters())
    engine = HFEngine(copy, [], 1 << 26, owns_model=True)
    del copy
    check_sleep(engine, strategy, prepared, 0.9 * weights)


@pytest.mark.engine
def test_a_sleeping_vllm_engine_frees_weights_and_cache(trainer):
    pytest.importorskip("vllm")
    strategy, prepared = trainer
    cfg = RolloutConfig(engine_type="vllm", prompt_max_len=64, generate_max_len=64, engine_kv_mib=1024)
    engine = get_engine(cfg, prepared.model, strategy, tiny.tokenizer(), bf16=True)
    try:
        check_sleep(engine, strategy, prepared, 1 << 30)
    finally:
        engine.shutdown()


def test_graphs_draw_the_tokens_of_eager_steps():
    """In float32; more responses than slots, so that graphs are dropped and captured again."""

    def responses(graphs):
        model = tiny.model(initializer_range=0.5).to("cuda")
        model.set_attn_implementation("packed")
        engine = HFEngine(model, range(40, 52), kv_bytes=100_000)
        engine._graphs.enabled = graphs
        found = generate(engine, [Group([5 + i, 6, 7], [i, 100 + i]) for i in range(6)],
                         SamplingParams(max_new_tokens=100))
        assert engine._graphs.enabled == graphs, "the step could not be captured"
        return [each.token_ids for part in found for each in part]

    assert responses(True) == responses(False)


def test_memory_of_any_size_is_pinned():
    sent = torch.rand(10_001, device="cuda")
    for memory in (pinned(sent.nbytes), pinned(1 << 16)[:sent.nbytes]):  # the first one in place
        kept = memory.view(torch.float32).copy_(sent, non_blocking=True)
        back = kept.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert memory.is_pinned() and torch.equal(back, sent) and torch.equal(kept, sent.cpu())
