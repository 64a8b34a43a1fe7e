"""Griffe extension of the documentation site: a shape such as [contexts][nodes] in a docstring is
no Markdown link.
"""

from typing import Any

from griffe import Extension, Object


class Shapes(Extension):
    """Escapes the brackets, outside of `code`."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring:
            parts = obj.docstring.value.split("`")
            obj.docstring.value = "`".join(
                part if at % 2 else part.replace("][", "]\\[") for at, part in enumerate(parts)
            )
