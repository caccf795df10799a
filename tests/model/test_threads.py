"""A walk belongs to the thread that runs it: what other threads do meanwhile is theirs."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from compare import assert_same, pipeline, plain, stepped
from torch import nn
from zoo import WIDTH, Of, blocks, floats

pytestmark = pytest.mark.usefixtures("one_thread")


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def through(m, x):
    for block in m.blocks:
        meet = m.between() if m.between else None  # in open code, as another thread would at any time
        x = block(x)
        assert meet is None
    return x


def stack(between=None):
    return Of(through, blocks=blocks(4), between=between).double()


def in_a_thread(work):
    failed = []

    def run():
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.cpu_only  # a default device is its thread's own
def test_another_thread_calls_modules_while_a_model_is_traced_and_run():
    other, calls = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), []

    def work():
        calls.append(other(torch.zeros(1, 2)))
        Identity.apply(torch.ones(2, requires_grad=True)).sum().backward()
        other.calls = len(calls)

    model = stack(lambda: in_a_thread(work))
    pipe = pipeline(model, floats(4, 6, WIDTH), cuts=["blocks.1", "blocks.2"])
    batch = floats(5, 6, WIDTH)
    assert_same(stepped(pipe, batch), plain(model, batch))
    assert len(calls) > 10


def test_attributes_that_another_thread_sets_are_not_refused():
    model = stack()
    model.between = lambda: in_a_thread(lambda: setattr(model.blocks[0], "note", object()))
    pipe = pipeline(model, floats(4, 6, WIDTH), cuts=["blocks.1"])
    pipe.step(floats(5, 6, WIDTH))


@pytest.mark.cpu_only
def test_two_traces_at_once_leave_nothing_behind():
    """The one that began first is over first."""
    draw, inside, over = random.random, threading.Event(), threading.Event()

    def first():
        if not inside.is_set():
            inside.set()
            time.sleep(0.3)

    def second():
        over.wait(2)

    def begins_later():
        inside.wait(10)
        pipeline(stack(second), floats(4, 6, WIDTH), cuts=["blocks.1"])

    later = threading.Thread(target=begins_later)
    later.start()
    pipeline(stack(first), floats(4, 6, WIDTH), cuts=["blocks.1"])
    over.set()
    later.join()
    assert random.random is draw
    assert nn.Module.__setattr__.__module__ == "torch.nn.modules.module"


@pytest.mark.cpu_only
def test_two_pipelines_in_two_threads():
    models = [stack() for _ in range(2)]
    batches = [floats(5, 6, WIDTH) for _ in models]
    wanted = [plain(model, batch) for model, batch in zip(models, batches, strict=True)]
    pipes = [pipeline(model, floats(4, 6, WIDTH), cuts=["blocks.1", "blocks.2"]) for model in models]
    found, failed = [None, None], []

    def train(at):
        try:
            for _ in range(4):
                loss, gradients = stepped(pipes[at], batches[at])
                found[at] = loss, {name: gradient.clone() for name, gradient in gradients.items()}
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same(ours, theirs)
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"
