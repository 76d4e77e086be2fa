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
export const state = (peer) => (peer.excluded ? [peer.excluded.startsWith("banned") ? "banned" : "quarantine", "bad"] : STATES[peer.state] || [peer.state, ""]);
export const dot = (peer) => el("i", { class: `dot ${peer ? (peer.excluded ? "bad" : peer.state) : "gone"}` });
