"""What tests would otherwise take from the machine, set before torch is imported.

Threads hardly spin while they wait, as test machines are shared. `precision=auto` is float32
everywhere, also where bfloat16 is native; NDE_NATIVE_BF16=1 in the environment runs the tests as on
a machine that has it. Models in the user's cache are not found, so that a preset is the same on all
machines.
"""

import os
import signal
import tempfile

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in the background of a shell; commands under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ["OMP_NUM_THREADS"] = "1"  # the models under test are too small for two
os.environ["NDE_NATIVE_BF16"] = os.environ.get("NDE_NATIVE_BF16") or "0"
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
_CACHE = tempfile.TemporaryDirectory(prefix="nde-tests-")
os.environ["HF_HOME"] = _CACHE.name
