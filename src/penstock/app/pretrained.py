"""Models of transformers: what lies beside their weights in a directory that `from_pretrained` takes.

Nothing here imports transformers: a model of theirs has done so.
"""

from __future__ import annotations

import copy
import sys

from torch import nn

CONFIG, GENERATION = "config.json", "generation_config.json"
FILES = (CONFIG, GENERATION)


def pretrained_files(model: nn.Module) -> dict[str, str] | None:
    """The files by name, as `save_pretrained` would write them; None for a model that is not transformers'."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    dtype = str(model.dtype).removeprefix("torch.")
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)  # the older name is of 4.55
    files = {CONFIG: config.to_json_string()}
    if model.can_generate() and model.generation_config is not None:
        files[GENERATION] = model.generation_config.to_json_string()
    return files
