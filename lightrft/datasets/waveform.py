"""Sound: WAV files, other formats through soundfile, and resampling. Functions raise ``ValueError`` for sound that
is broken."""
import io
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightrft.utils.errors import install_command, UserError

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_UNKNOWN_SIZE = 0x7FFFF000  # and above: what programs write that do not know the length yet
_UNKNOWN_LENGTH = 2**40  # samples, and above: what soundfile states of a file without an end
_BLOCK = 1 << 16  # samples of each channel that are decoded at a time
EXCESS_S = 0.1  # of a sound beyond the window of a processor: what encoders pad, and a cut by a clock
MOST_CHANNELS = 16
MOST_RATE = 48_000  # Hz: above, a sound has at most as many samples as the longest one has at this rate
_LOUDEST = 8.0  # of floats; above, they are integers that were not scaled


@dataclass(frozen=True, eq=False)
class Waveform:
    """Sound of one channel: ``samples`` [n] float32, about -1 to 1, at ``rate`` Hz."""
    samples: np.ndarray
    rate: int

    @property
    def seconds(self) -> float:
        """Length."""
        return len(self.samples) / self.rate


def as_mono(array: Any) -> np.ndarray:
    """Convert numbers [n], [n, channels] or [channels, n] to float32 [n]; integers are scaled by their type.

    A list of integers counts as 16 bits.

    Raises:
        ValueError: not numbers, empty, of other dimensions, NaN or infinite, or floats far outside of -1 to 1.
    """
    given = np.asarray(array)
    if given.dtype.kind not in "iuf" or given.ndim not in (1, 2) or given.size == 0:
        raise ValueError(f"{given.dtype} of shape {given.shape} is not numbers [n] or [n, channels]")
    samples = given.astype(np.float32) if given.dtype.kind == "f" else _scaled(given)
    if samples.ndim == 2:
        samples = samples.mean(1 if samples.shape[1] <= samples.shape[0] else 0)
    _check_values(samples)
    return samples


def _check_values(samples: np.ndarray) -> None:
    if not np.isfinite(samples).all():
        raise ValueError("NaN or infinite samples")
    if np.abs(samples).max() > _LOUDEST:
        raise ValueError(f"samples up to {np.abs(samples).max():g}, not from -1 to 1")


def _scaled(integers: np.ndarray) -> np.ndarray:
    """Scale integers to -1 to 1; of a type wider than 32 bits, as 16-bit numbers."""
    if integers.dtype.kind == "u":
        raise ValueError(f"{integers.dtype} samples: unsigned integers are not known")
    bits = 16 if integers.dtype.itemsize > 4 else 8 * integers.dtype.itemsize
    if np.abs(integers.astype(np.int64)).max() > 2**(bits - 1):
        raise ValueError(f"integer samples of more than {bits} bits")
    return (integers / 2.0**(bits - 1)).astype(np.float32)


def write_wav(samples: np.ndarray, rate: int) -> bytes:
    """Encode mono float32 samples as a WAV file, without loss."""
    body = samples.astype("<f4").tobytes()
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(body), b"WAVE", b"fmt ", 16, _FLOAT, 1, rate, 4 * rate,
                       4, 32, b"data", len(body))
    return head + body


def read_sound(data: bytes, seconds: float, tick: Callable[[], None]) -> Waveform:
    """Decode a sound file: PCM and float WAV here, everything else with soundfile (extra ``audio``).

    Args:
        data: the whole file.
        seconds: greatest length. Above ``MOST_RATE`` the limit is the number of samples of that length at this rate.
        tick: called for every block; it raises when time is up.

    Raises:
        ValueError: not a sound, cut off, empty, too long, of too many channels, or NaN.
        UserError: soundfile is needed and not installed.
    """
    wav = _read_wav(data, seconds, tick) if data[:4] == b"RIFF" and data[8:12] == b"WAVE" else None
    return wav or _read_other(data, seconds, tick)


def _mixed(blocks: Iterable[np.ndarray], rate: int, seconds: float, tick: Callable[[], None]) -> Waveform:
    """Mix blocks [n, channels] to one channel as they come, so that only the mono sound is held."""
    mono = bytearray()
    for block in blocks:
        tick()
        samples = block.astype(np.float32, copy=False).mean(1)
        _check_values(samples)
        mono += samples.tobytes()
        _check_length(len(mono) // 4, rate, seconds)
    if not mono:
        raise ValueError("no samples")
    return Waveform(np.frombuffer(mono, np.float32), rate)


def _read_wav(data: bytes, seconds: float, tick: Callable[[], None]) -> Waveform | None:
    """Decode a WAV file; None for another codec than PCM and float."""
    chunks = dict(_chunks(memoryview(data)))
    if len(chunks.get(b"fmt ", b"")) < 16 or b"data" not in chunks:
        raise ValueError("a WAV file without format or data")
    codec, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunks[b"fmt "])
    if codec == _EXTENSIBLE and len(chunks[b"fmt "]) >= 26:
        codec = int.from_bytes(chunks[b"fmt "][24:26], "little")
    if (codec, bits) not in _WAV_TYPES:
        return None
    _check_form(channels, rate)
    body, size, convert = chunks[b"data"], channels * bits // 8, _WAV_TYPES[codec, bits]
    count = len(body) // size
    _check_length(count, rate, seconds)
    parts = (body[at * size:min(at + _BLOCK, count) * size] for at in range(0, count, _BLOCK))
    return _mixed((convert(part).reshape(-1, channels) for part in parts), rate, seconds, tick)


def _chunks(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield name and content of the chunks of a RIFF file; nothing is copied.

    Raises:
        ValueError: the sound ends before the length that the file states.
    """
    at = 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        body = data[at + 8:at + 8 + size]
        if name == b"data" and len(body) < size < _UNKNOWN_SIZE:
            raise ValueError(f"cut off: {len(body)} of {size} bytes of sound are there")
        yield name, body
        at += 8 + size + size % 2


def _integers(kind: str, zero: float, scale: float) -> Callable[[memoryview], np.ndarray]:
    return lambda body: ((np.frombuffer(body, kind).astype(np.float32) - zero) / scale)


def _pcm24(body: memoryview) -> np.ndarray:
    padded = np.zeros((len(body) // 3, 4), np.uint8)
    padded[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
    return (padded.view("<i4")[:, 0] / 2.0**31).astype(np.float32)


_WAV_TYPES: dict[tuple[int, int], Callable[[memoryview], np.ndarray]] = {
    (_PCM, 8): _integers("u1", 128, 2.0**7),
    (_PCM, 16): _integers("<i2", 0, 2.0**15),
    (_PCM, 24): _pcm24,
    (_PCM, 32): _integers("<i4", 0, 2.0**31),
    (_FLOAT, 32): lambda body: np.frombuffer(body, "<f4"),
    (_FLOAT, 64): lambda body: np.frombuffer(body, "<f8"),
}


def _read_other(data: bytes, seconds: float, tick: Callable[[], None]) -> Waveform:
    """Decode what soundfile reads."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its library is missing
        raise UserError(f"sound other than PCM and float WAV needs the package soundfile ({error}): "
                        f"{install_command('audio')}") from error
    if _cut_off(data):
        raise ValueError("cut off: its last block is missing")
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        stated = file.frames if file.frames < _UNKNOWN_LENGTH else 0
        _check_form(file.channels, file.samplerate)
        _check_length(stated, file.samplerate, seconds)
        sound = _mixed(_blocks(file), file.samplerate, seconds, tick)
        if len(sound.samples) < 0.95 * stated:
            raise ValueError(f"cut off: {len(sound.samples)} of {stated} samples are there")
        return sound


def _blocks(file: Any) -> Iterator[np.ndarray]:
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
        yield block


def _stated_size(data: bytes) -> int:
    """Return how many bytes the header of an AIFF, AU, RF64 or W64 file states; 0: none, or another form."""
    match data[:4]:
        case b"FORM":
            return int.from_bytes(data[4:8], "big") + 8
        case b".snd" if data[8:12] != b"\xff" * 4:  # of a stream the size is unknown
            return int.from_bytes(data[4:8], "big") + int.from_bytes(data[8:12], "big")
        case b"RF64":
            return int.from_bytes(data[20:28], "little") + 8
        case b"riff":
            return int.from_bytes(data[16:24], "little")
    return 0


def _cut_off(data: bytes) -> bool:
    """Check for a missing end, which soundfile does not report of these forms: AIFF, AU, RF64, W64 and Ogg."""
    if _stated_size(data) > len(data):
        return True
    page = data.rfind(b"OggS")
    if data[:4] != b"OggS" or len(data) < page + 27:
        return data[:4] == b"OggS"
    segments = data[page + 27:page + 27 + data[page + 26]]
    last = bool(data[page + 5] & 4)  # flag of the last page
    return not last or page + 27 + data[page + 26] + sum(segments) > len(data)


def _check_form(channels: int, rate: int) -> None:
    if not 1 <= channels <= MOST_CHANNELS:
        raise ValueError(f"{channels} channels; it must have 1 to {MOST_CHANNELS}")
    if not 1000 <= rate <= 768_000:
        raise ValueError(f"a rate of {rate} Hz")


def _check_length(count: int, rate: int, seconds: float) -> None:
    most = int(seconds * min(rate, MOST_RATE))
    if count > most:
        raise ValueError(f"more than {most} samples, {most / rate:g} s at {rate} Hz. Cut it into pieces")


def resample(sound: Waveform, rate: int) -> Waveform:
    """Convert to another rate with soxr's high quality (extra ``audio``); the same rate needs no package.

    Raises:
        ValueError: shorter than one sample at ``rate``.
        UserError: soxr is not installed.
    """
    if sound.rate == rate:
        return sound
    try:
        import soxr
    except ImportError as error:
        raise UserError(f"sound of {sound.rate} Hz for a model of {rate} Hz needs the package soxr: "
                        f"{install_command('audio')}, or resample the data") from error
    samples = soxr.resample(sound.samples, sound.rate, rate)
    if not len(samples):
        raise ValueError(f"shorter than one sample at {rate} Hz")
    return Waveform(samples.astype(np.float32, copy=False), rate)
