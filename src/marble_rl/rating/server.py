"""`marble rate serve`: the page of each rater, its pictures, and its answers. Everything lies under a rater's link.

    GET  /r/TOKEN/                page.html, with page.css and page.js
    GET  /r/TOKEN/questions       the questions in the rater's order, and the answers so far
    GET  /r/TOKEN/pictures/ID     a picture
    POST /r/TOKEN/answers         {"question", "row", "choice"} -> 200 once it is on the disk

Any other request is refused with 403, whatever it asks for.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marble_rl import charts
from marble_rl.errors import StorageFailed
from marble_rl.rating.answers import AnswersFile
from marble_rl.rating.blinding import Question, Sheet
from marble_rl.rating.raters import Raters, invite, rater_of
from marble_rl.rating.study import VIDEO, Study, StudyFolder
from marble_rl.rewards.remote.http_client import is_loopback
from marble_rl.rewards.remote.http_server import address, bound_socket, read_body, serve_until_stopped
from marble_rl.section import first_mistake

PAGE = Path(__file__).with_name("page")
PALETTE = Path(charts.__file__).with_name("palette.css")
LARGEST_BODY = 4096
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; img-src 'self' data:; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "X-Robots-Tag": "noindex",
}
"""Of every response. A picture has no date and no tag: files of one model are of one time."""


class LinkRequired:
    """Refuses every request that does not begin with a rater's link, and adds the headers to every response."""

    def __init__(self, app: ASGIApp, tokens: Mapping[str, str]) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        _, _, rest = scope["path"].partition("/r/")
        token, slash, path = rest.partition("/")
        rater = rater_of(token, self._tokens) if scope["path"].startswith("/r/") else None
        app: ASGIApp = self._app
        if rater is None:
            app = JSONResponse({"error": "this link is not valid; ask for a new one"}, 403)
        elif not slash:
            app = RedirectResponse(f"/r/{token}/")  # what the page asks for is relative to its folder
        await app({**scope, "path": f"/{path}", "rater": rater}, receive, send_with_headers)


class Given(BaseModel):
    """An answer as a page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    question: str
    row: int
    choice: int


class RatingApp:
    """The requests of raters."""

    def __init__(
        self, study: Study, folder: StudyFolder, raters: Raters, answers: AnswersFile, notice: Callable[[str], None]
    ) -> None:
        self._study = study
        self._folder = folder
        self._tokens = raters.tokens
        self._answers = answers
        self._notice = notice
        self._sheets = {name: Sheet(study, name, raters.secret) for name in raters.tokens}
        self._left = {
            name: sum(self._choices(sheet, question).count(None) for question in sheet.questions.values())
            for name, sheet in self._sheets.items()
        }
        """Rows that a rater has not answered yet"""
        style = PALETTE.read_text(encoding="utf-8") + (PAGE / "page.css").read_text(encoding="utf-8")
        self._files = {
            "/": ("text/html", (PAGE / "page.html").read_bytes()),
            "/page.js": ("text/javascript", (PAGE / "page.js").read_bytes()),
            "/page.css": ("text/css", style.encode()),
        }

    def asgi(self) -> ASGIApp:
        routes = [
            *(Route(path, self._file, methods=["GET"]) for path in self._files),
            Route("/questions", self._questions, methods=["GET"]),
            Route("/pictures/{id}", self._picture, methods=["GET"]),
            Route("/answers", self._answer, methods=["POST"]),
        ]
        errors = (HTTPException, ClientDisconnect, StorageFailed, Exception)
        app = Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, self._failed))
        return LinkRequired(app, self._tokens)

    async def _file(self, request: Request) -> Response:
        kind, content = self._files[request.scope["path"]]
        return Response(content, media_type=kind)

    async def _questions(self, request: Request) -> Response:
        sheet = self._sheets[request.scope["rater"]]
        questions = [
            {
                "id": question.id,
                "prompt": self._study.prompts[question.prompt],
                "pictures": question.pictures,
                "rows": self._choices(sheet, question),
            }
            for question in sheet.questions.values()
        ]
        first = self._folder.picture(self._study.names[0], 0, 0)
        media = "video" if first is not None and first.suffix == VIDEO else "picture"
        asked = {"ask": self._study.ask, "media": media, "rater": request.scope["rater"], "questions": questions}
        return JSONResponse(asked)

    def _choices(self, sheet: Sheet, question: Question) -> list[int | None]:
        """The rater's answers so far, by row."""
        values = [self._answers.value(sheet.key(question, row)) for row in range(sheet.rows)]
        return [None if value is None else sheet.choice(question, value) for value in values]

    async def _picture(self, request: Request) -> Response:
        place = self._sheets[request.scope["rater"]].pictures.get(request.path_params["id"])
        file = None if place is None else self._folder.picture(*place)
        if file is None:
            raise HTTPException(404, "there is no such picture")
        content = await run_in_threadpool(file.read_bytes)
        return Response(content, media_type=f"image/{file.suffix[1:]}")

    async def _answer(self, request: Request) -> Response:
        sheet = self._sheets[request.scope["rater"]]
        try:
            given = Given.model_validate_json(await read_body(request, LARGEST_BODY))
        except ValidationError as error:
            raise HTTPException(400, first_mistake(error)) from None
        question = sheet.questions.get(given.question)
        if question is None or given.row not in range(sheet.rows) or given.choice not in range(1, sheet.choices + 1):
            raise HTTPException(400, "there is no such question, row or choice")
        key = sheet.key(question, given.row)
        is_new = self._answers.value(key) is None
        await run_in_threadpool(self._answers.add, key, sheet.value(question, given.choice))
        self._left[key.rater] -= is_new
        if is_new and self._left[key.rater] == 0:
            self._notice(f"{key.rater} has answered everything")
        return JSONResponse({"saved": True})

    async def _failed(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return JSONResponse({"error": error.detail}, error.status_code, error.headers)
        if isinstance(error, ClientDisconnect):
            return Response(status_code=400)  # nobody reads it
        self._notice(f"{request.method} {request.scope['path']}: {error}")
        if isinstance(error, StorageFailed):
            return JSONResponse({"error": "the server cannot write it to its disk"}, 503)
        return JSONResponse({"error": "the server failed"}, 500)  # the reason may name a picture's file, so its model


def serve(folder: StudyFolder, raters: str | None, *, host: str, port: int, notice: Callable[[str], None]) -> None:
    """Serve until a signal. ``raters``: see `invite`."""
    study = folder.read()
    folder.check_complete(study)
    with bound_socket(host, port) as listener, AnswersFile.opened(folder.answers) as answers:
        invited = invite(folder.raters, raters)
        app = RatingApp(study, folder, invited, answers, notice).asgi()
        url = _reachable(host, address(listener))
        width = max(map(len, invited.tokens))
        links = [f"{name:{width}}  {url}/r/{token}/" for name, token in invited.tokens.items()]
        if not is_loopback(host):
            links.append(
                "Other machines can reach this server. Whoever has a link can rate in that name, and answers travel "
                "unencrypted: serve in a network that you trust, and stop it when all have rated."
            )
        links.append(f"Answers: {folder.answers}. Ctrl-C stops; the same command continues, with the same links.")
        serve_until_stopped(app, listener, "\n".join(links), notice)


def _reachable(host: str, url: str) -> str:
    """The address that goes into links: 0.0.0.0 and :: stand for all addresses of this machine, and a phone needs one
    of them. That is the one from which another network would be reached; connecting a UDP socket sends nothing."""
    if host not in ("0.0.0.0", "::"):
        return url
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((elsewhere, 9))
            own = str(probe.getsockname()[0])
        except OSError:
            own = socket.gethostname()
    port = url.rpartition(":")[2]
    return f"http://[{own}]:{port}" if ":" in own else f"http://{own}:{port}"
