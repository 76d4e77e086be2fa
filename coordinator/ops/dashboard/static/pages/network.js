// The network: bytes of each link and round against what the plan predicts.
import { Chart } from "../chart.js";
import { card, el, show, table, tile } from "../dom.js";
import * as f from "../format.js";
import { get, onRun } from "../live.js";

const page = document.getElementById("page");
const tiles = el("div");
const over = el("div", { class: "chart small", "data-own": "" });
const overCard = card("Bytes of a round", over, el("div", { class: "legend" },
  el("span", {}, el("i", { class: "k1" }), "on links"), el("span", {}, el("i", { class: "k2" }), "in payloads")));
const list = el("div", { class: "stack" });
page.append(tiles, overCard, list);
const chart = new Chart(over);
overCard.hidden = true;

const sum = (rows, field) => rows.reduce((all, each) => all + (each[field] || 0), 0);
const less = (dense, sent) => (sent && dense ? `${(dense / sent).toFixed(dense / sent < 10 ? 1 : 0)}× less than float32` : "");
const against = (measured, predicted) => (measured === undefined || !predicted ? "–" : `${measured >= predicted ? "+" : "−"}${Math.abs(100 * (measured / predicted - 1)).toFixed(1)}\u202f%`);

// The members of a replica with what they have measured in it, and what the plan predicts that they send.
function membersOf(replica, measurements, prediction) {
  return replica.places.map(({ peer, stages }, i) => {
    const own = measurements.get(peer);
    // A member counts what it sends itself: downstream on the link behind it, upstream on that before.
    const predicted = (prediction.links[i]?.bytes[0] || 0) + (prediction.links[i - 1]?.bytes[1] || 0);
    return { peer, stages, predicted, ...(own?.replica === replica.index && own.round_number ? own : {}) };
  });
}

function draw(status, predictions) {
  const measurements = new Map(status.measurements.map((each) => [each.peer, each]));
  const replicas = status.replicas.filter((each) => each.is_planned && predictions[each.index])
    .map((each) => ({ ...each, prediction: predictions[each.index], members: membersOf(each, measurements, predictions[each.index]) }));
  const members = replicas.flatMap((each) => each.members);
  const measured = members.filter((each) => each.round_number > 0);
  const link = sum(measured, "link_bytes_sent");
  const payload = sum(measured, "payload_bytes");
  show(tiles, el("div", { class: "tiles" },
    tile("Links, last round", f.bytes(link), less(sum(measured, "link_bytes_dense"), link)),
    tile("Plan predicts", f.bytes(sum(members, "predicted")), measured.length === members.length && link ? `measured ${against(link, sum(members, "predicted"))}` : "for the links"),
    tile("Payloads, last round", f.bytes(payload), less(sum(measured, "payload_bytes_dense"), payload)),
    tile("All together", f.bytes(link + payload), "per round")));
  show(list, replicas.map((each) => el("div", { "data-key": String(each.index) }, card(`Replica ${each.index}`,
    el("p", { class: "quiet pad" }, [
      each.links.length > 0 && `links: ${[...new Set(each.links.map((one) => one.k))].map(f.width).join(", ")}`,
      each.figures?.round_number > 0 && `inner phase ${f.duration(each.figures.inner_seconds)}`,
      each.prediction.inner_seconds !== null && `the cost model predicts ${f.duration(each.prediction.inner_seconds)}`,
      each.prediction.slowest && `slowest: ${each.prediction.slowest.text}`].filter(Boolean).join(" · ")),
    table([
      { title: "member", kind: "id", cell: (row) => el("a", { href: `/peer/${row.peer}`, title: row.peer }, f.short(row.peer)) },
      { title: "stages", kind: "wide", cell: (row) => (row.stages.length === 1 ? row.stages[0] : `${row.stages[0]}-${row.stages[row.stages.length - 1]}`) },
      { title: "sent on links", kind: "number", cell: (row) => f.bytes(row.link_bytes_sent) },
      { title: "predicted", kind: "number", cell: (row) => (row.predicted ? f.bytes(row.predicted) : "no link") },
      { title: "difference", kind: "number", cell: (row) => against(row.link_bytes_sent, row.predicted) },
      { title: "payload", kind: "number wide", cell: (row) => f.bytes(row.payload_bytes) },
      { title: "of float32", kind: "number wide", cell: (row) => less(row.payload_bytes_dense, row.payload_bytes) },
      { title: "round", kind: "number wide", cell: (row) => (row.round_number ? f.count(row.round_number) : "–") },
    ], each.members, (row) => row.peer)))));
}

let shown = -1;
let asking = false;
onRun(async (run) => {
  document.title = `Network · ${run.spec.name}`;
  const newest = Math.max(0, ...run.replicas.map((each) => each.figures?.round_number || 0), run.rounds_decided);
  if (asking || newest === shown) return;
  asking = true;
  try {
    draw(await get("/api/status"), await get("/api/predictions"));
    shown = newest;
    const past = await get("/api/traffic").catch(() => null);
    if (past?.points.length > 1) {
      overCard.hidden = false;
      const xs = past.points.map((each) => each.round);
      chart.update({
        series: [
          { name: "links", x: xs, y: past.points.map((each) => each.link_bytes) },
          { name: "payloads", x: xs, y: past.points.map((each) => each.payload_bytes) },
        ],
        x: { title: "round" }, y: { beginAtZero: true, ticks: { callback: f.bytes } }, shown: f.bytes,
      });
    }
  } catch (error) {
    if (shown < 0) show(list, card("", el("p", {}, error.message)));
  } finally {
    setTimeout(() => { asking = false; }, 2000);
  }
});
