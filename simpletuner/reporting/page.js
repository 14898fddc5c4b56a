"use strict";

// Texts reach the page through textContent only, never as HTML.
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

// ---- Curves ----

const COLOURS = ["var(--accent)", "var(--accent-2)", "var(--accent-3)", "var(--dim)"];
const MARGIN = { left: 54, right: 10, top: 8, bottom: 24 };

function readable(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

// Round numbers inside [low, high], about `count` of them.
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

// A few wild values should not flatten the rest: they may leave the frame of the raw curve.
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

function nearest(points, step) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && step - points[low - 1][0] < points[low][0] - step) low -= 1;
  return points[low];
}

class Plot {
  constructor(figure, chart) {
    this.holder = figure.querySelector(".plot");
    this.series = chart.series;
    this.logarithmic = false;
    this.tip = element("div", { class: "tip", hidden: "" });
    const button = figure.querySelector(".log");
    button?.addEventListener("click", () => {
      this.logarithmic = !this.logarithmic;
      button.setAttribute("aria-pressed", String(this.logarithmic));
      this.draw();
    });
    this.holder.addEventListener("pointermove", (event) => this.point(event));
    this.holder.addEventListener("pointerleave", () => this.unpoint());
    if (this.series.length > 1) this.holder.before(this.legend());
    new ResizeObserver(() => this.draw()).observe(this.holder);
  }

  legend() {
    const items = this.series.map((one, index) =>
      element("span", {}, element("i", { style: `background:${COLOURS[index % COLOURS.length]}` }), one.name));
    return element("div", { class: "key-line" }, ...items);
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.holder;
    if (!width) return;
    const steps = this.series.flatMap((one) => one.raw.map((point) => point[0]));
    const [first, last] = [Math.min(...steps), Math.max(...steps)];
    const [low, high] = valueRange(this.series, this.logarithmic);
    const scale = this.logarithmic ? Math.log10 : (value) => value;
    this.right = width - MARGIN.right;
    this.x = (step) => MARGIN.left + ((step - first) / Math.max(1, last - first)) * (this.right - MARGIN.left);
    this.stepAt = (x) => first + ((x - MARGIN.left) / (this.right - MARGIN.left)) * (last - first);
    const floor = height - MARGIN.bottom;
    this.y = (value) => floor - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (floor - MARGIN.top);
    this.svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    this.svg.append(this.frame(width, height, first, last, low, high));
    this.series.forEach((one, index) => this.svg.append(...this.lines(one, COLOURS[index % COLOURS.length])));
    this.marks = shape("g");
    this.svg.append(this.marks);
    this.holder.replaceChildren(this.svg, this.tip);
  }

  frame(width, height, first, last, low, high) {
    const group = shape("g");
    for (const value of this.logarithmic ? logTicks(low, high) : linearTicks(low, high, height / 45)) {
      const y = this.y(value);
      group.append(shape("line", { class: "rule", x1: MARGIN.left, x2: this.right, y1: y, y2: y }));
      group.append(shape("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, readable(value)));
    }
    const steps = last > first ? linearTicks(first, last, Math.max(2, width / 90)).filter(Number.isInteger) : [first];
    for (const step of steps) {
      const anchor = this.x(step) > this.right - 20 ? "end" : "middle";
      const place = { x: this.x(step), y: height - 6, "text-anchor": anchor };
      group.append(shape("text", place, step.toLocaleString("en")));
    }
    return group;
  }

  lines(one, colour) {
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

  point(event) {
    if (!this.svg) return;
    const box = this.holder.getBoundingClientRect();
    const wanted = this.stepAt(Math.min(Math.max(event.clientX - box.left, MARGIN.left), this.right));
    const step = nearest(this.series[0].raw, wanted)[0];
    const x = this.x(step);
    this.marks.replaceChildren(shape("line", { class: "cross", x1: x, x2: x, y1: MARGIN.top, y2: box.height - MARGIN.bottom }));
    const texts = [`step ${step.toLocaleString("en")}`];
    this.series.forEach((one, index) => {
      const point = nearest(one.raw, step);
      const shown = one.smooth.length ? nearest(one.smooth, step) : point;
      const smooth = one.smooth.length ? `, smoothed ${readable(shown[1])}` : "";
      const where = point[0] === step ? "" : ` (step ${point[0].toLocaleString("en")})`;
      texts.push(`${one.name} ${readable(point[1])}${smooth}${where}`);
      const spot = { cx: this.x(shown[0]), cy: this.y(shown[1]), r: 4, fill: COLOURS[index % COLOURS.length] };
      this.marks.append(shape("circle", spot));
    });
    this.tip.textContent = texts.join("\n");
    this.tip.hidden = false;
    const room = box.width - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, x < box.width / 2 ? x + 12 : x - this.tip.offsetWidth - 12))}px`;
  }

  unpoint() {
    this.tip.hidden = true;
    this.marks?.replaceChildren();
  }
}

const charts = JSON.parse(document.getElementById("charts").textContent);
for (const figure of document.querySelectorAll("figure.chart")) {
  new Plot(figure, charts.find((chart) => chart.title === figure.dataset.chart));
}

// ---- Previews ----

// Two pictures of one size on top of each other, and a line between them that follows the finger.
function comparison(before, after) {
  const input = element("input", { type: "range", min: "0", max: "100", step: "0.1", value: "50", "aria-label": "Compare" });
  const box = element("div", { class: "compare" },
    element("img", { src: before.src, alt: before.alt, width: before.width, height: before.height }),
    element("img", { src: after.src, alt: after.alt, class: "after" }),
    element("span", { class: "handle" }),
    element("span", { class: "tag left" }, before.label), element("span", { class: "tag right" }, after.label), input);
  input.addEventListener("input", () => box.style.setProperty("--cut", `${input.value}%`));
  return box;
}

function single(picture) {
  return element("div", { class: "compare" },
    element("img", { src: picture.src, alt: picture.alt, width: picture.width, height: picture.height }),
    element("span", { class: "tag left" }, picture.label));
}

const rows = [...document.querySelectorAll(".previews tbody tr")].map((line) => ({
  name: line.querySelector("th").cloneNode(true),
  title: line.querySelector("th b").textContent,
  pictures: [...line.querySelectorAll("button.preview")].map((button) => {
    const image = button.querySelector("img");
    const label = `step ${Number(button.dataset.step).toLocaleString("en")}`;
    const [width, height] = [image.getAttribute("width"), image.getAttribute("height")];
    return { button, src: image.src, alt: image.alt, label, width, height };
  }),
}));

const comparisonSection = document.getElementById("comparison");
if (comparisonSection) {
  const place = comparisonSection.querySelector(".comparisons");
  for (const row of rows.filter((one) => one.pictures.length > 1).slice(0, 8)) {
    const caption = element("figcaption", {}, ...[...row.name.childNodes].map((node) => node.cloneNode(true)));
    place.append(element("figure", { class: "comparison" }, comparison(row.pictures[0], row.pictures.at(-1)), caption));
  }
  comparisonSection.hidden = !place.childElementCount;
}

const viewer = document.getElementById("viewer");

function show(row, index) {
  const [first, picture] = [row.pictures[0], row.pictures[index]];
  const arrow = (label, text, target) => {
    const button = element("button", { type: "button", "aria-label": label }, text);
    button.disabled = !row.pictures[target];
    button.addEventListener("click", () => show(row, target));
    return button;
  };
  const close = element("button", { type: "button", "aria-label": "Close" }, "✕");
  close.addEventListener("click", () => viewer.close());
  const what = element("span", { class: "what" }, element("b", {}, row.title), ` · ${picture.label}`);
  viewer.style.setProperty("--ratio", picture.width / picture.height);
  viewer.replaceChildren(index ? comparison(first, picture) : single(picture),
    element("div", { class: "viewer-bar" }, what, arrow("Earlier", "←", index - 1), arrow("Later", "→", index + 1), close));
  viewer.onkeydown = (event) => {
    const target = index + { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.target.type !== "range" && row.pictures[target]) show(row, target);
  };
  if (!viewer.open) viewer.showModal();
}

for (const row of rows) {
  row.pictures.forEach((picture, index) => picture.button.addEventListener("click", () => show(row, index)));
}
viewer.addEventListener("click", (event) => { if (event.target === viewer) viewer.close(); });
