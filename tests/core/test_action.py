"""Words: what can be printed can be parsed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Action, FormatError, Op

small = st.integers(0, 10_000)
compute = st.builds(Action, st.sampled_from([Op.F, Op.B, Op.I, Op.W]), small, small, small)
overlapped = st.builds(
    lambda f, b: Action(Op.FB, f.stage, f.microbatch, f.version, joined=b),
    compute,
    st.builds(Action, st.just(Op.B), small, small, small),
)
transfer = st.builds(
    Action, st.sampled_from([Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B]), small, small, st.just(0), small, small
)
own = st.builds(
    lambda op, stage, version: Action(op, stage, version=version),
    st.sampled_from([Op.REDUCE, Op.UPDATE, Op.UNSHARD, Op.RESHARD]),
    small,
    small,
)


@given(st.one_of(compute, overlapped, transfer, own))
def test_every_word_parses_back(action):
    assert Action.parse(str(action)) == action


def test_words_read_as_documented():
    assert str(Action(Op.F, 0, 3)) == "0F3"
    assert str(Action(Op.F, 0, 3, 2)) == "0F3@2"
    assert str(Action(Op.FB, 0, 5, joined=Action(Op.B, 7, 2))) == "0F5&7B2"
    assert str(Action(Op.SEND_F, 0, 3, peer=1, replica=0)) == "0F3>1"
    assert str(Action(Op.RECV_B, 0, 3, peer=1, replica=2)) == "0B3<1.2"
    assert str(Action(Op.UPDATE, 0, version=4)) == "0U@4"


@pytest.mark.parametrize(
    "word", ["", "F0", "0X1", "0F", "0F1@", "0F-1", "0W1>2", "0B1&0F1", "0F1&0I1", "0F1>", "0F1 2"]
)
def test_a_wrong_word_is_named_with_its_place(word):
    with pytest.raises(FormatError, match=r"line 3.*expected") as caught:
        Action.parse(word, "line 3")
    assert repr(word) in str(caught.value)


def test_letters_keep_their_numbers():
    # Stored schedules hold the numbers: a change here breaks them.
    assert [op.name for op in Op] == [
        "F", "B", "I", "W", "FB", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE", "UPDATE", "UNSHARD", "RESHARD",
    ]  # fmt: skip
    assert [int(op) for op in Op] == list(range(13))
