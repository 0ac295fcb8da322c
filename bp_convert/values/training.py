"""How a model is trained, and what came of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bp_convert.values.base import Number, Value

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]

LENGTHS = ("epochs", "steps", "minutes")  # of which one says how long a run is
AUTO_BLOCKS = 1.0  # weight of the blocks' term where ``auto`` takes it in

# The paper's settings (section IV). What is given beside a preset wins over it.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "optimizer": "Adam",
        "optimizer_options": {"betas": (0.9, 0.999)},
        "lr": 1e-3,
        "schedule": "constant",
        "clip": None,
        "augment": "paper",
        "batch": 128,
    },
    # Its rho is torch's alpha.
    "paper-captioner": {
        "optimizer": "RMSprop",
        "optimizer_options": {"alpha": 0.9},
        "lr": 1e-3,
        "schedule": "constant",
        "clip": None,
        "batch": 32,
    },
}


class Distill(Value):
    """Weights of the terms of the loss; a term that the data or the models lack is left out.

    Attributes:
        labels: cross-entropy on class labels, squared error on floating-point ones.
        logits: divergence from the teacher's outputs; squared error and cosine where they are no
            class scores.
        temperature: that both models' class scores are divided by.
        layers: relative squared error of each converted layer's output to the teacher's.
        blocks: the same of each block's output; ``auto`` is 1 where a teacher's outputs are learnt
            that are no class scores and the model repeats blocks of one class and one shape of
            outputs, else 0.
    """

    labels: NotNegative = 1.0
    logits: NotNegative = 1.0
    temperature: Positive = 2.0
    layers: NotNegative = 0.0
    blocks: NotNegative | Literal["auto"] = "auto"


class Training(Value):
    """The whole request.

    Attributes:
        data: a source of examples, as ``--calibrate`` takes it.
        validation: a source, or the share of ``data`` that is held out; 0 validates nothing.
        epochs: passes over the data; may be a fraction. 1 where no length is given.
        steps: steps of the optimiser, instead of epochs.
        minutes: about how long the run takes, instead of epochs: some steps are timed, and as many
            as fit are then made. The number depends on the machine, and stands in the report.
        batch: examples in one forward pass, over all processes together.
        accumulate: passes whose gradients make one step.
        optimizer: name in torch.optim, or ``package.module:Class``.
        optimizer_options: further arguments of it.
        lr: learning rate. ``auto`` tries rising ones for a few steps each from the same start,
            where there are a teacher and a validation, the run is long enough and its data can be
            read again, and takes the first that makes the validation loss worse than the one
            before, or the highest: low rates look better in a few steps than they are. Else it is
            1e-3.
        factor_lr: of the bilinear factors; None takes ``lr``.
        weight_decay: of dense weights; biases and norms never decay.
        factor_decay: of the bilinear factors. Decay of both factors of a product acts on it
            twice; ``benchmarks/factor_decay.py`` measures what that costs.
        schedule: ``constant``, ``cosine``, ``linear``, ``step`` (a tenth at 1/2 and 3/4), a
            scheduler in torch.optim.lr_scheduler, or ``package.module:NAME`` of a scheduler
            class or of a function from the share of steps done to a multiple of ``lr``.
        schedule_options: further arguments of a scheduler class.
        warmup: share of the steps in which the rate rises from 0.
        clip: largest norm of the gradient; None does not clip.
        precision: ``bf16`` and ``fp16`` compute in them and keep float32 weights.
        distill: weights of the loss.
        dropout: whether the model's dropout is in force; ``auto`` leaves it out where nothing but a
            teacher is learnt from, whose outputs have none.
        augment: ``paper`` rotates, shifts, flips and swaps channels of images.
        ema: decay of a moving average of the weights, which is then what is validated and
            returned; None keeps none.
        patience: validations without a lower loss after which training stops.
        validate_every: steps between validations; None validates after each epoch.
        checkpoint_every: steps between checkpoints.
        checkpoint_minutes: minutes between checkpoints.
        workers: processes that read data.
        compile: run the model through torch.compile.
        recompute: compute activations again in the backward pass instead of keeping them.
        shard: spread weights, gradients and optimiser states over the processes (FSDP).
        seed: of the order, the augmentation and dropout.
        preset: the paper's settings for classifiers or for the captioner.
    """

    data: str | None = None
    validation: str | Share = 0.1
    epochs: Positive | None = None
    steps: Count | None = None
    minutes: Positive | None = None
    batch: Count = 64
    accumulate: Count = 1
    optimizer: str = "Adam"
    optimizer_options: dict[str, Any] = Field(default_factory=dict)
    lr: Positive | Literal["auto"] = "auto"
    factor_lr: Positive | None = None
    weight_decay: NotNegative = 0.0
    factor_decay: NotNegative = 0.0
    schedule: str = "cosine"
    schedule_options: dict[str, Any] = Field(default_factory=dict)
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    clip: Positive | None = 1.0
    precision: Literal["no", "bf16", "fp16"] = "no"
    distill: Distill = Distill()
    dropout: bool | Literal["auto"] = "auto"
    augment: Literal["none", "paper"] = "none"
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    patience: Count | None = None
    validate_every: Count | None = None
    checkpoint_every: Count | None = None
    checkpoint_minutes: Positive | None = None
    workers: Annotated[int, Field(ge=0)] = 0
    compile: bool = False
    recompute: bool = False
    shard: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    preset: Literal["paper", "paper-captioner"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, value: Any) -> Any:
        """Put the preset below what is given, and one epoch where no length is."""
        if not isinstance(value, dict):
            return value
        preset = value.get("preset")
        known = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        value = {**known, **value}
        if all(value.get(one) is None for one in LENGTHS):
            value["epochs"] = 1.0
        return value

    @model_validator(mode="after")
    def _one_length(self) -> Training:
        given = [one for one in LENGTHS if getattr(self, one) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both say how long: give one of them")
        return self


class Trained(Value):
    """What a training run did.

    Attributes:
        steps: of the optimiser.
        examples: that were learnt from, repeats included.
        seconds: of the run; of all its parts where it was resumed.
        before: ``loss`` and the metric on the validation data, before the first step.
        after: the same of the model that is returned.
        teacher: the metric of the teacher on the same data.
        best_step: after how many steps the returned weights were had; 0 means that no step made
            the model better.
        peak_memory_bytes: of one step, measured: the allocator's count on CUDA, on a CPU what
            the models, gradients and optimiser hold and a step allocates besides.
        estimated_memory_bytes: the same, computed before the run.
        examples_per_second: over the run, validation left out.
        stopped: why it ended.
        notes: what the reader should know, such as the terms of the loss.
        resumed_from: step of the checkpoint that it went on from.
        curve: (step, training loss) of each step.
        lr: the learning rate.
        tried: (learning rate, validation loss after a few steps) of those that were tried.
    """

    steps: int
    examples: int
    seconds: float
    before: dict[str, float] = Field(default_factory=dict)
    after: dict[str, float] = Field(default_factory=dict)
    teacher: dict[str, float] = Field(default_factory=dict)
    best_step: int = 0
    peak_memory_bytes: int | None = None
    estimated_memory_bytes: int | None = None
    examples_per_second: float = 0.0
    stopped: str = ""
    notes: tuple[str, ...] = ()
    resumed_from: int | None = None
    curve: tuple[tuple[int, float], ...] = Field(default=(), repr=False)
    lr: float | None = None
    tried: tuple[tuple[float, Number], ...] = ()
