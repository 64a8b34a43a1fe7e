"""Threads of decoding: one for a small model, unless the user chose."""

import os
import subprocess
import sys

import pytest

USABLE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SCRIPT = """
import torch
{before}
from nde_talf.decoding.models.forward import fused_weights
from nde_talf import Autoregressive, SpeculativeDecoder
from tests.decoding.families import family
{after}
SpeculativeDecoder(family("llama"), None, Autoregressive(), "specinfer")
print(torch.get_num_threads())
"""


def printed(script, unset, **variables):
    """The last word that a script prints in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != unset} | variables
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=True,
    )
    return ran.stdout.split()[-1]


@pytest.mark.long
@pytest.mark.skipif(USABLE < 2, reason="one core has one thread")
@pytest.mark.parametrize(
    "before,after,expected",
    [
        ("", "", "1"),
        ("", "fused_weights.LARGE = 1", "all"),
        ("torch.set_num_threads(31)", "", "31"),
        ("", "torch.set_num_threads(31)", "31"),
        (
            "",
            f"from nde_talf.decoding.threads import threads; own = threads({USABLE});"
            " own.__enter__()",
            str(USABLE),
        ),
    ],
)
def test_a_small_model_decodes_on_one_thread_unless_the_user_chose(before, after, expected):
    told = printed(SCRIPT.format(before=before, after=after), "OMP_NUM_THREADS")
    assert told == expected if expected != "all" else int(told) > 1


def test_importing_the_package_sets_how_long_threads_spin_but_not_over_the_users_count():
    for given, expected in (({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7")):
        code = "import nde_talf, os; print(os.environ['GOMP_SPINCOUNT'])"
        assert printed(code, "GOMP_SPINCOUNT", **given) == expected
