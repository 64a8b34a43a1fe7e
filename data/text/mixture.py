"""Several corpora as one: text of several domains for one pair, and a draft that has seen more of
some than of others.
"""

import datasets

from nde_talf.data.text.corpus import by_hash, load_documents, load_rows
from nde_talf.data.text.row_template import RowTemplate
from nde_talf.data.text.settings import BUILT_IN, Corpus


def load_mixture(mix: dict[str, Corpus]) -> datasets.Dataset:
    """The documents of all corpora, with the columns name, text, kind (the corpus) and for_draft
    (the draft learns from it).

    Which documents are used, and which the draft learns from, depends on their names alone.

    Raises:
        UserError: a corpus cannot be read or does not fit its template.
    """
    return datasets.Dataset.from_list(
        [row for name, corpus in mix.items() for row in _documents(name, corpus)]
    )


def _documents(kind: str, corpus: Corpus) -> list[dict]:
    plain = corpus.source in BUILT_IN or corpus.source.endswith((".txt", ".md"))
    if plain or corpus.template == "{text}":
        documents = load_documents(corpus.source, split=corpus.split)
        pairs = list(zip(documents["name"], documents["text"], strict=True))
    else:
        table = load_rows(corpus.source, corpus.split)
        template = RowTemplate(corpus.template, corpus.source, f"data.mix.{kind}.template")
        template.check(list(table[0]) if len(table) else [])
        pairs = [
            (f"{kind}-{i}", text)
            for i, text in enumerate(map(template.render, table))
            if text.strip()
        ]
    pairs.sort(key=lambda pair: by_hash(f"take/{pair[0]}"))
    taken, size = [], 0
    for name, text in pairs:
        if corpus.characters is not None and size >= corpus.characters:
            break
        size += len(text)
        taken.append(
            {
                "name": name,
                "text": text,
                "kind": kind,
                "for_draft": by_hash(f"draft/{name}") < corpus.draft_fraction,
            }
        )
    return taken
