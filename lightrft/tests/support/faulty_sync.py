"""Ways in which a weight sync goes wrong: streams of weights that are not the trainer's. Also a plugin for whole runs:
``FAULTY_SYNC=kind@rank:version`` makes the HF engine of that rank take over such a stream."""
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from lightrft.rollout.hf.engine import HFEngine

Named = Iterator[tuple[str, Tensor]]
TARGET, TWIN = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"


def changed(change):
    """A stream whose ``target`` is ``change(tensor)``."""
    return lambda stream, engine, target, twin: (
        (name, change(tensor) if name == target else tensor) for name, tensor in stream)


def held(engine: HFEngine, name: str) -> Tensor:
    """The engine's present value."""
    return engine.model.get_parameter(name).detach().clone()


def skipped(stream: Named, engine: HFEngine, target: str, twin: str) -> Named:
    """``target`` never arrives: what the engine has stays."""
    return ((name, held(engine, name) if name == target else tensor) for name, tensor in stream)


def stale(stream: Named, engine: HFEngine, target: str, twin: str) -> Named:
    """Nothing new arrives."""
    return ((name, held(engine, name)) for name, _ in stream)


def swapped(stream: Named, engine: HFEngine, target: str, twin: str) -> Named:
    """Two weights of one shape are exchanged."""
    names = {target: twin, twin: target}
    return ((names.get(name, name), tensor) for name, tensor in stream)


def transposed(tensor: Tensor) -> Tensor:
    """The elements in the order of the transposed matrix."""
    return tensor.t().reshape(tensor.shape)


def one_bit(tensor: Tensor) -> Tensor:
    """The smallest change of one element."""
    wrong = tensor.clone()
    wrong[-1, -1] = torch.nextafter(wrong[-1, -1], torch.tensor(torch.inf))
    return wrong


FAULTS = {
    "skipped": (skipped, "it still has the values of the previous sync"),
    "stale": (stale, "it still has the values of the previous sync"),
    "transposed": (changed(transposed), "transposed"),
    "scaled": (changed(lambda tensor: tensor * (1 + 1e-3)), "scaled"),
    "one bit": (changed(one_bit), "truncated"),
    "rows": (changed(lambda tensor: tensor.roll(1, 0)), "mixed"),
    "swapped": (swapped, "it has the values of model."),
}
OF_STREAMS = ("transposed", "scaled", "one bit", "rows", "swapped")  # the others need the HF engine's parameters


def break_sync(engine: HFEngine, kind: str, target: str = TARGET, twin: str = TWIN) -> None:
    """From now on ``engine`` takes over faulty streams; the fault is outside of everything that is proven."""
    right = engine.update_weights
    engine.update_weights = lambda stream, version: right(FAULTS[kind][0](stream, engine, target, twin), version)


def _from_environment() -> None:
    kind, _, when = os.environ["FAULTY_SYNC"].partition("@")
    rank, _, first = when.partition(":")
    right = HFEngine.update_weights

    def update_weights(self: HFEngine, stream: Named, version: int) -> None:
        due = os.environ.get("RANK", "0") == rank and version >= int(first)
        right(self, FAULTS[kind][0](stream, self, TARGET, TWIN) if due else stream, version)

    HFEngine.update_weights = update_weights


if "FAULTY_SYNC" in os.environ:
    _from_environment()
