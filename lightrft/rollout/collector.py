"""Collection of completions as they end, and the callbacks that report them on each rank."""
from lightrft.rollout.engine import Arrived, Completion, Finished, Request

Ended = list[tuple[int, int, Completion]]  # request, index among its seeds, completion


class CompletionCollector:
    """Collector of the completions of all ``requests``, from all ranks that share an engine. Callbacks report only this
    rank's requests, ``mine``, counted from 0."""

    def __init__(self, requests: list[Request], mine: slice, on_finished: Finished | None,
                 on_arrived: Arrived | None) -> None:
        self.requests, self.mine = requests, range(mine.start, mine.stop)
        self.on_finished, self.on_arrived = on_finished, on_arrived
        self.done: list[dict[int, Completion]] = [{} for _ in requests]
        self.open, self.has_enough = len(self.mine), False

    @property
    def empty(self) -> list[int]:
        """Requests without seeds, which ask for nothing."""
        return [i for i, request in enumerate(self.requests) if not request.seeds]

    def take(self, ended: Ended) -> list[int]:
        """Store completions that have ended and report them; return the requests that they complete."""
        self.keep(ended)
        own = [(i - self.mine.start, j, one) for i, j, one in ended if i in self.mine]
        if own and self.on_arrived is not None:
            self.on_arrived(own)
        touched = dict.fromkeys(i for i, _, _ in ended)
        return [i for i in touched if len(self.done[i]) == len(self.requests[i].seeds)]

    def keep(self, ended: Ended) -> None:
        """Store completions without reporting them."""
        for i, j, one in ended:
            self.done[i][j] = one

    def enough(self, complete: list[int]) -> bool:
        """Report complete requests; return whether this rank needs no further token."""
        own = [i for i in complete if i in self.mine]
        self.open -= len(own)
        if self.on_finished is not None:
            self.has_enough |= any([self.on_finished(i - self.mine.start, self._responses(i)) for i in own])
        return self.has_enough or not self.open

    def own(self) -> list[list[Completion]]:
        """Completions of this rank, once all are stored."""
        return [self._responses(i) for i in self.mine]

    def _responses(self, i: int) -> list[Completion]:
        return [self.done[i][j] for j in range(len(self.requests[i].seeds))]
