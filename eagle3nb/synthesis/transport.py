"""How a server is reached: its address and key, the openai client that posts, the thread in which requests run."""

import asyncio
import os
import queue
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

from eagle3nb.errors import UserError
from eagle3nb.synthesis.faults import of_error, parsed

NEAR = ("127.0.0.1", "localhost", "::1", "0.0.0.0")  # asked past any proxy, and without a key where there is none
TRIES, TIMEOUT = 3, 30  # of a question about the server itself, and seconds for each


@dataclass(frozen=True)
class Clock:
    """What time and chance are to an endpoint; tests bring their own."""

    wall: Callable[[], float] = time.time  # what HTTP dates are compared with
    now: Callable[[], float] = time.monotonic
    sleep: Callable = asyncio.sleep
    within: Callable = asyncio.timeout  # seconds → an asynchronous context that raises TimeoutError after them
    draw: Callable[[float, float], float] = random.uniform


@dataclass(frozen=True)
class Address:
    """Where an API begins, and the environment variable that holds its key ("" for none).

    The key is read when something is asked and never kept beside the client that sends it. UserError for an address
    that is none, or that has a password in it.
    """

    url: str
    key_variable: str = ""

    def __post_init__(self):
        object.__setattr__(self, "url", self.url.strip().rstrip("/"))
        if any(mark in self.url for mark in "@?#"):
            raise UserError("endpoint has a user, a password or a query in it, which records would show; give the key "
                            "in the environment variable that key_variable names")
        try:
            parts = urllib.parse.urlsplit(self.url)
            good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
        except ValueError:
            good = False
        if not good:
            raise UserError(f"endpoint {self.url!r} is no address; give one such as http://127.0.0.1:30000/v1")
        if self.key_variable and not re.fullmatch(r"[A-Za-z_]\w*", self.key_variable):
            raise UserError("key_variable is no name of an environment variable; put the key into one, and its name "
                            "there")

    @property
    def near(self) -> bool:
        """On this machine."""
        return urllib.parse.urlsplit(self.url).hostname in NEAR

    def key(self) -> str:
        """The key; "" where none is named, or none is set for a server that is near. UserError where it is missing."""
        key = os.environ.get(self.key_variable, "").strip() if self.key_variable else ""
        if self.key_variable and not key and not self.near:
            raise UserError(f"the environment variable {self.key_variable} is not set, and {self.url} may want its "
                            'key; set it, or key_variable to "" for a server without')
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"the environment variable {self.key_variable} holds characters that no key has; set it "
                            "anew")
        return key

    def client(self, key: str):
        """openai's asynchronous client, without tries or time-outs of its own."""
        import openai  # 2.5 s: when something is asked, not with the package
        direct = {"http_client": openai.DefaultAsyncHttpxClient(trust_env=False)} if self.near else {}
        return openai.AsyncOpenAI(base_url=self.url, api_key=key or "none", max_retries=0, timeout=None, **direct)

    def get(self, path: str, wall: float) -> dict:
        """A JSON object that the server says about itself, at `path` or at a whole address. Raises Fault."""
        import openai
        key = self.key()
        direct = {"http_client": openai.DefaultHttpxClient(trust_env=False)} if self.near else {}
        with openai.OpenAI(base_url=self.url, api_key=key or "none", max_retries=TRIES - 1, timeout=TIMEOUT,
                           **direct) as client:
            try:
                text = client.get(path, cast_to=str)
            except openai.OpenAIError as error:
                raise of_error(error, wall, key) from None
        return parsed(text, wall, key)


async def post(client, path: str, body: dict, key: str, timeout_s: float, clock: Clock) -> dict:
    """The JSON object that answers, without the key. timeout_s: from the first byte sent to the last received. Raises
    Fault."""
    import openai
    try:
        async with clock.within(timeout_s):
            text = await client.post(path, body=body, cast_to=str)
    except (TimeoutError, openai.OpenAIError) as error:
        raise of_error(error, clock.wall(), key) from None  # the error's request holds the key
    return parsed(text, clock.wall(), key)


@contextmanager
def beside(client):
    """(start(coroutine) → its future, a queue of the futures that are done), in an event loop of its own thread.

    A Jupyter kernel's loop is busy with the cell that runs. What has not ended by the end of the block is cancelled,
    then the client is closed.
    """
    loop, arrived = asyncio.new_event_loop(), queue.SimpleQueue()
    thread = threading.Thread(target=loop.run_forever, name="asks", daemon=True)
    thread.start()

    def start(coroutine):
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        future.add_done_callback(arrived.put)
        return future

    try:
        yield start, arrived
    finally:
        asyncio.run_coroutine_threadsafe(end(client), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def end(client) -> None:
    """Cancel whatever else runs in this loop, and close the client's connections."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await client.close()
