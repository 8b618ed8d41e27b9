"""The records that pass through the trainer: Prompt, Episode and Batch, and what a medium of a prompt becomes."""
from lightrft.types.batch import Batch
from lightrft.types.branches import Branch, MediaSpan, Segment
from lightrft.types.episodes import by_group, Episode, Key, prompt_groups, unfinished
from lightrft.types.fields import Field, number, NUMBERS
from lightrft.types.media import MediaSource, MediaTensors
from lightrft.utils.prompt import Prompt

# their names in LightRFT
Experience = Batch
Sample = Episode

__all__ = [
    "Batch", "Branch", "by_group", "Episode", "Experience", "Field", "Key", "MediaSource", "MediaSpan", "MediaTensors",
    "NUMBERS", "number", "Prompt", "prompt_groups", "Sample", "Segment", "unfinished"
]
