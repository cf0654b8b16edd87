"""Rewards given by a vision-language model behind an OpenAI-compatible server: vLLM, SGLang, or a hosted one.

The model gets one picture and a question about it; a pattern finds the score in its reply. Where it finds none, or one
out of range, the model is asked again, more strictly; then it is an error. No picture is scored 0 because an answer is
missing.
"""

from __future__ import annotations

import base64
import io
import math
import random
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from PIL import Image

from marble_rl.errors import count_of
from marble_rl.rewards.core.background import Lane
from marble_rl.rewards.core.base import Images, RewardBase, RewardBatch, Traits, seconds_to_deadline
from marble_rl.rewards.core.retries import AllAttemptsFailed, Outage, RetryPolicy
from marble_rl.rewards.remote.chat import ChatError, ChatServer
from marble_rl.rewards.remote.settings import PLACEHOLDER, JudgeParams, UnifiedRewardParams
from marble_rl.types import Prompt

T = TypeVar("T")


class NotUnderstood(ChatError):
    """A reply in which no score can be read."""


class Judge(RewardBase):
    """The score that a vision-language model behind an OpenAI-compatible server gives each picture.

    Takes the params of `JudgeParams` as keyword arguments.
    """

    Params: type[JudgeParams] = JudgeParams

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self._question = self.params.question()
        self._pattern = re.compile(self.params.pattern)
        self._servers = [ChatServer(url, self.params.timeout, self.params.api_key_env) for url in self.params.url]
        self._policy = RetryPolicy(self.params.retries, self.params.backoff, self._count_retry)
        # Retries are made for each picture here, so whole batches need none.
        self.traits = Traits(range=self.params.scale or (-math.inf, math.inf), concurrency=1, retries=0)
        self.patience = self.params.wait
        self._outage = Outage(f"model {self.params.model!r}", self.params.wait)
        self._loaded = False
        self.repeats = 0
        self._lock = threading.Lock()

    def load(self, device: torch.device) -> None:
        """Check that every server answers and knows the model."""
        for server in self._servers:
            self._retried(partial(self._check_server, server), server.url)
        self._loaded = True

    def score(self, batch: RewardBatch) -> Sequence[float]:
        stop = threading.Event()
        outcomes: SimpleQueue[tuple[int, float | BaseException]] = SimpleQueue()
        lane = Lane(min(self.params.concurrency, len(batch.prompts)), "judge")
        try:
            for row, (image, prompt) in enumerate(zip(batch.images, batch.prompts, strict=True)):
                lane.put(partial(self._report, outcomes, row, image, prompt, stop))
            return _gathered(outcomes, len(batch.prompts))
        finally:
            # After a failure the other scores are of no use: jobs that have not begun are dropped, pauses end.
            stop.set()
            lane.close()

    def _report(
        self,
        outcomes: SimpleQueue[tuple[int, float | BaseException]],
        row: int,
        image: Images,
        prompt: Prompt,
        stop: threading.Event,
    ) -> None:
        """In a lane's thread: put the score, or the error, into the queue."""
        if stop.is_set():
            return
        try:
            outcomes.put((row, self._judge(row, image, prompt, stop)))
        except BaseException as error:  # raised in the thread that called `score`
            outcomes.put((row, error))

    def _judge(self, row: int, image: Images, prompt: Prompt, stop: threading.Event) -> float:
        picture = {"type": "image_url", "image_url": {"url": self._data_url(image)}}
        question = self._question.replace(PLACEHOLDER, prompt.text)
        # Chosen by position, not by load: the same picture goes to the same server in a repeated run.
        first = prompt.index + row

        def ask(number: int) -> float:
            nonlocal question
            server = self._servers[(first + number) % len(self._servers)]
            try:
                return self._ask(server, [picture, {"type": "text", "text": question}])
            except NotUnderstood:
                # At temperature 0 the same question would mostly get the same answer.
                if not question.endswith(self.params.insist):
                    question = f"{question}\n{self.params.insist}"
                raise

        try:
            return self._retried(ask, f"{prompt.index} {row}", stop)
        except ChatError as error:
            error.row = row
            raise

    def _retried(self, attempt: Callable[[int], T], seed: str, stop: threading.Event | None = None) -> T:
        try:
            return self._policy.call(attempt, random.Random(seed), stop, self._outage if self._loaded else None)
        except AllAttemptsFailed as error:
            last = error.failures[-1]
            if len(error.failures) > 1:
                last.args = (f"{last} (after {error.attempts})",)
            raise last from None

    def _count_retry(self) -> None:
        with self._lock:
            self.repeats += 1

    def _ask(self, server: ChatServer, content: list[dict[str, Any]]) -> float:
        return self._read_score(server, server.post("chat/completions", self._body(content)))

    def _body(self, content: str | list[dict[str, Any]]) -> dict[str, Any]:
        body = {
            "model": self.params.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.params.max_tokens,
            "temperature": self.params.temperature,
            **self.params.extra,
        }
        return {key: value for key, value in body.items() if value is not None}

    def _read_score(self, server: ChatServer, reply: Any) -> float:
        try:
            choice = reply["choices"][0]
            text = choice["message"]["content"]
        except (LookupError, TypeError):
            raise _unusable(server, "holds no message", str(reply), "check that `url` is a chat server") from None
        if choice.get("finish_reason") == "length":
            # The last number may have lost its last digits.
            raise _unusable(server, "was cut off", str(text), "raise max_tokens")
        if not isinstance(text, str):
            raise _unusable(server, "holds no text", str(reply), "use a model that answers in plain text")
        scores = [match[1] for match in self._pattern.finditer(text) if match[1] is not None]
        if not scores:
            problem = f"has no match for the pattern {self.params.pattern!r}"
            raise _unusable(server, problem, text, "make `prompt` ask for that form, or correct `pattern`")
        return self._checked(server, scores[-1], text)

    def _checked(self, server: ChatServer, number: str, text: str) -> float:
        try:
            score = float(number)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise _unusable(server, "gives no finite number", text, "correct `pattern`: its group must be the number")
        low, high = self.traits.range
        if not low <= score <= high:
            problem = f"gives the score {score:g}, which is not between {low:g} and {high:g}"
            raise _unusable(server, problem, text, "make `prompt` name the range, or correct `scale`")
        return score

    def _check_server(self, server: ChatServer, attempt: int) -> None:
        """Look for the model in the server's list, which costs nothing. Where it is not listed, or there is no list,
        ask the model for one word."""
        try:
            names = _model_names(server.get("models"))
        except ChatError as error:
            if error.status not in (404, 405):
                raise
            names = []
        if self.params.model in names:
            return
        try:
            server.post("chat/completions", self._body("Reply with one word."))
        except ChatError as error:
            if names:
                listed = server.excerpt(", ".join(names))
                error.args = (f"{error}. `model` is {self.params.model!r}; the server lists: {listed}",)
            raise

    def _data_url(self, image: Images) -> str:
        buffer = io.BytesIO()
        kind = self.params.image_format
        Image.fromarray(image).save(buffer, kind, **({"quality": 95} if kind == "jpeg" else {}))
        return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


class UnifiedReward(Judge):
    """UnifiedReward's score from 1 to 5 for how well the picture shows its prompt, and how good it looks.

    The question is our wording of what the model was trained to answer. Scores depend on the wording: to compare with
    published ones put the question of the authors' script (github.com/CodeGoat24/UnifiedReward,
    inference_qwen/image_generation/qwen_point_score_image_generation.py) into a file, and name it in
    ``question_file``. Answers have the authors' form either way: `Final Score:` and a number from 1 to 5. The pattern
    reads it also in Markdown, and the whole number, so that a 10 is not taken for a 1.
    """

    Params = UnifiedRewardParams


def _unusable(server: ChatServer, problem: str, reply: str, advice: str) -> NotUnderstood:
    return NotUnderstood(f"the reply of {server.url} {problem}; {advice}. Reply: {server.excerpt(reply)!r}")


def _gathered(outcomes: SimpleQueue[tuple[int, float | BaseException]], count: int) -> list[float]:
    """The scores in the order of their rows; the first error is raised as soon as it is known."""
    scores = [math.nan] * count
    for done in range(count):
        try:
            row, outcome = outcomes.get(timeout=seconds_to_deadline())
        except Empty:
            raise TimeoutError(f"not judged in time: {count - done} of {count_of(count, 'picture')}") from None
        if isinstance(outcome, BaseException):
            raise outcome
        scores[row] = outcome
    return scores


def _model_names(listing: Any) -> list[str]:
    """Names in a reply to `GET /models`; empty where it has another form."""
    entries = listing.get("data") if isinstance(listing, dict) else None
    if not isinstance(entries, list):
        return []
    return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]
