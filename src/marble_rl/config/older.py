"""Settings of earlier versions: renamed where a new one means the same, refused by name where the method is gone."""

from __future__ import annotations

from typing import Any

from marble_rl.errors import InputError

GONE = "was removed, because the study showed no gain from it (docs/results.md)"
REFRESH_KEYS = ("refresh_every", "ema_decay", "gradients", "probe_weights")


def upgraded(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree of a config, with the settings that this version reads."""
    rewards = tree.get("rewards")
    if isinstance(rewards, list):
        tree = {**tree, "rewards": [_reward(entry) for entry in rewards]}
    balance = tree.get("balance")
    if not isinstance(balance, dict) or balance.get("type", "marble") != "marble":
        return tree
    return {**tree, "balance": _marble(balance)}


def _reward(reward: Any) -> Any:
    """0.1 kept scores of repeated batches (`cache`), which changed no result; `credit` of geneval was `score`."""
    if not isinstance(reward, dict):
        return reward
    reward = {key: value for key, value in reward.items() if key != "cache"}
    params = reward.get("params")
    if not isinstance(params, dict):
        return reward
    if reward.get("type") == "geneval" and "score" in params and "credit" not in params:
        params = {"credit" if key == "score" else key: value for key, value in params.items()}
    if "reward" in params:  # of `frames`
        params = {**params, "reward": _reward(params["reward"])}
    return {**reward, "params": params}


def _marble(balance: dict[str, Any]) -> dict[str, Any]:
    """Up to version 0.1 one rule had the modes `solver`, `smooth` and `normalize`."""
    if balance.get("solver") == "noise_aware":
        raise InputError(f"balance.solver: noise_aware {GONE}. Remove the key, or use marble 0.1.0 for this run")
    if balance.get("smooth") == "gram":
        raise InputError(f"balance.smooth: gram {GONE}. Remove the key, or use marble 0.1.0 for this run")
    if balance.get("metric") == "adam":
        raise InputError(f"balance.metric: adam {GONE}. Remove the key, or use marble 0.1.0 for this run")
    if balance.get("solver") == "equal":
        return _unit_mean(balance)
    if balance.get("normalize") is False:
        if balance.get("apply", "alpha") != "alpha":
            raise InputError(f"balance.apply: {balance['apply']} needs unit gradients; remove balance.normalize: false")
        kept = (*REFRESH_KEYS, "uniform_after")
        return {"type": "marble_no_norm", **{key: balance[key] for key in kept if key in balance}}
    defaults = {"solver": "min_norm", "smooth": "alpha", "normalize": True, "metric": "euclidean"}
    return {key: value for key, value in balance.items() if key not in defaults or value != defaults[key]}


def _unit_mean(balance: dict[str, Any]) -> dict[str, Any]:
    """``solver: equal`` over norms is `type: unit_mean` now; without them it was `type: fixed` between refreshes."""
    for key, wanted in (("apply", "alpha_over_norm"), ("uniform_after", None)):
        if balance.get(key, wanted if key != "apply" else "alpha") != wanted:
            raise InputError(
                f"balance.solver: equal with {key}: {balance.get(key, 'alpha')} was removed; "
                "use `type: unit_mean` (equal coefficients on unit gradients) or `type: fixed` (on gradients)"
            )
    return {"type": "unit_mean", **{key: balance[key] for key in REFRESH_KEYS if key in balance}}
