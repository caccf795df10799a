"""The page docs/models.md: what came of every entry of the net."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from changes import SINGLE, UNTRIED
from families import TABLES

Records = dict[str, dict[str, dict[str, Any]]]  # of an entry, by schedule
SCHEDULES = ("1f1b", "zb-h1")
KINDS = {
    "net": "Networks for images, of our own", "masked": "Masked language models", "causal": "Causal language models",
    "seq2seq": "Text to text", "speech": "Speech to text", "letters": "Speech to letters (CTC)",
    "sounds": "Classes of sounds", "images": "Classes of images", "segments": "Segmentation", "depths": "Depth",
    "videos": "Classes of videos",
}  # fmt: skip
HEAD = """# Models that train

Models that nothing here was written for, each trained as a pipeline of 2 stages beside plain training: every family of
the `transformers` library, {version}, that trains on words, images or sound and can be built from a tiny configuration
with random weights, and networks for images as image libraries have them. `make zoo` runs it and writes this page (it
goes on where it was stopped; `tests/wide` holds the script). `make test` runs a sample.

How: three steps of AdamW over batches of two shapes, words and sound padded to different lengths in every row; 2
micro-batches; by 1f1b and by zb-h1; all in one process (inline) and on 2 ranks. In float64, and held against plain
training on whole batches. Where that is farther than 1e-10, because the library computes some of it in float32 or the
model normalises over its batch, against plain training in the same micro-batches. *Farthest* is the largest distance of
any weight or buffer, and *exact* is at most 1e-8, while weights move by about 3e-3: where a gradient is nearly nothing,
AdamW divides rounding by it. Dropout, jitter and masks in time are off. The loss is outside the model. Models that take
words and something else besides are given the words alone where they allow it.

In float32, against micro-batches and to 1e-6, since they convert weights in forward or overflow in float64: {single}.

{counts}
"""


def table(names: list[str], inline: Records, ranks: Records) -> str:
    """The whole page."""
    import transformers

    ways = {"inline": inline, "2 ranks": ranks}
    tried = [name for name in names if not is_untried(name, ways)]
    single = ", ".join(f"`{name}`" for name in SINGLE)
    page = [HEAD.format(version=transformers.__version__, single=single, counts="\n".join(counts(names, tried, ways)))]
    for kind, title in KINDS.items():
        rows = [row(name, ways) for name in tried if name.startswith(f"{kind} ")]
        head = ["| model | inline | 2 ranks | held against | farthest |", "|---|---|---|---|---|"]
        page.append("\n".join([f"## {title}", "", *head, *rows, ""]) if rows else "")
    page.append("\n".join(why_not(names, ways)))
    return "\n".join(filter(None, page))


def outcomes(name: str, way: Records) -> dict[str, str]:
    return {schedule: record["outcome"] for schedule, record in way.get(name, {}).items() if schedule in SCHEDULES}


def is_untried(name: str, ways: dict[str, Records]) -> bool:
    given = {outcome for way in ways.values() for outcome in outcomes(name, way).values()}
    return not given - {"not tried"}


def counts(names: list[str], tried: list[str], ways: dict[str, Records]) -> Iterator[str]:
    families = sum(not name.startswith("net ") for name in tried)
    yield f"{len(tried)} models: {families} families of transformers and {len(tried) - families} networks of our own."
    yield f"{len(names) - len(tried)} families were not tried; the reasons are at the end."
    yield ""
    yield "| | schedule | trains exactly | refused | fails | wrong | not run |"
    yield "|---|---|---|---|---|---|---|"
    for title, way in ways.items():
        for schedule in SCHEDULES:
            found = Counter(outcomes(name, way).get(schedule, "not run") for name in tried)
            cells = [found[one] for one in ("exact", "refused", "failed", "wrong")]
            yield f"| {title} | {schedule} | " + " | ".join(map(str, [*cells, found["not run"]])) + " |"


def row(name: str, ways: dict[str, Records]) -> str:
    records = [record for way in ways.values() for record in way.get(name, {}).values() if "off" in record]
    against = " and ".join(sorted({record["against"] for record in records}, reverse=True))
    off = f"{max(record['off'] for record in records):.0e}" if records else ""
    cells = [cell(outcomes(name, way)) for way in ways.values()]
    return f"| {name.partition(' ')[2]} | {cells[0]} | {cells[1]} | {against} | {off} |"


def cell(found: dict[str, str]) -> str:
    if len(found) == len(SCHEDULES) and len(set(found.values())) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{schedule} {outcome}" for schedule, outcome in sorted(found.items())) or "not run"


def why_not(names: list[str], ways: dict[str, Records]) -> Iterator[str]:
    for wanted, title in (("refused", "Refused"), ("failed", "Fails"), ("wrong", "Wrong"), ("not tried", "Not tried")):
        rows = list(_reasons(names, ways, wanted))
        yield f"## {title}\n\n" + ("| model | why |\n|---|---|\n" + "\n".join(rows) if rows else "None.") + "\n"


def _reasons(names: list[str], ways: dict[str, Records], wanted: str) -> Iterator[str]:
    for name in names:
        if wanted == "not tried" and not is_untried(name, ways):
            continue
        said = [record for way in ways.values() for record in way.get(name, {}).values() if record["outcome"] == wanted]
        if said:
            why = reason(said[0].get("said") or said[0].get("farthest", ""))
            yield f"| {name} | {UNTRIED.get(name.partition(' ')[2], why) if wanted == 'not tried' else why} |"


def reason(said: str) -> str:
    """One line without places of this machine."""
    needs = re.search(r"requires the (\S+) library", said)
    if needs:
        return f"needs the package {needs[1]}"
    line = re.sub(r"/\S*/(site-packages|tests)/", "", " ".join(said.split()))
    return line.replace("|", "\\|")[:240]


assert set(KINDS) == {"net", *TABLES}
