// The swarm: pipelines as chains, and every other peer.
import { badge, card, el, meter, show, table, told } from "../dom.js";
import * as f from "../format.js";
import { get, now, onRun } from "../live.js";
import { dot, state, waits } from "../peers.js";

const page = document.getElementById("page");
const head = el("div");
const chains = el("div", { id: "chains", class: "stack" });
const others = el("div");
page.append(head, chains, others);

function member(each, peer, swarm) {
  const gone = !peer || peer.state === "gone" || peer.state === "rests";
  const busy = peer?.busy ?? null;
  const stages = `${each.stages.includes("-") ? "stages" : "stage"} ${each.stages}`;
  return el("div", { class: `member ${each.is_slowest ? "slowest" : ""} ${gone ? "gone" : ""}`, "data-key": each.peer },
    el("div", { class: "member-head" }, el("span", {}, dot(peer), el("a", { href: `/peer/${each.peer}`, title: each.peer }, f.called(peer || each))),
      gone ? badge(peer?.state === "rests" ? "rests" : "gone", "bad") : peer.state === "trains" && peer.round < swarm.round && !peer.waits.length ? badge(`round ${peer.round}`) : badge(state(peer)[0], state(peer)[1])),
    el("small", {}, stages, peer?.device && ` · ${peer.device}`, peer?.flops && ` · ${f.flops(peer.flops)}`),
    el("span", { class: "busy" }, "busy", meter(busy), f.percent(busy)),
    each.predicted_busy !== null && el("small", {}, `predicted ${f.percent(each.predicted_busy)} of a step`),
    peer && !gone && el("small", {}, peer.round === swarm.round ? `step ${peer.step} of ${swarm.steps}` : `was in round ${f.count(peer.round)}`,
      peer.waits.length ? `, waits for ${waits(peer)}` : ""),
    gone && peer && el("small", {}, `last heard of ${f.ago(peer.seen, now())}`),
    peer?.problem && el("p", { class: "why" }, f.sentence(peer.problem)));
}

function link(each, swarm) {
  return el("div", { class: `link ${each.is_slowest ? "slowest" : ""} ${each.failed ? "failed" : ""}` },
    el("b", {}, each.k ? `${f.width(each.k)} of ${swarm.width}` : f.width(each.k)),
    el("span", {}, each.failed || (each.down === null && each.up === null ? "not measured" : `${f.rate(each.down)} ↓ ${f.rate(each.up)} ↑`)),
    el("span", { class: "below" }, [each.delay && f.milliseconds(each.delay), each.bytes && `${f.bytes(each.bytes)}/round`].filter(Boolean).join(" · ")));
}

const WORDS = { trains: ["trains", ""], paused: ["waits for the end of the pause", "wait"], offered: ["trained, waits for others", "good"], exchanges: ["exchanges payloads", "good"], decided: ["round decided", "good"], broken: ["cannot train", "bad"], done: ["done", "good"] };

function chain(replica, peers, swarm) {
  const [word, kind] = WORDS[replica.state] || [replica.state, ""];
  const parts = [];
  replica.members.forEach((each, i) => {
    parts.push(member(each, peers.get(each.peer), swarm));
    if (replica.links[i]) parts.push(link(replica.links[i], swarm));
  });
  return el("section", { class: `card chain-card ${replica.state}`, id: `replica-${replica.index}`, "data-key": `r${replica.index}` },
    el("header", { class: "card-head" }, el("h2", {}, `Replica ${replica.index}`,
      el("small", { class: "quiet" }, ` ${replica.members.length === 1 ? "full replica" : `pipeline of ${replica.members.length}`} · ${replica.microbatches} microbatch${replica.microbatches === 1 ? "" : "es"} per step`)),
    replica.slowest && el("span", { class: "quiet" }, `slowest: ${replica.slowest}`), badge(word, kind)),
    replica.state === "broken" && el("p", { class: "why" }, told(f.sentence(replica.doing))),
    el("div", { class: "chain" }, parts));
}

// A replica that has peers, but is in no plan: it lacks one of them, or waits for the next plan.
function waitingChain(replica, peers, swarm) {
  const parts = replica.members.flatMap((each, i) => [
    i > 0 && el("div", { class: "link" }, el("b", {}, "no link")),
    each.peer ? member({ ...each, predicted_busy: null }, peers.get(each.peer), swarm)
      : el("div", { class: "member gone", "data-key": `vacant ${i}` }, el("div", { class: "member-head" }, el("span", { class: "quiet" }, "nobody"), badge("vacant", "wait")),
        el("small", {}, `${each.stages.includes("-") ? "stages" : "stage"} ${each.stages}`))]);
  return el("section", { class: `card chain-card ${replica.is_ready ? "" : "broken"}`, id: `replica-${replica.index}`, "data-key": `w${replica.index}` },
    el("header", { class: "card-head" }, el("h2", {}, `Replica ${replica.index}`, el("small", { class: "quiet" }, " in no plan")),
      replica.is_ready ? badge("waits for its plan", "wait") : badge("cannot train", "bad")),
    el("p", { class: replica.is_ready ? "quiet" : "why" }, told(f.sentence(replica.doing))),
    el("div", { class: "chain" }, parts));
}

function draw(swarm) {
  const peers = new Map(swarm.peers.map((each) => [each.peer, each]));
  const placed = new Set([...swarm.replicas, ...swarm.waiting].flatMap((each) => each.members.map((one) => one.peer)));
  const counts = {};
  for (const each of swarm.peers) counts[each.state] = (counts[each.state] || 0) + 1;
  const names = { trains: "train", follows: "follow the rounds", spare: "spare", drains: "leave after their round", rests: "rest", relay: "relay for others", gone: "gone" };
  show(head, card("", el("div", { class: "groups" },
    Object.keys(names).filter((each) => counts[each]).map((each) => el("span", { "data-key": each }, el("i", { class: `dot ${each}` }), `${counts[each]} ${names[each]}`)),
    swarm.peers.length === 0 && el("span", { class: "quiet" }, "No peer has joined yet."))));
  show(chains, swarm.replicas.map((each) => chain(each, peers, swarm)), swarm.waiting.map((each) => waitingChain(each, peers, swarm)));
  const rest = swarm.peers.filter((each) => !placed.has(each.peer));
  show(others, rest.length > 0 && card("Other peers", table([
    { title: "peer", kind: "id", cell: (each) => [dot(each), el("a", { href: `/peer/${each.peer}`, title: each.peer }, f.called(each))] },
    { title: "does", cell: (each) => badge(...state(each)) },
    { title: "role", kind: "wide", cell: (each) => each.role },
    { title: "speed", kind: "number wide", cell: (each) => f.flops(each.flops) },
    { title: "up / down", kind: "number wide", cell: (each) => `${f.rate(each.uplink)} / ${f.rate(each.downlink)}` },
    { title: "heard of", kind: "number", cell: (each) => f.ago(each.seen, now()) },
    { title: "why", cell: (each) => f.sentence(each.excluded || each.why || each.problem || each.assignment) },
  ], rest, (each) => each.peer)));
}

let busy = false;
let again = false;
async function refresh() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  try {
    const swarm = await get("/api/swarm");
    draw(swarm);
    if (location.hash && !refresh.scrolled) document.querySelector(location.hash.replace(/[^#\w-]/g, ""))?.scrollIntoView();
    refresh.scrolled = true;
  } catch (error) {
    if (!chains.children.length) show(chains, card("", el("p", {}, `The swarm cannot be shown: ${error.message}`)));
  } finally {
    busy = false;
    if (again) {
      again = false;
      setTimeout(refresh, 500);
    }
  }
}
onRun((run) => {
  document.title = `${run.stalled ? "⚠ " : ""}Swarm · ${run.spec.name}`;
  refresh();
});
