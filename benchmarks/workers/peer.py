"""The peer: `torch.distributed.pipelining` with one stage a rank over gloo, as its users run it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Peer:
    """One of its schedules over a stage module, with a step like ours."""

    def __init__(self, schedule, module, microbatches, loss, inputs, target):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
        self.schedule = SCHEDULES[schedule](self.stage, n_microbatches=microbatches, loss_fn=loss)
        self.inputs = (inputs,) if rank == 0 else ()
        self.target = target if rank == ranks - 1 else None
        self.losses = [] if rank == ranks - 1 else None

    def zero(self):
        self.stage.submod.zero_grad()

    def step(self):
        """The outputs are not asked for: joining them would copy what nobody reads."""
        self.schedule.step(*self.inputs, target=self.target, losses=self.losses, return_outputs=False)

    def loss(self):
        """The mean over micro-batches, on the last rank."""
        return torch.stack(self.losses).mean().item() if self.losses else None

    def gradients(self):
        return {name: parameter.grad for name, parameter in self.stage.submod.named_parameters()}

    def held(self):
        """Bytes of the buffers that it keeps for receiving."""
        kept = [*self.stage.args_recv_info.values(), *self.stage.grad_recv_info.values()]
        every = [getattr(info, "buffer", None) for infos in kept for info in infos]  # the first stage has none
        buffers = [buffer for buffer in every if buffer is not None]
        return sum(buffer.untyped_storage().nbytes() for buffer in buffers)
