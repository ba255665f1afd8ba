"""Time for the endpoints' tests: sleeping takes none, and a request is out of time when its server says so.

Nothing depends on how fast this machine is: a time-out comes exactly for the requests that the server of the tests
holds, however long the others take.
"""

import asyncio

from eagle3nb.synthesis.transport import Clock

NEVER = 10**6  # seconds


class Patience:
    """`clock` for an endpoint; `slept`: what it was told to sleep. With `watch(endpoint)`, and `out_of_time` as the
    server's on_slow, a held request's time is over at once."""

    def __init__(self, draw=lambda low, high: high, wall: float = 0.0):
        self.passed, self.slept, self.tasks, self.limits = 0.0, [], {}, {}
        self.clock = Clock(wall=lambda: wall, now=lambda: self.passed, sleep=self.sleep, within=self.within, draw=draw)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.passed += seconds
        await asyncio.sleep(0)

    def within(self, seconds: float):
        task = asyncio.current_task()
        self.limits[task] = task.get_loop(), asyncio.timeout(NEVER)
        return self.limits[task][1]

    def watch(self, endpoint):
        """The endpoint, with each ask's task known by the ask's seed: `body` is the first that its task calls."""
        body = endpoint.body

        def known(ask, sampling):
            self.tasks[ask.seed] = asyncio.current_task()
            return body(ask, sampling)

        endpoint.body = known
        return endpoint

    def out_of_time(self, seed: int) -> None:
        """Called by the server, in a thread of its own."""
        loop, limit = self.limits[self.tasks[seed]]
        loop.call_soon_threadsafe(limit.reschedule, 0)
