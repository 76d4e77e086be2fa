// The live connection to the coordinator, and what the page says about it.
import { duration } from "./format.js";

const root = document.documentElement;
const SILENCE = 16000;
const HIDDEN = 60000;
const readers = new Set();
let source = null;
let heard = Date.now();
let ahead = 0; // the coordinator's clock minus ours, in seconds
let newest = null;
let retry = 1000;
let waiting = 0;
let hiddenTimer = 0;

const kept = () => newest?.live === false; // of a run that no coordinator serves
export const now = () => (kept() ? newest.time : Date.now() / 1000 + ahead);
export const latest = () => newest;

// `reader` gets each new record of the run, at once the newest if there is one.
export function onRun(reader) {
  readers.add(reader);
  if (newest) reader(newest);
}

export async function get(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  if (answer.status === 401) location.href = "/login";
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    throw Object.assign(new Error(told.error || `the coordinator answers ${answer.status}`), { status: answer.status });
  }
  return answer.json();
}

function say(kind, text) {
  const live = document.getElementById("live");
  live.className = `live ${kind}`;
  live.hidden = false;
  live.querySelector("span").textContent = text;
}

function lost() {
  const banner = document.getElementById("lost");
  const over = newest && newest.phase === "finished";
  const age = duration(Math.round((Date.now() - heard) / 1000));
  banner.textContent = over || kept()
    ? "What served these pages has ended. This is the last state. On the coordinator's machine, 'hetnode status --dashboard FOLDER' shows them again."
    : `Connection lost: the coordinator has not answered for ${age}. This page shows the last state and tries again.`;
  banner.hidden = false;
  banner.classList.toggle("over", Boolean(over || kept()));
  root.classList.add("stale");
  say(over ? "over" : "gone", over ? "finished" : "offline");
}

function found(data) {
  heard = Date.now();
  retry = 1000;
  ahead = data.time - heard / 1000;
  if (data.version !== root.dataset.version) {
    location.reload(); // the coordinator was updated
    return;
  }
  const banner = document.getElementById("lost");
  root.classList.remove("stale");
  banner.hidden = !kept();
  if (kept()) {
    banner.classList.add("over");
    banner.textContent = `The coordinator is not running. This is as of ${new Date(1000 * newest.time).toLocaleString()}.`;
    say("over", newest.phase === "finished" ? "finished" : "stopped");
  } else say("on", "live");
}

function connect() {
  clearTimeout(waiting);
  source?.close();
  source = new EventSource("/events");
  source.addEventListener("run", (event) => {
    const data = JSON.parse(event.data);
    newest = data;
    found(data);
    readers.forEach((reader) => reader(data));
  });
  source.addEventListener("beat", (event) => found(JSON.parse(event.data)));
  source.addEventListener("error", again);
}

function again() {
  source?.close();
  source = null;
  if (!document.hidden) lost();
  clearTimeout(waiting);
  waiting = setTimeout(connect, retry * (0.7 + 0.6 * Math.random()));
  retry = Math.min(15000, retry * 1.6);
  // An expired sign-in looks like a lost connection.
  fetch("/api/predictions", { method: "HEAD" }).then((answer) => {
    if (answer.status === 401) location.href = "/login";
  }, () => {});
}

setInterval(() => {
  if (document.hidden || !source) {
    if (!source && !document.hidden) lost();
    return;
  }
  if (Date.now() - heard > SILENCE) again();
}, 1000);

// Browsers open six connections to one host: pages that nobody sees give theirs back.
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (document.hidden) {
    hiddenTimer = setTimeout(() => {
      source?.close();
      source = null;
      clearTimeout(waiting);
    }, HIDDEN);
  } else if (!source) {
    heard = Date.now();
    connect();
  }
});

connect();
