"""A stage's backward in two halves: the input gradient first, the weight gradients later.

    queue = WeightQueue()                      # one for each micro-batch in flight
    with deferring(queue):
        outputs = stage(inputs)                                   # F
    with deferring(queue):
        torch.autograd.backward(outputs, gradients)               # I: inputs' .grad is complete
    queue.run()                                                   # W: parameters' .grad is complete

Each weight gradient is computed once, no forward runs twice, and results have the bits of a plain backward (on a GPU,
if its libraries are deterministic, except for the order of a bias's sum). Deferred are the weight and bias gradients of
linear layers (also inside multi-head attention, also `torch.addmm`), convolutions, transposed convolutions and dense
embeddings, where the weight is a parameter or views and casts of one. Between I and W their inputs and output gradients
stay alive, and must not be written to. A call costs about 40 µs of Python more in F, and 30 in I and W together.

Other gradients are computed during I, as usual: other functions (norms, LSTM, `x @ w`, einsum, embedding_bag), computed
weights (weight norm), a bias whose weight is frozen, names bound early (`from torch.nn.functional import linear`),
tensor subclasses (DTensor), code under functorch, forward-mode AD or a TorchFunctionMode (unless it calls
`stand_in(function)`), TorchScript and traced graphs, and compiled modules.

Hooks of a parameter, on the tensor and after accumulation, fire once for a backward, in W or in I. Only where one part
of a parameter's gradient is deferred and another is not (`F.linear(x, w)` and `w.square().sum()`), they fire in I with
that part and in W with the other; the sum is right.

Raises for `autograd.grad` with respect to parameters inside a stage, and for `create_graph` over the whole stage.
`autograd.grad` with respect to activations works, differentiated or not, and queues nothing.
"""

from penstock.model.split_backward.install import deferring
from penstock.model.split_backward.queue import WeightQueue
from penstock.model.split_backward.stand_ins import stand_in

__all__ = ["WeightQueue", "deferring", "stand_in"]
