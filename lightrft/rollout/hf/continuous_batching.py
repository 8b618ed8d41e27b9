"""Continuous batching: one ``generate`` call of the HF engine, from waiting prompts to finished responses.

Rows of the key-value cache are *slots*; a prompt has a *prompt slot* (``place``), which all its samples read. A
finished response frees its slot at once. As soon as a share of the slots is free, waiting responses take them. When
none waits any more, live rows and prompts move to the front, so that matrix products cover only them. The host keeps
one small array per slot; nothing in the decode loop runs once per row. For a response that resumes from a prefix, the
slot is first filled with the prefix; from then on its state is the same as if all of it had been generated here.
"""
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from lightrft.rollout.engine import Arrived, Completion, Finished, Request, SamplingParams
from lightrft.rollout.hf.kv_cache import Decode, KVCache, Prefill
from lightrft.rollout.sampling import sample, uniforms

_PREFILL_TOKENS = 8192  # a prefill pass takes no further prompt from here on
_SLACK = 8  # refill or compact once a share of 1 / _SLACK of the rows is free
_TOKEN, _POSITION, _COLUMN, _SAMPLE, _ALIVE = range(5)


@dataclass(frozen=True)
class _Shared:
    """A prompt whose samples did not all find a slot: its last logits wait for the next admission."""
    request: int
    first_sample: int
    logits: Tensor  # [1, V]


class Generation:
    """State of one ``generate`` call; :meth:`run` executes the call.

    On the device, ``state`` [5, slots] int64 holds the newest token, its position in the sequence and in the response,
    the sample a slot serves (``num_samples`` when free) and whether it is alive. Results are written to ``tokens``
    and ``logprobs`` [num_samples + 1, max_new_tokens]; the last row takes what free slots produce.
    """

    def __init__(self, model: nn.Module, cache: KVCache, requests: list[Request], params: SamplingParams, stop: Tensor,
                 on_finished: Finished | None, on_arrived: Arrived | None = None) -> None:
        self.model, self.cache, self.params = model, cache, params
        self.on_finished, self.on_arrived = on_finished, on_arrived
        self.first = params if params.first_temperature is None else replace(params,
                                                                             temperature=params.first_temperature)
        self.stop, self.stop_ids = stop, set(stop.nonzero()[:, 0].tolist())
        self.requests, self.decode = requests, Decode(cache)
        sizes = np.array([len(r.seeds) for r in requests])
        self.bounds = np.concatenate([[0], sizes.cumsum()])
        self.num_samples = int(self.bounds[-1])
        self.request_of = np.repeat(np.arange(len(requests)), sizes)
        self.prompt_len = np.array([len(r.token_ids) for r in requests])[self.request_of]
        self.prefixes = [prefix for r in requests for prefix in r.prefixes or [[]] * len(r.seeds)]
        self.begun = np.array([len(prefix) for prefix in self.prefixes], dtype=np.int64)
        self.remaining, self.length, self.ended = sizes.copy(), self.begun.copy(), False
        self.done = np.zeros(self.num_samples, dtype=bool)
        self.owner = np.full(cache.plan.slots, -1)  # sample of each slot, -1: free
        self.count = np.zeros(cache.plan.slots, dtype=np.int64)  # its tokens so far, 0 where free
        self.tenant = np.full(cache.plan.prompts, -1)  # request whose prompt is in each prompt slot, -1: free
        self.place = np.full(len(requests), -1)  # the inverse: prompt slot of each request, or -1
        self.live, self.moved = 0, False  # slots 0..live-1 are computed; rows or prompts changed since the last step
        self.responses: list[list[Completion]] = [[] for _ in requests]
        self.read: dict[int, Completion] = {}  # by sample
        waiting = [i for i in range(len(requests)) if sizes[i]]
        self.waiting = deque(sorted(waiting, key=lambda i:
                                    (not any(requests[i].prefixes), -len(requests[i].token_ids))))
        self.shared: _Shared | None = None
        self._allocate()

    def _allocate(self) -> None:
        device, slots, width = self.cache.device, self.cache.plan.slots, self.params.max_new_tokens
        self.state = torch.zeros(5, slots, dtype=torch.long, device=device)
        self.state[_SAMPLE] = self.num_samples
        self.noise = None
        if max(self.params.temperature, self.first.temperature) > 0.0:
            self.noise = torch.zeros(slots, width, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(self.num_samples + 1, width, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(self.num_samples + 1, width, dtype=torch.float32, device=device)

    def run(self) -> list[list[Completion]]:
        """Generate all, or until ``on_finished`` returns True; return responses in the order of requests and seeds."""
        for i in np.flatnonzero(self.remaining == 0):
            self._deliver(int(i))
        while self.remaining.any() and not self.ended:
            self._rearrange()
            self._step()
        self._abort()
        return self.responses

    def _rearrange(self) -> None:
        """Give free slots to waiting samples or, when none waits, close the gaps, once enough slots are free."""
        while (self.waiting or self.shared) and not self.ended:
            free = np.flatnonzero(self.owner < 0)
            if len(free) < min(max(1, len(self.owner) // _SLACK), self._waiting_samples()):
                return
            if not (self.shared or (self.tenant < 0).any()):
                return
            self._admit(free)
        dead = int((self.owner[:self.live] < 0).sum())
        if dead and dead >= self.live // _SLACK:
            self._compact()

    def _waiting_samples(self) -> int:
        shared = self.bounds[self.shared.request + 1] - self.shared.first_sample if self.shared else 0
        return int(shared) + sum(len(self.requests[i].seeds) for i in self.waiting)

    # -- admission ----------------------------------------------------------------------------------------------------
    def _admit(self, free: np.ndarray) -> None:
        """Fill the slots ``free`` with the shared prompt's other samples, or with new prompts of one prefill pass."""
        if self.shared is not None:
            self._admit_shared(self.shared, free)
            return
        groups: list[int] = []
        places = np.flatnonzero(self.tenant < 0)
        taken = tokens = 0
        while self.waiting and taken < len(free) and tokens < _PREFILL_TOKENS and len(groups) < len(places):
            groups.append(self.waiting.popleft())
            taken += len(self.requests[groups[-1]].seeds)
            tokens += len(self.requests[groups[-1]].token_ids)
        samples = np.concatenate([np.arange(self.bounds[i], self.bounds[i + 1]) for i in groups])[:len(free)]
        source = np.repeat(np.arange(len(groups)), [len(self.requests[i].seeds) for i in groups])[:len(free)]
        logits = self._prefill(groups, places[:len(groups)])
        if taken > len(samples):
            self.shared = _Shared(groups[-1], int(samples[-1]) + 1, logits[-1:].clone())
        self._start(samples, free[:len(samples)], logits[torch.from_numpy(source).to(logits.device)])

    def _admit_shared(self, shared: _Shared, free: np.ndarray) -> None:
        self.shared = None
        end = int(self.bounds[shared.request + 1])
        samples = np.arange(shared.first_sample, end)[:len(free)]
        if samples[-1] + 1 < end:
            self.shared = replace(shared, first_sample=int(samples[-1]) + 1)
        self._start(samples, free[:len(samples)], shared.logits.expand(len(samples), -1))

    def _prefill(self, groups: list[int], places: np.ndarray) -> Tensor:
        """Run each prompt of ``groups`` once, into its prompt slot; return last-token logits [prompts, V]."""
        self.place[groups], self.tenant[places] = places, groups
        prompts = [self.requests[i].token_ids for i in groups]
        view = Prefill(self.cache, [len(prompt) for prompt in prompts], places)
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.cache.device)
        return self._forward(tokens, view.positions, view, view.last)

    def _start(self, samples: np.ndarray, slots: np.ndarray, logits: Tensor) -> None:
        """Assign slots to samples and draw a token for each; ``logits`` [k, V] are those after their prompts."""
        fresh = self.begun[samples] == 0
        if fresh.any():
            self._draw(samples[fresh], slots[fresh], logits[torch.from_numpy(fresh).to(logits.device)], self.first)
        if not fresh.all():
            self._draw(samples[~fresh], slots[~fresh], self._restore(samples[~fresh], slots[~fresh]), self.params)

    def _restore(self, samples: np.ndarray, slots: np.ndarray) -> Tensor:
        """Run the prompts and prefixes of ``samples``, the prefixes into ``slots``; return last-token logits [k, V]."""
        lengths = self.prompt_len[samples] + self.begun[samples]
        passes, logits = (lengths.cumsum() - lengths) // _PREFILL_TOKENS, []
        for part in (passes == number for number in np.unique(passes)):
            tokens = [t for s in samples[part] for t in self.requests[self.request_of[s]].token_ids + self.prefixes[s]]
            view = Prefill(self.cache, lengths[part].tolist(), slots[part], self.prompt_len[samples[part]])
            logits.append(self._forward(torch.tensor(tokens, device=self.cache.device), view.positions, view,
                                        view.last))
        return torch.cat(logits)

    def _draw(self, samples: np.ndarray, slots: np.ndarray, logits: Tensor, params: SamplingParams) -> None:
        """Draw the next token of samples from ``logits`` [k, V]; from now on their slots are live."""
        device, begun = self.cache.device, self.begun[samples]
        index, ids, column, lengths = (torch.from_numpy(x).to(device)
                                       for x in (slots, samples, begun, self.prompt_len[samples]))
        state = torch.zeros_like(self.state[:, :len(slots)])
        state[_POSITION], state[_COLUMN], state[_SAMPLE], state[_ALIVE] = lengths + column - 1, column - 1, ids, 1
        if self.noise is not None:
            seeds = [self.requests[self.request_of[s]].seeds[s - self.bounds[self.request_of[s]]] for s in samples]
            self.noise[index] = torch.from_numpy(uniforms(seeds, self.params.max_new_tokens)).to(device)
        self.owner[slots], self.count[slots], self.moved = samples, begun + 1, True
        self.live = max(self.live, int(slots.max()) + 1)
        done = self._record(state, logits, None if self.noise is None else self.noise[index, column], params)
        self.state[:, index] = state
        self._retire(slots[done.cpu().numpy()])

    # -- decoding -----------------------------------------------------------------------------------------------------
    def _forward(self, tokens: Tensor, positions: Tensor, view: Prefill | Decode, keep: Tensor | int) -> Tensor:
        return self.model(input_ids=tokens[None], position_ids=positions[None], attention_mask=None, use_cache=False,
                          logits_to_keep=keep, kv_cache=view).logits[0]

    def _step(self) -> None:
        """Generate one token for every row."""
        live = self.live
        if not live or self.ended:
            return
        if self.moved:
            self._arrange()
        state = self.state[:, :live]
        self.decode.advance(state[_COLUMN], int(self.count[:live].max()))
        logits = self._forward(state[_TOKEN], state[_POSITION], self.decode, 0)
        noise = None if self.noise is None else self.noise[:live].gather(1, state[_COLUMN, :, None] + 1)[:, 0]
        done = self._record(state, logits, noise, self.params)
        self.count[:live] += self.owner[:live] >= 0
        finished = done.nonzero()[:, 0]
        if len(finished):
            self._retire(finished.cpu().numpy())

    def _arrange(self) -> None:
        """Pass to the attention the prompt slot and the prompt length that each row reads."""
        owner = self.owner[:self.live]
        alive = owner >= 0
        self.decode.arrange(np.where(alive, self.place[self.request_of[owner]], -1),
                            np.where(alive, self.prompt_len[owner], 0))
        self.moved = False

    def _record(self, state: Tensor, logits: Tensor, noise: Tensor | None, params: SamplingParams) -> Tensor:
        """Draw and store one token per column of ``state`` [5, k], in place; return which responses ended, bool [k]."""
        tokens, logprobs = sample(logits, noise, params)
        where = (state[_SAMPLE], state[_COLUMN] + 1)
        self.tokens[where], self.logprobs[where] = tokens, logprobs
        state[_TOKEN] = tokens
        state[_POSITION:_COLUMN + 1] += state[_ALIVE]
        return (self.stop[tokens] | (state[_COLUMN] == self.params.max_new_tokens - 1)) & (state[_ALIVE] == 1)

    # -- leaving ------------------------------------------------------------------------------------------------------
    def _retire(self, slots: np.ndarray) -> None:
        """Free ``slots``; report their responses, and every request whose last response has just ended."""
        if not len(slots):
            return
        samples = self.owner[slots]
        self.length[samples], self.done[samples] = self.count[slots], True
        self.owner[slots], self.count[slots] = -1, 0
        index = torch.from_numpy(slots).to(self.cache.device)
        self.state[:, index] = self.state.new_tensor([[0], [0], [0], [self.num_samples], [0]])
        if self.on_arrived is not None:
            self._tell(self.on_arrived, sorted(samples.tolist()))
        requests, counts = np.unique(self.request_of[samples], return_counts=True)
        self.remaining[requests] -= counts
        for request in requests[self.remaining[requests] == 0]:
            self._deliver(int(request))

    def _tell(self, on_arrived: Arrived, samples: list[int]) -> None:
        self._read(samples)
        requests = self.request_of[samples].tolist()
        on_arrived([(i, s - int(self.bounds[i]), self.read[s]) for i, s in zip(requests, samples)])

    def _deliver(self, request: int) -> None:
        if self.place[request] >= 0:
            self.tenant[self.place[request]] = -1
        self.responses[request] = self._completions(request)
        if self.on_finished is not None and self.on_finished(request, self.responses[request]):
            self.ended = True

    def _completions(self, request: int) -> list[Completion]:
        samples = range(int(self.bounds[request]), int(self.bounds[request + 1]))
        self._read([s for s in samples if s not in self.read])
        return [self.read[s] for s in samples]

    def _read(self, samples: list[int]) -> None:
        """Fetch responses from the device, once each."""
        index = torch.tensor(samples, dtype=torch.long, device=self.cache.device)
        width = int(self.length[samples].max(initial=0))
        for s, tokens, logprobs in zip(samples, *(x[index, :width].tolist() for x in (self.tokens, self.logprobs))):
            begun, end = int(self.begun[s]), int(self.length[s])
            reason = self._reason(tokens[end - 1]) if self.done[s] else "abort"
            self.read[s] = Completion(tokens[begun:end], logprobs[begun:end], reason)

    def _reason(self, last: int) -> str:
        return "stop" if last in self.stop_ids else "length"

    def _abort(self) -> None:
        """Collect unfinished responses as they are, if there are any."""
        slots = np.flatnonzero(self.owner >= 0)
        self.length[self.owner[slots]] = self.count[slots]
        for request in np.flatnonzero(self.remaining):
            self.responses[request] = self._completions(int(request))

    def _compact(self) -> None:
        """Move the live rows and prompts at the end into the gaps at the front."""
        self.moved, device = True, self.cache.device
        source, target = _gaps(self.owner[:self.live])
        moved, to, width = torch.from_numpy(source).to(device), torch.from_numpy(target).to(device), self.count.max()
        rows = self.cache.rows.data
        rows[:, :, to, :, :width] = rows[:, :, moved, :, :width]
        self.state[:, to] = self.state[:, moved]
        if self.noise is not None:
            self.noise[to] = self.noise[moved]
        for host, free in ((self.owner, -1), (self.count, 0)):
            host[target], host[source] = host[source], free
        self.live = int((self.owner >= 0).sum())
        source, target = _gaps(self.tenant)
        prompts = self.cache.prompts.data
        prompts[:, :, torch.from_numpy(target).to(device)] = prompts[:, :, torch.from_numpy(source).to(device)]
        self.place[self.tenant[source]] = target
        self.tenant[target], self.tenant[source] = self.tenant[source], -1


def _gaps(owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the entries >= 0 to move, and their targets, so that all such entries stand at the front."""
    alive = np.flatnonzero(owners >= 0)
    return alive[alive >= len(alive)], np.flatnonzero(owners[:len(alive)] < 0)
