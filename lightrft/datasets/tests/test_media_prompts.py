"""Data sets of prompts and demonstrations with pictures: tokens, masks, keys and what is processed how often."""
import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Semaphore

import numpy as np
import pytest
import torch
from PIL import Image

from lightrft.config.offline_schema import PairDataConfig
from lightrft.config.preference_schema import JudgedDataConfig
from lightrft.config.rm_schema import StepDataConfig
from lightrft.config.schema import DataConfig
from lightrft.config.sft_schema import SFTDataConfig
from lightrft.datasets import media_store
from lightrft.datasets.judged import JudgedDataset
from lightrft.datasets.media import find_medium, MediaError
from lightrft.datasets.media_store import open_store
from lightrft.datasets.preferences import PairDataset
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.datasets.steps import StepDataset
from lightrft.models.config_json import takes_media
from lightrft.models.tokenizer import load_tokenizer
from lightrft.tests.support import tiny, tiny_vision
from lightrft.utils.errors import UserError

pytest.importorskip("torchvision")
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{% if p.type == 'image' %}" + tiny_vision.PICTURE +
            "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}")


def picture(seed, size=(56, 84)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def png(seed, size=(56, 84)):
    file = io.BytesIO()
    picture(seed, size).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def ask(text, *pictures, **more):
    return {"prompt": [{"role": "user", "content": text}], "images": list(pictures), "answer": "1", **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_vision.save_model(tmp_path_factory.mktemp("m"), "qwen2_5_vl", True)


@pytest.fixture(scope="module")
def tokenizer(folder):
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def store(folder, tokenizer):
    return open_store(str(folder), tokenizer, DataConfig())


def prompts(rows, tokenizer, store, limit=500, **options):
    return PromptsDataset(DataConfig(prompt_data=[hold_rows(rows)], **options), tokenizer, limit, media=store)


def test_tokens_are_those_of_the_processor(tokenizer, store):
    rows = [ask("<image>How many?", png(0)), ask("no picture"), ask("<image> or <image>?", png(1, (112, 56)), png(0))]
    found = prompts(rows, tokenizer, store)
    pictures = [[picture(0)], None, [picture(1, (112, 56)), picture(0)]]
    for prompt, given in zip([found[i] for i in range(3)], pictures):
        whole = store.processor(text=[prompt.text], images=given)["input_ids"][0]
        assert prompt.token_ids == list(whole)
        assert prompt.unexpanded_ids == (tokenizer(prompt.text).input_ids if given else [])
        assert len(prompt.media) == len(given or []) == prompt.text.count("<|image_pad|>")
        assert "images" not in prompt.columns or not given, "rewards get no pixels"
    assert found[0].media[0] == found[2].media[1], "a key is the picture's content"
    assert store.decoded == 2 and store.kinds == ("image", )
    assert found[0].messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "How many?"}]


def test_templates_of_options_keep_pictures(tokenizer, store):
    found = prompts([ask("<image>How many?", png(0))], tokenizer, store, input_template="Q: {}!", system_prompt="Look.")
    assert found[0].text == ("<|im_start|>system Look.<|im_end|>\n<|im_start|>user " + tiny_vision.PICTURE +
                             "Q: How many?!<|im_end|>\n<|im_start|>assistant ")


def test_lengths_count_the_features(tokenizer, store):
    rows = [ask("<image>?", png(0)), ask("<image>?", png(1, (224, 224)))]
    whole = prompts(rows, tokenizer, store)
    small, large = (len(whole[i].token_ids) for i in range(2))
    assert large > small + 8
    assert len(prompts(rows, tokenizer, store, limit=small)) == 1
    with pytest.raises(DataError, match=f"{large} tokens"):
        prompts(rows, tokenizer, store, limit=small, overlong_prompt="error")


def test_rows_that_are_left_out_count_for_nothing(tokenizer, store):
    """In every data set: engines are not set up for the media of a row that is too long, or whose answers are the same
    tokens; the store forgets them."""
    turn, tokens = {"role": "assistant", "content": "2"}, StepDataConfig(placeholder_token="#",
                                                                         reward_tokens=["+", "-"])
    forms = {
        SFTDataset: (SFTDataConfig(), lambda asked: {"messages": [*asked, turn]}),
        JudgedDataset: (JudgedDataConfig(), lambda asked: {"prompt": asked, "completion": "2", "label": True}),
        StepDataset: (tokens, lambda asked: {"prompt": asked, "completions": ["2"], "labels": [True]}),
        PairDataset: (PairDataConfig(pair_policy="skip"), lambda asked: {
            "prompt": asked, "chosen": "2", "rejected": "2 " if "same" in asked[0]["content"] else "3"}),
        PromptsDataset: (DataConfig(), lambda asked: {"prompt": asked, "answer": "2"}),
    }  # yapf: disable
    asked = [("<image>?", [0]), ("plain <image>", [1]), ("<image><image>" + "long " * 60, [2, 3])]
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}", "{{ m.content | trim }}")
    for data, (cfg, form) in forms.items():
        more = [("same <image><image>", [4, 5])] if data is PairDataset else []
        rows = hold_rows([form([{"role": "user", "content": text}]) | {"images": [png(seed) for seed in seeds]}
                          for text, seeds in asked + more])  # yapf: disable
        store.most.clear()
        if data is PromptsDataset:
            found = data(replace(cfg, prompt_data=[rows]), tokenizer, 100, media=store)
        elif data is SFTDataset:
            found = data(replace(cfg, train_data=[rows]).as_data_config(), tokenizer, 100, media=store)
        else:
            found = data(replace(cfg, train_data=[rows], max_len=100), tokenizer, media=store)
        assert len(found) == 2 and store.most == {"image": 1} and len(store.media) == 2, data.__name__


def test_broken_media_stop_the_run_or_are_counted(tokenizer, store, caplog):
    broken = ask("<image>?", {"bytes": png(0)["bytes"][:200], "path": None})
    rows = [ask("<image>?", png(0), id="good"), broken, ask("<image> <image>", png(0))]
    with pytest.raises(MediaError, match="1 images for 2 placeholders"):
        prompts(rows, tokenizer, store)
    with pytest.raises(MediaError, match="row 2"):
        prompts(rows[:2], tokenizer, store)
    found = prompts(rows, tokenizer, store, media_policy="skip")
    assert [found[i].uid for i in range(len(found))] == ["0:good"] and found.dropped == 2
    with pytest.raises(DataError, match="nothing is left|no row has media"):
        prompts([broken], tokenizer, store, media_policy="skip")


def test_a_picture_that_the_processor_refuses_is_a_broken_one(tokenizer, store):
    rows = [ask("<image> a", png(1)), ask("<image> b", png(2, (1, 300)))]
    with pytest.raises(MediaError, match="row 2: image of .* bytes: the processor of the model refuses it: .*aspect"):
        prompts(rows, tokenizer, store)
    left = prompts(rows, tokenizer, store, media_policy="skip")
    assert len(left) == 1 and left.dropped == 1


def test_options_write_no_media(tokenizer, store):
    for name, text, mark in (("system_prompt", "Look at <image>.", "<image>"),
                             ("system_prompt", "a <|image_pad|>", ".|image_pad|>"), ("input_template", "<video>{}",
                                                                                     "<video>")):
        for row in (ask("<image>?", png(0)), {"prompt": [{"role": "user", "content": "?"}], "answer": "1"}):
            with pytest.raises(DataError, match=f"--{name} holds {mark.replace('|', '.')}, which stands for"):
                prompts([row], tokenizer, store, **{name: text}, media_policy="skip")


def test_a_system_prompt_takes_no_media_away(tokenizer, store):
    """It takes the place of the system turn of a row; so a medium there is an error. A word is none."""
    parts = [{"type": "image"}, {"type": "text", "text": "Seen?"}]
    for content, asked in ((parts, parts), ("<image>Seen?", "and <image>?")):
        chat = [{"role": "system", "content": content}, {"role": "user", "content": asked}]
        rows = [{"prompt": chat, "answer": "1", "images": [png(0), png(1)]}, ask("<image>?", png(2))]
        with pytest.raises(MediaError,
                           match="row 1: --system_prompt .* media of kind image. Write them in a user turn"):
            prompts(rows, tokenizer, store, system_prompt="Look.")
        assert len(prompts(rows, tokenizer, store, system_prompt="Look.", media_policy="skip")) == 1
        assert len(prompts(rows, tokenizer, store)) == 2
        spoken = {"messages": [*chat, {"role": "assistant", "content": "1"}], "images": [png(0), png(1)]}
        cfg = SFTDataConfig(train_data=[hold_rows([spoken])], system_prompt="Look.").as_data_config()
        with pytest.raises(MediaError, match="row 1: --system_prompt"):
            SFTDataset(cfg, tokenizer, 500, media=store)
    word = {"prompt": [{"role": "system", "content": "<image> is a tag"}, {"role": "user", "content": "?"}]}
    found = prompts([word | {"answer": "1"}], tokenizer, store, system_prompt="Look.")
    assert "Look." in found[0].text and "tag" not in found[0].text


PARTS_ONLY = ("{% for m in messages %}{{ m.role }}: {% for p in m.content %}{% if p.type == 'image' %}" +
              tiny_vision.PICTURE + "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}\n{% endfor %}")

TEXTS_ONLY = ("{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{% if p.type == 'image' %}" +
              tiny_vision.PICTURE + "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% else %}"
              "{{ m.role + ': ' + m.content }}{% endif %}\n{% endfor %}")


@pytest.mark.parametrize("template", [PARTS_ONLY, TEXTS_ONLY, TEMPLATE])
def test_texts_reach_templates_that_loop_over_parts(folder, store, template):
    """Of the roles for which they do; others get the texts that they concatenate."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = template
    rows = [ask("<image>How many?", png(0)), {"prompt": [{"role": "user", "content": "plain"}], "answer": "1"}]
    found = prompts(rows, tokenizer, store, system_prompt="Look.")
    for prompt, text in zip((found[0], found[1]), ("How many?", "plain")):
        assert "system" in prompt.text and "Look." in prompt.text and text in prompt.text


def test_the_store_keeps_what_it_has_room_for(folder, tokenizer, store):
    found = prompts([ask("<image>?", png(0)), ask("<image>?", png(1))], tokenizer, store)
    first, second = found[0].media[0], found[1].media[0]
    before = store.decoded
    store.prefetch([first, first, second])
    assert store.tensors(first) is store.tensors(first)
    assert store.decoded == before, "both were in the cache"
    size = sum(tensor.nbytes for tensor in store.tensors(first).tensors.values())
    tight = open_store(str(folder), tokenizer, DataConfig(media_cache_mib=0))
    tight.register(store.media.values())
    tight.prefetch([second])
    assert not tight._ahead, "nothing is processed ahead without a cache"
    tight.tensors(first), tight.tensors(second), tight.tensors(first)
    assert tight.decoded == 3 and tight._cache.nbytes == size
    with pytest.raises(UserError, match="ranks read different data"):
        store.tensors("image:nothing")


def test_what_waits_for_its_use_has_a_limit(folder, tokenizer):
    """Pictures of 300 KiB when processed: of 12 about 1 MiB waits; those that were left out are processed later."""
    store = open_store(str(folder), tokenizer, DataConfig(media_cache_mib=1))
    keys = store.register(find_medium(png(seed, (224, 224)), "image", store.rules, "row 1") for seed in range(12))
    store.prefetch(keys)
    coming = dict(store._ahead)
    waiting = [future.result() for future in coming.values()]
    size = sum(tensor.nbytes for made in waiting if made for tensor in made.tensors.values())
    assert len(coming) == 12 and 1 << 20 <= size == store._waiting < (1 << 20) + 3 * 400_000
    assert store.decoded < 9
    for key in keys:
        assert store.tensors(key).kind == "image"
    assert store._waiting == 0 and store.decoded == 12
    store.prefetch(keys[:4])
    assert len(store._ahead) == 4, "there is room again"
    waiting = [future.result() for future in store._ahead.values()]
    assert all(waiting) and store._waiting >= 1 << 20
    store.prefetch(keys[4:6])
    assert set(store._ahead) == {*keys[4:6]}, "those of another batch make room"


def test_media_are_decoded_ahead_for_engines_that_process_them(folder, tokenizer):
    """Once for engine and trainer, in other threads; of 12 pictures of 147 KiB a cache of 1 MiB takes 8 at most."""
    store = open_store(str(folder), tokenizer, DataConfig(media_cache_mib=1))
    first, second, *others = store.register(
        find_medium(png(seed, (224, 224)), "image", store.rules, "row 1") for seed in range(12))
    store.decode_ahead([first, second, first])
    opened = [store.open(key) for key in (first, second)]
    assert store.tensors(first).kind == "image" and store.open(second) is opened[1] and store.decoded == 2
    store.decode_ahead([first, *others])
    for coming in store._decoding.values():
        coming.result()
    assert store.decoded < 12 and store._decoded.nbytes <= 1 << 20
    assert store.open(others[-1]).size == (224, 224), "without room it is decoded when it is needed"
    (broken, ) = store.register([find_medium(png(1)["bytes"][:200], "image", store.rules, "row 2")])
    store.decode_ahead([broken])
    with pytest.raises(MediaError, match="row 2"):
        store.open(broken)


def test_threads_that_need_a_medium_at_once_decode_it_once(folder, tokenizer, monkeypatch):
    """Decoding ahead and processing ahead, in both orders, and two threads that ask."""
    store, decode = open_store(str(folder), tokenizer, DataConfig()), media_store.decode
    begun, may_end = Semaphore(0), Event()

    def slow(*args):
        begun.release()
        assert may_end.wait(60)
        return decode(*args)

    monkeypatch.setattr(media_store, "decode", slow)
    works = [store.decode_ahead, store.prefetch]
    with ThreadPoolExecutor(2) as threads:
        for seed, (first, other) in enumerate((works, works[::-1]), start=1):
            (key, ) = store.register([find_medium(png(seed), "image", store.rules, "row 1")])
            may_end.clear()
            first([key])
            assert begun.acquire(timeout=60)
            other([key])
            asked = [threads.submit(store.tensors, key) for _ in range(2)]
            again = begun.acquire(timeout=0.2)
            may_end.set()
            assert not again and asked[0].result(60) is asked[1].result(60) is store.tensors(key)
            assert store.open(key).size == (84, 56) and store.decoded == seed, "decoded for the engine and the trainer"


def test_a_template_with_an_order_of_roles_gets_texts(tokenizer):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = ("{% for m in messages %}{% if m.role == 'tool' and loop.previtem.role != 'assistant' %}"
                               "{{ raise_exception('first a call') }}{% endif %}{{ m.role }}: {{ m.content }}\n"
                               "{% endfor %}")
    chat = [{"role": role, "content": role[0]} for role in ("user", "assistant", "tool")]
    assert Renderer(DataConfig(), tokenizer).chat_text([chat], False) == ["user: u\nassistant: a\ntool: t\n"]


def test_headers_are_enough_for_lengths(folder, tokenizer, store):
    """The same tokens without a decoded picture; what is broken below its header stops the run when it is needed."""
    rows = [ask("<image>?", png(seed, size)) for seed, size in enumerate(((56, 84), (28, 300), (224, 224)))]
    options = {"media_check": "header", "max_pixels": 3000}  # fewer tokens than without
    quick = open_store(str(folder), tokenizer, DataConfig(**options))
    slow = open_store(str(folder), tokenizer, DataConfig(max_pixels=3000))
    found, expected = prompts(rows, tokenizer, quick), prompts(rows, tokenizer, slow)
    assert [found[i].token_ids for i in range(3)] == [expected[i].token_ids for i in range(3)]
    assert quick.decoded == 0 and slow.decoded == 3
    for key in found[2].media:
        assert torch.equal(quick.tensors(key).tensors["pixel_values"], slow.tensors(key).tensors["pixel_values"])
    cut = {"bytes": png(9)["bytes"][:2000], "path": None}
    (key, ) = prompts([ask("<image>?", cut)], tokenizer, quick)[0].media
    with pytest.raises(MediaError, match="cannot be read"):
        quick.tensors(key)
    for broken, message in (({"bytes": b"no"}, "none of the known formats"), (png(8, (1, 300)), "aspect ratio")):
        with pytest.raises(MediaError, match=message):
            prompts([ask("<image>?", broken)], tokenizer, quick)
    quick._texts[key] = "x"
    quick.media[key] = quick.media[found[0].media[0]]
    with pytest.raises(UserError, match="--media_check all"):
        quick.tensors(key)


def test_pictures_are_resized_to_the_limits(folder, tokenizer):
    rows, sizes = [ask("<image>?", png(0, (56, 84)))], []
    for limits in ({}, {"max_pixels": 2000}, {"min_pixels": 20_000}, {"max_pixels": 5000, "min_pixels": 3000}):
        store = open_store(str(folder), tokenizer, DataConfig(**limits))
        (key, ) = prompts(rows, tokenizer, store)[0].media
        sizes.append(store.open(key).size)
        (key, ) = store.register([find_medium([picture(0), picture(1)], "video", store.rules, "row 1")])
        assert [frame.size for frame in store.open(key).frames] == [sizes[-1]] * 2, "frames are as pictures"
    assert sizes[0] == sizes[3] == (84, 56)
    assert sizes[1] == (54, 36) and sizes[2][0] * sizes[2][1] >= 20_000


def test_keys_travel_without_pixels(tokenizer, store):
    prompt = prompts([ask("<image>?", png(0, (224, 224)))], tokenizer, store)[0]
    assert len(pickle.dumps(prompt)) < 3000 < len(png(0, (224, 224))["bytes"])


def test_models_without_a_processor(tmp_path, folder):
    tiny.save_model(tmp_path, "qwen2")
    assert takes_media(str(folder)) and not takes_media(str(tmp_path))
    with pytest.raises(UserError, match="has no processor"):
        open_store(str(tmp_path), load_tokenizer(str(tmp_path)), DataConfig())
