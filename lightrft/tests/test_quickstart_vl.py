"""The quickstarts that see and hear: their pictures, sounds and models, and short runs of their scripts."""
import io
import random
import re
import wave
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoProcessor

from lightrft.tests.support.launch import run_script
from lightrft.tests.test_example_data import load
from lightrft.tests.test_examples import CANONICAL, launch, lines, options_of

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="installed without its repository")
SIZES = ("--train_rows", 40, "--test_rows", 20, "--sft_rows", 40)
VISION, AUDIO = EXAMPLES / "quickstart_vl", EXAMPLES / "quickstart_audio"


def rows(folder, name):
    return pq.read_table(folder / "data" / f"{name}.parquet").to_pylist()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    pytest.importorskip("torchvision", reason="needs torchvision: make test installs it")
    folder = tmp_path_factory.mktemp("pictures")
    run_script(VISION / "prepare.py", "--out", folder, *SIZES)
    return folder


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sounds")
    run_script(AUDIO / "prepare.py", "--out", folder, *SIZES)
    return folder


@pytest.fixture
def counting(monkeypatch):
    return load("counting", VISION, monkeypatch)


@pytest.fixture
def reward(monkeypatch):
    return load("reward", VISION, monkeypatch)


def test_the_example_of_the_task(counting):
    layout = ("c.s", ".ca", "..s")
    assert counting.solution(layout, random.Random(0)) == "<think>1+2+0</think>\\boxed{3}"
    assert counting.solution(layout, random.Random(0), 1.0) == "<think>2+2+1</think>\\boxed{5}"


def test_careful_demonstrations_are_right_and_careless_ones_often_wrong(counting, reward):
    rng = random.Random(0)
    layouts = counting.distinct_layouts(2000, rng, held_out=True)
    assert all(counting.is_held_out(layout) for layout in layouts)
    shares = [sum(reward.exact_answer(counting.solution(layout, rng, careless), str(sum(counting.counts(layout))))
                  for layout in layouts) / 2000 for careless in (0.0, counting.CARELESS)]  # yapf: disable
    assert shares[0] == 1.0 and 0.4 < shares[1] < 0.6
    assert all(reward.row_accuracy(counting.solution(one, rng), counting.counts(one)) == 1.0 for one in layouts)


@pytest.mark.parametrize("said, score, right", [
    ("<think>2+0+1</think>\\boxed{3}", 1.0, 1.0),
    ("<think>2+1+0</think>\\boxed{3}", 1.0, 1 / 3),
    ("<think>2+0+2</think>\\boxed{4}", 0.0, 2 / 3),
    ("\\boxed{3}", 1.0, 0.0),
    ("3", 0.0, 0.0),
])  # yapf: disable
def test_reward_file(reward, said, score, right):
    assert reward.accuracy("any", said, "3", {"rows": [2, 0, 1]}) == {"score": score, "rows": right}


def test_rows_of_pictures(pictures):
    """They are those of ``layout`` in ``extra_info``: circles and squares can be told by the corner of their cell."""
    train, test, sft = (rows(pictures, name) for name in ("train", "test", "sft"))
    assert [len(train), len(test), len(sft)] == [40, 20, 40]
    assert not {row["extra_info"]["layout"] for row in train} & {row["extra_info"]["layout"] for row in test}
    for row in train:
        picture = np.asarray(Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("L"))
        cells = [(picture[y + 8, x + 8] < 250, picture[y + 3, x + 3] < 250) for y in (0, 16, 32) for x in (0, 16, 32)]
        assert ["." if not full else "s" if corner else "c" for full, corner in cells
                ] == ["c" if cell in "abc" else cell for cell in row["extra_info"]["layout"].replace("|", "")]
        assert row["reward_model"]["ground_truth"] == str(sum(full and not corner for full, corner in cells))
        assert row["messages"] == [{"role": "user", "content": "<image>What is the number of circles?"}]
    assert all([turn["role"] for turn in row["messages"]] == ["user", "assistant"] for row in sft)


def test_rows_of_sounds(sounds):
    """A beep is high if its spectrum is highest above 1 kHz."""
    for row in rows(sounds, "test"):
        with wave.open(io.BytesIO(row["audios"][0]["bytes"])) as file:
            assert file.getframerate() == 16000
            sound = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(float)
        slots = [slot for slot in sound.reshape(9, -1) if np.abs(slot).max() > 100]
        high = sum(np.abs(np.fft.rfft(slot)).argmax() * 16000 / len(slot) > 1000 for slot in slots)
        assert row["reward_model"]["ground_truth"] == str(high)
        assert len(slots) == 9 - row["extra_info"]["layout"].count(".")


def asked(processor, kind, medium, question):
    chat = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": question}]}]
    text = processor.apply_chat_template(chat, tokenize=False)
    return processor(text=[text], return_tensors="pt", **medium)


def check_pictures(folder, row):
    """``folder`` is what a hub download would be, and answers to a picture."""
    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    picture = Image.open(io.BytesIO(row["images"][0]["bytes"]))
    inputs = asked(processor, "image", {"images": [picture]}, "What is the number of circles?")
    tokens = processor.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    assert tokens.count("<|image_pad|>") == 9 and processor.tokenizer.unk_token not in tokens
    assert sum(p.numel() for p in model.parameters()) == 309_504
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] > len(tokens)


def check_sounds(folder, row):
    """``folder`` is what a hub download would be, and answers to a sound."""
    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForMultimodalLM.from_pretrained(folder)
    with wave.open(io.BytesIO(row["audios"][0]["bytes"])) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    inputs = asked(processor, "audio", {"audio": [sound], "sampling_rate": 16000}, "What is the number of high beeps?")
    tokens = processor.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    assert tokens.count("<|AUDIO|>") == 25 and processor.tokenizer.unk_token not in tokens
    assert sum(p.numel() for p in model.parameters()) == 216_320
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.text_config.tie_word_embeddings == tied, "vLLM ties what the config says"
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] > len(tokens)


def test_the_model_of_pictures_answers(pictures):
    check_pictures(pictures / "base", rows(pictures, "test")[0])


def test_the_model_of_sounds_answers(sounds):
    check_sounds(sounds / "base", rows(sounds, "test")[0])


# -- the scripts, end to end on two ranks -----------------------------------------------------------------------------
def quickstart(folder, name, sizes, words):
    """Data and model, warm-up and GRPO of one script; returns what it printed."""
    return launch("bash", EXAMPLES / name / f"run_{name}.sh", *words.split(), "--save_steps", -1, "--print_samples", 2,
                  cwd=folder, timeout=550, OUT=str(folder), WARM_CURVES="1", **sizes)


@pytest.fixture(scope="module")
def saw(tmp_path_factory):
    """Three supervised steps, two of GRPO."""
    pytest.importorskip("torchvision", reason="needs torchvision: make test installs it")
    folder = tmp_path_factory.mktemp("saw")
    quickstart(folder, "quickstart_vl", {"PREPARE_ARGS": " ".join(map(str, SIZES)), "SFT_ARGS": "--max_steps 3"},
               "--seed 3 --max_steps 2 --eval_steps 2 --rollout_batch_size 4 --n_samples_per_prompt 4 "
               "--train_batch_size 16 --no_drop_zero_advantage")  # all of its groups are flat
    return folder


@pytest.mark.slow
@pytest.mark.dist
def test_the_run_with_pictures(saw):
    metrics = lines(saw / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert all(set(CANONICAL) <= set(row) and "reward/accuracy/rows/mean" in row for row in metrics[1:])
    assert all("eval/all/pass@1" in row for row in (metrics[0], metrics[2]))
    assert metrics[1]["policy/first_ratio_gap"] == 0 and metrics[1]["rollout/mismatch/abs_dp_max"] < 1e-4
    assert lines(saw / "sft" / "metrics.jsonl")[-1]["step"] == 3
    assert options_of(saw)["seed"] == options_of(saw / "sft")["seed"] == 3


@pytest.mark.slow
@pytest.mark.dist
def test_the_run_with_pictures_leaves_what_it_promises(saw):
    expected = [*(f"data/{name}.parquet" for name in ("train", "test", "sft")), "learning_curve.png", "config.yaml",
                "report.html", "rollouts/step_2.jsonl", "checkpoints/step_000002/COMPLETE.json"]  # yapf: disable
    assert [name for name in expected if not (saw / name).is_file()] == []
    check_pictures(saw / "hf", rows(saw, "test")[0])
    check_pictures(saw / "sft" / "hf", rows(saw, "test")[0])


@pytest.mark.slow
@pytest.mark.dist
def test_the_model_of_pictures_is_asked_as_the_docs_say(saw, capsys):
    page = (EXAMPLES.parent / "docs" / "quickstart.md").read_text(encoding="utf-8")
    code, = re.findall(r"```python\n((?:(?!```).)*quickstart_vl/hf.*?)```", page, re.DOTALL)
    exec(code.replace("runs/quickstart_vl", str(saw)), {})
    right = rows(saw, "test")[0]["reward_model"]["ground_truth"]
    assert re.fullmatch(rf".*\nright: {right}\n", capsys.readouterr().out, re.DOTALL)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, check", [("quickstart_vl", check_pictures), ("quickstart_audio", check_sounds)])
def test_a_whole_quickstart_learns(name, check, tmp_path):
    """As users run it, with all defaults: held-out accuracy before and after is what is promised."""
    if name == "quickstart_vl":
        pytest.importorskip("torchvision", reason="needs torchvision: make test installs it")
    printed = quickstart(tmp_path, name, {}, "")
    metrics = lines(tmp_path / "metrics.jsonl")
    held_out = [row["eval/all/pass@1"] for row in metrics if "eval/all/pass@1" in row]
    assert 0.3 < held_out[0] < 0.6 and held_out[-1] >= 0.95, held_out
    assert len(metrics) > 10 and "reward/accuracy/rows/mean" in metrics[1] and options_of(tmp_path)["seed"] == 42
    assert metrics[1]["policy/first_ratio_gap"] == 0 and metrics[1]["rollout/mismatch/abs_dp_max"] < 1e-4
    check(tmp_path / "hf", rows(tmp_path, "test")[0])
    assert "sampling_rate" not in printed, "a warning for each sound"
