"""The page docs/gpu.md: tables of the stored records; what has no record is named as not run."""
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from benchmarks.gpu import catalog
from benchmarks.gpu.catalog import Measurement
from benchmarks.gpu.store import Record, Row, STATUS

MOST, MOST_ERRORS = 11_800, 4_000  # characters of the summary, and of the errors in it
ERROR_LINES, ERROR_WIDTH = 12, 300  # of one error in the summary
TITLE = """# Measured on a GPU

`make gpu` measures on the GPU of this machine and writes this page. It first installs vLLM, DeepSpeed, Liger's kernels,
TRL and pytest into `.venv-gpu`. All measurements together are planned to take 32 minutes on one GPU, and 42 with a
second one, which measures FSDP2 and tensor parallelism too. SGLang needs another torch, so its rows are measured by a
second call, `make gpu ENGINE=sglang`, which installs it into `.venv-gpu-sglang` and takes four of the 32 minutes.

The most valuable measurements run first, so a short stay on a GPU is enough for them. `make gpu MINUTES=8` ends within
eight minutes (four at least): the measurement that is still running is ended, and the figures that it has are kept. The
next call measures it again and continues. Ctrl-C and SIGTERM end a call in the same way. Each measurement is a separate
process: one that fails is listed below with its error, and the others still run. Results and page are two files,
`docs/data/gpu.json` and this one, or `gpu.json` and `gpu.md` in the folder `OUT=FOLDER`. The figures are printed too.
`make gpu-reduced` runs the same code on a CPU with tiny shapes (with `ENGINE=sglang` that of SGLang), and so do the
tests.

`make gpu PYTHON=python3` uses an existing Python and installs nothing.

## A short stay without a network

A machine without a network takes the packages that it lacks from wheels. Download them elsewhere, for the Python of
that machine, into `.whl` in the repository. Git ignores that folder, so copy it with the repository:

```bash
pip download --no-deps -d .whl --python-version 3.12 --only-binary :all: liger-kernel==0.8.5 trl==1.16.0 \\
  datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 math-verify==0.9.0 latex2sympy2-extended==1.11.0 \\
  antlr4-python3-runtime==4.13.2 xxhash==4.1.0
```

There, this line measures for eight minutes. The same line again, in the same repository, continues. Where the folder
`OUT` is set, both files are copied to it:

```bash
python3 -m benchmarks.gpu --minutes 8 --wheels .whl --out runs/gpu; [ -z "$OUT" ] || cp runs/gpu/gpu.* "$OUT"
```

`make gpu-image` builds an environment like the one of such a machine, for a try on CPUs: Python 3.12, torch 2.11,
transformers 5.17 and numpy 2.5, without engines (`make gpu-reduced PYTHON=.venv-gpu-image/bin/python`).

## The models

The models have the shapes of Qwen2.5 0.5B, 3B and 7B and of Qwen2.5-VL 3B, with random weights whose logits have a
standard deviation of 4. Every engine runs the 0.5B model, and vLLM the 7B model too. The 7B and the VL model train LoRA
adapters (rank 16), the 0.5B and the 3B model all weights. The memory plan chooses the activations that are recomputed,
except where the name says `recompute`: all. Where it says `fused`, the run takes the Triton kernels of
`--fused_decode` and `--fused_logprobs`. Each prompt of the VL model has one picture of 256 tokens.
"""
PREDICTED = """## What to expect

Computed for one H200 from counts of launches, bytes and FLOPs, before anything was measured. The figures of one step
assume 16384 tokens in a micro-batch, of sequences of 2048. Those of a rollout assume that every step is the replay of a
graph, and for spread lengths 1.14 times the replays alone ([launches and graphs](host_syncs.md)).

Three choices wait for the figures:

- Expandable segments become the default if `update-0.5b-expandable` is faster than `update-0.5b`, or reserves less
  memory, in the table "Update".
- The `hf` engine gives torch's free memory back after a rollout whose cache takes more than a 32nd of the GPU. It will
  keep that memory too if an update after a rollout is slower than others by more than 1 % there.
- `--fused_decode` and `--fused_logprobs` become the default if their errors are not above those of the products, they
  are faster in the tables "Log-probs" and "Attention of a decode step", the step-1 facts of `run-hf-0.5b-fused` are
  those of `run-hf-0.5b`, and its rollouts are faster."""
BYTES, FLOPS = 4.0e12, 0.6e15  # per second of an H200: 0.83 of its bandwidth, 0.6 of its dense bfloat16
HEAD = 8192 * 151936  # logits of the largest case of "Log-probs" of the 0.5B model
HEAD_MS = 1e3 * 4 * 2 * HEAD * 896 / FLOPS  # products: logits twice, gradients of the states and of the weight
ELEMENTWISE_MS = 54 / 2  # fourteen passes over the logits: 54 ms of a step of 16384 tokens
ONE_PASS_MS = 1e3 * HEAD * (4 + 4 + 2) / BYTES  # read, read again, the gradient written in bfloat16
ROWS, WEIGHTS = 256, 0.494e9  # of a rollout; of the 0.5B model
LAUNCHES, FUSED_LAUNCHES = 24 * 22 + 42, 24 * 12 + 42  # of a decode step, counted on the fake device
LAUNCH_S = 2.5e-6  # a kernel of a graph takes so long even if it computes nothing
PASSES_S = (2 * WEIGHTS + 10 * 4 * ROWS * 151936) / BYTES  # the weights once, ten passes over the logits
STEP_S, FUSED_STEP_S = LAUNCHES * LAUNCH_S + PASSES_S, FUSED_LAUNCHES * LAUNCH_S + PASSES_S
CACHE = ROWS * (128 / 8 + 256) * 2 * 2 * 64 * 2  # bytes of a layer: prompts of 8 rows each, and rows, of 2 heads
PRODUCTS_S = 11 * LAUNCH_S + (CACHE + 7 * 4 * ROWS * 14 * 384) / BYTES  # seven passes over the scores
ONE_KERNEL_S = 2 * LAUNCH_S + CACHE / BYTES
SPREAD = 0.432 * 1.2 / 1.14  # mean length (1 - exp(-2)) / 2 of the longest; fewer rows, shorter steps; no replays
SYNC_S = 290 * 60e-6 + (4 + 2) * WEIGHTS / BYTES  # about six launches per weight with its proof; float32 to bfloat16
# measurement, table, columns that choose the row, column, value
PREDICTIONS: tuple[tuple[str, str, Row, str, float], ...] = (
    ("update-0.5b", catalog.UPDATE, {"tokens per rank": 16384}, "s", 0.219),
    ("update-7b", catalog.UPDATE, {"tokens per rank": 16384}, "s", 1.118),
    ("update-7b", catalog.UPDATE, {"tokens per rank": 16384}, "MFU", 0.45),
    ("update-7b-recompute", catalog.UPDATE, {"tokens per rank": 16384}, "s", 1.566),
    ("update-7b-recompute", catalog.UPDATE, {"tokens per rank": 16384}, "MFU", 0.32),
    ("update-3b", catalog.UPDATE, {"tokens per rank": 16384}, "s", 0.78),
    ("update-3b", catalog.UPDATE, {"tokens per rank": 16384}, "MFU", 0.39),
    ("kernels", catalog.LOGPROBS, {"tokens": 8192, "hidden": 896}, "chunked, ms", HEAD_MS + ELEMENTWISE_MS),
    ("kernels", catalog.LOGPROBS, {"tokens": 8192, "hidden": 896}, "fused, ms", HEAD_MS + ONE_PASS_MS),
    ("kernels", catalog.DECODE, {"tokens": "128 + 256"}, "products, us", 1e6 * PRODUCTS_S),
    ("kernels", catalog.DECODE, {"tokens": "128 + 256"}, "one kernel, us", 1e6 * ONE_KERNEL_S),
    ("run-hf-0.5b", catalog.ROLLOUT, {"lengths": "256"}, "kernels per step", LAUNCHES),
    ("run-hf-0.5b", catalog.ROLLOUT, {"lengths": "256"}, "tokens/s", ROWS / STEP_S),
    ("run-hf-0.5b", catalog.ROLLOUT, {"lengths": "spread to 256"}, "tokens/s", ROWS / STEP_S * SPREAD),
    ("run-hf-0.5b-fused", catalog.ROLLOUT, {"lengths": "256"}, "kernels per step", FUSED_LAUNCHES),
    ("run-hf-0.5b-fused", catalog.ROLLOUT, {"lengths": "256"}, "tokens/s", ROWS / FUSED_STEP_S),
    ("run-hf-0.5b-fsdp2", catalog.SYNC, {}, "s", SYNC_S),
    ("run-hf-0.5b-fsdp2", catalog.SYNC, {}, "plain copy, GB/s", BYTES / 2 / 1e9),
)
INTROS = {
    catalog.FACTS: """Differences before the first update, which must be explained by rounding: between two
passes of the trainer, and between engine and trainer. The names are those of [the metrics](metrics.md).""",
    catalog.ANATOMY: "Means of the steps after the first, in milliseconds. MFU is that of the update alone.",
    catalog.UPDATE: """One optimizer step on one packed micro-batch per rank, with and without Liger's kernels. After a
rollout, torch has given the memory that it kept back to the device, and allocates it again. The peak is that of
tensors; torch reserves more. MFU counts 6 FLOPs per parameter and token (LoRA: 4, because frozen weights
have no gradient), without recomputed activations; the second one adds the attention scores.""",
    catalog.ATTENTION: """Forward and backward in bfloat16 over packed sequences; FLOPs of the causal half. The backward
pass counts 2.5 times the forward pass, as in FlashAttention, because it computes the scores again.""",
    catalog.LOGPROBS: """`chunked_logprobs` against `log_softmax` over the whole [N, V]: forward and backward of
log-probs and entropy, in bfloat16. MiB above the inputs.""",
    catalog.DECODE: """What the `hf` engine computes per layer and step, in bfloat16: products of PyTorch, and the
kernel of `--fused_decode`. Rows are prompts x samples, tokens those of a prompt and of a row. The errors are those
against float64, as a share of the largest output.""",
    catalog.ROLLOUT: """Tokens per second of the engine through the library, and of the same vLLM engine called on its
own, as here with a seed per response, and without any. All use vLLM's prefix cache and begin with an empty one, as
after the weight sync of a step. The time from asleep to the first token includes the weight sync. Kernels per step are
those that the GPU ran for a token, in graphs too.""",
    catalog.SYNC: "All weights from the trainer to the engine, with verification, against a copy of as many bytes.",
    catalog.SLEEP: "GiB in use on the whole device.",
    catalog.TESTS: "`pytest -m gpu`: attention, log-probs, step-1 facts and sleeping engines against references.",
    catalog.OPERATIONS: "What this torch can do on this device; faster paths depend on it.",
    catalog.QUICKSTART: "`examples/quickstart/run_quickstart.sh` in one process.",
    catalog.TRL: """The same model, prompts, reward and batch, in turn on one GPU. Both generate with Hugging Face
models. Times are compared per generated token.""",
    catalog.DOCTOR: "Findings of `python -m lightrft.cli.doctor`.",
}  # yapf: disable


def render(measurements: Sequence[Measurement], records: dict[str, Record]) -> str:
    """Render the page: machines, one section per table, and the errors."""
    parts = [TITLE, PREDICTED + "\n", *table(predictions(records)), *_machines(records.values())]
    for title, intro in INTROS.items():
        own = [one for one in measurements if title in one.tables]
        parts += [f"## {title}\n", f"{intro}\n", *_section(title, own, records)]
    return "\n".join([*parts, *_errors(records.values())]).rstrip("\n") + "\n"


def predictions(records: dict[str, Record]) -> list[Row]:
    """Return the predictions, each beside what was measured."""
    rows: list[Row] = []
    for name, title, chosen, column, value in PREDICTIONS:
        found = records[name].tables.get(title, []) if name in records else []
        measured = [row.get(column) for row in found if row.items() >= chosen.items()]
        figure = ", ".join([column, *(f"{key} {word}" for key, word in chosen.items() if isinstance(word, str))])
        rows.append(
            {"measurement": f"`{name}`", "figure": figure, "predicted": value, "measured": (*measured, None)[0]})
    return rows


def summary(measurements: Sequence[Measurement], records: dict[str, Record]) -> str:
    """Return the figures, then the end of each error, in at most ``MOST`` characters."""
    blocks = []
    for record in records.values():
        if record.error:
            lines = [line[:ERROR_WIDTH] for line in record.error.splitlines()]
            why, tail = lines[0], lines[1:][-ERROR_LINES:]
            blocks.append("\n".join([f"{record.name}: {record.status}, {why}", *tail]))
    errors = _head("\n".join(blocks), MOST_ERRORS)
    tables = [line for title in INTROS for line in _figures(title, measurements, records)]
    counts = ", ".join(f"{sum(one.status == status for one in records.values())} {status}" for status in STATUS)
    return f"{_head(chr(10).join(tables), MOST - len(errors) - len(counts) - 2)}\n{errors}\n{counts}"


def _figures(title: str, measurements: Sequence[Measurement], records: dict[str, Record]) -> list[str]:
    if not (rows := _rows(title, measurements, records)):
        return []
    head, _, *lines, _ = table(rows)  # between the first two is the rule of Markdown
    return [title, head, *lines]


def _head(text: str, most: int) -> str:
    """Return the lines that fit into ``most`` characters."""
    return text if len(text) <= most else text[:text.rindex("\n", 0, most - 3)] + "\n..."


def _machines(records: Iterable[Record]) -> list[str]:
    """Describe every machine, with the measurements that ran there."""
    ran = sorted(records, key=lambda record: sorted(record.machine.items()))
    if not ran:
        return ["**Nothing has been run yet**: no GPU was available so far.\n"]
    lines = []
    for facts, group in groupby(ran, key=lambda record: record.machine):
        names = ", ".join(sorted(f"`{record.name}`" for record in group))
        lines.append(f"- {facts['device']}; " + ", ".join(f"{k} {v}" for k, v in facts.items() if k != "device")
                     + f": {names}")  # yapf: disable
    return ["Machines:\n", *lines, ""]


def _section(title: str, own: list[Measurement], records: dict[str, Record]) -> list[str]:
    """Render the rows of a table, then the measurements that have not come to their end."""
    rows = _rows(title, own, records)
    absent = [f"- `{one.name}`: {_absence(one, records)}" for one in own if not _ok(one, records)]
    return [*(table(rows) if rows else []), *absent, *([""] if absent else [])]


def _rows(title: str, measurements: Iterable[Measurement], records: dict[str, Record]) -> list[Row]:
    """Return the rows of a table, each with the name of its measurement."""
    ran = [records[one.name] for one in measurements if one.name in records]
    return [{"measurement": f"`{record.name}`"} | row for record in ran for row in record.tables.get(title, [])]


def _ok(one: Measurement, records: dict[str, Record]) -> bool:
    return one.name in records and records[one.name].status == "ok"


def _absence(one: Measurement, records: dict[str, Record]) -> str:
    if one.name not in records:
        return "not run yet"
    return {"cut": "ended with the call", "failed": "failed, see the end of the page"}[records[one.name].status]


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
    blocks = [f"`{record.name}`, after {record.seconds:.0f} s:\n\n```text\n{record.error}\n```\n"
              for record in records if record.error]  # yapf: disable
    return ["## Errors\n", *blocks] if blocks else []
