// What each owner, and each peer without one, has done for the run.
import { card, el, show, table, tile } from "../dom.js";
import * as f from "../format.js";
import { get, onRun } from "../live.js";

const page = document.getElementById("page");
const tiles = el("div");
const list = el("div");
const options = new URLSearchParams(location.search);
const order = options.get("order") || "tokens";
const skip = Number(options.get("skip")) || 0;
const find = (options.get("find") || "").trim();
const mine = localStorage.getItem("find"); // what was found last is most likely the reader's own node
if (find) localStorage.setItem("find", find);
page.append(tiles, el("form", { class: "find", role: "search" },
  el("input", { type: "hidden", name: "order", value: order }),
  el("input", { type: "search", name: "find", value: find, maxlength: "128", placeholder: "name or id", "aria-label": "Find a peer" }),
  el("button", {}, "Find"),
  mine && !find && el("a", { href: `?find=${encodeURIComponent(mine)}` }, `my node: ${mine}`)), list);
const ORDERS = { tokens: "tokens", rounds: "stage rounds", payload: "payloads", link: "links" };

function draw(found) {
  const most = Math.max(1, ...found.credits.map((each) => each.stage_tokens));
  show(tiles, el("div", { class: "tiles" },
    tile("Peers", f.count(found.peers), "that have joined"),
    tile("Tokens", f.scaled(found.tokens), "committed"),
    tile("Payloads", f.bytes(found.payload_bytes), f.plural(found.stage_rounds, "payload")),
    tile("On links", f.bytes(found.link_bytes), "as peers have measured")));
  show(list, card("Leaderboard",
    el("nav", { class: "choice links" }, Object.entries(ORDERS).map(([key, label]) => el("a", { href: `?order=${key}&find=${encodeURIComponent(find)}`, "aria-current": key === order ? "true" : null }, label))),
    found.credits.length === 0 ? el("p", { class: "quiet" }, find ? `No peer has "${find}" in its name or id.` : "Nobody has joined yet.") : table([
      ...(find ? [] : [{ title: "", kind: "number", cell: (row) => found.skip + found.credits.indexOf(row) + 1 }]),
      { title: "peer", cell: (row) => [el("a", { href: `/peer/${row.peer}`, title: row.owner || row.peer }, f.called({ name: row.name, peer: row.owner || row.peer })), row.nodes > 1 && ` ${f.plural(row.nodes, "node")}`, share(row.stage_tokens / most)] },
      { title: "tokens", kind: "number", cell: (row) => f.scaled(row.stage_tokens) },
      { title: "stage rounds", kind: "number", cell: (row) => f.count(row.stage_rounds) },
      { title: "payloads", kind: "number wide", cell: (row) => f.bytes(row.payload_bytes) },
      { title: "links", kind: "number wide", cell: (row) => f.bytes(row.link_bytes) },
      { title: "last counted", kind: "number wide", cell: (row) => (row.last_round ? el("a", { href: `/round/${row.last_round}` }, `round ${f.count(row.last_round)}`) : "–") },
    ], found.credits, (row) => row.peer),
    el("nav", { class: "pager" }, skip > 0 && el("a", { href: `?order=${order}&skip=${Math.max(0, skip - found.most)}` }, "before"),
      !find && skip + found.most < found.owners && el("a", { href: `?order=${order}&skip=${skip + found.most}` }, "next")),
    el("p", { class: "quiet pad" }, "A token counts once for each stage at which it is committed. Tokens, rounds and payloads come from the event log; bytes on links are what each peer says itself.")));
}

function share(part) {
  const bar = el("i", {});
  bar.style.width = `${100 * part}%`;
  return el("span", { class: "meter thin" }, bar);
}

let shown = -1;
let asking = false;
onRun(async (run) => {
  document.title = `Leaderboard · ${run.spec.name}`;
  if (asking || shown === run.stage_rounds_committed) return;
  asking = true;
  try {
    draw(await get(`/api/credits?order=${encodeURIComponent(order)}&skip=${skip}&find=${encodeURIComponent(find)}`));
    shown = run.stage_rounds_committed;
  } catch (error) {
    if (shown < 0) show(list, card("Leaderboard", el("p", { class: "quiet" }, `It cannot be shown: ${error.message}`)));
  } finally {
    setTimeout(() => { asking = false; }, 3000);
  }
});
