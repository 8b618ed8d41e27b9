"""Estimated cost of a configuration: samples and tokens per step, parameters, seconds per step. Plain arithmetic."""
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.config.schema import Config
from lightrft.models.activations import ModelShape
from lightrft.strategy.memory import ModelSize
from lightrft.utils.errors import UserError

if TYPE_CHECKING:  # torch is imported with the first model
    from lightrft.models.reward_model import RewardKind

GIB, MIB = 2**30, 2**20
UTILISATION = 0.4  # share of the peak that training passes are assumed to reach
_SPEAKS = ("talker.", "token2wav.")  # parts of a whole Qwen2.5-Omni that are not loaded
_LAYER = re.compile(r".*?\.(?:layers?|h|blocks)\.\d+\.")  # of a decoder or a tower


@dataclass(frozen=True)
class BatchSizes:
    """Counts per rollout step over all ranks; tokens at the length limits."""
    prompts: int
    samples: int
    tokens: int
    optimizer_steps: int


def model_size(folder: str | Path | None) -> ModelSize | None:
    """Count parameters from the headers of the ``*.safetensors`` files in a local folder; None if there are none.

    Raises:
        ValueError: a file is incomplete.
    """
    shapes = _weight_shapes(folder)
    return count_parameters(shapes) if shapes else None


def known_model(path: str | None, hub: bool = False, head: bool = True,
                frozen: Sequence[str] = ()) -> tuple[ModelSize | None, ModelShape | None]:
    """Read the size and the shape of a model from its config.json and, in a local folder, the headers of its weights.

    What cannot be read is None; so is the shape of a family whose MLP has no gate.

    Args:
        hub: look for a path that is no local folder on the hub, which downloads the config.json.
        head: False leaves out a head that is not tied to the embeddings.
        frozen: words of ``--freeze_prefix``.
    """
    folder = Path(path or "").expanduser()
    if not path or not (folder / "config.json").is_file() and (folder.exists() or not hub):
        return model_size(path), None
    from lightrft.models.config_json import model_shape, parameter_shapes, trained_share
    try:
        shapes = _weight_shapes(path) or parameter_shapes(path)
        counted = {name: shape for name, shape in shapes.items() if head or not name.endswith("lm_head.weight")}
        size = count_parameters(counted)
        if frozen:
            share, trains_head = trained_share(path, list(frozen))
            size = replace(size, trained=share, trains_head=trains_head)
        return size, model_shape(path) if is_gated(shapes) else None
    except UserError:  # raised again where the model is loaded
        return None, None


def known_kinds(paths: Iterable[str]) -> "dict[str, RewardKind]":
    """Read the kinds of the reward models in folders of this machine, by path."""
    here = [path for path in paths if (Path(path).expanduser() / "config.json").is_file()]
    if not here:
        return {}
    from lightrft.models.config_json import reward_kind
    return {path: reward_kind(path) for path in here}


def is_gated(shapes: Iterable[str]) -> bool:
    """Return True if one of these parameters is the gate of an MLP."""
    return any("gate" in name for name in shapes)


def _weight_shapes(folder: str | Path | None) -> dict[str, Sequence[int]]:
    files = sorted(Path(folder).expanduser().glob("*.safetensors")) if folder else []
    return {name: shape for file in files for name, shape in _shapes(file).items() if not name.startswith(_SPEAKS)}


def count_parameters(shapes: Mapping[str, Sequence[int]]) -> ModelSize:
    """Count parameters from their shapes by name; a tied parameter is given once."""
    layers: Counter[str] = Counter()
    for name, shape in shapes.items():
        found = _LAYER.match(f".{name}")
        layers[found[0] if found else "outside"] += prod(shape)
    outside = layers.pop("outside", 0)
    return ModelSize(layers.total() + outside, max(layers.values(), default=0), outside,
                     max(map(prod, shapes.values()), default=0))


def _shapes(file: Path) -> dict[str, list[int]]:
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(file, framework="np") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}
    except SafetensorError as error:
        raise UserError(f"{file} is not a whole safetensors file ({error}): download it again") from error


def batch_sizes(config: Config) -> BatchSizes:
    """Count prompts, samples, tokens (at most) and optimizer steps of one rollout step."""
    r = config.rollout
    tokens = r.samples * r.longest
    return BatchSizes(r.rollout_batch_size, r.samples, tokens, config.optimizer_steps)


def batch_summary(config: Config, world_size: int) -> str:
    """One line for the start of a run: prompts, samples, tokens (at most) and optimizer steps per rollout step."""
    b, t = batch_sizes(config), config.train
    epochs = f", {t.max_epochs} passes" if t.max_epochs > 1 else ""
    steps = f"{b.optimizer_steps} optimizer step{'s' if b.optimizer_steps > 1 else ''}"
    return (f"each step: {b.prompts} prompts x {config.rollout.n_samples_per_prompt} = {b.samples} samples, "
            f"at most {b.tokens:,} tokens, {steps} of {t.train_batch_size} samples{epochs}; "
            f"{world_size} rank{'s' if world_size > 1 else ''}")


def step_flops(config: Config, size: ModelSize, critic: bool = False) -> float:
    """Floating-point operations of one rollout step at the length limits: 2 N per token forward, 4 N backward."""
    b, epochs = batch_sizes(config), config.train.max_epochs
    tokens = config.pass_tokens(b.samples)
    train = (8 if config.model.gradient_checkpointing is True else 6) * tokens * epochs * (2 if critic else 1)
    passes = len(config.forward_passes(b.samples, critic))  # a teacher counts as a model of this size
    return size.total * (train + 2 * passes * tokens + 2 * b.tokens)


def time_line(config: Config, world_size: int, size: ModelSize | None, device: str, critic: bool = False) -> str:
    """The time estimate as text, with its assumptions."""
    from lightrft.utils.gpu import peak_flops
    peak = peak_flops(device)
    if size is None or peak is None:
        why = "the model's size is not known" if size is None else f"the speed of {device or 'a CPU'} is not known"
        return f"time per step: unknown, {why}"
    seconds = step_flops(config, size, critic) / (peak * UTILISATION * world_size)
    return (f"time per step: about {seconds:.3g} s of computing at most (every sample at its length limit; {device} at "
            f"{UTILISATION:.0%} of {peak / 1e12:.0f} TFLOP/s); generation is bound by memory and takes longer")
