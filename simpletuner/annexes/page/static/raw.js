// The files of a config as JSON: every key, also those that no field shows, and the text of a file that is no JSON.
import { asJson, bindJson, isObject, page, problemLine, showJson, state } from "./form.js";

const areas = { config: page("#raw-config"), datasets: page("#raw-datasets") };
const kinds = { config: [isObject, "one JSON object: { }"], datasets: [(value) => Array.isArray(value) && value.every(isObject), "a list of JSON objects: [{ }]"] };

// What the page has now.
export function show() {
  for (const [name, value] of Object.entries({ config: state.values, datasets: state.datasets.entries })) {
    const broken = state.broken[name];
    showJson(areas[name], broken?.text ?? asJson(value));
    if (!broken) continue;
    areas[name].nextElementSibling.replaceChildren(...broken.problems.map((problem) => problemLine(problem, problem.message)));
    page("#raw").open = true;
  }
}

for (const [name, area] of Object.entries(areas)) {
  bindJson(area, area.nextElementSibling, kinds[name], (value) => {
    if (name === "config") state.values = value;
    else state.datasets.entries = value;
    document.dispatchEvent(new Event("edited"));
  });
  area.addEventListener("blur", show);
}
