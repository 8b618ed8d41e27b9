"""The page docs/gpu.md: tables of the stored records; what has no record is named as not run."""
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from benchmarks.gpu import catalog
from benchmarks.gpu.catalog import Measurement
from benchmarks.gpu.store import Record, Row

TITLE = """# Measured on a GPU

All measurements together are planned to take 30 minutes on one GPU, after the packages are installed. `make gpu`
measures everything except SGLang and writes this page. It first installs vLLM, DeepSpeed, Liger's kernels, TRL and
pytest into `.venv-gpu`. SGLang needs another torch, so its rows are measured by a second call, `make gpu
ENGINE=sglang`, which installs it into
`.venv-gpu-sglang` and takes four of the 30 minutes. With a second GPU a call takes 40 minutes and measures FSDP2 and
tensor parallelism too. A call starts only measurements that fit into its time and names the others, which the next call
runs.
`make gpu PYTHON=python3` uses an existing Python and installs nothing. `make gpu MINUTES=9` ends within nine minutes,
and the next call continues; `OUT=FOLDER` writes results and page to another folder. Each measurement is a separate
process: one that fails is listed below with its error, and the others still run. `make gpu-reduced` runs the same code
on a CPU with tiny shapes (with `ENGINE=sglang` that of SGLang), and so do the tests. The raw results are in
`docs/data/gpu`, one file per measurement.

The models have the shapes of Qwen2.5 0.5B and 7B and of Qwen2.5-VL 3B, with random weights whose logits have a standard
deviation of 4. Every engine runs the 0.5B model, and vLLM the 7B model too. The 7B and the VL model train LoRA adapters
(rank 16) with gradient checkpointing, the 0.5B model all weights. Each prompt of the VL model has one picture of 256
tokens.
"""
INTROS = {
    catalog.DOCTOR: "Findings of `python -m lightrft.cli.doctor`.",
    catalog.TESTS: "`pytest -m gpu`: attention, log-probs, step-1 facts and sleeping engines against references.",
    catalog.FACTS: """Differences before the first update, which must be explained by rounding: between two
passes of the trainer, and between engine and trainer. The names are those of [the metrics](metrics.md).""",
    catalog.ANATOMY: "Means of the steps after the first, in milliseconds. MFU is that of the update alone.",
    catalog.SLEEP: "GiB in use on the whole device.",
    catalog.SYNC: "All weights from the trainer to the engine, with verification, against a copy of as many bytes.",
    catalog.ROLLOUT: """Tokens per second of the engine through the library, and of the same vLLM engine called on its
own. Both use vLLM's prefix cache and begin with an empty one, as after the weight sync of a step. The time from asleep
to the first token includes the weight sync.""",
    catalog.UPDATE: """One optimizer step on one packed micro-batch per rank, with and without Liger's kernels. MFU
counts 6 FLOPs per parameter and token (LoRA: 4, because frozen weights have no gradient), without recomputed
activations; the second one adds the attention scores.""",
    catalog.ATTENTION: """Forward and backward in bfloat16 over packed sequences; FLOPs of the causal half. The backward
pass counts 2.5 times the forward pass, as in FlashAttention, because it computes the scores again.""",
    catalog.LOGPROBS: """`chunked_logprobs` against `log_softmax` over the whole [N, V]: forward and backward of
log-probs and entropy, in bfloat16. MiB above the inputs.""",
    catalog.QUICKSTART: "`examples/quickstart/run_quickstart.sh` in one process.",
    catalog.TRL: """The same model, prompts, reward and batch, in turn on one GPU. Both generate with Hugging Face
models. Times are compared per generated token.""",
}  # yapf: disable


def render(measurements: Sequence[Measurement], records: dict[str, Record]) -> str:
    """Render the page: machines, one section per table, and the errors."""
    parts = [TITLE, *_machines(records.values())]
    for title, intro in INTROS.items():
        own = [one for one in measurements if title in one.tables]
        parts += [f"## {title}\n", f"{intro}\n", *_section(title, own, records)]
    return "\n".join([*parts, *_errors(records.values())]).rstrip("\n") + "\n"


def _machines(records: Iterable[Record]) -> list[str]:
    """Describe every machine, with the measurements that ran there."""
    ran = sorted((record for record in records if record.done), key=lambda record: sorted(record.machine.items()))
    if not ran:
        return ["**Nothing has been run yet**: no GPU was available so far.\n"]
    lines = []
    for facts, group in groupby(ran, key=lambda record: record.machine):
        names = ", ".join(sorted(f"`{record.name}`" for record in group))
        lines.append(f"- {facts['device']}; " + ", ".join(f"{k} {v}" for k, v in facts.items() if k != "device")
                     + f": {names}")  # yapf: disable
    return ["Machines:\n", *lines, ""]


def _section(title: str, own: list[Measurement], records: dict[str, Record]) -> list[str]:
    """Render the rows of a table, then the measurements without one."""
    rows: list[Row] = []
    for one in own:
        found = records[one.name].tables.get(title, []) if one.name in records else []
        rows += [{"measurement": f"`{one.name}`"} | row for row in found]
    absent = [f"- `{one.name}`: {_absence(one, records)}" for one in own if not _ok(one, records)]
    return [*(table(rows) if rows else []), *absent, *([""] if absent else [])]


def _ok(one: Measurement, records: dict[str, Record]) -> bool:
    return one.name in records and records[one.name].status == "ok"


def _absence(one: Measurement, records: dict[str, Record]) -> str:
    if one.name not in records:
        return "not run yet"
    record = records[one.name]
    return f"skipped, {record.error}" if record.status == "skipped" else "failed, see the end of the page"


def table(rows: list[Row]) -> list[str]:
    """Render Markdown; the columns are those of all rows, in the order of their appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return [*lines, *(f"| {' | '.join(_cell(row.get(column)) for column in columns)} |" for row in rows), ""]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _errors(records: Iterable[Record]) -> list[str]:
    failed = [record for record in records if record.status == "failed"]
    blocks = [f"`{record.name}`, after {record.seconds:.0f} s:\n\n```text\n{record.error}\n```\n" for record in failed]
    return ["## Errors\n", *blocks] if failed else []
