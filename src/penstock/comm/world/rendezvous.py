"""The rendezvous of the ranks: find the store by the environment, announce this rank, and wait for the others."""

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
LINGER = 0.5  # seconds that a rank stays after it refused to start: it may hold the store that the others read
LOOK = 0.5  # seconds between two checks that announced ranks are still running
START = "PENSTOCK_START_TIMEOUT"  # environment variable: seconds within which all ranks have to announce themselves
USUAL_START = 60.0
AGENT = 5.0  # seconds within which a launcher's port has to accept a connection: it is open before the workers start


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process's rank and where the store is. `agent`: the launcher holds the store, else rank 0 does."""

    rank: int
    size: int
    address: str
    port: int
    agent: bool
    attempt: str


@dataclass(frozen=True)
class Announcement:
    """Facts that a rank publishes at the start."""

    size: int
    host: str
    pid: int
    status_page: str


def rank_and_size(env: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the rank and world size that torchrun, or another launcher, has set; None for a single process."""
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


def launch_environment(env: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return rank, size and the address of the store; None for a single process."""
    numbers = rank_and_size(env)
    if numbers is None:
        return None
    rank, size = numbers
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise InputError(
            "MASTER_ADDR and MASTER_PORT in the environment, the address where the ranks meet",
            f"none for {' and '.join(missing)}",
            "start the script with torchrun, or set them alike for every rank",
        )
    port = _whole(env, "MASTER_PORT")
    if not 0 < port < 1 << 16:
        raise InputError("MASTER_PORT from 1 to 65535", port, "choose another")
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return LaunchEnvironment(rank, size, env["MASTER_ADDR"], port, agent, env.get("TORCHELASTIC_RESTART_COUNT", "0"))


def start_timeout(env: Mapping[str, str]) -> float:
    """Return the seconds within which all ranks have to announce themselves."""
    text = env.get(START) or str(USUAL_START)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InputError(f"a number of seconds above 0 in {START}", repr(text), "correct it, or leave it out")
    return seconds


def connect_store(here: LaunchEnvironment, until: float) -> Store:
    """Connect to the store, which rank 0 or the launcher holds, under a prefix for each restart."""
    try:
        store = _host(here, until) if here.rank == 0 and not here.agent else _reach(here, until)
    except DistError as error:
        raise _no_store(here, str(error).split("\n")[0]) from None
    return PrefixStore(f"penstock/{here.attempt}", store)


def announce_and_wait(
    store: Store, rank: int, me: Announcement, until: float, gone: Callable[[], int | None] = lambda: None
) -> list[Announcement]:
    """Announce this rank, wait for all others, and return all announcements.

    Raises an error that names the missing ranks after the time-out. `gone` returns a rank that the launcher knows has
    ended, or None; it is reported at once.
    """
    try:
        return _announce_and_wait(store, rank, me, until, gone)
    except DistError as error:
        why = str(error).split("\n")[0]
        raise RankError(
            f"the ranks could not connect: rank 0 or the launcher, which holds the store, has ended: {why}"
        ) from None


def _announce_and_wait(
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
            raise RankError(f"rank {lost} ended before all ranks had started; look at its output", lost)
        if store.check(["refused"]):
            raise _size_mismatch(store.get("refused").decode())
        if monotonic() > until or store.check(["late"]):
            raise _too_late(store, keys, monotonic() - began)
        sleep(0.02)
    return [Announcement(**json.loads(text)) for text in store.multi_get(keys)]


def _lost(store: Store, keys: list[str], me: Announcement) -> int | None:
    """Return a rank of this host that has announced itself and ended since; None if there is none."""
    for rank, key in enumerate(keys):
        if store.check([key]):
            other = Announcement(**json.loads(store.get(key)))
            if other.host == me.host and not is_running(other.pid):
                return rank
    return None


def _too_late(store: Store, keys: list[str], waited: float) -> RankError:
    """Return the error for missing ranks, and tell the other ranks through the store that the time is over."""
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    store.set("late", "")
    sleep(LINGER)
    return RankError(_missing(missing, len(keys), waited), missing[0] if missing else None)


def _agree_on_size(store: Store, rank: int, size: int) -> None:
    """Raise on every rank if this one's size differs from that of the first rank that came."""
    first = store.compare_set("size", "", f"{size} on rank {rank}").decode()
    if int(first.split()[0]) != size:
        store.set("refused", f"{first} and {size} on rank {rank}")
        sleep(LINGER)
        raise _size_mismatch(f"{first} and {size} on rank {rank}")


def _size_mismatch(came: str) -> InputError:
    return InputError("the same WORLD_SIZE on every rank", came, "start all ranks of one run alike")


def run_interruptible(call: Callable[[], T], check: Callable[[float], None]) -> T:
    """Run a call that may block in native code in a thread, while this thread reacts to Ctrl-C and calls `check`
    regularly."""
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
    """End the process at once if the thread is still in native code: a normal exit of Python would abort."""
    if thread.is_alive():
        logging.shutdown()
        flush()
        os._exit(1)


def _host(here: LaunchEnvironment, until: float) -> Store:
    listener = _listen(here)
    return TCPStore(
        here.address,
        here.port,
        is_master=True,
        wait_for_workers=False,
        timeout=_left(until),
        master_listen_fd=listener.detach(),
    )


def _listen(here: LaunchEnvironment) -> socket.socket:
    """Listen on the address that the user named; torch would listen on all interfaces."""
    try:
        addresses = socket.getaddrinfo(here.address, here.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            "MASTER_ADDR to be an address of rank 0's host", f"{here.address} ({error})", "correct it"
        ) from None
    family, _, _, _, socket_address = addresses[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(socket_address)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:  # the address is translated (NAT)
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


def _reach(here: LaunchEnvironment, until: float) -> Store:
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
            raise _no_store(here, "the port answers, but not as the store of a run")

    return run_interruptible(
        lambda: TCPStore(here.address, here.port, is_master=False, wait_for_workers=False, timeout=_left(until)),
        check,
    )


def _no_store(here: LaunchEnvironment, why: str) -> RankError:
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
