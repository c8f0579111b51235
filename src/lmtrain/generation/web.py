"""`lmtrain chat --web`: a chat page for one or two models, served on localhost only.

The page holds the conversation and sends all of it with each question; the answer comes back as server-sent events. Two
models take turns token by token, because they share the processor and the random generator of the process.
"""

import asyncio
import contextlib
import copy
import dataclasses
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from typing import Any

import torch

from lmtrain import errors, terminal
from lmtrain.config.schema import Config
from lmtrain.errors import UserError, needing, reason
from lmtrain.generation.conversation import Talk
from lmtrain.models.flops import parameter_counts
from lmtrain.run_folder import trained

with needing("web", "chat.web=true"):
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

_LONGEST = 1_000_000  # maximum size of a conversation in bytes
_PATIENCE = 2  # seconds that answers in progress are given when the server ends
_ANSWERS = "answer"  # the name of threads that generate one
_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class _TooLong(Exception):
    """Raised for a request of more than _LONGEST bytes, before they are read."""


class _Stopped(Exception):
    """Raised inside the generation thread when the page has closed the connection."""


class _Turns:
    """A lock that threads get in the order in which they ask for it."""

    def __init__(self) -> None:
        self.asked = 0
        self.served = 0
        self.changed = threading.Condition()

    def __enter__(self) -> None:
        with self.changed:
            mine, self.asked = self.asked, self.asked + 1
            self.changed.wait_for(lambda: self.served == mine)

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self.served += 1
            self.changed.notify_all()

    def pass_on(self) -> None:
        """Lets the others have a turn; the random generators are then as they were."""
        on_host, on_devices = torch.get_rng_state(), torch.cuda.get_rng_state_all()
        self.__exit__()
        self.__enter__()
        torch.set_rng_state(on_host)
        torch.cuda.set_rng_state_all(on_devices)


def serve(config: Config) -> int:
    """Loads the models of run_dir and, if set, chat.against, and serves the page until Ctrl-C.

    Raises:
        UserError: a model can't be loaded, or the port is taken.
    """
    terminal.quiet_libraries()
    names = [config.run_dir, *([config.chat.against] if config.chat.against is not None else [])]
    asked = [trained.load_asked(dataclasses.replace(config, run_dir=name)) for name in names]
    talks = [Talk(model, tokenizer, config.generate, config.seed) for model, tokenizer in asked]
    try:
        listening = socket.create_server(("127.0.0.1", config.chat.port or 0))
    except OSError as error:
        raise UserError(f"chat.port={config.chat.port} can't be opened ({reason(error)}): choose another") from None
    port = listening.getsockname()[1]
    app = application([str(name) for name in names], talks, port)
    print(f"http://127.0.0.1:{port} (this machine only; Ctrl-C ends it)", flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_PATIENCE))
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        print("ended", flush=True)
    answers = [thread for thread in threading.enumerate() if thread.name == _ANSWERS]
    for thread in answers:
        thread.join(_PATIENCE)
    if any(thread.is_alive() for thread in answers):  # one computes a long prompt, say, which nothing interrupts
        sys.stdout.flush()
        os._exit(errors.FINISHED)
    return errors.FINISHED


def application(names: list[str], talks: list[Talk], port: int) -> Starlette:
    """Builds the web application: the page at /, descriptions of the models at /models, and answers at /answer.

    Args:
        port: the port it is served on; requests that name another host or come from another page are refused.
    """
    turns, one_at_a_time = _Turns(), [asyncio.Lock() for _ in talks]  # a model gives one answer at a time

    # Three addresses: the page, the models, and the answer to a conversation.
    async def page(request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        text = (files("lmtrain.generation") / "chat.html").read_text(encoding="utf-8").replace("NONCE", nonce)
        headers = {"Content-Security-Policy": _POLICY.format(nonce), "Referrer-Policy": "no-referrer"}
        return HTMLResponse(text, headers=headers)

    async def models(request: Request) -> Response:
        return JSONResponse([_about(name, talk) for name, talk in zip(names, talks, strict=True)])

    async def answer(request: Request) -> Response:
        try:
            talk, text, number = _asked(await _body(request), talks)
        except _TooLong:
            said = {"error": f"a conversation has at most {_LONGEST:,} bytes: begin a new one"}
            return JSONResponse(said, 413, headers={"Connection": "close"})
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            return JSONResponse({"error": f"no conversation: {error!r:.200}"}, 400)
        return StreamingResponse(_events(talk, text, one_at_a_time[number], turns), media_type="text/event-stream")

    # Pages of others must not reach a model on this machine.
    def guarded(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            if not is_from_here(dict(request.headers), port, request.method):
                return JSONResponse({"error": "this page is for a browser on this machine"}, 403)
            return await endpoint(request)

        return checked

    return Starlette(routes=[
        Route("/", guarded(page)), Route("/models", guarded(models)),
        Route("/answer", guarded(answer), methods=["POST"]),
    ])  # fmt: skip


def is_from_here(headers: dict[str, str], port: int, method: str) -> bool:
    """Returns whether a request comes from our own page and not from another page open in a browser on this machine.

    A foreign page whose domain name resolves to this machine (DNS rebinding) sends its own name in the Host header. A
    foreign page that posts to this server sends its own Origin header, or can't set the content type to JSON.
    """
    hosts = [f"{name}:{port}" for name in ("127.0.0.1", "localhost")]
    origin = headers.get("origin")
    if headers.get("host") not in hosts or (origin is not None and origin not in [f"http://{host}" for host in hosts]):
        return False
    return method != "POST" or headers.get("content-type", "").partition(";")[0].strip() == "application/json"


def _about(name: str, talk: Talk) -> dict[str, Any]:
    """Returns the description of a model that the page displays."""
    parameters, _, _ = parameter_counts(talk.model)
    return {
        "name": name,
        "about": f"{parameters / 1e6:,.1f} M parameters, {talk.model.config.model_type}",
        "chats": talk.template is not None,
        "temperature": talk.settings.temperature,
        "system": talk.settings.system_prompt or "",
    }


async def _body(request: Request) -> bytes:
    """Returns the body of a request; raises _TooLong without holding more than _LONGEST bytes of it."""
    if int(request.headers.get("content-length", 0)) > _LONGEST:
        raise _TooLong
    body = bytearray()
    async for part in request.stream():  # a length need not be declared
        body += part
        if len(body) > _LONGEST:
            raise _TooLong
    return bytes(body)


def _asked(body: bytes, talks: list[Talk]) -> tuple[Talk, str, int]:
    """Returns the conversation in a request as a separate Talk, its last question, and the number of the model."""
    asked = json.loads(body)
    number, turns = int(asked["model"]), asked["turns"]
    talk, retry = copy.copy(talks[number]), min(max(int(asked.get("retry", 0)), 0), 1_000_000)
    temperature = min(max(float(asked["temperature"]), 0.0), 10.0)
    system = asked.get("system") if talk.template is not None else None
    if not isinstance(system, str | None):
        raise TypeError("system is a text")
    talk.settings, talk.system = dataclasses.replace(talk.settings, temperature=temperature), system or None
    talk.seed += 1000 * retry
    for turn in turns:
        if turn["role"] not in ("user", "assistant") or not isinstance(turn["content"], str):
            raise ValueError("a turn has role user or assistant, and content, a text")
    talk.turns = [{"role": turn["role"], "content": turn["content"]} for turn in turns[:-1]]
    return talk, turns[-1]["content"], number


async def _events(talk: Talk, text: str, one_at_a_time: asyncio.Lock, turns: _Turns) -> AsyncIterator[str]:
    """Yields the events of an answer: {"text"} pieces, then {"end", "tokens", ...} or {"error"}.

    Generation runs in a thread and ends soon after the page has closed the connection. The server's end waits for no
    thread that can't be interrupted.
    """
    pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    stopped = threading.Event()
    over = asyncio.Event()

    def send(event: dict[str, Any]) -> None:
        if stopped.is_set():
            raise _Stopped
        if event != {"text": ""}:
            loop.call_soon_threadsafe(pieces.put_nowait, event)

    def generate() -> None:
        began, tokens = time.perf_counter(), -1  # the last call flushes the text and comes with no token

        def write(piece: str) -> None:
            nonlocal tokens
            tokens += 1
            send({"text": piece})
            turns.pass_on()

        with turns:
            talk.ask(text, write, lambda _: None)
        speed = round(tokens / (time.perf_counter() - began), 1)
        notes = {"cut_by": talk.cut_by, "left_out": talk.left_out}  # the number of turns that the model has not seen
        send({"end": True, "tokens": tokens, "tokens_per_s": speed, **notes})

    def answer() -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended, and the event loop with it
            try:
                generate()
            except _Stopped:
                pass
            except Exception as error:  # any error is shown on the page, and later questions still work
                said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                loop.call_soon_threadsafe(pieces.put_nowait, {"error": said})
            loop.call_soon_threadsafe(over.set)

    async with one_at_a_time:
        threading.Thread(target=answer, name=_ANSWERS, daemon=True).start()
        try:
            event: dict[str, Any] = {}
            while not event.keys() & {"end", "error"}:
                event = await pieces.get()
                yield f"data: {json.dumps(event)}\n\n"
        finally:
            stopped.set()
            await over.wait()
