"""A run's page: data, verdicts and charts put into the template. The result is one file that needs no other."""

from __future__ import annotations

import base64
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from marble_rl import __version__
from marble_rl.balancing.registry import RULES
from marble_rl.charts.style import CSS
from marble_rl.config import to_yaml
from marble_rl.errors import count_of
from marble_rl.report import sections
from marble_rl.report.floors import floors
from marble_rl.report.gallery import evaluate_command, prompt_gallery
from marble_rl.report.gradients import diagnosis, specialists
from marble_rl.report.guards import guards
from marble_rl.report.pictures import Gallery, training_samples
from marble_rl.report.run_data import RunData
from marble_rl.report.speed import speed, total_seconds
from marble_rl.report.tables import evaluation_rows
from marble_rl.report.verdicts import Verdict, verdicts
from marble_rl.report.wording import counted, duration, listed, number
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.layout import seems_alive
from marble_rl.runs.manifest import best_checkpoint


@dataclass(frozen=True)
class Status:
    """How far a run has come."""

    word: str
    """`finished`, `running` or `stopped`"""
    text: str


def run_page(
    run: RunData, *, folder: Path | None = None, refresh_seconds: int | None = None, now: float | None = None
) -> str:
    """The HTML. ``folder``: where its file will be, by default that of the run. ``refresh_seconds`` makes it load
    itself again, for a run that goes on."""
    remarks = list(run.remarks)
    colours = sections.colours(run)
    gallery = prompt_gallery(run, folder or run.folder, colours, remarks)
    judged = verdicts(run)
    guarded = floors(run)
    now = time.time() if now is None else now
    return render(
        "run.html.j2",
        title=run.folder.resolve().name,
        heading=_heading(run),
        status=_status(run, now),
        lead=_lead(judged),
        scored=_scored_step(run),
        facts=_facts(run),
        verdicts=judged,
        held_out=run.held_out,
        rewards=sections.reward_curves(run),
        evaluation=run.evaluation,
        evaluation_rows=evaluation_rows(run),
        evaluated=_evaluated(run),
        gallery=gallery,
        samples=training_samples(run, Gallery(remarks)),
        measured=[
            *([] if guarded is None else [guarded]),
            sections.coefficients(run),
            sections.harmony(run),
            sections.signal(run),
            diagnosis(run),
            specialists(run),
        ],
        guards=guards(run),
        speed=speed(run),
        config=to_yaml(run.config),
        history=run.history,
        remarks=remarks,
        refresh_seconds=refresh_seconds,
        made=time.strftime("%Y-%m-%d %H:%M", time.localtime(now)),
    )


def render(template: str, **values: Any) -> str:
    """Fill a template. Text is escaped; the policy in the page's head lets no script run but our own."""
    environment = Environment(
        loader=PackageLoader("marble_rl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number}
    loader = environment.loader
    assert loader is not None
    style, *scripts = (loader.get_source(environment, name)[0] for name in ("style.css", "script.js", "gallery.js"))
    script = "\n".join(scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = {"style": Markup(CSS + style), "script": Markup(script), "script_digest": digest, "version": __version__}
    return environment.get_template(template).render(**own, **values)


def _heading(run: RunData) -> str:
    rewards = counted(len(run.objectives), "reward")
    method = f" {RULES.part_of(run.config.balance).about}" if len(run.objectives) > 1 else ""
    return f"{Path(run.config.model.path).name}, trained on {rewards}{method}"


def _status(run: RunData, now: float) -> Status:
    done, wanted = run.steps_done, run.config.trainer.steps
    if run.finished:
        return Status("finished", "Its only step is done." if wanted == 1 else f"All {wanted} steps are done.")
    if run.modified is None or not run.lines:
        return Status("stopped" if run.in_use is False else "starting", f"No step of {wanted} is logged yet.")
    quiet = now - run.modified
    if seems_alive(quiet, total_seconds(run) / len(run.lines)) if run.in_use is None else run.in_use:
        left = duration(total_seconds(run) / len(run.lines) * (wanted - done))
        return Status("running", f"{done} of {count_of(wanted, 'step')} done, about {left} left.")
    return Status("stopped", f"{done} of {count_of(wanted, 'step')} done; the last was logged {duration(quiet)} ago.")


def _lead(judged: list[Verdict]) -> list[str]:
    """The verdicts that matter most, as the page's first sentences."""
    return [verdict.text for verdict in judged[:2] if verdict.answer != "unknown"]


@dataclass(frozen=True)
class ScoredStep:
    """Which step the scores of the headline are of."""

    text: str
    stale: bool = False
    """The run went on since."""
    command: str = ""
    """Evaluates the newest checkpoint, where there is one after the evaluated one"""


def _scored_step(run: RunData) -> ScoredStep | None:
    scores = run.evaluation
    if scores is None or scores.step is None or not scores.differences:
        return None
    text = f"Scores of step {scores.step}: {scores.after} against {scores.before}."
    if scores.step >= run.steps_done:
        return ScoredStep(text)
    text = f"{text} The run went on to step {run.steps_done}."
    if run.checkpoint is None or run.checkpoint <= scores.step:
        return ScoredStep(f"{text} There is no later checkpoint yet.", stale=True)
    return ScoredStep(text, True, evaluate_command(run, save_images=scores.keeps_every_prompt))


def _evaluated(run: RunData) -> str:
    """What the table of the evaluation rests on."""
    scores = run.evaluation
    if scores is None:
        return ""
    images = f"{count_of(scores.prompts, 'prompt')}, {count_of(len(scores.images), 'image')} for each of the weights"
    return f"{images}, the same seeds{'' if scores.step is None else f'; the checkpoint after step {scores.step}'}."


def _facts(run: RunData) -> list[tuple[str, str]]:
    c = run.config
    images = c.rollout.groups * c.rollout.group_size
    sources = [source.name for source in c.prompts.train]
    facts = [
        ("Model", c.model.path),
        ("Trained on", ", ".join(run.objectives)),
        *([("Guards", ", ".join(c.guards))] if c.guards else []),
        *([("Held out", ", ".join(run.held_out))] if run.held_out else []),
        ("Prompts", listed(sources)),
        ("Steps", f"{run.steps_done} of {c.trainer.steps}"),
        ("Images a rollout", f"{images} ({count_of(c.rollout.groups, 'prompt')}, {c.rollout.group_size} each)"),
        ("Seed", str(c.trainer.seed)),
    ]
    best = best_checkpoint(RunFolder(run.folder).checkpoints)
    if best is not None:
        facts.append(("Best checkpoint", f"step {best[0]}, validation score {number(best[1], signed=True)}"))
    seconds = total_seconds(run)
    return [*facts, ("Time", duration(seconds))] if seconds else facts
