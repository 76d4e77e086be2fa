// The health of the training: what is unusual, how far payloads agree, and what stops the run or sends it back.
import { badge, card, el, linked, causePeers, table } from "./dom.js";
import * as f from "./format.js";

export const cosine = (value) => (typeof value === "number" ? value.toFixed(3) : "–");
export const norm = (value) => (typeof value === "number" ? Number(value.toPrecision(3)).toString() : "–");
const MOST_STAGES = 8;
const round = (number) => el("a", { href: `/round/${number}` }, `round ${f.count(number)}`);
export const BY = { operator: "its operator", alarm: "an alarm" };

// Alarm, pause and rollbacks: what must be seen first. `isSaid`: that the run is paused.
export function notices(run, isSaid) {
  const { alarm, pause, rollbacks } = run;
  return [
    alarm && el("p", { class: "notice bad", "data-key": "alarm" }, el("b", {}, "Alarm. "), linked(alarm.text, causePeers(alarm))),
    pause && !isSaid && el("p", { class: "notice wait", "data-key": "pause" },
      el("b", {}, run.is_held ? "Paused " : "About to pause "), "before ", round(pause.from_round), ` by ${BY[pause.by] || pause.by}`,
      pause.reason && [": ", pause.reason], ". ", el("code", {}, "hetnode run resume"), " lets it go on."),
    rollbacks.map((each) => el("p", { class: "notice", "data-key": `rollback ${each.round_number}` },
      "Rollback: ", round(each.round_number), each.restore_round ? [" restored the anchors after ", round(each.restore_round)] : " restored the initial parameters", ".")),
  ];
}

function state(judged, alarm) {
  if (alarm) return badge("alarm", "bad");
  const { findings } = judged;
  return findings.length ? badge(f.plural(findings.length, "finding"), "wait") : badge("nothing unusual", "good");
}

function stages(judged) {
  if (!judged.stages.some((each) => each.payloads > 1)) {
    return el("p", { class: "quiet pad" }, "Fewer than two payloads were measured at each stage, so there is nothing to compare.");
  }
  const least = (each) => each.least_cosine ?? 1;
  const shown = [...judged.stages].sort((one, other) => least(one) - least(other)).slice(0, MOST_STAGES).sort((one, other) => one.stage - other.stage);
  return [table([
    { title: "stage", kind: "id", cell: (row) => row.stage },
    { title: "payloads", kind: "number", cell: (row) => row.payloads },
    { title: "agree", kind: "number", cell: (row) => cosine(row.cosine) },
    { title: "least", kind: "number", cell: (row) => cosine(row.least_cosine) },
    { title: "full", kind: "number wide", cell: (row) => cosine(row.full_cosine) },
    { title: "pipelines", kind: "number wide", cell: (row) => cosine(row.pipeline_cosine) },
    { title: "same kind", kind: "number wide", cell: (row) => cosine(row.alike) },
    { title: "other kind", kind: "number wide", cell: (row) => cosine(row.unlike) },
    { title: "norm", kind: "number", cell: (row) => norm(row.norm) },
    { title: "of the mean", kind: "number wide", cell: (row) => norm(row.mean_norm) },
  ], shown, (row) => String(row.stage)),
  judged.stages.length > shown.length && el("p", { class: "quiet pad" }, `The ${shown.length} of ${f.count(judged.stages.length)} stages that agree least.`),
  el("p", { class: "quiet pad small" }, "Agree: median cosine of a payload with the weighted sum of the others. Norm: median, before clipping.")];
}

export function healthCard(run) {
  const { health: judged, alarm } = run;
  if (!judged) {
    return card("Training health", el("p", { class: "quiet pad" }, "No round has been judged since the coordinator was started."));
  }
  const share = judged.error_share;
  return el("section", { class: "card" },
    el("header", { class: "card-head" }, el("h2", {}, "Training health ", el("small", {}, round(judged.round_number))), state(judged, alarm)),
    judged.findings.length > 0 && el("ul", { class: "sentences" }, judged.findings.map((each, i) => el("li", { class: "finding", "data-key": String(i) }, linked(each.sentence, each.peers)))),
    share !== null && el("p", { class: "pad" }, `Error feedback is ${f.percent(share)} of what members propose (median).`),
    stages(judged));
}

// What is unusual about one peer.
export const findingsAbout = (run, peer) => (run.health?.findings || []).filter((each) => each.peers.includes(peer));
