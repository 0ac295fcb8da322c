"""Work on several layers at once, each on its share of torch's threads.

A decomposition of a layer's size gains little from a second thread, two of them beside each other
nearly twice the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from bp_convert.tuning.clock import threads

MOST = 8  # jobs at once: each holds decompositions of a layer
Job = Callable[[], object]


def at_once(groups: Sequence[Sequence[Job]], done: Callable[[int], None] = lambda _: None) -> None:
    """Run groups of jobs; those of a group wait for its first.

    Args:
        done: called with the number of jobs that have ended.

    Raises:
        Exception: of a job that fails; what has not begun then is left.
    """
    count = torch.get_num_threads()
    workers = min(count, MOST)
    # Threads that start now take over how many torch runs on within each.
    with threads(count // workers), ThreadPoolExecutor(workers) as pool:
        waiting: dict[Future[object], Sequence[Job]] = {
            pool.submit(_without_gradients, first): others for first, *others in groups
        }
        ended = 0
        try:
            while waiting:
                now, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in now:
                    future.result()
                    ended += 1
                    for job in waiting.pop(future):
                        waiting[pool.submit(_without_gradients, job)] = ()
                done(ended)
        finally:
            pool.shutdown(cancel_futures=True)


def _without_gradients(job: Job) -> object:
    with torch.no_grad():  # which each thread turns off for itself
        return job()
