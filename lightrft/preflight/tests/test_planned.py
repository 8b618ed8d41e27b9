"""Plans for a machine: its name, the defaults that depend on it, and the refusal of what does not fit."""
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

from lightrft.cli.main import as_first_of
from lightrft.config.cli import parse_config
from lightrft.config.options import ConfigError
from lightrft.config.preference_schema import DPOConfig, KTOConfig
from lightrft.config.rm_schema import RMConfig
from lightrft.config.schema import Config
from lightrft.config.sft_schema import KDConfig, SFTConfig
from lightrft.config.tree import build, flatten
from lightrft.models.activations import Activations, ModelShape
from lightrft.preflight import planned, training
from lightrft.preflight.checks.run_plan import backward
from lightrft.preflight.cost import GIB, known_model, step_flops
from lightrft.preflight.hardware import Device, Machine, UNKNOWN
from lightrft.preflight.memory import memory, micro_batch_tokens
from lightrft.preflight.planned import (known_positions, limit_rows, refuse_emulated_bf16, refuse_lengths,
                                        refuse_unlike_ranks, refuse_what_does_not_fit, settle, settle_recomputation)
from lightrft.preflight.training import MODES
from lightrft.preflight.validate import changes
from lightrft.strategy.memory import ModelSize
from lightrft.trainer.session import settled
from lightrft.utils.errors import UserError

SHAPE = ModelShape(layers=3, hidden=64, mlp=256, queries=64, keys=32, heads=4)
SIZE = ModelSize(total=1000, largest_layer=100, outside=200)
GPU = Device("H100", GIB, GIB)


def model(folder, layers=2, hidden=64):
    """A folder with nothing but a config.json."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": hidden, "vocab_size": 1000,
              "num_attention_heads": max(4, hidden // 128), "num_key_value_heads": max(2, hidden // 256),
              "num_hidden_layers": layers, "intermediate_size": 4 * hidden}  # yapf: disable
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("text, ranks, gib, gpu", [("8xH100", 8, 79.1, "H100"), ("1x24", 1, 24, "a GPU of 24 GiB"),
                                                   ("2x8x80", 16, 80, "a GPU of 80 GiB"), ("2x4xA100", 8, 79.1, "A100"),
                                                   ("1xRTX4090", 1, 23.6, "RTX4090")])
def test_a_machine_by_name(text, ranks, gib, gpu):
    machine = Machine.planned(text)
    assert (machine.ranks, machine.gpu, machine.device.cuda) == (ranks, gpu, True)
    assert machine.device.total == machine.device.free == int(gib * GIB)


@pytest.mark.parametrize("text", ["8", "H100", "8xH1000", "0x80", "x80", "8x", "2x2x2x80", "8xh1000"])
def test_other_names_are_refused(text):
    with pytest.raises(ConfigError, match=f"--plan_gpus {text}: expected .* names: B200"):
        Machine.planned(text)


def test_only_a_dry_run_is_planned_for_other_gpus(capsys):
    assert parse_config(["--dry_run", "--plan_gpus", "8x80"]).plan_gpus == "8x80"
    with pytest.raises(SystemExit):
        parse_config(["--plan_gpus", "8x80"])
    assert "--plan_gpus 8x80: plans a run for GPUs that are not here; add --dry_run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "ranks, gpus, told",
    [("8", "4xH100", "--plan_gpus 4xH100 has 4 GPUs on a machine, and --nproc .* starts 8 processes there"),
     ("8", "2x8xH100", ""), ("", "4xH100", ""), ("1", "2x1x80", ""), ("16", "2x8x80", "has 8 GPUs")])
def test_processes_and_gpus_of_a_plan_agree(ranks, gpus, told):
    parsed = parse_config(["--pretrain", "x", "--prompt_data", "x", "--dry_run", "--plan_gpus", gpus])
    refused = pytest.raises(ConfigError, match=told) if told else nullcontext()
    with as_first_of(ranks) if ranks else nullcontext(), refused:
        settled(parsed)


def settled_recomputation(tree, machine, **options):
    """The value of ``--gradient_checkpointing`` and its source."""
    config, provenance = build(tree, {"bf16": True, "use_liger": False} | options), {}
    settle_recomputation(config, provenance, machine)
    return config.model.gradient_checkpointing, provenance.get("gradient_checkpointing", "flag")


@pytest.mark.parametrize("tree", [Config, SFTConfig])
def test_as_little_is_recomputed_as_the_memory_allows(tree, tmp_path):
    """The margin of the verdict is left; the plan says what the choice takes, and what those before it would take."""
    path = model(tmp_path / "model", layers=6)
    options = {"pretrain": path, "max_tokens_per_micro_batch": 1 << 20, "train_batch_size": 512}
    size, shape = known_model(path)

    def least(mode, device):
        config = build(tree, options | {"bf16": True, "use_liger": False, "gradient_checkpointing": mode})
        return backward(config, 1, size, device, shape)

    none, selective, _ = (least(mode, GPU) for mode in MODES)
    for free, expected in ((none * 1.1 + 1, False), (none * 1.1 - 1, "selective"), (selective * 1.1 + 1, "selective"),
                           (selective * 1.1 - 1, True), (GIB, True)):
        machine = Machine(1, Device("H100", int(free), GPU.total))
        chosen, source = settled_recomputation(tree, machine, **options)
        assert chosen == expected and type(chosen) is type(expected)
        taken = [f"{least(mode, GPU) / GIB:.1f}" for mode in MODES[:MODES.index(expected) + 1]]
        assert source.startswith(f"default: backward takes {taken[-1]} of {free / GIB:.1f} GiB")
        assert source.count("would take") == len(taken) - 1 and all(f"would take {each}" in source
                                                                    for each in taken[:-1])


@pytest.mark.parametrize("tree", [Config, SFTConfig])
def test_an_option_wins_over_the_plan_of_recomputation(tree, tmp_path):
    path, large = model(tmp_path / "model"), Device("H100", 10 * GIB, GIB)
    for machine, given, expected in ((Machine(1, GPU), False, (False, "flag")), (Machine(1,
                                                                                         large), True, (True, "flag")),
                                     (Machine(1, large), "selective", ("selective", "flag")),
                                     (Machine(1, Device("cpu", GIB, GIB)), None, (False, "default: no GPU"))):
        assert settled_recomputation(tree, machine, pretrain=path, gradient_checkpointing=given) == expected
    assert settled_recomputation(tree, Machine(1, GPU), pretrain=str(tmp_path)) == (False, "default: no model")
    before = flatten(build(tree, {"gradient_checkpointing": False}))  # as in a checkpoint of another machine
    assert changes(before, build(tree, {"gradient_checkpointing": "selective"})) == []


def test_layers_that_nobody_can_count_are_recomputed_in_large_models(tmp_path, monkeypatch):
    for total, expected in ((10**9, False), (15 * 10**8, True)):
        monkeypatch.setattr(training, "known_model", lambda *_: (replace(SIZE, total=total), None))  # noqa: B023
        chosen, source = settled_recomputation(Config, Machine(1, GPU))
        assert (chosen, source) == (expected, f"default: {total / 1e9:.2g} billion parameters, activations not counted")


@pytest.mark.parametrize("tree", [Config, SFTConfig])
def test_bf16_that_was_set_for_older_gpus_is_refused(tree):
    """One of them may be an older one; the message names it."""
    old = Machine(1, GPU, "Tesla T4", bf16=False)
    with pytest.raises(ConfigError, match="--bf16 true: Tesla T4 has no bfloat16 in hardware .* with --bf16 false"):
        refuse_emulated_bf16(build(tree, {"bf16": True}), old)
    for given, machine in ((None, old), (False, old), (True, Machine(1, GPU)), (True, Machine(1, UNKNOWN, bf16=False))):
        config = build(tree, {"bf16": given})
        settle(config, {}, machine)
        refuse_emulated_bf16(config, machine)


def test_ranks_on_unlike_machines_are_refused():
    alike = {"bf16": True, "use_liger": False, "gradient_checkpointing": True}
    refuse_unlike_ranks([alike, dict(alike)])
    with pytest.raises(UserError,
                       match="--use_liger: .* false on rank 0 and true on rank 2; .* all: --use_liger false"):
        refuse_unlike_ranks([alike, alike, alike | {"use_liger": True}])
    for other in (False, "selective"):
        with pytest.raises(UserError, match="for all: --gradient_checkpointing true"):  # that runs everywhere
            refuse_unlike_ranks([alike, alike | {"gradient_checkpointing": other}])


@pytest.mark.parametrize("tree", [Config, SFTConfig])
def test_bf16_is_on_on_gpus(tree):
    for device, given, expected, source in ((GPU, None, True, "default: CUDA"), (GPU, False, False, "flag"),
                                            (Device("cpu", GIB, GIB), None, False,
                                             "default: no GPU"), (Device("cpu", GIB, GIB), True, True, "flag")):
        config, provenance = build(tree, {"bf16": given}), {}
        settle(config, provenance, Machine(1, device))
        assert (config.model.bf16, provenance.get("bf16", "flag")) == (expected, source)
    config, provenance = build(tree, {}), {}
    settle(config, provenance, Machine(1, GPU, "Tesla T4", bf16=False))
    assert not config.model.bf16 and provenance["bf16"] == "default: GPU before Ampere"
    before = flatten(build(tree, {"bf16": False}))  # as in a checkpoint from before the default
    assert changes(before, build(tree, {"bf16": True})) == ["--bf16 true (was false)"]


def test_liger_is_on_where_it_is_installed_on_gpus(monkeypatch):
    for device, there, expected, source in ((GPU, "liger_kernel", True,
                                             "default: installed"), (GPU, "nothing", False, "default: not installed"),
                                            (Device("cpu", GIB, GIB), "liger_kernel", False, "default: no GPU")):
        monkeypatch.setattr(planned, "find_spec", lambda name: name == there or None)
        config, provenance = Config(), {}
        settle(config, provenance, Machine(1, device))
        assert (config.model.use_liger, provenance["use_liger"]) == (expected, source)


def test_the_tokens_of_a_micro_batch():
    base = {"train_batch_size": 8, "prompt_max_len": 100, "generate_max_len": 300, "max_tokens_per_micro_batch": 1000}
    for more, ranks, expected in (({}, 1, (1000, True)), ({}, 8, (400, False)), ({"micro_train_batch_size":
                                                                                  2}, 1, (800, True)),
                                  ({"max_tokens_per_micro_batch":
                                    5000}, 1, (3200, False)), ({"max_tokens_per_micro_batch": 200}, 8, (200, True))):
        assert micro_batch_tokens(build(Config, base | more), ranks) == expected


def test_a_shared_prompt_counts_once_in_the_plan():
    """Where a mini-batch has all samples of its prompts; elsewhere they may all be of different prompts."""
    base = {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "train_batch_size": 8, "prompt_max_len": 100,
            "generate_max_len": 300}  # yapf: disable
    for more, ranks, expected in (({}, 1, (2600, False)), ({"share_prompts":
                                                            False}, 1, (3200, False)), ({"train_batch_size":
                                                                                         4}, 1, (1600, False)),
                                  ({}, 4, (700, False)), ({"micro_train_batch_size":
                                                           4}, 1, (1300, True)), ({"lora_rank": 4, "lora_dropout":
                                                                                   0.1}, 1, (3200, False))):
        assert micro_batch_tokens(build(Config, base | more), ranks) == expected
    shared, apart = (step_flops(build(Config, base | {"share_prompts": on}), SIZE) for on in (True, False))
    assert apart - shared == SIZE.total * 6 * 600


def row(one, chunk_mib):
    """Activations by phase: of temporaries of layers and a chunk of logits, which never exist together, the larger."""
    chunk, temporaries = chunk_mib << 20, one.backward - one.kept
    return (0, max(0, one.forward - chunk), one.kept + max(0, temporaries - chunk), 0, 0)


def test_activations_in_the_plan():
    """Several micro-batches: beside the gradients; a single one frees activations while gradients come into being."""
    options = {"prompt_max_len": 100, "generate_max_len": 300, "max_tokens_per_micro_batch": 1000,
               "logprob_chunk_mib": 1}  # yapf: disable
    several, single = (build(Config, options | {"train_batch_size": size}) for size in (8, 2))
    for config, tokens in ((several, 1000), (single, 800)):
        found = memory(config, 1, SIZE, GPU, SHAPE)
        assert found["activations"] == row(Activations(SHAPE, tokens, 4), 1)
        assert found["gradients, float32"][2:4] == (4000 if config is several else 0, 4000)
    beside = build(Config, flatten(single) | {"pretrain_data": ["a.txt"], "pretrain_max_len": 300, "ptx_batch_size": 6})
    for ranks, tokens in ((1, 1000), (2, 900)):
        found, before = (memory(each, ranks, SIZE, GPU, SHAPE) for each in (beside, single))
        assert found["activations"][2:] == row(Activations(SHAPE, tokens, 4), 1)[2:], "of three rows per rank"
        assert found["activations"][1] == before["activations"][1], "no pass without gradients reads them"
        assert found["gradients, float32"][2] > before["gradients, float32"][2] == 0, "a step has two micro-batches"
    one = Activations(SHAPE, 1000, 2, recompute=True, frozen=True)
    for mib in (1, 16):
        lora = {"bf16": True, "gradient_checkpointing": True, "lora_rank": 4, "logprob_chunk_mib": mib}
        config = build(Config, flatten(several) | lora)
        assert memory(config, 1, SIZE, GPU, SHAPE)["activations"] == row(one, mib)
    assert row(one, 16) == (0, 0, one.kept, 0, 0) and row(one, 1)[2] > one.kept
    assert replace(one, fused=True).kept < one.kept < replace(one, recompute="selective").kept
    assert replace(one, recompute="selective").kept < replace(one, recompute=False).kept


def test_a_teacher_is_held_as_the_policy_is_or_visits_for_its_passes(tmp_path):
    path = model(tmp_path / "model", layers=4)
    whole = 4 * known_model(path)[0].total / 2  # of two ranks

    def held(tree, **options):
        return memory(build(tree, {"teacher_model": path} | options), 2, SIZE, GPU)["teacher"]

    assert held(Config) == (whole, ) * 5 and held(Config, teacher_offload=True) == (0, whole, 0, 0, 0)
    assert held(KDConfig) == (0, *(whole, ) * 3, 0)
    assert held(KDConfig, kd_top_k=4, teacher_cache_dir="cache") == (0, whole, 0, 0, 0)


@pytest.mark.parametrize("tree, options", [
    (Config, {"engine_kv_mib": 1}),
    *[(tree, {"max_len": 3072}) for tree in (SFTConfig, RMConfig, DPOConfig, KTOConfig, KDConfig)]])  # yapf: disable
def test_one_byte_decides_whether_a_run_starts(tree, options, tmp_path):
    path = model(tmp_path / "model", layers=4)
    teacher = {"teacher_model": path} if tree is KDConfig else {}
    config = build(tree, {"pretrain": path, "gradient_checkpointing": False} | options | teacher)
    size, shape = known_model(path, head=tree is not RMConfig)
    needed = max(map(sum, zip(*memory(config, 2, size, GPU, shape).values())))
    enough = int(needed) + 1
    refuse_what_does_not_fit(config, Machine(2, Device("H100", enough, enough)))
    refuse_what_does_not_fit(config, Machine(2, Device("cpu", 1, 1)))
    with pytest.raises(
            ConfigError,
            match=r"the run does not fit: .* in the phase backward, and .* are free; largest: activations .*; "
            "--.* brings it to "):
        refuse_what_does_not_fit(config, Machine(2, Device("H100", enough - 2, enough - 2)))


@pytest.mark.parametrize("tree, name, given, trained", [(SFTConfig, "max_len", 4096, 512),
                                                        (KDConfig, "max_len", 512, 512),
                                                        (RMConfig, "max_len", 100, 100),
                                                        (Config, "pretrain_max_len", 4096, 512)])
def test_a_limit_of_rows_beyond_the_positions_of_the_model_is_lowered_to_them(tree, name, given, trained, tmp_path,
                                                                              capsys):
    path, lengths = model(tmp_path / "model"), {"prompt_max_len": 400, "generate_max_len": 112}
    (file := tmp_path / "model" /
     "config.json").write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 512}))
    known = {"pretrain": path, name: given} | {word: most for word, most in lengths.items() if word in tree.LENGTHS}
    config, provenance = build(tree, known), {}
    for _ in range(2):
        limit_rows(config, provenance, known_positions(config))
        assert flatten(config)[name] == trained
    notice = f"--{name} {given}: the model has 512 positions" in (said := capsys.readouterr().err)
    assert notice == (given > trained) == (name in provenance) and said.count("positions") == notice, "once"


def test_responses_beyond_the_positions_are_refused(tmp_path):
    config = build(Config, {"pretrain": model(tmp_path / "model"), "prompt_max_len": 10**6})
    with pytest.raises(UserError, match="more than the .* positions"):
        refuse_lengths(config, known_positions(config))
    refuse_lengths(config, 0)
    (tmp_path / "model" / "config.json").write_text("{")
    assert known_positions(config) == 0, "told where the model is loaded"
