"""The threat model, executed: whatever a model file says, nothing in it runs.

Each file tries to create a marker. Each must be refused with a remedy, with and without --arch,
or be read without any effect.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from bp_convert.errors import CheckpointError
from bp_convert.files.arch import arch_factory
from bp_convert.files.converted import needs_trust, read_converted, save_converted
from bp_convert.files.read_model import load_model
from bp_convert.pickles.admit import admit
from tests.files.crafted import call, text, torch_file, whole

ARCH = "torchvision:squeezenet1_1"


class Runs:
    """Pickles as a call of a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


class Spiteful(nn.Module):
    """An nn.Module whose __setstate__ acts."""

    def __setstate__(self, state: dict[str, object]) -> None:
        Path(str(state["marker"])).touch()


def shell(marker: Path) -> Runs:
    return Runs(os.system, f"touch {marker}")


def at_the_top(path: Path, marker: Path) -> None:
    torch.save(shell(marker), path)


def in_a_nested_dictionary(path: Path, marker: Path) -> None:
    state = {"weight": torch.zeros(2), "extra": {"deep": [1, {"er": shell(marker)}]}}
    torch.save({"epoch": 3, "model_state": state}, path)


def as_a_dictionary_key(path: Path, marker: Path) -> None:
    torch.save({"weight": torch.zeros(2), (1, shell(marker)): 2}, path)


def in_an_attribute_of_a_module(path: Path, marker: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].note = shell(marker)
    torch.save(model, path)


def as_a_forward_hook(path: Path, marker: Path) -> None:
    model = nn.Linear(2, 2)
    model._forward_hooks = OrderedDict({0: shell(marker)})
    torch.save(model, path)


def as_a_parameter(path: Path, marker: Path) -> None:
    model = nn.Linear(2, 2)
    model._parameters["weight"] = shell(marker)  # type: ignore[assignment]
    torch.save(model, path)


def by_eval(path: Path, marker: Path) -> None:
    evil = Runs(eval, f"open({str(marker)!r}, 'w').close()")
    torch.save({"weight": torch.zeros(2), "x": evil}, path)


def by_import(path: Path, marker: Path) -> None:
    torch_file(path, whole(call("builtins", "__import__", "antigravity")))


def by_old_builtins(path: Path, marker: Path) -> None:
    torch_file(path, whole(call("__builtin__", "exec", f"open({str(marker)!r}, 'w').close()")))


def by_getattr(path: Path, marker: Path) -> None:
    reach = b"c__builtin__\ngetattr\n" + b"(ctorch.nn.modules.linear\nLinear\n" + text("__init__")
    torch_file(path, whole(reach + b"tR"))


def by_a_path_through_torchvision(path: Path, marker: Path) -> None:
    torch_file(path, whole(call("torchvision", "os.system", f"touch {marker}")))


def by_a_path_through_a_module_file(path: Path, marker: Path) -> None:
    torch_file(path, whole(call("torchvision.models._utils", "os.system", f"touch {marker}")))


def by_a_name_that_a_module_imported(path: Path, marker: Path) -> None:
    # torchvision.datasets.utils does `import os`.
    torch_file(path, whole(call("torchvision.datasets.utils", "os.system", f"touch {marker}")))


def by_a_torch_function_that_is_no_module(path: Path, marker: Path) -> None:
    torch_file(path, whole(call("torch.nn.modules.module", "register_module_forward_hook", "x")))


def by_torch_nn_utils(path: Path, marker: Path) -> None:
    torch_file(path, whole(call("torch.nn.utils.parametrize", "register_parametrization", "x")))


def by_a_method(path: Path, marker: Path) -> None:
    torch_file(path, whole(call("torch.nn.modules.module", "Module.__reduce__", "x")))


def by_torch_load(path: Path, marker: Path) -> None:
    torch_file(path, whole(call("torch", "load", "another.pt")))


def by_torch_hub(path: Path, marker: Path) -> None:
    torch_file(path, whole(call("torch.hub", "load", "someone/something", "model")))


def by_an_nn_module_of_main(path: Path, marker: Path) -> None:
    module = b"c__main__\nSpiteful\n)\x81}" + text("marker") + text(str(marker)) + b"sb"
    torch_file(path, whole(module))


def by_an_nn_module_of_another_package(path: Path, marker: Path) -> None:
    model = Spiteful()
    model.marker = str(marker)
    torch.save(model, path)


def by_a_module_on_the_path(path: Path, marker: Path) -> None:
    (path.parent / "lying_in_wait.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nclass Net: ...\n"
    )
    torch_file(path, whole(call("lying_in_wait", "Net")))


def in_the_old_format(path: Path, marker: Path) -> None:
    torch.save({"w": shell(marker)}, path, _use_new_zipfile_serialization=False)


def as_a_plain_pickle(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps(shell(marker)))


def as_a_newer_pickle(path: Path, marker: Path) -> None:
    torch.save(shell(marker), path, pickle_protocol=4)


ATTACKS = [
    at_the_top,
    in_a_nested_dictionary,
    as_a_dictionary_key,
    in_an_attribute_of_a_module,
    as_a_forward_hook,
    as_a_parameter,
    by_eval,
    by_import,
    by_old_builtins,
    by_getattr,
    by_a_path_through_torchvision,
    by_a_path_through_a_module_file,
    by_a_name_that_a_module_imported,
    by_a_torch_function_that_is_no_module,
    by_torch_nn_utils,
    by_a_method,
    by_torch_load,
    by_torch_hub,
    by_an_nn_module_of_main,
    by_an_nn_module_of_another_package,
    by_a_module_on_the_path,
    in_the_old_format,
    as_a_plain_pickle,
    as_a_newer_pickle,
]


@pytest.mark.parametrize("arch", [None, ARCH])
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda one: one.__name__)
def test_nothing_runs(
    attack: Callable[[Path, Path], None],
    arch: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path, marker = tmp_path / "model.pt", tmp_path / "marker"
    attack(path, marker)
    before = {*sys.modules}
    with pytest.raises(CheckpointError) as caught:
        load_model(path, arch=arch)
    assert not marker.exists()
    assert "lying_in_wait" not in sys.modules
    assert "antigravity" not in {*sys.modules} - before
    text_of_error = str(caught.value)
    assert caught.value.fix
    assert "weights_only" not in text_of_error
    assert "add_safe_globals" not in text_of_error


def test_the_attacks_are_real(tmp_path: Path) -> None:
    """Without the safe loader these files do run: the markers above could have appeared."""
    path, marker = tmp_path / "model.pt", tmp_path / "marker"
    for attack in (at_the_top, in_an_attribute_of_a_module, by_eval, by_a_module_on_the_path):
        attack(path, marker)
        sys.path.insert(0, str(tmp_path))
        try:
            torch.load(path, weights_only=False)
        finally:
            sys.path.remove(str(tmp_path))
            sys.modules.pop("lying_in_wait", None)
        assert marker.exists(), attack.__name__
        marker.unlink()


def test_an_evil_class_in_a_checkpoint_stays_inert(tmp_path: Path) -> None:
    """With --arch the weights are had, and the class beside them does nothing."""
    path, marker = tmp_path / "model.pt", tmp_path / "marker"
    evil = Spiteful()
    evil.marker = str(marker)
    torch.save({"state_dict": nn.Linear(2, 3).state_dict(), "meter": evil}, path)
    (tmp_path / "net.py").write_text("from torch import nn\ndef make(): return nn.Linear(2, 3)\n")
    loaded = load_model(path, arch=f"{tmp_path / 'net.py'}:make")
    assert isinstance(loaded.model, nn.Linear)
    assert not marker.exists()


@pytest.mark.parametrize("where", ["skeleton", "skeleton attribute", "state", "plan"])
def test_nothing_runs_from_a_converted_file(where: str, tmp_path: Path) -> None:
    path, marker = tmp_path / "out.pt", tmp_path / "marker"
    model = nn.Sequential(nn.Linear(2, 2))
    save_converted(path, model=model, plan_json="{}", settings_json="{}", arch=None)
    content = torch.load(path, weights_only=False)
    if where == "skeleton attribute":
        content["skeleton"][0].note = shell(marker)
    else:
        content[where] = shell(marker)
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="nothing was run"):
        read_converted(path)
    assert not marker.exists()
    assert needs_trust(path) == ["posix.system"]


def test_trust_opens_no_way_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trusting a package admits what it defines, not what it imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "trusted_nets"
    folder.mkdir()
    (folder / "__init__.py").write_text("import os\nfrom os import system\n")
    path, marker = tmp_path / "model.pt", tmp_path / "marker"
    for name in ("system", "os.system"):
        torch_file(path, whole(call("trusted_nets", name, f"touch {marker}")))
        with pytest.raises(CheckpointError):
            load_model(path, trust=["trusted_nets"])
    torch_file(path, whole(call("os", "system", f"touch {marker}")))
    for trust in ("os", "posix", "trusted_nets"):
        with pytest.raises(CheckpointError, match="nothing was run"):
            load_model(path, trust=[trust])
    assert not marker.exists()


def test_the_standard_library_is_never_trusted() -> None:
    assert admit("ensurepip.bootstrap", ["ensurepip"]) is None
    assert admit("this.s", ["this"]) is None
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (b"ctorch._C\n_VariableFunctionsClass\n", "from_file"),  # a real torch function
        (b"ctorch.nn.modules.linear\nLinear\n", "__init__"),
        (b"ctorch.nn.modules.linear\nLinear\n", "relu"),
    ],
)
def test_getattr_gives_little(owner: bytes, name: str, tmp_path: Path) -> None:
    path = torch_file(
        tmp_path / "m.pt", whole(b"c__builtin__\ngetattr\n(" + owner + text(name) + b"tR")
    )
    with pytest.raises(CheckpointError, match="is not admitted"):
        load_model(path)


def test_trusting_a_script_does_not_let_the_file_call_its_functions(tmp_path: Path) -> None:
    path, marker = tmp_path / "model.pt", tmp_path / "marker"
    (tmp_path / "careful_script.py").write_text(
        "import pathlib\ndef wipe(path): pathlib.Path(path).touch()\n"
    )
    torch_file(path, whole(call("__main__", "wipe", str(marker))))
    with pytest.raises(CheckpointError, match="does not define"):
        load_model(path, trust=[str(tmp_path / "careful_script.py")])
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn.modules.linear.nn",
        "torch.nn.modules.linear.init",
        "torch.nn.modules.linear.Tensor",
        "torch.nn.modules.linear.Module",  # imported there, at home elsewhere
        "torch.nn.modules.linear.Linear.forward",
        "torch.nn.modules..linear.Linear",
        "torch.nn.modules.linear",
        "torch.nn.Linear",  # no pickle names it so
        "torch.nn.utils.weight_norm.remove_weight_norm",
        "torch.nn.init.normal_",
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "torch.nn.modules.nothing.Nothing",
        "torch.fx.graph_module.GraphModule",
        "torchvision.models.feature_extraction.DualGraphModule",
        "torchvision.models._api.get_model",
        "torchvision.models.resnet.resnet18",
        "torchvision.io.video_reader.VideoReader",
        "torchvision.models...os.system",
        "torchvision.models/../../os.system",
        "bp_convert.pickles.user_code.run_file",
        "bp_convert.layers.linear.BPLinear.from_dense",
        "bp_convert_evil.Net",
        "torchvision_evil.models.Net",
        "torch.nn.modules_evil.Net",
        "__main__.Net",
        "getattr",
        "",
    ],
)
def test_names_that_are_refused(name: str) -> None:
    assert admit(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn.modules.linear.Linear",
        "torch.nn.modules.module.Module",
        "torchvision.models.resnet.ResNet",
        "torchvision.ops.misc.Conv2dNormActivation",
        "bp_convert.layers.linear.BPLinear",
    ],
)
def test_names_that_are_admitted(name: str) -> None:
    found = admit(name)
    assert isinstance(found, type)
    assert issubclass(found, nn.Module)
    assert f"{found.__module__}.{found.__qualname__}" == name


def test_an_arch_in_a_file_runs_no_script(tmp_path: Path) -> None:
    """An arch that stands in a converted file is not the user's word."""
    marker = tmp_path / "marker"
    script = tmp_path / "script.py"
    script.write_text(f"open({str(marker)!r}, 'w').close()\ndef make(): ...\n")
    for arch in (f"{script}:make", "script:make", "os:system", "shutil:rmtree?path=x"):
        with pytest.raises(CheckpointError, match="--trust"):
            arch_factory(arch)
    assert not marker.exists()


def test_a_bad_storage_size_is_an_error(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(4)}, buffer)
    path = tmp_path / "short.pt"
    path.write_bytes(buffer.getvalue()[:-60])
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(path, arch=ARCH)
