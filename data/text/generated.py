"""Text that the project makes itself: worked arithmetic and tables, the same on every machine.

Each kind mixes what a draft meets with different success. Set phrases are easy for any model. Facts
that are the same in every document (products, square roots, the catalogue) can be known by heart:
long stretches without a choice. Names and numbers of a single document (who buys what) can only be
guessed.

A document is a function of its name alone. So a split of the documents stays as it is when their
number changes.
"""

import random
from collections.abc import Callable
from functools import cache
from math import isqrt

NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Henry",
    "Ida",
    "Jonas",
    "Karin",
    "Leo",
]
CITIES = {
    city: country
    for country, cities in {
        "France": "Paris Lyon",
        "Italy": "Rome Turin",
        "Germany": "Berlin Bonn",
        "Norway": "Oslo Bergen",
        "Spain": "Madrid Seville",
        "Austria": "Vienna Graz",
    }.items()
    for city in cities.split()
}
ARTICLES = [
    "lamp",
    "chair",
    "table",
    "clock",
    "mirror",
    "shelf",
    "carpet",
    "stool",
    "basket",
    "candle",
    "bottle",
    "kettle",
]
COLOURS = ["red", "blue", "green", "white", "black", "yellow", "brown", "grey"]
FRUIT = ["apples", "pears", "plums", "cherries", "oranges", "lemons"]
MATERIALS = ["oak", "steel", "glass", "paper", "copper", "marble", "cotton", "leather"]
PARTS = [
    "two handles",
    "a lid",
    "three drawers",
    "a drawer",
    "four legs",
    "a mirror",
    "two wheels",
    "a golden frame",
]
ROOMS = ["kitchen", "garden", "hall", "office", "bedroom", "library", "cellar", "attic"]
CATALOGUE = 100
"""Articles of the catalogue, which a model can know by heart."""
ROOTS = [n for n in range(2, 16) if isqrt(n) ** 2 != n]
DIGITS = 12
"""Digits of a root after the point."""
PLACES = ["Ones", "Tens", "Hundreds", "Thousands"]
SECTIONS = 6
"""Sections of a document: problems, or tables."""
RIGHT = 0.85
"""Fraction of the products in a drill that are right."""
DOCUMENTS = 2000
"""Documents of each source."""


def arithmetic(name: str) -> str:
    """Products with a verdict, sums worked digit by digit, and stories of who has how many.

    Example of a section:

    Problem 3: add 4 8 and 7 5.
    Ones: 8 + 5 = 13. Write 3 and carry 1.
    Tens: 4 + 7 + 1 = 12. Write 2 and carry 1.
    The sum of 4 8 and 7 5 is 1 2 3.
    """
    return _document(name, (_drill, _drill, _drill, _sum, _story))


def tables(name: str) -> str:
    """Square roots, pages of a catalogue, tables with orders from them, and records.

    Example of a section:

    Table 5: square roots.

    | 6 | 2. 4 4 9 4 8 9 7 4 2 7 8 3 |
    | 5 | 2. 2 3 6 0 6 7 9 7 7 4 9 9 |
    """
    return _document(name, (_roots, _roots, _catalogue, _shop, _records))


@cache
def _shop_catalogue() -> list[str]:
    """The descriptions of all articles of the shop, which are the same in every document."""
    rng = random.Random("catalogue")
    return [
        f"{rng.choice(COLOURS)} {rng.choice(ARTICLES)} of {rng.choice(MATERIALS)} with"
        f" {rng.choice(PARTS)}, made in {rng.choice([*CITIES])} for the {rng.choice(ROOMS)} of"
        f" {rng.choice(NAMES)}"
        for _ in range(CATALOGUE)
    ]


GENERATED: dict[str, Callable[[str], str]] = {"arithmetic": arithmetic, "tables": tables}
"""Source name -> the text of a document by its name."""


def documents(source: str) -> list[tuple[str, str]]:
    """The (name, text) of all documents of a source of `GENERATED`, about 3 million characters."""
    names = [f"{source}-{index}" for index in range(DOCUMENTS)]
    return [(name, GENERATED[source](name)) for name in names]


def _document(name: str, kinds: tuple[Callable[[random.Random, int], list[str]], ...]) -> str:
    rng = random.Random(name)
    first = rng.randint(1, 80)
    sections = (rng.choice(kinds)(rng, first + number) for number in range(SECTIONS))
    return "\n".join("\n".join([*lines, ""]) for lines in sections)


def _drill(rng: random.Random, number: int) -> list[str]:
    lines = [f"Drill {number}: products."]
    for _ in range(rng.randint(8, 16)):
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        answer = a * b if rng.random() < RIGHT else rng.randint(2, 9) * rng.randint(2, 9)
        lines.append(f"{a} x {b} = {answer}, {'right' if answer == a * b else f'wrong: {a * b}'}.")
    return lines


def _sum(rng: random.Random, number: int) -> list[str]:
    size = rng.randint(2, len(PLACES))
    rows = [[rng.randint(1, 9) for _ in range(size)] for _ in range(2)]
    one, other = (" ".join(map(str, row)) for row in rows)
    digits: list[int] = []
    lines, carry = [f"Problem {number}: add {one} and {other}."], 0
    for place, a, b in zip(PLACES, reversed(rows[0]), reversed(rows[1]), strict=False):
        total = a + b + carry
        terms = f"{a} + {b} + 1" if carry else f"{a} + {b}"
        carry, digit = divmod(total, 10)
        digits.insert(0, digit)
        lines.append(f"{place}: {terms} = {total}. Write {digit} and carry {carry}.")
    result = " ".join(map(str, [1] * carry + digits))
    return [*lines, f"The sum of {one} and {other} is {result}."]


def _story(rng: random.Random, number: int) -> list[str]:
    one, other = rng.sample(NAMES, 2)
    fruit, has = rng.choice(FRUIT), {one: rng.randint(10, 20), other: rng.randint(10, 20)}

    def state() -> str:
        return f"{one} has {has[one]} {fruit} and {other} has {has[other]} {fruit}."

    lines = [f"Problem {number}: at the beginning {state()}"]
    for _ in range(rng.randint(2, 4)):
        giver, taker = rng.sample((one, other), 2)
        given = rng.randint(1, has[giver] // 2)
        has[giver] -= given
        has[taker] += given
        lines += [f"Then {giver} gives {given} {fruit} to {taker}.", f"After that {state()}"]
    return [*lines, f"Together they have {sum(has.values())} {fruit} all the time."]


def _shop(rng: random.Random, number: int) -> list[str]:
    rows = [
        (i, article, rng.choice(COLOURS), rng.randint(2, 60))
        for i, article in enumerate(rng.sample(ARTICLES, rng.randint(3, 5)), start=1)
    ]
    lines = [
        f"Table {number}: articles of the shop in {rng.choice([*CITIES])}.",
        "",
        "| number | article | colour | price |",
        "| --- | --- | --- | --- |",
        *(f"| {i} | {article} | {colour} | {price} |" for i, article, colour, price in rows),
        "",
    ]
    for order in range(1, rng.randint(3, 6)):
        i, article, colour, price = rng.choice(rows)
        lines.append(
            f"Order {order}: {rng.choice(NAMES)} buys {rng.randint(2, 9)} pieces of article {i}, "
            f"which is the {colour} {article} at a price of {price}."
        )
    return lines


def _catalogue(rng: random.Random, number: int) -> list[str]:
    articles = _shop_catalogue()
    first = rng.randrange(len(articles))
    chosen = [(first + i) % len(articles) for i in range(rng.randint(3, 8))]
    named = [f"Article {i + 1}: a {articles[i]}." for i in chosen]
    return [f"Page {number} of the catalogue.", *named]


def _roots(rng: random.Random, number: int) -> list[str]:
    lines = [f"Table {number}: square roots.", ""]
    for _ in range(rng.randint(8, 14)):
        n = rng.choice(ROOTS)
        digits = str(isqrt(n * 10 ** (2 * DIGITS)))
        lines.append(f"| {n} | {digits[:-DIGITS]}. {' '.join(digits[-DIGITS:])} |")
    return lines


def _records(rng: random.Random, number: int) -> list[str]:
    first = rng.randint(10, 90)
    lines = [f"List {number}: customers of the shop, one record a line.", ""]
    for identity, name in enumerate(rng.sample(NAMES, rng.randint(4, 8)), start=first):
        city = rng.choice([*CITIES])
        lines.append(
            f'{{"id": {identity}, "name": "{name}", "city": "{city}", "country": "{CITIES[city]}",'
            f' "language": "English", "mail": "{name.lower()}@example.org", "active":'
            f" {rng.choice(('true', 'false'))}}}"
        )
    return lines
