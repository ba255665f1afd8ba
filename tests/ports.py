"""Ports of 127.0.0.1 for those who cannot be told to take any."""

import os
import random
import socket

FIRST, LAST = 20_000, 32_000  # below those that the system gives away by itself, so that nobody is given it meanwhile


def free_port() -> int:
    """One that is free now, and that stays so until it is used: other test processes draw other ones."""
    draw = random.Random(os.urandom(8))
    while True:
        port = draw.randint(FIRST, LAST)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
