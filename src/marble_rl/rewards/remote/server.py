"""`marble rewards serve`: the rewards of a config behind HTTP, on starlette and uvicorn.

    GET  /health           {"version", "protocol", "rewards": {name: traits}, "max_body_bytes", "max_batch"}
    GET  /metrics          {"rewards": {name: {"calls", "images", "failures", "retries", "seconds"}}}
    POST /applies/{name}   {"prompts": [...]}          -> {"applies": [true, ...]}
    POST /score/{name}     a batch, see wire.py        -> {"scores": [...]}

A request that cannot be answered gets an HTTP error with {"error": reason}; there are no made-up scores. The token is
checked before anything of the body is read. A model is called by one thread at a time. The socket listens after all
models are loaded, so a server that answers is ready.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from marble_rl import __version__
from marble_rl.errors import InputError, RewardFailed
from marble_rl.rewards.core.base import RewardBatch
from marble_rl.rewards.core.calls import CalledReward
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.rewards.remote.http_client import is_loopback, read_secret
from marble_rl.rewards.remote.http_server import address, bound_socket, read_body, serve_until_stopped
from marble_rl.rewards.remote.wire import (
    PROTOCOL,
    TOKEN_VARIABLE,
    Malformed,
    decode_batch,
    decode_prompts,
    encode_traits,
    json_limit,
)
from marble_rl.types import Prompt


@dataclass(frozen=True)
class Limits:
    """How large one request may be."""

    max_body_bytes: int = 256 << 20
    max_batch: int = 512


class ServedReward:
    """A loaded reward, called by one thread at a time, in the order of the requests."""

    def __init__(self, reward: CalledReward) -> None:
        self.called = reward
        self._turn = asyncio.Lock()

    async def applies_to(self, prompts: Sequence[Prompt]) -> list[bool]:
        """The reward's own answer; the prompts' lists of rewards are applied by the client."""
        async with self._turn:
            return await run_in_threadpool(lambda: [self.called.suits(prompt) for prompt in prompts])

    async def score(self, batch: RewardBatch) -> list[float | None]:
        async with self._turn:
            return await run_in_threadpool(self._score, batch)

    def _score(self, batch: RewardBatch) -> list[float | None]:
        for prompt in batch.prompts:
            if not self.called.suits(prompt):
                raise HTTPException(400, f"the reward does not apply to the prompt {prompt.text!r}")
        return self.called.score_unsigned(batch)


class TokenRequired:
    """Refuses every request without the token, whatever its path."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        else:
            refusal = JSONResponse(
                {"error": "the bearer token is missing or wrong"}, 401, headers={"WWW-Authenticate": "Bearer"}
            )
            await refusal(scope, receive, send)


class RewardsApp:
    """The four requests, and the answers to those that fail."""

    def __init__(self, scorer: Scorer, limits: Limits, notice: Callable[[str], None]) -> None:
        self._rewards = {name: ServedReward(scorer[name]) for name in scorer.names}
        self._limits = limits
        self._notice = notice

    def asgi(self, token: str | None) -> ASGIApp:
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/applies/{name}", self._applies, methods=["POST"]),
            Route("/score/{name}", self._score, methods=["POST"]),
        ]
        errors = (HTTPException, Malformed, ClientDisconnect, RewardFailed, InputError, Exception)
        app = Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, self._failed))
        return app if token is None else TokenRequired(app, token)

    async def _health(self, request: Request) -> Response:
        rewards = {name: encode_traits(served.called.traits) for name, served in self._rewards.items()}
        return JSONResponse({"version": __version__, "protocol": PROTOCOL, "rewards": rewards, **asdict(self._limits)})

    async def _metrics(self, request: Request) -> Response:
        return JSONResponse({"rewards": {name: asdict(served.called.counts) for name, served in self._rewards.items()}})

    async def _applies(self, request: Request) -> Response:
        served = self._served(request)
        limit = min(json_limit(self._limits.max_batch), self._limits.max_body_bytes)
        prompts = decode_prompts(await read_body(request, limit), self._limits.max_batch)
        return JSONResponse({"applies": await served.applies_to(prompts)})

    async def _score(self, request: Request) -> Response:
        served = self._served(request)
        body = await read_body(request, self._limits.max_body_bytes, " (--max-body-mb)")
        batch = decode_batch(body, self._limits.max_batch)
        return JSONResponse({"scores": await served.score(batch)})

    def _served(self, request: Request) -> ServedReward:
        name = request.path_params["name"]
        if name not in self._rewards:
            raise HTTPException(404, f"no reward {name[:100]!r} here; served are {', '.join(self._rewards)}")
        return self._rewards[name]

    async def _failed(self, request: Request, error: Exception) -> Response:
        where = f"{request.method} {request.scope['path'][:100]}"  # not request.url: a client's Host may break it
        if isinstance(error, HTTPException):
            reason = f"{where}: {error.detail}"
            return JSONResponse({"error": reason}, error.status_code, error.headers)
        if isinstance(error, Malformed):
            return JSONResponse({"error": str(error)}, 400)
        reason = str(error) or type(error).__name__
        self._notice(f"{where}: {reason}")
        return JSONResponse({"error": reason}, 500)


def required_token(host: str) -> str | None:
    """The token that clients must send. Only a server that other machines cannot reach may do without."""
    token = read_secret(TOKEN_VARIABLE, "--host")
    if not token and not is_loopback(host):
        raise InputError(
            f"--host: {host!r} can be reached from other machines, so clients must send a token; "
            f"set the environment variable {TOKEN_VARIABLE}, here and for the clients, or serve on 127.0.0.1"
        )
    return token or None


def serve(
    configs: Sequence[RewardConfig],
    *,
    host: str,
    port: int,
    limits: Limits,
    device: torch.device,
    notice: Callable[[str], None],
) -> None:
    """Serve until a signal, then finish the requests under way and return."""
    token = required_token(host)
    # Retries and timeouts are up to the clients.
    served = [config.model_copy(update={"retries": 0, "timeout": None}) for config in configs]
    scorer = Scorer(served, build_rewards(served))
    with bound_socket(host, port) as listener:
        for remark in scorer.load(device):
            notice(remark)
        app = RewardsApp(scorer, limits, notice).asgi(token)
        banner = f"serving {', '.join(scorer.names)} at {address(listener)} (Ctrl-C stops)"
        serve_until_stopped(app, listener, banner, notice)
