from pathlib import Path

import pytest

from lightrft.config.cli import parse_config
from lightrft.config.files import load_config, plugins_of, save_config, to_yaml
from lightrft.config.options import ConfigError
from lightrft.config.schema import Config
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.tree import build, options
from lightrft.tests.support.option_values import every_option, other_value


def load(folder: Path, text: str) -> dict[str, object]:
    path = folder / "c.yaml"
    path.write_text(text)
    return load_config(path, Config)


@pytest.mark.parametrize("tree", [Config, SFTConfig])
def test_round_trip_of_every_option(tree: type, tmp_path: Path) -> None:
    config = build(tree, {option.name: other_value(option) for option in every_option(tree)})
    path = tmp_path / "run" / "config.yaml"
    save_config(config, path)
    again = parse_config(["--config", str(path)], tree=tree)
    assert again.config == config and to_yaml(
        again.config) == path.read_text(), "a stored configuration reproduces itself"
    sources = {source.partition("; ")[0] for source in again.provenance.values()}
    assert sources == {f"yaml:{path}"}, "every value is in the file"


def test_round_trip_of_awkward_values(tmp_path: Path) -> None:
    values = {
        "l2": 1e-7, "actor_learning_rate": 3e-4, "stop": ["a,b", "\n", "é"], "system_prompt": "yes: {x}\n# no",
        "wandb_run_name": "007", "adam_betas": [0.1 + 0.2, 0.999], "kl_target": None, "eval_data": []
    }
    config = build(Config, values)
    save_config(config, tmp_path / "c.yaml", ["json"])
    found = load_config(tmp_path / "c.yaml", Config)
    assert build(Config, found) == config and plugins_of(tmp_path / "c.yaml") == ["json"], "exact"


def test_nested_flat_aliases_and_number_forms(tmp_path: Path) -> None:
    found = load(
        tmp_path, "strategy: {strategy: fsdp}\nl2: 3e-4\nmax_samples: 1.0e+3\nreward: math=0.9,format=0.1\n"
        "kl_target: null\nmax_norm: 1\ndisable_ds_ckpt: true\neval_pass_k: 4\n")
    assert found == {
        "strategy": "fsdp", "l2": 3e-4, "max_samples": 1000, "reward": ["math=0.9", "format=0.1"], "kl_target": None,
        "max_norm": 1.0, "disable_ckpt": True, "eval_pass_k": [4]
    }, found
    assert load(tmp_path, "strategy: fsdp\nreward: [a]\n") == {"strategy": "fsdp", "reward": ["a"]}
    assert load(tmp_path, "") == {} and load(tmp_path, "train:\n  seed: 1\n") == {"seed": 1}


@pytest.mark.parametrize("text,parts", [
    ("sead: 1", ["unknown key sead", "did you mean seed"]),
    ("train: {sead: 1}", ["unknown key train.sead", "did you mean seed"]),
    ("trian: {seed: 1}", ["unknown key trian", "did you mean train"]),
    ("algorithm: {seed: 1}", ["algorithm.seed", "belongs to the group train"]),
    ("train: 3", ["train is a group"]),
    ("grad_accum_dtype: bf16", ["accumulated in float32"]),
    ("seed: x", ["--seed", "an integer", "'x'"]),
    ("seed: true", ["--seed", "an integer", "True"]),
    ("seed: 1.5", ["--seed", "1.5"]),
    ("seed: null", ["--seed", "None"]),
    ("bf16: 1", ["--bf16", "true or false"]),
    ("wandb_project: 007", ["--wandb_project", "put it in quotes"]),
    ("kl_estimator: k9", ["--kl_estimator", "one of k1, k2, k3"]),
    ("prompt_data: {a: 1}", ["--prompt_data", "text"]),
    ("seed: 1\nseed: 2", ["'seed' is given twice"]),
    ("seed: 1\ntrain: {seed: 2}", ["seed is given twice"]),
    ("- seed", ["expected a mapping"]),
    ("seed: [", ["cannot be read"]),
    ("seed: x\nsead: 1", ["--seed", "sead", "2 problems"]),
    ("fsdp: false", ["unknown key fsdp"]),
    ("pretrain: {{MODEL}}", ["cannot be read", "put a text that begins with a brace, such as {{...}}, in quotes"]),
    ("dry_run: true", ["dry_run is not an option of a run", "--dry_run"]),
    ("plan_gpus: 8xH100",
     ["plan_gpus is not an option of a run", "--dry_run --plan_gpus 8xH100", '.plan(gpus="8xH100")']),
])
def test_mistakes(text: str, parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert "c.yaml" in str(error.value), "the file is named"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "c.yaml", Config)


def test_every_default_converts_to_itself() -> None:
    for tree in (Config, SFTConfig):
        for option in options(tree).values():
            assert option.convert(option.default) == option.default, f"{option.flag} refuses its own default"
