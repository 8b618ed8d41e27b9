"""Rules of training on preferences: the loss and its options, the reference model."""
from collections.abc import Iterator
from typing import Any

from lightrft.config.layers import changed
from lightrft.config.preference_schema import DPOConfig, ReferenceModelConfig
from lightrft.ops.preference import PAIR_LOSSES
from lightrft.preflight.shared_rules import folder


def pair_problems(c: DPOConfig) -> Iterator[str]:
    """Yield the problems of the loss of pairs and of its reference."""
    p, name = c.preference, c.preference.chosen_loss
    loss = PAIR_LOSSES.get(name)
    if p.ipo and p.loss not in (type(p)().loss, name):
        yield f"--ipo True: contradicts --loss {p.loss}; drop one of them"
    for option, value in changed(c, ("label_smoothing", "simpo_gamma")):
        if option not in loss.reads:
            readers = [other for other in PAIR_LOSSES if option in PAIR_LOSSES.get(other).reads]
            yield f"--{option} {value:g}: has no effect with --loss {name}; drop it, or use {' or '.join(readers)}"
    if loss.needs_smoothing and not p.label_smoothing:
        yield f"--loss {name}: is not defined with --label_smoothing 0; add --label_smoothing 0.001"
    if name == "robust" and p.label_smoothing == 0.5:
        yield "--label_smoothing 0.5: labels that are wrong half of the time say nothing; nearest valid value: 0.49"
    yield from reference_problems(c, "" if p.needs_reference else f"--loss {name}, which has no reference")


def reference_problems(c: Any, without: str = "") -> Iterator[str]:
    """Yield the problems of the reference model; ``without``: why there is none."""
    m: ReferenceModelConfig = c.model
    yield from folder("ref_pretrain", m.ref_pretrain)
    own = "--lora_rank, where the reference is the policy without its adapters" * bool(m.lora_rank)
    cached = "--ref_cache_dir, after which the reference is freed" * bool(m.ref_cache_dir)
    reasons = {"ref_pretrain": without or own, "ref_offload": without or own or cached, "ref_cache_dir": without}
    for option, value in changed(c, reasons):
        if reasons[option]:
            yield f"--{option} {value}: has no effect with {reasons[option]}; drop it"
