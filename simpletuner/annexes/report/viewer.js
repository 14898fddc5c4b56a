"use strict";

// ---- Clips: all visible ones play together ----

const calm = matchMedia("(prefers-reduced-motion: reduce)");
let playing = !calm.matches;
const inView = new Set();
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) inView.add(target);
    else inView.delete(target);
    run(target);
  }
});

// A clip that was started or paused by its own button stays so until all are played or paused.
function run(clip) {
  if ((clip.wanted ?? playing) && inView.has(clip)) clip.play().catch(() => {});
  else clip.pause();
}

function watch(clip) {
  if (clip.watched) return clip;
  clip.watched = true;
  clip.muted = true; // the attribute alone does not mute a clip that was created by a script
  for (const type of ["play", "pause", "loadedmetadata"]) clip.addEventListener(type, () => describeClip(clip));
  describeClip(clip);
  watcher.observe(clip);
  return clip;
}

// The mark of a clip has its length; its button says what it does.
function describeClip(clip) {
  const mark = clip.parentElement?.querySelector(".clip-mark");
  if (mark && clip.duration) mark.textContent = `▶ ${clip.duration < 0.1 ? "1 frame" : `${clip.duration.toFixed(1)} s`}`;
  const button = clip.closest("figure")?.querySelector("button.play.one");
  if (button) button.textContent = clip.paused ? "Play" : "Pause";
}

document.addEventListener("click", ({ target }) => {
  if (!target.matches("button.play.one")) return;
  const clips = [...target.closest("figure").querySelectorAll("video")];
  const wanted = clips[0].paused;
  for (const clip of clips) {
    clip.wanted = wanted;
    run(clip);
  }
});

// Clips of the same length are kept in sync.
function keepTogether() {
  const leaders = new Map();
  for (const clip of inView) {
    if (!clip.duration) continue;
    const length = clip.duration.toFixed(2);
    const leader = leaders.get(length);
    if (!leader) leaders.set(length, clip);
    else if (Math.abs(clip.currentTime - leader.currentTime) > 0.06) clip.currentTime = leader.currentTime;
  }
}

const labelOfAll = () => (playing ? "Pause all" : "Play all");

function playButton() {
  return element("button", { type: "button", class: "play all" }, labelOfAll());
}

document.addEventListener("click", ({ target }) => {
  if (!target.matches("button.play.all")) return;
  playing = !playing;
  for (const clip of document.querySelectorAll("video")) {
    clip.wanted = undefined;
    run(clip);
  }
  document.querySelectorAll("button.play.all").forEach((each) => { each.textContent = labelOfAll(); });
});

function clipOf(item, more = {}) {
  return watch(element("video", { src: item.source, muted: "", loop: "", playsinline: "", preload: "auto", "aria-label": item.label, ...more }));
}

function pictureOf(item) {
  const size = item.width ? { width: item.width, height: item.height } : {};
  return element("img", { src: item.source, alt: item.label, ...size });
}

// ---- The previews and samples, as items in page order ----

function itemOf(button, group, name, prompt) {
  const media = button.firstElementChild;
  const data = button.dataset;
  return {
    button, group, name, prompt, label: data.label, step: data.step, ema: "ema" in data,
    file: media.src.startsWith("data:") ? data.file : media.src, isClip: media.tagName === "VIDEO",
    source: media.src, width: media.getAttribute("width"), height: media.getAttribute("height"),
  };
}

// In a table, the lines of a prompt share its text.
const promptOf = (row) => (row.querySelector(".prompt") ?? row.closest("tbody").querySelector(".prompt")).textContent;

let items = [];
let rows = [];

// Collects the previews on the page; called again after new ones are added.
function gather() {
  items = [];
  rows = [...document.querySelectorAll(".prompt-row")].map((row, group) => {
    const prompt = promptOf(row);
    const previews = [...row.querySelectorAll("button.preview")].map((button) => itemOf(button, group, row.dataset.name, prompt));
    items.push(...previews.filter((item) => !item.ema), ...previews.filter((item) => item.ema));
    return previews;
  });
  for (const sample of document.querySelectorAll("figure.sample")) {
    const prompt = sample.querySelector("figcaption").title;
    for (const button of sample.querySelectorAll("button.preview")) items.push(itemOf(button, -1, "Training data", prompt));
  }
  for (const shot of document.querySelectorAll("figure.shot")) {
    for (const button of shot.querySelectorAll("button.preview")) addShot(shot, button);
  }
  for (const clip of document.querySelectorAll(":is(.cells, .shot, .compared) video")) describeClip(watch(clip));
  document.querySelectorAll("button.play.all").forEach((each) => { each.textContent = labelOfAll(); });
}

// The item of a button, or of another that shows the same file.
function itemAt(button) {
  const own = items.findIndex((item) => item.button === button);
  return own >= 0 ? own : items.findIndex((item) => item.source === button.firstElementChild.src);
}

// A large preview; the rows of its section may have only a selection of the steps, and no row for its prompt.
function addShot(shot, button) {
  if (itemAt(button) >= 0) return;
  const listed = [...shot.closest("section").querySelectorAll(".prompt-row")].find((row) => row.dataset.name === shot.dataset.name);
  const all = [...document.querySelectorAll(".prompt-row")];
  const group = listed ? all.indexOf(listed) : all.length + [...document.querySelectorAll("figure.shot")].indexOf(shot);
  const item = itemOf(button, group, shot.dataset.name, shot.querySelector(".prompt").textContent);
  const later = items.findIndex((each) => each.group > group || (each.group === group && Number(each.step) > Number(item.step)));
  items.splice(later < 0 ? items.length : later, 0, item);
}
setInterval(keepTogether, 400);

// ---- Before and after ----

// Two overlaid pictures of the same size, with a divider that can be dragged.
function slider(before, after) {
  const input = element("input", { type: "range", min: "0", max: "100", step: "0.1", value: "50", "aria-label": "Compare" });
  const box = element("div", { class: "compare" }, pictureOf(before), pictureOf(after), element("span", { class: "handle" }),
    element("span", { class: "tag left" }, shortLabel(before)), element("span", { class: "tag right" }, shortLabel(after)), input);
  box.children[1].classList.add("after");
  input.addEventListener("input", () => box.style.setProperty("--cut", `${input.value}%`));
  return box;
}

function shortLabel(item) {
  return `${item.ema ? "EMA, " : ""}step ${Number(item.step).toLocaleString("en")}`;
}

function sideBySide(before, after) {
  const half = (item) => element("div", {}, item.isClip ? clipOf(item) : pictureOf(item), element("span", { class: "tag left" }, shortLabel(item)));
  return element("div", { class: "duo" }, half(before), half(after));
}

function compared(before, after) {
  return after.isClip ? sideBySide(before, after) : slider(before, after);
}

// Fills the section with the first and the newest preview of each row, side by side: a slider would hide half of each.
function fillComparison(section, rowsShown = rows) {
  const place = section.querySelector(".comparisons");
  place.replaceChildren();
  for (const row of rowsShown.slice(0, 8)) {
    const plain = row.filter((item) => !item.ema);
    const shown = plain.length > 1 ? plain : row;
    if (shown.length < 2) continue;
    const caption = element("figcaption", {}, element("b", {}, shown[0].name), element("span", { class: "prompt" }, shown[0].prompt));
    place.append(element("figure", { class: "comparison" }, sideBySide(shown[0], shown.at(-1)), caption));
  }
  const hint = section.querySelector(".hint");
  if (place.querySelector("video") && !hint.querySelector("button")) hint.append(" ", playButton());
  section.hidden = !place.childElementCount;
}

// ---- The viewer: one picture or clip, fitted to the window, with its prompt ----

const viewer = document.getElementById("viewer");
const view = { index: 0, compare: false, natural: false };
const moreTools = []; // functions of an item that return further controls for it

function button(text, label, act, { disabled = false, pressed = null } = {}) {
  const made = element("button", { type: "button", "aria-label": label, title: label }, text);
  made.disabled = disabled;
  if (pressed !== null) made.setAttribute("aria-pressed", String(pressed));
  made.addEventListener("click", act);
  return made;
}

// The item with the same step and weights in the next group, or else the group's first item.
function neighbour(direction) {
  const here = items[view.index];
  const next = items.filter((item) => item.group === here.group + direction);
  const same = next.find((item) => item.step === here.step && item.ema === here.ema) ?? next[0];
  return here.group < 0 || !same ? -1 : items.indexOf(same);
}

function show(index) {
  if (!items[index]) return;
  view.index = index;
  const item = items[index];
  const first = items.find((each) => each.group === item.group);
  const canCompare = item.group >= 0 && first !== item && first.isClip === item.isClip;
  const toggle = (key) => () => { view[key] = !view[key]; show(view.index); };
  const stage = element("div", { class: view.natural ? "stage natural" : "stage" },
    view.compare && canCompare ? compared(first, item) : item.isClip ? clipOf(item, { controls: "" }) : pictureOf(item));
  stage.style.setProperty("--ratio", item.width ? item.width / item.height : 1.5);
  const what = element("div", { class: "what" }, element("b", {}, item.name), element("span", { class: "dim" }, ` ${item.label}`),
    element("p", {}, item.prompt));
  const tools = element("div", { class: "tools" },
    button("←", "Previous (left arrow)", () => show(index - 1), { disabled: index === 0 }),
    button("→", "Next (right arrow)", () => show(index + 1), { disabled: index === items.length - 1 }),
    button("↑", "Row above (up arrow)", () => show(neighbour(-1)), { disabled: neighbour(-1) < 0 }),
    button("↓", "Row below (down arrow)", () => show(neighbour(1)), { disabled: neighbour(1) < 0 }),
    ...(canCompare ? [button("Compare", `Compare with ${shortLabel(first)}`, toggle("compare"), { pressed: view.compare })] : []),
    ...moreTools.flatMap((make) => make(item)),
    button("1:1", "Actual pixels", toggle("natural"), { pressed: view.natural }),
    ...(item.file ? [element("a", { href: item.file, target: "_blank", rel: "noopener" }, "File")] : []),
    button("✕", "Close (Escape)", () => viewer.close()));
  viewer.replaceChildren(tools, stage, what);
  if (!viewer.open) viewer.showModal();
  viewer.focus();
}

viewer.addEventListener("keydown", (event) => {
  if (event.target.type === "range") return;
  const targets = {
    ArrowLeft: () => view.index - 1, ArrowRight: () => view.index + 1, ArrowUp: () => neighbour(-1), ArrowDown: () => neighbour(1),
  };
  if (!targets[event.key]) return;
  event.preventDefault();
  show(targets[event.key]());
});
viewer.addEventListener("click", (event) => { if (event.target === viewer) viewer.close(); });
viewer.addEventListener("close", () => viewer.replaceChildren());
document.addEventListener("click", (event) => {
  const opener = event.target.closest("button.preview");
  if (opener) show(itemAt(opener));
});
