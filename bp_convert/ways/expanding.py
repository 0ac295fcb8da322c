"""A layer that runs on its factors, or on the dense weight that is built of them once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor, is_grad_enabled, nn
from typing_extensions import Self

from bp_convert.torch_private import is_differentiated_plainly, is_watched
from bp_convert.values.plan import Way
from bp_convert.ways.kept import Kept, Source, looks_at


class Expanding(nn.Module):
    """A layer of which something dense can be built, and kept while nothing is trained.

    Attributes:
        way: ``factored``, or ``expanded``: in eval mode, without gradients, on a CPU, the dense
            weight is built at the first call and torch's own function runs on it. Where gradients
            are wanted a linear layer and a convolution build it for each call, as part of what is
            differentiated, if that is less work than their factors. Else, under autocast and in
            what is compiled, traced or exported the layer runs on its factors. ``fused``: in eval
            mode, without gradients, on a CUDA device, one kernel makes both products (see
            ``ways.fused``); else on its factors.

    What is kept is no part of the state: it is never saved, copied or moved, and goes with
    ``train()``, ``eval()``, ``to()`` and any change of the parameters (see ``ways.kept``).
    """

    EXPANDS: ClassVar[bool] = False  # whether the forward asks ``built_for``
    FUSES: ClassVar[bool] = False  # whether it asks ``fused``

    way: Way = "factored"
    _kept: Kept | None = None

    def sources(self) -> Sequence[Source]:
        """Return where the tensors are held that the dense weight hangs on."""
        raise NotImplementedError

    def expand(self) -> Any:
        """Build what is kept; None where it cannot be."""
        raise NotImplementedError

    def built_for(self, x: Any) -> Any:
        """Return what is kept for a call on ``x``, built anew where it has to be; None where the
        call goes on the factors."""
        if is_grad_enabled() or type(x) is not Tensor or is_watched():
            return None
        kept = self._kept
        if kept is not None and kept.holds():
            return kept.value
        return self._anew()

    @staticmethod
    def trains_on_plain(*given: Tensor | None) -> bool:
        """Return whether a call is one for backward alone, so that it may build the dense weight
        for itself; see ``kron.built_product``."""
        if not is_grad_enabled():
            return False
        return is_differentiated_plainly(*(one for one in given if one is not None))

    def _anew(self) -> Any:
        self._kept = None
        if self.training:
            return None
        looks = looks_at(self.sources())  # before it is built, so that no write falls in between
        value = None if looks is None else self.expand()
        if looks is None or value is None:
            return None
        self._kept = Kept(value, looks)
        return value

    def train(self, mode: bool = True) -> Self:
        """Set the mode; what is kept for inference is dropped."""
        self._kept = None
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._kept = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}


def kept_bytes(model: nn.Module) -> int:
    """Return the memory that expanded layers of a model take now, besides its parameters."""
    ones = [one._kept for one in model.modules() if isinstance(one, Expanding)]
    return sum(one.nbytes for one in ones if one is not None)
