"""Reading ahead: one step, in order, by another thread; errors come where the step is taken."""

import threading

import pytest
from waiting import PATIENCE

from eagle3nb.drafter.ahead import Ahead


def test_one_step_ahead_and_no_more():
    made, begun, may = [], [threading.Event() for _ in range(4)], [threading.Event() for _ in range(4)]

    def make(step):
        begun[step].set()
        assert may[step].wait(PATIENCE)
        made.append((step, threading.current_thread() is threading.main_thread()))
        return [step]

    may[0].set()
    with Ahead(make, 4) as ahead:
        assert ahead.take(0) == [0]
        assert begun[1].wait(PATIENCE)             # while step 0 would compute
        may[1].set()
        assert ahead.take(1) == [1] and begun[2].wait(PATIENCE) and not begun[3].is_set()
        may[2].set()
        may[3].set()
        assert [ahead.take(step) for step in (2, 3)] == [[2], [3]] and not ahead.coming
    assert made == [(0, True), (1, False), (2, False), (3, False)] and ahead.waited > 0


def test_an_error_comes_with_its_step():
    def make(step):
        if step == 1:
            raise ValueError("row 7")
        return [step]

    with Ahead(make, 5) as ahead:
        assert ahead.take(0) == [0]
        with pytest.raises(ValueError, match="row 7"):
            ahead.take(1)


def test_in_order_and_by_the_asker_where_states_stream():
    made = []
    with Ahead(lambda step: made.append((step, threading.current_thread())) or [step], 3, reads=False) as ahead:
        assert ahead.take(1) == [1] and not ahead.coming and made == [(1, threading.main_thread())]
