"""Text that a target samples: answers to prompts, and text without any data.

It is written in shards. A killed run reads the shards that exist and writes the others.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from nde_talf.data.dialogues.self_made import UNFINISHED, Opening, Screen
from nde_talf.data.engines.transformers import Engine
from nde_talf.data.text.conversation import and_skipped
from nde_talf.data.text.settings import SELF_MADE
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import activity, console, track
from nde_talf.decoding.sampling.rng import SamplingSetting

T = TypeVar("T")
FIRST, LEAST = 50, 0.02
"""Samples after which the usable ones are counted, and the least share of them."""


class Sampling(NamedTuple):
    """Engine, shard size and seed with which a target samples texts.

    Attributes:
        engine: loads the engine; called only where a shard is missing.
        size: texts of a shard.
        seed: of the run.
    """

    engine: Callable[[], Engine]
    size: int
    seed: int


def sampled(
    store: TraceStore,
    how: Sampling,
    prompts: list[list[int]],
    most: int,
    temperatures: Sequence[float] = (1.0,),
) -> list[list[int]]:
    """Sample a text of at most `most` tokens after each prompt.

    Texts are written in shards, which take the temperatures in turn.
    """

    def written(shard: int, asked: list[list[int]]) -> list[list[int]]:
        setting = SamplingSetting(temperatures[shard % len(temperatures)])
        return how.engine().sample(asked, setting, most, how.seed * 1_009 + shard)

    return in_shards(store, "tokens", prompts, how.size, written)


def in_shards(
    store: TraceStore,
    column: str,
    asked: list[T],
    size: int,
    answer: Callable[[int, list[T]], list],
) -> list[Any]:
    """Return the answers to all that is asked, written in shards of `size`, in one column.

    answer: gets the number of a shard that is not there yet, and what is asked in it.
    """
    parts = [asked[start : start + size] for start in range(0, len(asked), size)]
    names = [store.name(shard, len(parts)) for shard in range(len(parts))]
    for shard, name in track(enumerate(names), f"answers, {store.kind}", len(names), "shard"):
        if not store.holds(name):
            store.write(name, {column: answer(shard, parts[shard])})
    return [one for name in names for one in store.lists(name)[column]]


@dataclass
class SelfMade:
    """Texts that a target writes without any data.

    Attributes:
        store: takes all that is sampled, in shards.
        how: the engine, the size of a shard and the seed.
        tokenizer: of the target.
        opening: the beginning of the texts; a user's turn has to end.
        most: tokens of a text, at most.
    """

    store: TraceStore
    how: Sampling
    tokenizer: PreTrainedTokenizerBase
    opening: Opening
    most: int

    def texts(self, wanted: int, known: Iterable[str] = ()) -> list[str]:
        """Let the target write until `wanted` of its texts can be used.

        Equal arguments give equal texts. Those that cannot be used are counted by reason, and told.

        Args:
            wanted: number of texts.
            known: texts that are held out: what is much like them is not used.

        Raises:
            UserError: hardly any text can be used.
        """
        screen = Screen(self.tokenizer, whole=bool(self.opening.closing))
        for text in known:
            screen.fault(text, ended=True)
        texts: list[str] = []
        reasons: Counter[str] = Counter()
        with activity(f"{self.store.kind} that the target writes", wanted, "text") as now:
            for text, ended in self._written():
                if fault := screen.fault(text, ended):
                    reasons[fault] += 1
                else:
                    texts.append(text)
                now.done, looked = len(texts), len(texts) + reasons.total()
                if len(texts) == wanted:
                    break
                if looked >= FIRST and len(texts) < LEAST * looked:
                    raise UserError(_unusable(f"{len(texts)} of {looked}", reasons))
        usable = f"{len(texts)} of {looked} can be used{and_skipped(reasons)}"
        console.print(f"self-made {self.store.kind}: {usable}")
        return texts

    def _written(self) -> Iterator[tuple[str, bool]]:
        """Yield texts without end, shard after shard, and whether each ended."""
        store, how, before = self.store, self.how, self.opening.tokens
        for shard in count():
            name = f"{store.kind}-{shard:06d}.parquet"
            if not store.holds(name):
                size = how.size if shard else min(how.size, FIRST)  # hopeless ones are soon told
                seed, asked = how.seed * 1_009 + shard, [before] * size
                made = how.engine().sample(asked, SELF_MADE, self.most, seed, self.opening.ends)
                store.write(name, {"tokens": [ids[len(before) :] for ids in made]})
            yield from map(self._read, store.lists(name)["tokens"])

    def _read(self, ids: list[int]) -> tuple[str, bool]:
        """Return a text without what ends it, and whether it ended."""
        text = str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        head, closed, _ = text.partition(self.opening.closing or text + "\n")
        return head.rstrip("\ufffd").strip(), bool(closed) or len(ids) < self.most


def _unusable(share: str, reasons: Counter[str]) -> str:
    advice = "Give data of your own (data=prompts.jsonl)"
    if reasons[UNFINISHED] * 2 > reasons.total():
        advice += ", or raise data.self_made.tokens if its turns are long"
    return (
        f"data=self: {share} texts that the target wrote can be used{and_skipped(reasons)}."
        f" {advice}."
    )
