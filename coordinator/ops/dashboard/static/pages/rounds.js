// The rounds, the newest first.
import { badge, card, el, show, table } from "../dom.js";
import * as f from "../format.js";
import { get, now, onRun } from "../live.js";

const page = document.getElementById("page");
const list = el("div");
page.append(list);
const given = Number(new URLSearchParams(location.search).get("before")) || 0;
const KINDS = { open: "", committed: "good", aborted: "bad", skipped: "" };

function outcome(round, stages, restored) {
  if (round.round_number in restored) return badge(`rollback to ${restored[round.round_number]}`, "wait");
  const counts = {};
  for (const each of round.stages) counts[each.outcome] = (counts[each.outcome] || 0) + 1;
  if ((counts.committed || 0) === stages) return badge("committed", "good");
  if ((counts.aborted || 0) === stages) return badge("aborted", "bad");
  return Object.keys(KINDS).filter((each) => counts[each]).map((each) => [badge(`${counts[each]} ${each}`, KINDS[each]), " "]);
}

function payloads(stages) {
  const least = stages.length ? Math.min(...stages.map((each) => each.counted)) : 0;
  return `${least} of ${Math.max(0, ...stages.map((each) => each.offered))}`;
}

function draw(found) {
  const rows = found.rounds;
  const oldest = rows.length ? rows[rows.length - 1].round_number : 0;
  show(list, card("Rounds", rows.length === 0 ? el("p", { class: "quiet" }, "No round has begun.") : table([
    { title: "round", kind: "id", cell: (row) => el("a", { href: `/round/${row.round_number}` }, f.count(row.round_number)) },
    { title: "outcome", cell: (row) => outcome(row, found.stages, found.restored) },
    { title: "payloads", kind: "number", cell: (row) => payloads(row.stages.filter((each) => each.outcome !== "skipped")) },
    { title: "loss", kind: "number", cell: (row) => f.loss(row.validation_loss) },
    { title: "took", kind: "number", cell: (row) => f.duration(row.seconds) },
    { title: "tokens", kind: "number wide", cell: (row) => f.scaled(row.tokens) },
    { title: "bytes", kind: "number wide", cell: (row) => f.bytes(row.stages.reduce((sum, each) => sum + each.payload_bytes, 0)) },
    { title: "plan", kind: "number wide", cell: (row) => row.epoch },
    { title: "began", kind: "number wide", cell: (row) => el("span", { title: f.full(row.began_at) }, f.clock(row.began_at, now())) },
  ], rows, (row) => String(row.round_number)),
  el("nav", { class: "pager" }, given > 0 && el("a", { href: "/rounds" }, "newest"), oldest > 1 && el("a", { href: `/rounds?before=${oldest}` }, "older"))));
}

let shown = "";
let asking = false;
onRun(async (run) => {
  document.title = `Rounds · ${run.spec.name}`;
  const newest = `${run.stage_rounds_committed} ${run.stage_rounds_aborted} ${run.round_number}`;
  if (asking || newest === shown || (given && shown)) return;
  asking = true;
  try {
    draw(await get(`/api/rounds${given ? `?before=${given}` : ""}`));
    shown = newest;
  } catch (error) {
    if (!shown) show(list, card("Rounds", el("p", { class: "quiet" }, `They cannot be shown: ${error.message}`)));
  } finally {
    setTimeout(() => { asking = false; }, 2000);
  }
});
