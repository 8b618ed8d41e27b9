"""A tiny task for runs that are killed, broken and continued: model, prompts, a dense reward, options."""
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lightrft.tests.support import tiny

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Share of lower-case letters, and a little for every digit of the reference."""
    letters = sum(letter.islower() for letter in solution_str) / max(len(solution_str), 1)
    return letters + 0.1 * (str(ground_truth) in solution_str)
'''
OPTIONS: dict[str, Any] = {
    "rollout_batch_size": 8, "n_samples_per_prompt": 4, "train_batch_size": 16, "prompt_max_len": 64,
    "generate_max_len": 12, "max_steps": 8, "save_steps": 2, "max_ckpt_num": 2, "best_metric": "reward/mean",
    "actor_learning_rate": 3e-3, "eval_steps": 4, "eval_at_start": True,
    "save_trajectories": True, "use_tensorboard": True, "engine_kv_mib": 4
}  # yapf: disable

# no self-test, because the plugin counts its calls
BAD_LOSS = {"plugin": "lightrft.tests.support.fault_plugin", "policy_loss": "faulty", "no_self_test": True}


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Distinct prompts with references."""
    return [{"prompt": f"What is {i}+{i}?", "reference": str(2 * i), "data_source": "sums"}
            for i in range(start, start + count)]  # yapf: disable


def write_rows(path: Path, content: list[dict[str, Any]]) -> Path:
    """A jsonl file; returns it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return path


def write_home(folder: Path) -> Path:
    """``model/``, ``train.jsonl``, ``test.jsonl`` and ``reward.py`` in ``folder``; returns it."""
    tiny.save_model(folder / "model", initializer_range=0.1)
    write_rows(folder / "train.jsonl", rows(20))
    write_rows(folder / "test.jsonl", rows(6, start=50))
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return folder


def write_geo3k(folder: Path, seen: list[dict[str, Any]]) -> None:
    """Raw problems with figures, as the hub has Geometry3K, from rows of ``examples/quickstart_vl``."""
    folder.mkdir(parents=True)
    raw = [{"images": [{"bytes": row["images"][0]["bytes"], "path": None}], "problem": "<image>Find $x$.",
            "answer": "7"} for row in seen]  # yapf: disable
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(raw), folder / f"{split}-00000-of-00001.parquet")


def write_avqa(file: Path, sounds: Path, heard: list[dict[str, Any]]) -> None:
    """Raw questions of AVQA, the last one without its sound, from rows of ``examples/quickstart_audio``."""
    sounds.mkdir(parents=True)
    raw = [{"question_text": "What beeps?", "multi_choice": ["A dog", "a high tone"], "answer": 1,
            "audio_path": f"{i}.wav"} for i in range(len(heard) + 1)]  # yapf: disable
    for i, row in enumerate(heard):
        (sounds / f"{i}.wav").write_bytes(row["audios"][0]["bytes"])
    write_rows(file, raw)
