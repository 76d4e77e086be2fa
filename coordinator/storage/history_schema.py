"""The tables of ``history.sqlite``, and the statements that write each kind of row.

The file is derived from the event log and the metrics file, so there are no migrations: whoever changes a
table, a row or what RowBuilder makes of an event increases HISTORY_VERSION, and the coordinator writes the
file anew at its next start.
"""

from __future__ import annotations

from coordinator.history import rows
from coordinator.history.rows import Row

HISTORY_FILE = "history.sqlite"
"""In the folder of the coordinator."""
HISTORY_ID = 0x68746869
"""'hthi', in the header of the SQLite file."""
HISTORY_VERSION = 3
"""`PRAGMA user_version` of the file."""

# Times are Unix times in milliseconds, durations milliseconds. `peer` is the number of a peer. The tables
# that grow with rounds times members have the order in which pages read them, and no more indices than that.
TABLES = (
    "CREATE TABLE run (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), run TEXT NOT NULL,"
    " spec TEXT NOT NULL, stages INTEGER NOT NULL, rounds INTEGER NOT NULL,"
    " sequence INTEGER NOT NULL DEFAULT 0, at INTEGER NOT NULL DEFAULT 0,"
    " measured INTEGER NOT NULL DEFAULT 0,"  # bytes of the metrics file that are in here
    " builder BLOB,"  # what makes rows, as it was between two rounds
    " committed INTEGER NOT NULL DEFAULT 0, aborted INTEGER NOT NULL DEFAULT 0,"
    " tokens INTEGER NOT NULL DEFAULT 0, stage_tokens INTEGER NOT NULL DEFAULT 0, finished_at INTEGER,"
    " link_bytes INTEGER NOT NULL DEFAULT 0, link_bytes_dense INTEGER NOT NULL DEFAULT 0,"
    " payload_bytes INTEGER NOT NULL DEFAULT 0, payload_bytes_dense INTEGER NOT NULL DEFAULT 0)",
    "CREATE TABLE peers (number INTEGER PRIMARY KEY, peer TEXT NOT NULL UNIQUE, role TEXT NOT NULL,"
    " is_here INTEGER NOT NULL DEFAULT 0, sessions INTEGER NOT NULL DEFAULT 0,"
    " strikes INTEGER NOT NULL DEFAULT 0, failures INTEGER NOT NULL DEFAULT 0, first_at INTEGER NOT NULL,"
    " last_at INTEGER NOT NULL, last_change TEXT NOT NULL DEFAULT '',"
    " last_sequence INTEGER NOT NULL DEFAULT 0, stage_tokens INTEGER NOT NULL DEFAULT 0,"
    " stage_rounds INTEGER NOT NULL DEFAULT 0, payload_bytes INTEGER NOT NULL DEFAULT 0,"
    " link_bytes INTEGER NOT NULL DEFAULT 0, first_round INTEGER NOT NULL DEFAULT 0,"
    " last_round INTEGER NOT NULL DEFAULT 0, credit_sequence INTEGER NOT NULL DEFAULT 0)",
    "CREATE TABLE sessions (peer INTEGER NOT NULL, joined_sequence INTEGER NOT NULL,"
    " joined_at INTEGER NOT NULL, role TEXT NOT NULL, device TEXT NOT NULL, reachability TEXT,"
    " left_at INTEGER, left_sequence INTEGER NOT NULL DEFAULT 0, ending TEXT NOT NULL DEFAULT '',"
    " reason TEXT NOT NULL DEFAULT '', PRIMARY KEY (peer, joined_sequence)) WITHOUT ROWID",
    "CREATE TABLE changes (peer INTEGER NOT NULL, sequence INTEGER NOT NULL, at INTEGER NOT NULL,"
    " round INTEGER NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,"
    " PRIMARY KEY (peer, sequence)) WITHOUT ROWID",
    "CREATE TABLE estimates (peer INTEGER NOT NULL, sequence INTEGER NOT NULL, at INTEGER NOT NULL,"
    " flops REAL, uplink REAL, downlink REAL, round_trip REAL, microbatch_seconds REAL,"
    " PRIMARY KEY (peer, sequence)) WITHOUT ROWID",
    "CREATE TABLE plans (epoch INTEGER PRIMARY KEY, sequence INTEGER NOT NULL, at INTEGER NOT NULL,"
    " from_round INTEGER NOT NULL, first_sample INTEGER NOT NULL, replicas INTEGER NOT NULL,"
    " members INTEGER NOT NULL, reason TEXT NOT NULL, body BLOB NOT NULL)",
    "CREATE TABLE rounds (round INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, began_at INTEGER NOT NULL,"
    " began_sequence INTEGER NOT NULL, restarts INTEGER NOT NULL DEFAULT 0, decided_at INTEGER,"
    " tokens INTEGER NOT NULL DEFAULT 0)",
    "CREATE TABLE stage_rounds (round INTEGER NOT NULL, stage INTEGER NOT NULL, outcome INTEGER NOT NULL,"
    " decided_at INTEGER, decided_sequence INTEGER NOT NULL, first_offer_at INTEGER, closed_at INTEGER,"
    " closed_sequence INTEGER NOT NULL, gather INTEGER NOT NULL, last_report_at INTEGER,"
    " contested INTEGER NOT NULL, offered INTEGER NOT NULL, counted INTEGER NOT NULL,"
    " payload_bytes INTEGER NOT NULL, tokens INTEGER NOT NULL, reason TEXT,"
    " PRIMARY KEY (round, stage)) WITHOUT ROWID",
    # The reason is NULL where it is that of the decision.
    "CREATE TABLE contributions (round INTEGER NOT NULL, stage INTEGER NOT NULL, peer INTEGER NOT NULL,"
    " replica INTEGER NOT NULL, standing INTEGER NOT NULL, offered_at INTEGER,"
    " offered_sequence INTEGER NOT NULL DEFAULT 0, reported_at INTEGER,"
    " reported_sequence INTEGER NOT NULL DEFAULT 0, held INTEGER NOT NULL DEFAULT 0,"
    " weight REAL NOT NULL DEFAULT 0, nbytes INTEGER NOT NULL DEFAULT 0, tokens INTEGER NOT NULL DEFAULT 0,"
    " reason TEXT DEFAULT '', reason_sequence INTEGER NOT NULL DEFAULT 0, cosine REAL, norm REAL,"
    " PRIMARY KEY (round, stage, peer)) WITHOUT ROWID",
    "CREATE INDEX contributions_of_peer ON contributions (peer, round, stage)",
    "CREATE TABLE measurements (round INTEGER NOT NULL, replica INTEGER NOT NULL, position INTEGER NOT NULL,"
    " peer INTEGER NOT NULL, at INTEGER NOT NULL, is_last INTEGER NOT NULL, train_loss REAL,"
    " validation_loss REAL, tokens INTEGER NOT NULL, inner INTEGER NOT NULL, outer INTEGER NOT NULL,"
    " compute INTEGER NOT NULL, gradient_norm REAL, steps INTEGER NOT NULL, extra_steps INTEGER NOT NULL,"
    " microbatches INTEGER NOT NULL, link_bytes INTEGER NOT NULL, link_bytes_dense INTEGER NOT NULL,"
    " payload_bytes INTEGER NOT NULL, payload_bytes_dense INTEGER NOT NULL, progress_norm REAL,"
    " error_norm REAL, PRIMARY KEY (round, replica, position, peer)) WITHOUT ROWID",
    "CREATE UNIQUE INDEX measurements_of_peer ON measurements (peer, round)",
    # Sums of the measurements, kept up to date: pages need them of all rounds.
    "CREATE TABLE replicas (replica INTEGER PRIMARY KEY, epoch INTEGER NOT NULL DEFAULT 0,"
    " members TEXT NOT NULL DEFAULT '', first_round INTEGER, last_round INTEGER, validation_loss REAL,"
    " train_loss REAL, newest_tokens INTEGER NOT NULL DEFAULT 0, newest_time INTEGER NOT NULL DEFAULT 0,"
    " tokens INTEGER NOT NULL DEFAULT 0, link_bytes INTEGER NOT NULL DEFAULT 0,"
    " link_bytes_dense INTEGER NOT NULL DEFAULT 0, payload_bytes INTEGER NOT NULL DEFAULT 0,"
    " payload_bytes_dense INTEGER NOT NULL DEFAULT 0)",
    "CREATE TABLE replica_rounds (replica INTEGER NOT NULL, round INTEGER NOT NULL, at INTEGER NOT NULL,"
    " validation_loss REAL, train_loss REAL, members INTEGER NOT NULL DEFAULT 0,"
    " link_bytes INTEGER NOT NULL DEFAULT 0, link_bytes_dense INTEGER NOT NULL DEFAULT 0,"
    " payload_bytes INTEGER NOT NULL DEFAULT 0, payload_bytes_dense INTEGER NOT NULL DEFAULT 0,"
    " PRIMARY KEY (replica, round)) WITHOUT ROWID",
    "CREATE TABLE round_figures (round INTEGER PRIMARY KEY, at INTEGER NOT NULL,"
    " members INTEGER NOT NULL DEFAULT 0, losses INTEGER NOT NULL DEFAULT 0,"
    " validation_sum REAL NOT NULL DEFAULT 0, least REAL, greatest REAL,"
    " train_losses INTEGER NOT NULL DEFAULT 0, train_sum REAL NOT NULL DEFAULT 0,"
    " link_bytes INTEGER NOT NULL DEFAULT 0, link_bytes_dense INTEGER NOT NULL DEFAULT 0,"
    " payload_bytes INTEGER NOT NULL DEFAULT 0, payload_bytes_dense INTEGER NOT NULL DEFAULT 0)",
)


def _insert(table: str, columns: str, replace: str = "") -> str:
    marks = ", ".join("?" for _ in columns.split(","))
    return f"INSERT {replace}INTO {table} ({columns}) VALUES ({marks})"


_CONTRIBUTION = " WHERE round = ? AND stage = ? AND peer = ?"

STATEMENTS: dict[type[Row], tuple[str, ...]] = {
    rows.PeerAdded: (
        "INSERT INTO peers (number, peer, role, first_at, last_at) VALUES (?1, ?2, ?3, ?4, ?4)",
    ),
    rows.PeerChanged: (_insert("changes", "peer, sequence, at, round, kind, text", "OR REPLACE "),),
    rows.PeerNow: (
        "UPDATE peers SET role = coalesce(?, role), is_here = coalesce(?, is_here), sessions = sessions + ?,"
        " strikes = strikes + ?, failures = failures + ?, last_at = ?, last_change = ?, last_sequence = ?"
        " WHERE number = ?",
    ),
    rows.SessionBegun: (_insert("sessions", "peer, joined_sequence, joined_at, role, device, reachability"),),
    rows.SessionEnded: (
        "UPDATE sessions SET left_at = ?, left_sequence = ?, ending = ?, reason = ?"
        " WHERE peer = ? AND left_at IS NULL",
    ),
    rows.Estimated: (
        _insert("estimates", "peer, sequence, at, flops, uplink, downlink, round_trip, microbatch_seconds"),
    ),
    rows.PlanAdded: (
        _insert("plans", "epoch, sequence, at, from_round, first_sample, replicas, members, reason, body"),
    ),
    rows.ReplicaPlanned: (
        f"{_insert('replicas', 'replica, epoch, members')}"
        " ON CONFLICT (replica) DO UPDATE SET epoch = excluded.epoch, members = excluded.members",
    ),
    rows.RoundBegun: (
        f"{_insert('rounds', 'round, epoch, began_at, began_sequence')} ON CONFLICT (round) DO UPDATE SET"
        " epoch = excluded.epoch, began_at = excluded.began_at, began_sequence = excluded.began_sequence,"
        " restarts = restarts + 1",
    ),
    rows.RoundVoid: (
        "DELETE FROM contributions WHERE round = ?",
        "DELETE FROM stage_rounds WHERE round = ?",
    ),
    rows.StageRoundNow: (
        _insert(
            "stage_rounds",
            "round, stage, outcome, decided_at, decided_sequence, first_offer_at, closed_at, closed_sequence,"
            " gather, last_report_at, contested, offered, counted, payload_bytes, tokens, reason",
            "OR REPLACE ",
        ),
    ),
    rows.Offered: (
        _insert(
            "contributions",
            "round, stage, peer, replica, standing, offered_at, offered_sequence, weight, nbytes",
            "OR REPLACE ",
        ),
    ),
    rows.Reported: (
        f"UPDATE contributions SET reported_at = ?, reported_sequence = ?, held = ?{_CONTRIBUTION}",
    ),
    rows.Counted: (f"UPDATE contributions SET standing = {rows.COUNTED}, tokens = ?{_CONTRIBUTION}",),
    rows.Credited: (
        "UPDATE peers SET stage_tokens = stage_tokens + ?, stage_rounds = stage_rounds + 1,"
        " payload_bytes = payload_bytes + ?,"
        " first_round = CASE first_round WHEN 0 THEN ? ELSE first_round END,"
        " last_round = ?, credit_sequence = ? WHERE number = ?",
    ),
    rows.LeftOut: (
        f"UPDATE contributions SET standing = {rows.LEFT_OUT}, reason = ?, reason_sequence = ?"
        f"{_CONTRIBUTION}",
    ),
    rows.Missed: (
        "INSERT OR REPLACE INTO contributions"
        " (round, stage, peer, replica, standing, reason, reason_sequence)"
        f" VALUES (?, ?, ?, ?, {rows.MISSING}, ?, ?)",
    ),
    rows.Agreed: (f"UPDATE contributions SET cosine = ?, norm = ?{_CONTRIBUTION} AND norm IS NULL",),
    rows.Decided: (
        "UPDATE run SET committed = committed + ?, aborted = aborted + ?, tokens = tokens + ?,"
        " stage_tokens = stage_tokens + ?",
    ),
    rows.RoundTokens: ("UPDATE rounds SET tokens = ? WHERE round = ?",),
    rows.RoundDecided: ("UPDATE rounds SET decided_at = ? WHERE round = ?",),
    rows.Finished: ("UPDATE run SET finished_at = ?",),
}
"""By kind of row, what it changes. Each statement binds all fields of the row."""

MEASURED = (
    _insert(
        "measurements",
        "round, replica, position, peer, at, is_last, train_loss, validation_loss, tokens, inner, outer,"
        " compute, gradient_norm, steps, extra_steps, microbatches, link_bytes, link_bytes_dense,"
        " payload_bytes, payload_bytes_dense, progress_norm, error_norm",
    )
    + " ON CONFLICT DO NOTHING"
)
"""Adds a measurement, unless its peer has measured that round before."""

_SUMS = ("link_bytes", "link_bytes_dense", "payload_bytes", "payload_bytes_dense")
_ADD = ", ".join(f"{name} = {name} + excluded.{name}" for name in _SUMS)
_BYTES = ", ".join(_SUMS)
_VALUES = ", ".join(f":{name}" for name in _SUMS)
MEASUREMENT_SUMS = (
    "UPDATE run SET " + ", ".join(f"{name} = {name} + :{name}" for name in _SUMS),
    "UPDATE peers SET link_bytes = link_bytes + :link_bytes WHERE number = :peer",
    "INSERT INTO replicas (replica, first_round, last_round, validation_loss, train_loss, newest_tokens,"
    f" newest_time, tokens, {_BYTES}) VALUES (:replica, :round_number, :round_number, :validation_loss,"
    f" :train_loss, :tokens, :is_last * (:inner + :outer), :tokens, {_VALUES})"
    " ON CONFLICT (replica) DO UPDATE SET"
    " first_round = min(coalesce(first_round, excluded.first_round), excluded.first_round),"
    " last_round = max(coalesce(last_round, excluded.last_round), excluded.last_round),"
    " validation_loss = iif(:is_last, excluded.validation_loss, validation_loss),"
    " train_loss = iif(:is_last, excluded.train_loss, train_loss),"
    " newest_tokens = iif(:is_last, excluded.newest_tokens, newest_tokens),"
    " newest_time = iif(:is_last, excluded.newest_time, newest_time),"
    f" tokens = tokens + excluded.tokens, {_ADD}",
    f"INSERT INTO replica_rounds (replica, round, at, validation_loss, train_loss, members, {_BYTES})"
    f" VALUES (:replica, :round_number, :at, :validation_loss, :train_loss, 1, {_VALUES})"
    " ON CONFLICT (replica, round) DO UPDATE SET"
    " at = iif(:is_last, excluded.at, at),"
    " validation_loss = iif(:is_last, excluded.validation_loss, validation_loss),"
    f" train_loss = iif(:is_last, excluded.train_loss, train_loss), members = members + 1, {_ADD}",
    "INSERT INTO round_figures (round, at, members, losses, validation_sum, least, greatest, train_losses,"
    f" train_sum, {_BYTES}) VALUES (:round_number, :at, 1, :validation_loss IS NOT NULL,"
    " coalesce(:validation_loss, 0), :validation_loss, :validation_loss, :train_loss IS NOT NULL,"
    f" coalesce(:train_loss, 0), {_VALUES}) ON CONFLICT (round) DO UPDATE SET"
    " at = max(at, excluded.at), members = members + 1, losses = losses + excluded.losses,"
    " validation_sum = validation_sum + excluded.validation_sum,"
    " least = min(coalesce(least, excluded.least), coalesce(excluded.least, least)),"
    " greatest = max(coalesce(greatest, excluded.greatest), coalesce(excluded.greatest, greatest)),"
    " train_losses = train_losses + excluded.train_losses, train_sum = train_sum + excluded.train_sum,"
    f" {_ADD}",
)
"""What a measurement that was added changes elsewhere; the parameters are its fields by name."""

PROGRESS = (
    "UPDATE run SET sequence = iif(?1, ?1, sequence), at = iif(?2, ?2, at), measured = iif(?3, ?3, measured)"
)
"""How far the history is: 0 changes nothing."""
KEEP_BUILDER = "UPDATE run SET builder = ?"
BEGIN_RUN = "INSERT INTO run (only_row, run, spec, stages, rounds) VALUES (1, ?, ?, ?, ?)"
