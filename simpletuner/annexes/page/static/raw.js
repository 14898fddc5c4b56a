// The files of a config as JSON: all keys, including those without a field, and the text of files that are not JSON.
import { asJson, bindJson, isObject, page, problemLine, showJson, state } from "./form.js";

const areas = { config: page("#raw-config"), datasets: page("#raw-datasets") };
const kinds = { config: [isObject, "one JSON object: { }"], datasets: [(value) => Array.isArray(value) && value.every(isObject), "a list of JSON objects: [{ }]"] };

// The page's current content.
export function show() {
  for (const [name, value] of Object.entries({ config: state.values, datasets: state.datasets.entries })) {
    const broken = state.broken[name];
    showJson(areas[name], broken?.text ?? asJson(value));
    if (areas[name].classList.contains("untaken")) continue; // shows a problem
    areas[name].nextElementSibling.replaceChildren(...(broken?.problems ?? []).map((problem) => problemLine(problem, problem.message)));
    page("#raw").open ||= Boolean(broken);
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
