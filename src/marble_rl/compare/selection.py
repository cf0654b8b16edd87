"""Parses `--methods` and `--seeds`.

--methods base,specialists,marble            names and sets of names
--methods weights:1,1,1,2,2                  a weighted sum with these weights
--methods 'hot=optimizer.lr=1e-3,balance={type: gdpo}'     a method of your own: its name, then settings
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from marble_rl.compare.methods import Method, known_methods, method_named, method_sets, weighted
from marble_rl.config import RunConfig
from marble_rl.errors import InputError, suggestion

OWN = re.compile(r"^(?P<name>[A-Za-z0-9_-]+)=(?P<setting>[A-Za-z0-9_.-]+=.*)$", re.DOTALL)
SHARED = re.compile(
    r"^(trainer\.seed|evaluation(\..*)?|prompts(\.heldout.*)?|rewards(\.[^.=]+(\.(name|type|params|held_out).*)?)?)="
)
"""Settings that say how methods are judged: on what prompts, by which rewards."""
MOST_SEEDS = 1_000
NUMBER = re.compile(r"^\d+(\.\d*)?$")


def select_methods(given: Sequence[str], config: RunConfig) -> list[Method]:
    """The methods asked for, each once, in the order asked for."""
    methods: list[Method] = []
    for argument in given:
        for entry in _entries(argument):
            methods += [method for method in _expand(entry, config) if method not in methods]
    if not methods:
        raise InputError("--methods: names none; give for example --methods joint")
    for i, method in enumerate(methods):
        for other in methods[:i]:
            if method.slug == other.slug:
                raise InputError(f"--methods: {method.name!r} is there twice, with other settings; rename one")
    return methods


def select_seeds(text: str) -> list[int]:
    """`0,1,5` or `0-4` or both."""
    seeds: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if first > last:
            raise InputError(f"--seeds: {part!r} is neither a number nor a range; give for example 0-4 or 0,1,5")
        if last - first >= MOST_SEEDS:
            raise InputError(
                f"--seeds: {part!r} is more than {MOST_SEEDS:,} seeds, each of which is a training; give fewer"
            )
        seeds += [seed for seed in range(first, last + 1) if seed not in seeds]
    return seeds


def _entries(argument: str) -> list[list[str]]:
    """The argument, cut at commas outside brackets; numbers and settings belong to the entry before them."""
    entries: list[list[str]] = []
    for piece in _pieces(argument):
        continues = NUMBER.match(piece) or ("=" in piece and not OWN.match(piece))
        if continues and entries:
            entries[-1].append(piece)
        else:
            entries.append([piece])
    return entries


def _pieces(argument: str) -> list[str]:
    pieces, depth = [""], 0
    for character in argument:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces if piece.strip()]


def _expand(entry: list[str], config: RunConfig) -> list[Method]:
    first, *more = entry
    own = OWN.match(first)
    if own:
        return [_own_method(own["name"], [own["setting"], *more], config)]
    if first.startswith("weights:"):
        return [_weights([first.removeprefix("weights:"), *more], config)]
    if more:
        raise InputError(
            f"--methods: {more[0]!r} after {first!r} means nothing; "
            "a method of your own is name=key=value, weights are weights:1,2"
        )
    sets = method_sets(config.trained_rewards)
    names = sets.get(first, [first])
    return [_named(name, config) for name in names]


def _named(name: str, config: RunConfig) -> Method:
    if name.startswith("weights:"):
        return _weights(name.removeprefix("weights:").split(","), config)
    try:
        return method_named(name, config)
    except KeyError:
        rewards = config.trained_rewards
        known = [*known_methods(rewards), "weights:" + ",".join("1" * len(rewards)), *method_sets(rewards)]
        raise InputError(
            f"--methods: unknown method {name!r}.{suggestion(name, known)} Known: {', '.join(known)}"
        ) from None


def _weights(texts: list[str], config: RunConfig) -> Method:
    rewards = config.trained_rewards
    if len(texts) != len(rewards) or not all(NUMBER.match(text) for text in texts):
        raise InputError(
            f"--methods: weights:{','.join(texts)} must give one number for each of {', '.join(rewards)}, in that order"
        )
    return weighted([float(text) for text in texts], rewards)


def _own_method(name: str, settings: list[str], config: RunConfig) -> Method:
    if name in known_methods(config.trained_rewards) or name in method_sets(config.trained_rewards):
        raise InputError(f"--methods: {name!r} is a method already; give yours another name")
    for setting in settings:
        if SHARED.match(setting):
            raise InputError(
                f"--methods {name}: {setting!r} is the same for all methods; use --seeds, or --set for all of them"
            )
    return Method(name, " ".join(f"with {', '.join(settings)}".split()), tuple(settings))
