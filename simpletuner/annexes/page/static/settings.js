// The place "Settings": its parts, the search, the open config, and the check after every change.
import { allConfigs, api, ask, bindField, changes, complete, defaultOf, element, fields, inForm, isDirty, open, page, problemLine, refuseName, remember, reread, save, sentences, showField, state, tell } from "./form.js";
import { isOfDataset, refreshDatasets, showDatasets, startDatasets, tellDatasets, tellLedger } from "./datasets.js";
import { showPlan } from "./plan.js";

export { isDirty };

const all = (selector) => [...document.querySelectorAll(selector)];
const tabs = all("[role=tab]");
const drawn = () => [...fields].filter(([, field]) => field.isConnected);
const tabOf = (field) => field.closest("section").id.split("/")[0];
const FORM = tabs.map((tab) => tab.id.slice(4)); // names of the panes
const defaults = Object.fromEntries([...fields].map(([key, field]) => [key, defaultOf(field)]));
let judged = { problems: [], effective: {}, greyed: {} };
let planned = []; // problems that only the plan finds
let number = 0; // of the latest check
let told = ""; // the answer to the last save
let refusal = "";
const timers = {};

function later(name, delay, action) {
  clearTimeout(timers[name]);
  timers[name] = setTimeout(action, delay);
}

// ---- Parts. The URL names one, or one of its sections. ----

async function openFiles() {
  if (location.hash.startsWith("#dataset/files/") || page("#library").open) (await import("./library.js")).show();
}

export function showPart() {
  const [name] = location.hash.slice(1).split("/");
  const tab = tabs.find((each) => each.id === `tab-${name}`) ?? page("#tab-basic");
  page("#search").value = "";
  for (const each of tabs) {
    each.setAttribute("aria-selected", String(each === tab));
    each.tabIndex = each === tab ? 0 : -1;
  }
  drawAll([tab.id.slice(4)]);
  filter("");
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target?.matches("section, .field")) target.scrollIntoView();
  else scrollTo(0, 0);
  tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  openFiles();
}

// A pane is drawn when it is first shown, searched, or has a problem: the whole form takes long.
function draw(name) {
  const pane = page(`#pane-${name}`);
  const shell = pane.querySelector(":scope > template");
  if (!shell) return false;
  shell.replaceWith(shell.content);
  for (const [key, field] of drawn().filter(([, field]) => pane.contains(field))) {
    complete(field, "f");
    bindField(field, (value) => set(key, value));
    showField(field, state.values[key], state.effective[key]);
  }
  if (name === "dataset") showDatasets();
  return true;
}

function drawAll(names) {
  if (names.filter(draw).length) showProblems();
}

function set(key, value) {
  if (value === undefined) delete state.values[key];
  else state.values[key] = value;
  showField(fields.get(key), state.values[key], state.effective[key]);
  edited();
}

page("[role=tablist]").addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
  if (!step) return;
  const place = tabs.indexOf(document.activeElement) + step;
  const next = tabs[Number.isFinite(place) ? (place + tabs.length) % tabs.length : place < 0 ? 0 : tabs.length - 1];
  event.preventDefault();
  next.click();
  next.focus();
});

// Searches all tabs at once, by prefixes of words: "oom" does not match "room".
const plain = (text) => ` ${text.toLowerCase().replace(/[^\p{L}\p{N}.]+/gu, " ")} `;

function filter(query) {
  const wanted = plain(query), words = wanted.split(" ").filter(Boolean), searching = words.length > 0;
  document.body.classList.toggle("searching", searching);
  const isMeant = (field) => {
    const { key, words: meant = "" } = field.dataset, group = field.closest(".group")?.dataset.group ?? "";
    const text = plain(`${key} ${meant} ${field.textContent} ${group}`);
    return plain(meant).includes(wanted) || words.every((word) => text.includes(` ${word}`));
  };
  if (searching) drawAll([...FORM]);
  let found = 0;
  for (const field of all("main .field")) {
    const isFound = !searching || isMeant(field);
    field.classList.toggle("unfound", !isFound);
    found += isFound;
  }
  for (const part of all(".group, .pane .card, .dataset-card, .grid + .more")) {
    part.classList.toggle("unfound", searching && !part.querySelector(".field:not(.unfound, [hidden])"));
    if (part.tagName === "DETAILS") part.open = searching || Boolean(part.querySelector(".set-here, .told .bad"));
  }
  for (const name of FORM) {
    const isChosen = page(`#tab-${name}`).getAttribute("aria-selected") === "true";
    page(`#pane-${name}`).hidden = !searching && !isChosen;
  }
  page("#no-match").hidden = !searching || found > 0;
}

// The open config.
export async function openConfig(name, from = name, configs = null) {
  const refused = await open(from || name, !from);
  if (refused) {
    showSaved(`${from} cannot be opened: ${sentences(refused).join("; ")}`);
    return false;
  }
  state.config = name;
  told = "";
  if (from !== name) {
    // A new config or copy that is not saved yet; it has its own dataset file and output folder.
    state.values.data_backend_config = `config/${name === "config" ? "" : `${name}/`}multidatabackend.json`;
    state.values.output_dir = `output/${from === `examples/${name}` ? "my-" : ""}${name}`;
    Object.assign(state, { file: {}, etag: null });
    Object.assign(state.datasets, { file: [], etag: null });
  }
  await refill(configs);
  return true;
}

// `configs`: the project's configs, if they have just been read.
async function refill(configs = null) {
  remember("config", state.config);
  inForm("#look").href = `/dataset?config=${encodeURIComponent(state.config)}`;
  document.dispatchEvent(new CustomEvent("config", { detail: state.config }));
  listConfigs(configs);
  showDatasets([]);
  page("#pane-settings").ariaBusy = null;
  await check();
  filter("");
}

// Of a broken file no datasets were read, which is no problem of its own.
const isUnread = () => state.datasets.entries.length === 0 && Boolean(state.broken.config || state.broken.datasets);
const settings = () => ({ config: state.config, values: state.values, datasets: isUnread() ? null : state.datasets.entries });

async function check() {
  const mine = (number += 1);
  const { ok, status, data } = await api("/api/training/validate", { method: "POST", body: settings() });
  if (mine !== number) return;
  if (!status) return; // the server is unreachable; the check is repeated when it is back
  judged = ok ? data : { ...judged, problems: data.problems };
  state.effective = { ...defaults, ...judged.effective };
  offerFlavours(judged.flavours ?? {});
  showAll();
  later("plan", 600, plan);
}

async function plan(more) {
  const mine = number, found = await showPlan(settings(), more);
  if (!found || mine !== number) return;
  planned = found.problems;
  showProblems();
  tellLedger(found.datasets);
}
document.addEventListener("fetch-files", () => plan({ fetch: true }));

// The button of a problem: sets fields, which count as unsaved input.
document.addEventListener("apply", ({ detail }) => {
  for (const [key, value] of Object.entries(detail)) {
    if (value === null) delete state.values[key];
    else state.values[key] = value;
  }
  showAll();
  edited();
});

function offerFlavours(flavours) {
  const list = fields.get("model_flavour").querySelector("select");
  list.replaceChildren(list.options[0], ...Object.entries(flavours).map(([name, about]) => element("option", { value: name, textContent: `${name}: ${about}` })));
}

function showAll() {
  refreshDatasets();
  for (const [key, field] of drawn()) showField(field, state.values[key], state.effective[key]);
  showProblems();
  showSaved();
  showRaw();
}

async function showRaw() {
  if (page("#raw").open || state.broken.config || state.broken.datasets) (await import("./raw.js")).show();
}

function showProblems() {
  const seen = new Set(), problems = [...judged.problems, ...planned].filter(({ key, message }) => {
    const name = `${key}: ${message}`;
    const isRepeated = planned.some((each) => each.key === key && each.message !== message && each.message.startsWith(message));
    return !isRepeated && !seen.has(name) && seen.add(name); // the plan adds what would fit
  });
  const keyOf = (problem) => problem.key.split(/[.[]/)[0];
  const isBlank = !state.etag && !isDirty(); // an empty new config shows no problems yet
  for (const problem of isBlank ? [] : problems.filter(({ fatal }) => fatal)) {
    const field = fields.get(keyOf(problem)); // drawn, so that its tab counts it
    if (field || isOfDataset(problem)) draw(field ? tabOf(field) : "dataset");
  }
  for (const [key, field] of drawn()) tell(field, problems.filter((problem) => keyOf(problem) === key), judged.greyed[key]);
  all("main .group").forEach(shareReason);
  // The plan's panel shows problems of the device.
  const elsewhere = problems.filter((problem) => !fields.has(keyOf(problem)) && problem.key !== "device"), rest = elsewhere.filter((problem) => !isOfDataset(problem));
  tellDatasets(elsewhere);
  const unreadable = Object.values(state.broken).flatMap((file) => file?.problems ?? []); // their texts are below all fields
  page("#problems").replaceChildren(...[...unreadable, ...rest].map((problem) => element("li", { className: problem.fatal ? "bad" : "warning" }, problemLine(problem))));
  for (const tab of tabs) {
    const count = isBlank ? 0 : all(`#pane-${tab.id.slice(4)} .told .bad`).length, badge = tab.querySelector(".count");
    badge.hidden = !count;
    badge.textContent = count;
    badge.setAttribute("aria-label", `${count} problems`);
  }
}

// A reason shared by most greyed fields of a group is shown once.
function shareReason(group) {
  const greyed = Object.groupBy(group.querySelectorAll(".field.greyed"), (field) => judged.greyed[field.dataset.key]);
  const [reason, alike] = Object.entries(greyed).sort(([, a], [, b]) => b.length - a.length)[0] ?? ["", []];
  const plural = { has: "have", needs: "need" }, shared = group.querySelector(".shared");
  shared.hidden = alike.length < 3;
  shared.textContent = reason.replace(/^(has|needs)\b/, (verb) => `${alike.length} options ${plural[verb]}`);
  for (const field of alike) field.querySelector(".reason")?.classList.toggle("sr", !shared.hidden);
}

// The result of saving is shown until the next edit.
function showSaved(text = told) {
  told = text;
  const changed = changes(), count = Object.keys(changed).length, dirty = isDirty();
  for (const [key, field] of fields) field.classList.toggle("changed", key in changed);
  page("#save").disabled = !dirty;
  page("#saved").textContent = text || (state.gone ? `${state.gone} was deleted or moved; Save restores it.` : dirty ? (count ? `${count} unsaved` : "Datasets unsaved") : "");
}

function edited() {
  planned = [];
  showSaved("");
  later("check", 200, check);
}

// Resolves to whether it was saved.
async function saveNow() {
  try {
    const saved = await save();
    await refill();
    if (saved) showSaved("Saved");
    return saved;
  } catch (error) {
    refusal = `Not saved: ${error.message}`;
    showSaved(refusal);
    return false;
  }
}

async function listConfigs(configs = null) {
  const found = [...(configs ?? (await allConfigs()))];
  if (!found.some(({ name }) => name === state.config)) found.push({ name: state.config });
  page("#config").replaceChildren(...found.map(({ name, problem }) => element("option", {
    value: name, textContent: (name === "config" ? "config/config.json" : name) + (problem ? " (broken)" : ""), title: problem ?? "", selected: name === state.config,
  })));
}

startDatasets(edited);
document.addEventListener("edited", () => showDatasets());
document.addEventListener("edited", edited);
page("#raw").addEventListener("toggle", showRaw);
page("#search").addEventListener("input", ({ target }) => { filter(target.value); scrollTo(0, 0); });
page("#save").addEventListener("click", saveNow);
page("#start-config").addEventListener("click", async () => {
  if (isDirty() && !(await saveNow())) return;
  const { begin } = await import("./begin.js");
  showSaved(await begin(state.config));
});

// Asks what to do with unsaved changes; resolves to whether to continue.
export async function maySwitch() {
  const choice = isDirty() ? await ask(page("#leave")) : "discard";
  return choice === "save" ? saveNow() : choice === "discard";
}

document.addEventListener("back", () => { listConfigs(); check(); });

const NEWS = { taken: "The file has changed on disk and was reloaded.", changed: "The file has also changed on disk; Save compares both versions." };

// Files may change while the page is open: it reloads them and updates the plan when it is visible again.
async function lookAgain({ type }) {
  if (document.body.dataset.place !== "settings" || document.hidden || page("dialog[open]")) return;
  const wasGone = state.gone, news = await reread();
  if (news === "taken") await refill();
  if (news in NEWS && (!told || told !== refusal)) showSaved(NEWS[news]);
  else if (state.gone !== wasGone || (!news && told === NEWS.changed)) showSaved("");
  if (!news && type !== "beat") check();
}
document.addEventListener("beat", lookAgain);
document.addEventListener("visibilitychange", lookAgain);
for (const type of ["focus", "hashchange"]) addEventListener(type, lookAgain);
page("#config").addEventListener("change", async ({ target }) => {
  if (await maySwitch()) await openConfig(target.value);
  target.value = state.config;
});
page("#add-config").addEventListener("click", () => newConfig());

// Asks for the name of a new config, and for the config to copy.
export async function newConfig(copied = "") {
  if (!(await maySwitch())) return;
  const { data } = await api("/api/configs/examples"), from = page("#new-from"), name = page("#new-name");
  from.replaceChildren(from.options[0], ...data.map((each) => element("option", { textContent: each.name, selected: each.name === copied })));
  name.value = copied.replace("examples/", "");
  for (let refused = ""; ; ) {
    page("#new .bad").textContent = refused;
    if ((await ask(page("#new"))) !== "create") return;
    refused = await refuseName(name.value.trim());
    if (!refused) break;
  }
  await openConfig(name.value.trim(), from.value);
  if (copied) location.hash = "basic";
}
document.addEventListener("config", openFiles);
addEventListener("beforeunload", (event) => isDirty() && event.preventDefault());
addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key === "s") {
    event.preventDefault();
    if (isDirty()) saveNow();
  }
  const isTyping = event.target.matches("input, textarea, select");
  if (event.key === "/" && !isTyping && document.body.dataset.place === "settings") {
    event.preventDefault();
    page("#search").focus();
  }
});
page("#plan details").open = innerWidth > 1080;
showPart();
export const opening = openFirst(new URLSearchParams(location.search).get("config"));

// Opens the config in the URL, or else the first readable one.
async function openFirst(asked) {
  const configs = await allConfigs(), found = configs.toSorted((a, b) => Boolean(a.problem) - Boolean(b.problem)).map(({ name }) => name);
  const isThere = found.includes(asked) || asked?.startsWith("examples/"), isGone = asked && asked !== "config" && !isThere;
  let refused = isGone ? `There is no config ${asked}.` : "", isOpen = false;
  for (const name of isThere ? [asked, ...found] : found) {
    isOpen = await openConfig(name, name, configs);
    if (isOpen) break;
    refused ||= told;
  }
  if (!isOpen) {
    await open("config", true);
    await refill(configs);
  }
  if (refused) showSaved(refused);
}
