// Line charts with plotly, which is loaded when the first chart is shown.
const root = document.documentElement;
const style = getComputedStyle(root);
const colour = (name) => style.getPropertyValue(name).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");
const charts = new Set();
let loading = null;

export const MOST_SERIES = 12;

function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `${root.dataset.static}/plotly.min.js`;
    script.onload = () => resolve(window.Plotly);
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

function layout(options) {
  const quiet = colour("--quiet");
  const axis = {
    gridcolor: colour("--grid"), zeroline: false, linecolor: colour("--line"), tickcolor: colour("--line"),
    tickfont: { color: quiet, size: 11 }, automargin: true, fixedrange: true, nticks: 7,
    title: { font: { color: quiet, size: 11 }, standoff: 8 },
  };
  return {
    autosize: true, margin: { l: 8, r: 12, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", color: colour("--text"), size: 12 },
    hovermode: "x unified", showlegend: false, barmode: options.barmode,
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text"), size: 12 } },
    xaxis: { ...axis, showgrid: false, ...options.x, title: { ...axis.title, text: options.x?.title || "" } },
    yaxis: { ...axis, ...options.y, title: { ...axis.title, text: options.y?.title || "" } },
  };
}

// A chart in `target`; call update({series, x, y}) with new data. Series: {name, x, y, colour, dash}.
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
      const Plotly = await plotly();
      while (this.data) {
        const { series, ...options } = this.data;
        this.shown = this.data;
        this.data = null;
        const traces = series.map((each, i) => ({
          type: each.type || "scatter", mode: "lines", name: each.name, x: each.x, y: each.y, connectgaps: true,
          line: { color: each.colour || seriesColour(i), width: 2, dash: each.dash, shape: "linear" },
          marker: { color: each.colour || seriesColour(i) },
          fill: each.fill, fillcolor: each.fillcolor, hoverinfo: each.quiet ? "skip" : undefined,
          hovertemplate: each.quiet ? undefined : each.hover || "%{y:.4f}", opacity: each.opacity,
        }));
        await Plotly.react(this.target, traces, layout(options), { displayModeBar: false, responsive: true });
      }
      this.target.classList.remove("failed");
    } catch (error) {
      this.target.textContent = error.message;
      this.target.classList.add("failed");
    } finally {
      this.drawing = false;
    }
  }
}

dark.addEventListener("change", () => charts.forEach((chart) => chart.shown && chart.update(chart.shown)));
