"""Checks of this machine before any work starts: its device, its latency tables, its login."""

import os
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

from nde_talf.decoding.common.device_check import check_device
from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines.config.policies import make_policy
from nde_talf.pipelines.config.schema import MEASURED, Config, table_file
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.schema import selectable


def check_machine(config: Config) -> None:
    """Raise UserError for a device, a latency table or a login that this machine lacks."""
    check_device(config.model.device)
    for name in config.selector.verifiers:
        selectable(name, "selector.verifiers")
    for policy, options in config.evaluation.policies.items():
        try:
            make_policy(policy, options)
        except UserError as error:
            raise UserError(f"evaluation.policies.{policy}: {error}") from None
    if config.selector.table != MEASURED:
        LatencyTable.load(table_file(config.selector.table, Path()))
    if config.tracking.mode == "online":
        _check_login()


def _check_login() -> None:
    """Raise UserError if W&B has no key, or its server does not take it.

    Otherwise it would ask for one, or fail, after work was done.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    stored, fault = False, "there is no API key"
    try:
        host = urlsplit(wandb.setup().settings.base_url).hostname
        with suppress(OSError, NetrcParseError):
            stored = netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
        if stored or {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"} & os.environ.keys():
            wandb.login()
            return
    except Exception as error:  # of its settings, its service and the network
        fault = " ".join(str(error).split())[:300]
    raise UserError(
        f"tracking=online: W&B cannot be used ({fault}). Run `wandb login`, or set WANDB_API_KEY,"
        " or use tracking=offline."
    )
