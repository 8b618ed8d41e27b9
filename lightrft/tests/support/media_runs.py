"""Data and models for whole runs on prompts with pictures or sounds, and without."""
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lightrft.datasets.rows import hold_rows
from lightrft.tests.support import tiny_vision
from lightrft.tests.support.runs import BASE

OPTIONS: dict[str, Any] = {
    "rollout_batch_size": 4, "n_samples_per_prompt": 4, "train_batch_size": 8, "max_epochs": 2, "max_steps": 2,
    "prompt_max_len": 64, "self_test": True, "sync_proof": "both", "sync_canary_every": 1, "stop": [],
    "micro_train_batch_size": 4, "init_kl_coef": 0.01, "use_kl_loss": True, "engine_kv_mib": 4,
    "apply_chat_template": True
}  # yapf: disable
SHOWN: dict[str, Any] = {  # of runs whose environment shows pictures
    "env_images": 6, "generate_max_len": 200, "prompt_max_len": 160, "n_samples_per_prompt": 2, "max_epochs": 2,
    "micro_train_batch_size": 8, "engine_kv_mib": 8, "stop": BASE["stop"], "self_test": False, "init_kl_coef": 0.0,
    "use_kl_loss": False, "advantage_estimator": "reinforce"
}  # yapf: disable
_COLUMNS = {"image": "images", "video": "videos", "audio": "audios"}


def picture(seed: int) -> dict[str, Any]:
    """A picture of noise, as data sets hold them."""
    noise = np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def video(seed: int) -> list[dict[str, Any]]:
    """Four pictures."""
    return [picture(10 * seed + i) for i in range(4)]


def sound(seed: int) -> dict[str, Any]:
    """Half a second of noise."""
    noise = (np.random.default_rng(seed).standard_normal(8000) * 3000).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16000, 0, "NONE", ""))
        writer.writeframes(noise.tobytes())
    return {"bytes": file.getvalue(), "path": None}


def rows(kind: str) -> list[dict[str, Any]]:
    """Prompts with one medium, none, two and the first one again."""
    texts = [("<m>How many?", [0]), ("plain text", []), ("<m> or <m>", [1, 2]), ("and <m>?", [0])]
    of: Any = {"image": picture, "video": video, "audio": sound}[kind]
    return [{"id": str(i), "prompt": [{"role": "user", "content": text.replace("<m>", f"<{kind}>")}],
             _COLUMNS[kind]: [of(n) for n in numbers], "reference": "1"}
            for i, (text, numbers) in enumerate(texts)]  # yapf: disable


def with_videos() -> list[dict[str, Any]]:
    """Prompts with one video, none, two, and one after a picture."""
    found = rows("video")
    found[3]["prompt"][0]["content"], found[3]["images"] = "<image> and <video>?", [picture(0)]
    return found


def write_home(folder: Path, family: str) -> dict[str, Any]:
    """Write a model of ``family`` to ``folder/model`` and a template that renders its media; return options of a run
    on :func:`rows` of its first kind."""
    tiny_vision.save_model(folder / "model", family, tied=True)
    marks, template = tiny_vision.FAMILIES[family].placeholders, folder / "template.jinja"
    shown = "".join("{% if p.type == '" + kind + "' %}" + mark + "{% endif %}" for kind, mark in marks.items())
    template.write_text(
        "{% for m in messages %}<|im_start|>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}" + shown +
        "{{ p.text if p.type == 'text' else '' }}{% endfor %}{% endif %}<|im_end|>{% endfor %}", encoding="utf-8")
    return OPTIONS | {"prompt_data": [hold_rows(rows(next(iter(marks))))], "chat_template": str(template)}


def write_shown(folder: Path, family: str) -> dict[str, Any]:
    """Write a model of ``family`` and a template with turns; return :func:`options_shown`."""
    write_home(folder, family)
    template = folder / "template.jinja"
    text = template.read_text(encoding="utf-8").replace("<|im_start|>", "<|im_start|>{{ m.role }} ")
    template.write_text(text + "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}", encoding="utf-8")
    return options_shown(folder)


def options_shown(folder: Path) -> dict[str, Any]:
    """Options of a run in the ``folder`` of :func:`write_shown`, whose environment shows pictures, on :func:`rows` of
    which some begin with one."""
    hinted = [row | {"hint": "picture" if i % 2 else ""} for i, row in enumerate(rows("image"))]
    return OPTIONS | SHOWN | {"prompt_data": [hold_rows(hinted)], "chat_template": str(folder / "template.jinja")}
