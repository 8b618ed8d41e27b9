"""Run by test_deepspeed_strategy under torchrun: what DeepSpeed's options do, and what it must not do, on two ranks."""
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.config.schema import OptimConfig, StrategyConfig
from lightrft.strategy.deepspeed import Sizes
from lightrft.strategy.deepspeed.deepspeed_strategy import DeepspeedStrategy
from lightrft.strategy.optimizer import OptimSpec
from lightrft.tests.support.strategy_case import Case, assert_same, freeze_imports
from lightrft.tests.support.tiny_lm import TinyLM, share

HERE = "."  # no check here writes


class Halves(nn.Module):
    """Two layers, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(3, 5)

    def forward(self, layer: str) -> Tensor:
        return self.get_submodule(layer)(torch.ones(3)).square().sum()


def case_of(bf16: bool = False, **options) -> Case:
    """A strategy whose buffers and persistent parameters are as small as the models here."""
    cfg = StrategyConfig(strategy="deepspeed", **options)
    freeze_imports(cfg)
    strategy = DeepspeedStrategy(cfg, bf16, Sizes(reduce=3000, persist=0))
    strategy.setup()
    assert "mlflow" not in sys.modules, "DeepSpeed's tuner, which nothing uses, has imported it: 1.4 s"
    return Case(strategy, HERE)


def divided(stage: int) -> list[int]:
    """Elements of weights, gradients and moments on this rank after the backward passes of a step."""
    case = case_of(zero_stage=stage)
    prepared = case.prepare()
    case.train(prepared, range(1))
    case.backward(prepared, 1)
    case.strategy.free_full(prepared.model)
    weights = sum(vars(param).get("ds_tensor", param).numel() for param in prepared.model.parameters())
    moments = sum(state["exp_avg"].numel() for state in prepared.optimizer.state.values())
    return [weights, sum(grad.numel() for grad in case.strategy.gradients(prepared).values()), moments]


def second_copies(zpg: int) -> list[list[int]]:
    """Parameters of which the ranks hold a second copy after a backward pass and after the weights have left the
    device, of a trained and of a frozen model; what is learnt is the same."""
    plain, case = case_of(zero_stage=3), case_of(zero_stage=3, zpg=zpg)
    expected, prepared = plain.prepare(), case.prepare()
    frozen, batch = case.strategy.prepare(TinyLM()), share(0, 0, 1, case.strategy.device)[0]
    assert case.train(prepared, range(2)) == plain.train(expected, range(2))
    case.backward(prepared, 2)
    before = frozen.model(*batch)
    found = [[sum(param.ds_secondary_tensor is not None for param in model.parameters())]
             for model in (prepared.model, frozen.model)]  # yapf: disable
    for one, counts in zip((prepared, frozen), found):
        case.strategy.offload(one)
        counts.append(sum(param.ds_secondary_tensor is not None for param in one.model.parameters()))
        case.strategy.reload(one)
    assert torch.equal(frozen.model(*batch), before)
    return found


def gathered_at_most(recomputing: bool) -> tuple[int, int, list[float]]:
    """Most elements that are whole or on their way at once in passes without gradients and in three steps, of a model
    of eight layers, and the norms of the gradients. DeepSpeed knows the order of passes from the third one on."""
    case, found = case_of(zero_stage=3), [0]
    prepared = case.prepare(layers=8, recomputing=recomputing)
    params: list[Any] = list(prepared.model.parameters())

    def look(*_) -> None:
        live = (param.ds_numel for param in params if param.ds_status.name != "NOT_AVAILABLE")
        found[-1] = max(found[-1], sum(live))

    for module in prepared.model.modules():
        module.register_forward_pre_hook(look)
    for param in params:
        param.register_post_accumulate_grad_hook(look)
    with torch.no_grad():
        for batch in share(0, 0, 1, case.strategy.device):
            prepared.model(*batch)
    found.append(0)
    norms = case.train(prepared, range(3))
    return *found, norms


def collecting_buffers(overlap: bool) -> int:
    """Buffers in which gradients are collected, while those before are reduced."""
    case = case_of(zero_stage=2, overlap_comm=overlap)
    prepared, counts = case.prepare(), []
    zero = case.strategy.engines[prepared.model].optimizer
    for param in prepared.model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: counts.extend(len(bucket.buffer) for bucket in zero.ipg_buckets.values()))
    case.train(prepared, range(1))
    return max(counts)


def unused_gradients_are_not_used_again() -> None:
    for stage in range(4):
        case = case_of(zero_stage=stage)
        prepared = case.strategy.prepare(Halves(), OptimSpec(0.1, OptimConfig(adam_betas=[0.0, 0.0])))
        for layer in ("first", "second"):
            before = case.weights(prepared)
            case.strategy.backward(prepared.model(layer), prepared)
            case.strategy.optimizer_step(prepared)
            other = "second" if layer == "first" else "first"
            after = case.weights(prepared)
            assert not torch.equal(after[f"{layer}.weight"], before[f"{layer}.weight"]), (stage, layer)
            assert torch.equal(after[f"{other}.weight"], before[f"{other}.weight"]), (stage, layer)


def decays_what_no_pass_reads() -> list[bool]:
    """True, by stage, if a step decays weights that have no gradients."""
    found = []
    for stage in range(4):
        case = case_of(zero_stage=stage)
        prepared = case.strategy.prepare(Halves(), OptimSpec(0.1, OptimConfig(l2=0.5)))
        before = case.weights(prepared)["second.weight"]
        case.strategy.backward(prepared.model("first"), prepared)
        case.strategy.optimizer_step(prepared)
        found.append(not torch.equal(case.weights(prepared)["second.weight"], before))
    return found


def moved_weights_are_the_same() -> None:
    """Weights that leave the device and return have other storage; masters must follow it."""
    for options in (dict(zero_stage=2), dict(zero_stage=3), dict(zero_stage=3, adam_offload=True)):
        case = case_of(**options)
        prepared, twin = case.prepare(), case.prepare()
        for one in (prepared, twin):
            case.train(one, range(2))
        case.strategy.free_full(prepared.model)
        prepared.optimizer.partitions.move(torch.clone)
        assert case.train(prepared, range(2, 4)) == case.train(twin, range(2, 4))
        assert_same(case.state(prepared), case.state(twin))


def late_copies_are_waited_for() -> None:
    """With CUDA the gradients of an offloaded optimizer reach host memory after the call that copies them. Here they do
    when somebody waits for them."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Zero
    queued: list[tuple[Tensor, Tensor]] = []
    copy, wait = Zero.async_inplace_copy_grad_to_fp32_buffer_from_gpu, Zero._wait_for_offload_copies

    def queue(zero: Any, param: Any) -> None:
        index, source, dest, count = zero.grad_position[zero.get_param_id(param)]
        target = zero.single_partition_of_fp32_groups[index].grad.view(-1).narrow(0, dest, count)
        queued.append((target, zero.get_param_gradient_attribute(param).view(-1).narrow(0, source, count).clone()))
        zero.clear_grad_attribute(param)

    def arrive(zero: Any) -> None:
        for target, source in queued:
            target.copy_(source)
        queued.clear()

    Zero.async_inplace_copy_grad_to_fp32_buffer_from_gpu, Zero._wait_for_offload_copies = queue, arrive
    try:
        for stage in (1, 2):
            norms = []
            for offloaded in (False, True):
                case = case_of(zero_stage=stage, adam_offload=offloaded)
                prepared = case.prepare()
                case.backward(prepared, 0)
                norms.append(case.strategy.global_norm(prepared, case.strategy.gradients(prepared)))
                case.strategy.discard_gradients(prepared)
            assert abs(norms[0] - norms[1]) < 1e-5 * norms[0], (stage, norms)
    finally:
        Zero.async_inplace_copy_grad_to_fp32_buffer_from_gpu, Zero._wait_for_offload_copies = copy, wait


def bf16_does_not_round_the_weights() -> None:
    for stage in range(4):
        case = case_of(bf16=True, zero_stage=stage)
        fresh = dict(TinyLM().export_params((n, p.detach()) for n, p in TinyLM().named_parameters()))
        assert_same(case.weights(case.prepare()), fresh)


def another_run_in_this_process_learns_the_same() -> None:
    """The group of the first is gone, and with it the groups that DeepSpeed has made; its store is still there."""
    losses = []
    for _ in range(3):
        case = case_of(zero_stage=2)
        losses.append(case.train(case.prepare(), range(1)))
        case.strategy.teardown()
    assert losses == losses[:1] * 3


if __name__ == "__main__":
    torch.set_num_threads(1)
    holder = case_of()
    found = {
        "divided": [divided(stage) for stage in range(4)], "second": [second_copies(zpg) for zpg in (1, 2)], "buffers":
        [collecting_buffers(overlap) for overlap in (False, True)], "gathered":
        [gathered_at_most(recomputing) for recomputing in (False, True)], "decays": decays_what_no_pass_reads()
    }
    unused_gradients_are_not_used_again()
    moved_weights_are_the_same()
    late_copies_are_waited_for()
    bf16_does_not_round_the_weights()
    holder.strategy.teardown()
    another_run_in_this_process_learns_the_same()
    if holder.strategy.rank == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(found, file)
