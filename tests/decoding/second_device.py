"""A second device, `second`, that keeps its numbers on the CPU.

As on a GPU, an operation on tensors of two devices fails.

It is registered with torch for the whole process, so that its tests run in one of their own:
`python -m tests.decoding.second_device` decodes and traces with the draft there, then with both
models, and compares with the CPU.
"""

import sys
from itertools import product
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "second"


class Stored(torch.Tensor):
    """A tensor on the device. raw: its numbers, on the CPU."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "Stored":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            values.stride(),
            values.storage_offset(),
            dtype=values.dtype,
            device=NAME,
        )
        made.raw = values
        return made

    def tolist(self):
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return run(operation, *args, **(kwargs or {}))


def values(tree: Any) -> Any:
    return tree_map_only(Stored, lambda x: x.raw, tree)


def run(operation, *args, **kwargs):
    """An operation with a tensor, or a result, on the device."""
    aten, leaves = torch.ops.aten, tree_leaves((args, kwargs))
    given = [x for x in leaves if isinstance(x, torch.Tensor)]
    wanted = [x.type for x in leaves if isinstance(x, torch.device)]
    if operation is aten.copy_.default:
        return copy_from(args[1], args[0])
    if operation is aten._local_scalar_dense.default:
        return args[0].raw.item()
    if operation is not aten._to_copy.default and any(
        x.dim() and not isinstance(x, Stored) for x in given
    ):
        raise RuntimeError(
            f"{operation.name()}: expected all tensors on one device, and found {NAME} and cpu"
        )
    args, kwargs = tree_map_only(
        torch.device, lambda _: torch.device("cpu"), values((args, kwargs))
    )
    found = operation(*args, **kwargs)
    if wanted and wanted != [NAME]:
        return found
    known = {id(x.raw): x for x in given if isinstance(x, Stored)}  # what was changed in place
    return tree_map_only(
        torch.Tensor, lambda x: known[id(x)] if id(x) in known else Stored(x), found
    )


def copy_from(source, target, non_blocking=False):
    values(target).copy_(values(source))
    return target


class Backend(_DummyBackendModule):
    """What torch asks of a device: it has no random numbers of its own."""

    def get_rng_state(self, device):
        return torch.empty(0)

    def set_rng_state(self, state, device):
        pass


def register() -> list[torch.library.Library]:
    """Make the device known to torch, for as long as what is returned lives."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(run, "PrivateUse1")
    aten.impl("_copy_from", copy_from, "PrivateUse1")
    for operation in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):
        aten.impl(
            operation.name(),
            lambda *args, own=operation, **kwargs: run(own, *args, **kwargs),
            "PrivateUse1",
        )
    return [every, aten]


def main() -> None:
    from nde_talf.data.text.pair import Pair
    from nde_talf.data.traces.settings import SETTINGS, TracesConfig
    from nde_talf.data.traces.trace import trace_trajectories
    from nde_talf.decoding.actions import Action
    from nde_talf.decoding.common.micro_batch import MicroBatch
    from nde_talf.decoding.drafter import LMDrafter
    from nde_talf.decoding.loop import SpeculativeDecoder
    from nde_talf.decoding.policies.beam import Beam
    from nde_talf.decoding.policies.delayed import Delayed
    from nde_talf.decoding.sampling import Rng, SamplingSetting
    from nde_talf.draft_training.train_lm import held_out_report
    from nde_talf.evaluation.loops import transformers_assisted
    from nde_talf.selector.fingerprint import fingerprint
    from tests import ROOT

    held = register()
    assert held
    try:
        torch.ones(2, device=NAME) + torch.ones(2)
        sys.exit("the device does not notice a tensor of another one")
    except RuntimeError as error:
        assert "one device" in str(error)
    pair = Pair(ROOT / "tests/fixtures/pair")
    pairs = [
        pair.models("cpu", "float32"),
        pair.models("cpu", "float32", NAME),
        pair.models(NAME, "float32"),
    ]
    target, draft = pairs[1]
    assert {weight.device.type for weight in draft.module.parameters()} == {NAME}
    assert (
        {weight.device.type for weight in target.module.parameters()}
        == {"cpu"}
        == {draft.device.type}
    )
    prompts, setting = pair.every_prompt()[:1], SamplingSetting(1.0)
    tokens = prompts[0].tokens

    def decoded(target, draft, policy, rule, device):
        decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, rule, device=device)
        found = decoder.generate(tokens, 24, setting, Rng.seeded(0)).tokens
        layer, *_ = decoder.drafting.session.cache.layers
        assert layer.keys.device.type == next(draft.module.parameters()).device.type
        return found

    for policy, rule in ((Delayed(Action(2, 1, 2)), "specinfer"), (Beam(8, 3), "nss")):
        for device in (False, True):
            one, other = (decoded(*models, policy, rule, device) for models in pairs[:2])
            assert one == other, (policy, device)
    assert decoded(*pairs[2], policy, rule, device) == one
    config = TracesConfig(
        verifiers=["specinfer", "spectr", "traversal", "gbv"], samples=2, stride=16
    )
    trajectory = [[*tokens, *decoded(*pairs[0], Delayed(Action(1, 0, 2)), "specinfer", False)]]
    one, *others = (
        trace_trajectories(
            *models, prompts, trajectory, [SETTINGS["t1.0"]], config, MicroBatch(4), 0
        )
        for models in pairs
    )
    for other, (name, column) in product(others, one.items()):
        (
            torch.testing.assert_close(column, other[name])
            if isinstance(column, torch.Tensor)
            else None
        )
    rows = pair.rows("held_out")[:2]
    assert held_out_report(*pairs[0], rows) == held_out_report(*pairs[1], rows)
    assert fingerprint(pairs[0][1]) == fingerprint(draft)
    records = [
        transformers_assisted("assisted", *models, setting, 8)(tokens, 0, "text")
        for models in pairs[:2]
    ]
    assert records[0].accepted == records[1].accepted
    print("equal on two devices")


if __name__ == "__main__":
    main()
