"""Every key declares what it may be, and one function checks it before any work: here for all keys
of the three commands.
"""

from dataclasses import MISSING, fields
from math import inf, nan, nextafter

import pytest

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.schema import (
    ALLOWED,
    LONG_TEXT,
    SEED,
    TEXT,
    allowed,
    check_fields,
    choice,
    number,
)
from nde_talf.pipelines.config import Config
from nde_talf.pipelines.generate import GenerateConfig
from nde_talf.pipelines.recommend import RecommendConfig
from tests.pipelines.fields import every_field

OPEN = {"evaluation.policies", "options", "dialogues.template_options"}
"""Dictionaries that others read: a policy, which knows its options, and a chat template."""


ALL = [
    pytest.param(*found, id=found[0])
    for schema in (Config, GenerateConfig, RecommendConfig)
    for found in every_field(schema)
]
assert len(ALL) > 200


def message(schema: type, name: str, value: object) -> str:
    """What is said of the value of one field; the others hold nothing."""
    with pytest.raises(UserError) as error:
        check_fields(
            dict.fromkeys((each.name for each in fields(schema)), None) | {name: value},
            "group",
            schema,
        )
    return str(error.value)


@pytest.mark.parametrize("key,types,field,schema", ALL)
def test_what_is_just_outside_is_refused(key, types, field, schema):
    own = field.metadata.get(ALLOWED, TEXT)
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    check_fields(
        dict.fromkeys((each.name for each in fields(schema)), None) | {field.name: default},
        "group",
        schema,
    )
    listed = isinstance(default, list)
    if types & {int, float} and dict not in types:
        assert own.names is None and own.pattern is None and -inf < own.low < own.high < inf, (
            f"{key} has no bounds"
        )
        step = (lambda x, to: x + (1 if to > x else -1)) if int in types else nextafter
        outside = [
            own.low if own.above else step(own.low, -inf),
            own.high if own.below else step(own.high, inf),
        ]
        inside = [
            step(own.low, inf) if own.above else own.low,
            step(own.high, -inf) if own.below else own.high,
        ]
        outside += [nan, inf, -inf] if float in types else []
        for value in outside:
            said = message(schema, field.name, [value] * 2 if listed else value)
            assert (
                f"group.{field.name}=" in said and "a number " in said and ", such as " in said
            ), said
        for value in inside:
            entries = [value] * max(1, own.entries[0])
            check_fields(
                dict.fromkeys((each.name for each in fields(schema)), None) | {field.name: entries},
                "group",
                schema,
            )
    elif str in types and dict not in types:
        if own.names is None:
            for value in ["a\0b", "x" * 1_000_001, *(["x" * 256] if own is TEXT else [])]:
                assert f"group.{field.name}=" in message(
                    schema, field.name, [value] if listed else value
                )
        else:
            said = message(schema, field.name, ["banana"] if listed else "banana")
            assert (
                f"group.{field.name}" in said
                and "banana" in said
                and all(name in said for name in own.names)
            )
    else:
        assert bool in types or key in OPEN, f"{key}: nothing is checked"


@pytest.mark.parametrize(
    "key,types,field,schema",
    [own for own in ALL if own.values[2].metadata.get(ALLOWED, TEXT).entries[0]],
)
def test_empty_lists_are_refused_where_a_stage_would_have_nothing_to_do(key, types, field, schema):
    assert f"group.{field.name}=[]: give" in message(schema, field.name, [])


def test_lists_of_what_is_done_may_not_be_empty():
    entries = {own.values[0]: own.values[2].metadata.get(ALLOWED, TEXT).entries[0] for own in ALL}
    work = (
        "evaluation.methods",
        "evaluation.settings",
        "traces.settings",
        "traces.verifiers",
        "selector.verifiers",
    )
    assert all(entries[key] == 1 for key in (*work, "selector.tables", "latency.contexts"))


def test_a_name_inside_a_dictionary_is_in_the_key():
    config = Config()
    from nde_talf.data.text.settings import Corpus, PromptPart, PromptSet

    config.data.mix = {"code": Corpus(draft_fraction=nan)}
    with pytest.raises(
        UserError, match=r"data\.mix\.code\.draft_fraction=nan: it must be a number from 0 to 1"
    ):
        check_fields(config)
    config.data.mix = {}
    config.data.sets = {"mine": PromptSet(parts=[PromptPart("x" * 300, "{a}")])}
    with pytest.raises(
        UserError,
        match=(
            r"data\.sets\.mine\.parts\[0\]\.source=x+\.\.\. \(300 characters\): it must be a text"
        ),
    ):
        check_fields(config)
    config.data.sets = {"x" * 300: PromptSet()}
    with pytest.raises(UserError, match=r"data\.sets\.NAME=x+"):
        check_fields(config)


def test_the_message_of_every_kind():
    from dataclasses import dataclass, field

    @dataclass
    class Settings:
        rate: float = number(0.1, 0, 1, above=True)
        count: int = number(None, 2, SEED, example=5)
        kind: str = choice("a", ("a", "b"))
        parts: list[int] = number([1, 2], 1, 9, entries=(2, 2))
        text: str = allowed("x", LONG_TEXT)
        free: str = field(default="y")

    def said(**given):
        with pytest.raises(UserError) as error:
            check_fields(Settings(**given), "own")
        return str(error.value)

    assert (
        said(rate=0.0)
        == "own.rate=0.0: it must be a number above 0 and at most 1, such as own.rate=0.1."
    )
    assert (
        said(count=1) == f"own.count=1: it must be a number from 2 to {SEED}, such as own.count=5."
    )
    assert said(kind="d") == "own.kind=d: there is none; choose from a, b."
    assert (
        said(parts=[1])
        == "own.parts=[1]: give 2 of them, each a number from 1 to 9, such as own.parts=[1, 2]."
    )
    assert (
        said(parts=[0, 1])
        == "own.parts=[0, 1]: each must be a number from 1 to 9, such as own.parts=[1, 2]."
    )
    assert "own.free=zz" in said(free="z" * 256)
