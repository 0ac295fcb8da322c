"""What bilinear recurrent layers ask of their arguments and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from bp_convert.errors import FactorError
from bp_convert.kron.fits import checked
from bp_convert.kron.policies import paper_factors
from bp_convert.recurrence.steps import Frame, GateMatrix
from bp_convert.values.factors import FactorSpec


def groups(spec: FactorSpec, matrix: GateMatrix) -> int:
    """Return how many matrices of a role have factors of their own: one a gate, or 1 where the
    gates stand above each other in one matrix (G*H, D)."""
    return matrix.gates * matrix.outputs // (spec.out[0] * spec.out[1])


def steps_and_batch(shape: tuple[int, ...], batch_first: bool) -> tuple[int, int]:
    """Return how many steps an input of this shape has, and how many sequences."""
    if len(shape) == 2:
        return shape[0], 1
    return (shape[1], shape[0]) if batch_first else (shape[0], shape[1])


def check_fields(where: str, frame: Frame, dropout: float) -> None:
    """Refuse constructor fields that cannot be.

    Raises:
        FactorError: no layers, a dropout that is no probability, or a projection that is none.
    """
    if frame.layers < 1:
        raise FactorError(
            where=where,
            found=f"num_layers={frame.layers}",
            allowed="at least 1",
            fix="give the number of stacked layers",
        )
    if not 0 <= dropout <= 1:
        raise FactorError(
            where=where,
            found=f"dropout={dropout}",
            allowed="a probability, 0 to 1",
            fix="give the share of values that are zeroed between layers",
        )
    if frame.proj and (frame.mode != "LSTM" or not 0 < frame.proj < frame.hidden):
        raise FactorError(
            where=where,
            found=f"proj_size={frame.proj}",
            allowed="of an LSTM less than its hidden size, of others none",
            fix="leave proj_size out, or give fewer numbers than the hidden size",
        )


def recurrent_factors(
    where: str,
    given: Mapping[str, FactorSpec] | None,
    matrices: Mapping[str, GateMatrix],
    rank: int,
) -> dict[str, FactorSpec]:
    """Return one checked FactorSpec a role: ``ih_l0``, ``hh_l0``, ``ih_l1``, ...

    Its outputs are H, for factors of each gate, or G*H, for factors of the gates together.

    Raises:
        FactorError: a role that is missing or unknown, or pairs that do not fit.
    """
    factors = {}
    for role, one in matrices.items():
        if given is None:
            spec = paper_factors(one.inputs, one.outputs, rank)
        elif role in given:
            spec = given[role]
        else:
            raise FactorError(
                where=f"{where}, factors[{role!r}]",
                found=f"factors for {', '.join(given) or 'nothing'}",
                allowed="one FactorSpec for every matrix of each layer",
                fix=f"add {role!r}, or leave factors out",
            )
        joint = spec.out[0] * spec.out[1] == one.gates * one.outputs
        outputs = one.outputs * (one.gates if joint else 1)
        factors[role] = checked(f"{where}, {role}", spec, inputs=one.inputs, outputs=outputs)
    unknown = sorted(set(given or ()) - set(factors))
    if unknown:
        raise FactorError(
            where=f"{where}, factors",
            found=", ".join(unknown),
            allowed=", ".join(factors),
            fix="both directions of a layer share its factors; leave the others out",
        )
    return factors


def check_input(where: str, x: Tensor, input_size: int) -> None:
    """Refuse an input of the wrong width, with torch's own type of error.

    Raises:
        RuntimeError: the last axis is not the input size, or there is no step.
    """
    if x.shape[-1] != input_size:
        raise RuntimeError(f"{where}: input.size(-1) must be {input_size}, got {x.shape[-1]}")
    if x.shape[0] == 0:
        raise RuntimeError(f"{where}: the sequence must have at least one step")


def check_state(where: str, state: Sequence[Tensor], wanted: Sequence[tuple[int, ...]]) -> None:
    """Refuse initial states of the wrong shape, with torch's own type of error.

    Raises:
        RuntimeError: another shape than (layers * directions, N, H), or (.., H) for one sequence.
    """
    for name, one, shape in zip(("h_0", "c_0"), state, wanted, strict=False):
        if tuple(one.shape) != shape:
            raise RuntimeError(f"{where}: {name} must be {shape}, got {tuple(one.shape)}")
