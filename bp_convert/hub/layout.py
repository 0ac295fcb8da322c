"""The names in a folder of transformers, and what its config.json says; no torch is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from bp_convert.values.plan import Plan

CONFIG = "config.json"
PLAN = "bp_convert_plan.json"  # beside the weights: all that the plan says, and why
CODE = "modeling_bp_convert.py"  # what AutoModel runs where it is trusted
KEY = "bp_convert"  # in config.json: what the layers are
WEIGHTS = (
    *("model.safetensors", "pytorch_model.bin"),
    *("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
)

CODE_TEXT = '''"""The model of this folder, of bilinear projections: pip install bp-convert.

Run by AutoModel.from_pretrained(FOLDER, trust_remote_code=True); bp_convert.from_pretrained(FOLDER)
needs no trust.
"""

import bp_convert.hub


def __getattr__(name):
    return bp_convert.hub.rebuilt(name)
'''

# What a model needs besides weights: tokenizers, pre-processing, licences; sentence-transformers.
_BESIDE = (".json", ".txt", ".model", ".spm", ".jinja", ".tiktoken", ".vocab", ".codes", ".bpe")
_OWN = (CONFIG, "generation_config.json", PLAN)
_LARGEST = 2**27  # bytes of such a file
_MODULES = "modules.json"  # of sentence-transformers: the folders of what follows the model


def config_of(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json; empty where there is none that can be read."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def holds_plan(folder: Path) -> bool:
    """Tell whether a folder holds a model that was converted here."""
    return isinstance(config_of(folder).get(KEY), dict)


def told_by(plan: Plan) -> dict[str, Any]:
    """Return what a config is to say of a plan: no more than making the layers takes."""
    changed = tuple(
        one.model_copy(update={"notes": (), "aliases": (), "error": None, "sensitivity": None})
        for one in plan.layers
        if one.action != "kept"
    )
    short = plan.model_copy(update={"layers": changed, "others": (), "notes": ()})
    said = short.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {"format": 1, "plan": said}


def plan_beside(text: str) -> str:
    """Return the text of the file beside the weights, given the plan's."""
    content = {"format": 1, "plan": json.loads(text)}
    return json.dumps(content, indent=1) + "\n"


def plan_of_folder(folder: Path) -> Plan | None:
    """Return the plan that lies in a folder; None where none can be read."""
    try:
        content = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return Plan.model_validate(content["plan"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a folder's weights; none where there are none.

    Raises:
        ValueError, OSError, KeyError, AttributeError, TypeError: an index that cannot be read.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            # Only names in this folder: an index is not to reach elsewhere.
            return sorted(folder / Path(str(one)).name for one in shards)
    return []


def class_named(config: dict[str, Any]) -> str | None:
    """Return the class that a config says its weights are of."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return first if isinstance(first, str) and first.isidentifier() else None


def companions(folder: Path) -> list[Path]:
    """Return what lies beside the weights in a folder and belongs to any form of its model, as
    paths in it."""
    found = [
        one
        for one in sorted(folder.iterdir())
        if one.is_file()
        and (one.suffix in _BESIDE or one.name.startswith("LICENSE"))
        and one.name not in _OWN
        and not one.name.startswith((".", "training_args"))
        and not one.name.endswith(".index.json")
        and one.stat().st_size <= _LARGEST
    ]
    for part in _parts(folder / _MODULES):
        inner = folder / part
        if inner.is_dir():
            found += [one for one in sorted(inner.rglob("*")) if one.is_file()]
    return [one.relative_to(folder) for one in found]


def copy_companions(source: Path, goal: Path) -> None:
    """Copy what lies beside the weights in one folder into another."""
    for one in companions(source):
        (goal / one).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / one, goal / one)


def _parts(modules: Path) -> list[str]:
    """Return the folders that modules.json names, but for the model's own."""
    try:
        content = json.loads(modules.read_text(encoding="utf-8"))
        named = [str(one.get("path", "")) for one in content]
    except (OSError, ValueError, AttributeError, TypeError):
        return []
    # Only names in this folder: modules.json is not to reach elsewhere.
    return [one for one in named if one and Path(one).name == one and one != ".."]
