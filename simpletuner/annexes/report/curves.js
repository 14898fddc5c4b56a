"use strict";

// Charts. Text is set only through textContent, never as HTML.
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function shape(tag, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

const COLOURS = ["var(--accent)", "var(--accent-2)", "var(--accent-3)", "var(--accent-4)", "var(--accent-5)", "var(--dim)"];
// A line may name its colour: lines of one run then have the same colour in all charts.
const colourOf = (line, index) => COLOURS[(line.colour ?? index) % COLOURS.length];
const MARGIN = { left: 54, right: 10, top: 8, bottom: 24 };

function readable(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

// About `count` round numbers within [low, high], for the ticks of an axis.
function linearTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const ticks = [];
  for (let index = Math.ceil(low / step); index * step <= high + step * 1e-9; index++) ticks.push(index * step);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of [1, 2, 5]) ticks.push(factor * 10 ** power);
  }
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  return inside.length > 7 ? inside.filter((tick) => Number.isInteger(Number(Math.log10(tick).toFixed(6)))) : inside;
}

// Outliers of the raw curve may be clipped, so that they do not flatten the rest.
function valueRange(series, logarithmic) {
  let values = series.flatMap((one) => [...one.raw, ...one.smooth]).map((point) => point[1]);
  if (logarithmic) values = values.filter((value) => value > 0);
  values.sort((a, b) => a - b);
  if (!values.length) return [0.1, 1];
  const at = (share) => values[Math.min(values.length - 1, Math.floor(share * values.length))];
  let [low, high] = [values[0], values[values.length - 1]];
  const usual = at(0.99);
  if (high > 3 * usual && usual > 0) high = 1.5 * usual;
  if (logarithmic) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, low * 1.5), Math.max(0, high * 1.5)];
  const air = (high - low) * 0.06;
  return [low >= 0 ? Math.max(0, low - air) : low - air, high + air];
}

// The point nearest to a position; positions grow with the steps.
function nearest(points, wanted, place = (step) => step) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (place(points[middle][0]) < wanted) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && wanted - place(points[low - 1][0]) < place(points[low][0]) - wanted) low -= 1;
  return points[low];
}

// The hours spent until a step, interpolated between the known points [step, hours].
function interpolator(points) {
  return (step) => {
    const after = points.findIndex((point) => point[0] >= step);
    if (after === 0) return points[0][1];
    if (after < 0) return points.at(-1)[1];
    const [[left, low], [right, high]] = [points[after - 1], points[after]];
    return low + ((step - left) / (right - left)) * (high - low);
  };
}

class Plot {
  constructor(figure, chart, hoursAt) {
    this.holder = figure.querySelector(".plot");
    this.figure = figure;
    this.series = chart.series;
    this.bars = chart.bars;
    this.hoursAt = hoursAt;
    this.logarithmic = false;
    this.overTime = false;
    this.tip = element("div", { class: "tip", hidden: "" });
    const button = figure.querySelector(".log");
    button?.addEventListener("click", () => this.setLogarithmic(!this.logarithmic));
    this.holder.addEventListener("pointermove", (event) => this.point(event));
    this.holder.addEventListener("pointerleave", () => this.unpoint());
    if (this.series.length > 1 || "colour" in this.series[0]) this.holder.before(this.legend());
    new ResizeObserver(() => this.draw()).observe(this.holder);
  }

  setLogarithmic(wanted) {
    this.logarithmic = wanted;
    this.figure.querySelector(".log")?.setAttribute("aria-pressed", String(wanted));
    this.draw();
  }

  setOverTime(wanted) {
    this.overTime = wanted && !this.bars;
    this.draw();
  }

  // Shows newer values of the same series, unless the pointer is over the chart.
  update(chart, hoursAt) {
    if (!this.tip.hidden) return;
    [this.series, this.hoursAt] = [chart.series, hoursAt];
    this.draw();
  }

  // Position of a step on the horizontal axis: the step itself, or the hours spent until then.
  place(step) {
    return this.overTime ? this.hoursAt(step) : step;
  }

  legend() {
    const items = this.series.map((one, index) => {
      const line = element("i");
      line.style.background = colourOf(one, index); // a served page allows no style attributes
      return element("span", {}, line, one.name);
    });
    return element("div", { class: "key-line" }, ...items);
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.holder;
    if (!width) return;
    const steps = this.series.flatMap((one) => one.raw.map((point) => point[0]));
    const [first, last] = this.bars ? [0, 1000] : [Math.min(...steps), Math.max(...steps)].map((step) => this.place(step));
    const [low, high] = this.bars ? [0, 1.06 * valueRange(this.series, false)[1]] : valueRange(this.series, this.logarithmic);
    const scale = this.logarithmic ? Math.log10 : (value) => value;
    this.right = width - MARGIN.right;
    const scaleX = (this.right - MARGIN.left) / (last - first || 1);
    this.placeX = (place) => MARGIN.left + (place - first) * scaleX;
    this.x = (step) => this.placeX(this.place(step));
    const floor = this.floor = height - MARGIN.bottom;
    this.y = (value) => floor - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (floor - MARGIN.top);
    this.svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.summary() });
    this.svg.append(this.frame(width, height, first, last, low, high));
    this.series.forEach((one, index) => this.svg.append(...this.lines(one, colourOf(one, index))));
    this.marks = shape("g");
    this.svg.append(this.marks);
    this.holder.replaceChildren(this.svg, this.tip);
  }

  // A description of the curves for screen readers.
  summary() {
    const ends = this.series.map(({ name, raw, smooth }) => {
      const points = smooth.length ? smooth : raw;
      return `${name} from ${readable(points[0][1])} to ${readable(points.at(-1)[1])}`;
    });
    return `${this.figure.dataset.chart}: ${ends.join(", ")}, ${this.bars ? "by timestep" : `steps ${this.series[0].raw[0][0]} to ${this.series[0].raw.at(-1)[0]}`}`;
  }

  frame(width, height, first, last, low, high) {
    const group = shape("g");
    for (const value of this.logarithmic ? logTicks(low, high) : linearTicks(low, high, height / 36)) {
      const y = this.y(value);
      group.append(shape("line", { class: "rule", x1: MARGIN.left, x2: this.right, y1: y, y2: y }));
      group.append(shape("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, readable(value)));
    }
    let places = last > first ? linearTicks(first, last, Math.max(2, width / 60)) : [first];
    if (!this.overTime) places = places.filter(Number.isInteger);
    for (const place of places) {
      const x = this.placeX(place);
      const text = this.overTime ? `${readable(place)} h` : place.toLocaleString("en");
      group.append(shape("text", { x, y: height - 6, "text-anchor": x > this.right - 20 ? "end" : "middle" }, text));
    }
    return group;
  }

  lines(one, colour) {
    if (this.bars) return this.columns(one, colour);
    const path = (points) => points
      .filter((point) => !this.logarithmic || point[1] > 0)
      .map((point, index) => `${index ? "L" : "M"}${this.x(point[0]).toFixed(1)} ${Math.max(-4, this.y(point[1])).toFixed(1)}`)
      .join("");
    const faint = one.smooth.length > 0;
    const opacity = one.raw.length > 400 ? 0.22 : 0.33;
    const raw = shape("path", { d: path(one.raw), stroke: colour, "stroke-width": faint ? 1 : 2, opacity: faint ? opacity : 1 });
    const dots = one.raw.length <= 30 && !faint
      ? one.raw.map((point) => shape("circle", { cx: this.x(point[0]), cy: this.y(point[1]), r: 3, fill: colour })) : [];
    return faint ? [raw, shape("path", { d: path(one.smooth), stroke: colour, "stroke-width": 2.2 })] : [raw, ...dots];
  }

  columns(one, colour) {
    const width = (this.right - MARGIN.left) / one.raw.length;
    return one.raw.map(([place, value]) => shape("rect", {
      x: this.placeX(place) - width / 2 + 1, y: this.y(value), width: width - 2, height: this.floor - this.y(value),
      rx: 2, fill: colour, opacity: 0.8,
    }));
  }

  point(event) {
    if (!this.svg) return;
    const box = this.holder.getBoundingClientRect();
    const step = nearest(this.series[0].raw, event.clientX - box.left, (each) => this.x(each))[0];
    const x = this.x(step);
    this.marks.replaceChildren(shape("line", { class: "cross", x1: x, x2: x, y1: MARGIN.top, y2: box.height - MARGIN.bottom }));
    const texts = [this.headline(step)];
    this.series.forEach((one, index) => {
      const point = nearest(one.raw, step);
      const shown = one.smooth.length ? nearest(one.smooth, step) : point;
      const smooth = one.smooth.length ? `, smoothed ${readable(shown[1])}` : "";
      const where = point[0] === step ? "" : ` (step ${point[0].toLocaleString("en")})`;
      texts.push(`${one.name} ${readable(point[1])}${smooth}${where}`);
      const spot = { cx: this.x(shown[0]), cy: this.y(shown[1]), r: 4, fill: colourOf(one, index) };
      this.marks.append(shape("circle", spot));
    });
    this.tip.textContent = texts.join("\n");
    this.tip.hidden = false;
    const room = box.width - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, x < box.width / 2 ? x + 12 : x - this.tip.offsetWidth - 12))}px`;
  }

  headline(step) {
    if (this.bars) return `timesteps around ${step}`;
    const name = `step ${step.toLocaleString("en")}`;
    return this.overTime ? `${name}, ${this.hoursAt(step).toFixed(2)} h` : name;
  }

  unpoint() {
    this.tip.hidden = true;
    this.marks?.replaceChildren();
  }
}

let plots = [];

function setAxis(axis) {
  for (const button of document.querySelectorAll(".axis button")) button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
  for (const plot of plots) plot.setOverTime(axis === "hours");
}

// Draws the charts in #charts; called again when the page's charts change.
function drawCharts() {
  const { charts, hours } = JSON.parse(document.getElementById("charts").textContent);
  plots = [...document.querySelectorAll("figure.chart")].map((figure) =>
    new Plot(figure, charts.find((chart) => chart.title === figure.dataset.chart), interpolator(hours)));
  document.querySelector(".axis").hidden = hours.length < 2;
  setAxis("steps");
}

document.addEventListener("click", (event) => {
  const button = event.target.closest(".axis button");
  if (button) setAxis(button.dataset.axis);
});
if (document.getElementById("charts")) drawCharts();
