"""The vLLM engine on a CPU, the real one: against the trainer's own forward, the HF engine, and its errors."""
import gc
import resource
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from lightrft.config.schema import ModelConfig, RolloutConfig
from lightrft.models.loader import load_actor
from lightrft.ops.fingerprint import Piece, fingerprints
from lightrft.rollout import SamplingParams, get_engine
from lightrft.rollout.vllm import launch
from lightrft.tests.support import tiny, turns
from lightrft.tests.support.engine_contract import EngineContract
from lightrft.tests.support.engine_rig import EXACT, LIMIT, NEW, SIZES, STOPS, EngineRig, requests
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.forks import branches_are_those_of_their_prompts
from lightrft.tests.support.quick_starts import quick_starts
from lightrft.tests.support.vllm_async import scheduled_ahead
from lightrft.utils import watchdog

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.slow]


class Rig(EngineRig):
    """With the real vLLM."""
    title, kind = "vLLM", "float32"

    def __init__(self, folder, *engine_args):
        super().__init__(folder, self.load(str(folder)))
        # a pass holds the longest prompt and no more, so that prompts have to wait for each other
        cfg = RolloutConfig(engine_type="vllm", prompt_max_len=LIMIT - NEW, generate_max_len=NEW, engine_kv_mib=64,
                            engine_args=[f"max_num_batched_tokens={LIMIT}", *engine_args])
        state, set_threads = torch.get_rng_state(), torch.set_num_threads
        with quick_starts():
            self.engine = self.vllm = get_engine(cfg, self.actor, self.strategy, self.tokenizer, self.kind == "bf16")
        assert torch.equal(torch.get_rng_state(), state) and torch.set_num_threads is set_threads, "not put back"

    def load(self, folder):
        return load_actor(ModelConfig(pretrain=folder))

    def unfinished(self):
        return self.vllm.native.get_num_unfinished_requests()


@pytest.fixture(scope="module", params=["tied", "untied"])
def rig(request, tmp_path_factory):
    """``packed``: vLLM packs linear weights as it would by itself, so that updates go through its layer-wise reload.
    ``untied``: it schedules ahead, as on CUDA."""
    folder = tmp_path_factory.mktemp("model")
    tiny.save_model(folder, tie_word_embeddings=request.param != "untied", **SIZES)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "packed":
            from vllm import _custom_ops
            patch.setattr(_custom_ops, "_supports_onednn", True)
            patch.setattr(launch, "keep_weights_unpacked", lambda: None)
        with scheduled_ahead() if request.param == "untied" else nullcontext():
            rig = Rig(folder)
        core = rig.vllm.native.engine_core.engine_core
        assert (core.batch_queue is not None) is (request.param == "untied"), "steps wait for each other"
        with pytest.raises(RuntimeError, match="has no weights yet"):
            generate(rig.vllm, requests(), SamplingParams(NEW))
        yield rig
        parts = rig.vllm.weight_map.held["model.norm.weight"]
        held = [weakref.ref(one) for one in (rig.vllm.model, *(part.view for part in parts.values()))]
        del parts
        rig.vllm.shutdown()
        assert not torch.distributed.is_initialized(), "vLLM's process group is left"
        gc.collect()
        assert [one() for one in held] == [None] * len(held), "an engine that has ended holds weights"


class TestEngine(EngineContract):
    """What vLLM shares with other engines."""


@pytest.mark.parametrize("rig", ["packed"], indirect=True)
class TestPackedWeights:
    """What of it depends on how vLLM holds weights."""
    test_logprobs = EngineContract.test_logprobs_are_the_trainers_before_and_after_an_update
    test_asleep = EngineContract.test_asleep_it_neither_generates_nor_learns
    test_broken_streams = EngineContract.test_a_broken_stream_of_weights_is_refused_until_a_good_one_comes


@pytest.mark.parametrize("rig", ["tied", "packed"], indirect=True)
def test_many_updates_neither_drift_nor_leak(rig):
    rig.ready()
    params, memory = SamplingParams(NEW), []
    for _ in range(20):
        rig.learn()
        rig.vllm.sleep()
        rig.ready()
        mean, largest = rig.gap(requests(1), params)
        assert mean < EXACT and largest < 2e-5, (mean, largest)
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert memory[-1] - memory[9] < 20 << 10, f"{(memory[-1] - memory[9]) >> 10} MiB more after ten updates"


def test_enough_is_enough(rig):
    """No token after the callback has had enough; what was under way is a beginning, and can be gone on with."""
    rig.ready()
    asked, params, greedy = requests(2), SamplingParams(NEW, stop_token_ids=STOPS), SamplingParams(NEW, 0.0)
    whole = generate(rig.vllm, asked, params)
    none = generate(rig.vllm, [Group([5], []), *asked], params, lambda i, done: True)
    assert {tuple(done.token_ids) for group in none for done in group} == {()} and len(none[1]) == len(asked[0].seeds)
    found = generate(rig.vllm, asked, params, lambda i, done: True)
    cut = [(i, j) for i, group in enumerate(found) for j, done in enumerate(group) if done.finish_reason == "abort"]
    assert cut and len(cut) < sum(map(len, found)) and not rig.unfinished()
    for i, j in cut:
        begun, full = found[i][j], whole[i][j]
        assert begun.token_ids == full.token_ids[:len(begun.token_ids)] != full.token_ids
        assert len(begun.logprobs) == len(begun.token_ids)
    full, = generate(rig.vllm, requests(1)[:1], greedy)[0]
    rest, = generate(rig.vllm, [Group(asked[0].token_ids, [7], prefixes=[full.token_ids[:8]])], greedy)[0]
    assert (rest.token_ids, rest.finish_reason) == (full.token_ids[8:], "length")
    assert rest.logprobs == pytest.approx(full.logprobs[8:], abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_turns(rig, temperature):
    """A part that resumes draws with the seed that the same tokens would give as a prefix."""
    rig.ready()
    params = replace(turns.PARAMS, temperature=temperature)
    groups = turns.turns_are_those_by_hand(rig.vllm, requests(), params)
    turns.turns_have_the_scores(requests(), groups, lambda one, ids: rig.logprobs(one, ids, params))
    turns.a_turn_without_room_is_dropped(rig.vllm, requests())
    assert not rig.unfinished()
    if not temperature:
        turns.an_environment_in_workers_answers(rig.vllm, rig.hf, rig.tokenizer, requests(),
                                                lambda one, ids: rig.logprobs(one, ids, params))


def test_branches(rig):
    """A branch is another request under the key of its response."""
    rig.ready()
    branches_are_those_of_their_prompts(rig.vllm, requests(), close=1e-5)
    assert not rig.unfinished()


def test_a_cut_turn(rig):
    """Tokens after a cut are drawn with other seeds, as after every prefix."""
    rig.ready()
    found = list(turns.cut_turns(rig.vllm, requests()))
    assert any(begun.given for _, _, begun, *_ in found), "no cut in a later turn"
    for i, j, begun, done, whole in found:
        end = len(begun.token_ids)
        assert begun.token_ids == whole.token_ids[:end] and begun.drawn == whole.drawn[:end], (i, j)
        turns.turns_have_the_scores([requests()[i]], [[done]], lambda one, ids: rig.logprobs(one, ids, turns.PARAMS))


@pytest.mark.parametrize("rig", ["tied", "untied", "packed"], indirect=True)
def test_what_it_holds_can_be_read(rig, request):
    """Bit for bit; a change of one element shows. Packed weights cannot be read, but all others."""
    rig.ready()
    weights, altered = dict(rig.strategy.full_params(rig.actor)), "model.layers.1.mlp.up_proj.weight"
    if "packed" in request.node.callspec.id:
        weights = {name: tensor for name, tensor in weights.items() if "_proj" not in name}
        altered = "model.layers.1.input_layernorm.weight"
    assert len(weights) >= 6 and rig.vllm.weight_dtypes() == {name: torch.float32 for name in weights}
    held = rig.vllm.fingerprints(list(weights))
    assert torch.equal(held, fingerprints([Piece(tensor) for tensor in weights.values()]))
    next(iter(rig.vllm.weight_map.held[altered].values())).view.view(-1)[35] += 1e-6
    where = (rig.vllm.fingerprints(list(weights)) != held).nonzero()[:, 0].tolist()
    assert [list(weights)[i] for i in where] == [altered]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """An engine as it is by default: a pass holds many prompts. The folder of its tied model has a copy of the head."""
    from safetensors.torch import load_file, save_file
    folder = tiny.save_model(tmp_path_factory.mktemp("wide") / "model", **SIZES)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors",
              {"format": "pt"})
    rig = Rig(folder, "max_num_batched_tokens=8192").ready()
    yield rig
    rig.vllm.shutdown()


def test_a_copy_of_the_head_in_the_folder_of_a_tied_model(wide):
    """Such folders are common; vLLM unties the head for them, and it would keep its first weights for ever."""
    wide.learn()
    mean, _ = wide.ready().gap(requests(1), SamplingParams(NEW))
    assert mean < EXACT


def test_more_than_128_sequences_run_at_once(wide):
    scheduler, running = wide.ready().vllm.native.engine_core.engine_core.scheduler, []
    step, before = wide.vllm.native.step, watchdog.Progress.ticks
    wide.vllm.native.step = lambda: (step(), running.append(len(scheduler.running)))[0]
    generate(wide.vllm, [Group(list(range(5, 12)), list(range(200)))], SamplingParams(4))
    del wide.vllm.native.step
    assert watchdog.Progress.ticks - before >= len(running) >= 4, "the watchdog sees no progress"
    assert max(running) > 190 and scheduler.max_num_running_reqs == 256


def test_with_cuda_seeds_cost_no_call_per_request(rig, monkeypatch):
    """vLLM's second runner, which needs Triton, draws for all requests at once, from their seeds and positions; the
    first calls a generator per request and token. Nothing that the trainer asks for sends vLLM back to the first."""
    for triton in (False, True):
        monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", triton)
        assert rig.vllm.native.vllm_config.use_v2_model_runner is triton


def test_arguments_of_its_own_must_exist(tmp_path):
    with pytest.raises(ValueError,
                       match="--engine_args max_logprob: vLLM has no such argument .did you mean max_logprobs"):
        launch.start_engine({"model": "x", "max_logprob": 3}, torch.device("cpu"))


def test_a_repetition_penalty_counts_the_tokens_of_the_prompt_too(rig):
    rig.ready()
    params = SamplingParams(NEW, temperature=0.0, repetition_penalty=3.0, stop_token_ids=STOPS)
    tokens, expected, free = ([[c.token_ids for c in group] for group in responses] for responses in (
        generate(rig.vllm, requests(), params), generate(rig.hf, requests(), params),
        generate(rig.hf, requests(), replace(params, repetition_penalty=1.0))))  # yapf: disable
    assert tokens == expected != free
