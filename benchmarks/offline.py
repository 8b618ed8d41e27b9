"""Compare SFT, DPO and reward models with TRL's trainers: CPU seconds per step, tokens per CPU second, peak memory.

    make oracles && python benchmarks/offline.py [--pairs 3] [--threads 1] [--cases sft dpo rm] [--out offline.json]

Both trainers run in turn, as in ``peers.py``, on the same model of 3M random parameters, the same rows in the same
order and the same optimizer; their losses are equal. Lengths are ragged: prompts have 8 to 64 tokens, answers 8 to 512,
log-uniformly. A step has 32 conversations, or 16 pairs. Tokens are those of the rows, prompts counted once for each
answer, without padding. ``--quick`` has two short steps.

TRL computes in float32 as here, without gradient checkpointing, 8 conversations or 4 pairs in a pass. ``trl, padding
free`` is its SFT with one sequence of all rows of a pass, ``trl, packed`` with rows packed to 1024 tokens, of which a
step has about as many tokens; its DPO and its reward models have neither. This trainer has passes of at most 1024
tokens, about those of TRL's 8 conversations without their padding, with the prompt of a pair once.
"""
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from peers import main, make_ragged, Meter, TRL, WARM_UP

PROMPT, ANSWER = (8, 64), (8, 512)  # tokens
OURS: dict[str, Any] = dict(
    lr_scheduler="constant", lr_warmup_ratio=0.0, max_norm=1.0, adam_betas=[0.9, 0.95], max_len=1024, shuffle=False,
    max_tokens_per_micro_batch=1024, disable_ckpt=True, strategy="single", logging_steps=1000)  # yapf: disable
PACKED = {"packing": True, "max_length": 1024}
PAIR_SIDES = ("trl", "lightrft")


@dataclass(frozen=True)
class Case:
    """One trainer: its rows per step, its optimizer, and the settings of TRL.

    Attributes:
        sides: names of what is compared.
        trl: options of TRL's trainer.
        packed: those of ``trl, packed`` in place of them.
        model: folder of the model within that of the comparison.
    """
    kind: str
    rows: int
    steps: int
    trl: dict[str, Any]
    sides: tuple[str, ...] = PAIR_SIDES
    packed: dict[str, Any] = field(default_factory=dict)
    rate: float = 1e-4
    model: str = "ragged"

    @property
    def total(self) -> int:
        """Rows of a run."""
        return self.rows * (self.steps + WARM_UP)


def batch(rows: int, passes: int) -> dict[str, int]:
    """Return TRL's options for a step of ``rows`` in ``passes``."""
    return {"per_device_train_batch_size": rows // passes, "gradient_accumulation_steps": passes}


SFT_SIDES = ("trl", "trl, padding free", "trl, packed", "lightrft")
CASES = {
    "sft": Case("sft", 32, 4, batch(32, 4), SFT_SIDES,
                batch(6, 6) | PACKED),
    "dpo": Case("dpo", 16, 2, batch(16, 4)),
    "rm": Case("rm", 16, 2, batch(16, 4)),
}
TINY = {f"{name} tiny": Case(name, 4, 2, batch(4, 2), ("trl", "lightrft"), rate=1e-2) for name in CASES}  # --quick


def write_rows(folder: Path, count: int) -> None:
    """Write conversations that are pairs too: digits, of which each is a token."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    draw = random.Random(0)

    def digits(least: int, most: int) -> str:
        length = round(least * (most / least)**draw.random())
        return "".join(draw.choices("0123456789", k=length))

    rows = [{"prompt": digits(*PROMPT), "chosen": digits(*ANSWER), "rejected": digits(*ANSWER)} for _ in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")


def read_rows(case: Case, data: str) -> list[dict[str, str]]:
    """Read the rows of a run, in their order."""
    import pyarrow.parquet as pq
    rows = pq.read_table(data).to_pylist()[:case.total]
    if case.kind == "sft":
        return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    return rows


def run_lightrft(case: Case, model: str, data: str, folder: str) -> Meter:
    """Run this trainer."""
    import lightrft.trainer.offline.dpo_trainer
    import lightrft.trainer.offline.rm_trainer  # noqa: F401  before the meter, as of all that is imported
    from lightrft import api
    from lightrft.trainer.base_trainer import BaseTrainer
    meter, end_step = Meter(), BaseTrainer._end_step

    def counted(self: BaseTrainer, metrics: dict[str, float]) -> None:
        end_step(self, metrics)
        meter.add(int(metrics[f"{case.kind}/tokens"]), case.rows, case.rows, metrics[f"{case.kind}/loss"])
        meter.step()

    BaseTrainer._end_step = counted  # type: ignore[method-assign]
    given = OURS | {"train_batch_size": case.rows, "learning_rate": case.rate, "save_path": folder,
                    "max_steps": case.steps + WARM_UP}  # yapf: disable
    try:
        vars(api)[case.kind.upper()](model, read_rows(case, data), **given).train()
    finally:
        BaseTrainer._end_step = end_step  # type: ignore[method-assign]
    return meter


def run_trl(case: Case, model: str, data: str, folder: str, **options: Any) -> Meter:
    """Run TRL's trainer."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    trainer, config = trl_classes(case.kind)
    meter = Meter()

    class Steps(TrainerCallback):
        seen = 0

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            if "loss" in logs:
                meter.add(int(logs["num_tokens"]) - self.seen, case.rows, case.rows, logs["loss"])
                self.seen = int(logs["num_tokens"])
                meter.step()

    names = vars(config)["__dataclass_fields__"]
    shared = {name: value for name, value in TRL.items()
              if name in names and name not in ("beta", "loss_type")}  # GRPO's
    given = shared | case.trl | options
    given |= {"output_dir": folder, "max_steps": case.steps + WARM_UP, "learning_rate": case.rate,
              "train_sampling_strategy": "sequential"}  # yapf: disable
    trainer(trl_model(case.kind, model), args=config(**({"max_length": 1024} | given)), callbacks=[Steps()],
            train_dataset=Dataset.from_list(read_rows(case, data)),
            processing_class=AutoTokenizer.from_pretrained(model)).train()  # yapf: disable
    return meter


def trl_classes(kind: str) -> tuple[Any, Any]:
    """Return TRL's trainer and its options."""
    import trl
    name = {"sft": "SFT", "dpo": "DPO", "rm": "Reward"}[kind]
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")


def trl_model(kind: str, folder: str) -> Any:
    """Load the model as TRL takes it; the head of a reward model is one of zeros, as here."""
    import transformers
    name = "SequenceClassification" if kind == "rm" else "CausalLM"
    load: Callable[..., Any] = getattr(transformers, f"AutoModelFor{name}").from_pretrained
    model = load(folder, dtype="float32", attn_implementation="sdpa", **({"num_labels": 1} if kind == "rm" else {}))
    if kind == "rm":
        model.score.weight.data.zero_()
    return model


def run_packed(case: Case, model: str, data: str, folder: str) -> Meter:
    """Run TRL's SFT on packed rows."""
    return run_trl(case, model, data, folder, **case.packed)


SIDES = {"trl": run_trl, "trl, padding free": partial(run_trl, padding_free=True, max_length=None),
         "trl, packed": run_packed, "lightrft": run_lightrft}  # yapf: disable


def prepare(home: Path, cases: list[str]) -> None:
    """Make the model and the rows in ``home``, if it has none yet."""
    if not (home / "ragged").is_dir():
        make_ragged(home / "ragged", 1024)
        write_rows(home / "data", max(case.total for case in CASES.values()))


if __name__ == "__main__":
    quick = "--quick" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--quick"]
    main(__doc__, CASES | TINY, prepare, list(TINY if quick else CASES), SIDES)
