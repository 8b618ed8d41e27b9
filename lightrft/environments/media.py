"""Pictures of environments as media of the policy: known to the store by their keys, and tokens where they appear."""
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence

from lightrft.datasets.media import find_medium, MediaError, shorten
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.rendering import Renderer
from lightrft.environments.base import Message, Step
from lightrft.types import Segment
from lightrft.utils.errors import UserError
from lightrft.utils.play import Shown

_KIND = "image"


class Pictures:
    """Pictures that environments show to a policy.

    Args:
        store: of the policy's media; None: it takes none.
        most: pictures in one response, those of ``reset`` included.

    Raises:
        UserError: there may be pictures, and the policy does not take them.
    """

    def __init__(self, store: MediaStore | None, most: int, encoder: Renderer) -> None:
        self.store, self.most, self.encoder = store, most, encoder
        if most and (store is None or _KIND not in store.takes):
            raise UserError(f"--env_images {most}: the model takes no pictures. Choose one that does, or drop it")
        if most and store is not None:
            if store.single.by_number:
                raise UserError(
                    f"--env_images {most}: {type(store.processor).__name__} processes a picture beside others "
                    "in another way than alone, so later ones would change those before. Choose another "
                    "model, or drop it")
            store.media.expect(_KIND, most)

    def of(self, answer: Step) -> list[Shown]:
        """Return the pictures of an answer, which the store knows from now on.

        Raises:
            UserError: none are expected.
        """
        return self._made_known([*answer.images, *_data_in(answer.messages or [])])

    def in_messages(self, messages: Iterable[Message]) -> list[Shown]:
        """Return the pictures of messages, likewise.

        Raises:
            UserError: none are expected.
        """
        return self._made_known([*_data_in(messages)])

    def _made_known(self, found: Sequence[str]) -> list[Shown]:
        if found and not self.most:
            raise UserError("an environment answered with image, and observations are texts without --env_images. Add "
                            "--env_images N, the most pictures in a response, for a model that takes pictures, or let "
                            "the environment describe what it shows (a game of gymnasium: in observe())")
        return [self._known.show(_shown(data, self._known)) for data in found]

    @property
    def _known(self) -> MediaStore:
        assert self.store is not None, "pictures are refused without one"
        return self.store

    def segment(self, text: str, shown: Sequence[Shown]) -> list[int] | Segment:
        """Return rendered text as given tokens, with what stands for the features of each of its pictures.

        Raises:
            DataError: it has more or fewer placeholders than pictures, or the model's processor refuses one.
        """
        if not shown:
            return self._ids(text)
        keys = tuple(one.key for one in shown)
        expanded, _ = self._known.expand(text, keys)
        given = Segment.given(self._ids(expanded))
        given.media, given.unexpanded_ids = keys, self._ids(text)
        return given

    def written(self, text: str, shown: Sequence[Shown]) -> list[int] | Segment:
        """Return the text of an environment, which has the marks of the template itself, as given tokens.

        Raises:
            MediaError: it has more or fewer placeholders than pictures.
        """
        token: str = getattr(self.store and self.store.processor, "image_token", "")
        if shown and (found := text.count(token)) != len(shown):
            raise MediaError(f"the text of a step has {found} {token} for {len(shown)} images: {shorten(text)}. Write "
                             "one for each of them")
        return self.segment(text, shown)

    def _ids(self, text: str) -> list[int]:
        return self.encoder.encode_inside([text])[0]


def _data_in(messages: Iterable[Message] | str) -> Iterator[str]:
    for message in messages if not isinstance(messages, str) else ():
        yield from (part["data"] for part in message["content"] if isinstance(part, dict) and "data" in part)


def _shown(data: str, store: MediaStore) -> Shown:
    try:
        content = b64decode(data)
    except ValueError as error:
        raise MediaError(f"an observation: a picture is no base64 ({error})") from error
    return Shown(find_medium(content, _KIND, store.rules, "an observation").key, data)
