// Four small charts over the last minutes, drawn by uPlot. Each snapshot is a point; nothing is kept on the server.

const POINTS = 480;
const HEIGHT = 116;

const CHARTS = {
  rate: { series: [["tok/s", "--chart-0", true]] },
  gap: { series: [["slowest", "--chart-3", false], ["median", "--chart-0", true]] },
  step: { series: [["schedule", "--chart-4", true], ["move", "--chart-3", true], ["emit", "--chart-1", true], ["sample", "--chart-2", true], ["decode", "--chart-0", true]], stacked: true },
  cells: { series: [["cached", "--chart-4", true], ["in use", "--chart-0", true]], stacked: true },
};

const read = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Charts {
  constructor(byId) {
    this.byId = byId;
    this.data = {};
    this.plots = {};
    for (const [name, { series }] of Object.entries(CHARTS)) this.data[name] = [[], ...series.map(() => [])];
    const observer = new ResizeObserver(() => this.resize());
    observer.observe(byId("c-rate").parentElement);
  }

  add(snapshot, rate) {
    const { now, cells } = snapshot;
    const step = rate?.step;
    this.push("rate", now, [rate ? rate.tokens : null]);
    this.push("gap", now, [rate?.slowest ?? null, rate?.gap ?? null]);
    this.push("step", now, step ? [step.schedule, step.move, step.emit, step.sample, step.decode] : Array(5).fill(null));
    this.push("cells", now, cells ? [cells.cached, cells.used - cells.cached] : [null, null]);
  }

  push(name, now, values) {
    const data = this.data[name];
    let below = 0;
    const heights = CHARTS[name].stacked
      ? values.slice().reverse().map((value) => (value === null ? null : (below += value))).reverse()
      : values;
    [now, ...heights].forEach((value, index) => {
      data[index].push(value);
      if (data[index].length > POINTS) data[index].shift();
    });
    this.plots[name] ??= this.make(name);
    const from = data[0][0];
    this.plots[name].setData(data, false);
    this.plots[name].setScale("x", { min: Math.min(from, now - 30), max: now });
  }

  make(name) {
    const ink = read("--ink-3");
    const axis = { stroke: ink, grid: { stroke: read("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const now = () => this.data[name][0].at(-1);
    const options = {
      width: this.width(name),
      height: HEIGHT,
      padding: [8, 16, 0, 0],
      cursor: { points: { size: 6 }, drag: { x: false, y: false }, y: false },
      legend: { show: CHARTS[name].series.length > 1, live: false, markers: { width: 0, fill: (plot, index) => read(CHARTS[name].series[index - 1][1]) } },
      scales: { x: { time: false, auto: false }, y: { range: (plot, low, high) => [0, Math.max(1, (high || 0) * 1.1)] } },
      axes: [
        { ...axis, size: 22, space: 60, values: (plot, ticks) => ticks.map((at) => (now() - at < 1 ? "now" : `${Math.round(at - now())} s`)), splits: () => this.splits(name) },
        { ...axis, size: 40, space: 30, values: (plot, ticks) => ticks.map((at) => (at >= 1000 ? `${at / 1000}k` : at)) },
      ],
      series: [{}, ...CHARTS[name].series.map(([label, color, filled]) => ({ label, stroke: read(color), width: 1.5, fill: filled ? read(color) + (CHARTS[name].stacked ? "" : "2a") : undefined, points: { show: false }, spanGaps: false }))],
    };
    return new uPlot(options, this.data[name], this.byId(`c-${name}`));
  }

  /** Round distances from now, so that the labels stand still while the line moves. */
  splits(name) {
    const times = this.data[name][0];
    const now = times.at(-1);
    const span = Math.max(30, now - times[0]);
    const every = [5, 10, 15, 30, 60, 120].find((step) => span / step <= 4) ?? 120;
    const found = [];
    for (let back = 0; back <= span; back += every) found.unshift(now - back);
    return found;
  }

  width(name) {
    return Math.max(160, this.byId(`c-${name}`).clientWidth);
  }

  resize() {
    for (const [name, plot] of Object.entries(this.plots)) plot.setSize({ width: this.width(name), height: HEIGHT });
  }

  /** Colours changed: uPlot reads them only when it is made. */
  restyle() {
    for (const name of Object.keys(this.plots)) {
      this.plots[name].destroy();
      this.plots[name] = this.make(name);
      const now = this.data[name][0].at(-1);
      this.plots[name].setScale("x", { min: Math.min(this.data[name][0][0], now - 30), max: now });
    }
  }
}
