"""Ranks as threads of one process: a strategy whose collectives are real, without models."""
import copy
import threading

import torch

from lightrft.strategy.base import StrategyBase


class ThreadStrategy(StrategyBase):
    """The collectives of one thread among ``world``."""

    def __init__(self, world, rank):
        self.world, self.rank, self.world_size = world, rank, len(world.slots)

    def _read(self, value, copied):
        """Give ``value`` to the others; a copy of what this rank reads of each."""
        self.world.slots[self.rank] = value
        self.world.barrier.wait()
        found = [copied(each) for each in self.world.slots]
        self.world.barrier.wait()
        return found

    def all_gather_object(self, value):
        """Every rank gets copies, as pickling would make."""
        return self._read(value, copy.deepcopy)

    def all_reduce(self, value, op="sum"):
        found = torch.stack(self._read(value, torch.clone))
        return {"sum": found.sum, "max": found.amax, "min":
                found.amin}[op](0).to(torch.int64 if op == "sum" and value.dtype == torch.bool else value.dtype)

    def exchange(self, outgoing):
        return self._read(outgoing, lambda each: copy.deepcopy(each[self.rank]))


ThreadStrategy.__abstractmethods__ = frozenset()


class World:
    """``size`` threads that run one function each."""

    def __init__(self, size):
        self.slots, self.barrier = [None] * size, threading.Barrier(size, timeout=60)

    def run(self, function):
        """``[function(strategy)]`` of every rank."""
        found, errors = [None] * len(self.slots), []

        def work(rank):
            try:
                found[rank] = function(ThreadStrategy(self, rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank, )) for rank in range(len(self.slots))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found
