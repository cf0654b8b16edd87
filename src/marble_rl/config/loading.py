"""From a YAML file and `--set` overrides to a checked RunConfig, or to one clear line that says what is wrong."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from yaml.error import MarkedYAMLError

from marble_rl.config.schema import (
    Balance,
    DropoutBalance,
    FixedBalance,
    GdpoBalance,
    MarbleBalance,
    MinVarianceBalance,
    PromptSourceConfig,
    RewardConfig,
    RunConfig,
    SequentialBalance,
    SingleBalance,
    WeightedSumBalance,
)
from marble_rl.config.trackers import TensorboardTracker, TrackerConfig
from marble_rl.errors import InputError
from marble_rl.mini import MINI

REWARD_FILES = ("model", "processor", "head", "colour_model")
"""Parameters of rewards that may name a file or folder."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML config (or a run's config.json) and apply overrides such as ``trainer.steps=10``.

    Relative file names in it count from the config's own folder. Raises InputError with one line per mistake.
    """
    path = Path(path)
    return _resolve(_overridden(path, overrides), path)


def load_scoring_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A config of which only the rewards matter: a file that has no other section will do, and then no prompts."""
    path = Path(path)
    others = {"model": {"path": MINI}, "prompts": {"train": []}}
    return _resolve({**others, **_overridden(path, overrides)}, path)


def _overridden(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    tree = _read(path)
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _resolve(tree: dict[str, Any], path: Path) -> RunConfig:
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise InputError(_explain(error, path, tree)) from None
    config = _with_absolute_paths(config, path.parent.resolve())
    _check_references(config)
    return config


def dump_config(config: RunConfig) -> str:
    """The resolved config as JSON; `load_config` reads it back to an equal one."""
    return config.model_dump_json(indent=2) + "\n"


def to_yaml(config: RunConfig) -> str:
    """The resolved config as YAML, for people."""
    return yaml.safe_dump(json.loads(config.model_dump_json()), sort_keys=False, allow_unicode=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"config file not found: {path}. Give the path of a YAML file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read config file {path}: {error}") from None
    try:
        tree = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not readable"
        raise InputError(f"{path} is not valid YAML{where}: {problem}. Mend that line.") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: expected a mapping of sections (model:, prompts:, ...), found {_kind(tree)}.")
    return tree


class _UniqueKeys(yaml.SafeLoader):
    """YAML's own loader takes the last of two equal keys, and forgets the other without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for i, key in enumerate(names):
            if any(key.value == other.value for other in names[:i]):
                raise MarkedYAMLError(problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key; numbers in it index lists: ``rewards.0.held_out=true``."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise InputError(f"--set {override!r}: expected key=value, for example --set trainer.steps=10")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"--set {override!r}: {text!r} is not a valid YAML value; quote it") from None
    *parents, last = key.split(".")
    node: Any = tree
    for name in parents:
        if isinstance(node, dict):
            if node.get(name) is None:
                node[name] = {}
            node = node[name]
        else:
            node = node[_list_index(node, name, override)]
    if isinstance(node, dict):
        node[last] = value
    else:
        node[_list_index(node, last, override)] = value


def _list_index(node: Any, name: str, override: str) -> int:
    if not isinstance(node, list):
        raise InputError(f"--set {override!r}: {name!r} is set below a plain value, {node!r}; shorten the key")
    if not name.isdigit() or int(name) >= len(node):
        raise InputError(f"--set {override!r}: {name!r} must be an index from 0 to {len(node) - 1} of that list")
    return int(name)


def _with_absolute_paths(config: RunConfig, folder: Path) -> RunConfig:
    """Resolve the files and folders that it names, so that the saved config means the same from anywhere."""
    model = config.model
    if model.path != MINI and (folder / model.path).is_dir():
        model = model.model_copy(update={"path": str((folder / model.path).resolve())})
    lora = config.lora
    if lora.init is not None:
        lora = lora.model_copy(update={"init": (folder / lora.init).resolve()})
    prompts = config.prompts
    absolute: dict[str, Any] = {}
    for split in ("train", "heldout"):
        sources = getattr(prompts, split)
        if sources is not None:
            absolute[split] = [_with_absolute_files(source, folder) for source in sources]
    trackers = [_with_absolute_dir(tracker, folder) for tracker in config.logging.trackers]
    logging = config.logging.model_copy(update={"trackers": trackers})
    rewards = [r.model_copy(update={"params": _with_absolute_params(r.params, folder)}) for r in config.rewards]
    sections = {"model": model, "lora": lora, "prompts": prompts.model_copy(update=absolute), "logging": logging}
    return config.model_copy(update={**sections, "rewards": rewards})


def _with_absolute_params(params: Any, folder: Path, key: str = "") -> Any:
    """Models and heads that lie in the config's folder; what does not may be an id on the hub, or a server's name."""
    if isinstance(params, dict):
        return {name: _with_absolute_params(value, folder, name) for name, value in params.items()}
    if key in REWARD_FILES and isinstance(params, str) and params != MINI and (folder / params).exists():
        return str((folder / params).resolve())
    return params


def _with_absolute_dir(tracker: TrackerConfig, folder: Path) -> TrackerConfig:
    if isinstance(tracker, TensorboardTracker) and tracker.dir is not None:
        return tracker.model_copy(update={"dir": (folder / tracker.dir).resolve()})
    return tracker


def _with_absolute_files(source: PromptSourceConfig, folder: Path) -> PromptSourceConfig:
    if source.file is not None:
        return source.model_copy(update={"file": (folder / source.file).resolve()})
    if source.generate is not None and source.generate.exclude is not None:
        exclude = (folder / source.generate.exclude).resolve()
        return source.model_copy(update={"generate": source.generate.model_copy(update={"exclude": exclude})})
    return source


def _check_references(config: RunConfig) -> None:
    """What one setting says about another."""
    _check_rewards(config)
    _check_balance(config.balance, config.trained_rewards)
    names = [reward.name for reward in config.rewards]
    for split in ("train", "heldout"):
        for i, source in enumerate(getattr(config.prompts, split) or []):
            for name in source.rewards or []:
                require_name(name, names, f"prompts.{split}.{i}.rewards")

    if config.trainer.micro_batch == "auto" and config.loss.regularize_every > 1:
        raise InputError(
            "trainer.micro_batch: auto, but loss.regularize_every: "
            f"{config.loss.regularize_every} makes the update depend on the micro-batches; set one of them to a number "
            "of its own: micro_batch: 8, or regularize_every: 1"
        )

    rollout = config.rollout
    if rollout.group_size % rollout.images_at_once:
        raise InputError(
            f"rollout.batch_size: {rollout.batch_size} does not divide rollout.group_size={rollout.group_size}; "
            f"use a divisor of {rollout.group_size}"
        )
    if rollout.groups % rollout.updates:
        raise InputError(
            f"rollout.updates: {rollout.updates} does not divide rollout.groups={rollout.groups}; "
            f"use a divisor of {rollout.groups}"
        )


def _check_rewards(config: RunConfig) -> None:
    names = [reward.name for reward in config.rewards]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"rewards: the name {name!r} is used twice; names must differ")
    for i, reward in enumerate(config.rewards):
        if reward.optional and not reward.held_out:
            raise InputError(
                f"rewards.{i} ({reward.name}).optional: true, but the reward is trained on; "
                "only held-out rewards may be left out. Remove it, or set held_out: true"
            )
        _check_hacking_guards(reward, f"rewards.{i} ({reward.name})")
        _check_finite(reward.params, f"rewards.{i} ({reward.name}).params")
    trained = config.trained_rewards
    if not trained:
        raise InputError("rewards: all of them are held_out; at least one must be trained")
    for step in range(config.trainer.steps):
        if len(config.rewards_off(step)) == len(trained):
            raise InputError(f"rewards: no reward's `schedule` covers step {step}; leave one on in every step")


def _check_balance(balance: Balance, trained: Sequence[str]) -> None:
    if isinstance(balance, SingleBalance):
        require_name(balance.reward, trained, "balance.reward")
    elif isinstance(balance, SequentialBalance):
        for i, stage in enumerate(balance.stages):
            require_name(stage.reward, trained, f"balance.stages.{i}.reward")
    elif isinstance(balance, FixedBalance):
        if balance.coefficients is not None:
            _check_weights(balance.coefficients, trained, "balance.coefficients")
            total = sum(balance.coefficients.values())
            if abs(total - 1.0) > 1e-6:
                raise InputError(
                    f"balance.coefficients: they sum to {total:g}, but must sum to 1; divide each by {total:g}"
                )
    elif isinstance(balance, MarbleBalance):
        _check_weights(balance.probe_weights, trained, "balance.probe_weights")
        if balance.solver == "noise_aware" and balance.smooth != "gram":
            raise InputError("balance.solver: noise_aware works on averaged products; set balance.smooth: gram")
        if balance.solver == "equal" and balance.smooth != "alpha":
            raise InputError("balance.solver: equal has no problem to smooth products for; set balance.smooth: alpha")
        if not balance.normalize and (balance.smooth, balance.apply) != ("alpha", "alpha"):
            raise InputError(
                "balance.normalize: false is an ablation of the paper's rule; "
                "set balance.smooth: alpha and balance.apply: alpha"
            )
        if not balance.normalize and balance.metric != "euclidean":
            raise InputError(
                f"balance.metric: {balance.metric} needs unit gradients, but balance.normalize is false, "
                "an ablation of the paper's rule; set balance.metric: euclidean"
            )
    elif isinstance(balance, WeightedSumBalance | GdpoBalance):
        _check_weights(balance.weights, trained, "balance.weights")
        if all(balance.weights.get(name, 1.0) == 0 for name in trained):
            raise InputError("balance.weights: every weight is 0, so there is nothing to train; set one above 0")
    else:
        assert isinstance(balance, DropoutBalance | MinVarianceBalance)


def _check_finite(value: Any, key: str) -> None:
    """A run keeps its config as JSON, which has no other numbers: they would come back as null."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_finite(item, f"{key}.{name}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_finite(item, f"{key}.{i}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{key}: {value} is not a finite number; leave the key out, or give a number")


def _check_hacking_guards(reward: RewardConfig, where: str) -> None:
    if reward.watch is not None and not reward.held_out:
        raise InputError(f"{where}.watch: only held-out rewards are watched; remove it, or set held_out: true")
    if reward.held_out and (reward.clip is not None or reward.schedule is not None):
        raise InputError(f"{where}: is held out, so clip and schedule have nothing to act on; remove them")
    if reward.clip is not None:
        low, high = reward.clip
        if (low is None and high is None) or (low is not None and high is not None and low >= high):
            raise InputError(
                f"{where}.clip: {list(reward.clip)} bounds nothing; give [lowest, highest], one may be null"
            )
    if reward.schedule == []:
        raise InputError(f"{where}.schedule: is empty, so it would never be trained; set held_out: true instead")
    for begin, end in reward.schedule or []:
        if end is not None and begin >= end:
            raise InputError(f"{where}.schedule: [{begin}, {end}] holds no step; give [from, until] with from < until")


def _check_weights(weights: dict[str, float], names: Sequence[str], key: str) -> None:
    for name in weights:
        require_name(name, names, key)


def require_name(name: str, names: Sequence[str], key: str) -> None:
    """Raise unless ``name`` is one of ``names``, proposing the nearest."""
    if name not in names:
        raise InputError(f"{key}: unknown name {name!r}.{suggestion(name, names)} Known: {', '.join(names)}")


def suggestion(name: str, names: Sequence[str]) -> str:
    """' Did you mean ...?' for the nearest of the valid names, or nothing."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def _explain(error: ValidationError, path: Path, tree: dict[str, Any]) -> str:
    lines = []
    for item in error.errors():
        location = _user_location(item["loc"], tree)
        key = ".".join(map(str, location)) or "(top level)"
        found = item["input"]
        if item["type"] == "extra_forbidden":
            valid = _valid_keys(location[:-1], tree)
            text = f"unknown key {location[-1]!r}.{suggestion(str(location[-1]), valid)} Valid: {', '.join(valid)}"
        elif item["type"] == "missing":
            text = "is missing; add it"
        elif item["type"] == "union_tag_not_found":
            text = "needs a `type:`, one of " + item["ctx"]["discriminator"] + " values; see docs/config.md"
        elif item["type"] == "union_tag_invalid":
            valid = [v.strip("' ") for v in item["ctx"]["expected_tags"].split(",")]
            tag = str(item["ctx"]["tag"])
            text = f"unknown type {tag!r}.{suggestion(tag, valid)} Valid: {', '.join(valid)}"
        elif item["type"] in ("model_type", "model_attributes_type", "dict_type"):
            text = f"expected a mapping (key: value), found {_kind(found)}"
        elif item["type"] == "list_type":
            text = f"expected a list, found {_kind(found)}"
        else:
            text = f"found {found!r}; {item['msg'][0].lower()}{item['msg'][1:]}"
        lines.append(f"{key}: {text}")
    unique = list(dict.fromkeys(lines))
    return f"{path}: {unique[0]}" if len(unique) == 1 else f"{path}:\n  " + "\n  ".join(unique)


def _user_location(location: tuple[int | str, ...], tree: Any) -> list[int | str]:
    """The keys as the user wrote them: pydantic inserts the tag of a union into the path."""
    keys: list[int | str] = []
    node = tree
    for i, part in enumerate(location):
        is_last = i == len(location) - 1
        if isinstance(node, dict) and part not in node and not is_last:
            continue
        keys.append(part)
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            node = None
    return keys


def _valid_keys(location: Sequence[int | str], tree: Any) -> list[str]:
    """Keys that the section at ``location`` accepts."""
    annotation: Any = RunConfig
    node: Any = tree
    for part in location:
        if isinstance(part, str):  # a number is an index into a list, whose annotation its items share
            annotation = _section_of(annotation, node).model_fields[part].annotation
        node = node[part]
    return list(_section_of(annotation, node).model_fields)


def _section_of(annotation: Any, node: Any) -> type[BaseModel]:
    """The section that describes ``node``; of a union's, the one that its `type` names."""
    choices = sections_in(annotation)
    if len(choices) > 1:
        choices = [c for c in choices if node.get("type") in get_args(c.model_fields["type"].annotation)] or choices
    return choices[0]


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The config sections that a field's type holds: none, one, or the variants of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return f"{value!r}"
