"""The picture of a run."""
import json
import subprocess
import sys

from PIL import Image

from lightrft.utils.curve import _smooth, panels, plot_curve, read_metrics, series


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows():
    for step in range(1, 41):
        yield {
            "step": step, "reward/mean": step / 40, "reward/math/mean": step / 50, "reward/format/mean": 0.5,
            "reward/unscored": 0, "policy/entropy": 1 / step, "policy/kl_ref": None if step == 3 else 0.01 * step,
            "rollout/response_len/mean": 30 + step
        }
        if step % 10 == 0:
            yield {"step": step, "eval/all/pass@1": step / 45, "eval/all/avg@1": step / 45}


def test_panels_follow_the_metrics(tmp_path):
    lines = read_metrics(write(tmp_path / "metrics.jsonl", rows()))
    found = dict(panels(lines))
    assert list(found) == [
        "reward", "parts of the reward", "response length (tokens)", "KL (nats per token)", "entropy (nats)"
    ]
    assert found["reward"] == {"reward/mean": "sampled reward", "eval/all/pass@1": "held-out pass@1"}
    assert set(found["parts of the reward"].values()) == {"math", "format"}
    assert series(lines, "eval/all/pass@1")[0] == [10, 20, 30, 40]
    assert 3 not in series(lines, "policy/kl_ref")[0], "null is no number"


def test_the_picture_is_a_png_and_needs_no_display(tmp_path):
    path = plot_curve(write(tmp_path / "metrics.jsonl", rows()), tmp_path / "learning_curve.png", "GRPO")
    assert path == tmp_path / "learning_curve.png", path
    with Image.open(path) as picture:
        assert picture.format == "PNG" and picture.width > 1200 and len(set(picture.convert("L").tobytes())) > 50
    assert sorted(file.name for file in tmp_path.iterdir()) == ["learning_curve.png", "metrics.jsonl"]


def test_nothing_to_draw_and_a_half_written_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "policy/lr": 0.1}\n{"step": 2, "pol')
    assert len(read_metrics(path)) == 1 and plot_curve(path, tmp_path / "c.png") is None
    path.write_text("")
    assert plot_curve(path, tmp_path / "c.png") is None


def test_smoothing_keeps_lines_straight():
    line = [0.5 * i for i in range(60)]
    assert max(abs(a - b) for a, b in zip(_smooth(line), line)) < 1e-9
    assert _smooth([1.0]) == [1.0]


def test_matplotlib_is_loaded_only_to_draw():
    code = ("import sys, lightrft.utils.curve, lightrft.utils.sinks\n"
            "assert not {'matplotlib', 'torch'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
