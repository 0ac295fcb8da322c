"""Lines of text, as a model's tokenizer cuts them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bp_convert.data.dataset import Item, Request, Rows, placed
from bp_convert.data.locator import Locator
from bp_convert.graph.example import OPTIONAL
from bp_convert.values.tensors import TensorSpec

LENGTH = 128  # tokens of one example, at most
IDS = "input_ids"


class TextLines(Rows):
    """A text file with one example a line, optionally followed by a tab and its label.

    Labels that are all integers stand for themselves; other ones are numbered in the order of
    their names. Only where lines start is held, so that a large file costs 16 bytes a line.

    Args:
        request: for the file, with the option ``length``: the most tokens of one example, 128 or
            what the tokenizer says its model takes, if that is less. Among the model's inputs are
            the token ids.

    Raises:
        DataError: no tokenizer, or one with more words than the model's word table; some lines
            with a label and some without; a model that takes no token ids.
    """

    def __init__(self, request: Request) -> None:
        source = request.source
        source.admit(("length",))
        self.where, self._bad = source.where, source.bad
        self._path = source.path
        self._starts: array[int] = array("q")
        self._index()
        self._tokenizer = self._load(request.tokenizer)
        self._names = self._match(request.specs)
        self._length = self._limit(source)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitems__(self, rows: Sequence[int]) -> Item:
        """Tokenise lines; the batch (N, T) is padded to its own longest example."""
        encoded = self._tokenizer(
            [self._text(row) for row in rows],
            padding=True,
            truncation=True,
            max_length=self._length,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return *placed(encoded, self._names), self._labels_of(rows)

    def _labels_of(self, rows: Sequence[int]) -> Tensor | None:
        return None if self._labels is None else torch.tensor([self._labels[row] for row in rows])

    def _index(self) -> None:
        codes: array[int] = array("q")
        known: dict[str, int] = {}
        plain = 0
        start = 0
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                line = self._decode(raw, number)
                if line:
                    _, tab, label = line.rpartition("\t")
                    plain += not tab
                    if tab:
                        codes.append(known.setdefault(label.strip(), len(known)))
                    if plain and known:
                        raise self._bad(
                            f"line {number} {'with' if tab else 'without'} a label after a tab, "
                            f"and lines before it {'without' if tab else 'with'}",
                            "one example a line, all with a label after a tab or none with a tab",
                            "write text<TAB>label in every line, or replace the tabs by spaces",
                        )
                    self._starts.append(start)
                start += len(raw)
        self._labels = _numbered(codes, known) if known else None

    def _decode(self, raw: bytes, number: int) -> str:
        try:
            return raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as problem:
            raise self._bad(
                f"line {number} is not UTF-8: {problem.reason}",
                "text in UTF-8",
                "save the file as UTF-8",
            ) from problem

    def _text(self, row: int) -> str:
        with self._path.open("rb") as file:
            file.seek(self._starts[row])
            line = file.readline().decode("utf-8-sig").strip()
        return line if self._labels is None else line.rpartition("\t")[0].strip()

    def _load(self, folder: str | Path | None) -> Any:
        fix = "name the folder of the model's tokenizer (tokenizer.json or vocab.txt)"
        if folder is None:
            raise self._bad("text, and no tokenizer", "a folder with the model's tokenizer", fix)
        try:
            from transformers import AutoTokenizer
        except ImportError as problem:
            raise self._bad(
                "transformers is not installed",
                "text with transformers installed",
                "pip install 'bp-convert[transformers]'",
            ) from problem
        if not Path(folder).expanduser().is_dir():
            raise self._bad(f"no folder {folder}", "a local folder; nothing is downloaded", fix)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(Path(folder).expanduser()), local_files_only=True, trust_remote_code=False
            )
        except Exception as problem:  # the library raises of every kind
            text = str(problem).strip().splitlines() or ["no message"]
            raise self._bad(
                f"no tokenizer in {folder}: {type(problem).__name__}: {text[0]}",
                "a folder with the model's tokenizer",
                fix,
            ) from problem
        if tokenizer.pad_token_id is None:  # any word will do: the mask hides it
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        tokenizer.padding_side = "right"
        return tokenizer

    def _match(self, specs: Sequence[TensorSpec]) -> dict[str, str | None]:
        """Say which of the tokenizer's results goes to which keyword of forward."""
        made = [
            IDS,
            *(k for k in OPTIONAL if k in {*self._tokenizer.model_input_names, OPTIONAL[0]}),
        ]
        for spec in specs:
            if len(spec.shape) != 1 or "float" in spec.dtype:
                raise self._bad(
                    "text",
                    f"what the model takes: {spec}",
                    "give the data as an array, or describe the token ids with "
                    f"--input {IDS}=int64:1x16",
                )
        high = next(
            (one.high for one in specs if one.name == IDS), specs[0].high if specs else None
        )
        if high is not None and len(self._tokenizer) > high:
            raise self._bad(
                f"a tokenizer of {len(self._tokenizer):,} words",
                f"at most {high:,}, what the model's word table holds",
                "the tokenizer does not fit the model: take the one the model was trained with",
            )
        named = [spec.name for spec in specs]
        if not specs or IDS in named:
            result: dict[str, str | None] = {one: one for one in made}
            missing = [str(name) for name in named if name not in made]
        else:
            result = {IDS: named[0]}
            missing = [str(name) for name in named[1:]]
        if missing:
            raise self._bad(
                f"a tokenizer that makes {', '.join(made)}",
                f"what the model takes: {' and '.join(str(spec) for spec in specs)}",
                "give the data as a .npz file with one array for each input",
            )
        return result

    def _limit(self, source: Locator) -> int:
        own = int(self._tokenizer.model_max_length)  # 1e30 where the tokenizer does not know
        numbers = source.numbers("length")
        if numbers is None:
            return min(LENGTH, own)
        if len(numbers) != 1 or not 1 <= numbers[0] <= own or numbers[0] % 1:
            raise self._bad(
                f"length={source.options['length']}",
                "a whole number of tokens" + (f" up to {own}" if own < 10**9 else ""),
                "write for example text.txt?length=64",
            )
        return int(numbers[0])


def _numbered(codes: Sequence[int], known: dict[str, int]) -> list[int]:
    """Turn codes, in the order of appearance, into class numbers."""
    whole = all(name.removeprefix("-").isdecimal() for name in known)
    order = {name: int(name) if whole else i for i, name in enumerate(sorted(known))}
    final = {code: order[name] for name, code in known.items()}
    return [final[code] for code in codes]
