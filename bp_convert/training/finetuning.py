"""One call of ``finetune``: a model, its teacher and data go in; what training needs is made, run,
and put back; a trained copy and what was done come out."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bp_convert.data.split import Split, Uses, freed, split_for
from bp_convert.errors import TrainingError
from bp_convert.feeding.feed import Feed, Micro, feeds
from bp_convert.graph.clone import clone
from bp_convert.graph.example import device_of
from bp_convert.graph.running import evaluating
from bp_convert.randomness import Aside
from bp_convert.storage import is_marked, plan_of, store
from bp_convert.surgery import fingerprint
from bp_convert.torch_private import forget_compiled
from bp_convert.training.average import Average
from bp_convert.training.checkpoints import Checkpoints
from bp_convert.training.dropout import Changed, leave_out, put_back
from bp_convert.training.engine import Engine
from bp_convert.training.loop import Loop
from bp_convert.training.loss import Objective, objective_for
from bp_convert.training.memory import estimate
from bp_convert.training.optimizers import make_optimizer, make_schedule
from bp_convert.training.recompute import recompute, undo
from bp_convert.training.run_log import RunLog
from bp_convert.training.trials import ShortRuns
from bp_convert.training.validation import Validation, metric_for, taught, to_device
from bp_convert.training.watched import Watched
from bp_convert.values.explain import validated
from bp_convert.values.progress import Progress, told, unheard
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec
from bp_convert.values.training import LENGTHS, Trained, Training

WHOLE = (
    "stored in few bits before, trained and saved as floating-point numbers: "
    "bp_convert.store(model, 'int8') rounds the result again"
)
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
    fitted: Collection[int] = (),
    scored: Collection[int] = (),
    split: Split | None = None,
    progress: Progress | bool | None = None,
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
        fitted: rows of ``data`` that the model was calibrated on (``Examples.rows``); they are
            learnt, but not held out: their loss is too low at the start.
        scored: rows of ``data`` that are kept for another score: neither learnt nor held out.
        split: what is learnt and held out, where that is decided already; ``data``,
            ``validation``, ``inputs``, ``download``, ``tokenizer``, ``fitted`` and ``scored`` are
            not looked at then.
        progress: called with words, steps done and their number; True draws a bar.

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
    if source is None and split is None:
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
    half = (torch.float16, torch.bfloat16)
    if found := [name for name, one in model.named_parameters() if one.dtype in half]:
        raise TrainingError(
            where=found[0],
            found=f"weights in {model.get_parameter(found[0]).dtype}",
            allowed="float32 weights; precision=bf16 or fp16 computes in half of that",
            fix="convert without --dtype, train, and take a smaller dtype afterwards",
        )
    with told(progress) as tell, Aside(given.seed):
        home = None if folder is None else Path(folder)
        trainer = Trainer(model, teacher, given, home, resume, tell)
        if split is None:
            uses = Uses(
                learn=source,
                validation=given.validation if validation is None else validation,
                order=given.seed,
                fitted=frozenset(fitted),
                left_out=frozenset(scored),
            )
            alone = trainer.engine.main_process_first
            with alone() if download else contextlib.nullcontext():
                split = split_for(
                    model,
                    uses,
                    Settings(inputs=_inputs(model, inputs)),
                    tokenizer=tokenizer,
                    download=download and trainer.engine.is_main_process,
                )
        return trainer.train(split, metric)


def settings_for(settings: Training | None, asked: dict[str, Any]) -> Training:
    """Return settings with some fields given anew.

    Raises:
        TrainingError: a field is unknown or its value is not valid.
    """
    given = {} if settings is None else settings.model_dump(exclude_unset=True)
    if any(one in asked for one in LENGTHS):
        given = {key: one for key, one in given.items() if key not in LENGTHS}
    return validated(Training, {**given, **asked}, "training setting", error=TrainingError)


def _inputs(model: nn.Module, inputs: Sequence[TensorSpec | str] | None) -> tuple[TensorSpec, ...]:
    """Return what a model takes: as described, or as its plan says."""
    if inputs is not None:
        return tuple(map(TensorSpec.parse, inputs))
    return freed(plan_of(model).inputs) if is_marked(model) else ()


@dataclass
class Trainer:
    """A model, its teacher and settings, from the first look at the data to the report."""

    source: nn.Module
    taught_by: nn.Module | None
    settings: Training
    folder: Path | None
    resume: bool
    progress: Progress

    def __post_init__(self) -> None:
        self.engine = Engine(self.settings)
        torch.manual_seed(self.settings.seed + self.engine.place.rank)
        self.notes: list[str] = []
        if not self.engine.is_main_process:
            self.progress = unheard

    def _whole(self) -> nn.Module:
        """Return a copy of the model whose weights may take any value."""
        if not is_marked(self.source) or not plan_of(self.source).stored:
            return clone(self.source)
        self.notes.append(WHOLE)
        return store(self.source, "fp32")

    def train(self, split: Split, metric: str | None) -> tuple[nn.Module, Trained]:
        settings, engine, began = self.settings, self.engine, time.monotonic()
        learnt, held, words = feeds(
            split, settings, engine.place, pinned=engine.device.type == "cuda"
        )
        self.notes += split.notes
        model = self._whole()
        teacher = None
        if self.taught_by is not None:  # its forward may write on its own weights
            teacher = evaluating(clone(self.taught_by, apart=True).to(engine.device))
        engine.place_model(model)
        watched = Watched(model, teacher, settings.distill)
        objective, micro = self._objective(model, teacher, learnt, watched)
        self.notes.append(objective.words)
        optimizer = make_optimizer(model, settings)
        expected = self._estimate(micro, teacher)
        steps = self._steps(learnt)
        changed = recompute(model) if settings.recompute else []
        if settings.recompute and not changed:
            self.notes.append("recompute: the model has no row of blocks; nothing was changed")
        quiet: Changed = []
        if settings.dropout is False or (settings.dropout == "auto" and objective.teacher_alone):
            quiet = leave_out(model)
        if settings.compile:
            model.compile()
        model.train()
        fresh = copy.deepcopy(optimizer.state_dict())
        schedule = make_schedule(optimizer, settings, steps or 1)
        engine.wrap(optimizer)
        validation = None
        if held is not None:
            scored = metric_for(objective, metric)
            validation = Validation(engine, held, objective, scored, teacher, watched)
        about: dict[str, Any] = {
            "settings": settings.model_dump(mode="json", exclude=FREE),
            "steps": steps,
            "data": words,
            "model": fingerprint(self.source),
            "taught": self.taught_by is not None,
            "processes": engine.place.world,
        }
        kept, content = self._checkpoints()
        if content is not None:
            if steps is None:
                about["steps"] = content["about"]["steps"]
            self._check_same(content["about"], about)
        resumed = None if content is None else content["run"]["step"]
        engine.wait_for_everyone()  # until every process has looked into the folder
        folder = self.folder if engine.is_main_process else None
        loop = Loop(
            engine,
            settings,
            learnt,
            objective,
            schedule,
            steps or 1,
            validation,
            teacher,
            watched,
            average=None if settings.ema is None else Average(model, settings.ema),
            log=RunLog(folder, self.progress, resumed=resumed),
            checkpoints=kept,
            about=about,
        )
        try:
            trials = ShortRuns(loop, fresh, began)
            if content is not None:
                trials.begin(about["steps"], content["run"]["lr"])
                loop.restore(content)
            else:
                trials.settle(steps, None if settings.lr == "auto" else settings.lr)
                about["steps"] = loop.steps
            del trials  # with the weights that it started from
            for note in self.notes:
                loop.log.event(loop.state.step, note)
            loop.run()
        finally:
            loop.log.close()
            watched.remove()
            undo(changed)
            put_back(quiet)
        self.notes += watched.notes
        if loop.state.best_step == 0 and validation is not None:
            self.notes.append(
                "no step lowered the validation loss: the weights are as given; try a lower lr (a "
                "tenth) or warmup=0.1"
            )
        return self._result(), self._report(loop, expected, resumed)

    def _objective(
        self, model: nn.Module, teacher: nn.Module | None, learnt: Feed, watched: Watched
    ) -> tuple[Objective, Micro]:
        """Look at one pass to see what the outputs are."""
        micro = next(iter(learnt.epoch(0)))
        there = to_device(micro, model)
        model.eval()
        try:
            with torch.no_grad(), watched, self.engine.autocast():
                reference = None if teacher is None else taught(teacher, there)
                raw = model(*there.args, **there.kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as problem:
            lines = str(problem).strip().splitlines() or ["no message"]
            raise TrainingError(
                where=f"{type(model).__name__} on the training data",
                found=f"{type(problem).__name__}: {lines[0][:200]}",
                allowed="data that the model runs on",
                fix="give examples as the model takes them: the same sizes, types and tokenizer",
            ) from problem
        objective = objective_for(self.source, raw, there, reference, self.settings.distill)
        return watched.settled(objective, there), micro

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
        else:
            self.progress(f"about {found / 2**20:,.0f} MiB a step", 0, 1)
        return found

    def _steps(self, learnt: Feed) -> int | None:
        """Return how many steps are asked for; None for as many as fit into some minutes."""
        if self.settings.steps is not None or self.settings.minutes is not None:
            return self.settings.steps
        each = -(-(learnt.passes or 1) // self.settings.accumulate)
        return max(1, round((self.settings.epochs or 1) * each))

    def _checkpoints(self) -> tuple[Checkpoints | None, dict[str, Any] | None]:
        if self.folder is None:
            return None, None
        kept = Checkpoints(self.folder, tidy=self.engine.is_main_process)
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
        forget_compiled(result)
        flags = dict(self.source.named_modules())
        for name, module in result.named_modules():
            module.training = flags[name].training
        result.to(device_of(self.source))
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
            lr=state.lr,
            tried=state.tried,
        )
