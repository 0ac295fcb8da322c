"""What came of the matrix on one page: totals by family and mode, every reason, what is slow."""

from __future__ import annotations

import html
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.clock import machine
from benchmarks.zoo.trial import MODES, OUTCOMES

Record = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
SLOWEST = 15


def totals(records: Sequence[Record]) -> Table:
    """Count outcomes by mode and family, with the share that was converted."""
    head = ["mode", "family", "tried", *OUTCOMES, "converted %", "weights replaced %"]
    rows = []
    for mode in [*MODES, "none"]:
        of_mode = [one for one in records if one["mode"] == mode]
        families = sorted({family(one) for one in of_mode})
        for name in [*families, "all"] if of_mode else []:
            some = [one for one in of_mode if name in (family(one), "all")]
            counts = Counter(one["outcome"] for one in some)
            numbers = [str(counts[one]) for one in OUTCOMES]
            share = f"{100 * counts['converted'] / len(some):.1f}"
            rows.append([mode, name, str(len(some)), *numbers, share, _replaced(some)])
    return head, rows


def _replaced(records: Sequence[Record]) -> str:
    """Return the share of all weights of what converted that is in replaced layers."""
    counts: Counter[str] = Counter()
    for one in records:
        counts.update(one.get("weights", {}))
    return f"{100 * counts['replaced'] / counts.total():.1f}" if counts else "-"


def family(record: Record) -> str:
    """Return the library that a record's architecture comes from."""
    return str(record["name"]).partition("/")[0]


def grouped(records: Iterable[Record], outcome: str) -> list[tuple[str, list[Record]]]:
    """Return the records of an outcome by their reason, the most frequent first."""
    found: defaultdict[str, list[Record]] = defaultdict(list)
    for one in records:
        if one["outcome"] == outcome:
            found[reason(one)].append(one)
    return sorted(found.items(), key=lambda pair: -len(pair[1]))


def reason(record: Record) -> str:
    """Return a record's message without the names and numbers that are its own."""
    lines = [line.strip() for line in record.get("text", "").splitlines()]
    told = next((line for line in lines if line.startswith("found:")), lines[0] if lines else "")
    kind = record.get("error", "")
    words = re.sub(r"\d[\d.,e+-]*", "n", told.removeprefix("found:").strip())
    return " ".join(one for one in (kind, words, f"[{record.get('place', '')}]") if one)[:240]


def kept_reasons(records: Iterable[Record]) -> Table:
    """Count why layers stay as they are, and which share of all weights they hold."""
    counts: Counter[tuple[str, str]] = Counter()
    held: Counter[tuple[str, str]] = Counter()
    total: Counter[str] = Counter()
    for one in records:
        for words, number in one.get("reasons", {}).items():
            counts[one["mode"], words] += number
        for words, number in one.get("weights", {}).items():
            held[one["mode"], words] += number
            total[one["mode"]] += number
    rows = [
        [*key, str(counts[key] or "-"), f"{100 * held[key] / max(1, total[key[0]]):.2f}"]
        for key in sorted(counts | held, key=lambda key: (key[0], -held[key], -counts[key]))
        if key[1] != "replaced" and (counts[key] > 2 or held[key] > 0.0005 * total[key[0]])
    ]
    return ["mode", "reason", "layers", "% of the weights"], rows


def slowest(records: Iterable[Record]) -> Table:
    """Return the records that took the most seconds of processor time."""
    by_time = sorted(records, key=spent, reverse=True)[:SLOWEST]
    rows = [
        [one["name"], one["mode"], f"{spent(one):.1f}", _steps(one["seconds"])] for one in by_time
    ]
    return ["architecture", "mode", "seconds", "of which"], rows


def spent(record: Record) -> float:
    """Return a record's seconds of processor time."""
    return float(sum(record.get("seconds", {}).values()))


def _steps(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {one:.1f}" for name, one in seconds.items() if one >= 0.05)


def summary(records: Sequence[Record]) -> str:
    """Return the totals as text for a terminal."""
    head, rows = totals(records)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (head, *rows)
    ]
    took = sum(spent(one) for one in records)
    return "\n".join([*lines, f"{len(records)} trials, {took:.0f} s of processor time"])


Part = str | Table | tuple[str, str]


def parts(records: Sequence[Record]) -> list[tuple[str, list[Part]]]:
    """Return the page: headings, each with paragraphs and tables."""
    libraries = ("torch", "torchvision", "timm", "transformers", "bp-convert")
    versions = ", ".join(f"{name} {version(name)}" for name in libraries)
    names = len({one["name"] for one in records})
    took = sum(spent(one) for one in records)
    about = f"{names} architectures, {len(records)} trials, {took:.0f} s of processor time. "
    found: list[tuple[str, list[Part]]] = [
        ("Architectures and modes", [about + f"{machine()}; {versions}.", totals(records)])
    ]
    for outcome in OUTCOMES[2:]:
        groups = grouped(records, outcome)
        if groups:
            shown: list[Part] = []
            for words, some in groups:
                who = ", ".join(f"{one['name']} ({one['mode']})" for one in some)
                shown += [f"{len(some)} × {words}", ("code", some[0].get("text", "")), who]
            found.append((outcome.capitalize(), shown))
    kept = [one for one in records if one["outcome"] == "kept"]
    if kept:
        rows = [[one["name"], one["mode"], _why(one)] for one in kept]
        found.append(("Nothing to convert", [(["architecture", "mode", "reasons"], rows)]))
    found.append(("Why layers stay", [kept_reasons(records)]))
    found.append(("Slowest", [slowest(records)]))
    found.append(("Every trial", [_everything(records)]))
    return found


def _why(record: Record) -> str:
    return "; ".join(f"{words} ({n})" for words, n in record.get("reasons", {}).items()) or "-"


def _everything(records: Sequence[Record]) -> Table:
    modes = [mode for mode in [*MODES, "none"] if any(one["mode"] == mode for one in records)]
    by_key = {(one["name"], one["mode"]): one for one in records}
    names = sorted({one["name"] for one in records})
    rows = [[name, *(_cell(by_key.get((name, mode))) for mode in modes)] for name in names]
    return ["architecture", *modes], rows


def _cell(record: Record | None) -> str:
    if record is None:
        return ""
    if "params" not in record:
        return str(record["outcome"])
    before, after = record["params"]
    done = f"{record['replaced']}+{record['widened']}/{record['layers']}"
    return (
        f"{record['outcome']}, {done} layers, {after / max(1, before):.2f}, {spent(record):.1f} s"
    )


STYLE = (
    "body{font:15px/1.5 system-ui;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;font-size:13px}td,th{border:1px solid #ccc;padding:2px 8px;"
    "text-align:left}pre{background:#f5f5f5;padding:.6rem;white-space:pre-wrap}"
)


def write_pages(records: Sequence[Record], path: Path) -> None:
    """Write NAME.md and NAME.html."""
    from markdown import markdown  # comes with mkdocs

    made = parts(records)
    text = _markdown(made)
    path.with_suffix(".md").write_text(text)
    body = markdown(text, extensions=["tables", "fenced_code"])
    head = f"<meta charset=utf-8><style>{STYLE}</style><title>{made[0][0]}</title>"
    path.with_suffix(".html").write_text(f"<!doctype html><html lang=en>{head}\n{body}\n</html>\n")


def _markdown(made: list[tuple[str, list[Part]]]) -> str:
    lines: list[str] = []
    for level, (title, body) in enumerate(made):
        lines += [f"{'#' if level == 0 else '##'} {title}", ""]
        for part in body:
            if isinstance(part, str):
                lines += [_plain(part), ""]
            elif part[0] == "code":
                lines += ["```", str(part[1]), "```", ""]
            else:
                head, rows = part
                lines += [_bar(list(head)), _bar(["---"] * len(head))]
                lines += [_bar(row) for row in rows] + [""]
    return "\n".join(lines)


def _bar(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(_plain(str(cell)) for cell in cells)} |"


def _plain(text: str) -> str:
    """Keep what Markdown and HTML would read as their own."""
    return re.sub(r"([*_`|])", r"\\\1", html.escape(text, quote=False))
