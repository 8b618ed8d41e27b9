"""Maps of weights that loaders like those of engines fuse, shard and rearrange; in this process, without an engine."""
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import MixtralForCausalLM, Qwen2ForCausalLM, Qwen3MoeForCausalLM

from lightrft.ops.fingerprint import Piece, fingerprints
from lightrft.rollout.weight_sync import weight_map
from lightrft.rollout.weight_sync.load_trace import trace_loader
from lightrft.rollout.weight_sync.kernel_layouts import Layouts
from lightrft.rollout.weight_sync.sync import checkpoint_names, under_checkpoint_names
from lightrft.rollout.weight_sync.weight_map import WeightMap

E, I, H = 5, 3, 4
FUSED = {"up": torch.Size([E, 2 * I, H]), "down": torch.Size([E, H, I])}
APART = {f"{i}.{name}": torch.Size(shape) for i in range(E)
         for name, shape in (("gate", (I, H)), ("third", (I, H)), ("down", (H, I)))}  # yapf: disable


class Model(nn.Module):
    """Two layers of experts, as an engine holds them once they are loaded. ``pack``: what its kernel makes of one."""

    def __init__(self, pack, dtype):
        super().__init__()
        self.pack, self.loads = pack, 0
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            for name, shape in (("w13", (E, 2 * I + 2, H)), ("w2", (E, H, I + 1))):  # padded
                layer.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False))

    def load(self, stream):
        """The elements as they come."""
        for name, weight in stream:
            layer, _, name = name.partition(".")
            w13, w2 = self.layers[int(layer)].w13, self.layers[int(layer)].w2
            expert, _, part = name.rpartition(".")
            for i in [int(expert)] if expert else range(E):
                one = weight if expert else weight[i]
                if part == "down":
                    w2[i, :, :I].copy_(one)
                    continue
                if part in ("up", "gate"):
                    w13[i, :I].copy_(one[:I])
                if part in ("up", "third"):
                    w13[i, I + 1:2 * I + 1].copy_(one[-I:])

    def reload(self, stream):
        """As a sync does."""
        self.loads += 1
        for layer in self.layers:
            layer.w13.zero_(), layer.w2.zero_()
        self.load(stream)
        for layer in self.layers:
            for parameter in layer.parameters():
                parameter.copy_(torch.stack([self.pack(one) for one in parameter]))


def shuffled(plane):
    """As a kernel may want it."""
    order = torch.randperm(plane.numel(), generator=torch.Generator().manual_seed(len(plane)))
    return plane.flatten()[order].view(plane.shape)


PACKS = {"as sent": lambda plane: plane, "turned": lambda plane: plane.flip(0).t().reshape(plane.shape),
         "shuffled": shuffled}  # yapf: disable


def weights(shapes, dtype):
    generator = torch.Generator().manual_seed(3)
    return {f"{layer}.{name}": torch.randn(shape, generator=generator).to(dtype)
            for layer in range(2) for name, shape in shapes.items()}  # yapf: disable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", [FUSED, APART], ids=["fused", "apart"])
@pytest.mark.parametrize("pack", PACKS)
def test_elements_are_found_wherever_a_kernel_wants_them(pack, shapes, dtype):
    """Each weight reads as it was sent, and a change of any element of the engine's that is no padding shows."""
    model, sent = Model(PACKS[pack], dtype), weights(shapes, dtype)
    mapped = WeightMap(model.load, {name: one.shape for name, one in sent.items()}, None, (), model.layers,
                       model.reload)
    assert model.loads <= 1 and not mapped.fault("X") and set(mapped.dtypes.values()) == {dtype}
    model.reload(iter(sent.items()))
    expected = fingerprints([Piece(one) for one in sent.values()])
    assert torch.equal(mapped.fingerprints(list(sent)), expected)
    if shapes is FUSED:
        assert all(len(parts) == 1 + ("up" in name) for name, parts in mapped.held.items()), "experts are not joined"
    if pack == "as sent":
        assert all(place.order is None for parts in mapped.held.values() for place in parts.values())
    seen = 0
    for parameter in model.layers[1].parameters():
        for element in parameter.view(-1):
            kept = element.clone()
            element.add_(1)
            wrong = (mapped.fingerprints(list(sent)) != expected).nonzero()[:, 0].tolist()
            assert len(wrong) <= 1 and all(list(sent)[i].startswith("1.") for i in wrong)
            seen += len(wrong)
            element.copy_(kept)
    assert seen == E * 3 * I * H


def test_numbers_of_many_digits():
    """More elements than a bfloat16 can count."""
    layer, swap = nn.Module(), torch.arange(5000).flip(0)
    layer.w = nn.Parameter(torch.zeros(1, 5000, 20, dtype=torch.bfloat16), requires_grad=False)
    mapped = WeightMap(lambda stream: [layer.w[0].copy_(one[0]) for _, one in stream], {"w": layer.w.shape}, None, (),
                       [layer], lambda stream: [layer.w[0].copy_(one[0][swap]) for _, one in stream])  # yapf: disable
    order = mapped.held["w"][((0, 0, 0), (1, 5000, 20))].order
    assert torch.equal(order, torch.arange(100_000).view(5000, 20)[swap].flatten())


def test_elements_that_are_changed_are_not_found():
    model = Model(lambda plane: plane * 2, torch.float32)
    sent = weights(FUSED, torch.float32)
    mapped = WeightMap(model.load, {name: one.shape for name, one in sent.items()}, None, (), model.layers,
                       model.reload)
    assert mapped.dtypes == {} and not mapped.fault("X")


def test_a_layer_of_which_a_part_came_changed_cannot_be_read():
    """Its kernel may have moved the rest."""
    model, shapes = Model(shuffled, torch.float32), {f"0.{name}": shape for name, shape in FUSED.items()}
    mapped = WeightMap(lambda stream: model.load((name, one * 2 if "down" in name else one) for name, one in stream),
                       shapes, None, (), model.layers, model.reload)  # yapf: disable
    assert mapped.dtypes == {} and not mapped.fault("X")


def test_layers_that_are_loaded_alike_are_measured_once():
    model = Model(shuffled, torch.float32)
    layouts, found = Layouts(model.reload), []
    copies = trace_loader(model.load, {f"{i}.{name}": shape for i in range(2) for name, shape in FUSED.items()})
    for i, layer in enumerate(model.layers):
        found.append(layouts.orders(layer, {name: group for name, group in copies.items() if name[0] == str(i)}))
    assert model.loads == 1 and found[0] is found[1]


@pytest.mark.parametrize("skipped, said", [
    (["1.down"], "X does not hold 60 of the 60 elements of 1.down: it would generate with random values"),
    (["0.up", "1.up"], "X does not hold 120 of the 120 elements of 0.up, nor all of 1 others: "),
    (["0.3.third"], "X does not hold 12 of the 12 elements of 0.3.third: "),
])  # yapf: disable
def test_what_an_engine_passes_over_is_refused(skipped, said):
    model, shapes = Model(None, torch.float32), APART if "third" in skipped[0] else FUSED
    shapes = {f"{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    mapped = WeightMap(lambda stream: model.load(one for one in stream if one[0] not in skipped), shapes)
    assert mapped.fault("X").startswith(said)


def test_an_expert_that_an_engine_passes_over_is_refused():
    held = torch.zeros(E - 1, H, I)
    mapped = WeightMap(lambda stream: [held[i].copy_(one[i]) for _, one in stream for i in range(E - 1)],
                       {"down": FUSED["down"]})  # yapf: disable
    assert mapped.fault("X").startswith("X does not hold 12 of the 60 elements of down: ") and not mapped.dtypes


def test_a_parameter_that_nothing_fills_is_refused():
    model = Model(None, torch.float32)
    model.head = nn.Parameter(torch.zeros(2))
    shapes = {f"{i}.{name}": shape for i in range(2) for name, shape in FUSED.items()}
    assert WeightMap(model.load, shapes,
                     model=model).fault("X").startswith("X has head, for which the trainer sends no weight")


@pytest.mark.parametrize("family", [Qwen3MoeForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM])
def test_names_in_checkpoints(family, tmp_path):
    """Experts come apart, as views; what is sent under these names is what transformers saves."""
    config = family.config_class(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=1,
                                 head_dim=4, num_experts=3, num_local_experts=3, moe_intermediate_size=6,
                                 intermediate_size=6, vocab_size=11)  # yapf: disable
    model = family(config)
    model.save_pretrained(tmp_path)
    own = dict(model.named_parameters())
    names = checkpoint_names(model, {name: one.shape for name, one in own.items()})
    sent = dict(under_checkpoint_names(own.items(), names))
    saved = load_file(tmp_path / "model.safetensors")
    assert set(sent) == set(saved) and all(torch.equal(sent[name], one) for name, one in saved.items())
    addresses = {one.untyped_storage().data_ptr() for one in own.values()}
    assert all(one.untyped_storage().data_ptr() in addresses for one in sent.values())
    assert bool(names) == (family is not Qwen2ForCausalLM)


def heads(held, stream, rank, padded):
    """Two ranks load four heads of queries, and one of keys, of two rows each: the last two rows of ``held``.

    Both hold the keys, as in vLLM and SGLang on GPUs; or the second one holds zeros, as with SGLang on a CPU.
    """
    for name, weight in stream:
        mine = held[-2:] if name == "k" else held[:-2]
        if padded and rank:
            mine.zero_()
            mine[:0].copy_(torch.zeros_like(mine[:0]))
        else:
            mine.copy_(weight if name == "k" or padded else weight[4 * rank:4 * rank + 4])


@pytest.mark.parametrize("padded", [False, True])
def test_fewer_heads_of_keys_than_ranks(padded, monkeypatch):
    """Each rank reads what it holds, and both know the whole weights; an error shows on the ranks that hold it."""
    shapes, said = {"q": torch.Size([8, H]), "k": torch.Size([2, H])}, []
    held = [torch.zeros(10 if padded else 6, H, dtype=torch.bfloat16) for _ in range(2)]
    loaders = [lambda stream, rank=rank: heads(held[rank], stream, rank, padded) for rank in range(2)]
    monkeypatch.setattr(WeightMap, "_of_all_ranks", lambda one, mine: said.append(mine) or [mine])
    for load in loaders:
        WeightMap(load, shapes)
    monkeypatch.setattr(WeightMap, "_of_all_ranks", lambda one, mine: said)
    monkeypatch.setattr(weight_map.dist, "get_rank", lambda group: group.rank)
    maps = [WeightMap(load, shapes, SimpleNamespace(rank=rank)) for rank, load in enumerate(loaders)]
    assert all(one.dtypes == dict.fromkeys(shapes, torch.bfloat16) and not one.fault("X") for one in maps)
    assert [bool(one.held["k"]) for one in maps] == [True, not padded]

    def read():
        sums = []
        monkeypatch.setattr(weight_map.dist, "all_reduce", lambda sent, group: sums.append(sent.clone()))
        for one in maps:
            one.fingerprints([*shapes])
        monkeypatch.setattr(weight_map.dist, "all_reduce", lambda sent, group: sent.copy_(sum(sums)))
        return [one.fingerprints([*shapes]) for one in maps]

    sent = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    for load in loaders:
        load(iter(sent.items()))
    expected = fingerprints([Piece(one) for one in sent.values()])
    assert all(torch.equal(found, expected) for found in read())
    held[0][-1, 0] += 1
    assert [bool((found != expected)[1]) for found in read()] == [True, padded]
