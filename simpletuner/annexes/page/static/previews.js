// The previews of a run: their size, a slider over their steps, and the step that they are shown beside.
/* global gather, playButton */

import { parsed, parts, morphChildren, run, want } from "./run.js";

const place = document.querySelector("[data-part=previews]");
const SIZES = { S: 150, M: 240, L: 400 }; // least width of a preview in pixels
const GAP = 14;
const chosen = { run: "", step: "", beside: "", page: "" }; // of the run on view; empty: what the server chooses
let size = localStorage.getItem("preview-size") ?? "M";
let request = null;

// ---- Size: rows are filled, and have as equal a number of previews as possible ----

// On a phone, there are two in a row, unless large ones are wanted or each is a pair.
const fewest = (box) => (size === "L" || box.querySelector(".beside") ? 1 : 2);

function arrange() {
  for (const button of place.querySelectorAll("[data-size]")) button.setAttribute("aria-pressed", String(button.dataset.size === size));
  for (const box of place.querySelectorAll(".shots")) {
    const count = box.childElementCount;
    const most = Math.max(fewest(box), Math.floor((box.clientWidth + GAP) / ((SIZES[size] ?? SIZES.M) + GAP)));
    const rows = Math.ceil(count / most);
    box.style.setProperty("--columns", Math.max(1, Math.ceil(count / rows)));
  }
}

new ResizeObserver(arrange).observe(place);

function setSize(wanted) {
  size = wanted;
  localStorage.setItem("preview-size", size);
  arrange();
}

// ---- Steps ----

const query = () => {
  const asked = Object.entries(chosen).filter(([name, value]) => name !== "run" && value);
  return new URLSearchParams(asked).toString();
};

// Only the large previews are fetched while the slider is dragged; an older answer is dropped.
async function showStep() {
  const asked = run;
  parts.previews.query = query();
  request?.abort();
  request = new AbortController();
  const path = `/runs/${encodeURIComponent(run)}/previews?${query()}&only=shots`;
  // An abort, by the next step, rejects either promise.
  const html = await fetch(path, { signal: request.signal }).then((answer) => (answer.ok ? answer.text() : "")).catch(() => "");
  const fresh = parsed(html).querySelector(".shots.main");
  const shown = place.querySelector(".shots.main");
  if (!fresh || !shown || asked !== run) return; // another run was chosen meanwhile
  morphChildren(shown, fresh);
  arrange();
  gather();
}

function slide(slider) {
  const steps = JSON.parse(slider.dataset.steps);
  const index = Number(slider.value);
  const step = steps[index];
  slider.parentElement.querySelector("output").textContent = step.toLocaleString("en");
  slider.setAttribute("aria-valuetext", `step ${step}`);
  chosen.step = index === steps.length - 1 ? "" : String(step); // the newest: follows the run
  showStep();
}

// ---- What the server has drawn ----

place.addEventListener("shown", () => {
  if (chosen.run !== run) Object.assign(chosen, { run, step: "", beside: "", page: "" });
  for (const select of place.querySelectorAll("select[data-value]")) select.value = select.dataset.value;
  const slider = place.querySelector(".slider input");
  if (slider && slider !== document.activeElement) slider.value = slider.getAttribute("value");
  arrange();
});

place.addEventListener("input", ({ target }) => {
  if (target.matches(".slider input")) slide(target);
});

place.addEventListener("change", ({ target }) => {
  const { choice } = target.dataset;
  if (!choice) return;
  chosen[choice] = target.value;
  parts.previews.query = query();
  if (choice === "page") want("previews");
  else showStep();
});

place.addEventListener("click", ({ target }) => {
  if (target.dataset.size) setSize(target.dataset.size);
});
