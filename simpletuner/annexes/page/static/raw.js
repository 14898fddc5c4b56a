// The files of a config as JSON: every key, also those that no field shows, and the text of a file that is no JSON.
import { element, page, problemLine, state } from "./form.js";

const areas = { config: page("#raw-config"), datasets: page("#raw-datasets") };
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const kinds = { config: [isObject, "one JSON object: { }"], datasets: [(value) => Array.isArray(value) && value.every(isObject), "a list of JSON objects: [{ }]"] };
const told = (name, ...lines) => areas[name].nextElementSibling.replaceChildren(...lines);

// What the page has now; not while somebody types.
export function show() {
  for (const [name, value] of Object.entries({ config: state.values, datasets: state.datasets.entries })) {
    const broken = state.broken[name];
    if (areas[name] !== document.activeElement) areas[name].value = broken?.text ?? JSON.stringify(value, null, 2);
    if (!broken) continue;
    told(name, ...broken.problems.map((problem) => problemLine(problem, problem.message)));
    page("#raw").open = true;
  }
}

for (const [name, area] of Object.entries(areas)) {
  area.addEventListener("input", () => {
    const [fits, kind] = kinds[name];
    try {
      const value = JSON.parse(area.value);
      if (!fits(value)) throw new Error(`It must be ${kind}`);
      if (name === "config") state.values = value;
      else state.datasets.entries = value;
      told(name);
      document.dispatchEvent(new Event("edited"));
    } catch (error) {
      told(name, element("p", { className: "bad", textContent: `Not taken: ${error.message}` }));
    }
  });
  area.addEventListener("blur", show);
}
