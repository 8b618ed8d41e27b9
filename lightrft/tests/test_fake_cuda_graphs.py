"""CUDA graphs of the decode step on the fake device: their launches, their tokens, and captures that fail."""
import gc
import re
import threading
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch

from lightrft.config.engines import HF_GRAPHS
from lightrft.models.lora import add_lora
from lightrft.rollout.scheduler import Scheduler
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.hf import continuous_batching, kv_cache
from lightrft.rollout.hf.decode_graph import Shapes, StepGraphs
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.hf.kv_cache import Decode
from lightrft.rollout.hf.workspace import Workspace
from lightrft.rollout.sampling import sample
from lightrft.tests.support import naive_decode, runs, tiny
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.fake_cuda import fake_cuda, GRAPH, KERNEL, runtime, SYNC
from lightrft.tests.support.fake_cuda.ledger import EMPTIED
from lightrft.tests.support.fake_cuda.tensor import CudaTensor, current
from lightrft.tests.test_fake_cuda import decode, STEPS

no_picture = runs.no_picture


def one_launch(*args):
    """Stand for the kernel of ``--fused_decode``."""
    current().add(KERNEL)
    return CudaTensor(naive_decode.attend(*(x.data_on_host if isinstance(x, CudaTensor) else x for x in args)))


def launches(layers, fuses, lora, dtype, family="qwen2", one_kernel=False):
    """Launches of a decode step without graphs."""
    totals = []
    for tokens in (8, 16):
        with fake_cuda() as ledger:
            model = tiny.model(family, num_hidden_layers=layers).to(dtype)
            model.set_attn_implementation("packed")
            if lora:
                add_lora(model, 2, 4, 0.0, ["all-linear"])
            engine = HFEngine(model.to("cuda"), eos_token_ids=[], kv_bytes=1 << 20, one_kernel=one_kernel)
            engine._graphs.enabled, engine.fuses = False, fuses
            generate(engine, [Group([5, 6, 7], [1, 2])], SamplingParams(max_new_tokens=tokens))
        totals.append(ledger.total(KERNEL))
    return (totals[1] - totals[0]) / 8


@pytest.mark.parametrize("row, given", [
    ("float32", (True, False, torch.float32)),
    ("LoRA", (True, True, torch.float32)),
    ("bfloat16", (True, False, torch.bfloat16)),
    ("bfloat16, Qwen3", (True, False, torch.bfloat16, "qwen3")),
    ("bfloat16, one kernel", (True, False, torch.bfloat16, "qwen2", True)),
    ("float32, not fused", (False, False, torch.float32)),
    ("LoRA, not merged", (False, True, torch.float32)),
])  # yapf: disable
def test_a_layer_launches_what_the_docs_say(row, given, monkeypatch):
    import peft  # noqa: F401  (what it imports asks the device at import)
    monkeypatch.setattr(kv_cache, "_kernel", lambda: one_launch)
    page = (Path(__file__).parents[2] / "docs" / "host_syncs.md").read_text(encoding="utf-8")
    said = int(re.search(rf"\| {row} \| (\d+) \|", page)[1])
    assert launches(2, *given) - launches(1, *given) == said


def test_graphs_draw_the_tokens_of_the_cpu(monkeypatch):
    """More responses than slots: rows are freed, filled and moved between the steps that graphs replay. Log-probs are
    equal up to rounding, also of steps in larger shapes than they need."""
    place, choose, larger = Decode._place, Shapes.choose, Counter()
    monkeypatch.setattr(Shapes, "choose", lambda self, needed:
                        (shape := choose(self, needed), larger.update([shape != needed]))[0])

    def tokens(device):
        model = tiny.model(initializer_range=0.5).to(device)
        model.set_attn_implementation("packed")
        engine = HFEngine(model, range(40, 52), kv_bytes=20_000)
        asked = [Group([5 + i, 6, 7], [i, 100 + i]) for i in range(6)]
        found = generate(engine, asked, SamplingParams(max_new_tokens=24))
        logprobs.append([x for part in found for each in part for x in each.logprobs])
        return [each.token_ids for part in found for each in part]

    logprobs = []
    expected = tokens("cpu")
    with fake_cuda() as ledger:
        assert tokens("cuda") == expected
    torch.testing.assert_close(logprobs[1], logprobs[0], rtol=0, atol=1e-5)
    assert larger[True] > 10 and ledger.total(GRAPH) > 10 and len({len(each) for each in expected}) > 2
    monkeypatch.setattr(Decode, "_place", lambda self, arrays, stay: place(self, arrays, stay)
                        if self.shape not in self._held else None)
    with fake_cuda():
        assert tokens("cuda") != expected, "a graph of other slots draws other tokens"


def test_a_step_that_waits_for_the_device_is_not_captured(monkeypatch, capsys):
    monkeypatch.setattr(continuous_batching, "sample",
                        lambda logits, *rest: sample(logits + logits.sum().item() * 0, *rest))
    assert decode(8).total(GRAPH) == 0
    said = "decodes without CUDA graphs: a step cannot be captured (operation not permitted"
    assert capsys.readouterr().err.count(said) == 1


def test_a_capture_waits_for_the_queued_work_and_lets_other_threads_allocate():
    """Its kernels read what the stream of the program writes; in the mode "global" an allocation of any thread, such as
    that of overlapped passes, ends it."""
    with fake_cuda():
        graph, program = StepGraphs(torch.device("cuda")), torch.cuda.current_stream()
        for _ in range(4):
            graph.run("shape", lambda: torch.ones(1, device="cuda"))
        assert graph.graphs and graph.stream is not program
        own = [("wait", graph.stream, program), ("enter", graph.stream), ("capture", graph.stream, "thread_local")]
        assert runtime.QUEUED == own


def test_other_threads_compute_and_wait_during_a_capture():
    """As the passes of ``--overlap_passes`` do; the graph has the operators of its own thread alone."""
    found = []

    def step():
        thread = threading.Thread(target=lambda: found.append(torch.ones(2, device="cuda").cpu().tolist()))
        thread.start()
        thread.join()
        return torch.ones(1, device="cuda") * 2

    with fake_cuda():
        graph = StepGraphs(torch.device("cuda"))
        for _ in range(3):
            graph.run("shape", step)
        (recorded, _), = graph.graphs.values()
        assert len(recorded.steps) == 2
    assert found == [[1.0, 1.0]] * 2


def test_a_capture_that_fails_leaves_the_program_on_its_stream():
    with fake_cuda():
        graph, before = StepGraphs(torch.device("cuda")), torch.cuda.current_stream()
        found = [graph.run("shape", lambda: torch.ones(1, device="cuda") * torch.ones(1, device="cuda").item())
                 for _ in range(4)]  # yapf: disable
        assert not graph.enabled and [each.item() for each in found] == [1.0] * 4
        assert torch.cuda.current_stream() is before
        assert not runtime.CAPTURING, "torch would still allocate as during a capture"
        assert not torch.cuda.default_generators[0].capturing, "torch 2.11 would draw no numbers, as for dropout"


def failing_first(error, draw=sample):
    """``sample`` that raises in a first capture."""
    errors = [error]

    def draw_or_raise(*args):
        if errors and torch.cuda.is_current_stream_capturing():
            raise errors.pop()
        return draw(*args)

    return draw_or_raise


@pytest.mark.parametrize("error, again", [(torch.OutOfMemoryError("CUDA out of memory"), True), (ValueError(""), False),
                                          (AssertionError("no"), False)])
def test_an_error_of_a_capture_costs_the_graphs_alone(error, again, monkeypatch, capsys):
    """Until the engine wakes, if memory was lacking: an update, or the sleep of another engine, has freed some. A
    generator that cannot be reset then is no reason to end the run."""
    monkeypatch.setattr(continuous_batching, "sample", failing_first(error))
    with fake_cuda() as ledger:
        if isinstance(error, AssertionError):
            monkeypatch.setattr(runtime.Generator, "clone_state", lambda self: torch.ones(1) @ torch.ones(2))
        model = tiny.model()
        model.set_attn_implementation("packed")
        engine, graphs = HFEngine(model.to("cuda"), eos_token_ids=[], kv_bytes=1 << 20), []
        for wakes in (False, False, True):
            if wakes:
                engine.sleep()
                engine.wake()
            generate(engine, [Group([5, 6, 7], [1])], SamplingParams(max_new_tokens=8))
            graphs.append(ledger.total(GRAPH))
        assert graphs[:2] == [0, 0] and (graphs[2] > 0) == again and not runtime.CAPTURING
    told = capsys.readouterr().err
    assert told.count("a step cannot be captured") == 1 and ("until the engine next wakes" in told) == again


def test_a_capture_that_fails_after_good_ones_costs_them_too():
    """All have one pool. Until the engine wakes every shape runs as it is, then all are captured again."""
    lacking = [True]

    def step(width):
        if runtime.CAPTURING and width == 3 and lacking:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.ones(width, device="cuda") * 2

    def totals(graph, widths=(1, 2, 3)):
        return [graph.run(width, lambda: step(width)).sum().item() for width in widths]

    with fake_cuda() as ledger:
        graph = StepGraphs(torch.device("cuda"))
        for _ in range(3):
            assert totals(graph, (1, 2)) == [2, 4]
        assert len(graph.graphs) == 2
        for _ in range(3):
            assert totals(graph) == [2, 4, 6]
        assert not graph.graphs and not graph.enabled and graph.lacked_memory and not runtime.CAPTURING
        before = ledger.total(GRAPH)
        lacking.clear()
        graph.retry()
        assert totals(graph) == totals(graph) == [2, 4, 6]
        assert len(graph.graphs) == 3 and ledger.total(GRAPH) - before == 6, "shapes that were seen: at once"


def test_of_more_shapes_than_graphs_those_used_last_stay():
    with fake_cuda() as ledger:
        graph = StepGraphs(torch.device("cuda"))

        def run(width):
            return graph.run(width, lambda: torch.ones(width, device="cuda") * 2).sum().item()

        for width in [*range(1, HF_GRAPHS + 1), 1] * 2:
            assert run(width) == 2 * width
        assert [*graph.graphs] == [*range(2, HF_GRAPHS + 1), 1]
        for width in (HF_GRAPHS + 1, HF_GRAPHS + 1, 1, 4, HF_GRAPHS + 2, HF_GRAPHS + 2):
            assert run(width) == 2 * width
        assert [*graph.graphs] == [*range(5, HF_GRAPHS + 1), HF_GRAPHS + 1, 1, 4, HF_GRAPHS + 2]
        before = ledger.total(GRAPH)
        assert run(2) == 4 and ledger.total(GRAPH) == before + 1, "one that went is captured again at once"
        assert len(graph.graphs) == HF_GRAPHS


def test_a_capture_that_fails_keeps_no_tensor_of_its_step():
    kept = []

    def step():
        made = torch.ones(1, device="cuda")
        if runtime.CAPTURING:
            kept.append(weakref.ref(made))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made

    with fake_cuda():
        gc.disable()
        try:
            graph = StepGraphs(torch.device("cuda"))
            for _ in range(4):
                graph.run(64, step)
            assert [each() for each in kept] == [None] and not graph.graphs
        finally:
            gc.enable()


def test_an_error_in_a_generation_frees_its_graph(monkeypatch):
    monkeypatch.setattr(Scheduler, "_sorted", lambda *args: 1 / 0)
    with fake_cuda():
        model = tiny.model()
        model.set_attn_implementation("packed")
        engine, freed = HFEngine(model.to("cuda"), eos_token_ids=[], kv_bytes=1 << 20), []
        begin = Workspace.begin
        monkeypatch.setattr(Workspace, "begin", lambda *args:
                            (begin(*args), monkeypatch.setattr(engine._graphs, "free", lambda: freed.append(True))
                             ))  # those of a new workspace were freed before
        with pytest.raises(ZeroDivisionError):
            generate(engine, [Group([5, 6, 7], [1])], SamplingParams(max_new_tokens=8))
        assert freed == [True] and engine._space is None


def generated(engine, rollout, new=24):
    """Tokens of the responses to prompts that differ between rollouts."""
    asked = [Group([5 + i + rollout] * (3 + rollout), [i, 100 + i]) for i in range(6)]
    return [each.token_ids for part in generate(engine, asked, SamplingParams(max_new_tokens=new)) for each in part]


def rollouts(device, sleeps, kv_bytes=1 << 18):
    """Tokens of three rollouts with other prompts and weights each, and the captures up to each one's end."""
    model, tokens, captures = tiny.model(initializer_range=0.5).to(device), [], []
    model.set_attn_implementation("packed")
    engine = HFEngine(model, range(40, 52), kv_bytes=kv_bytes)
    for rollout in range(3):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + 0.1 * rollout)
        if sleeps:
            engine.sleep()
            engine.wake()
        engine.update_weights([], rollout)
        tokens.append(generated(engine, rollout))
        captures.append(sum(each[0] == "capture" for each in runtime.QUEUED))
    return tokens, captures


@pytest.mark.parametrize("sleeps, part", [(False, 32), (True, 32), (True, 1 << 40)])
def test_graphs_stay_over_rollouts_and_syncs(sleeps, part, monkeypatch):
    """And over sleep, unless their memory is large: then they are captured again, with the cache at another place, and
    torch gives the memory of the last one to the device."""
    monkeypatch.setattr("lightrft.rollout.hf.engine.HF_KEPT_PART", part)
    expected, _ = rollouts("cpu", sleeps)
    with fake_cuda() as ledger:
        tokens, captures = rollouts("cuda", sleeps)
    emptied = {"rollout/hf/decode_graph.py:StepGraphs._capture": 1}
    if part > 32:
        emptied = {"rollout/hf/decode_graph.py:StepGraphs._capture": 3, "rollout/hf/engine.py:HFEngine._give_back": 2}
    assert ledger.sites(EMPTIED) == emptied
    assert tokens == expected and captures[0] > 1
    _, *later = (after - before for before, after in zip([0, *captures], captures))
    assert (max(later) == 0) == (part == 32)


def test_other_options_or_moved_weights_take_new_graphs():
    with fake_cuda():
        model = tiny.model(initializer_range=0.5).to("cuda")
        model.set_attn_implementation("packed")
        engine, spaces = HFEngine(model, range(40, 52), kv_bytes=1 << 18), []
        for change in (None, None, "moved", "longer"):
            if change == "moved":
                weight = model.model.layers[0].mlp.up_proj.weight
                weight.data = weight.data.clone()
            generated(engine, 0, new=32 if change == "longer" else 24)
            spaces.append(engine._space)
        assert spaces[0] is spaces[1] and len({*map(id, spaces)}) == 3


def test_a_capture_waits_for_nothing_and_uses_the_memory_of_the_former_one(monkeypatch):
    begun, modes, emptied, begin = [], set(), [], runtime.CUDAGraph.capture_begin
    monkeypatch.setattr(runtime.CUDAGraph, "capture_begin", lambda self, pool, mode:
                        (begun.append(pool), modes.add(mode), begin(self, pool, mode)))
    with fake_cuda() as ledger, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
        graph = StepGraphs(torch.device("cuda"))
        for width in (64, 128):
            for _ in range(4):
                graph.run(width, lambda: torch.ones(1, device="cuda") * 2)
        assert len(begun) == 2 and begun[0] == begun[1] and ledger.total(SYNC) == 0
        assert len(emptied) == 1, "the first capture finds the memory that an update has left cached"
        graph.free()
        for _ in range(4):
            graph.run(64, lambda: torch.ones(1, device="cuda") * 2)
        assert begun[2] != begun[0], "the memory of a generation that has ended is free"
    assert modes == {"thread_local"}, "allocations of other threads end a capture"


def test_passes_during_generation_have_one_stream_and_the_gpu_of_their_rank(tmp_path, monkeypatch):
    """They wait for the weights in every step, and never run on the stream of captures; a thread starts on GPU 0."""
    home, chosen = runs.write_home(tmp_path), []
    with fake_cuda(), monkeypatch.context() as patch:  # undone before the fake device goes
        patch.setattr(torch.cuda, "set_device", lambda device: chosen.append(threading.current_thread().name))
        runs.run(home, tmp_path / "run", overlap_passes=True, **STEPS)
        queued, program = list(runtime.QUEUED), torch.cuda.current_stream()
    captured = {each[1] for each in queued if each[0] == "capture"}
    passes = [each for each in queued if each[1] not in captured]
    stream = passes[0][1]
    assert captured and passes == [("wait", stream, program), ("enter", stream)] * 2
    assert chosen.count("overlapped passes") == 2


def test_adapters_leave_the_generator_of_the_gpu_as_it_was(monkeypatch):
    """Their seed would otherwise give the dropout of every rank the same masks."""
    restored = []
    with fake_cuda(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: restored.append(device))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        add_lora(tiny.model(), 2, 4, 0.0, ["q_proj"])
    assert len(restored) == 1
