// The curves of a page that is read again: new points go into the charts that curves.js has drawn.
/* global interpolator, plots */

export const chartData = (root) => JSON.parse(root.querySelector("#charts")?.textContent ?? '{"charts":[]}');

const linesOf = (chart) => [chart.title, chart.series.map((line) => line.name)];
const shapeOf = (data) => JSON.stringify(data.charts.map(linesOf));

// Whether the charts and their lines are the same, whatever their points.
export const haveSameLines = (data, other) => shapeOf(data) === shapeOf(other);

export function updateCharts(data) {
  for (const plot of plots) {
    const chart = data.charts.find(({ title }) => title === plot.figure.dataset.chart);
    plot.update(chart, interpolator(data.hours));
  }
}
