"""The door: a model, its teacher and data go in; a trained copy and what was done come out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from bp_convert.data.door import specs_of
from bp_convert.errors import TrainingError
from bp_convert.graph.clone import clone, shadow
from bp_convert.storage import PLAN_ATTRIBUTE
from bp_convert.surgery import fingerprint
from bp_convert.training.average import Average
from bp_convert.training.checkpoints import Checkpoints
from bp_convert.training.engine import Engine
from bp_convert.training.feed import Micro
from bp_convert.training.groups import make_optimizer, make_schedule
from bp_convert.training.judge import Judge, metric_for, taught, to_device
from bp_convert.training.loop import Loop
from bp_convert.training.loss import Objective, objective_for
from bp_convert.training.matching import LayerPairs
from bp_convert.training.material import Material, Reading, material
from bp_convert.training.memory import estimate
from bp_convert.training.randomness import random_state, set_random_state
from bp_convert.training.recompute import recompute, undo
from bp_convert.training.watch import Watch
from bp_convert.values.explain import explained
from bp_convert.values.plan import Plan
from bp_convert.values.tensors import TensorSpec
from bp_convert.values.training import Trained, Training

Progress = Callable[[str, int, int], None]
# What may differ between a run and the one that goes on with it
FREE = {"workers", "checkpoint_every", "checkpoint_minutes", "compile"}


def finetune(
    model: nn.Module,
    data: Any = None,
    *,
    teacher: nn.Module | None = None,
    settings: Training | None = None,
    validation: Any = None,
    metric: str | None = None,
    inputs: Sequence[TensorSpec | str] | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    download: bool = False,
    tokenizer: str | Path | None = None,
    progress: Progress | None = None,
    **asked: Any,
) -> tuple[nn.Module, Trained]:
    """Train a copy of a model, by labels, by a teacher, or by both.

    The weights of the lowest validation loss are returned, the ones before the first step
    included. Any nn.Module can be trained; a converted one learns from its source.

    Args:
        data: a source as the command line takes it, tensors, a data set, a loader, or a function
            that makes one; the settings' ``data`` where none is given.
        teacher: the source model, whose outputs are learnt.
        settings: the request; its fields may also be given as keywords, such as ``epochs=3``.
        validation: a source, data, or a share that is held out; the settings' where none is given.
        metric: scored on the validation data, as ``bp_convert.evaluation.Scorer`` knows it. None
            takes the accuracy for class labels, perplexity for causal language models, else the
            cosine to the teacher's output.
        inputs: what the model takes; those of its plan, or inferred, where not given.
        folder: where checkpoints, ``log.jsonl`` and TensorBoard's events go; None writes nothing.
        resume: go on from the newest sound checkpoint in ``folder``. On a CPU the result is that
            of an uninterrupted run, to the bit.
        download: let torchvision fetch a data set that is not there.
        tokenizer: folder of a tokenizer, for text.
        progress: called with words, steps done and their number.

    Returns:
        The trained copy, of the user's own class, and what was done. The model itself and the
        random states stay as they are.

    Raises:
        TrainingError: settings that do not fit, or a loss that is no number any more.
        DataError: the data cannot be read or does not fit the model.
        CheckpointError: ``folder`` cannot be written, or its checkpoints are of another run.
    """
    given = settings_for(settings, asked)
    source = given.data if data is None else data
    if source is None:
        raise TrainingError(
            where="finetune",
            found="no data",
            allowed="a source such as FashionMNIST?root=data, or tensors, a data set, a loader",
            fix="give data=",
        )
    if resume and folder is None:
        raise TrainingError(
            where="resume",
            found="no folder",
            allowed="the folder of the run that is gone on with",
            fix="give folder=",
        )
    _check_dtypes(model)
    with _own_random(given.seed):
        run = _Run(model, teacher, given, folder, resume, progress)
        specs = _specs(model, inputs)
        reading = Reading(
            specs, tokenizer, download, run.engine.place, run.engine.device.type == "cuda"
        )
        if download and run.engine.world > 1 and not run.engine.main:
            run.engine.wait()  # until the first process has it
        try:
            read = material(
                source, given.validation if validation is None else validation, given, reading
            )
        finally:
            if download and run.engine.main:
                run.engine.wait()
        return run.train(read, metric)


def settings_for(settings: Training | None, asked: dict[str, Any]) -> Training:
    """Return settings with some fields given anew.

    Raises:
        TrainingError: a field is unknown or its value is not valid.
    """
    given = {} if settings is None else settings.model_dump(exclude_unset=True)
    if "epochs" in asked:
        given.pop("steps", None)
    if "steps" in asked:
        given.pop("epochs", None)
    try:
        return Training.model_validate({**given, **asked})
    except ValidationError as problem:
        raise explained(problem, "training setting") from None


@dataclass
class _Run:
    """One call of ``finetune``."""

    source: nn.Module
    taught_by: nn.Module | None
    settings: Training
    folder: str | Path | None
    resume: bool
    progress: Progress | None

    def __post_init__(self) -> None:
        self.engine = Engine(self.settings)
        torch.manual_seed(self.settings.seed + self.engine.place.rank)
        self.notes: list[str] = []
        self.changed: list[nn.Module] = []

    def train(self, read: Material, metric: str | None) -> tuple[nn.Module, Trained]:
        settings, engine = self.settings, self.engine
        self.notes += read.notes
        model = clone(self.source)
        teacher = None if self.taught_by is None else self._teacher(self.taught_by)
        engine.place_model(model)
        objective, micro = self._objective(model, teacher, read)
        self.notes.append(objective.words)
        pairs = self._pairs(model, teacher)
        optimizer = make_optimizer(model, settings)
        expected = self._estimate(micro, teacher)
        steps = self._steps(read)
        if settings.recompute:
            self.changed = recompute(model)
            if not self.changed:
                self.notes.append("recompute: the model has no row of blocks; nothing was changed")
        if settings.compile:
            model.compile()
        model.train()
        schedule = make_schedule(optimizer, settings, steps)
        engine.prepare(optimizer)
        average = None if settings.ema is None else Average(model, settings.ema)
        judge = None
        if read.held is not None:
            judge = Judge(engine, read.held, objective, metric_for(objective, metric), teacher)
        kept, content = self._checkpoints(read.words)
        engine.wait()  # until every process has looked into the folder
        loop = Loop(
            engine,
            settings,
            read.learnt,
            objective,
            schedule,
            steps,
            judge=judge,
            teacher=teacher,
            pairs=pairs,
            average=average,
            watch=Watch(None, self.progress if engine.main else None),
            checkpoints=kept,
            about=self._about(read.words, steps),
        )
        resumed = None
        if content is not None:
            self._check_same(content["about"], loop.about)
            loop.restore(content)
            resumed = loop.state.step
        if engine.main and self.folder is not None:
            loop.watch = Watch(Path(self.folder), self.progress, resumed=resumed)
        for note in self.notes if self.folder is not None else ():
            loop.watch.event(loop.state.step, note)
        try:
            loop.run()
        finally:
            loop.watch.close()
            if pairs is not None:
                pairs.remove()
            undo(self.changed)
        if pairs is not None and pairs.skipped:
            self.notes.append(
                f"distill.layers: {len(pairs.skipped)} of {len(pairs.names)} layers have other "
                "widths than the teacher's and were left out"
            )
        if loop.state.best_step == 0 and judge is not None:
            self.notes.append("no step lowered the validation loss: the weights are as given")
        return self._result(), self._report(loop, expected, resumed)

    def _teacher(self, teacher: nn.Module) -> nn.Module:
        """Return the teacher in eval mode on the device; the user's own stays as it is."""
        device = self.engine.device
        here = all(p.device == device for p in teacher.parameters())
        copy = shadow(teacher) if here else clone(teacher).to(device)
        return copy.eval()

    def _objective(
        self, model: nn.Module, teacher: nn.Module | None, read: Material
    ) -> tuple[Objective, Micro]:
        """Look at one pass to see what the outputs are."""
        micro = next(iter(read.learnt.epoch(0)))
        there = to_device(micro, model)
        model.eval()
        try:
            with torch.no_grad(), self.engine.autocast():
                reference = None if teacher is None else taught(teacher, there)
                raw = model(*there.args, **there.kwargs)
        except TrainingError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as problem:
            lines = str(problem).strip().splitlines() or ["no message"]
            raise TrainingError(
                where=f"{type(model).__name__} on the training data",
                found=f"{type(problem).__name__}: {lines[0][:200]}",
                allowed="data that the model runs on",
                fix="give examples as the model takes them: the same sizes, types and tokenizer",
            ) from problem
        distill = self.settings.distill
        return objective_for(self.source, raw, there, reference, distill), micro

    def _pairs(self, model: nn.Module, teacher: nn.Module | None) -> LayerPairs | None:
        if teacher is None or not self.settings.distill.layers:
            return None
        pairs = LayerPairs(model, teacher)
        if not pairs.names:
            pairs.remove()
            raise TrainingError(
                where="distill.layers",
                found="no bilinear layer that stands for one of the teacher's",
                allowed="a converted model and the model that it was converted from",
                fix="leave distill.layers out",
            )
        return pairs

    def _estimate(self, micro: Micro, teacher: nn.Module | None) -> int | None:
        """Estimate the memory of a step before the run, on an optimiser of the plain model."""
        settings = self.settings
        found = estimate(
            self.source,
            micro,
            make_optimizer(self.source, settings),
            teacher=teacher,
            averaged=settings.ema is not None,
            recomputed=settings.recompute,
        )
        if found is None:
            self.notes.append("memory not estimated: the model does not run without data")
        elif self.progress is not None and self.engine.main:
            self.progress(f"about {found / 2**20:,.0f} MiB a step", 0, 1)
        return found

    def _steps(self, read: Material) -> int:
        if self.settings.steps is not None:
            return self.settings.steps
        each = -(-(read.learnt.passes or 1) // self.settings.accumulate)
        return max(1, round((self.settings.epochs or 1) * each))

    def _checkpoints(self, words: str) -> tuple[Checkpoints | None, dict[str, Any] | None]:
        if self.folder is None:
            return None, None
        kept = Checkpoints(Path(self.folder), tidy=self.engine.main)
        if not self.resume:
            if kept.paths():
                raise TrainingError(
                    where=str(self.folder),
                    found=f"the checkpoints of another run, such as {kept.paths()[0].name}",
                    allowed="an empty folder, or going on with that run",
                    fix="add --resume (resume=True), name another folder, or remove this one",
                )
            return kept, None
        content, notes = kept.newest()
        if content is None:
            notes.append("nothing to resume from: the run starts at step 0")
        elif notes:
            notes.append(f"resumed from the one before, step {content['run']['step']}")
        self.notes += notes
        return kept, content

    def _about(self, words: str, steps: int) -> dict[str, Any]:
        return {
            "settings": self.settings.model_dump(mode="json", exclude=FREE),
            "steps": steps,
            "data": words,
            "model": fingerprint(self.source),
            "taught": self.taught_by is not None,
            "processes": self.engine.world,
        }

    def _check_same(self, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
        flat = [{**one.get("settings", {}), **one} for one in (theirs, mine)]
        for one in flat:
            one.pop("settings", None)
        other = [key for key in flat[1] if flat[0].get(key) != flat[1][key]]
        if other:
            key = other[0]
            raise TrainingError(
                where=f"resuming from {self.folder}: {key}",
                found=f"{flat[1][key]}",
                allowed=f"{flat[0].get(key)}, as in the run that is gone on with",
                fix="give the same settings, model and data, or train in another folder",
            )

    def _result(self) -> nn.Module:
        engine = self.engine
        if engine.sharded:
            result = clone(self.source)
            result.load_state_dict(engine.weights())
        else:
            result = engine.release()
            if "forward" not in vars(self.source):
                result.__dict__.pop("forward", None)  # what accelerate has put back there
            result.zero_grad(set_to_none=True)
        result._compiled_call_impl = None
        flags = dict(self.source.named_modules())
        for name, module in result.named_modules():
            module.training = flags[name].training
        where = next((p.device for p in self.source.parameters()), torch.device("cpu"))
        result.to(where)
        return result

    def _report(self, loop: Loop, expected: int | None, resumed: int | None) -> Trained:
        state = loop.state
        return Trained(
            steps=state.step,
            examples=state.examples,
            seconds=state.seconds,
            before=state.before,
            after=state.best,
            teacher=state.teacher,
            best_step=state.best_step,
            peak_memory_bytes=loop.peak,
            estimated_memory_bytes=expected,
            examples_per_second=loop.rate,
            stopped=state.stopped,
            notes=tuple(self.notes),
            resumed_from=resumed,
            curve=tuple(enumerate(state.losses, 1)),
        )


@contextlib.contextmanager
def _own_random(seed: int) -> Iterator[None]:
    """Seed every generator, and put them back afterwards."""
    before = random_state()
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        set_random_state(before)


def _specs(model: nn.Module, inputs: Sequence[TensorSpec | str] | None) -> tuple[TensorSpec, ...]:
    if inputs is not None:
        named = [one if isinstance(one, TensorSpec) else TensorSpec.parse(one) for one in inputs]
        return specs_of(model, named)
    text = getattr(model, PLAN_ATTRIBUTE, None)
    planned = Plan.model_validate_json(text).inputs if isinstance(text, str) else ()
    return specs_of(model, planned)


def _check_dtypes(model: nn.Module) -> None:
    half = next(
        (n for n, p in model.named_parameters() if p.dtype in (torch.float16, torch.bfloat16)), None
    )
    if half is not None:
        raise TrainingError(
            where=half,
            found=f"weights in {model.get_parameter(half).dtype}",
            allowed="float32 weights; precision=bf16 or fp16 computes in half of that",
            fix="convert without --dtype, train, and take a smaller dtype afterwards",
        )
