"""What is minimised: labels, the teacher's outputs, and outputs of single layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bp_convert.calibration.tap import token_mask
from bp_convert.errors import DataError, TrainingError
from bp_convert.evaluation.outputs import live_output, token_ids
from bp_convert.graph.tree import tensors_in
from bp_convert.kinds import is_twin
from bp_convert.training.feed import Micro
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
    """

    task: Task
    distill: Distill
    labelled: bool
    taught: bool
    causal: bool = False

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
        return "loss: " + " + ".join(terms)

    @property
    def _labels(self) -> bool:
        return self.distill.labels > 0 and (self.labelled or self.causal)

    @property
    def _logits(self) -> bool:
        return self.distill.logits > 0 and self.taught

    def __call__(
        self, raw: Any, micro: Micro, reference: Tensor | None, gap: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss over a pass's examples, in float32.

        Args:
            raw: what the model returned.
            reference: the teacher's output (N, ...).
            gap: mean relative squared error of layers' outputs.
        """
        out = live_output(raw, micro.args, micro.kwargs).float()
        mask = token_mask((micro.args, micro.kwargs))
        terms: list[Tensor] = []
        if self._labels:
            terms.append(self.distill.labels * self._of_labels(out, micro, mask))
        if self._logits and reference is not None:
            terms.append(self.distill.logits * self._of_teacher(out, reference.float(), mask))
        if gap is not None:
            terms.append(self.distill.layers * gap.float())
        return torch.stack(terms).sum()

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
    if not (reference is not None and (distill.logits or distill.layers)) and not (
        distill.labels > 0 and (labelled or causal)
    ):
        raise DataError(
            where="training",
            found="no labels and no teacher" if reference is None else f"weights {distill!r}",
            allowed="labels, or a teacher whose outputs are learnt",
            fix="give data with labels, or the source model as teacher (--teacher)",
        )
    return Objective(task, distill, labelled, reference is not None, causal)


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


def _task_of_outputs(raw: Any, out: Tensor, micro: Micro) -> Task:
    scores = raw.get("logits") if isinstance(raw, dict) else getattr(raw, "logits", None)
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


class LayerPairs:
    """Outputs of a model's bilinear layers and of the same names in its teacher, of the passes
    inside ``with``.

    Args:
        student: the converted model.
        teacher: its source.

    Attributes:
        names: layers that have a partner.
        skipped: those whose outputs have another shape than the teacher's.

    Raises:
        TrainingError: there is none.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        theirs = dict(teacher.named_modules())
        twins = {name: one for name, one in student.named_modules() if is_twin(one)}
        mine = {
            name: module
            for name, module in twins.items()
            if name in theirs and not any(name.startswith(f"{one}.") for one in twins if one)
        }
        if not mine:
            raise TrainingError(
                where="distill.layers",
                found="no bilinear layer that stands for one of the teacher's",
                allowed="a converted model and the model that it was converted from",
                fix="leave distill.layers out",
            )
        self.names = tuple(mine)
        self.skipped: set[str] = set()
        self._watching = False
        self._seen: dict[str, list[Tensor]] = {}
        self._wanted: dict[str, list[Tensor]] = {}
        self._handles = [
            *(m.register_forward_hook(self._keep(self._seen, name)) for name, m in mine.items()),
            *(theirs[n].register_forward_hook(self._keep(self._wanted, n)) for n in self.names),
        ]

    def _keep(self, store: dict[str, list[Tensor]], name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if self._watching and (tensors := tensors_in(output)):
                store.setdefault(name, []).append(tensors[0])

        return hook

    def __enter__(self) -> None:
        self._watching = True

    def __exit__(self, *_: object) -> None:
        self._watching = False

    def gap(self) -> Tensor | None:
        """Return the mean over layers of the squared difference relative to the teacher's
        output's square, of the passes since the last call; None where no shapes agree."""
        found = []
        for name in self.names:
            pairs = zip(self._seen.get(name, []), self._wanted.get(name, []), strict=False)
            for mine, theirs in pairs:
                if mine.shape != theirs.shape:
                    self.skipped.add(name)
                    continue
                theirs = theirs.float()
                size = theirs.square().mean().clamp(min=1e-12)
                found.append((mine.float() - theirs).square().mean() / size)
        self._seen.clear()
        self._wanted.clear()
        return torch.stack(found).mean() if found else None

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
