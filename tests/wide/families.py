"""Every family of the installed transformers library that trains on words, images or sound, one entry each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# What is trained, and the library's own table of it. A family that several tables have is taken from the first.
TABLES = {
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "segments": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "depths": "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "videos": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "letters": "MODEL_FOR_CTC_MAPPING_NAMES",
    "sounds": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}


@dataclass(frozen=True)
class Family:
    """A model class of the library, by the name of its family (`model_type`)."""

    kind: str
    name: str
    model: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def families() -> dict[str, Family]:
    """All of them, by kind and name."""
    from transformers.models.auto import modeling_auto

    taken: dict[str, Family] = {}
    models = set()  # of which several families have the same
    for kind, table in TABLES.items():
        for name, model in getattr(modeling_auto, table).items():
            model = model[0] if isinstance(model, (list, tuple)) else model
            if name not in taken and model not in models:
                taken[name] = Family(kind, name, model)
                models.add(model)
    return {str(family): family for family in taken.values()}


def config_class(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[name]
