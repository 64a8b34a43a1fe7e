"""Trainings in several processes of this machine."""

import os
import secrets
import socket
import threading
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from pytorch_lightning.strategies import DDPStrategy


class LocalProcesses(DDPStrategy):
    """One process per device. Nothing listens beyond the loopback.

    The processes meet in a file, since torch's own store listens on every interface. They are
    spawned, not forked: a fork of a process with threads can hang.

    Args:
        folder: of the training, for the file.
    """

    def __init__(self, folder: Path):
        super().__init__(start_method="spawn")
        name = f".processes.{os.getpid()}-{secrets.token_hex(4)}.tmp"  # a kill leaves it
        self.file = folder.resolve() / name

    def setup_distributed(self) -> None:
        """Join the other processes."""
        threading.Thread(target=_end_with, args=[parent_process()], daemon=True).start()
        self.set_world_ranks()
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
        torch.distributed.init_process_group(
            "nccl" if self.root_device.type == "cuda" else "gloo",
            store=torch.distributed.FileStore(str(self.file), self.world_size),
            rank=self.global_rank,
            world_size=self.world_size,
        )
        super().setup_distributed()


def _end_with(parent: BaseProcess) -> None:
    """End this process when its parent ends, even killed; else it would wait for the others."""
    parent.join()
    os._exit(1)
