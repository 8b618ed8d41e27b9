"""A conversation with a model in an engine: turns, pictures, and answers that appear while they are generated."""
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.prompt_rows import Message, text_of
from lightrft.datasets.rows import hold_rows, lone_surrogate
from lightrft.inference.loading import LoadedModel
from lightrft.models.vocabulary import check_rows
from lightrft.rollout.engine import RolloutEngine
from lightrft.rollout.scheduler import generate
from lightrft.trainer.environment import turns_of
from lightrft.trainer.samples import decode, sample_seed
from lightrft.types import Episode, Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.logging import silent
from lightrft.utils.play import Shown

PIECE = 16  # tokens that are generated before they are shown
UNFINISHED = "�"  # the end of a text whose last character has further bytes
HELP = "/image PATH: show a picture with the next message; /reset or clear: begin again; /exit or exit: end"


@dataclass
class Conversation:
    """Turns so far, and pictures that wait for the next message."""
    model: LoadedModel
    engine: RolloutEngine
    seed: int
    messages: list[Message] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)  # of all turns
    waiting: list[str] = field(default_factory=list)
    turns: int = 0
    shown: list[str] = field(default_factory=list)  # pictures of the environment in the messages of the last answer
    rewritten: Episode | None = None  # the last answer, if its environment has rewritten the conversation in it

    @staticmethod
    def check(model: LoadedModel) -> None:
        """Refuse an environment that shows pictures in a text: the next turn would render their tokens as text.

        Raises:
            UserError: there is one.
        """
        player = model.environment
        if player is not None and player.form is None and player.pictures.most:
            raise UserError(f"--env_images {player.pictures.most}: a chat keeps pictures in messages, and "
                            f"--environment {player.pool.spec.title} ({player.pool.info.kind}) writes a text. Drop "
                            "--env_images, or let it answer with messages")

    def reset(self) -> None:
        """Forget all turns."""
        self.messages, self.pictures, self.waiting = [], [], []

    def show(self, path: str) -> str:
        """Add a picture to the next message; return what to say about it."""
        if self.model.media is None:
            return "this model takes text only"
        if "image" not in self.model.media.takes:
            return f"this model takes {', '.join(self.model.media.takes)} only"
        if self.model.config.rollout.caps.counts_media:
            return "pictures need --engine_type hf, because other engines are started for a known number of them"
        file = Path(path).expanduser()
        if not file.is_file():
            return f"{path}: no such file"
        self.waiting.append(str(file.resolve()))
        return f"{file.name} goes with the next message"

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer to a message piece by piece; the turn is kept once it is complete.

        Raises:
            UserError: the conversation is longer than ``--prompt_max_len``, or a picture cannot be used.
        """
        parts = [*({"type": "image"} for _ in self.waiting), {"type": "text", "text": text}]
        said: Message = {"role": "user", "content": parts if self.waiting else text}
        pictures, self.waiting = [*self.pictures, *self.waiting], []
        prompt = self._prompt([*self.messages, said], pictures)
        pieces = self._pieces if self.model.environment is None else self._played
        self.shown, self.rewritten = [], None
        answer = yield from pieces(prompt)
        before = [*self.messages, said]
        if self.rewritten is not None:
            before, pictures = self._rewritten_by(self.rewritten, dict(zip(prompt.media, pictures)))
        self.messages, self.turns = [*before, *answer], self.turns + 1
        self.pictures = [*pictures, *self.shown]

    def _rewritten_by(self, answer: Episode, pictures: dict[str, str]) -> tuple[list[Message], list[str]]:
        """Return the messages and the pictures before the last branch of an answer; ``pictures``: those before, by
        key."""
        sources = pictures | {one.key: _uri(one) for one in (answer.play.shown if answer.play else ())}
        return answer.prompt.messages, [sources[key] for key in answer.prompt.media]

    def _prompt(self, messages: list[Message], pictures: list[str]) -> Prompt:
        """Render and tokenize the conversation as a row of a data set."""
        config = self.model.config
        row = {"prompt": messages, **({"images": pictures} if pictures else {})}
        data = replace(config.data, prompt_data=[hold_rows([row])])
        with silent():  # columns are those of a chat
            prompt = PromptsDataset(data, self.model.tokenizer, config.rollout.prompt_max_len, media=self.model.media,
                                    scored=False, tools=self.model.tools)[0]
        check_rows(None, str(config.model.pretrain), self.model.tokenizer, [("the conversation", prompt.token_ids)])
        return prompt

    def _pieces(self, prompt: Prompt) -> Generator[str, None, list[Message]]:
        """Generate an answer a few tokens at a time, each piece from where the last one ended; return its message."""
        cfg, tokenizer = self.model.config.rollout, self.model.tokenizer
        sampling = self.model.sampling
        answer, shown = Episode(prompt, self.turns, 0, role="chat", seed=sample_seed(self.seed, self.turns)), ""
        while answer.finish_reason != "stop" and answer.response_len < cfg.generate_max_len:
            most = min(answer.response_len + PIECE, cfg.generate_max_len)
            generate(self.engine, [answer], replace(sampling, max_new_tokens=most))
            decode(tokenizer, [answer], sampling.stop_token_ids)
            ended = answer.finish_reason != "length" or most == cfg.generate_max_len
            text = answer.text if ended else answer.text.rstrip(UNFINISHED)
            yield text[len(shown):]
            shown = text
        return [{"role": "assistant", "content": shown}]

    def _played(self, prompt: Prompt) -> Generator[str, None, list[Message]]:
        """Generate an answer with its environment, yield the turns and what they were answered with, and return them as
        messages."""
        sampling, environment = self.model.sampling, self.model.environment
        answer = Episode(prompt, self.turns, 0, role="chat", seed=sample_seed(self.seed, self.turns))
        with turns_of(environment, self.model.tokenizer, [answer],
                      sampling.max_new_tokens) as (turns, hears_cuts):  # yapf: disable
            generate(self.engine, [answer], sampling, turns, hears_cuts=hears_cuts)
        assert answer.play is not None, "it had an environment"
        for message in answer.play.messages:
            name = "" if message["role"] == "assistant" else f"[{message.get('name') or message['role']}] "
            yield f"{name}{text_of(message['content'])}\n"
        if answer.play.failure:
            yield f"[the environment failed: {answer.play.failure}]\n"
        decode(self.model.tokenizer, [answer], sampling.stop_token_ids)
        self.shown = [*map(_uri, answer.shown)]  # those of reset() are not in the messages
        if answer.closed:
            self.rewritten = answer
        with_roles = environment is not None and environment.form is not None
        return _last_turns(answer) if with_roles else [{"role": "assistant", "content": answer.text}]


def _uri(picture: Shown) -> str:
    return f"data:;base64,{picture.data}"


def _last_turns(answer: Episode) -> list[Message]:
    """Return the turns of the last branch of an answer, and what they were answered with."""
    messages, count = answer.play.messages if answer.play else [], sum(drawn for drawn, *_ in answer.runs)
    starts = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[starts[-count]:] if count else []


WORDS = {"exit": "/exit", "clear": "/reset"}  # whole lines that mean a command, in any case, as in OpenRLHF


def talk(conversation: Conversation, lines: TextIO, write: Callable[[str], object], prompt: str = "") -> None:
    """Answer messages, one per line, until ``/exit`` or the end of ``lines``; a byte that is no text is a surrogate.
    :data:`WORDS` are commands too.

    Args:
        prompt: is written where a message is expected.
    """
    write(prompt)
    for line in lines:
        command, _, rest = WORDS.get(line.strip().lower(), line.strip()).partition(" ")
        if command == "/exit":
            return
        if lone_surrogate(line):
            write("the line is not UTF-8, and is left out. Set the terminal to UTF-8, or convert the text\n")
        elif command == "/reset":
            conversation.reset()
            write("a new conversation\n")
        elif command == "/image":
            write(f"{conversation.show(rest.strip())}\n")
        elif command.startswith("/"):
            write(f"{HELP}\n")
        elif command:
            _answer(conversation, line.strip(), write)
        write(prompt)


def _answer(conversation: Conversation, text: str, write: Callable[[str], object]) -> None:
    try:
        for piece in conversation.ask(text):
            write(piece)
        write("\n")
    except UserError as error:
        write(f"{error}. The message is not kept; /reset begins a new conversation\n")
