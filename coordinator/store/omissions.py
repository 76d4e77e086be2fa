"""Why payloads were not counted, in sentences."""

from __future__ import annotations

from coordinator.base.phrases import counted, short
from coordinator.store.history_tables import Contribution, Kind, Omission, Standing


def why_not(part: Contribution, decision: str = "") -> str:
    """A sentence: why a payload was not counted; "" if it was, or while the round is open."""
    if part.cause is None or part.cause == Omission.DECISION:
        return decision if part.cause else ""
    if part.standing == Standing.MISSING:
        lacked = "" if part.culprit in (None, part.peer) else f"its replica lacked {short(part.culprit)}: "
        return f"{lacked}{part.detail or _WHY_NOT[part.cause]}"
    by = counted(part.rejections or 1, "member")
    return _WHY_NOT[part.cause].format(by=by, detail=part.detail)


_WHY_NOT: dict[str, str] = {
    Omission.UNHELD: "too few members of the group hold its payload",
    Omission.NO_OFFER: "no offer came before the round closed",
    Kind.REJECTED: "{by} of the group rejected its payload: {detail}",
    Kind.ARBITRATED: "the coordinator could not use its payload: {detail}",
    Kind.WEIGHED: "its payloads count for nothing until they agree with the others and copy none",
    Kind.DIVERGED: "its payload starts from another anchor than those of the others",
}
