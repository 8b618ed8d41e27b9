"""The limits of the first step, on recorded log-probs: rounding passes on every device, faults stop."""
import re
from pathlib import Path

import pytest
import torch

from lightrft.config.schema import Config
from lightrft.config.tree import options
from lightrft.ops import rounding
from lightrft.ops.divergence import gap_metrics, gap_sums, mismatch_metrics, mismatch_sums
from lightrft.ops.fingerprint import fingerprints, Piece
from lightrft.ops.rounding import BANDS, EXPERTS, Arithmetic, has_experts
from lightrft.tests.support.recorded_gaps import in_fp8, KINDS, LEARNING_RATE, model, Recording
from lightrft.trainer.checks.first_step import StepFactError
from lightrft.trainer.tests.test_first_step import check_facts, config, GOOD, ON_GPUS

TENSOR = "layers.1.self_attn.o_proj.weight"
# arithmetic of the engine, device, options
SETTINGS = {
    "float32, CPU": ("float32", "cpu", {}),
    "float32, GPU": ("float32", "cuda", {}),
    "TF32": ("tf32", "cuda", {"engine_type": "vllm"}),
    "bfloat16, CPU": ("bf16", "cpu", {"bf16": True}),
    "bfloat16, GPU": ("bf16", "cuda", {"bf16": True, "engine_type": "sglang"}),
    "fp8": ("fp8", "cuda", {"bf16": True, "engine_type": "vllm", "engine_quantization": "fp8"}),
}
FLOAT32, BF16 = ["float32, CPU", "float32, GPU"], ["bfloat16, CPU", "bfloat16, GPU"]


@pytest.fixture(scope="module")
def recorded():
    """Log-probs by kind of model: of the engine per arithmetic, of the trainer with right weights and with faults."""
    found = {}
    for kind in KINDS:
        record = Recording(kind)
        found[kind] = {
            "float32": record.apart(), "tf32": record.in_tf32(), "bf16": record.of(record.policy, bf16=True),
            "fp8": record.of(record.changed("weight", in_fp8)), "right": record.trainer,
            "stale": record.of(record.one_step_on(LEARNING_RATE)), "little": record.of(record.one_step_on(1e-4)),
            "offset": record.of(record.changed(TENSOR, lambda weight: weight + 1e-3)),
            "scaled": record.of(record.changed(TENSOR, lambda weight: weight * 1.001)),
        }  # yapf: disable
    return found


def metrics_of(trainer, engine):
    """Those of a step whose passes agree to the bit."""
    found = mismatch_metrics(*mismatch_sums(trainer, engine, torch.ones(len(trainer), dtype=torch.bool)))
    return {**GOOD, **ON_GPUS, **{f"rollout/mismatch/{key}": value for key, value in found.items()}}


def check(trainer, engine, experts, device, **options):
    check_facts(metrics_of(trainer, engine), config(**options), True, device, experts)


def check_case(recorded, kind, setting, trainer):
    engine, device, options = SETTINGS[setting]
    check(recorded[kind][trainer], recorded[kind][engine], kind == "experts", device, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_rounding_passes(recorded, kind, setting, caplog):
    check_case(recorded, kind, setting, "right")
    assert "quantized" not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", [*FLOAT32, "TF32", *BF16])
def test_weights_of_one_step_before_stop(recorded, kind, setting):
    with pytest.raises(StepFactError, match="rollout/mismatch.*does not sample from the weights"):
        check_case(recorded, kind, setting, "stale")


@pytest.mark.parametrize("kind,setting",
                         [(kind, setting) for kind in KINDS for setting in FLOAT32] + [("dense", "TF32")])
def test_a_twentieth_of_the_step_stops_in_float32(recorded, kind, setting):
    with pytest.raises(StepFactError, match="rollout/mismatch"):
        check_case(recorded, kind, setting, "little")


@pytest.mark.parametrize("kind,setting,fault", [
    *[(kind, setting, "offset") for kind in KINDS for setting in FLOAT32],
    ("dense", "float32, CPU", "scaled"), ("dense", "float32, GPU", "scaled"), ("experts", "float32, CPU", "scaled"),
])  # yapf: disable
def test_one_tensor_off_by_a_thousandth_stops_in_float32(recorded, kind, setting, fault):
    """Every element of one matrix plus 1e-3, or times 1.001."""
    with pytest.raises(StepFactError, match="rollout/mismatch"):
        check_case(recorded, kind, setting, fault)


@pytest.mark.parametrize("kind", KINDS)
def test_what_bfloat16_hides_the_fingerprints_find(recorded, kind):
    """Neighbouring numbers are further apart than a factor of 1.001: log-probs move less than by rounding."""
    engine, right = recorded[kind]["bf16"], recorded[kind]["right"]
    for fault in ("offset", "scaled"):
        assert (recorded[kind][fault] - right).abs().mean() < (engine - right).abs().mean()
        check(recorded[kind][fault], engine, kind == "experts", "cuda", bf16=True)
    weight = next(value for name, value in model(kind).named_parameters() if name.endswith(TENSOR)).detach()
    prints = fingerprints([Piece(each, torch.bfloat16) for each in (weight, weight + 1e-3, weight * 1.001)])
    assert len(set(prints.tolist())) == 3


def test_bands_of_their_own_are_needed(recorded):
    """TF32 is no float32: its rounding would stop a run."""
    for kind in ("tf32", "bf16"):
        with pytest.raises(StepFactError):
            check(recorded["dense"]["right"], recorded["dense"][kind], False, "cuda")


def student(count, scale):
    """Noise with heavy tails, [count]."""
    rng = torch.Generator().manual_seed(0)
    normal = torch.randn(count, 4, generator=rng)
    return scale * normal[:, 0] / (normal[:, 1:]**2).mean(1).sqrt()


def shifted(noise):
    """Log-probs of tokens of all probabilities, and the same with ``noise`` on their logits."""
    logits = torch.linspace(0.02, 0.98, len(noise)).logit()
    return torch.nn.functional.logsigmoid(logits), torch.nn.functional.logsigmoid(logits + noise)


def test_the_largest_gaps_that_were_reported_pass():
    """Of bfloat16 at the first step. The maximum alone would stop the run, had it a limit."""
    trainer, engine = shifted(student(100_000, 0.053))
    found = metrics_of(trainer, engine)
    assert 0.009 < found["rollout/mismatch/abs_dp_mean"] < 0.011 and found["rollout/mismatch/abs_dp_max"] > 0.5
    check(trainer, engine, False, "cuda", bf16=True)
    trainer, engine = shifted(student(100_000, 0.115))
    assert 0.06 < metrics_of(trainer, engine)["rollout/mismatch/abs_logp_mean"] < 0.07
    check(trainer, engine, True, "cuda", bf16=True)


@pytest.mark.parametrize("setting", list(SETTINGS)[1:])
def test_one_broken_token_is_no_fault_except_on_a_cpu_in_float32(recorded, setting):
    kind, device, options = SETTINGS[setting]
    engine = recorded["dense"][kind].clone()
    engine[torch.argmax(engine)] -= 0.2 if setting.startswith("float32") else 3.0
    check(recorded["dense"]["right"], engine, False, device, **options)
    with pytest.raises(StepFactError, match="abs_dp_max|abs_logp_mean"):
        check(recorded["dense"]["right"], engine, False, "cpu")


def test_a_quantized_engine_is_a_warning(recorded, caplog):
    metrics = metrics_of(recorded["dense"]["stale"], recorded["dense"]["fp8"])
    quantized = config(**SETTINGS["fp8"][2])
    check_facts(metrics, quantized, device="cuda")
    assert "--engine_quantization none" in caplog.text and "abs_logp_mean" in caplog.text
    for broken in ({"rollout/mismatch/abs_logp_mean": float("nan")}, {"policy/first_kl_ref_mean": 1.0}):
        with pytest.raises(StepFactError):
            check_facts({**metrics, **broken}, quantized, device="cuda")


def passes(trainer, other):
    """Metrics of a step whose engine agrees and whose passes differ."""
    gaps, mask = (trainer - other).abs(), torch.ones(len(trainer), dtype=torch.bool)
    (sums, largest), found = gap_sums(gaps, mask), {**GOOD, **ON_GPUS}
    for key in ("policy/first_ratio_gap", "policy/first_kl_ref"):
        found |= {key: largest.item(), **{f"{key}_{name}": value for name, value in gap_metrics(sums).items()}}
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", ["float32, GPU", "TF32", "bfloat16, GPU", "float32, CPU", "bfloat16, CPU"])
def test_passes_of_the_trainer(recorded, kind, setting, monkeypatch):
    """On CPUs those over other packs; the same packs are checked in runs, to the bit."""
    rounded, device, options = SETTINGS[setting]
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high" if rounded == "tf32" else "highest")
    cfg = config(**options, micro_rollout_batch_size=1)
    check_facts(passes(recorded[kind]["right"], recorded[kind][rounded]), cfg, True, device, kind == "experts")
    if setting == "bfloat16, CPU":
        with pytest.raises(StepFactError, match="first_ratio_gap is"):
            check_facts(passes(recorded[kind]["right"], recorded[kind][rounded]), config(**options), True, device,
                        kind == "experts")
    with pytest.raises(StepFactError, match="policy/first_ratio_gap"):
        check_facts(passes(recorded[kind]["stale"], recorded[kind][rounded]), cfg, True, device, kind == "experts")


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_found(kind):
    assert has_experts(model(kind)) == (kind == "experts")


def row(text, name):
    """Numbers of a row of the table of limits."""
    cells = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", text, re.MULTILINE)[1].split("|")
    return [float(number[0]) for cell in cells if (number := re.search(r"\d[\d.e-]*", cell))]


def test_the_limits_in_the_docs():
    page = Path(rounding.__file__).parents[2] / "docs" / "safety.md"
    if not page.exists():
        pytest.skip("installed without its repository")
    text = page.read_text(encoding="utf-8")
    names = {"float32": "float32, GPU", "tf32": "TF32, GPU", "bf16": "bfloat16, CPU and GPU", "fp8": "fp8 engine, GPU"}
    for kind, name in names.items():
        for device in ("cpu", "cuda") if kind == "bf16" else ("cuda", ):
            for experts in (False, True):
                found = Arithmetic(device, kind, experts)
                shown = row(text, name + (", experts" if experts and EXPERTS[kind] != BANDS[kind] else ""))
                assert shown == [
                    *found.engine_limits().values(), *(found.pass_limits(False).values() if kind != "fp8" else ())
                ]
    exact = Arithmetic("cpu", "float32")
    assert row(text, "float32, CPU")[:2] == list(exact.engine_limits().values())
    assert re.search(r"largest: 0, on other packs (\S+) \|$", text, re.MULTILINE)[1] == "1e-3"
    assert exact.pass_limits(False) == {"": 1e-3} and exact.pass_limits(True) == {"": 0.0}


@pytest.mark.parametrize("device,kind,experts,limits", [
    ("cpu", "float32", False, (1e-3, 1e-4)), ("cuda", "float32", False, (1e-3, 1e-4)),
    ("cuda", "tf32", False, (0.02, 5e-3)), ("cuda", "bf16", True, (0.8, 0.2))])  # yapf: disable
def test_canaries_have_the_limits_of_the_same_arithmetic(device, kind, experts, limits):
    """The first gap: 1e-3 or four times the limit of the mean, the larger one; later ones at least that limit."""
    assert Arithmetic(device, kind, experts).canary_limits() == pytest.approx(limits)


def test_float32_is_exact_unless_torch_is_told_otherwise():
    """The help of --bf16 says so; the library reads the precision of torch, and puts back what vLLM changes."""
    assert "without TF32" in options(Config())["bf16"].help
    for path in Path(__file__).parents[2].rglob("*.py"):
        if "tests" not in path.parts:
            text = path.read_text(encoding="utf-8")
            assert "allow_tf32" not in text and 'precision("' not in text, path
