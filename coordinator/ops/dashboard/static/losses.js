// The chart of losses: over rounds or time, of each replica or their mean.
import { Chart, MOST_SERIES, seriesColour } from "./chart.js";
import { el } from "./dom.js";
import { get } from "./live.js";

export class LossChart {
  constructor(target) {
    this.by = "round";
    this.kind = "validation_loss";
    this.at = -1;
    this.body = el("div", { class: "chart", "data-own": "" });
    this.legend = el("div", { class: "legend" });
    target.append(el("section", { class: "card" },
      el("header", { class: "card-head" }, el("h2", {}, "Loss"),
        this.choice("kind", [["validation_loss", "validation"], ["train_loss", "training"]]),
        this.choice("by", [["round", "rounds"], ["at", "time"]])),
      this.body, this.legend));
    this.chart = new Chart(this.body);
    this.record = null;
  }

  choice(field, options) {
    const group = el("div", { class: "choice", role: "group" });
    for (const [value, label] of options) {
      const button = el("button", { type: "button", "aria-pressed": String(this[field] === value) }, label);
      button.addEventListener("click", () => {
        this[field] = value;
        for (const each of group.children) each.setAttribute("aria-pressed", String(each === button));
        this.draw();
      });
      group.append(button);
    }
    return group;
  }

  // Losses change with rounds: a new one is asked for, and no more than every two seconds.
  async run(run) {
    const newest = Math.max(run.rounds_decided, 0, ...run.replicas.map((each) => each.figures?.round_number || 0));
    if (newest === this.at || this.asking) return;
    this.asking = true;
    try {
      this.record = await get("/api/losses");
      if (this.body.classList.contains("failed")) {
        this.body.classList.remove("failed");
        this.body.textContent = "";
      }
      this.at = newest;
      this.draw();
    } catch (error) {
      if (!this.record) {
        this.body.textContent = `There are no losses to show: ${error.message}`;
        this.body.classList.add("failed");
      }
    } finally {
      setTimeout(() => { this.asking = false; }, 2000);
    }
  }

  draw() {
    if (!this.record) return;
    if (!this.record.mean.length) {
      this.body.textContent = "The first losses come when a round has been measured.";
      this.body.classList.add("failed");
      return;
    }
    const time = this.by === "at";
    const xs = (points) => points.map((each) => (time ? 1000 * each.at : each.round));
    const shown = this.record.replicas.slice(0, MOST_SERIES);
    const series = shown.map((each, i) => ({
      name: `replica ${each.replica}`, x: xs(each.points), y: each.points.map((point) => point[this.kind]), colour: seriesColour(i),
    }));
    if (this.record.replica_count > shown.length) {
      const points = this.record.mean;
      series.push({ name: `mean of ${this.record.replica_count}`, x: xs(points), y: points.map((point) => point[this.kind]), colour: getComputedStyle(document.documentElement).getPropertyValue("--text").trim() });
    }
    this.legend.replaceChildren(...series.map((each) => {
      const mark = el("i");
      mark.style.background = each.colour;
      return el("span", {}, mark, each.name);
    }));
    this.chart.update({ series, x: { title: time ? "" : "round", type: time ? "time" : "linear" }, y: { title: "nats per token" } });
  }
}
