"""A model traced into a graph with free axes; what cannot be traced is named."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bp_convert.errors import BpConvertError, ExportError
from bp_convert.exporting.axes import BATCH, EXAMPLE, FreeAxes
from bp_convert.graph.running import inference

Program = torch.export.ExportedProgram
_DIM = re.compile(r"Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)")
_OPERATOR = re.compile(
    r"\b(?:aten|torchvision|bp_convert|prims|higher_order)[.:]{1,2}\w+(?:\.\w+)?"
)


def traced(model: nn.Module, axes: FreeAxes) -> tuple[Program, FreeAxes]:
    """Trace a model in eval mode; return the axes, too, within what the model itself allows.

    Raises:
        ExportError: it cannot be traced with these axes; names the layer where that shows.
    """
    args, kwargs = axes.draw(model, EXAMPLE)
    shapes = axes.shapes(model, args, kwargs)
    with inference(model), _entered(model) as inside, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        except BpConvertError:
            raise
        except Exception as problem:
            bounds = _suggested(str(problem), axes)
            if not bounds:
                raise _refused(model, inside, problem) from problem
        else:
            return made, axes
    return traced(model, axes.within(bounds))


def _suggested(message: str, axes: FreeAxes) -> dict[str, tuple[int | None, int | None]]:
    """Return the bounds of axes that torch asks for, such as the rows of a table of positions;
    nothing where it asks for more, or has been given them already."""
    found: dict[str, tuple[int | None, int | None]] = {}
    for line in message.partition("Suggested fixes:")[2].splitlines():
        name, equals, rest = line.strip().partition(" = ")
        if not equals:
            continue
        asked = _DIM.fullmatch(rest)
        if asked is None or name not in axes.names:
            return {}
        low, high = (None if one is None else int(one) for one in asked.groups())
        if name == BATCH and high is not None:
            return {}
        found[name] = (low, high)
    return {} if axes.bounds else found


@contextmanager
def _entered(model: nn.Module) -> Iterator[list[str]]:
    """Yield the names of the modules that run at a moment; those of a failure stay."""
    stack: list[str] = []
    handles: list[Any] = []

    def leave(*_: Any) -> None:
        stack.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield stack
    finally:
        for one in handles:
            one.remove()


def _refused(model: nn.Module, inside: list[str], problem: Exception) -> ExportError:
    name = inside[-1] if inside else ""
    where = type(model).__name__
    if name:
        where = f"{name} ({type(model.get_submodule(name)).__name__})"
    text = " ".join(str(problem).split())
    fix = (
        "export a forward without this step, or keep to bp_convert.load, which runs the model "
        "as it is"
    )
    if "specialized it to be a constant" in text or "Constraints violated" in text:
        found = f"the forward fixes an axis that should be free: {text[:300]}"
        fix = (
            "take sizes from the input (x.shape[0]) and not from numbers in forward; --fixed "
            "(sequences=False in Python) fixes the lengths of sequences"
        )
    elif "data-dependent" in text or "DataDependent" in type(problem).__name__:
        found = f"the forward looks at the data: {text[:300]}"
        fix = (
            "replace Python's if, len or int over tensors by torch.where, masks or fixed sizes; "
            f"or {fix.partition(', or ')[2]}"
        )
    else:
        found = f"{type(problem).__name__}: {text[:300] or 'no message'}"
    return ExportError(
        where=where, found=found, allowed="a forward that torch.export traces", fix=fix
    )


def unsupported(program: Program, goal: str, problem: BaseException) -> ExportError:
    """Return the error for a graph that a target does not take: its operator and its layer."""
    said: list[str] = []
    one: BaseException | None = problem
    while one is not None:
        said.append(str(one))
        one = one.__cause__ or one.__context__
    text = "\n".join(said)
    operators = [one.replace("::", ".") for one in _OPERATOR.findall(text)]
    name = next(iter(operators), "")
    where = _layer_of(program, name) or "the graph"
    lines = [line.strip() for line in said[-1].splitlines() if line.strip()]
    return ExportError(
        where=where,
        found=f"the operator {name}, which {goal} has no form for"
        if name
        else f"{goal} does not take the graph: {(lines or ['no message'])[0][:300]}",
        allowed=f"operators that can be written for {goal}",
        fix="write this layer with other operators, leave it out of the exported module, or take "
        "another target (--to torch-export runs in torch)",
    )


def _layer_of(program: Program, operator: str) -> str:
    """Return the name and class of the module that calls an operator, itself or what it is made
    of; empty where that is not known."""
    for parts in (False, True) if operator else ():
        try:
            graph = program.run_decompositions().graph if parts else program.graph
        except Exception:  # the message goes without it
            return ""
        for node in graph.nodes:
            stack = node.meta.get("nn_module_stack") or {}
            if node.op == "call_function" and str(node.target).startswith(operator) and stack:
                path, kind = list(stack.values())[-1]
                kind = kind if isinstance(kind, str) else kind.__name__
                return f"{path or 'the model itself'} ({kind.rpartition('.')[2]})"
    return ""
