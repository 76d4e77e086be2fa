"""The public page of a run as files, for any web host: a page without scripts, and its content as JSON.

Nothing in them needs a server, or the place at which they lie. Readers find no address of anybody. Each file
is replaced as a whole, the page last, so a visitor sees an old or a new one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from coordinator.ops.dashboard.about import About, read_about, samples_text
from coordinator.ops.dashboard.queries import Record, shown
from coordinator.store.history import SqliteHistory
from coordinator.store.history_answers import Credit, Page
from coordinator.store.history_file import HISTORY_FILE
from coordinator.store.history_writer import write_events
from coordinator.store.log_copy import first_state, opened_copy, status_after
from protocol.status import RunStatus
from protocol.trust.private_file import write_whole
from protocol.trust.public_name import name_as_text
from protocol.wire.run_page import PATH, RUN_PAGE, RunPage

SITE_VERSION = 1
"""`hetnode_site` of run.json: grows when a field is renamed, removed or changes its meaning."""
JSON_FILE, PAGE_FILE = "run.json", "index.html"
_STATIC = ("dashboard.css", "mark.svg")
_FIGURES = ("nodes", "stage_tokens", "stage_rounds", "last_round")
_MOST_PEOPLE, _MOST_SHOWN, _MOST_LOSSES, _MOST_EVALUATIONS = 1000, 100, 500, 64
_WIDTH, _HEIGHT = 800, 220


def write_site(folder: Path, out: Path, page: RunPage | None) -> Record:
    """Write the page of the run whose coordinator has `folder`, running or not, to `out`. Returns its JSON.

    `page` is what the coordinator publishes, which tells how to join; None where it publishes nothing, or is
    not here. Other files in `out` stay. Raises HetnodeError STORE_CORRUPT; OSError.
    """
    about = read_about(folder)
    with opened_copy(folder) as (spec, store), TemporaryDirectory(prefix="hetnode-site-") as place:
        path = Path(place, HISTORY_FILE)
        events = enumerate(store.events(), start=1)
        state = write_events(path, first_state(folder, spec), events, folder / "metrics.jsonl")
        status = status_after(folder, state)
        if not about.samples:
            about = replace(about, samples=samples_text(status.evaluations))
        record = _record(status, SqliteHistory(path), about, page)
    found = {f"static/{name}": (files(__package__) / "static" / name).read_bytes() for name in _STATIC}
    found[JSON_FILE] = json.dumps(record, allow_nan=False, indent=1).encode()
    if page is not None:
        found[PATH.lstrip("/")] = RUN_PAGE.encode(page)
    for name, content in (found | {PAGE_FILE: _rendered(record, about).encode()}).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(out / name, content)
    return record


def _record(status: RunStatus, history: SqliteHistory, about: About, page: RunPage | None) -> Record:
    credits, losses = history.credits(page=Page(0, _MOST_PEOPLE)), history.losses(most=_MOST_LOSSES)
    measured = [each.validation_loss for each in losses if each.validation_loss is not None]
    return {
        "hetnode_site": SITE_VERSION,
        "run": status.run,
        "spec_hash": status.spec.hash,
        "title": about.title or status.spec.name,
        "description": about.description,
        "time": status.time,
        "phase": status.phase.value,
        "rounds_decided": status.rounds_decided,
        "rounds": status.spec.rounds,
        "parameters": status.parameters,
        "tokens": status.tokens_committed,
        "validation_loss": measured[-1] if measured else None,
        "losses": [[each.round_number, each.validation_loss] for each in losses],
        "invite": page.invite if page else "",
        "contact": page.contact if page else "",
        "contributors": credits.owners,
        "stage_tokens": credits.stage_tokens,
        "people": [_person(each) for each in credits.credits],
        "evaluations": [
            {"round": each.round_number, "name": shown(each.name), "figures": dict(each.figures)}
            for each in status.evaluations[:_MOST_EVALUATIONS]
        ],
        "samples": about.samples,
        "downloads": [asdict(each) for each in about.downloads],
    }


def _person(credit: Credit) -> Record:
    figures = {name: getattr(credit, name) for name in _FIGURES}
    whose = {"id": credit.owner or credit.peer, "is_owner": bool(credit.owner)}
    return {**whose, "name": name_as_text(credit.name), **figures}


def _rendered(record: Record, about: About) -> str:
    escape, loader = select_autoescape(default=True), PackageLoader(__package__)
    templates = Environment(loader=loader, autoescape=escape, undefined=StrictUndefined)
    values: dict[str, Any] = {
        **record,
        "people": record["people"][:_MOST_SHOWN],
        "line": _line([each for each in record["losses"] if each[1] is not None]),
        "updated": datetime.fromtimestamp(record["time"], UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "about": replace(about, title=""),  # the page has it as its heading
        "front": None,
        "run": record["title"],
        "run_id": record["run"],
        "home": PAGE_FILE,
        "static": "static",
        "version": "",
        "published": False,
        "size": (_WIDTH, _HEIGHT),
    }
    return templates.get_template("site.html").render(values)


def _line(losses: list[tuple[int, float]]) -> Record | None:
    """The losses by round as points of a line, with their bounds; None where there are not two."""
    if len(losses) < 2:
        return None
    rounds, values = zip(*losses, strict=True)
    first, most = rounds[0], max(values)
    width, height = max(1, rounds[-1] - first), most - min(values) or 1.0
    points = (
        f"{(number - first) / width * _WIDTH:.1f},{(most - loss) / height * _HEIGHT:.1f}"
        for number, loss in losses
    )
    return {
        "points": " ".join(points),
        "first": first,
        "last": rounds[-1],
        "least": min(values),
        "most": most,
    }
