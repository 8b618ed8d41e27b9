"""Checks and estimates of the trainers on fixed data: demonstrations, pairs, references, teachers, steps."""
import re
from collections.abc import Iterator

from lightrft.config.layers import changed
from lightrft.config.offline_schema import OfflineConfig
from lightrft.config.options import show
from lightrft.config.preference_schema import DPOConfig, KTOConfig
from lightrft.config.rm_schema import GRMConfig, PRMConfig, RMConfig
from lightrft.config.sft_schema import KDConfig, SFTConfig
from lightrft.ops.preference import PAIR_LOSSES
from lightrft.preflight.batches import batch_problems
from lightrft.preflight.hardware import Device
from lightrft.preflight.memory import frozen_bytes, micro_batch_tokens, teacher_bytes
from lightrft.preflight.shared_rules import evaluations, probabilities, rendering, writable
from lightrft.preflight.training import TrainingPreflight
from lightrft.rollout.engines import ByPhase
from lightrft.strategy.memory import ModelSize


class OfflinePreflight(TrainingPreflight):
    """Checks and estimates of a trainer on fixed data."""
    config: OfflineConfig

    def problems(self, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
        """Yield the problems of the data and of the batches, then those of the trainer's own options."""
        yield from super().problems(world_size, cuda, local_ranks)
        d = self.config.data
        yield from rendering(d)
        yield from probabilities("train_data", d.train_data_probs, len(d.train_data))
        yield from batch_problems(self.config, world_size)
        yield from evaluations(self.config)
        yield from self.own_problems()

    def own_problems(self) -> Iterator[str]:
        """Yield the problems of the options that a trainer has for itself."""
        yield from ()

    def summary(self, world_size: int) -> list[str]:
        """Describe the rows and the micro-batches of a step."""
        c, (tokens, several) = self.config, micro_batch_tokens(self.config, world_size)
        return [f"each step: {c.train.train_batch_size} {c.ROWS} of at most {c.sequence_len:,} tokens, in "
                f"{'micro-batches' if several else 'one micro-batch'} of at most {tokens:,} tokens per rank; "
                f"{world_size} rank{'s' if world_size > 1 else ''}"]  # yapf: disable

    def beside(self, name: str, held: float, offloaded: bool, cache: str | None) -> dict[str, ByPhase]:
        """Return the row of a second model of ``held`` bytes: resident, or only in passes that come before training."""
        resident = held * (not offloaded and cache is None)
        return {name: (0, held, resident, resident, 0)}


class SFTPreflight(OfflinePreflight):
    """Checks of supervised fine-tuning."""
    config: SFTConfig

    def own_problems(self) -> Iterator[str]:
        """Yield the problems of the part of demonstrations that is learnt."""
        if self.config.data.pretrain_mode and not self.config.data.multiturn:
            yield ("--multiturn false: has no effect with --pretrain_mode, which puts every token into the loss; drop "
                   "one")


class KDPreflight(SFTPreflight):
    """Checks and estimates of distillation."""
    config: KDConfig

    def own_problems(self) -> Iterator[str]:
        """Yield the problems of the demonstrations, of the teacher and of its part in the loss."""
        yield from super().own_problems()
        t = self.config.teacher
        if t.teacher_cache_dir and t.teacher_offload:
            yield ("--teacher_offload true: has no effect with --teacher_cache_dir, after which the teacher is freed; "
                   "drop it")
        if t.teacher_cache_dir:
            yield from writable("teacher_cache_dir", t.teacher_cache_dir)
        if not t.kd_coef:
            yield "--kd_coef 0: the teacher has no effect; use lightrft sft"

    def not_trained(self, world_size: int, size: ModelSize, device: Device) -> dict[str, ByPhase]:
        """Return the bytes of the teacher."""
        t = self.config.teacher
        held = teacher_bytes(self.config, t.teacher_model, world_size, device)
        return self.beside("teacher", held, t.teacher_offload, t.teacher_cache_dir)


class ReferencePreflight(OfflinePreflight):
    """Checks and estimates of a trainer against a reference model."""
    config: DPOConfig | KTOConfig

    def reference_problems(self, without: str = "") -> Iterator[str]:
        """Yield the problems of the reference model; ``without``: why there is none."""
        m = self.config.model
        own = "--lora_rank, where the reference is the policy without its adapters" * bool(m.lora_rank)
        cached = "--ref_cache_dir, after which the reference is freed" * bool(m.ref_cache_dir)
        if m.ref_cache_dir:
            yield from writable("ref_cache_dir", m.ref_cache_dir)
        reasons = {"ref_pretrain": without or own, "ref_offload": without or own or cached, "ref_cache_dir": without}
        for option, value in changed(self.config, reasons):
            if reasons[option]:
                yield f"--{option} {show(value)}: has no effect with {reasons[option]}; drop it"

    def not_trained(self, world_size: int, size: ModelSize, device: Device) -> dict[str, ByPhase]:
        """Return the bytes of the reference, unless it is the policy without its adapters."""
        c, m = self.config, self.config.model
        held = 0 if m.lora_rank else frozen_bytes(c, world_size, size, c.strategy.fsdp_shard_size)
        return self.beside("reference", held, m.ref_offload, m.ref_cache_dir)


class DPOPreflight(ReferencePreflight):
    """Checks and estimates of training on pairs."""
    config: DPOConfig

    def own_problems(self) -> Iterator[str]:
        """Yield the problems of the loss of pairs and of its reference."""
        p, name = self.config.preference, self.config.preference.chosen_loss
        loss = PAIR_LOSSES.get(name)
        if p.ipo and p.loss not in (type(p)().loss, name):
            yield f"--ipo true: contradicts --loss {p.loss}; drop one of them"
        for option, value in changed(self.config, ("label_smoothing", "simpo_gamma")):
            if option not in loss.reads:
                readers = [other for other in PAIR_LOSSES if option in PAIR_LOSSES.get(other).reads]
                yield f"--{option} {value:g}: has no effect with --loss {name}; drop it, or use {' or '.join(readers)}"
        if loss.needs_smoothing and not p.label_smoothing:
            yield f"--loss {name}: is not defined with --label_smoothing 0; add --label_smoothing 0.001"
        if p.label_smoothing == 0.5:
            yield ("--label_smoothing 0.5: labels that are wrong half of the time carry no information; nearest valid "
                   "value: 0.49")
        yield from self.reference_problems("" if p.needs_reference else f"--loss {name}, which has no reference")

    def not_trained(self, world_size: int, size: ModelSize, device: Device) -> dict[str, ByPhase]:
        """Return the bytes of the reference, if the loss reads one."""
        return super().not_trained(world_size, size, device) if self.config.preference.needs_reference else {}


class KTOPreflight(ReferencePreflight):
    """Checks and estimates of training on judged answers."""
    config: KTOConfig

    def own_problems(self) -> Iterator[str]:
        """Yield the problems of the weights of judged answers and of their reference."""
        if not self.config.preference.desirable_loss_weight and not self.config.preference.undesirable_loss_weight:
            yield ("--desirable_loss_weight 0 with --undesirable_loss_weight 0: nothing would be trained; give one of "
                   "them a weight, e.g. 1")
        yield from self.reference_problems()


class RMPreflight(OfflinePreflight):
    """Checks of reward models, whose head takes the place of the model's."""
    config: RMConfig
    has_logits = False

    def own_problems(self) -> Iterator[str]:
        """Yield the problem of a margin that the loss does not read."""
        t = self.config.train
        if t.margin and t.loss != "sigmoid":
            yield f"--margin {t.margin:g}: has no effect with --loss {t.loss}; drop it, or use --loss sigmoid"


class PRMPreflight(OfflinePreflight):
    """Checks of process reward models."""
    config: PRMConfig

    def own_problems(self) -> Iterator[str]:
        """Yield the problems of the tokens of steps and of their labels."""
        d = self.config.data
        if len(d.reward_tokens) == 1:
            yield (f"--reward_tokens {d.reward_tokens[0]}: a judgement needs at least two; name the token for a "
                   "good step and the one for a bad step, e.g. --reward_tokens + -")
        if not d.form.step_separator:
            yield "--step_separator '': steps would run into each other; nearest valid value: '\\n'"


class GRMPreflight(OfflinePreflight):
    """Checks of judges."""
    config: GRMConfig

    def own_problems(self) -> Iterator[str]:
        """Yield the problems of the request to a judge."""
        asked = self.config.data.task_instruction
        if self.config.data.apply_chat_template:
            yield "--apply_chat_template: has no effect, because requests to a judge are always chats; drop it"
        if asked is not None and re.findall(r"\{(prompt|first|second)\}", asked) != ["prompt", "first", "second"]:
            yield (f"--task_instruction {asked!r}: must hold {{prompt}}, {{first}} and {{second}} once each, in this "
                   "order")
