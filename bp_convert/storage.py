"""Converted models and plans, written and read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from bp_convert.bits.stored import can_be_stored, stored_bytes, stored_forms
from bp_convert.errors import CheckpointError, PlanError, TraceError, VerificationError
from bp_convert.files.arch import arch_factory
from bp_convert.files.atomic import Prove, check_output, is_folder, write_all, write_text
from bp_convert.files.converted import (
    ConvertedFile,
    is_converted,
    read_converted,
    save_converted,
    torch_writer,
)
from bp_convert.files.entries import fill
from bp_convert.files.folder import check_foldable, save_folder
from bp_convert.files.read_model import load_model
from bp_convert.files.reread import read_back
from bp_convert.files.writable import check_whole, check_writable
from bp_convert.fitting import round_stored
from bp_convert.graph.clone import clone, plain_clone
from bp_convert.graph.example import SampleInputs
from bp_convert.graph.merging import merged
from bp_convert.graph.running import Args, Kwargs, evaluating, in_mode, run, same_draws
from bp_convert.hub.layout import plan_of_folder
from bp_convert.hub.marked import PLAN_ATTRIBUTE as PLAN_ATTRIBUTE
from bp_convert.hub.marked import check_whole_numbers, mark, plan_text, text_of, unmark
from bp_convert.hub.marked import is_marked as is_marked
from bp_convert.hub.rebuild import from_pretrained as from_pretrained
from bp_convert.linears import check_no_linears, linear_clone
from bp_convert.planner.worth import READ
from bp_convert.surgery import apply_plan
from bp_convert.values.architecture import Architecture
from bp_convert.values.base import as_json
from bp_convert.values.literals import Store
from bp_convert.values.plan import Plan, Totals
from bp_convert.verify.compare import difference
from bp_convert.verify.pair import tolerance_of

ROWS = 2  # examples on which plain layers are compared


def check_savable(
    model: nn.Module, path: str | Path, *, arch: str | None = None, trust: Sequence[str] = ()
) -> tuple[str, ...]:
    """Refuse, before any work, a model that could not be read back from where it will be written.

    Returns:
        What loading it will have to trust.

    Raises:
        CheckpointError: names what is at fault, and a way out.
    """
    if is_folder(path):
        check_foldable(model)
        return ()
    return check_writable(model, path, arch=arch, trust=trust)


def save(
    model: nn.Module,
    path: str | Path,
    *,
    arch: str | None = None,
    force: bool = False,
    trust: Sequence[str] = (),
    check: bool = True,
    prove: Prove | None = None,
) -> list[Path]:
    """Write a converted model to ``NAME.pt``, to ``NAME.safetensors`` beside ``NAME.plan.json``,
    or, where it is one of transformers, to a folder ``NAME/`` with its tokenizer.

    Args:
        arch: how to make the source model again; then the file holds weights and plan only.
        force: replace an existing file.
        trust: packages and Python files that will be trusted when the file is loaded.
        check: read the file back, and compare every bit, before it takes its name.
        prove: does so in the place of ``check``.

    Returns:
        The files written.

    Raises:
        CheckpointError: the file could not be read back, exists, cannot be written, or the model
            was not made here.
        VerificationError: the file does not hold what the model does; then it is removed.
    """
    check_no_linears(model)
    text = plan_text(model)
    made = Plan.model_validate_json(text)
    if is_folder(path):
        check_whole_numbers(made)
        return [save_folder(model, Path(path), force=force, check=check, prove=prove)]
    if prove is None and check:
        prove = read_back(model, Path(path), trust=trust)
    return save_converted(
        Path(path),
        model=model,
        plan_json=text,
        settings_json=made.settings.model_dump_json(by_alias=True),
        arch=arch,
        force=force,
        trust=trust,
        prove=prove,
        forms=stored_forms(model, made),
    )


def store(model: nn.Module, how: Store) -> nn.Module:
    """Return a copy of a converted model whose weights are rounded anew, each by itself, and which
    ``save`` stores so.

    Args:
        how: ``int8``, ``int4``, ``int3``, ``bf16``, ``fp16``; or ``fp32``, which rounds nothing:
            what was stored in few bits goes on as it is now, such as to be trained.

    Raises:
        CheckpointError: the model was not converted.
        PlanError: a weight that these bits do not hold.
    """
    plan = plan_of(model)
    made = clone(model, apart=True)
    modules = dict(made.named_modules(remove_duplicate=False))
    chosen = None if how == "fp32" else how
    layers = tuple(
        one.model_copy(update={"store": chosen if _storable(modules.get(one.name)) else None})
        for one in plan.layers
    )
    plan = plan.model_copy(update={"layers": layers})
    round_stored(made, made, plan)
    size = Totals(before=plan.bytes.before, after=stored_bytes(made, plan))
    plan = plan.model_copy(update={"bytes": size})
    mark(made, text_of(plan))
    return made


def _storable(module: nn.Module | None) -> bool:
    return module is not None and can_be_stored(module)


def load(
    path: str | Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    arch: str | None = None,
    trust: Sequence[str] = (),
) -> nn.Module:
    """Give a saved model back, on the CPU and in eval mode.

    Args:
        path: a file or folder that ``save`` or the command line wrote: of a converted model, or
            of one in plain layers, as ``bp-convert dense`` and ``finetune`` write them.
        model: the source model, or what makes it, where the file holds weights and plan only and
            names no architecture, or one that is not there any more.
        arch: how to make the source model, as the command line takes it; in place of ``model``.
        trust: packages and Python files whose classes the file may hold; their code runs.

    Raises:
        CheckpointError: the file is no model, or needs ``model``, ``arch`` or ``trust``.
    """
    if model is None and arch is not None:
        model = arch_factory(arch, trust=trust, typed=True)
    if not is_converted(path):
        if model is not None:
            raise CheckpointError(
                where=str(path),
                found="a file that holds no plan: its model was not converted, or is in plain "
                "layers again",
                allowed="a converted model, where model or arch is given",
                fix=f"bp_convert.load({str(path)!r}) for a whole model; "
                "bp_convert.open_model(path, arch=...) for weights",
            )
        return evaluating(load_model(path, trust=trust).model)
    if Path(path).is_dir():
        return from_pretrained(path)
    return restored(read_converted(path, trust=trust), str(path), model=model, trust=trust)


def restored(
    read: ConvertedFile,
    where: str,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    trust: Sequence[str] = (),
) -> nn.Module:
    """Make the model whose file was read; see ``load``."""
    if read.skeleton is not None and model is None:
        mark(read.skeleton, read.plan_json)
        return evaluating(read.skeleton)
    made = read_plan_text(read.plan_json, where)
    if isinstance(model, nn.Module):
        source = model
    elif model is not None:
        source = model()
    elif read.arch is not None:
        place = Architecture.parse(read.arch).place
        if place is not None and not place.exists():
            found = f"weights and a plan for {read.arch}, but {place} is not there"
            raise _needs_model(where, found)
        source = arch_factory(read.arch, trust=trust)()
    else:
        raise _needs_model(where, "weights and a plan, without the architecture they belong to")
    if made.settings.merge_adapters:
        source, _ = merged(source)
    # Every start is random: structure without fitting.
    layers = tuple(one.model_copy(update={"init": "random"}) for one in made.layers)
    empty = apply_plan(source, made.model_copy(update={"layers": layers})).model
    fill(empty, read.state)
    mark(empty, read.plan_json)
    return evaluating(empty)


def _needs_model(where: str, found: str) -> CheckpointError:
    return CheckpointError(
        where=where,
        found=found,
        allowed="a source model to apply the plan to",
        fix="bp_convert.load(path, model=YourModel) with the source model or what makes it, or "
        "bp_convert.load(path, arch=...) with where it is now",
    )


def to_dense(model: nn.Module, *, factored: bool = False) -> nn.Module:
    """Return a copy in which every bilinear layer is the plain torch layer of the same weight.

    Args:
        factored: make two plain layers in a row of each layer of low rank, which stay as small as
            its factors; names of their weights then end in ``0.weight`` and ``1.weight``.

    Raises:
        VerificationError: the model does not run, or computes something else, with two layers in
            the place of one, as where its code reads their weights.
    """
    dense = plain_clone(model, factored=factored)
    unmark(dense)
    if factored and is_marked(model):
        _same_outputs(
            model,
            dense,
            "two plain layers for one of low rank",
            "turn it back without factored (--factored): the model's code reads its layers",
        )
    return dense


def to_linears(model: nn.Module) -> nn.Module:
    """Return a copy in which every ``BPLinear`` and ``BPConv1D``, those of attention too, is two
    ``nn.Linear``, ``first`` and ``last``, with an exchange of axes between: for tools that look for
    ``nn.Linear``, such as torchao's ``quantize_`` and adapters.

    It has as many parameters and computes the same but for rounding. Factors that layers share stay
    shared. As they are stay convolutions, embeddings and heads tied to them, recurrent layers,
    stacks of experts and layers whose weight the model's code reads instead of calling them; the
    log (``bp_convert``, INFO) names them. ``save`` refuses the copy: save the converted model, and
    call this after ``load``.

    Raises:
        VerificationError: the model does not run, or computes something else, with two layers in
            the place of one.
    """
    read: set[str] = set()
    if is_marked(model):
        for layer in plan_of(model).layers:
            read.update((layer.name, *layer.aliases) if READ in layer.notes else ())
    made = linear_clone(model, read)
    if is_marked(model):
        _same_outputs(
            model,
            made,
            "two nn.Linear for each bilinear layer",
            "use the converted model, or bp_convert.to_dense: the model's code reads its layers",
        )
    return made


def _same_outputs(model: nn.Module, plain: nn.Module, what: str, fix: str) -> None:
    """Check that two layers in a row may stand for one, on the input that the plan describes."""
    sample = SampleInputs(plan_of(model).inputs)
    if not sample:
        return
    args, kwargs = sample.batch(model, ROWS)
    try:
        want, got = (_output(one, args, kwargs) for one in (model, plain))
        found = difference(want, got)
        words = found.form or f"outputs that differ by {found.size:.2g} in {found.where}"
    except TraceError as problem:
        found, words = None, problem.found
    if found is None or found.form or found.size > tolerance_of(model):
        raise VerificationError(
            where=f"{type(model).__name__} with {what}",
            found=words,
            allowed="the outputs of the converted model",
            fix=fix,
        )


def _output(model: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    copy = clone(model, apart=True)
    with torch.no_grad(), in_mode(copy, training=False), same_draws():
        return run(copy, args, kwargs)


def save_dense(
    model: nn.Module,
    path: str | Path,
    *,
    force: bool = False,
    trust: Sequence[str] = (),
    prove: Prove | None = None,
) -> Path:
    """Write a model without bilinear layers as one pickled module, or as a folder of transformers,
    whole or not at all.

    Raises:
        CheckpointError, VerificationError: as ``save``.
    """
    if is_folder(path):
        return save_folder(model, Path(path), force=force, prove=prove)
    path = Path(path)
    check_output(path, force=force, suffixes=(".pt", ".pth"))
    check_whole(model, trust)
    prove = prove or read_back(model, path, trust=trust)
    return write_all([(path, torch_writer(model))], force=force, prove=prove)[0]


def plan_of(model: nn.Module | str | Path) -> Plan:
    """Return the plan that a converted model, or one in a file, was made by.

    Args:
        model: what ``convert``, ``apply``, ``prune`` or ``load`` returned; or the path of a
            converted file or folder, of which nothing is made or run.

    Raises:
        CheckpointError: the model was not converted, or the file holds no converted model.
    """
    if isinstance(model, nn.Module):
        return Plan.model_validate_json(plan_text(model))
    found = plan_of_folder(Path(model)) if Path(model).is_dir() else None
    if found is not None:
        return found
    return read_plan_text(read_converted(Path(model)).plan_json, str(model))


def read_plan(path: str | Path) -> Plan:
    """Read a plan that was written with ``write_plan`` or ``--plan-out``, edited or not.

    Raises:
        PlanError: the file is not a plan; the message names the place in it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise PlanError(
            where=str(path),
            found=f"{type(problem).__name__}: {problem}",
            allowed="a plan file, written with --plan-out",
            fix="check the path",
        ) from None
    return read_plan_text(text, str(path))


def read_plan_text(text: str, where: str) -> Plan:
    """Read a plan from JSON text.

    Raises:
        PlanError: the text is not a plan.
    """
    try:
        return Plan.model_validate_json(text)
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise PlanError(
            where=f"{where}, at {place}",
            found=f"{first['msg']} (got {str(first.get('input'))[:80]})",
            allowed="a plan as --plan-out writes it",
            fix="mend this place, or write the plan again",
        ) from None


def write_plan(plan: Plan, path: str | Path, force: bool = False) -> Path:
    """Write a plan as JSON that a person can edit.

    Raises:
        CheckpointError: the file exists or cannot be written.
    """
    return write_text(Path(path), as_json(plan) + "\n", force=force)
