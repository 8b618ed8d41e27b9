"""Odd, broken and huge sounds."""
import base64
import io
import tracemalloc
import wave
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from lightrft.datasets.decoding import decode
from lightrft.datasets.media import find_medium, MediaError
from lightrft.datasets.tests.test_decoding import decoded, encoded, NOISE, RULES
from lightrft.datasets.waveform import resample, Waveform, write_wav

SINE = 0.5 * np.sin(np.arange(1600) * 2 * np.pi * 440 / 16_000)


def wav(samples, rate=16_000, width=2, channels=1):
    """A WAV file of the standard library."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((channels, width, rate, 0, "NONE", ""))
        scaled = np.round(np.asarray(samples) * (2**(8 * width - 1) - 1)).astype("<i8")
        scaled += 128 if width == 1 else 0
        out.writeframes(scaled.reshape(-1, 1).view(np.uint8)[:, :width].tobytes())
    return file.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_of_every_width(width):
    sound = decoded(wav(SINE, width=width), "audio")
    assert sound.samples.dtype == np.float32 and sound.rate == 16_000 and sound.seconds == 0.1
    assert np.abs(sound.samples - SINE).max() < 2.0**(2 - 8 * width) + 1e-6


def test_float_wav_and_extensible_wav():
    soundfile = pytest.importorskip("soundfile")
    for subtype in ("FLOAT", "DOUBLE", "PCM_24"):
        for kind in ("WAV", "WAVEX"):
            file = io.BytesIO()
            soundfile.write(file, SINE, 16_000, subtype=subtype, format=kind)
            assert np.abs(decoded(file.getvalue(), "audio").samples - SINE).max() < 1e-6


@pytest.mark.parametrize("kind, subtype", [("FLAC", None), ("OGG", None), ("MP3", None),
                                           ("WAV", "ULAW"), ("AIFF", None), ("AU", None), ("W64", None), ("RF64", None),
                                           ("AU", "PCM_S8"), ("W64", "PCM_U8"), ("RF64", "PCM_U8"), ("CAF", None)])
def test_what_soundfile_reads(kind, subtype):
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, SINE.repeat(4)[:6399], 16_000, subtype=subtype, format=kind)
    for data in (file.getvalue(), base64.b64encode(file.getvalue()).decode()):
        sound = decoded(data, "audio")
        assert abs(sound.seconds - 0.4) < 0.1 and 0.3 < np.abs(sound.samples).max() < 0.7


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3", "AIFF", "AU", "W64", "RF64", "CAF"])
def test_sounds_cut_off(kind):
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, NOISE[0, 0, 0] / 999 * np.sin(np.arange(80_000)), 16_000, format=kind)
    data = file.getvalue()
    for length in range(len(data) // 20, len(data) * 9 // 10, len(data) // 20):
        with pytest.raises(MediaError, match="row 1: audio of"):
            decoded(data[:length], "audio")


def test_stereo_is_mixed_and_resampled():
    pytest.importorskip("soxr")
    both = np.stack([SINE[::2], np.zeros(800)], 1)
    for value in (wav(both, 8000, channels=2), {"array": both, "sampling_rate":
                                                8000}, {"array": both.T.tolist(), "sampling_rate": 8000}):
        sound = decoded(value, "audio")
        assert sound.rate == 16_000 and abs(len(sound.samples) - 1600) <= 1
        middle = slice(200, 1400)
        assert np.abs(sound.samples[middle] - SINE[middle] / 2).max() < 0.01


def test_integers_are_scaled():
    sound = decoded({"array": [16384, -32768], "sampling_rate": 16_000}, "audio")
    assert sound.samples.tolist() == [0.5, -1.0]
    wide = decoded({"array": np.array([2**30], np.int32), "sampling_rate": 16_000}, "audio")
    assert wide.samples.tolist() == [0.5]


def test_streamed_wav_of_unknown_length_is_read_to_its_end():
    data = bytearray(wav(SINE))
    data[40:44] = b"\xff" * 4
    assert len(decoded(bytes(data), "audio").samples) == 1600


def broken_wav(at, value):
    data = bytearray(wav(SINE))
    data[at:at + len(value)] = value
    return bytes(data)


@pytest.mark.parametrize("data, message", [
    (wav(SINE)[:1000], "cut off: 956 of 3200 bytes"),
    (wav([]), "no samples"),
    (wav(SINE)[:40], "without format or data"),
    (write_wav(np.array([0.0, np.nan], np.float32), 16_000), "NaN or infinite"),
    (write_wav(np.array([0.0, np.inf], np.float32), 16_000), "NaN or infinite"),
    (write_wav(np.full(3, 1e30, np.float32), 16_000), "not from -1 to 1"),
    (broken_wav(22, b"\0\0"), "0 channels"),
    (broken_wav(24, b"\0\0\0\0"), "a rate of 0 Hz"),
    (broken_wav(24, b"\xff\xff\xff\xff"), "a rate of 4294967295 Hz"),
    (b"hello world, this is no sound at all", "cannot be read"),
    (encoded(Image.fromarray(NOISE)), "cannot be read"),
])  # yapf: disable
def test_broken_sounds(data, message):
    if "cannot be read" in message:
        pytest.importorskip("soundfile")
    with pytest.raises(MediaError, match=f"row 1: audio of {len(data)} bytes: .*{message}"):
        decoded(data, "audio")


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
def test_long_sounds_and_many_channels_are_refused(kind):
    """The limit is one of seconds at the file's own rate; above 48 kHz one of memory."""
    soundfile, short = pytest.importorskip("soundfile"), replace(RULES, max_seconds=2.0)

    def silence(seconds, rate, channels=1):
        file = io.BytesIO()
        soundfile.write(file, np.zeros((int(seconds * rate), channels)), rate, format=kind)
        return file.getvalue()

    for rate, most in ((8000, 16_000), (48_000, 96_000), (96_000, 96_000)):
        with pytest.raises(MediaError, match=f"more than {most} samples, {most / rate:g} s at {rate} Hz. Cut it"):
            decoded(silence(most / rate + 0.1, rate), "audio", short, rate=rate)
        assert decoded(silence(most / rate, rate), "audio", short, rate=rate).seconds == pytest.approx(most / rate)
    if kind != "FLAC":  # it has at most 8
        assert decoded(silence(0.1, 16_000, 16), "audio").seconds == pytest.approx(0.1)
        with pytest.raises(MediaError, match="17 channels; it must have 1 to 16"):
            decoded(silence(0.1, 16_000, 17), "audio")


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_channels_take_no_memory(kind):
    soundfile, file, count = pytest.importorskip("soundfile"), io.BytesIO(), 1 << 20
    soundfile.write(file, np.zeros((count, 8), np.int16), 16_000, format=kind)
    medium = find_medium(file.getvalue(), "audio", RULES, "row 1")
    tracemalloc.start()
    sound = decode(medium, RULES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(sound.samples) == count and peak < 4 * sound.samples.nbytes, "two copies are mono, all channels are 8"


def test_resampling_keeps_length_and_pitch():
    pytest.importorskip("soxr")
    for rate in (8000, 11_025, 44_100, 48_000):
        tone = np.sin(np.arange(rate) * 2 * np.pi * 1000 / rate).astype(np.float32)
        sound = resample(Waveform(tone, rate), 16_000)
        assert abs(len(sound.samples) - 16_000) <= 1
        assert abs(np.abs(np.fft.rfft(sound.samples)).argmax() - 1000) <= 1
