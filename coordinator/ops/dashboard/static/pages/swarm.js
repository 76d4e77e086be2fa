// The swarm: pipelines as chains, and every other peer.
import { badge, card, el, meter, show, table, linked, causePeers } from "../dom.js";
import * as f from "../format.js";
import { get, now, onRun } from "../live.js";
import { busy, dot, excluded, seen, stagesOf, state, waits } from "../peers.js";

const page = document.getElementById("page");
const head = el("div");
const chains = el("div", { id: "chains", class: "stack" });
const others = el("div");
page.append(head, chains, others);

const openRound = (swarm) => Math.min(swarm.round_number, swarm.spec.rounds);

// `place` of a replica, and the share of a step that the cost model predicts for it: null if unknown.
function member(place, swarm, share = null, isSlowest = false) {
  const peer = swarm.byId.get(place.peer);
  const gone = !peer || peer.activity === "gone" || peer.activity === "rests";
  const able = peer?.estimates.capacity;
  const computing = busy(swarm.measured.get(place.peer));
  return el("div", { class: `member ${isSlowest ? "slowest" : ""} ${gone ? "gone" : ""}`, "data-key": place.peer },
    el("div", { class: "member-head" }, el("span", {}, dot(peer), el("a", { href: `/peer/${place.peer}`, title: place.peer }, f.called(peer || place))),
      gone ? badge(peer?.activity === "rests" ? "rests" : "gone", "bad") : peer.activity === "trains" && peer.round_number < openRound(swarm) && !peer.waits.length ? badge(`round ${peer.round_number}`) : badge(...state(peer))),
    el("small", {}, stagesOf(place.stages), able?.device && ` · ${able.device}`, able?.flops > 0 && ` · ${f.flops(able.flops)}`),
    el("span", { class: "busy" }, "busy", meter(computing), f.percent(computing)),
    share !== null && el("small", {}, `predicted ${f.percent(share)} of a step`),
    peer && !gone && el("small", {}, peer.round_number === openRound(swarm) ? `step ${peer.inner_step} of ${swarm.spec.inner.steps}` : `was in round ${f.count(peer.round_number)}`,
      peer.waits.length ? `, waits for ${waits(peer)}` : ""),
    gone && peer && el("small", {}, `last heard of ${f.ago(seen(peer, swarm.time), now())}`),
    peer?.problem && el("p", { class: "why" }, f.sentence(peer.problem)));
}

const sameEnds = (one, other) => one.length === other.length && one.every((each) => other.includes(each));

function link(replica, i, swarm, predicted) {
  const ends = [replica.places[i].peer, replica.places[i + 1].peer];
  const { slowest, links } = predicted || {};
  const { bytes, bandwidth, delay } = links?.[i] || {};
  const isSlowest = slowest && slowest.kind !== "computing" && sameEnds(ends, [slowest.peer, slowest.other]);
  const closed = (replica.cause?.causes || []).find((each) => each.code === "link-closed" && sameEnds(ends, each.peers));
  const [down, up] = bandwidth || [null, null];
  const { k } = replica.links[i];
  return el("div", { class: `link ${isSlowest ? "slowest" : ""} ${closed ? "failed" : ""}` },
    el("b", {}, k ? `${f.width(k)} of ${swarm.spec.model.width}` : f.width(k)),
    el("span", {}, closed ? `cannot be opened: ${closed.detail}` : down === null && up === null ? "not measured" : `${f.rate(down)} ↓ ${f.rate(up)} ↑`),
    el("span", { class: "below" }, [delay && f.milliseconds(delay), bytes && `${f.bytes(bytes[0] + bytes[1])}/round`].filter(Boolean).join(" · ")));
}

const WORDS = { trains: ["trains", ""], paused: ["waits for the end of the pause", "wait"], offered: ["trained, waits for others", "good"], exchanges: ["exchanges payloads", "good"], decided: ["round decided", "good"], broken: ["cannot train", "bad"], done: ["done", "good"] };

function chain(replica, swarm, predicted) {
  const [word, kind] = WORDS[replica.state] || [replica.state, ""];
  const slowest = predicted?.slowest;
  const parts = replica.places.flatMap((each, i) => [
    i > 0 && link(replica, i - 1, swarm, predicted),
    member(each, swarm, predicted?.utilization[i] ?? null, slowest?.kind === "computing" && slowest.peer === each.peer)]);
  return el("section", { class: `card chain-card ${replica.state}`, id: `replica-${replica.index}`, "data-key": `r${replica.index}` },
    el("header", { class: "card-head" }, el("h2", {}, `Replica ${replica.index}`,
      el("small", { class: "quiet" }, ` ${replica.places.length === 1 ? "full replica" : `pipeline of ${replica.places.length}`} · ${replica.microbatches} microbatch${replica.microbatches === 1 ? "" : "es"} per step`)),
    slowest && el("span", { class: "quiet" }, `slowest: ${slowest.text}`), badge(word, kind)),
    (replica.state === "broken" || replica.cause) && el("p", { class: "why" }, linked(f.sentence(replica.cause?.text || "a member is missing"), causePeers(replica.cause))),
    el("div", { class: "chain" }, parts));
}

// A replica that has peers, but is in no plan: it lacks one of them, or waits for the next plan.
function waitingChain(replica, swarm) {
  const isReady = replica.state === "ready";
  const parts = replica.places.flatMap((each, i) => [
    i > 0 && el("div", { class: "link" }, el("b", {}, "no link")),
    each.peer ? member(each, swarm)
      : el("div", { class: "member gone", "data-key": `vacant ${i}` }, el("div", { class: "member-head" }, el("span", { class: "quiet" }, "nobody"), badge("vacant", "wait")),
        el("small", {}, stagesOf(each.stages)))]);
  return el("section", { class: `card chain-card ${isReady ? "" : "broken"}`, id: `replica-${replica.index}`, "data-key": `w${replica.index}` },
    el("header", { class: "card-head" }, el("h2", {}, `Replica ${replica.index}`, el("small", { class: "quiet" }, " in no plan")),
      isReady ? badge("waits for its plan", "wait") : badge("cannot train", "bad")),
    el("p", { class: isReady ? "quiet" : "why" }, linked(f.sentence(replica.cause?.text || "the next plan includes it"), causePeers(replica.cause))),
    el("div", { class: "chain" }, parts));
}

function draw(swarm, predictions) {
  swarm.byId = new Map(swarm.peers.map((each) => [each.peer, each]));
  swarm.measured = new Map(swarm.measurements.map((each) => [each.peer, each]));
  const placed = new Set(swarm.replicas.flatMap((each) => each.places.map((one) => one.peer)));
  const counts = swarm.activities;
  const names = { trains: "train", follows: "follow the rounds", spare: "spare", drains: "leave after their round", rests: "rest", relay: "relay for others", gone: "gone" };
  show(head, card("", el("div", { class: "groups" },
    Object.keys(names).filter((each) => counts[each]).map((each) => el("span", { "data-key": each }, el("i", { class: `dot ${each}` }), `${counts[each]} ${names[each]}`)),
    swarm.peers.length === 0 && el("span", { class: "quiet" }, "No peer has joined yet."))));
  show(chains, swarm.replicas.filter((each) => each.is_planned).map((each) => chain(each, swarm, predictions[each.index])),
    swarm.replicas.filter((each) => !each.is_planned && each.places.length > 0).map((each) => waitingChain(each, swarm)));
  const rest = swarm.peers.filter((each) => !placed.has(each.peer));
  const able = (peer) => peer.estimates.capacity;
  show(others, rest.length > 0 && card("Other peers", table([
    { title: "peer", kind: "id", cell: (each) => [dot(each), el("a", { href: `/peer/${each.peer}`, title: each.peer }, f.called(each))] },
    { title: "does", cell: (each) => badge(...state(each)) },
    { title: "role", kind: "wide", cell: (each) => each.role },
    { title: "speed", kind: "number wide", cell: (each) => f.flops(able(each).flops || null) },
    { title: "up / down", kind: "number wide", cell: (each) => `${f.rate(able(each).uplink || null)} / ${f.rate(able(each).downlink || null)}` },
    { title: "heard of", kind: "number", cell: (each) => f.ago(seen(each, swarm.time), now()) },
    { title: "why", cell: (each) => f.sentence(excluded(each) || each.message || each.problem || each.assignment) },
  ], rest, (each) => each.peer)));
}

let asking = false;
let again = false;
async function refresh() {
  if (asking) {
    again = true;
    return;
  }
  asking = true;
  try {
    draw(await get("/api/status"), await get("/api/predictions"));
    if (location.hash && !refresh.scrolled) document.querySelector(location.hash.replace(/[^#\w-]/g, ""))?.scrollIntoView();
    refresh.scrolled = true;
  } catch (error) {
    if (!chains.children.length) show(chains, card("", el("p", {}, `The swarm cannot be shown: ${error.message}`)));
  } finally {
    asking = false;
    if (again) {
      again = false;
      setTimeout(refresh, 500);
    }
  }
}
onRun((run) => {
  document.title = `${run.is_stalled ? "⚠ " : ""}Swarm · ${run.spec.name}`;
  refresh();
});
