// The comparison of runs: draws the previews' viewer, and looks again while one of the runs trains.
/* global drawCharts, gather, interpolator, plots, viewer */

const SECONDS = 30;
const part = (root, name) => root.querySelector(`[data-part="${name}"]`);
const dataOf = (root) => JSON.parse(root.querySelector("#charts")?.textContent ?? '{"charts":[]}');
const shapeOf = (data) => JSON.stringify(data.charts.map((chart) => [chart.title, chart.series.map((line) => line.name)]));

function showCurves(fresh) {
  const data = dataOf(fresh);
  if (shapeOf(dataOf(document)) !== shapeOf(data)) {
    part(document, "curves").replaceWith(part(fresh, "curves"));
    if (data.charts.length) drawCharts();
    return;
  }
  for (const plot of plots) {
    plot.update(data.charts.find((chart) => chart.title === plot.figure.dataset.chart), interpolator(data.hours));
  }
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
