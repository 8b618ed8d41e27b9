"""Options of prompts, for every command that reads them: their sources, columns, media and rendering."""
from dataclasses import dataclass

from lightrft.config.options import NON_NEGATIVE, option, POSITIVE, PROBABILITY

LIMIT = "[-1, inf)"


@dataclass
class MediaConfig:
    """Pictures, videos and sounds of rows: the columns they are in, and what may be read."""
    images_key: str = option("images", "column that holds the pictures of a row, one or a list (else: images, image)")
    videos_key: str = option("videos", "column that holds the videos of a row, one or a list (else: videos, video)")
    audios_key: str = option("audios",
                             "column that holds the sounds of a row, one or a list (else: audios, audio, audio_path)")
    media_root: str | None = option(
        None,
        "folder of the files that rows name; no file outside of it is read (default: the folder of the data file)")
    media_urls: bool = option(False, "download pictures, videos and sounds that rows name by http(s) URL", free=True)
    media_policy: str = option(
        "error", "a row whose pictures, videos or sounds cannot be used stops the run, or is left out and counted",
        ("error", "skip"), free=True)
    media_check: str = option(
        "all", "what is read of all pictures at the start of a run: everything, which finds the broken ones, or the "
        "headers, from which most processors know the number of tokens; a broken picture then stops the run later",
        ("all", "header"), free=True)
    media_timeout_s: float = option(30.0, "most seconds to download and decode one picture, video or sound",
                                    within=POSITIVE, free=True)
    fps: float = option(2.0, "frames per second of a video that the model sees; a list of pictures has this rate",
                        within=POSITIVE)
    max_pixels: int = option(
        0, "shrink larger pictures and frames to this many pixels, before the processor's own resizing; 0: no limit",
        within=NON_NEGATIVE)
    min_pixels: int = option(0, "enlarge smaller pictures and frames to this many pixels; 0: no limit",
                             within="[0, 64000000]", why="a picture of a row has no more")
    media_cache_mib: int = option(
        1024, "MiB of processed pictures, videos and sounds that each rank keeps, and "
        "of those that wait for their first use, also decoded for vLLM; 0: nothing is processed ahead",
        within=NON_NEGATIVE, free=True)
    media_cache_dir: str | None = option(
        None, "folder that keeps processed pictures, videos and sounds for later runs and all ranks of a node; not "
        "those of URLs", free=True)
    media_disk_mib: int = option(
        16384, "MiB of files in --media_cache_dir, beyond which those not read for the longest time are removed",
        within=POSITIVE, needs="media_cache_dir DIR", free=True)
    cache_features: bool = option(
        False, "compute the features of a picture, video or sound once, where its tower and what leads from it to the "
        "decoder are not trained (--freeze_prefix visual projector), and keep them in host memory", free=True)
    feature_cache_mib: int = option(4096, "MiB of features that each rank keeps", within=NON_NEGATIVE,
                                    needs="cache_features", free=True)
    limit_mm_image_per_prompt: int = option(
        0, "most pictures of a row, beyond which --media_policy decides; 0 or -1: no limit", within=LIMIT)
    limit_mm_video_per_prompt: int = option(
        0, "most videos of a row, beyond which --media_policy decides; 0 or -1: no limit", within=LIMIT)
    limit_mm_audio_per_prompt: int = option(
        0, "most sounds of a row, beyond which --media_policy decides; 0 or -1: no limit", within=LIMIT)


@dataclass
class RenderingConfig(MediaConfig):
    """Rendering of a row as the text that a model reads, and its media."""
    apply_chat_template: bool = option(
        False, "render text prompts as one user turn with the tokenizer's chat template (message lists always are)",
        common=True)
    chat_template: str | None = option(
        None, "a Jinja file, or one of the built-in template names, that replaces the tokenizer's own")
    system_prompt: str | None = option(None, "system message of every prompt; it replaces the one a row brings")
    input_template: str | None = option(None, "text with one {} that wraps every text prompt")


@dataclass
class PromptConfig(RenderingConfig):
    """Conversion of a row to a prompt: its columns and its rendering."""
    input_key: str = option("prompt", "column that holds the prompt (text or chat messages)")
    label_key: str = option("label", "column, or key of extra_info, that names the reward recipe of a row")
    reference_key: str = option("reference", "column, or key of extra_info, that holds the reference answer")
    overlong_prompt: str = option("filter",
                                  "a prompt longer than --prompt_max_len is dropped and counted, or stops the run",
                                  ("filter", "error"), free=True)
    data_workers: int = option(0, "processes that tokenize the data set; 0: in this process", within=NON_NEGATIVE,
                               free=True)


@dataclass
class PromptDataConfig(PromptConfig):
    """Sources of the prompts, and the conversion of a row to a prompt."""
    prompt_data: list[str] = option([], "prompts: file, folder or hub id, 'path@data_dir'; several are mixed",
                                    common=True, card="training data")
    prompt_data_probs: list[float] = option([], "mixing probability of each --prompt_data entry (default: concatenate)",
                                            within=PROBABILITY, needs="prompt_data A,B")
    prompt_split: str = option("train", "split of --prompt_data to use")
    max_samples: int = option(0, "use at most this many prompts of --prompt_data; 0: all", within=NON_NEGATIVE)


@dataclass
class HeldOutConfig(PromptConfig):
    """Sources of held-out prompts, and the conversion of a row to a prompt."""
    eval_data: list[str] = option([], "held-out prompts, same forms", free=True, common=True, card="held-out data")
    eval_split: str = option("test", "split of --eval_data to use", free=True)
    eval_suite: list[str] = option(
        [], "public evaluation sets, whole: math500, aime24, aime25, gpqa, gsm8k, each from the hub, or name=path from "
        "a file or folder", free=True)
    max_eval_samples: int = option(500, "use at most this many prompts of --eval_data; 0: all", within=NON_NEGATIVE,
                                   free=True)
