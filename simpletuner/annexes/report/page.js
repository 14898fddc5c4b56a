"use strict";

gather();
const comparisonSection = document.getElementById("comparison");
if (comparisonSection) fillComparison(comparisonSection);

// ---- Copying the snippet ----

for (const copy of document.querySelectorAll(".snippet .copy")) {
  const code = copy.parentElement.querySelector("pre");
  copy.addEventListener("click", () => {
    getSelection().selectAllChildren(code);
    copy.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl-C";
  });
}

// ---- During the run: reload the page and restore its state ----

const folds = [...document.querySelectorAll("details")];

function remember() {
  const state = {
    scroll: scrollY, open: folds.map((fold) => fold.open), playing,
    logarithmic: plots.map((plot) => plot.logarithmic), overTime: plots.some((plot) => plot.overTime),
  };
  history.replaceState(state, "");
}

function restore() {
  const state = history.state;
  history.replaceState(null, "");
  if (!state) return;
  folds.forEach((fold, index) => { fold.open = state.open[index] ?? fold.open; });
  plots.forEach((plot, index) => plot.setLogarithmic(state.logarithmic[index] ?? false));
  setAxis(state.overTime ? "hours" : "steps");
  if (playing !== state.playing) document.querySelector("button.play")?.click();
  requestAnimationFrame(() => scrollTo(0, state.scroll));
}

// Not while the viewer is open, a picture is dragged, or text is selected.
let held = false;
addEventListener("pointerdown", () => { held = true; });
addEventListener("pointerup", () => { held = false; });
const isBusy = () => document.hidden || viewer.open || held || !getSelection().isCollapsed;

const seconds = Number(document.querySelector("footer").dataset.refresh);
restore();
if (seconds) {
  history.scrollRestoration = "manual";
  setInterval(() => {
    if (isBusy()) return;
    remember();
    location.reload();
  }, seconds * 1000);
}
