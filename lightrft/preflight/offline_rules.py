"""Rules of the trainers on fixed data, each for its own options: demonstrations, pairs, references, teachers, steps."""
import re
from collections.abc import Iterator
from functools import singledispatch
from typing import Any

from lightrft.config.layers import changed
from lightrft.config.options import show
from lightrft.config.offline_schema import OfflineConfig
from lightrft.config.preference_schema import DPOConfig, KTOConfig, ReferenceModelConfig
from lightrft.config.rm_schema import GRMConfig, PRMConfig
from lightrft.config.sft_schema import KDConfig, SFTConfig
from lightrft.ops.preference import PAIR_LOSSES
from lightrft.preflight.shared_rules import folder


@singledispatch
def own_problems(c: OfflineConfig) -> Iterator[str]:
    """Yield the problems of the options that are specific to one trainer on fixed data; each registers its rules
    here."""
    yield from ()


@own_problems.register
def demonstration_problems(c: SFTConfig) -> Iterator[str]:
    """Yield the problems of the part of demonstrations that is learnt."""
    if c.data.pretrain_mode and not c.data.multiturn:
        yield "--multiturn false: has no effect with --pretrain_mode, which puts every token into the loss; drop one"


@own_problems.register
def judge_problems(c: GRMConfig) -> Iterator[str]:
    """Yield the problems of the request to a judge."""
    asked = c.data.task_instruction
    if c.data.apply_chat_template:
        yield "--apply_chat_template: has no effect, because requests to a judge are always chats; drop it"
    if asked is not None and re.findall(r"\{(prompt|first|second)\}", asked) != ["prompt", "first", "second"]:
        yield (f"--task_instruction {asked!r}: must hold {{prompt}}, {{first}} and {{second}} once each, in this order")


@own_problems.register
def pair_problems(c: DPOConfig) -> Iterator[str]:
    """Yield the problems of the loss of pairs and of its reference."""
    p, name = c.preference, c.preference.chosen_loss
    loss = PAIR_LOSSES.get(name)
    if p.ipo and p.loss not in (type(p)().loss, name):
        yield f"--ipo true: contradicts --loss {p.loss}; drop one of them"
    for option, value in changed(c, ("label_smoothing", "simpo_gamma")):
        if option not in loss.reads:
            readers = [other for other in PAIR_LOSSES if option in PAIR_LOSSES.get(other).reads]
            yield f"--{option} {value:g}: has no effect with --loss {name}; drop it, or use {' or '.join(readers)}"
    if loss.needs_smoothing and not p.label_smoothing:
        yield f"--loss {name}: is not defined with --label_smoothing 0; add --label_smoothing 0.001"
    if p.label_smoothing == 0.5:
        yield ("--label_smoothing 0.5: labels that are wrong half of the time carry no information; nearest valid "
               "value: 0.49")
    yield from reference_problems(c, "" if p.needs_reference else f"--loss {name}, which has no reference")


@own_problems.register
def judged_problems(c: KTOConfig) -> Iterator[str]:
    """Yield the problems of the weights of judged answers and of their reference."""
    if not c.preference.desirable_loss_weight and not c.preference.undesirable_loss_weight:
        yield ("--desirable_loss_weight 0 with --undesirable_loss_weight 0: nothing would be trained; give one of "
               "them a weight, e.g. 1")
    yield from reference_problems(c)


def reference_problems(c: Any, without: str = "") -> Iterator[str]:
    """Yield the problems of the reference model; ``without``: why there is none."""
    m: ReferenceModelConfig = c.model
    yield from folder("ref_pretrain", m.ref_pretrain)
    own = "--lora_rank, where the reference is the policy without its adapters" * bool(m.lora_rank)
    cached = "--ref_cache_dir, after which the reference is freed" * bool(m.ref_cache_dir)
    reasons = {"ref_pretrain": without or own, "ref_offload": without or own or cached, "ref_cache_dir": without}
    for option, value in changed(c, reasons):
        if reasons[option]:
            yield f"--{option} {show(value)}: has no effect with {reasons[option]}; drop it"


@own_problems.register
def teacher_problems(c: KDConfig) -> Iterator[str]:
    """Yield the problems of the demonstrations, of the teacher and of its part in the loss."""
    yield from demonstration_problems(c)
    t = c.teacher
    if not t.teacher_model:
        yield "--teacher_model is missing: give an HF folder or hub id of the teacher"
    yield from folder("teacher_model", t.teacher_model)
    if t.teacher_cache_dir and t.teacher_offload:
        yield ("--teacher_offload true: has no effect with --teacher_cache_dir, after which the teacher is freed; drop "
               "it")
    if not t.kd_coef:
        yield "--kd_coef 0: the teacher has no effect; use lightrft sft"


@own_problems.register
def step_problems(c: PRMConfig) -> Iterator[str]:
    """Yield the problems of the tokens of steps and of their labels."""
    d = c.data
    if not d.placeholder_token:
        yield ("--placeholder_token is missing: name the token that follows every step of the solutions, e.g. a "
               "reserved one of the tokenizer")
    if len(d.reward_tokens) == 1:
        yield (f"--reward_tokens {d.reward_tokens[0]}: a judgement needs at least two; name the token for a good step "
               "and the one for a bad step, e.g. --reward_tokens + -")
    if not d.form.step_separator:
        yield "--step_separator '': steps would run into each other; nearest valid value: '\\n'"
