// Why something is as it is, in the sentences of "hetnode explain".
import { el, linked, causePeers, show } from "./dom.js";
import { get } from "./live.js";

const EVERY = 15000;
const FIRST = 6; // sentences that are shown at once

const text = (each) => linked(each.text, [...each.peers, ...causePeers(each.cause)]);

function sentence(each, i) {
  const events = each.events.length > 0 && el("span", { class: "cited", title: "Numbers of events: 'hetnode explain event N' shows what they say." },
    ` [${each.events.join(", ")}]`);
  const rounds = each.code === "aborts" ? each.rounds.map((number) => [" ", el("a", { href: `/round/${number}` }, `round ${number}`)]) : [];
  return el("li", { "data-key": String(i) }, text(each), rounds, events);
}

// A card that asks `question` while it is open; call ask() whenever the run has changed.
export class Explanation {
  constructor(target, label, question, open = true) {
    this.question = question;
    this.next = 0;
    this.body = el("div", { class: "explained" });
    this.card = el("details", { class: "card explain", open, "data-own": "" }, el("summary", {}, el("h2", {}, label)), this.body);
    this.card.addEventListener("toggle", () => this.ask());
    target.append(this.card);
  }

  // `settled`: the answer will not change.
  async ask(settled = false) {
    if (!this.card.open || this.asking || Date.now() < this.next) return;
    this.asking = true;
    if (!this.found) show(this.body, el("p", { class: "quiet" }, "The coordinator reads its log …"));
    try {
      this.found = await get(`/api/explain?question=${encodeURIComponent(this.question)}`);
      this.draw();
      this.next = settled ? Infinity : Date.now() + EVERY;
    } catch (error) {
      // What was told before still helps.
      if (!this.found) show(this.body, el("p", { class: "quiet" }, error.message));
      this.next = Date.now() + EVERY;
    } finally {
      this.asking = false;
    }
  }

  draw() {
    const { title, statements } = this.found;
    const rows = statements.map(sentence);
    show(this.body, el("p", { class: "answer" }, text(title)), el("ul", { class: "sentences" }, rows.slice(0, FIRST)),
      rows.length > FIRST && el("details", { class: "more" }, el("summary", {}, `${rows.length - FIRST} more`),
        el("ul", { class: "sentences" }, rows.slice(FIRST))));
  }
}
