"""What is said when the hub does not give a model: the real libraries against a small server in the hub's place."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPConfig

from marble_rl import hub
from marble_rl.errors import InputError
from marble_rl.memory.empty_model import config_folder
from marble_rl.models import load_model
from marble_rl.rewards.builtin.clip import ClipScore, Hpsv2
from marble_rl.rewards.builtin.embedder import read_model
from marble_rl.rewards.builtin.imagereward import ImageReward
from marble_rl.rewards.builtin.photo_detector import load_finder

CPU = torch.device("cpu")
ANSWERS = {
    "gated": (403, "GatedRepo"),
    "missing": (404, "RepoNotFound"),
    "empty": (404, "EntryNotFound"),
    "forbidden": (401, ""),
}
"""The hub's status and X-Error-Code for repositories of these owners."""
LOADERS: dict[str, Callable[[str], Any]] = {
    "clip": lambda source: ClipScore(model=source).load(CPU),
    "hpsv2": lambda source: Hpsv2(model=source).load(CPU),
    "imagereward": lambda source: ImageReward(model=source).load(CPU),
    "detector": lambda source: load_finder(source, CPU),
    "pipeline": lambda source: load_model(source, CPU),
    "file": lambda source: hub.download("model", source, "weights.pt"),
}


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        owner = next((part for part in self.path.split("/") if part in ANSWERS), "missing")
        status, code = ANSWERS[owner]
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


def use_hub(address: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT does, which is read when the library is imported."""
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(f"{constants}.ENDPOINT", address)
    monkeypatch.setattr(
        f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(cache))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


@pytest.fixture
def online(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(server, tmp_path, monkeypatch)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # libraries pause before they ask again


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("kind", LOADERS)
def test_a_gated_model_names_its_licence_and_the_token(kind: str) -> None:
    said = (
        r"^model(\.path)?: gated/x is gated\. Accept its licence at https://huggingface\.co/gated/x, "
        r"then give your token with `hf auth login` or HF_TOKEN"
    )
    with pytest.raises(InputError, match=said):
        LOADERS[kind]("gated/x")


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("kind", LOADERS)
def test_a_model_that_is_not_on_the_hub(kind: str) -> None:
    said = r"^model(\.path)?: the hub has no 'missing/x', or it is private\. Check the id .*HF_TOKEN"
    with pytest.raises(InputError, match=said):
        LOADERS[kind]("missing/x")


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("kind", LOADERS)
def test_a_repository_of_something_else(kind: str) -> None:
    with pytest.raises(InputError, match=r"^model(\.path)?: https://huggingface\.co/empty/x does not hold .+"):
        LOADERS[kind]("empty/x")


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("kind", LOADERS)
def test_a_token_that_the_hub_refuses(kind: str) -> None:
    with pytest.raises(InputError, match=r"^model(\.path)?: the hub refused .*/forbidden/x \(.*401.*renew your token"):
        LOADERS[kind]("forbidden/x")


@pytest.mark.parametrize("kind", LOADERS)
def test_offline_without_a_copy(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    said = (
        r"^model(\.path)?: .+ of 'some/model' is neither here nor in the hub's cache, and HF_HUB_OFFLINE is set\. "
        r"Download https://huggingface\.co/some/model"
    )
    with pytest.raises(InputError, match=said):
        LOADERS[kind]("some/model")


@pytest.mark.parametrize("kind", ["clip", "file"])
def test_no_network(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at that port. The hub's library tries five times; the pauses between are left out here."""
    use_hub("http://127.0.0.1:9", tmp_path, monkeypatch)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    said = r"^model: .+ of 'some/model' is neither here .*, and the hub cannot be reached \(.*[Cc]onnection refused"
    with pytest.raises(InputError, match=said):
        LOADERS[kind]("some/model")


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "silent"])
def test_an_estimate_does_not_wait_for_a_network(silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks once, and takes the copy in the cache if there is one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        use_hub(f"http://127.0.0.1:{server.getsockname()[1]}", tmp_path, monkeypatch)
        if not silent:
            server.close()
        monkeypatch.setattr(hub, "REACHABLE_TIMEOUT", 0.2)
        monkeypatch.setattr("time.sleep", lambda _: pytest.fail("a pause before it is tried again"))
        why = "timed out" if silent else "[Cc]onnection refused"
        with pytest.raises(InputError, match=rf"'some/model' is neither here .*, and the hub cannot be reached.*{why}"):
            config_folder("some/model")
        copy = tmp_path / "models--some--model" / "snapshots" / "1234"
        copy.mkdir(parents=True)
        (copy.parents[1] / "refs").mkdir()
        (copy.parents[1] / "refs" / "main").write_text("1234")
        assert config_folder("some/model") == copy


@pytest.mark.parametrize("kind", ["clip", "hpsv2", "imagereward", "detector", "pipeline"])
@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/model", "~/nowhere/model", "a/b/c"])
def test_a_folder_that_is_not_there(kind: str, path: str) -> None:
    with pytest.raises(InputError, match=rf"^model(\.path)?: no such folder.*: {path}"):
        LOADERS[kind](path)


@pytest.mark.parametrize("kind", ["clip", "hpsv2", "detector"])
def test_a_folder_of_something_else(kind: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(InputError, match=rf"^model: {tmp_path} does not hold a .+ in transformers' format \(.+\)"):
        LOADERS[kind](str(tmp_path))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    CLIPConfig().save_pretrained(tmp_path)
    save_file({"x": torch.zeros(9)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-20])
    with pytest.raises(InputError, match=rf"^model: {tmp_path} does not hold a CLIP model .*\(.+\)"):
        read_model(str(tmp_path), "model")


def test_what_is_already_explained_passes() -> None:
    with pytest.raises(InputError, match=r"^the first$"), hub.explained("model", "some/model", "a model"):
        raise InputError("the first")


@pytest.mark.parametrize(
    ("source", "local"),
    [("a/b", False), ("name", False), ("/a/b", True), ("./a", True), ("~/a", True), ("a/b/c", True), ("..", True)],
)
def test_what_can_only_be_a_path(source: str, local: bool) -> None:
    assert hub.looks_local(source) is local
