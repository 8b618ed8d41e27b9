"""Train a scalar and a generative reward model that see, and print the share of held-out pairs that they judge right.

    python benchmarks/picture_judges.py [--seeds 1] [--steps 300] [--kinds rm grm] [--one_question] [--out judges.json]

The model is the untrained Qwen2.5-VL of 310k parameters of ``make quickstart-vl``. A pair has two small pictures of
circles and squares; in one the circles have the colour that the prompt asks for. Layouts of held-out pairs are not
among the training ones. The scalar model is trained with ``lightrft rm``; the judge reads both pictures in a random
order and says which one is better in ``<answer>`` tags (``lightrft grm``), and only the exact answer counts. Before the
answer the judge names the colour that is not the one asked for, and its picture: ``Response 2 has blue circles.``
"grm, answer only" learns the answer alone, of which one token in about 40 says anything.
"""
import argparse
import json
import random
import statistics
import string
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peers import machine

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "examples" / name) for name in ("quickstart_vl", "quickstart"))]
COLOURS = {"a": "red", "b": "green", "c": "blue"}
TEMPLATE = ("{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
            "{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else 'MEDIUM' }}{% endfor %}"
            "{% endif %}{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}")
OPTIONS: dict[str, Any] = dict(
    train_batch_size=32, learning_rate=3e-3, lr_warmup_ratio=0.05, max_len=240, eval_steps=-1, disable_ckpt=True,
    strategy="single", logging_steps=1000)  # yapf: disable
JUDGE: dict[str, Any] = {"task_instruction": "{prompt} 1 {first} 2 {second}", "generate_max_len": 80, "max_steps": 300}
ONLY = "grm, answer only"
OWN: dict[str, dict[str, Any]] = {"rm": {"max_steps": 120}, "grm": JUDGE, ONLY: JUDGE | {"judgement_key": "none"}}


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
                     "rejected": "<image>", "images": media,
                     "judgement": f"{{rejected}} has {COLOURS[wrong]} circles."})  # yapf: disable
    return rows


def write_model(folder: Path, seed: int) -> None:
    """Save the quickstart's untrained model, with the letters of answers and a template for pictures in answers."""
    import common
    import prepare
    common.CHARACTERS = "".join(dict.fromkeys(common.CHARACTERS + string.ascii_uppercase + "<>"))
    prepare.write_base(folder / "model", seed)
    (folder / "template").write_text(TEMPLATE.replace("MEDIUM", prepare.PICTURE), encoding="utf-8")


def train(kind: str, seed: int, steps: int | None, rows: int, held_out: int, asked: str) -> dict[str, float]:
    """Train a model of ``kind`` (of ``OWN``), and return its last metrics."""
    from lightrft import api
    with TemporaryDirectory() as folder:
        write_model(Path(folder), seed)
        options = OPTIONS | OWN[kind] | ({"max_steps": steps} if steps else {})
        trainer = vars(api)[kind.partition(",")[0].upper()]
        run = trainer(f"{folder}/model", pairs(rows, False, seed, asked), pairs(held_out, True, 0, asked),
                      chat_template=f"{folder}/template", save_path=f"{folder}/run", seed=seed, max_epochs=1000,
                      **options).train()  # yapf: disable
        return run.metrics.iloc[-1].to_dict()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="optimizer steps of 32 pairs (default: 120 of rm, 300 of a judge)")
    parser.add_argument("--rows", type=int, default=1000, help="training pairs")
    parser.add_argument("--held_out", type=int, default=100, help="held-out pairs")
    parser.add_argument("--kinds", nargs="+", choices=OWN, default=list(OWN))
    parser.add_argument("--one_question", action="store_true", help="all prompts ask for the same colour")
    parser.add_argument("--out", type=Path, help="JSON file of all results")
    args = parser.parse_args()
    asked = "".join(COLOURS)[:1 if args.one_question else None]
    results: dict[str, Any] = {name: value for name, value in machine().items() if name != "trl"}
    results |= {"colours": len(asked), "rows": args.rows, "held_out": args.held_out, "runs": []}
    print("| model | seed | steps | held-out accuracy |\n|---|---|---|---|", flush=True)
    for kind in args.kinds:
        steps = args.steps or OWN[kind]["max_steps"]
        for seed in args.seeds:
            metrics = train(kind, seed, steps, args.rows, args.held_out, asked)
            results["runs"].append({"kind": kind, "seed": seed, "steps": steps, "accuracy": metrics["eval/accuracy"]})
            print(f"| {kind} | {seed} | {steps} | {metrics['eval/accuracy']:.3f} |", flush=True)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1) + "\n")
        accuracies = [run["accuracy"] for run in results["runs"] if run["kind"] == kind]
        print(f"| {kind} | median | {steps} | {statistics.median(accuracies):.3f} |", flush=True)


if __name__ == "__main__":
    main()
