"""Why a request gave no answer: a short reason, whether another try may, and whether it may have been billed."""

import email.utils
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

AGAIN = (408, 409, 429)  # and whatever is 500 or more
FATAL = (401, 402, 403, 404)  # key, credit, leave, address or model: the next request would get the same
WORDS = 200  # characters of a server's own words that are kept
SHORTEST_KEY = 8  # characters; what is shorter ("EMPTY", "none") protects nothing and stands in ordinary text
TOO_LONG = re.compile(
    r"context.{0,4}(length|window|size|limit)|maximum (context|model|sequence|input)|max_(model|seq|input)\w*len"
    r"|(input|prompt|request|messages?)\b.{0,60}\b(too long|too large|longer than|exceeds?)|string_too_long", re.I)


@dataclass(eq=False)
class Fault(Exception):  # noqa: N818 (no error to the user: it becomes an answer that says why)
    """`again`: another try may succeed. `fatal`: no other ask would either. `alone`: it is this prompt's, another's may
    well be answered. `refused`: the server's keeper said no. `billed`: the server may have worked for it. `after`:
    seconds that the server wants to be left alone."""

    reason: str
    detail: str = ""
    again: bool = False
    fatal: bool = False
    alone: bool = False
    refused: bool = False
    billed: bool = False
    after: float | None = None

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


def of_status(status: int, text: str, headers: Mapping[str, str], now: float, key: str = "") -> Fault:
    """The fault of an HTTP status that is none of the 2xx, its body and its headers; `now` in seconds since 1970."""
    detail, again = words(text, key), status in AGAIN or status >= 500
    after = retry_after(headers, now) if again else None
    if status == 429:
        spent = "insufficient_quota" in text  # OpenAI's word for an account without credit, which waiting does not mend
        return Fault("no credit" if spent else "rate limited", detail, again=not spent, fatal=spent, after=after)
    if status == 403 and re.search("moderation|flagged|content.?policy", text, re.I):
        return Fault("moderation", detail, alone=True, refused=True)  # OpenRouter's, of one prompt
    if status in (400, 413, 422) and TOO_LONG.search(text):
        return Fault("longer than the context", detail, alone=True)
    return Fault("no credit" if status == 402 else f"http {status}", detail, again=again, fatal=status in FATAL,
                 after=after)


def of_error(error: Exception, now: float, key: str = "") -> Fault:
    """The fault of an exception of the openai client, or of asyncio's time-out. Any other exception is raised again."""
    import openai  # 2.5 s: when one was asked, not with the package

    if isinstance(error, TimeoutError | openai.APITimeoutError):
        return Fault("time-out", again=True, billed=True)
    if isinstance(error, openai.APIStatusError):
        return of_status(error.status_code, error.response.text, error.response.headers, now, key)
    if isinstance(error, openai.APIConnectionError):
        cause = error.__cause__ or error
        before = type(cause).__name__ in ("ConnectError", "ConnectTimeout")  # of httpx, and of httpx2
        return Fault("no connection" if before else "dropped", words(str(cause), key), again=True, billed=not before)
    raise error


def parsed(text: str, now: float, key: str = "") -> dict:
    """The JSON object of a 2xx body, without the key. Raises Fault where it is none, or holds an error for an answer.

    OpenRouter's errors after a model has begun come with status 200; their `code` is the status they would have had.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Fault("not json", words(text, key), again=True, billed=True) from None
    if not isinstance(value, dict):
        raise Fault("not json", words(text, key), again=True, billed=True)
    error = value.get("error")
    if error:
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and 400 <= code < 600:
            fault = of_status(code, text, {}, now, key)
            fault.billed = True  # the model had begun
            raise fault
        raise Fault("error in the answer", words(text, key), again=True, billed=True)
    return redacted(value, key)


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds from Retry-After, a number or an HTTP date (RFC 9110, 10.2.3); None where it says nothing of use."""
    value = (headers.get("retry-after") or "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - now, 0.0)
    except (ValueError, TypeError, OverflowError):
        return None


def words(text: str, key: str = "") -> str:
    """A server's own words on an error in one short line, without the key: the message in the usual JSON forms, else
    the whole text."""
    try:
        value = json.loads(text)
        for name in ("error", "message", "detail"):
            value = value.get(name, value) if isinstance(value, dict) else value
        text = value if isinstance(value, str) else text
    except (ValueError, RecursionError):
        pass
    return " ".join(readable(redacted(text, key)).split())[:WORDS]  # cut last: half a key would not be found


def readable(text: str) -> str:
    """The text as a file can hold it: halves of a surrogate pair, which JSON can spell and UTF-8 cannot, become "?"."""
    return text.encode("utf-8", "replace").decode()


def redacted(value, key: str):
    """`value` (text, or whatever JSON holds) without the key wherever a server echoes it."""
    if len(key) < SHORTEST_KEY:
        return value
    if isinstance(value, str):
        return value.replace(key, "[key]")
    if isinstance(value, dict):
        return {redacted(name, key): redacted(entry, key) for name, entry in value.items()}
    return [redacted(entry, key) for entry in value] if isinstance(value, list) else value
