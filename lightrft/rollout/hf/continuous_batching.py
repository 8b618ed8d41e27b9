"""Continuous batching: one ``generate`` call of the HF engine, from waiting prompts to finished responses.

Rows of the key-value cache are *slots*; a prompt has a *prompt slot*, which all its samples read. A response that has
ended frees its slot at once. As soon as a share of the slots is free, waiting responses take them. When none waits any
more, live rows and prompts move to the front, so that matrix products cover only them. The host keeps one small array
per slot; nothing in the decode loop runs once per row. For a response that resumes, from a prefix or with its next
turn, the slot is first filled with its tokens; from then on its state is the same as if all of them had been generated
in this slot.
"""
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightrft.models.actor_modality import ActorModality
from lightrft.rollout.collector import CompletionCollector
from lightrft.rollout.engine import Completion, Ended, SamplingParams
from lightrft.rollout.hf.decode_graph import padded_rows, padded_width, StepGraphs
from lightrft.rollout.hf.kv_cache import Prefill
from lightrft.rollout.hf.module_calls import Forward
from lightrft.rollout.hf.workspace import Workspace
from lightrft.rollout.sampling import penalised, sample, uniforms
from lightrft.types import Experience
from lightrft.utils.tensors import upload

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
    """State of one ``generate`` call, on the host and in ``space``; :meth:`run` executes the call.

    ``stop`` [V] bool: the tokens that end a response.
    """

    def __init__(self, model: PreTrainedModel, modality: ActorModality, decode_pass: Forward, space: Workspace,
                 collector: CompletionCollector, params: SamplingParams, stop: Tensor, graphs: StepGraphs) -> None:
        self.model, self.collector, self.params, self.graphs = model, collector, params, graphs
        self.cache, self.decode, self.state = (cache := space.cache), space.decode, space.state
        self.free, self.noise, self.seen = space.free, space.noise, space.seen
        self.tokens, self.logprobs, self.stop = space.tokens, space.logprobs, space.stop
        self.decode_pass = decode_pass
        self.modality = modality
        self.first = params if params.first_temperature is None else replace(params,
                                                                             temperature=params.first_temperature)
        self.stop_ids = set(stop.nonzero()[:, 0].tolist())
        self.requests = collector.requests
        sizes = collector.left.copy()
        self.bounds = np.concatenate([[0], sizes.cumsum()])
        self.num_samples = int(self.bounds[-1])
        self.request_of = np.repeat(np.arange(len(sizes)), sizes)
        self.prompt_len = np.array([len(r.token_ids) for r in self.requests])[self.request_of]
        begun = [len(prefix) for r in self.requests for prefix in r.prefixes or [[]] * len(r.seeds)]
        self.begun = np.array(begun, dtype=np.int64)  # tokens that each sample had when it last took a slot
        self.owner = np.full(cache.plan.slots, -1)  # sample of each slot, -1: free
        self.count = np.zeros(cache.plan.slots, dtype=np.int64)  # its tokens so far, 0 where free
        self.tenant = np.full(cache.plan.prompts, -1)  # request whose prompt is in each prompt slot, -1: free
        self.prompt_slot = np.full(len(sizes), -1)  # the inverse: prompt slot of each request
        self.shift = np.zeros(len(sizes), dtype=np.int64)  # position after each prompt, less its length (M-RoPE)
        self.live = 0  # slots from here on are free
        self.moved = self.padded = False  # rows or prompts changed since the last step; it had sizes rounded up
        self.waiting = deque(
            sorted(
                np.flatnonzero(sizes).tolist(), key=lambda i:
                (not any(self.requests[i].prefixes), -len(self.requests[i].token_ids))))
        self.shared: _Shared | None = None
        self.resuming = deque[int]()  # samples between two turns; their prompts stay in the prompt slots
        space.begin(stop)

    def _upload(self, values: np.ndarray) -> Tensor:
        """Copy an array of the host to the device."""
        return upload(torch.from_numpy(values), self.cache.device)

    def run(self) -> list[list[Completion]]:
        """Generate all, or until no rank needs more; return responses in the order of requests and seeds."""
        self._decode()
        self.collector.store(self._read(np.flatnonzero(self.owner >= 0), "abort"))
        return self.collector.own

    def _decode(self) -> None:
        complete = self.collector.empty
        while not self.collector.enough(complete):
            complete, resumed = self.collector.take(self._advance())
            for i, j in resumed:
                sample = int(self.bounds[i]) + j
                self.begun[sample] = len(self.collector.begun(i, j))
                self.resuming.append(sample)

    def _advance(self) -> Ended:
        """Draw a token for waiting samples if enough slots are free, else for every row; return what has ended."""
        self.tenant[self.collector.left[self.tenant] == 0] = -1
        if waiting := self._waiting_samples():
            free = np.flatnonzero(self.owner < 0)
            if len(free) >= min(max(1, len(self.owner) // _SLACK), waiting):
                if self.resuming:
                    return self._resume(free)
                if self.shared is not None:
                    return self._admit_shared(self.shared, free)
                if (self.tenant < 0).any():
                    return self._admit(free)
        elif (dead := int((self.owner[:self.live] < 0).sum())) and dead >= self.live // _SLACK:
            self._compact()
        return self._step()

    def _waiting_samples(self) -> int:
        shared = self.bounds[self.shared.request + 1] - self.shared.first_sample if self.shared else 0
        return int(shared) + len(self.resuming) + sum(len(self.requests[i].seeds) for i in self.waiting)

    # -- admission ----------------------------------------------------------------------------------------------------
    def _admit(self, free: np.ndarray) -> Ended:
        """Fill the slots ``free`` with the samples of new prompts of one prefill pass."""
        groups: list[int] = []
        prompt_slots = np.flatnonzero(self.tenant < 0)
        taken = tokens = 0
        while self.waiting and taken < len(free) and tokens < _PREFILL_TOKENS and len(groups) < len(prompt_slots):
            groups.append(self.waiting.popleft())
            taken += len(self.requests[groups[-1]].seeds)
            tokens += len(self.requests[groups[-1]].token_ids)
        samples = np.concatenate([np.arange(self.bounds[i], self.bounds[i + 1]) for i in groups])[:len(free)]
        source = np.repeat(np.arange(len(groups)), [len(self.requests[i].seeds) for i in groups])[:len(free)]
        logits = self._prefill(groups, prompt_slots[:len(groups)])
        if taken > len(samples):
            self.shared = _Shared(groups[-1], int(samples[-1]) + 1, logits[-1:].clone())
        return self._start(samples, free[:len(samples)], logits[self._upload(source)])

    def _admit_shared(self, shared: _Shared, free: np.ndarray) -> Ended:
        """Fill the slots ``free`` with the other samples of the shared prompt."""
        self.shared = None
        end = int(self.bounds[shared.request + 1])
        samples = np.arange(shared.first_sample, end)[:len(free)]
        if samples[-1] + 1 < end:
            self.shared = replace(shared, first_sample=int(samples[-1]) + 1)
        return self._start(samples, free[:len(samples)], shared.logits.expand(len(samples), -1))

    def _resume(self, free: np.ndarray) -> Ended:
        """Fill the slots ``free`` with samples that begin their next turn."""
        samples = np.array([self.resuming.popleft() for _ in range(min(len(free), len(self.resuming)))])
        slots = free[:len(samples)]
        return self._draw(samples, slots, self._restore(samples, slots), self.params)

    def _prefill(self, groups: list[int], prompt_slots: np.ndarray) -> Tensor:
        """Run each prompt of ``groups`` once, into its prompt slot; return last-token logits [prompts, V]."""
        self.prompt_slot[groups], self.tenant[prompt_slots] = prompt_slots, groups
        prompts = [self.requests[i].token_ids for i in groups]
        inputs = self._inputs(groups, prompts)
        view = Prefill(self.cache, inputs.pop("packing"), prompt_slots)
        if any(self.requests[i].media for i in groups):
            last = inputs["position_ids"].flatten(0, -2)[-3:, view.last].amax(0)  # of four rows the first is the index
            self.shift[groups] = (last + 1).cpu().numpy() - [len(prompt) for prompt in prompts]
        return self._forward(inputs, view)

    def _inputs(self, requests: list[int], sequences: list[list[int]]) -> dict[str, Any]:
        """Pack sequences that begin with the prompts of ``requests`` for one forward pass."""
        exp = Experience.pack(sequences, prompt_lens=[len(self.requests[i].token_ids) for i in requests],
                              media=[self.requests[i].media for i in requests])
        return self.modality.inputs(exp.to(self.cache.device), self.model)

    def _start(self, samples: np.ndarray, slots: np.ndarray, logits: Tensor) -> Ended:
        """Assign slots to samples and draw a token for each; ``logits`` [k, V] are those after their prompts."""
        fresh, ended = self.begun[samples] == 0, []
        if fresh.any():
            ended += self._draw(samples[fresh], slots[fresh], logits[self._upload(np.flatnonzero(fresh))], self.first)
        if not fresh.all():
            begun = self._restore(samples[~fresh], slots[~fresh])
            ended += self._draw(samples[~fresh], slots[~fresh], begun, self.params)
        return ended

    def _restore(self, samples: np.ndarray, slots: np.ndarray) -> Tensor:
        """Run the tokens of begun ``samples``, what follows their prompts into ``slots``; return last-token logits
        [k, V]."""
        lengths = self.prompt_len[samples] + self.begun[samples]
        passes, logits = (lengths.cumsum() - lengths) // _PREFILL_TOKENS, []
        for part in (passes == number for number in np.unique(passes)):
            inputs = self._inputs(self.request_of[samples[part]].tolist(), [self._tokens(s) for s in samples[part]])
            view = Prefill(self.cache, inputs.pop("packing"), slots[part], self.prompt_len[samples[part]])
            logits.append(self._forward(inputs, view))
        return torch.cat(logits)

    def _tokens(self, sample: int) -> list[int]:
        """Tokens of a sample that is not in a slot: its prompt and what follows."""
        i = int(self.request_of[sample])
        return self.requests[i].token_ids + self.collector.begun(i, sample - int(self.bounds[i]))

    def _draw(self, samples: np.ndarray, slots: np.ndarray, logits: Tensor, params: SamplingParams) -> Ended:
        """Draw the next token of samples from ``logits`` [k, V]; from now on their slots are live."""
        begun = self.begun[samples]
        after = self.prompt_len[samples] + self.shift[self.request_of[samples]]
        index, ids, column, start = map(self._upload, (slots, samples, begun, after))
        state = torch.zeros_like(self.state[:, :len(slots)])
        state[_POSITION], state[_COLUMN], state[_SAMPLE], state[_ALIVE] = start + column - 1, column - 1, ids, 1
        if self.noise is not None:
            seeds = [self.requests[self.request_of[s]].seeds[s - self.bounds[self.request_of[s]]] for s in samples]
            self.noise[index] = self._upload(uniforms(seeds, self.params.max_new_tokens))
        self.owner[slots], self.count[slots], self.moved = samples, begun + 1, True
        self.live = max(self.live, int(slots.max()) + 1)
        seen = self._seen_by(samples)
        done = self._record(state, logits, None if self.noise is None else self.noise[index, column], params, seen)
        self.state[:, index] = state
        if self.seen is not None and seen is not None:
            self.seen[index] = seen
        return self._retire(slots[done.cpu().numpy()])

    def _seen_by(self, samples: np.ndarray) -> Tensor | None:
        """Return the tokens [k, V] of the prompts and responses of samples that are not in a slot."""
        if self.seen is None:
            return None
        seen = torch.zeros(len(samples), self.seen.shape[1], dtype=torch.bool)
        for row, number in zip(seen, samples):
            row[self._tokens(number)] = True
        return upload(seen, self.cache.device)

    # -- decoding -----------------------------------------------------------------------------------------------------
    def _forward(self, inputs: dict[str, Any], view: Prefill) -> Tensor:
        return self.modality.logits(self.model, view.last, kv_cache=view, **inputs)

    def _step(self) -> Ended:
        """Draw the next token of every row."""
        padded = self.graphs.enabled
        if self.moved or padded != self.padded:
            self._arrange(padded)
        width = int(self.count[:self.live].max())
        if padded:
            width = padded_width(width, self.cache.plan.length)
        rows = self.decode.live
        done = self.graphs.run((self.decode.shape, width), partial(self._compute, rows, width))
        self.count[:rows] += self.owner[:rows] >= 0
        finished = np.flatnonzero(done.cpu().numpy())  # the one sync of a step
        return self._retire(finished) if len(finished) else []

    def _compute(self, live: int, width: int) -> Tensor:
        """Run the device's part of a step: rows below ``live``, responses below ``width``; return which ended."""
        state = self.state[:, :live]
        self.decode.advance(state[_COLUMN], width)
        logits = self.decode_pass(state[_TOKEN, None], state[_POSITION, None], self.decode)
        noise = None if self.noise is None else self.noise[:live].gather(1, state[_COLUMN, :, None] + 1)[:, 0]
        return self._record(state, logits, noise, self.params, None if self.seen is None else self.seen[:live])

    def _arrange(self, padded: bool) -> None:
        """Pass to the attention the prompt slot and the prompt length that each row reads; ``padded``: some more rows,
        which are free."""
        owner = self.owner[:padded_rows(self.live, len(self.owner)) if padded else self.live]
        alive = owner >= 0
        self.decode.arrange(np.where(alive, self.prompt_slot[self.request_of[owner]], -1),
                            np.where(alive, self.prompt_len[owner], 0), padded)
        self.moved, self.padded = False, padded

    def _record(self, state: Tensor, logits: Tensor, noise: Tensor | None, params: SamplingParams,
                seen: Tensor | None) -> Tensor:
        """Draw and store one token per column of ``state`` [5, k] and row of ``seen`` [k, V], in place; return which
        responses ended, bool [k]."""
        if seen is not None:
            logits = penalised(logits.float(), seen, params.repetition_penalty)
        tokens, logprobs = sample(logits, noise, params)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        where = (state[_SAMPLE], state[_COLUMN] + 1)
        self.tokens[where], self.logprobs[where] = tokens, logprobs
        state[_TOKEN] = tokens
        state[_POSITION:_COLUMN + 1] += state[_ALIVE]
        return (self.stop[tokens] | (state[_COLUMN] == self.params.max_new_tokens - 1)) & (state[_ALIVE] == 1)

    # -- leaving ------------------------------------------------------------------------------------------------------
    def _retire(self, slots: np.ndarray) -> Ended:
        """Free ``slots``; return what they have drawn."""
        ended = self._read(slots)
        self.owner[slots], self.count[slots] = -1, 0
        self.state[:, self._upload(slots)] = self.free
        return ended

    def _read(self, slots: np.ndarray, reason: str = "") -> Ended:
        """Fetch what ``slots`` have drawn since their samples took them, in the order of the samples. ``reason``: why
        they end; empty: by their last token."""
        slots = slots[self.owner[slots].argsort()]
        samples, ends = self.owner[slots], self.count[slots]
        index, width = self._upload(samples), int(ends.max(initial=0))
        rows = (x[index, :width].tolist() for x in (self.tokens, self.logprobs))
        parts: Ended = []
        for s, end, tokens, logprobs in zip(samples.tolist(), ends.tolist(), *rows):
            i, begun = int(self.request_of[s]), int(self.begun[s])
            why = reason or ("stop" if tokens[end - 1] in self.stop_ids else "length")
            parts.append((i, s - int(self.bounds[i]), Completion(tokens[begun:end], logprobs[begun:end], why)))
        return parts

    def _compact(self) -> None:
        """Move the live rows and prompts at the end into the gaps at the front."""
        self.moved = True
        source, target = _gaps(self.owner[:self.live])
        moved, to, width = self._upload(source), self._upload(target), self.count.max()
        rows = self.cache.rows.data
        rows[:, :, to, :, :width] = rows[:, :, moved, :, :width]
        self.state[:, to] = self.state[:, moved]
        self.state[:, moved] = self.free  # sizes that are rounded up reach them
        for drawn in (self.noise, self.seen):
            if drawn is not None:
                drawn[to] = drawn[moved]
        for host, free in ((self.owner, -1), (self.count, 0)):
            host[target], host[source] = host[source], free
        self.live = int((self.owner >= 0).sum())
        source, target = _gaps(self.tenant)
        prompts = self.cache.prompts.data
        prompts[:, :, self._upload(target)] = prompts[:, :, self._upload(source)]
        self.prompt_slot[self.tenant[source]] = target
        self.tenant[target], self.tenant[source] = self.tenant[source], -1


def _gaps(owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the entries >= 0 to move, and their targets, so that all such entries stand at the front."""
    alive = np.flatnonzero(owners >= 0)
    return alive[alive >= len(alive)], np.flatnonzero(owners[:len(alive)] < 0)
