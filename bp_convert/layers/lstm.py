"""An LSTM whose matrices are sums of Kronecker products."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bp_convert.errors import FactorError
from bp_convert.kron.nearest import nearest_kronecker_sum, reconstruct
from bp_convert.kron.pairs import nearest_pair
from bp_convert.layers.checks import checked
from bp_convert.layers.init import init_factors_
from bp_convert.layers.lstm_paths import (
    GATES,
    Direction,
    factored_macs,
    fused,
    fused_macs,
    loop,
    prefers_factored,
)
from bp_convert.values.factors import FactorSpec

State = tuple[Tensor, Tensor]


class BPLSTM(nn.Module):
    """An ``nn.LSTM`` with bilinear gates (paper, section III-F).

    Each of the four gates has its own factors for the input and for the hidden state, and one
    bias. There are two ways to run it and a rule that picks: step by step on the factors, with
    the input products of all steps done at once; or, where the hidden size is small and the steps
    are many, torch's fused LSTM on weights built from the factors.

    Args: as ``nn.LSTM``, and
        factors: one FactorSpec per matrix, by role: ``ih_l0``, ``hh_l0``, ``ih_l1``, ... (both
            directions use the same); by default the nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (T, N, I), (N, T, I) with ``batch_first``, (T, I), or a PackedSequence; output as
        nn.LSTM's. Per layer: w1_ih (4, R, h1, i1), w2_ih (4, R, i2, h2), w1_hh (4, R, h1, h1'),
        w2_hh (4, R, h2', h2), bias (4H).

    Raises:
        FactorError: proj_size, or pairs that do not fit.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        *,
        factors: Mapping[str, FactorSpec] | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if proj_size:
            raise FactorError(
                where="BPLSTM",
                found=f"proj_size={proj_size}",
                allowed="proj_size=0: projected LSTMs are not factored",
                fix="keep this LSTM dense",
            )
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.proj_size = 0
        self.factors = self._factors(factors, rank)
        self._kept: tuple[Any, list[Tensor]] | None = None
        where: Any = {"device": device, "dtype": dtype}
        for suffix in self._suffixes():
            for role in ("ih", "hh"):
                spec = self.factors[f"{role}_{suffix.removesuffix('_reverse')}"]
                (k1, k2), (d1, d2), terms = spec.out, spec.inp, spec.rank
                w1 = nn.Parameter(torch.empty(GATES, terms, k1, d1, **where))
                w2 = nn.Parameter(torch.empty(GATES, terms, d2, k2, **where))
                self.register_parameter(f"w1_{role}_{suffix}", w1)
                self.register_parameter(f"w2_{role}_{suffix}", w2)
            if bias:
                empty = nn.Parameter(torch.empty(GATES * hidden_size, **where))
                self.register_parameter(f"bias_{suffix}", empty)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw factors so that weights vary as a fresh ``nn.LSTM``'s, 1 / (3 H), and the bias as
        the sum of its two, 2 / (3 H)."""
        variance = 1 / (3 * self.hidden_size)
        for suffix in self._suffixes():
            for role in ("ih", "hh"):
                w1, w2 = self._pair(role, suffix)
                init_factors_(w1, w2, w1.shape[1], variance)
            if self.bias:
                bound = (6 * variance) ** 0.5
                nn.init.uniform_(self._bias(suffix), -bound, bound)

    def forward(
        self, input: Tensor | PackedSequence, hx: State | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        """Return (output, (h_n, c_n)) as ``nn.LSTM`` does."""
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        if input.dim() not in (2, 3):
            raise ValueError(f"BPLSTM: expected 2 or 3 axes, got {input.dim()}")
        single = input.dim() == 2
        x = input.unsqueeze(1) if single else input.transpose(0, 1) if self.batch_first else input
        batch = x.shape[1]
        if hx is not None and single:
            hx = (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
        self._check(x, hx, batch)
        y, h, c = self._run(x, hx, None)
        if single:
            return y.squeeze(1), (h.squeeze(1), c.squeeze(1))
        return (y.transpose(0, 1) if self.batch_first else y), (h, c)

    def _packed(
        self, packed: PackedSequence, hx: State | None
    ) -> tuple[PackedSequence, State]:
        if hx is not None and packed.sorted_indices is not None:
            order = packed.sorted_indices
            hx = (hx[0].index_select(1, order), hx[1].index_select(1, order))
        self._check(packed.data, hx, int(packed.batch_sizes[0]))
        y, h, c = self._run(packed.data, hx, packed.batch_sizes)
        if packed.unsorted_indices is not None:
            back = packed.unsorted_indices
            h, c = h.index_select(1, back), c.index_select(1, back)
        return packed._replace(data=y), (h, c)

    def _run(
        self, x: Tensor, hx: State | None, sizes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run all layers on (T, N, I), or on packed data (sum of sizes, I)."""
        batch = x.shape[1] if sizes is None else int(sizes[0])
        steps = x.shape[0] if sizes is None else len(sizes)
        if self._factored(steps, batch, sizes):
            h, c = hx if hx is not None else self._zeros(x, batch)
            return self._loop(x, h, c)
        weights = self._built()
        h, c = hx if hx is not None else self._zeros(x, batch)
        with warnings.catch_warnings():
            # cuDNN would like the weights in one chunk; they are built anew at each call.
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
            return fused(
                x,
                sizes,
                (h, c),
                weights,
                bias=self.bias,
                num_layers=self.num_layers,
                dropout=self.dropout,
                training=self.training,
                bidirectional=self.bidirectional,
            )

    def _built(self) -> list[Tensor]:
        """Return the dense weights in torch's order, kept between calls that cannot change them.

        Only inference keeps them: eval mode without gradients. Any write to a parameter changes
        its version and with it the key. They are not part of the state and are never copied.
        """
        keeps = not (self.training or torch.is_grad_enabled() or torch.compiler.is_compiling())
        key = tuple((id(p), p.device, p.dtype, _version(p)) for p in self.parameters())
        if keeps and self._kept is not None and self._kept[0] == key:
            return self._kept[1]
        weights = []
        for suffix in self._suffixes():
            weights += [self._dense(role, suffix) for role in ("ih", "hh")]
            if self.bias:
                bias = self._bias(suffix)
                weights += [bias, torch.zeros_like(bias)]
        self._kept = (key, weights) if keeps else None
        return weights

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def _loop(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        last_h, last_c = [], []
        for layer in range(self.num_layers):
            sides = []
            for side, suffix in enumerate(self._sides(layer)):
                at = layer * len(self._sides(layer)) + side
                one = Direction(
                    self._pair("ih", suffix),
                    self._pair("hh", suffix),
                    self._bias(suffix) if self.bias else None,
                )
                y, h_n, c_n = loop(x, h[at], c[at], one, reverse=side == 1)
                sides.append(y)
                last_h.append(h_n)
                last_c.append(c_n)
            x = sides[0] if len(sides) == 1 else torch.cat(sides, -1)
            if self.dropout and self.training and layer + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout)
        return x, torch.stack(last_h), torch.stack(last_c)

    def _zeros(self, x: Tensor, batch: int) -> State:
        count = self.num_layers * (2 if self.bidirectional else 1)
        zeros = torch.zeros(count, batch, self.hidden_size, dtype=x.dtype, device=x.device)
        return zeros, zeros

    def _factored(self, steps: int, batch: int, sizes: Tensor | None) -> bool:
        return sizes is None and prefers_factored(self.hidden_size, steps, batch, self._load())

    def _load(self) -> float:
        """Return the recurrent multiply-adds of the factors over the dense matrix's."""
        return self.factors["hh_l0"].params / self.hidden_size**2

    def predict_macs(self, shape: tuple[int, ...]) -> int:
        """Return the multiply-adds of one call on an input of this shape, on the path taken."""
        if len(shape) == 2:
            steps, batch = shape[0], 1
        else:
            steps, batch = (shape[1], shape[0]) if self.batch_first else (shape[0], shape[1])
        sides = 2 if self.bidirectional else 1
        count = factored_macs if self._factored(steps, batch, None) else fused_macs
        return sides * sum(
            count(self.factors[f"ih_l{i}"], self.factors[f"hh_l{i}"], steps, batch)
            for i in range(self.num_layers)
        )

    def flatten_parameters(self) -> None:
        """Do nothing; nn.LSTM's callers expect the method."""

    # Dense and back

    @classmethod
    def from_dense(
        cls,
        layer: nn.LSTM,
        *,
        factors: Mapping[str, FactorSpec] | None = None,
        rank: int = 1,
    ) -> Self:
        """Return the nearest bilinear LSTM to a trained one; nothing is shared with it.

        Raises:
            FactorError: proj_size, pairs that do not fit, or weights that are not finite.
        """
        new = cls(
            layer.input_size,
            layer.hidden_size,
            layer.num_layers,
            layer.bias,
            layer.batch_first,
            layer.dropout,
            layer.bidirectional,
            layer.proj_size,
            factors=factors,
            rank=rank,
            device=layer.weight_ih_l0.device,
            dtype=layer.weight_ih_l0.dtype,
        )
        new.fit_({n: p for n, p in layer.named_parameters() if n.startswith("weight")})
        if layer.bias:
            with torch.no_grad():
                for suffix in new._suffixes():
                    two = (getattr(layer, f"bias_{role}_{suffix}") for role in ("ih", "hh"))
                    new._bias(suffix).copy_(sum(two))
        new.requires_grad_(layer.weight_ih_l0.requires_grad)
        return new.train(layer.training)

    @torch.no_grad()
    def fit_(self, weights: Mapping[str, Tensor]) -> float:
        """Set the factors to the nearest Kronecker sums, gate by gate.

        Args:
            weights: by torch's names, ``weight_ih_l0`` (4H, I), ``weight_hh_l0`` (4H, H), ...

        Returns:
            The relative Frobenius error over all matrices.
        """
        gap = total = 0.0
        for suffix in self._suffixes():
            for role in ("ih", "hh"):
                name = f"weight_{role}_{suffix}"
                spec = self.factors[f"{role}_{suffix.removesuffix('_reverse')}"]
                w1, w2 = self._pair(role, suffix)
                for gate, matrix in enumerate(weights[name].chunk(GATES)):
                    fit = nearest_kronecker_sum(matrix, spec.out, spec.inp, spec.rank, name=name)
                    w1[gate].copy_(fit.w1)
                    w2[gate].copy_(fit.w2)
                    size = float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
                    gap += fit.error**2 * size
                    total += size
        return (gap / total) ** 0.5 if total else 0.0

    def to_dense(self) -> nn.LSTM:
        """Return the ``nn.LSTM`` of the same weights; its second bias is zero."""
        new = nn.LSTM(
            self.input_size,
            self.hidden_size,
            self.num_layers,
            self.bias,
            self.batch_first,
            self.dropout,
            self.bidirectional,
            device=self.w1_ih_l0.device,
            dtype=self.w1_ih_l0.dtype,
        )
        with torch.no_grad():
            for name, parameter in new.named_parameters():
                parameter.copy_(getattr(self, name))
        new.requires_grad_(self.w1_ih_l0.requires_grad)
        return new.train(self.training)

    def __getattr__(self, name: str) -> Any:
        """Build ``weight_ih_l0``, ``bias_hh_l0`` and so on for code that looks at them."""
        kind, _, rest = name.partition("_")
        role, _, suffix = rest.partition("_")
        if kind in ("weight", "bias") and role in ("ih", "hh") and suffix:
            parameters = self.__dict__["_parameters"]
            if kind == "weight" and f"w1_{role}_{suffix}" in parameters:
                return self._dense(role, suffix)
            if kind == "bias" and f"bias_{suffix}" in parameters:
                bias = self._bias(suffix)
                return bias if role == "ih" else torch.zeros_like(bias)
        return super().__getattr__(name)

    def _dense(self, role: str, suffix: str) -> Tensor:
        w1, w2 = self._pair(role, suffix)
        return torch.cat([reconstruct(a, b) for a, b in zip(w1, w2, strict=True)])  # (4H, D)

    def extra_repr(self) -> str:
        """Tell torch's own fields, the pairs and the number of terms."""
        parts = [f"{self.input_size}, {self.hidden_size}"]
        if self.num_layers != 1:
            parts.append(f"num_layers={self.num_layers}")
        parts += [
            f"{name}={getattr(self, name)}"
            for name, usual in (
                ("bias", True),
                ("batch_first", False),
                ("dropout", 0.0),
                ("bidirectional", False),
            )
            if getattr(self, name) != usual
        ]
        spec = self.factors["ih_l0"]
        (h1, h2), (i1, i2) = spec.out, spec.inp
        parts.append(f"hidden={h1}x{h2}, in={i1}x{i2}, rank={spec.rank}")
        return ", ".join(parts)

    # Names and checks

    def _sides(self, layer: int) -> list[str]:
        return [f"l{layer}", f"l{layer}_reverse"] if self.bidirectional else [f"l{layer}"]

    def _suffixes(self) -> list[str]:
        return [suffix for layer in range(self.num_layers) for suffix in self._sides(layer)]

    def _pair(self, role: str, suffix: str) -> tuple[Tensor, Tensor]:
        parameters = self._parameters
        w1, w2 = parameters[f"w1_{role}_{suffix}"], parameters[f"w2_{role}_{suffix}"]
        assert w1 is not None
        assert w2 is not None
        return w1, w2

    def _bias(self, suffix: str) -> Tensor:
        bias = self._parameters[f"bias_{suffix}"]
        assert bias is not None
        return bias

    def _factors(
        self, given: Mapping[str, FactorSpec] | None, rank: int
    ) -> dict[str, FactorSpec]:
        hidden = self.hidden_size
        factors = {}
        for layer in range(self.num_layers):
            inputs = hidden * (2 if self.bidirectional else 1) if layer else self.input_size
            for role, width in ((f"ih_l{layer}", inputs), (f"hh_l{layer}", hidden)):
                if given is None:
                    spec = FactorSpec(
                        out=nearest_pair(hidden), inp=nearest_pair(width), rank=rank
                    )
                elif role in given:
                    spec = given[role]
                else:
                    raise FactorError(
                        where=f"BPLSTM, factors[{role!r}]",
                        found=f"factors for {', '.join(given) or 'nothing'}",
                        allowed="one FactorSpec for ih and hh of each layer",
                        fix=f"add {role!r}, or leave factors out",
                    )
                factors[role] = checked(f"BPLSTM, {role}", spec, inputs=width, outputs=hidden)
        return factors

    def _check(self, x: Tensor, hx: State | None, batch: int) -> None:
        if x.shape[-1] != self.input_size:
            raise RuntimeError(
                f"BPLSTM: input.size(-1) must be {self.input_size}, got {x.shape[-1]}"
            )
        count = self.num_layers * (2 if self.bidirectional else 1)
        wanted = (count, batch, self.hidden_size)
        for name, state in zip(("h_0", "c_0"), hx or (), strict=False):
            if tuple(state.shape) != wanted:
                raise RuntimeError(f"BPLSTM: {name} must be {wanted}, got {tuple(state.shape)}")


def _version(parameter: Tensor) -> int:
    return -1 if parameter.is_inference() else parameter._version
