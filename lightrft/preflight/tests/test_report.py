import re
from math import prod
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lightrft.config.cli import parse_config
from lightrft.config.schema import Config
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.tree import build, options
from lightrft.preflight.base import preflight
from lightrft.preflight.cost import (GIB, batch_sizes, batch_summary, count_parameters, model_size, step_flops,
                                     time_line)
from lightrft.preflight.hardware import Machine, UNKNOWN
from lightrft.preflight.memory import memory_lines
from lightrft.strategy.memory import ModelSize
from lightrft.preflight.report import option_table, report, resolved
from lightrft.utils.gpu import peak_flops
from lightrft.utils.errors import UserError

SIZE = ModelSize(total=1000, largest_layer=100, outside=200)


def safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path)


def test_layers_of_a_tower_are_not_those_of_the_decoder() -> None:
    shapes = {"visual.blocks.0.w": (3, ), "vision_tower.encoder.layer.0.w": (4, ), "lm_head.weight": (2, ),
              "language_model.layers.0.w": (5, ), "language_model.layers.0.experts.1.w": (6, )}  # yapf: disable
    assert count_parameters(shapes) == ModelSize(20, 11, 2, 6)


def test_model_size_from_the_headers(tmp_path: Path) -> None:
    shapes = {
        "model.embed_tokens.weight": [10, 4], "model.layers.0.a": [4, 4], "model.layers.1.a": [4, 4],
        "model.layers.1.b": [3], "model.norm.weight": [4]
    }
    safetensors(tmp_path / "a-1.safetensors", dict(list(shapes.items())[:2]))
    safetensors(tmp_path / "a-2.safetensors", dict(list(shapes.items())[2:]))
    assert model_size(tmp_path) == ModelSize(sum(map(prod, shapes.values())), 19, 44, 40)
    assert model_size("org/model") is None and model_size(None) is None


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b"cut"])
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, content: bytes) -> None:
    safetensors(tmp_path / "a.safetensors", {"x": [4]})
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[:-1] if content == b"cut" else content)
    with pytest.raises(UserError, match=r"a\.safetensors is not a whole safetensors file \(.+\): download it again"):
        model_size(tmp_path)


def test_batch_sizes_by_hand() -> None:
    config = build(
        Config, {
            "rollout_batch_size": 6, "n_samples_per_prompt": 4, "train_batch_size": 8, "max_epochs": 2,
            "prompt_max_len": 10, "generate_max_len": 20
        })
    b = batch_sizes(config)
    assert (b.prompts, b.samples, b.tokens, b.optimizer_steps) == (6, 24, 720, 6)
    line = batch_summary(config, 2)
    assert all(part in line for part in ("6 prompts", "24 samples", "720 tokens", "6 optimizer steps", "2 ranks")), line
    assert "\n" not in line and "2 passes" in line, line


def test_flops_by_hand() -> None:
    small = {
        "rollout_batch_size": 1, "n_samples_per_prompt": 2, "train_batch_size": 2, "prompt_max_len": 3,
        "generate_max_len": 2
    }
    tokens = 10
    assert step_flops(build(Config, small), SIZE) == 1000 * (7 * 6 + tokens * 2), "the prompt is trained once"
    assert step_flops(build(Config, small | {"share_prompts": False}), SIZE) == 1000 * tokens * (6 + 2)
    more = small | {"train_batch_size": 1, "gradient_checkpointing": True, "init_kl_coef": 0.1, "max_epochs": 2}
    assert step_flops(build(Config, more), SIZE) == 1000 * tokens * (16 + 2 + 4)
    base = step_flops(build(Config, small), SIZE)
    for values, passes in (({"teacher_model":
                             "t"}, 2), ({"rollout_correction":
                                         "bypass"}, 0), ({"advantage_estimator": "reinforce++", "init_kl_coef":
                                                          0.1}, 2)):
        assert step_flops(build(Config, small | values), SIZE) == base + 1000 * 7 * 2 * passes, values


def test_peak_flops_by_the_names_that_torch_has() -> None:
    known = {
        "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835, "NVIDIA H200": 989,
        "NVIDIA GH200 480GB": 989, "NVIDIA GH200 144G HBM3e": 989, "NVIDIA H20": 148, "NVIDIA B200": 2250,
        "NVIDIA GB200": 2500, "NVIDIA B300 SXM6 AC": 2250, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100 80GB PCIe": 312,
        "NVIDIA A100-PCIE-40GB": 312, "NVIDIA A10": 125, "NVIDIA A10G": 70, "NVIDIA L4": 121, "NVIDIA L40S": 362,
        "NVIDIA L40": 181, "NVIDIA GeForce RTX 4090": 165, "NVIDIA GeForce RTX 5090": 209.5,
        "NVIDIA RTX 6000 Ada Generation": 364, "AMD Instinct MI300X": 1307, "H100": 989, "RTX4090": 165
    }
    assert {name: peak_flops(name) for name in known} == {name: peak * 1e12 for name, peak in known.items()}
    others = ("", "a GPU of 24 GiB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10-24Q", "NVIDIA GeForce RTX 4090 D",
              "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100X", "NVIDIA H100 NVL Custom", "Tesla T4")
    assert not [name for name in others if peak_flops(name)], "no utilisation is better than a wrong one"


def test_report_names_every_option_and_its_provenance(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("l2: 0.5\n")
    parsed = parse_config(["--config", str(path), "--seed", "77"], defaults={"gamma": 0.5})
    text = report(parsed.config, parsed.provenance, Machine.here(2))
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}
    untouched = dict(word.split("=") for word in text.split() if re.fullmatch(r"\w+=\S+", word))
    assert lines.keys() | untouched.keys() >= options(Config).keys() and not lines.keys() & untouched.keys()
    assert "77" in lines["seed"] and lines["seed"].endswith("[flag]") and untouched["lambd"] == "0.95"
    assert lines["l2"].endswith(f"[yaml:{path}]") and lines["gamma"].endswith("[script]"), lines
    assert batch_summary(parsed.config,
                         2) in text and "memory per rank: unknown" in text and "time per step: unknown" in text


def test_report_with_a_known_model() -> None:
    size = ModelSize(GIB, GIB // 10, GIB // 5)
    text = "\n".join(memory_lines(Config(), 2, size, UNKNOWN))
    assert "  weights  " in text and "GiB per rank" in text
    text = time_line(Config(), 2, size, "NVIDIA H200")
    assert "about" in text and "H200 at 40% of 989" in text, text
    assert "a CPU" in time_line(Config(), 1, SIZE, ""), "a CPU has no estimate"


def test_report_says_what_it_leaves_to_the_engine() -> None:
    for engine, name in {"vllm": "vLLM", "sglang": "SGLang"}.items():
        lines = preflight(build(Config, {"engine_type": engine, "engine_args": ["foo=1"]})).estimates(Machine.here(1))
        assert lines[-1] == f"--engine_args: {name} checks names and values when it starts, not here"
        bare = preflight(build(Config, {"engine_type": engine})).estimates(Machine.here(1))
        assert "when it starts" not in "".join(bare)


def test_every_tree_has_a_report() -> None:
    sft = report(SFTConfig(), {"seed": "flag"}, Machine.here(2))
    assert sft.startswith(resolved(SFTConfig(), {"seed": "flag"})) and "[flag]" in sft
    batch, memory = sft.splitlines()[-2:]
    assert batch.endswith("128 conversations of at most 2,048 tokens, in micro-batches of at most 16,384 tokens "
                          "per rank; 2 ranks")  # yapf: disable
    assert memory == ("memory per rank: unknown, because --pretrain is neither a model folder nor a model that the hub "
                      "could provide")
    loss = build(Config, {"policy_loss": "gpg", "max_epochs": 2})
    assert "\nwarning: --policy_loss gpg has no ratio" in report(loss, {}, Machine.here(1))
    assert preflight(loss).summary(2) == [batch_summary(loss, 2)] and "2 ranks" in preflight(SFTConfig()).summary(2)[0]


@pytest.mark.parametrize("tree", [Config, SFTConfig])
def test_tables_and_listings_cover_the_tree(tree: type) -> None:
    table, listing = option_table(tree), resolved(tree(), {})
    assert re.findall(r"^\| \*\*`--(\w+)`", table, re.M) == [name for name, one in options(tree).items() if one.common]
    table = table.replace("**`", "`").replace("`**", "`")
    assert all(f"| `--{name}` |" in table and name in listing for name in options(tree))
    rows = [line.replace("\\|", "") for line in table.splitlines() if line.startswith("| `--")]
    assert all(line.count("|") == 6 for line in rows), "a cell breaks the table"


def test_the_table_has_ranges_and_needs() -> None:
    rows = {line.split("`")[1]: line for line in option_table(Config).splitlines() if line.startswith("| `--")}
    assert "| `0` | at least 0 | ranks that share" in rows["--initial_model_shard_size"]
    assert rows["--initial_model_shard_size"].endswith("; needs `--init_kl_coef` |")
    assert "| `0.2` | in (0, 1] |" in rows["--eps_clip"] and "| `none` |  | train only" in rows["--difficulty_min"]
