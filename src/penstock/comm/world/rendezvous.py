"""How the ranks of a run find each other: the environment says where the store is, each announces itself there."""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from penstock.comm.watch.process import is_running
from penstock.comm.watch.stderr import flush
from penstock.errors import InputError, RankError

T = TypeVar("T")
LINGER = 0.5  # seconds that a rank stays after it refused to start: it may hold the store that tells the others
LOOK = 0.5  # seconds between two looks at whether those that have come are still there
START = "PENSTOCK_START_TIMEOUT"  # in the environment: seconds in which all ranks have to come
USUAL_START = 60.0
AGENT = 5.0  # seconds in which a launcher's port has to take a connection: it was there before its workers


@dataclass(frozen=True)
class Place:
    """This process among the ranks. `agent`: the launcher holds the store, not rank 0."""

    rank: int
    size: int
    address: str
    port: int
    agent: bool
    attempt: str


@dataclass(frozen=True)
class Announcement:
    """What a rank says of itself at the start."""

    size: int
    host: str
    pid: int
    board: str


def number(env: Mapping[str, str]) -> tuple[int, int] | None:
    """This process among how many, as torchrun, or another launcher, sets it; None where it is alone."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, size = _whole(env, "RANK"), _whole(env, "WORLD_SIZE")
    if size < 1:
        raise InputError("at least 1 process in WORLD_SIZE", size, "correct the environment of this rank")
    if size == 1:
        return None
    if not 0 <= rank < size:
        raise InputError(
            f"RANK from 0 to {size - 1}, as WORLD_SIZE is {size}", rank, "start each rank with its own number"
        )
    return rank, size


def place(env: Mapping[str, str]) -> Place | None:
    """The same, and where the ranks meet."""
    found = number(env)
    if found is None:
        return None
    rank, size = found
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise InputError(
            "MASTER_ADDR and MASTER_PORT in the environment, the place where the ranks meet",
            f"none for {' and '.join(missing)}",
            "start the script with torchrun, or set them alike for every rank",
        )
    port = _whole(env, "MASTER_PORT")
    if not 0 < port < 1 << 16:
        raise InputError("MASTER_PORT from 1 to 65535", port, "choose another")
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(rank, size, env["MASTER_ADDR"], port, agent, env.get("TORCHELASTIC_RESTART_COUNT", "0"))


def start_timeout(env: Mapping[str, str]) -> float:
    """Seconds in which all ranks have to come."""
    text = env.get(START) or str(USUAL_START)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InputError(f"a number of seconds above 0 in {START}", repr(text), "correct it, or leave it out")
    return seconds


def connect(here: Place, until: float) -> Store:
    """The store, held by rank 0 or by the launcher, under a prefix of its own for every restart."""
    try:
        store = _host(here, until) if here.rank == 0 and not here.agent else _reach(here, until)
    except DistError as error:
        raise _no_store(here, str(error).split("\n")[0]) from None
    return PrefixStore(f"penstock/{here.attempt}", store)


def meet(
    store: Store, rank: int, me: Announcement, until: float, gone: Callable[[], int | None] = lambda: None
) -> list[Announcement]:
    """Announce this rank, and wait for all the others. Names the missing ones when the time is over, and at once one
    that cannot come any more: `gone` is its number, where the launcher knows."""
    try:
        return _meet(store, rank, me, until, gone)
    except DistError as error:
        why = str(error).split("\n")[0]
        raise RankError(
            f"the ranks could not meet: rank 0 or the launcher, which holds the store, is gone: {why}"
        ) from None


def _meet(
    store: Store, rank: int, me: Announcement, until: float, gone: Callable[[], int | None]
) -> list[Announcement]:
    if store.add(f"taken/{rank}", 1) > 1:
        raise InputError("one process for each rank", f"two with RANK={rank}", "give every process its own RANK")
    _agree_on_size(store, rank, me.size)
    store.set(f"here/{rank}", json.dumps(asdict(me)))
    keys = [f"here/{r}" for r in range(me.size)]
    began = looked = monotonic()
    while not store.check(keys):
        lost = gone()
        if lost is None and monotonic() - looked > LOOK:
            lost, looked = _lost(store, keys, me), monotonic()
        if lost is not None:
            raise RankError(f"rank {lost} ended before all ranks had met; look at what it says", lost)
        if store.check(["refused"]):
            raise _unlike(store.get("refused").decode())
        if monotonic() > until or store.check(["late"]):
            raise _too_late(store, keys, monotonic() - began)
        sleep(0.02)
    return [Announcement(**json.loads(text)) for text in store.multi_get(keys)]


def _lost(store: Store, keys: list[str], me: Announcement) -> int | None:
    """A rank of this host that has come, and ended while others were still waited for."""
    for rank, key in enumerate(keys):
        if store.check([key]):
            other = Announcement(**json.loads(store.get(key)))
            if other.host == me.host and not is_running(other.pid):
                return rank
    return None


def _too_late(store: Store, keys: list[str], waited: float) -> RankError:
    """The time is over for one, and so for all: the others need not wait for it."""
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    store.set("late", "")
    sleep(LINGER)
    return RankError(_missing(missing, len(keys), waited), missing[0] if missing else None)


def _agree_on_size(store: Store, rank: int, size: int) -> None:
    """With the first that came; all get to know if one does not."""
    first = store.compare_set("size", "", f"{size} on rank {rank}").decode()
    if int(first.split()[0]) != size:
        store.set("refused", f"{first} and {size} on rank {rank}")
        sleep(LINGER)
        raise _unlike(f"{first} and {size} on rank {rank}")


def _unlike(came: str) -> InputError:
    return InputError("the same WORLD_SIZE on every rank", came, "start all ranks of one run alike")


def patiently(call: Callable[[], T], check: Callable[[float], None]) -> T:
    """Run a call that may block in native code, while this thread is open to Ctrl-C and asks `check` now and then."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread, began = threading.Thread(target=run, daemon=True), monotonic()
    thread.start()
    try:
        thread.join(0.1)
        while thread.is_alive():
            check(monotonic() - began)
            thread.join(0.1)
    except BaseException:
        atexit.register(_leave, thread)
        raise
    if errors:
        raise errors[0]
    return results[0]


def _leave(thread: threading.Thread) -> None:
    """A thread that is still in native code when Python ends would make the end an abort."""
    if thread.is_alive():
        logging.shutdown()
        flush()
        os._exit(1)


def _host(here: Place, until: float) -> Store:
    listener = _listen(here)
    return TCPStore(
        here.address,
        here.port,
        is_master=True,
        wait_for_workers=False,
        timeout=_left(until),
        master_listen_fd=listener.detach(),
    )


def _listen(here: Place) -> socket.socket:
    """On the address that the user named: torch's own way would listen on all."""
    try:
        found = socket.getaddrinfo(here.address, here.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            "MASTER_ADDR to be an address of rank 0's host", f"{here.address} ({error})", "correct it"
        ) from None
    family, _, _, _, where = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:  # behind a translated address
            listener.bind(("", here.port))
        else:
            listener.close()
            raise InputError(
                f"port {here.port} of {here.address} (MASTER_PORT) to be free on the host of rank 0",
                "a port that cannot be taken: " + os.strerror(error.errno or 0),
                "end the program that holds it, or set MASTER_PORT to another port on every rank",
            ) from None
    listener.listen(1024)
    return listener


def _reach(here: Place, until: float) -> Store:
    open_until = min(until, monotonic() + AGENT) if here.agent else until
    while True:
        try:
            socket.create_connection((here.address, here.port), timeout=1.0).close()
            break
        except OSError as error:
            if monotonic() > open_until:
                raise _no_store(here, str(error)) from None
            sleep(0.05)

    def check(waited: float) -> None:
        if monotonic() > until + 1.0:
            raise _no_store(here, "something answers there that is not the store of a run")

    return patiently(
        lambda: TCPStore(here.address, here.port, is_master=False, wait_for_workers=False, timeout=_left(until)),
        check,
    )


def _no_store(here: Place, why: str) -> RankError:
    holder = "the launcher" if here.agent else "rank 0"
    where = f"{here.address}:{here.port} (MASTER_ADDR:MASTER_PORT)"
    return RankError(
        f"expected {holder} to hold the store of the run at {where}, but rank {here.rank} cannot reach it: {why}; "
        f"look at what {holder} says, and whether the address and the port are right",
        None if here.agent else 0,
    )


def _missing(missing: list[int], size: int, waited: float) -> str:
    if not missing:
        return (
            f"expected {size} ranks (WORLD_SIZE) at the start, but the last came only after {waited:.0f} s; start again"
        )
    who = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} are"
    return (
        f"expected {size} ranks (WORLD_SIZE) at the start, but {who} missing after {waited:.0f} s; "
        f"look at what they say, or start them; {START} in the environment is how many seconds to wait"
    )


def _left(until: float) -> timedelta:
    return timedelta(seconds=max(until - monotonic(), 1.0))


def _whole(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise InputError(f"a whole number in {name}", repr(env[name]), "correct the environment of this rank") from None
