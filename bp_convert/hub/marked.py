"""What a converted model carries: the plan that made it, and a ``save_pretrained`` that writes a
folder which loads as small as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from bp_convert.errors import CheckpointError
from bp_convert.hub.layout import CODE, CODE_TEXT, KEY, PLAN, plan_beside, told_by
from bp_convert.hub.tied_names import forget_ties, tell_ties
from bp_convert.values.plan import Plan

PLAN_ATTRIBUTE = "bp_convert_plan"
METHOD = "save_pretrained"


class SavePretrained:
    """``save_pretrained`` of one converted model, in the place of its class's.

    It stands among the model's attributes, so that copies and pickles of the model have their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: Any, *arguments: Any, **options: Any) -> None:
        """Do as transformers does, and say in the folder what the layers are.

        Raises:
            CheckpointError: transformers could not make the model's class again.
        """
        if options.get("push_to_hub"):
            raise _refused(
                "push_to_hub, which would leave out the file that loads the layers",
                "model.push_to_hub(NAME), which writes all of the folder",
            )
        check_class(self.model)
        text = plan_text(self.model)
        plan = Plan.model_validate_json(text)
        check_whole_numbers(plan)
        with config_told(self.model, plan):
            save: Any = getattr(type(self.model), METHOD)
            save(self.model, save_directory, *arguments, **options)
        if options.get("is_main_process", True):
            folder = Path(save_directory)
            (folder / PLAN).write_text(plan_beside(text), encoding="utf-8")
            (folder / CODE).write_text(CODE_TEXT, encoding="utf-8")


class Refusing:
    """What a file's ``SavePretrained`` is taken for: a file's models write nothing until ``mark``
    has seen them."""

    def __call__(self, *arguments: Any, **options: Any) -> None:
        """Refuse."""
        refuse()


def text_of(plan: Plan) -> str:
    """Return a plan as JSON, as a model carries it; in few bits its text counts, too, and leaves
    out what is as ever."""
    return plan.model_dump_json(by_alias=True, exclude_defaults=bool(plan.stored))


def mark(model: nn.Module, plan_json: str) -> None:
    """Note on a converted model the plan that made it, as ``save`` wants to know it."""
    setattr(model, PLAN_ATTRIBUTE, plan_json)
    for module in model.modules():
        if callable(getattr(type(module), METHOD, None)):
            vars(module)[METHOD] = SavePretrained(model) if module is model else refuse
    tell_ties(model)


def unmark(model: nn.Module) -> None:
    """Undo ``mark``."""
    vars(model).pop(PLAN_ATTRIBUTE, None)
    for module in model.modules():
        held = vars(module).get(METHOD)
        if held is refuse or isinstance(held, SavePretrained | Refusing):
            del vars(module)[METHOD]
    forget_ties(model)


def is_marked(model: nn.Module) -> bool:
    """Return whether the model was made by carrying out a plan."""
    return isinstance(getattr(model, PLAN_ATTRIBUTE, None), str)


def plan_text(model: nn.Module) -> str:
    """Return the plan that a model was made by, as JSON.

    Raises:
        CheckpointError: it was not converted.
    """
    text = getattr(model, PLAN_ATTRIBUTE, None)
    if isinstance(text, str):
        return text
    raise CheckpointError(
        where=type(model).__name__,
        found="a model without a conversion plan",
        allowed="a model that convert() or apply() returned",
        fix="convert it first, or save it with torch.save",
    )


def check_class(model: nn.Module) -> None:
    """Refuse a model whose class transformers could not make again from a folder.

    Raises:
        CheckpointError: it is no model of transformers, or of a class of the user's own.
    """
    home = type(model).__module__
    if not home.startswith("transformers."):
        kind = "a class of its own" if hasattr(model, METHOD) else "no model of transformers"
        raise _refused(
            f"{type(model).__name__} of {home}: {kind}, which a folder cannot make again",
            "bp_convert.save(model, 'NAME.pt'), or -o NAME.pt",
        )


def check_whole_numbers(plan: Plan) -> None:
    """Refuse to write weights in few bits where transformers reads them.

    Raises:
        CheckpointError: the plan stores some so.
    """
    if plan.stored:
        layer = plan.stored[0]
        raise _refused(
            f"{layer.name} stored in {layer.store}, which transformers would not read",
            "bp_convert.save(model, 'NAME.pt') or 'NAME.safetensors', which hold these bits; for a "
            "folder convert with --store fp32, or take bp_convert.store(model, 'fp32')",
        )


@contextmanager
def config_told(model: Any, plan: Plan) -> Iterator[None]:
    """Let a model's config say what its layers are, and who makes them."""
    config = model.config
    entries = {name: f"{CODE.removesuffix('.py')}.{one}" for name, one in _autos(config, model)}
    had = getattr(config, "auto_map", None)
    setattr(config, KEY, told_by(plan))
    config.auto_map = {**(had or {}), **entries}
    try:
        yield
    finally:
        delattr(config, KEY)
        if had is None:
            del config.auto_map
        else:
            config.auto_map = had


def _autos(config: Any, model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each auto class that makes a model of this config, and the class that it makes."""
    import transformers
    from transformers.models.auto import modeling_auto

    for name in dir(modeling_auto):
        mapping = getattr(getattr(modeling_auto, name), "_model_mapping", None)
        if not name.startswith("AutoModel") or mapping is None or type(config) not in mapping:
            continue
        made: Any = mapping[type(config)]
        classes = made if isinstance(made, tuple | list) else (made,)
        found: type[Any] = type(model) if type(model) in classes else classes[0]
        if getattr(transformers, found.__name__, None) is found:
            yield name, found.__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from drawing bars of its own."""
    logging: Any = import_module("transformers.utils.logging")
    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def refuse(*arguments: Any, **options: Any) -> None:
    """Stand for ``save_pretrained`` of a part of a converted model.

    Raises:
        CheckpointError: always.
    """
    raise _refused(
        "a part of it: from_pretrained would not know its layers and start them at random",
        "save the whole model, or the plain form of the part: "
        "bp_convert.to_dense(part).save_pretrained(FOLDER)",
    )


def _refused(found: str, fix: str) -> CheckpointError:
    return CheckpointError(
        where="save_pretrained of a converted model",
        found=found,
        allowed="a whole model of transformers",
        fix=fix,
    )
