"""Decode speculatively with the draft and the selector of this folder; the law of the text stays
the same.
"""

try:
    from nde_talf import generate_from
except ImportError as error:
    raise ImportError(
        "This needs the package nde_talf: see requirements.txt beside this file."
    ) from error


def generate(model, **arguments):
    return generate_from(model, **arguments)
