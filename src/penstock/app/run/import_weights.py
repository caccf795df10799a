"""`penstock import`: make a checkpoint of a config's pipeline with weights from a file; run by each worker."""

from __future__ import annotations

from pathlib import Path

from penstock.app.run.request import Request, rank, run_worker
from penstock.training.checkpoint.atomic import require_nothing_at


def import_run(request: Request) -> int:
    """Import the weights and write a checkpoint from which a training can start."""
    weights, path = request.flags["weights"], request.flags["checkpoint"]
    require_nothing_at(Path(path).absolute())  # before any long work
    pipe = request.task().pipeline(verify=False)
    pipe.import_weights(weights)
    pipe.save(path)
    if rank() == 0:
        print(f'wrote {path}; train from it with resume = "{path}" in [training]', flush=True)
    return 0


if __name__ == "__main__":
    run_worker(import_run)
