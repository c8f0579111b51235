"""Calls code of the user's, a tool, an environment or a reward, so that it neither ends the run nor runs for ever."""

import asyncio
import contextlib
import inspect
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from typing import Any

from lmtrain.data.chat.time_limits import TookTooLong, time_limit
from lmtrain.rewards.own_process import ToolFailed, described


class Escaped(ToolFailed):
    """Raised, with the text of a ToolFailed, for what is no Exception and would end the run, as SystemExit does."""


def run_user_code(function: Callable[[], Any], seconds: float | None) -> Any:
    """Returns what function() returns; a coroutine is awaited, in an event loop that all calls share.

    Args:
        seconds: time limit, with the reservations of `time_limit`; None: there is none.

    Raises:
        TookTooLong: it took longer.
        Exception: what the function raised.
        Escaped: it raised something else, such as SystemExit, or a KeyboardInterrupt without a Ctrl-C.
    """
    with time_limit(seconds), _interrupts() as pressed:
        try:
            value = function()
            return _awaited(value, seconds) if inspect.isawaitable(value) else value
        except (Exception, TookTooLong):
            raise
        except BaseException as error:
            if pressed:
                raise
            raise Escaped(described(error)) from None


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yields a list that a Ctrl-C is added to, which is how it differs from a KeyboardInterrupt that code raises."""
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def note(number: int, frame: Any) -> None:
        pressed.append(number)
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process; it runs in a thread, as a notebook's main thread has one of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coroutines", daemon=True).start()
    return loop


def _awaited(value: Awaitable[Any], seconds: float | None) -> Any:
    ended = threading.Event()

    async def guarded() -> Any:
        try:
            return await value
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            raise Escaped(described(error)) from None
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(guarded(), _loop(os.getpid()))
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # it is the coroutine's own
            raise
        raise TookTooLong from None
    finally:
        if not future.done():
            future.cancel()
            if not ended.wait(1.0):  # it doesn't let go of the loop: others get a new one
                _loop.cache_clear()
