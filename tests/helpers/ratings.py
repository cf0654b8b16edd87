"""Rating studies: prepared from real models, served by a real process, and answered over HTTP."""

from __future__ import annotations

import http.client
import json
import resource
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image, ImageOps

from runs import marble, start

NAMES = ("tuned", "base", "inverted")


def prepare_study(folder: Path, run: Path, model: Path, prompts: int, *options: object) -> Path:
    """A trained run, its base model, and a folder with the base model's pictures in other colours."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.txt").write_text("".join(f"a cup, number {i + 1}\n" for i in range(prompts)))
    two = [f"tuned={run}", f"base={model}"]
    both = marble("rate", "prepare", *two, "--prompts", folder / "prompts.txt", "--out", folder / "two")
    assert both.code == 0, both.err
    (folder / "drawn").mkdir()
    for i, file in enumerate(sorted((folder / "two" / "pictures" / "base").iterdir())):
        with Image.open(file) as picture:
            ImageOps.invert(picture).save(folder / "drawn" / f"{i}.png")
    three = [*two, f"inverted={folder / 'drawn'}"]
    out = folder / "study"
    study = marble("rate", "prepare", *three, "--prompts", folder / "prompts.txt", "--out", out, *options)
    assert study.code == 0, study.err
    return out


@contextmanager
def rate_server(study: Path, *options: object) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """`marble rate serve` in a process, and the links that it prints, by rater; killed in the end if it still runs."""
    with start("rate", "serve", study, *options) as child:
        try:
            yield child, printed_links(child)
        finally:
            child.kill()


def printed_links(child: subprocess.Popen[str]) -> dict[str, str]:
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line)
        if line.startswith("Answers:"):
            return dict(each.split() for each in lines if "/r/" in each)
    raise AssertionError("".join(lines))


def request(url: str, method: str = "GET", body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body, with the standard library's client."""
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=10)) as connection:
        connection.request(method, parts.path, body)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def questions(link: str) -> dict[str, Any]:
    status, _, body = request(f"{link}questions")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


def shown_model(study: Path, picture: bytes) -> tuple[str, int]:
    """Whose picture it is, and of which prompt: the owner of the study can tell by the file."""
    files = [file for file in (study / "pictures").rglob("*.png") if file.read_bytes() == picture]
    assert len(files) == 1
    return files[0].parent.name, int(files[0].stem.partition("-")[0])


def send(link: str, question: str, row: int, choice: int) -> int:
    body = json.dumps({"question": question, "row": row, "choice": choice}).encode()
    return request(f"{link}answers", "POST", body)[0]


def answer_lines(study: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (study / "answers.jsonl").read_text().splitlines()]


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """As on a full disk: the kernel writes what fits, then refuses."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
