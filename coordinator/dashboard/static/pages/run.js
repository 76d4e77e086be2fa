// The run: how far it is, how the loss goes, what it waits for.
import { badge, card, el, meter, show, tile, told } from "../dom.js";
import * as f from "../format.js";
import { Explanation } from "../explain.js";
import { healthCard, notices } from "../health.js";
import { now, onRun } from "../live.js";
import { LossChart } from "../losses.js";

const page = document.getElementById("page");
const parts = ["hero", "notices", "tiles", "losses", "why", "health", "replicas", "events", "facts"];
const at = Object.fromEntries(parts.map((name) => [name, el("div", { class: `part-${name}` })]));
const STATES = {
  trains: ["trains", ""], paused: ["paused", "wait"], offered: ["trained", "good"], exchanges: ["exchanges", "good"], decided: ["done", "good"],
  broken: ["cannot train", "bad"], done: ["done", "good"],
};
page.append(at.hero, at.notices, at.tiles, at.losses, at.why,
  el("div", { class: "two" }, at.replicas, at.events), at.health, at.facts);
at.notices.classList.add("notices");
const why = new Explanation(at.why, "What it waits for, and what would be faster", "now", false);
const losses = new LossChart(at.losses);

const isPaused = (run) => run.phase === "training" && Boolean(run.health.pause?.holds) && !run.stalled;

function what(run) {
  if (run.phase === "finished") return ["Finished", "good"];
  if (run.phase === "gathering") return ["Gathering peers", "wait"];
  if (isPaused(run)) return [`Paused before round ${f.count(run.round)}`, "wait"];
  if (run.stalled) return [`Waiting in round ${f.count(run.round)}`, "bad"];
  return [`Round ${f.count(run.round)}`, ""];
}

function reason(run) {
  const text = run.message.replace(/^(training: round|PAUSED before round) \d+ of \d+[,; ]*/, "").replace(/^(finished|waiting in round \d+ of \d+): /, "");
  return f.sentence(text) || "All replicas train.";
}

function hero(run) {
  const [title, kind] = what(run);
  const left = run.phase === "training" && run.remaining_seconds !== null;
  const progress = run.replicas.length
    ? run.replicas.reduce((sum, each) => sum + each.progress, 0) / run.replicas.length : 0;
  return el("section", { class: `card hero ${kind}` },
    el("div", { class: "hero-head" },
      el("h1", {}, title, run.phase === "training" && el("small", {}, ` of ${f.count(run.rounds)}`)),
      left && el("div", { class: "eta" }, el("b", {}, f.duration(run.remaining_seconds)), " left",
        el("small", {}, `until about ${f.clock(now() + run.remaining_seconds, now())}`))),
    el("p", { class: "hero-message" }, told(reason(run)), isPaused(run) && [". ", el("code", {}, "hetnode run resume"), " lets it go on."]),
    meter(run.decided / run.rounds, `big ${kind}`, `${run.decided} of ${run.rounds} rounds are decided`),
    run.phase === "training" && el("div", { class: "hero-foot" },
      el("span", {}, `${f.percent(run.decided / run.rounds)} of the run`),
      !isPaused(run) && el("span", { class: "round-progress" }, "this round ", meter(progress, "thin"), f.percent(progress))));
}

function peersOf(run) {
  const names = { trains: "train", follows: "follow", spare: "spare", drains: "leave", rests: "rest", relay: "relay", gone: "gone" };
  const live = Object.entries(run.peers).filter(([state]) => !["gone", "rests"].includes(state))
    .reduce((sum, [, number]) => sum + number, 0);
  const detail = Object.keys(names).filter((state) => run.peers[state])
    .map((state) => `${run.peers[state]} ${isPaused(run) && state === "trains" ? "wait" : names[state]}`).join(" · ");
  return tile("Peers here", f.count(live), detail, run.peers.gone && !run.peers.trains ? "bad" : "");
}

function tiles(run) {
  const broken = run.replica_count - run.replicas_complete;
  return el("div", { class: "tiles" },
    tile("Validation loss", f.loss(run.loss), "nats per token, mean of replicas"),
    tile("Speed", f.scaled(run.tokens_per_second), "tokens per second"),
    tile("Tokens trained", f.scaled(run.tokens), "committed"),
    tile("A round takes", f.duration(run.expected_round_seconds), run.began && !isPaused(run) ? `this one: ${f.duration(Math.max(0, now() - run.began))}` : ""),
    tile("Stage rounds", f.count(run.committed), `committed · ${f.count(run.aborted)} aborted`, run.aborted ? "note" : ""),
    peersOf(run),
    broken > 0 && run.phase === "training" && tile("Replicas", `${run.replicas_complete} of ${run.replica_count}`, "can train", "bad"),
    !run.agree && tile("Anchors", "DIFFER", "replicas disagree", "bad"));
}

function replicas(run) {
  return card("Replicas", run.replicas.length === 0
    ? el("p", { class: "quiet pad" }, "There is no plan yet.")
    : el("ul", { class: "rows" }, run.replicas.map((each) => {
      const [word, kind] = STATES[each.state] || [each.state, ""];
      return el("li", { "data-key": String(each.index), class: each.state },
        el("div", { class: "row-head" },
          el("a", { href: `/swarm#replica-${each.index}` }, `replica ${each.index}`),
          el("span", { class: "quiet" }, each.members === 1 ? "full" : f.plural(each.members, "member")),
          badge(word, kind),
          el("span", { class: "end" }, f.loss(each.loss)),
          el("span", { class: "end quiet" }, each.tokens_per_second === null ? "" : `${f.scaled(each.tokens_per_second)} tok/s`)),
        meter(each.progress, `thin ${kind}`),
        each.state === "broken" && el("p", { class: "why" }, f.sentence(each.doing)));
    })), run.waiting.map((each) => el("p", { class: "why", "data-key": each }, told(f.sentence(each)))), run.replica_count > run.replicas.length && el("p", { class: "quiet pad" }, `and ${f.count(run.replica_count - run.replicas.length)} more`));
}

function events(run) {
  return card("Latest events", run.events.length === 0
    ? el("p", { class: "quiet pad" }, "Nothing but rounds since the coordinator was started.")
    : el("ol", { class: "events" }, run.events.slice(0, 30).map((each) => el("li", { class: each.warning ? "warning" : "", "data-key": `${each.at} ${each.text}` },
      el("time", { title: f.full(each.at) }, f.clock(each.at, now())), el("span", {}, told(f.sentence(each.text)))))));
}

function batch(run) {
  if (!run.plan) return "none yet";
  const wanted = run.spec.batch === null ? "" : ` of ${f.count(run.spec.batch)}`;
  const slower = run.plan.learning_rate_factor < 1 ? `; the learning rate is ${run.plan.learning_rate_factor.toFixed(2)} times as high` : "";
  return `${f.count(run.plan.batch)}${wanted} samples of all replicas in an inner step${slower}`;
}

function facts(run) {
  const spec = run.spec;
  const rows = [
    ["Model", `${f.scaled(spec.parameters)} parameters: ${spec.layers} layers of width ${spec.width}, vocabulary ${f.count(spec.vocabulary)}, context ${f.count(spec.context)}`],
    ["Round", `${f.plural(spec.steps, "inner step")} of ${f.plural(spec.microbatches, "microbatch").replace("batchs", "batches")}, ${f.plural(spec.stages, "stage")}`],
    ["Batch", batch(run)],
    ["Plan", run.plan ? `${run.plan.epoch}, since round ${f.count(run.plan.from_round)}: ${run.plan.reason}` : "none yet"],
    ["Last commit", run.last_commit ? f.ago(run.last_commit, now()) : "none yet"],
    ["Specification", spec.hash],
    ["Run", run.run],
  ];
  return card("About the run", el("dl", { class: "facts" }, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
}

function draw(run) {
  document.title = `${run.stalled ? "⚠ " : ""}${what(run)[0]} · ${run.spec.name}`;
  show(at.hero, hero(run));
  show(at.notices, notices(run.health, isPaused(run)));
  show(at.tiles, tiles(run));
  show(at.health, healthCard(run.health));
  why.ask();
  show(at.replicas, replicas(run));
  show(at.events, events(run));
  show(at.facts, facts(run));
}

let newest = null;
onRun((run) => {
  newest = run;
  draw(run);
  losses.run(run);
});
setInterval(() => newest && !document.hidden && show(at.tiles, tiles(newest)), 1000);
