"""A model that sees and one that hears, trained under every strategy on text, on media and on both; started by
test_media_strategies in its process or by torchrun. The reference is one process with all micro-batches."""
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.config.schema import DataConfig, ModelConfig, StrategyConfig
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.models.loader import load_actor, load_exported
from lightrft.models.media_features import FeatureCache
from lightrft.models.tokenizer import load_tokenizer
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.strategy.checkpoint import CheckpointManager
from lightrft.strategy.deepspeed import Sizes
from lightrft.strategy.distributed import transformer_blocks
from lightrft.strategy.fsdp import units, WrapPolicy
from lightrft.strategy.sharding import is_whole
from lightrft.strategy.strategy import get_strategy, SingleProcessStrategy
from lightrft.tests.support.media_runs import picture
from lightrft.tests.support.tiny_vision import FAMILIES, PICTURE
from lightrft.tests.support.media_rig import MediaRig
from lightrft.tests.support.tiny_vision import SOUNDS
from lightrft.tests.support.strategy_case import Case, assert_same, freeze_imports, whole_gradients
from lightrft.trainer.model_media import connect_media, open_media

DATA = {"text": [(1, ), (1, 1)], "media": [(0, 3), (2, )], "mixed": [(0, 1, 2), (1, )]}  # rows of micro-batches
RIGS = {
    "sees": replace(FAMILIES["qwen3_vl"], placeholders={"image": PICTURE}),  # its tower feeds several layers
    "tiles": FAMILIES["llava_onevision"], "hears": SOUNDS["qwen2_audio"],
    "does both": FAMILIES["qwen2_5_omni_thinker"], "bare": FAMILIES["gemma3"]
}  # yapf: disable
STEPS = {"mixed": 3}  # of those that are compared with one process; other data differ in the first ones, and ten steps
# of every strategy are compared in strategy_conformance
OF_RIG = {"hears": ("media", "mixed"), "tiles": ("mixed", )}  # text alone: one tower that it does not use is enough
KINDS = {"kinds": [(0, 5), (7, 1)]}  # picture and videos; sound and text
MICRO_BATCHES, ROWS = 4, 2  # of a step; those with all rows of the data
RELATIVE = 1e-5


@dataclass
class MediaCase(Case):
    """A strategy that trains the model of ``rig`` on one kind of data. Even micro-batches, those of rank 0 of two, are
    of the first rows of the data, odd ones of the others."""
    rig: MediaRig = field(default=None)  # type: ignore[assignment]
    data: str = "mixed"
    cache: FeatureCache | None = None
    blind: bool = False  # the data hold no media

    def prepare(self, **options) -> Prepared:
        actor = load_actor(ModelConfig(pretrain=str(self.rig.folder), **options), deferred=True)
        prepared = self.strategy.prepare(actor, self.spec)
        connect_media(prepared.model, None if self.blind else self.rig.source, self.strategy, self.cache)
        return prepared

    def backward(self, prepared: Prepared, step: int, count: int = MICRO_BATCHES, scale: float = 1.0) -> float:
        """Return this rank's share of the loss."""
        strategy, found = self.strategy, 0.0
        mine = range(strategy.rank, count, strategy.world_size)
        for index in mine:
            exp = self.micro_batch(step, index).to(strategy.device)
            loss = -prepared.model(exp)[0].sum() * (scale / 50)
            strategy.backward(loss, prepared, last=index == mine[-1])
            found += loss.item()
        return found

    def micro_batch(self, step: int, index: int):
        """Rows of the data with random responses."""
        draw = torch.Generator().manual_seed(100 * step + index)
        rig, rows = self.rig, (DATA | KINDS)[self.data][index % 2]
        return rig.pack([(rig.prompts[row], torch.randint(5, 40, (6, ), generator=draw).tolist(), rig.keys[row])
                         for row in rows])  # yapf: disable


REFERENCES: dict[tuple[Any, ...], Any] = {}


def alone(case: MediaCase, what: str, find: Callable[[MediaCase], Any], *options: Any, bf16: bool = False) -> Any:
    """The same in one process, once for all strategies and numbers of ranks: the result ``what`` of ``find``."""
    key = what, case.rig.folder.name, case.data, case.blind, *options
    if key not in REFERENCES:
        strategy = SingleProcessStrategy(StrategyConfig(), bf16=bf16)
        twin = replace(case, strategy=strategy, cache=None)
        REFERENCES[key] = find(twin)
    return REFERENCES[key]


def compare_gradients(case: MediaCase, prepared: Prepared, loss: float, expected: dict[str, Tensor]) -> None:
    """Of every parameter, those of the tower included, after a first pass; a text batch gives the tower zeros. And the
    loss."""
    shares = case.strategy.all_gather_object(case.backward(prepared, 0))
    assert sum(shares) == pytest.approx(loss, rel=RELATIVE)
    norm = norm_of(expected)
    for name, gradient in whole_gradients(case.strategy, prepared).items():
        assert (gradient - expected.get(name, 0)).norm() < RELATIVE * norm, name
        learns = case.data != "text" and ".lora_A." not in name and name in expected  # some towers have unread layers
        assert bool(gradient.any()) or not learns, f"{name} learns nothing"


def norm_of(gradients: dict[str, Tensor]) -> float:
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()


def first_pass(twin: MediaCase, prepared: Prepared) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of one process."""
    loss = twin.backward(prepared, 0)
    named = prepared.model.named_parameters()
    return loss, {name: param.grad.clone() for name, param in named if param.grad is not None}


def same_gradients(case: MediaCase, **options) -> None:
    """Loss, gradients and their norm in one pass of a model that is not trained as a whole."""
    loss, expected = alone(case, "gradients", lambda twin: first_pass(twin, twin.prepare(**options)), str(options))
    prepared = case.prepare(**options)
    compare_gradients(case, prepared, loss, expected)
    assert case.strategy.optimizer_step(prepared, 0.0) == pytest.approx(norm_of(expected), rel=RELATIVE)


def same_steps(case: MediaCase, steps: int = STEPS["mixed"]) -> None:
    """Loss and gradients of the first of several steps, the norms of all, and the weights after them."""

    def more(twin: MediaCase, prepared: Prepared) -> tuple[list[float], dict[str, Tensor]]:
        norms = [twin.strategy.optimizer_step(prepared, 0.5), *twin.train(prepared, range(1, steps), 0.5, ROWS)]
        return norms, twin.weights(prepared)

    def trained(twin: MediaCase):
        prepared = twin.prepare()
        return first_pass(twin, prepared), more(twin, prepared)

    first, (norms, weights) = alone(case, "steps", trained)
    prepared = case.prepare()
    compare_gradients(case, prepared, *first)
    found, reached = more(case, prepared)
    assert found == pytest.approx(norms, rel=1e-4) and len(found) == steps
    assert_same(reached, weights, atol=1e-4)
    if case.data == "mixed":
        is_exported(case, prepared, reached)


def is_exported(case: MediaCase, prepared: Prepared, weights: dict[str, Tensor]) -> None:
    """The export loads, and has the weights."""
    case.strategy.save_model(prepared, case.folder / "hf")
    assert_same(weights, dict(load_exported(str(case.folder / "hf")).named_parameters()))


def cuts_alike(case: MediaCase) -> None:
    """One micro-batch of the rows of a rank, and one per row: the same loss and gradients."""
    prepared, rig, strategy, found = case.prepare(), case.rig, case.strategy, []
    draw = torch.Generator().manual_seed(strategy.rank)
    rows = [(rig.prompts[row], torch.randint(5, 40, (6, ), generator=draw).tolist(), rig.keys[row])
            for row in ((0, 1), (2, 3))[strategy.rank % 2]]  # yapf: disable
    for parts in ([rows], [[row] for row in rows]):
        losses = [-prepared.model(rig.pack(part).to(strategy.device))[0].sum() / 50 for part in parts]
        for loss in losses:
            strategy.backward(loss, prepared, last=loss is losses[-1])
        found.append({name: one.clone() for name, one in whole_gradients(strategy, prepared).items()})
        strategy.discard_gradients(prepared)
    norm = norm_of(found[0])
    assert norm > 0 and all((one - found[1][name]).norm() < RELATIVE * norm for name, one in found[0].items())


def unread_towers_stay(case: MediaCase) -> None:
    """Of a model that sees or hears, trained on data without media and with weight decay."""
    blind = replace(case, data="text", blind=True)
    prepared = blind.prepare()
    before = blind.weights(prepared)
    blind.train(prepared, range(2), count=ROWS)
    tower = [name for name in before if "visual" in name or "tower" in name]
    after, expected = blind.weights(prepared), alone(blind, "blind", lambda twin: trained_weights(twin, 2))
    assert tower and blind.spec.options.l2
    assert_same({name: after[name] for name in tower}, {name: before[name] for name in tower})
    assert_same(after, expected, atol=1e-4)


def trained_weights(case: MediaCase, steps: int) -> dict[str, Tensor]:
    prepared = case.prepare()
    case.train(prepared, range(steps), count=ROWS)
    return case.weights(prepared)


def resumes_bitwise(case: MediaCase) -> None:
    """Save, go on, load into a fresh model, go on; the model is offloaded and reloaded in between."""
    prepared, strategy = case.prepare(), case.strategy
    case.train(prepared, range(1), count=ROWS)
    manager = CheckpointManager(strategy, case.folder / "resume", asynchronous=False)
    assert manager.save(1, {"actor": prepared}, {}, {}, {})
    strategy.offload(prepared)
    strategy.reload(prepared)
    norms = case.train(prepared, range(1, 3), count=ROWS)
    fresh = case.prepare()
    manager.load(manager.latest(), {"actor": fresh})
    assert case.train(fresh, range(1, 3), count=ROWS) == norms
    assert_same(case.state(fresh), case.state(prepared))


def rounds_alike(case: MediaCase) -> None:
    """In bfloat16 the norms are those of one process, and a tower computes in it too."""
    low = MediaCase(get_strategy(case.strategy.cfg, bf16=True), case.folder, rig=case.rig)
    low.strategy.setup()
    norms = alone(low, "bf16", lambda twin: twin.train(twin.prepare(), range(2), count=ROWS), bf16=True)
    prepared, seen = low.prepare(), set()
    for block in transformer_blocks(prepared.model):
        block.register_forward_hook(lambda _module, _inputs, out: seen.add(out.dtype))
    assert low.train(prepared, range(2), count=ROWS) == pytest.approx(norms, rel=1e-3)
    assert seen == {torch.bfloat16}


def recomputes(case: MediaCase) -> None:
    """Gradient checkpointing, of the blocks of the tower too, changes no gradient."""
    found: list[dict[str, Tensor]] = []
    for on in (False, True):
        prepared = case.prepare(gradient_checkpointing=on)
        blocks = transformer_blocks(prepared.model)
        assert all(vars(block)["gradient_checkpointing"] is on for block in blocks if on)
        case.backward(prepared, 0)
        found.append({name: grad.clone() for name, grad in whole_gradients(case.strategy, prepared).items()})
        case.strategy.discard_gradients(prepared)
    assert_same(*found, atol=1e-6)


def features_are_kept(case: MediaCase, words: list[str]) -> None:
    """Of a frozen tower, which ranks run together where it is divided: those that lack no features too."""
    frozen = {"freeze_prefix": words}
    expected = alone(case, "frozen", lambda twin: twin.train(twin.prepare(**frozen), range(3), count=ROWS))
    kept = replace(case, cache=FeatureCache(64))
    prepared, passes = kept.prepare(**frozen), []
    tower = case.rig.actor.modality.family.towers[case.rig.source.kinds[0]]
    tower.module(prepared.model.hf_model).register_forward_hook(lambda *_: passes.append(1))
    norms = kept.train(prepared, range(1), count=ROWS)
    first = len(passes)
    norms += kept.train(prepared, range(1, 3), count=ROWS)
    assert norms == pytest.approx(expected, rel=RELATIVE)
    world, unique = case.strategy.world_size, [{key for row in rows for key in case.rig.keys[row]}
                                               for rows in DATA[case.data]]
    own = unique[case.strategy.rank] if world > 1 else set.union(*unique)
    divided = not all(map(is_whole, prepared.model.parameters()))
    most = max(map(len, unique)) if divided and world > 1 else len(own)
    assert len(passes) == first == most and kept.cache.take_counts()[0] == len(own)


def adapts_a_matrix(case: MediaCase) -> None:
    """Gemma-3's projector, which is no layer; the rank of the adapter is so large that ZeRO-3 divides it."""
    same_gradients(case, lora_rank=32, target_modules=["projector"])


class Answers(BaseHTTPRequestHandler):
    """A web server that sends two kinds of pictures: ``/other`` changes, and ``/once`` is there for one that asks."""
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        again = self.asked.count(self.path) > 1
        self.send_response(404 if again and self.path == "/once" else 200)
        self.end_headers()
        self.wfile.write(picture(int(again and self.path == "/other"))["bytes"])

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


def ranks_read_the_same(strategy: StrategyBase, folder: Path) -> None:
    """Of URLs: a row whose download fails on one rank is left out on both, and other bytes are an error."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    Thread(target=server.serve_forever, daemon=True).start()
    site = f"http://127.0.0.1:{strategy.all_gather_object(server.server_port)[0]}"
    tokenizer = load_tokenizer(str(folder), None)
    template = "{% for p in messages[0].content %}{{ p.text if p.type == 'text' else '" + PICTURE + "' }}{% endfor %}"
    tokenizer.chat_template = template

    def read(*names: str) -> list[str]:
        pictures = {name: [f"{site}/{name}"] * (2 if name == "once" else 1) for name in names}
        rows = [{"prompt": [{"role": "user", "content": "<image>" * len(urls) + name}], "images": urls, "reference": ""}
                for name, urls in pictures.items()]  # yapf: disable
        cfg = DataConfig(prompt_data=[hold_rows(rows)], apply_chat_template=True, media_urls=True, media_policy="skip")
        store = open_media(str(folder), tokenizer, cfg, strategy)
        texts = [prompt.text for prompt in PromptsDataset(cfg, tokenizer, 64, media=store)]
        assert store is not None and store.most == {"image": 1}, "two are in the row that is left out"
        return texts

    assert [text.rpartition(">")[2] for text in read("red", "once", "blue")] == ["red", "blue"]
    with pytest.raises(DataError,
                       match="row 2: image '.*/other': the server sent other bytes to rank 1 than to rank 0"):
        read("red", "other")
    strategy.barrier()
    server.shutdown()


def variants(ranks: int) -> dict[str, tuple[StrategyConfig, WrapPolicy | Sizes | None]]:
    """Strategies, those of DeepSpeed last: it changes its process."""
    fsdp, small = {"strategy": "fsdp"}, Sizes(reduce=20_000, persist=1100)
    zero = {f"zero{stage}": (StrategyConfig(strategy="deepspeed", zero_stage=stage), small) for stage in (2, 3)}
    layers = {"fsdp": (StrategyConfig(**fsdp), WrapPolicy(one_unit=0, keep_full=0))}
    return {**layers, **zero} if ranks > 1 else {"single": (StrategyConfig(strategy="single"), None), **layers, **zero}


def run(name: str, cfg: StrategyConfig, sizes: WrapPolicy | Sizes | None, folder: Path, rigs: dict[str,
                                                                                                   MediaRig]) -> None:
    """All checks for one strategy; for tiles and sounds those that a tower of another form could change. On one rank
    FSDP and ZeRO do what they do on two, but for the collectives: they are compared on mixed data there."""
    freeze_imports(cfg)
    strategy = get_strategy(cfg)
    if sizes is not None:
        setattr(strategy, "sizes" if isinstance(sizes, Sizes) else "wrap", sizes)
    strategy.setup()
    own = folder / f"{name}_on_{strategy.world_size}"
    own.mkdir(parents=True, exist_ok=True)
    sees, tiles, hears = rigs["sees"], rigs["tiles"], rigs["hears"]
    try:
        several, cases = strategy.world_size > 1, {}
        for rig in (hears, tiles, sees) if several else (hears, sees):
            case = cases[rig.folder.name] = MediaCase(strategy, own / rig.folder.name, rig=rig)
            case.folder.mkdir(exist_ok=True)
            for data in OF_RIG.get(rig.folder.name, DATA) if several or name == "single" else ("mixed", ):
                same_steps(replace(case, data=data), 2 if rig is tiles else STEPS.get(data, 2))
        same_steps(replace(case, rig=rigs["does both"], data="kinds"), 2)
        resumes_bitwise(case)
        cuts_alike(case)
        features_are_kept(case, ["visual", "projector"])
        if several:
            cuts_alike(cases["hears"])
            features_are_kept(cases["hears"], ["audio", "projector"])
            same_gradients(cases["hears"], lora_rank=2, target_modules=["all-linear", "audio"])
        if several or name == "single":
            of_parts(case, rigs["bare"])
        if isinstance(sizes, WrapPolicy):
            assert len(units(case.prepare().model)) == 1 + 2 + 2, "the root, blocks of the tower and of the decoder"
    finally:
        strategy.teardown()


def of_parts(case: MediaCase, bare: MediaRig) -> None:
    """Adapters, frozen parts, unread towers, gradient checkpointing and bfloat16."""
    same_gradients(case, lora_rank=2, target_modules=["all-linear", "visual"])
    adapts_a_matrix(replace(case, rig=bare))
    same_gradients(case, freeze_prefix=["visual"])
    same_gradients(case, freeze_prefix=["language", "projector"])
    unread_towers_stay(case)
    recomputes(case)
    rounds_alike(case)


def main(folder: Path) -> None:
    """Run every variant on as many ranks as were started. What one process finds is left in ``folder`` for others."""
    if (known := folder / "alone.pt").exists():
        REFERENCES.update(torch.load(known))
    holder = get_strategy(StrategyConfig(strategy="fsdp"))
    holder.setup()  # all variants share this group
    if holder.world_size > 1:
        ranks_read_the_same(holder, folder / "sees")
    rigs = {name: MediaRig(folder / name, family.placeholders, family) for name, family in RIGS.items()}
    found = variants(holder.world_size)
    for name, options in found.items():
        run(name, *options, folder, rigs)
    if holder.is_main:
        torch.save(REFERENCES, known)
    holder.teardown()
    print(json.dumps({"passed": list(found)}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
