"""What a run of jobs tells whoever looks on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bp_convert.values.outcome import Outcome
from bp_convert.values.recipe import Job


@dataclass(frozen=True)
class Task:
    """A job that has to run.

    Attributes:
        identity: hash of the job.
        full: hash of the trained full model that it starts from.
    """

    job: Job
    identity: str
    full: str


class Watch(Protocol):
    """Is told what becomes of each job."""

    def started(self, name: str) -> None:
        """Hear that a job runs."""

    def progressed(self, name: str, words: str, done: int, total: int) -> None:
        """Hear how far it is."""

    def ended(self, outcome: Outcome) -> None:
        """Hear what became of it."""

    def breathe(self) -> None:
        """Draw again; called several times a second."""


class Unwatched:
    """Nobody looks on."""

    def started(self, name: str) -> None:
        """Do nothing."""

    def progressed(self, name: str, words: str, done: int, total: int) -> None:
        """Do nothing."""

    def ended(self, outcome: Outcome) -> None:
        """Do nothing."""

    def breathe(self) -> None:
        """Do nothing."""
