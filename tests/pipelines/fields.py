"""All fields of a configuration."""

from dataclasses import fields, is_dataclass
from typing import get_args, get_origin, get_type_hints

from nde_talf.decoding.common.schema import OPTIONS


def every_field(schema: type, group: str = ""):
    """(key, types in its annotation, field, dataclass) of all fields that hold no dataclass."""
    types = get_type_hints(schema)
    for each in fields(schema):
        key, own = f"{group}.{each.name}" if group else each.name, types[each.name]
        if each.metadata.get(OPTIONS):
            for option in each.metadata[OPTIONS].values():
                yield from every_field(option, key)
            continue
        parts = {own, *get_args(own)}
        if inner := next(filter(is_dataclass, parts), None):
            yield from every_field(inner, f"{key}.NAME" if get_origin(own) in (dict, list) else key)
        else:
            yield key, {part for one in parts for part in (one, *get_args(one))}, each, schema
