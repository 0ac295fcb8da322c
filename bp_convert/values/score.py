"""How good a converted model is, next to its source."""

from __future__ import annotations

from pydantic import ConfigDict

from bp_convert.values.base import Value


class Score(Value):
    """One metric of two models on the same examples.

    Attributes:
        metric: its name, such as accuracy, top5, perplexity, cosine or error.
        before: of the source model; 1 for cosine and 0 for error, which compare with it.
        after: of the converted model. A perplexity may be infinite.
        higher_is_better: whether a larger number is a better model.
        examples: examples that both were scored on.
    """

    # JSON has no infinity; as text it comes back as the same number.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    metric: str
    before: float
    after: float
    higher_is_better: bool
    examples: int
