"""The example input of a model, described in words that fit a command line."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import Field

from bp_convert.errors import PlanError
from bp_convert.values.base import Worded

DType = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "bool", "uint8"]
_DTYPES = get_args(DType)
_TEXT = re.compile(
    r"^(?:(?P<name>[A-Za-z_]\w*)=)?(?:(?P<dtype>[a-z]+\d*):)?(?P<shape>\d+(?:x\d+)*)"
    r"(?:>=(?P<low>\d+))?(?:<(?P<high>\d+))?$"
)


class TensorSpec(Worded):
    """One input tensor, without its batch axis.

    Attributes:
        name: keyword of the model's forward, or None for a positional argument.
        dtype: name of the torch dtype.
        shape: shape of one example; the batch axis is put in front when it is built.
        low: integers are drawn from [low, high).
        high: None lets the table that they reach decide.
    """

    name: str | None = None
    dtype: DType = "float32"
    shape: tuple[Annotated[int, Field(ge=1)], ...]
    low: Annotated[int, Field(ge=0)] = 0
    high: Annotated[int, Field(ge=1)] | None = None

    @classmethod
    def parse(cls, text: str | TensorSpec) -> TensorSpec:
        """Read ``3x224x224``, ``int64:1x16``, ``tokens=int64:1x16<99`` or ``n=int64:1>=1<9``.

        Without a name or a dtype the text is the shape of one float32 example, and an axis of 1
        in front of three others is taken for the batch. With a name or a dtype the first axis is
        the batch. What is read already is returned as it is.

        Raises:
            PlanError: the text does not have that form.
        """
        if isinstance(text, TensorSpec):
            return text
        found = _TEXT.match(text.strip())
        if found is None or (found["dtype"] or "float32") not in _DTYPES:
            raise PlanError(
                where=f"--input {text}",
                found=repr(text),
                allowed="[NAME=][DTYPE:]SHAPE[>=LOW][<HIGH], such as 3x224x224 or "
                "tokens=int64:1x16",
                fix=f"write the shape as numbers joined by x; dtypes: {', '.join(_DTYPES)}",
            )
        shape = tuple(int(n) for n in found["shape"].split("x"))
        if 0 in shape:
            raise PlanError(
                where=f"--input {text}",
                found="an axis of length 0",
                allowed="axes of at least 1",
                fix="give the shape of one real example",
            )
        explicit = found["name"] is not None or found["dtype"] is not None
        if explicit or (len(shape) == 4 and shape[0] == 1):
            shape = shape[1:]
        low, high = int(found["low"] or 0), None if found["high"] is None else int(found["high"])
        if high is not None and low >= high:
            raise PlanError(
                where=f"--input {text}",
                found=f"no integer from {low} on and below {high}",
                allowed="a lower bound below the upper one",
                fix="mend the bounds",
            )
        return cls.model_validate(
            {
                "name": found["name"],
                "dtype": found["dtype"] or "float32",
                "shape": shape,
                "low": low,
                "high": high,
            }
        )

    def __str__(self) -> str:
        shape = "x".join(str(n) for n in self.shape)
        if self.name is None and self.dtype == "float32" and self.shape:
            return shape
        head = "" if self.name is None else f"{self.name}="
        tail = f">={self.low}" if self.low else ""
        tail += "" if self.high is None else f"<{self.high}"
        return f"{head}{self.dtype}:1{'x' if shape else ''}{shape}{tail}"
