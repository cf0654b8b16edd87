"""Rewards given by a vision-language model behind an OpenAI-compatible server: vLLM, SGLang, or a hosted one.

The judge sees one picture and a question about it; a pattern finds the score in its reply. A reply without a score is
an error, as is a score out of range: nothing is ever scored 0 for want of an answer.
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

from marble_rl.errors import InputError
from marble_rl.rewards.core import checks
from marble_rl.rewards.core.background import Lane
from marble_rl.rewards.core.base import Images, RewardBase, RewardBatch, Traits, seconds_left
from marble_rl.rewards.remote.chat import ChatClient, ChatError, with_retries
from marble_rl.types import Prompt

T = TypeVar("T")

PLACEHOLDER = "{prompt}"
IMAGE_FORMATS = ("png", "jpeg")


class Judge(RewardBase):
    """The score that a vision-language model behind an OpenAI-compatible server gives each picture.

    ``prompt`` is the question, with {prompt} where the picture's prompt belongs; ``pattern`` is a regular expression
    whose one group is the score. The last match in the reply counts. ``scale`` is [lowest, highest] allowed score.
    """

    default_model: str | None = None
    default_prompt: str | None = None
    default_pattern: str | None = None
    default_scale: tuple[float, float] | None = None

    def __init__(
        self,
        url: str | Sequence[str],
        model: str | None = None,
        prompt: str | None = None,
        pattern: str | None = None,
        scale: Sequence[float] | None = None,
        concurrency: int = 16,
        retries: int = 3,
        backoff: float = 1.0,
        timeout: float = 120.0,
        api_key_env: str | None = None,
        max_tokens: int | None = 1024,
        temperature: float | None = 0.0,
        image_format: str = "png",
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.urls = checks.base_urls(url)
        self.model = checks.text("model", _given(model, self.default_model), "the model's name on the server")
        self.prompt = _template(_given(prompt, self.default_prompt))
        self.pattern = checks.one_group_pattern(_given(pattern, self.default_pattern))
        self.scale = self.default_scale if scale is None else checks.score_range(scale)
        self.concurrency = checks.whole("concurrency", concurrency, 1)
        self.retries = checks.whole("retries", retries, 0)
        self.backoff = checks.number("backoff", backoff, "0 or more seconds")
        self.timeout = checks.number("timeout", timeout, "more than 0 seconds", positive=True)
        self.max_tokens = None if max_tokens is None else checks.whole("max_tokens", max_tokens, 1)
        self.temperature = None if temperature is None else checks.number("temperature", temperature, "0 or more")
        if image_format not in IMAGE_FORMATS:
            raise InputError(f"image_format: {image_format!r} is unknown; use one of {', '.join(IMAGE_FORMATS)}")
        self.image_format = image_format
        if extra is not None and not isinstance(extra, dict):
            raise InputError(f"extra: {extra!r} is not a mapping; give further fields of the request, or leave it out")
        self.extra = extra or {}
        # Pictures are retried one by one here, so whole batches need not be.
        self.traits = Traits(range=self.scale or (-math.inf, math.inf), concurrency=1, retries=0)
        self.repeats = 0
        self._lock = threading.Lock()
        self._client = ChatClient(self.timeout, checks.variable_name("api_key_env", api_key_env))

    def load(self, device: torch.device) -> None:
        """Nothing to load here; every server must answer, and know the model."""
        for url in self.urls:
            self._find_server(url)

    def score(self, batch: RewardBatch) -> Sequence[float]:
        stop = threading.Event()
        outcomes: SimpleQueue[tuple[int, float | BaseException]] = SimpleQueue()
        lane = Lane(min(self.concurrency, len(batch.prompts)), "judge")
        try:
            for row, (image, prompt) in enumerate(zip(batch.images, batch.prompts, strict=True)):
                lane.put(partial(self._report, outcomes, row, image, prompt, stop))
            return _gathered(outcomes, len(batch.prompts))
        finally:
            # After a failure nobody waits for the rest: what has not begun is dropped, pauses end.
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
        """In a lane's thread: the score, or why there is none."""
        if stop.is_set():
            return
        try:
            outcomes.put((row, self._judge(row, image, prompt, stop)))
        except BaseException as error:  # raised in the thread that waits for it
            outcomes.put((row, error))

    def _judge(self, row: int, image: Images, prompt: Prompt, stop: threading.Event) -> float:
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": self._data_url(image)}},
            {"type": "text", "text": self.prompt.replace(PLACEHOLDER, prompt.text)},
        ]
        # By position, not by who is free: the same picture goes to the same server in a repeated run.
        first = prompt.index + row
        try:
            return self._retried(
                lambda number: self._ask(self.urls[(first + number) % len(self.urls)], content),
                seed=f"{prompt.index} {row}",
                stop=stop,
            )
        except ChatError as error:
            error.row = row
            raise

    def _retried(self, attempt: Callable[[int], T], seed: str, stop: threading.Event) -> T:
        def counted(number: int) -> T:
            if number:
                with self._lock:
                    self.repeats += 1
            return attempt(number)

        return with_retries(counted, retries=self.retries, backoff=self.backoff, dice=random.Random(seed), stop=stop)

    def _ask(self, url: str, content: list[dict[str, Any]]) -> float:
        return self._read_score(url, self._client.post(url, "chat/completions", self._body(content)))

    def _body(self, content: str | list[dict[str, Any]]) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            **self.extra,
        }
        return {key: value for key, value in body.items() if value is not None}

    def _read_score(self, url: str, reply: Any) -> float:
        try:
            choice = reply["choices"][0]
            text = choice["message"]["content"]
        except (LookupError, TypeError):
            raise self._unusable(url, "holds no message", str(reply), "check that `url` is a chat server") from None
        if choice.get("finish_reason") == "length":
            # The last number may have lost its last digits.
            raise self._unusable(url, "was cut off", str(text), "raise max_tokens")
        if not isinstance(text, str):
            raise self._unusable(url, "holds no text", str(reply), "use a model that answers in plain text")
        found = [match[1] for match in self.pattern.finditer(text) if match[1] is not None]
        if not found:
            wanted = f"has no match for the pattern {self.pattern.pattern!r}"
            raise self._unusable(url, wanted, text, "make `prompt` ask for that form, or mend `pattern`")
        return self._checked(url, found[-1], text)

    def _checked(self, url: str, number: str, text: str) -> float:
        try:
            score = float(number)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise self._unusable(url, "gives no finite number", text, "mend `pattern`: its group must be the number")
        if self.scale is not None and not self.scale[0] <= score <= self.scale[1]:
            low, high = self.scale
            problem = f"gives the score {score:g}, which is not between {low:g} and {high:g}"
            raise self._unusable(url, problem, text, "make `prompt` name the range, or correct `scale`")
        return score

    def _unusable(self, url: str, problem: str, reply: str, advice: str) -> ChatError:
        # Another attempt makes sense even at temperature 0: a server's batches change from one to the next.
        return ChatError(f"the reply of {url} {problem}; {advice}. Reply: {self._client.excerpt(reply)!r}", again=True)

    def _find_server(self, url: str) -> None:
        self._retried(lambda _: self._check_server(url), seed=url, stop=threading.Event())

    def _check_server(self, url: str) -> None:
        """The list of models is free; a server without one, or with other names in it, is asked for a word."""
        try:
            served = _model_names(self._client.get(url, "models"))
        except ChatError as error:
            if error.status not in (404, 405):
                raise
            served = []
        if self.model in served:
            return
        try:
            self._client.post(url, "chat/completions", self._body("Reply with one word."))
        except ChatError as error:
            if served:
                listed = self._client.excerpt(", ".join(served))
                error.args = (f"{error}. `model` is {self.model!r}; the server lists: {listed}",)
            raise

    def _data_url(self, image: Images) -> str:
        buffer = io.BytesIO()
        options = {"quality": 95} if self.image_format == "jpeg" else {}
        Image.fromarray(image).save(buffer, self.image_format, **options)
        return f"data:image/{self.image_format};base64,{base64.b64encode(buffer.getvalue()).decode()}"


class UnifiedReward(Judge):
    """UnifiedReward's score from 1 to 5 for how well the picture shows its prompt, and how good it looks.

    The question is our wording of what the model was trained to answer. Scores depend on the wording: to compare with
    published ones set ``prompt`` to the question of the authors' script (github.com/CodeGoat24/UnifiedReward,
    inference_qwen/image_generation/qwen_point_score_image_generation.py). They publish no pattern; ours reads the
    whole number behind `Final Score:`, so that a 10 is no 1.
    """

    default_model = "CodeGoat24/UnifiedReward-qwen-7b"
    default_prompt = (
        "This image was generated from a text caption. Judge two things.\n"
        "1. Does it show what the caption says: its objects, their attributes, and how they relate to each other?\n"
        "2. How good is it to look at: sharpness, detail, colours, overall appeal?\n"
        "Name the elements of the caption, each as 'element (type): value', where value is 1 if the image shows it "
        "and 0 if not. Then write 'Final Score:' and a score from 1 to 5.\n"
        "Caption: [{prompt}]"
    )
    default_pattern = r"Final Score:\s*([-+]?\d+(?:\.\d+)?)"
    default_scale = (1.0, 5.0)


def _gathered(outcomes: SimpleQueue[tuple[int, float | BaseException]], count: int) -> list[float]:
    """The scores in the order of their rows; the first error is raised as soon as it is known."""
    scores = [math.nan] * count
    for done in range(count):
        try:
            row, outcome = outcomes.get(timeout=seconds_left())
        except Empty:
            raise TimeoutError(f"{count - done} of {count} pictures were not judged in time") from None
        if isinstance(outcome, BaseException):
            raise outcome
        scores[row] = outcome
    return scores


def _model_names(listing: Any) -> list[str]:
    """Of a reply to `GET /models`; empty where it has another form."""
    entries = listing.get("data") if isinstance(listing, dict) else None
    if not isinstance(entries, list):
        return []
    return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]


def _given(value: T | None, default: T | None) -> T | None:
    return default if value is None else value


def _template(prompt: Any) -> str:
    template = checks.text("prompt", prompt, f"the question for the judge, with {PLACEHOLDER} for the picture's prompt")
    others = re.findall(r"\{\w*\}", template)
    if PLACEHOLDER not in template and others:
        raise InputError(
            f"prompt: {others[0]} is not filled in; write {PLACEHOLDER} where the picture's prompt belongs"
        )
    return template
