"""Shared lanes between real processes: values, order, memory, and what is left when one of them is gone."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from other_process import Other, Patience, made

from penstock import PenstockError
from penstock.comm.transport.interface import ClosedLane, LaneName, Message, MessageKey
from penstock.comm.transport.shared import mapping
from penstock.comm.transport.shared.end import SentElsewhere
from penstock.comm.transport.shared.receiver import SharedReceiver
from penstock.comm.transport.shared.ring import ENTRIES
from penstock.comm.transport.shared.sender import LAYOUTS, SharedSender
from penstock.errors import FormatError

numbers = itertools.count(0, 2)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    started = Other(tmp_path_factory.mktemp("shared"))
    yield started
    started.end()


@pytest.fixture
def lane():
    """The number of a lane that no other test has used."""
    return next(numbers)


@pytest.fixture
def ends():
    """Both ends in this process, for what does not need two."""
    store, name = dist.HashStore(), LaneName(0, 1)
    pair = SharedSender(name, store, Patience(0.5), 1), SharedReceiver(name, store, Patience(0.5), 0)
    yield pair
    for end in pair:
        end.close()


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:penstock")


def test_values_words_stamps_of_many_shapes(other, lane):
    shapes = [(), (0,), (1,), (7,), (3, 0, 2), (1, 5, 1), (4, 8), (2, 3, 4, 5), (1,) * 30, (300, 300)]
    types = ["bool", "uint8", "int64", "bfloat16", "float16", "float32", "float64", "complex64", "int16"]
    asked = [(0, at, at, random.Random(at).choice(shapes), types[at % len(types)]) for at in range(100)]
    other.tell("send", lane, asked)
    receiver = other.receiver(lane)
    for run, microbatch, seed, shape, name in asked:
        message = receiver.receive(MessageKey(run, microbatch))
        (number,), (tensor,) = message.values, message.values.values()
        assert (number, message.metadata, message.stamp) == (seed, str(seed).encode(), seed)
        assert tensor.dtype == getattr(torch, name)
        assert tensor.shape == shape
        assert torch.equal(tensor, made(seed, shape, tensor.dtype))
        del message, tensor
    other.answer()
    assert receiver.bytes_held == 0
    receiver.close()


def test_asked_for_in_another_order(other, lane):
    order = [(run, at) for run in range(2) for at in range(20)]
    other.ask("send", lane, [(run, at, 100 * run + at, (5,), "float32") for run, at in order])
    random.Random(0).shuffle(order)
    receiver = other.receiver(lane)
    for run, at in order:
        found = receiver.receive(MessageKey(run, at)).values[100 * run + at]
        assert torch.equal(found, made(100 * run + at, (5,)))
    receiver.close()


def test_a_thousand_messages_of_changing_shapes_reuse_few_slots(other, lane):
    sender, receiver = other.sender(lane), other.receiver(lane)
    other.tell("echo", lane, 1000)
    for at in range(1000):
        tensor = made(at, (random.Random(at).randint(1, 40), 32))
        sender.send(MessageKey(1, at), Message({3: tensor}))
        assert torch.equal(receiver.receive(MessageKey(1, at)).values[3], tensor)
    assert other.answer() <= 10 * 40 * 32 * 4  # bytes
    assert sender.bytes <= 10 * 40 * 32 * 4
    assert receiver.most_bytes_held <= 40 * 32 * 4
    sender.close()
    receiver.close()


def test_tensors_kept_for_ever_keep_their_values(other, lane):
    sender, receiver = other.sender(lane), other.receiver(lane)
    other.tell("echo", lane, 200)
    kept = {}
    for at in range(200):
        sender.send(MessageKey(1, at), Message({0: made(at, (1000,))}))
        tensor = receiver.receive(MessageKey(1, at)).values[0]
        if at % 20 == 0:
            kept[at] = tensor[1:].view(27, 37)  # some view of it is enough
    del tensor
    assert other.answer() <= 13 * 4096  # ten kept, two in use, one more at most
    assert receiver.bytes_held == 10 * 4032
    for end in (sender, receiver):
        end.close()
    for at, tensor in kept.items():
        assert torch.equal(tensor.flatten(), made(at, (1000,))[1:])
    assert mappings() == 10
    kept.clear()
    del tensor
    assert mappings() == 0


def test_bytes_held_are_those_in_use_and_the_most_there_ever_were(other, lane):
    other.ask("send", lane, [(0, at, at, (256,), "float32") for at in range(6)])
    receiver = other.receiver(lane)
    held = [receiver.receive(MessageKey(0, at)) for at in range(3)]
    assert receiver.bytes_held == 3 * 1024
    del held[0]
    assert receiver.bytes_held == 2 * 1024
    held.append(receiver.receive(MessageKey(0, 5)))  # the two before it have been taken, too
    assert receiver.bytes_held == receiver.most_bytes_held == 5 * 1024
    held.clear()
    assert receiver.bytes_held == 2 * 1024
    assert receiver.most_bytes_held == 5 * 1024
    receiver.close()
    assert receiver.bytes_held == 0


def test_the_one_copy_is_the_senders(other, lane):
    """A received tensor lies in the sender's slot: what the sender's mapping shows later, it shows, and back."""
    other.ask("send", lane, [(0, at, at, (300, 300), "float32") for at in range(2)])
    receiver = other.receiver(lane)
    first, second = (receiver.receive(MessageKey(0, at)).values[at] for at in range(2))
    assert torch.equal(second, made(1, (300, 300)))
    other.ask("write_to_slots", lane, 7.0)
    assert first.eq(7).all()
    assert second.eq(7).all()
    second.mul_(3)
    assert other.ask("read_slots", lane, 300 * 300) == [{7.0}, {21.0}]
    receiver.close()


def test_the_receiver_may_write_to_what_it_got(other, lane):
    other.ask("send", lane, [(0, at, at, (64,), "float32") for at in range(2)])
    receiver = other.receiver(lane)
    first, second = (receiver.receive(MessageKey(0, at)).values[at] for at in range(2))
    first.mul_(0)
    leaf = second.requires_grad_()
    (leaf * 2).sum().backward()
    assert torch.equal(first, torch.zeros(64))
    assert torch.equal(second.detach(), made(1, (64,)))
    assert torch.equal(leaf.grad, torch.full((64,), 2.0))
    receiver.close()


def test_a_killed_sender_is_asked_about_and_leaves_nothing(tmp_path):
    before = set(Path("/dev/shm").iterdir()), len(list(Path("/proc/self/fd").iterdir()))
    for turn in range(3):
        folder = tmp_path / str(turn)
        folder.mkdir()
        doomed = Other(folder)
        receiver = doomed.receiver(0)
        doomed.tell("stream", 0, 1000 * (turn + 1))
        for at in range(50 * turn + 1):
            last = receiver.receive(MessageKey(0, at)).values[0]
        doomed.kill()
        receiver._waiting.limit = 0.5
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="rank 1"):
            receiver.receive(MessageKey(0, -1))  # never sent: all that had been are taken first
        assert time.monotonic() - begin < 5
        asked = [waited for _, waited in receiver._waiting.asked]
        assert max(b - a for a, b in itertools.pairwise([0.0, *asked[-3:]])) < 0.45
        assert last.eq(1).all()  # of a process that is gone
        receiver.close()
        doomed.end()
        del last, doomed
    assert mappings() == 0
    assert set(Path("/dev/shm").iterdir()) == before[0]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before[1] + 1


def test_a_sender_that_never_comes_is_asked_about(tmp_path):
    receiver = SharedReceiver(LaneName(0, 1), dist.FileStore(str(tmp_path / "store"), 1), Patience(0.3), 4)
    with pytest.raises(TimeoutError, match="rank 4"):
        receiver.receive(MessageKey(0, 0))
    receiver.close()


def test_memory_of_somebody_else_is_not_taken_for_the_lane():
    store, name = dist.HashStore(), LaneName(0, 1)
    other = mapping.create("other")
    mapping.allocate(other, 0, 1 << 20)
    sender = SharedSender(name, store, Patience(), 1)
    process, _, mark = store.get("lane 0 1 0 0").decode().split()
    files = len(list(Path("/proc/self/fd").iterdir()))
    for file in (other, 1 << 20):
        store.set("lane 0 1 0 0", f"{process} {file} {mark}")
        with pytest.raises(OSError, match=r"lane|No such file"):
            SharedReceiver(name, store, Patience(), 0).connect()
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    os.close(other)
    sender.close()


def test_a_closed_lane_gives_what_was_sent_and_then_says_so(other, lane):
    receiver = other.receiver(lane)
    other.ask("send", lane, [(0, at, at, (5,), "float32") for at in range(3)])
    receiver.connect()
    other.ask("close", lane)
    for at in (2, 0, 1):
        assert torch.equal(receiver.receive(MessageKey(0, at)).values[at], made(at, (5,)))
    for _ in range(2):
        with pytest.raises(ClosedLane, match="closed"):
            receiver.receive(MessageKey(0, 3))
    receiver.close()


def test_without_memory_send_fails_and_the_message_goes_elsewhere(other, lane):
    receiver = other.receiver(lane)
    assert other.ask("send_without_memory", lane) == errno.EFBIG
    with pytest.raises(SentElsewhere):
        receiver.receive(MessageKey(0, 0))
    assert torch.equal(receiver.receive(MessageKey(0, 1)).values[0], made(1))
    receiver.close()


def test_more_memory_than_there_is_is_an_error():
    file = mapping.create("test")
    for size in (1 << 45, 1 << 60):
        with pytest.raises(OSError, match="shared memory"):
            mapping.allocate(file, 0, size)
    os.close(file)


def test_a_forked_child_frees_nothing_and_may_not_take_part(other, lane):
    sender = other.sender(lane)
    for at in range(3):
        sender.send(MessageKey(0, at), Message({0: made(at)}))
    other.ask("keep", lane, 3)
    status, held, same = other.ask("fork_and_drop", lane)
    assert (status, held, same) == (0, 3 * 128, True)
    size = sender.bytes
    sender.send(MessageKey(0, 3), Message({0: made(3)}))
    assert sender.bytes > size  # the three are taken still
    sender.close()


def test_tensors_that_die_in_many_threads_give_every_slot_back(ends):
    sender, receiver = ends
    for run in range(5):
        for at in range(200):
            sender.send(MessageKey(run, at), Message({0: made(at)}))
        heaps = [[receiver.receive(MessageKey(run, at)) for at in range(i, 200, 4)] for i in range(4)]
        threads = [threading.Thread(target=heap.clear) for heap in heaps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert receiver.bytes_held == 0
        assert sender.bytes == 200 * 4096


def test_slots_that_no_message_wants_any_more_are_given_up(ends):
    sender, receiver = ends
    sender.send(MessageKey(0, 0), Message({0: torch.ones(1 << 20)}))
    receiver.receive(MessageKey(0, 0))
    for at in range(1, 400):
        sender.send(MessageKey(0, at), Message({0: torch.ones(5)}))
        receiver.receive(MessageKey(0, at))
    sender.send(MessageKey(0, 400), Message({0: torch.ones(3000)}))
    assert sender.bytes == 4096 + 12288
    assert torch.equal(receiver.receive(MessageKey(0, 400)).values[0], torch.ones(3000))


def test_more_layouts_than_are_remembered(ends):
    sender, receiver = ends
    for at in [*range(LAYOUTS + 50), 0, 3, LAYOUTS + 20]:
        sender.send(MessageKey(0, at), Message({at: torch.full((at % 50 + 1,), float(at))}))
        assert torch.equal(receiver.receive(MessageKey(0, at)).values[at], torch.full((at % 50 + 1,), float(at)))


def test_a_receiver_far_behind_makes_the_sender_ask(ends):
    sender, receiver = ends
    for at in range(ENTRIES):
        sender.send(MessageKey(0, at), Message())
    with pytest.raises(TimeoutError):
        sender.send(MessageKey(0, ENTRIES), Message())
    for at in range(ENTRIES):
        assert receiver.receive(MessageKey(0, at)) == Message()
    sender.send(MessageKey(0, ENTRIES), Message(metadata=b"on"))
    assert receiver.receive(MessageKey(0, ENTRIES)).metadata == b"on"


def test_strides_stay_where_memory_is_dense(ends):
    sender, receiver = ends
    base = torch.arange(1024.0)
    sent = {
        0: base.view(32, 32).t(),
        1: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        2: base.view(32, 32)[1:],
        3: base.as_strided((4, 1, 3), (3, 77, 1)),
        4: base.view(32, 32)[:, ::2],
        5: torch.randn(3, 1).expand(3, 5),
        6: torch.randn(4, dtype=torch.complex64).conj(),
        7: torch.randn(4, dtype=torch.complex64).conj().imag,
        8: torch.randn(4, 4, requires_grad=True) * 2,
    }
    sender.send(MessageKey(0, 0), Message(sent))
    got = receiver.receive(MessageKey(0, 0)).values
    for number, tensor in sent.items():
        kept = number in (0, 1, 2, 3, 8)
        assert got[number].stride() == (tensor.stride() if kept else tensor.contiguous().stride())
        assert torch.equal(got[number], tensor)
        assert not got[number].requires_grad
        assert not got[number].is_conj()
        assert not got[number].is_neg()


def test_large_tensors_sent_with_and_without_inference_mode(ends):
    sender, receiver = ends
    tensor = torch.randn(1 << 16, requires_grad=True)
    for at in range(4):
        with torch.inference_mode(at % 2 == 0):
            sender.send(MessageKey(0, at), Message({0: tensor * 1}))
        assert torch.equal(receiver.receive(MessageKey(0, at)).values[0], tensor.detach())


def test_what_cannot_be_sent_is_refused_and_takes_no_slot(ends):
    sender, receiver = ends
    for tensor in (torch.ones(3, 3).to_sparse(), torch.ones(3, device="meta")):
        with pytest.raises(PenstockError, match="value 7"):
            sender.send(MessageKey(0, 0), Message({7: tensor}))
    assert sender.bytes == 0
    sender.send(MessageKey(0, 0), Message({7: torch.ones(3)}))
    assert torch.equal(receiver.receive(MessageKey(0, 0)).values[7], torch.ones(3))


def test_closed_ends_say_so_and_let_go(ends):
    sender, receiver = ends
    sender.send(MessageKey(0, 0), Message({7: torch.ones(3)}))
    receiver.receive(MessageKey(0, 0))
    for end in ends:
        end.close()
        end.close()
    with pytest.raises(PenstockError, match="closed"):
        sender.send(MessageKey(0, 1), Message())
    with pytest.raises(PenstockError, match="closed"):
        receiver.receive(MessageKey(0, 1))
    assert mappings() == 0


@pytest.mark.parametrize(
    "entry",
    [
        (0, 0, 0, 1 << 40, 4096, 64, 0, 0, 0, 12),  # a slot beyond the end of the memory
        (0, 0, 0, 4095, 4096, 64, 0, 0, 0, 12),  # not at a page
        (0, 0, 0, 0, 0, 64, 0, 0, 0, 12),  # of no size
        (0, 0, 0, 0, 4096, 1 << 30, 0, 0, 0, 12),  # more tensors than slot
        (0, 0, 0, 0, 4096, 64, 0, 5, 0, 0),  # a layout that never came
        (0, 0, 0, 0, 4096, 64, 0, 0, 0, 4096 - 64),  # a layout of other bytes
    ],
)
def test_a_wrong_descriptor_is_one_error(ends, entry):
    sender, receiver = ends
    sender._ring.write(*entry)
    with pytest.raises(FormatError):
        receiver.receive(MessageKey(0, 0))


def test_one_message_twice_is_an_error(ends):
    sender, receiver = ends
    for _ in range(2):
        sender.send(MessageKey(0, 0), Message())
    with pytest.raises(FormatError, match="twice"):
        receiver.receive(MessageKey(0, 1))
