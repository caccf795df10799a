"""One action of a slot, and its notation as a short word.

A word is read as *stage, operation, micro-batch*, then the weight version when it is not 0:

    0F3      stage 0 runs the forward of micro-batch 3          0F3@2   the same with weight version 2
    0B3      full backward                                      0I3, 0W3   input gradient, weight gradient apart
    0F5&7B2  forward of stage 0 and backward of stage 7, overlapped as one action
    0F3>1    stage 0 sends the output of forward 3 to stage 1       1F3<0   and stage 1 receives it
    1B3>0    stage 1 sends the gradient back to stage 0            0B3<1   and stage 0 receives it
    0F3>1.2  the same to replica 2 of stage 1 (replica 0 is not written)
    0R@4     stage 0 reduces its gradients over its replicas for version 4
    0U@4     stage 0 updates its weights to version 4
    0G, 0D   stage 0 gathers (unshards) its parameters, and drops (reshards) them again
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from penstock.core.arguments import named_fields
from penstock.errors import FormatError


class Op(IntEnum):
    """Operation of an action. The numbers are stored in schedules and must not change."""

    F = 0
    B = 1
    I = 2
    W = 3
    FB = 4  # a forward that overlaps the full backward in the next row
    SEND_F = 5
    RECV_F = 6
    SEND_B = 7
    RECV_B = 8
    REDUCE = 9
    UPDATE = 10
    UNSHARD = 11
    RESHARD = 12


COMPUTE = (Op.F, Op.B, Op.I, Op.W, Op.FB)
TRANSFER = (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B)

_COMPUTE_LETTER = {Op.F: "F", Op.B: "B", Op.I: "I", Op.W: "W", Op.FB: "F"}
_STAGE_LETTER = {Op.REDUCE: "R", Op.UPDATE: "U", Op.UNSHARD: "G", Op.RESHARD: "D"}
_TRANSFER_SIGN = {Op.SEND_F: ("F", ">"), Op.RECV_F: ("F", "<"), Op.SEND_B: ("B", ">"), Op.RECV_B: ("B", "<")}

_WORD = re.compile(
    r"(?P<stage>\d+)"
    r"(?:(?P<op>[FBIW])(?P<mb>\d+)(?:(?P<sign>[<>])(?P<peer>\d+)(?:\.(?P<replica>\d+))?)?|(?P<own>[RUGD]))"
    r"(?:@(?P<version>\d+))?"
)
_FROM_LETTER = {"F": Op.F, "B": Op.B, "I": Op.I, "W": Op.W}
_FROM_STAGE_LETTER = {letter: op for op, letter in _STAGE_LETTER.items()}
_FROM_SIGN = {pair: op for op, pair in _TRANSFER_SIGN.items()}


@named_fields
@dataclass(frozen=True, slots=True)
class Action:
    """One action of one slot. `peer` and `replica` are a transfer's other end; `joined` is the backward of an FB."""

    op: Op
    stage: int
    microbatch: int = -1
    version: int = 0
    peer: int = -1
    replica: int = -1
    joined: Action | None = None

    def __str__(self) -> str:
        version = f"@{self.version}" if self.version else ""
        if self.op in _STAGE_LETTER:
            return f"{self.stage}{_STAGE_LETTER[self.op]}{version}"
        if self.op in _TRANSFER_SIGN:
            letter, sign = _TRANSFER_SIGN[self.op]
            replica = f".{self.replica}" if self.replica > 0 else ""
            return f"{self.stage}{letter}{self.microbatch}{sign}{self.peer}{replica}{version}"
        joined = f"&{self.joined or ''}" if self.op is Op.FB else ""  # an FB without its backward has no valid word
        return f"{self.stage}{_COMPUTE_LETTER[self.op]}{self.microbatch}{version}{joined}"

    @classmethod
    def parse(cls, word: str, where: str = "action") -> Action:
        """Parse a word, the inverse of `str`. `where` names its source in error messages."""
        first, joiner, second = word.strip().partition("&")
        action = cls._parse_one(first, word, where)
        if not joiner:
            return action
        backward = cls._parse_one(second, word, where)
        if action.op is not Op.F or backward.op is not Op.B:
            raise FormatError(where, "a forward & a full backward", repr(word), "write it like 0F5&7B2")
        return cls(Op.FB, action.stage, action.microbatch, action.version, joined=backward)

    @classmethod
    def _parse_one(cls, part: str, word: str, where: str) -> Action:
        match = _WORD.fullmatch(part)
        if match is None:
            raise FormatError(where, "a word like 0F3, 1B2, 2I0, 2W0, 0F3>1 or 0U@1", repr(word), "correct the word")
        if any(len(digits) > 9 for digits in match.groupdict(default="").values()):
            raise FormatError(where, "numbers below a billion", repr(word), "correct the word")
        stage, version = int(match["stage"]), int(match["version"] or 0)
        if match["own"]:
            return cls(_FROM_STAGE_LETTER[match["own"]], stage, version=version)
        if not match["sign"]:
            return cls(_FROM_LETTER[match["op"]], stage, int(match["mb"]), version)
        op = _FROM_SIGN.get((match["op"], match["sign"]))
        if op is None:
            raise FormatError(where, "a transfer of F (activations) or B (gradients)", repr(word), "correct the word")
        return cls(op, stage, int(match["mb"]), version, int(match["peer"]), int(match["replica"] or 0))
