"""Several processes under torchrun do what one process does, stop together, and go on together.

gloo on the CPU; NCCL has no test here. Starting processes takes longer than the runs themselves, so one launch serves
several tests, and each of its commands is the command line's own (tests/launched.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runs import TESTS, base_config, lora_bytes, marble, metrics, train, write_config

pytestmark = pytest.mark.full

THINGS = ["cup", "hat", "kite", "sign", "block", "marble", "boat", "tree"]
LAZY_AND_UNEVEN = [
    "rollout={group_size: 4, steps: 3, groups: 6, updates: 2}",  # 2 groups of 3 for one process, 1 for the other
    "trainer.micro_batch=3",
    "trainer.steps=2",
    "loss.regularize_every=3",
    "balance.refresh_every=1",
]


FAIR = ["balance={type: fair}", "loss.noise=group", "trainer.steps=4"]
DARK = '{name: dark, type: "rewards_for_tests:darkness", guard: {floor: 0.001, band: 0.01, base_images: 3}}'
GUARDS = [
    f"rewards=[{{name: bright, type: brightness}}, {DARK}, {{name: colour, type: colour, guard: {{}}}}]",
    "balance={type: fixed}",
    "loss={timesteps_per_sample: 2, regularize_every: 2, noise: group}",
    "trainer.micro_batch=2",
    "trainer.steps=5",
]
VALIDATED = [
    "prompts.validation=[{name: more, texts: [a red ball, a green bird, a blue lamp, a horse]}]",
    "trainer={steps: 4, save_every: 4, micro_batch: 4, eval_every: 2}",
]


def settings(model: Path) -> dict[str, Any]:
    """4 groups in each of 4 updates; refreshes and ordinary steps in turn; the second rollout begins with step 4."""
    colours = [f"a {colour} {thing}" for thing in THINGS for colour in ("red", "blue", "green")]
    return {
        "prompts": {
            "train": [
                {"name": "things", "texts": [f"a {thing}" for thing in THINGS]},
                {"name": "colours", "texts": colours},
            ]
        },
        "rollout": {**base_config(model)["rollout"], "groups": 16, "updates": 4},
        "loss": {"timesteps_per_sample": 2},
        "balance": {"type": "marble", "refresh_every": 2},
        "trainer": {"steps": 5, "save_every": 3, "micro_batch": 4, "eval_every": 4},
        "evaluation": {"steps": 2, "batch_size": 3, "limit": 5},
    }


def failing(name: str) -> str:
    """The second process fails in the second rollout: it scores 8 groups in the first."""
    reward = f'{{name: {name}, type: "rewards_for_tests:FailsElsewhere", params: {{calls: 9}}, retries: 0}}'
    return f"rewards=[{{name: bright, type: brightness}}, {reward}]"


def launch(
    folder: Path, processes: int, commands: list[list[object]], *options: str, **variables: str
) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "commands.json").write_text(json.dumps([[str(part) for part in command] for command in commands]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with open(folder / "log", "w") as log:
        return subprocess.Popen(
            [*torchrun, "--monitor-interval", "0.1", *options, str(TESTS / "launched.py"), str(folder)],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=TESTS,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        )


@dataclass(frozen=True)
class Launched:
    config: Path
    folder: Path
    code: int
    codes: dict[str, int]
    """Exit code of each command, the same in all processes"""
    log: str


def weights(run: Path) -> torch.Tensor:
    """The EMA, as exported, and the trained weights of the newest checkpoint."""
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[1]))
    files = load_file(run / "lora" / "pytorch_lora_weights.safetensors"), load_file(newest / "adapters.safetensors")
    return torch.cat([file[name].double().flatten() for file in files for name in sorted(file)])


def within_a_rollout(run: Path) -> torch.Tensor:
    """All adapters after step 3, the last checkpoint that knows one rollout only."""
    file = load_file(run / "checkpoints" / "step-3" / "adapters.safetensors")
    return torch.cat([file[name].double().flatten() for name in sorted(file)])


def assert_same_run(one: Path, other: Path, second_rollout: int = 4) -> None:
    """Up to rounding. The images of a second rollout show it: a weight that differs in its last bit can round a pixel
    to the next of 256 levels, a reward then changes by more, and in these groups of nearly equal images its advantages
    do too. On which processors that happens is chance."""
    if (one / "checkpoints" / "step-3").exists():
        before = within_a_rollout(other)
        assert (within_a_rollout(one) - before).norm() < 1e-5 * before.norm()
    tolerance = 1e-5 if len(metrics(one)) <= second_rollout else 1e-3
    assert (weights(one) - weights(other)).norm() < tolerance * weights(other).norm()
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            tolerance = 0.02 if a["step"] >= second_rollout else 1e-6 if key.startswith("alpha") else 1e-5
            assert a[key] == pytest.approx(b[key], rel=tolerance, abs=tolerance), (a["step"], key)


@pytest.fixture(scope="module")
def config(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config") / "config.yaml", tiny_sd3, **settings(tiny_sd3))


@pytest.fixture(scope="module")
def alone(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train(config, run)
    return run


@pytest.fixture(scope="module")
def two(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Everything that two processes do here, but for dying."""
    folder = tmp_path_factory.mktemp("two")
    train(config, folder / "continued", "--set", "trainer.steps=2")
    changes = {
        "refused": ["rollout.updates=16"],
        "run": [],
        "sharded": ["trainer.shard_base=true"],
        "uneven": LAZY_AND_UNEVEN,
        "fair": FAIR,
        "guards": GUARDS,
        "validated": VALIDATED,
        "guards-sharded": [*GUARDS, "trainer.shard_base=true"],
        "failed": [failing("odd"), "trainer.eval_every=null"],
        "failed-sharded": [failing("strange"), "trainer.eval_every=null", "trainer.shard_base=true"],
    }
    commands: dict[str, list[object]] = {
        name: ["train", config, "--out", folder / name, *[part for change in sets for part in ("--set", change)]]
        for name, sets in changes.items()
    }
    resumed = ["train", config, "--out", folder / "resumed", "--set"]
    commands["begun"] = [*resumed, "trainer.steps=3"]
    commands["resumed"] = [*resumed, "trainer.steps=5", "--resume"]
    commands["continued"] = ["train", config, "--out", folder / "continued", "--resume"]
    commands["evaluated"] = ["evaluate", folder / "run", "--out", folder / "evaluated"]
    commands["sample"] = ["sample", folder / "run", "--prompt", "a cup"]
    train(config, folder / "fair-alone", *[part for change in FAIR for part in ("--set", change)])
    train(config, folder / "guards-alone", *[part for change in GUARDS for part in ("--set", change)])
    train(config, folder / "validated-alone", *[part for change in VALIDATED for part in ("--set", change)])
    train(config, folder / "uneven-alone", *[part for change in LAZY_AND_UNEVEN for part in ("--set", change)])
    process = launch(folder, 2, list(commands.values()))
    code = process.wait(300)
    log = (folder / "log").read_text()
    first, second = (json.loads((folder / f"codes-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second, log
    return Launched(config, folder, code, dict(zip(commands, first, strict=True)), log)


def test_two_processes_are_one(alone: Path, two: Launched) -> None:
    """Refreshes, ordinary steps, two rollouts, an evaluation; the images drawn are the same files."""
    assert two.codes["run"] == 0, two.log
    assert_same_run(two.folder / "run", alone)
    pictures = sorted(path.name for path in (alone / "samples").iterdir())
    assert pictures
    assert (two.folder / "run" / "samples" / pictures[0]).read_bytes() == (alone / "samples" / pictures[0]).read_bytes()


def test_uneven_shares_and_lazy_regularisation(two: Launched) -> None:
    """Micro-batches of 3 in groups of 4 lie across the processes' border, and one in three samples is regularised."""
    assert two.codes["uneven"] == 0, two.log
    assert_same_run(two.folder / "uneven", two.folder / "uneven-alone")


def test_momenta_of_fair_balancing(two: Launched) -> None:
    assert two.codes["fair"] == 0, two.log
    assert_same_run(two.folder / "fair", two.folder / "fair-alone")


def test_guards(two: Launched) -> None:
    """Base scores, levels and multipliers; sharded, all ranks make the same passes, for the base model's images and for
    the samples that are regularised."""
    assert (two.codes["guards"], two.codes["guards-sharded"]) == (0, 0), two.log
    assert_same_run(two.folder / "guards", two.folder / "guards-alone")
    assert torch.equal(weights(two.folder / "guards-sharded"), weights(two.folder / "guards"))
    scores = [json.loads((two.folder / name / "base_scores.json").read_text()) for name in ("guards", "guards-alone")]
    assert scores[0]["prompts"].keys() == scores[1]["prompts"].keys()
    assert any(line["floor/dark/lambda"] > 0 for line in metrics(two.folder / "guards"))


def test_the_best_checkpoint_is_that_of_one_process(two: Launched) -> None:
    """Every rank judges, the first writes; the state has the base model's scores of the prompts of both ranks."""
    assert two.codes["validated"] == 0, two.log
    runs = [two.folder / name for name in ("validated", "validated-alone")]
    ours, theirs = (json.loads((run / "checkpoints" / "step-4" / "state.json").read_text())["best"] for run in runs)
    assert (ours["step"], ours["made_with"]) == (theirs["step"], theirs["made_with"])
    assert ours["base"] == theirs["base"]
    assert len(ours["base"]["bright"]) == 4
    assert (runs[0] / "checkpoints" / f"step-{ours['step']}" / "manifest.json").exists()
    assert two.log.count("validation after step 2: score") == 1


def test_a_sharded_base_model_changes_nothing(two: Launched) -> None:
    assert two.codes["sharded"] == 0, two.log
    assert "base model sharded: 38,856 of 77,712 parameters" in two.log
    assert torch.equal(weights(two.folder / "sharded"), weights(two.folder / "run"))


def test_a_resumed_run_of_two_is_the_uninterrupted_one_bit_for_bit(two: Launched) -> None:
    assert (two.codes["begun"], two.codes["resumed"]) == (0, 0), two.log
    assert torch.equal(weights(two.folder / "resumed"), weights(two.folder / "run"))


def test_a_run_of_one_process_is_continued_by_two(alone: Path, two: Launched) -> None:
    assert two.codes["continued"] == 0, two.log
    assert_same_run(two.folder / "continued", alone)


@pytest.mark.parametrize(("run", "reward"), [("failed", "odd"), ("failed-sharded", "strange")])
def test_a_reward_that_fails_in_one_process_stops_all(two: Launched, run: str, reward: str) -> None:
    """After the same step, told once, saved."""
    assert two.code != 0
    assert two.codes[run] == 3, two.log
    assert two.log.count(f"stopped: reward '{reward}' failed on an image of prompt") == 1
    assert "the reward model fell over (rank 1 of 2)" in two.log
    assert "Traceback (most recent call last)" not in two.log.split("torch/distributed/elastic")[0]
    folder = two.folder / run
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-3", "step-4"]
    assert len(metrics(folder)) == 4


def test_a_run_of_two_processes_is_continued_by_one(two: Launched, tmp_path: Path) -> None:
    """Where the reward behaves: the one that failed above, with the base model sharded and now whole."""
    shutil.copytree(two.folder / "failed-sharded", tmp_path / "run")
    same = ["--set", failing("strange"), "--set", "trainer.eval_every=null"]
    outcome = train(two.config, tmp_path / "run", "--resume", *same)
    assert "the run differs from the one that was started" not in outcome.err
    train(two.config, tmp_path / "alone", *same)
    assert_same_run(tmp_path / "run", tmp_path / "alone")


def test_what_cannot_be_divided_is_refused_once(two: Launched) -> None:
    assert two.codes["refused"] == 2
    assert two.log.count("error: rollout.groups: 16 groups in rollout.updates: 16 are 1 an update") == 1
    assert not (two.folder / "refused").exists()
    assert two.codes["sample"] == 2
    assert two.log.count("error: marble sample: started 2 times by torchrun") == 1


def test_an_evaluation_is_divided(two: Launched, tmp_path: Path) -> None:
    assert two.codes["evaluated"] == 0, two.log
    outcome = marble("evaluate", two.folder / "run", "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    for name in ("scores.json", "grid.png"):
        assert (tmp_path / name).read_bytes() == (two.folder / "evaluated" / name).read_bytes()


def test_four_processes_are_one(alone: Path, config: Path, tmp_path: Path) -> None:
    process = launch(tmp_path, 4, [["train", config, "--out", tmp_path / "run"]])
    assert process.wait(300) == 0, (tmp_path / "log").read_text()
    assert_same_run(tmp_path / "run", alone)


def test_killed_restarted_and_stopped(config: Path, tmp_path: Path) -> None:
    """kill -9 of one process: torchrun starts all again, which go on. SIGTERM: all finish a step, save and end. One
    process does the rest, and the result is, bit for bit, that of a run that nothing happened to."""
    run, log = tmp_path / "run", tmp_path / "log"
    # More steps than a signal can take to arrive.
    process = launch(
        tmp_path,
        2,
        [["train", config, "--out", run, "--resume-or-start", "--set", "trainer.steps=100"]],
        "--max-restarts=1",
    )

    def wait_until(happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 150
        while not happened():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)

    def logged() -> str:
        return (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""

    wait_until(lambda: logged().count("\n") >= 2)
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    wait_until(lambda: "continuing after step" in log.read_text())
    # Those that were started again have made a step: lines beyond their checkpoint, which are not the old ones.
    (saved,) = re.findall(r"continuing after step (\d+)", log.read_text())
    before = logged()
    wait_until(lambda: logged() != before and logged().count("\n") > int(saved))
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) != 0
    told = log.read_text()
    assert "stopped: another rank of this run died" in told
    assert "continuing after step" in told
    assert json.loads((tmp_path / "codes-0.json").read_text()) == [128 + signal.SIGTERM]
    done = len(metrics(run))
    assert told.count(f"stopped after step {done}\n") == 1
    assert (run / "checkpoints" / f"step-{done}" / "manifest.json").exists()

    # Two processes round otherwise than one, and a pixel that flips changes a picture's size: so two here as well.
    whole = tmp_path / "whole"
    calm = ["train", config, "--out", whole, "--set", f"trainer.steps={done}"]
    assert launch(tmp_path / "calm", 2, [calm]).wait(100) == 0, (tmp_path / "calm" / "log").read_text()
    for one in (run, whole):
        train(config, one, "--resume", "--set", f"trainer.steps={done + 2}")
    assert lora_bytes(run) == lora_bytes(whole)
    assert metrics(run) == metrics(whole)


def test_a_closed_terminal_gives_a_hanging_reward_up(config: Path, tmp_path: Path) -> None:
    """It hangs in one of two processes, while the other one waits for its scores. Both end with the step saved. The
    terminal's SIGHUP reaches torchrun, which passes it on."""
    run, log = tmp_path / "run", tmp_path / "log"
    odd = "{name: odd, type: 'rewards_for_tests:Sleeping', params: {calls: 8, seconds: 600, rank: '1'}}"
    changes = ("--set", f"rewards=[{odd}]", "--set", "trainer.eval_every=null")
    process = launch(tmp_path, 2, [["train", config, "--out", run, *changes]])
    deadline = time.monotonic() + 150
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 4:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) != 0
    assert json.loads((tmp_path / "codes-0.json").read_text()) == [128 + signal.SIGHUP], log.read_text()
    assert "stopped after step 4: gave up waiting for reward 'odd' (rank 1 of 2)" in log.read_text()
    assert "Step 4 is saved." in log.read_text()
    assert (run / "checkpoints" / "step-4" / "manifest.json").exists()


def test_a_rank_that_is_too_slow(config: Path, tmp_path: Path) -> None:
    """The first process waits for its scores, no longer than the timeout, and saves."""
    run, log = tmp_path / "run", tmp_path / "log"
    odd = "{name: odd, type: 'rewards_for_tests:Sleeping', params: {calls: 8, seconds: 600, rank: '1'}}"
    changes = ("--set", f"rewards=[{odd}]", "--set", "trainer.eval_every=null")
    process = launch(tmp_path, 2, [["train", config, "--out", run, *changes]], MARBLE_TIMEOUT="20")
    assert process.wait(300) != 0
    told = log.read_text()
    assert json.loads((tmp_path / "codes-0.json").read_text()) == [3], told
    assert "stopped: another rank of this run died, or exceeded the timeout of 20 s (MARBLE_TIMEOUT)" in told
    assert "Timed out waiting 20000ms for recv operation to complete" in told
    assert "Step 4 is saved." in told
    assert (run / "checkpoints" / "step-4" / "manifest.json").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exchange_that_fails_in_one_process(config: Path, tmp_path: Path, rank: int) -> None:
    """It tells what failed there, the other one that its connection was closed, and the first saves."""
    run, log = tmp_path / "run", tmp_path / "log"
    text = "NCCL error: unhandled cuda error, Cuda failure 2 ''out of memory''"
    odd = (
        f"{{name: odd, type: 'rewards_for_tests:BreaksExchange', params: {{calls: 8, rank: '{rank}', text: '{text}'}}}}"
    )
    changes = ("--set", f"rewards=[{odd}]", "--set", "trainer.eval_every=null")
    process = launch(tmp_path, 2, [["train", config, "--out", run, *changes]])
    assert process.wait(300) != 0
    told = log.read_text()
    assert json.loads((tmp_path / "codes-0.json").read_text()) == [3], told
    assert "stopped: out of memory in an exchange between ranks." in told
    assert "The error: DistBackendError: NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'" in told
    if rank == 1:
        assert "stopped: another rank of this run died" in told
        assert "Connection closed by peer" in told
    assert "Step 4 is saved." in told
    assert (run / "checkpoints" / "step-4" / "manifest.json").exists()
