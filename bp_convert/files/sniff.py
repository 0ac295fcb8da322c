"""Tell what kind of file this is from its first bytes and its table of contents alone."""

from __future__ import annotations

import difflib
import zipfile
from enum import Enum
from pathlib import Path

from bp_convert.errors import CheckpointError

ALLOWED = (
    "a pickled model (torch.save(model)), or weights (a state dict, a training checkpoint, "
    ".safetensors) together with --arch"
)
_RESAVE = "load it where it was made and write torch.save(model, 'model.pt') or its state dict"
ASK = "copy or download it again, or ask its author for the weights as .safetensors"
_SMALL, _RATIO = 2**26, 100  # bytes, and how much smaller an honest archive may be
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the first pickle of torch < 1.6
_HEAD = 64 * 1024
_PICKLE_PROTOCOLS = range(2, 6)

_TORCH_TWIN = (
    "give the PyTorch model: the same one, if it was made in PyTorch; others have to be trained or "
    "rebuilt there first"
)
_TENSORFLOW = ("a TensorFlow model", _TORCH_TWIN)
_ONNX = (
    "an ONNX model",
    "give the PyTorch model that it was exported from; the result can be exported to ONNX again",
)

# First bytes of files that people take for PyTorch models: (offset, bytes, what it is, what to do).
_FOREIGN: tuple[tuple[int, bytes, str, str], ...] = (
    (
        0,
        b"version https://git-lfs",
        "a git-lfs pointer: a few lines of text that stand for the real file",
        "run `git lfs pull` in its repository, then try again",
    ),
    (0, b"\x93NUMPY", "a numpy array", _RESAVE),
    (0, b"\x89HDF\r\n", "an HDF5 file, such as Keras writes", _TORCH_TWIN),
    (
        0,
        b"GGUF",
        "a GGUF file",
        "give the PyTorch weights that it was made from: the folder with config.json and "
        ".safetensors, which the result can be turned into GGUF from again",
    ),
    (4, b"TFL3", "a TensorFlow Lite model", _TORCH_TWIN),
    (0, b"\x1f\x8b", "a gzip archive", "unpack it, and give the model file in it"),
    (0, b"BZh", "a bzip2 archive", "unpack it, and give the model file in it"),
    (0, b"7z\xbc\xaf", "a 7z archive", "unpack it, and give the model file in it"),
    (
        257,
        b"ustar",
        "a tar archive (torch wrote models so before 2017)",
        "unpack it and give the model file in it; if torch wrote it, load it with the torch that "
        "did and save it again",
    ),
)


class FileKind(Enum):
    """The files that can be read."""

    TORCH = "a torch.save file"
    LEGACY = "a torch.save file of torch 1.5 or older"
    SAFETENSORS = "a safetensors file"


def file_kind(path: Path) -> FileKind:
    """Tell which readable kind of file stands at ``path``; execute and import nothing.

    Raises:
        CheckpointError: no file is there, or it is no model that can be read; says what it is.
    """
    head, size = _read_head(path)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _kind_of_zip(path)
    if _is_safetensors(head, size):
        return FileKind.SAFETENSORS
    if head.startswith(_LEGACY_MAGIC):
        return FileKind.LEGACY
    for offset, magic, what, fix in _FOREIGN:
        if head[offset:].startswith(magic):
            raise refusal(path, what, fix)
    raise refusal(path, *_guess(path, head))


def refusal(path: Path | str, found: str, fix: str) -> CheckpointError:
    """Return the error for a file that is not a readable model."""
    return CheckpointError(where=str(path), found=found, allowed=ALLOWED, fix=fix)


def _read_head(path: Path) -> tuple[bytes, int]:
    try:
        if path.is_dir():
            raise refusal(path, *_guess_folder(path))
        if not path.exists():
            raise refusal(path, "no file of this name", _near_names(path))
        if not path.is_file():
            raise refusal(path, "a device or a pipe", "give a regular file")
        with path.open("rb") as file:
            head = file.read(_HEAD)
        size = path.stat().st_size
    except (OSError, ValueError) as problem:
        raise refusal(
            path, f"a file that cannot be opened: {problem}", "check its name and permissions"
        ) from None
    if not head:
        raise refusal(path, "an empty file", "write or download it again")
    return head, size


def _kind_of_zip(path: Path) -> FileKind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            unpacked = sum(one.file_size for one in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, EOFError):
        raise refusal(
            path,
            "a truncated or damaged torch.save file (its table of contents is missing)",
            "copy or download it again, and compare the sizes",
        ) from None
    if len({*names}) < len(names):  # two readers may take one each
        raise refusal(path, "an archive with two records of one name", ASK)
    if unpacked > _SMALL + _RATIO * path.stat().st_size:
        raise refusal(path, f"an archive that unpacks to {unpacked:,} bytes", ASK)
    # torch puts everything under one folder, named after the file.
    inner = [name.partition("/")[2] or name for name in names]
    program = ""
    if any(name.endswith("constants.pkl") or name.startswith("code/") for name in inner):
        program = "a TorchScript program, whose layers can no longer be exchanged"
    elif any(
        name == "archive_format" or name.startswith(("models/", "serialized_exported_program"))
        for name in inner
    ):
        program = "an exported program (torch.export), whose layers can no longer be exchanged"
    if program:
        raise refusal(
            path,
            program,
            "give the eager model that it was made from: torch.save(model, 'model.pt'), or its "
            "state dict with --arch",
        )
    if "data.pkl" in inner:
        return FileKind.TORCH
    if "model.weights.h5" in names:
        raise refusal(path, "a Keras model", _TORCH_TWIN)
    if any(name.endswith(".npy") for name in names):
        raise refusal(path, "a numpy .npz archive", _RESAVE)
    raise refusal(path, "a zip archive without a model in it", "unpack it, or give another file")


def _is_safetensors(head: bytes, size: int) -> bool:
    length = int.from_bytes(head[:8], "little")
    return len(head) > 8 and 2 <= length <= size - 8 and head[8:9] == b"{"


def _guess(path: Path, head: bytes) -> tuple[str, str]:
    """Name what is not a model, as well as its bytes tell."""
    if head[:1] == b"\x80" and len(head) > 1 and head[1] in _PICKLE_PROTOCOLS:
        if b"sklearn" in head or b"joblib" in head:
            return "a scikit-learn or joblib pickle", "give a PyTorch model; this is none"
        return "a plain pickle, which was not written by torch.save", _RESAVE
    if _is_tensorflow(head):
        return _TENSORFLOW
    if path.suffix == ".onnx" or _is_onnx(head):
        return _ONNX
    if path.suffix == ".safetensors":
        return "a truncated or damaged safetensors file", "copy or download it again"
    if _is_text(head):
        if head.lstrip()[:1] == b"<":
            return "a web page, perhaps a failed download", "download the model file itself"
        return "a text file", "give the model file itself"
    return "bytes of no known kind, perhaps a damaged file", "copy or download it again"


def _is_onnx(head: bytes) -> bool:
    """Tell the version of its form, from 3 on, in the first field, and the tag of another."""
    first = len(head) > 2 and head[0] == 8 and 3 <= head[1] < 64
    return first and head[2] in b"\x12\x1a\x22\x28\x32\x3a\x42"


def _is_tensorflow(head: bytes) -> bool:
    """Tell a saved model, by its version 1, and a frozen graph, by its first operations."""
    saved = head[:3] == b"\x08\x01\x12"
    named = any(one in head[:4096] for one in (b"\x12\x0bPlaceholder", b"\x12\x05Const"))
    return saved or (head[:1] == b"\n" and named)


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as problem:
        if problem.start < len(head) - 4:  # not merely a character cut by the end of the head
            return False
        text = head[: problem.start].decode("utf-8")
    return all(char.isprintable() or char.isspace() for char in text)


def _guess_folder(path: Path) -> tuple[str, str]:
    if (path / "saved_model.pb").is_file():
        return _TENSORFLOW
    if (path / "open_clip_config.json").is_file():
        return (
            "an open_clip checkpoint, which does not say its class in a way that is read here",
            "pip install open_clip_torch, put `def make(): return "
            "open_clip.create_model('ViT-B-32')`, with its own name, into clip.py, and say "
            "--arch clip.py:make",
        )
    if (path / "config.json").is_file():
        return "the folder of a transformers model", "give the folder where a model is asked for"
    models = sorted(
        one.name
        for one in path.iterdir()
        if one.suffix in {".pt", ".pth", ".bin", ".ckpt", ".safetensors"}
    )
    foreign = {one.suffix: one for one in path.iterdir() if one.suffix in {".gguf", ".onnx"}}
    if foreign and not models:
        try:
            file_kind(next(iter(foreign.values())))
        except CheckpointError as problem:
            return f"a folder of {problem.found}", problem.fix
    if models:
        return "a folder", f"give a file in it, such as {path / models[0]}"
    return "a folder", "give a model file"


def _near_names(path: Path) -> str:
    try:
        names = [one.name for one in path.parent.iterdir()]
    except OSError:
        return f"check the path; there is no folder {path.parent}"
    near = difflib.get_close_matches(path.name, names, n=3)
    return f"check the path; near names: {', '.join(near)}" if near else "check the path"
