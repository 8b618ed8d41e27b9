"""Rollout files and solutions on the console."""
import json

import pytest
import torch

from lightrft.utils.trajectory_saver import format_samples, save_rollout

ROW = {
    "prompt": "2+2?", "response": "é 4", "reward": 1.0, "parts": {"math": 1.0, "style":
                                                                  None}, "advantage": float("nan"), "reference": "4",
    "finish_reason": "stop", "response_length": 3, "logprobs": torch.tensor([-0.5, -0.25])
}


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_one_line_per_sample_with_plain_values(tmp_path):
    path = save_rollout(tmp_path / "rollouts", 4, [ROW, ROW])
    assert path.name == "step_4.jsonl" and "é" in path.read_text(encoding="utf-8")
    assert read(path) == [{"step": 4, **ROW, "advantage": None, "logprobs": [-0.5, -0.25]}] * 2


def test_a_file_is_replaced_only_when_complete(tmp_path):
    path = save_rollout(tmp_path, 1, [ROW])

    def rows():
        yield ROW
        raise RuntimeError("engine died")

    with pytest.raises(RuntimeError):
        save_rollout(tmp_path, 1, rows())
    assert len(read(path)) == 1, "the complete file is gone"


def test_samples_are_readable_and_cut_in_the_middle():
    text = format_samples([ROW, ROW | {"response": "a" * 50 + "b" * 50, "reward": None}], width=20)
    assert text.count("prompt:") == 2 and "reward 1  " in text and "reference 4" in text
    assert "a" * 10 + " [... 80 characters ...] " + "b" * 10 in text and "reward None" not in text
