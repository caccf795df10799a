"""Every kind of model, split into two and four: loss and all gradients are the whole model's."""

from __future__ import annotations

import pytest
import torch
from compare import check
from zoo import ZOO, born

BATCHES = [(3, 5), (5, 9), (7, 9)]  # rows and length; the example has 4 and 6


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("how", [2, 4, "named"])
@pytest.mark.parametrize("name", ZOO)
def test_split_model_is_the_whole_model(name, how):
    animal = ZOO[name]
    if animal.transformers:
        pytest.importorskip("transformers")
    where = {"cuts": animal.cuts} if how == "named" else {"stages": how}
    batches = [animal.inputs(*sizes) for sizes in BATCHES]
    with torch.backends.cudnn.flags(enabled=name != "lstm"):  # cuDNN has no backward of them in eval mode
        check(born(name), animal.inputs(4, 6), batches, animal.by_parts, **where)
