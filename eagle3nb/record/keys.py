"""What keys look like, and parameters that hold one: refused before anything is written, since every record of a stage
shows its parameters. What is told of a key is its kind, never itself.
"""

import os
import re

from eagle3nb.errors import UserError

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL", re.IGNORECASE)  # names of environment variables
# How keys begin, behind no letter or digit, and how they go on. An expression begins with plain text: that is fast.
KEYS = {"sk-": r"[\w-]{16,}", "hf_": r"[A-Za-z0-9]{16,}", "glpat-": r"[\w-]{16,}", "github_pat_": r"\w{16,}",
        **{f"gh{kind}_": r"[A-Za-z0-9]{16,}" for kind in "pousr"}, "AKIA": r"[A-Z0-9]{16}\b", "ASIA": r"[A-Z0-9]{16}\b",
        "AIza": r"[\w-]{30,}", "xox": r"[abprs]-[A-Za-z0-9-]{10,}", "npm_": r"[A-Za-z0-9]{30,}", "pypi-": r"\w{30,}",
        "gsk_": r"[A-Za-z0-9]{20,}", "nvapi-": r"[\w-]{20,}", "xai-": r"[A-Za-z0-9]{20,}", "r8_": r"[A-Za-z0-9]{20,}",
        "sk_live_": r"[A-Za-z0-9]{16,}", "sk_test_": r"[A-Za-z0-9]{16,}",
        **{f"{word} ": r"\s*[\w.~+/-]{16,}" for word in ("Bearer", "bearer", "BEARER", "Basic")},
        "eyJ": r"[\w-]{8,}\.eyJ[\w-]{8,}\."}
OTHERS = {"a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
          "a password in an address": r"://[^\s/:@\"'<>]+:[^\s/@\"'<>]+@",
          "a key in an address": r"://[^\s\"'<>]*[?&#](?i:[\w-]*(?:key|token|secret|passw(?:or)?d))=[^\s&\"'<>…]{8,}"}
SHAPES = tuple((what, re.compile(shape)) for what, shape in (
    *((f"a key ({begin.strip()} …)", rf"{begin}(?<![A-Za-z0-9]{begin}){rest}") for begin, rest in KEYS.items()),
    *OTHERS.items()))
RANDOM = re.compile(r"(?<![A-Za-z0-9])(?=[A-Za-z]*\d)[A-Za-z0-9]{12,}")  # in a key, and in hardly a name or a path
SHORTEST = 8  # characters of a secret that are looked for: shorter ones stand in ordinary text


def secrets(named=()) -> dict[str, str]:
    """{environment variable: its value} of those that are called like secrets, and those named."""
    return {name: value for name, value in sorted(os.environ.items()) if SECRET.search(name) or name in named}


def refuse_keys(values: dict, origin: str = "") -> None:
    """UserError where a parameter's value, or a text in it, is what a key looks like, or the value of an environment
    variable that holds one. origin: where the values come from, for the message."""
    known = [value.strip() for value in secrets({str(values.get("key_variable"))}).values() if RANDOM.search(value)]
    for name, value in values.items():
        for text in texts_of(value):
            what = next((what for what, shape in SHAPES if (found := shape.search(text))
                         and (what in OTHERS or RANDOM.search(found[0]))), "")
            what = what or ("the value of an environment variable" if any(secret in text for secret in known) else "")
            if what:
                raise UserError(f"{origin + ': ' if origin else ''}parameter {name} holds {what}, which every record "
                                "would show; set it as an environment variable, and give that one's name as "
                                "key_variable")


def texts_of(value):
    """Every text in a value, keys of objects too."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from texts_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_of(inner)
    elif isinstance(value, str):
        yield value
