"""``examples/trainers``: the command of every script, and its plan for a tiny model and a batch of rows."""
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightrft.tests.support import tiny
from lightrft.tests.support.preference_runs import JUDGED, STEPS
from lightrft.tests.support.scorers import save_scorer
from lightrft.tests.support.tiny_task import write_rows
from lightrft.tests.test_gpu_start import recorded

TRAINERS = Path(__file__).parents[2] / "examples" / "trainers"
pytestmark = pytest.mark.skipif(not TRAINERS.exists(), reason="installed without its repository")
SPLITS = {"train": 128, "test": 8}
ROWS: dict[str, list[dict[str, Any]]] = {
    "judged": JUDGED, "prompts": [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in JUDGED],
    "steps": [{name: row[name] for name in ("prompt", "completions", "labels")} for row in STEPS]
}  # yapf: disable
SCRIPTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "sft": ("judged", "train_sft", {"learning_rate": "1e-05"}),
    "kto": ("judged", "train_kto", {"beta": "0.1", "learning_rate": "5e-07"}),
    "kd": ("judged", "train_kd", {"teacher_model": "{home}/teacher", "kd_coef": "0.4"}),
    "prm": ("steps", "train_prm", {"placeholder_token": "#", "reward_tokens": "+,-", "step_policy": "skip"}),
    "ppo": ("prompts", "train", {"reward_pretrain": "{home}/reward", "advantage_estimator": "gae",
                                 "critic_learning_rate": "9e-06", "prompt_data": "{home}/prompts"}),
}  # yapf: disable
"""By the name of a script its rows, its command, and options that a plan shows."""


@pytest.fixture(name="home", scope="module")
def fixture_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, a teacher, a reward model, and folders of rows with the splits train and test."""
    home = tmp_path_factory.mktemp("home")
    for name in ("model", "teacher"):
        tiny.save_model(home / name, max_position_embeddings=2048)
    save_scorer(home / "reward", seed=1)
    for name, rows in ROWS.items():
        (home / name).mkdir()
        for split, count in SPLITS.items():
            write_rows(home / name / f"{split}.jsonl", (rows * SPLITS["train"])[:count])
    return home


def places(home: Path, data: str) -> dict[str, str]:
    """The environment of a script."""
    return {"MODEL": str(home / "model"), "DATA": str(home / data), "TEACHER": str(home / "teacher"),
            "REWARD_MODEL": str(home / "reward"), "PLACEHOLDER": "#", "PROMPT_MAX_LEN": "100",
            "GENERATE_MAX_LEN": "100"}  # yapf: disable


def test_the_readme_lists_every_script() -> None:
    listed = re.findall(r"^bash examples/trainers/(\S+)", (TRAINERS / "README.md").read_text(), re.MULTILINE)
    assert listed == [f"run_{name}.sh" for name in SCRIPTS]
    assert sorted(listed) == sorted(path.name for path in TRAINERS.glob("run_*.sh"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_the_plan_of_its_trainer(name: str, home: Path, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    data, command, wanted = SCRIPTS[name]
    words, said = recorded(TRAINERS / f"run_{name}.sh", tmp_path, "hf", "--seed", "7", **places(home, data))
    assert said.startswith("rollout engine: hf, ") if name == "ppo" else not said
    module, *flags = words[words.index("8") + 2:]
    assert words[:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8", "-m"]
    assert module == f"lightrft.cli.{command}"
    with pytest.raises(SystemExit) as ended:
        import_module(module).main([*flags, "--dry_run", "--plan_gpus", "8xH100"])
    shown = capsys.readouterr().out
    assert not ended.value.code, shown[-600:]
    options = dict(re.findall(r"^  (\w+) +(\S.*?) +\[flag\]$", shown, re.MULTILINE))
    wanted = wanted | {"eval_data": str(home / data), "seed": "7", "strategy": "fsdp", "train_batch_size": "128"}
    assert {option: options.get(option) for option in wanted} == {
        option: value.replace("{home}", str(home)) for option, value in wanted.items()}  # yapf: disable


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_a_file_is_not_evaluated_on_unless_it_is_named(name: str, home: Path, tmp_path: Path) -> None:
    train, test = (str(home / SCRIPTS[name][0] / f"{split}.jsonl") for split in SPLITS)
    for environment, wanted in (({}, "none"), ({"EVAL_DATA": test}, test)):
        words, _ = recorded(TRAINERS / f"run_{name}.sh", tmp_path, "hf", **places(home, train), **environment)
        last = len(words) - words[::-1].index("--eval_data")
        assert words[last] == wanted
