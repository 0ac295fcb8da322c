"""torch's private names: each is there and does what we need; one file alone reaches for them."""

from __future__ import annotations

import ast
import io
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

from bp_convert import torch_private as private

ROOT = Path(private.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "torch_private.py")
# Names with an underscore that are not torch's, and whose they are.
OTHERS = {
    "_exit": "os: ends a process that was killed by its caller",
    "_getframe": "sys: the line of the model's forward that asks for a size",
    "_lru_cache_wrapper": "functools: what a forward caches in",
    "_replace": "a method of named tuples",
    "_reset_state": "accelerate: one run's precision must not bind the next",
    "_pass_through_h": "torchvision: a name that its models' files hold",
}


def _words(path: str) -> list[str]:
    return [part for part in path.split(".") if part.startswith("_") or part == "experimental"]


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _attributes(tree: ast.AST) -> set[str]:
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def _own(tree: ast.AST) -> set[str]:
    """Return the names that a file gives to what is its own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


OWN = {name for path in FILES for name in _own(ast.parse(path.read_text(encoding="utf-8")))}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_file_reaches_for_a_private_name_of_torch(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [name for node in ast.walk(tree) for name in _imported(node) if _words(name)]
    assert not imports
    assert not _attributes(tree) - OWN - OTHERS.keys()
    if path.parent.name != "pickles":  # what a file may name is data
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        assert not [one for one in texts if isinstance(one, str) and one.startswith("torch._")]


def test_the_scan_sees_what_it_is_to_see() -> None:
    code = (
        "from torch.fx import experimental\nimport torch._dynamo\nmodule._parameters\nself._x = 1"
    )
    tree = ast.parse(code)
    assert [n for node in ast.walk(tree) for n in _imported(node) if _words(n)] == [
        "torch.fx.experimental",
        "torch._dynamo",
    ]
    assert _attributes(tree) - _own(tree) == {"_parameters"}


def test_private_methods_of_torch_are_overridden_knowingly() -> None:
    kinds = (nn.Module, Tensor, private.FakeTensorMode, private.SymNode, private.ShapeEnv)
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.bases:
                named = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                private_ones = {n for n in named if n.startswith("_") and not n.startswith("__")}
                found |= {n for n in private_ones if any(hasattr(kind, n) for kind in kinds)}
    assert found == private.OVERRIDDEN.keys()
    assert all(any(hasattr(kind, name) for kind in kinds) for name in private.OVERRIDDEN)


def test_families_of_layers_have_their_bases() -> None:
    assert issubclass(nn.BatchNorm2d, private.BatchNormBase)
    assert issubclass(nn.SyncBatchNorm, private.BatchNormBase)
    assert issubclass(nn.InstanceNorm1d, private.InstanceNormBase)
    assert issubclass(nn.ConvTranspose3d, private.ConvBase)
    assert issubclass(nn.Dropout2d, private.DropoutBase)
    assert not issubclass(nn.LayerNorm, private.BatchNormBase)


def test_fake_tensors_have_a_shape_and_no_data() -> None:
    with private.FakeTensorMode() as mode, private.enable_python_dispatcher():
        made = nn.functional.linear(torch.empty(2, 10**9), torch.empty(10**9 + 1, 10**9))
    assert isinstance(made, private.FakeTensor)
    assert made.shape == (2, 10**9 + 1)
    with pytest.raises(private.DataDependentOutputException), mode:
        made.sum().item()
    with pytest.raises(private.DynamicOutputShapeException), mode:
        made.nonzero()
    assert issubclass(private.UnsupportedFakeTensorException, Exception)
    assert all(logging.getLogger(name).handlers is not None for name in private.FAKE_LOGGERS)


def test_symbols_compute_and_are_asked() -> None:
    class Env(private.ShapeEnv):
        asked: list[Any]

        def evaluate_expr(self, orig_expr: Any, hint: Any = None, *a: Any, **k: Any) -> Any:
            self.asked.append(orig_expr)
            return super().evaluate_expr(orig_expr, hint, *a, **k)

    env = Env(duck_shape=False, specialize_zero_one=True, assume_static_by_default=False)
    env.asked = []
    symbol = private.new_symbol(env, 6, "width")
    size = torch.SymInt(private.SymNode(symbol, env, int, 6))
    assert private.expr_in((2 * size).node) == 2 * symbol
    assert 2 * size == 12
    assert symbol in env.asked[-1].free_symbols
    with pytest.raises(private.GuardOnDataDependentSymNode):
        bool(env.create_unbacked_symint() > 7)


def test_sequences_are_packed_by_the_operators_that_we_take_over() -> None:
    called = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            called.append(getattr(func, "__name__", ""))
            return func(*args, **(kw or {}))

    with Watch():
        pad_packed_sequence(pack_padded_sequence(torch.rand(3, 2, 4), torch.tensor([3, 2])))
    assert {private.PACK, private.UNPACK} <= set(called)


def test_nested_values_are_walked() -> None:
    value = {"a": [torch.ones(1), 2], "b": (torch.zeros(1),)}
    assert private.tree_leaves(value) == [torch.ones(1), 2, torch.zeros(1)]
    assert private.arg_tree_leaves([1], two=2) == [1, 2]
    assert private.tree_map_only(int, lambda n: n + 1, [1, "x"]) == [2, "x"]


def test_what_a_module_holds_is_read_and_exchanged() -> None:
    norm = nn.BatchNorm1d(3)
    other = nn.Parameter(torch.zeros(5))
    private.parameters_of(norm)["weight"] = other
    private.buffers_of(norm)["running_mean"] = other
    assert norm.weight is other
    assert norm.running_mean is other
    assert private.submodules_of(nn.Sequential(norm)) == {"0": norm}
    assert not any(private.hooks_of(norm))
    for register in (norm.register_forward_hook, norm.register_forward_pre_hook):
        register(lambda *_: None)
        assert any(private.hooks_of(norm))
        for hooks in private.hooks_of(norm):
            hooks.clear()
        assert not any(private.hooks_of(norm))
    assert private.has_one_width(nn.MultiheadAttention(4, 2))
    assert not private.has_one_width(nn.MultiheadAttention(4, 2, kdim=3))
    attention = nn.MultiheadAttention(4, 2)
    private.without_fused_path(attention)
    assert not private.has_one_width(attention)


@pytest.mark.slow
def test_compiled_modules_are_known_and_undone() -> None:
    layer = nn.Linear(2, 2)
    compiled: Any = torch.compile(layer)
    assert private.is_compiled(compiled)
    assert not private.is_compiled(layer)
    layer.compile(backend=lambda *_: pytest.fail("it was compiled"))
    private.forget_compiled(layer)
    layer(torch.rand(1, 2))


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_memory_has_an_identity_and_counts_its_writes() -> None:
    for device in ("cpu", "meta"):
        one = torch.zeros(4, device=device)
        assert private.storage_id(one) == private.storage_id(one[1:])
        assert private.storage_id(one) != private.storage_id(torch.zeros(4, device=device))
    one = torch.zeros(4)
    before = private.version_of(one)
    one[2:].add_(1)
    assert private.version_of(one) > before
    typed: Any = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=one.untyped_storage(), dtype=one.dtype
    )
    assert private.address_of(typed) == one.data_ptr()


def test_a_reshape_is_no_view() -> None:
    y = torch.rand(2, 6, requires_grad=True) * 1
    made = private.without_view(y, (2, 2, 3))
    assert torch.equal(made, y.view(2, 2, 3))
    assert not made._is_view()


def test_operators_tell_what_they_return() -> None:
    assert private.returns_tensor(torch.ops.aten.add.Tensor)
    assert not private.returns_tensor(torch.ops.aten.equal.default)


def test_parametrisations_are_named_and_put_back() -> None:
    names = {kind.__name__ for kind in private.PARAMETRIZATIONS}
    layer: Any = parametrizations.weight_norm(nn.Linear(2, 2))
    assert type(layer.parametrizations.weight[0]).__name__ in names
    assert private.WrappedHook.__module__ == "torch.nn.modules.module"
    wanted = layer.weight
    layer.__class__ = nn.Linear  # as a file gives it
    private.parametrize_anew(layer, ["weight"])
    assert type(layer) is not nn.Linear
    assert torch.equal(layer.weight, wanted)


def test_names_in_a_pickle_are_listed_and_its_parts_are_ours_to_give() -> None:
    found = private.names_beyond_tensors(io.BytesIO(pickle.dumps(nn.Linear, protocol=2)))
    assert found == ["torch.nn.modules.linear.Linear"]

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing: object) -> object:
            return ("storage", 7) if thing == "part" else None

    class Reader(private.Unpickler):
        def persistent_load(self, pid: object) -> object:
            return pid

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(["part"])
    read: Any = Reader(io.BytesIO(buffer.getvalue()), encoding="utf-8")
    assert read.load() == [("storage", 7)]


def test_memory_is_told_step_by_step() -> None:
    def run() -> None:
        a = torch.empty(1 << 20)
        del a
        torch.empty(1 << 18)

    events = list(private.memory_events(run))
    assert max(events) >= 4 << 20
    assert min(events) <= -4 << 20
