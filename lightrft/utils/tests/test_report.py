"""The page of a run: what is in it, and what bounds it. lightrft/tests/test_report_page.py opens it in a browser."""
import json
import re
import time

import pytest

from lightrft.cli import main as command
from lightrft.utils import report
from lightrft.utils.report import Report, write_report
from lightrft.utils.trajectory_saver import json_line

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 \u0000 é 😀"


def write_run(folder, steps=3, records=1, text=HOSTILE):
    folder.mkdir(exist_ok=True)
    rows = [{"step": step, "reward/mean": 0.1 * step, "time/rollout_s": 1.0, "time/step_s": 2.0, "policy/lr": None}
            for step in range(1, steps + 1)]  # yapf: disable
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = {"index": 0, "reward": None, "parts": {}, "error": text, "tokens": 1, "text": [text], "logprobs": [-1.0]}
    groups = [{"uid": "0:0", "prompt": text, "reference": text, "samples": [sample]}]
    lines = [json_line({"step": step, "kind": "training", "groups": groups}) for step in range(records)]
    (folder / "samples.jsonl").write_text("".join(lines) + '{"step": 9, "ki', encoding="utf-8")
    return folder


def data_of(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def test_no_text_of_a_sample_ends_the_script(tmp_path):
    page = write_report(write_run(tmp_path / "run"))
    text = page.read_text(encoding="utf-8")
    assert text.count("<script") == 2 and text.count("</script>") == 2 and "<!--" not in text
    group = data_of(page)["records"][0]["groups"][0]
    assert group["prompt"] == HOSTILE, "nothing is lost"
    assert sorted(path.name for path in page.parent.iterdir()) == ["metrics.jsonl", "report.html", "samples.jsonl"]


def test_the_page_names_no_other_file(tmp_path):
    """The browser is told so as well: its policy allows no request."""
    text = report.TEMPLATE.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"], "a namespace, which is not loaded"
    assert not re.search(r"<link|<img|@import|url\(|\bsrc=|fetch\(|import\(", text)


def test_long_runs_are_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "SAMPLE_BYTES", 4000)
    data = data_of(write_report(write_run(tmp_path / "run", steps=2001, records=33, text="x" * 50)))
    kept = [record["step"] for record in data["records"]]
    assert kept == list(range(0, 33, 4)), "the newest stays, the others are spread evenly"
    assert data["mean_of"] == 3 and len(data["x"]) == 667 and data["x"][:2] == [3, 6] and data["x"][-1] == 2001
    assert data["y"]["reward/mean"][0] == 0.2 and data["y"]["policy/lr"][0] is None and data["steps"] == 2001
    assert data["time"] == "33 min 21 s (rollout 100%)"


def test_a_page_under_way_is_written_at_a_bounded_rate(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    run = Report(write_run(tmp_path / "run"))
    run.refresh()
    page = tmp_path / "run" / "report.html"
    page.unlink()
    now[0] += report.INTERVAL_S - 1
    run.refresh()
    assert not page.exists(), "too early"
    now[0] += 1
    write, cost = report.write_report, 5.0

    def slow(folder):
        write(folder)
        now[0] += cost

    monkeypatch.setattr(report, "write_report", slow)
    run.refresh()
    assert page.exists()
    page.unlink()
    now[0] += 99 * cost
    run.refresh()
    assert not page.exists(), "a page that takes 5 s is written every 500 s"
    now[0] += cost
    run.refresh()
    assert page.exists()


def test_without_metrics_there_is_no_page(tmp_path):
    assert write_report(tmp_path) is None and not list(tmp_path.iterdir())


def test_the_command_writes_it_again(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    command.main(["report", str(folder)])
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n" and data_of(folder / "report.html")["steps"] == 3
    with pytest.raises(SystemExit) as done:
        command.main(["report", str(tmp_path)])
    assert done.value.code == 2 and "no metrics.jsonl" in capsys.readouterr().err


def test_a_full_disk_costs_the_page_and_not_the_run(tmp_path, monkeypatch, capsys):

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "replace", full)
    Report(write_run(tmp_path / "run")).refresh()
    assert "report.html: [Errno 28] No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("*.part")), "it leaves the room to others"
