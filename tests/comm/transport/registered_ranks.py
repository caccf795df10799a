"""A transport from outside the package, over the store that ranks share: what the ranks of its test do."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch import nn

import penstock
from penstock.comm.transport.wire import from_bytes, to_bytes

SENT: list[int] = []


class StoreSender:
    def __init__(self, link):
        self.store = link.store

    def send(self, key, message):
        data = to_bytes(message)
        SENT.append(len(data))
        if len(SENT) == 10 and sys.argv[1:] == ["leaves"] and os.environ["RANK"] == "1":
            os._exit(3)
        self.store.set(f"{key.run}.{key.microbatch}", data)

    def close(self):
        pass


class StoreReceiver:
    def __init__(self, link):
        self.link = link

    def receive(self, key):
        name, started = f"{key.run}.{key.microbatch}", time.monotonic()
        while not self.link.store.check([name]):
            self.link.watch.check(self.link.peer, time.monotonic() - started)
            time.sleep(0.001)
        data = self.link.store.get(name)
        self.link.store.delete_key(name)
        return from_bytes(data)

    def close(self):
        pass


def train(transport: str | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    pipe = penstock.Pipeline(
        model,
        example=torch.ones(1, 6),
        stages=3,
        transport=transport,
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    torch.manual_seed(1)
    return [step.loss for step in pipe.train([(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(4)])]


if __name__ == "__main__":
    torch.set_num_threads(1)
    penstock.register_transport("store", StoreSender, StoreReceiver)
    print(json.dumps([train("store"), len(SENT)]))
