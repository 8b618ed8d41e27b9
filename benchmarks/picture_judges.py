"""Train a scalar and a generative reward model that see, and print the share of held-out pairs that they judge right.

    python benchmarks/picture_judges.py [--seeds 1] [--steps 300] [--kinds rm grm] [--one_question]

The model is the untrained Qwen2.5-VL of 310k parameters of ``make quickstart-vl``. A pair has two small pictures of
circles and squares; in one the circles have the colour that the prompt asks for. Layouts of held-out pairs are not
among the training ones. The scalar model is trained with ``lightrft rm``; the judge reads both pictures in a random
order and says which one is better in ``<answer>`` tags (``lightrft grm``), and only the exact answer counts.
"""
import argparse
import random
import statistics
import string
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "examples" / name) for name in ("quickstart_vl", "quickstart"))]
COLOURS = {"a": "red", "b": "green", "c": "blue"}
TEMPLATE = ("{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
            "{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else 'MEDIUM' }}{% endfor %}"
            "{% endif %}{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}")
OPTIONS: dict[str, Any] = dict(
    train_batch_size=32, learning_rate=3e-3, lr_warmup_ratio=0.05, max_len=200, eval_steps=-1, disable_ckpt=True,
    strategy="single", logging_steps=1000)  # yapf: disable
OWN: dict[str, dict[str, Any]] = {"rm": {}, "grm": {"task_instruction": "{prompt} 1 {first} 2 {second}",
                                                    "generate_max_len": 48}}  # yapf: disable


def recoloured(layout: tuple[str, ...], colour: str) -> tuple[str, ...]:
    """Give all circles of a layout one colour."""
    return tuple("".join(colour if cell in COLOURS else cell for cell in row) for row in layout)


def pairs(count: int, held_out: bool, seed: int, asked: str) -> list[dict[str, Any]]:
    """Draw pairs of one split; ``asked``: the colours that prompts ask for."""
    from counting import distinct_layouts
    from task import png
    rng, rows = random.Random(f"{held_out} {seed}"), []
    layouts = [each for each in distinct_layouts(2 * count, rng, held_out) if set("".join(each)) & set(COLOURS)]
    for one, other in zip(layouts[::2], layouts[1::2]):
        right = rng.choice(asked)
        wrong = rng.choice(sorted(set(COLOURS) - {right}))
        media = [{"bytes": png(recoloured(one, right)), "path": None},
                 {"bytes": png(recoloured(other, wrong)), "path": None}]  # yapf: disable
        rows.append({"prompt": [{"role": "user", "content": f"{COLOURS[right]} circles"}], "chosen": "<image>",
                     "rejected": "<image>", "images": media})  # yapf: disable
    return rows


def write_model(folder: Path, seed: int) -> None:
    """Save the quickstart's untrained model, with the letters of answers and a template for pictures in answers."""
    import common
    import prepare
    common.CHARACTERS = "".join(dict.fromkeys(common.CHARACTERS + string.ascii_uppercase + "<>"))
    prepare.write_base(folder / "model", seed)
    (folder / "template").write_text(TEMPLATE.replace("MEDIUM", prepare.PICTURE), encoding="utf-8")


def train(kind: str, seed: int, steps: int, rows: int, held_out: int, asked: str) -> dict[str, float]:
    """Train a model of ``kind`` ("rm" or "grm"), and return its last metrics."""
    from lightrft import api
    with TemporaryDirectory() as folder:
        write_model(Path(folder), seed)
        run = vars(api)[kind.upper()](f"{folder}/model", pairs(rows, False, seed,
                                                               asked), pairs(held_out, True, 0, asked),
                                      chat_template=f"{folder}/template", save_path=f"{folder}/run", seed=seed,
                                      max_steps=steps, max_epochs=1000, **OPTIONS | OWN[kind]).train()
        return run.metrics.iloc[-1].to_dict()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of 32 pairs")
    parser.add_argument("--rows", type=int, default=2000, help="training pairs")
    parser.add_argument("--held_out", type=int, default=300, help="held-out pairs")
    parser.add_argument("--kinds", nargs="+", choices=OWN, default=list(OWN))
    parser.add_argument("--one_question", action="store_true", help="all prompts ask for the same colour")
    args = parser.parse_args()
    asked = "".join(COLOURS)[:1 if args.one_question else None]
    print("| model | seed | steps | held-out accuracy |\n|---|---|---|---|", flush=True)
    for kind in args.kinds:
        found = []
        for seed in args.seeds:
            metrics = train(kind, seed, args.steps, args.rows, args.held_out, asked)
            found.append(metrics["eval/accuracy"])
            print(f"| {kind} | {seed} | {args.steps} | {found[-1]:.3f} |", flush=True)
        print(f"| {kind} | median | {args.steps} | {statistics.median(found):.3f} |", flush=True)


if __name__ == "__main__":
    main()
