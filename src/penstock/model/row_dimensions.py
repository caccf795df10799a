"""Where the rows of a batch lie in the values that cross between stages, so that replicas can exchange parts of them.

A value has its rows in one dimension, perhaps folded with another behind it, as in view(rows * length, -1); or it has
nothing to do with rows, as a table of positions. Both are found by running the example and a part of it. Anything else,
such as a mean over the rows, cannot be divided, and is refused where stages have unequal numbers of replicas; it is not
noticed only where all tokens of the example are one and the same, and not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.errors import SplitError
from penstock.model import tree
from penstock.model.batch import piece, rows_of
from penstock.model.batchnorm import DeferredNorms
from penstock.model.buffers import Buffers
from penstock.model.passage import Passage
from penstock.model.record import trace
from penstock.model.seeding import draws, random_states_kept
from penstock.model.split import Split
from penstock.model.stage import Job, Settings, Stage
from penstock.model.untouched import untouched

ROWS = 4  # a part of fewer than two rows may be treated in a way of its own
CLOSE = 1e-3  # of a value's largest entry: kernels are chosen by sizes, and round differently


Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class RowDimension:
    """The dimension that rows lie in, `each` entries a row; or none, for a value that is the same for all rows."""

    dimension: int | None
    each: int = 1

    def part(self, tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return some rows of a tensor; all of it if it has none."""
        if self.dimension is None:
            return tensor
        return tensor.narrow(self.dimension, first * self.each, (last - first) * self.each)

    def shape(self, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """Return a shape for another number of rows."""
        if self.dimension is None:
            return shape
        return (*shape[: self.dimension], rows * self.each, *shape[self.dimension + 1 :])


@dataclass(frozen=True)
class RowDimensions:
    """The row dimensions of a model's values, by the names that forwards of all sizes have in common."""

    known: Mapping[int, RowDimension] = field(default_factory=dict)
    by_line: Mapping[str, RowDimension] = field(default_factory=dict)  # of values that one line makes, all alike

    def of(self, key: int, described: str) -> RowDimension:
        """Return where the rows of a value lie; of one that comes by another path, where the same line made it."""
        found = self.known.get(key) or self.by_line.get(described)
        if found is None:
            raise _refusal(described, "that the example does not have")
        return found


def row_dimensions(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> RowDimensions:
    """Find where the rows lie in all values that cross between stages, or whose shapes the model's own code reads.

    Values are compared in eval mode, without random numbers. A value may have another name in training, so the
    dimensions are found by shapes alone in every mode.
    """
    call = _enough_rows((args, kwargs))
    seen = split.first.trace
    found: list[tuple[int, str, RowDimension]] = []
    with (
        random_states_kept(device),
        untouched(split.model, seen.generators, seen.written),
        _modes_kept(split.model) as own_modes,
    ):
        if seen.draws:
            _require_draws_without_rows(split, call)
        split.model.eval()
        compared = _compared_once(split, call, device)
        for training in (None, True, False):
            own_modes() if training is None else split.model.train(training)
            try:
                with torch.enable_grad():
                    found += _by_shapes(split, call, device, compared)
            except SplitError:
                raise
            except Exception:  # a model need not run in every mode
                if training is None:
                    raise
    lines: dict[str, set[RowDimension]] = {}
    for _, described, dimension in found:
        lines.setdefault(described, set()).add(dimension)
    by_line = {described: every.pop() for described, every in lines.items() if len(every) == 1}
    return RowDimensions({key: dimension for key, _, dimension in found}, by_line)


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Put every module back into its own mode at the end, and whenever it is asked for."""
    modes = [(module, module.training) for module in model.modules()]

    def put_back() -> None:
        for module, training in modes:
            module.training = training

    try:
        yield put_back
    finally:
        put_back()


def _compared_once(split: Split, call: Call, device: torch.device) -> set[str]:
    """Compare values for inputs that differ as much as the model allows."""
    variations: list[Call] = [_varied(call), call]
    if device.type == "cpu":  # elsewhere a number that an embedding does not have ends the process
        variations.insert(0, _varied(call, bold=True))
    for number, varied in enumerate(variations, 1):
        try:
            with torch.no_grad():
                return _compared(split, varied, device)
        except SplitError:
            raise
        except Exception:
            if number == len(variations):
                raise
    raise AssertionError("no variation was tried")


def _compared(split: Split, call: Call, device: torch.device) -> set[str]:
    """Refuse values that rows cannot be taken out of; return what the others are called."""
    whole, some, rows, part = _of_two_sizes(split, call, device)
    if whole[2] != some[2]:
        raise SplitError(
            "results of modules without plain numbers that depend on the rows, between unequal numbers of replicas",
            "some that do",
            "give both stages the same number of replicas",
        )
    for key, (tensor, described) in whole[0].items():
        if key not in some[0]:
            raise _refusal(described, "that a part of the example does not have")
        _dimension(tensor, some[0][key][0], rows, part, described)
    return {described for _, described in whole[0].values()}


def _by_shapes(
    split: Split, call: Call, device: torch.device, compared: set[str]
) -> list[tuple[int, str, RowDimension]]:
    """Return the dimensions of rows, with what the values are called in the present mode and where they are made."""
    before = draws()
    whole, some, rows, part = _of_two_sizes(split, call, device)
    drawn = not all(map(torch.equal, before, draws()))
    found = []
    for key, (tensor, described) in whole[0].items():
        if key not in some[0]:
            raise _refusal(described, "that a part of the example does not have")
        other = some[0][key][0]
        alike = described in compared or (drawn and tensor.shape != other.shape)  # else random numbers differ
        found.append((key, described, _dimension(tensor, other, rows, part, described, values=not alike)))
    for key, (shape, described) in whole[1].items():
        if key not in whole[0] and key in some[1]:
            dimension = _dimension_of_shape(shape, some[1][key][0], rows, part) or RowDimension(None)
            found.append((key, described, dimension))
    return found


def _of_two_sizes(split: Split, call: Call, device: torch.device) -> tuple[Found, Found, int, int]:
    """Return what all rows of an example make, and what half of them make, with both numbers of rows."""
    rows = rows_of(call)
    part = rows // 2
    return _values(split, *call, device), _values(split, *_piece(*call, part, rows), device), rows, part


def _require_draws_without_rows(split: Split, call: Call) -> None:
    """Refuse random numbers for rows that code between the modules draws: stages with other numbers of replicas would
    draw others for the same rows."""
    rows = rows_of(call)
    whole, some = (trace(split.layout, *one) for one in (call, _piece(*call, rows // 2, rows)))
    drawn = [[(e, t.values[v].shape) for e in t.events if e.seed is not None for v in e.makes] for t in (whole, some)]
    for (event, shape), (_, other) in zip(*drawn, strict=False):
        if shape != other:
            raise SplitError(
                "random numbers for rows that a module of the model draws, where stages have unequal numbers of "
                "replicas",
                f"{event.name!r} at {event.line}, outside of all modules",
                "draw them inside a module, or give all stages the same number of replicas",
            )


def _piece(
    args: tuple[Any, ...], kwargs: dict[str, Any], last: int, rows: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = piece((args, kwargs), 0, last, rows)
    return args, kwargs


def _enough_rows(call: Call) -> Call:
    """Repeat an example of few rows."""
    rows = rows_of(call)
    times = -(-ROWS // rows)
    if times == 1:
        return call

    def repeated(leaf: Any) -> Any:
        has_rows = isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        return torch.cat([leaf] * times) if has_rows else leaf

    args, kwargs = tree.replace_leaves(call, repeated)
    return args, kwargs


def _varied(call: Call, bold: bool = False) -> Call:
    """Make rows unlike each other, in numbers that a model takes where it takes the example's: else what is a mean over
    rows would be that over half of them. Rows of an example are often zeros, or the same ones twice. `bold`: of
    nothing but zeros all rows but the first become ones, which few models do not take."""
    draw = torch.Generator().manual_seed(0)

    def varied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.dtype == torch.bool or not leaf.numel():
            return leaf
        if leaf.is_floating_point() or leaf.is_complex():
            factors = torch.rand(leaf.shape, generator=draw, device="cpu").to(leaf.device) / 2 + 0.5
            return (leaf * factors if bool(leaf.any()) else leaf + factors).to(leaf.dtype)
        if bold and not bool(leaf.any()):
            ones = leaf.clone()
            ones[1:] = 1
            return ones
        if leaf.dim() == 1:
            return leaf
        places = torch.arange(leaf.shape[-1], device=leaf.device)
        rows = [row[..., (places - at).clamp(min=0)] for at, row in enumerate(leaf)]  # moved on by some places
        return torch.stack(rows)

    args, kwargs = tree.replace_leaves(call, varied)
    return args, kwargs


Found = tuple[dict[int, tuple[torch.Tensor, str]], dict[int, tuple[tuple[int, ...], str]], str]


def _values(split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Found:
    """Run all stages; return what crosses between them, the shapes that code reads, and plain results as text."""
    norms, buffers = DeferredNorms(split.model), Buffers(split.model)
    path = split.path(args, kwargs)
    names = path.row_names.values
    job = Job(0, -1, args, kwargs, rows_of((args, kwargs)), path, lambda result: None, passage=Passage())
    values: dict[int, torch.Tensor] = {}
    for at in range(split.pieces):
        stage = Stage(split, at, Settings(device), norms, buffers, [])
        outputs, _ = stage.forward(job, {value: values[value] for value in path.incoming[at]})
        values |= {value: tensor.detach().clone() for value, tensor in outputs.items()}
    traced = path.trace.values
    shapes = {
        names[value]: (tuple(shape), path.describe(value))
        for value, (shape, _) in job.passage.shapes.items()
        if not traced[value].free
    }
    plain = repr([tree.leaves(result) for _, result in sorted(job.passage.plain.items())])
    return {names[value]: (tensor, path.describe(value)) for value, tensor in values.items()}, shapes, plain


def _dimension(
    whole: torch.Tensor, some: torch.Tensor, rows: int, part: int, described: str, values: bool = True
) -> RowDimension:
    """Return where the rows of a value lie; by its shape, and by its `values` too."""
    if whole.shape == some.shape:
        if values and not _close(whole, some):
            raise _refusal(described, "that depends on all rows together")
        return RowDimension(None)
    dimension = _dimension_of_shape(tuple(whole.shape), tuple(some.shape), rows, part)
    if dimension is None or (values and not _close(dimension.part(whole, 0, part), some)):
        raise _refusal(described, f"of shape {tuple(whole.shape)} for {rows} rows, not one row after the other")
    return dimension


def _dimension_of_shape(whole: tuple[int, ...], some: tuple[int, ...], rows: int, part: int) -> RowDimension | None:
    if len(whole) != len(some):
        return None
    differing = [at for at, (a, b) in enumerate(zip(whole, some, strict=True)) if a != b]
    if len(differing) != 1:
        return None
    (at,) = differing
    if whole[at] % rows or whole[at] * part != some[at] * rows:
        return None
    return RowDimension(at, whole[at] // rows)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if not a.numel():
        return True
    largest = float(a.abs().nan_to_num(posinf=0.0).max())
    return torch.allclose(a, b, rtol=CLOSE, atol=CLOSE * largest, equal_nan=True)


def _refusal(described: str, came: str) -> SplitError:
    return SplitError(
        "values between stages with unequal numbers of replicas that can be divided by rows",
        f"{described}, {came}",
        "give both stages the same number of replicas, or cut elsewhere",
    )
