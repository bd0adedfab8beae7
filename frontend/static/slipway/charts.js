// Charts: plotly, loaded when the first one is about to be seen; a table behind each.

const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const TABLE_ROWS = 50;
let loading = null;

function loadPlotly(src) {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = src;
    script.addEventListener("load", () => resolve(globalThis.Plotly));
    script.addEventListener("error", () => reject(new Error(`the chart library did not load from ${src}`)));
    document.head.append(script);
  });
  return loading;
}

function token(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function formatValue(value, unit) {
  if (value === null || value === undefined) return "—";
  if (unit === "share") return `${(100 * value).toFixed(1)} %`;
  if (unit === "seconds") return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toPrecision(3)} s`;
  if (unit === "bytes") {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let size = value;
    let index = 0;
    while (Math.abs(size) >= 1000 && index < units.length - 1) { size /= 1000; index += 1; }
    return `${index ? size.toPrecision(3) : Math.round(size)} ${units[index]}`;
  }
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

function formatX(x, axis) {
  return axis === "time" ? new Date(x).toISOString().slice(11, 19) : String(x);
}

function traces(chart) {
  return chart.lines.map((line, index) => ({
    type: "scatter",
    mode: line.x.length < 40 ? "lines+markers" : "lines",
    name: line.name,
    x: chart.axis === "time" ? line.x.map((x) => new Date(x)) : line.x,
    y: line.y,
    line: {
      color: token(`--chart-${(index % 6) + 1}`),
      width: 1.6,
      dash: DASHES[index % DASHES.length],
      shape: chart.stepped ? "hv" : "linear",
    },
    marker: { size: 4, symbol: index },
    hovertemplate: `%{y:.4~g}<extra>${line.name.replaceAll("<", "&lt;")}</extra>`,
  }));
}

function layout(chart) {
  const grid = { gridcolor: token("--line"), zerolinecolor: token("--line"), linecolor: token("--line-strong"), tickfont: { size: 10 } };
  return {
    margin: { l: 44, r: 8, t: 8, b: 28 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: token("--font"), size: 11, color: token("--muted") },
    showlegend: chart.lines.length > 1,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 10 }, bgcolor: "rgba(0,0,0,0)" },
    hovermode: "x unified",
    hoverlabel: { bgcolor: token("--raised"), bordercolor: token("--line-strong"), font: { color: token("--text") } },
    xaxis: { ...grid, type: chart.axis === "time" ? "date" : "linear", tickformat: chart.axis === "time" ? undefined : "d", nticks: 6 },
    yaxis: { ...grid, nticks: 5, tickformat: chart.unit === "share" ? ".1~%" : chart.unit === "bytes" ? "~s" : undefined, ticksuffix: chart.unit === "bytes" ? "B" : "", exponentformat: "e", rangemode: chart.unit === "number" ? "normal" : "tozero" },
    uirevision: chart.key,
  };
}

function fillTable(card, chart) {
  const table = card.querySelector("table");
  const xs = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => b - a).slice(0, TABLE_ROWS);
  const values = chart.lines.map((line) => new Map(line.x.map((x, index) => [x, line.y[index]])));
  const head = document.createElement("tr");
  for (const name of [chart.axis === "time" ? "time (UTC)" : "step", ...chart.lines.map((line) => line.name)]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = name;
    head.append(cell);
  }
  const rows = xs.map((x) => {
    const row = document.createElement("tr");
    for (const text of [formatX(x, chart.axis), ...values.map((map) => formatValue(map.get(x), chart.unit))]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  });
  table.tHead.replaceChildren(head);
  table.tBodies[0].replaceChildren(...rows);
}

function lastValues(chart) {
  return chart.lines.map((line) => formatValue(line.y.at(-1), chart.unit)).join(" · ");
}

export class ChartBoard {
  constructor(root) {
    this.root = root;
    this.source = root.dataset.plotly;
    this.data = new Map();
    this.seen = new WeakSet();
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        this.seen.add(entry.target);
        this.#draw(entry.target);
      }
    }, { rootMargin: "200px" });
    for (const card of root.querySelectorAll("[data-chart]")) {
      this.observer.observe(card);
      card.querySelector("details").addEventListener("toggle", () => this.#table(card));
    }
    document.addEventListener("slipway:theme", () => this.#all());
  }

  update(charts) {
    for (const chart of charts) this.data.set(chart.key, chart);
    this.#all();
  }

  #all() {
    for (const card of this.root.querySelectorAll("[data-chart]")) {
      const chart = this.data.get(card.dataset.chart);
      if (!chart) continue;
      card.querySelector(".now").textContent = chart.lines.length ? lastValues(chart) : "";
      const plot = card.querySelector(".plot.empty-plot");
      if (plot && chart.lines.length) plot.textContent = "";
      this.#table(card);
      if (this.seen.has(card)) this.#draw(card);
    }
  }

  #table(card) {
    const chart = this.data.get(card.dataset.chart);
    if (chart && card.querySelector("details").open) fillTable(card, chart);
  }

  async #draw(card) {
    const chart = this.data.get(card.dataset.chart);
    if (!chart || !chart.lines.length) return;
    const plotly = await loadPlotly(this.source);
    const plot = card.querySelector(".plot");
    if (plot.classList.contains("empty-plot")) {
      plot.classList.remove("empty-plot");
      plot.replaceChildren();
    }
    await plotly.react(plot, traces(chart), layout(chart), { displayModeBar: false, responsive: true });
    card.dataset.points = String(chart.lines.reduce((sum, line) => sum + line.total, 0));
  }
}
