"""Continuous batching: one ``generate`` call of the HF engine, from waiting prompts to finished responses.

Rows of the key-value cache are *slots*. A finished response leaves its slot at once and, as soon as a share of the
slots is free, waiting ones take them; when nothing waits any more, the live rows are moved to the front, so that matrix
products work on live rows only. The host keeps one small array per slot; nothing in the decode loop runs once per row.
"""
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from lightrft.rollout.engine import Completion, Request, SamplingParams
from lightrft.rollout.kv_cache import Decode, KVCache, Prefill
from lightrft.rollout.sampling import sample, uniforms

_PREFILL_TOKENS = 8192  # a prefill pass takes no further prompt from here on
_SLACK = 8  # refill or compact once a share of 1 / _SLACK of the rows is free
_TOKEN, _POSITION, _COUNT, _SAMPLE, _ALIVE = range(5)

Finished = Callable[[int, list[Completion]], None] | None


@dataclass(frozen=True)
class _Shared:
    """A prompt whose samples did not all find a slot: its cache and its last logits wait for the next admission."""
    request: int
    first_sample: int
    saved: Tensor  # [layers, 2, heads, prompt, dim]
    logits: Tensor  # [1, V]


class Generation:
    """The state of one call; :meth:`run` is the whole life of it.

    On the device, ``state`` [5, slots] int64 holds the newest token, its position, the tokens generated so far, the
    sample a slot works for (``num_samples`` when free) and whether it is alive. Results are written to ``tokens`` and
    ``logprobs`` [num_samples + 1, max_new_tokens]; the last row takes what free slots produce.
    """

    def __init__(self, model: nn.Module, cache: KVCache, requests: list[Request], params: SamplingParams, stop: Tensor,
                 on_finished: Finished) -> None:
        self.model, self.cache, self.params, self.on_finished = model, cache, params, on_finished
        self.stop, self.stop_ids = stop, set(stop.nonzero()[:, 0].tolist())
        self.requests, self.decode = requests, Decode(cache)
        sizes = np.array([len(r.seeds) for r in requests])
        self.bounds = np.concatenate([[0], sizes.cumsum()])
        self.num_samples = int(self.bounds[-1])
        self.request_of = np.repeat(np.arange(len(requests)), sizes)
        self.prompt_len = np.array([len(r.token_ids) for r in requests])[self.request_of]
        self.remaining, self.length = sizes.copy(), np.zeros(self.num_samples, dtype=np.int64)
        self.owner = np.full(cache.slots, -1)  # sample of each slot, -1: free
        self.position = np.zeros(cache.slots, dtype=np.int64)  # host copy of the positions, 0 where free
        self.live = 0  # slots 0..live-1 are computed
        self.responses: list[list[Completion]] = [[] for _ in requests]
        waiting = [i for i in range(len(requests)) if sizes[i]]
        self.waiting = deque(sorted(waiting, key=lambda i: -len(requests[i].token_ids)))
        self.shared: _Shared | None = None
        self._allocate()

    def _allocate(self) -> None:
        device, slots, width = self.cache.device, self.cache.slots, self.params.max_new_tokens
        self.state = torch.zeros(5, slots, dtype=torch.long, device=device)
        self.state[_SAMPLE] = self.num_samples
        self.noise = None
        if self.params.temperature > 0.0:
            self.noise = torch.zeros(slots, width, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(self.num_samples + 1, width, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(self.num_samples + 1, width, dtype=torch.float32, device=device)

    def run(self) -> list[list[Completion]]:
        """Generate everything; responses in the order of requests and seeds."""
        for i in np.flatnonzero(self.remaining == 0):
            self._deliver(int(i))
        while self.remaining.any():
            self._rearrange()
            self._step()
        return self.responses

    def _rearrange(self) -> None:
        """Give free slots to waiting samples or, when none waits, close the gaps, once enough slots are free."""
        while self.waiting or self.shared:
            free = np.flatnonzero(self.owner < 0)
            if len(free) < min(max(1, self.cache.slots // _SLACK), self._waiting_samples()):
                return
            self._admit(free)
        dead = self.live - int((self.owner[:self.live] >= 0).sum())
        if dead and dead >= self.live // _SLACK:
            self._compact()

    def _waiting_samples(self) -> int:
        shared = self.bounds[self.shared.request + 1] - self.shared.first_sample if self.shared else 0
        return int(shared) + sum(len(self.requests[i].seeds) for i in self.waiting)

    # -- admission ----------------------------------------------------------------------------------------------------
    def _admit(self, free: np.ndarray) -> None:
        """Fill the slots ``free``: the shared prompt's other samples, or new prompts, as fit one prefill pass."""
        if self.shared is not None:
            self._admit_shared(free)
            return
        groups: list[int] = []
        taken = tokens = 0
        while self.waiting and taken < len(free) and tokens < _PREFILL_TOKENS:
            groups.append(self.waiting.popleft())
            taken += len(self.requests[groups[-1]].seeds)
            tokens += len(self.requests[groups[-1]].token_ids)
        samples = np.concatenate([np.arange(self.bounds[i], self.bounds[i + 1]) for i in groups])[:len(free)]
        source = np.repeat(np.arange(len(groups)), [len(self.requests[i].seeds) for i in groups])[:len(free)]
        slots = free[:len(samples)]
        logits = self._prefill(groups, source, slots)
        if taken > len(samples):
            saved = self.cache.save(int(slots[-1]), len(self.requests[groups[-1]].token_ids))
            self.shared = _Shared(groups[-1], int(samples[-1]) + 1, saved, logits[-1:].clone())
        self._start(samples, slots, logits[torch.from_numpy(source).to(logits.device)])

    def _admit_shared(self, free: np.ndarray) -> None:
        shared, self.shared = self.shared, None
        end = int(self.bounds[shared.request + 1])
        samples = np.arange(shared.first_sample, end)[:len(free)]
        slots = free[:len(samples)]
        self.cache.restore(torch.from_numpy(slots).to(self.cache.device), shared.saved)
        if samples[-1] + 1 < end:
            self.shared = replace(shared, first_sample=int(samples[-1]) + 1)
        self._start(samples, slots, shared.logits.expand(len(samples), -1))

    def _prefill(self, groups: list[int], source: np.ndarray, slots: np.ndarray) -> Tensor:
        """Runs each prompt of ``groups`` once; its cache goes to all its slots. Last-token logits [prompts, V]."""
        prompts = [self.requests[i].token_ids for i in groups]
        lengths = [len(prompt) for prompt in prompts]
        view = Prefill(self.cache, lengths, torch.from_numpy(source), torch.from_numpy(slots))
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.cache.device)
        return self._forward(tokens, view.positions, view, view.last)

    def _start(self, samples: np.ndarray, slots: np.ndarray, logits: Tensor) -> None:
        """Slots begin to work for samples; the first tokens are drawn from ``logits`` [k, V]."""
        device = self.cache.device
        index, ids, lengths = (torch.from_numpy(x).to(device) for x in (slots, samples, self.prompt_len[samples]))
        self.cache.open(index, lengths)
        self.state[_POSITION, index] = lengths - 1
        self.state[_COUNT, index] = 0
        self.state[_SAMPLE, index] = ids
        self.state[_ALIVE, index] = 1
        if self.noise is not None:
            seeds = [self.requests[self.request_of[s]].seeds[s - self.bounds[self.request_of[s]]] for s in samples]
            self.noise[index] = torch.from_numpy(uniforms(seeds, self.params.max_new_tokens)).to(device)
        self.owner[slots], self.position[slots] = samples, self.prompt_len[samples] - 1
        self.live = max(self.live, int(slots.max()) + 1)
        state = self.state[:, index]
        done = self._record(state, logits, None if self.noise is None else self.noise[index, 0])
        self.state[:, index] = state
        self.position[slots] += 1
        self._retire(slots[done.cpu().numpy()])

    # -- decoding -----------------------------------------------------------------------------------------------------
    def _forward(self, tokens: Tensor, positions: Tensor, view: Prefill | Decode, keep: Tensor | int) -> Tensor:
        return self.model(input_ids=tokens[None], position_ids=positions[None], attention_mask=None, use_cache=False,
                          logits_to_keep=keep, kv_cache=view).logits[0]

    def _step(self) -> None:
        """One token for every row."""
        live = self.live
        if not live:
            return
        state = self.state[:, :live]
        self.decode.advance(state[_POSITION], live, int(self.position[:live].max()) + 1)
        logits = self._forward(state[_TOKEN], state[_POSITION], self.decode, 0)
        noise = None if self.noise is None else self.noise[:live].gather(1, state[_COUNT, :, None])[:, 0]
        done = self._record(state, logits, noise)
        self.position[:live] += self.owner[:live] >= 0
        finished = done.nonzero()[:, 0]
        if len(finished):
            self._retire(finished.cpu().numpy())

    def _record(self, state: Tensor, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Draw and store one token per column of ``state`` [5, k], in place; which responses ended, bool [k]."""
        tokens, logprobs = sample(logits, noise, self.params)
        where = (state[_SAMPLE], state[_COUNT])
        self.tokens[where], self.logprobs[where] = tokens, logprobs
        state[_TOKEN] = tokens
        state[_POSITION:_COUNT + 1] += state[_ALIVE]
        return (self.stop[tokens] | (state[_COUNT] == self.params.max_new_tokens)) & (state[_ALIVE] == 1)

    # -- leaving ------------------------------------------------------------------------------------------------------
    def _retire(self, slots: np.ndarray) -> None:
        """Free ``slots``; hand over every request whose last response has just ended."""
        if not len(slots):
            return
        samples = self.owner[slots]
        self.length[samples] = self.position[slots] - self.prompt_len[samples] + 1
        self.owner[slots], self.position[slots] = -1, 0
        index = torch.from_numpy(slots).to(self.cache.device)
        self.state[:, index] = self.state.new_tensor([[0], [0], [0], [self.num_samples], [0]])
        requests, counts = np.unique(self.request_of[samples], return_counts=True)
        self.remaining[requests] -= counts
        for request in requests[self.remaining[requests] == 0]:
            self._deliver(int(request))

    def _deliver(self, request: int) -> None:
        first, end = int(self.bounds[request]), int(self.bounds[request + 1])
        tokens, logprobs = self.tokens[first:end].tolist(), self.logprobs[first:end].tolist()
        lengths = self.length[first:end].tolist()
        rows = [(row[:n], values[:n]) for row, values, n in zip(tokens, logprobs, lengths)]
        self.responses[request] = [Completion(t, l, "stop" if t[-1] in self.stop_ids else "length") for t, l in rows]
        if self.on_finished is not None:
            self.on_finished(request, self.responses[request])

    def _compact(self) -> None:
        """Move the live rows at the end into the gaps at the front."""
        alive = np.flatnonzero(self.owner[:self.live] >= 0)
        count = len(alive)
        source, target = alive[alive >= count], np.flatnonzero(self.owner[:count] < 0)
        if len(source):
            moved, to = torch.from_numpy(source).to(self.cache.device), torch.from_numpy(target).to(self.cache.device)
            self.cache.move(moved, to, int(self.position[source].max()))
            self.state[:, to] = self.state[:, moved]
            if self.noise is not None:
                self.noise[to] = self.noise[moved]
            self.owner[target], self.position[target] = self.owner[source], self.position[source]
            self.owner[source], self.position[source] = -1, 0
        self.live = count
