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
const replicas = el("div", { class: "stack" });
page.append(tiles, overCard, replicas);
const chart = new Chart(over);
overCard.hidden = true;

const sum = (rows, field) => rows.reduce((all, each) => all + (each[field] || 0), 0);
const less = (dense, sent) => (sent && dense ? `${(dense / sent).toFixed(dense / sent < 10 ? 1 : 0)}× less than float32` : "");
const against = (measured, predicted) => (measured === null || !predicted ? "–" : `${measured >= predicted ? "+" : "−"}${Math.abs(100 * (measured / predicted - 1)).toFixed(1)}\u202f%`);

function draw(network) {
  const members = network.replicas.flatMap((each) => each.members);
  const measured = members.filter((each) => each.round > 0);
  const link = sum(measured, "link_bytes");
  const payload = sum(measured, "payload_bytes");
  show(tiles, el("div", { class: "tiles" },
    tile("Links, last round", f.bytes(link), less(sum(measured, "link_dense"), link)),
    tile("Plan predicts", f.bytes(sum(members, "link_predicted")), measured.length === members.length && link ? `measured ${against(link, sum(members, "link_predicted"))}` : "for the links"),
    tile("Payloads, last round", f.bytes(payload), less(sum(measured, "payload_dense"), payload)),
    tile("All together", f.bytes(link + payload), "per round")));
  show(replicas, network.replicas.map((each) => el("div", { "data-key": String(each.index) }, card(`Replica ${each.index}`,
    el("p", { class: "quiet pad" }, [
      each.k.length > 0 && `links: ${[...new Set(each.k)].map(f.width).join(", ")}`,
      each.inner_seconds !== null && `inner phase ${f.duration(each.inner_seconds)}`,
      each.inner_predicted !== null && `the cost model predicts ${f.duration(each.inner_predicted)}`,
      each.slowest && `slowest: ${each.slowest}`].filter(Boolean).join(" · ")),
    table([
      { title: "member", kind: "id", cell: (row) => el("a", { href: `/peer/${row.peer}`, title: row.peer }, f.short(row.peer)) },
      { title: "stages", kind: "wide", cell: (row) => row.stages },
      { title: "sent on links", kind: "number", cell: (row) => f.bytes(row.link_bytes) },
      { title: "predicted", kind: "number", cell: (row) => (row.link_predicted ? f.bytes(row.link_predicted) : "no link") },
      { title: "difference", kind: "number", cell: (row) => against(row.link_bytes, row.link_predicted) },
      { title: "payload", kind: "number wide", cell: (row) => f.bytes(row.payload_bytes) },
      { title: "of float32", kind: "number wide", cell: (row) => less(row.payload_dense, row.payload_bytes) },
      { title: "round", kind: "number wide", cell: (row) => (row.round ? f.count(row.round) : "–") },
    ], each.members, (row) => row.peer)))));
}

let shown = -1;
let asking = false;
onRun(async (run) => {
  document.title = `Network · ${run.spec.name}`;
  const newest = Math.max(0, ...run.replicas.map((each) => each.round), run.decided);
  if (asking || newest === shown) return;
  asking = true;
  try {
    draw(await get("/api/network"));
    shown = newest;
    const past = await get("/api/traffic").catch(() => null);
    if (past?.points.length > 1) {
      overCard.hidden = false;
      const xs = past.points.map((each) => each.round);
      chart.update({
        series: [
          { name: "links", x: xs, y: past.points.map((each) => each.link_bytes), hover: "%{y:.3s}B" },
          { name: "payloads", x: xs, y: past.points.map((each) => each.payload_bytes), hover: "%{y:.3s}B" },
        ],
        x: { title: "round" }, y: { rangemode: "tozero", ticksuffix: "B", tickformat: "~s" },
      });
    }
  } catch (error) {
    if (shown < 0) show(replicas, card("", el("p", {}, error.message)));
  } finally {
    setTimeout(() => { asking = false; }, 2000);
  }
});
