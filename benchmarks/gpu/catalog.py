"""The measurements: names, what they need, and the seconds that they take on one H100."""
from dataclasses import dataclass, field

LARGE = ("7b", "3b-vl")  # they train adapters: one GPU does not hold what all weights take
WITH_PICTURES = ("3b-vl", )


@dataclass(frozen=True)
class Setting:
    """Arguments of a measurement: model, engine, folders.

    Args:
        size: shape of the model, a key of ``models.SHAPES``.
        tp: ranks that run one engine together.
        strategy: of the trainer.
        recompute: all activations; False leaves the choice to the memory plan.
        liger: Liger's kernels, where they are installed.
        expandable: memory of torch in segments that grow.
        short: micro-batches of the two smaller sizes alone.
        fused: this library's own kernels, of log-probs and of a decode step.
        reduced: tiny shapes, for the CPU.
        models: folder that keeps the random models between measurements.
        scratch: empty folder, removed afterwards.
    """
    size: str = "0.5b"
    engine: str = "hf"
    tp: int = 1
    strategy: str = "auto"
    recompute: bool = False
    liger: bool = True
    expandable: bool = False
    short: bool = False
    fused: bool = False
    reduced: bool = False
    models: str = ""
    scratch: str = ""


@dataclass(frozen=True)
class Measurement:
    """A function that returns the rows of some tables; it runs in a separate process.

    Args:
        function: ``module:name``; takes a :class:`Setting`, yields rows by the title of their table, whenever there
            are more.
        tables: titles of the tables it adds rows to.
        seconds: expected time; after twice of it the process is ended.
        needs: "gpu", or packages by the name of their import.
        ranks: processes, one per GPU.
        reduced: False: not part of the reduced form.
    """
    name: str
    function: str
    tables: tuple[str, ...]
    seconds: int
    setting: Setting = field(default_factory=Setting)
    needs: tuple[str, ...] = ()
    ranks: int = 1
    reduced: bool = True

    @property
    def limit(self) -> int:
        """Seconds after which the process is ended."""
        return 2 * self.seconds


FACTS, ANATOMY = "Step-1 facts in bfloat16", "Anatomy of a step"
SLEEP, SYNC, ROLLOUT = "Memory of the engine, asleep and awake", "Weight sync", "Rollout"
UPDATE, ATTENTION, LOGPROBS = "Update", "Attention kernels", "Log-probs from hidden states"
OPERATIONS, DECODE = "Operations of this torch", "Attention of a decode step"
DOCTOR, TESTS, QUICKSTART, TRL = "Doctor", "Tests on the GPU", "Quickstart", "TRL on the same GPU"
STEP, ENGINE = (FACTS, ANATOMY), (SLEEP, SYNC, ROLLOUT)


def _run(size: str, engine: str, seconds: int, reduced: bool = True, tp: int = 1) -> Measurement:
    """Steps of the trainer and the life of its engine, in one process: an engine starts for a minute. Every engine runs
    the 0.5B model and vLLM the 7B model too: with all of them it would be 40 minutes."""
    name = f"run-{engine}-{size}" + (f"-tp{tp}" if tp > 1 else "")
    return Measurement(name, "rollout:run", STEP + ENGINE, seconds, Setting(size, engine, tp), () if engine == "hf" else
                       (engine, ), tp, reduced)


MEASUREMENTS = (
    _run("0.5b", "hf", 100),
    _run("0.5b", "vllm", 150),
    _run("0.5b", "sglang", 180),
    Measurement("kernels", "kernels:kernels", (OPERATIONS, ATTENTION, LOGPROBS, DECODE), 65),
    Measurement("update-7b", "training:update", (UPDATE, ), 150, Setting("7b"), reduced=False),
    Measurement("tests", "machine:tests", (TESTS, ), 150, needs=("pytest", )),
    Measurement("update-0.5b", "training:update", (UPDATE, ), 50, reduced=False),
    Measurement("quickstart", "machine:quickstart", (QUICKSTART, ), 120),
    Measurement("update-0.5b-no-liger", "training:update", (UPDATE, ), 35, Setting(liger=False, short=True),
                reduced=False),
    Measurement("update-7b-recompute", "training:update", (UPDATE, ), 40, Setting("7b", recompute=True, short=True),
                reduced=False),
    Measurement("update-3b", "training:update", (UPDATE, ), 50, Setting("3b", short=True), reduced=False),
    Measurement("update-0.5b-expandable", "training:update", (UPDATE, ), 45, Setting(expandable=True), reduced=False),
    Measurement("run-hf-0.5b-fsdp2", "rollout:run", STEP + ENGINE, 90, Setting(strategy="fsdp")),
    Measurement("run-hf-0.5b-fused", "rollout:run", STEP + ENGINE, 70, Setting(fused=True), ("gpu", "triton"),
                reduced=False),
    Measurement("step-hf-3b-vl", "training:steps", STEP, 80, Setting("3b-vl"), ("torchvision", )),
    Measurement("trl-0.5b", "peers:trl", (TRL, ), 150, needs=("trl", "datasets")),
    _run("7b", "vllm", 300, reduced=False),
    Measurement("doctor", "machine:doctor", (DOCTOR, ), 40),
    _run("7b", "vllm", 300, tp=2),
    Measurement("engine-hf-0.5b-fsdp2", "rollout:engine", ENGINE, 60, ranks=2, reduced=False),
    Measurement("update-0.5b-fsdp2", "training:update", (UPDATE, ), 80, ranks=2),
)  # yapf: disable
"""In the order in which they run: what is most worth knowing first, for a stay on a GPU may be short. SGLang and vLLM
do not fit into one environment."""
