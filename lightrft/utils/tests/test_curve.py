"""The picture of a run."""
import json
import subprocess
import sys

import pytest
from matplotlib.text import Text
from PIL import Image

from lightrft.utils.curve import _smooth, ACCURACY, draw, panels, plot_curve, read_metrics, series


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
            mean = min(step / 45, 1)
            yield {"step": step, "eval/all/pass@1": mean, "eval/all/reward@1": mean, "eval/all/pass@1/low": mean * 0.9,
                   "eval/all/pass@1/high": mean + (1 - mean) / 2}  # yapf: disable


def test_panels_follow_the_metrics(tmp_path):
    lines = read_metrics(write(tmp_path / "metrics.jsonl", rows()))
    found = dict(panels(lines))
    assert list(found) == [
        "reward", "held-out accuracy", "parts of the reward", "response length (tokens)", "KL (nats per token)",
        "entropy (nats)"
    ]
    assert found["reward"] == {"reward/mean": "sampled"} and found[ACCURACY] == {"eval/all/pass@1": "pass@1"}
    assert set(found["parts of the reward"].values()) == {"math", "format"}
    assert series(lines, "eval/all/pass@1")[0] == [10, 20, 30, 40]
    assert 3 not in series(lines, "policy/kl_ref")[0], "null is no number"


def test_a_reward_of_0_throughout_is_drawn_and_a_kl_of_0_is_not():
    lines = [{"step": step, "reward/mean": 0.0, "reward/a/mean": 0.0, "reward/b/mean": 0.0, "policy/kl_old": 0.0}
             for step in (1, 2)]  # yapf: disable
    assert [title for title, _ in panels(lines)] == ["reward", "parts of the reward"]


def test_the_legend_has_the_last_held_out_number():
    lines = [{"step": 5, "eval/all/pass@1": 0.5}, {"step": 10, "eval/all/pass@1": 1.0}]
    legend = draw(lines, panels(lines)).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["pass@1, last 1.000"]


def test_the_picture_is_a_png_and_needs_no_display(tmp_path):
    path = plot_curve(write(tmp_path / "metrics.jsonl", rows()), tmp_path / "learning_curve.png")
    assert path == tmp_path / "learning_curve.png", path
    with Image.open(path) as picture:
        assert picture.format == "PNG" and picture.width > 1200 and len(set(picture.convert("L").tobytes())) > 50
    assert sorted(file.name for file in tmp_path.iterdir()) == ["learning_curve.png", "metrics.jsonl"]


SUITES = ("aime24", "gpqa", "gsm8k", "math500", "openai/gsm8k")


def runs():
    """A long run with five suites, one of a single step, one of a million steps, one that ended in an evaluation."""
    suites = {f"eval/{name}/pass@{k}{part}": 1.0 for name in SUITES for k in (1, 16) for part in ("", "/low", "/high")}
    one = {"step": 1, "reward/mean": -3.0, "policy/entropy": 1e-9, "rollout/response_len/mean": 16384.0}
    sft = [{"step": 10**6 + i, "sft/loss": 1 / (i + 1), "eval/loss": 123456.0} for i in range(3)]
    bad = {"step": 1, "reward/mean": 0.0, "reward/a/mean": None, "reward/b/mean": None, "policy/kl_ref": -1.0}
    return {"suites": [*rows(), {"step": 40} | suites], "one": [one], "sft": sft, "bad": [bad],
            "start": [{"step": 0, "eval/all/pass@1": 0.0}]}  # yapf: disable


@pytest.mark.parametrize("name", runs())
def test_labels_do_not_overlap_and_axes_contain_the_data(name):
    lines = runs()[name]
    figure = draw(lines, panels(lines))
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    for axes in figure.axes:  # ticks outside of the axis are not drawn
        drawn = {
            label for axis in (axes.xaxis, axes.yaxis) for tick in axis._update_ticks() for label in (tick.label1, )
        }
        ticks = {text for tick in (*axes.xaxis.get_major_ticks(), *axes.yaxis.get_major_ticks())
                 for text in (tick.label1, tick.label2)}  # yapf: disable
        texts = [text for text in texts if text not in ticks or text in drawn]
        for line in axes.lines:
            for values, (low, high) in zip(line.get_data(), (axes.get_xlim(), axes.get_ylim())):
                assert all(low <= value <= high for value in values), axes.get_title()
        assert axes.get_ylim()[0] <= 0 <= axes.get_ylim()[1], axes.get_title()
        if axes.get_title() == ACCURACY:
            assert axes.get_ylim()[0] == pytest.approx(0, abs=0.05) and axes.get_ylim()[1] == pytest.approx(1, abs=0.05)
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    page = figure.bbox
    for i, (text, box) in enumerate(boxes):
        assert box.x0 >= page.x0 and box.x1 <= page.x1 and box.y0 >= page.y0 and box.y1 <= page.y1, f"{text} is cut off"
        for other, there in boxes[:i]:
            assert not box.overlaps(there), f"{text!r} is over {other!r}"


def test_every_suite_is_a_line():
    lines = runs()["suites"]
    shown = dict(panels(lines))[ACCURACY]
    assert len(shown) == 2 * len(SUITES) and shown["eval/openai/gsm8k/pass@16"] == "openai/gsm8k pass@16"


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


def test_a_single_step_is_no_turn():
    values = [1.0] * 59 + [2.0]
    assert _smooth(values)[-1] < 1.4, "the line ends at the last step, whatever its noise"
    assert _smooth([5.0, *values])[0] == 5.0, "the start of a run is no noise"


def test_matplotlib_is_loaded_only_to_draw():
    code = ("import sys, lightrft.utils.curve, lightrft.utils.sinks\n"
            "assert not {'matplotlib', 'torch'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
