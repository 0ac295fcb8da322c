"""How a model is trained, and what that gave. A stand-in until training is merged."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from bp_convert.values.base import Value


class Distill(Value):
    labels: float = 1.0
    logits: float = 1.0
    temperature: float = 2.0
    layers: float = 0.0


class Training(Value):
    data: str | None = None
    validation: str | float = 0.1
    epochs: float | None = None
    steps: int | None = None
    batch: int = 64
    accumulate: int = 1
    optimizer: str = "Adam"
    optimizer_options: dict[str, Any] = Field(default_factory=dict)
    lr: float = 1e-3
    factor_lr: float | None = None
    weight_decay: float = 0.0
    factor_decay: float = 0.0
    schedule: str = "cosine"
    warmup: float = 0.0
    clip: float | None = 1.0
    precision: Literal["no", "bf16", "fp16"] = "no"
    distill: Distill = Distill()
    augment: Literal["none", "paper"] = "none"
    ema: float | None = None
    patience: int | None = None
    validate_every: int | None = None
    checkpoint_every: int | None = None
    checkpoint_minutes: float | None = None
    workers: int = 0
    compile: bool = False
    recompute: bool = False
    seed: int = 0
    preset: Literal["paper", "paper-captioner"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one(cls, v: Any) -> Any:
        if isinstance(v, dict):
            if v.get("epochs") is not None and v.get("steps") is not None:
                raise ValueError("epochs and steps: give one")
            if v.get("epochs") is None and v.get("steps") is None:
                v = {**v, "epochs": 1.0}
        return v


class Trained(Value):
    steps: int
    examples: int
    seconds: float
    before: dict[str, float]
    after: dict[str, float]
    best_step: int
    peak_memory_bytes: int | None = None
    estimated_memory_bytes: int | None = None
    examples_per_second: float = 0.0
    stopped: str = ""
    notes: tuple[str, ...] = ()
    resumed_from: int | None = None
    curve: tuple[tuple[int, float], ...] = ()
