// One peer: what it does now, what it has done, and what was held against it.
import { Chart } from "../chart.js";
import { badge, card, el, meter, show, table, tile, linked } from "../dom.js";
import * as f from "../format.js";
import { Explanation } from "../explain.js";
import { cosine, findingsAbout, norm } from "../health.js";
import { get, now, onRun } from "../live.js";
import { busy, dot, excluded, seen, state, waits } from "../peers.js";

const peer = decodeURIComponent(location.pathname.split("/").pop());
const page = document.getElementById("page");
const head = el("div", { class: "stack" });
const reason = el("div");
const unusual = el("div");
const lists = el("div", { class: "stack" });
const body = el("div", { class: "chart small", "data-own": "" });
const speedCard = card("Measured speed", body);
speedCard.hidden = true;
page.append(head, unusual, reason, speedCard, lists);
const why = new Explanation(reason, "Why it does what it does", peer);
reason.hidden = true;
const chart = new Chart(body);
const WARNINGS = new Set(["strike", "weighed", "lost", "quarantined", "banned", "retreated"]);
const REASONS = { offered: "wait", counted: "good", "left out": "bad", withheld: "wait", missing: "bad" };

function hero({ peer: is, past, time }) {
  const summary = past?.summary;
  const what = is ? state(is) : summary ? [summary.is_here ? "here" : "gone", summary.is_here ? "good" : "bad"] : ["not known", "bad"];
  return card("",
    el("div", { class: "hero-head" }, el("h1", {}, dot(is), is?.name || f.short(peer)), badge(...what)),
    el("p", { class: "quiet mono" }, peer),
    is && el("p", { class: "hero-message" }, [
      is.assignment || `role ${is.role}`, is.waits.length ? `waits for ${waits(is)}` : "", `heard of ${f.ago(seen(is, time), now())}`,
    ].filter(Boolean).join(" · ")),
    !is && !summary && el("p", { class: "quiet" }, "No peer of this name has joined this run."),
    is?.exclusion && el("p", { class: "why" }, f.sentence(excluded(is))),
    is?.problem && el("p", { class: "why" }, f.sentence(is.problem)),
    is?.cause && el("p", { class: is.cause.code === "link-closed" ? "why" : null }, f.sentence(is.message)),
    is?.role_reason && el("p", { class: "quiet" }, `Role ${is.role}, chosen by the coordinator: ${is.role_reason}`));
}

function tiles(found) {
  const is = found.peer;
  const able = is?.estimates.capacity;
  const credit = found.past?.summary?.credit;
  return el("div", { class: "tiles" },
    credit && tile("Tokens", f.scaled(credit.stage_tokens), "committed, per stage"),
    credit && tile("Stage rounds", f.count(credit.stage_rounds), credit.stage_rounds ? `rounds ${f.count(credit.first_round)} to ${f.count(credit.last_round)}` : "that counted"),
    credit && tile("Payloads", f.bytes(credit.payload_bytes), `and ${f.bytes(credit.link_bytes)} on links`),
    is && tile("Computes", f.flops(able.flops || null), able.device),
    is && tile("Up / down", `${f.rate(able.uplink || null)} / ${f.rate(able.downlink || null)}`, able.round_trip ? `${f.milliseconds(able.round_trip)} to the coordinator` : `reached: ${is.reachability}`),
    is && tile("Busy", f.percent(busy(found.measurement)), "of its last inner phase"),
    is && tile("Strikes", f.count(found.past?.summary?.strikes ?? is.strikes), f.plural(found.past?.summary?.failures ?? is.failures, "failure"), is.strikes ? "bad" : ""));
}

function contributions(rows) {
  return rows.length > 0 && card("Contributions", table([
    { title: "round", kind: "id", cell: (row) => el("a", { href: `/round/${row.round_number}` }, f.count(row.round_number)) },
    { title: "stage", cell: (row) => row.stage },
    { title: "payload", cell: (row) => badge(row.standing, REASONS[row.standing]) },
    { title: "tokens", kind: "number wide", cell: (row) => f.scaled(row.tokens) },
    { title: "bytes", kind: "number wide", cell: (row) => f.bytes(row.nbytes) },
    { title: "agrees", kind: "number wide", cell: (row) => cosine(row.cosine) },
    { title: "norm", kind: "number wide", cell: (row) => norm(row.norm) },
    { title: "why not", cell: (row) => linked(f.sentence(row.reason), row.culprit ? [row.culprit] : []) },
  ], rows, (row) => `${row.round_number} ${row.stage}`));
}

function measured(rows) {
  return rows.length > 0 && card("Its rounds", table([
    { title: "round", kind: "id", cell: (row) => el("a", { href: `/round/${row.round_number}` }, f.count(row.round_number)) },
    { title: "place", kind: "wide", cell: (row) => `${row.replica}.${row.position + 1}` },
    { title: "inner", kind: "number", cell: (row) => f.duration(row.inner_seconds) },
    { title: "busy", cell: (row) => meter(row.inner_seconds ? row.compute_seconds / row.inner_seconds : 0) },
    { title: "exchange", kind: "number", cell: (row) => f.duration(row.outer_seconds) },
    { title: "on links", kind: "number wide", cell: (row) => f.bytes(row.link_bytes) },
    { title: "error feedback", kind: "number wide", cell: (row) => f.percent(row.error_share) },
    { title: "loss", kind: "number wide", cell: (row) => f.loss(row.validation_loss) },
  ], rows.filter((row) => row.round_number > 0), (row) => String(row.round_number)));
}

function changes(rows) {
  return rows.length > 0 && card("History", el("ol", { class: "events" }, rows.map((each) => el("li", { "data-key": String(each.sequence), class: WARNINGS.has(each.kind) ? "warning" : "" },
    el("time", { title: f.full(each.at) }, f.clock(each.at, now())), el("span", {}, linked(f.sentence(each.text), [each.peer]))))));
}

function draw(found) {
  show(head, hero(found), tiles(found));
  const past = found.past;
  show(lists, past ? [el("div", { class: "two" }, changes(past.changes), measured(past.figures)), contributions(past.contributions)]
    : found.problem && el("p", { class: "quiet" }, `Its past is not shown: ${found.problem}`));
  const points = past?.estimates.filter((each) => each.flops > 0) || [];
  speedCard.hidden = points.length < 2;
  if (points.length > 1) {
    chart.update({
      series: [{ name: "FLOP/s", x: points.map((each) => 1000 * each.at), y: points.map((each) => each.flops) }],
      x: { type: "time" }, y: { beginAtZero: true, ticks: { callback: f.flops } }, shown: f.flops,
    });
  }
}

let asking = false;
onRun(async (run) => {
  document.title = `Peer ${f.short(peer)}`;
  const findings = findingsAbout(run, peer);
  show(unusual, findings.length > 0 && card("Unusual in its training", el("ul", { class: "sentences" },
    findings.map((each) => el("li", { class: "finding", "data-key": each.sentence }, linked(each.sentence, each.peers))))));
  if (asking) return;
  asking = true;
  try {
    const found = await get(`/api/peer?peer=${encodeURIComponent(peer)}`);
    draw(found);
    reason.hidden = !found.peer;
    if (found.peer) why.ask();
  } catch (error) {
    if (!head.children.length) show(head, card("", el("p", {}, `The peer cannot be shown: ${error.message}`)));
  } finally {
    setTimeout(() => { asking = false; }, 2500);
  }
});
