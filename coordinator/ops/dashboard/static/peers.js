// Words for what a peer does and waits for.
import { el } from "./dom.js";

const WAITS = {
  assignment: "a place in the run", plan: "the next plan", links: "its links", neighbour: "its neighbour",
  group: "the other replicas", payloads: "payloads", decision: "the decision", checkpoint: "a checkpoint",
  pause: "the end of the pause",
};
const STATES = {
  trains: ["trains", "good"], follows: ["follows", "accent"], spare: ["spare", "accent"], relay: ["relay", "accent"],
  drains: ["leaves", "wait"], rests: ["rests", "wait"], gone: ["gone", "bad"],
};

export const waits = (peer) => peer.waits.map((each) => WAITS[each] || each).join(", ");
const EXCLUSIONS = { banned: "banned", quarantined: "quarantine" };

export const state = (peer) => (peer.exclusion ? [EXCLUSIONS[peer.exclusion], "bad"] : STATES[peer.activity] || [peer.activity, ""]);
export const dot = (peer) => el("i", { class: `dot ${peer ? (peer.exclusion ? "bad" : peer.activity) : "gone"}` });
export const excluded = (peer) => (peer.exclusion === "quarantined" ? "in quarantine" : peer.exclusion && ["banned", peer.exclusion_reason].filter(Boolean).join(": "));
export const seen = (peer, time) => time - peer.seconds_since_seen;
export const busy = (measured) => (measured?.round_number && measured.inner_seconds ? Math.min(1, measured.compute_seconds / measured.inner_seconds) : null);
export const stagesOf = (stages) => (stages.length === 1 ? `stage ${stages[0]}` : `stages ${stages[0]}-${stages[stages.length - 1]}`);
