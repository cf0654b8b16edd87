"""Runs jobs as processes of the command line, several at a time, from one loop in the main thread."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from marble_rl.compare.display import JobsDisplay
from marble_rl.compare.job_result import AGAIN, Failure, JobResult, finished, job_result
from marble_rl.compare.jobs import Job, identity
from marble_rl.config import dump_config
from marble_rl.distributed.interrupts import Interrupts
from marble_rl.runs.scores import SCORES, Scores
from marble_rl.storage import storage_errors, write_bytes, write_json

LAST_LINES = 20
POLL_SECONDS = 0.1


def run_jobs(
    jobs: Sequence[Job],
    at_once: int,
    display: JobsDisplay,
    interrupts: Interrupts,
    lock: int,
    on_result: Callable[[], None] = lambda: None,
) -> None:
    """Run the jobs; each that ends leaves its result. A crash is a result too, and does not stop the others.

    Where a stop is asked for, each process gets one SIGINT, finishes its step and saves; no other job is begun.
    """
    waiting, running = list(jobs), list[JobProcess]()
    asked_to_stop = False
    try:
        while running or (waiting and not interrupts.pending()):
            if interrupts.pending() and not asked_to_stop:
                asked_to_stop = True
                for process in running:
                    process.stop()
            while waiting and len(running) < at_once and not interrupts.pending():
                running.append(JobProcess(waiting.pop(0), lock))
                display.began(running[-1].job)
            for process in list(running):
                if process.goes_on(stopping=interrupts.pending()):
                    display.progress(process.job, process.stage, process.steps_done())
                    continue
                running.remove(process)
                display.ended(process.job, process.result)
                if process.result is not None:
                    on_result()
            time.sleep(POLL_SECONDS)
    except Exception:  # a fault in here, such as a full disk: the other jobs save first
        for process in running:
            process.stop()
        for process in running:
            process.wait()
        raise
    finally:  # a second Ctrl-C
        for process in running:
            process.kill()


class JobProcess:
    """A running job: one process that trains, then evaluates."""

    def __init__(self, job: Job, lock: int) -> None:
        self.job = job
        self.stage = "train"
        self.result: JobResult | None = None
        """Set when the job has ended by itself."""
        self._began = time.monotonic()
        with storage_errors(str(job.folder), AGAIN):
            job.folder.mkdir(parents=True, exist_ok=True)
            write_json(job.identity_file, identity(job.config))
            write_bytes(job.config_file, dump_config(job.config).encode())
            job.result.unlink(missing_ok=True)  # of an attempt that failed
            with open(job.log, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "marble_rl.cli.child", str(os.getpid()), *self._commands()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"},
                    pass_fds=(lock,),
                    start_new_session=True,  # Ctrl-C in the terminal reaches this process only, which passes it on once
                )

    def _commands(self) -> list[str]:
        job = self.job
        train = ["train", str(job.config_file), "--out", str(job.run), "--resume-or-start"]
        evaluate = ["evaluate", str(job.run), "--weights", job.method.weights, "--out", str(job.evaluation)]
        return [json.dumps(command) for command in (train, [*evaluate, "--device", job.config.model.device])]

    def goes_on(self, *, stopping: bool) -> bool:
        """Whether the job is still running; if not, its result is written."""
        if self.stage == "train" and (self.job.run / "lora").exists():
            self.stage, self._began = "evaluate", time.monotonic()
            if stopping:  # the first signal was used up by a training that ended anyway
                self.stop()
        code = self._process.poll()
        if code is None:
            return True
        if code == 0:
            self._finish()
        elif not stopping:
            self._fail(code)
        return False

    def steps_done(self) -> int:
        """Of the training, as far as logged."""
        try:
            return (self.job.run / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def wait(self) -> None:
        self._process.wait()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait()

    def _finish(self) -> None:
        scores = Scores.read(self.job.evaluation / SCORES)
        self.result = finished(self.job, scores, time.monotonic() - self._began)
        self.result.write(self.job.result)

    def _fail(self, code: int) -> None:
        lines = self.job.log.read_text(encoding="utf-8", errors="replace").splitlines()
        self.result = job_result(self.job, failed=Failure(self.stage, code, lines[-LAST_LINES:]))
        self.result.write(self.job.result)
