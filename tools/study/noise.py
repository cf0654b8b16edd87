"""How much of a gain is luck of the evaluation: its standard deviation over the noise that images are sampled from.

marble evaluate RUN --images 4
python -m tools.study.noise RUN/evaluation/scores.json

With n images of each of P prompts, and v the variance of a prompt's images,

    var(gain) = (mean_p v_base + mean_p v_tuned) / (n P)
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, variance

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from marble_rl.errors import InputError
from marble_rl.runs.scores import Scores, WeightsScores

IMAGES = (1, 2, 4, 8, 16)


def noise_of_gains(scores: Scores) -> dict[str, float]:
    """By reward: the standard deviation of the gain with one image of each prompt. Rewards with fewer than two images
    of a prompt are left out."""
    parts = [_noise(scores.weights[name]) for name in (scores.before, scores.after)]
    return {reward: math.sqrt(sum(part[reward] for part in parts)) for reward in parts[0] if reward in parts[1]}


def _noise(scored: WeightsScores) -> dict[str, float]:
    """By reward, the variance of the mean over prompts with one image of each."""
    images: dict[str, dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for image in scored.images:
        for reward, score in image.scores.items():
            if score is not None:
                images[reward][image.source, image.index].append(score)
    repeated = {reward: [x for x in prompts.values() if len(x) > 1] for reward, prompts in images.items()}
    return {reward: fmean(map(variance, xs)) / len(xs) for reward, xs in repeated.items() if xs}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scores", type=Path, metavar="FILE", help="scores.json of an evaluation with several images")
    try:
        found = noise_of_gains(Scores.read(parser.parse_args(words).scores))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    table = Table(title="Standard deviation of the gain, by images a prompt", box=SIMPLE_HEAD, title_justify="left")
    for head in ("reward", *map(str, IMAGES)):
        table.add_column(head, justify="left" if head == "reward" else "right")
    for reward, deviation in found.items():
        table.add_row(reward, *(f"{deviation / math.sqrt(n):.4f}" for n in IMAGES))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
