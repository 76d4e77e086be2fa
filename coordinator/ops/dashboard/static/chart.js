// Line charts with Chart.js, which is loaded when the first chart is shown.
import { el } from "./dom.js";

const root = document.documentElement;
const style = getComputedStyle(root);
const colour = (name) => style.getPropertyValue(name).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");
const charts = new Set();
let loading = null;

export const MOST_SERIES = 12;

function library() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `${root.dataset.static}/Chart.bundle.js`;
    script.onload = () => resolve(window.Chart);
    script.onerror = () => {
      loading = null;
      reject(new Error("the charts cannot be loaded"));
    };
    document.head.append(script);
  });
  return loading;
}

const SERIES = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
export const seriesColour = (i) => colour(SERIES[i % SERIES.length]);

function axis({ title, type = "linear", ...more }) {
  const quiet = colour("--quiet");
  return {
    type, ...more, border: { color: colour("--line") },
    title: { display: Boolean(title), text: title || "", color: quiet, font: { size: 11 } },
    ticks: { color: quiet, font: { size: 11 }, maxTicksLimit: 7, maxRotation: 0, ...more.ticks },
  };
}

function options({ x = {}, y = {}, shown = (value) => value.toFixed(4) }) {
  const text = colour("--text");
  return {
    animation: false, responsive: true, maintainAspectRatio: false, spanGaps: true,
    interaction: { mode: "index", intersect: false },
    elements: { point: { radius: 0, hoverRadius: 4 }, line: { borderWidth: 2 } },
    scales: { x: axis({ ...x, grid: { display: false } }), y: axis({ ...y, grid: { color: colour("--grid") } }) },
    plugins: {
      legend: { display: false },
      tooltip: {
        backgroundColor: colour("--card"), borderColor: colour("--line"), borderWidth: 1, titleColor: text, bodyColor: text,
        callbacks: { label: (item) => ` ${item.dataset.label}: ${shown(item.parsed.y)}` },
      },
    },
  };
}

// A chart in `target`; call update({series, x, y, shown}) with new data. Series: {name, x, y, colour}; `x` and `y` are
// scales of Chart.js with a title as text, and `shown` gives the text of a value.
export class Chart {
  constructor(target) {
    this.target = target;
    this.data = null;
    charts.add(this);
  }

  async update(data) {
    this.data = data;
    if (this.drawing) return; // the newest data is drawn next
    this.drawing = true;
    try {
      const Library = await library();
      const { series, ...about } = this.data;
      const datasets = series.map((each, i) => ({
        label: each.name, data: each.y.map((y, at) => ({ x: each.x[at], y })), pointRadius: each.y.length === 1 ? 3 : 0,
        borderColor: each.colour || seriesColour(i), backgroundColor: each.colour || seriesColour(i),
      }));
      if (!this.chart?.canvas?.isConnected) { // at first, and after a message in its place
        this.chart?.destroy();
        const canvas = el("canvas", { role: "img" });
        this.target.replaceChildren(canvas);
        this.target.classList.remove("failed");
        this.chart = new Library(canvas, { type: "line", data: { datasets: [] }, options: {} });
      }
      Object.assign(this.chart, { data: { datasets }, options: options(about) });
      this.chart.update("none");
      this.chart.canvas.setAttribute("aria-label", `chart of ${series.map((each) => each.name).join(", ")}`);
    } catch (error) {
      this.target.textContent = error.message;
      this.target.classList.add("failed");
    } finally {
      this.drawing = false;
    }
  }
}

dark.addEventListener("change", () => charts.forEach((chart) => chart.data && chart.update(chart.data)));
