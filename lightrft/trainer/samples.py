"""Groups of responses, finished or not, and their texts; the seeds of samples and inputs of rewards."""
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import DataConfig, RolloutConfig
from lightrft.datasets.records import prefill_of
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.token_texts import decode_behind
from lightrft.rewards.base import RewardInput
from lightrft.rollout.engine import RolloutEngine, SamplingParams
from lightrft.rollout.scheduler import generate, Round
from lightrft.trainer.environment import Environment, next_turn
from lightrft.types import Episode, Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.progress import phase
from lightrft.utils.score import Score


def sample_seed(*path: int | str) -> int:
    """Hash a path such as (run seed, step, group, sample) to a 63-bit seed, the same on every rank and machine."""
    digest = hashlib.blake2b("/".join(map(str, path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stop_token_ids(stop: list[str], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the token that every stop string is within a text; one that is not exactly one token is an error."""
    ids = Renderer(DataConfig(), tokenizer).encode_inside(stop) if stop else []
    for text, tokens in zip(stop, ids):
        if len(tokens) != 1:
            raise UserError(
                f"--stop {text!r} is {len(tokens)} tokens of this tokenizer; a stop string must be exactly one")
    return tuple(tokens[0] for tokens in ids)


def sampling_params(cfg: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """Return the parameters with which responses are drawn."""
    return SamplingParams(cfg.generate_max_len, cfg.temperature, cfg.top_p, cfg.top_k, cfg.min_p,
                          stop_token_ids(cfg.stop, tokenizer), cfg.first_token_temperature if cfg.use_fire else None)


def reward_input(prompt: Prompt, response: str) -> RewardInput:
    """Build the input of a reward. ``response`` does not contain the prompt; a prefill at the end of that is the start
    of the answer, so rewards read it there, as in TRL."""
    begun = prefill_of(prompt.messages)
    messages = prompt.messages if begun is None else prompt.messages[:-1]
    return RewardInput(prompt=prompt.text.removesuffix(begun
                                                       or ""), response=(begun or "") + response, messages=messages,
                       data_source=prompt.data_source, label=prompt.label, reference=prompt.reference,
                       columns=prompt.columns, media=prompt.media, template_kwargs=prompt.template_kwargs)


@dataclass
class ResponseGroup:
    """Responses to one prompt, finished or not, on the rank that generates them."""
    number: int  # of its prompt: in the batch, or in all draws of the run
    prompt: Prompt
    responses: list[Episode]

    @classmethod
    def new(cls, number: int, prompt: Prompt, size: int) -> "ResponseGroup":
        """Create a group of ``size`` empty responses."""
        return cls(number, prompt, [Episode(prompt, number, index) for index in range(size)])

    @classmethod
    def load(cls, state: dict[str, Any]) -> "ResponseGroup":
        """Restore a group from :meth:`state`; in checkpoints of earlier versions the scores are apart."""
        prompt, number = Prompt(**state["prompt"]), state["number"]
        responses = [Episode.load(prompt, number, j, response) for j, response in enumerate(state["responses"])]
        for row in state.get("scored", ()):
            load_score(responses[row["index"]], row)
        return cls(number, prompt, responses)

    def state(self) -> dict[str, Any]:
        """Return the group as plain values, for a checkpoint."""
        return {"number": self.number, "prompt": asdict(self.prompt),
                "responses": [response.state() for response in self.responses]}  # yapf: disable

    @property
    def open(self) -> list[Episode]:
        """Unfinished responses."""
        return [response for response in self.responses if response.open]

    @property
    def tokens(self) -> int:
        """Number of tokens generated so far."""
        return sum(response.response_len for response in self.responses)

    def oldest(self, version: int) -> int:
        """Return the version of the oldest weights that drew a token; ``version`` if no token is drawn yet."""
        return min((response.segments[0].version for response in self.responses if response.segments), default=version)

    def renumbered(self, group_id: int) -> list[Episode]:
        """Return the responses with another number of their group."""
        return [replace(response, group_id=group_id) for response in self.responses]


def load_score(episode: Episode, row: dict[str, Any]) -> None:
    """Restore the score of an episode from the ``row`` that checkpoints of earlier versions hold."""
    episode.score = Score(row["reward"], row["parts"], row["error"], row["weights"], fault=row.get("fault"))
    episode.steps = [(end, reward) for end, reward in row.get("steps", ())]
    if row.get("greedy_length") is not None:
        episode.greedy = row["greedy_reward"], row["greedy_length"]


def decode(tokenizer: PreTrainedTokenizerBase, episodes: Iterable[Episode],
           stop: tuple[int, ...] = ()) -> list[Episode]:  # yapf: disable
    """Set the text of finished responses. Special tokens and ``stop`` tokens stay; only the end token goes."""
    finished, kept = list(episodes), set(stop) - {tokenizer.eos_token_id}
    bodies = []
    for episode in finished:
        ids = episode.response_ids
        ends = episode.finish_reason == "stop" and ids[-1] not in kept
        bodies.append((episode.prompt.token_ids, ids[:-1] if ends else ids))
    for episode, text in zip(finished, decode_behind(tokenizer, bodies)):
        episode.text = text
    return finished


def respond(engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, environment: Environment | None,
            numbered: Sequence[tuple[int, Prompt]], seeds: list[list[int]], sampling: SamplingParams,
            role: str) -> list[Episode]:
    """Generate one decoded response per seed of each numbered prompt, with the engine's current weights.

    ``role`` is that of the episodes, and names the progress on the console.
    """
    episodes = [Episode(prompt, number, index, role=role, seed=seed) for (number, prompt), of_prompt in
                zip(numbered, seeds, strict=True) for index, seed in enumerate(of_prompt)]  # yapf: disable
    bar = phase(len(numbered), role, "prompt")

    def heard(finished: Round) -> None:
        bar.update(len(finished.groups))

    generate(engine, episodes, sampling, next_turn(environment, tokenizer), heard)
    bar.close()
    return decode(tokenizer, episodes, sampling.stop_token_ids)
