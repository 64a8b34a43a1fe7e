"""What torch.compile gains for a native forward pass on a CPU.

`python -m benchmarks.compiled --run checkpoints/default` (five minutes; it needs a C++ compiler).

A pass runs a tree of so many rows (each row has two children) after a text, from the call of the
session to the hidden states. The models are draft and target of a run. Three ways are interleaved
over the same weights, the last two over the same cache:

- transformers' forward,
- the native one,
- the native one compiled: everything from tokens to hidden states is one function for
  torch.compile, with C++ wrappers (`cpp_wrapper`), so that Python makes one call a pass. It writes
  the cache's slots. Numbers of rows above one, lengths of text and sizes of the cache are dynamic.

Then texts are decoded with native passes of the run's pair and with compiled ones: between two
passes of a loop there is other work, which a pass that is repeated does not see. The texts have to
be the same.

Hidden states are compared with the native pass's before the clock runs. Medians of CPU time; one
thread. The control is the first way timed under two names.
"""

import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import torch
from torch import Tensor

from benchmarks.passes import binary_tree, pass_options
from benchmarks.timing import interleaved, report
from nde_talf.data.text.pair import ROLES
from nde_talf.decoding.actions import Action
from nde_talf.decoding.cache import KVCache
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.forward.attention import Seen, seen_in
from nde_talf.decoding.forward.native import NativeForward
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.session import TreeSession

ROWS = (1, 8, 16)
CONTEXTS = (128,)


class Compiled:
    """The native pass of a Llama after a text, compiled.

    Called as `NativeForward` is. Its first pass over a text is native.
    """

    def __init__(self, native: NativeForward):
        self.native, options = native, {"cpp_wrapper": True}
        self.compiled = torch.compile(
            self._pass, fullgraph=True, isolate_recompiles=True, recompile_limit=32, options=options
        )
        self.states: Tensor | None = None
        self.wide = 0  # passes over more than one row

    def over(self, states: Tensor) -> None:
        """From now on, write to the slots of a cache that these are."""
        self.states = states
        # One tensor a layer, each of a storage of its own over the same memory: writes to views of
        # one storage would be compiled to copies of all of it.
        self.slots = [torch.from_dlpack(own) for own in states]
        for own in self.slots:
            torch._dynamo.maybe_mark_dynamic(own, 2)

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, *rest: Any
    ) -> Tensor:
        native, start, count = self.native, cache.length, tokens.shape[1]
        states = cache._buffers()[0].states
        if states is None or not start or start + count > states.shape[-2]:
            return native(tokens, positions, mask, cache, *(rest or ({},)))
        if states is not self.states:
            self.over(states)
        seen = seen_in(None, mask, positions, None, start, native.embedding.dtype, native.groups)
        for layer in cache._growing:
            layer.length = start + count
        self.wide += count > 1
        if count > 1 and self.wide < 4:  # later ones find what was compiled for these
            for own, dimensions in ((tokens, [1]), (positions, [1]), (seen.mask, [2, 3])):
                if own is not None:
                    torch._dynamo.maybe_mark_dynamic(own, dimensions)
        return self.compiled(tokens, positions, seen, start, self.slots)

    def _pass(
        self, tokens: Tensor, positions: Tensor, seen: Seen, start: int, slots: list[Tensor]
    ) -> Tensor:
        native, (batch, count) = self.native, tokens.shape
        angles = native.tables[native.layers[0].kind].at(positions)
        states = torch.embedding(native.embedding, tokens).view(batch * count, -1)
        written: Any = Written(slots, start, start + count)
        for index, layer in enumerate(native.layers):
            states = layer.run(states, batch, angles, seen, written, index)
        return native.norm(states).view(batch, count, -1)


class Written:
    """What a decoder layer sees of the cache inside the compiled function."""

    def __init__(self, slots: list[Tensor], start: int, end: int):
        self.slots, self.start, self.end, self.index = slots, start, end, 0

    def layer(self, index: int) -> "Written":
        self.index = index
        return self

    def update(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        own = self.slots[2 * self.index : 2 * self.index + 2]
        for states, new in zip(own, (keys, values), strict=True):
            states[:, :, self.start : self.end] = new
        return [states[:, :, : self.end] for states in own]


def passing(
    session: TreeSession, forward: Callable[..., Tensor], rows: int
) -> Callable[[], Tensor]:
    """A pass of `forward` over a tree of so many rows, which the session drops again."""
    tokens, parents = binary_tree(rows)

    def run() -> Tensor:
        session.forward = forward
        hidden = session.grow(tokens, parents)
        session.rollback()
        return hidden

    return run


def generations(
    target: CausalModel, draft: CausalModel, tokens: int, repeats: int
) -> tuple[list[list], list[str]]:
    """Rows of the table, and controls: texts from a seed, decoded with native passes of both models
    and with compiled ones.
    """
    native = {model: model.native for model in (target, draft)}
    compiled = {model: Compiled(own) for model, own in native.items() if own is not None}
    decoders = {
        "plain decoding": SpeculativeDecoder(target, None, Autoregressive(), "naive"),
        "SpecInfer (3, 0, 5)": SpeculativeDecoder(
            target, LMDrafter(draft), Delayed(Action(3, 0, 5)), "specinfer"
        ),
    }
    prompt = [7 * i % target.vocab_size for i in range(min(CONTEXTS))]
    rows, controls = [], []
    for name, decoder in decoders.items():

        def write(forwards: dict, decoder: SpeculativeDecoder = decoder) -> list[int]:
            for model in (target, draft):
                model.native = forwards[model]
            rng = Rng(torch.Generator().manual_seed(0))
            return decoder.generate(prompt, tokens, SamplingSetting(0.6), rng).tokens

        started = time.process_time()
        assert write(native) == write(compiled), "the texts differ"
        compiling = time.process_time() - started
        times = interleaved(
            {"native": partial(write, native), "compiled": partial(write, compiled)}, repeats
        )
        own, other = (1e6 * times.cpu[way] / tokens for way in ("native", "compiled"))
        rows.append([f"{name}, a token", len(prompt), "–", "–", own, other, own / other, compiling])
        controls.append(times.note(f" ({name})"))
    return rows, controls


@torch.inference_mode()
def main() -> None:
    parser = pass_options(__doc__, ROWS, CONTEXTS, 60)
    parser.add_argument(
        "--tokens", type=int, default=96, help="of the texts that are decoded both ways; 0: none"
    )
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    models = {
        role: CausalModel.load(options.run / "pair" / role, name=role) for role in ROLES[::-1]
    }
    rows, controls = [], []
    for name, model in models.items():
        theirs = CausalModel(model.module, model.name, "transformers")
        assert model.native is not None
        compiled = Compiled(model.native)
        for count in options.rows:
            for context in options.contexts:
                sessions = [
                    TreeSession(own.hidden, own.device, own.dtype, own.layers)
                    for own in (theirs, model)
                ]
                for session in sessions:
                    session.reset(context + max(options.rows))
                    session.append([7 * i % model.vocab_size for i in range(context)])
                tasks: dict[str, Callable[[], Tensor]] = {
                    "transformers": passing(sessions[0], theirs.hidden, count),
                    "native": passing(sessions[1], model.hidden, count),
                    "compiled": passing(sessions[1], compiled, count),
                }
                started, expected = time.process_time(), tasks["native"]()
                torch.testing.assert_close(tasks["compiled"](), expected, atol=1e-5, rtol=1e-5)
                compiling = time.process_time() - started
                times = interleaved(tasks, options.repeats)
                cpu = [times.cpu[way] for way in tasks]
                rows.append(
                    [name, context, count, *(1e6 * own for own in cpu), cpu[1] / cpu[2], compiling]
                )
                print(rows[-1], flush=True)
                controls.append(times.note(f" ({name}, {context} tokens, {count} rows)"))
    if options.tokens:
        found, checked = generations(
            models["target"], models["draft"], options.tokens, max(1, options.repeats // 5)
        )
        rows, controls = rows + found, controls + checked
    columns = [
        "model",
        "tokens of context",
        "rows",
        "transformers, µs",
        "native, µs",
        "native compiled, µs",
    ]
    columns += ["native over compiled", "first compiled pass, s"]
    wrong = [line for line in controls if not line.endswith(".")]
    note = f"{len(controls) - len(wrong)} of {len(controls)} A/A controls hold 1." + (
        " The others:" if wrong else ""
    )
    report(
        "compiled",
        shlex.join(["python", "-m", "benchmarks.compiled", *sys.argv[1:]]),
        columns,
        rows,
        [note, *wrong],
    )


if __name__ == "__main__":
    main()
