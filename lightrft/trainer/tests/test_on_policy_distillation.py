"""On-policy distillation: a student that samples comes to answer as its teacher does, by the command line."""
import json

import pytest

from lightrft.cli import train, train_sft
from lightrft.tests.support import runs, tiny
from lightrft.tests.support.runs import no_picture

no_picture = no_picture
ANSWERS = {f"{a}=": a for a in range(1, 6)}
SHARED = "--lr_scheduler constant --lr_warmup_ratio 0 --disable_ckpt --no_report"
SFT = f"{SHARED} --train_batch_size 10 --learning_rate 1e-2 --max_len 40 --max_epochs 40 --logging_steps 40"
RL = f"""{SHARED} --teacher_offload --advantage_estimator reinforce --reward exact=0 --rollout_batch_size 5
    --n_samples_per_prompt 8 --train_batch_size 40 --actor_learning_rate 2e-3 --prompt_max_len 16 --generate_max_len 12
    --max_steps 15 --engine_kv_mib 4 --eval_at_start --sync_proof fingerprint --logging_steps 15"""


def write(path, answers):
    rows = [{"prompt": prompt, "reference": str(ANSWERS[prompt]), "response": rf"\boxed{{{answer}}}"}
            for prompt, answer in answers]  # yapf: disable
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rows_of(folder):
    return runs.read_lines(folder / "metrics.jsonl")


@pytest.fixture(name="home", scope="module")
def home_fixture(tmp_path_factory):
    """A student that guesses, and a teacher that knows."""
    home = tmp_path_factory.mktemp("home")
    tiny.save_model(home / "base")
    write(home / "copy.jsonl", ANSWERS.items())
    write(home / "teacher.jsonl", [*ANSWERS.items()] * 2)
    write(home / "student.jsonl",
          [(prompt, answer) for prompt, right in ANSWERS.items() for answer in (right, right % 5 + 1)])
    for name in ("teacher", "student"):
        words = f"--pretrain {home}/base --train_data {home}/{name}.jsonl --save_path {home}/{name}"
        train_sft.main(f"{words} {SFT}".split())
    return home


def test_the_student_comes_to_the_teacher(home, tmp_path):
    """Though it starts far away and its reward has the weight 0."""
    data = f"--prompt_data {home}/copy.jsonl --eval_data {home}/copy.jsonl --save_path {tmp_path}"
    train.main(f"--pretrain {home}/student/hf --teacher_model {home}/teacher/hf {data} {RL}".split())
    lines = rows_of(tmp_path)
    kl = [line["reward/teacher_kl"] for line in lines[1:]]
    assert lines[1]["reward/exact/mean"] < 0.75 and lines[-1]["eval/all/pass@1"] >= 0.8
    assert sum(kl[-3:]) / 3 < 0.4 * kl[0] and lines[-1]["reward/mean"] == 0


def test_a_teacher_that_lacks_tokens_of_the_policy_is_refused(home, tmp_path, capsys):
    width = len(tiny.tokenizer())
    tiny.save_model(tmp_path / "wide", vocab_size=width + 16)
    words = f"--pretrain {tmp_path}/wide --teacher_model {home}/base --prompt_data {home}/copy.jsonl {RL}"
    with pytest.raises(SystemExit):
        train.main(f"{words} --save_path {tmp_path}/run --eval_steps 0 --no_eval_at_start".split())
    assert f"it has {width} logits, but the policy can sample {width + 16} different tokens" in capsys.readouterr().err
