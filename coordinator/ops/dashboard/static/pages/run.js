// The run: how far it is, how the loss goes, what it waits for.
import { badge, card, el, meter, show, tile, linked, causePeers } from "../dom.js";
import * as f from "../format.js";
import { Evaluations } from "../evaluations.js";
import { Explanation } from "../explain.js";
import { BY, healthCard, notices } from "../health.js";
import { published, takePart } from "../join.js";
import { now, onRun } from "../live.js";
import { LossChart } from "../losses.js";

const page = document.getElementById("page");
const parts = ["hero", "notices", "tiles", "losses", "evaluations", "why", "health", "replicas", "events", "facts", "join"];
const at = Object.fromEntries(parts.map((name) => [name, el("div", { class: `part-${name}` })]));
const STATES = {
  trains: ["trains", ""], paused: ["paused", "wait"], offered: ["trained", "good"], exchanges: ["exchanges", "good"], decided: ["done", "good"],
  broken: ["cannot train", "bad"], done: ["done", "good"],
};
page.append(at.hero, at.notices, at.tiles, at.losses, at.evaluations, at.why,
  el("div", { class: "two" }, at.replicas, at.events), at.health, at.facts, at.join);
at.notices.classList.add("notices");
const why = new Explanation(at.why, "What it waits for, and what would be faster", "now", false);
const losses = new LossChart(at.losses);
const evaluations = new Evaluations(at.evaluations);

const isPaused = (run) => run.phase === "training" && run.is_held && !run.is_stalled;
const openRound = (run) => Math.min(run.round_number, run.spec.rounds);

function what(run) {
  if (run.phase === "finished") return ["Finished", "good"];
  if (run.phase === "gathering") return ["Gathering peers", "wait"];
  if (isPaused(run)) return [`Paused before round ${f.count(openRound(run))}`, "wait"];
  if (run.is_stalled) return [`Waiting in round ${f.count(openRound(run))}`, "bad"];
  return [`Round ${f.count(openRound(run))}`, ""];
}

function pausedBy(pause) {
  return `by ${BY[pause.by] || pause.by}${pause.reason && `: ${pause.reason}`}`;
}

function reason(run) {
  if (run.phase === "finished") return `${f.plural(run.spec.rounds, "round")}, ${f.plural(run.stage_rounds_committed, "commit")}, ${f.plural(run.stage_rounds_aborted, "abort")}`;
  if (isPaused(run)) return f.sentence(pausedBy(run.pause));
  const doing = f.sentence(run.cause.text) || "All replicas train.";
  return run.pause ? `${doing}; then paused ${pausedBy(run.pause)}` : doing;
}

function hero(run) {
  const [title, kind] = what(run);
  const left = run.phase === "training" && run.remaining_seconds !== null;
  const planned = run.replicas.filter((each) => each.is_planned);
  const progress = planned.length ? planned.reduce((sum, each) => sum + each.progress, 0) / planned.length : 0;
  return el("section", { class: `card hero ${kind}` },
    el("div", { class: "hero-head" },
      el("h1", {}, title, run.phase === "training" && el("small", {}, ` of ${f.count(run.spec.rounds)}`)),
      left && el("div", { class: "eta" }, el("b", {}, f.duration(run.remaining_seconds)), " left",
        el("small", {}, `until about ${f.clock(now() + run.remaining_seconds, now())}`))),
    el("p", { class: "hero-message" }, linked(reason(run), causePeers(run.cause)), isPaused(run) && [". ", el("code", {}, "hetnode run resume"), " lets it go on."]),
    meter(run.rounds_decided / run.spec.rounds, `big ${kind}`, `${run.rounds_decided} of ${run.spec.rounds} rounds are decided`),
    run.phase === "training" && el("div", { class: "hero-foot" },
      el("span", {}, `${f.percent(run.rounds_decided / run.spec.rounds)} of the run`),
      !isPaused(run) && el("span", { class: "round-progress" }, "this round ", meter(progress, "thin"), f.percent(progress))));
}

function peersOf(run) {
  const names = { trains: "train", follows: "follow", spare: "spare", drains: "leave", rests: "rest", relay: "relay", gone: "gone" };
  const live = Object.entries(run.activities).filter(([state]) => !["gone", "rests"].includes(state))
    .reduce((sum, [, number]) => sum + number, 0);
  const detail = Object.keys(names).filter((state) => run.activities[state])
    .map((state) => `${run.activities[state]} ${isPaused(run) && state === "trains" ? "wait" : names[state]}`).join(" · ");
  return tile("Peers here", f.count(live), detail, run.phase !== "finished" && run.activities.gone && !run.activities.trains ? "bad" : "");
}

function tiles(run) {
  const broken = run.replicas_broken;
  return el("div", { class: "tiles" },
    tile("Validation loss", f.loss(run.validation_loss), "nats per token, mean of replicas"),
    tile("Speed", f.scaled(run.tokens_per_second), "tokens per second"),
    tile("Tokens trained", f.scaled(run.tokens_committed), "committed"),
    tile("A round takes", f.duration(run.expected_round_seconds), run.round_seconds && !isPaused(run) ? `this one: ${f.duration(Math.max(0, run.round_seconds + now() - run.time))}` : ""),
    tile("Stage rounds", f.count(run.stage_rounds_committed), `committed · ${f.count(run.stage_rounds_aborted)} aborted`, run.stage_rounds_aborted ? "note" : ""),
    peersOf(run),
    broken > 0 && run.phase === "training" && tile("Replicas", `${run.replicas_planned - broken} of ${run.replicas_planned}`, "can train", "bad"),
    !run.anchors_agree && tile("Anchors", "DIFFER", "replicas disagree", "bad"));
}

function replicas(run) {
  const planned = run.replicas.filter((each) => each.is_planned || (run.phase === "finished" && each.figures));
  const lacking = run.replicas.filter((each) => !each.is_planned && each.cause);
  return card("Replicas", planned.length === 0
    ? el("p", { class: "quiet pad" }, "There is no plan yet.")
    : el("ul", { class: "rows" }, planned.map((each) => {
      const [word, kind] = each.is_planned ? STATES[each.state] || [each.state, ""] : ["took part", ""];
      const figures = each.figures?.round_number ? each.figures : null; // round 0: nothing was trained
      return el("li", { "data-key": String(each.index), class: each.state },
        el("div", { class: "row-head" },
          el("a", { href: `/swarm#replica-${each.index}` }, `replica ${each.index}`),
          each.is_planned && el("span", { class: "quiet" }, each.places.length === 1 ? "full" : f.plural(each.places.length, "member")),
          badge(word, kind),
          el("span", { class: "end" }, f.loss(figures?.validation_loss)),
          el("span", { class: "end quiet" }, figures ? `${f.scaled(figures.tokens_per_second)} tok/s` : "")),
        meter(each.progress, `thin ${kind}`),
        (each.state === "broken" || each.cause) && el("p", { class: "why" }, f.sentence(each.cause?.text || "a member is missing")));
    })), lacking.slice(0, 8).map((each) => el("p", { class: "why", "data-key": `w${each.index}` }, linked(f.sentence(each.cause.text), causePeers(each.cause)))), run.replicas_planned > planned.length && el("p", { class: "quiet pad" }, `and ${f.count(run.replicas_planned - planned.length)} more`));
}

function events(run) {
  return card("Latest events", run.events.length === 0
    ? el("p", { class: "quiet pad" }, "Nothing but rounds since the coordinator was started.")
    : el("ol", { class: "events" }, run.events.slice(0, 30).map((each) => el("li", { class: each.warning ? "warning" : "", "data-key": `${each.at} ${each.text}` },
      el("time", { title: f.full(each.at) }, f.clock(each.at, now())), el("span", {}, linked(f.sentence(each.text), each.peers))))));
}

function facts(run) {
  const rows = Object.entries({ ...run.facts, "Last commit": run.committed_at ? f.ago(run.committed_at, now()) : "none yet" });
  return card("About the run", el("dl", { class: "facts" }, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
}

function draw(run) {
  document.title = `${run.is_stalled ? "⚠ " : ""}${what(run)[0]} · ${run.spec.name}`;
  show(at.hero, hero(run));
  show(at.notices, notices(run, isPaused(run)));
  show(at.tiles, tiles(run));
  show(at.health, healthCard(run));
  why.ask();
  show(at.replicas, replicas(run));
  show(at.events, events(run));
  show(at.facts, facts(run));
  show(at.join, run.phase !== "finished" && run.live !== false && takePart(offer));
}

let newest = null;
let offer = null;
published().then((found) => {
  offer = found;
  if (newest) draw(newest);
});
onRun((run) => {
  newest = run;
  draw(run);
  losses.run(run);
  evaluations.run(run);
});
setInterval(() => newest && !document.hidden && show(at.tiles, tiles(newest)), 1000);
