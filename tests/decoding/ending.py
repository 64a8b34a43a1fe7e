"""A program whose helper processes end in turn, for `test_tensor_parallel`: `python -m
tests.decoding.ending MODEL`.

It prints a line after each part: the error when process 1 was killed between two passes; seconds
and error when process 1 stopped answering inside one; and the number of process 1 while it runs and
waits.
"""

import os
import signal
import sys
import time
from contextlib import suppress

import torch

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.tensor_parallel import Leader, leading


def helper(leader: Leader) -> int:
    return leader._processes[1].pid


def one_pass(model: CausalModel) -> None:
    model.hidden(torch.tensor([[1, 2]]), torch.arange(2)[None], None, None)


def error_of(model: CausalModel) -> str:
    started = time.monotonic()
    for _ in range(2):  # also of every later pass
        try:
            one_pass(model)
        except UserError as error:
            found = str(error)
        else:
            raise SystemExit("a pass without process 1 succeeded")
    return f"{time.monotonic() - started:.1f} {found}"


def main() -> None:
    folder = sys.argv[1]
    for number, name in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        leader = Leader(2, "cpu", seconds=4)
        with leading(leader):
            model = CausalModel.load(folder, name="model.target")
            if number == 0:
                time.sleep(6)  # longer than a pass may take: between two passes there is no limit
                one_pass(model)
            os.kill(helper(leader), name)
            print(error_of(model), flush=True)
            with suppress(ProcessLookupError):
                os.kill(helper(leader), signal.SIGKILL)
    leader = Leader(2, "cpu")
    with leading(leader):
        one_pass(CausalModel.load(folder, name="model.target"))
        print(helper(leader), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
