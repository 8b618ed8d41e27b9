"""The SGLang engine. What needs SGLang runs in the environment that ``make test`` makes for it, .venv-sglang."""
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightrft.config.schema import RolloutConfig
from lightrft.rollout.sglang import client, launch, scheduler_patches, weights
from lightrft.rollout.sglang.engine import SGLangEngine
from lightrft.rollout.sglang.launch import check_window, engine_arguments
from lightrft.rollout.sglang.weights import buckets
from lightrft.rollout.weight_sync.sync import WeightManifest
from lightrft.tests.support import tiny
from lightrft.tests.support.sglang_environment import FOLDER, in_its_environment, PYTHON
from lightrft.tests.support.warmed_up import fixture_warmed_up
from lightrft.utils.env import process_space, total_memory, World
from lightrft.utils.errors import UserError

fixture_warmed_up = fixture_warmed_up  # pytest finds it here
ROOT = Path(__file__).parents[3]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_in_the_environment_of_sglang(warmed_up):
    """All files in one process; it and the processes of two ranks, which come last, are forks of one that has imported
    SGLang."""
    files = [f"{FOLDER}/sglang_{name}.py" for name in ("engine", "experts", "vision", "processes")]
    code, said = in_its_environment(PYTHON, "-m", "lightrft.tests.support.sglang_suite", "-q", "--tb=short", *files,
                                    limit_s=1700, WARMED_UP=str(warmed_up))
    assert code == 0 and int(re.search(r"(\d+) passed", said)[1]) > 60, said[-8000:]
    assert not re.search(r"\d skipped", said), said[-8000:]


def test_options_reach_sglang(monkeypatch):
    monkeypatch.setattr(launch, "total_memory", lambda device: 24 << 30 if device == CUDA else total_memory(device))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 << 30, 24 << 30))

    def arguments(device=CUDA, bf16=False, world=World(), **rollout):
        return engine_arguments(RolloutConfig(**rollout), tiny.config(), device, bf16, world)

    plain = arguments()
    assert plain["context_length"] >= 2048 and plain["base_gpu_id"] == 1 and plain["max_total_tokens"] is None
    assert plain["dtype"] == "float32" and plain["quantization"] is None and plain["enable_memory_saver"]
    token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, dimensions, bytes
    changes = [
        ({"engine_tp_size": 2}, "tp_size", 2),
        ({"engine_mem_util": 0.8}, "mem_fraction_static", 0.8),
        ({"engine_sleep": False}, "enable_memory_saver", False),
        ({"engine_quantization": "fp8"}, "quantization", "fp8"),
        ({"engine_args": ["chunked_prefill_size=8"]}, "chunked_prefill_size", 8),
        ({"prompt_max_len": 24}, "context_length", plain["context_length"] - 1000),
        ({"bf16": True}, "dtype", "bfloat16"),
    ]  # yapf: disable
    for options, name, value in changes:
        changed = arguments(**options)
        assert changed[name] == value != plain.get(name), name
        assert {**plain, name: value} == changed, f"{name} changes other arguments too"
    assert (plain["max_running_requests"], plain["cuda_graph_max_bs_decode"]) == (256, 256)
    few = arguments(engine_max_seqs=7)
    assert (few["max_running_requests"], few["cuda_graph_max_bs_decode"]) == (7, 7)
    assert arguments(CPU, engine_max_seqs=7)["cuda_graph_max_bs_decode"] is None
    cached = arguments(engine_kv_mib=3)
    assert (cached["max_total_tokens"], cached["mem_fraction_static"]) == ((3 << 20) // token, 0.9)
    assert arguments(engine_kv_mib=3, engine_tp_size=2)["max_total_tokens"] == 2 * ((3 << 20) // token)
    on_cpu = arguments(CPU)
    assert 0 < on_cpu["max_total_tokens"] <= (4 << 30) // token and not on_cpu["enable_memory_saver"]


def test_sglang_takes_the_share_of_the_whole_device(monkeypatch):
    """Its own option is a share of what is free, and the trainer's models are on the device before it starts."""
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((35 if emptied else 20) << 30, 80 << 30))
    assert launch.free_share(0.35, CUDA) * 35 == pytest.approx(0.35 * 80)
    with pytest.raises(UserError, match="would take 40.0 GiB, and 35.0 of 80.0 GiB are free: at most 0.39 fits"):
        launch.free_share(0.5, CUDA)


def test_what_torch_keeps_is_given_back_before_sglang_allocates(monkeypatch):
    """A recorder stands for SGLang, which occupies memory of a GPU only; its process does not see torch's cache."""
    order = []
    manager = SimpleNamespace(resume_memory_occupation=order.append, release_memory_occupation=order.append)
    requests = SimpleNamespace(ResumeMemoryOccupationReqInput=lambda tags: f"resume {tags}",
                               ReleaseMemoryOccupationReqInput=lambda tags: f"release {tags}")  # yapf: disable
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(io_struct=requests))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("emptied"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: order.append("collected"))
    engine = SGLangEngine(None, WeightManifest({}), [], 8, 8, 1, sleeps=True)
    engine.native = SimpleNamespace(manager=manager, run=lambda call: call(), come_to_rest=lambda: order.append("rest"))
    engine.sleep()
    engine.wake()
    engine._wake_cache()
    again = ["emptied", "collected"]
    assert order == [
        "rest", "release ['kv_cache', 'weights']", *again, "resume ['weights']", *again, "resume ['kv_cache']"
    ]


def test_an_engine_that_does_not_come_to_rest_is_an_error():
    native = object.__new__(client.SGLangNative)
    native.engine = SimpleNamespace(tokenizer_manager=SimpleNamespace(flush_cache=lambda timeout_s: SimpleNamespace(
        success=False, message=f"waited {timeout_s:g} s")))  # yapf: disable
    native.run = lambda call: call()
    with pytest.raises(RuntimeError, match="did not finish its work within 60 s: waited 60 s"):
        native.come_to_rest()


def test_an_update_waits_for_the_end_of_the_work(monkeypatch):
    order = []
    requests = SimpleNamespace(BeginWeightUpdateReqInput=lambda: "begin", EndWeightUpdateReqInput=lambda: "end")
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(io_struct=requests))
    done = lambda request: (order.append(request) or True, "")  # noqa: E731
    manager = SimpleNamespace(begin_weight_update=done, end_weight_update=done)
    native = SimpleNamespace(manager=manager, run=lambda call: call(), come_to_rest=lambda: order.append("rest"))
    weights.load(native, [], {}, 1)
    assert order == ["rest", "begin", "end"]


def test_the_sampler_takes_what_sglang_may_pass():
    output = SimpleNamespace(next_token_logits=torch.tensor([[0.0, 5.0, 1.0]]))
    info = SimpleNamespace(sampling_seed=torch.tensor([-1]), need_top_p_sampling=False, need_top_k_sampling=False,
                           need_min_p_sampling=False, temperatures=torch.ones(1, 1), is_any_greedy=True)
    tokens = scheduler_patches._draw(None, output, info, True, None, None, torch.tensor([3]), logprob_logits=None)
    assert tokens.tolist() == [1]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_sglang_cannot_share_is_refused(name, monkeypatch):
    monkeypatch.setattr(launch, "total_memory", lambda device: 24 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 << 30, 24 << 30))
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(UserError, match=f"{name}=max_split.*True: SGLang can neither .* remove it"):
        engine_arguments(RolloutConfig(), tiny.config(), CUDA, False, World())
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:False")
    assert engine_arguments(RolloutConfig(), tiny.config(), CUDA, False, World())


def test_attention_that_sglang_would_compute_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "total_memory", lambda device: 24 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 << 30, 24 << 30))

    def on(device, family, *args):
        return engine_arguments(RolloutConfig(engine_args=list(args)), tiny.config(family), device, False, World())

    with pytest.raises(UserError, match="torch_native, .* does not cap attention logits, .*attn_logit_softcapping 50"):
        on(CPU, "gemma2")
    assert json.loads(on(CUDA, "gemma2")["json_model_override_args"]) == {"hidden_act": "gelu_pytorch_tanh"}
    assert on(CPU, "gemma2", "attention_backend=intel_amx")
    for family, longest, known in (("mistral", 8, None), ("gemma3", 9, 7), ("qwen2", 999, None)):
        check_window(tiny.config(family), longest, known)
    with pytest.raises(UserError,
                       match=r"reaches back 8 tokens \(sliding_window\), .* not implement for mistral, .* have 9; "):
        check_window(tiny.config("mistral"), 9, None)


def test_weights_travel_in_buckets():
    """Each bucket is right when it comes; its memory serves the next one too, unless a weight is larger."""
    generator = torch.Generator().manual_seed(1)
    sent = [(str(i), torch.randn(size, generator=generator)) for i, size in enumerate([3, 5, 60, 1, 200, 7, 9])]
    dtypes, seen, addresses = {"1": torch.bfloat16, "5": torch.float64}, [], set()
    for flat, inside in buckets(sent, dtypes, 300):
        addresses.add(flat.data_ptr())
        assert flat.is_shared() and len(flat) in (300, 800)
        for name, view, start in inside:
            dtype = dtypes.get(name, torch.float32)
            held = flat[start:start + view.nbytes].view(dtype)
            assert torch.equal(held, dict(sent)[name].to(dtype)) and view.dtype == dtype
            seen.append(name)
    assert seen == [name for name, _ in sent] and len(addresses) == 2
    assert not list(buckets([], {}, 10))


@pytest.fixture
def short():
    """A folder whose name leaves room for sockets; that of ``tmp_path`` may not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_only_what_the_dead_of_this_machine_left_is_removed(short, monkeypatch):
    """The processes of another machine or container with the same TMPDIR are not in this /proc, and may be alive."""
    monkeypatch.setattr(launch, "remove", partial(shutil.rmtree, ignore_errors=True))  # without SGLang's counters
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    mine = launch.claim()
    own, pid, _ = mine.name.removeprefix("lightrft-sglang-").split("-")
    assert pid == str(os.getpid())
    for source in (os, "uname", lambda: SimpleNamespace(nodename="other")), (os, "readlink", lambda path: "pid:[7]"):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(*source)
            assert process_space() != own
    gone = str(2**22 + 1)  # larger than any process id
    names = [f"lightrft-sglang-{host}-{one}-x" for host, one in ((own, gone), ("0badcafe", gone), ("0badcafe", pid))]
    for name in names:
        (short / name).mkdir()
    again = launch.claim()
    assert sorted(short.iterdir()) == sorted([mine, again, *(short / name for name in names[1:])])


@dataclass
class Ports:
    """Some of SGLang's."""
    nccl_port: int
    rpc_ipc_name: str
    instance_id: str = ""


def test_sockets_have_names_that_the_system_takes(short, monkeypatch):
    """Up to the longest that can be bound; a folder whose name is a byte longer is refused."""
    monkeypatch.setattr(launch, "remove", partial(shutil.rmtree, ignore_errors=True))
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.setattr(tempfile, "tempdir", str(short))
        own = len(str(launch.claim())) - len(str(short))
        longest = Path(short, "d" * (107 - len("/00") - own - len(f"{short}/")))
        random = Path(short, "random")
        for path in (longest, Path(f"{longest}d")):
            path.mkdir()
        random.touch()
        monkeypatch.setattr(tempfile, "tempdir", str(longest))
        ports, folder = Ports(1, f"ipc://{random}"), launch.claim()
        launch.move(ports, folder)
        listener.bind(ports.rpc_ipc_name.removeprefix("ipc://"))
        assert ports.instance_id == folder.name and not random.exists()
        monkeypatch.setattr(tempfile, "tempdir", f"{longest}d")
        with pytest.raises(UserError, match="TMPDIR .*more than 107 bytes; .* 1 bytes shorter"):
            launch.claim()


def test_a_missing_package_is_reported_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ValueError, match=r"cannot import sglang .* run: pip install -e '.\[sglang\]'"):
        client.SGLangNative({"model_path": "x"}, {}, CPU)


def test_the_shim_is_for_tests_alone():
    """Nothing in the library knows the stand-in for SGLang's kernels."""
    for path in (ROOT / "lightrft").rglob("*.py"):
        if "tests" not in path.relative_to(ROOT).parts:
            assert not re.search("sglang_cpu_shim|sgl_kernel", path.read_text(encoding="utf-8")), path
