"""A second process for tests of shared lanes: it does what it is told over a pipe, and is gone when the test is."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.comm.transport.interface import LaneName, Message, MessageKey
from penstock.comm.transport.shared.receiver import SharedReceiver
from penstock.comm.transport.shared.sender import SharedSender

BOUND = 60  # seconds for any one answer


class Patience:
    """Waits that long and no longer; remembers what it was asked."""

    def __init__(self, limit=20.0):
        self.limit, self.asked = limit, []

    def check(self, peer, waited):
        self.asked.append((peer, waited))
        if waited > self.limit:
            raise TimeoutError(f"waited for rank {peer}")

    def lost(self, peer, error):
        return error


class Other:
    """Calls of its methods run there. Lanes are called by a number: `out` leads from here to there, `back` back."""

    def __init__(self, folder):
        self.path = str(Path(folder) / "store")
        self.store = dist.FileStore(self.path, 2)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(self.path, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def sender(self, lane, limit=20.0):
        return SharedSender(LaneName(lane, lane + 1), self.store, Patience(limit), 1)

    def receiver(self, lane, limit=20.0):
        return SharedReceiver(LaneName(lane + 1, lane), self.store, Patience(limit), 1)

    def tell(self, what, *arguments):
        self.pipe.send((what, arguments))

    def answer(self):
        assert self.pipe.poll(BOUND), "no answer"
        said, result = self.pipe.recv()
        assert said == "done", result
        return result

    def ask(self, what, *arguments):
        self.tell(what, *arguments)
        return self.answer()

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(BOUND)

    def end(self):
        self.process.kill()
        self.process.join(BOUND)
        self.pipe.close()


def made(seed, shape=(4, 8), dtype=torch.float32):
    """The same tensor on both sides."""
    drawn = torch.randint(0, 1 << 30, tuple(shape), generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype)


class There:
    """What the other process can do. It sends with `back` lanes and receives with `out` lanes."""

    def __init__(self, store):
        self.store, self.senders, self.receivers, self.kept = store, {}, {}, []

    def sender(self, lane):
        if lane not in self.senders:
            self.senders[lane] = SharedSender(LaneName(lane + 1, lane), self.store, Patience(), 0)
        return self.senders[lane]

    def receiver(self, lane):
        if lane not in self.receivers:
            self.receivers[lane] = SharedReceiver(LaneName(lane, lane + 1), self.store, Patience(), 0)
        return self.receivers[lane]

    def send(self, lane, messages):
        """(run, micro-batch, seed, shape, type) each."""
        for run, microbatch, seed, shape, name in messages:
            tensor = made(seed, shape, getattr(torch, name))
            self.sender(lane).send(MessageKey(run, microbatch), Message({seed: tensor}, str(seed).encode(), seed))
        return self.sender(lane).bytes

    def write_to_slots(self, lane, number):
        """Over all that was sent, as it lies in this process's own memory."""
        for slot in self.sender(lane)._slots._every.values():
            torch.frombuffer(slot.piece, dtype=torch.float32).fill_(number)

    def read_slots(self, lane, count):
        """What the first numbers of each slot are."""
        slots = self.sender(lane)._slots._every.values()
        return [{*torch.frombuffer(slot.piece, dtype=torch.float32)[:count].tolist()} for slot in slots]

    def echo(self, lane, count):
        for at in range(count):
            self.sender(lane).send(MessageKey(1, at), self.receiver(lane).receive(MessageKey(1, at)))
        return self.sender(lane).bytes

    def stream(self, lane, size):
        """Until killed, or told nothing any more."""
        tensor = torch.ones(size)
        with contextlib.suppress(TimeoutError):
            for at in range(1 << 60):
                self.sender(lane).send(MessageKey(0, at), Message({0: tensor}))

    def close(self, lane):
        self.sender(lane).close()

    def keep(self, lane, count):
        self.kept += [self.receiver(lane).receive(MessageKey(0, at)) for at in range(count)]

    def fork_and_drop(self, lane):
        """A child that frees all it has copied from us, and tries to take part; then what we hold, and its answer."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                self.kept.clear()
                gc.collect()
                self.receiver(lane).receive(MessageKey(9, 9))
            except Exception as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        same = all(torch.equal(kept.values[0], made(at)) for at, kept in enumerate(self.kept))
        return status, self.receiver(lane).bytes_held, same

    def send_without_memory(self, lane):
        """More than may be: the error; then a word instead of it, and what fits."""
        sender = self.sender(lane)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
        try:
            sender.send(MessageKey(0, 0), Message({0: torch.ones(4 << 20)}))
            found = None
        except OSError as error:
            found = error.errno
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        sender.send_elsewhere(MessageKey(0, 0))
        sender.send(MessageKey(0, 1), Message({0: made(1)}))
        return found


def serve(path, pipe):
    torch.set_num_threads(1)
    there = There(dist.FileStore(path, 2))
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            what, arguments = pipe.recv()
            try:
                pipe.send(("done", getattr(there, what)(*arguments)))
            except Exception as error:
                pipe.send(("failed", repr(error)))
