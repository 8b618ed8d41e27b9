"""The README: its length, its first screen, its plans for GPUs, and the versions that it compares."""
import json
import re
import shlex
from pathlib import Path

import pytest

from lightrft.cli.main import COMMANDS
from lightrft.preflight import engine_rules
from lightrft.tests.test_gpu_start import QWEN, SHAPES, plan

ROOT = Path(__file__).parents[2]
if not (ROOT / "README.md").exists():
    pytest.skip("installed without its repository", allow_module_level=True)
README = (ROOT / "README.md").read_text(encoding="utf-8")
LARGER = {
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
             "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
    "3B": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
           "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True},
    "14B": {"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
            "intermediate_size": 13824, "vocab_size": 152064, "tie_word_embeddings": False},
    "32B": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
            "intermediate_size": 27648, "vocab_size": 152064, "tie_word_embeddings": False},
    "72B": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "intermediate_size": 29568, "vocab_size": 152064, "tie_word_embeddings": False},
}  # yapf: disable
SIZES = LARGER | {name.split("-")[1]: shape for name, shape in SHAPES.items()}
ROWS = re.findall(r"^\| ([\d.]+B) \| `(\S+)` \| `(.+?)` \| ([\d.]+) \| (.+) \|$", README, re.MULTILINE)


def test_it_is_short():
    text = re.sub(r"<!--.*?-->|^ *\|.*$", "", README, flags=re.MULTILINE)
    assert len(text.split()) <= 1200, "words outside of tables"


def test_the_number_of_algorithms_is_that_of_the_table():
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = [row for row in re.findall(r"^\| \[`(\w\S*?)`\]", page, re.MULTILINE) if row != "none"]  # no correction
    assert f"[{len(rows)} algorithms](docs/algorithms.md)" in README


def test_the_first_screen():
    """A sentence, the picture and the two commands."""
    sentence, picture, commands = README.split("\n\n")[1:4]
    assert sentence.count(".") == 1 and picture.startswith("![") and commands.startswith("```bash\nmake quickstart ")
    assert len(commands.splitlines()) == 4 and "\nlightrft train --nproc 8 " in commands


def test_the_claims_say_that_no_gpu_has_run_them():
    """The day a GPU has run, this page and that one change together."""
    never = "**Nothing has been run yet**" in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert ("No number on this page was measured on a GPU" in README) is never


@pytest.mark.parametrize("size, gpus, options, gib, phase", ROWS, ids=lambda value: value[:12])
def test_a_row_of_the_hardware_guide_is_the_plan(size: str, gpus: str, options: str, gib: str, phase: str,
                                                 tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rules, "find_spec", lambda name: name)  # vLLM need not be installed here
    (tmp_path / "config.json").write_text(json.dumps(QWEN | SIZES[size]), encoding="utf-8")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1?", "reference": "2", "data_source": "openai/gsm8k"}\n')
    files = ["--pretrain", str(tmp_path), "--prompt_data", str(tmp_path / "data.jsonl")]
    words = [*files, "--bf16", "--engine_type", "vllm", "--plan_gpus", gpus, *shlex.split(options)]
    code, together, text = plan(words, capsys)
    largest = max(together, key=lambda name: together[name])
    assert (code, f"{together[largest]:.1f}", largest) == (0, gib, phase) and "less than 10%" not in text


def test_the_hardware_guide_covers_one_gpu_to_several_nodes() -> None:
    assert {gpus for _, gpus, *_ in ROWS} >= {"1x24", "1x80", "8x80", "2x8x80"}
    assert {size for size, *_ in ROWS} == SIZES.keys()


def test_a_figure_of_a_claim_is_on_the_page_that_it_links_to() -> None:
    part = README.split("## What is unusual here")[1].split("\n## ")[0]
    claims = [line for line in part.splitlines() if "](docs/" in line]
    for claim in claims:
        linked = "".join((ROOT / name).read_text(encoding="utf-8") for name in re.findall(r"\]\((docs/\w+\.md)", claim))
        shown = re.sub(r"\[.*?\]\(.*?\)|\w+ \d+\.\d+\.\d+", "", claim)
        for figure in re.findall(r"(?<![\w.-])\d+\.\d+(?![\w-])|\b\d+(?= %)", shown):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", linked), (figure, claim)
    assert len(claims) > 8


def test_every_trainer_and_command_is_a_link_away() -> None:
    """Of each command README names the page that has it in a code block, or in its text."""
    for name in COMMANDS:
        pages = [(ROOT / page).read_text(encoding="utf-8") for page in re.findall(r"\]\((docs/\w+\.md)", README)]
        assert re.search(rf"lightrft {name}\b|`{name}`", README), f"README does not name {name}"
        assert any(re.search(rf"lightrft(\.cli\.(train_)?| ){name}\b", page) for page in pages), name


def test_the_comparison_is_dated_and_of_the_versions_that_are_tested() -> None:
    part = README.split("## Compared with other trainers")[1].split("\n## ")[0]
    assert re.search(r"\bRead on \d+ [A-Z]\w+ 20\d\d\b", part)
    pins = dict(re.findall(r"^(\w+)==(\S+)", (ROOT / "requirements-oracles.txt").read_text(), re.MULTILINE))
    assert f"TRL {pins['trl']} " in part and f"verl {pins['verl']} " in part
    rows = [line.split("|")[1:-1] for line in part.splitlines() if line.startswith("| ")]
    assert len(rows) > 10 and all(len(row) == 7 and all(cell.strip() for cell in row[1:]) for row in rows)
