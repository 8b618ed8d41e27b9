"""``benchmarks/quickstart_seeds.py``: its runs are valid, it resumes, and the docs show what it stored."""
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("installed without its repository", allow_module_level=True)
sys.path[:0] = [str(ROOT / "benchmarks")]

import quickstart_seeds as seeds  # noqa: E402
from matrix_report import by_run  # noqa: E402

from lightrft.config.cli import parse_config  # noqa: E402

STORED = json.loads(seeds.OUTPUTS.data.read_text(encoding="utf-8"))
MEDIA = ("quickstart_vl", "quickstart_audio")


def test_the_docs_show_the_stored_curves():
    page = seeds.OUTPUTS.page.read_text(encoding="utf-8")
    shown = page.split(seeds.START)[1].split(seeds.END)[0]
    assert shown == seeds.section(STORED), "run: python benchmarks/quickstart_seeds.py --docs"
    assert seeds.OUTPUTS.picture.exists() and seeds.PLAIN.exists()


def test_three_seeds_of_each_run_reach_their_aim():
    """As they are, frozen, with LoRA and with vLLM: careless models before, 0.95 after; by default in less than four
    minutes of CPU time, as the README promises."""
    found = by_run(STORED)
    assert found.keys() == {seeds.Run(example, way, 0).name for example in MEDIA for way in seeds.WAYS}
    for run, results in found.items():
        assert len({result["seed"] for result in results}) == len(results) == 3, run
        assert all(0.3 <= result["start"] < 0.6 and result["end"] >= seeds.AIM for result in results), run
        assert all(result["held_out"][0] == [0, result["start"]] for result in results), run
        assert all(result["held_out"][-1][1] == result["end"] for result in results), run
        assert run not in MEDIA or all(result["cpu_seconds"] < 240 for result in results), run


@pytest.mark.parametrize("example, way", [(example, way) for example in seeds.TOWERS for way in seeds.WAYS
                                          if (example, way) not in seeds.REFUSED])  # yapf: disable
def test_the_flags_of_a_run_are_accepted(example, way):
    parse_config(["--pretrain", "M", "--prompt_data", "D", "--reward", "exact", *seeds.Run(example, way, 1).flags()])


def test_a_finished_run_is_kept(tmp_path):
    run = seeds.Run("quickstart_vl", "own=--l2 0.1", 3)
    folder = run.folder(tmp_path)
    folder.mkdir()
    rows = [{"step": 0, seeds.METRIC: 0.5}, {"step": 1}, {"step": 2, seeds.METRIC: 0.97},
            {"step": 4, seeds.METRIC: 0.94}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = seeds.summary(run, folder, 40.4, 80.6)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    assert seeds.kept(run, tmp_path) == result and result["run"] == "quickstart_vl own" and result["reached"] == 2
    assert seeds.kept(run._replace(way="own=--l2 0.2"), tmp_path) is None
    other = result | {"seed": 4, "end": 0.98, "reached": None}
    assert seeds.table([result, other]).splitlines()[2] == ("| `quickstart_vl own` | 3, 4 | 0.500 (0.500-0.500) | "
                                                            "0.960 (0.940-0.980) | 2, none | 40, 40 |")
