// The settings of the open config: the file's values, the page's values, and their problems.
// A field shows a value of `state.values`, or as its placeholder the value that training uses by default.
import { api, element, page, sentences } from "./common.js";

export * from "./common.js";

// `gone` names a file of the open config that was deleted or moved.
export const state = { broken: {}, config: "config", path: "", gone: "", etag: null, file: {}, values: {}, effective: {}, datasets: { etag: null, path: "", file: [], entries: [] } };
// The panes of the form are templates until they are drawn: `fields` and `inForm` are of both.
const parts = [];
export const fields = new Map();
export const inForm = (selector) => parts.map((part) => part.querySelector(selector)).find(Boolean);

// Finds the fields, once the form is on the page.
export function collectFields(pane) {
  parts.push(pane, ...[...pane.querySelectorAll("template")].map(({ content }) => content));
  for (const field of parts.flatMap((part) => [...part.querySelectorAll(".group .field")])) fields.set(field.dataset.key, field);
}
export const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const clone = (value) => JSON.parse(JSON.stringify(value));
export const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
export const asJson = (value) => JSON.stringify(value, null, 2);

// A field: its common parts, its control, and conversion between the control and JSON.
export function complete(field, prefix) {
  const [label, input, help] = field.children, { key } = field.dataset, id = `${prefix}-${key}`, name = element("div", { className: "name" });
  const words = `Use the default of ${label.textContent}`;
  const reset = element("button", { type: "button", className: "reset", hidden: true, ariaLabel: words, title: "Use the default", textContent: "↺" });
  Object.assign(label, { htmlFor: id, title: key });
  Object.assign(input, { id, autocomplete: "off", spellcheck: false, role: input.type === "checkbox" ? "switch" : null });
  input.setAttribute("aria-describedby", `${id}-help ${id}-told`);
  help.id = `${id}-help`;
  name.append(label, reset);
  const replace = element("button", { type: "button", className: "replace", hidden: true, textContent: "Replace" });
  field.prepend(name, element("div", { className: "set" }, input, replace));
  field.append(element("div", { className: "told", id: `${id}-told` }));
}

const control = (field) => field.querySelector(".set").querySelector("input, select, textarea");
export const defaultOf = ({ dataset }) => JSON.parse(dataset.default ?? "null");
export const isSecret = (value) => same(value, { secret: "set" });
export const written = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

export function showField(field, value, effective) {
  const input = control(field), isSet = value !== undefined, secret = isSecret(value);
  field.classList.toggle("set-here", isSet);
  field.querySelector(".reset").hidden = !isSet;
  field.querySelector(".replace").hidden = !secret;
  input.readOnly = secret;
  const unset = effective === undefined ? defaultOf(field) : effective;
  if (input.type === "checkbox") {
    const word = isSet ? String(value).toLowerCase() : String(unset);
    input.checked = ["true", "1", "yes", "on"].includes(word);
    input.indeterminate = !isSet && unset === null;
    return;
  }
  const fallback = unset === null ? (field.dataset.note ?? "") : written(unset);
  if (input.tagName === "SELECT") {
    input.options[0].textContent = fallback ? `${fallback} (default)` : "";
    const known = [...input.options].find((option) => option.value === written(value ?? ""));
    if (isSet && !known) input.append(element("option", { textContent: written(value) }));
  } else {
    input.placeholder = isSet ? "empty" : fallback;
  }
  // Text is not reformatted while the user types, unless the value changed elsewhere.
  const isTyped = document.activeElement === input && same(readField(field), value);
  if (!isTyped) input.value = secret ? "set" : isSet ? written(value) : "";
}

function readField(field) {
  const input = control(field), text = input.value;
  if (input.type === "checkbox") return input.checked;
  if (text.trim() === "") return undefined;
  if (["int", "float"].includes(field.dataset.type) && Number.isFinite(Number(text))) return Number(text);
  const isJson = field.dataset.type === "json" || (input.tagName !== "SELECT" && /^\s*[[{]/.test(text));
  try {
    return isJson ? JSON.parse(text) : text;
  } catch {
    return text; // the check reports the problem
  }
}

// Calls `set(value)` on every change; undefined removes the key.
export function bindField(field, set) {
  control(field).addEventListener("input", () => set(readField(field)));
  const clear = () => { set(undefined); control(field).focus(); };
  for (const button of field.querySelectorAll(".reset, .replace")) button.addEventListener("click", clear);
}

// Shows a value as JSON. Text that the user is typing, or that is not JSON yet, is kept unless the value changed elsewhere.
const texts = new WeakMap();
export function showJson(area, text) {
  const isTyped = area === document.activeElement || area.classList.contains("untaken");
  if (!isTyped || texts.get(area) !== text) {
    area.value = text;
    area.classList.remove("untaken");
  }
  texts.set(area, text);
}

// Calls `take(value)` on every change to a value of a kind, and shows a problem otherwise.
export function bindJson(area, told, [fits, kind], take) {
  area.addEventListener("input", () => {
    let problem = "";
    try {
      const value = JSON.parse(area.value);
      if (!fits(value)) throw new Error(`It must be ${kind}`);
      texts.set(area, asJson(value));
      take(value);
    } catch (error) {
      problem = `Not taken: ${error.message}`;
    }
    area.classList.toggle("untaken", problem !== "");
    told.replaceChildren(...(problem ? [element("p", { className: "bad", textContent: problem })] : []));
  });
}

// A message as a sentence: most messages follow the name of a key, which is replaced by its label, as are other keys.
// Names of documentation pages become links.
const KEY = /(?<![\w./'"`{=-])[a-z0-9]+(?:_[a-z0-9]+)+(?![\w/'"`}=-]|\.\w)/g;
const PREDICATE = /^(and|are|aligns|can|cannot|does|has|have|is|makes|may|must|needs?|takes|was|would)\b/;
const labelOf = (field) => field?.querySelector("label").textContent;
const labelled = (key) => labelOf(fields.get(key) ?? inForm(`.field[data-key="${CSS.escape(key)}"]`)) ?? key;
const linked = (text) => text.split(/(docs\/[\w/]+\.md)/).map((part, index) => (index % 2 ? element("a", { href: `/${part}`, target: "_blank", textContent: part }) : part));

function sentence(field, { kind, message }) {
  if (kind === "required") return `${labelOf(field)} is required.`; // its message repeats the help beside the field
  const named = message.replace(KEY, labelled);
  return PREDICATE.test(message) ? `${labelOf(field)} ${named}` : named;
}

// A problem, with a button that applies its remedy unless the page already has these settings.
export function problemLine({ key, message, fatal, remedy = {} }, text = `${{ memory: "Memory:", disk: "Disk:" }[key] ?? labelled(key)} ${message.replace(KEY, labelled)}`) {
  const line = element("p", { className: fatal ? "bad" : "warning" }, ...linked(text.trim()));
  const changed = Object.entries(remedy).filter(([name, value]) => !same(state.values[name], value ?? undefined));
  if (!changed.length) return line;
  const removed = changed.filter(([, value]) => value === null).map(([name]) => labelled(name));
  const words = removed.length === changed.length ? `Remove ${removed.join(", ")}` : "Apply";
  const button = element("button", { type: "button", className: "apply", textContent: words });
  button.title = changed.map(([name, value]) => `${labelled(name)}: ${value === null ? "default" : written(value)}`).join(", ");
  button.addEventListener("click", () => document.dispatchEvent(new CustomEvent("apply", { detail: Object.fromEntries(changed) })));
  line.append(" ", button);
  return line;
}

export function tell(field, problems, reason = "") {
  const isMissing = problems.some(({ kind }) => kind === "required");
  // A missing value shows no problem at its default: defaults are not the user's mistake.
  if (isMissing && control(field).tagName === "SELECT") control(field).options[0].textContent = "choose one";
  const isWrong = isMissing || field.classList.contains("set-here");
  field.classList.toggle("wrong", isWrong && problems.some((problem) => problem.fatal));
  field.classList.toggle("warned", problems.some((problem) => !problem.fatal));
  field.classList.toggle("greyed", Boolean(reason));
  control(field).disabled = Boolean(reason);
  control(field).setAttribute("aria-invalid", String(field.classList.contains("wrong")));
  const lines = problems.map((problem) => problemLine(problem, sentence(field, problem)));
  if (reason && !problems.some(({ message }) => message === reason)) lines.push(element("p", { className: "reason", textContent: reason }));
  field.querySelector(".told").replaceChildren(...lines);
}

// The changes to the file, in the server's format: null removes a key.
export function changes(values = state.values, file = state.file) {
  const keys = new Set([...Object.keys(file), ...Object.keys(values)]);
  return Object.fromEntries([...keys].filter((key) => !same(file[key], values[key])).map((key) => [key, values[key] ?? null]));
}
export const datasetsChanged = () => !same(state.datasets.file, state.datasets.entries);
export const isDirty = () => state.gone !== "" || Object.keys(changes()).length > 0 || datasetsChanged();

// Saving. If the file has changed in the meantime, both versions are compared first.
export async function save() {
  if (state.gone) return (await import("./conflict.js")).restore(state.gone);
  const values = changes(), entries = state.datasets.entries, name = encodeURIComponent(state.config), { broken } = state;
  const whole = (part) => (broken[part] ? { whole: true } : {}); // an unreadable file is replaced as a whole
  const first = !Object.keys(values).length || (await put(`/api/configs/${state.config}`, { values, ...whole("config") }, state.etag, takeConfig));
  return first && (!datasetsChanged() || put(`/api/datasets/plan?config=${name}`, { entries, ...whole("datasets") }, state.datasets.etag, takeDatasets));
}

export async function put(path, body, etag, take) {
  const { config } = state;
  const answer = await api(path, { method: "PUT", body, etag });
  if (state.config !== config) return answer.ok; // another config was opened meanwhile
  if (answer.ok) take(answer);
  else if (answer.status === 412) {
    const { restore, settle } = await import("./conflict.js");
    return answer.etag ? settle(answer, take) : restore(answer.data.path);
  } else throw new Error(sentences(answer).join("\n"));
  return true;
}

export function takeConfig({ data, etag }) {
  Object.assign(state, { etag, path: data.path, file: clone(data.values), values: clone(data.values), broken: { ...state.broken, config: null } });
}
function takeDatasets({ data, etag }) {
  Object.assign(state, { datasets: { etag, path: data.path, file: clone(data.entries), entries: clone(data.entries) }, broken: { ...state.broken, datasets: null } });
}

// The configs of the project, including unreadable ones.
export async function allConfigs() {
  const { ok, data } = await api("/api/configs/");
  return ok ? data : [];
}

// Reads the settings and datasets of a config from its files.
export async function load(name) {
  const datasets = `/api/datasets/plan?config=${encodeURIComponent(name)}`;
  return { config: await api(`/api/configs/${name}`), datasets: await api(datasets) };
}

const isBroken = ({ data }) => typeof data.text === "string";
export const LATE = Symbol("another config was asked for meanwhile");
let asked = 0; // number of the config that was asked for last

// Loads the files of a config, or their text if they are not JSON; a new config is empty. Resolves to the reason of a
// failure, or to LATE.
export async function open(name, isNew = false) {
  const none = { ok: false, etag: null, data: {} };
  const mine = (asked += 1);
  const answers = isNew ? { config: none, datasets: none } : await load(name);
  if (mine !== asked) return LATE;
  if (!answers.config.ok && !isNew && !isBroken(answers.config)) return answers.config;
  take(name, answers);
  return null;
}

// What is open from now on.
function take(name, { config, datasets }) {
  Object.assign(state, { config: name, gone: "" });
  takeConfig(config.ok ? config : { data: { values: {} }, etag: config.etag });
  takeDatasets(datasets.ok ? datasets : { data: { entries: [] }, etag: datasets.etag });
  for (const [part, answer] of Object.entries({ config, datasets })) if (isBroken(answer)) state.broken[part] = answer.data;
}

// Checks the files of the open config, and reloads them unless there are unsaved changes. Resolves to "gone", "changed",
// "taken", or "" if they have not changed.
export async function reread() {
  const known = () => [state.config, state.etag, state.datasets.etag], before = known();
  if (!state.etag) return "";
  const answers = await load(state.config);
  const { config, datasets } = answers;
  if (!config.status || !datasets.status || !same(known(), before)) return ""; // the server is unreachable, or the config was just saved
  state.gone = (config.status === 404 && state.path) || (datasets.ok && !datasets.etag && state.datasets.etag && state.datasets.path) || "";
  if (state.gone) return "gone";
  if (!config.etag || same([state.config, config.etag, datasets.etag], before)) return "";
  if (isDirty() || page(".untaken")) return "changed";
  take(state.config, answers);
  return "taken";
}

// Why a new config cannot have a name; empty if it can.
export async function refuseName(name) {
  if (!/^[\p{L}\p{N}_][\p{L}\p{M}\p{N}_.-]*$/u.test(name)) return "Give it a name of letters, digits and . _ -";
  return (await allConfigs()).some((each) => each.name === name) ? `There is a config ${name} already.` : "";
}
