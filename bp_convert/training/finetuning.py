"""The door: a model, its teacher and data go in; a trained copy and what was done come out."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bp_convert.data.split import Split, Uses, split_for
from bp_convert.errors import TrainingError
from bp_convert.randomness import Aside
from bp_convert.storage import is_marked, plan_of
from bp_convert.training.trainer import Trainer
from bp_convert.values.explain import validated
from bp_convert.values.progress import Progress, told
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec
from bp_convert.values.training import Trained, Training


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
    if "epochs" in asked:
        given.pop("steps", None)
    if "steps" in asked:
        given.pop("epochs", None)
    return validated(Training, {**given, **asked}, "training setting", error=TrainingError)


def _inputs(model: nn.Module, inputs: Sequence[TensorSpec | str] | None) -> tuple[TensorSpec, ...]:
    """Return what a model takes: as described, or as its plan says."""
    if inputs is not None:
        return tuple(
            one if isinstance(one, TensorSpec) else TensorSpec.parse(one) for one in inputs
        )
    return plan_of(model).inputs if is_marked(model) else ()
