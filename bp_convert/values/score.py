"""How good a converted model is, next to its source."""

from __future__ import annotations

from math import isfinite
from typing import Annotated

from pydantic import PlainSerializer

from bp_convert.values.base import Value


def _in_json(number: float) -> float | str:
    return number if isfinite(number) else str(number)


# JSON has no infinity; as the text "inf" it comes back as the same number.
Number = Annotated[float, PlainSerializer(_in_json, return_type=float | str, when_used="json")]


class Score(Value):
    """One metric of two models on the same examples.

    Attributes:
        metric: its name, such as accuracy, top5, perplexity, cosine or error.
        before: of the source model; 1 for cosine and 0 for error, which compare with it.
        after: of the converted model. A perplexity may be infinite.
        higher_is_better: whether a larger number is a better model.
        examples: examples that both were scored on.
    """

    metric: str
    before: Number
    after: Number
    higher_is_better: bool
    examples: int

    @property
    def lost(self) -> float:
        """How much worse the converted model is; negative where it is better."""
        lost = self.before - self.after
        return lost if self.higher_is_better else -lost
