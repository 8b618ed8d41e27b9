"""The comparisons with TRL's trainer (``make peers`` and vl_peer.py), where TRL is installed: a step of each."""
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightrft
from lightrft.tests.support.warm import warm_environ, warm_python

ROOT = Path(lightrft.__file__).parents[1]
SCRIPT, PACKAGES = ROOT / "benchmarks" / "peers.py", Path(sys.prefix) / "oracles"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="installed without its repository")


def run(script: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([warm_python(), script, *map(str, words)], capture_output=True, text=True, timeout=280,
                          env=os.environ | warm_environ(nested=True))  # yapf: disable


def test_it_says_so_where_trl_is_not_installed(tmp_path: Path) -> None:
    done = run(SCRIPT, "--packages", tmp_path)
    assert done.returncode == 1 and "run make peers" in done.stderr, done.stderr


def recorded(name: str) -> tuple[dict[str, Any], str]:
    """What a benchmark has stored, and the page that shows it."""
    return json.loads((ROOT / "docs" / "data" / name).read_text()), (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_page_shows_the_recorded_judges_of_pictures() -> None:
    """And both kinds reach their aim on every seed, on three colours."""
    found, page = recorded("picture_judges.json")
    for kind, reaches in {"rm": True, "grm": True, "grm, answer only": False}.items():
        runs = [each["accuracy"] for each in found["runs"] if each["kind"] == kind]
        assert len(runs) == found["colours"] == 3 and (min(runs) >= 0.95) is reaches, kind
        assert f"| {', '.join(f'{one:.3f}' for one in runs)} |" in page, kind


def test_the_page_shows_the_recorded_seconds_of_two_commits() -> None:
    found, page = recorded("before_after.json")
    for case, sides in found["runs"].items():
        old, new = ([1e6 * run["cpu_s"] / run["tokens"] for run in sides[name]] for name in ("before", "after"))
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        shown = f"{statistics.median(old):.1f} | {statistics.median(new):.1f} | {statistics.median(ratios):.2f}"
        span = f"({min(ratios):.2f} to {max(ratios):.2f})"
        assert f"| {case} | {len(ratios)} | {shown} {span} |" in page, case
    assert found["runs"] and found["old"] in page


def test_the_page_shows_the_recorded_steps_on_fixed_data() -> None:
    """Twice as many tokens per CPU second as TRL's trainers as they are, in half the memory; the faster settings of its
    SFT are shown."""
    found, page = recorded("offline.json")
    names = {"sft": "SFT", "dpo": "DPO", "rm": "reward model"}
    assert {f"{name}, threads 1" for name in names} == found["runs"].keys()
    speeds, shares = [], []
    for run, sides in found["runs"].items():
        for side, results in sides.items():
            ratios = [one["tokens_per_cpu_s"] / peer["tokens_per_cpu_s"] for one, peer in zip(results, sides["trl"])]
            cpu, tokens, peak = (statistics.median(one[key] for one in results)
                                 for key in ("cpu_s", "tokens", "peak_mib"))  # yapf: disable
            shown = f"| {names[run.split(',')[0]]} | {side.replace('trl', 'TRL')} |"
            rate = statistics.median(one["tokens_per_cpu_s"] for one in results)
            row = f"{shown} {cpu:.2f} | {tokens:.0f} | {peak:.0f} | {rate:.0f} | {statistics.median(ratios):.2f}x"
            assert row in page and len(results) == 3, (run, side)
            if side == "lightrft":
                speeds.append(statistics.median(ratios))
                shares.append(peak / statistics.median(one["peak_mib"] for one in sides["trl"]))
    assert min(speeds) >= 2 and max(shares) <= 0.5
    claims = (f"{min(speeds):.2f} to {max(speeds):.2f} times the tokens per CPU second",
              f"in {100 * min(shares):.0f} % to {100 * max(shares):.0f} % of the memory")
    assert ", ".join(claims) in (ROOT / "README.md").read_text()


def test_the_page_shows_the_recorded_steps_of_grpo() -> None:
    """README has the ratios of the three machines alone. With pictures, and every sample trained, three times as many
    tokens per CPU second as TRL."""
    medians = {ratio for cpu in ("", "_amd", "_zen5") for ratio in shown_steps(f"peers{cpu}.json")}
    found, _ = recorded("vl_peer.json")
    assert min(ratios_of(found["runs"]["pictures, threads 1"], "lightrft")) >= 3 and {*shown_steps("vl_peer.json")}
    (claim, ) = re.findall(r"^\| Side by side with TRL .*?\| (.*)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"\b\d+\.\d\d\b", claim)) == medians - {"1.00"}


def shown_rows(name: str, least: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The record of benchmarks/NAME.py, of which the page has all rows, at least ``least``."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module(name)
    found, page = recorded(f"{name}.json")
    rows = [benchmark.row(title, runs) for title, runs in found.items()]
    assert len(rows) >= least and all(row in page for row in (*benchmark.HEADER.splitlines(), *rows)), rows
    return found


def test_the_page_shows_the_recorded_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    shown_rows("turns", 3, monkeypatch)


def test_the_page_shows_what_the_timing_of_tools_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of the HF engine in float32; of other engines and dtypes, what the record has counted."""
    found = shown_rows("tool_timing", 2, monkeypatch)
    assert not any(one["tokens"] for one in found["hf, float32, 32 responses"])


def test_the_page_shows_the_recorded_steps_with_tools() -> None:
    """TRL calls the tools of a batch one after another, so that its steps take their sum; here they take one call."""
    found, page = recorded("tool_peers.json")
    for run, sides in found["runs"].items():
        for side, results in sides.items():
            cpu, wall, tokens = (statistics.median(one[key] for one in results)
                                 for key in ("cpu_s", "wall_s", "tokens"))
            rate = statistics.median(ratios_of(sides, side))
            waits = statistics.median(peer["wall_s"] / one["wall_s"] for one, peer in zip(results, sides["trl"]))
            row = f"{run.split(',')[0]} | {side.replace('trl', 'TRL')} | {cpu:.2f} | {wall:.2f} | {tokens:.0f}"
            assert f"| {row} | {rate:.2f}x | {waits:.2f}x |" in page, row
    late = found["runs"]["0.5 s, threads 1"]
    assert all(peer["wall_s"] > 3 * one["wall_s"] for one, peer in zip(late["lightrft"], late["trl"]))


def ratios_of(sides: dict[str, list[dict[str, float]]], side: str) -> list[float]:
    return [one["tokens_per_cpu_s"] / peer["tokens_per_cpu_s"] for one, peer in zip(sides[side], sides["trl"])]


def shown_steps(name: str) -> Iterator[str]:
    """The median ratios of a record, each of whose rows is on the page."""
    found, page = recorded(name)
    names = {"trl": "TRL", "lightrft": "lightrft, every sample trained", "lightrft, default": "lightrft"}
    for run, side in ((run, side) for run in found["runs"] for side in names):
        case, results, ratios = run.split(",")[0], found["runs"][run][side], ratios_of(found["runs"][run], side)
        cpu, *counts = (statistics.median(one[key] for one in results)
                        for key in ("cpu_s", "tokens", "trained", "tokens_per_cpu_s"))  # yapf: disable
        shown = f"| {case} | {names[side]} | {cpu:.2f} | {' | '.join(f'{one:.0f}' for one in counts)} |"
        assert f"{shown} {statistics.median(ratios):.2f}x" in page, (run, side)
        assert len(ratios) == 3 or case == "ragged", "the number of pairs that the page names"
        yield f"{statistics.median(ratios):.2f}"


def test_the_page_shows_the_recorded_tower_passes() -> None:
    """At least four times less of the tower, one decode per picture, and no pixel between ranks."""
    found, page = recorded("vl_prefix.json")
    columns = {"tower": "{:.2f}", "whole": "{:.2f}", "peak": "{:.0f}"}
    for way in ("once", "each"):
        shown = [form.format(statistics.median(one[name] for one in found[way])) for name, form in columns.items()]
        assert f"| {way} | {' | '.join(shown)} |" in page, way
    ratios = [each["tower"] / once["tower"] for once, each in zip(found["once"], found["each"])]
    assert f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" in page and min(ratios) >= 4
    assert {(one["decoded"], one["processed"], one["found"]) for one in found["once"]} == {(2, 2, 0)}
    assert {one["decoded"] for one in found["each"]} == {16}


def test_families_shows_the_recorded_passes_of_layers_with_state(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The benchmark prints the table of the page; the gradients with and without shared prompts are equal."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    hybrid = importlib.import_module("hybrid")
    for name in ("peers", "bare_loop"):  # they add to the path, which ends with this test
        sys.modules.pop(name)
    found, page = recorded("hybrid.json")[0], (ROOT / "docs" / "families.md").read_text()
    header, *rows = hybrid.table(found).splitlines()
    assert all(row in page for row in rows) and header.replace("way", "prompts") in page
    file, small = tmp_path / "all.json", "--rounds 1 --prompts 1 --prompt 40 --response 8"
    hybrid.main([*small.split(), "--out", str(file)])
    fresh = json.loads(file.read_text())
    assert hybrid.table(fresh) in capsys.readouterr().out
    assert [fresh[way][0]["row"] for way in hybrid.WAYS] == [40 + 8 * 8, 8 * 48]
    assert max(found["gradient_gap"], fresh["gradient_gap"]) < 1e-6


def test_readme_shows_the_recorded_seeds_of_the_quickstart() -> None:
    found, readme = recorded("quickstart_seeds.json")[0], (ROOT / "README.md").read_text()
    assert len(found["runs"]) == 3 and min(each["end"] for each in found["runs"]) >= 0.95
    for run in found["runs"]:
        row = f"| {run['seed']} | {run['start']:.3f} | {run['end']:.3f} | {run['reached']} | {run['seconds']} s |"
        assert row in readme, row


@pytest.mark.slow
@pytest.mark.skipif(not (PACKAGES / "trl").is_dir(), reason="TRL is missing: make oracles")
@pytest.mark.parametrize("script, example, longest", [("peers", "quickstart", 8), ("vl_peer", "quickstart_vl", 8),
                                                      ("tool_peers", "agents", 48)])  # yapf: disable
def test_both_trainers_make_the_same_steps(script: str, example: str, longest: int, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    if script == "vl_peer":
        pytest.importorskip("torchvision", reason="needs torchvision: make test installs it")
    monkeypatch.setenv("AGENT", "calculator")
    made = run(ROOT / "examples" / example / "prepare.py", "--out", tmp_path, "--train_rows", 20, "--sft_rows", 20)
    assert made.returncode == 0, made.stderr
    (tmp_path / "sft").mkdir()
    (tmp_path / "base").rename(tmp_path / "sft" / "hf")  # untrained
    done = run(SCRIPT.with_stem(script), "--home", tmp_path, "--cases", "tiny", "--pairs", 1, "--threads", 1, "--out",
               tmp_path / "out")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert found["trl"] == "1.16.0" and found["torch"] and found["cpu"]
    sides = found["runs"]["tiny, threads 1"]
    assert [*sides] == ["trl", "lightrft"] + ["lightrft, default"] * (script != "tool_peers")
    for side, (result, ) in sides.items():
        assert result["steps"] == 1 and result["samples"] == 16 and result["cpu_s"] > 0, (side, result)
        assert 16 <= result["tokens"] <= 16 * longest and f"| tiny | 1 | {side} |" in done.stdout, (side, result)
    trained = {side: result["trained"] for side, (result, ) in sides.items()}
    assert trained["trl"] == trained["lightrft"] == 16
    assert trained.get("lightrft, default", 0) < 16  # an untrained model's answers are all wrong


@pytest.mark.slow
@pytest.mark.skipif(not (PACKAGES / "trl").is_dir(), reason="TRL is missing: make oracles")
def test_a_reward_model_has_the_losses_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of benchmarks/offline.py on the same ragged rows: tokens and losses of all steps are equal."""
    for folder in (PACKAGES, SCRIPT.parent):
        monkeypatch.syspath_prepend(folder)
    offline = importlib.import_module("offline")
    offline.prepare(tmp_path, [])
    case, data = offline.TINY["rm tiny"], str(tmp_path / "data" / "train.parquet")
    trl, own = (offline.SIDES[side](case, str(tmp_path / "ragged"), data, str(tmp_path / side)) for side in case.sides)
    assert len(own.losses) == 3 and own.losses == pytest.approx(trl.losses, rel=1e-3)
    assert max(abs(loss - own.losses[0]) for loss in own.losses) > 5e-3, own.losses
    assert own.result()["tokens"] == trl.result()["tokens"] > 0 and own.result()["peak_mib"] > 0
