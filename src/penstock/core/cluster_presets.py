"""Common machines by name, as the contents of a cluster file; a file may start from one and change what differs.

Bandwidths are what one device can send one way, from the vendors' figures, not measured: `penstock cluster measure` or
a file of one's own is nearer the truth. `speed` is 1 throughout: a profile is taken on, or estimated for, the device
at hand. The `dapple` machines are those of that paper's planner (16 devices each), to compare plans with it.
"""

from __future__ import annotations

from typing import Any

NVLINK_PAIR = {"bandwidth": 25e9, "reduce_bandwidth": 25e9, "reduce_rings": True}

PRESETS: dict[str, dict[str, Any]] = {
    "pc": {
        "hosts": 1,
        "devices": 2,
        "kind": "rtx-4090",
        "inside": {"bandwidth": 25e9, "latency": 10e-6},  # PCIe 4.0 x16
    },
    "dgx-v100": {
        "hosts": 1,
        "devices": 8,
        "kind": "v100-32",
        "inside": {"bandwidth": 150e9, "latency": 5e-6},
        "between": {"bandwidth": 6.25e9, "latency": 10e-6},  # four 100 Gb/s adapters for eight devices
    },
    "dgx-a100": {
        "hosts": 1,
        "devices": 8,
        "kind": "a100-80",
        "inside": {"bandwidth": 300e9, "latency": 5e-6},
        "between": {"bandwidth": 25e9, "latency": 10e-6},  # one 200 Gb/s adapter a device
    },
    "dgx-h100": {
        "hosts": 1,
        "devices": 8,
        "kind": "h100",
        "inside": {"bandwidth": 450e9, "latency": 5e-6},
        "between": {"bandwidth": 50e9, "latency": 10e-6},  # one 400 Gb/s adapter a device
    },
    "dgx-h200": {
        "hosts": 1,
        "devices": 8,
        "kind": "h200",
        "inside": {"bandwidth": 450e9, "latency": 5e-6},
        "between": {"bandwidth": 50e9, "latency": 10e-6},
    },
    "dapple-a": {
        "hosts": 2,
        "devices": 8,
        "kind": "v100-16",
        "inside": NVLINK_PAIR,
        "between": {"bandwidth": 1e9, "reduce_bandwidth": 3e9},
    },
    "dapple-b": {
        "hosts": 16,
        "devices": 1,
        "kind": "v100-16",
        "inside": NVLINK_PAIR,
        "between": {"bandwidth": 1e9, "reduce_bandwidth": 3e9},
    },
    "dapple-c": {
        "hosts": 16,
        "devices": 1,
        "kind": "v100-16",
        "inside": NVLINK_PAIR,
        "between": {"bandwidth": 0.4e9, "reduce_bandwidth": 1.2e9},
    },
}

KINDS: dict[str, dict[str, float]] = {
    "v100-16": {"memory": 16e9},
    "v100-32": {"memory": 32e9},
    "a100-40": {"memory": 40e9},
    "a100-80": {"memory": 80e9},
    "h100": {"memory": 80e9},
    "h200": {"memory": 141e9},
    "rtx-4090": {"memory": 24e9},
}
