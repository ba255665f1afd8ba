"""Bars in processes that are forked and killed."""

import os
import signal
import threading

from tqdm import tqdm
from waiting import PATIENCE

from eagle3nb.progress import progress


def test_a_fork_killed_while_it_draws_holds_up_no_other(capsys):
    """tqdm's own lock is one for all forks: killed inside it, the child would leave the parent waiting for ever."""
    with progress(2, "before", "rows"):
        pass
    child = os.fork()
    if not child:
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL

    def draw():
        with progress(2, "after", "rows") as bar:
            bar.advance(2)

    thread = threading.Thread(target=draw, daemon=True)  # not by an alarm, which is pytest-timeout's own
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the bar waits for a process that is dead"
    assert "after" in capsys.readouterr().out


def test_a_fork_of_a_process_that_draws_has_a_lock_of_its_own():
    held, over = threading.Event(), threading.Event()

    def draw():
        with tqdm.get_lock():
            held.set()
            over.wait()

    thread = threading.Thread(target=draw)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(PATIENCE))  # ends it, should it wait; a fork has no alarm of the process that it comes from
        with tqdm.get_lock():
            os._exit(0)
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
