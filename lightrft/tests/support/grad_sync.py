"""Checks of --grad_sync on several ranks, started by strategy_conformance."""
from unittest import mock

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.base import Prepared
from lightrft.strategy import fsdp
from lightrft.strategy.fsdp import FSDPV2Strategy, WrapPolicy
from lightrft.strategy.memory import WHOLE_GRADIENTS_SHARE
from lightrft.tests.support.strategy_case import Case, assert_same, whole_gradients
from lightrft.tests.support.tiny_lm import SPEC, TinyLM, loss_of, micro_batch


def full_gradient_bytes(strategy: FSDPV2Strategy, prepared: Prepared) -> int:
    """Bytes of the gradients of full weights that this rank holds."""
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in strategy._placements[prepared.model].units]
    params = [vars(param) for group in groups if group for param in group.fsdp_params]
    found = [param["unsharded_accumulated_grad"] for param in params]
    found += [param["_unsharded_param"].grad for param in params if "_unsharded_param" in param]
    return sum(grad.numel() * grad.element_size() for grad in found if grad is not None)


def grad_sync(case: Case) -> None:
    """Check what full gradients a rank holds between micro-batches, and that the results are the same, also where ranks
    replicate each other."""
    gradients, weights, counted = {}, {}, {}
    for bf16, shard_size in ((False, 0), (False, 1), (True, 0)):
        for when in ("last", "every"):
            cfg = StrategyConfig(grad_sync=when, fsdp_shard_size=shard_size)
            own = Case(FSDPV2Strategy(cfg, bf16, WrapPolicy(one_unit=0, keep_full=0)), case.folder)
            own.strategy.setup()
            prepared, key = own.prepare(), (bf16, shard_size, when)
            batches = [micro_batch(0, 2 * case.strategy.rank + number, case.strategy.device) for number in range(2)]
            own.strategy.backward(loss_of(prepared.model, batches[0]), prepared, last=False)
            counted[key] = full_gradient_bytes(own.strategy, prepared)
            own.strategy.backward(loss_of(prepared.model, batches[1]), prepared)
            gradients[key] = whole_gradients(own.strategy, prepared)
            own.strategy.optimizer_step(prepared)
            own.train(prepared, range(1, 4))
            weights[key] = own.weights(prepared)
        assert_same(gradients[bf16, shard_size, "every"], gradients[bf16, shard_size, "last"], atol=1e-6)
        assert_same(weights[bf16, shard_size, "every"], weights[bf16, shard_size, "last"], atol=1e-6)
    full = 4 * sum(param.numel() for param in TinyLM().parameters())
    assert counted == {key: full if key[2] == "last" else 0 for key in counted}, (full, counted)


def chosen_grad_sync(case: Case) -> None:
    """Check that auto keeps full gradients while they are small against the device, the same on all ranks."""
    size, strategy = sum(param.numel() for param in TinyLM().parameters()), FSDPV2Strategy(StrategyConfig())
    strategy.setup()
    for ratio, every in ((1.0, False), (0.99, True)):
        smallest = int(ratio * 4 * size / WHOLE_GRADIENTS_SHARE) * (case.strategy.world_size)
        room = smallest if strategy.is_main else 1 << 40
        with mock.patch.object(fsdp, "total_memory", lambda device, room=room: room):
            assert strategy._placements[strategy.prepare(TinyLM(), SPEC).model].every is every
