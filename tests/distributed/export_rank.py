"""A training script whose ranks export and import weights: run by one process or by several, as its arguments say.

python export_rank.py OUT STAGES '{"schedule": ...}' ACTION...

train:N  export:PATH  import:PATH  state:NAME (the whole model's, into OUT, by rank 0)
try:PATH and refuse:PATH export and import, where that is expected to fail
die:RANK,CALL,N  a rank kills itself at the Nth os.CALL
limit:BYTES  unlimit:  how long files of rank 1 may become
peak:VERB,PATH  export or import, and how far memory grew meanwhile (`big` models, whose ranks hold one stage each)
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import torch
from checkpoint_rank import die_at
from torch import nn

from checkpoints import batch, gpt
from penstock import InputError, Pipeline
from penstock.model.materialise import weightless

RANK = int(os.environ.get("RANK", "0"))
WIDTH, LAYERS = 1024, 8  # a stage of `big`: so many layers of 4 MiB


def big(stages: int, load: str | None = None, seed: int = 0) -> Pipeline:
    torch.manual_seed(seed + RANK)
    with weightless():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(stages * LAYERS)))
    return Pipeline(model, example=torch.zeros(1, WIDTH), stages=stages, microbatches=1, verify=False, load=load)


def growth(act) -> int:
    """Bytes by which this process's resident memory was at most larger, while it acted, than before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    act()
    return status("VmHWM") - before


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def main(out: str, stages: str, options: str, *actions: str) -> None:
    torch.set_num_threads(1)
    given = json.loads(options)
    pipe = big(int(stages), **given) if given.pop("big", False) else gpt(int(stages), **given)
    said: dict[str, list] = {"losses": [], "errors": [], "peaks": []}
    print(f"rank {RANK} begins as {os.getpid()}", flush=True)
    for action in actions:
        verb, word = action.split(":", 1)
        if verb == "train":
            said["losses"] += [step.loss for step in pipe.train(batch(pipe.index + n) for n in range(int(word)))]
        elif verb == "export":
            pipe.export(word)
        elif verb == "import":
            pipe.import_weights(word)
        elif verb in ("try", "refuse"):
            try:
                pipe.export(word) if verb == "try" else pipe.import_weights(word)
            except InputError as error:
                said["errors"].append(str(error))
        elif verb == "state":
            whole = pipe.state_dict()
            if RANK == 0:
                torch.save(whole, Path(out) / f"{word}.pt")
        elif verb == "peak":
            verb, path = word.split(",")
            act = pipe.export if verb == "export" else pipe.import_weights
            said["peaks"].append(growth(lambda act=act, path=path: act(path)))
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
