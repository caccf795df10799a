"""Common machines by name, as the contents of a cluster file. A file may start from a preset and change what differs.

Bandwidths are what one device can send one way, from the vendors' figures, not measured: `penstock cluster measure`
gives more accurate ones. `speed` is always 1, because a profile is measured on, or estimated for, the same device. The
`dapple` presets are the clusters of the DAPPLE paper (16 devices each), for comparing plans with the paper's.

Vendors publish no latencies: 5 us inside a host and 10 us outside are of the order that NCCL's own model assumes
(src/graph/tuning.cc: 6.6 us an operation, and a hop 0.6 to 3.4 over NVLink, 1.0 to 5.7 over PCIe, 2.7 to 14 over a
network).
"""

from __future__ import annotations

from typing import Any

# NVLink 2.0: 25 GB/s per link and way; a V100 has six, one or two to each neighbour in the cube mesh of a DGX-1 (white
# paper "NVIDIA DGX-1 System Architecture", WP-08437). More members give an all-reduce more rings.
NVLINK_PAIR = {"bandwidth": 25e9, "reduce_bandwidth": 25e9, "reduce_rings": True}

PRESETS: dict[str, dict[str, Any]] = {
    "pc": {
        "hosts": 1,
        "devices": 2,
        "kind": "rtx-4090",
        "inside": {"bandwidth": 32e9, "latency": 10e-6},  # PCIe 4.0 x16; these have no NVLink (GeForce RTX 4090 specs)
    },
    "dgx-v100": {
        "hosts": 1,
        "devices": 8,
        "kind": "v100-32",
        "inside": {**NVLINK_PAIR, "latency": 5e-6},
        "between": {"bandwidth": 6.25e9, "latency": 10e-6},  # four 100 Gb/s adapters for eight devices (WP-08437)
    },
    "dgx-a100": {
        "hosts": 1,
        "devices": 8,
        "kind": "a100-80",
        "inside": {"bandwidth": 300e9, "latency": 5e-6},  # NVLink 3: 600 GB/s both ways (A100 datasheet, 2021)
        "between": {"bandwidth": 25e9, "latency": 10e-6},  # a 200 Gb/s adapter a device (DGX A100 datasheet, 2021)
    },
    "dgx-h100": {
        "hosts": 1,
        "devices": 8,
        "kind": "h100",
        "inside": {"bandwidth": 450e9, "latency": 5e-6},  # NVLink 4: 900 GB/s both ways (H100 datasheet, 2023)
        "between": {"bandwidth": 50e9, "latency": 10e-6},  # a 400 Gb/s adapter a device (DGX H100/H200 user guide)
    },
    "dgx-h200": {
        "hosts": 1,
        "devices": 8,
        "kind": "h200",
        "inside": {"bandwidth": 450e9, "latency": 5e-6},  # as the H100 (H200 datasheet, 2024)
        "between": {"bandwidth": 50e9, "latency": 10e-6},  # as the DGX H100
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

# Memory in decimal bytes, as vendors state it. `host_bandwidth` is that of PCIe x16: 16 GB/s each way with version 3.0,
# twice that with 4.0, four times with 5.0 (datasheets add both ways: V100 32, A100 64, H100 and H200 128 GB/s).
KINDS: dict[str, dict[str, float]] = {
    "v100-16": {"memory": 16e9, "host_bandwidth": 16e9},
    "v100-32": {"memory": 32e9, "host_bandwidth": 16e9},
    "a100-40": {"memory": 40e9, "host_bandwidth": 32e9},
    "a100-80": {"memory": 80e9, "host_bandwidth": 32e9},
    "h100": {"memory": 80e9, "host_bandwidth": 64e9},
    "h200": {"memory": 141e9, "host_bandwidth": 64e9},
    "l40s": {"memory": 48e9, "host_bandwidth": 32e9},
    "rtx-4090": {"memory": 24e9, "host_bandwidth": 32e9},
}
