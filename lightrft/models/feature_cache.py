"""Cache of the features that frozen towers compute, in host memory."""
from collections.abc import Callable, Sequence

import torch

from lightrft.models.towers import Features
from lightrft.utils.byte_cache import ByteCache

_MIB = 1 << 20


class FeatureCache:
    """Features by the key of their medium, of towers that are not trained; those not used for the longest time go.

    A tower computes each medium alone, so its features do not depend on the batch, on the ranks or on what is kept.

    Args:
        budget_mib: MiB of features that are kept.

    Attributes:
        computed: media whose features a tower computed, since the last :meth:`take_counts`.
        reused: media whose features were there.
    """

    def __init__(self, budget_mib: int) -> None:
        self.computed = self.reused = 0
        self._kept = ByteCache[Features](budget_mib * _MIB, lambda one: one.nbytes)

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    @torch.no_grad()
    def features(self, keys: Sequence[str], compute: Callable[[str | None], Features],
                 passes: Callable[[int], int]) -> Features:
        """Return the features of the media ``keys``, in host memory; ``compute`` runs a tower for those that are not
        kept.

        Args:
            compute: features of one medium; of a blank one for None.
            passes: number of passes of all ranks that run together, from that of this rank.
        """
        found = {key: self._kept.get(key) for key in keys}
        missing = [key for key, one in found.items() if one is None]
        blank = passes(len(missing)) - len(missing)
        for key in missing:
            found[key] = self._kept.keep(key, compute(key).on_host())
        for _ in range(blank):
            compute(None)
        self.computed, self.reused = self.computed + len(missing), self.reused + len(found) - len(missing)
        return Features.joined([one for one in found.values() if one is not None])

    def take_counts(self) -> tuple[int, int]:
        """Return ``(computed, reused)``, and count from 0 again."""
        counts = self.computed, self.reused
        self.computed = self.reused = 0
        return counts
