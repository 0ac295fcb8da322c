"""An LSTM whose matrices are sums of Kronecker products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import Self

from bp_convert.kron.nearest import nearest_kronecker_sum
from bp_convert.layers.carry import blank
from bp_convert.layers.init import init_factors_
from bp_convert.layers.lstm_checks import (
    GATES,
    check_fields,
    check_input,
    check_state,
    groups,
    lstm_factors,
)
from bp_convert.layers.lstm_cost import lstm_macs, prefers_factored
from bp_convert.layers.lstm_paths import Direction, built, fused, loop, one_chunk
from bp_convert.torch_private import parameters_of
from bp_convert.values.factors import FactorSpec

State = tuple[Tensor, Tensor]


class BPLSTM(nn.Module):
    """An ``nn.LSTM`` with bilinear gates (paper, section III-F).

    Each of the four gates has its own factors for the input and for the hidden state, and one
    bias; or, where a spec's outputs are 4H, the four gates above each other share factors. There
    are two ways to run it and a rule that picks (``lstm_cost.prefers_factored``): step by step on
    the factors, with the input products of all steps done at once; or, where the hidden size is
    small or the terms are many, torch's fused LSTM on weights built from the factors. On CUDA
    devices it is always the latter.

    Args: as ``nn.LSTM``, and
        factors: one FactorSpec per matrix, by role: ``ih_l0``, ``hh_l0``, ``ih_l1``, ... (both
            directions use the same); by default the nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        input (T, N, I), (N, T, I) with ``batch_first``, (T, I), or a PackedSequence; output as
        nn.LSTM's. Per layer: w1_ih (G, R, h1, i1), w2_ih (G, R, i2, h2), w1_hh (G, R, h1, h1'),
        w2_hh (G, R, h2', h2), bias (4H); G = 4 with h1*h2 = H, or G = 1 with h1*h2 = 4H.

    Raises:
        FactorError: proj_size, fields that cannot be, or pairs that do not fit.
    """

    mode: ClassVar[str] = "LSTM"  # torch's field, for code that reads it

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
        check_fields(num_layers, dropout, proj_size)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.proj_size = 0
        self.factors = lstm_factors(
            factors,
            input_size,
            hidden_size,
            num_layers=num_layers,
            bidirectional=bidirectional,
            rank=rank,
        )
        self._kept: tuple[list[Tensor], list[Tensor]] | None = None
        where: Any = {"device": device, "dtype": dtype}
        for suffix in self._suffixes():
            for role in ("ih", "hh"):
                spec = self._spec(role, suffix)
                (k1, k2), (d1, d2), terms = spec.out, spec.inp, spec.rank
                many = groups(spec, hidden_size)
                w1 = nn.Parameter(torch.empty(many, terms, k1, d1, **where))
                w2 = nn.Parameter(torch.empty(many, terms, d2, k2, **where))
                self.register_parameter(f"w1_{role}_{suffix}", w1)
                self.register_parameter(f"w2_{role}_{suffix}", w2)
            if bias:
                one = nn.Parameter(torch.empty(GATES * hidden_size, **where))
                self.register_parameter(f"bias_{suffix}", one)
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
                bound = (3 * 2 * variance) ** 0.5  # var of uniform(-b, b) is b^2 / 3
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
        check_input(x, self.input_size)  # (T, N, I)
        if hx is not None:
            count, batch = self._count(), x.shape[1]
            sizes = (count,) if single else (count, batch)
            check_state(hx, (*sizes, self.hidden_size))
            hx = (hx[0].unsqueeze(1), hx[1].unsqueeze(1)) if single else hx
        y, h, c = self._run(x, hx, None)
        if single:
            return y.squeeze(1), (h.squeeze(1), c.squeeze(1))
        return (y.transpose(0, 1) if self.batch_first else y), (h, c)

    def _packed(self, packed: PackedSequence, hx: State | None) -> tuple[PackedSequence, State]:
        check_input(packed.data, self.input_size)
        if hx is not None:
            check_state(hx, (self._count(), int(packed.batch_sizes[0]), self.hidden_size))
            if packed.sorted_indices is not None:
                order = packed.sorted_indices
                hx = (hx[0].index_select(1, order), hx[1].index_select(1, order))
        y, h, c = self._run(packed.data, hx, packed.batch_sizes)
        if packed.unsorted_indices is not None:
            back = packed.unsorted_indices
            h, c = h.index_select(1, back), c.index_select(1, back)
        return packed._replace(data=y), (h, c)

    def _run(
        self, x: Tensor, hx: State | None, sizes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run all layers on (T, N, I), or on packed rows (sum of sizes, I)."""
        steps, batch = (x.shape[0], x.shape[1]) if sizes is None else (len(sizes), int(sizes[0]))
        if hx is None:
            zeros = x.new_zeros(self._count(), batch, self.hidden_size)
            hx = (zeros, zeros)
        if self._factored(x, steps, batch):
            if sizes is not None:
                return self._loop(x, *hx, sizes.tolist())
            y, h, c = self._loop(x.flatten(0, 1), *hx, [batch] * steps)
            return y.view(steps, batch, y.shape[-1]), h, c
        return fused(
            x,
            sizes,
            hx,
            self._weights(x),
            bias=self.bias,
            num_layers=self.num_layers,
            dropout=self.dropout,
            training=self.training,
            bidirectional=self.bidirectional,
        )

    def _factored(self, x: Tensor, steps: int, batch: int) -> bool:
        if torch.compiler.is_compiling():
            batch = 1  # so that a graph for a free batch size does not hang on it
        return x.device.type != "cuda" and prefers_factored(self.factors, steps, batch)

    def _weights(self, x: Tensor) -> list[Tensor]:
        """Return the dense weights in torch's order.

        In eval mode without gradients a CPU keeps them, with a copy of the parameters that they
        were built from; the next call compares values, since a parameter's version misses writes
        through ``.data``. They are no part of the state and are never copied or moved.
        """
        parameters = list(self.parameters())
        plain = type(x) is Tensor and all(type(p) is nn.Parameter and p.is_cpu for p in parameters)
        lasting = not (self.training or torch.is_grad_enabled() or torch.compiler.is_compiling())
        if not (plain and lasting):
            return self._build()
        kept = self._kept
        if kept is not None and all(map(_same, kept[0], parameters)):
            return kept[1]
        weights = self._build()
        if weights[0].dtype == parameters[0].dtype:  # autocast would build narrower ones
            self._kept = ([p.clone() for p in parameters], weights)
        return weights

    def _build(self) -> list[Tensor]:
        weights = []
        for suffix in self._suffixes():
            weights += [built(*self._pair(role, suffix)) for role in ("ih", "hh")]
            if self.bias:
                bias = self._bias(suffix)
                weights += [bias, torch.zeros_like(bias)]
        return one_chunk(weights, 4 if self.bias else 2) if weights[0].is_cuda else weights

    def train(self, mode: bool = True) -> Self:
        """Set the mode; weights kept for inference are dropped."""
        self._kept = None
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._kept = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def _loop(
        self, x: Tensor, h: Tensor, c: Tensor, sizes: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Step on the factors through packed rows (sum of sizes, I)."""
        states: list[State] = []
        for layer in range(self.num_layers):
            sides = []
            for side, suffix in enumerate(self._sides(layer)):
                at = len(states)
                one = Direction(
                    self._pair("ih", suffix),
                    self._pair("hh", suffix),
                    self._bias(suffix) if self.bias else None,
                )
                y, *state = loop(x, h[at], c[at], one, sizes=sizes, reverse=side == 1)
                sides.append(y)
                states.append((state[0], state[1]))
            x = sides[0] if len(sides) == 1 else torch.cat(sides, -1)
            if self.dropout and self.training and layer + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout)
        last_h, last_c = zip(*states, strict=True)
        return x, torch.stack(last_h), torch.stack(last_c)

    def predict_macs(self, shape: tuple[int, ...]) -> int:
        """Return the multiply-adds of one call on an input of this shape, as
        ``lstm_cost.lstm_macs``."""
        if len(shape) == 2:
            steps, batch = shape[0], 1
        else:
            steps, batch = (shape[1], shape[0]) if self.batch_first else (shape[0], shape[1])
        return lstm_macs(self.factors, steps, batch, 2 if self.bidirectional else 1)

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
        like: Any = layer.weight_ih_l0
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
            device=like.device,
            dtype=like.dtype,
        )
        new.fit_({n: p for n, p in layer.named_parameters() if n.startswith("weight")})
        for suffix in new._suffixes():
            for role in ("ih", "hh"):
                trained = getattr(layer, f"weight_{role}_{suffix}").requires_grad
                for factor in new._pair(role, suffix):
                    factor.requires_grad_(trained)
            if layer.bias:
                ih, hh = (getattr(layer, f"bias_{role}_{suffix}") for role in ("ih", "hh"))
                with torch.no_grad():
                    new._bias(suffix).copy_(ih + hh)
                new._bias(suffix).requires_grad_(ih.requires_grad or hh.requires_grad)
        return new.train(layer.training)

    @torch.no_grad()
    def fit_(self, weights: Mapping[str, Tensor]) -> float:
        """Set the factors to the nearest Kronecker sums.

        Args:
            weights: by torch's names, ``weight_ih_l0`` (4H, I), ``weight_hh_l0`` (4H, H), ...

        Returns:
            The relative Frobenius error over all matrices.
        """
        gap = total = 0.0
        for suffix in self._suffixes():
            for role in ("ih", "hh"):
                name = f"weight_{role}_{suffix}"
                spec = self._spec(role, suffix)
                w1, w2 = self._pair(role, suffix)
                for at, matrix in enumerate(weights[name].chunk(len(w1))):
                    fit = nearest_kronecker_sum(matrix, spec.out, spec.inp, spec.rank, name=name)
                    w1[at].copy_(fit.w1)
                    w2[at].copy_(fit.w2)
                    size = float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
                    gap += fit.error**2 * size
                    total += size
        return (gap / total) ** 0.5 if total else 0.0

    def to_dense(self) -> nn.LSTM:
        """Return the ``nn.LSTM`` of the same weights; its second bias is zero."""
        new = blank(
            nn.LSTM,
            self.input_size,
            self.hidden_size,
            self.num_layers,
            self.bias,
            self.batch_first,
            bidirectional=self.bidirectional,
            device=self.w1_ih_l0.device,
            dtype=self.w1_ih_l0.dtype,
        )
        new.dropout = self.dropout  # set late: torch would warn of it where there is one layer
        for name, parameter in new.named_parameters():
            value = getattr(self, name)
            with torch.no_grad():
                parameter.copy_(value)
            parameter.requires_grad_(value.requires_grad)
        return new.train(self.training)

    def __getattr__(self, name: str) -> Any:
        """Build ``weight_ih_l0``, ``bias_hh_l0`` and so on for code that looks at them."""
        role = _role(name)
        parameters = self.__dict__.get("_parameters", {})
        if role and name.startswith("weight") and f"w1_{role}" in parameters:
            return built(parameters[f"w1_{role}"], parameters[f"w2_{role}"])  # (4H, D)
        if role and name.startswith("bias") and f"bias_{role[3:]}" in parameters:
            bias = parameters[f"bias_{role[3:]}"]
            return bias.view_as(bias) if role.startswith("ih") else torch.zeros_like(bias)
        return super().__getattr__(name)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The dense weights and biases of each layer and direction, in nn.LSTM's order, built anew
        at each access."""
        parts = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.bias else ()))
        return [
            [getattr(self, f"{part}_{suffix}") for part in parts] for suffix in self._suffixes()
        ]

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set what is built: the factors are what can be set."""
        if _role(name):
            _read_only(name)
        super().__setattr__(name, value)

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
        ih, hh = self.factors["ih_l0"], self.factors["hh_l0"]
        (h1, h2), (i1, i2) = ih.out, ih.inp
        ranks = f"{ih.rank}" if ih.rank == hh.rank else f"{ih.rank}+{hh.rank}"
        rows = "hidden" if groups(ih, self.hidden_size) == GATES else "gates"
        parts.append(f"{rows}={h1}x{h2}, in={i1}x{i2}, rank={ranks}")
        return ", ".join(parts)

    # Names

    def _count(self) -> int:
        return self.num_layers * (2 if self.bidirectional else 1)

    def _sides(self, layer: int) -> list[str]:
        return [f"l{layer}", f"l{layer}_reverse"] if self.bidirectional else [f"l{layer}"]

    def _suffixes(self) -> list[str]:
        return list(chain.from_iterable(map(self._sides, range(self.num_layers))))

    def _spec(self, role: str, suffix: str) -> FactorSpec:
        return self.factors[f"{role}_{suffix.removesuffix('_reverse')}"]

    def _pair(self, role: str, suffix: str) -> tuple[Tensor, Tensor]:
        w1, w2 = (parameters_of(self)[f"{w}_{role}_{suffix}"] for w in ("w1", "w2"))
        assert w1 is not None
        assert w2 is not None
        return w1, w2

    def _bias(self, suffix: str) -> Tensor:
        bias = parameters_of(self)[f"bias_{suffix}"]
        assert bias is not None
        return bias


def _role(name: str) -> str | None:
    """Return ``ih_l0`` for torch's ``weight_ih_l0`` and ``bias_ih_l0``, None for other names."""
    for kind in ("weight_", "bias_"):
        rest = name.removeprefix(kind)
        if rest != name and rest.startswith(("ih_l", "hh_l")):
            return rest
    return None


def _read_only(name: str) -> NoReturn:
    raise AttributeError(f"{name} is built from factors at each access; set those, or use fit_()")


def _same(kept: Tensor, now: Tensor) -> bool:
    return kept.dtype == now.dtype and torch.equal(kept, now)
