"""One job: a method and a seed. Its files, its config, and what makes it the same job as one that was run before.

DIR/jobs/marble-seed0.json     the result: all that the table needs
DIR/jobs/marble-seed0.log      what its processes printed
DIR/jobs/marble-seed0/         config.json, identity.json, run/, evaluation/
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marble_rl.compare.methods import BASE, Method, specialist
from marble_rl.compare.selection import select_methods
from marble_rl.config import RunConfig, load_config
from marble_rl.config.effect import WITHOUT_EFFECT, matches
from marble_rl.runs.layout import JOB_IDENTITY
from marble_rl.storage import file_digest

JOBS = "jobs"


@dataclass(frozen=True)
class Job:
    """What is to be run, and where."""

    method: Method
    seed: int
    config: RunConfig
    out: Path
    """Of the whole comparison."""

    @property
    def name(self) -> str:
        return f"{self.method.slug}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        return self.out / JOBS / self.name

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def evaluation(self) -> Path:
        return self.folder / "evaluation"

    @property
    def config_file(self) -> Path:
        return self.folder / "config.json"

    @property
    def identity_file(self) -> Path:
        """What the job was begun with, prompts by content: the files themselves may change before it goes on."""
        return self.folder / JOB_IDENTITY

    @property
    def result(self) -> Path:
        return self.out / JOBS / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return self.out / JOBS / f"{self.name}.log"

    @property
    def on_cpu(self) -> bool:
        from marble_rl.devices import accelerator

        return self.config.model.device == "cpu" or accelerator() is None


def plan_jobs(
    config: Path,
    overrides: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    curve: int | None = None,
) -> list[Job]:
    """Seed by seed, so that a comparison that is stopped early has whole rows of the first seeds.

    ``curve``: joint methods are also evaluated every so many steps; others only after training.

    A job's seed is that of its training, and is added to that of the evaluation: methods with one seed share prompts,
    training noise and evaluation noise; another seed is new in all of these.
    """
    shared = load_config(config, overrides)
    jobs = []
    single = {BASE, *map(specialist, shared.trained_rewards)}
    for seed in seeds:
        for method in select_methods(methods, shared):
            every = "null" if curve is None or method.name in single else curve
            settings = [
                *overrides,
                f"trainer.eval_every={every}",
                "logging.images_every=null",
                "logging.trackers=[]",  # a comparison has its own display and table
                *method.overrides,
                f"trainer.seed={seed}",
                f"evaluation.seed={shared.evaluation.seed + seed}",
            ]
            jobs.append(Job(method, seed, load_config(config, settings), out))
    return jobs


def identity(config: RunConfig) -> dict[str, Any]:
    """What a job's result depends on, and the same on any machine: prompt files by content, a model folder by name.

    Settings at their defaults are left out, so that a new setting does not make old results those of another config.
    """
    everything = config.model_dump(mode="json", exclude_defaults=True, exclude={"logging"})
    tree: dict[str, Any] = _with_effect(everything)
    if Path(config.model.path).is_dir():
        tree["model"]["path"] = Path(config.model.path).name
    for source in [*tree["prompts"]["train"], *(tree["prompts"].get("heldout") or [])]:
        for place, key in ((source, "file"), (source.get("generate") or {}, "exclude")):
            if place.get(key) is not None:
                place[key] = _content(Path(place[key]))
    return tree


def _with_effect(tree: Any, key: str = "") -> Any:
    """Without what may change between two calls and leaves it the same job."""
    if isinstance(tree, dict):
        named = {name: f"{key}.{name}".lstrip(".") for name in tree}
        return {n: _with_effect(tree[n], k) for n, k in named.items() if not matches(k, WITHOUT_EFFECT)}
    return [_with_effect(part, f"{key}.{i}") for i, part in enumerate(tree)] if isinstance(tree, list) else tree


def _content(path: Path) -> str:
    """Name and digest of a prompt file, or of the files in a folder."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    digests = [f"{file.name} {file_digest(file)}" for file in files if file.exists()]
    return f"{path.name} sha256:{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:16]}"


def config_hash(tree: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def flat(tree: Any, key: str = "") -> dict[str, Any]:
    """{dotted key: value} of every leaf."""
    if isinstance(tree, dict):
        parts = [flat(value, f"{key}.{name}".lstrip(".")) for name, value in tree.items()]
    elif isinstance(tree, list):
        parts = [flat(value, f"{key}.{i}".lstrip(".")) for i, value in enumerate(tree)]
    else:
        return {key: tree}
    return {name: value for part in parts for name, value in part.items()}


def changes(before: dict[str, Any], after: dict[str, Any], but: Sequence[str] = ()) -> list[str]:
    """What differs between two identities, in words; keys under one of ``but`` are not looked at."""
    old, new = flat(before), flat(after)
    default = "its default"
    return [
        f"{key} was {_shown(old.get(key, default))}, now {_shown(new.get(key, default))}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key, default) != new.get(key, default)
        and not any(key == name or key.startswith(f"{name}.") for name in but)
    ]


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
