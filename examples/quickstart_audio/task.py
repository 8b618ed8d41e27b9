"""The task of the quickstart that hears: count the high beeps of a short sound, and do not count the low ones.

A sound has one second at 16 kHz: nine slots with a high beep of one of three pitches, a low beep, or silence.
"""
import io
import sys
import wave
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "quickstart_vl"))
from counting import Counting, Layout, DECOY, TARGETS  # noqa: E402

RATE = 16000  # samples per second
SLOT = RATE // 9
PITCHES = dict(zip(TARGETS, (1600.0, 2000.0, 2500.0))) | {DECOY: 500.0}  # Hz


def beep(pitch: float) -> np.ndarray:
    """Return a beep that swells and fades within its slot, 0 for silence: float [SLOT] in [-1, 1]."""
    time = np.arange(SLOT) / RATE
    return 0.5 * np.sin(2 * np.pi * pitch * time) * np.hanning(SLOT)


def wav(layout: Layout) -> bytes:
    """Return the sound of a layout as a WAV file with 16-bit samples."""
    sound = np.concatenate([beep(PITCHES.get(cell, 0.0)) for cell in "".join(layout)])
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((sound * 32767).astype("<i2").tobytes())
    return file.getvalue()


TASK = Counting("lightrft/quickstart_audio", "<audio>What is the number of high beeps?", "audios", ".wav", wav)
