// What the model could do after each round: a chart for each set or task, and what it made of prompts.
import { Chart } from "./chart.js";
import { card, el, show } from "./dom.js";
import * as f from "./format.js";
import { get } from "./live.js";

export class Evaluations {
  constructor(target) {
    this.charts = el("div", { class: "two" });
    this.samples = el("div", { class: "about" });
    target.append(this.charts, this.samples);
    this.known = new Map();
    this.at = null;
  }

  // A new evaluation changes the facts, and samples come with rounds.
  async run(run) {
    const at = `${run.rounds_decided} ${run.facts.Evaluations}`;
    if (at === this.at || this.asking) return;
    this.asking = true;
    try {
      this.draw(await get("/api/evaluations"));
      this.at = at;
    } catch { // the page says elsewhere that the history cannot be read
    } finally {
      setTimeout(() => { this.asking = false; }, 2000);
    }
  }

  draw({ lines, samples }) {
    const groups = new Map();
    for (const line of lines) {
      const key = JSON.stringify([line.name, line.metric]);
      groups.set(key, [...(groups.get(key) || []), line]);
    }
    for (const [key, group] of groups) {
      const { name, metric } = group[0];
      if (!this.known.has(key)) {
        const body = el("div", { class: "chart small", "data-own": "" });
        this.charts.append(card(`${name}: ${metric}`, body));
        this.known.set(key, new Chart(body));
      }
      const series = group.map((line) => ({
        name: line.peer ? f.short(line.peer) : "operator", x: line.points.map((each) => each.round), y: line.points.map((each) => each.value),
      }));
      this.known.get(key).update({ series, x: { title: "round" }, y: { title: metric } });
    }
    show(this.samples, samples.length > 0 && card("What the model says", samples.map((each) => el("details", { "data-key": `${each.round_number} ${each.peer} ${each.name} ${each.number}`, ...(each.round_number === samples[0].round_number && { open: "" }) },
      el("summary", {}, `round ${f.count(each.round_number)}`), el("pre", {}, el("b", {}, each.prompt), each.text)))));
  }
}
