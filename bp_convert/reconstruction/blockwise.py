"""Block after block: each tuned to its source's output from the inputs that it now gets.

Squared errors over squared norms are made less by Adam, without labels (in the manner of BRECQ,
Li et al., ICLR 2021, who round weights so; here factors, biases, norms and small kept layers
follow). Examples that are not learnt judge every block, and in the end the whole model: what is
not better there goes back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from bp_convert.calibration.tap import Batches
from bp_convert.graph.clone import clone
from bp_convert.graph.example import device_of
from bp_convert.graph.reshape import cast
from bp_convert.graph.running import draws_kept, evaluating
from bp_convert.graph.tree import rows_in
from bp_convert.kinds import is_twin, table_rows
from bp_convert.layers.recurrent_stack import RecurrentStack
from bp_convert.reconstruction.bench import Bench, Untunable, error_beside, relay_of
from bp_convert.reconstruction.block_finding import blocks_of
from bp_convert.reconstruction.call_order import Segment, segments_of
from bp_convert.reconstruction.dividing import divided
from bp_convert.reconstruction.effort import asked_of, epochs_of, held_of
from bp_convert.reconstruction.resuming import Done
from bp_convert.reconstruction.tuning import put, tune
from bp_convert.values.plan import Plan
from bp_convert.values.progress import Progress, unheard
from bp_convert.values.reconstruction import BlockResult, Reconstructed

SMALL = 2**20  # numbers in a kept weight, up to which it is tuned
FEW = 3  # epochs, up to which blocks take the rate that was best for the one before
EXACT = 1e-6  # relative error below which there is nothing to make up for
HALVES = (torch.float16, torch.bfloat16)
LONG = 1800.0  # seconds that nobody waits for who did not ask for it
WORSE = "the model's outputs on the held-out examples were not better: all blocks went back"
UNJUDGED = "the model puts out no floating-point numbers to judge it by: all blocks went back"


def reconstruct(
    source: nn.Module,
    converted: nn.Module,
    plan: Plan,
    batches: Batches,
    *,
    digest: str = "",
    progress: Progress = unheard,
) -> Reconstructed | None:
    """Tune the blocks of ``converted`` in place; None where that is switched off.

    Args:
        source: the model that was converted; it is run and left as it is.
        batches: (args, kwargs) of forward.
        digest: names the examples; a run on them that was killed is gone on with.
    """
    if plan.settings.reconstruct == "off" or not plan.converted:
        return None
    count = sum(rows_in(batch) for batch in batches)
    epochs, reason = epochs_of(plan, count, device_of(converted))
    if not epochs:
        return Reconstructed(reason=reason)
    parts, judging = _parted(plan, batches)
    if not judging:
        return Reconstructed(reason="the examples cannot be parted into learnt and held out ones")
    with draws_kept(source, converted):
        try:
            return _Course(source, converted, plan, parts, judging, epochs, digest, progress).run()
        except TooLong as problem:
            return Reconstructed(reason=str(problem))


def learnt_of(model: nn.Module, plan: Plan, batches: Batches) -> Batches:
    """Return the batches that factors may be fitted to: all, or without the examples that will
    judge the tuning of blocks, which nothing must know before."""
    count = sum(rows_in(batch) for batch in batches)
    if not plan.converted or not epochs_of(plan, count, device_of(model))[0]:
        return batches
    parts, judging = _parted(plan, batches)
    return parts[:-judging] if judging else batches


def _parted(plan: Plan, batches: Batches) -> tuple[Batches, int]:
    """Return batches, and how many of the last judge."""
    count = sum(rows_in(batch) for batch in batches)
    return divided(batches, held_of(count, asked_of(plan.settings).held_out))


class TooLong(Exception):  # noqa: N818 - a reason, which a report gives
    """Nobody asked for what would take so long."""


class _Course:
    """One reconstruction: copies that run, what is done, and what is left to do."""

    def __init__(
        self,
        source: nn.Module,
        converted: nn.Module,
        plan: Plan,
        batches: Batches,
        judging: int,
        epochs: int,
        digest: str,
        progress: Progress,
    ) -> None:
        self.start = time.perf_counter()
        self.source, self.converted = source, converted
        self.asked, self.epochs, self.seed = asked_of(plan.settings), epochs, plan.settings.seed
        self.batches, self.progress = batches, progress
        self.learnt = range(len(batches) - judging)
        self.held = range(len(batches) - judging, len(batches))
        # Copies, for models that write on themselves; the second is tuned.
        self.before = evaluating(clone(source, apart=True))
        self.after = evaluating(clone(converted, apart=True))
        if any(one.dtype in HALVES for one in self.after.parameters()):
            cast(self.after, torch.float32)
        if device_of(self.after).type == "cuda":
            _with_gradients(self.after)
        self.unasked = plan.settings.reconstruct is None
        self.relays = relay_of(self.before, batches), relay_of(self.after, batches)
        self.names = {id(one): name for name, one in self.after.named_parameters()}
        known = set(self.names.values())
        self.free = [name for name in _free(converted) if name in known]
        self.holders = _holders(self.after.modules())
        words = (self.asked.model_dump_json(), str(epochs), str(self.seed), digest)
        self.kept = Done(source, converted, *words, str(device_of(converted)))
        self.resumed = 0
        self.rate: float | None = None

    def run(self) -> Reconstructed:
        blocks = blocks_of(self.after, self.asked.blocks)
        self.segments = segments_of(self.after, blocks, self.batches[0])
        results = []
        try:
            for number, segment in enumerate(self.segments):
                results.append(self._done(number, segment, self.epochs))
        finally:
            for relay in self.relays:
                relay.close()
        if self.asked.end_to_end:
            names = tuple(name for one in self.segments for name in one.modules)
            results.append(
                self._done(len(results), Segment(names), self.asked.end_to_end, "end to end")
            )
        return self._judged([one for one in results if one is not None])

    def _done(
        self, number: int, segment: Segment, epochs: int, name: str = ""
    ) -> BlockResult | None:
        """Tune a segment, or take what an earlier run made of it; None where nothing is tuned."""
        parameters = self._parameters(segment)
        if not parameters:
            return None
        found = self.kept.read(number)
        if found is not None and set(found[1]) == {self.names[id(one)] for one in parameters}:
            self.resumed += 1
            put(parameters, [found[1][self.names[id(one)]] for one in parameters])
            result = found[0]
        else:
            result = self._tuned(number, segment, parameters, epochs, name or segment.name)
            self.kept.write(number, result, {self.names[id(one)]: one for one in parameters})
        if result.kept and segment.block and self.epochs <= FEW:
            self.rate = result.lr  # of blocks alike: to try others is a third of their epochs
        return result

    def _tuned(
        self,
        number: int,
        segment: Segment,
        parameters: Sequence[nn.Parameter],
        epochs: int,
        name: str,
    ) -> BlockResult:
        begun, ticks = time.perf_counter(), 0
        total = len(self.segments) * self.epochs + self.asked.end_to_end

        def ticked() -> None:
            nonlocal ticks
            ticks += 1
            each = (time.perf_counter() - begun) / ticks
            left = each * max(0, total - number * self.epochs - ticks)
            done = min(total, number * self.epochs + ticks)
            if self.unasked and left > LONG:
                raise TooLong(f"it would take {_time(left)} (--reconstruct does it)")
            self.progress(f"tuning, {_time(left)} left: {name}", done, total)

        self.progress(f"tuning {name}", number * self.epochs, total)
        start = [one.detach().clone() for one in parameters]
        bench = None
        try:
            bench = Bench(self.before, self.after, segment, parameters, self.batches, self.relays)
            error = bench.error(self.held)
            if error < EXACT:
                reason = "nothing before it was changed"
                return BlockResult(name=name, before=error, after=error, reason=reason)
            found = tune(
                bench,
                parameters,
                self.learnt,
                self.held,
                epochs=epochs,
                rate=self.asked.lr or (self.rate if segment.block else None),
                seed=self.seed % 2**32,
                ticked=ticked,
            )
        except TooLong:
            raise
        except Exception as problem:  # a forward that takes no gradients may fail in any way
            put(parameters, start)
            return BlockResult(name=name, reason=_why(problem), seconds=_since(begun))
        finally:
            if bench is not None:
                bench.close()
        better = found.after < found.before
        return BlockResult(
            name=name,
            before=found.before,
            after=found.after,
            kept=better,
            lr=found.rate,
            epochs=found.epochs,
            seconds=_since(begun),
            reason="" if better else "no step lowered the error on the held-out examples",
        )

    def _parameters(self, segment: Segment) -> list[nn.Parameter]:
        """Return what is tuned of a segment: what no other part of the model holds, too."""
        found: dict[int, nn.Parameter] = {}
        inside = {
            id(module): module
            for name in segment.modules
            for module in self.after.get_submodule(name).modules()
        }
        here = _holders(inside.values())
        for module in inside.values():
            for one in module.parameters(recurse=False):
                whole = here[id(one)] == self.holders[id(one)]
                if whole and self.names.get(id(one)) in self.free:
                    found[id(one)] = one
        return list(found.values())

    def _judged(self, results: list[BlockResult]) -> Reconstructed:
        """Carry over what was tuned, and take it back where the whole model is not better."""
        about: dict[str, Any] = {
            "learnt": sum(rows_in(self.batches[at]) for at in self.learnt),
            "held": sum(rows_in(self.batches[at]) for at in self.held),
            "resumed": self.resumed,
        }
        if not any(one.kept for one in results):
            reason = "no block became better on the held-out examples"
            return Reconstructed(
                blocks=tuple(results), reason=reason, seconds=_since(self.start), **about
            )
        own = dict(self.converted.named_parameters())
        tuned = [own[name] for name in self.free]
        start = [one.detach().clone() for one in tuned]
        before = self._error()
        found = dict(self.after.named_parameters())
        put(tuned, [found[name] for name in self.free])
        after = self._error()
        reason = UNJUDGED if before is None or after is None else ""
        if before is not None and after is not None and not after < before:
            reason = WORSE
        if reason:
            put(tuned, start)
            results = [
                one.model_copy(update={"kept": False, "reason": reason}) if one.kept else one
                for one in results
            ]
        return Reconstructed(
            blocks=tuple(results),
            before=before,
            after=after if not reason else before,
            reason=reason,
            seconds=_since(self.start),
            **about,
        )

    def _error(self) -> float | None:
        """Return the relative error of the converted model's outputs on what is held out."""
        model = evaluating(clone(self.converted, apart=True))
        return error_beside(self.before, model, [self.batches[at] for at in self.held])


def _free(model: nn.Module) -> list[str]:
    """Return the names of the parameters that may be tuned: floating-point ones of one holder, and
    factors that bilinear layers share.

    Tables stay, of which the examples see few rows; so do large weights that were kept, and what
    its owner froze, in a model that is not frozen as a whole.
    """
    holders = _holders(model.modules())
    names = {id(one): name for name, one in model.named_parameters()}
    looked = {
        id(one)
        for module in model.modules()
        if table_rows(module) is not None
        for one in module.parameters(recurse=False)
    }
    frozen = not any(one.requires_grad for one in model.parameters())
    found = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        twin = is_twin(module) or id(module) in inside
        if twin:
            inside |= {id(one) for one in module.modules()}
        if table_rows(module) is not None:
            continue
        for key, one in module.named_parameters(recurse=False):
            if not one.is_floating_point() or id(one) in looked:
                continue
            if holders[id(one)] > 1 and (not twin or names.get(id(one)) != f"{name}.{key}"):
                continue
            if not twin and (one.numel() > SMALL or not (frozen or one.requires_grad)):
                continue
            found.append(f"{name}.{key}".lstrip("."))
    return found


def _with_gradients(model: nn.Module) -> None:
    """Let gradients go through recurrent layers on a GPU, where cuDNN keeps what they need in train
    mode only."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase | RecurrentStack):
            module.dropout = 0.0
            module.train()


def _why(problem: Exception) -> str:
    if isinstance(problem, Untunable):
        return str(problem)
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    return f"it does not run with gradients: {lines[0][:120]}"


def _holders(modules: Iterable[nn.Module]) -> Counter[int]:
    """Count the modules that hold each parameter, by ``id``."""
    return Counter(id(one) for module in modules for one in module.parameters(recurse=False))


def _since(start: float) -> float:
    return time.perf_counter() - start


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
