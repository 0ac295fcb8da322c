"""Text files and tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.data.crafted import load_examples, refuses, scored, spec, tokenizer

WORDS = [f"w{i}" for i in range(20)]  # w3 has id 5, after [PAD] and [UNK]
IDS = "input_ids=int64:1x8<22"


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    return tokenizer(tmp_path / "tokenizer", WORDS)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "data.txt"
    path.write_bytes(text.encode())
    return path


def rows(kwargs: dict[str, torch.Tensor]) -> list[list[int]]:
    """Return the ids of each example without its padding."""
    pairs = zip(kwargs["input_ids"], kwargs["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def test_lines_become_padded_ids_and_masks(tmp_path: Path, cut: Path) -> None:
    path = write(tmp_path, "w0 w1 w2\n\n   \nw3\r\nw4 strange\n")
    found = load_examples(path, [spec(IDS)], tokenizer=cut)
    args, kwargs = found.batches[0]
    assert args == ()
    assert set(kwargs) == {"input_ids", "attention_mask"}
    assert sorted(rows(kwargs)) == [[2, 3, 4], [5], [6, 1]]
    assert kwargs["input_ids"].shape == (3, 3)
    assert kwargs["attention_mask"].sum(1).tolist() == [len(one) for one in rows(kwargs)]
    assert bool((kwargs["attention_mask"].diff(dim=1) <= 0).all())  # padding on the right
    assert found.labels is None
    assert found.count == 3


def test_batches_are_as_long_as_their_own_longest(tmp_path: Path, cut: Path) -> None:
    path = write(tmp_path, "\n".join(" ".join(WORDS[: i + 1]) for i in range(6)))
    found = load_examples(path, [spec(IDS)], tokenizer=cut, batch=2)
    for _, kwargs in found.batches:
        assert kwargs["input_ids"].shape[1] == int(kwargs["attention_mask"].sum(1).max())
    assert len({kwargs["input_ids"].shape[1] for _, kwargs in found.batches}) > 1


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        (["5", "0", "3"], [5, 0, 3]),
        (["good", "bad", "fair"], [2, 0, 1]),
        (["5", "x", "3"], [1, 2, 0]),
    ],
)
def test_labels_follow_a_tab(
    tmp_path: Path, cut: Path, labels: list[str], numbers: list[int]
) -> None:
    path = write(tmp_path, "\n".join(f"w{i}\t{label}" for i, label in enumerate(labels)))
    found = load_examples(path, [spec(IDS)], tokenizer=cut)
    assert found.labels is not None
    words = [one[0] - 2 for one in rows(found.batches[0][1])]
    assert found.labels.tolist() == [numbers[word] for word in words]


@pytest.mark.parametrize("text", ["w0\t1\nw1\n", "w0\nw1\t1\n"])
def test_labels_stand_in_all_lines_or_none(tmp_path: Path, cut: Path, text: str) -> None:
    with refuses("line 2", "<TAB>"):
        load_examples(write(tmp_path, text), [spec(IDS)], tokenizer=cut)


def test_long_lines_are_cut(tmp_path: Path, cut: Path) -> None:
    path = write(tmp_path, " ".join(WORDS * 20))
    long = load_examples(path, [spec(IDS)], tokenizer=cut).batches[0][1]["input_ids"]
    assert long.shape[1] == 128
    asked = load_examples(f"{path}?length=9", [spec(IDS)], tokenizer=cut)
    assert asked.batches[0][1]["input_ids"].shape[1] == 9
    short = tokenizer(tmp_path / "short", WORDS, most=16)
    assert (
        load_examples(path, [spec(IDS)], tokenizer=short).batches[0][1]["input_ids"].shape[1] == 16
    )
    for length in ("0", "17", "1.5", "a", "3,4"):
        with refuses("length"):
            load_examples(f"{path}?length={length}", [spec(IDS)], tokenizer=short)


def test_ids_go_where_the_model_takes_them(tmp_path: Path, cut: Path) -> None:
    path = write(tmp_path, "w0 w1\n")
    args, kwargs = load_examples(path, [spec("int64:1x8<22")], tokenizer=cut).batches[0]
    assert [one.tolist() for one in args] == [[[2, 3]]]
    assert kwargs == {}
    _, kwargs = load_examples(path, [spec("tokens=int64:1x8<22")], tokenizer=cut).batches[0]
    assert set(kwargs) == {"tokens"}
    _, kwargs = load_examples(path, [], tokenizer=cut).batches[0]
    assert set(kwargs) >= {"input_ids", "attention_mask"}


def test_models_that_take_no_ids_are_refused(tmp_path: Path, cut: Path) -> None:
    path = write(tmp_path, "w0 w1\n")
    for texts in (["8"], ["int64:1x8x2"], [IDS, "other=int64:1x8"], ["int64:1x8", "int64:1x8"]):
        with refuses("what the model takes"):
            load_examples(path, [spec(text) for text in texts], tokenizer=cut)


def test_a_tokenizer_larger_than_the_word_table_does_not_fit(tmp_path: Path, cut: Path) -> None:
    path = write(tmp_path, "w0 w1\n")
    with refuses("tokenizer does not fit", "22 words", "21"):
        load_examples(path, [spec("input_ids=int64:1x8<21")], tokenizer=cut)
    assert load_examples(path, [spec("input_ids=int64:1x8")], tokenizer=cut).count == 1


def test_a_tokenizer_without_a_padding_word_pads_all_the_same(tmp_path: Path) -> None:
    bare = tokenizer(tmp_path / "bare", WORDS, pad=False)
    path = write(tmp_path, "w0 w1 w2\nw3\n")
    kwargs = load_examples(path, [spec(IDS)], tokenizer=bare).batches[0][1]
    assert sorted(rows(kwargs)) == [[1, 2, 3], [4]]


def test_tokenizers_that_are_not_there(tmp_path: Path) -> None:
    path = write(tmp_path, "w0 w1\n")
    with refuses("no tokenizer"):
        load_examples(path, [spec(IDS)])
    with refuses("nothing is downloaded"):
        load_examples(path, [spec(IDS)], tokenizer="bert-base-uncased")
    (tmp_path / "empty").mkdir()
    with refuses("no tokenizer in"):
        load_examples(path, [spec(IDS)], tokenizer=tmp_path / "empty")


def test_files_without_text_are_refused(tmp_path: Path, cut: Path) -> None:
    for text in ("", "\n \n"):
        with refuses("no examples"):
            load_examples(write(tmp_path, text), [spec(IDS)], tokenizer=cut)
    (tmp_path / "data.txt").write_bytes(b"w0\n\xff\xfe\n")
    with refuses("line 2 is not UTF-8"):
        load_examples(tmp_path / "data.txt", [spec(IDS)], tokenizer=cut)


def test_a_byte_order_mark_is_no_word(tmp_path: Path, cut: Path) -> None:
    (tmp_path / "data.txt").write_bytes(b"\xef\xbb\xbfw0\n")
    found = load_examples(tmp_path / "data.txt", [spec(IDS)], tokenizer=cut)
    assert rows(found.batches[0][1]) == [[2]]


def test_the_parts_never_meet_and_repeat_themselves(tmp_path: Path, cut: Path) -> None:
    path = write(tmp_path, "\n".join(WORDS))
    options = {"tokenizer": cut, "count": 8}
    one = load_examples(path, [spec(IDS)], **options)  # type: ignore[arg-type]
    again = load_examples(path, [spec(IDS)], **options)  # type: ignore[arg-type]
    last = scored(path, [spec(IDS)], taken=8, count=8, tokenizer=cut)
    assert one.digest == again.digest
    first, second = (
        {i for _, kwargs in part.batches for row in rows(kwargs) for i in row}
        for part in (one, last)
    )
    assert len(first) == len(second) == 8
    assert not first & second
