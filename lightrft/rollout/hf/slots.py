"""Slots of the HF engine: which response has which row of the cache, and which prompt has which prompt slot."""
import numpy as np

from lightrft.rollout.hf.workspace import Workspace
from lightrft.rollout.open_responses import OpenPrompt, OpenResponse
from lightrft.types import Segment
from lightrft.utils.tensors import upload

ALIVE = 3  # index of a slot's state that says whether it draws


class Slots:
    """Owners of the rows and prompt slots of ``space``, while weights of one ``version`` draw.

    Attributes:
        owners: response of each slot.
        tenants: prompt of each prompt slot.
        taken: slots with a response.
        alive: slots that draw: neither free nor parked.
        count: tokens of the response of each slot so far, 0 where free.
        live: slots from here on do not draw.
        moved: rows or prompts have changed since the attention was told.
    """

    def __init__(self, space: Workspace, version: int) -> None:
        self.space, self.cache, self.version, plan = space, space.cache, version, space.cache.plan
        self.device = space.cache.device
        self.owners: list[OpenResponse | None] = [None] * plan.slots
        self.tenants: list[OpenPrompt | None] = [None] * plan.prompts
        self.taken, self.alive = np.zeros(plan.slots, dtype=bool), np.zeros(plan.slots, dtype=bool)
        self.count = np.zeros(plan.slots, dtype=np.int64)
        self.live, self.moved = 0, False

    def of(self, slots: np.ndarray) -> list[OpenResponse]:
        """Return the responses in ``slots``."""
        return [owner for slot in slots.tolist() if (owner := self.owners[slot]) is not None]

    # -- prompts ------------------------------------------------------------------------------------------------------
    def seat(self, prompts: list[OpenPrompt], slots: list[int]) -> None:
        """Assign prompt slots."""
        for prompt, slot in zip(prompts, slots, strict=True):
            prompt.slot, self.tenants[slot] = slot, prompt

    def _leave(self) -> None:
        """Free the slots of prompts all of whose responses are finished."""
        self.tenants = [tenant if tenant is not None and tenant.left else None for tenant in self.tenants]

    def free_prompts(self, least: int, needed: OpenPrompt | None) -> list[int]:
        """Return the free prompt slots. Where there is none, up to ``least`` prompts leave none of whose responses
        draws, with these; not the ``needed`` one."""
        self._leave()
        if free := [index for index, tenant in enumerate(self.tenants) if tenant is None]:
            return free
        staying = {response.prompt for response in self.of(np.flatnonzero(self.alive))} | {needed}
        free = [index for index, tenant in enumerate(self.tenants) if tenant not in staying][:least]
        for index in free:
            self._evict(index)
        return free

    def _evict(self, index: int) -> None:
        """Free a prompt slot, and the rows of the prompt's responses."""
        if (prompt := self.tenants[index]) is not None:
            self.vacate(np.array([row for row, owner in enumerate(self.owners) if owner and owner.prompt is prompt]))
            prompt.slot, self.tenants[index] = -1, None

    # -- rows ---------------------------------------------------------------------------------------------------------
    def occupy(self, responses: list[OpenResponse], slots: np.ndarray, count: np.ndarray) -> None:
        """Let ``slots`` draw for responses that have ``count`` tokens, each."""
        for response, slot in zip(responses, slots.tolist(), strict=True):
            response.slot, self.owners[slot] = slot, response
        self.taken[slots], self.alive[slots], self.count[slots], self.moved = True, True, count, True
        self.live = max(self.live, int(slots.max()) + 1)

    def park(self, slots: list[int]) -> None:
        """Stop drawing; the rows stay. From now on their newest token is noise: an answer begins with the right one."""
        if slots:
            self.alive[slots] = False
            self.space.state[ALIVE, upload(slots, self.device)] = 0

    def vacate(self, slots: np.ndarray) -> None:
        """Free ``slots``; what they have drawn has been fetched."""
        if not len(slots):
            return
        for response in self.of(slots):
            self.owners[response.slot], response.slot = None, -1
        self.taken[slots], self.alive[slots], self.count[slots] = False, False, 0
        self.space.state[:, upload(slots, self.device)] = self.space.free

    def vacate_all(self) -> None:
        """Free all slots and prompt slots."""
        self.vacate(np.flatnonzero(self.taken))
        for index in range(len(self.tenants)):
            self._evict(index)

    def fetch(self, slots: np.ndarray) -> list[OpenResponse]:
        """Fetch what ``slots`` have drawn; return their responses, in the order of submission."""
        if not len(slots):
            return []
        responses = sorted(self.of(slots), key=lambda response: response.order)
        slots = np.array([response.slot for response in responses])
        ends, index = self.count[slots], upload(slots, self.device)
        columns = (x[index, :int(ends.max())].tolist() for x in (self.space.tokens, self.space.logprobs))
        for response, end, tokens, logprobs in zip(responses, ends.tolist(), *columns):
            begun = response.episode.response_len
            response.episode.add([Segment(tokens[begun:end], logprobs[begun:end], True, self.version)])
        return responses

    # -- order --------------------------------------------------------------------------------------------------------
    def compact(self) -> None:
        """Move the live rows and prompts at the end into the gaps at the front; parked rows change places with them."""
        self._leave()
        self._move_rows(*_gaps(self.alive[:self.live]))
        self.live, self.moved = int(self.alive.sum()), True
        source, target = _gaps(np.array([tenant is not None for tenant in self.tenants]))
        if len(source):
            self.cache.prompts.move(*upload(np.stack([source, target]), self.device))
        for old, new in zip(source.tolist(), target.tolist()):
            self.tenants[new], self.tenants[old] = (tenant := self.tenants[old]), None
            if tenant is not None:
                tenant.slot = new

    def _move_rows(self, source: np.ndarray, target: np.ndarray) -> None:
        parked, space = self.taken[target], self.space
        freed = source[~parked]
        old, new = np.concatenate([source, target[parked]]), np.concatenate([target, source[parked]])
        moved, to = upload(np.stack([old, new]), self.device)
        self.cache.rows.move(moved, to, self.count.max())
        space.state[:, to] = space.state[:, moved]
        space.state[:, upload(freed, self.device)] = space.free  # sizes that are rounded up reach them
        for drawn in (space.tokens, space.logprobs, space.noise, space.seen):
            if drawn is not None:
                drawn[to] = drawn[moved]
        for host in (self.taken, self.alive, self.count):
            host[new], host[freed] = host[old], 0
        owners = [self.owners[slot] for slot in old.tolist()]
        for slot, owner in [*((slot, None) for slot in freed.tolist()), *zip(new.tolist(), owners)]:
            self.owners[slot] = owner
            if owner is not None:
                owner.slot = slot


def _gaps(used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the entries of ``used`` (bool) to move, and their targets, so that all such entries stand at the
    front."""
    alive = np.flatnonzero(used)
    return alive[alive >= len(alive)], np.flatnonzero(~used[:len(alive)])
