"""Register schedules of the user's own by name, for `penstock.schedule`, a Pipeline, the simulator and the planner's
search."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.core.arguments import named
from penstock.core.loop import Loop
from penstock.core.schedule import Schedule
from penstock.core.validation import text, truth, whole
from penstock.errors import InputError
from penstock.planners.search.space import SearchMethod, register_method
from penstock.schedules.registry import ScheduleMethod, register
from penstock.schedules.request import ScheduleRequest

Builder = Callable[[ScheduleRequest], Schedule | Loop]
IN_FLIGHT = ("depth", "all")


@named
def register_schedule(
    name: str,
    *,
    summary: str = "",
    chunks: int = 1,
    asynchronous: bool = False,
    in_flight: str = "depth",
    options: Mapping[str, str] | None = None,
) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a function from a ScheduleRequest to a Schedule under a name.

    The name then works wherever a schedule's name does. `chunks` is the number of stages on each rank. `asynchronous`:
    the function returns a Loop. `options` are those that the schedule takes, with a text each; the function finds their
    values in `request.options`. `in_flight` says how many micro-batches a stage keeps, for `penstock.plan`: "depth" (as
    many as there are stages behind it, as 1F1B does) or "all" of the mini-batch. A plan's search uses synchronous
    schedules of one chunk.
    """
    text("the name of a schedule", name, "give a name of your own")
    text("summary", summary, "describe the schedule in a few words")
    whole("chunks", chunks)
    truth("asynchronous", asynchronous)
    if in_flight not in IN_FLIGHT:
        raise InputError("in_flight to be 'depth' or 'all'", repr(in_flight), "choose one")

    def decorate(build: Builder) -> Builder:
        if not callable(build):
            raise InputError("a function from a ScheduleRequest to a Schedule", type(build).__name__, "decorate one")
        bounds = (chunks, chunks)
        register(
            ScheduleMethod(name, build, summary, chunks=bounds, asynchronous=asynchronous, options=dict(options or {}))
        )
        if not asynchronous and chunks == 1:
            register_method(SearchMethod(name, name, whole=in_flight == "all"))
        return build

    return decorate
