"""What one rater sees: questions and pictures in an order of their own, under identifiers that say nothing.

Orders and identifiers are keyed hashes (HMAC) of what they stand for, with a key that raters do not get. They are the
same after a restart, and differ between raters: two of them cannot put their pages side by side to find out more.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
from dataclasses import dataclass

from marble_rl.rating.answers import Key
from marble_rl.rating.study import CRITERIA, HIGHEST, Study

SECOND = 3
"""Choices of a pair: 1, the first picture is better; 2, they are the same; 3, the second is better."""


@dataclass(frozen=True)
class Question:
    """Pictures of one prompt, from the same noise: of all models (scales), or of two (pairs)."""

    id: str
    prompt: int
    image: int
    models: tuple[str, ...]
    """In the order shown"""
    pictures: tuple[str, ...]
    """Identifiers of their pictures"""


class Sheet:
    """All questions to one rater.

    A question has rows, each of which gets a number: a row for each picture and criterion, 1 to 5 (scales); or one for
    each criterion, 1 to 3 (pairs).
    """

    def __init__(self, study: Study, rater: str, secret: str) -> None:
        self._names = study.names
        self._pairs = study.ask == "pairs"
        self._rater = rater
        self._secret = secret.encode()
        shown = list(itertools.combinations(study.names, 2)) if self._pairs else [tuple(study.names)]
        asked = [
            self._question(i, j, models)
            for i in range(len(study.prompts))
            for j in range(study.images)
            for models in shown
        ]
        self.questions = {question.id: question for question in sorted(asked, key=lambda question: question.id)}
        """By identifier. The identifiers are random, and so is their order."""
        self.pictures = {
            picture: (model, question.prompt, question.image)
            for question in asked
            for picture, model in zip(question.pictures, question.models, strict=True)
        }
        """Model, prompt and image by identifier"""
        self.rows = len(CRITERIA) * (1 if self._pairs else len(study.names))
        self.choices = SECOND if self._pairs else HIGHEST

    def _question(self, prompt: int, image: int, models: tuple[str, ...]) -> Question:
        place = (prompt, image, *models)
        pictures = sorted((self._hash("picture", *place, model), model) for model in models)
        identifiers, order = zip(*pictures, strict=True)
        return Question(self._hash("question", *place), prompt, image, order, identifiers)

    def _hash(self, *parts: object) -> str:
        text = "\n".join(map(str, (self._rater, *parts)))
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()[:32]

    def key(self, question: Question, row: int) -> Key:
        """What a row asks."""
        number, criterion = divmod(row, len(CRITERIA))
        model, against = question.models[number], None
        if self._pairs:
            model, against = sorted(question.models, key=self._names.index)
        return Key(self._rater, question.prompt, question.image, CRITERIA[criterion], model, against)

    def value(self, question: Question, choice: int) -> float:
        """What a choice means, see `Answer.value`."""
        return self._turned(question, (SECOND - choice) / 2) if self._pairs else float(choice)

    def choice(self, question: Question, value: float) -> int:
        """The choice that means it."""
        return round(SECOND - 2 * self._turned(question, value) if self._pairs else value)

    def _turned(self, question: Question, score: float) -> float:
        """From the score of the picture shown first to that of the study's first model, or back."""
        return score if list(question.models) == sorted(question.models, key=self._names.index) else 1 - score
