"""`draft.strategy=fsdp`: a head whose weights, gradients and optimiser states are shared out among
processes (torch's `fully_shard`), through Lightning's ModelParallelStrategy, on GPUs and on a CPU
alike.

A head is one decoder layer and is gathered as one unit, for one pass of a step, forwards and
backwards. The target is no part of the module and stays unsharded on every device: processes run it
over different numbers of nodes, so that none can wait for another's part of it. It knows nothing of
losses.
"""

from pytorch_lightning.plugins.environments import (
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from nde_talf.decoding.common.errors import UserError

_LAUNCHED = (
    TorchElasticEnvironment,
    SLURMEnvironment,
    LSFEnvironment,
    MPIEnvironment,
)  # what Lightning asks, in its order


class Sharded(ModelParallelStrategy):
    """`devices` processes of this machine, each with its part of the weights.

    It starts them itself, so that a stage can use it: spawned beside GPUs, forked on a CPU. A
    checkpoint is one file with the full weights, as with any other. Raises UserError where
    something else started several processes already.
    """

    def __init__(self, devices: int):
        if any(environment.detect() for environment in _LAUNCHED):
            raise UserError(
                "draft.strategy=fsdp starts its processes itself: run the command without torchrun"
                " or srun (in a Slurm job with SLURM_NTASKS unset), or use draft.strategy=ddp with"
                " them."
            )
        super().__init__(
            data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False
        )

    def _configure_launcher(self) -> None:
        self._launcher = _MultiProcessingLauncher(
            self, "fork" if self.root_device.type == "cpu" else "spawn"
        )


class ShardedHead:
    """For a LightningModule with a `head`, in front of it: shards the head before a training and
    gathers it after it.
    """

    head: nn.Module
    device_mesh: DeviceMesh

    def configure_model(self) -> None:
        fully_shard(self.head, mesh=self.device_mesh["data_parallel"])
        register_fsdp_forward_method(self.head, "tree_features")

    def on_fit_end(self) -> None:
        for module in self.head.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(
                    module,
                    name,
                    nn.Parameter(gathered(weight.detach()), requires_grad=weight.requires_grad),
                )


def gathered(value: Tensor) -> Tensor:
    """`value`, in full, gathered from all processes if each has a part of it."""
    return value.full_tensor() if isinstance(value, DTensor) else value
