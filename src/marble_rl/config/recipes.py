"""Recipes: the configs that come with the package, found by name, and copied into a folder by `marble init`.

In the repository they are the folder `configs`; the wheel holds the same files as `marble_rl/recipes`. The first lines
of a recipe say what it is for:

    # Trains: what it trains, and how long that takes
    # Card: the GPU it needs
    # Hub: what it downloads
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import marble_rl
from marble_rl.errors import InputError, suggestion
from marble_rl.storage import storage_errors, write_bytes
from marble_rl.trust import guard

PACKAGE = Path(marble_rl.__file__).parent
EMBEDDED = "mini"
"""Recipes whose names begin like this train the pipeline inside the package."""
REWARD_FILE = "my_rewards.py"
REWARD_ENTRY = (
    '  # - {name: mine, type: "my_rewards:mine"} # a reward of your own: see my_rewards.py, then remove the #\n'
)


@dataclass(frozen=True)
class Recipe:
    """A config that comes with the package."""

    name: str
    file: Path
    trains: str
    card: str
    hub: str

    def files(self) -> dict[str, bytes]:
        """What `marble init` writes: the config, the prompt files that it names, and an example of a reward."""
        text = self.file.read_text(encoding="utf-8")
        prompts = sorted(set(re.findall(r"\bprompts/[\w.-]+", text)))
        config = re.sub(r"^rewards:.*\n", lambda match: match[0] + REWARD_ENTRY, text, count=1, flags=re.MULTILINE)
        return {
            f"{self.name}.yaml": config.encode(),
            **{name: (self.file.parent / name).read_bytes() for name in prompts},
            REWARD_FILE: (self.file.parent / REWARD_FILE).read_bytes(),
        }


def recipe_folder() -> Path:
    """Where the recipes are: in the installed package, or in the repository that it is imported from."""
    packaged = PACKAGE / "recipes"
    return packaged if packaged.is_dir() else PACKAGE.parents[1] / "configs"


def recipes() -> dict[str, Recipe]:
    """The recipes to start from, by name, the embedded ones first. Configs without the three lines at their top are for
    studies and tests."""
    found = {}
    files = recipe_folder().glob("*.yaml")
    for file in sorted(files, key=lambda file: (not file.name.startswith(EMBEDDED), file.name)):
        head = file.read_text(encoding="utf-8")[:2000]
        match = re.match(r"# Trains: (.+)\n# Card: (.+)\n# Hub: (.+)\n", head)
        if match:
            found[file.stem] = Recipe(file.stem, file, match[1], match[2], match[3])
    return found


def find_config(path: Path) -> Path:
    """The file that a CONFIG argument means: a file, the config.json of a run folder, or a recipe by its name."""
    if path.is_dir() and (path / "config.json").is_file():
        guard(path)  # a run, which may be anyone's
        return path / "config.json"
    if path.is_file() or len(path.parts) != 1 or path.suffix in (".yaml", ".yml", ".json"):
        return path
    file = recipe_folder() / f"{path.name}.yaml"
    if file.is_file():
        return file
    if path.exists():
        return path
    names = list(recipes())
    raise InputError(
        f"CONFIG: {path.name!r} is neither a file nor a recipe.{suggestion(path.name, names)} Give the path of a YAML "
        f"file, or one of {', '.join(names)}"
    )


def copy_recipe(name: str, out: Path) -> list[Path]:
    """Write a recipe's files into a folder. Files that are there already, with other content, are refused."""
    known = recipes()
    if name not in known:
        raise InputError(f"RECIPE: unknown name {name!r}.{suggestion(name, list(known))} Known: {', '.join(known)}")
    files = {out / relative: content for relative, content in known[name].files().items()}
    for file, content in files.items():
        if file.exists() and (not file.is_file() or file.read_bytes() != content):
            raise InputError(f"--out: {file} exists and is another file; give another folder, or move it away")
    for file, content in files.items():
        with storage_errors(str(file), "run marble init again"):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(file, content)
    return list(files)
