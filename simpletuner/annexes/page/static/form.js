// The settings of the open config: what the file says, what the page has, and what is wrong with it.
// A field shows a value of `state.values`, or, greyed as its placeholder, what training uses without it.

// `gone` names a file of the open config that was deleted or moved.
export const state = { broken: {}, config: "config", opened: "", switched: false, path: "", gone: "", etag: null, file: {}, values: {}, effective: {}, datasets: { etag: null, path: "", file: [], entries: [] } };
export const page = (selector) => document.querySelector(selector);
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const clone = (value) => JSON.parse(JSON.stringify(value));
export const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
export const asJson = (value) => JSON.stringify(value, null, 2);

export async function api(path, { method = "GET", body, etag, signal } = {}) {
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(etag && { "If-Match": etag }) };
  let response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    watch();
    return { ok: false, status: 0, etag: null, data: { problems: [{ key: "", message: "The server does not answer.", fatal: true }] } };
  }
  const data = await response.json().catch(() => ({ problems: [{ key: "", message: response.statusText, fatal: true }] }));
  return { ok: response.ok, status: response.status, etag: response.headers.get("ETag"), data };
}

// Asks now and then whether the server is there, and says so while it is not; the event "back" tells that it is again,
// "beat" that it still is.
export async function watch() {
  clearTimeout(timer);
  const notice = page("#away"), wasAway = !notice.hidden;
  const { ok, status, statusText } = await fetch("/health", { signal: AbortSignal.timeout(10000) }).catch(() => ({}));
  notice.hidden = Boolean(ok);
  if (!ok && !wasAway) notice.textContent = `The server ${status ? `answers "${status} ${statusText}"` : "does not answer"}. What you typed stays here; the page goes on when the server is back.`;
  if (ok) document.dispatchEvent(new Event(wasAway ? "back" : "beat"));
  clearTimeout(timer);
  timer = setTimeout(watch, ok ? 5000 : 1500);
}
let timer = setTimeout(watch, 5000);

// What is wrong with a request that was refused.
export const sentences = ({ ok, data }) => (ok ? [] : data.problems.map(({ key, message }) => (key ? `${key}: ${message}` : message)));

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Keeps what is open in the address, so that a reload shows it again.
export function remember(key, value) {
  const url = new URL(location);
  url.searchParams.set(key, value);
  history.replaceState(history.state, "", url);
}

// One field: what all have, its control, its value as JSON, and back.
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
const isSecret = (value) => same(value, { secret: "set" });
const written = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

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
  // What is being typed stays as it is typed, unless the value came from elsewhere.
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
    return text; // the check says what is wrong with it
  }
}

// Calls `set(value)` on every change; undefined removes the key.
export function bindField(field, set) {
  control(field).addEventListener("input", () => set(readField(field)));
  const clear = () => { set(undefined); control(field).focus(); };
  for (const button of field.querySelectorAll(".reset, .replace")) button.addEventListener("click", clear);
}

// A value as JSON. What is being typed, or is no JSON yet, stays as it is typed unless the value comes from elsewhere.
const texts = new WeakMap();
export function showJson(area, text) {
  const isTyped = area === document.activeElement || area.classList.contains("untaken");
  if (!isTyped || texts.get(area) !== text) {
    area.value = text;
    area.classList.remove("untaken");
  }
  texts.set(area, text);
}

// Calls `take(value)` on every change that is a value of a kind, and says what is wrong with others.
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

// A message as a sentence: most continue the name of their key, for which the label stands here, as for other keys. What
// `train` and `plan` say of a page of the documentation leads there.
const KEY = /(?<![\w./'"`{=-])[a-z0-9]+(?:_[a-z0-9]+)+(?![\w/'"`}=-]|\.\w)/g;
const PREDICATE = /^(and|are|aligns|can|cannot|does|has|have|is|makes|may|must|needs?|takes|was|would)\b/;
const labelOf = (field) => field?.querySelector("label").textContent;
const labelled = (key) => labelOf(page(`main .field[data-key="${CSS.escape(key)}"]`)) ?? key;
const linked = (text) => text.split(/(docs\/[\w/]+\.md)/).map((part, index) => (index % 2 ? element("a", { href: `/${part}`, target: "_blank", textContent: part }) : part));

function sentence(field, message) {
  // The help, which such a message repeats, stands beside the field.
  const named = message.replace(/^(is required\.).*/s, "$1").replace(KEY, labelled);
  return PREDICATE.test(message) ? `${labelOf(field)} ${named}` : named;
}

// A problem, and a button that sets what solves it, unless the page has these settings already.
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
  const isMissing = problems.some(({ message }) => message.startsWith("is required."));
  // Nothing was chosen, so no default is shown; other defaults are not the user's mistake.
  if (isMissing && control(field).tagName === "SELECT") control(field).options[0].textContent = "choose one";
  const isWrong = isMissing || field.classList.contains("set-here");
  field.classList.toggle("wrong", isWrong && problems.some((problem) => problem.fatal));
  field.classList.toggle("warned", problems.some((problem) => !problem.fatal));
  field.classList.toggle("greyed", Boolean(reason));
  control(field).disabled = Boolean(reason);
  control(field).setAttribute("aria-invalid", String(field.classList.contains("wrong")));
  const lines = problems.map((problem) => problemLine(problem, sentence(field, problem.message)));
  if (reason && !problems.some(({ message }) => message === reason)) lines.push(element("p", { className: "reason", textContent: reason }));
  field.querySelector(".told").replaceChildren(...lines);
}

// What differs from the file, as the server takes it: null removes a key.
export function changes(values = state.values, file = state.file) {
  const keys = new Set([...Object.keys(file), ...Object.keys(values)]);
  return Object.fromEntries([...keys].filter((key) => !same(file[key], values[key])).map((key) => [key, values[key] ?? null]));
}
const changed = (values, own) => Object.fromEntries(Object.entries({ ...values, ...own }).filter(([, value]) => value !== null));
const datasetsChanged = () => !same(state.datasets.file, state.datasets.entries);
export const isDirty = () => state.gone !== "" || Object.keys(changes()).length > 0 || datasetsChanged();

// Saving. A file that changed meanwhile is compared first, and nothing is lost.
export async function save() {
  if (state.gone) return restore(state.gone);
  const values = changes(), entries = state.datasets.entries, name = encodeURIComponent(state.config), { broken } = state;
  const whole = (part) => (broken[part] ? { whole: true } : {}); // of a file that cannot be read, nothing is kept
  const first = !Object.keys(values).length || (await put(`/api/configs/${state.config}`, { values, ...whole("config") }, state.etag, takeConfig));
  return first && (!datasetsChanged() || put(`/api/datasets/plan?config=${name}`, { entries, ...whole("datasets") }, state.datasets.etag, takeDatasets));
}

async function put(path, body, etag, take) {
  const answer = await api(path, { method: "PUT", body, etag });
  if (answer.ok) take(answer);
  else if (answer.status === 412) return answer.etag ? settle(answer, take) : restore(answer.data.path);
  else throw new Error(sentences(answer).join("\n"));
  return true;
}

function takeConfig({ data, etag }) {
  Object.assign(state, { etag, path: data.path, file: clone(data.values), values: clone(data.values), broken: { ...state.broken, config: null } });
}
function takeDatasets({ data, etag }) {
  Object.assign(state, { datasets: { etag, path: data.path, file: clone(data.entries), entries: clone(data.entries) }, broken: { ...state.broken, datasets: null } });
}

// The configs of the project, also those that cannot be opened.
export async function allConfigs() {
  const { ok, data } = await api("/api/configs/");
  return ok ? data : [];
}

// The settings and datasets of a config as they are in its files.
async function load(name) {
  const datasets = `/api/datasets/plan?config=${encodeURIComponent(name)}`;
  return { config: await api(`/api/configs/${name}`), datasets: await api(datasets) };
}

// Takes what the files of a config say, and the text of those that are no JSON; nothing of a new one. Resolves to why not.
export async function open(name, isNew = false) {
  const none = { ok: false, etag: null, data: {} }, isBroken = ({ data }) => typeof data.text === "string";
  const { config, datasets } = isNew ? { config: none, datasets: none } : await load(name);
  if (!config.ok && !isNew && !isBroken(config)) return config;
  Object.assign(state, { config: name, gone: "" });
  takeConfig(config.ok ? config : { data: { values: {} }, etag: config.etag });
  takeDatasets(datasets.ok ? datasets : { data: { entries: [] }, etag: datasets.etag });
  for (const [part, answer] of Object.entries({ config, datasets })) if (isBroken(answer)) state.broken[part] = answer.data;
  return null;
}

// Looks at the files of the open config again, and takes them unless something is unsaved. Resolves to what has become of
// them: "gone", "changed", "taken", or "" for nothing.
export async function reread() {
  const known = () => [state.config, state.etag, state.datasets.etag], before = known();
  if (!state.etag) return "";
  const { config, datasets } = await load(state.config);
  if (!config.status || !datasets.status || !same(known(), before)) return ""; // the server is away, or it was just saved
  state.gone = (config.status === 404 && state.path) || (datasets.ok && !datasets.etag && state.datasets.etag && state.datasets.path) || "";
  if (state.gone) return "gone";
  if (!config.etag || same([state.config, config.etag, datasets.etag], before)) return "";
  if (isDirty() || page(".untaken")) return "changed";
  await open(state.config);
  return "taken";
}

// Why a new config cannot have this name; empty if it can.
export async function refuseName(name) {
  if (!/^[\p{L}\p{N}_][\p{L}\p{M}\p{N}_.-]*$/u.test(name)) return "Give it a name of letters, digits and . _ -";
  return (await allConfigs()).some((each) => each.name === name) ? `There is a config ${name} already.` : "";
}

// What the page had of a file that is gone. Secrets were never sent to it.
const withoutSecrets = (value) => JSON.parse(JSON.stringify(value, (key, inner) => (isSecret(inner) ? undefined : Array.isArray(inner) ? inner.filter((each) => !isSecret(each)) : inner)));
const secretsIn = (value) => Object.entries(value ?? {}).flatMap(([key, inner]) => (isSecret(inner) ? [key] : typeof inner === "object" ? secretsIn(inner) : []));

// Asks what becomes of a config or dataset file that was deleted or moved; resolves to whether something was saved.
async function restore(path) {
  const dialog = page("#gone"), mine = withoutSecrets(changes()), entries = withoutSecrets(state.datasets.entries);
  const secrets = [...new Set(secretsIn([state.values, state.datasets.entries]))].join(", ");
  dialog.querySelector(".what").textContent = `${path} was deleted or moved since it was opened. Nothing was saved, and this page still has everything that it held.${secrets && ` Secrets were never sent here, so enter them again: ${secrets}.`}`;
  for (let refused = ""; ; ) {
    dialog.querySelector(".bad").textContent = refused;
    const choice = await ask(dialog), name = choice === "new" ? page("#gone-name").value.trim() : state.config;
    if (choice === "drop" && (await open(state.config))) await open(state.config, true);
    if (!["restore", "new"].includes(choice)) return false;
    if (choice === "restore") return saveAgain((await load(name)).config.ok ? null : withoutSecrets(state.values), entries);
    refused = await refuseName(name);
    if (refused) continue;
    const touched = datasetsChanged() ? entries : [];
    state.config = name;
    return saveAgain(mine, touched);
  }
}

// Writes files that do not exist: the config, unless it does, and its datasets.
async function saveAgain(values, entries) {
  state.gone = "";
  if (values) {
    Object.assign(state, { etag: null, file: {}, values });
    if (!(await put(`/api/configs/${state.config}`, { values }, null, takeConfig))) return false;
  }
  const { datasets } = await load(state.config);
  if (!datasets.etag) Object.assign(state.datasets, { etag: null, file: [], entries });
  return save();
}

// The entries of a dataset file by their ids, which may be missing or repeated while somebody types.
function byName(entries) {
  const named = {};
  for (const [index, entry] of entries.entries()) named[!entry.id || entry.id in named ? `${entry.id ?? ""}[${index}]` : entry.id] = entry;
  return named;
}

// What the file has now, with what was changed here: entries that were removed here are left out, and those that were
// removed in the file come back if they were changed here.
function merged(theirs, mine, file) {
  const isKept = (name) => (name in mine ? name in theirs || !same(mine[name], file[name]) : !(name in file));
  const entry = (name) => (name in theirs && name in mine ? changed(theirs[name], changes(mine[name], file[name] ?? {})) : (theirs[name] ?? mine[name]));
  return Object.keys({ ...theirs, ...mine }).filter(isKept).map(entry);
}

// Asks which of two versions to keep; resolves to whether one was saved or taken.
async function settle(answer, take) {
  const { data } = answer, dialog = page("#conflict"), isDatasets = Boolean(data.entries);
  const [theirs, mine, file] = isDatasets ? [data.entries, state.datasets.entries, state.datasets.file].map(byName) : [data.values, state.values, state.file].map((values) => ({ "": values }));
  const cell = (value) => element("td", { className: "key", textContent: value === undefined ? "not set" : written(value) });
  const rows = Object.keys({ ...theirs, ...mine }).flatMap((name) => {
    const own = changes(mine[name] ?? {}, file[name] ?? {}), differing = Object.keys(changes(mine[name] ?? {}, theirs[name] ?? {}));
    return differing.map((key) => [name ? `${name}: ${key}` : key, theirs[name]?.[key], key in own ? mine[name]?.[key] : "not changed by you"]);
  });
  dialog.querySelector(".what").textContent = `${data.path} has changed since it was opened. Nothing was saved, and nothing is lost: this is what differs.`;
  dialog.querySelector("tbody").replaceChildren(...rows.map((cells) => element("tr", {}, ...cells.map(cell))));
  const kept = merged(theirs, mine, file), choice = await ask(dialog);
  if (!choice || choice === "keep") return false;
  take(answer);
  if (choice === "theirs") return true;
  if (isDatasets) state.datasets.entries = kept;
  else state.values = kept[0];
  return save();
}

// Shows a dialog; resolves to the value of the button, or "" on Escape.
export function ask(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.onclick = ({ target }) => target.matches(".tools-row button") && dialog.close(target.value);
    dialog.onclose = () => resolve(dialog.returnValue);
    dialog.showModal();
  });
}
