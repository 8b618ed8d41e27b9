"""What tests compare of families with state, by family, and the table of it in ``docs/families.md``."""
from typing import Any

from lightrft.models.stateful import continues
from lightrft.rollout.vllm.states import ON_CPUS, REFUSED
from lightrft.tests.support import tiny
from lightrft.tests.support.preference_runs import EVERY
from lightrft.tests.support.strategy_ranks import KINDS, RESUMED

FAMILIES = [*tiny.HYBRIDS, *tiny.STATEFUL]  # packed, decoded by the hf engine, exported and resumed
STORED = ("falcon_h1", "granitemoehybrid", "nemotron_h")  # of Mamba 2
IN_FLOAT32 = (*STORED, "lfm2")  # into vLLM
SYNCED = {"qwen3_5": 9, "qwen3_5_moe": 9, "qwen3_next": 7}  # into vLLM; number of weights of a layer with state
COLUMNS = ("model type", "packed", "shared prompt", "hf engine", "sync to vLLM", "export", "resume", "two strategies")
RIGHT, UNTRIED = "right", "not tried"


def trained(options: dict[str, Any]) -> set[str]:
    """Families with state that a run with ``options`` trains: policy and critic."""
    models = (str(options.get(name, "")).rpartition("/")[2] for name in ("pretrain", "critic_pretrain"))
    return {*models} & {*FAMILIES}


def in_vllm(family: str) -> str:
    """What vLLM does with a family."""
    if family in IN_FLOAT32:
        return f"{RIGHT}, in float32"
    if family in SYNCED:
        return f"{RIGHT}, in bfloat16"
    return f"refused: {(REFUSED | ON_CPUS).get(family, 'never compared')}"


def row_of(family: str) -> tuple[str, ...]:
    """The row of a family."""
    spread = trained(KINDS[RESUMED]).union(*(trained(options) for _, options in EVERY.values()))
    return (f"`{family}`", RIGHT, RIGHT if continues(tiny.model(family)) else "computed again",
            RIGHT, in_vllm(family), RIGHT, RIGHT, RIGHT if family in spread else UNTRIED)  # yapf: disable


def table() -> str:
    """The table of all families, in Markdown."""
    rows = [COLUMNS, ("---", ) * len(COLUMNS), *map(row_of, sorted(FAMILIES))]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
