"""Features of media: their indices in prompts, and a host-memory cache of those that frozen towers compute."""
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn, Tensor
from transformers import PretrainedConfig

from lightrft.models.towers import config_value, Features, Tower
from lightrft.ops.segment import expand
from lightrft.types import Experience
from lightrft.utils.byte_cache import ByteCache
from lightrft.utils.errors import UserError

Kinds = tuple[str, ...]
_NO_TOKEN = -2  # no id, nor what stands for one that a family lacks


def keys_of(exp: Experience, kinds: Kinds) -> list[list[str]]:
    """Keys of the media of ``kinds`` of each sequence, in the order of their features."""
    return [[key for key in sequence if key.partition(":")[0] in kinds] for sequence in exp.media or ()]


class MediaPlaces:
    """Finds the tokens of sequences that stand for media, all of which are in their :attr:`Batch.spans`. All positions
    are on the CPU.

    Args:
        towers: of the family, by kind of media.
        config: of the model.

    Attributes:
        tokens: id of the token that stands for a feature, by kind.
    """

    def __init__(self, towers: Mapping[str, Tower], config: PretrainedConfig) -> None:
        self.tokens = {kind: int(config_value(config, tower.token, -1)) for kind, tower in towers.items()}
        self._between = {
            kind: tuple(int(config_value(config, name, -1)) for name in tower.between)
            for kind, tower in towers.items() if tower.between
        }

    def groups(self, kinds: Iterable[str]) -> list[Kinds]:
        """Group the ``kinds`` by what stands for them. Those of one group look alike: their features take its
        places in the order of the media (InternVL and SmolVLM, for which a video is a row of pictures)."""
        found: dict[tuple[int, tuple[int, ...]], Kinds] = {}
        for kind in kinds:
            mark = self.tokens[kind], self._between.get(kind, ())
            found[mark] = (*found.get(mark, ()), kind)
        return list(found.values())

    def of(self, exp: Experience, kind: str) -> Tensor:
        """Positions in [T] of the tokens that stand for media of ``kind``, or of its group."""
        host = exp.host
        inside = torch.zeros(host.num_tokens, dtype=torch.bool)
        for first, spans in zip(host.cu_seqlens.tolist(), host.spans):
            for span in spans:
                inside[first + span.start:first + span.stop] = True
        return self.marked(host.token_ids.where(inside, _NO_TOKEN), kind, host.cu_seqlens).nonzero()[:, 0]

    def of_prompt(self, ids: list[int], kind: str) -> list[int]:
        """Indices of the tokens of one prompt that stand for media of ``kind``, or of its group."""
        return self.marked(torch.tensor(ids), kind, torch.tensor([0, len(ids)])).nonzero()[:, 0].tolist()

    def marked(self, ids: Tensor, kind: str, cu_seqlens: Tensor) -> Tensor:
        """Bool [T]: which tokens stand for media of ``kind``, by id and, of kinds with one token, by what is around."""
        found = ids == self.tokens[kind]
        for other, (first, last) in self._between.items():
            if self.tokens[other] == self.tokens[kind]:
                change = (ids == first).int() - (ids == last).int()
                depth = change.cumsum(0)
                before = (depth - change)[cu_seqlens[:-1].long()]
                opened = depth > expand(before, cu_seqlens)
                found = found & (opened if other == kind else ~opened)
        return found

    def blocks(self, exp: Experience, kinds: Iterable[str]) -> Tensor:
        """Number of the picture, or frame, of each token [T]; -1: text."""
        inside = torch.zeros(exp.num_tokens, dtype=torch.bool)
        for kind in kinds:
            inside[self.of(exp, kind)] = True
        starts = inside & ~nn.functional.pad(inside, (1, -1))
        return torch.where(inside, starts.cumsum(0), -1)

    @staticmethod
    def check(places: Tensor, exp: Experience, kinds: Kinds, keys: Sequence[Sequence[str]],
              features: Mapping[str, int]) -> None:
        """Compare, sequence by sequence, the ``places`` (:meth:`of`) of media of the group ``kinds`` with the
        ``features`` of its ``keys``, a number by key.

        Raises:
            UserError: they differ.
        """
        ends = exp.host.cu_seqlens[1:].long()
        tokens = torch.bucketize(places, ends, right=True).bincount(minlength=len(ends)).tolist()
        for number, (found, some) in enumerate(zip(tokens, keys)):
            if found != (wanted := sum(features[key] for key in some)):
                raise UserError(
                    f"sequence {number} of a micro-batch has {found} {' or '.join(kinds)} tokens for "
                    f"{wanted} features of {len(some)} media {', '.join(some)}: the processor is not the model's")


_MIB = 1 << 20


class FeatureCache:
    """Features of frozen towers by the key of their medium; the least recently used are evicted.

    A tower computes each medium alone, so features do not depend on the batch, the ranks or the contents of the cache.

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
