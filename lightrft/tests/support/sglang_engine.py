"""The SGLang engine, the real one on a CPU: against the trainer's own forward, the HF engine, and its errors.

For an environment with SGLang; :mod:`lightrft.rollout.tests.test_sglang_engine` runs it there. One engine serves all.
"""
import asyncio
import gc
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightrft.ops.fingerprint import Piece, fingerprints
from lightrft.rollout import SamplingParams
from lightrft.rollout.sglang import client, weights as sglang_weights
from lightrft.rollout.sglang.client import SGLangNative
from lightrft.rollout.weight_sync.verify import WeightSyncError
from lightrft.tests.support import tiny, turns
from lightrft.tests.support.engine_contract import EngineContract
from lightrft.tests.support.engine_rig import EXACT, LIMIT, NEW, names_a_fault, requests
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.forks import branches_are_those_of_their_prompts
from lightrft.tests.support.faulty_sync import OF_STREAMS, TARGET
from lightrft.tests.support.sglang_rig import SIZES, Rig, forked, state, verifier
from lightrft.utils.errors import UserError

ON_QUIT = signal.getsignal(signal.SIGQUIT)  # ignored, where a shell started the tests in the background


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    folder = tiny.save_model(tmp_path_factory.mktemp("model"), **SIZES)
    Rig.before = state()
    rig = Rig(folder)
    yield rig
    rig.engine.shutdown()


def resident_kib(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def test_the_process_is_as_before_and_nothing_is_generated_without_weights(rig):
    assert state() == Rig.before
    with pytest.raises(RuntimeError, match="has no weights yet"):
        generate(rig.engine, requests(), SamplingParams(NEW))


class TestEngine(EngineContract):
    """What SGLang shares with other engines."""


def test_it_comes_to_rest_after_the_last_token(rig):
    """Memory that is released before, or a prefix that outlives an update, would end the run."""
    native = rig.ready().engine.native
    running = []

    async def begin():
        from sglang.srt.managers.io_struct import GenerateReqInput
        sampling = {"max_new_tokens": NEW, "sampling_seed": 1}
        asked = GenerateReqInput(input_ids=requests()[0].token_ids, sampling_params=sampling)
        running.append(asyncio.ensure_future(anext(native.manager.generate_request(asked, None))))
        await asyncio.sleep(0.01)

    native.run(begin)
    assert native.manager.rid_to_state, "it has ended already"
    native.come_to_rest()
    assert not native.manager.rid_to_state

    async def end():
        return await running[0]

    assert len(native.run(end)["output_ids"]) == NEW


def test_many_updates_neither_drift_nor_leak(rig, monkeypatch):
    """Memory is released and resumed, although on a CPU that frees none."""
    rig.ready()
    monkeypatch.setattr(rig.engine, "sleeps", True)
    params, memory, pids = SamplingParams(NEW), [], [os.getpid(), rig.engine.native.processes[0].pid]
    for _ in range(10):
        rig.learn()
        rig.engine.sleep()
        rig.ready()
        mean, largest = rig.gap(requests(1), params)
        assert mean < EXACT and largest < 2e-5, (mean, largest)
        memory.append([resident_kib(pid) for pid in pids])
    grown = [last - middle for last, middle in zip(memory[-1], memory[4])]
    assert max(grown) < 10 << 10, f"KiB more after five updates: {grown}"
    assert len(os.listdir("/proc/self/fd")) < 200


def test_draws_follow_the_distribution(rig):
    rig.ready()
    request, many = Group([5, 6, 7], list(range(1500))), SamplingParams(1, 0.5, top_k=4)
    drawn = [done.token_ids[0] for done in generate(rig.engine, [request], many)[0]]
    for token in set(drawn):
        p, share = math.exp(rig.logprobs(request, [token], many)[0]), drawn.count(token) / len(drawn)
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / len(drawn)) + 1e-3, (token, share, p)
    assert len(set(drawn)) == 4


def test_the_longest_request_fits(rig):
    rig.ready()
    done, = generate(rig.engine, [Group([5] * (LIMIT - NEW), [1])], SamplingParams(NEW))[0]
    assert len(done.token_ids) == NEW or done.finish_reason == "stop"


def test_the_watchdog_sees_progress_in_a_long_response(rig, monkeypatch):
    """SGLang reports a response that has not ended every 50 tokens."""
    rig.ready()
    before, ticks = (manager := rig.engine.native.manager).last_receive_tstamp, []
    monkeypatch.setattr(client, "_POLL_S", 0.002)
    monkeypatch.setattr(client, "tick", lambda: ticks.append(manager.last_receive_tstamp))
    asked = [Group([5 + i, 6, 7], [i]) for i in range(16)]
    found = generate(rig.engine, asked, SamplingParams(LIMIT - 3))
    assert max(len(done.token_ids) for done, in found) > 50, "one of many is long, whatever the weights are"
    assert set(ticks) - {before, manager.last_receive_tstamp}, "no progress is seen"


def test_enough_is_enough(rig):
    """No token after the callback has had enough; what was under way is a beginning, and goes on as in one go."""
    rig.ready()
    asked, params = requests(2), SamplingParams(NEW, stop_token_ids=tuple(range(4, 20)))
    whole = generate(rig.engine, asked, params)
    found = generate(rig.engine, asked, params, lambda i, done: True)
    cut = [(i, j) for i, group in enumerate(found) for j, done in enumerate(group) if done.finish_reason == "abort"]
    assert cut and len(cut) < sum(map(len, found)) and not rig.unfinished()
    for i, j in cut:
        begun, full = found[i][j], whole[i][j]
        assert begun.token_ids == full.token_ids[:len(begun.token_ids)] != full.token_ids
        assert len(begun.logprobs) == len(begun.token_ids)
    prefixes = [[done.token_ids[:1 + i] if len(done.token_ids) > 1 + i else [] for done in group]
                for i, group in enumerate(whole)]
    onward = [Group(one.token_ids, one.seeds, prefixes=begun) for one, begun in zip(asked, prefixes)]
    for group, begun, rest in zip(whole, prefixes, generate(rig.engine, onward, params)):
        for one, prefix, more in zip(group, begun, rest):
            assert prefix + more.token_ids == one.token_ids and more.finish_reason == one.finish_reason
            assert more.logprobs == pytest.approx(one.logprobs[len(prefix):], abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_turns(rig, temperature):
    """Also where they are cut: noise depends on the position alone, so it resumes as in one go."""
    rig.ready()
    params = replace(turns.PARAMS, temperature=temperature)
    groups = turns.turns_are_those_by_hand(rig.engine, requests(), params)
    turns.turns_have_the_scores(requests(), groups, lambda one, ids: rig.logprobs(one, ids, params))
    turns.a_turn_without_room_is_dropped(rig.engine, requests())
    for i, j, _, done, whole in turns.cut_turns(rig.engine, requests()):
        assert turns.equal(done, whole), (i, j)
    if not temperature:
        turns.an_environment_in_workers_answers(rig.engine, rig.hf, rig.tokenizer, requests(),
                                                lambda one, ids: rig.logprobs(one, ids, params))
    assert not rig.unfinished()


def test_branches(rig):
    """A branch is another request under the key of its response."""
    rig.ready()
    branches_are_those_of_their_prompts(rig.engine, requests(), close=1e-5)
    assert not rig.unfinished()


def test_memory_is_released_and_resumed_in_order(rig, monkeypatch):
    """Nothing twice: SGLang would end."""
    rig.ready()
    calls, right = [], rig.engine._occupy
    monkeypatch.setattr(rig.engine, "sleeps", True)
    monkeypatch.setattr(rig.engine, "_occupy", lambda *words: (calls.append(words), right(*words)))
    for step in ("sleep", "sleep", "wake", "wake", "sleep", "wake"):
        getattr(rig.engine, step)()
    rig.sync()
    generate(rig.engine, requests(1), SamplingParams(1))
    generate(rig.engine, requests(1), SamplingParams(1))
    assert calls == [("Release", ["kv_cache", "weights"]), ("Resume", ["weights"]), ("Release", ["weights"]),
                     ("Resume", ["weights"]), ("Resume", ["kv_cache"])]  # yapf: disable


def test_what_it_holds_can_be_read(rig):
    rig.ready()
    weights = dict(rig.strategy.full_params(rig.actor))
    assert rig.engine.weight_dtypes() == {name: torch.float32 for name in weights}
    assert torch.equal(rig.engine.fingerprints(list(weights)), fingerprints([Piece(one) for one in weights.values()]))


@pytest.fixture
def proven(rig, monkeypatch):
    """After a right sync, with other weights for the next one; what a test patches is put back."""
    monkeypatch.setattr(rig.engine, "update_weights", rig.engine.update_weights)
    monkeypatch.setattr(rig, "proof", None)
    rig.engine.wake()
    rig.proof = verifier(rig.cfg, rig.strategy, rig.prepared, rig.engine)
    assert rig.sync() < 1e-5
    rig.learn()
    yield rig


@pytest.mark.parametrize("kind", OF_STREAMS)
def test_a_faulty_sync_is_named(proven, kind):
    names_a_fault(proven, kind)


def test_a_tensor_that_sglang_passes_over(proven, monkeypatch):
    right = sglang_weights.buckets
    monkeypatch.setattr(
        sglang_weights, "buckets", lambda *words:
        ((flat, [one for one in inside if one[0] != TARGET]) for flat, inside in right(*words)))
    with pytest.raises(WeightSyncError, match=re.escape(f"{TARGET} (layer 1) differs") + ".* still has the values"):
        proven.sync()


def test_a_prefix_cache_that_outlives_the_update(proven, monkeypatch):
    """All weights are right; keys and values of the canaries' prompts are those of the old ones."""
    manager, right = proven.engine.native.manager, proven.engine.native.manager.update_weights_from_tensor

    def kept(request):
        request.flush_cache = False
        return right(request)

    with monkeypatch.context() as patch:
        patch.setattr(manager, "update_weights_from_tensor", kept)
        patch.setattr(proven.engine.native, "come_to_rest", lambda: None)  # which drops the prefixes too
        with pytest.raises(WeightSyncError, match="canaries differ .* a cache survived the update"):
            proven.sync()
    assert proven.sync() < 1e-5


def test_what_sglang_refuses_is_an_error(rig, monkeypatch):
    manager = rig.engine.native.manager

    async def refused(_):
        return False, "the dog ate it"

    with monkeypatch.context() as patch:
        patch.setattr(manager, "update_weights_from_tensor", refused)
        with pytest.raises(RuntimeError, match="did not load the weights: the dog ate it"):
            rig.sync()
        with pytest.raises(RuntimeError, match="has no weights yet"):
            generate(rig.engine, requests(), SamplingParams(NEW))
    rig.ready()


def test_arguments_of_its_own_must_exist():
    with pytest.raises(ValueError, match="--engine_args max_seq_len: SGLang has no such argument .did you mean"):
        SGLangNative({"model_path": "x", "max_seq_len": 3}, {}, torch.device("cpu"))


def test_schedulers_do_not_hear_what_stops_a_run(rig):
    """A launcher signals all processes of a rank; the trainer may want another rollout before it leaves."""
    rig.ready()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(rig.engine.native.processes[0].pid, number)
    assert generate(rig.engine, requests(), SamplingParams(NEW))


def test_a_scheduler_that_is_killed(rig):
    """While it generates: a clear error, soon, and this process and its other children live on."""
    rig.ready()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    scheduler = rig.engine.native.processes[0]
    os.kill(scheduler.pid, signal.SIGSTOP)  # or all responses may be there before it is killed
    threading.Timer(0.5, os.kill, (scheduler.pid, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="scheduler .* has ended with exit code -9"):
        generate(rig.engine, requests(), SamplingParams(NEW))
    with pytest.raises(RuntimeError, match="scheduler .* has ended"):
        rig.sync()
    assert time.monotonic() - start < 30
    rig.engine.shutdown()
    with pytest.raises(RuntimeError, match="asleep"):
        generate(rig.engine, requests(), SamplingParams(NEW))
    assert other.poll() is None, "another child was killed"
    other.kill()
    other.wait()
    assert signal.getsignal(signal.SIGQUIT) is ON_QUIT
    assert not Path(f"/proc/{scheduler.pid}").exists(), "a zombie is left"


def own_files():
    return {path for folder in (tempfile.gettempdir(), "/dev/shm")
            for path in Path(folder).glob(f"*lightrft-sglang-*-{os.getpid()}-*")}  # yapf: disable


def test_a_start_that_fails_leaves_nothing_behind(tmp_path):
    """It reports the scheduler's own error. Sockets are closed: the garbage collector would wait for them for ever."""
    before, children, files = state(), multiprocessing.active_children(), own_files()
    with forked(), pytest.raises(UserError, match="SGLang cannot run .*: ValueError: Unsupported activation: relu6"):
        Rig(tiny.save_model(tmp_path, hidden_act="relu6", **SIZES))
    gc.collect()
    assert state() == before and multiprocessing.active_children() == children and own_files() == files
