"""nn.Embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.kinds.base import Ask, Factors, Kind, Spread, Widths, with_rank
from bp_convert.kron.pairs import covering_pair, nearest_pair
from bp_convert.layers.embedding import BPEmbedding, unsupported
from bp_convert.values.factors import FactorSpec
from bp_convert.values.settings import Pairs


class EmbeddingKind(Kind):
    name = "Embedding"
    dense = nn.Embedding
    twin = BPEmbedding
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
        return unsupported(module)

    def widths(self, module: nn.Embedding) -> Widths:
        return module.num_embeddings, module.embedding_dim

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
