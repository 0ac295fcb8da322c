"""Jobs on a Ray cluster; results come back to the driver, which puts them into place."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bp_convert.batch.attempt import failure
from bp_convert.batch.folders import LOG, Results
from bp_convert.batch.identity import Task
from bp_convert.errors import RecipeError
from bp_convert.files.atomic import write_text
from bp_convert.values.outcome import Outcome
from bp_convert.values.progress import Onlooker, unheard

RETRIES = 3  # of a job whose worker or machine is lost
BREATH = 0.5  # seconds


class Cluster:
    """Runs jobs as Ray tasks.

    The cluster is the one that ``RAY_ADDRESS`` names, else one of this machine's own. Model and
    data files have to lie at the same paths on every machine, and bp-convert has to be installed
    there; results come back through Ray. A job takes a CPU, and a GPU where there are any.

    Args:
        results: the folder of results, on the driver.
        jobs: jobs at a time; on a cluster of this machine's own also its CPUs.

    Raises:
        RecipeError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, results: Results, jobs: int) -> None:
        try:
            import ray
        except ImportError:
            raise RecipeError(
                where="--executor ray",
                found="Ray is not installed",
                allowed="ray[default]",
                fix="pip install 'bp-convert[ray]', or leave --executor out",
            ) from None
        self.ray: Any = ray
        self.results = results
        self.jobs = jobs

    def run(self, tasks: Sequence[Task], watch: Onlooker, *, keep_going: bool) -> None:
        """Run all tasks; unless ``keep_going``, none starts after one has failed."""
        own = not self.ray.is_initialized()
        if own:
            self._connect()
        gpus = 1 if self.ray.cluster_resources().get("GPU", 0) >= 1 else 0
        remote = self.ray.remote(max_retries=RETRIES, num_cpus=1, num_gpus=gpus)(_on_a_worker)
        waiting = list(tasks)
        running: dict[Any, Task] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    task = waiting.pop(0)
                    running[remote.remote(task, str(self.results.folder.resolve()))] = task
                    watch.started(task.job.name)
                done, _ = self.ray.wait([*running], timeout=BREATH)
                for reference in done:
                    outcome = self._fetch(running.pop(reference), reference)
                    watch.ended(outcome)
                    if outcome.state == "failed" and not keep_going:
                        waiting.clear()
        finally:
            for reference in running:
                with contextlib.suppress(Exception):  # the cluster may be gone already
                    self.ray.cancel(reference, force=True)
            if own:
                self.ray.shutdown()

    def _connect(self) -> None:
        address = os.environ.get("RAY_ADDRESS")
        local = {"num_cpus": self.jobs, "include_dashboard": False}
        try:
            self.ray.init(
                address=address,
                log_to_driver=False,
                logging_level="ERROR",
                **({} if address else local),
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as problem:
            raise RecipeError(
                where="--executor ray",
                found=f"no cluster at {address or 'this machine'}: {problem}",
                allowed="a running Ray cluster, or none named for one of this machine's own",
                fix="correct RAY_ADDRESS, or unset it",
            ) from None

    def _fetch(self, task: Task, reference: Any) -> Outcome:
        """Take a job's result and put it into place; a job that is lost for good has failed."""
        with self.results.drafted(task.job.name) as draft:
            try:
                text, packed = self.ray.get(reference)
            except self.ray.exceptions.RayError as problem:
                first = str(problem).strip().splitlines()[0]
                outcome = failure(task.job, task.identity, f"lost on the cluster: {first}")
                write_text(draft / LOG, f"{problem}\n")
            else:
                outcome = Outcome.model_validate_json(text)
                with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                    archive.extractall(draft, filter="data")
            self.results.land(draft, outcome)
        return outcome


def _on_a_worker(task: Task, folder: str) -> tuple[str, bytes]:
    """Run a job, wherever this is; return its outcome and its folder's contents, packed."""
    from bp_convert.batch.attempt import run_in

    shared = Path(folder)
    if not shared.is_dir():  # another machine, that does not share the driver's disk
        shared = Path(tempfile.gettempdir()) / f"bp-convert-{os.getuid()}" / shared.name
        shared.mkdir(parents=True, exist_ok=True)
    results = Results(shared)
    with results.drafted(task.job.name) as draft:
        outcome = run_in(draft, task, results, unheard)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for one in sorted(draft.iterdir()):
                archive.add(one, arcname=one.name)
        return outcome.model_dump_json(), packed.getvalue()
