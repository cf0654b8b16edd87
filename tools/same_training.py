"""Do two work trees train alike? Compares the weights of the LoRA files that both give on this machine, bit by bit.

python -m tools.same_training OLD          # OLD: a folder with another work tree, or a git revision
python -m tools.same_training v0.1.0 --steps 5

1. configs/tiny.yaml, and the first steps of configs/mini-demo.yaml, trained in both trees: the same bits.
2. configs/tiny.yaml begun in the old tree and resumed in this one: the same bits again.
3. The old tree's run is evaluated and exported by this one.

Exit code 1 if anything differs.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from marble_rl.models.lora_files import folded, read_lora_file
from tools.work_trees import HERE, Tree, work_tree

TINY, DEMO = "configs/tiny.yaml", "configs/mini-demo.yaml"


def lora_of(tree: Tree, config: str, out: Path, *arguments: str) -> str:
    """The digest of the LoRA that a training gives."""
    tree.marble("train", config, "--out", str(out), *arguments)
    return digest(out / "lora")


def digest(lora: Path) -> str:
    """Of the weights with their scale in B, a power of two in both configs: 0.1.0 left it to the file's header."""
    file = read_lora_file(lora, "lora")
    tensors = folded(file.tensors(), file.alpha / file.rank)
    content = {name: tensor.numpy().tobytes() for name, tensor in sorted(tensors.items())}
    return hashlib.sha256(repr(content).encode()).hexdigest()


def compare(old: Tree, new: Tree, steps: int, scratch: Path) -> dict[str, tuple[str, str]]:
    """Digests by training: (old, new)."""
    model = scratch / "tiny-sd3"
    new.python("-m", "tools.tiny", str(model))
    tiny = ("--set", f"model.path={model}")
    few = ("--set", f"trainer.steps={steps}")
    digests = {
        TINY: (lora_of(old, TINY, scratch / "old-tiny", *tiny), lora_of(new, TINY, scratch / "new-tiny", *tiny)),
        f"{DEMO}, {steps} steps": (
            lora_of(old, DEMO, scratch / "old-demo", *few),
            lora_of(new, DEMO, scratch / "new-demo", *few),
        ),
    }
    begun = scratch / "begun"
    lora_of(old, TINY, begun, *tiny, "--set", "trainer.steps=20")
    resumed = lora_of(new, TINY, begun, *tiny, "--resume")
    digests[f"{TINY}, begun in the old tree and resumed in the new"] = (digests[TINY][0], resumed)
    new.marble("evaluate", str(scratch / "old-tiny"))
    new.marble("export", str(scratch / "old-tiny"), "--out", str(scratch / "exported"))
    return digests


def main(
    old: Annotated[str, typer.Argument(help="Folder of another work tree, or a git revision.")],
    steps: Annotated[int, typer.Option(help="Steps of configs/mini-demo.yaml.")] = 5,
) -> None:
    """Compare the trainings of another work tree with this one's."""
    with tempfile.TemporaryDirectory() as folder, work_tree(old, Path(folder)) as tree:
        digests = compare(tree, Tree(HERE), steps, Path(folder))
    for name, (before, now) in digests.items():
        typer.echo(f"{'same' if before == now else 'DIFFERENT'}  {name}  {before[:12]} {now[:12]}")
    if any(before != now for before, now in digests.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
