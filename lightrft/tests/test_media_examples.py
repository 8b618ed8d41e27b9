"""``examples/gsm8k_geo3k`` with figures, ``r1_aqa`` and ``grm_vl_rl``: preprocessing, rewards and launch scripts."""
import runpy
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lightrft.config.prompt_schema import MediaConfig
from lightrft.datasets.media import MediaRules
from lightrft.datasets.media_rows import find_row_media
from lightrft.tests.support import tiny
from lightrft.tests.support.launch import free_port, run_script
from lightrft.tests.support.tiny_task import write_avqa, write_geo3k, write_rows
from lightrft.tests.test_examples import launch, lines, options_of

EXAMPLES = Path(__file__).parents[2] / "examples"
GEO3K, AQA, GRM = EXAMPLES / "gsm8k_geo3k", EXAMPLES / "r1_aqa", EXAMPLES / "grm_vl_rl"
SIZES = {"TBS": "4", "RBS": "2", "N_SAMPLES": "2", "MICRO_TRAIN": "2", "PROMPT_MAX_LEN": "900",
         "GENERATE_MAX_LEN": "8", "EVAL_STEPS": "1", "SAVE_STEPS": "-1", "NPROC": "1", "ENGINE": "hf"}  # yapf: disable
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="installed without its repository")


def rows(path):
    return pq.read_table(path).to_pylist()


@pytest.fixture(scope="module")
def geo3k(tmp_path_factory):
    """Raw problems with figures, as the hub has them, converted; and the untrained model of the quickstart."""
    pytest.importorskip("torchvision", reason="needs torchvision: make test installs it")
    folder = tmp_path_factory.mktemp("geo3k")
    run_script(EXAMPLES / "quickstart_vl" / "prepare.py", "--out", folder, "--train_rows", 6, "--test_rows", 6,
               "--sft_rows", 2)
    write_geo3k(folder / "raw", rows(folder / "data" / "train.parquet"))
    run_script(EXAMPLES / "data_preprocess" / "geo3k_lightrft.py", "--local_dataset_path", folder / "raw",
               "--local_save_dir", folder / "geo3k")
    return folder


def test_geo3k_preprocess_script(geo3k):
    row = rows(geo3k / "geo3k" / "test.parquet")[0]
    assert row["data_source"] == "hiyouga/geometry3k" and row["images"][0]["bytes"].startswith(b"\x89PNG")
    assert row["prompt"][1]["content"] == "<image>Find $x$." and row["extra_info"]["label"] == "geo3k_rule"


@pytest.fixture(scope="module")
def avqa(tmp_path_factory):
    """Raw questions, one without its sound, converted; and the untrained model of the quickstart."""
    folder = tmp_path_factory.mktemp("avqa")
    run_script(EXAMPLES / "quickstart_audio" / "prepare.py", "--out", folder, "--train_rows", 6, "--test_rows", 1,
               "--sft_rows", 2)
    sounds = folder / "sounds"
    write_avqa(folder / "raw.jsonl", sounds, rows(folder / "data" / "train.parquet"))
    run_script(AQA / "data_preprocess" / "avqa.py", "--input_jsonl", folder / "raw.jsonl", "--audio_dir", sounds,
               "--local_save_dir", folder / "avqa", "--val_ratio", 0.3, "--enable_think")
    return folder


def test_avqa_preprocess_script(avqa):
    """The rows are those of the trainer: one sound, which the column repeats, and the question."""
    train, test = (rows(avqa / "avqa" / f"{split}.parquet") for split in ("train", "test"))
    assert (len(train), len(test)) == (4, 2) and {row["reference"] for row in train} == {"a high tone"}
    rules = MediaRules(root=avqa / "sounds")
    messages, media = find_row_media(train[0], MediaConfig(), train[0]["prompt"], rules, "row 1")
    assert [part["type"] for part in messages[0]["content"]] == ["audio", "text"] and len(media) == 1
    assert "A dog; a high tone" in messages[0]["content"][1]["text"]
    assert train[0]["extra_info"]["think"] is True and train[0]["label"] == "avqa_rule"


def trained(script, folder, data, *words, **environment):
    """One step of a launch script on one rank; returns its metrics and options."""
    launch("bash", script, "--max_steps", 1, "--max_eval_samples", 2, *words, cwd=folder, MODEL=str(folder / "base"),
           DATA=str(folder / data), SAVE=str(folder / script.stem), MASTER_PORT=free_port(), **SIZES, **environment)
    assert (folder / script.stem / "hf" / "processor_config.json").is_file()
    return lines(folder / script.stem / "metrics.jsonl")[-1], options_of(folder / script.stem)


@pytest.mark.slow
@pytest.mark.dist
def test_geo3k_grpo_script(geo3k):
    row, options = trained(GEO3K / "run_grpo_geo3k_qwen2.5_vl_7b.sh", geo3k, "geo3k")
    assert row["rollout/samples"] == 4 and "eval/hiyouga/geometry3k/reward@1" in row and "policy/kl_ref" in row
    assert options["limit_mm_image_per_prompt"] == 10 and options["advantage_estimator"] == "group_norm"


@pytest.mark.slow
@pytest.mark.dist
def test_geo3k_ppo_script(geo3k):
    row, options = trained(GEO3K / "run_ppo_geo3k_qwen2.5_vl_7b.sh", geo3k, "geo3k")
    assert row["critic/loss"] >= 0 and options["critic_learning_rate"] == 9e-6 and options["advantages_norm"]


@pytest.mark.slow
@pytest.mark.dist
def test_avqa_script(avqa):
    row, options = trained(AQA / "run_grpo_r1_aqa_qwen2_audio_7b.sh", avqa, "avqa", AUDIO=str(avqa / "sounds"))
    assert {"reward/answer/mean", "reward/tags/mean"} <= row.keys() and options["media_root"] == str(avqa / "sounds")


def test_the_scripts_default_to_the_runs_that_their_users_know():
    wanted = {
        GEO3K / "run_grpo_geo3k_qwen2.5_vl_7b.sh": "N_SAMPLES=8 MICRO_ROLLOUT=8 EPISODES=20 KL_ESTIMATOR=k3",
        GEO3K / "run_ppo_geo3k_qwen2.5_vl_7b.sh": "N_SAMPLES=2 EPISODES=30 KL_ESTIMATOR=k1 CRITIC_LR=9e-6",
        AQA / "run_grpo_r1_aqa_qwen2_audio_7b.sh": "TBS=16 RBS=4 N_SAMPLES=4 EPISODES=10 GPUS_PER_NODE=1"
    }
    for script, words in wanted.items():
        text = script.read_text(encoding="utf-8")
        for word in words.split():
            name, value = word.split("=")
            assert f"\n{name}=${{{name}:-{value}}}\n" in text, (script.name, word)


def test_rewards_of_a_judge():
    reward = runpy.run_path(str(GRM / "reward.py"))
    right = "<think>It adds.</think>\n<answer>Response 1 is better</answer>"
    assert reward["accuracy"]("judge/first", right, "Response 1 is better") == {"score": 1.0, "first": 1.0}
    assert reward["accuracy"]("judge/second", right, "Response 2 is better") == {"score": 0.0, "second": 0.0}
    assert reward["accuracy"]("judge/tie", "Response 1 is better", "Response 1 is better") == {"score": 0.0, "tie": 0.0}
    assert reward["form"]("", right, "") == 1.0 and reward["form"]("", right.replace("It adds.", " "), "") == 0.0


@pytest.mark.slow
@pytest.mark.dist
def test_judge_script(tmp_path):
    """Pairs in both orders, and metrics that tell them apart."""
    tiny.save_model(tmp_path / "base", initializer_range=0.1, max_position_embeddings=2048)
    pairs = [{"prompt": f"{i}+1?", "chosen": str(i + 1), "rejected": str(i), "tie": i == 3} for i in range(24)]
    write_rows(tmp_path / "pairs.jsonl", pairs)
    run_script(GRM / "data_preprocess" / "pairs.py", "--pairs", tmp_path / "pairs.jsonl", "--local_save_dir",
               tmp_path / "data", "--test_rows", 8)
    train, test = (rows(tmp_path / "data" / f"{split}.parquet") for split in ("train", "test"))
    assert (len(train), len(test)) == (16, 8) and train[3]["reward_model"]["ground_truth"] == "Both are equally good"
    for i, row in enumerate(train):
        first, second = (i + 1, i) if row["data_source"] == "judge/first" else (i, i + 1)
        assert i == 3 or f"Response 1: {first}\n\nResponse 2: {second}\n" in row["prompt"][0]["content"]
    sizes = SIZES | {"TBS": "8", "RBS": "16", "N_SAMPLES": "1", "MICRO_TRAIN": "8"}
    launch("bash", GRM / "run_grm_vl_rl.sh", "--max_steps", 1, "--advantage_estimator", "reinforce", cwd=tmp_path,
           MODEL=str(tmp_path / "base"), DATA=str(tmp_path / "data"), SAVE=str(tmp_path / "run"),
           MASTER_PORT=free_port(), **sizes)
    row, options = lines(tmp_path / "run" / "metrics.jsonl")[-1], options_of(tmp_path / "run")
    assert {"reward/accuracy/first/mean", "reward/accuracy/second/mean", "reward/form/mean"} <= row.keys(), row
    assert {"eval/judge/first/pass@1", "eval/judge/second/pass@1"} <= row.keys()
    assert options["loss_agg_mode"] == "seq-mean-token-sum" and options["max_pixels"] == 282240
