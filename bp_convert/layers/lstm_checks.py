"""What a bilinear LSTM asks of its arguments and inputs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bp_convert.errors import FactorError
from bp_convert.kron.policies import paper_factors
from bp_convert.layers.common import checked
from bp_convert.values.factors import FactorSpec

GATES = 4  # in torch's order: input, forget, cell, output


def groups(spec: FactorSpec, hidden_size: int) -> int:
    """Return how many matrices have factors of their own: 4, one a gate, or 1 where the gates
    stand above each other in one matrix (4H, D)."""
    return GATES * hidden_size // (spec.out[0] * spec.out[1])


def steps_and_batch(shape: tuple[int, ...], batch_first: bool) -> tuple[int, int]:
    """Return how many steps an input of this shape has, and how many sequences."""
    if len(shape) == 2:
        return shape[0], 1
    return (shape[1], shape[0]) if batch_first else (shape[0], shape[1])


def check_fields(num_layers: int, dropout: float, proj_size: int) -> None:
    """Refuse constructor fields that cannot be.

    Raises:
        FactorError: no layers, a dropout that is no probability, or projected states.
    """
    if proj_size:
        raise FactorError(
            where="BPLSTM",
            found=f"proj_size={proj_size}",
            allowed="proj_size=0: projected LSTMs are not factored",
            fix="keep this LSTM dense",
        )
    if num_layers < 1:
        raise FactorError(
            where="BPLSTM",
            found=f"num_layers={num_layers}",
            allowed="at least 1",
            fix="give the number of stacked layers",
        )
    if not 0 <= dropout <= 1:
        raise FactorError(
            where="BPLSTM",
            found=f"dropout={dropout}",
            allowed="a probability, 0 to 1",
            fix="give the share of values that are zeroed between layers",
        )


def gate_sizes(
    input_size: int, hidden_size: int, *, num_layers: int, bidirectional: bool
) -> dict[str, tuple[int, int]]:
    """Return the (inputs, outputs) of one gate's matrices, by role; both directions share them."""
    sizes = {}
    for layer in range(num_layers):
        inputs = hidden_size * (2 if bidirectional else 1) if layer else input_size
        sizes[f"ih_l{layer}"] = (inputs, hidden_size)
        sizes[f"hh_l{layer}"] = (hidden_size, hidden_size)
    return sizes


def lstm_factors(
    given: Mapping[str, FactorSpec] | None,
    input_size: int,
    hidden_size: int,
    *,
    num_layers: int,
    bidirectional: bool,
    rank: int,
) -> dict[str, FactorSpec]:
    """Return one checked FactorSpec a matrix, by role: ``ih_l0``, ``hh_l0``, ``ih_l1``, ...

    Its outputs are H, for factors of each gate, or 4H, for factors of the four together.

    Raises:
        FactorError: a role that is missing or unknown, or pairs that do not fit.
    """
    factors = {}
    sizes = gate_sizes(input_size, hidden_size, num_layers=num_layers, bidirectional=bidirectional)
    for role, (inputs, hidden) in sizes.items():
        if given is None:
            spec = paper_factors(inputs, hidden, rank)
        elif role in given:
            spec = given[role]
        else:
            raise FactorError(
                where=f"BPLSTM, factors[{role!r}]",
                found=f"factors for {', '.join(given) or 'nothing'}",
                allowed="one FactorSpec for ih and hh of each layer",
                fix=f"add {role!r}, or leave factors out",
            )
        joint = spec.out[0] * spec.out[1] == GATES * hidden
        outputs = hidden * (GATES if joint else 1)
        factors[role] = checked(f"BPLSTM, {role}", spec, inputs=inputs, outputs=outputs)
    unknown = sorted(set(given or ()) - set(factors))
    if unknown:
        raise FactorError(
            where="BPLSTM, factors",
            found=", ".join(unknown),
            allowed=", ".join(factors),
            fix="both directions of a layer share its factors; leave the others out",
        )
    return factors


def check_input(x: Tensor, input_size: int) -> None:
    """Refuse an input of the wrong width, with torch's own type of error.

    Raises:
        RuntimeError: the last axis is not the input size, or there is no step.
    """
    if x.shape[-1] != input_size:
        raise RuntimeError(f"BPLSTM: input.size(-1) must be {input_size}, got {x.shape[-1]}")
    if x.shape[0] == 0:
        raise RuntimeError("BPLSTM: the sequence must have at least one step")


def check_state(hx: tuple[Tensor, Tensor], wanted: tuple[int, ...]) -> None:
    """Refuse initial states of the wrong shape, with torch's own type of error.

    Raises:
        RuntimeError: a shape other than (layers * directions, N, H), or (.., H) for one sequence.
    """
    for name, state in zip(("h_0", "c_0"), hx, strict=True):
        if tuple(state.shape) != wanted:
            raise RuntimeError(f"BPLSTM: {name} must be {wanted}, got {tuple(state.shape)}")
