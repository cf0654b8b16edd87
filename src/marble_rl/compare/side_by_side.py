"""`marble compare A B ...`: runs that exist, side by side: scores, paired differences, settings that differ.

Every run is one training. So all intervals are over prompts: they say how far a score depends on which prompts were
asked, and nothing about what another seed would give. No difference counts as decided (`Interval.significant`).

A difference is that of the mean scores on the prompts that both runs were evaluated on, and its interval is paired:
every draw of prompts is the same for both. Without a prompt in common there is no difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from marble_rl.compare.jobs import JOBS
from marble_rl.compare.methods import BASE
from marble_rl.compare.statistics import Array, over_prompts, prompt_means, resampled_means
from marble_rl.config import RunConfig, dump_config
from marble_rl.errors import InputError
from marble_rl.intervals import Interval
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.scores import SCORES, Scores

ONE_EACH = "one run each: the intervals are over prompts and say nothing about another seed"
SEEDS = "marble compare CONFIG --methods ... --seeds 0-4 trains several"
NONE = "none"
"""Of a setting that a run does not have."""
PromptKey = tuple[str, str, int]
"""Source, text, and which of equal texts"""
Prompts = dict[PromptKey, dict[str, list[float]]]
"""Scores of the images of each prompt, by reward that applies"""


@dataclass(frozen=True)
class ComparedRun:
    """One run."""

    name: str
    folder: Path
    config: RunConfig
    scores: Scores | None
    """Of its last `marble evaluate`"""

    @property
    def label(self) -> str:
        """What was evaluated."""
        if self.scores is None:
            return "not evaluated"
        step = "" if self.scores.step is None else f", step {self.scores.step}"
        return f"{self.scores.after}{step}"


@dataclass(frozen=True)
class Difference:
    """A run against the first one."""

    run: str
    by_reward: dict[str, Interval]
    prompts: int
    """That both were evaluated on"""
    same_noise: bool | None
    """Whether both began with the same noise; None where an evaluation does not say"""
    left_out: list[str] = field(default_factory=list)
    """Rewards of one name that the two runs score differently"""

    def changed(self, sign: int) -> list[str]:
        """Rewards whose interval lies above 0 (``sign`` 1) or below it (-1)."""
        known = {name: d for name, d in self.by_reward.items() if d.over != "nothing"}
        return [name for name, d in known.items() if d.low * sign > 0 and d.high * sign > 0]


@dataclass(frozen=True)
class SideBySide:
    """All that the table and the page show of the scores and the settings."""

    runs: list[ComparedRun]
    rewards: list[str]
    held_out: list[str]
    means: dict[str, dict[str, Interval]]
    """By run that was evaluated, then by reward"""
    differences: list[Difference]
    settings: list[tuple[str, list[str]]]
    """Key, and the value of each run"""
    base: dict[str, float] = field(default_factory=dict)
    """Mean scores of the model without adapter, by reward; empty where the first run has none, or models differ"""

    @property
    def first(self) -> ComparedRun:
        return self.runs[0]

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": [
                {
                    "name": run.name,
                    "path": str(run.folder),
                    "seed": run.config.trainer.seed,
                    "step": None if run.scores is None else run.scores.step,
                    "weights": None if run.scores is None else run.scores.after,
                    "means": {name: vars(interval) for name, interval in self.means.get(run.name, {}).items()},
                }
                for run in self.runs
            ],
            "against": self.first.name,
            "base": self.base,
            "differences": [
                {**vars(d), "by_reward": {name: vars(interval) for name, interval in d.by_reward.items()}}
                for d in self.differences
            ],
            "settings": [
                {"key": key, **dict(zip([run.name for run in self.runs], values, strict=True))}
                for key, values in self.settings
            ],
            "notes": notes(self),
        }


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder; give the folders of two or more runs")
        if not RunFolder(folder).exists and (folder / JOBS).is_dir():
            raise InputError(
                f"{folder} is a comparison, not a run; give some of its runs, {folder / JOBS}/NAME/run, or it alone: "
                f"marble compare {folder} --table-only, marble report {folder}"
            )
    runs = []
    for name, run in zip(_names(folders), map(RunFolder, folders), strict=True):
        config = run.load_config()
        file = run.evaluation / SCORES
        runs.append(ComparedRun(name, run.path, config, Scores.read(file) if file.exists() else None))
    return runs


def side_by_side(runs: Sequence[ComparedRun]) -> SideBySide:
    """The first run is what the others are compared with."""
    evaluated = {run.name: run.scores for run in runs if run.scores is not None}
    rewards = list(dict.fromkeys(name for scores in evaluated.values() for name in scores.rewards))
    held_out = {name for scores in evaluated.values() for name in scores.held_out_rewards}
    differences = [_difference(runs[0], run, rewards) for run in runs[1:]]
    return SideBySide(
        list(runs),
        rewards,
        [name for name in rewards if name in held_out],
        {name: _means(scores, rewards) for name, scores in evaluated.items()},
        [difference for difference in differences if difference is not None],
        differing([_named(json.loads(dump_config(run.config))) for run in runs]),
        _base(runs),
    )


def _base(runs: Sequence[ComparedRun]) -> dict[str, float]:
    scores = runs[0].scores
    same = len({run.config.model.path for run in runs}) == 1
    return scores.weights[BASE].means if scores is not None and same and BASE in scores.weights else {}


def notes(compared: SideBySide) -> list[str]:
    """How to read the figures, and what is missing."""
    lines = [f"{ONE_EACH}; {SEEDS}"]
    for d in compared.differences:
        against = f"{d.run} against {compared.first.name}"
        if not d.prompts:
            lines.append(f"{against}: evaluated on other prompts, so there is no difference to show")
            continue
        noise = {
            True: "the same noise",
            False: "other noise or sampling settings, which adds to the differences",
            None: "it is not known whether the noise was the same (evaluations of an older version)",
        }[d.same_noise]
        lines.append(f"{against}: paired by prompt, {d.prompts} prompts that both have; {noise}")
        if d.left_out:
            lines.append(f"{against}: no difference in {', '.join(d.left_out)}, which the two score differently")
    if any(i.over == "nothing" for d in compared.differences for i in d.by_reward.values()):
        lines.append("no interval: one prompt alone has scores")
    for run in compared.runs:
        if run.scores is None:
            lines.append(f"{run.name} has no scores yet: marble evaluate {run.folder}")
    return lines


def differing(trees: Sequence[Any], key: str = "") -> list[tuple[str, list[str]]]:
    """(key, values) of every setting that is not the same in all trees."""
    if all(isinstance(tree, Mapping) for tree in trees):
        names = dict.fromkeys(name for tree in trees for name in tree)
        return [
            row
            for name in names
            for row in differing([tree.get(name, NONE) for tree in trees], f"{key}.{name}".lstrip("."))
        ]
    if all(tree == trees[0] for tree in trees):
        return []
    return [(key, [tree if isinstance(tree, str) else json.dumps(tree) for tree in trees])]


def _named(tree: Any) -> Any:
    """The same tree, with lists of entries that have a name as mappings: an entry is compared with that of its name."""
    if isinstance(tree, dict):
        return {name: _named(value) for name, value in tree.items()}
    if isinstance(tree, list) and tree and all(isinstance(entry, dict) and "name" in entry for entry in tree):
        return {entry["name"]: _named({k: v for k, v in entry.items() if k != "name"}) for entry in tree}
    return tree


def _names(folders: Sequence[Path]) -> list[str]:
    """Of each folder as many last parts as tell them apart."""
    resolved = [folder.resolve() for folder in folders]
    for i, folder in enumerate(resolved):
        if folder in resolved[:i]:
            raise InputError(f"{folders[i]} is given twice; give different runs")
    places = [folder.parent if folder.name == "run" else folder for folder in resolved]  # a job calls its run so
    for count in range(1, max(len(place.parts) for place in places) + 1):
        names = ["/".join(place.parts[-count:]) for place in places]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in resolved]


def _by_prompt(scores: Scores) -> Prompts:
    """Under the last weights."""
    seen: dict[tuple[str, str], list[int]] = {}
    prompts: Prompts = {}
    for image in scores.weights[scores.after].images:
        same = seen.setdefault((image.source, image.prompt), [])
        if image.index not in same:
            same.append(image.index)
        of_prompt = prompts.setdefault((image.source, image.prompt, same.index(image.index)), {})
        for name, score in image.scores.items():
            if score is not None:
                of_prompt.setdefault(name, []).append(score)
    return prompts


def _table(prompts: Prompts, keys: Iterable[PromptKey], rewards: Sequence[str]) -> Array:
    """[P, M]: the mean over a prompt's images; NaN where a reward does not apply."""
    rows = [[np.mean(prompts[key][name]) if name in prompts[key] else np.nan for name in rewards] for key in keys]
    return np.array(rows, dtype=np.float64)


def _intervals(rewards: Sequence[str], means: Array, drawn: Array, counts: Array) -> dict[str, Interval]:
    """Of the rewards that have a score at all."""
    return {
        name: over_prompts(float(means[i]), drawn[:, i], int(counts[i])) for i, name in enumerate(rewards) if counts[i]
    }


def _means(scores: Scores, rewards: Sequence[str]) -> dict[str, Interval]:
    prompts = _by_prompt(scores)
    table = _table(prompts, prompts, rewards)
    return _intervals(rewards, prompt_means(table), resampled_means(table), np.isfinite(table).sum(axis=0))


def _difference(first: ComparedRun, run: ComparedRun, rewards: Sequence[str]) -> Difference | None:
    """None where one of them was not evaluated."""
    if first.scores is None or run.scores is None:
        return None
    before, after = _by_prompt(first.scores), _by_prompt(run.scores)
    shared = [key for key in before if key in after]
    one, other = ({r.name: (r.type, r.params) for r in side.config.rewards} for side in (first, run))
    left_out = [name for name in rewards if name in one and name in other and one[name] != other[name]]
    names = [name for name in rewards if name not in left_out]
    if not shared or not names:
        return Difference(run.name, {}, len(shared), None, left_out)
    theirs, ours = _table(before, shared, names), _table(after, shared, names)
    both = np.isfinite(theirs) & np.isfinite(ours)
    theirs, ours = np.where(both, theirs, np.nan), np.where(both, ours, np.nan)
    drawn = resampled_means(ours) - resampled_means(theirs)
    by_reward = _intervals(names, prompt_means(ours) - prompt_means(theirs), drawn, both.sum(axis=0))
    return Difference(run.name, by_reward, len(shared), _same_noise(first.scores, run.scores), left_out)


def _same_noise(one: Scores, other: Scores) -> bool | None:
    """Noise is drawn for the place of a prompt in its set, from the seed of the evaluation."""
    if not one.made_with or not other.made_with:
        return None
    places, others = ({(i.source, i.prompt, i.index) for i in scores.images} for scores in (one, other))
    shared = {place[:2] for place in places} & {place[:2] for place in others}
    same_places = all(place in others for place in places if place[:2] in shared)
    return one.made_with == other.made_with and same_places
