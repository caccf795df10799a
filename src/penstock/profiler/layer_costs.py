"""Turn the counted work of a layer into seconds on a device and bytes."""

from __future__ import annotations

from penstock.core.profile import Layer
from penstock.model.heap import bytes_of
from penstock.model.layers import Layers
from penstock.profiler.devices import Machine
from penstock.profiler.layer_work import CountedWork
from penstock.profiler.optimizer_steps import OptimizerStep
from penstock.profiler.roofline import seconds


def layer_costs(layers: Layers, at: int, done: CountedWork, steps: dict[str, OptimizerStep], machine: Machine) -> Layer:
    """Return a layer of the profile. `steps` are the updates of parameters, by name."""
    model, layer, work = layers.split.model, layers[at], done.work[at]
    updates = [steps[name] for name in layer.parameters if name in steps]
    return Layer(
        layer.name,
        seconds(machine, work.forward),
        seconds(machine, work.input_grad),
        seconds(machine, work.weight_grad),
        output_bytes=sum(one.bytes for one in done.sent if one.source == at),
        kept_bytes=work.kept,
        kept_until_weight_bytes=work.kept_until_weight,
        parameter_bytes=bytes_of(model.get_parameter(name) for name in layer.parameters),
        buffer_bytes=bytes_of(model.get_buffer(name) for name in layer.buffers),
        optimizer_bytes=sum(update.state for update in updates),
        update=sum(seconds(machine, update.work) for update in updates),
    )
