"""Partial rollout (``--oversample``): a step does not wait for its longest responses; they continue in the next one."""
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from math import ceil
from typing import Any

from lightrft.config.schema import Config
from lightrft.datasets.loader import PromptLoader
from lightrft.rollout.engine import Completion, Request
from lightrft.trainer.experience_maker import Rollout
from lightrft.trainer.fast_exp_maker import FastExperienceMaker
from lightrft.trainer.dynamic_sampling import tell_dropped
from lightrft.trainer.metric_sums import staleness_metrics
from lightrft.trainer.samples import Ended, pack_samples, reward_input, Rows
from lightrft.types import Prompt, Sample
from lightrft.utils.logging import get_logger


@dataclass
class Response(Completion):
    """A response so far, without its prompt; ``weight_versions`` are those of the weights that drew its tokens."""
    weight_versions: list[int]

    def add(self, more: Completion, version: int) -> None:
        """Append what the weights of ``version`` have generated."""
        self.token_ids, self.logprobs = self.token_ids + more.token_ids, self.logprobs + more.logprobs
        self.weight_versions = self.weight_versions + [version] * len(more.token_ids)
        self.finish_reason = more.finish_reason


@dataclass
class PartialGroup:
    """The responses to one prompt, on every rank."""
    number: int  # of the draw of its prompt
    prompt: Prompt
    responses: list[Response]
    rows: Rows = field(default_factory=list)  # of the responses that are finished and scored

    @classmethod
    def new(cls, number: int, prompt: Prompt, size: int) -> "PartialGroup":
        """Nothing is generated yet."""
        return cls(number, prompt, [Response([], [], "abort", []) for _ in range(size)])

    @classmethod
    def load(cls, state: dict[str, Any]) -> "PartialGroup":
        """The inverse of :func:`dataclasses.asdict`."""
        responses = [Response(**response) for response in state["responses"]]
        return cls(state["number"], Prompt(**state["prompt"]), responses, state["rows"])

    @property
    def open(self) -> list[int]:
        """Which responses are unfinished."""
        return [j for j, response in enumerate(self.responses) if response.finish_reason == "abort"]

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return sum(len(response.token_ids) for response in self.responses)

    def oldest(self, version: int) -> int:
        """Version of the oldest weights that drew a token; ``version`` where none is drawn yet."""
        return min((v for response in self.responses for v in response.weight_versions[:1]), default=version)

    def add(self, completions: list[Completion], version: int, places: list[int]) -> None:
        """Go on with the responses at ``places``; those that are finished have had theirs."""
        for j, more in zip(places, completions, strict=True):
            if self.responses[j].finish_reason == "abort":
                self.responses[j].add(more, version)

    def ended(self, place: int) -> Ended:
        """A finished response, to be decoded."""
        return self.number, self.prompt, place, self.responses[place]

    def samples(self, group_id: int) -> list[Sample]:
        """The finished group as samples, not decoded."""
        prompt, n = self.prompt, len(self.prompt.token_ids)
        return [
            Sample(prompt, group_id, index, prompt.token_ids + done.token_ids,
                   [False] * n + [True] * len(done.token_ids), [0.0] * n + done.logprobs,
                   [-1] * n + done.weight_versions, done.finish_reason) for index, done in enumerate(self.responses)
        ]


class PartialExperienceMaker(FastExperienceMaker):
    """Takes groups that are under way some way further.

    Groups are dealt to ranks one by one, and so is the number of those that must be finished: each rank stops by
    itself, after the same token in every run. What it has generated is gathered, so that nothing hangs on the rank.
    """

    def advance(self, groups: list[PartialGroup], wanted: int, due: set[int]) -> Callable[[], Rows]:
        """Generate until ``wanted`` of ``groups`` (none is finished) are, and those with a number in ``due`` as well.

        Returns:
            A function that waits for the rewards: the rows of all samples whose scoring began now, which are those left
            of groups that are finished now, and perhaps some of others, in the order of their numbers.
        """
        rank, world = self.strategy.rank, self.strategy.world_size
        mine = groups[rank::world]
        with self.timer("rollout"):
            samples = self._drive(mine, len(range(rank, wanted, world)), due)
            self.strategy.barrier()
        baseline = self._answer_greedily(samples)
        with self.timer("gather"):
            parts = self.strategy.all_gather_object([(group.number, group.responses) for group in mine])
        found = dict(chain.from_iterable(parts))
        for group in groups:
            group.responses = found[group.number]
        return lambda: self._gather_rows(samples, baseline)

    def _drive(self, mine: list[PartialGroup], quota: int, due: set[int]) -> list[Sample]:
        """The engine on this rank's groups; samples of which the rewards are under way now."""
        version, opened, done = self.engine.weight_version, [group.open for group in mine], set[int]()
        late = {group.number for group in mine} & due
        self._expect(len(mine))

        def arrived(ended: list[tuple[int, int, Completion]]) -> None:
            for i, k, completion in ended:
                mine[i].responses[opened[i][k]].add(completion, version)
            samples = self.samples_of(mine[i].ended(opened[i][k]) for i, k, _ in ended)
            self._begin([(i, sample) for (i, *_), sample in zip(ended, samples)])

        def finished(i: int, completions: list[Completion]) -> bool:
            mine[i].add(completions, version, opened[i])
            self._finish(i, mine[i])
            done.add(i)
            late.discard(mine[i].number)
            return len(done) >= quota and not late

        early = self._begins_early([group.prompt for group in mine])
        asked = self._continued(mine) if quota or late else []  # ranks that share an engine have to call it together
        found = self.engine.generate(asked, self.sampling, finished, arrived if early else None)
        for i in sorted(set(range(len(found))) - done):
            mine[i].add(found[i], version, opened[i])
            if not mine[i].open:  # its last response ended while it was being stopped
                self._finish(i, mine[i])
        return self._begun()

    def _begins_early(self, prompts: Iterable[Prompt]) -> bool:
        """A row goes along with its group from step to step, so it has to be complete without the group."""
        alone = self.greedy is None and not any(self.rewards.compares(reward_input(prompt, "")) for prompt in prompts)
        return alone and super()._begins_early(prompts)

    def _finish(self, i: int, group: PartialGroup) -> None:
        """Score what is left of a group whose responses are all finished."""
        begun = {row["index"] for row in group.rows} | self._samples[i].keys()
        rest = [j for j in range(len(group.responses)) if j not in begun]
        self._begin([(i, sample) for sample in self.samples_of(map(group.ended, rest))])
        self.rewards.finish(self._handles[i])

    def _continued(self, groups: list[PartialGroup]) -> list[Request]:
        """What is left to generate; a response draws by the seed that it began with."""
        whole = self._requests([(group.number, group.prompt) for group in groups], "draw")
        return [
            replace(request, seeds=[request.seeds[j]
                                    for j in group.open], prefixes=[group.responses[j].token_ids for j in group.open])
            for request, group in zip(whole, groups)
        ]


class OversamplingSource:
    """Partial rollout (Kimi k1.5, arXiv:2501.12599; APRIL, arXiv:2509.18521).

    ``oversample`` batches of groups are under way; generation ends when one batch is finished, which is trained. The
    others are carried over with every token that they have. A group that would become older than ``max_staleness``
    versions is waited for, so nothing is thrown away and long responses are trained as often as short ones. Groups are
    trained in the order of their oldest token. Near the end no more prompts are drawn than are trained.

    Args:
        total_steps: of the run.
    """
    exhausted = False  # every step has a whole batch

    def __init__(self, config: Config, maker: PartialExperienceMaker, loader: PromptLoader, total_steps: int) -> None:
        rollout = config.rollout
        self.maker, self.loader, self.total_steps = maker, loader, total_steps
        self.batch, self.size, self.max_staleness = (rollout.rollout_batch_size, rollout.n_samples_per_prompt,
                                                     rollout.max_staleness)
        self.most = ceil(rollout.oversample * self.batch - 1e-9)  # 1.1 * 10 is 11
        self.groups: list[PartialGroup] = []

    def make(self, step: int, kl_coef: float = 0.0) -> Rollout:
        """The rollout of one step."""
        missing = min(self.most, (self.total_steps - step) * self.batch) - len(self.groups)
        self.groups += [
            PartialGroup.new(number, prompt, self.size) for number, prompt in self.loader.draw(max(0, missing))
        ]
        running = [group for group in self.groups if group.open]
        due = {group.number for group in running if group.oldest(step) + self.max_staleness <= step}
        tokens = -sum(group.tokens for group in running)
        rows_of = self.maker.advance(running, max(0, self.batch - len(self.groups) + len(running)), due)
        tokens += sum(group.tokens for group in running)
        chosen = self._take(step)
        exp = pack_samples([s for place, group in enumerate(chosen) for s in group.samples(place)], self.size)
        rollout = self.maker.complete(exp, lambda: self._rows(rows_of(), chosen), step, kl_coef)
        rollout.metrics |= staleness_metrics(exp, step) | self._metrics(chosen, step) | {
            "rollout/tokens": tokens,
            "rollout/tokens_per_s": tokens / max(self.maker.timer.seconds("rollout"), 1e-9),
            "rollout/partial/due": len(due),
        }
        return rollout

    def _take(self, step: int) -> list[PartialGroup]:
        """The batch of finished groups whose tokens are the oldest; the others stay, in the same order."""
        self.groups.sort(key=lambda group: (group.oldest(step + 1), group.number))
        chosen = [group for group in self.groups if not group.open][:self.batch]
        taken = {group.number for group in chosen}
        self.groups = [group for group in self.groups if group.number not in taken]
        return chosen

    def _rows(self, rows: Rows, chosen: list[PartialGroup]) -> Rows:
        """Give every group its new ``rows``; returns all those of ``chosen``, numbered by place."""
        groups = {group.number: group for group in (*chosen, *self.groups)}
        for row in rows:
            groups[row["group_id"]].rows.append(row)
        return [
            row | {"group_id": place} for place, group in enumerate(chosen)
            for row in sorted(group.rows, key=lambda row: row["index"])
        ]

    def _metrics(self, chosen: list[PartialGroup], step: int) -> dict[str, float]:
        versions = [set(response.weight_versions) for group in chosen for response in group.responses]
        left = [group.responses[j] for group in self.groups for j in group.open if group.responses[j].token_ids]
        return {
            "rollout/partial/groups": sum(group.oldest(step) < step for group in chosen),
            "rollout/partial/samples": sum(len(each) > 1 for each in versions),
            "rollout/partial/left_groups": len(self.groups),
            "rollout/partial/left_samples": len(left),
            "rollout/partial/left_tokens": sum(len(response.token_ids) for response in left),
        }

    def state_dict(self) -> dict[str, Any]:
        """The groups that go on."""
        return {"open": [asdict(group) for group in self.groups], "size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; what this run cannot go on with is told and dropped."""
        carried = [PartialGroup.load(each) for each in state.get("open", ())]
        if carried and (state["size"] != self.size or len(carried) > self.batch):
            get_logger().warning(
                "the %d groups of %d samples under way in the checkpoint are dropped: now there are groups of %d and "
                "%d per batch", len(carried), state["size"], self.size, self.batch)
        else:
            self.groups = carried
        tell_dropped(state, "rows")
