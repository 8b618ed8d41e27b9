"""Checks that every strategy passes on any number of ranks; test_conformance.py starts them, here or by torchrun."""
import json
import resource
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.checkpoint import CheckpointManager
from lightrft.strategy.deepspeed import Sizes
from lightrft.strategy.fsdp import FSDPV2Strategy, WrapPolicy, units
from lightrft.strategy.strategy import SingleProcessStrategy, get_strategy
from lightrft.tests.support.eight_bit_moments import eight_bit_moments
from lightrft.tests.support.grad_sync import chosen_grad_sync, grad_sync
from lightrft.tests.support.other_optimizers import other_optimizers
from lightrft.tests.support.recomputed_gradients import recomputed_gradients_are_the_same
from lightrft.tests.support.strategy_case import (Case, assert_same, communicates_at_the_end, freeze_imports,
                                                  whole_gradients)
from lightrft.tests.support.tiny_lm import (expected_gradients, expected_steps, loss_of, MAX_NORMS, micro_batch,
                                            MICRO_BATCHES, placed, Reference, TinyLM)
from lightrft.tests.support.unread_weights import unread_weights_stay

CHECKS: dict[str, Callable[["Case"], None]] = {}


def check(function: Callable[["Case"], None]) -> Callable[["Case"], None]:
    """Register a check."""
    CHECKS[function.__name__] = function
    return function


@check
def collectives(case: Case) -> None:
    strategy, ranks = case.strategy, range(case.strategy.world_size)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16):
        value = torch.tensor([strategy.rank + 1, 3], dtype=dtype, device=strategy.device)
        assert strategy.all_reduce(value).tolist() == [sum(r + 1 for r in ranks), 3 * len(ranks)], dtype
        assert strategy.all_reduce(value, "max").tolist() == [len(ranks), 3], dtype
        assert strategy.all_reduce(value, "min").dtype == dtype
        assert value.tolist() == [strategy.rank + 1, 3], "all_reduce changed its input"
    flags = torch.tensor([strategy.rank == 0, False])
    assert strategy.all_reduce(flags, "max").tolist() == [True, False]
    assert strategy.all_reduce(flags).dtype == torch.int64
    assert [strategy.any_rank(strategy.rank == r) for r in (len(ranks) - 1, -1)] == [True, False]
    for size in (1, 100_000, 3, 1_000_000, 7, 7, 7):  # more and less than the room of the last ones
        assert strategy.all_gather_object({strategy.rank: [True] * size}) == [{r: [True] * size} for r in ranks]
    for size in (0, 1, 50_000):  # nothing, little and much; each pair of ranks another tensor
        outgoing = [{"to": torch.full((size * r, ), strategy.rank)} for r in ranks]
        incoming = strategy.exchange(outgoing)
        assert all(torch.equal(incoming[r]["to"], torch.full((size * strategy.rank, ), r)) for r in ranks)
    with pytest.raises(ValueError, match="unknown reduction 'mean'"):
        strategy.all_reduce(flags, "mean")
    strategy.barrier()


@check
def gradients(case: Case) -> None:
    """Sums over micro-batches and ranks; three micro-batches on two ranks need a padded one."""
    for count in (MICRO_BATCHES, 3):
        prepared, expected = case.prepare(), expected_gradients(case.strategy.device, count)
        case.backward(prepared, 0, count)
        norm = torch.nn.utils.get_total_norm(list(expected.values()))
        for name, gradient in whole_gradients(case.strategy, prepared).items():
            error = (gradient - expected[name]).norm() / norm
            assert error < 1e-6, f"gradient of {name} is off by {error}"
        assert case.strategy.global_norm(prepared, case.strategy.gradients(prepared)) == pytest.approx(norm)
        assert case.strategy.optimizer_step(prepared, 0.0) == pytest.approx(norm.item(), rel=1e-6)


@check
def ten_steps(case: Case) -> None:
    """Norms, clipping (on, and off at 0, in turn), weights and rates after ten steps."""
    prepared, (expected, reference) = case.prepare(tied=False), expected_steps(case.strategy.device)
    norms = [case.train(prepared, range(step, step + 1), max_norm)[0] for step, max_norm in enumerate(MAX_NORMS)]
    assert min(norms) > 0.5, "the test does not clip"
    assert norms == pytest.approx(expected, rel=1e-5)
    assert_same(case.weights(prepared), reference.weights(), atol=2e-5)
    assert prepared.scheduler.get_last_lr() == reference.scheduler.get_last_lr()


@check
def bad_step_changes_nothing(case: Case) -> None:
    """One rank's loss is NaN or infinite in one micro-batch: every rank skips, and the next step is as if nothing
    was."""
    prepared, last, (_, at_2, at_4) = case.prepare(), case.strategy.world_size - 1, case.four_steps
    case.train(prepared, range(2))
    rate = prepared.scheduler.get_last_lr()
    for bad in (float("nan"), float("inf")):
        case.backward(prepared, 2, scale=bad if case.strategy.rank == last else 1.0)
        norm = case.strategy.optimizer_step(prepared, 1.0)
        assert not torch.isfinite(torch.tensor(norm)), norm
        assert_same(case.state(prepared), at_2)
        assert prepared.scheduler.get_last_lr() == rate
    case.train(prepared, range(2, 4))
    assert_same(case.state(prepared), at_4)


@check
def abandoned_step_leaves_nothing(case: Case) -> None:
    """Gradients of a first micro-batch are dropped, after a forward pass without a backward pass."""
    prepared, (norms, at_2, _) = case.prepare(), case.four_steps
    batch = micro_batch(7, 0, case.strategy.device)
    case.strategy.backward(loss_of(prepared.model, batch), prepared, last=False)
    loss_of(prepared.model, batch)
    case.strategy.discard_gradients(prepared)
    assert all(param.grad is None for param in prepared.model.parameters())
    assert case.train(prepared, range(2)) == norms[:2]
    assert_same(case.state(prepared), at_2)


@check
def forward_sees_new_weights(case: Case) -> None:
    """A no-grad pass between backward and step must not leave stale full weights behind."""
    prepared, reference = case.prepare(), Reference(case.strategy.device)
    batch = micro_batch(3, 0, case.strategy.device)
    case.backward(prepared, 0)
    with torch.no_grad():
        before = loss_of(prepared.model, batch)
    case.strategy.optimizer_step(prepared)
    reference.backward(0)
    reference.step(0.0)
    with torch.no_grad():
        after = loss_of(prepared.model, batch)
        expected = loss_of(reference.model, batch)
    assert abs(after - expected) < 1e-5 < abs(after - before), (before, after, expected)


@check
def uneven_counts_are_refused(case: Case) -> None:
    strategy, prepared = case.strategy, case.prepare()
    if strategy.world_size > 1 and communicates_at_the_end(strategy, prepared):
        for number in range(2 - strategy.rank):
            loss = loss_of(prepared.model, micro_batch(0, number, strategy.device))
            strategy.backward(loss, prepared, last=number == 1 - strategy.rank)
        with pytest.raises(RuntimeError, match="different number"):
            strategy.optimizer_step(prepared)
        strategy.discard_gradients(prepared)
    with pytest.raises(ValueError, match="does not depend on the model"):
        strategy.backward(torch.zeros(()), prepared)
    untrained = strategy.prepare(TinyLM())
    assert untrained.optimizer is None and not any(p.requires_grad for p in untrained.model.parameters())
    with pytest.raises(ValueError, match="without an OptimSpec"):
        strategy.optimizer_step(untrained)


@check
def full_params(case: Case) -> None:
    """HF names and values, tied ones once, in any bucket size; the parts of all ranks add up to them."""
    for tied in (True, False):
        prepared, reference = case.prepare(tied=tied), Reference(case.strategy.device, tied)
        expected = reference.weights()
        assert ("lm_head.weight" in expected) is not tied
        for bucket_bytes in (1, 20_000, 1 << 30):
            assert_same({n: v.clone() for n, v in case.strategy.full_params(prepared.model, bucket_bytes)}, expected)
        some = {f"model.{name}": expected[name] for name in list(expected)[1:3]}
        assert_same({n: v.clone() for n, v in case.strategy.gathered(prepared.model, 20_000, some)}, some)
        slices = case.strategy.own_slices(prepared.model)
        assert_same({name: case.strategy.all_reduce(placed(one)) for name, one in slices}, expected)


@check
def offload_and_reload(case: Case) -> None:
    """Weights and moments are in host memory while offloaded; with --adam_offload, moments stay. Nothing changes."""
    prepared, strategy, (norms, _, at_4) = case.prepare(), case.strategy, case.four_steps
    case.train(prepared, range(2))
    strategy.offload(prepared)
    states = prepared.optimizer.state.values()
    assert states and all(state["exp_avg"].device.type == "cpu" for state in states)
    assert all(param.device.type == "cpu" for param in prepared.model.parameters())
    strategy.reload(prepared)
    on = "cpu" if strategy.cfg.fsdp_cpu_offload else strategy.device.type
    assert all(param.device.type == on for param in prepared.model.parameters())
    rest = "cpu" if strategy.cfg.adam_offload else on
    assert all(state["exp_avg_sq"].device.type == rest for state in states)
    assert case.train(prepared, range(2, 4)) == norms[2:]
    assert_same(case.state(prepared), at_4)


@check
def save_model(case: Case) -> None:
    prepared = case.prepare()
    case.train(prepared, range(1))
    expected = case.weights(prepared)
    for dtype, path in ((None, case.folder / "hf32"), (torch.bfloat16, case.folder / "hf16")):
        case.strategy.save_model(prepared, path, dtype)
        loaded = Qwen2ForCausalLM.from_pretrained(path)
        assert loaded.dtype == (dtype or torch.float32)
        same = {name: value.to(dtype or torch.float32) for name, value in expected.items()}
        assert_same(dict(loaded.named_parameters()), same)


@check
def resume_is_bitwise(case: Case) -> None:
    """Save, continue, load into a fresh model, continue: every tensor and the rate are the same; states of all ranks
    return."""
    prepared, strategy = case.prepare(), case.strategy
    case.train(prepared, range(3))
    manager = CheckpointManager(strategy, case.folder / "resume", asynchronous=True)
    assert manager.latest() is None
    assert manager.save(3, {"actor": prepared}, {"sampler": [1, 2]}, {"rank": strategy.rank}, {"acc": 0.5})
    case.train(prepared, range(3, 6))  # during the write
    assert manager.wait() and manager.failures == 0
    fresh = case.prepare(seed=5)
    path = manager.latest()
    assert path is not None and path.name == "step_000003"
    global_state, rank_states = manager.load(path, {"actor": fresh})
    assert global_state == {"sampler": [1, 2]} and rank_states == [{"rank": r} for r in range(strategy.world_size)]
    assert fresh.scheduler.last_epoch == 3
    case.train(fresh, range(3, 6))
    assert_same(case.state(fresh), case.state(prepared))
    assert fresh.scheduler.get_last_lr() == prepared.scheduler.get_last_lr()


@check
def other_world_size(case: Case) -> None:
    """A checkpoint that one process wrote resumes here exactly where it stood; ours is left for one process to read."""
    strategy, prepared = case.strategy, case.prepare(seed=5)
    manager = CheckpointManager(strategy, case.folder.parent / "one_process", asynchronous=False)
    _, rank_states = manager.load(manager.latest(), {"actor": prepared})
    assert rank_states == [{"rank": 0}]
    saved = torch.load(case.folder.parent / "one_process.pt")
    assert_same(case.state(prepared), saved["at_3"])
    case.train(prepared, range(3, 6))
    assert_same(case.state(prepared), saved["at_6"], atol=2e-5)
    ours = CheckpointManager(strategy, case.folder / "ours", asynchronous=False)
    assert ours.save(6, {"actor": prepared}, {}, {"rank": strategy.rank}, {})
    state = case.state(prepared)
    if strategy.is_main:
        torch.save(state, case.folder / "ours.pt")


@check
def another_model_is_refused(case: Case) -> None:
    """The first missing or differing tensor is named, and nothing is loaded."""
    strategy, prepared = case.strategy, case.prepare()
    manager = CheckpointManager(strategy, case.folder / "other", asynchronous=False)
    assert manager.save(1, {"actor": prepared}, {}, {}, {})
    for options, text in ((dict(layers=3), r"it has no tensor actor/model/model\.model\.layers\.2"),
                          (dict(layers=1), r"this one has no tensor actor/model/model\.model\.layers\.1"),
                          (dict(hidden=16), r"embed_tokens\.weight has shape \[65, 32\] there and \[65, 16\] here")):
        other = case.prepare(**options)
        before = case.state(other)
        with pytest.raises(ValueError, match=text):
            manager.load(manager.latest(), {"actor": other})
        assert_same(case.state(other), before)


@check
def full_disk_keeps_the_previous(case: Case) -> None:
    """The last rank cannot write past 8 kB, its own state or its shards: no rank dies, the older checkpoint stays and
    the temporary one goes."""
    strategy, prepared = case.strategy, case.prepare()
    folder = case.folder / "full"
    for asynchronous in (False, True):
        manager = CheckpointManager(strategy, folder, asynchronous=asynchronous)
        manager.save(1, {"actor": prepared}, {}, {}, {})
        assert manager.wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if strategy.rank == strategy.world_size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        try:
            returned = manager.save(2, {"actor": prepared}, {}, {"own": torch.zeros(10 if asynchronous else 10_000)},
                                    {})
            assert returned is asynchronous and not manager.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        strategy.barrier()
        assert manager.failures == 1
        assert sorted(path.name for path in folder.iterdir()) == ["step_000001"]
        assert manager.latest() == folder / "step_000001"
        assert manager.save(1, {"actor": prepared}, {}, {}, {}), "a save after a failed one"


@cache
def norms_in_bf16() -> list[float]:
    """Norms of three steps of a single process with bf16."""
    alone = Case(SingleProcessStrategy(StrategyConfig(), bf16=True), Path())
    return alone.train(alone.prepare(tied=False), range(3), 0.0)


def bf16_computes_low_and_keeps_float32(case: Case) -> None:
    """Not part of CHECKS: needs a strategy with bf16. The numbers are those of a single process with bf16; offloaded
    weights return, and a loaded state is computed with."""
    prepared, strategy = case.prepare(tied=False), case.strategy
    assert case.train(prepared, range(3), 0.0) == pytest.approx(norms_in_bf16(), rel=1e-3)
    assert all(value.dtype == torch.float32 for value in case.weights(prepared).values())
    assert all(state["exp_avg"].dtype == torch.float32 for state in prepared.optimizer.state.values())
    strategy.offload(prepared)
    strategy.reload(prepared)
    fresh = case.prepare(seed=5, tied=False)
    strategy.load_state_dict(fresh, strategy.state_dict(prepared))
    assert case.train(fresh, range(3, 5)) == case.train(prepared, range(3, 5))
    assert_same(case.state(fresh), case.state(prepared))


def wrapping(case: Case) -> None:
    """Not part of CHECKS: the units of a model by size, and by the HF class when it does not name its layers."""
    policies = {"one": (WrapPolicy(), 1), "layers": (WrapPolicy(one_unit=0), 3)}
    for policy, count in policies.values():
        strategy = FSDPV2Strategy(StrategyConfig(), wrap=policy)
        strategy.setup()
        assert len(units(strategy.prepare(TinyLM()).model)) == count
        assert len(units(strategy.prepare(TinyLM().model).model)) == count
        strategy.teardown()


# zero2, zero3, fsdp (one unit) and freeing (many, freed) show of these what is the same code
BRIEF = ("zero0", "zero1", "zero1_offload", "zero2_offload", "zero3_offload", "layers", "hsdp", "cpu_offload", "every")
ROUND_ALIKE = ("zero1", "zero1_offload", "zero2_offload", "zero3_offload", "layers")  # in bfloat16, likewise
OF_EACH = (gradients, ten_steps, bad_step_changes_nothing, uneven_counts_are_refused, offload_and_reload,
           other_world_size)
Variant = tuple[StrategyConfig, WrapPolicy | Sizes | None]


def zero_variants() -> dict[str, Variant]:
    """DeepSpeed's, run apart from the others: it changes its process."""
    small = Sizes(reduce=20_000, persist=1100)  # whole: norms, biases and attention; divided: the rest
    made: dict[str, dict] = {f"zero{n}": {"zero_stage": n} for n in range(4)}
    made |= {f"zero{n}_offload": {"zero_stage": n, "adam_offload": True, "overlap_comm": n == 3} for n in (1, 2, 3)}
    return {name: (StrategyConfig(strategy="deepspeed", **options), small) for name, options in made.items()}


def variants(world_size: int) -> dict[str, Variant]:
    """Name -> options of the strategies compared on ``world_size`` ranks."""
    fsdp = {"strategy": "fsdp"}
    freeing = WrapPolicy(one_unit=0, keep_full=0)
    named = {"fsdp": (StrategyConfig(**fsdp), None)}
    if world_size == 1:
        return {
            "single": (StrategyConfig(strategy="single"), None), "adam_offload":
            (StrategyConfig(strategy="single", adam_offload=True), None), **named
        }
    return {
        **named, "layers": (StrategyConfig(**fsdp), WrapPolicy(one_unit=0)), "freeing":
        (StrategyConfig(**fsdp), freeing), "hsdp": (StrategyConfig(**fsdp, fsdp_shard_size=1,
                                                                   adam_offload=True), WrapPolicy(one_unit=0)),
        "cpu_offload": (StrategyConfig(**fsdp, fsdp_cpu_offload=True), freeing), "every":
        (StrategyConfig(**fsdp, grad_sync="every", fsdp_shard_size=1), WrapPolicy(one_unit=0))
    }


def run(name: str, cfg: StrategyConfig, sizes: WrapPolicy | Sizes | None, folder: Path) -> None:
    """All checks for one strategy."""
    freeze_imports(cfg)
    strategy = get_strategy(cfg)
    if isinstance(sizes, Sizes):
        strategy.sizes = sizes
    elif sizes is not None:
        strategy.wrap = sizes
    strategy.setup()
    try:
        own = folder / f"{name}_on_{strategy.world_size}"
        own.mkdir(parents=True, exist_ok=True)
        case = Case(strategy, own)
        for title, function in CHECKS.items():
            if name in BRIEF and function not in OF_EACH:
                continue
            try:
                function(case)
            except AssertionError as error:
                raise AssertionError(f"{name}, rank {strategy.rank}, {title}: {error}") from error
        unread_weights_stay(case)
        if name not in BRIEF:
            recomputed_gradients_are_the_same(case)
        if name in ("single", "fsdp", "zero2", "zero3"):
            other_optimizers(case)
        if not isinstance(sizes, Sizes) and name not in BRIEF:
            eight_bit_moments(case)
        if name not in ROUND_ALIKE:
            low = Case(get_strategy(cfg, bf16=True), own)
            low.strategy.setup()
            bf16_computes_low_and_keeps_float32(low)
        if name == "fsdp":
            wrapping(case)
        if name == "fsdp" and strategy.world_size > 1:
            grad_sync(case)
            chosen_grad_sync(case)
    finally:
        strategy.teardown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    holder = get_strategy(StrategyConfig(strategy="fsdp"))
    holder.setup()  # all variants share this group
    found = zero_variants() if "zero" in sys.argv else variants(2)
    if holder.world_size == 1:
        found = {"zero2": found["zero2"]}
    for variant, options in found.items():
        run(variant, *options, Path(sys.argv[1]))
    holder.teardown()
    print(json.dumps({"passed": list(found)}))
