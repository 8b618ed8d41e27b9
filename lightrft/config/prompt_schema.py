"""Options of prompts, for every command that reads them: their sources, columns, media and rendering."""
from dataclasses import dataclass
from typing import Any

from lightrft.config.options import line_breaks, NON_NEGATIVE, option, POSITIVE, PROBABILITY

LIMIT = "[-1, inf)"


@dataclass
class MediaConfig:
    """Pictures, videos and sounds of rows: the columns they are in, and what may be read."""
    images_key: str = option("images", "column that holds the pictures of a row, one or a list (else: images, image)")
    videos_key: str = option("videos", "column that holds the videos of a row, one or a list (else: videos, video)")
    audios_key: str = option("audios",
                             "column that holds the sounds of a row, one or a list (else: audios, audio, audio_path)")
    media_root: str | None = option(
        None, "folder of the files that rows name; no file outside it is read (default: the folder of the data file)")
    media_urls: bool = option(False, "download pictures, videos and sounds that rows name by http(s) URL", free=True)
    media_policy: str = option(
        "error", "a row with unusable pictures, videos or sounds stops the run (error), or is left out and counted "
        "(skip)", ("error", "skip"), free=True)
    media_check: str = option(
        "all", "check of all pictures at the start of a run. all: decode them, which finds broken ones; header: read "
        "only their sizes, which is faster, but a broken picture then stops the run later", ("all", "header"),
        free=True)
    media_timeout_s: float = option(30.0, "limit in seconds on downloading and decoding one picture, video or sound",
                                    within=POSITIVE, free=True)
    fps: float = option(2.0, "frames per second that the model sees of a video; the rate of a list of pictures",
                        within=POSITIVE)
    max_pixels: int = option(
        0, "shrink larger pictures and frames to this many pixels, before the processor's own resizing; 0: no limit",
        within=NON_NEGATIVE)
    min_pixels: int = option(0, "enlarge smaller pictures and frames to this many pixels; 0: no limit",
                             within="[0, 64000000]", why="a picture of a row has no more")
    media_cache_mib: int = option(
        1024, "MiB per rank for processed pictures, videos and sounds, prepared "
        "ahead of a step and kept; with vllm the same again for decoded ones; 0: nothing is processed ahead",
        within=NON_NEGATIVE, free=True)
    media_cache_dir: str | None = option(
        None, "cache folder for processed pictures, videos and sounds, for later runs and all ranks of a node; media "
        "of URLs are not cached", free=True)
    media_disk_mib: int = option(16384,
                                 "limit on --media_cache_dir in MiB; the least recently used files are removed first",
                                 within=POSITIVE, needs="media_cache_dir DIR", free=True)
    cache_features: bool = option(
        False, "compute the features of a picture, video or sound only once and keep them in host memory; needs a "
        "frozen tower and projector (--freeze_prefix visual projector)", free=True)
    feature_cache_mib: int = option(4096, "limit in MiB on cached features per rank", within=NON_NEGATIVE,
                                    needs="cache_features", free=True)
    limit_mm_image_per_prompt: int = option(0,
                                            "limit on pictures per row, handled by --media_policy; 0 or -1: no limit",
                                            within=LIMIT)
    limit_mm_video_per_prompt: int = option(0, "limit on videos per row, handled by --media_policy; 0 or -1: no limit",
                                            within=LIMIT)
    limit_mm_audio_per_prompt: int = option(0, "limit on sounds per row, handled by --media_policy; 0 or -1: no limit",
                                            within=LIMIT)


@dataclass
class RenderingConfig(MediaConfig):
    """Rendering of a row as the text that a model reads, and its media."""
    apply_chat_template: bool = option(
        False, "render text prompts as one user turn with the tokenizer's chat template (message lists always are)",
        common=True)
    chat_template: str | None = option(
        None, "a Jinja file, one of the built-in template names, or the text of a template with {{, in place of the "
        "tokenizer's own", path="template")
    chat_template_kwargs: dict[str, Any] = option(
        {},
        "variables of the chat template, as a JSON object, e.g. '{\"enable_thinking\": false}'; those in the column "
        "chat_template_kwargs of a row win, key by key")
    system_prompt: str | None = option(None, "system message of every prompt; replaces the one of the row")
    input_template: str | None = option(
        None,
        "text with one {} that wraps every text prompt; the two characters \\n are a line break, '' is no template")

    def __post_init__(self) -> None:
        """Read the template as it is typed in a shell."""
        self.input_template = line_breaks(self.input_template) if self.input_template else None


@dataclass
class PromptConfig(RenderingConfig):
    """Conversion of a row to a prompt: its columns and its rendering."""
    input_key: str = option("prompt", "column that holds the prompt (text or chat messages)", common=True)
    label_key: str = option("label", "column, or key of extra_info, that names the reward recipe of a row")
    reference_key: str = option("reference", "column, or key of extra_info, that holds the reference answer",
                                common=True)
    overlong_prompt: str = option(
        "filter", "a prompt longer than --prompt_max_len is dropped and counted (filter), or stops "
        "the run (error)", ("filter", "error"), free=True)
    data_workers: int = option(0, "processes that tokenize the data set; 0: in this process", within=NON_NEGATIVE,
                               free=True)


@dataclass
class PromptDataConfig(PromptConfig):
    """Sources of the prompts, and the conversion of a row to a prompt."""
    prompt_data: list[str] = option(
        [], "prompts: file, folder or hub id, 'path@data_dir', or reasoning_gym:NAME?size=500; several are mixed",
        common=True, card="training data", path="rows", required="give a file, folder or hub id of the data")
    prompt_data_probs: list[float] = option([], "mixing probability of each --prompt_data entry (default: concatenate)",
                                            within=PROBABILITY, needs="prompt_data A,B")
    prompt_split: str = option("train", "split of --prompt_data to use")
    max_samples: int = option(0, "use at most this many prompts of --prompt_data; 0: all", within=NON_NEGATIVE)


@dataclass
class HeldOutConfig(PromptConfig):
    """Sources of held-out prompts, and the conversion of a row to a prompt."""
    eval_data: list[str] = option([], "held-out prompts; same forms as --prompt_data", free=True, common=True,
                                  card="held-out data", path="rows")
    eval_split: str = option("test", "split of --eval_data to use", free=True)
    eval_suite: list[str] = option(
        [], "public evaluation sets, used in full: math500, aime24, aime25, gpqa, gsm8k, from the hub, or name=path "
        "from a file or folder", free=True, path="suites")
    max_eval_samples: int = option(500, "use at most this many prompts of --eval_data; 0: all", within=NON_NEGATIVE,
                                   free=True)
