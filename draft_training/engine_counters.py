"""What an engine counted of a head's drafts: how many were accepted at each position, in all or by
request.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from nde_talf.data.text.prompts import Prompt
from nde_talf.decoding.common.errors import UserError

Group = tuple[str, str]
"""Domain, and context length."""


@dataclass
class Counters:
    """What was counted: `drafts` verified, and at each position how many of them were accepted
    there.
    """

    drafts: int = 0
    accepted: list[int] = field(default_factory=list)

    def __add__(self, other: "Counters") -> "Counters":
        accepted = [
            a + b
            for a, b in zip(self.accepted or [0] * len(other.accepted), other.accepted, strict=True)
        ]
        return Counters(self.drafts + other.drafts, accepted)

    @property
    def rates(self) -> list[float]:
        """Of the drafts, the fraction accepted at each position, as vLLM reports it."""
        return [accepted / max(1, self.drafts) for accepted in self.accepted]


ByGroup = dict[Group, Counters]
EVERYTHING: Group = ("all", "all")


def read_counters(file: Path) -> dict[str, Counters]:
    """By id of the prompt, or in all under "" where an engine does not say which.

    The file is one of these:

    - `{"drafts": 100, "accepted": [71, 52, 41]}`;
    - `{"requests": [{"prompt": ID, "drafts": 10, "accepted": [7, 5, 4]}, ...]}`, with which the
      differences are looked at by domain and context length too;
    - the text of vLLM's `/metrics`, with its lines `vllm:spec_decode_num_drafts` and
      `vllm:spec_decode_num_accepted_tokens_per_pos`.

    Raises:
        UserError: it is none of these, or the numbers cannot be.
    """
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text) if text.lstrip().startswith("{") else _of_metrics(text)
        requests = content.get("requests") or [{"prompt": "", **content}]
        found: dict[str, Counters] = {}
        for each in requests:
            own = Counters(int(each["drafts"]), [int(count) for count in each["accepted"]])
            found[str(each["prompt"])] = found.get(str(each["prompt"]), Counters()) + own
        widths = {len(own.accepted) for own in found.values()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{file}: it holds no counters ({type(error).__name__}: {error}). Give {{"drafts": N,'
            ' "accepted": [by position]}, {"requests": [{"prompt": ID, "drafts": N, "accepted":'
            " [...]}]}, or the text of vLLM's /metrics."
        ) from error
    for own in found.values():
        steps = [own.drafts, *own.accepted]
        if (
            len(widths) > 1
            or widths == {0}
            or any(later > earlier or later < 0 for earlier, later in pairwise(steps))
        ):
            raise UserError(
                f"{file}: of {own.drafts} drafts {own.accepted} were accepted by position. There"
                " has to be a position, and a token can be accepted only where the one before it"
                " was: give counts, not rates, of one draft length."
            )
    return found


def _of_metrics(text: str) -> dict[str, Any]:
    """The counters in the text of vLLM's /metrics, over all its engines."""
    number = r"\{([^}]*)\}\s+([0-9.eE+]+)"
    drafts = [
        float(value)
        for _, value in re.findall(r"^vllm:spec_decode_num_drafts(?:_total)?" + number, text, re.M)
    ]
    accepted: dict[int, float] = {}
    for labels, value in re.findall(
        r"^vllm:spec_decode_num_accepted_tokens_per_pos(?:_total)?" + number, text, re.M
    ):
        position = int(re.findall(r'position="(\d+)"', labels)[0])
        accepted[position] = accepted.get(position, 0) + float(value)
    if not drafts or not accepted:
        raise ValueError(
            "no line vllm:spec_decode_num_drafts or vllm:spec_decode_num_accepted_tokens_per_pos"
        )
    return {
        "drafts": sum(drafts),
        "accepted": [accepted[position] for position in range(len(accepted))],
    }


def group_of(prompt: Prompt) -> Group:
    """Its domain, and its length between two powers of 2."""
    power = max(4, (len(prompt.tokens)).bit_length())
    return prompt.kind, f"under {2**power}" if power == 4 else f"{2 ** (power - 1)}-{2**power - 1}"


def counted(engine: dict[str, Counters], prompts: Sequence[Prompt]) -> tuple[list[Prompt], ByGroup]:
    """The prompts that `engine` counted, and its counters by group; all prompts and one group where
    it does not say which.

    Raises UserError for one that is not among `prompts`.
    """
    if "" in engine:
        return list(prompts), {EVERYTHING: engine[""]}
    by_id, found = {prompt.id: prompt for prompt in prompts}, dict[Group, Counters]()
    if unknown := set(engine) - set(by_id):
        raise UserError(
            f"prompt {sorted(unknown)[0]}: it is not among the {len(prompts)} prompts that are"
            " compared (--prompts)."
        )
    for name, own in engine.items():
        group = group_of(by_id[name])
        found[group] = found.get(group, Counters()) + own
    return [prompt for prompt in prompts if prompt.id in engine], found
