"""Models that see or hear on the fake CUDA device: the numbers of the CPU, and when the host waits."""
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from lightrft.models import attention
from lightrft.models.attention import PackedLayout, segmented_attention
from lightrft.models.towers import Features, Tower
from lightrft.tests.support import media_runs, runs, tiny_vision
from lightrft.tests.support.fake_cuda import fake_cuda, KERNEL, SYNC
from lightrft.tests.support.fake_cuda.ledger import marginal
from lightrft.tests.support.media_rig import MediaRig
from lightrft.tests.test_fake_cuda import assert_same, BF16

pytest.importorskip("torchvision")
no_picture = runs.no_picture
FAMILIES = {"image": "qwen2_5_vl", "audio": "qwen2_audio"}
# What Hugging Face's own code waits for, in a forward and a backward pass of tiny models.
SYNCS = {
    "qwen3_vl": ("the decoder adds the features of one deeper layer by mask", 5),
    "qwen3_vl_moe": ("the same", 5),
    "gemma4": ("padded patches are left out by mask, of pictures and of videos", 8),
    "gemma4_layers": ("the same", 8),
    "idefics3": ("padded tiles are left out by mask", 5),
    "smolvlm": ("the same, of pictures and of videos", 10),
    "llava_pixtral": ("`image_sizes` go to the GPU and back", 2),
    "mistral3": ("the same", 2),
    "llava_next": ("lengths that nobody reads go to the GPU", 1),
    "llava_onevision": ("the same", 1),
}
RELEASE = Version(transformers.__version__)
TILES = (5, 10) if RELEASE < Version("5.20") else (6, 12) if RELEASE < Version("5.23") else (4, 8)
OTHERS = dict(zip(("idefics3", "smolvlm"), TILES))  # of this release


@pytest.fixture(name="homes", scope="module")
def homes_fixture(tmp_path_factory):
    """A model and the options of a run for each kind, and what that run has logged on the device, where it has put
    tables that stay there."""
    found = {}
    for kind, family in FAMILIES.items():
        home = tmp_path_factory.mktemp(kind)
        options = media_runs.write_home(home, family) | {"self_test": False, "max_epochs": 1}
        found[kind] = home, options, on_the_device(home, home / "warm", options)
    return found


def on_the_device(home, folder, options):
    """The lines of a run on the fake device."""
    with fake_cuda():
        run = runs.run(home, folder, **options)
        run.trainer.strategy.teardown()
    return run.lines


@pytest.mark.parametrize("kind, strategy", [("image", "single"), ("image", "fsdp"), ("audio", "single")])
def test_two_steps_give_the_numbers_of_the_cpu(kind, strategy, homes, tmp_path):
    home, options, lines = homes[kind]
    if strategy != "single":
        lines = on_the_device(home, tmp_path / "cuda", options | {"strategy": strategy})
    expected = runs.run(home, tmp_path / "cpu", **options | {"strategy": strategy})
    expected.trainer.strategy.teardown()
    assert_same(lines, expected.lines, 2e-5)


def syncs_of(home, folder, options):
    with fake_cuda() as ledger:
        runs.run(home, folder, **options | {"max_steps": 1, "sync_proof": "fingerprint"}).trainer.strategy.teardown()
    return ledger.sites(SYNC)


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_micro_batch_with_media_makes_the_host_wait(kind, homes, tmp_path):
    """In passes of the old log-probs, of the reference and of the update."""
    home, options, _ = homes[kind]
    options = {name: value for name, value in options.items() if name != "sync_canary_every"}
    cuts = [options | {"train_batch_size": 16, "micro_train_batch_size": size} for size in (4, 2)]
    few, many = (syncs_of(home, tmp_path / str(i), cut) for i, cut in enumerate(cuts))
    assert marginal(few, many, 4) == {}


@pytest.mark.parametrize("family", tiny_vision.FAMILIES)
def test_towers_of_every_family_wait_as_often_as_the_docs_say(family, tmp_path):
    """Log-probs and gradients are those of the CPU."""
    made = tiny_vision.FAMILIES[family]
    rig = MediaRig(made.save(tmp_path, tied=False), made.placeholders, made)
    exp = rig.pack(rig.samples())
    expected = rig.actor(exp)[0].detach()
    with fake_cuda() as ledger:
        rig.actor.to("cuda")
        moved = exp.to("cuda")
        rig.actor(moved)  # puts tables on the device that stay there
        ledger.counts.clear()
        found = rig.actor(moved)[0]
        found.sum().backward()
        assert ledger.total(SYNC) == OTHERS.get(family, SYNCS.get(family, ("", 0))[1]), ledger.sites(SYNC)
        torch.testing.assert_close(found.detach().cpu(), expected, atol=1e-5, rtol=0)


def test_a_copy_that_is_planted_in_a_tower_is_counted(tmp_path, monkeypatch):
    made, of = tiny_vision.FAMILIES["llava"], Tower.of
    rig = MediaRig(made.save(tmp_path, tied=False), made.placeholders, made)
    exp = rig.pack(rig.samples())

    def planted(*args):
        found = of(*args)
        return Features([each.cpu().to("cuda") for each in found.each])

    monkeypatch.setattr(Tower, "of", planted)
    with fake_cuda() as ledger:
        rig.actor.to("cuda")
        rig.actor(exp.to("cuda"))
    assert ledger.sites(SYNC)["models/actor_modality.py:MediaModality._features"] == 2 * 3, "of three pictures"


def test_the_docs_list_what_towers_wait_for():
    page = (Path(__file__).parents[2] / "docs" / "host_syncs.md").read_text(encoding="utf-8")
    table = page.split("<!-- towers -->")[1].split("<!-- /towers -->")[0]
    assert table.strip().splitlines()[2:] == [f"| `{name}` | {why} | {count} |" for name, (why, count) in SYNCS.items()]


def naive(lens, *qkv):
    """One segment after another."""
    parts = zip(*(x[0].split(lens, 1) for x in qkv))
    return torch.cat([torch.nn.functional.scaled_dot_product_attention(*part).transpose(0, 1) for part in parts])


LENS = [5, 16, 16, 16, 3, 3, 9]


def test_segments_attend_in_both_directions_alone():
    qkv = torch.randn(3, 1, 2, sum(LENS), 8).unbind()
    layout = PackedLayout(torch.tensor([0, *LENS]).cumsum(0).int(), LENS)
    given = {"cu_seq_lens_q": layout.cu_seqlens}
    for segments in ([layout], None):
        found, _ = segmented_attention(torch.nn.Identity(), *qkv, None, segments=segments, **given)
        torch.testing.assert_close(found[0], naive(LENS, *qkv))


def test_towers_take_the_kernel_of_cuda_in_half_precision(monkeypatch):
    """One call per layer in place of one per picture and window, whose bounds the host does not read."""
    kernels, attend = [], attention._attend_varlen
    monkeypatch.setattr(attention, "_attend_varlen", lambda *args: kernels.append(args[-1]) or attend(*args))
    plain = torch.randn(3, 1, 2, sum(LENS), 8).bfloat16().requires_grad_()
    naive(LENS, *plain.float().unbind()).square().sum().backward()
    with fake_cuda() as ledger:
        cu = torch.tensor([0, *LENS]).cumsum(0).int().to("cuda")
        qkv = plain.detach().to("cuda").requires_grad_()
        ledger.counts.clear()
        found, _ = segmented_attention(torch.nn.Identity(), *qkv.unbind(), None, cu_seq_lens_q=cu,
                                       segments=[PackedLayout(cu, LENS)])
        found.float().square().sum().backward()
        assert kernels == [False] and ledger.total(SYNC) == 0 and ledger.total(KERNEL) < 30
        torch.testing.assert_close(qkv.grad.cpu().float(), plain.grad.float(), atol=BF16 * 4, rtol=BF16)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_half_precision_trains_towers(strategy, homes, tmp_path, monkeypatch):
    kernels, attend = [], attention._attend_varlen
    monkeypatch.setattr(attention, "_attend_varlen", lambda *args: kernels.append(args[-1]) or attend(*args))
    home, options, _ = homes["image"]
    with fake_cuda():
        found = runs.run(home, tmp_path, **options | {"strategy": strategy, "bf16": True, "max_steps": 1})
        found.trainer.strategy.teardown()
    assert kernels.count(False) > 2 and kernels.count(True) > 2, "the tower's attention, and the decoder's"
    assert found.lines[0]["rollout/mismatch/abs_logp_mean"] < BF16
