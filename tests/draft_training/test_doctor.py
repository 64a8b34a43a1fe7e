"""The head doctor names the fault of an engine from its counters.

The engine here is one of its own: plain passes over the full text, with transformers' layers, and
the faults of engines.
"""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from nde_talf.data.text.prompts import Prompt
from nde_talf.data.text.tokenizer import train_tokenizer
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.doctor import (
    ADVICE,
    EVERYTHING,
    FAULTS,
    HEALTHY,
    TEMPLATE,
    Counters,
    counted,
    diagnose,
    expected,
    group_of,
    read_counters,
    report,
    suspects,
)
from nde_talf.draft_training.export import load_head, save_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.lm_settings import LanguageModelConfig
from nde_talf.draft_training.settings import HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import fit_head
from nde_talf.draft_training.train_lm import LanguageModel, fit

DRAFTED, NEW_TOKENS = 3, 32
IN_HALF = ("the head is in bfloat16", "rotary tables are in bfloat16")


def test_counters_are_read_from_json_and_from_vllms_metrics(tmp_path):
    file = tmp_path / "counters"
    file.write_text('{"drafts": 10, "accepted": [7, 5]}')
    assert read_counters(file) == {"": Counters(10, [7, 5])}
    requests = [
        {"prompt": "a", "drafts": 4, "accepted": [3, 1]},
        {"prompt": "b", "drafts": 2, "accepted": [0, 0]},
    ]
    file.write_text(json.dumps({"requests": [*requests, requests[0]]}))
    assert read_counters(file) == {"a": Counters(8, [6, 2]), "b": Counters(2, [0, 0])}
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Number of drafts.",
        "# TYPE vllm:spec_decode_num_drafts_total counter",
    ]
    for engine, count in (("0", 10), ("1", 4)):
        lines.append(
            f'vllm:spec_decode_num_drafts_total{{engine="{engine}",model_name="x"}} {count}.0'
        )
        for position, accepted in enumerate((count // 2, count // 4)):
            labels = f'engine="{engine}",model_name="x",position="{position}"'
            lines.append(
                f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {accepted}.0"
            )
    file.write_text("\n".join(lines))
    assert read_counters(file) == {"": Counters(14, [7, 3])}


@pytest.mark.parametrize(
    "text",
    ["", "{}", "{", '{"drafts": 3}', '{"drafts": 3, "accepted": [4]}', '{"drafts": 9, "accepted": [4, 5]}',
     '{"drafts": 9, "accepted": []}', '{"requests": [{"drafts": 1, "accepted": [1]}]}', '{"drafts": 9, "accepted": ["x"]}',
     '{"requests": [{"prompt": "a", "drafts": 1, "accepted": [1]}, {"prompt": "b", "drafts": 1, "accepted": [1, 1]}]}'],
)  # fmt: skip
def test_what_holds_no_counters_is_refused(text, tmp_path):
    (tmp_path / "counters").write_text(text)
    with pytest.raises(UserError, match="counters"):
        read_counters(tmp_path / "counters")


def test_counters_of_unknown_prompts_are_refused_and_known_ones_are_grouped():
    prompts = [
        Prompt("a", "code", tokens=[1] * 20),
        Prompt("b", "code", tokens=[1] * 31),
        Prompt("c", "prose", tokens=[1]),
    ]
    with pytest.raises(UserError, match="prompt d"):
        counted({"d": Counters(1, [1])}, prompts)
    some, groups = counted({"a": Counters(3, [2]), "b": Counters(4, [1])}, prompts)
    assert [prompt.id for prompt in some] == ["a", "b"]
    assert groups == {("code", "16-31"): Counters(7, [3])} and group_of(prompts[2]) == (
        "prose",
        "under 16",
    )
    assert counted({"": Counters(1, [1])}, prompts) == (prompts, {EVERYTHING: Counters(1, [1])})


def test_the_most_likely_fault_is_named_and_chance_is_not():
    of = lambda *counts: {EVERYTHING: Counters(counts[0], list(counts[1:]))}  # noqa: E731
    ours = {
        HEALTHY: of(1000, 700, 500),
        "a norm too much": of(1000, 400, 100),
        "all drafted tokens have one position": of(1000, 700, 200),
    }
    assert diagnose(of(1000, 700, 500), ours).causes == []
    assert diagnose(of(500, 345, 255), ours).causes == []
    found = diagnose(of(500, 352, 95), ours)
    assert found.causes == ["position offset"] and found.probability < 1e-6 < found.fits
    assert any(
        "Likely cause: position offset" in line for line in report(found, of(500, 352, 95), ours)
    )
    lost = diagnose(of(500, 490, 10), ours)
    assert lost.fits < 1e-6 and any(
        "a second cause" in line for line in report(lost, of(500, 490, 10), ours)
    )
    near = diagnose(of(1000, 699, 500), ours | {"the head is in bfloat16": of(1000, 699, 500)})
    assert near.causes == ["dtype"], "exactly what the engine counts, however small the difference"


class Engine:
    """Greedy speculation, one token of the draft and one text of the target at a time, from
    scratch.
    """

    def __init__(self, target: CausalModel, head, fault: str = ""):
        self.target, self.head, self.fault = target, head, fault
        self.cut = SimpleNamespace(before=None)
        target.module.model.norm.register_forward_pre_hook(
            lambda _, inputs: setattr(self.cut, "before", inputs[0])
        )

    @torch.no_grad()
    def features(self, text: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Of the target at each token, and its most likely next token there."""
        found = self.target.module(torch.tensor([text]), output_hidden_states=True, use_cache=False)
        layers, fault = found.hidden_states, self.fault
        wanted = self.head.feature_layers
        if wanted:
            by = {"layer up": 1, "layer": -1}.get(fault, 0)
            some = [
                self.cut.before if layer + by == len(layers) - 1 else layers[layer + by]
                for layer in wanted
            ]
            features = torch.cat(some, -1)
        else:
            features = {"no norm": self.cut.before, "layer": layers[-2]}.get(fault, layers[-1])
        return features[0], found.logits[0].argmax(-1).tolist()

    @torch.no_grad()
    def draft(self, text: list[int], features: torch.Tensor) -> list[int]:
        head, known = self.head, len(text) - 1
        if self.fault == "late":
            features = torch.cat([features[:1], features[:-1]])
        inputs, tokens = head.combine(features[:known]), text[1:]
        for _ in range(DRAFTED):
            positions = torch.arange(len(tokens))
            if self.fault == "one position":
                positions.clamp_(max=known)
            if self.fault == "one too far":
                positions[known:] += 1
            turned = (
                patch.object(modeling_llama, "apply_rotary_pos_emb", neighbours)
                if self.fault == "pairs"
                else nullcontext()
            )
            with turned:
                outputs = head.forward(
                    torch.tensor([tokens]), positions[None], None, None, inputs[None]
                )[0]
            if self.fault == "no d2t":
                tokens = [*tokens, int(head.lm_head(head.norm(outputs[-1])).argmax())]
            else:
                tokens = [*tokens, int(head.logits(outputs[-1]).argmax())]
            inputs = torch.cat([inputs, outputs[-1:].to(inputs.dtype)])
        return tokens[known:]

    def counters(self, prompts: list[Prompt], tokens: list[list[int]]) -> dict[str, Counters]:
        found = {}
        for prompt, text in zip(prompts, tokens, strict=True):
            end, own = len(text) + NEW_TOKENS, Counters(0, [0] * DRAFTED)
            text = [*text, self.features(text)[1][-1]]
            while len(text) < end:
                drafted = self.draft(text, self.features(text)[0])
                best = self.features(text + drafted)[1][len(text) - 1 :]
                right = 0
                while right < DRAFTED and drafted[right] == best[right]:
                    right += 1
                text = text + drafted[:right] + [best[right]]
                own.drafts += 1
                own.accepted = [count + (right > at) for at, count in enumerate(own.accepted)]
            found[prompt.id] = own
        return found


def neighbours(query, key, cos, sin, *_):
    """Rotation as GPT-J has it: pairs (x_0, x_1), (x_2, x_3) and so on."""

    def turned(states):
        half = states.shape[-1] // 2
        c, s = cos[:, None, :, :half], sin[:, None, :, :half]
        even, odd = states[..., ::2], states[..., 1::2]
        return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)

    return turned(query), turned(key)


def texts(count: int, length: int, by: int, seed: int, noise: float = 0.0) -> torch.Tensor:
    """Letters 0-25 [count, length]: each is the one three before it plus `by`, and at times any
    other.
    """
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(26, (count, length), generator=generator)
    for at in range(3, length):
        regular = torch.rand(count, generator=generator) > noise
        letters[:, at] = torch.where(regular, (letters[:, at - 3] + by) % 26, letters[:, at])
    return letters


@pytest.fixture(scope="module")
def patients(tmp_path_factory) -> SimpleNamespace:
    """A target that has to look three tokens back, and writes other text without its first token;
    short and long prompts.
    """
    torch.manual_seed(0)
    folder, tokenizer = tmp_path_factory.mktemp("heads"), train_tokenizer(["abc"], 257)
    letters = torch.tensor([tokenizer(chr(97 + number))["input_ids"][0] for number in range(26)])
    first = torch.full((256, 1), tokenizer.bos_token_id)
    rows = torch.cat([first, letters[texts(256, 47, 1, 0, 0.06)]], 1)
    sizes = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=160, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )  # fmt: skip
    config = LanguageModelConfig(
        hidden=64, layers=4, heads=4, steps=300, batch=16, warm_up=10, precision="32-true"
    )
    every = torch.cat([rows, letters[texts(256, 48, 2, 1, 0.06)]])
    target = CausalModel(
        fit(LanguageModel(LlamaForCausalLM(sizes), config), every, folder / "target")
    )
    prompts = []
    for number in range(10):
        tokens = letters[texts(1, 40 if number % 2 else 12, 1, 100 + number)[0]].tolist()
        prompts.append(
            Prompt(
                str(number), "letters", tokenizer.decode(tokens), [tokenizer.bos_token_id, *tokens]
            )
        )
    return SimpleNamespace(
        target=target, prompts=prompts, tokenizer=tokenizer, rows=rows, folder=folder, heads={}
    )


def head_of(patients: SimpleNamespace, features: str, steps: int) -> Path:
    config = HeadConfig(
        features=features, draft_vocab=60 if features == "three" else None, loss=TalfLoss(k=2), roots=8, steps=steps, batch=8,
        warm_up=4, precision="32-true",
    )  # fmt: skip
    head = fit_head(patients.target, patients.rows, config, patients.folder / f"{features}-{steps}")
    return save_head(head, patients.folder / f"{features}-{steps}-export")


def treated(patients: SimpleNamespace, features: str) -> SimpleNamespace:
    """A trained head on `features`, and what our loop counts with it as it is and with each fault;
    made once.
    """
    if features not in patients.heads:
        export = head_of(patients, features, 300 if features == "three" else 150)
        ours = suspects(
            patients.target, export, patients.prompts, DRAFTED, NEW_TOKENS, patients.tokenizer
        )
        patients.heads[features] = SimpleNamespace(export=export, ours=ours)
    return patients.heads[features]


PLANTED = [
    ("final", "", []), ("final", "no norm", ["norm"]), ("final", "norm", ["norm"]), ("final", "layer", ["layer"]),
    ("final", "rope", ["rope"]), ("final", "pairs", ["rope"]), ("final", "one position", ["position offset"]),
    ("final", "one too far", ["position offset"]), ("final", "late", ["position offset"]), ("final", "prompts", ["template"]),
    ("three", "", []), ("three", "layer", ["layer"]), ("three", "layer up", ["layer"]), ("three", "no d2t", ["vocabulary map"]),
    ("three", "rope", ["rope"]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("features", "fault", "causes"), PLANTED)
def test_a_planted_fault_is_found(patients, features, fault, causes):
    """In an engine of its own, prompt by prompt."""
    own, target = treated(patients, features), patients.target
    head = load_head(own.export, target)
    if fault == "norm":

        def normalised(module, args, kwargs):
            states = kwargs.pop("hidden_states", args[0] if args else None)
            return (
                torch.nn.functional.rms_norm(
                    states, states.shape[-1:], eps=head.config.rms_norm_eps
                ),
            ), kwargs

        head.layers[0].self_attn.register_forward_pre_hook(normalised, with_kwargs=True)
    if fault == "rope":
        frequencies = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)  # the target's base is 100
        head.rotary.inv_freq.copy_(frequencies)
    tokens = [prompt.tokens[fault == "prompts" :] for prompt in patients.prompts]
    _, engine = counted(
        Engine(target, head, fault).counters(patients.prompts, tokens), patients.prompts
    )
    found = diagnose(engine, own.ours)
    assert found.causes == causes, (found.faults, engine)
    assert set(engine) == {("letters", "under 16"), ("letters", "32-63")}


@pytest.mark.slow
def test_a_head_in_bfloat16_is_found(patients):
    """A head that is not sure of itself, where rounding moves some counts: they are exactly those
    of a head in bfloat16.
    """
    target, export = patients.target, head_of(patients, "final", 20)
    count = partial(
        expected, target, prompts=patients.prompts, tokens=[p.tokens for p in patients.prompts]
    )
    heads = {name: load_head(export, target) for name in (HEALTHY, *IN_HALF)}
    drafters = {
        name: FAULTS[name][1](head) if name in FAULTS else EagleDrafter(head)
        for name, head in heads.items()
    }
    ours = {
        name: count(drafter=drafter, drafted=DRAFTED, new_tokens=100)
        for name, drafter in drafters.items()
    }
    served = EagleDrafter(load_head(export, target, torch.bfloat16))
    engine = count(drafter=served, drafted=DRAFTED, new_tokens=100)
    assert engine != ours[HEALTHY]
    found = diagnose(engine, ours)
    assert found.causes == ["dtype"] and "the head is in bfloat16" in found.faults


def test_every_fault_has_advice():
    assert {cause for cause, _ in FAULTS.values()} | {TEMPLATE} == set(ADVICE)
