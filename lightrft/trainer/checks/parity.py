"""Parity of engine and trainer on rows with media before the first step: tokens, grids, positions, first log-probs."""
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from lightrft.models.packed_model import PackedModel
from lightrft.ops.rounding import Arithmetic
from lightrft.rollout.engine import RolloutEngine, ShowsMedia, ShowsPositions
from lightrft.rollout.weight_sync.verify import Canary
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.types import Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.logging import get_logger

ROWS = 16  # compared at most
_GRIDS = ("_grid_thw", "_sizes")  # end the names of tensors: patches in time, height and width; height and width


def check_parity(strategy: StrategyBase, prepared: Prepared, engine: RolloutEngine, prompts: Sequence[Prompt],
                 arithmetic: Arithmetic) -> None:
    """Compare engine and trainer on the first row with each combination of media, and log a line per row: first all
    sets of kinds, then other numbers and orders of them, at most :data:`ROWS`. A collective.

    Raises:
        UserError: names the row and what differs.
    """
    for prompt in _one_of_each(prompts):
        canary = Canary(strategy, prepared, engine, [prompt], 1, arithmetic)
        try:
            line = _compared(canary, cast(PackedModel, prepared.model))
        except UserError as error:
            raise UserError(f"row {prompt.uid}: {error}") from error
        get_logger().info(f"engine and trainer agree on row {prompt.uid}: {line}")


def _one_of_each(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the first prompt with each combination of kinds of media."""
    sets: dict[frozenset[str], Prompt] = {}
    rows: dict[tuple[str, ...], Prompt] = {}
    for prompt in prompts:
        if prompt.media:
            kinds = tuple(key.partition(":")[0] for key in prompt.media)
            sets.setdefault(frozenset(kinds), prompt)
            rows.setdefault(kinds, prompt)
    return list({prompt.uid: prompt for prompt in (*sets.values(), *rows.values())}.values())[:ROWS]


def _compared(canary: Canary, model: PackedModel) -> str:
    """Describe the one prompt of ``canary`` as engine and trainer see it.

    Raises:
        UserError: they differ.
    """
    prompt, modality = canary.prompts[0], model.modality
    grids = _grids_of(model, prompt)
    _compare_grids(canary.engine, prompt, grids)
    ours = modality.prompt_positions(model.hf_model, prompt.token_ids, prompt.media)
    _compare_positions(canary.engine, prompt, ours)
    scored, reported = canary.scores()  # compares tokens too: of the trainer with features, of the engine with its own
    gaps = canary.of_all_ranks((scored - reported).abs().max().item())
    if not max(gaps) <= canary.at_start:
        raise UserError(f"the log-prob of the first token is {reported[0]:.5f} for the engine and {scored[0]:.5f} for "
                        f"the trainer (largest gap of a rank: {max(gaps):.3g}): they do not see the same media; use "
                        "another --engine_type")
    tokens = sum(prompt.token_ids.count(token) for token in {*modality.tokens.values()})  # kinds may share one
    return (f"{len(prompt.token_ids)} tokens, {tokens} of them for {len(prompt.media)} media{_described(grids)}, "
            f"positions to {len(prompt.token_ids) - 1 if ours is None else int(ours.max())}, first log-prob "
            f"{reported[0]:.5f} and {scored[0]:.5f}")


def _grids_of(model: PackedModel, prompt: Prompt) -> dict[str, list[list[int]]]:
    """Return the grids of patches, or sizes, of the media of a prompt that have one, by the processor's name."""
    media = [] if model.modality.media is None else map(model.modality.media.tensors, prompt.media)
    found: dict[str, list[list[int]]] = {}
    for one in media:
        for name, tensor in one.tensors.items():
            if name.endswith(_GRIDS):
                found.setdefault(name, []).extend(_rows([tensor]))
    return found


def _rows(tensors: Iterable[Tensor]) -> list[list[int]]:
    return [row for tensor in tensors for row in tensor.reshape(-1, tensor.shape[-1]).tolist()]


def _described(grids: dict[str, list[list[int]]]) -> str:
    rows = ["x".join(map(str, row)) for some in grids.values() for row in some]
    return f" of {', '.join(rows)}" if rows else ""


def _compare_grids(engine: RolloutEngine, prompt: Prompt, ours: dict[str, list[list[int]]]) -> None:
    """Compare the grids or sizes of media, where the engine has its own; for a Pixtral tower vLLM keeps no sizes, but
    pictures [3, height, width] that are cut to them."""
    theirs = engine.media_tensors(prompt) if isinstance(engine, ShowsMedia) else {}
    cut = [one for some in theirs.values() for one in some if one.dim() == 3]
    for name, rows in ours.items():
        found = _rows(theirs[name]) if name in theirs else [[*one.shape[1:]] for one in cut]
        if found and found != rows:
            raise UserError(f"{name} is {found} for the engine and {rows} for the trainer; use another --engine_type")


def _compare_positions(engine: RolloutEngine, prompt: Prompt, ours: Tensor | None) -> None:
    """Compare positions [3, L] of a prompt, where the engine has its own."""
    if not isinstance(engine, ShowsPositions):
        return
    theirs = engine.positions(prompt)
    index = torch.arange(len(prompt.token_ids)).expand(3, -1)
    left, right = (index if each is None else each for each in (theirs, ours))
    if left.shape != right.shape or not torch.equal(left, right):
        if left.shape != right.shape:
            raise UserError(f"the prompt has {left.shape[1]} positions for the engine and {right.shape[1]} for the "
                            "trainer; use another --engine_type")
        first = int((left != right).any(0).nonzero()[0])
        raise UserError(f"the position of token {first} is {left[:, first].tolist()} for the engine and "
                        f"{right[:, first].tolist()} for the trainer; use another --engine_type")
