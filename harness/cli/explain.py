"""``assay explain``: the meaning of a known bug or another finding."""

from __future__ import annotations

from typing import Annotated

import typer

from assay.harness.cli.app import app, say
from assay.harness.errors import UsageError
from assay.harness.text import did_you_mean


@app.command()
def explain(
    id: Annotated[str | None, typer.Argument(help="The id of a finding; without one, all are listed.")] = None,
) -> None:
    """Explain a finding: what goes wrong, wrong and right code, public reports, and what to do."""
    from assay.reports.explain import explanation, titles

    kinds = titles()
    known = {known_id: title for kind in kinds.values() for known_id, title in kind.items()}
    if id is None:
        width = max(map(len, known))
        for heading, ids in kinds.items():
            say(f"{heading}:")
            for known_id, title in ids.items():
                say(f"  {known_id:<{width}}  {title}")
        return
    if id not in known:
        hint = did_you_mean(id, [*known]) or "assay explain lists them"
        raise UsageError(f"There is no known bug or finding {id!r}.", "the id of one", hint)
    say(explanation(id))
