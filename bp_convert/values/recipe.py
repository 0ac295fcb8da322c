"""A recipe: models, how each is converted and trained, and what is compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from bp_convert.values.architecture import Architecture
from bp_convert.values.base import Value, one_or_many
from bp_convert.values.literals import Init, Method
from bp_convert.values.settings import LayerRule, Rank, Settings
from bp_convert.values.target import Target
from bp_convert.values.tensors import TensorSpec
from bp_convert.values.training import Training

Counterpart = Literal["full", "low-rank", "pruned"]
Weights = Literal["pt", "safetensors", "folder", "none"]
ReportForm = Literal["html", "md", "json"]
EXAMPLES = 512  # that are calibrated on
BATCHES = (1, 32)  # at which latency is measured where none are named
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")
TRAININGS = ("train", "finetune")


class Figures(Value):
    """What a publication prints for one model, to stand beside what is measured.

    Attributes:
        metric: the metric that ``score`` is of.
        score: as printed; accuracies in percent.
        params: parameters as printed.
        source: where it is printed.
    """

    metric: str = "accuracy"
    score: float | None = None
    params: Annotated[int, Field(gt=0)] | None = None
    source: str = ""


class JobKeys(Value):
    """What may be said of a job. Paths are relative to the folder the command is run in.

    Attributes:
        model: a model file, or a transformers folder.
        arch: how to make the model where the file holds weights only, or where there is none.
        trust: packages and Python files whose code may be run.
        allow_missing: accept weights that the model file lacks.
        tokenizer: folder of a tokenizer, for text; by default the model's own.
        input: example inputs, as the command's ``--input``.
        settings: everything else that the command can be asked for.
        layers: rules for single layers; the first that matches wins.
        calibrate: data that factors are fitted to.
        examples: of them, at most.
        target: limits that the converted model keeps.
        alpha: widening of what layers put out.
        rank: Kronecker terms, or a share of each layer's parameters.
        method: what a target is met with.
        init: where factors start from; ``random`` trains from scratch.
        counterpart: another model instead of the converted one: the ``full`` model itself; one of
            ``low-rank`` layers, or one with channels ``pruned`` by the norm of their weights, of
            the size that the conversion would have.
        train: training of the full model before anything else; done once for all jobs with the
            same model and training.
        finetune: training of the converted model.
        teacher: whom the converted model learns from while it is trained: its ``source``, ``none``,
            or ``auto``, which is the source where the start is warm and the source is trained.
        evaluate: data that is scored on; none of it is fitted to.
        scored: examples of it, at most.
        metric: what is scored.
        report: forms in which each job's report is written.
        weights: form in which each job's model is written; ``folder`` is that of transformers.
        seed: of every random start.
        paper: figures to compare with.
    """

    model: str | None = None
    arch: str | None = None
    trust: tuple[str, ...] = ()
    allow_missing: bool = False
    tokenizer: str | None = None
    input: tuple[TensorSpec, ...] = ()
    settings: Settings = Settings()
    layers: tuple[LayerRule, ...] = ()
    calibrate: str | None = None
    examples: Annotated[int, Field(ge=1)] = EXAMPLES
    target: tuple[Target, ...] = ()
    alpha: Annotated[float, Field(ge=1, lt=1000)] = 1.0
    rank: Rank = 1
    method: Method = "auto"
    init: Init = "auto"
    counterpart: Counterpart | None = None
    train: Training | None = None
    finetune: Training | None = None
    teacher: Literal["auto", "source", "none"] = "auto"
    evaluate: str | None = None
    scored: Annotated[int, Field(ge=1)] = 2000
    metric: str | None = None
    report: tuple[ReportForm, ...] = ("html", "json")
    weights: Weights = "pt"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    paper: Figures | None = None

    _lists = field_validator("trust", "report", "input", "target", mode="before")(one_or_many)


# Keys of a job that also stand in Settings, under their name there.
SHARED = {key: key for key in Settings.model_fields if key in JobKeys.model_fields}
SHARED["input"] = "inputs"


class Job(JobKeys):
    """One conversion, with everything that its result depends on.

    What follows the name is asked for on the command line alone.

    Attributes:
        name: names the job's folder; unique in a recipe.
        plan: file of a plan that is applied, instead of making one.
        device: where the model is converted, timed, and left.
        dtype: floating type of the result.
        measure: batch sizes at which it is timed.
        unchecked: take a result also where no input is known to check it on.
        layerwise: convert from disk to disk with one layer in memory at a time; None does so where
            the model is large for the free memory.
    """

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$", max_length=120)]
    plan: str | None = None
    device: str | None = None
    dtype: str | None = None
    measure: tuple[Annotated[int, Field(ge=1)], ...] = ()
    unchecked: bool = True
    layerwise: bool | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Job:
        if self.model is None and self.arch is None:
            raise ValueError(
                "model and arch are both absent: give `model: FILE` or `arch: FROM:NAME`"
            )
        twice = [
            key
            for key, field in SHARED.items()
            if key in self.model_fields_set and field in self.settings.model_fields_set
        ]
        if twice:
            raise ValueError(f"{twice[0]} is given twice: by itself and in settings")
        if "rank" in self.model_fields_set and self.target:
            raise ValueError(
                "rank and target: a target chooses the terms; rules set them for layers"
            )
        if self.metric is not None and self.evaluate is None:
            raise ValueError("metric needs data to score on: add evaluate")
        if self.teacher == "source" and self.finetune is None:
            raise ValueError("teacher is about training: add finetune")
        if self.counterpart == "full" and (self.target or self.alpha != 1):
            raise ValueError("the full model is not converted: leave alpha and target out")
        _ = self.request  # raises where settings do not go together
        return self

    @property
    def trainings(self) -> dict[str, Training]:
        """The trainings that there are, by key."""
        return {key: one for key in TRAININGS if (one := getattr(self, key)) is not None}

    @property
    def words(self) -> str:
        """The model's name in a few words."""
        if self.model is not None:
            return Path(self.model).name
        return Architecture.parse(self.arch or "").name

    @property
    def keys(self) -> dict[str, object]:
        """What tells a job from its neighbours, as plain values."""
        request = self.request
        return {
            "alpha": request.alpha,
            "rank": request.rank,
            "target": ", ".join(map(str, request.target)),
            "method": request.method,
            "counterpart": self.counterpart or "",
            "init": request.init,
            "seed": request.seed,
        }

    @property
    def request(self) -> Settings:
        """The job's settings, put into one."""
        own = {
            field: getattr(self, key)
            for key, field in SHARED.items()
            if key in self.model_fields_set
        }
        given = {name: getattr(self.settings, name) for name in self.settings.model_fields_set}
        return Settings.model_validate({**given, **own})


class Recipe(JobKeys):
    """A file of jobs. What stands at its top holds for every job.

    Attributes:
        name: of the recipe; by default the file's.
        about: what it is for.
        extends: a recipe that this one starts from, relative to its file.
        defaults: what holds for every job; weaker than what stands at the top.
        matrix: lists by key (dotted keys reach into settings and training); every combination is
            a job. ``exclude`` lists combinations to leave out.
        jobs: the jobs, where they differ in more than a matrix can say; each may have a
            ``name`` and a ``matrix`` of its own.
        output: the folder of results.
    """

    name: str | None = None
    about: str = ""
    extends: str | None = None
    defaults: JobKeys = JobKeys()
    matrix: Matrix | None = None
    jobs: tuple[Entry, ...] = ()
    output: str | None = None


class Matrix(Value):
    """Lists of values by key. Any key of a job may stand here, dotted where it lies deeper.

    Attributes:
        exclude: combinations that are left out; each names some of the keys with a value.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    exclude: tuple[dict[str, Any], ...] = ()


class Entry(JobKeys):
    """One of the ``jobs`` of a recipe.

    Attributes:
        name: of the job; with a matrix, what its jobs' names begin with.
        matrix: lists of values; each combination is a job.
    """

    name: str | None = None
    matrix: Matrix | None = None


Recipe.model_rebuild()
