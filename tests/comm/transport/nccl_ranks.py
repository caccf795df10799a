"""What the ranks of the NCCL test do: `python nccl_ranks.py STORE`, with RANK and WORLD_SIZE set."""

from __future__ import annotations

import sys
from datetime import timedelta

import gloo_ranks
import torch
import torch.distributed as dist

from penstock.comm.transport import nccl
from penstock.comm.transport.gloo.mesh import GlooMesh
from penstock.comm.transport.interface import LaneName, Message, MessageKey

RANK, SIZE, OTHERS = gloo_ranks.RANK, gloo_ranks.SIZE, gloo_ranks.OTHERS
COUNT = 12


def on_device(message: Message) -> Message:
    values = {number: tensor.cuda() for number, tensor in message.values.items()}
    return Message(values, message.metadata, message.stamp)


def on_host(message: Message) -> Message:
    assert all(tensor.is_cuda for tensor in message.values.values())
    return Message({number: tensor.cpu() for number, tensor in message.values.items()}, message.metadata, message.stamp)


def everything_in_any_order(
    to: dict[tuple[int, int], nccl.NcclSender], of: dict[tuple[int, int], nccl.NcclReceiver]
) -> None:
    for run in range(3):
        for seed in range(COUNT):
            for (peer, n), sender in to.items():
                sender.send(MessageKey(run, seed), on_device(gloo_ranks.message(100 * run + 20 * n + seed + peer)))
        for (_, n), receiver in sorted(of.items(), reverse=run == 1):
            for seed in reversed(range(COUNT)) if run == 2 else range(COUNT):
                gloo_ranks.same(on_host(receiver.receive(MessageKey(run, seed))), 100 * run + 20 * n + seed + RANK)


def behind_slow_work(to: dict[tuple[int, int], nccl.NcclSender], of: dict[tuple[int, int], nccl.NcclReceiver]) -> None:
    """What is sent is made by kernels that run for long, and its memory is given up at once: the values still arrive,
    also where the receiver's own compute stream is busy and memory is asked for all the time."""
    big = torch.randn(4096, 4096, device="cuda")
    for microbatch in range(8):
        for (peer, n), sender in to.items():
            for _ in range(5):
                big = big @ big
                big = big / big.norm()
            value = torch.zeros(2**20, device="cuda") + big.isnan().sum() + (10 * n + peer + microbatch)
            sender.send(MessageKey(9, microbatch), Message({0: value}))
            del value
            torch.full((2**20,), -1.0, device="cuda")  # takes memory that is free, and spoils it
        for (_, n), receiver in of.items():
            got = receiver.receive(MessageKey(9, microbatch)).values[0]
            doubled = got * 2
            del got
            torch.full((2**20,), -1.0, device="cuda")
            wrong = (doubled != 2 * (10 * n + RANK + microbatch)).sum()
            assert int(wrong) == 0, int(wrong)


if __name__ == "__main__":
    torch.cuda.set_device(0)
    store = dist.FileStore(sys.argv[1], SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=60))
    device = torch.device("cuda", 0)
    mesh = GlooMesh(gloo_ranks.PATIENCE, 60)
    pairs = [(a, b) for a in range(SIZE) for b in range(SIZE) if a != b]
    outs, ins = nccl.connect(pairs, RANK, device, mesh)
    keys = [(peer, n) for peer in OTHERS for n in range(2)]
    to = {(p, n): nccl.NcclSender(LaneName(SIZE * n + RANK, SIZE * n + p), outs[p]) for p, n in keys}
    of = {(p, n): nccl.NcclReceiver(LaneName(SIZE * n + p, SIZE * n + RANK), ins[p]) for p, n in keys}
    everything_in_any_order(to, of)
    behind_slow_work(to, of)
    torch.cuda.synchronize()
    for end in (*to.values(), *of.values()):
        end.close()
    mesh.close()
    dist.destroy_process_group()
    print("done")
