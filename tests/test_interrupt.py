"""Waits that end at a signal, whenever it comes."""

import os
import queue
import signal
import threading

import pytest

from eagle3nb import interrupt

ROUNDS = 100  # of plain get() on one core, 10 in 100 were seen to sleep on


def test_a_signal_in_the_moment_before_the_wait_ends_it(monkeypatch):
    """Sent by a thread that runs as soon as the waiting one lets go of the interpreter: on the same core, so that the
    one that waits is not yet asleep."""
    monkeypatch.setattr(interrupt, "LOOK", 0.05)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in range(ROUNDS):
            begin = threading.Event()

            def send(begin=begin):
                begin.wait()
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

            thread = threading.Thread(target=send)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                begin.set()
                interrupt.next_of(queue.SimpleQueue())
            thread.join()
    finally:
        signal.signal(signal.SIGINT, usual)
        os.sched_setaffinity(0, cores)


def test_what_comes_is_handed_on(monkeypatch):
    monkeypatch.setattr(interrupt, "LOOK", 0.01)
    waiting = queue.Queue()
    later = threading.Timer(0.1, waiting.put, [None])  # after several looks
    later.start()
    assert interrupt.next_of(waiting) is None
    later.join()
