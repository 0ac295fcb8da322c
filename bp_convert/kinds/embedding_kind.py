"""nn.Embedding."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.kinds.choices import Ask, Choices, Factors, Widths, with_rank
from bp_convert.kinds.kind import STEPS, Examples, Kind
from bp_convert.kinds.shapes import Form, Shape, Sizes, shape_of
from bp_convert.kinds.speed import Counts
from bp_convert.kinds.spread import Spread
from bp_convert.kron.pairs import covering_pair, divisor_pairs, nearest_pair
from bp_convert.layers.embedding import BPEmbedding, in_groups, unsupported
from bp_convert.seen.pick import Pick
from bp_convert.values.factors import FactorSpec, Pair
from bp_convert.values.settings import Pairs
from bp_convert.values.tensors import TensorSpec

BLOCKS = tuple(2**power for power in range(1, 13))


class EmbeddingKind(Kind):
    name = "Embedding"
    twin: ClassVar[Any] = BPEmbedding
    lookup = True
    refused: ClassVar[tuple[str, ...]] = ("max_norm", "norm_type", "scale_grad_by_freq", "sparse")

    def form(self, module: nn.Embedding) -> Form:
        return Form(
            own={"out": module.embedding_dim},
            inputs=(),
            sizes=lambda own, inp: Sizes(
                {"weight": (module.num_embeddings, own["out"])},
                {"embedding_dim": own["out"]},
                own["out"],
            ),
            base=self.base_of(module),
        )

    def refuse(self, module: nn.Embedding) -> str | None:
        return unsupported(module) or super().refuse(module)

    def widths(self, module: nn.Embedding) -> Widths:
        shape = shape_of(module, "weight") or ()
        if len(shape) != 2:
            return module.num_embeddings, module.embedding_dim
        return shape[0], shape[1]

    def factor(self, module: nn.Embedding, widths: Widths, ask: Ask) -> Factors:
        rows, columns = widths
        if isinstance(ask.pairs, Pairs):
            spec = self._explicit(widths, ask.pairs)
        elif ask.by_share:
            spec = FactorSpec(out=(1, columns), inp=(rows, 1))
        else:
            inp = nearest_pair(rows) if ask.pairs == "paper" else covering_pair(rows)
            spec = FactorSpec(out=nearest_pair(columns), inp=inp)
        return {"weight": with_rank(spec, ask.rank, rows * columns)}

    def _explicit(self, widths: Widths, pairs: Pairs) -> FactorSpec:
        rows, columns = widths
        (v1, v2), (e1, e2) = pairs.inp, pairs.out
        if v1 * v2 >= rows and e1 * e2 == columns:
            return FactorSpec(out=pairs.out, inp=pairs.inp)
        raise PlanError(
            where=f"{self.name} {rows} x {columns}",
            found=f"pairs out {pairs.out}, in {pairs.inp}",
            allowed=f"out with product {columns}; in with a product of at least {rows}",
            fix="rows beyond the vocabulary are padding; columns must match exactly",
        )

    def choices(self, module: nn.Embedding, widths: Widths) -> dict[str, Choices]:
        rows, columns = widths
        return {"weight": Choices(divisor_pairs(columns), {(): _row_pairs(rows)})}

    def matrices(
        self, module: nn.Embedding, spread: Spread, factors: Factors | None = None
    ) -> dict[str, list[Tensor]]:
        """Return the table turned, (E, V): an index is a column that is looked up."""
        return {"weight": [self.spread(module, spread)["weight"].t()]}

    @torch.no_grad()
    def add(self, module: nn.Embedding, role: str, changes: Sequence[Tensor]) -> None:
        module.weight.add_(changes[0].t().to(module.weight))

    def rows(self, module: nn.Embedding, x: Tensor, pick: Pick) -> dict[str, list[Tensor]]:
        """Return the indices (n,) that are looked up, without those of padding tokens."""
        if pick.mask is not None and x.shape == pick.mask.shape:
            return {"weight": [x[pick.mask.to(x.device, torch.bool)]]}
        return {"weight": [x.reshape(-1)]}

    @torch.no_grad()
    def place(self, twin: BPEmbedding, role: str, index: int, w1: Tensor, w2: Tensor) -> None:
        held1, held2 = twin.by_term()
        held1.copy_(w1.transpose(1, 2))
        held2.copy_(w2)

    @torch.no_grad()
    def rest(self, module: nn.Embedding, twin: BPEmbedding, spread: Spread) -> None:
        if twin.padding_idx is not None:
            wide = self.spread(module, spread)["weight"]
            twin.padding_row.copy_(wide[twin.padding_idx])

    def buffers(self, module: nn.Embedding, widths: Widths) -> int:
        return 0 if module.padding_idx is None else widths[1]

    def macs(
        self, module: nn.Embedding, widths: Widths, factors: Factors, shapes: Sequence[Shape]
    ) -> int:
        return BPEmbedding.predict_macs(factors["weight"], shapes)

    def operations(
        self, module: nn.Embedding, widths: Widths, factors: Factors, shape: Shape
    ) -> tuple[Counts, Counts]:
        rows, spec = prod(shape), factors["weight"]
        (e1, e2), rank = spec.out, spec.rank
        dense: Counts = {"calls": 1, "moved": rows * widths[1]}
        read = e1 + e2  # of each term, for each index
        if in_groups(spec, rows):
            read = e2 if spec.inp[0] <= spec.inp[1] else e1
        twin: Counts = {
            "calls": 1,
            "gathered": rows * rank * read,
            "moved": rows * widths[1],
            "macs": rows * rank * widths[1] if rank > 1 else 0,
        }
        return dense, twin

    def channel_axis(self, module: nn.Embedding) -> None:
        return None

    def empty_output(self, module: nn.Embedding, x: Tensor) -> Tensor:
        return module.weight.new_empty(*x.shape, module.embedding_dim)

    def examples(self, module: nn.Embedding, name: str) -> Examples:
        rows = module.num_embeddings
        spec = TensorSpec(dtype="int64", shape=(STEPS,), high=rows)
        yield spec, f"{STEPS} ids below {rows}, from its first layer {name}"

    def output_norms(self, module: nn.Embedding) -> Tensor:
        return module.weight.double().square().sum(0)

    def spread(self, module: nn.Embedding, spread: Spread) -> dict[str, Tensor]:
        return {"weight": spread.rows(module.weight, axis=1)}


def _row_pairs(rows: int) -> tuple[Pair, ...]:
    """Return pairs that cover a vocabulary: its divisors, and blocks of powers of two, whose
    last one may be filled up with spare rows."""
    blocks = [(-(-rows // size), size) for size in BLOCKS if 2 * size <= rows]
    return tuple(sorted({*divisor_pairs(rows), *blocks}))
