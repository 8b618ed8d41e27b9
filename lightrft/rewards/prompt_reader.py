"""Prompts of responses as a reward model reads them: its own template, tokenizer and processor."""
from concurrent.futures import Future

from lightrft.config.schema import DataConfig
from lightrft.datasets.control_tokens import ControlTokens
from lightrft.datasets.media_store import MediaStore, open_store
from lightrft.datasets.prompt_rows import Message
from lightrft.datasets.rendering import Renderer
from lightrft.models.config_json import media_kinds, token_frames
from lightrft.models.tokenizer import load_tokenizer
from lightrft.rewards.base import Outcome, RewardInput
from lightrft.rewards.placement import ScorerSetup
from lightrft.utils.errors import UserError


class PromptReader:
    """Reads prompts for the reward model at ``path``.

    Args:
        cfg: rendering of prompts.

    Attributes:
        store: media of the prompts for the processor of the model; None: it reads text alone.
    """

    def __init__(self, path: str, setup: ScorerSetup, cfg: DataConfig | None = None) -> None:
        self.path, self.source = path, setup.media
        self.renderer = Renderer(cfg or DataConfig(), load_tokenizer(path))
        self.control = ControlTokens(self.renderer)
        self.store = self._opened(setup)

    def _opened(self, setup: ScorerSetup) -> MediaStore | None:
        kinds = media_kinds(self.path) if setup.media is not None else ()
        if not kinds or setup.media is None or not setup.media.most:
            return None
        store = open_store(self.path, self.renderer.tokenizer, setup.data, token_frames(self.path), kinds)
        store.media.most = {kind: most for kind, most in setup.media.most.items() if kind in kinds}
        return store

    def prompt(self, item: RewardInput) -> str | list[Message]:
        """Return the prompt as text or messages."""
        return item.messages or item.prompt

    def response(self, item: RewardInput) -> str | list[Message]:
        """Return the response as text or, of several turns behind messages, as messages. What an environment wrote in
        them has no control tokens of this model; one that writes text is its user."""
        if not item.messages or len(item.turns) == 1:
            return item.response
        return [turn if turn["role"] == "assistant" else self._heard(turn) for turn in item.turns]

    def _heard(self, turn: Message) -> Message:
        role = "user" if turn["role"] == "environment" else turn["role"]
        return turn | {"role": role, "content": self.control.neutral(turn["content"])}

    def media(self, item: RewardInput) -> tuple[str, ...]:
        """Return the keys of the media of the prompt, by which the store of the model knows them."""
        return self.store.adopt(self.source, item.media) if self.store is not None and self.source is not None else ()

    def check(self, item: RewardInput) -> None:
        """Check that the model reads the media of the prompt.

        Raises:
            UserError: it does not.
        """
        parts = [part for turn in item.messages if isinstance(turn.get("content"), list) for part in turn["content"]]
        kinds = {str(part.get("type")) for part in parts} - {"text"} | {key.partition(":")[0] for key in item.media}
        takes = () if self.store is None else self.store.takes
        if unread := sorted(kinds - {*takes}):
            raise UserError(f"--reward_pretrain {self.path}: here the reward model reads {', '.join(takes) or 'text'} "
                            f"only, and a prompt has {', '.join(unread)}: train one that reads it, or score these rows "
                            "with --reward and your own file")

    def ids(self, text: str, ids: list[int], media: tuple[str, ...]) -> list[int]:
        """Return the tokens of a rendered prompt: ``ids``, or with media those of its expanded ``text``."""
        return self.store.encode(text, media) if self.store is not None and media else ids

    def begin(self, inputs: list[RewardInput]) -> "tuple[list[Future[list[Outcome]]], list[int]]":
        """Return a future for each response, and the indices of those that can be read; others have their outcome.

        Raises:
            UserError: a prompt has media that the model does not read.
        """
        futures: list[Future[list[Outcome]]] = [Future() for _ in inputs]
        refused = [self.refusal(item) for item in inputs]
        for future, outcome in zip(futures, refused):
            if outcome is not None:
                future.set_result([outcome])
        return futures, [i for i, outcome in enumerate(refused) if outcome is None]

    def refusal(self, item: RewardInput) -> Outcome | None:
        """Return why a response cannot be read: it has a token that stands for a medium. None: it can, and the media of
        its prompt are processed in the background.

        Raises:
            UserError: the model does not read the media of the prompt.
        """
        self.check(item)
        if self.store is None:
            return None
        found = next((token for token in self.store.tokens if token in item.response), None)
        if found is not None:
            return Outcome(None, "media_token", f"the response has {found}, which {self.path!r} reads as a medium")
        self.store.prefetch(self.media(item))
        return None
