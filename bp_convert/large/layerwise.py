"""A plan carried out from disk to disk: a layer is read, factored and written before the next.

What is under way stands in one hidden folder beside its goal, a shard at a time. A run that is
killed goes on after the last whole shard, and writes the same bytes as one that is not.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from bp_convert._version import __version__
from bp_convert.errors import CheckpointError, PlanError, VerificationError
from bp_convert.files.atomic import check_folder, put_folder, sync, temporary, write_text
from bp_convert.graph.running import same_draws
from bp_convert.graph.walk import walk
from bp_convert.hub.layout import CODE, CODE_TEXT, PLAN, copy_companions, plan_beside
from bp_convert.hub.marked import config_told
from bp_convert.hub.rebuild import needed, rebuilt
from bp_convert.kinds import Spread
from bp_convert.large.shards import Shard, size_of
from bp_convert.large.skeleton import Skeleton
from bp_convert.mixing import DRAWN, draw_at_size
from bp_convert.surgery import Converted, apply_plan, check, fill
from bp_convert.values.plan import LayerPlan, Plan
from bp_convert.values.progress import Progress

SHARD = 2**29  # bytes of a file, beyond which another is begun
_JOB = "job.json"  # what the work is of, and below the errors of a shard's layers
_LOCK = "run.lock"
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Part:
    """Tensors that are written together: those of one layer's twin, or one that stays.

    Attributes:
        names: of the converted model's state.
        layer: that is replaced; None for one that stays.
    """

    names: tuple[str, ...]
    layer: LayerPlan | None


def convert_folder(
    skeleton: Skeleton,
    source: Path,
    plan: Plan,
    goal: Path,
    *,
    force: bool = False,
    progress: Progress,
) -> tuple[Converted, int]:
    """Convert the model of one folder into another, with one layer in memory at a time.

    Returns:
        What became of the layers, without a model; and how many shards an earlier run had written.

    Raises:
        CheckpointError: the folder cannot be written, or a file cannot be read.
        PlanError: the plan does not fit the model.
        VerificationError: the folder does not hold what its config tells.
    """
    real = check_folder(goal, force=force)
    shared = next((one for one in plan.converted if one.shares), None)
    if shared is not None:
        raise PlanError(
            where=f"{shared.name} ({shared.kind})",
            found="factors that it shares with another layer, which are fitted together",
            allowed="layers on factors of their own, where one is in memory at a time",
            fix="convert the whole model in memory, or set these layers to kept in the plan",
        )
    check(skeleton.model, plan)
    return _Run(skeleton, source, plan, real, progress).run()


class _Run:
    def __init__(
        self, skeleton: Skeleton, source: Path, plan: Plan, goal: Path, progress: Progress
    ) -> None:
        self.skeleton, self.source, self.plan, self.goal = skeleton, source, plan, goal
        self.progress = progress
        self.sites = {site.name: site for site in walk(skeleton.model)}
        empty = apply_plan(skeleton.model, plan, structure_only=True, checked=True).model
        self.forms = _once(empty, skeleton.names)
        self.shards = self._shared_out()
        self.work = temporary(goal, hashlib.sha256(goal.name.encode()).hexdigest()[:16])
        self.done = Converted(skeleton.model)

    def run(self) -> tuple[Converted, int]:
        self.work.mkdir(exist_ok=True)
        lock = FileLock(self.work / _LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise CheckpointError(
                where=str(self.goal),
                found="another run that writes it",
                allowed="one run at a time",
                fix="wait for it, or give another name",
            ) from None
        try:
            self._same_work_or_none()
            self._room()
            resumed = sum(self._file(number).is_file() for number in range(len(self.shards)))
            todo = len(self.plan.converted)
            for number, parts in enumerate(self.shards):
                if not self._file(number).is_file():
                    self._write(number, parts, todo)
                self._note(number)
            self.progress("writing", todo, todo)
            self._beside()
            self._check()
        finally:
            lock.release()
        for one in (*self.work.glob("*.layers"), self.work / _JOB, self.work / _LOCK):
            one.unlink(missing_ok=True)
        for one in self.work.rglob("*"):
            sync(one)
        put_folder(self.work, self.goal)
        return self.done, resumed

    # What is written where

    def _shared_out(self) -> list[list[Part]]:
        """Share the tensors out among files, in the model's order."""
        shards: list[list[Part]] = [[]]
        held = 0
        for part in _parts(self.forms, self.plan):
            size = sum(size_of(self.forms[name]) for name in part.names)
            if held and held + size > SHARD:
                shards.append([])
                held = 0
            shards[-1].append(part)
            held += size
        return shards

    def _file(self, number: int) -> Path:
        if len(self.shards) == 1:
            return self.work / "model.safetensors"
        return self.work / f"model-{number + 1:05d}-of-{len(self.shards):05d}.safetensors"

    def _same_work_or_none(self) -> None:
        """Empty the folder where it holds the work of another job."""
        told = {
            "version": __version__,
            "torch": torch.__version__,
            "plan": self.plan.model_dump(mode="json", by_alias=True),
            "source": [
                (one.name, one.stat().st_size, one.stat().st_mtime_ns)
                for one in self.skeleton.checkpoint.files
            ],
        }
        text = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest() + "\n"
        job = self.work / _JOB
        if job.is_file() and job.read_text(encoding="utf-8") == text:
            for one in self.work.glob("*.part"):
                one.unlink()
            return
        for one in self.work.iterdir():
            if one.name != _LOCK:
                shutil.rmtree(one) if one.is_dir() else one.unlink()
        write_text(job, text)

    def _room(self) -> None:
        wanted = sum(
            size_of(self.forms[name])
            for number, parts in enumerate(self.shards)
            if not self._file(number).is_file()
            for part in parts
            for name in part.names
        )
        free = shutil.disk_usage(self.work).free
        if free < wanted:
            raise CheckpointError(
                where=str(self.goal),
                found=f"{wanted / 1e9:.1f} GB to write, and {free / 1e9:.1f} GB free",
                allowed="a disk with room for the result",
                fix="free some space, or write somewhere else",
            )

    # A shard

    def _write(self, number: int, parts: Sequence[Part], todo: int) -> None:
        path = self._file(number)
        begun, errors = path.with_suffix(".part"), {}
        forms = {name: self.forms[name] for part in parts for name in part.names}
        try:
            with Shard(begun, forms) as shard:
                for part in parts:
                    if part.layer is None:
                        for name in part.names:
                            shard.copy(name, self.skeleton.stored(name))
                        continue
                    at = self.plan.converted.index(part.layer)
                    self.progress(part.layer.name, at, todo)
                    twin, error = self._twin(part.layer, at)
                    state = twin.state_dict()
                    for name in part.names:
                        shard.put(name, state[name.removeprefix(f"{part.layer.name}.")])
                    if error is not None:
                        errors[part.layer.name] = error
            sync(begun)
            write_text(path.with_suffix(".layers"), json.dumps(errors), force=True)
            begun.replace(path)
            sync(self.work)
        except OSError as problem:
            raise CheckpointError(
                where=str(path),
                found=f"it cannot be written: {problem.strerror or problem}",
                allowed="a folder that can be written, with enough free space",
                fix="free some space and run the command again: it goes on from here",
            ) from problem

    def _note(self, number: int) -> None:
        """Take up how well a shard's layers were fitted, now or by an earlier run."""
        text = self._file(number).with_suffix(".layers").read_text(encoding="utf-8")
        self.done.errors.update(json.loads(text))

    @torch.no_grad()
    def _twin(self, layer: LayerPlan, at: int) -> tuple[nn.Module, float | None]:
        """Read a layer, and return its bilinear twin and the error of the fit."""
        site = self.sites[layer.name]
        dense = copy.deepcopy(site.held)  # on the meta device
        given = {}
        for key in dense.state_dict():
            names = site.names if site.kind.bare else [f"{one}.{key}" for one in site.names]
            known = next(name for name in names if name in self.skeleton.names)
            given[key] = self.skeleton.checkpoint.tensor(self.skeleton.names[known])
        dense.load_state_dict(given, assign=True)
        there = replace(site, held=dense)
        with same_draws(self.plan.settings.seed + at):  # whatever was written before it
            twin = site.kind.build(there.outline, layer.after, dict(layer.factors), "cpu")
            site.kind.carry(there.outline, twin)
            if layer.init == "random":
                self.done.random[layer.name] = "as asked"
                return twin, None
            if layer.init == "mixed":
                draw_at_size(there, twin, Spread())
                self.done.random[layer.name] = DRAWN
                return twin, None
            return twin, fill(layer, there, twin, Spread())

    # What lies beside the weights

    def _beside(self) -> None:
        copy_companions(self.source, self.work)
        if (self.source / _GENERATION).is_file():
            shutil.copyfile(self.source / _GENERATION, self.work / _GENERATION)
        model: Any = self.skeleton.model
        with config_told(model, self.plan):
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(self.work)
        (self.work / CODE).write_text(CODE_TEXT, encoding="utf-8")
        text = self.plan.model_dump_json(by_alias=True)
        (self.work / PLAN).write_text(plan_beside(text), encoding="utf-8")
        if len(self.shards) > 1:
            placed = {
                name: self._file(number).name
                for number, parts in enumerate(self.shards)
                for part in parts
                for name in part.names
            }
            size = sum(map(size_of, self.forms.values()))
            index = {"metadata": {"total_size": size}, "weight_map": placed}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self.work / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _check(self) -> None:
        """Make the model again from its config, without weights, and compare it with the files.

        Raises:
            VerificationError: they do not belong together.
        """
        transformers = needed("transformers", str(self.work))
        config = transformers.AutoConfig.from_pretrained(self.work, local_files_only=True)
        made: Any = rebuilt(type(self.skeleton.model).__name__)
        with torch.device("meta"):
            again = made(config)
        wanted = {name: tuple(one.shape) for name, one in _once(again, self.forms).items()}
        held = {name: tuple(one.shape) for name, one in self.forms.items()}
        odd = sorted(name for name in {**wanted, **held} if wanted.get(name) != held.get(name))
        if odd:
            raise VerificationError(
                where=str(self.goal),
                found=f"{len(odd)} tensors that its config does not tell as they are, such as "
                f"{odd[0]}",
                allowed="a folder from which the same model is made",
                fix="please report this model",
            )


def _once(model: nn.Module, preferred: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return each tensor of a model's state under one name, of tied ones under that which is
    preferred."""
    state = model.state_dict(keep_vars=True)
    named: dict[int, str] = {}
    for name, tensor in state.items():
        if id(tensor) not in named or (name in preferred and named[id(tensor)] not in preferred):
            named[id(tensor)] = name
    return {name: state[name] for name in state if named[id(state[name])] == name}


def _parts(forms: Mapping[str, Tensor], plan: Plan) -> Iterator[Part]:
    """Yield what is written together, in the model's order."""
    layers = {one.name: one for one in plan.converted}
    found: dict[str, list[str]] = {}
    for name in forms:
        owner = name.rpartition(".")[0]
        while owner and owner not in layers:
            owner = owner.rpartition(".")[0]
        found.setdefault(owner or name, []).append(name)
    for owner, names in found.items():
        yield Part(tuple(names), layers.get(owner))
