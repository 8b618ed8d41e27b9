"""Ranks as threads: a spread batch whose collectives are real, in one process."""
import threading

import torch

from lightrft.ops.segment import Spread


class ThreadSpread(Spread):
    """Spread of a batch over threads; ``own_index`` are the sequences of this one."""

    def __init__(self, world, rank, own_index, size):
        self.world, self.rank, self.index, self.size = world, rank, torch.tensor(own_index, dtype=torch.long), size

    def own(self, values):
        return values[self.index]

    def gather(self, values):
        whole = torch.zeros(self.size, dtype=values.dtype).index_copy(0, self.index, values)
        return self.total(whole)

    def total(self, value):
        self.world.slots[self.rank] = value
        self.world.barrier.wait()
        found = sum(self.world.slots[1:], self.world.slots[0])
        self.world.barrier.wait()
        return found


class World:
    """Threads that run one function each."""

    def __init__(self, size):
        self.slots, self.barrier = [None] * size, threading.Barrier(size, timeout=60)

    def run(self, function, owners, size):
        """``[function(spread)]`` of every rank; ``owners[rank]`` are its sequences of a batch of ``size``."""
        found, errors = [None] * len(owners), []

        def work(rank):
            try:
                found[rank] = function(ThreadSpread(self, rank, owners[rank], size))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank, )) for rank in range(len(owners))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found
