"""Checks of this machine before any work starts: its device, its latency tables, its login."""

import os
from pathlib import Path
from typing import Any

from nde_talf.decoding.common.device_check import check_device
from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines.config.policies import make_policy
from nde_talf.pipelines.config.schema import MEASURED, table_file
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.schema import selectable
from nde_talf.selector.selector_settings import SelectorConfig


def check_machine(
    device: str, selector: SelectorConfig, policies: dict[str, dict[str, Any]], tracking: str
) -> None:
    """Raise UserError for a device, a latency table or a login that this machine lacks."""
    check_device(device)
    for name in selector.verifiers:
        selectable(name, "selector.verifiers")
    for policy, options in policies.items():
        try:
            make_policy(policy, options)
        except UserError as error:
            raise UserError(f"evaluation.policies.{policy}: {error}") from None
    if selector.table != MEASURED:
        LatencyTable.load(table_file(selector.table, Path()))
    if tracking == "online":
        _check_login()


def _check_login() -> None:
    """Let W&B log in, which may ask for a key; raise UserError if it cannot."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    try:
        wandb.login(verify=True)
        return
    except Exception as error:  # of its settings, its service and the network
        fault = " ".join(str(error).split())[:300]
    raise UserError(
        f"tracking=online: W&B cannot be used ({fault}). Run `wandb login`, or set WANDB_API_KEY,"
        " or use tracking=offline."
    )
