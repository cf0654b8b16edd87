"""The journal: one line per step in metrics.jsonl, what happened since the last line, and image grids when due."""

from __future__ import annotations

import io
import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

from marble_rl.config import RunConfig
from marble_rl.distributed.world import World
from marble_rl.errors import StorageFailed
from marble_rl.prompts import load_prompts
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.images import grid_rows
from marble_rl.runs.journal import Journal
from marble_rl.types import Conditioning, Prompt, Rollout
from runs import base_config
from thread_ranks import in_threads

CPU = torch.device("cpu")


def settings(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({**base_config(Path("model")), **changes})


class Journaled:
    """A journal of a run folder, with a scorer whose rewards can be called."""

    def __init__(
        self, folder: Path, config: RunConfig | None = None, step: int = 0, world: World | None = None
    ) -> None:
        config = config or settings()
        folder.mkdir(exist_ok=True)
        self.folder = RunFolder(folder)
        self.scorer = Scorer(config.rewards, build_rewards(config.rewards))
        self.scorer.load(CPU)
        console = Console(file=io.StringIO(), width=200)
        self.journal = Journal(config, self.folder, world or World(), self.scorer, CPU, console, step)

    def score(self, images: int) -> None:
        """The first of a fixed row of images, four at a time."""
        dice = torch.Generator().manual_seed(0)
        pixels = torch.stack(
            [torch.randint(256, (16, 16, 3), generator=dice, dtype=torch.uint8) for _ in range(images)]
        )
        self.scorer.score(self.scorer.names, pixels, [Prompt(i, "a kite", "things") for i in range(images)], 4)

    @property
    def lines(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]


def rollout(config: RunConfig) -> Rollout:
    """Black images; those of group i are i in the first channel."""
    r = config.rollout
    groups = load_prompts(config.prompts.train, "prompts.train").draw(0, 0, r.groups, r.updates)
    images = torch.zeros(r.groups * r.group_size, 16, 16, 3, dtype=torch.uint8)
    images[..., 0] = torch.arange(r.groups).repeat_interleave(r.group_size)[:, None, None]
    latents = torch.zeros(len(images), 4, 8, 8)
    return Rollout(groups, groups, r.group_size, latents, images, Conditioning(), torch.linspace(1, 0, 4))


def test_a_step_is_one_line_with_sorted_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "marble_rl")
    run = Journaled(tmp_path / "run")
    with run.journal as journal:
        journal.log(0, {"reward/small": 0.5, "loss/kl": 0.25})
        journal.log(1, {"reward/small": 0.75})
    first, second = run.lines
    assert (first["step"], first["reward/small"], first["loss/kl"]) == (0, 0.5, 0.25)
    assert (second["step"], second["reward/small"]) == (1, 0.75)
    assert "loss/kl" not in second
    assert list(first) == ["step", *sorted(key for key in first if key != "step")]
    assert first["memory/peak_mb"] > 10
    assert "step 2/8  small 0.750" in caplog.text


def test_times_and_counts_are_those_since_the_last_line(tmp_path: Path) -> None:
    run = Journaled(tmp_path / "run")
    with run.journal as journal:
        with journal.display.stage("rollout"):
            run.score(8)
            time.sleep(0.02)
        journal.log(0, {})
        run.score(4)
        journal.log(1, {})
        journal.log(2, {})
    first, second, third = run.lines
    assert first["time/rollout"] >= 0.02
    assert "time/rollout" not in second
    for name in ("small", "bright"):
        assert first[f"time/reward/{name}"] > 0
        assert first[f"scoring/failures/{name}"] == first[f"scoring/retries/{name}"] == 0
        assert second[f"time/reward/{name}"] > 0
    assert not [key for key in first if key.endswith("/colour")], "it applies to no image here"
    times = {key for key in third if key.startswith(("scoring/", "time/"))}
    assert times == {"time/cpu"}, "nothing happened since"


def test_a_resumed_journal_drops_the_lines_after_its_checkpoint(tmp_path: Path) -> None:
    run = Journaled(tmp_path / "run")
    with run.journal as journal:
        for step in range(4):
            journal.log(step, {"reward/small": float(step)})
    with open(run.folder.metrics, "a") as file:
        file.write('{"step": 4, "rew')  # cut short by a crash
    resumed = Journaled(tmp_path / "run", step=2)
    assert [line["step"] for line in resumed.lines] == [0, 1]
    with resumed.journal as journal:
        journal.log(2, {"reward/small": 9.0})
    assert [(line["step"], line["reward/small"]) for line in resumed.lines] == [(0, 0.0), (1, 1.0), (2, 9.0)]


@pytest.mark.parametrize(
    ("images_every", "grids"),
    [(None, []), (1, [0, 2, 4, 6]), (4, [0, 4, 6]), (3, [0, 2, 6]), (100, [0, 6])],
    ids=lambda value: str(value),
)
def test_a_grid_is_drawn_for_the_rollout_of_a_due_step(
    tmp_path: Path, images_every: int | None, grids: list[int]
) -> None:
    """Two updates per rollout: a due step may be the second one of its rollout. The last step is always due."""
    config = settings(logging={"images_every": images_every})
    run = Journaled(tmp_path / "run", config)
    with run.journal as journal:
        for step in range(0, 8, 2):
            journal.save_images(rollout(config), step)
    assert sorted(path.name for path in run.folder.samples.glob("*")) == [f"step-{step}.png" for step in grids]


def test_a_grid_shows_the_groups_of_all_ranks_under_their_prompts(tmp_path: Path) -> None:
    config = settings(logging={"images_every": 1})
    whole = rollout(config)

    def show(world: World) -> None:
        own = world.share(len(whole.groups))
        rows = [i * whole.group_size + s for i in own for s in range(whole.group_size)]
        part = Rollout(
            tuple(whole.groups[i] for i in own),
            whole.drawn,
            whole.group_size,
            whole.x0[rows],
            whole.images[rows],
            whole.conditioning,
            whole.sigmas,
        )
        with Journaled(tmp_path / "run", config, world=world).journal as journal:
            journal.save_images(part, 0)

    in_threads(2, show)
    with Image.open(tmp_path / "run" / "samples" / "step-0.png") as grid:
        rows = grid_rows(grid)
    assert [row.prompt for row in rows] == [group.prompt.text for group in whole.drawn]
    assert [row.frames[0].getpixel((5, 5)) for row in rows] == [(i, 0, 0) for i in range(4)]


def with_videos(of: Rollout, frames: int) -> Rollout:
    """The same, every image a video that gets lighter."""
    light = 20 * torch.arange(frames, dtype=torch.uint8)[:, None, None, None]
    return replace(of, images=of.images[:, None] + light)


def test_a_grid_of_videos_plays_them_at_the_rate_of_the_config(tmp_path: Path) -> None:
    config = settings(logging={"images_every": 1, "fps": 5})
    whole = with_videos(rollout(config), 6)

    def show(world: World) -> None:
        own = world.share(len(whole.groups))
        rows = [i * whole.group_size + s for i in own for s in range(whole.group_size)]
        part = replace(whole, groups=tuple(whole.groups[i] for i in own), images=whole.images[rows])
        with Journaled(tmp_path / "run", config, world=world).journal as journal:
            journal.save_images(part, 0)

    in_threads(2, show)
    with Image.open(tmp_path / "run" / "samples" / "step-0.webp") as grid:
        rows = grid_rows(grid)
    assert [(row.prompt, row.fps) for row in rows] == [(group.prompt.text, 5) for group in whole.drawn]
    for row in rows:
        assert [frame.getpixel((40, 40))[1] for frame in row.frames] == pytest.approx([20 * t for t in range(6)], abs=6)


def test_a_grid_that_cannot_be_written_stops_its_step(tmp_path: Path) -> None:
    """It is drawn beside the training: the step of its rollout waits for it."""
    config = settings(logging={"images_every": 1, "trackers": ["tensorboard"]})
    run = Journaled(tmp_path / "run", config)
    run.folder.samples.write_text("a file in the way")
    with run.journal as journal:
        journal.save_images(rollout(config), 0)
        with pytest.raises(StorageFailed, match=r"cannot write .*samples/step-0\.png.* continue with --resume"):
            journal.log(0, {})
        journal.log(1, {})
    assert [line["step"] for line in run.lines] == [0, 1]


def test_a_grid_that_is_being_drawn_is_finished_whatever_ends_the_run(tmp_path: Path) -> None:
    config = settings(logging={"images_every": 1})
    run = Journaled(tmp_path / "run", config)
    with suppress(KeyboardInterrupt), run.journal as journal:
        journal.save_images(rollout(config), 0)
        raise KeyboardInterrupt
    assert [file.name for file in run.folder.samples.iterdir()] == ["step-0.png"]


def test_the_grid_of_a_dropped_rollout_gives_way_to_that_of_the_next(tmp_path: Path) -> None:
    config = settings(logging={"images_every": 1})
    run = Journaled(tmp_path / "run", config)
    first = rollout(config)
    with run.journal as journal:
        journal.save_images(first, 0)
        journal.save_images(replace(first, images=first.images + 100), 0)
        journal.log(0, {})
    with Image.open(run.folder.samples / "step-0.png") as grid:
        assert grid_rows(grid)[0].frames[0].getpixel((5, 5)) == (100, 100, 100)


def test_with_several_ranks_rank_0_writes_and_logs_its_waiting_time(tmp_path: Path) -> None:
    def log(world: World) -> None:
        run = Journaled(tmp_path / "run", world=world)
        world.collective_seconds += 0.5 + world.rank
        with run.journal as journal:
            journal.log(0, {})

    in_threads(2, log)
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["time/waiting"] == 0.5
