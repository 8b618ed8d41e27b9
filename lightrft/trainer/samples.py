"""Steps of an episode on its way: its seed, the parameters of its sampling, its text, the input of its rewards."""
from collections.abc import Iterable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import Config, DataConfig, RolloutConfig
from lightrft.datasets.prompt_rows import Message, prefill_of
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.token_texts import decode_behind
from lightrft.rewards.base import RewardInput
from lightrft.rollout.engine import RolloutEngine, SamplingParams
from lightrft.rollout.scheduler import generate, Round
from lightrft.trainer.environment import AnyEnvironment, turns_of
from lightrft.types import Episode, Prompt
from lightrft.types.episodes import sample_seed
from lightrft.utils.errors import UserError
from lightrft.utils.play import BETWEEN, Play
from lightrft.utils.progress import phase


def group_seeds(config: Config, step: int | str, number: int) -> list[int]:
    """Return the seeds of the samples of a group, by the number of its prompt in the batch of ``step``, or, with
    "draw", in all draws of the run."""
    return [sample_seed(config.train.seed, step, number, index) for index in range(config.rollout.n_samples_per_prompt)]


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


def reward_input(prompt: Prompt, response: str, play: Play | None = None, group_id: int = 0) -> RewardInput:
    """Build the input of a reward. ``response`` does not contain the prompt; a prefill at the end of that is the start
    of the answer, so rewards read it there, as in TRL. ``play``: what an environment did in the response, of which
    rewards read the turns of the policy alone."""
    begun = prefill_of(prompt.messages) or ""
    messages = prompt.messages[:-1] if begun else prompt.messages
    if play is not None:
        play = replace(play.begun_with(begun), shown=[])  # rewards read messages, without the pixels
        response = BETWEEN.join(play.answers)
    else:
        response = begun + response
    return RewardInput(prompt.text.removesuffix(begun), response, messages, prompt.data_source, prompt.label,
                       prompt.reference, prompt.columns, prompt.media, prompt.template_kwargs, play=play,
                       group_id=group_id)


def judged(episode: Episode) -> RewardInput:
    """Build the input of a reward from an episode with a text; of one that forks, with the prompt of the first branch.
    """
    return reward_input(episode.first_prompt, episode.text, episode.play, episode.group_id)


def decode(tokenizer: PreTrainedTokenizerBase, episodes: Iterable[Episode],
           stop: tuple[int, ...] = ()) -> list[Episode]:  # yapf: disable
    """Set the text of finished responses, and of several turns without a record the turns. Special tokens and ``stop``
    tokens stay; only the end token goes."""
    finished, kept = list(episodes), set(stop) - {tokenizer.eos_token_id}
    bodies = []
    for episode in (each.joined for each in finished):
        ids = episode.response_ids
        ends = _ends(tokenizer, ids, episode.finish_reason == "stop", kept)
        bodies.append((episode.prompt.token_ids, ids[:-1] if ends else ids))
    for episode, text in zip(finished, decode_behind(tokenizer, bodies)):
        episode.text, whole = text, episode.joined
        if episode.play is None and whole.drawn_len < whole.response_len:
            episode.play = Play(_turns(tokenizer, whole, kept))
    return finished


def _ends(tokenizer: PreTrainedTokenizerBase, ids: list[int], stopped: bool, kept: set[int]) -> bool:
    """Return True if the last token of a turn is no part of its text. One that has not ``stopped`` may end with such a
    token too: the answer to it had no room."""
    return ids[-1] not in kept if stopped else ids[-1:] == [tokenizer.eos_token_id]


def _turns(tokenizer: PreTrainedTokenizerBase, episode: Episode, kept: set[int]) -> list[Message]:
    """Return the turns of a response, each without its end token, and what an environment wrote between them."""
    pairs, roles, ids = [], [], episode.token_ids
    for drawn, start, stop in episode.runs:
        stopped = stop < len(ids) or episode.finish_reason == "stop"
        ends = drawn and _ends(tokenizer, ids[:stop], stopped, kept)
        pairs.append((ids[:start], ids[start:stop - ends]))
        roles.append("assistant" if drawn else "environment")
    return [{"role": role, "content": text} for role, text in zip(roles, decode_behind(tokenizer, pairs))]


def respond(engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, environment: AnyEnvironment | None,
            numbered: Sequence[tuple[int, Prompt]], seeds: list[list[int]], sampling: SamplingParams,
            role: str) -> list[Episode]:
    """Generate one decoded response per seed of each numbered prompt, with the engine's current weights.

    ``role`` is that of the episodes, and names the progress on the console.
    """
    episodes = [episode for (number, prompt), of_prompt in zip(numbered, seeds, strict=True)
                for episode in Episode.group(prompt, number, of_prompt, role)]  # yapf: disable
    bar = phase(len(numbered), role, "prompt")

    def heard(finished: Round) -> None:
        bar.update(len(finished.groups))

    with turns_of(environment, tokenizer, episodes, sampling.max_new_tokens) as (turns, hears_cuts):
        generate(engine, episodes, sampling, turns, heard, hears_cuts)
    bar.close()
    return decode(tokenizer, episodes, sampling.stop_token_ids)
