"""The base of all values: frozen, closed to unknown fields, JSON in and out."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """A frozen pydantic model. Equal values do the same thing."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
