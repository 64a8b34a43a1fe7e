"""Drafts inside vLLM: a draft model or n-grams.

    from nde_talf import for_vllm

    llm = LLM(TARGET, **for_vllm(draft="runs/x/pair/draft", tokens=4))

vLLM's V1 runner imports `Proposer` by name, as speculative_config={"method": "custom_class", ...}
asks, and hands our options to it in `additional_config`. vLLM does not ask for the draft's
probabilities: it verifies each drafted token as if the draft had given it probability 1. It says
neither which request a row belongs to nor what the target's hidden states are. docs/serving.md says
what has run.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from packaging.specifiers import SpecifierSet

from nde_talf.data.engines.vllm import import_vllm
from nde_talf.data.engines.vllm_speculation import sampling_fault
from nde_talf.decoding.common.arguments import Positive, checked
from nde_talf.decoding.common.errors import Advice, UserError
from nde_talf.decoding.drafters.ngram import NgramDrafter
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.integrations.batch_drafting import Proposals
from nde_talf.integrations.transformers import NGRAM, drafter_of, is_head

KEY = "nde_talf"
"""Under which vLLM's `additional_config` holds `draft`."""
SUPPORTED = SpecifierSet("==0.32.*", prereleases=True)
"""vLLM's versions in which the proposer has run: its interface may change with each."""


def checked_draft(draft: Any) -> str:
    """Return `draft`. Raises UserError unless it is "ngram" or the folder of a draft model."""
    named = f"for_vllm(draft={draft!r})"
    if not draft or not isinstance(draft, str):
        raise UserError(
            f"{named}, which is additional_config[{KEY!r}]: name the folder of a draft model, or"
            " 'ngram'."
        )
    if draft != NGRAM and not Path(draft).exists():
        raise UserError(f"{named}: there is no such folder or file, seen from {Path.cwd()}.")
    if draft != NGRAM and is_head(Path(draft)):
        raise UserError(
            f"{named}: it is a draft head, which needs the target's hidden states, and vLLM gives a"
            " proposer none. Serve it by vLLM's own method:"
            " nde_talf.data.engines.vllm_speculation.head_method(folder, tokens)."
        )
    return draft


@checked
def for_vllm(draft: str | Path, tokens: Positive = 8) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` with which it drafts by `Proposer`.

    On the command line they are `--speculative-config` and `--additional-config`, as JSON.

    Args:
        draft: folder of a draft model with the target's tokenizer, or "ngram": what followed the
            same words before.
        tokens: tokens drafted at a time; with n-grams up to that many, as far as there are some.

    Raises:
        UserError: the draft cannot be used.
    """
    own = checked_draft(str(draft))
    method = {
        "method": "custom_class",
        "model": f"{Proposer.__module__}.{Proposer.__qualname__}",
        "num_speculative_tokens": tokens,
    }
    return {"speculative_config": method, "additional_config": {KEY: own}}


class Proposer:
    """Drafter that vLLM builds from `for_vllm`, once in every process that runs the target.

    Raises:
        UserError: another version of vLLM; options that cannot be used; a draft of another
            tokenizer.
    """

    def __init__(self, vllm_config: Any):
        check_version(import_vllm().__version__)
        self.config = vllm_config
        self.draft = checked_draft((vllm_config.additional_config or {}).get(KEY))
        self.max_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self.proposals: Proposals | None = None
        processes = vllm_config.parallel_config.world_size
        if processes > 1:
            raise UserError(
                f"nde_talf in vLLM: {processes} processes share the target, which has not been"
                " tried. Use one."
            )
        if fault := sampling_fault():
            warnings.warn(
                "nde_talf in vLLM: sampled requests would get other texts than without"
                f" speculation, whoever drafts, because {fault}. Send requests at temperature 0"
                " alone.",
                Advice,
                stacklevel=2,
            )

    def load_model(self, target: Any) -> None:
        """VLLM calls this once, with its own target, which is not looked at."""
        model, most = self.config.model_config, self.max_tokens
        rows = model.get_vocab_size()
        if self.draft == NGRAM:
            self.proposals = Proposals(NgramDrafter(rows), most)
            return
        dtype = str(model.dtype).removeprefix("torch.")
        device = str(self.config.device_config.device)
        draft = CausalModel.load(self.draft, device, dtype, "for_vllm: draft")
        name = f"for_vllm(draft=) {self.draft}"
        drafter = drafter_of(draft, name, model.tokenizer or model.model, rows)
        self.proposals = Proposals(drafter, most)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        **ignored: Any,
    ) -> list[list[int]]:
        """Draft for every row of the batch.

        A row gets none where the step sampled nothing, that is within a prompt.

        Args:
            sampled_token_ids: by row what the step committed.
            num_tokens_no_spec: [rows or more], committed tokens, these included.
            token_ids_cpu: [rows or more, max_model_len], their ids, then anything.
            ignored: what else vLLM hands over.
        """
        assert self.proposals is not None
        texts = [
            token_ids_cpu[row, : num_tokens_no_spec[row]] if sampled else token_ids_cpu[row, :0]
            for row, sampled in enumerate(sampled_token_ids)
        ]
        return self.proposals.propose(texts, self.config.model_config.max_model_len)


def check_version(version: str) -> None:
    """Raise UserError for a version of vLLM in which the proposer has not run."""
    if version not in SUPPORTED:
        raise UserError(
            f"vLLM {version}: nde_talf's proposer has run in versions {SUPPORTED}, and vLLM calls"
            " its interface experimental. Install one of these, or use vLLM's own methods"
            " (docs/draft.md)."
        )
