"""What is minimised: labels, the teacher's outputs, and outputs inside of the models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.calibration.tap import token_mask
from bp_convert.errors import DataError
from bp_convert.evaluation.outputs import live_output, token_ids
from bp_convert.feeding.feed import Micro
from bp_convert.values.training import Distill

# classes: scores (N, C) of one class an example. tokens: scores (N, T, V) of one word a place.
# values: outputs that floating-point labels are compared with. features: anything else.
Task = Literal["classes", "tokens", "values", "features"]


@dataclass(frozen=True)
class Objective:
    """The loss of one task.

    Attributes:
        task: what the outputs are.
        distill: weights of the terms.
        labelled: whether there are labels.
        taught: whether there is a teacher.
        causal: the next token stands for the label.
        scored: class scores stand among the outputs.
    """

    task: Task
    distill: Distill
    labelled: bool
    taught: bool
    causal: bool = False
    scored: bool = False

    @property
    def words(self) -> str:
        """The terms, for reports."""
        terms = []
        if self._labels:
            kind = {"values": "squared error to the labels"}.get(self.task)
            kind = kind or f"cross-entropy on {'the next token' if self.causal else 'labels'}"
            terms.append(f"{self.distill.labels:g} x {kind}")
        if self._logits:
            kind = (
                f"KL to the teacher's scores at temperature {self.distill.temperature:g}"
                if self.task in ("classes", "tokens")
                else "(relative squared error + 1 - cosine) to the teacher's outputs"
            )
            terms.append(f"{self.distill.logits:g} x {kind}")
        if self.taught and self.distill.layers:
            terms.append(f"{self.distill.layers:g} x relative squared error of layers' outputs")
        if self.taught and self._blocks:
            terms.append(f"{self._blocks:g} x relative squared error of blocks' outputs")
        return "loss: " + " + ".join(terms)

    @property
    def learns_features(self) -> bool:
        """Whether the teacher's outputs are learnt, and there are no class scores among them."""
        return self._logits and self.task == "features" and not self.scored

    @property
    def teacher_alone(self) -> bool:
        """Whether nothing but a teacher is learnt from."""
        return self.taught and not self._labels

    @property
    def inside_alone(self) -> bool:
        """Whether nothing but outputs inside of the models counts."""
        return not (self._labels or self._logits)

    def with_blocks(self, weight: float) -> Objective:
        """Return the same loss with a weight of the blocks' term."""
        return replace(self, distill=self.distill.model_copy(update={"blocks": weight}))

    @property
    def _blocks(self) -> float:
        return 0.0 if self.distill.blocks == "auto" else self.distill.blocks

    @property
    def _labels(self) -> bool:
        return self.distill.labels > 0 and (self.labelled or self.causal)

    @property
    def _logits(self) -> bool:
        return self.distill.logits > 0 and self.taught

    def __call__(
        self,
        raw: Any,
        micro: Micro,
        reference: Tensor | None,
        layers: Tensor | None = None,
        blocks: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss over a pass's examples, in float32.

        Args:
            raw: what the model returned.
            reference: the teacher's output (N, ...).
            layers, blocks: mean relative squared errors of their outputs.
        """
        out = live_output(raw, micro.args, micro.kwargs).float()
        mask = token_mask((micro.args, micro.kwargs))
        terms: list[Tensor] = []
        if self._labels:
            terms.append(self.distill.labels * self._of_labels(out, micro, mask))
        if self._logits and reference is not None:
            terms.append(self.distill.logits * self._of_teacher(out, reference.float(), mask))
        for weight, gap in ((self.distill.layers, layers), (self._blocks, blocks)):
            if gap is not None:
                terms.append(weight * gap)
        return torch.stack(terms).sum() if terms else out.new_zeros(())

    def _of_labels(self, out: Tensor, micro: Micro, mask: Tensor | None) -> Tensor:
        if self.causal:
            ids = token_ids(micro.args, micro.kwargs)
            assert ids is not None
            target = ids[:, 1:].to(out.device).long()
            if mask is not None:
                target = target.masked_fill(~(mask[:, 1:] & mask[:, :-1]).to(out.device), -100)
            return F.cross_entropy(out[:, :-1].flatten(0, 1), target.flatten())
        assert micro.labels is not None
        labels = micro.labels.to(out.device)
        if self.task == "values":
            return F.mse_loss(out, labels.float().reshape(out.shape))
        if self.task == "tokens":
            return F.cross_entropy(out.flatten(0, 1), labels.long().flatten())
        return F.cross_entropy(out, labels.long())

    def _of_teacher(self, out: Tensor, reference: Tensor, mask: Tensor | None) -> Tensor:
        if self.task in ("classes", "tokens"):
            return divergence(out, reference, self.distill.temperature, mask)
        if mask is not None and out.dim() == 3 and out.shape[:2] == mask.shape:
            chosen = mask.to(out.device)
            out, reference = out[chosen], reference[chosen]
        size = reference.square().mean().clamp(min=1e-12)
        gap = F.mse_loss(out, reference) / size
        if out.dim() < 2 or out.shape[1:].numel() < 2:
            return gap
        cosine = F.cosine_similarity(out.flatten(1), reference.flatten(1), dim=1)
        return gap + 1 - cosine.mean()


def divergence(
    out: Tensor, reference: Tensor, temperature: float, mask: Tensor | None = None
) -> Tensor:
    """Return the mean KL divergence of class scores from the teacher's, times temperature squared
    (Hinton et al., 2015), computed in the logarithms of float32.

    Args:
        out: (N, C) or (N, T, C).
        reference: the same shape.
        mask: (N, T), which places count.
    """
    if out.dim() == 3:
        chosen = torch.ones(out.shape[:2], dtype=torch.bool) if mask is None else mask
        out, reference = out[chosen.to(out.device)], reference[chosen.to(out.device)]
    mine = F.log_softmax(out.float() / temperature, dim=-1)
    theirs = F.log_softmax(reference.float() / temperature, dim=-1)
    kl = F.kl_div(mine, theirs, reduction="batchmean", log_target=True)
    return kl * temperature**2


def objective_for(
    model: nn.Module, raw: Any, micro: Micro, reference: Tensor | None, distill: Distill
) -> Objective:
    """Tell from one pass what the outputs are, and so which loss fits.

    Raises:
        DataError: the labels do not fit the outputs, or there is nothing to learn from.
    """
    out = live_output(raw, micro.args, micro.kwargs)
    if reference is not None and reference.shape != out.shape:
        raise DataError(
            where="the teacher",
            found=f"outputs of shape {tuple(reference.shape)}",
            allowed=f"{tuple(out.shape)}, as the model's",
            fix="give the model that this one was converted from",
        )
    causal = False
    if micro.labels is not None and distill.labels > 0:
        task = _task_of_labels(out, micro.labels)
    else:
        task = _task_of_outputs(raw, out, micro)
        name = type(model).__name__
        causal = task == "tokens" and ("CausalLM" in name or "LMHead" in name)
    labelled = micro.labels is not None
    inside = distill.layers or distill.blocks not in (0, "auto")
    if not (reference is not None and (distill.logits or inside)) and not (
        distill.labels > 0 and (labelled or causal)
    ):
        raise DataError(
            where="training",
            found="no labels and no teacher" if reference is None else f"weights {distill!r}",
            allowed="labels, or a teacher whose outputs are learnt",
            fix="give data with labels, or the source model as teacher (--teacher)",
        )
    scored = isinstance(_scores(raw), Tensor)
    return Objective(task, distill, labelled, reference is not None, causal, scored)


def _task_of_labels(out: Tensor, labels: Tensor) -> Task:
    whole = not labels.is_floating_point()
    if whole and labels.dim() == 1 and out.dim() == 2 and out.shape[1] > 1:
        top = int(labels.max())
        if int(labels.min()) < 0 or top >= out.shape[1]:
            raise _misfit(out, f"labels from {int(labels.min())} to {top}")
        return "classes"
    if whole and out.dim() == 3 and labels.shape == out.shape[:2]:
        return "tokens"
    if not whole and labels.numel() == out.numel():
        return "values"
    raise _misfit(out, f"labels of shape {tuple(labels.shape)}, {labels.dtype}")


def _misfit(out: Tensor, found: str) -> DataError:
    return DataError(
        where="training",
        found=f"{found} for outputs of shape {tuple(out.shape)}",
        allowed="class numbers (N,) below C for outputs (N, C), (N, T) for (N, T, V), or "
        "floating-point labels of the outputs' shape",
        fix="number the classes as the model does, or set distill.labels=0 to learn from the "
        "teacher alone",
    )


def _scores(raw: Any) -> Any:
    return raw.get("logits") if isinstance(raw, dict) else getattr(raw, "logits", None)


def _task_of_outputs(raw: Any, out: Tensor, micro: Micro) -> Task:
    scores = _scores(raw)
    ids = token_ids(micro.args, micro.kwargs)
    if out.dim() == 3 and isinstance(scores, Tensor) and ids is not None:
        return "tokens" if out.shape[:2] == ids.shape else "features"
    if out.dim() != 2 or out.shape[1] < 2:
        return "features"
    if isinstance(scores, Tensor):
        return "classes"
    values = out.detach().float()
    unit = bool(((values.norm(dim=1) - 1).abs() < 1e-3).all())
    return "features" if unit or bool((values >= 0).all()) else "classes"
