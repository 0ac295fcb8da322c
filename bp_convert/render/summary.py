"""The verdict: what was saved, what it costs, and whether training is needed, in plain words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isfinite

from bp_convert.render import words
from bp_convert.render.numbers import change, layers, percent, short, size
from bp_convert.values.plan import LayerPlan, largest
from bp_convert.values.report import Report, Score

USABLE = 0.01  # relative difference of the outputs below which nothing needs to be trained
SAME = 1e-4  # the same up to rounding, which a drawn input shows as well as any
CLOSE = 0.1
FINE = 0.01  # share of a metric whose loss needs no training
FEW = 16  # examples below which nothing is called usable
WHOLE = 0.999  # of the weights' energy, from which equal outputs tell that nothing was lost
UNMOVED = "they do not depend on what was lost, as behind a head of zeros; score it before use."
LITTLE = "too few for a verdict; score it on more with --evaluate before use."
TRY = " Try --target params=0.25 --calibrate DATA: a budget, spent where it costs least."
NOTHING = "that is no measure of its quality; score it on real data with --evaluate before use."


def verdict(report: Report) -> str:
    """Return one paragraph that a user can act on."""
    done = report.plan.converted
    if not done and not report.plan.stored:
        return _nothing(report)
    parts = [_saved(report), _quality(report, done), _speed(report), _plain(report)]
    if report.training is not None:
        parts.append(words.trained_verdict(report.training))
    return " ".join(filter(None, parts))


def energy_kept(report: Report) -> float | None:
    """Return the share of the squared weights that the factors keep, weighted by parameters."""
    fitted = [layer for layer in report.plan.converted if layer.name in report.fit_errors]
    total = sum(layer.params[0] for layer in fitted)
    if not total:
        return None
    return sum(one.params[0] * _kept(report.fit_errors[one.name]) for one in fitted) / total


def _kept(error: float) -> float:
    """Return the share of the squares that a relative error leaves; none where it is not finite."""
    return 1 - error**2 if isfinite(error) else 0.0


def _nothing(report: Report) -> str:
    reasons = Counter(layer.reason for layer in report.layers if layer.reason)
    held = largest(report.plan.others, report.plan.params.before)
    without = f" For want of a kind these stay as they are: {held}." if held else ""
    if not reasons:
        return f"Nothing was converted: the model holds no layer of a known kind.{without}"
    reason, count = reasons.most_common(1)[0]
    hint = ""
    if "dense layer" in reason:
        hint = " --convert-anyway trades that speed for size."
    if not report.plan.settings.target:
        hint += TRY
    return (
        f"Nothing was converted; {count} of {len(report.layers)} layers: {reason}.{hint}{without}"
    )


def _saved(report: Report) -> str:
    params, macs = report.plan.params, report.plan.macs
    if report.plan.stored:
        return _saved_bytes(report)
    text = f"({short(params.before)} to {short(params.after)})"
    if params.after < params.before:
        text = f"Saved {percent(1 - params.ratio)} of the parameters {text}"
    elif params.after > params.before:
        text = f"Grew by {percent(params.ratio - 1)} of the parameters {text}"
    else:
        text = f"The same number of parameters ({short(params.after)})"
    if macs is not None:
        text += f"; multiply-adds {change(macs)}"
    return text + "."


def _saved_bytes(report: Report) -> str:
    """Say what became of the bytes, and of the parameters, where they do not go together."""
    params, held, macs = report.plan.params, report.plan.bytes, report.plan.macs
    text = f"Saved {percent(1 - held.ratio)} of the bytes ({size(held.before)} to "
    text += f"{size(held.after)})"
    if params.after < params.before:
        text += f" and {percent(1 - params.ratio)} of the parameters"
    elif not report.plan.converted:
        stores = sorted({str(layer.store) for layer in report.plan.stored})
        text += f", all layers dense, in {', '.join(stores)}"
    if macs is not None:
        text += f"; multiply-adds {change(macs)}"
    return text + "."


def _quality(report: Report, done: Sequence[LayerPlan]) -> str:
    if report.scores:
        return _scored(report.scores[0], trained=report.training is not None)
    if report.training is not None:
        return ""  # what was measured before it no longer holds
    random = [layer for layer in done if any("starts from noise" in note for note in layer.notes)]
    if random:
        every = "It" if len(random) == len(done) else f"{len(random)} of {len(done)} layers"
        return f"{every} start{'s' if every == 'It' else ''} from noise: train it before use."
    kept = energy_kept(report)
    found = report.verification
    if found is None or (found.output_error is None and found.flips is None):
        return _unseen(report, done, kept)
    gap = max(found.output_error or 0.0, found.flips or 0.0)
    outputs = f"utputs {words.outputs(found)} on {words.compared_on(found)}"
    if not gap < CLOSE:
        advice = "train it before use."
    elif gap < SAME and not found.flips and not found.examples:
        whole = kept is None or kept > WHOLE
        advice = "the same function, usable as it is." if whole else UNMOVED
    elif found.examples < FEW:
        advice = LITTLE if found.examples else NOTHING
    else:
        advice = "usable as it is." if gap < USABLE else "check its accuracy."
    if kept is None or gap < USABLE:
        return f"O{outputs}: {advice}"
    return f"{_energy(report, done, kept)}; o{outputs}: {advice}"


def _unseen(report: Report, done: Sequence[LayerPlan], kept: float | None) -> str:
    """Say what is known where no outputs were compared."""
    if kept is None:
        return "What it does to the outputs was not measured."
    more = "." if kept > 1 - CLOSE**2 else "; expect to train it before use."
    return _energy(report, done, kept) + more


def _energy(report: Report, done: Sequence[LayerPlan], kept: float) -> str:
    ranks = {layer.rank for layer in done}
    what = f"Rank {ranks.pop()}" if len(ranks) == 1 else "The factors"
    verb = "keeps" if what.startswith("Rank") else "keep"
    whose = "these layers' outputs" if report.calibration else "these weights' energy"
    return f"{what} {verb} {percent(kept)} of {whose}"


def _scored(score: Score, *, trained: bool) -> str:
    """Say what became of the metric, and whether that needs training."""
    text = words.score(score)
    text = f"{text[0].upper()}{text[1:]}"
    if score.examples < FEW:
        return f"{text}: {LITTLE}"
    if score.lost <= FINE * abs(score.before):
        return f"{text}: usable as it is."
    more = "more training" if trained else "training it"
    return f"{text}; {more}, or a larger target, wins accuracy back."


def _plain(report: Report) -> str:
    """Say where plain int8 takes no more bytes and is nearer to the source."""
    plain, found = report.plain_int8, report.verification
    if plain is None or found is None or found.output_error is None or report.training is not None:
        return ""
    if not plain.output_error < found.output_error:
        return ""
    gap = f"outputs differ by {percent(plain.output_error)}"
    return (
        f"On size alone plain int8 serves better: {size(plain.bytes)}, {gap} (--target params=1 "
        "--store int8); it saves no multiply-adds."
    )


def _speed(report: Report) -> str:
    slower = [one for one in report.latency if one.speedup < 1]
    if slower:
        worst = min(slower, key=lambda one: one.speedup)
        return f"It is slower: {1 / worst.speedup:.1f}x the dense time at batch {worst.batch}."
    if report.latency:
        best = min(report.latency, key=lambda one: one.speedup)
        return f"It is {best.speedup:.1f}x as fast at batch {best.batch}."
    told = sum(any("slower" in note for note in layer.notes) for layer in report.layers)
    if told:
        be = "is" if told == 1 else "are"
        return f"{layers(told)} {be} expected to be slower than before (measure with --measure)."
    return ""
