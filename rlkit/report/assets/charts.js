// Curves, drawn by uPlot.
const SERIES = 8;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const unitOf = { share: percent };

const smooth = (values, weight) => {
  if (!weight) return values;
  let mean = 0;
  let share = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share; // without the pull of the zero that it starts from
  });
};

const aligned = (curves) => {
  const steps = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, i) => [step, i]));
  const columns = curves.map((curve) => {
    const column = new Array(steps.length).fill(null);
    curve.x.forEach((step, i) => (column[at.get(step)] = curve.y[i]));
    return column;
  });
  return [steps, columns];
};

// Width of the numbers beside a chart: what the longest needs, such as -1.00e-8.
const room = (_, labels) => Math.max(52, ...(labels || []).map((label) => 12 + 7 * label.length));

// Ticks with as many digits as tell them apart: of a curve between 1 and 1.00002 three would make all of them 1.
const ticked = (ticks, format) => {
  for (let digits = 3; digits < 12; digits++) {
    const labels = ticks.map((tick) => format(tick, digits));
    if (new Set(labels).size === labels.length) return labels;
  }
  return ticks.map((tick) => format(tick));
};

const stacked = (columns) => {
  const below = new Array(columns[0].length).fill(0);
  return columns.map((column) => column.map((value, i) => (below[i] += value || 0)));
};

class Chart {
  constructor(panel, smoothing) {
    this.panel = panel;
    this.smoothing = smoothing;
    this.host = h("div", { class: "plot" });
    const bad = panel.curves.filter((curve) => curve.bad);
    const many = bad.reduce((sum, curve) => sum + curve.bad, 0);
    this.node = h(
      "article",
      { class: "card", title: panel.standard ? "" : panel.title },
      h("h3", {}, panel.title, h("span", {}, panel.note)),
      this.host,
      bad.length > 0 && h("p", { class: "bad" }, `${plural(many, "value")} not finite, first at step ${bad[0].bad_at[0]}`),
    );
  }

  draw() {
    const width = Math.floor(this.host.clientWidth);
    if (!width) return;
    if (this.plot) this.plot.destroy();
    const { panel } = this;
    const stack = panel.unit === "stack";
    const [steps, columns] = aligned(panel.curves);
    const smoothed = columns.map((column) => smooth(column, this.smoothing));
    const shown = stack ? stacked(smoothed) : smoothed;
    const order = shown.map((_, i) => i);
    if (stack) order.reverse(); // the highest is filled first, the others over it
    const format = unitOf[panel.unit] || number;
    const line = css("--line");
    const ink = css("--muted");
    const font = "11px system-ui, sans-serif";
    const few = steps.length <= 60;
    const series = [{ label: "step" }];
    const data = [steps];
    for (const i of order) {
      const colour = css(`--series-${i % SERIES}`);
      if (this.smoothing && !stack) {
        series.push({ stroke: `${colour}38`, width: 1, spanGaps: true, points: { show: false }, class: "raw" });
        data.push(columns[i]);
      }
      series.push({
        label: panel.curves[i].label,
        stroke: stack ? css("--card") : colour,
        fill: stack ? colour : undefined,
        width: stack ? 1 : 1.75,
        spanGaps: true,
        points: { show: !stack && few && !this.smoothing, size: 5, fill: colour },
        value: (plot, _, __, at) => {
          const own = at === null || at === undefined ? lastOf(smoothed[i]) : smoothed[i][at]; // not that of the stack
          return format(own);
        },
        colour,
      });
      data.push(shown[i]);
    }
    const axis = { stroke: ink, font, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 } };
    const floor = stack || panel.unit === "share";
    this.plot = new uPlot(
      {
        width,
        height: 190,
        series,
        padding: [10, 8, 0, 0],
        cursor: { sync: { key: "steps" }, points: { size: 7 }, drag: { x: true, y: false } },
        legend: { live: true, markers: { width: 0, fill: (_, i) => series[i].colour || "transparent" } },
        scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : low === null ? [0, 1] : margins(low, high, panel.curves)) }, y: { range: (_, low, high) => span(...wider(low, high, panel.curves), floor) } },
        hooks: { draw: [(plot) => intervals(plot, panel.curves)] },
        axes: [
          { ...axis, size: 26, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? number(tick) : "")) },
          { ...axis, size: room, values: (_, ticks) => ticked(ticks, format) },
        ],
      },
      data,
      this.host,
    );
    // What is shown raw behind its smoothed self has no line of its own in the legend.
    this.host.querySelectorAll(".u-legend .raw").forEach((row) => row.remove());
  }
}

const whole = (curves) => curves.filter((curve) => curve.low && curve.high);
// Room for intervals: above and below, and beside the first and the last.
const wider = (low, high, curves) => low === null || high === null || low === undefined ? [low, high] : [Math.min(low, ...whole(curves).flatMap((curve) => curve.low)), Math.max(high, ...whole(curves).flatMap((curve) => curve.high))];
const margins = (low, high, curves) => (whole(curves).length ? [low - 0.03 * (high - low), high + 0.03 * (high - low)] : [low, high]);

const lastOf = (values) => {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
};

const span = (low, high, floor) => {
  if (low === null || high === null || low === undefined) return [0, 1];
  if (floor) low = Math.min(0, low);
  if (high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high))) {
    // A flat curve, but for rounding: ticks that fine cannot be told apart, and uPlot would make them without end.
    const around = Math.abs(low) * 0.1 || (floor ? 0.1 : 0.5);
    return floor ? [low, high + around] : [low - around, high + around];
  }
  const room = (high - low) * 0.06;
  return [floor && low === 0 ? 0 : low - room, high + room];
};

// Vertical lines from low to high, where a curve has them.
const intervals = (plot, curves) => {
  const { ctx } = plot;
  ctx.save();
  curves.forEach((curve, i) => {
    if (!curve.low || !curve.high) return;
    ctx.strokeStyle = css(`--series-${i % SERIES}`);
    ctx.lineWidth = devicePixelRatio;
    ctx.beginPath();
    curve.x.forEach((step, at) => {
      const x = plot.valToPos(step, "x", true);
      const ends = [curve.low[at], curve.high[at]].map((value) => plot.valToPos(value, "y", true));
      ctx.moveTo(x, ends[0]);
      ctx.lineTo(x, ends[1]);
      for (const y of ends) ctx.rect(x - 4 * devicePixelRatio, y, 8 * devicePixelRatio, 0);
    });
    ctx.stroke();
  });
  ctx.restore();
};

// Draws charts when they come into view, again when the width, the smoothing or the theme changes.
class Gallery {
  constructor() {
    this.charts = new Map();
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const chart = this.charts.get(entry.target);
        if (chart) chart.visible = entry.isIntersecting;
        if (chart && entry.isIntersecting && chart.stale) this.paint(chart);
      }
    }, { rootMargin: "200px" });
    this.sized = new ResizeObserver((entries) => {
      for (const entry of entries) {
        const chart = this.charts.get(entry.target);
        if (chart && Math.floor(chart.host.clientWidth) !== chart.width) this.touch(chart);
      }
    });
  }

  paint(chart) {
    chart.stale = false;
    chart.width = Math.floor(chart.host.clientWidth);
    chart.draw();
  }

  touch(chart) {
    chart.stale = true;
    if (chart.visible) this.paint(chart);
  }

  add(panel, parent) {
    const chart = new Chart(panel, 0);
    chart.stale = true;
    this.charts.set(chart.node, chart);
    parent.append(chart.node);
    this.seen.observe(chart.node);
    this.sized.observe(chart.node);
    return chart;
  }

  redraw(smoothing) {
    for (const chart of this.charts.values()) {
      if (smoothing !== undefined) chart.smoothing = smoothing;
      this.touch(chart);
    }
  }
}
