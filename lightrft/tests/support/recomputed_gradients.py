"""The check that gradients do not depend on the activations that the backward pass computes again, for every strategy.
"""
from lightrft.tests.support.strategy_case import assert_same, Case, whole_gradients


def recomputed_gradients_are_the_same(case: Case) -> None:
    """Bitwise, of two micro-batches, with nothing, some and all of the activations of a layer recomputed."""

    def gradients(mode: bool | str) -> dict[str, object]:
        prepared = case.prepare(recomputing=mode)
        case.backward(prepared, 0, 2 * case.strategy.world_size)
        return whole_gradients(case.strategy, prepared)

    expected = gradients(False)
    assert expected
    for mode in ("selective", True):
        assert_same(gradients(mode), expected)
