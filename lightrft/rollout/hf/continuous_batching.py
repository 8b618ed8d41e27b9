"""Continuous batching: the rounds of the HF engine, from waiting prompts to finished responses.

Rows of the key-value cache are *slots*; a prompt has a *prompt slot*, which all its samples read. A response that has
ended frees its slot at once. As soon as a share of the slots is free, waiting responses take them. When none waits any
more, live rows and prompts move to the front, so that matrix products cover only them. The host keeps one small array
per slot; nothing in the decode loop runs once per row.

A response that waits for an answer is *parked*: it keeps its slot while no other response needs one, and then only what
is appended runs through the model, in the pass of the next step. A response without a slot has its tokens on the host,
and its next slot is first filled with them. In both cases its state is then the same as if all its tokens had been
generated in this slot.
"""
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightrft.models.actor_modality import ActorModality
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.hf.decode_graph import Shape, Shapes, StepGraphs
from lightrft.rollout.hf.kv_cache import Extend, Joined, sizes
from lightrft.rollout.hf.module_calls import Forward
from lightrft.rollout.hf.passes import groups, Passes, PREFILL_TOKENS
from lightrft.rollout.hf.response_queue import ResponseQueue
from lightrft.rollout.hf.slots import ALIVE, Slots
from lightrft.rollout.hf.workspace import Workspace
from lightrft.rollout.open_responses import OpenPrompt, OpenResponse
from lightrft.rollout.sampling import penalised, sample, uniforms
from lightrft.types import Key
from lightrft.utils.tensors import upload
from lightrft.utils.watchdog import tick

_SLACK = 8  # refill, compact or go on once a share of 1 / _SLACK of the rows is free or answered
_PATIENCE = 8  # steps that an answered response waits for others, whose pass it shares
StopOf = Callable[[SamplingParams], Tensor]
Appended = tuple[dict[str, Any], Extend]  # inputs and view of a pass
_TOKEN, _POSITION, _COLUMN = range(ALIVE)


class Generation:
    """Slots of one :class:`Workspace` and the responses that they serve; :meth:`step` runs one round.

    Args:
        params: those of most responses; a step of others as well runs without graphs.
        stop_of: returns the tokens [V] bool that end a response with given parameters.
        queue: all unfinished responses; none has a slot.
        version: of the weights that draw.
    """

    def __init__(self, model: PreTrainedModel, modality: ActorModality, decode_pass: Forward, space: Workspace,
                 params: SamplingParams, stop_of: StopOf, graphs: StepGraphs, queue: ResponseQueue,
                 version: int) -> None:  # yapf: disable
        self.modality, self.decode_pass, self.graphs = modality, decode_pass, graphs
        self.space, self.queue, self.params, self.stop_of = space, queue, params, stop_of
        self.cache, self.device, self.decode, self.state = space.cache, space.cache.device, space.decode, space.state
        self.noise, self.seen, self.tokens, self.logprobs = space.noise, space.seen, space.tokens, space.logprobs
        self.slots, self.passes = Slots(space, version), Passes(model, modality, space.cache)
        weights = sum(weight.nbytes for weight in model.parameters())
        self.shapes = Shapes(weights // self.cache.spec.bytes_per_token, self.cache.plan.prompts)
        self.reads = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)  # prompt slot and length of each row
        self.sizes = 0, 0, 0, 0  # that these take
        self.arranged: tuple[Any, ...] = ()  # shape that the attention has, and whether graphs read it
        self.variants: list[tuple[SamplingParams, np.ndarray]] = []  # parameters of the rows that draw, and the rows
        self.usual = True  # all of them are ``params``
        self.waited = 0  # steps since the first of the answered responses was there
        space.begin(main := stop_of(params))
        self.stops = {params.stop_token_ids: (space.stop, set(main.nonzero()[:, 0].tolist()))}

    def step(self) -> list[OpenResponse]:
        """Draw a token for answered and waiting samples if enough slots are free, else for every row; return what has
        ended."""
        slots, alive = self.slots, self.slots.alive
        appended: Appended | None = None
        if self._goes_on():
            appended = self._continue()
        elif waiting := self.queue.waiting:
            free = self._free_slots(min(max(1, len(alive) // _SLACK), waiting))
            if len(free) and self.queue.answered:  # their prompts could leave for those of others
                appended = self._continue()
            elif len(free) and (begun := self._fill(free)) is not None:
                return begun
        elif (dead := int((~alive[:slots.live]).sum())) and dead >= slots.live // _SLACK:
            slots.compact()
        return self._step(appended) if alive.any() else []

    def _fill(self, free: np.ndarray) -> list[OpenResponse] | None:
        """Give the slots ``free`` to responses that wait for one; None if none can take one."""
        if resumed := self._resumable(len(free)):
            slots = free[:len(resumed)]
            return self._draw(resumed, slots, self.passes.begun(resumed, slots))
        if self.queue.shared is not None:
            return self._admit_shared(self.queue.shared, free)
        return self._admit(free)

    # -- room ---------------------------------------------------------------------------------------------------------
    def _free_slots(self, least: int) -> np.ndarray:
        """Return the free slots if there are ``least``, after parked responses have left theirs; else none."""
        missing = least - int((~self.slots.taken).sum())
        parked = [response.slot for response in self.queue.parked.values() if response.slot >= 0]
        if missing > len(parked):
            return np.empty(0, dtype=np.int64)
        if missing > 0:
            self.slots.vacate(np.array(parked[:missing]))
        return np.flatnonzero(~self.slots.taken)

    # -- admission ----------------------------------------------------------------------------------------------------
    def _admit(self, free: np.ndarray) -> list[OpenResponse] | None:
        """Fill the slots ``free`` with the samples of new prompts of one prefill pass; None if there is no prompt."""
        prompts, responses, source = list[OpenPrompt](), list[OpenResponse](), list[int]()
        waiting, tokens = self.queue.prompts, 0
        room = self.slots.free_prompts(len(waiting), self.queue.shared)
        while waiting and len(responses) < len(free) and tokens < PREFILL_TOKENS and len(prompts) < len(room):
            prompts.append(prompt := waiting.popleft())
            source += [len(prompts) - 1] * len(prompt.responses)
            responses += prompt.responses
            tokens += prompt.length
        if not prompts:
            return None
        logits = self._prefill(prompts, room[:len(prompts)])
        responses, others = responses[:len(free)], responses[len(free):]
        if others:
            self.queue.shared, prompts[-1].responses = prompts[-1], others
            prompts[-1].logits = logits[-1:].clone()
        return self._start(responses, free[:len(responses)], logits[upload(source[:len(responses)], self.device)])

    def _admit_shared(self, prompt: OpenPrompt, free: np.ndarray) -> list[OpenResponse]:
        """Fill the slots ``free`` with the other samples of the shared prompt."""
        assert prompt.logits is not None, "a prompt is shared until its last sample has begun"
        logits, responses, prompt.responses = prompt.logits, prompt.responses[:len(free)], prompt.responses[len(free):]
        if not prompt.responses:
            self.queue.shared, prompt.logits = None, None
        return self._start(responses, free[:len(responses)], logits.expand(len(responses), -1))

    def _resumable(self, most: int) -> list[OpenResponse]:
        """Take up to ``most`` begun responses from the queue whose prompts have a prompt slot, perhaps anew."""
        first = [self.queue.resuming[i] for i in range(min(most, len(self.queue.resuming)))]
        absent = list(dict.fromkeys(response.prompt for response in first if response.prompt.slot < 0))
        if absent and (room := self.slots.free_prompts(len(absent), self.queue.shared)):
            self._prefill(absent[:len(room)], room[:len(absent)])
        ready = [response for response in first if response.prompt.slot >= 0]
        for response in ready:
            self.queue.resuming.remove(response)
        return ready

    def _prefill(self, prompts: list[OpenPrompt], slots: list[int]) -> Tensor:
        """Run each prompt once, into its prompt slot; return last-token logits [prompts, V]."""
        self.slots.seat(prompts, slots)
        return self.passes.prompts(prompts, slots)

    def _start(self, responses: list[OpenResponse], slots: np.ndarray, logits: Tensor) -> list[OpenResponse]:
        """Assign slots to responses and draw a token for each; ``logits`` [k, V] are those after their prompts."""
        fresh = np.array([not response.episode.segments for response in responses])
        new, begun = ([responses[i] for i in np.flatnonzero(chosen)] for chosen in (fresh, ~fresh))
        self.cache.fork([response.prompt.slot for response in new], slots[fresh])
        ended = self._draw(new, slots[fresh], logits[upload(np.flatnonzero(fresh), self.device)]) if new else []
        return ended + (self._draw(begun, slots[~fresh], self.passes.begun(begun, slots[~fresh])) if begun else [])

    # -- answers ------------------------------------------------------------------------------------------------------
    def _goes_on(self) -> bool:
        """Return True once answered responses are a share of those that draw, or the first one has waited long enough:
        a pass costs about the same for one and for a few."""
        answered = len(self.queue.answered)
        self.waited = self.waited + 1 if answered else 0
        return answered > 0 and (answered * _SLACK >= self.slots.alive.sum() or self.waited > _PATIENCE)

    def _continue(self) -> Appended | None:
        """Let answered responses draw in the next step, which runs the last token of each; return the pass over those
        before it, which the step joins. Passes that it cannot join run here."""
        for response in (answered := self.queue.answered):
            if self._needs_logits(response):
                self.slots.vacate(np.array([response.slot]))
        self.queue.resuming += [response for response in answered if response.slot < 0]
        responses = sorted((each for each in answered if each.slot >= 0), key=lambda response: response.order)
        self.queue.answered, self.waited = [], 0
        longer = [each for each in responses if each.episode.response_len > self.slots.count[each.slot]]
        passes = [self._appended([longer[i] for i in group]) for group in groups(longer)]
        joined = passes.pop() if passes and "input_ids" in passes[-1][0] else None  # others show media
        for each in passes:
            self.passes.run(*each)
        if responses:
            self._enter(responses, np.array([response.slot for response in responses]))
        return joined

    def _appended(self, responses: list[OpenResponse]) -> Appended:
        begins = self.slots.count[[response.slot for response in responses]] - 1
        return self.passes.appended(responses, begins)

    def _needs_logits(self, response: OpenResponse) -> bool:
        """Return True for an answer with media in which tokens see later ones, or that end it: no step runs such a
        token."""
        count = int(self.slots.count[response.slot])
        spans = response.spans_from(count)
        return bool(spans) and (self.modality.both_ways or spans[-1].stop == response.episode.response_len - count)

    # -- drawing ------------------------------------------------------------------------------------------------------
    def _draw(self, responses: list[OpenResponse], slots: np.ndarray, logits: Tensor) -> list[OpenResponse]:
        """Draw the next token of responses from ``logits`` [k, V]; from now on their slots are live."""
        tick()
        variants = _by_params([response.next_params for response in responses])
        if len(variants) > 1:
            drawn = [self._draw([responses[i] for i in rows], slots[rows], logits[upload(rows, self.device)])
                     for _, rows in variants]  # yapf: disable
            return [*chain.from_iterable(drawn)]
        index = self._enter(responses, slots)
        if self.noise is not None:
            seeds = [response.episode.seed for response in responses]
            self.noise[index] = upload(uniforms(seeds, self.noise.shape[1]), self.device)
        done = self._record_some(index, logits, variants[0][0])
        self.slots.count[slots] += 1
        return self._end(slots[done.cpu().numpy()])

    def _enter(self, responses: list[OpenResponse], slots: np.ndarray) -> Tensor:
        """Let ``slots`` draw the next token of responses, from now on; return them on the device."""
        counts, starts = _lengths(responses), [response.after for response in responses]
        newest = [response.newest for response in responses]
        index, *state = upload(np.stack([slots, newest, starts + counts - 1, counts - 1, counts >= 0]), self.device)
        self.state[:, index] = torch.stack(state)
        if (seen := self._seen_by(responses)) is not None and self.seen is not None:
            self.seen[index] = seen
        self.slots.occupy(responses, slots, counts)
        return index

    def _seen_by(self, responses: list[OpenResponse]) -> Tensor | None:
        """Return the tokens [k, V] of the prompts and responses."""
        if self.seen is None:
            return None
        seen = torch.zeros(len(responses), self.seen.shape[1], dtype=torch.bool)
        for row, response in zip(seen, responses):
            row[response.episode.token_ids] = True
        return upload(seen, self.device)

    def _step(self, appended: Appended | None) -> list[OpenResponse]:
        """Draw the next token of every row."""
        tick()
        slots, moved = self.slots, self.slots.moved
        if moved:
            self._read()
        shape = self._shape(int(slots.count[:slots.live].max()))
        arranged = shape[:-1], self.graphs.enabled
        if moved or arranged != self.arranged:
            self.decode.arrange(*self.reads, *arranged)
            self.arranged = arranged
        compute = partial(self._compute, rows := shape.rows, shape.width, appended)
        done = self.graphs.run(shape, compute) if self.usual and appended is None else compute()
        slots.count[:rows] += slots.alive[:rows]
        finished = np.flatnonzero(done.cpu().numpy())  # the one sync of a step
        return self._end(finished) if len(finished) else []

    def _compute(self, live: int, width: int, appended: Appended | None) -> Tensor:
        """Run the device's part of a step: rows below ``live``, responses below ``width``; return which ended."""
        state = self.state[:, :live]
        self.decode.advance(state[_COLUMN], width, state[ALIVE])
        logits = self._logits(state[_TOKEN, None], state[_POSITION, None], appended)
        if len(self.variants) == 1:
            noise = None if self.noise is None else self.noise[:live].gather(1, state[_COLUMN, :, None] + 1)[:, 0]
            seen = None if self.seen is None else self.seen[:live]
            return self._record(state, self.space.rows[:live], logits, noise, seen, self.variants[0][0])
        done = torch.zeros(live, dtype=torch.bool, device=state.device)
        for params, rows in self.variants:
            index = upload(rows, self.device)
            done[index] = self._record_some(index, logits[index], params)
        return done

    def _logits(self, token_ids: Tensor, positions: Tensor, appended: Appended | None) -> Tensor:
        """Run the newest tokens [1, live] of all rows, and what is appended to some; return logits of the former."""
        if appended is None:
            return self.decode_pass(token_ids, positions, self.decode)
        inputs, view = appended
        both = {"input_ids": torch.cat([token_ids, inputs["input_ids"]], 1),
                "position_ids": torch.cat([positions, inputs["position_ids"]], 1)}  # yapf: disable
        return self.passes.run(inputs | both, Joined(self.decode, view))

    def _shape(self, width: int) -> Shape:
        """Return the shape of a step whose longest response has ``width`` tokens, for graphs rounded up."""
        needed = Shape(*self.sizes, width)
        if not self.graphs.enabled:
            return needed
        needed = needed.padded(self.cache.plan)
        return self.shapes.choose(needed) if self.usual else needed

    def _read(self) -> None:
        """Find the prompt slot and the prompt length that each row reads."""
        live, drawing = self.slots.live, np.flatnonzero(self.slots.alive)
        responses = self.slots.of(drawing)
        slots, lengths = np.full(live, -1), np.zeros(live, dtype=np.int64)
        slots[drawing] = [response.prompt.slot for response in responses]
        lengths[drawing] = [response.prompt.length for response in responses]
        self.reads, self.sizes = (slots, lengths), sizes(slots, lengths)
        self.variants = [(params, drawing[rows])
                         for params, rows in _by_params([response.params for response in responses])]
        self.usual = [params for params, _ in self.variants] == [self.params]
        self.slots.moved = False

    def _record_some(self, index: Tensor, logits: Tensor, params: SamplingParams) -> Tensor:
        """Draw and store a token for each of the slots ``index`` [k], as :meth:`_record` does."""
        state, seen = self.state[:, index], None if self.seen is None else self.seen[index]
        noise = None if self.noise is None else self.noise[index, state[_COLUMN] + 1]
        done = self._record(state, index, logits, noise, seen, params)
        self.state[:, index] = state
        if self.seen is not None and seen is not None:
            self.seen[index] = seen
        return done

    def _record(self, state: Tensor, rows: Tensor, logits: Tensor, noise: Tensor | None, seen: Tensor | None,
                params: SamplingParams) -> Tensor:
        """Draw and store one token per column of ``state`` [4, k] and row of ``seen`` [k, V], in place, as results of
        the slots ``rows`` [k]; return which responses ended, bool [k]."""
        if seen is not None:
            logits = penalised(logits.float(), seen, params.repetition_penalty)
        stop, _ = self._stop(params)
        tokens, logprobs = sample(logits, noise, params)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        where = (rows, state[_COLUMN] + 1)
        self.tokens[where], self.logprobs[where] = tokens, logprobs
        state[_TOKEN] = tokens
        state[_POSITION:_COLUMN + 1] += state[ALIVE]
        return (stop[tokens] | (state[_COLUMN] == params.max_new_tokens - 1)) & (state[ALIVE] == 1)

    def _stop(self, params: SamplingParams) -> tuple[Tensor, set[int]]:
        """Return the tokens that end a response: [V] bool on the device, and as a set."""
        if params.stop_token_ids not in self.stops:
            stop = self.stop_of(params)
            self.stops[params.stop_token_ids] = upload(stop, self.device), set(stop.nonzero()[:, 0].tolist())
        return self.stops[params.stop_token_ids]

    # -- leaving ------------------------------------------------------------------------------------------------------
    def _end(self, slots: np.ndarray) -> list[OpenResponse]:
        """Return the responses that have drawn a stop token or the last that they may draw; free or park ``slots``."""
        responses, parked, finished = self.slots.fetch(slots), list[OpenResponse](), list[OpenResponse]()
        for response in responses:
            stopped = response.episode.segments[-1].token_ids[-1] in self._stop(response.params)[1]
            response.episode.finish_reason = "stop" if stopped else "length"
            (parked if response.waits and stopped and response.room else finished).append(response)
        self.queue.park(parked)
        self.queue.finish(finished)
        self.slots.park([response.slot for response in parked])
        self.slots.vacate(np.array([response.slot for response in finished], dtype=np.int64))
        return responses

    def abort(self, keys: Iterable[Key]) -> list[OpenResponse]:
        """End responses; return what those have drawn that did not wait for an answer."""
        opened = {key: self.queue.open[key] for key in keys if key in self.queue.open}
        slots = np.array([response.slot for response in opened.values() if response.slot >= 0], dtype=np.int64)
        self.slots.fetch(slots[self.slots.alive[slots]])
        ended = self.queue.abort(opened)
        self.slots.vacate(slots)
        return ended

    def evict_all(self) -> None:
        """Take all slots away; responses resume from their tokens, on the host, in another workspace."""
        self.queue.requeue_all()
        self.queue.resuming.extendleft(reversed(self.slots.fetch(np.flatnonzero(self.slots.alive))))
        self.slots.vacate_all()


def _lengths(responses: Iterable[OpenResponse]) -> np.ndarray:
    """Numbers of tokens of responses, without their prompts."""
    return np.array([response.episode.response_len for response in responses])


def _by_params(params: Sequence[SamplingParams]) -> list[tuple[SamplingParams, np.ndarray]]:
    """Indices of the rows of each set of parameters; mostly they are one object."""
    if all(other is params[0] for other in params):
        return [(params[0], np.arange(len(params)))]
    return [(same, np.array([i for i, other in enumerate(params) if other == same])) for same in dict.fromkeys(params)]
