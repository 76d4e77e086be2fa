// Elements without HTML: whatever a peer is called, it is text.

export function el(name, attributes = {}, ...children) {
  const made = name === "svg" || name === "path" || name === "circle"
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "width" && name === "i") made.style.width = value;
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.flat(3).filter((each) => each !== null && each !== undefined && each !== false && each !== "")
    .map((each) => (each instanceof Node ? each : document.createTextNode(String(each)))));
  return made;
}

// Makes `old` equal to `fresh` with as few changes as possible: selections, focus and transitions stay.
export function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName
      || old.dataset?.key !== fresh.dataset?.key) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.hasAttribute("data-own")) return; // its content is not ours to change
  for (const { name } of [...old.attributes]) {
    if (name !== "style" && name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of [...fresh.attributes]) {
    if (name !== "style" && name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.style && old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  const had = [...old.childNodes];
  const gets = [...fresh.childNodes];
  gets.forEach((each, i) => (i < had.length ? morph(had[i], each) : old.append(each)));
  had.slice(gets.length).forEach((each) => each.remove());
}

export function show(target, ...children) {
  const fresh = target.cloneNode(false);
  fresh.append(...children.flat(3).filter(Boolean));
  morph(target, fresh);
}

export const card = (title, ...content) =>
  el("section", { class: "card" }, title && el("header", { class: "card-head" }, el("h2", {}, title)), ...content);

export function badge(text, kind = "") {
  return el("span", { class: `badge ${kind}` }, text);
}

export function meter(share, kind = "", label = "") {
  const percent = Math.round(1000 * Math.max(0, Math.min(1, share || 0))) / 10;
  return el("span", { class: `meter ${kind}`, role: "img", "aria-label": label || `${Math.round(percent)} %` },
    el("i", { width: `${percent}%` }));
}

export function tile(name, value, detail = "", kind = "") {
  return el("div", { class: `tile ${kind}` },
    el("span", { class: "tile-name" }, name), el("span", { class: "tile-value" }, value),
    el("span", { class: "tile-detail" }, detail || "\u00a0"));
}

// A table that hides its columns marked "wide" on a phone. Columns: {title, cell(row), kind}.
export function table(columns, rows, key) {
  return el("div", { class: "table" }, el("table", {},
    el("thead", {}, el("tr", {}, columns.map((each) => el("th", { class: each.kind || "", scope: "col" }, each.title)))),
    el("tbody", {}, rows.map((row) => el("tr", { "data-key": key ? key(row) : null },
      columns.map((each) => el("td", { class: each.kind || "" }, each.cell(row))))))));
}

// The peers of a cause and of those that it follows from.
export const causePeers = (cause) => (cause ? [...cause.peers, ...cause.causes.flatMap(causePeers)] : []);

// A sentence in which the ends of the ids of `peers` are links to their pages.
export function linked(text, peers = []) {
  return [...new Set(peers)].reduce((parts, peer) => parts.flatMap((part) => {
    const end = peer.slice(-8);
    return typeof part !== "string" ? [part] : part.split(`..${end}`).flatMap((piece, i) => (i === 0 ? [piece]
      : [el("a", { href: `/peer/${encodeURIComponent(peer)}`, title: peer }, `…${end}`), piece]));
  }), [text]);
}
