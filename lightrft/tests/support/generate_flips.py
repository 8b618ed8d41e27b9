"""For every option of batch inference and evaluation: a run that shows what flipping it changes. See test_generate and
test_evaluate."""
from lightrft.tests.support.option_flips import Flip

DRAWN = {"best_of_n": 2}
SCORED = {"score": ["@home/reward.py"], **DRAWN}
CSFT = {**SCORED, "post_processor": "csft"}
GIVEN = {"eval_task": "rm", "prompt_data": ["@given"], "pretrain": None, "score": ["exact"]}


def rows(run):
    """All rows of the output."""
    return run.rows


def columns(*names):
    """Columns of the rows of the output."""
    return lambda run: [[row.get(name) for name in names] for row in run.rows]


GENERATE_FLIPS: dict[str, Flip] = {
    "temperature":
    Flip(0.5, columns("output")),
    "repetition_penalty":
    Flip(4.0, columns("output")),
    "best_of_n":
    Flip(2, rows),
    "output_key":
    Flip("other", columns("output"), GIVEN),
    "max_len":
    Flip(20, columns("unscored"), {**GIVEN, "score": ["@home/rm"]}),
    "value_head_prefix":
    Flip("v_head", columns("reward"), {**GIVEN, "score": ["@home/heads"], "value_head_prefix": "value_head"}),
    "iter":
    Flip(1, columns("prompt_id"), {"iter": 0, "rollout_batch_size": 2}),
    "rollout_batch_size":
    Flip(3, columns("prompt_id"), {"iter": 0}),
    "enable_csft":
    Flip(True, columns("input")),
    "csft_prompt":
    Flip("<rm_score>: 1.00", columns("input"), {"enable_csft": True}),
    "score":
    Flip(["@home/reward.py"], columns("reward")),
    "post_processor":
    Flip("rs", rows, SCORED),
    "normalize_reward":
    Flip(True, columns("reward"), SCORED),
    "reward_template":
    Flip("{reward}: {input}", columns("input"), CSFT),
    "min_reward_gap":
    Flip(0.2, rows, {**SCORED, "post_processor": "iter_dpo"}),
    "keep_truncated":
    Flip(True, rows, {**SCORED, "post_processor": "rs"}),
    "output_path":
    Flip("@save/other.jsonl", lambda run: run.out.name),
    "eval_task":
    Flip("rm", columns("tokens"), {"prompt_data": ["@given"], "score": ["exact"]}),
    "seed":
    Flip(1, columns("output")),
}


def metrics(run):
    """Names of the numbers."""
    return [row["metric"] for row in run.results]


SAMPLED = {"n_samples": 2, "temperature": 1.0}
EVALUATE_FLIPS: dict[str, Flip] = {
    "pretrain": Flip(["@home/model", "@home/other"], lambda run: len(run.results)),
    "temperature": Flip(1.0, lambda run: run.outputs),
    "repetition_penalty": Flip(4.0, lambda run: run.outputs),
    "n_samples": Flip(2, metrics, {"temperature": 1.0, "accuracy_part": "compute_score"}),
    "score": Flip(["exact"], lambda run: [row["value"] for row in run.results], SAMPLED),
    "pass_k": Flip([1, 2], metrics, SAMPLED | {"accuracy_part": "compute_score"}),
    "maj_k": Flip([2], metrics, SAMPLED | {"accuracy_part": "compute_score"}),
    "accuracy_part": Flip("compute_score", metrics, SAMPLED),
    "output_path": Flip("@save/other", lambda run: run.folder.name),
    "enable_csft": Flip(True, lambda run: run.inputs),
    "csft_prompt": Flip("<rm_score>: 1.00", lambda run: run.inputs, {"enable_csft": True}),
    "seed": Flip(1, lambda run: run.outputs, SAMPLED),
}
