"""A training script, as a user's: it is run by one process or by several, and does what its arguments say.

python checkpoint_rank.py OUT KIND STAGES '{"schedule": ...}' ACTION...

load:PATH  step:N  save:PATH  evaluate:  state:NAME (into OUT, one file a rank)
try:PATH and refuse:PATH save and load, where that is expected to fail
random:  draw:              from the user's generator, seeded by rank
die:RANK,CALL,N             a rank kills itself at the Nth os.CALL
limit:BYTES  unlimit:       how long files of rank 1 may become
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch

from checkpoints import batch, conv, gpt, pictures, state, steps, typed
from penstock import InputError

RANK = int(os.environ.get("RANK", "0"))


def die_at(call: str, number: int) -> None:
    """End this process, as a killed one ends, at so many calls of a function of the system."""
    real, left = getattr(os, call), [number]

    def counted(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, call, counted)


def main(out: str, kind: str, stages: str, options: str, *actions: str) -> None:
    torch.set_num_threads(1)
    make, given = {"gpt": (gpt, batch), "conv": (conv, pictures)}[kind]
    pipe = make(int(stages), **json.loads(options))
    said = {"losses": [], "errors": []}
    print(f"rank {RANK} begins as {os.getpid()}", flush=True)
    for action in actions:
        verb, word = action.split(":", 1)
        if verb == "load":
            pipe.load(word)
        elif verb == "step":
            said["losses"] += steps(pipe, int(word), given)
        elif verb == "save":
            pipe.save(word)
        elif verb in ("try", "refuse"):
            try:
                pipe.save(word) if verb == "try" else pipe.load(word)
            except InputError as error:
                said["errors"].append(str(error))
        elif verb == "state":
            torch.save(state(pipe), Path(out) / f"{word}-{RANK}.pt")
        elif verb == "evaluate":
            said["losses"].append(pipe.evaluate([typed(pipe, given(99))]))
        elif verb == "random":
            torch.manual_seed(1000 + RANK)
        elif verb == "draw":
            said["drawn"] = torch.rand(3).tolist()
        elif verb == "die":
            rank, call, number = word.split(",")
            if int(rank) == RANK:
                die_at(call, int(number))
        elif verb == "limit" and RANK == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(word), resource.RLIM_INFINITY))
        elif verb == "unlimit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (Path(out) / f"said-{RANK}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
