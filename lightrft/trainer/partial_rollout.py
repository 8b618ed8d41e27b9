"""Partial rollout (``--oversample``): a step does not wait for its longest responses; the next step continues them."""
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
    """Response so far, without its prompt; ``weight_versions`` are the versions of the weights that drew its tokens, -1
    on appended ones."""
    weight_versions: list[int] = field(default_factory=list)

    def add(self, more: Completion, version: int) -> None:
        """Append tokens that the weights of ``version`` generated."""
        self.extend(more)
        self.weight_versions = self.weight_versions + [version if drawn else -1 for drawn in more.drawn]


@dataclass
class PartialGroup:
    """Responses to one prompt; every rank holds them."""
    number: int  # number of the draw of its prompt
    prompt: Prompt
    responses: list[Response]
    rows: Rows = field(default_factory=list)  # of the responses that are finished and scored

    @classmethod
    def new(cls, number: int, prompt: Prompt, size: int) -> "PartialGroup":
        """Create a group of ``size`` empty responses."""
        return cls(number, prompt, [Response([], [], "abort") for _ in range(size)])

    @classmethod
    def load(cls, state: dict[str, Any]) -> "PartialGroup":
        """Restore a group from the result of :func:`dataclasses.asdict`."""
        responses = [Response(**response) for response in state["responses"]]
        return cls(state["number"], Prompt(**state["prompt"]), responses, state["rows"])

    @property
    def open(self) -> list[int]:
        """Indices of the unfinished responses."""
        return [j for j, response in enumerate(self.responses) if response.finish_reason == "abort"]

    @property
    def tokens(self) -> int:
        """Number of tokens generated so far."""
        return sum(len(response.token_ids) for response in self.responses)

    def oldest(self, version: int) -> int:
        """Return the version of the oldest weights that drew a token; ``version`` if no token is drawn yet."""
        return min((v for response in self.responses for v in response.weight_versions[:1]), default=version)

    def add(self, completions: list[Completion], version: int, places: list[int]) -> None:
        """Extend the responses at indices ``places``; finished ones are complete already and are skipped."""
        for j, more in zip(places, completions, strict=True):
            if self.responses[j].finish_reason == "abort":
                self.responses[j].add(more, version)

    def ended(self, place: int) -> Ended:
        """Return a finished response, to be decoded."""
        return self.number, self.prompt, place, self.responses[place]

    def samples(self, group_id: int) -> list[Sample]:
        """Convert the finished group to samples, without decoding."""
        prompt, n = self.prompt, len(self.prompt.token_ids)
        return [
            Sample(prompt, group_id, index, prompt.token_ids + done.token_ids, [False] * n + done.drawn,
                   [0.0] * n + done.logprobs, [-1] * n + done.weight_versions, done.finish_reason)
            for index, done in enumerate(self.responses)
        ]


class PartialExperienceMaker(FastExperienceMaker):
    """Advances groups that are under way.

    Groups are dealt to ranks one by one, and so is the number of groups that must be finished: each rank stops by
    itself, after the same token in every run. Its completions are gathered, so that nothing depends on the rank.
    """

    def advance(self, groups: list[PartialGroup], wanted: int, due: set[int]) -> Callable[[], Rows]:
        """Generate until ``wanted`` of the unfinished ``groups`` are finished, and all with a number in ``due``.

        Returns:
            A function that waits for the rewards and returns the rows of all samples whose scoring began in this call,
            in the order of their numbers: the rest of every group finished now, and perhaps samples of other groups.
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
        """Run the engine on this rank's groups; return the samples whose scoring has started."""
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
        asked = self._continued(mine) if quota or late else []  # ranks that share an engine must call it together
        found = self.engine.generate(asked, self.sampling, finished, arrived if early else None)
        for i in sorted(set(range(len(found))) - done):
            mine[i].add(found[i], version, opened[i])
            if not mine[i].open:  # its last response finished while the engine stopped
                self._finish(i, mine[i])
        return self._begun()

    def _begins_early(self, prompts: Iterable[Prompt]) -> bool:
        """Require rows that are complete without their group, because a row is carried over with its group."""
        alone = self.greedy is None and not any(self.rewards.compares(reward_input(prompt, "")) for prompt in prompts)
        return alone and super()._begins_early(prompts)

    def _finish(self, i: int, group: PartialGroup) -> None:
        """Score the remaining responses of a finished group."""
        begun = {row["index"] for row in group.rows} | self._samples[i].keys()
        rest = [j for j in range(len(group.responses)) if j not in begun]
        self._begin([(i, sample) for sample in self.samples_of(map(group.ended, rest))])
        self.rewards.finish(self._handles[i])

    def _continued(self, groups: list[PartialGroup]) -> list[Request]:
        """Return requests for the unfinished responses; each response keeps its original seed."""
        whole = self._requests([(group.number, group.prompt) for group in groups], "draw")
        return [
            replace(request, seeds=[request.seeds[j]
                                    for j in group.open], prefixes=[group.responses[j].token_ids for j in group.open])
            for request, group in zip(whole, groups)
        ]


class OversamplingSource:
    """Source of batches with partial rollout (Kimi k1.5, arXiv:2501.12599; APRIL, arXiv:2509.18521).

    ``oversample`` batches of groups are under way. Generation ends when one batch is finished; that batch is trained.
    The other groups are carried over with all their tokens. Generation waits for a group that would exceed a staleness
    of ``max_staleness`` versions, so nothing is discarded and long responses are trained as often as short ones. Groups
    are trained in the order of their oldest token. Near the end only as many prompts are drawn as can be trained.

    Args:
        total_steps: steps of the run.
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
        """Make the rollout of one step."""
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
        """Remove and return the batch of finished groups with the oldest tokens; the others keep their order."""
        self.groups.sort(key=lambda group: (group.oldest(step + 1), group.number))
        chosen = [group for group in self.groups if not group.open][:self.batch]
        taken = {group.number for group in chosen}
        self.groups = [group for group in self.groups if group.number not in taken]
        return chosen

    def _rows(self, rows: Rows, chosen: list[PartialGroup]) -> Rows:
        """Give every group its new ``rows``; return all rows of ``chosen``, numbered by the index of their group."""
        groups = {group.number: group for group in (*chosen, *self.groups)}
        for row in rows:
            groups[row["group_id"]].rows.append(row)
        return [
            row | {"group_id": place} for place, group in enumerate(chosen)
            for row in sorted(group.rows, key=lambda row: row["index"])
        ]

    def _metrics(self, chosen: list[PartialGroup], step: int) -> dict[str, float]:
        versions = [set(response.weight_versions) - {-1} for group in chosen for response in group.responses]
        left = [group.responses[j] for group in self.groups for j in group.open if group.responses[j].token_ids]
        return {
            "rollout/partial/groups": sum(group.oldest(step) < step for group in chosen),
            "rollout/partial/samples": sum(len(each) > 1 for each in versions),
            "rollout/partial/left_groups": len(self.groups),
            "rollout/partial/left_samples": len(left),
            "rollout/partial/left_tokens": sum(len(response.token_ids) for response in left),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the unfinished and waiting groups."""
        return {"open": [asdict(group) for group in self.groups], "size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; drop groups that this run cannot continue, with a warning."""
        carried = [PartialGroup.load(each) for each in state.get("open", ())]
        if carried and (state["size"] != self.size or len(carried) > self.batch):
            get_logger().warning(
                "the %d groups of %d samples under way in the checkpoint are dropped: now there are groups of %d and "
                "%d per batch", len(carried), state["size"], self.size, self.batch)
        else:
            self.groups = carried
        tell_dropped(state, "rows")
