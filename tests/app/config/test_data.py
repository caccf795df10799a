"""Batches: the same for the same seed and number, real text, the user's own, and one message for what is none."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import islice

import pytest
import torch

from penstock.app.config.data import GivenData, RowsData, TextData, built_in_text, digits, read_text
from penstock.errors import InputError
from penstock.model.seeding import mixed

pytestmark = pytest.mark.cpu_only
TEXT = "the quick brown fox jumps over the lazy dog " * 20


def some(data, count, first=0):
    return list(islice(data.batches(first), count))


def same(left, right):
    return all(torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(left, right, strict=True))


def test_a_batch_depends_on_seed_and_number_alone():
    data = TextData(TEXT, rows=4, length=8, seed=3)
    torch.manual_seed(0)
    first = some(data, 5)
    torch.manual_seed(1)
    assert same(first, some(TextData(TEXT, rows=4, length=8, seed=3), 5))
    assert same(first[2:], some(data, 3, first=2))
    assert not same(first, some(TextData(TEXT, rows=4, length=8, seed=4), 5))
    assert not torch.equal(first[0][0], first[1][0])


def test_neighbouring_seeds_share_no_batches():
    one, two = (some(TextData(TEXT, rows=4, length=8, seed=seed), 6) for seed in (0, 1))
    assert not any(torch.equal(a, b) for a, _ in one for b, _ in two)


def test_batches_leave_the_users_random_state_alone():
    before = torch.get_rng_state()
    some(TextData(TEXT, rows=4, length=8), 3)
    assert torch.equal(before, torch.get_rng_state())


def test_another_process_makes_the_same_batches():
    code = (
        "from penstock.app.config.data import TextData, built_in_text\n"
        "x, y = next(TextData(built_in_text(), 2, 16, seed=7).batches(4))\n"
        "print(x.tolist(), y.tolist())"
    )
    said = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)}
    x, y = next(TextData(built_in_text(), 2, 16, seed=7).batches(4))
    assert said == {f"{x.tolist()} {y.tolist()}\n"}


def test_the_target_is_the_text_one_token_further():
    data = TextData(TEXT, rows=3, length=10)
    for inputs, target in some(data, 4):
        assert inputs.shape == target.shape == (3, 10)
        for row in range(3):
            text = "".join(data.alphabet[number] for number in (*inputs[row].tolist(), target[row, -1].item()))
            assert text in TEXT
            assert torch.equal(inputs[row, 1:], target[row, :-1])


def test_the_built_in_text_is_pythons_own_manual():
    text = built_in_text()
    assert "lambda" in text
    assert len(text) > 200_000
    assert TextData(text, 2, 8).vocab == len(set(text))


def test_characters_or_bytes_of_the_users_file(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("grüße " * 10, encoding="utf-8")
    characters = TextData(read_text(str(file), as_bytes=False), 2, 8)
    assert characters.vocab == len(set("grüße "))
    as_bytes = TextData(read_text(str(file), as_bytes=True), 2, 8)
    assert as_bytes.vocab == 256
    assert bytes(as_bytes.tokens.tolist()).decode() == "grüße " * 10


def test_files_that_are_no_text_get_one_message(tmp_path):
    with pytest.raises(InputError, match=r"data.path: expected a file .*No such file"):
        read_text(str(tmp_path / "nowhere"), as_bytes=False)
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r'not; set data.tokens = "bytes"'):
        read_text(str(tmp_path / "image"), as_bytes=False)
    with pytest.raises(InputError, match="more than 8 tokens, but got 5"):
        TextData("short", 2, 8)


def test_every_row_of_a_text_can_be_drawn_up_to_its_end():
    data = TextData("abcdef", rows=64, length=5)
    (inputs, target), *_ = some(data, 1)
    assert set(map(tuple, inputs.tolist())) == {(0, 1, 2, 3, 4)}
    assert set(target[:, -1].tolist()) == {5}


def test_rows_keep_their_targets():
    data = RowsData(torch.arange(10.0).view(10, 1), torch.arange(10), rows=4, seed=2)
    for inputs, target in some(data, 5):
        assert torch.equal(inputs[:, 0].long(), target)
    assert same(some(data, 3, first=2), some(data, 5)[2:])


@pytest.mark.parametrize(("length", "share"), [(8, 0.1), (16, 0.25), (8, 0.5), (30, 0.05)])
def test_text_that_is_held_out_is_in_no_batch(length, share):
    """Each token of a text of numbers tells its place, so windows can be told apart."""
    text = "".join(map(chr, range(1000, 3000)))
    data = TextData(text, rows=16, length=length, validation=share)
    held_out = list(data.validation())
    places = torch.cat([torch.cat((inputs, target[:, -1:]), 1) for inputs, target in held_out])
    assert torch.equal(places, places[:, :1] + torch.arange(length + 1))
    scored = torch.cat([target.flatten() for _, target in held_out]).tolist()
    assert len(scored) == len(set(scored)), "each token counts once"
    assert 0.6 * share < len(scored) / len(text) <= share
    trained = torch.cat([torch.cat((x, y), 1).flatten() for x, y in some(data, 300)]).unique().tolist()
    assert not set(trained) & set(places.flatten().tolist())
    assert len(trained) > 0.95 * (1 - share) * len(text) - 20 * length
    assert same(held_out, list(TextData(text, rows=16, length=length, seed=5, validation=share).validation()))


def test_without_validation_batches_are_what_they_were():
    data = TextData(TEXT, rows=4, length=8, seed=3)
    assert list(data.validation()) == []
    starts = torch.randint(len(TEXT) - 8, (4, 1), generator=torch.Generator().manual_seed(mixed(3, 2)))
    assert torch.equal(some(data, 1, first=2)[0][0], data.tokens[starts + torch.arange(8)])


def test_a_share_that_leaves_no_window_is_refused():
    for share, length, said in [(0.001, 8, "to hold out"), (0.995, 8, "to train on"), (0.02, 100, "to hold out")]:
        with pytest.raises(InputError, match=rf"data.validation: expected a share that leaves a window .* {said}"):
            TextData(TEXT, rows=4, length=length, validation=share)


def test_the_unigram_entropy_is_that_of_the_held_out_text():
    text = "aab " * 400
    data = TextData(text, rows=4, length=8, validation=0.25)
    held_out = "".join(data.text(target.flatten()) for _, target in data.validation())
    shares = [held_out.count(sign) / len(held_out) for sign in "ab "]
    assert data.unigram_entropy() == pytest.approx(-sum(share * math.log(share) for share in shares))
    assert data.unigram_entropy() == pytest.approx(1.04, abs=0.02)


def test_tokens_are_told_as_text():
    characters, as_bytes = (TextData(text, 2, 2) for text in ("grüße", "grüße".encode()))
    assert characters.text(characters.tokens) == as_bytes.text(as_bytes.tokens) == "grüße"


def test_rows_that_are_held_out_are_in_no_batch():
    data = RowsData(torch.arange(40.0).view(40, 1), torch.arange(40), rows=6, validation=0.25)
    held_out = [int(target) for _, targets in data.validation() for target in targets]
    assert len(set(held_out)) == 10
    trained = {int(target) for _, targets in some(data, 100) for target in targets}
    assert trained == set(range(40)) - set(held_out)
    for share in (0.001, 0.999):
        with pytest.raises(InputError, match=r"data.validation: expected a share that leaves a row"):
            RowsData(torch.zeros(40, 1), torch.zeros(40), rows=6, validation=share)


def test_a_function_gives_the_held_out_batches_once():
    pairs = [(torch.tensor([k]), torch.tensor([k])) for k in range(3)]
    assert [x.item() for x, _ in GivenData(lambda: pairs, lambda: iter(pairs[1:])).validation()] == [1, 2]
    assert list(GivenData(lambda: pairs).validation()) == []
    with pytest.raises(InputError, match="each batch to be"):
        list(GivenData(lambda: pairs, lambda: [1]).validation())


def test_digits_are_there_or_the_message_says_what_to_install():
    try:
        import sklearn  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(InputError, match="pip install scikit-learn"):
            digits(4, 0)
    else:
        inputs, target = next(digits(4, 0).batches())
        assert inputs.shape == (4, 64)
        assert inputs.max() <= 1
        assert target.max() <= 9


def test_a_functions_batches_begin_again_when_they_end():
    pairs = [(torch.tensor([k]), torch.tensor([k])) for k in range(3)]
    data = GivenData(lambda: iter(pairs))
    assert [x.item() for x, _ in some(data, 7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [x.item() for x, _ in some(data, 3, first=4)] == [1, 2, 0]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([], "at least one batch, but got none"),
        ([(1, 2, 3)], r"\(inputs, target\), but got 3 values"),
        ([7], r"\(inputs, target\), but got int"),
        (None, "an iterable, but got NoneType"),
    ],
)
def test_what_is_no_data_gets_one_message(made, said):
    with pytest.raises(InputError, match=said):
        some(GivenData(lambda: made), 1)
