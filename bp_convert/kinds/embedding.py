"""nn.Embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.kinds.base import Ask, Choices, Factors, Kind, Spread, Widths, with_rank
from bp_convert.kinds.rows import Pick, index_rows
from bp_convert.kinds.shapes import contradiction, shape_of
from bp_convert.kron.pairs import covering_pair, divisor_pairs, nearest_pair
from bp_convert.layers.embedding import BPEmbedding, unsupported
from bp_convert.values.factors import FactorSpec, Pair
from bp_convert.values.settings import Pairs

BLOCKS = tuple(2**power for power in range(1, 13))


class EmbeddingKind(Kind):
    name = "Embedding"
    dense = nn.Embedding
    twin = BPEmbedding
    lookup = True
    fields = (
        "num_embeddings",
        "embedding_dim",
        "padding_idx",
        "max_norm",
        "norm_type",
        "scale_grad_by_freq",
        "sparse",
    )

    def refuse(self, module: nn.Embedding) -> str | None:
        told = {"weight": (module.num_embeddings, module.embedding_dim)}
        return unsupported(module) or contradiction(module, told)

    def widths(self, module: nn.Embedding) -> Widths:
        shape = shape_of(module, "weight") or ()
        if len(shape) != 2:
            return module.num_embeddings, module.embedding_dim
        return shape[0], shape[1]

    def factor(self, module: nn.Embedding, widths: Widths, ask: Ask) -> Factors:
        rows, columns = widths
        if isinstance(ask.pairs, Pairs):
            spec = self._explicit(widths, ask.pairs)
        elif ask.pairs == "fast" and isinstance(ask.rank, float):
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
        return {"weight": [index_rows(x, pick)]}

    @torch.no_grad()
    def place(self, twin: BPEmbedding, role: str, index: int, w1: Tensor, w2: Tensor) -> None:
        twin.w1.copy_(w1.transpose(1, 2))
        twin.w2.copy_(w2)

    @torch.no_grad()
    def rest(self, module: nn.Embedding, twin: BPEmbedding, spread: Spread) -> None:
        if twin.padding_idx is not None:
            wide = self.spread(module, spread)["weight"]
            twin.padding_row.copy_(wide[twin.padding_idx])

    @torch.no_grad()
    def shift(self, twin: BPEmbedding, role: str, index: int, change: Tensor) -> bool:
        return False

    def params(self, module: nn.Embedding, widths: Widths, factors: Factors | None = None) -> int:
        rows, columns = widths
        return rows * columns if factors is None else factors["weight"].params

    def macs(
        self,
        module: nn.Embedding,
        widths: Widths,
        factors: Factors,
        shapes: Sequence[tuple[int, ...]],
    ) -> int:
        return BPEmbedding.predict_macs(factors["weight"], shapes)

    def build(
        self, module: nn.Embedding, widths: Widths, factors: Factors, device: torch.device | str
    ) -> BPEmbedding:
        rows, columns = widths
        return BPEmbedding(
            rows,
            columns,
            padding_idx=module.padding_idx,
            factors=factors["weight"],
            device=device,
            dtype=module.weight.dtype,
        )

    def spread(self, module: nn.Embedding, spread: Spread) -> dict[str, Tensor]:
        return {"weight": spread.rows(module.weight, axis=1)}

    @torch.no_grad()
    def fill(self, module: nn.Embedding, twin: BPEmbedding, spread: Spread) -> float:
        return twin.fit_(self.spread(module, spread)["weight"])


def _row_pairs(rows: int) -> tuple[Pair, ...]:
    """Return pairs that cover a vocabulary: its divisors, and blocks of powers of two, whose
    last one may be filled up with spare rows."""
    blocks = [(-(-rows // size), size) for size in BLOCKS if 2 * size <= rows]
    return tuple(sorted({*divisor_pairs(rows), *blocks}))
