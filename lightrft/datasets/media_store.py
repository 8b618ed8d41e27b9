"""Store of the pictures, videos and sounds of a run by key: decoded, processed and cached where they are used.

Every rank reads the same data, so every rank can look up every key. Ranks exchange keys, never pixels.
"""
import hashlib
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Any

from jinja2 import TemplateError
from PIL import Image
from transformers import AutoProcessor, ProcessorMixin
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from lightrft.config.prompt_schema import MediaConfig
from lightrft.datasets.decoding import decode, image_size, Video
from lightrft.datasets.known_media import KnownMedia
from lightrft.datasets.media import KINDS, MediaError, MediaRules, Medium, shorten
from lightrft.datasets.media_cache import DiskCache, settings_of
from lightrft.datasets.pictures import fitted, resized
from lightrft.datasets.processing import check_order, Decoded, host_bytes, MediumProcessor
from lightrft.datasets.prompt_rows import Message
from lightrft.datasets.rows import DataError
from lightrft.datasets.waveform import Waveform
from lightrft.types import MediaTensors
from lightrft.utils.byte_cache import ByteCache, OncePerKey
from lightrft.utils.errors import first_line, install_command, UserError
from lightrft.utils.hub import read_pretrained
from lightrft.utils.play import Shown

_MIB = 1 << 20
_STILL = "The video has one frame: raise --fps if it is a file, write it as a picture, or remove the row"
_SEVERAL = "+"  # ends the key of a picture that is processed as one of several
Replaced = tuple[tuple[int, int], tuple[int, int]]


def open_store(path: str, tokenizer: PreTrainedTokenizerBase, cfg: MediaConfig, token_frames: int = 0,
               takes: Sequence[str] = KINDS) -> "MediaStore":
    """Open the store for the model at ``path``, whose processor gets ``tokenizer``; ``token_frames`` as for
    :class:`~lightrft.datasets.processing.MediumProcessor`, ``takes`` as for :class:`MediaStore`.

    Raises:
        UserError: the processor cannot be loaded.
    """
    try:
        processor: Any = read_pretrained(AutoProcessor, path)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"cannot load the processor of {path!r}: {first_line(error)}. Copy the model's processor "
                        f"files there; missing packages are installed by {install_command('vl')}") from error
    if not isinstance(processor, ProcessorMixin):
        raise UserError(f"{path!r} has no processor, only {type(processor).__name__}: copy the processor files of the "
                        "model there (processor_config.json or preprocessor_config.json)")
    processor.tokenizer = tokenizer
    store = MediaStore(processor, MediaRules.of(cfg), (cfg.min_pixels, cfg.max_pixels), cfg.media_cache_mib,
                       headers=cfg.media_check == "header", token_frames=token_frames, takes=takes)
    if cfg.media_cache_dir is not None:
        store.disk = DiskCache(Path(cfg.media_cache_dir).expanduser(), cfg.media_disk_mib * _MIB, store.settings)
    return store


class MediaStore:
    """Decodes and processes media, each once while it is in the cache.

    Args:
        processor: of the model.
        rules: limits of decoding.
        pixels: least and most pixels of a picture or frame, to which others are resized; 0: no limit.
        cache_mib: MiB of processed tensors that are kept. At most as many again, and one medium per worker, wait for
            their first use; with 0 nothing is processed ahead. The same holds for decoded media, where the engine
            asks for them.
        workers: threads that decode and process ahead.
        headers: take the text of a picture from its header, where the processor has a function for sizes.
        token_frames: as for :class:`~lightrft.datasets.processing.MediumProcessor`.
        takes: kinds of media that the model takes; rows with others are refused.

    Attributes:
        media, decoded: those of the rows by key, and how many were decoded so far.
        disk: keeps processed media for other ranks and runs; None: nothing does.
        settings: hash of everything but the content that decides about the tensors of a medium.
        cut: keys of the sounds whose end was cut off, to the window of the processor.
        gather: returns the values of all ranks that read the same rows; by itself, of this process alone.
    """

    def __init__(self, processor: ProcessorMixin, rules: MediaRules, pixels: tuple[int,
                                                                                   int] = (0, 0), cache_mib: int = 1024,
                 workers: int = 2, headers: bool = False, token_frames: int = 0, takes: Sequence[str] = KINDS) -> None:
        self.processor: Any = processor
        self.single = MediumProcessor(processor, token_frames)
        self.headers, self.takes = headers, tuple(takes)
        self._texts: dict[str, str] = {}
        self._distinct: dict[str, str] = {}
        self.rules, self.pixels = rules, pixels
        self.settings = settings_of(processor, pixels, rules.fps, rules.max_frames)
        self.disk: DiskCache | None = None
        self.decoded = 0
        self.gather: Callable[[Any], list[Any]] = lambda value: [value]
        self.cut = set[str]()
        self.media = KnownMedia()
        self._cache, self._lock = ByteCache[MediaTensors](cache_mib * _MIB, attrgetter("nbytes"), least=1), Lock()
        self._pool = ThreadPoolExecutor(workers, "media")
        self._ahead: dict[str, Future[MediaTensors | None]] = {}
        self._waiting = 0  # bytes of what was processed ahead
        self._decoded = ByteCache[Decoded](cache_mib * _MIB, host_bytes)  # for an engine that asks for their sizes
        self._decoding: dict[str, Future[None]] = {}
        self._room = 0  # bytes that may still be decoded ahead
        self._making, self._opening = OncePerKey[MediaTensors](), OncePerKey[Decoded]()
        self.blank = lru_cache(self.single.blank)

    def register(self, media: Iterable[Medium]) -> tuple[str, ...]:
        """Make the media of one row known; return their keys."""
        found = tuple(media)
        several = self.single.by_number and sum(one.kind == "image" for one in found) > 1
        keys = tuple(one.key + _SEVERAL * (several and one.kind == "image") for one in found)
        self.media.update(zip(keys, found))
        return keys

    def show(self, picture: Shown) -> Shown:
        """Make a picture of an environment known; return the object that keeps it known."""
        return self.media.show(picture)

    def adopt(self, other: "MediaStore", keys: Iterable[str]) -> tuple[str, ...]:
        """Make the media of one row known that ``other``, the store of another model, has under ``keys``."""
        return self.register(other.media[key] for key in keys)

    def keep(self, rows: Iterable[tuple[str, ...]]) -> None:
        """Count the media of the rows that a data set keeps, for :attr:`most`; forget those that no data set keeps."""
        for key in self.media.keep(rows):
            self._texts.pop(key, None)

    def try_first(self) -> str | None:
        """Process the first medium of the rows; return its kind and its place, None without any."""
        key = next(iter(self.media), None)
        if key is None:
            return None
        self.tensors(key)
        return f"{key.partition(':')[0]} of {self.media[key].where}"

    def check_downloads(self, keys: Iterable[str]) -> None:
        """Compare the downloads of all ranks: by one hash, unless they differ. A collective.

        Raises:
            DataError: names a URL that gave different bytes to two ranks.
        """
        urls = {medium.key: medium for key in keys for medium in self.media[key].downloads()}
        own = [(key, self.rules.downloads.get(key)) for key in sorted(urls)]
        if len({*self.gather(hashlib.blake2b(repr(own).encode(), digest_size=16).digest())}) == 1:
            return
        for rank, found in enumerate(ranks := self.gather(own)):
            for (key, first), (_, other) in zip(ranks[0], found):
                if first != other:
                    raise DataError(f"{urls[key].where}: the server sent other bytes to rank {rank} than to rank 0. "
                                    "Download it first and write its path")
        raise DataError("the ranks read different rows with URLs. Give all of them the same files")

    @property
    def most(self) -> dict[str, int]:
        """Most media of each kind in one sequence; the same on all ranks."""
        return self.media.most

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the media of all rows, sorted."""
        return tuple(sorted(self.most))

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """Tokens of the model that stand for media or are written around them, which no text of a row may hold."""
        tokenizer, names = self.processor.tokenizer, []
        for kind in KINDS:
            ids = [
                index for index in (*getattr(self.processor, f"{kind}_token_ids", ()),
                                    getattr(self.processor, f"{kind}_start_id", None),
                                    getattr(self.processor, f"{kind}_end_id", None)) if index is not None
            ]
            names += [getattr(self.processor, f"{kind}_token", None), *tokenizer.convert_ids_to_tokens(ids)]
            names += self._written_around(kind)
        return tuple(name for name in dict.fromkeys(names) if name in tokenizer.get_vocab())

    def _written_around(self, kind: str) -> list[str]:
        """Return the special tokens that the chat template writes for a medium; none without a template for it."""
        tokenizer = self.processor.tokenizer

        def ids(*parts: dict[str, str]) -> list[int]:
            chat = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
            return tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False).input_ids

        try:
            added = sorted({*ids({"type": kind})} - {*ids()})
        except (TemplateError, TypeError, ValueError):
            return []
        known = tokenizer.added_tokens_decoder
        return [known[index].content for index in added if index in known and known[index].special]

    def check_words(self, messages: list[Message], where: str) -> None:
        """Raise :class:`MediaError` if a text holds one of :attr:`tokens`."""
        for message in messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            text = "".join(str(part.get("text") or "") for part in parts)
            found = next((token for token in self.tokens if token in text), None)
            if found is not None:
                raise MediaError(f"{where}: a text holds {found}, which this model reads as a picture, video or sound: "
                                 f"{shorten(text)}. Write one <image>, <video> or <audio> per medium of the row and no "
                                 f"{found}, or leave such rows out with --media_policy skip")

    def open(self, key: str) -> Decoded:
        """Decode the medium ``key`` unless :meth:`decode_ahead` did: in a size within the limits, a sound in the length
        that the processor takes.

        Raises:
            UserError: no rank's data hold it, or it cannot be decoded.
        """
        coming = self._decoding.get(key)
        if coming is not None:
            coming.result()
        medium = self._opened(key)
        return self.single.fit(medium) if isinstance(medium, Waveform) else medium

    def decode_ahead(self, keys: Iterable[str]) -> None:
        """Decode media in the background for an engine that asks for their sizes, as many as the cache takes; those
        that were not used for the longest time make room."""
        with self._lock:
            self._room = self._decoded.budget
            self._decoding = {key: coming for key, coming in self._decoding.items() if not coming.done()}
            for key in dict.fromkeys(keys):
                if (kept := self._decoded.get(key)) is not None:
                    self._room -= host_bytes(kept)
                elif key not in self._decoding:
                    self._decoding[key] = self._pool.submit(self._decode_ahead, key)

    def _decode_ahead(self, key: str) -> None:
        if self._room > 0:
            self._opened(key)

    def _opened(self, key: str) -> Decoded:
        """Return the medium as it was decoded ahead, or decode it, once for all threads that need it now."""
        return self._opening.run(key, self._kept_or_decoded)

    def _kept_or_decoded(self, key: str) -> Decoded:
        """Return a decoded medium; one that is to be decoded ahead is kept, whichever thread decodes it."""
        if (kept := self._decoded.get(key)) is not None:
            return kept
        medium = self._open(key)
        with self._lock:
            coming = self._decoding.get(key)
            if coming is not None and not coming.done() and self._room > 0:
                self._room -= host_bytes(self._decoded.keep(key, medium))
        return medium

    def _open(self, key: str) -> Decoded:
        reference = self.media[key]
        with self._lock:
            self.decoded += 1
        medium = decode(reference, self.rules, self.single.rate)
        if isinstance(medium, Image.Image):
            return resized(medium, *self.pixels)
        if isinstance(medium, Video):
            return replace(medium, frames=[resized(frame, *self.pixels) for frame in medium.frames])
        return medium

    def tensors(self, key: str) -> MediaTensors:
        """Implement :meth:`~lightrft.types.MediaSource.tensors`; threads that ask at once get the same."""
        return self._making.run(key, self._kept_or_made)

    def _kept_or_made(self, key: str) -> MediaTensors:
        """Return processed tensors from the cache, from the background, or make them."""
        with self._lock:
            kept = self._cache.get(key)
            coming = self._ahead.pop(key, None) if kept is None else None
        if kept is not None:
            return kept
        made = None if coming is None else coming.result()
        if made is None:
            made = self._made(key)
        else:
            with self._lock:
                self._waiting -= made.nbytes
        self._keep_text(key, made.text)
        if made.cut_s:
            self.cut.add(key)
        return self._cache.keep(key, made)

    def text(self, key: str) -> str:
        """Return the text of the medium ``key`` in a prompt, computed from its header if that is enough."""
        if key not in self._texts:
            found = self._text_of_header(key) if self.headers else None
            self._keep_text(key, self.tensors(key).text if found is None else found)
        return self._texts[key]

    def prefetch_texts(self, keys: Iterable[str]) -> None:
        """Process media in the background whose texts will be asked for and take more than headers."""
        if not self.headers:
            self.prefetch(key for key in keys if key not in self._texts)

    def _text_of_header(self, key: str) -> str | None:
        medium = self.media[key]
        if medium.kind != "image" or key.endswith(_SEVERAL):
            return None
        height, width = image_size(medium, self.rules)
        width, height = fitted((width, height), *self.pixels)
        try:
            return self.single.text_of_size(height, width)
        except (ValueError, ArithmeticError) as error:
            raise self._refused(key, error) from error

    def _keep_text(self, key: str, text: str) -> None:
        """Remember a text; most media of a run have one of few."""
        known = self._texts.setdefault(key, self._distinct.setdefault(text, text))
        if known != text:
            raise UserError(f"{self.media[key].where}: the processor makes {len(text)} characters of it, and said "
                            f"{len(known)} for its size. Read all media at the start: --media_check all")

    def _refused(self, key: str, error: Exception, remedy: str = "Change or remove the row") -> MediaError:
        return MediaError(f"{self.media[key].where}: the processor of the model refuses it: {first_line(error)}. "
                          f"{remedy}")

    def prefetch(self, keys: Iterable[str]) -> None:
        """Process media in the background, before they are asked for, as far as there is room."""
        wanted = dict.fromkeys(keys)
        with self._lock:
            if self._waiting >= self._cache.budget:
                self._drop_unused(wanted)
            for key in wanted:
                if self._waiting >= self._cache.budget:
                    return
                if key not in self._cache and key not in self._making and not self._is_coming(key):
                    self._ahead[key] = self._pool.submit(self._made_ahead, key)

    def _drop_unused(self, wanted: Container[str]) -> None:
        """Drop media that were processed ahead but never used."""
        for key in [key for key, coming in self._ahead.items() if key not in wanted and coming.done()]:
            done = self._ahead.pop(key)
            made = None if done.exception() else done.result()
            self._waiting -= 0 if made is None else made.nbytes

    def _is_coming(self, key: str) -> bool:
        """Return False for a medium that nobody has asked for, or for which there was no room."""
        coming = self._ahead.get(key)
        if coming is None or not coming.done():
            return coming is not None
        return coming.exception() is not None or coming.result() is not None

    def _made_ahead(self, key: str) -> MediaTensors | None:
        """Make the tensors of a medium that waits for its use; None: there is no room for it now."""
        with self._lock:
            if self._waiting >= self._cache.budget:
                return None
        made = self._made(key)
        with self._lock:
            self._waiting += made.nbytes
        return made

    def _made(self, key: str) -> MediaTensors:
        """Make the tensors of a medium, from the disk where they are."""
        disk = self.disk
        path = disk.path(key, self.media[key]) if disk is not None and key in self.media else None
        if disk is None or path is None:
            return self._processed(key)
        made = disk.read(path)
        if made is None:
            made = self._processed(key)
            disk.write(path, made)
        return made

    def _processed(self, key: str) -> MediaTensors:
        decoded = self._opened(key)
        try:
            return self.single.process(key.partition(":")[0], decoded, key.endswith(_SEVERAL))
        except (ValueError, RuntimeError, ArithmeticError) as error:  # e.g. Qwen's, of a picture of 1 x 300 pixels
            still = isinstance(decoded, Video) and len(decoded.frames) == 1
            raise self._refused(key, error, *[_STILL] * still) from error

    def expand(self, text: str, keys: tuple[str, ...]) -> tuple[str, list[Replaced]]:
        """Replace the placeholder of each medium in a rendered prompt by what stands for its features.

        Returns:
            The text, and the replaced ranges [start, end) of characters with those that took their place.

        Raises:
            DataError: the prompt has more or fewer placeholders than media, or a medium is broken.
        """
        texts = {kind: [self.text(key) for key in keys if key.startswith(f"{kind}:")] for kind in KINDS}
        for kind, found in texts.items():
            token: Any = getattr(self.processor, f"{kind}_token", None)
            if (found or token in self.tokens) and text.count(token) != len(found):
                raise DataError(f"the chat template wrote {text.count(token)} {token} for {len(found)} media of kind "
                                f"{kind}: {shorten(text)}. Give the model's own with --chat_template")
        check_order(self.processor, text, keys, texts, self.tokens)
        (expanded, ), offsets = self.processor.get_text_with_replacements([text], *texts.values())
        return expanded, [(each["span"], each["new_span"]) for each in offsets[0]] if offsets else []

    def encode(self, text: str, keys: tuple[str, ...]) -> list[int]:
        """Tokenize the expanded text of a rendered prompt (:meth:`expand`)."""
        expanded, _ = self.expand(text, keys)
        return self.processor.tokenizer(expanded, add_special_tokens=False, verbose=False).input_ids
