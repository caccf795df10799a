"""What a process frees, it has at once when it wants it again."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from penstock.model.pages import keep_pages

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    kept = [torch.zeros(1 << 18) for _ in range(32)]  # of a megabyte each

if "keep" in sys.argv:
    keep_pages()
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""


def faults(*words, **chosen):
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, *words], env=plain | chosen, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_steps_take_no_new_pages():
    """10 steps of 32 MiB are 81,920 pages where each is handed out anew."""
    assert faults("keep") < 1000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_who_has_chosen_is_left_in_peace():
    chosen = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    assert min(faults(**chosen), faults("keep", **chosen)) > 10_000
