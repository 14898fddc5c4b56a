// The comparison of runs: draws the previews' viewer, and looks again while one of the runs trains.
/* global drawCharts, gather, viewer */

import { chartData, haveSameLines, updateCharts } from "./charts.js";

const SECONDS = 30;
const part = (root, name) => root.querySelector(`[data-part="${name}"]`);

function showCurves(fresh) {
  const data = chartData(fresh);
  if (haveSameLines(chartData(document), data)) {
    updateCharts(data);
    return;
  }
  part(document, "curves").replaceWith(part(fresh, "curves"));
  if (data.charts.length) drawCharts();
}

async function look() {
  const main = document.querySelector("main[data-live]");
  if (!main || document.hidden || viewer.open) return;
  const answer = await fetch(location.href).catch(() => null);
  if (!answer?.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  showCurves(fresh);
  for (const name of ["runs", "settings", "previews"]) {
    const now = part(document, name);
    const later = part(fresh, name);
    if (!now.isEqualNode(later)) now.replaceWith(later);
  }
  gather();
  main.toggleAttribute("data-live", Boolean(fresh.querySelector("main[data-live]")));
}

gather();
setInterval(look, SECONDS * 1000);
