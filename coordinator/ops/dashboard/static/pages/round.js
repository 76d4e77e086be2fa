// One round: who offered when, who was counted and why not, bytes, and the seconds of each phase.
import { badge, card, el, show, table, tile, linked } from "../dom.js";
import * as f from "../format.js";
import { Explanation } from "../explain.js";
import { cosine, norm } from "../health.js";
import { get, onRun } from "../live.js";

const number = Number(location.pathname.split("/").pop());
const page = document.getElementById("page");
const head = el("div", { class: "stack" });
const reason = el("div");
const all = el("div", { class: "stack" });
page.append(head, reason, all);
const why = new Explanation(reason, "Why it went so", String(number));
const KINDS = { open: "", committed: "good", aborted: "bad", skipped: "", offered: "wait", counted: "good", "left out": "bad", withheld: "wait", missing: "bad" };
const PHASES = [["inner", "until the first payload"], ["offer", "until the group was closed"], ["group", "until all had reported"], ["decision", "until the decision"]];

function phases(seconds) {
  const known = PHASES.map(([name, label], i) => [name, label, seconds[name], i]).filter(([, , value]) => value !== null);
  const total = known.reduce((sum, [, , value]) => sum + value, 0);
  if (!total) return null;
  return [el("div", { class: "phases" }, known.map(([name, label, value, i]) => {
    const part = el("i", { class: `p${i + 1}`, title: `${label}: ${f.duration(value)}` });
    part.style.flexGrow = String(Math.max(value / total, 0.004));
    return part;
  })), el("div", { class: "legend" }, known.map(([, label, value, i]) => el("span", {}, el("i", { class: `p${i + 1}` }), `${label} ${f.duration(value)}`)))];
}

function agreement(rows) {
  const known = rows.map((row) => row.cosine).filter((value) => value !== null).sort((one, other) => one - other);
  if (known.length < 2) return null;
  const middle = (known[(known.length - 1) >> 1] + known[known.length >> 1]) / 2;
  const least = known.length > 2 ? `, least ${cosine(known[0])}` : "";
  return el("span", { class: "end quiet", title: "Cosine of a payload with the weighted sum of the others" }, `agreement ${cosine(middle)}${least}`);
}

function stage(each, began, isRollback) {
  const summary = each.summary;
  return el("div", { "data-key": `s${summary.stage}` }, card(`Stage ${summary.stage}`,
    el("div", { class: "row-head" }, badge(summary.outcome, KINDS[summary.outcome]),
      !isRollback && el("span", {}, `${summary.counted} of ${f.plural(summary.offered, "payload")} counted, ${f.bytes(summary.payload_bytes)}`),
      each.contested > 0 && badge(`${each.contested} contested`, "wait"), agreement(each.contributions)),
    summary.reason && el("p", { class: "quiet pad" }, f.sentence(summary.reason)),
    !isRollback && [phases(each.phases), table([
      { title: "peer", kind: "id", cell: (row) => el("a", { href: `/peer/${row.peer}`, title: row.peer }, f.short(row.peer)) },
      { title: "replica", kind: "number", cell: (row) => (row.replica < 0 ? "–" : row.replica) },
      { title: "payload", cell: (row) => badge(row.standing, KINDS[row.standing]) },
      { title: "offered after", kind: "number", cell: (row) => (row.offered_at === null ? "–" : f.duration(Math.max(0, row.offered_at - began))) },
      { title: "reported after", kind: "number wide", cell: (row) => (row.reported_at === null ? "–" : f.duration(Math.max(0, row.reported_at - began))) },
      { title: "holds", kind: "number wide", cell: (row) => row.held },
      { title: "bytes", kind: "number wide", cell: (row) => f.bytes(row.nbytes) },
      { title: "agrees", kind: "number wide", cell: (row) => cosine(row.cosine) },
      { title: "norm", kind: "number wide", cell: (row) => norm(row.norm) },
      { title: "why not", cell: (row) => linked(f.sentence(row.reason), row.culprit ? [row.culprit] : []) },
    ], each.contributions, (row) => row.peer)]));
}

function members(rows) {
  return rows.length > 0 && card("Members", table([
    { title: "peer", kind: "id", cell: (row) => el("a", { href: `/peer/${row.peer}`, title: row.peer }, f.short(row.peer)) },
    { title: "place", cell: (row) => `${row.replica}.${row.position + 1}` },
    { title: "inner", kind: "number", cell: (row) => f.duration(row.inner_seconds) },
    { title: "computes", kind: "number", cell: (row) => f.percent(row.inner_seconds ? Math.min(1, row.compute_seconds / row.inner_seconds) : null) },
    { title: "exchange", kind: "number", cell: (row) => f.duration(row.outer_seconds) },
    { title: "on links", kind: "number wide", cell: (row) => f.bytes(row.link_bytes) },
    { title: "payload", kind: "number wide", cell: (row) => f.bytes(row.payload_bytes) },
    { title: "error feedback", kind: "number wide", cell: (row) => f.percent(row.error_share) },
    { title: "training loss", kind: "number wide", cell: (row) => f.loss(row.train_loss) },
    { title: "validation", kind: "number", cell: (row) => f.loss(row.validation_loss) },
  ], rows, (row) => row.peer));
}

function draw(found, rounds) {
  const summary = found.summary;
  const bytes = found.stages.reduce((sum, each) => sum + each.summary.payload_bytes, 0);
  const open = summary.seconds === null;
  show(head,
    el("div", { class: "crumbs" },
      number > 1 ? el("a", { href: `/round/${number - 1}` }, `← round ${f.count(number - 1)}`) : el("span"),
      el("a", { href: "/rounds" }, "all rounds"),
      !open && number < rounds ? el("a", { href: `/round/${number + 1}` }, `round ${f.count(number + 1)} →`) : el("span")),
    el("section", { class: "card hero" }, el("div", { class: "hero-head" }, el("h1", {}, `Round ${f.count(number)}`, el("small", {}, open ? " is open" : ` took ${f.duration(summary.seconds)}`)),
      el("span", { class: "quiet" }, `plan ${summary.epoch} · began ${f.full(summary.began_at)}`)),
      summary.restarts > 0 && el("p", { class: "hero-message" }, `It began anew ${f.plural(summary.restarts, "time")} with another plan.`)),
    found.alarm && el("p", { class: "notice bad" }, el("b", {}, "Alarm. "), found.alarm),
    found.restores !== null && el("p", { class: "notice" }, "This round is a rollback: it restores ",
      found.restores ? ["the anchors after ", el("a", { href: `/round/${found.restores}` }, `round ${f.count(found.restores)}`)] : "the initial parameters", "."),
    el("div", { class: "tiles" },
      tile("Validation loss", f.loss(summary.validation_loss), "mean of replicas"),
      tile("Tokens", f.scaled(summary.tokens), "committed"),
      tile("Payloads", f.bytes(bytes), "that counted"),
      tile("Stages", `${found.stages.filter((each) => each.summary.outcome === "committed").length} of ${found.stages.length}`, "committed")));
  show(all, found.stages.map((each) => stage(each, summary.began_at, found.restores !== null)), members(found.members));
}

let done = "";
let asking = false;
onRun(async (run) => {
  document.title = `Round ${number} · ${run.spec.name}`;
  // A round that was decided long ago does not change.
  const key = number > run.rounds_decided - 2 ? `${run.stage_rounds_committed} ${run.stage_rounds_aborted} ${run.round_number} ${run.message}` : "decided";
  why.ask(number < run.rounds_decided - 2);
  if (asking || key === done) return;
  asking = true;
  try {
    draw(await get(`/api/round?round=${number}`), run.spec.rounds);
    done = key;
    reason.hidden = false;
  } catch (error) {
    reason.hidden = true;
    show(head);
    show(all, card(`Round ${number}`, el("p", { class: "quiet" }, error.message), el("a", { href: "/rounds" }, "all rounds")));
  } finally {
    setTimeout(() => { asking = false; }, 1500);
  }
});
