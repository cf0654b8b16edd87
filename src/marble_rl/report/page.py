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
from marble_rl.report import sections
from marble_rl.report.evaluation import prompt_cards
from marble_rl.report.floors import floors
from marble_rl.report.gradients import diagnosis, specialists
from marble_rl.report.guards import guards
from marble_rl.report.pictures import Gallery, least_changes, shown_cards, training_samples
from marble_rl.report.run_data import RunData
from marble_rl.report.speed import speed, total_seconds
from marble_rl.report.tables import evaluation_rows
from marble_rl.report.verdicts import Verdict, verdicts
from marble_rl.report.wording import counted, duration, listed, number
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.layout import best_checkpoint, seems_alive


@dataclass(frozen=True)
class Status:
    """How far a run has come."""

    word: str
    """`finished`, `running` or `stopped`"""
    text: str


def run_page(run: RunData, *, refresh_seconds: int | None = None, now: float | None = None) -> str:
    """The HTML. ``refresh_seconds`` makes it load itself again, for a run that goes on."""
    remarks = list(run.remarks)
    gallery = Gallery(remarks)
    cards = [] if run.evaluation is None else prompt_cards(run.evaluation, RunFolder(run.folder).evaluation)
    judged = verdicts(run)
    guarded = floors(run)
    now = time.time() if now is None else now
    return render(
        "run.html.j2",
        title=run.folder.resolve().name,
        heading=_heading(run),
        status=_status(run, now),
        lead=_lead(judged),
        facts=_facts(run),
        verdicts=judged,
        colours=sections.colours(run),
        held_out=run.held_out,
        rewards=sections.reward_curves(run),
        evaluation=run.evaluation,
        evaluation_rows=evaluation_rows(run),
        cards=shown_cards(cards, gallery),
        least=least_changes(cards),
        samples=training_samples(run, gallery),
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
    style, script = (loader.get_source(environment, name)[0] for name in ("style.css", "script.js"))
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
        return Status("finished", f"All {wanted} steps are done.")
    if run.modified is None or not run.lines:
        return Status("stopped" if run.in_use is False else "starting", f"No step of {wanted} is logged yet.")
    quiet = now - run.modified
    if seems_alive(quiet, total_seconds(run) / len(run.lines)) if run.in_use is None else run.in_use:
        left = duration(total_seconds(run) / len(run.lines) * (wanted - done))
        return Status("running", f"{done} of {wanted} steps are done, about {left} are left.")
    return Status("stopped", f"{done} of {wanted} steps are done; the last was logged {duration(quiet)} ago.")


def _lead(judged: list[Verdict]) -> list[str]:
    """The verdicts that matter most, as the page's first sentences."""
    return [verdict.text for verdict in judged[:2] if verdict.answer != "unknown"]


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
        ("Images a rollout", f"{images} ({c.rollout.groups} prompts, {c.rollout.group_size} each)"),
        ("Seed", str(c.trainer.seed)),
    ]
    best = best_checkpoint(RunFolder(run.folder).checkpoints)
    if best is not None:
        facts.append(("Best checkpoint", f"step {best[0]}, validation score {number(best[1], signed=True)}"))
    seconds = total_seconds(run)
    return [*facts, ("Time", duration(seconds))] if seconds else facts
