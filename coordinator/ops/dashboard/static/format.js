// Figures for people. Unknown ones are a dash.
const DASH = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);
const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];

export function scaled(value, unit = "", digits = 1) {
  if (!known(value)) return DASH;
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < PREFIXES.length - 1) {
    value /= 1000;
    power += 1;
  }
  const text = value.toFixed(power === 0 && Number.isInteger(value) ? 0 : Math.abs(value) >= 99.5 ? 0 : digits);
  return `${text}${unit || power ? "\u202f" : ""}${PREFIXES[power]}${unit}`;
}

export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : DASH);
export const loss = (value) => (known(value) ? value.toFixed(4) : DASH);
export const bytes = (value) => scaled(value, "B");
export const flops = (value) => scaled(value, "FLOP/s");
export const rate = (value) => (known(value) ? scaled(8 * value, "b/s") : DASH);
export const percent = (value) => (!known(value) ? DASH : value > 0 && value < 0.01 ? "<\u202f1\u202f%" : `${Math.floor(100 * value + 1e-9)}\u202f%`);
export const milliseconds = (value) => (known(value) ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)}\u202fms` : DASH);

export function duration(seconds) {
  if (!known(seconds)) return DASH;
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)}\u202fms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)}\u202fs`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes}\u202fmin`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours}\u202fh ${minutes % 60}\u202fmin`;
  return `${Math.floor(hours / 24)}\u202fd ${hours % 24}\u202fh`;
}

export function ago(at, now) {
  if (!known(at)) return DASH;
  const seconds = Math.max(0, now - at);
  return seconds < 3 ? "now" : `${duration(Math.floor(seconds))} ago`;
}

export function clock(at, now) {
  if (!known(at)) return DASH;
  const date = new Date(1000 * at);
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  return Math.abs(at - now) < 43200 ? time : `${date.toLocaleDateString([], { day: "numeric", month: "short" })} ${time}`;
}

export const full = (at) => (known(at) ? new Date(1000 * at).toLocaleString([], { hourCycle: "h23" }) : DASH);
export const width = (k) => (k ? `k ${k}` : "uncompressed"); // of a link
export const short = (peer) => `…${peer.slice(-8)}`;
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
export const sentence = (text) => (text ? text[0].toUpperCase() + text.slice(1) : "");
// A public name is no proof of who it is: the end of the peer id stands with it.
export const called = (peer) => (peer.name ? `${peer.name} ${short(peer.peer)}` : short(peer.peer));
