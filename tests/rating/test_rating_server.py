"""`marble rate serve`: who may ask, what a rater can learn, and what is on the disk when an answer is confirmed."""

from __future__ import annotations

import json
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from marble_rl.rating.answers import AnswersFile
from marble_rl.rating.raters import Raters, invite
from marble_rl.rating.server import RatingApp
from marble_rl.rating.study import StudyFolder
from marble_rl.rewards.remote.http_server import address, bound_socket, running
from ratings import NAMES, answer_lines, files_end_at, questions, request, send, shown_model
from runs import marble


@contextmanager
def serving(study: Path, raters: str | None = "anna,ben") -> Iterator[dict[str, str]]:
    """Links of a server in this process, by rater. The order is the same in every test run."""
    folder = StudyFolder(study)
    if not folder.raters.exists():
        Raters(secret="secret-1", tokens={}).write(folder.raters)
    with bound_socket("127.0.0.1", 0) as listener, AnswersFile.opened(folder.answers) as answers:
        invited = invite(folder.raters, raters)
        app = RatingApp(folder.read(), folder, invited, answers, notice=lambda text: None).asgi()
        with running(app, listener):
            yield {name: f"{address(listener)}/r/{token}/" for name, token in invited.tokens.items()}


def as_pairs(study: Path) -> Path:
    plan = json.loads((study / "study.json").read_text())
    (study / "study.json").write_text(json.dumps(plan | {"ask": "pairs"}))
    return study


def test_without_a_link_everything_is_refused(study: Path) -> None:
    with serving(study) as links:
        link = links["anna"]
        root, _, token = link.rstrip("/").rpartition("/r/")
        question = questions(link)["questions"][0]
        body = json.dumps({"question": question["id"], "row": 0, "choice": 3}).encode()
        picture = f"pictures/{question['pictures'][0]}"
        wrong = ["", token[:-1], token + "A", token.swapcase(), "%00", "é", "..", "rater-1"]
        paths = ["", "questions", picture, "page.js", "page.css", "answers", "../study.json", "nothing"]
        refused = [f"/r/{each}/{path}" for each in wrong for path in paths]
        refused += [f"/{path}" for path in ["", "favicon.ico", "r", "r/", "questions", picture, f"x/r/{token}/"]]
        for path in refused:
            for method in ("GET", "POST", "HEAD", "PUT"):
                status, headers, _ = request(root + path.replace("é", "%C3%A9"), method, body)
                assert status == 403, (method, path)
                assert headers["cache-control"] == "no-store"
        assert answer_lines(study) == []
        assert request(link + picture)[0] == 200
    with serving(study, "ben") as links:
        stranger = links["ben"].replace(links["ben"].rstrip("/").rpartition("/")[2], token)
        assert request(stranger)[0] == 403, "anna is not asked any more"


def test_everything_is_kept_out_of_caches_frames_and_other_sites(study: Path) -> None:
    with serving(study) as links:
        link = links["anna"]
        picture = questions(link)["questions"][0]["pictures"][0]
        for path in ("", "questions", f"pictures/{picture}", "page.js", "page.css", "nothing"):
            _, headers, body = request(link + path)
            assert headers["cache-control"] == "no-store"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert not headers.keys() & {"last-modified", "etag", "set-cookie"}
            assert b"http://" not in body
            assert b"https://" not in body
        status, headers, _ = request(link.rstrip("/"))
        assert (status, headers["location"]) == (307, link[link.index("/r/") :])


@pytest.mark.parametrize("ask", ["scales", "pairs"])
def test_nothing_that_a_rater_gets_tells_the_model(study: Path, ask: str) -> None:
    if ask == "pairs":
        as_pairs(study)
    with serving(study) as links:
        first, second = (questions(links[name])["questions"] for name in ("anna", "ben"))
        everything = b"".join(request(links["anna"] + path)[2] for path in ("", "questions", "page.js"))
        for name in (*NAMES, str(study), "0000-0", ".png"):
            assert name.encode() not in everything
        identifiers = [{i for q in each for i in (q["id"], *q["pictures"])} for each in (first, second)]
        assert not identifiers[0] & identifiers[1], "two raters cannot compare their pages"
        assert len(identifiers[0]) == (16 if ask == "scales" else 36)
        places = Counter()
        for link, each in ((links["anna"], first), (links["ben"], second)):
            for question in each:
                pictures = [request(f"{link}pictures/{i}") for i in question["pictures"]]
                assert {headers["content-type"] for _, headers, _ in pictures} == {"image/png"}
                shown = [shown_model(study, body) for _, _, body in pictures]
                assert len({prompt for _, prompt in shown}) == 1
                assert question["prompt"] == f"a cup, number {shown[0][1] + 1}"
                places.update((place, model) for place, (model, _) in enumerate(shown))
        assert len(places) == (9 if ask == "scales" else 6), "every model stands at every place"
        assert [q["prompt"] for q in first] != [q["prompt"] for q in second]
        # Of another rater, or made up: not there.
        assert request(f"{links['anna']}pictures/{second[0]['pictures'][0]}")[0] == 404


def test_an_answer_is_on_the_disk_under_its_model_when_it_is_confirmed(study: Path) -> None:
    with serving(study) as links:
        link = links["anna"]
        for number, question in enumerate(questions(link)["questions"]):
            for place, picture in enumerate(question["pictures"]):
                model, prompt = shown_model(study, request(f"{link}pictures/{picture}")[2])
                for row, criterion in ((2 * place, "alignment"), (2 * place + 1, "quality")):
                    choice = 1 + (number + row) % 5
                    assert send(link, question["id"], row, choice) == 200
                    last = answer_lines(study)[-1]
                    del last["time"]
                    assert last == {
                        "rater": "anna",
                        "prompt": prompt,
                        "image": 0,
                        "criterion": criterion,
                        "model": model,
                        "against": None,
                        "value": choice,
                    }


def test_a_choice_between_two_is_stored_for_the_model_that_comes_first_in_the_study(study: Path) -> None:
    as_pairs(study)
    with serving(study) as links:
        link = links["ben"]
        turned = set()
        for question in questions(link)["questions"]:
            shown = [shown_model(study, request(f"{link}pictures/{i}")[2])[0] for i in question["pictures"]]
            first, second = sorted(shown, key=NAMES.index)
            turned.add(shown[0] != first)
            for choice, preferred in ((1, shown[0]), (2, None), (3, shown[1])):
                assert send(link, question["id"], 1, choice) == 200
                last = answer_lines(study)[-1]
                assert (last["model"], last["against"], last["criterion"]) == (first, second, "quality")
                assert last["value"] == (0.5 if preferred is None else float(preferred == first))
                rows = [q["rows"] for q in questions(link)["questions"] if q["id"] == question["id"]]
                assert rows == [[None, choice]]
        assert turned == {True, False}


def test_raters_continue_with_the_same_links_order_and_answers(study: Path) -> None:
    with serving(study) as links:
        before = {name: questions(link) for name, link in links.items()}
        assert send(links["anna"], before["anna"]["questions"][1]["id"], 4, 2) == 200
    with serving(study, None) as again:
        assert {name: link.rpartition(":")[2][5:] for name, link in again.items()} == {
            name: link.rpartition(":")[2][5:] for name, link in links.items()
        }
        before["anna"]["questions"][1]["rows"][4] = 2
        assert {name: questions(link) for name, link in again.items()} == before
    assert (study / "raters.json").stat().st_mode & 0o077 == 0
    with serving(study, "carl,anna") as more:
        assert more["anna"].rpartition("/r/")[2] == links["anna"].rpartition("/r/")[2]
        assert list(more) == ["carl", "anna"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff",
        b'{"question": "x", "row": 0, "choice": 1}',
        b'{"question": ID, "row": 6, "choice": 1}',
        b'{"question": ID, "row": -1, "choice": 1}',
        b'{"question": ID, "row": 0, "choice": 6}',
        b'{"question": ID, "row": 0, "choice": 0}',
        b'{"question": ID, "row": 0, "choice": 2.5}',
        b'{"question": ID, "row": 0, "choice": true}',
        b'{"question": ID, "row": 0, "choice": 1, "rater": "ben"}',
    ],
)
def test_a_malformed_answer_is_refused(study: Path, body: bytes) -> None:
    with serving(study) as links:
        identifier = json.dumps(questions(links["anna"])["questions"][0]["id"]).encode()
        status, _, reply = request(f"{links['anna']}answers", "POST", body.replace(b"ID", identifier))
        assert (status, "error" in json.loads(reply)) == (400, True)
        assert answer_lines(study) == []
        assert request(f"{links['anna']}answers", "POST", b" " * 5000)[0] == 413
        assert request(f"{links['anna']}answers")[0] == 405


def test_a_failure_is_told_without_its_reason(study: Path) -> None:
    """The reason may name a file, and that the model. A picture that the disk cannot read:"""
    for file in (study / "pictures").rglob("*.png"):
        file.unlink()
        file.symlink_to("/proc/self/mem")
    with serving(study) as links:
        picture = questions(links["anna"])["questions"][0]["pictures"][0]
        status, headers, body = request(f"{links['anna']}pictures/{picture}")
    assert (status, json.loads(body)) == (500, {"error": "the server failed"})
    assert headers["cache-control"] == "no-store"


def test_an_answer_that_cannot_be_written_is_not_confirmed(study: Path) -> None:
    with serving(study) as links:
        first = questions(links["anna"])["questions"][0]["id"]
        with files_end_at(10):
            assert send(links["anna"], first, 0, 4) == 503
        assert answer_lines(study) == []
        assert send(links["anna"], first, 0, 4) == 200
        assert [line["value"] for line in answer_lines(study)] == [4]


def test_raters_at_the_same_time_lose_nothing(study: Path) -> None:
    with serving(study, "8") as links:

        def rate(link: str) -> list[int]:
            return [send(link, q["id"], row, 1 + row % 5) for q in questions(link)["questions"] for row in range(6)]

        with ThreadPoolExecutor(8) as pool:
            assert set().union(*pool.map(rate, links.values())) == {200}
    assert Counter(line["rater"] for line in answer_lines(study)) == {f"rater-{i + 1}": 24 for i in range(8)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--raters", "anna,anna"], "--raters: 'anna,anna'"),
        (["--raters", "an na"], "--raters: 'an na'"),
        (["--raters", "0"], "--raters: '0'"),
        (["--raters", ""], "--raters: ''"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
    ],
)
def test_mistakes_are_named(study: Path, options: list[str], said: str) -> None:
    done = marble("rate", "serve", study, "--port", 0, *options)
    assert done.code == 2
    assert said in done.err


def test_a_folder_that_is_no_study_a_taken_port_and_a_second_server_are_refused(study: Path, tmp_path: Path) -> None:
    assert "is not a rating study" in marble("rate", "serve", tmp_path).err
    assert "is not a rating study" in marble("rate", "results", tmp_path).err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = marble("rate", "serve", study, "--port", taken.getsockname()[1])
        assert (done.code, "cannot listen on" in done.err) == (2, True)
    with serving(study):
        assert "is being served by another process" in marble("rate", "serve", study, "--port", 0).err


@pytest.mark.parametrize("package", ["starlette.applications", "uvicorn"])
def test_a_missing_package_is_named_with_its_extra(study: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("rating.server", "rewards.remote.http_server"):
        monkeypatch.delitem(sys.modules, f"marble_rl.{module}")
    done = marble("rate", "serve", study)
    assert done.code == 2
    assert f"marble rate serve needs {package}; run: pip install 'marble-rl[serve]'" in done.err
